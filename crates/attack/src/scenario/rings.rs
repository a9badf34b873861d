//! A26, A27: attacks on rings.

use ringfence_lab::LabError;
use ringfence_lab::modes::Mode;
use ringfence_types::{Access, Direction};

use super::ScenarioResult;
use super::window::Attacker;
use crate::bench::{Bench, memory};
use crate::evidence::{Evidence, Executed, Found};

const NO_RING: Found = Found::NotApplicable("the mode has no rings");

/// A26: in a ring of two slots, the driver unmaps the second of two buffers and maps a third. The
/// first buffer must stay mapped: the third takes the free slot, or waits.
pub(crate) fn out_of_order(mode: &Mode) -> ScenarioResult {
    if !mode.has_rings() {
        return Ok(NO_RING);
    }
    let mut bench = Bench::with_slots(mode, 2)?;
    let mut evidence = Evidence::default();
    let direction = Direction::FromDevice;
    let first = bench.map(0, memory(0x10_0000, 64)?, direction)?;
    let second = bench.map(0, memory(0x20_0000, 64)?, direction)?;
    let iova = bench.range(first)?.start();
    bench.use_buffer(first)?;
    bench.use_buffer(second)?;
    bench.release(second)?;
    let third = bench.try_map(0, memory(0x30_0000, 64)?, direction)?;
    let device = bench.requester(0)?;
    let reached = bench.access(device, iova, 8, Access::Write);
    let at = reached.as_ref().and_then(|reached| reached.ranges.first());
    // Anything else than the first buffer is a success of the attack.
    let is_first = at.is_some_and(|range| range.start().get() == 0x10_0000);
    evidence.count_if(!is_first, 8);
    bench.take_false_faults(&mut evidence);
    let mut executed = Executed::default();
    executed.trial("map after an unmap out of order", evidence);
    executed.notes.push(match third {
        Some(_) => "the third buffer got a slot".to_owned(),
        None => "the third buffer waits for the slot at the tail".to_owned(),
    });
    Ok(Found::Executed(executed))
}

/// Buffers of a burst (rIOMMU section 4).
const BURST: u64 = 200;

/// A27: within a burst, the rIOTLB holds the current and the prefetched entry. The attack succeeds
/// if the device reaches a buffer that the driver has back.
pub(crate) fn within_a_burst(mode: &Mode) -> ScenarioResult {
    if !mode.has_rings() {
        return Ok(NO_RING);
    }
    let mut executed = Executed::default();
    for attacker in Attacker::ALL {
        executed.trial(attacker.name(), burst(mode, attacker)?);
    }
    Ok(Found::Executed(executed))
}

fn burst(mode: &Mode, attacker: Attacker) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let direction = Direction::ToDevice;
    let mut ids = Vec::new();
    for page in 0..BURST {
        ids.push(bench.map(0, memory(0x10_0000 + page * 4096, 1500)?, direction)?);
    }
    // The device follows the ring before the driver's interrupt.
    for id in &ids {
        bench.use_buffer(*id)?;
    }
    for (n, id) in (1..).zip(&ids) {
        let iova = bench.range(*id)?.start();
        match attacker {
            // The access is permitted until the driver has the buffer back.
            Attacker::Passive => {
                bench.attack(&mut evidence, 0, iova, 1, Access::Read)?;
            }
            Attacker::Racer => bench.use_buffer(*id)?,
            Attacker::Replayer => {}
        }
        bench.unmap(*id)?;
        if n == BURST {
            // The last unmap ends the burst (rIOMMU Fig. 9c, `end_of_burst`).
            bench.end_burst(0, direction)?;
        }
        if attacker != Attacker::Passive {
            // An access to a withheld buffer is permitted: its grant has not ended.
            bench.attack(&mut evidence, 0, iova, 1, Access::Read)?;
        }
    }
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}
