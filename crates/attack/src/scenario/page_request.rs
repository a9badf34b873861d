//! A38: page requests of a malicious device.

use ringfence_devices::ats::PageFaultHandler;
use ringfence_hw::{GroupPosition, PageRequest, PrgIndex, ResponseCode, Translate};
use ringfence_lab::LabError;
use ringfence_lab::modes::{Mode, TableKind};
use ringfence_pgtable::{MapRequest, PageRequests};
use ringfence_types::{Access, Iova, Permissions, Pfn, PhysAddr, RequesterId};

use super::ScenarioResult;
use crate::bench::Bench;
use crate::device_tlb::{DeviceTlbUnit, MachineFrames};
use crate::evidence::{Evidence, Executed, Found};

/// Entries of the page request queue.
const QUEUE: usize = 64;
/// Number of the device that the attacker controls.
const ATTACKER: u16 = 1;
/// The page that the attacker's driver has registered. No device has a grant of the pages after it.
const REGISTERED: u64 = 0x999_0000;

/// A device requests more pages than the unit's queue holds, so that the requests of another device
/// are lost. It also requests pages that its driver has not mapped, and the operating system
/// resolves only pages that the driver has mapped. No mode serves page requests by itself: the unit
/// of these variants walks the mode's tables.
pub(crate) fn page_requests(mode: &Mode) -> ScenarioResult {
    if mode.table == TableKind::None {
        return Ok(Found::NotApplicable("the machine has no IOMMU"));
    }
    let mut executed = Executed::default();
    let allowed = PageRequests::Allowed;
    for (name, attacker) in [("storm", allowed), (NO_PRI, PageRequests::Blocked)] {
        let Some((mut bench, mut unit)) = with_pri(mode, attacker)? else {
            return Ok(Found::NotApplicable("the unit serves no device TLB"));
        };
        let evidence = storm(&mut bench, &mut unit)?;
        if attacker == allowed {
            executed.trial(name, evidence);
        } else {
            executed.comparison(name, evidence);
        }
    }
    for (name, checks) in [(UNSOLICITED, true), ("handler maps every page", false)] {
        let Some((mut bench, mut unit)) = with_pri(mode, allowed)? else {
            return Ok(Found::NotApplicable("the unit serves no device TLB"));
        };
        let evidence = unsolicited(&mut bench, &mut unit, checks)?;
        if checks {
            executed.trial(name, evidence);
        } else {
            executed.comparison(name, evidence);
        }
    }
    Ok(Found::Executed(executed))
}

const NO_PRI: &str = "page requests not permitted";
const UNSOLICITED: &str = "unsolicited request";

/// Creates a bench whose victim may make page requests, and its attacker as `attacker` says.
fn with_pri(
    mode: &Mode,
    attacker: PageRequests,
) -> Result<Option<(Bench, DeviceTlbUnit)>, LabError> {
    let mut bench = Bench::new(mode)?;
    let unit = DeviceTlbUnit::new(&mut bench, [PageRequests::Allowed, attacker], QUEUE)?;
    Ok(unit.map(|unit| (bench, unit)))
}

fn request(device: RequesterId, page: u64, group: u16) -> Result<PageRequest, LabError> {
    let group = PrgIndex::new(group % PrgIndex::COUNT);
    Ok(PageRequest {
        device,
        page: Pfn::containing(Iova::new(page)),
        permissions: Permissions::READ_WRITE,
        group: group.ok_or(LabError::Internal("a group of page requests"))?,
        position: GroupPosition::Last,
    })
}

/// The attack succeeds if software never sees the victim's request.
fn storm(bench: &mut Bench, tlb: &mut DeviceTlbUnit) -> Result<Evidence, LabError> {
    let mut evidence = Evidence::default();
    let (victim, attacker) = (bench.requester(0)?, bench.requester(ATTACKER)?);
    let mut handler = PageFaultHandler::new(QUEUE);
    for round in 0..20 {
        // The device ignores the number of outstanding groups that its driver allows.
        for group in 0..=QUEUE as u16 {
            let storming = request(attacker, REGISTERED, group)?;
            let _ = tlb.unit.page_request(&*tlb.memory, &storming);
        }
        let own = request(victim, 0x10_0000 + round * 4096, 0)?;
        let _ = tlb.unit.page_request(&*tlb.memory, &own);
        let mut seen = false;
        let budget = 2 * QUEUE;
        handler.serve(tlb.unit.page_requests(), budget, |request| {
            seen |= request.device == victim;
            ResponseCode::InvalidRequest
        });
        evidence.count_if(!seen, 0);
    }
    Ok(evidence)
}

/// A device whose pages are mapped on request: its driver has registered one page. The attack
/// succeeds if the device reaches another page after the response.
fn unsolicited(
    bench: &mut Bench,
    tlb: &mut DeviceTlbUnit,
    checks: bool,
) -> Result<Evidence, LabError> {
    let mut evidence = Evidence::default();
    let attacker = bench.requester(ATTACKER)?;
    let table = tlb.demand_table(bench, ATTACKER)?;
    let memory = tlb.memory.clone();
    let mut handler = PageFaultHandler::new(QUEUE);
    for page in 0..=16 {
        let wanted = request(attacker, REGISTERED + page * 4096, 0)?;
        let _ = tlb.unit.page_request(&*memory, &wanted);
        let frames = MachineFrames(bench.machine());
        handler.serve(tlb.unit.page_requests(), 1, |request| {
            let iova = request.page.iova();
            if checks && iova != Iova::new(REGISTERED) {
                return ResponseCode::InvalidRequest;
            }
            let request = MapRequest {
                iova,
                pa: PhysAddr::new(iova.get()),
                pages: 1,
                permissions: request.permissions,
            };
            match table.map(&*memory, &frames, request) {
                Ok(()) => ResponseCode::Success,
                Err(_) => ResponseCode::InvalidRequest,
            }
        });
        let iova = wanted.page.iova();
        let unit = &mut tlb.unit;
        let reached = unit.translate(&*memory, attacker, iova, 8, Access::Read);
        let reached = reached.ok().map(|found| found.first());
        if page == 0 {
            evidence.false_faults += u64::from(reached.is_none());
            continue;
        }
        let (oracle, now) = (&bench.oracle, bench.now());
        let verdict = reached.map(|range| oracle.judge(attacker, &range, Access::Read, now));
        evidence.count(verdict.as_ref());
    }
    Ok(evidence)
}
