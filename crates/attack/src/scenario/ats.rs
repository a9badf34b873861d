//! A13, A14: a device with a device TLB.

use ringfence_lab::modes::{Mode, TableKind};
use ringfence_types::{Access, Direction, Iova, PhysAddr, PhysRange};

use super::ScenarioResult;
use crate::bench::{Bench, memory};
use crate::evidence::{Evidence, Executed, Found};

/// Memory that no device has a grant of.
const SECRET: u64 = 0x999_0000;

const NO_ATS: Found = Found::NotApplicable("the unit serves no device TLB");

/// A13: the device makes translated requests to host addresses that the unit never gave it. The
/// context entry permits a device TLB, or it does not.
pub(crate) fn translated(mode: &Mode) -> ScenarioResult {
    if mode.table == TableKind::None {
        return without_iommu(mode);
    }
    let mut executed = Executed::default();
    for permitted in [true, false] {
        let mut bench = Bench::new(mode)?;
        if permitted && !bench.permit_ats(0)? {
            return Ok(NO_ATS);
        }
        let id = bench.map(0, memory(0x10_0000, 4096)?, Direction::Bidirectional)?;
        bench.use_buffer(id)?;
        let mut evidence = Evidence::default();
        for page in 0..16 {
            let target = memory(SECRET + page * 4096, 8)?;
            for access in [Access::Read, Access::Write] {
                bench.translated_attack(&mut evidence, 0, target, access)?;
            }
        }
        if permitted {
            executed.trial("device TLB permitted", evidence);
        } else {
            executed.comparison("device TLB not permitted", evidence);
        }
    }
    Ok(Found::Executed(executed))
}

/// Without an IOMMU, the root complex takes every address for a host address.
fn without_iommu(mode: &Mode) -> ScenarioResult {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    for access in [Access::Read, Access::Write] {
        bench.attack(&mut evidence, 0, Iova::new(SECRET), 8, access)?;
    }
    let mut executed = Executed::default();
    executed.trial("no IOMMU", evidence);
    Ok(Found::Executed(executed))
}

/// A14: the device completes the invalidation of its device TLB and keeps the entry. Then it makes
/// translated requests to the buffer that the driver has back.
pub(crate) fn retained(mode: &Mode) -> ScenarioResult {
    if mode.table == TableKind::None {
        return without_iommu(mode);
    }
    let mut executed = Executed::default();
    for permitted in [true, false] {
        let mut bench = Bench::new(mode)?;
        if permitted && !bench.permit_ats(0)? {
            return Ok(NO_ATS);
        }
        let mut evidence = Evidence::default();
        for round in 0..20 {
            let buffer = memory(0x10_0000 + round * 4096, 4096)?;
            let id = bench.map(0, buffer, Direction::FromDevice)?;
            let device = bench.requester(0)?;
            let iova = bench.range(id)?.start();
            let kept = bench.machine().translation_request(device, iova);
            bench.release(id)?;
            // Without an answer, the device can only repeat the I/O virtual address.
            let host = kept.unwrap_or(PhysAddr::new(iova.get()));
            if let Some(target) = PhysRange::new(host, 8) {
                bench.translated_attack(&mut evidence, 0, target, Access::Write)?;
            }
        }
        if permitted {
            executed.trial("device TLB permitted", evidence);
        } else {
            executed.comparison("device TLB not permitted", evidence);
        }
    }
    Ok(Found::Executed(executed))
}
