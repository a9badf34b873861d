//! A30 and A32 on Xen: forged hypercalls, and frames that leave a domain.

use std::fmt::Debug;
use std::rc::Rc;

use ringfence_devices::{DmaRequest, Observer};
use ringfence_lab::guest::HostUnit;
use ringfence_lab::hardware::{Calgary, Hardware};
use ringfence_lab::xen::{Domid, FrameReferences, IommuOp, TceFlush, Xen, XenError};
use ringfence_lab::{LabError, Profile};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{Access, Fault, Iova, Permissions, Pfn, PhysAddr, PhysRange, RequesterId};

use super::ScenarioResult;
use crate::bench::memory;
use crate::evidence::{Evidence, Executed, Found};

/// The attacker and the victim. Each drives the device of the bus with its number.
const ATTACKER: Domid = Domid::new(1);
const VICTIM: Domid = Domid::new(2);
/// Pages of each domain.
const PAGES: u64 = 64;
const RW: Permissions = Permissions::READ_WRITE;
/// The page of the victim's mapping.
const MAPPED: u64 = 5;
/// The first page past the end of a space.
const BEYOND: u64 = 1 << 20;
/// The buses of the unit.
const BUSES: IommuOp = IommuOp::IommuDetected {
    first_bus: 1,
    last_bus: 9,
};

fn device(domid: Domid) -> RequesterId {
    RequesterId::new(domid.get() << 8)
}

fn refused(call: impl Debug) -> impl FnOnce(XenError) -> LabError {
    move |reason| LabError::RefusedHypercall {
        call: format!("{call:?}"),
        reason: reason.into(),
    }
}

struct Host {
    arena: Rc<Arena>,
    xen: Xen,
}

#[derive(Default)]
struct Reached(Option<PhysAddr>);

impl Observer for &mut Reached {
    fn allowed(&mut self, _: &DmaRequest, ranges: &[PhysRange]) {
        self.0 = ranges.first().map(PhysRange::start);
    }

    fn faulted(&mut self, _: &DmaRequest, _: &Fault) {}
}

impl Host {
    /// Creates Xen with dom0, the attacker and the victim. It knows no buses yet.
    fn without_buses(references: FrameReferences) -> Result<Self, LabError> {
        let arena = Rc::new(Arena::new(256 << 20)?);
        let region = memory(128 << 20, 128 << 20)?;
        let frames = Rc::new(Frames::new(Rc::clone(&arena), region));
        let unit = Calgary::new(&Profile::r210_2015(), &arena, &frames)?;
        let unit = HostUnit::modelled(unit);
        let mut xen = Xen::new(&arena, &frames, Coherency::Coherent, unit, references);
        for index in 1..=3 {
            let first = PhysAddr::new(index << 24);
            let created = xen.create_domain(first, PAGES);
            created.map_err(refused("create_domain"))?;
        }
        Ok(Self { arena, xen })
    }

    /// Creates the same domains, a space for the attacker and one for the victim, and a mapping of
    /// the victim.
    fn new(references: FrameReferences) -> Result<Self, LabError> {
        let mut host = Self::without_buses(references)?;
        host.perform(Domid::DOM0, BUSES)?;
        for domid in [ATTACKER, VICTIM] {
            let bdf = device(domid);
            host.perform(Domid::DOM0, IommuOp::CreateIoSpace { bdf, domid })?;
        }
        host.perform(VICTIM, map(VICTIM, MAPPED, 0))?;
        match host.reach(VICTIM, MAPPED) {
            Some(_) => Ok(host),
            None => Err(LabError::Internal(
                "a device cannot reach its domain's page",
            )),
        }
    }

    /// Makes a hypercall that Xen must perform.
    fn perform(&mut self, caller: Domid, call: IommuOp) -> Result<(), LabError> {
        self.xen.hypercall(caller, &call).map_err(refused(call))
    }

    fn reach(&mut self, domid: Domid, page: u64) -> Option<PhysAddr> {
        let request = DmaRequest {
            device: device(domid),
            iova: Iova::new(page << 12),
            bytes: 1,
            access: Access::Write,
        };
        let mut reached = Reached::default();
        if let HostUnit::Modelled { hardware, .. } = &mut self.xen.unit {
            let _ = hardware.probe(&self.arena, &request, &mut reached);
        }
        reached.0
    }

    /// Returns the addresses that the attacker reaches on the pages of its forged calls.
    fn reached_by_attacker(&mut self) -> [Option<PhysAddr>; 2] {
        [0, BEYOND].map(|page| self.reach(ATTACKER, page))
    }

    /// Returns the spaces, and the addresses that the victim reaches on the pages of forged calls.
    fn spaces(&mut self) -> (Vec<RequesterId>, [Option<PhysAddr>; 2]) {
        let reached = [MAPPED, MAPPED + 1].map(|page| self.reach(VICTIM, page));
        (self.xen.devices(), reached)
    }
}

