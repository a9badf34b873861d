//! A01, A11: accesses of a device that never had a mapping of the address.

use ringfence_lab::LabError;
use ringfence_lab::modes::{Mode, TableKind};
use ringfence_types::{Access, Direction, Iova, RingId, RingIova, RingSlot};

use super::ScenarioResult;
use crate::bench::{Bench, SLOTS, memory};
use crate::evidence::{Evidence, Executed, Found};

const BOTH: [Access; 2] = [Access::Read, Access::Write];

/// A01: reads and writes at addresses without a mapping: far from every mapping, on the pages
/// before and after one, and, with rings, at rings and slots that do not exist or are empty.
pub(crate) fn never_mapped(mode: &Mode) -> ScenarioResult {
    let mut bench = Bench::new(mode)?;
    let id = bench.map(0, memory(0x10_0000, 4096)?, Direction::ToDevice)?;
    let range = bench.range(id)?;
    let mut tries = vec![0, 1, 0x12_3456, 0xffff_f000, 1 << 33, (1 << 36) - 1];
    tries.push(range.start().get().wrapping_sub(4096));
    tries.push(range.last().get().wrapping_add(4096));
    if mode.has_rings() {
        for (ring, slot) in [(0, SLOTS), (0, SLOTS - 1), (7, 0), (u16::MAX, 0)] {
            let slot = RingSlot::new(slot).unwrap_or(RingSlot::MAX);
            tries.push(RingIova::start(RingId::new(ring), slot).iova().get());
        }
    }
    let mut evidence = Evidence::default();
    for iova in tries {
        for access in BOTH {
            bench.attack(&mut evidence, 0, Iova::new(iova), 1, access)?;
        }
    }
    bench.take_false_faults(&mut evidence);
    let mut executed = Executed::default();
    executed.trial("never mapped", evidence);
    Ok(Found::Executed(executed))
}

/// A11: a device uses an address of another device, just after that device has used it. The other
/// device has a domain of its own, or, with flat tables, is behind the same host bridge. For
/// comparison, the operating system gives both devices one domain.
pub(crate) fn foreign(mode: &Mode) -> ScenarioResult {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    for (direction, start) in Direction::ALL
        .into_iter()
        .zip([0x10_0000, 0x20_0000, 0x30_0000])
    {
        let id = bench.map(0, memory(start, 64)?, direction)?;
        // Warm the entry: a lookup without a domain tag would find it.
        bench.use_buffer(id)?;
        let iova = bench.range(id)?.start();
        for access in BOTH {
            bench.attack(&mut evidence, 1, iova, 8, access)?;
        }
        bench.release(id)?;
    }
    bench.take_false_faults(&mut evidence);
    let mut executed = Executed::default();
    executed.trial("other device", evidence);
    if matches!(mode.table, TableKind::Flat | TableKind::StaticFlat) {
        executed.trial("same host bridge", sibling(mode, false)?);
    } else if mode.table != TableKind::None {
        executed.comparison("same domain", sibling(mode, true)?);
    }
    Ok(Found::Executed(executed))
}

/// The function beside a device uses the device's addresses.
fn sibling(mode: &Mode, same_domain: bool) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    if same_domain {
        bench.attach_sibling(0)?;
    }
    let sibling = bench.sibling(0)?;
    for page in 0..4 {
        let buffer = memory(0x10_0000 + page * 4096, 64)?;
        let id = bench.map(0, buffer, Direction::Bidirectional)?;
        bench.use_buffer(id)?;
        let iova = bench.range(id)?.start();
        for access in BOTH {
            let reached = bench.access(sibling, iova, 8, access);
            evidence.count(reached.as_ref().map(|reached| &reached.verdict));
        }
        bench.release(id)?;
    }
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}
