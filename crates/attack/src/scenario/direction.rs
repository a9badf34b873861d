//! A06: accesses against the direction of a live mapping.

use ringfence_lab::LabError;
use ringfence_lab::modes::Mode;
use ringfence_types::{Access, Direction};

use super::ScenarioResult;
use crate::bench::{Bench, memory};
use crate::evidence::{Evidence, Executed, Found};

/// Writes through `ToDevice` and reads through `FromDevice`, after permitted accesses, so that
/// the entries are cached with their permissions. Each page has been mapped in the other direction
/// before. Then another buffer in the page is mapped in the other direction at the same time.
pub(crate) fn wrong_direction(mode: &Mode) -> ScenarioResult {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    for (direction, wrong) in [
        (Direction::ToDevice, Access::Write),
        (Direction::FromDevice, Access::Read),
    ] {
        let opposite = match direction {
            Direction::ToDevice => Direction::FromDevice,
            _ => Direction::ToDevice,
        };
        let before = bench.map(0, memory(0x10_0000, 64)?, opposite)?;
        bench.use_buffer(before)?;
        bench.release(before)?;
        for start in [0x10_0000, 0x20_0000] {
            let id = bench.map(0, memory(start, 64)?, direction)?;
            bench.use_buffer(id)?;
            let iova = bench.range(id)?.start();
            bench.attack(&mut evidence, 0, iova, 64, wrong)?;
            bench.release(id)?;
        }
    }
    bench.take_false_faults(&mut evidence);
    let mut executed = Executed::default();
    executed.trial("against the direction", evidence);
    executed.trial("page with both directions", both_directions(mode)?);
    Ok(Found::Executed(executed))
}

/// Two buffers in one page, mapped in opposite directions. A mapping of the page with the rights of
/// both lets the device write the first and read the second.
fn both_directions(mode: &Mode) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let read = bench.map(0, memory(0x10_0000, 64)?, Direction::ToDevice)?;
    let written = bench.map(0, memory(0x10_0800, 64)?, Direction::FromDevice)?;
    for _ in 0..2 {
        bench.use_buffer(read)?;
        bench.use_buffer(written)?;
        for (id, wrong) in [(read, Access::Write), (written, Access::Read)] {
            let iova = bench.range(id)?.start();
            bench.attack(&mut evidence, 0, iova, 64, wrong)?;
        }
    }
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}
