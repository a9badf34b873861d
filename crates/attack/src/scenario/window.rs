//! A02, A03, A05: accesses after the driver has the buffer back, by three attackers.
//!
//! The clock is virtual. The attacker repeats its accesses on a schedule, up to 50 seconds after
//! the release. The last success measures the length of the window in time. The busy driver instead
//! maps and unmaps other buffers at one moment, and measures the window in unmaps.

use ringfence_lab::LabError;
use ringfence_lab::modes::{Mode, Safety};
use ringfence_types::{Access, Direction, IovaRange, Nanos, PhysRange};

use super::ScenarioResult;
use super::sharers::{self, Step};
use crate::bench::{Bench, MapId, access_of, memory};
use crate::evidence::{Evidence, Executed, Found};

/// Behaviour of a malicious device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attacker {
    /// Uses each buffer while it is mapped, as the driver intends.
    Passive,
    /// Repeats addresses of unmapped buffers.
    Replayer,
    /// Also accesses the buffer just before the unmap, so that the IOTLB holds its entry.
    Racer,
}

impl Attacker {
    pub(crate) const ALL: [Self; 3] = [Self::Passive, Self::Replayer, Self::Racer];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Passive => "passive",
            Self::Replayer => "replayer",
            Self::Racer => "racer",
        }
    }
}

const US: u64 = 1_000;
const MS: u64 = 1_000 * US;
const S: u64 = 1_000 * MS;

/// Times of accesses after the release.
pub(crate) const SCHEDULE: [u64; 22] = [
    0,
    US,
    10 * US,
    100 * US,
    MS,
    2 * MS,
    5 * MS,
    9 * MS,
    10 * MS,
    11 * MS,
    20 * MS,
    100 * MS,
    S,
    5 * S,
    8 * S,
    10 * S,
    20 * S,
    29 * S,
    31 * S,
    39 * S,
    41 * S,
    50 * S,
];

/// Offset of the victim's map within a cycle of a reverse translation cache, so that the cycle
/// ends after_release two times of the schedule.
pub(crate) const PHASE: u64 = 500 * MS;

/// The step after_release the release and the first access of the attacker.
type AfterRelease = fn(&mut Bench, MapId, PhysRange) -> Result<(), LabError>;

/// A02: the entry is in the IOTLB at the unmap.
pub(crate) fn warm(mode: &Mode) -> ScenarioResult {
    let mut executed = schedule(mode, |_, _, _| Ok(()))?;
    executed.trial("busy driver", busy(mode)?);
    sharers::trials(&mut executed, mode, 1, |_, _| Ok(()))?;
    Ok(Found::Executed(executed))
}

/// A03: all caches are invalidated, so the access needs a walk.
pub(crate) fn cold(mode: &Mode) -> ScenarioResult {
    let invalidate: AfterRelease = |bench, _, _| bench.machine().invalidate_all();
    let mut executed = schedule(mode, invalidate)?;
    let invalidate: Step = |bench, _| bench.machine().invalidate_all();
    sharers::trials(&mut executed, mode, 1, invalidate)?;
    Ok(Found::Executed(executed))
}

/// A05: the page is freed and allocated again, to the kernel. For comparison, the new owner maps
/// it for another device, and that map may end the window.
pub(crate) fn recycled_page(mode: &Mode) -> ScenarioResult {
    fn free(bench: &mut Bench, buffer: PhysRange) -> Result<PhysRange, LabError> {
        let page = PhysRange::new(buffer.start().align_down(4096), 4096);
        let page = page.ok_or(LabError::Internal("a page"))?;
        bench.oracle.reallocate(&page);
        Ok(page)
    }
    let to_kernel: AfterRelease = |bench, _, buffer| free(bench, buffer).map(drop);
    let to_driver: AfterRelease = |bench, _, buffer| {
        let page = free(bench, buffer)?;
        bench.map(1, page, Direction::Bidirectional).map(drop)
    };
    let mut executed = schedule(mode, to_kernel)?;
    // The other user's bytes keep the page. The kernel gets the released bytes for other data.
    sharers::trials(&mut executed, mode, 1, |bench, buffer| {
        bench.store(buffer.start(), 0x6b65_726e_656c_2121)
    })?;
    executed.comparison("the new owner maps it", schedule(mode, to_driver)?.total());
    Ok(Found::Executed(executed))
}

