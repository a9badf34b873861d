//! A36: a device without a driver.

use ringfence_lab::LabError;
use ringfence_lab::modes::{Mode, Owner};
use ringfence_types::{Access, Direction, Iova, RequesterId};

use super::ScenarioResult;
use crate::bench::{Bench, memory};
use crate::evidence::{Evidence, Executed, Found};

const BOTH: [Access; 2] = [Access::Read, Access::Write];
/// An address without a mapping.
const UNMAPPED: Iova = Iova::new(0x5000);

/// A device makes accesses before its driver is bound, after the unbind of a driver that leaks its
/// mappings, after the bind of the next driver, and, for comparison, before the kernel enables the
/// unit.
pub(crate) fn without_driver(mode: &Mode) -> ScenarioResult {
    let mut executed = Executed::default();
    executed.trial("not attached", not_attached(mode)?);
    executed.trial("after the unbind", after_unbind(mode)?);
    if !attaches_once(mode.owner) {
        executed.trial("after the rebind", after_rebind(mode)?);
    }
    executed.comparison("before the unit is enabled", before_enable(mode)?);
    Ok(Found::Executed(executed))
}

/// The functions have no context entry, on another bus or on a bus with an attached device.
fn not_attached(mode: &Mode) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let id = bench.map(0, memory(0x10_0000, 4096)?, Direction::Bidirectional)?;
    bench.use_buffer(id)?;
    let mapped = bench.range(id)?.start();
    for device in [RequesterId::new(0x7700), bench.sibling(0)?] {
        try_both(&mut bench, &mut evidence, device, mapped);
    }
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}

/// The IOTLB and the context cache hold the device's entries until the unbind.
fn after_unbind(mode: &Mode) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let id = bench.map(0, memory(0x10_0000, 4096)?, Direction::Bidirectional)?;
    let mapped = bench.range(id)?.start();
    // The other device keeps its driver.
    let other = bench.map(1, memory(0x20_0000, 4096)?, Direction::Bidirectional)?;
    bench.use_buffer(id)?;
    bench.use_buffer(other)?;
    bench.unbind(0)?;
    let device = bench.requester(0)?;
    try_both(&mut bench, &mut evidence, device, mapped);
    bench.use_buffer(other)?;
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}

/// The model of the para-virtual host keeps the records of a device for ever. Xen destroys no I/O
/// space that still maps granted pages, so a driver domain cannot bind a device that leaks them.
fn attaches_once(owner: Owner) -> bool {
    owner.is_pviommu() || owner == Owner::XenGrant
}

/// Pages that the first driver leaks.
const LEAKED: u64 = 4;

/// A second driver binds the device, whose new domain may have the number of the old one. The
/// device uses addresses of the first driver's mappings, before and after the second maps a buffer.
fn after_rebind(mode: &Mode) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let mut leaked = Vec::new();
    for page in 0..LEAKED {
        let buffer = memory(0x10_0000 + page * 4096, 4096)?;
        let id = bench.map(0, buffer, Direction::Bidirectional)?;
        bench.use_buffer(id)?;
        leaked.push(bench.range(id)?.start());
    }
    // The IOTLB holds the last entries at the unbind.
    let other = bench.map(1, memory(0x20_0000, 4096)?, Direction::Bidirectional)?;
    bench.use_buffer(other)?;
    bench.rebind(0)?;
    for second in [None, Some(memory(0x30_0000, 4096)?)] {
        if let Some(buffer) = second {
            let id = bench.map(0, buffer, Direction::Bidirectional)?;
            bench.use_buffer(id)?;
        }
        for iova in &leaked {
            for access in BOTH {
                bench.attack(&mut evidence, 0, *iova, 8, access)?;
            }
        }
        bench.use_buffer(other)?;
    }
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}

fn before_enable(mode: &Mode) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    bench.machine().disable();
    let device = bench.requester(0)?;
    try_both(&mut bench, &mut evidence, device, Iova::new(0x10_0000));
    Ok(evidence)
}

fn try_both(bench: &mut Bench, evidence: &mut Evidence, device: RequesterId, mapped: Iova) {
    for iova in [mapped, UNMAPPED] {
        for access in BOTH {
            let reached = bench.access(device, iova, 8, access);
            evidence.count(reached.as_ref().map(|reached| &reached.verdict));
        }
    }
}