fn map(of: Domid, page: u64, gpfn: u64) -> IommuOp {
    IommuOp::MapEntry {
        bdf: device(of),
        page: Pfn::new(page),
        gpfn,
        permissions: RW,
    }
}

/// Hypercalls of the attacker's domain on spaces and frames that it does not own. Beside each, a
/// similar call that its caller may make.
fn calls() -> [(IommuOp, (Domid, IommuOp)); 11] {
    let (own, other) = (device(ATTACKER), device(VICTIM));
    let unmap = IommuOp::UnmapEntry {
        bdf: other,
        page: Pfn::new(MAPPED),
        flush: TceFlush::Now,
    };
    let next = map(VICTIM, MAPPED + 1, 0);
    let flush = IommuOp::FlushIoSpace { bdf: other };
    let whole = |bdf| IommuOp::MapWholeGuest { bdf };
    let destroy = |bdf| IommuOp::DestroyIoSpace { bdf };
    let create = IommuOp::CreateIoSpace {
        bdf: RequesterId::new(0x300),
        domid: ATTACKER,
    };
    let last = map(ATTACKER, 0, PAGES - 1);
    let last_page = map(ATTACKER, BEYOND - 1, 0);
    [
        // Entries of the victim's space.
        (next, (VICTIM, next)),
        (map(VICTIM, MAPPED, 0), (VICTIM, next)),
        (unmap, (VICTIM, unmap)),
        (flush, (VICTIM, flush)),
        (whole(other), (ATTACKER, whole(own))),
        // Frames past the end of the domain, and a page past the end of the space.
        (map(ATTACKER, 0, PAGES), (ATTACKER, last)),
        (map(ATTACKER, 0, u64::MAX), (ATTACKER, last)),
        (map(ATTACKER, BEYOND, 0), (ATTACKER, last_page)),
        // Calls of dom0.
        (destroy(other), (Domid::DOM0, destroy(other))),
        (destroy(own), (Domid::DOM0, destroy(own))),
        (create, (Domid::DOM0, create)),
    ]
}

/// A30: the attacker's domain makes hypercalls on spaces and frames that it does not own. The
/// attack succeeds if Xen performs one, or refuses it after a change. Xen must perform the valid
/// call beside each.
pub(super) fn forged() -> ScenarioResult {
    let mut evidence = Evidence::default();
    for (call, (caller, valid)) in calls() {
        Host::new(FrameReferences::Counted)?.perform(caller, valid)?;
        let mut host = Host::new(FrameReferences::Counted)?;
        let before = host.spaces();
        let executed = host.xen.hypercall(ATTACKER, &call).is_ok();
        let reached = host.reached_by_attacker();
        let reached = reached.iter().flatten().count() as u64;
        let changed = host.spaces() != before;
        evidence.count_if(executed || reached > 0 || changed, reached);
    }
    // The buses are detected once, so the attacker tries it before dom0.
    let mut host = Host::without_buses(FrameReferences::Counted)?;
    let executed = host.xen.hypercall(ATTACKER, &BUSES).is_ok();
    let changed = host.xen.hypercall(Domid::DOM0, &BUSES).is_err();
    evidence.count_if(executed || changed, 0);
    let mut executed = Executed::default();
    executed.trial("Xen checks hypercalls", evidence);
    Ok(Found::Executed(executed))
}

/// A32: the domain returns a mapped page to Xen, which gives its frame to the victim. The attack
/// succeeds if the attacker's device still reaches the frame. For comparison, Xen does not count
/// the references of I/O spaces.
pub(super) fn released_frame() -> ScenarioResult {
    let mut executed = Executed::default();
    executed.trial("frames are counted", released(FrameReferences::Counted)?);
    let uncounted = released(FrameReferences::NotCounted)?;
    executed.comparison("frames not counted", uncounted);
    Ok(Found::Executed(executed))
}

fn released(references: FrameReferences) -> Result<Evidence, LabError> {
    let mut host = Host::new(references)?;
    let mut evidence = Evidence::default();
    for page in 0..16 {
        // The victim has a hole for the frame. Xen gives out the frame that it got last.
        let hole = PAGES - 1 - page;
        let decreased = host.xen.decrease_reservation(VICTIM, hole);
        decreased.map_err(refused("decrease_reservation"))?;
        host.perform(ATTACKER, map(ATTACKER, page, page))?;
        let released = host.xen.decrease_reservation(ATTACKER, page).is_ok();
        let increased = host.xen.increase_reservation(VICTIM, hole);
        increased.map_err(refused("increase_reservation"))?;
        let reached = host.reach(ATTACKER, page);
        let owner = reached.and_then(|frame| host.xen.owner(frame));
        evidence.count_if(owner == Some(VICTIM), 1);
        evidence.false_faults += u64::from(!released && reached.is_none());
    }
    Ok(evidence)
}
