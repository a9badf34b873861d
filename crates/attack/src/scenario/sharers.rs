//! A02, A03, A05, A17, A23, A35 in modes whose buffers share mappings: one user of a page releases
//! its buffer, and another still holds the page.
//!
//! Both buffers lie in one page and have one direction, so both have the same mapping. The device
//! keeps its access to the bytes of the released buffer until the last user unmaps.

use ringfence_lab::LabError;
use ringfence_lab::modes::{Mode, Safety};
use ringfence_types::{Direction, Nanos, PhysRange};

use super::window::{PHASE, SCHEDULE};
use crate::bench::{Bench, MapId, access_of, memory};
use crate::evidence::{Evidence, Executed};

/// Name of the trial while another user holds the page.
pub(crate) const HELD: &str = "another user holds the page";
/// Name of the trial after the unmap of the last user.
pub(crate) const RELEASED: &str = "after the last user's unmap";

/// The step between the unmap of a user and the accesses of the device.
pub(crate) type Step = fn(&mut Bench, PhysRange) -> Result<(), LabError>;

/// Returns true if both buffers lie in one page of I/O virtual addresses.
pub(crate) fn share(bench: &Bench, one: MapId, other: MapId) -> Result<bool, LabError> {
    let (one, other) = (bench.range(one)?.start(), bench.range(other)?.start());
    Ok(one.align_down(4096) == other.align_down(4096))
}

/// Adds the trials with two users of each page, in modes whose buffers share mappings. `pages`
/// pages are unmapped in one batch.
pub(crate) fn trials(
    executed: &mut Executed,
    mode: &Mode,
    pages: u64,
    step: Step,
) -> Result<(), LabError> {
    if !mode.flush.has_cache() {
        return Ok(());
    }
    let (mut held, mut released) = (Evidence::default(), Evidence::default());
    for direction in [Direction::ToDevice, Direction::FromDevice] {
        two_users(mode, direction, pages, step, &mut held, &mut released)?;
    }
    if mode.safety() >= Safety::Strict {
        executed.beyond_bound += released.successes;
    }
    executed.trial(HELD, held);
    executed.trial(RELEASED, released);
    Ok(())
}

fn two_users(
    mode: &Mode,
    direction: Direction,
    pages: u64,
    step: Step,
    held: &mut Evidence,
    released: &mut Evidence,
) -> Result<(), LabError> {
    let mut bench = Bench::new(mode)?;
    bench.advance_to(Nanos(PHASE));
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for page in 0..pages {
        let at = 0x10_0000 + page * 4096;
        for (users, start) in [(&mut first, at), (&mut second, at + 0x800)] {
            let buffer = memory(start, 64)?;
            let id = bench.map(0, buffer, direction)?;
            bench.use_buffer(id)?;
            users.push((id, buffer));
        }
    }
    unmap(&mut bench, &first, step)?;
    let mut under_hold = Evidence::default();
    attack(&mut bench, &mut under_hold, direction, &first, &second)?;
    // The other user sets the length of this window, not the mode.
    under_hold.last_success_ns = None;
    bench.take_false_faults(held);
    held.add(&under_hold);
    unmap(&mut bench, &second, step)?;
    attack(&mut bench, released, direction, &second, &first)?;
    bench.take_false_faults(released);
    Ok(())
}

/// Unmaps the buffers in one call.
fn unmap(bench: &mut Bench, users: &[(MapId, PhysRange)], step: Step) -> Result<(), LabError> {
    let ids: Vec<_> = users.iter().map(|(id, _)| *id).collect();
    bench.unmap_multi(&ids)?;
    users
        .iter()
        .try_for_each(|(_, buffer)| step(bench, *buffer))
}

/// Accesses the buffers of `targets` on the schedule. Counts only those that share the mapping of
/// their page's buffer in `others`: without a second user, an access is no attempt.
fn attack(
    bench: &mut Bench,
    evidence: &mut Evidence,
    direction: Direction,
    targets: &[(MapId, PhysRange)],
    others: &[(MapId, PhysRange)],
) -> Result<(), LabError> {
    let start = bench.now().0;
    for after in SCHEDULE {
        bench.advance_to(Nanos(start + after));
        for ((id, _), (other, _)) in targets.iter().zip(others) {
            if !share(bench, *id, *other)? {
                continue;
            }
            let range = bench.range(*id)?;
            for iova in [range.start(), range.last()] {
                bench.attack(evidence, 0, iova, 1, access_of(direction))?;
            }
        }
    }
    Ok(())
}
