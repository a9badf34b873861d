//! A36: a device without a driver.

use ringfence_lab::LabError;
use ringfence_lab::modes::Mode;
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
    for (first, name, published) in [
        (
            FirstDriver::Leaks,
            "after the rebind",
            "leaked, as published",
        ),
        (
            FirstDriver::Releases,
            "released before the rebind",
            "released, as published",
        ),
    ] {
        let is_hosted = mode.owner.is_pviommu();
        let rebind = match is_hosted {
            true => Bench::rebind_with_context,
            false => Bench::rebind,
        };
        executed.trial(name, after_rebind(mode, first, rebind)?);
        if is_hosted {
            let evidence = after_rebind(mode, first, Bench::rebind_unnoticed)?;
            executed.comparison(published, evidence);
        }
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

/// Pages that the first driver leaves.
const LEFT: u64 = 4;

/// The state in which the first driver leaves its buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FirstDriver {
    /// The buffers are mapped.
    Leaks,
    /// The driver has unmapped them. A cache or a queue may keep their entries.
    Releases,
}

/// A second driver binds the device, whose new domain may have the number of the old one. The
/// device uses addresses of the first driver's mappings, before and after the second maps a buffer.
///
/// The host of the para-virtual IOMMU installs the context entry when the IOMMU's driver is ready
/// (`docs/PVIOMMU.md`), so the entry stays at the rebind. The published design names no step for a
/// driver that leaves: the device keeps its table, and the guest keeps the device's cache of
/// released mappings.
fn after_rebind(
    mode: &Mode,
    first: FirstDriver,
    rebind: fn(&mut Bench, u16) -> Result<(), LabError>,
) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let mut left = Vec::new();
    for page in 0..LEFT {
        let buffer = memory(0x10_0000 + page * 4096, 4096)?;
        let id = bench.map(0, buffer, Direction::Bidirectional)?;
        bench.use_buffer(id)?;
        left.push((id, bench.range(id)?.start()));
    }
    if first == FirstDriver::Releases {
        for (id, _) in &left {
            bench.release(*id)?;
        }
    }
    // The IOTLB holds the last entries at the unbind.
    let other = bench.map(1, memory(0x20_0000, 4096)?, Direction::Bidirectional)?;
    bench.use_buffer(other)?;
    rebind(&mut bench, 0)?;
    for second in [None, Some(memory(0x30_0000, 4096)?)] {
        if let Some(buffer) = second {
            let id = bench.map(0, buffer, Direction::Bidirectional)?;
            bench.use_buffer(id)?;
        }
        for (_, iova) in &left {
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
