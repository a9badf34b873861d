//! A13, A14: a device with a device TLB.

use ringfence_devices::Bus;
use ringfence_devices::ats::{AtsControl, AtsFunction, OnInvalidate};
use ringfence_hw::{TranslatedCheck, TranslationCompletion, TranslationService};
use ringfence_lab::LabError;
use ringfence_lab::modes::{Mode, TableKind};
use ringfence_pgtable::PageRequests;
use ringfence_types::{Access, Direction, Iova, Permissions, PhysAddr, PhysRange};

use super::ScenarioResult;
use super::fabric::Collect;
use crate::bench::{Bench, MapId, memory};
use crate::device_tlb::DeviceTlbUnit;
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
    let Some((mut bench, mut unit)) = checked(mode)? else {
        return Ok(NO_ATS);
    };
    let mut evidence = Evidence::default();
    let id = bench.map(0, memory(0x10_0000, 4096)?, Direction::Bidirectional)?;
    let own = permit(&mut bench, &mut unit, id, Permissions::READ_WRITE)?;
    for page in 0..16 {
        let target = memory(SECRET + page * 4096, 8)?;
        for access in [Access::Read, Access::Write] {
            attack(&mut bench, &mut unit, &mut evidence, target, access)?;
            let own = unit.translated_request(&bench, 0, own, access)?;
            evidence.false_faults += u64::from(!own);
        }
    }
    executed.comparison(CHECKED, evidence);
    Ok(Found::Executed(executed))
}

/// Name of the variant in which the unit looks up the host address of each translated request.
const CHECKED: &str = "host address checked";

/// Creates a bench and a unit that checks host addresses.
fn checked(mode: &Mode) -> Result<Option<(Bench, DeviceTlbUnit)>, LabError> {
    let mut bench = Bench::new(mode)?;
    let unit = DeviceTlbUnit::new(&mut bench, [PageRequests::Blocked; 2], 16)?;
    Ok(unit.map(|unit| (bench, unit)))
}

/// Returns the first 8 host bytes of a mapping of the first device, and permits their page.
fn permit(
    bench: &mut Bench,
    unit: &mut DeviceTlbUnit,
    id: MapId,
    permissions: Permissions,
) -> Result<PhysRange, LabError> {
    let (device, iova) = (bench.requester(0)?, bench.range(id)?.start());
    let answer = unit.unit.translation_request(&*unit.memory, device, iova);
    let TranslationCompletion::Page { base, size, .. } = answer else {
        return Err(LabError::Internal("a mapped page without a translation"));
    };
    let host = base.wrapping_add(iova.offset_in(size.bytes()));
    let host = memory(host.get(), 8)?;
    unit.permit(bench, 0, host, permissions)?;
    Ok(host)
}

/// Makes a translated request to the unit that checks host addresses, and counts it.
fn attack(
    bench: &mut Bench,
    unit: &mut DeviceTlbUnit,
    evidence: &mut Evidence,
    target: PhysRange,
    access: Access,
) -> Result<(), LabError> {
    let permitted = unit.translated_request(bench, 0, target, access)?;
    let device = bench.requester(0)?;
    let verdict = bench.oracle.judge(device, &target, access, bench.now());
    evidence.count(permitted.then_some(&verdict));
    Ok(())
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

/// Check of translated requests beyond the permission of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Check {
    None,
    HostAddress,
}

/// A14: the device completes the invalidation of its device TLB and keeps the entry. Then it makes
/// translated requests to the buffer that the driver has back.
pub(crate) fn retained(mode: &Mode) -> ScenarioResult {
    if mode.table == TableKind::None {
        return without_iommu(mode);
    }
    let keeps = OnInvalidate::CompletesAndKeeps;
    let Some(kept) = after_invalidation(mode, keeps, Check::None)? else {
        return Ok(NO_ATS);
    };
    let mut executed = Executed::default();
    executed.trial("device TLB permitted", kept);
    let honest = OnInvalidate::RemovesAndCompletes;
    for (name, behaviour, check) in [
        ("honest device", honest, Check::None),
        (CHECKED, keeps, Check::HostAddress),
    ] {
        if let Some(evidence) = after_invalidation(mode, behaviour, check)? {
            executed.comparison(name, evidence);
        }
    }
    executed.comparison("device TLB not permitted", not_permitted(mode)?);
    Ok(Found::Executed(executed))
}

/// Runs the device through 20 buffers: it writes each, and again after it has completed the
/// invalidation of the unmap. `None` if the mode's unit serves no device TLB.
fn after_invalidation(
    mode: &Mode,
    on_invalidate: OnInvalidate,
    check: Check,
) -> Result<Option<Evidence>, LabError> {
    let Some((mut bench, mut unit)) = checked(mode)? else {
        return Ok(None);
    };
    if check == Check::None {
        *unit.unit.translated_check() = TranslatedCheck::DeviceOnly;
    }
    let mut device = AtsFunction::new(bench.requester(0)?, 64, on_invalidate);
    device.set_control(AtsControl::Enabled);
    let mut evidence = Evidence::default();
    for round in 0..20 {
        let buffer = memory(0x10_0000 + round * 4096, 4096)?;
        let id = bench.map(0, buffer, Direction::FromDevice)?;
        let iova = bench.range(id)?.start();
        let host = permit(&mut bench, &mut unit, id, Permissions::WRITE)?;
        let live = write(&mut unit, &mut device, iova);
        evidence.false_faults += u64::from(live.is_none());
        unit.revoke(0, host.start())?;
        bench.release(id)?;
        unit.invalidate(0, iova, &mut device)?;
        let reached = write(&mut unit, &mut device, iova);
        let verdict = reached.map(|range| {
            let now = bench.now();
            bench.oracle.judge(device.id(), &range, Access::Write, now)
        });
        evidence.count(verdict.as_ref());
    }
    Ok(Some(evidence))
}

/// Writes 8 bytes at `iova` through the device TLB. Returns the memory that the write reached.
fn write(unit: &mut DeviceTlbUnit, device: &mut AtsFunction, iova: Iova) -> Option<PhysRange> {
    let mut reached = Vec::new();
    let mut bus = Bus::new(&mut unit.unit, &*unit.memory, Collect(&mut reached));
    let written = device.probe(&mut bus, iova, 8, Access::Write);
    written.ok().and_then(|()| reached.first().copied())
}

/// A device without permission gets no translation, and repeats the I/O virtual address as a host
/// address.
fn not_permitted(mode: &Mode) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    for round in 0..20 {
        let buffer = memory(0x10_0000 + round * 4096, 4096)?;
        let id = bench.map(0, buffer, Direction::FromDevice)?;
        let device = bench.requester(0)?;
        let iova = bench.range(id)?.start();
        let kept = bench.machine().translation_request(device, iova);
        bench.release(id)?;
        let host = kept.unwrap_or(PhysAddr::new(iova.get()));
        if let Some(target) = PhysRange::new(host, 8) {
            bench.translated_attack(&mut evidence, 0, target, Access::Write)?;
        }
    }
    Ok(evidence)
}