/// Runs the schedule of each attacker, in both directions.
fn schedule(mode: &Mode, after_release: AfterRelease) -> Result<Executed, LabError> {
    let mut executed = Executed::default();
    for attacker in Attacker::ALL {
        let mut evidence = Evidence::default();
        for direction in [Direction::ToDevice, Direction::FromDevice] {
            one_buffer(mode, attacker, direction, after_release, &mut evidence)?;
        }
        executed.trial(attacker.name(), evidence);
    }
    Ok(executed)
}

/// Maps and releases one buffer under `attacker`, and adds the counts to `evidence`.
fn one_buffer(
    mode: &Mode,
    attacker: Attacker,
    direction: Direction,
    after_release: AfterRelease,
    evidence: &mut Evidence,
) -> Result<(), LabError> {
    let mut bench = Bench::new(mode)?;
    bench.advance_to(Nanos(PHASE));
    let buffer = memory(0x10_0010, 5000)?;
    let id = bench.map(0, buffer, direction)?;
    bench.use_buffer(id)?;
    let (range, access) = (bench.range(id)?, access_of(direction));
    if attacker == Attacker::Passive {
        access_ends(&mut bench, evidence, range, access)?;
        bench.release(id)?;
        bench.take_false_faults(evidence);
        return Ok(());
    }
    if attacker == Attacker::Racer {
        bench.use_buffer(id)?;
    }
    bench.unmap(id)?;
    if !bench.is_back(id)? {
        bench.end_burst(0, direction)?;
    }
    // A burst as published returns the buffer before its invalidation.
    after_release(&mut bench, id, buffer)?;
    access_ends(&mut bench, evidence, range, access)?;
    bench.end_burst(0, direction)?;
    let released = bench.now().0;
    for after in SCHEDULE {
        bench.advance_to(Nanos(released + after));
        access_ends(&mut bench, evidence, range, access)?;
    }
    bench.take_false_faults(evidence);
    Ok(())
}

/// Accesses the first and the last byte.
fn access_ends(
    bench: &mut Bench,
    evidence: &mut Evidence,
    range: IovaRange,
    access: Access,
) -> Result<(), LabError> {
    for iova in [range.start(), range.last()] {
        bench.attack(evidence, 0, iova, 1, access)?;
    }
    Ok(())
}

/// Unmaps of single pages before the busy driver turns to larger buffers.
const SINGLE_PAGES: u64 = 1 << 10;
/// Unmaps of 256 pages, together more than one wrap of a 32-bit space.
const LARGE_BUFFERS: u64 = (1 << 12) + 16;

/// Measures the window in unmaps: the driver maps and unmaps other buffers, and no time passes.
fn busy(mode: &Mode) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let direction = Direction::FromDevice;
    let id = bench.map(0, memory(0x10_0000, 4096)?, direction)?;
    let iova = bench.range(id)?.start();
    bench.use_buffer(id)?;
    bench.release(id)?;
    // A mode without a bound never ends the window.
    let large = if mode.safety() == Safety::Bounded {
        LARGE_BUFFERS
    } else {
        0
    };
    let (small, big) = (memory(0x20_0000, 4096)?, memory(0x40_0000, 256 * 4096)?);
    for unmaps in 0..SINGLE_PAGES + large {
        if !bench.attack(&mut evidence, 0, iova, 1, Access::Write)? {
            break;
        }
        evidence.last_success_unmaps = Some(unmaps);
        let other = if unmaps < SINGLE_PAGES { small } else { big };
        let other = bench.map(0, other, direction)?;
        if bench.range(other)?.start() == iova {
            // The allocator gave the address to another buffer.
            break;
        }
        bench.release(other)?;
    }
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}
