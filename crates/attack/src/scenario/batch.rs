//! A35: a batch of buffers that the driver gets back before their invalidation.

use ringfence_lab::LabError;
use ringfence_lab::modes::Mode;
use ringfence_types::{Access, Direction};

use super::ScenarioResult;
use super::sharers;
use super::window::Attacker;
use crate::bench::{Bench, MapId, memory};
use crate::evidence::{Evidence, Executed, Found};

/// Buffers of a batch.
const BATCH: u64 = 64;

/// Unmaps 64 buffers in one call, and in 64 calls with one end of the burst. The attack succeeds
/// if the device reaches a buffer that the driver has back.
pub(crate) fn batch(mode: &Mode) -> ScenarioResult {
    let mut executed = Executed::default();
    for attacker in Attacker::ALL {
        let mut evidence = one_call(mode, attacker)?;
        evidence.add(&single_calls(mode, attacker)?);
        executed.trial(attacker.name(), evidence);
    }
    sharers::trials(&mut executed, mode, BATCH, |_, _| Ok(()))?;
    Ok(Found::Executed(executed))
}

/// Reads the buffers that the driver has back.
fn attack_returned(
    bench: &mut Bench,
    evidence: &mut Evidence,
    attacker: Attacker,
    ids: &[MapId],
) -> Result<(), LabError> {
    for id in ids {
        if attacker != Attacker::Passive && bench.is_back(*id)? {
            let iova = bench.range(*id)?.start();
            bench.attack(evidence, 0, iova, 8, Access::Read)?;
        }
    }
    Ok(())
}

/// Maps the buffers of a batch. The device uses each.
fn map_batch(bench: &mut Bench) -> Result<Vec<MapId>, LabError> {
    let mut ids = Vec::new();
    for page in 0..BATCH {
        let buffer = memory(0x10_0000 + page * 4096, 4096)?;
        let id = bench.map(0, buffer, Direction::ToDevice)?;
        bench.use_buffer(id)?;
        ids.push(id);
    }
    Ok(ids)
}

fn one_call(mode: &Mode, attacker: Attacker) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let ids = map_batch(&mut bench)?;
    if attacker == Attacker::Racer {
        for id in &ids {
            bench.use_buffer(*id)?;
        }
    }
    bench.unmap_multi(&ids)?;
    attack_returned(&mut bench, &mut evidence, attacker, &ids)?;
    // A layer with bursts returns the buffers here.
    bench.end_burst(0, Direction::ToDevice)?;
    attack_returned(&mut bench, &mut evidence, attacker, &ids)?;
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}

fn single_calls(mode: &Mode, attacker: Attacker) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let ids = map_batch(&mut bench)?;
    for (done, id) in ids.iter().enumerate() {
        if attacker == Attacker::Racer {
            bench.use_buffer(*id)?;
        }
        bench.unmap(*id)?;
        attack_returned(&mut bench, &mut evidence, attacker, &ids[..=done])?;
    }
    bench.end_burst(0, Direction::ToDevice)?;
    attack_returned(&mut bench, &mut evidence, attacker, &ids)?;
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}
