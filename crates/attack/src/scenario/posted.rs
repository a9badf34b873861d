//! A23: a posted write reaches memory after the unmap.

use ringfence_devices::posted::WriteDraining;
use ringfence_lab::LabError;
use ringfence_lab::modes::Mode;
use ringfence_types::Direction;

use super::ScenarioResult;
use crate::bench::{Bench, memory};
use crate::evidence::{Evidence, Executed, Found};

/// The device posts a write to a mapped buffer, the driver unmaps the buffer, and the write reaches
/// memory. The attack succeeds if the driver had the buffer back before. With draining, an
/// invalidation completes only after the writes before it.
pub(crate) fn posted_write(mode: &Mode) -> ScenarioResult {
    let mut executed = Executed::default();
    executed.trial(
        "invalidation drains writes",
        in_flight(mode, WriteDraining::Drained)?,
    );
    executed.comparison(
        "invalidation without draining",
        in_flight(mode, WriteDraining::NotDrained)?,
    );
    Ok(Found::Executed(executed))
}

fn in_flight(mode: &Mode, draining: WriteDraining) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    bench.set_draining(draining);
    let mut evidence = Evidence::default();
    for round in 0..20 {
        let buffer = memory(0x10_0000 + round * 4096, 2048)?;
        let id = bench.map(0, buffer, Direction::FromDevice)?;
        let iova = bench.range(id)?.start();
        bench.post_write(0, iova, 64)?;
        bench.unmap(id)?;
        if !bench.is_back(id)? {
            bench.end_burst(0, Direction::FromDevice)?;
        }
        let verdicts = bench.deliver();
        evidence.count(verdicts.first());
        bench.end_burst(0, Direction::FromDevice)?;
    }
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}
