//! A30 and A32 on Xen: forged hypercalls, and frames that leave a domain.

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

fn device(domid: Domid) -> RequesterId {
    RequesterId::new(domid.get() << 8)
}

fn refused(_: XenError) -> LabError {
    LabError::Internal("a hypercall that Xen refuses")
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
    /// Creates Xen with dom0, the attacker and the victim, and a space for each of the latter.
    fn new(references: FrameReferences) -> Result<Self, LabError> {
        let arena = Rc::new(Arena::new(256 << 20)?);
        let region = memory(128 << 20, 128 << 20)?;
        let frames = Rc::new(Frames::new(Rc::clone(&arena), region));
        let unit = Calgary::new(&Profile::r210_2015(), &arena, &frames)?;
        let unit = HostUnit::modelled(unit);
        let mut xen = Xen::new(&arena, &frames, Coherency::Coherent, unit, references);
        for domain in 1..=3 {
            let first = PhysAddr::new(domain << 24);
            xen.create_domain(first, PAGES).map_err(refused)?;
        }
        let buses = IommuOp::IommuDetected {
            first_bus: 1,
            last_bus: 9,
        };
        xen.hypercall(Domid::DOM0, &buses).map_err(refused)?;
        for domid in [ATTACKER, VICTIM] {
            let bdf = device(domid);
            let create = IommuOp::CreateIoSpace { bdf, domid };
            xen.hypercall(Domid::DOM0, &create).map_err(refused)?;
        }
        let own = map(VICTIM, MAPPED, 0);
        xen.hypercall(VICTIM, &own).map_err(refused)?;
        Ok(Self { arena, xen })
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
/// call that its domain may make in its place. Xen detects its buses once, when the host is made.
fn calls() -> [(IommuOp, Option<(Domid, IommuOp)>); 12] {
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
    let buses = IommuOp::IommuDetected {
        first_bus: 0,
        last_bus: 255,
    };
    let last = map(ATTACKER, 0, PAGES - 1);
    [
        // Entries of the victim's space, and a space for the victim's bus.
        (next, Some((VICTIM, next))),
        (map(VICTIM, MAPPED, 0), Some((VICTIM, next))),
        (unmap, Some((VICTIM, unmap))),
        (flush, Some((VICTIM, flush))),
        (whole(other), Some((ATTACKER, whole(own)))),
        // Frames past the end of the domain, and a page past the end of the space.
        (map(ATTACKER, 0, PAGES), Some((ATTACKER, last))),
        (map(ATTACKER, 0, u64::MAX), Some((ATTACKER, last))),
        (
            map(ATTACKER, 1 << 20, 0),
            Some((ATTACKER, map(ATTACKER, (1 << 20) - 1, 0))),
        ),
        // Calls of dom0.
        (destroy(other), Some((Domid::DOM0, destroy(other)))),
        (destroy(own), Some((Domid::DOM0, destroy(own)))),
        (create, Some((Domid::DOM0, create))),
        (buses, None),
    ]
}

/// A30: the attacker's domain makes hypercalls on spaces and frames that it does not own. Xen must
/// perform the valid call beside each.
pub(super) fn forged() -> ScenarioResult {
    let mut evidence = Evidence::default();
    for (call, valid) in calls() {
        if let Some((caller, valid)) = valid {
            let mut host = Host::new(FrameReferences::Counted)?;
            host.xen.hypercall(caller, &valid).map_err(refused)?;
        }
        let mut host = Host::new(FrameReferences::Counted)?;
        let victims = host.reach(VICTIM, MAPPED);
        let executed = host.xen.hypercall(ATTACKER, &call).is_ok();
        let reached = host.reach(ATTACKER, 0).is_some();
        let changed = host.reach(VICTIM, MAPPED) != victims || victims.is_none();
        evidence.count_if(executed || reached || changed, u64::from(reached));
    }
    let mut executed = Executed::default();
    executed.trial("Xen checks hypercalls", evidence);
    Ok(Found::Executed(executed))
}

/// A32: the domain returns a mapped page to Xen, which gives its frame to another domain. For
/// comparison, Xen does not count the references of I/O spaces.
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
        let call = map(ATTACKER, page, page);
        host.xen.hypercall(ATTACKER, &call).map_err(refused)?;
        let frame = host.reach(ATTACKER, page);
        let released = host.xen.decrease_reservation(ATTACKER, page).is_ok();
        let reached = host.reach(ATTACKER, page);
        let owner = frame.and_then(|frame| host.xen.owner(frame));
        evidence.count_if(released && reached.is_some() && owner != Some(ATTACKER), 1);
        evidence.false_faults += u64::from(!released && reached.is_none());
    }
    Ok(evidence)
}
