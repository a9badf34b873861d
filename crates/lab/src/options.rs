//! The options of a comparison.

use crate::Profile;
use crate::layer::INSPECTED_BYTES;
use crate::limits::ReplayLimits;
use crate::machine::Prices;
use crate::mapping_cache::CycleParams;
use crate::meter::TIMED_REPLAYS;
use crate::modes::Mode;
use crate::replay::AttackerKind;
use crate::ring::RingSizes;

/// The modes to run and their options.
#[derive(Debug, Clone)]
pub struct CompareOptions {
    /// The modes, in the order of the rows.
    pub modes: Vec<Mode>,
    /// Costs and geometry.
    pub profile: Profile,
    /// Prices of the rows; `None` takes those of `profile`.
    pub prices: Option<Prices>,
    /// Names of the devices to replay; `None` for all.
    pub devices: Option<Vec<String>>,
    /// Number of timed repetitions; 0 disables the meter.
    pub repetitions: usize,
    /// True to run the attack pass.
    pub attack: bool,
    /// The attackers of the attack pass.
    pub attackers: AttackerKind,
    /// True if the device of the metered pass accesses the pages of a buffer at its map as well as
    /// before its unmap.
    pub early_touches: bool,
    /// Slots of the rings in ring modes.
    pub rings: RingSizes,
    /// T and C of modes with a reverse translation cache.
    pub cache_cycles: CycleParams,
    /// Bytes of a received buffer that the driver copies before it uses them, in modes whose
    /// drivers take their buffers from a pool (assumed).
    pub inspected_bytes: u32,
    /// True if the plan moves large buffers to contiguous frames.
    pub contiguous_frames: bool,
    /// Bounds on the replay.
    pub limits: ReplayLimits,
}

impl CompareOptions {
    /// Returns options for all named modes with the profile of the papers' machine.
    pub fn new() -> Self {
        Self {
            modes: Mode::named(),
            profile: Profile::r210_2015(),
            prices: None,
            devices: None,
            repetitions: 3,
            attack: true,
            attackers: AttackerKind::All,
            early_touches: false,
            rings: RingSizes::default(),
            cache_cycles: CycleParams::PAPER,
            inspected_bytes: INSPECTED_BYTES,
            contiguous_frames: false,
            limits: ReplayLimits::default(),
        }
    }

    /// Returns the number of pages that may be mapped at once so that the tables of all timed
    /// replays stay below 4 GiB. The tables exist at the same time, and one trace line can map 64
    /// GiB.
    pub(crate) fn timed_pages(&self) -> u64 {
        const TABLES: u64 = 4 << 30;
        let replays =
            (self.modes.len() as u64).saturating_mul(TIMED_REPLAYS * self.repetitions as u64 + 1);
        TABLES / 8 / replays.max(1)
    }
}

impl Default for CompareOptions {
    fn default() -> Self {
        Self::new()
    }
}
