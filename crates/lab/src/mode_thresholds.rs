//! The sizes from which a mode maps buffers, and the unknown costs behind them.

use ringfence_dma::space::SharedPages;
use serde::Serialize;

use crate::hybrid::{shared_pages, thresholds};
use crate::machine::MachineProfile;
use crate::modes::Mode;

/// The sizes from which a mode maps buffers in a replay. It copies smaller ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ModeThresholds {
    /// Name of the mode.
    pub mode: String,
    /// Least size of a mapped buffer that the device may write, in bytes. `None` if the mode copies
    /// all of them.
    pub receive_bytes: Option<u64>,
    /// The same for buffers that the device only reads.
    pub transmit_bytes: Option<u64>,
    /// True if the sizes count the bytes on whole pages, because the mode copies the other ones.
    pub on_whole_pages: bool,
    /// Fields of the profile that the sizes depend on and that no source states. The replay assumes
    /// those of [`Profile::r210_2015`](crate::Profile::r210_2015).
    pub assumed: Vec<&'static str>,
}

impl ModeThresholds {
    /// Returns the sizes of `mode` on a machine; `None` if it does not choose by size.
    pub fn new(mode: &Mode, machine: &MachineProfile) -> Option<Self> {
        let found = thresholds(mode, &machine.for_replay())?;
        let split = shared_pages(mode) == SharedPages::Copied;
        // The costs of a split buffer contain no write-backs.
        let costs = [
            ("invalidation_cycles", machine.invalidation_cycles.is_some()),
            ("coherent", split || machine.coherent.is_some()),
        ];
        let unknown = costs.into_iter().filter(|(_, known)| !known);
        let finite = |bytes: u64| (bytes < u64::MAX).then_some(bytes);
        Some(Self {
            mode: mode.name.clone(),
            receive_bytes: finite(found.receive),
            transmit_bytes: finite(found.transmit),
            on_whole_pages: split,
            assumed: unknown.map(|(field, _)| field).collect(),
        })
    }
}
