//! A04: an address that belongs to a new buffer still reaches the old one.

use ringfence_lab::LabError;
use ringfence_lab::modes::Mode;
use ringfence_types::{Access, Direction};

use super::ScenarioResult;
use crate::bench::{Bench, memory};
use crate::evidence::{Evidence, Executed, Found};

/// Maps buffers one after the other. The device uses each twice, so that the second access finds
/// what the first one cached. An access succeeds as an attack if it reaches an old buffer, and a
/// stopped access is a false fault.
pub(crate) fn recycled_address(mode: &Mode) -> ScenarioResult {
    if !mode.translates() {
        return Ok(Found::NotApplicable(
            "addresses are physical: none is given to another buffer",
        ));
    }
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    for round in 0..400 {
        let id = bench.map(
            0,
            memory(0x10_0000 + round * 4096, 64)?,
            Direction::ToDevice,
        )?;
        let iova = bench.range(id)?.start();
        for _ in 0..2 {
            bench.attack(&mut evidence, 0, iova, 64, Access::Read)?;
        }
        bench.release(id)?;
    }
    bench.take_false_faults(&mut evidence);
    let mut executed = Executed::default();
    executed.trial("new buffer at an old address", evidence);
    if mode.has_rings() {
        executed.trial("same slot within a burst", same_slot(mode)?);
    }
    Ok(Found::Executed(executed))
}

/// A ring of one slot gives every buffer the same address. The driver maps the next buffer before
/// the burst ends, if the layer lets it.
fn same_slot(mode: &Mode) -> Result<Evidence, LabError> {
    let mut bench = Bench::with_slots(mode, 1)?;
    let mut evidence = Evidence::default();
    let direction = Direction::ToDevice;
    for round in 0..100 {
        let buffer = memory(0x10_0000 + round * 4096, 64)?;
        let id = match bench.try_map(0, buffer, direction)? {
            Some(id) => id,
            None => {
                // The burst withholds the slot.
                bench.end_burst(0, direction)?;
                bench.map(0, buffer, direction)?
            }
        };
        let iova = bench.range(id)?.start();
        bench.attack(&mut evidence, 0, iova, 64, Access::Read)?;
        bench.unmap(id)?;
    }
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}
