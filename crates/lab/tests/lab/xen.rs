//! Xen's hypercalls for I/O spaces: rights, frames that change owners, grants, and a hostile guest.

use std::collections::BTreeMap;
use std::rc::Rc;

use proptest::prelude::*;
use ringfence_devices::{DmaRequest, Observer};
use ringfence_lab::Profile;
use ringfence_lab::guest::HostUnit;
use ringfence_lab::hardware::{Calgary, Hardware};
use ringfence_lab::oracle::{Oracle, Ownership, Verdict};
use ringfence_lab::xen::{
    Domid, FrameReferences, GrantHandle, GrantMap, GrantRef, IommuOp, MAX_MULTICALL, TceFlush, Xen,
    XenError,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{
    Access, Direction, Fault, Iova, Permissions, Pfn, PhysAddr, PhysRange, RequesterId,
};

pub(crate) const DOM0: Domid = Domid::DOM0;
pub(crate) const GUEST: Domid = Domid::new(1);
pub(crate) const OTHER: Domid = Domid::new(2);
/// Pages of each domain.
pub(crate) const PAGES: u64 = 64;
pub(crate) const RW: Permissions = Permissions::READ_WRITE;
pub(crate) const READ: Permissions = Permissions::READ;

/// A device of bus `bus`.
pub(crate) const fn on(bus: u8) -> RequesterId {
    RequesterId::new((bus as u16) << 8 | 0x18)
}

/// First byte of a domain's machine memory.
pub(crate) fn base(domid: Domid) -> u64 {
    (u64::from(domid.get()) + 1) << 24
}

/// Xen with three domains of [`PAGES`] pages each.
pub(crate) struct Machine {
    pub(crate) arena: Rc<Arena>,
    pub(crate) xen: Xen,
}

/// The first range that an access reached.
#[derive(Default)]
struct Reached(Option<PhysAddr>);

impl Observer for &mut Reached {
    fn allowed(&mut self, _: &DmaRequest, ranges: &[PhysRange]) {
        self.0 = ranges.first().map(PhysRange::start);
    }

    fn faulted(&mut self, _: &DmaRequest, _: &Fault) {}
}

impl Machine {
    pub(crate) fn new(references: FrameReferences) -> Self {
        let arena = Rc::new(Arena::new(256 << 20).unwrap());
        let region = PhysRange::new(PhysAddr::new(128 << 20), 128 << 20).unwrap();
        let frames = Rc::new(Frames::new(Rc::clone(&arena), region));
        let unit = Calgary::new(&Profile::r210_2015(), &arena, &frames).unwrap();
        let unit = HostUnit::modelled(unit);
        let mut xen = Xen::new(&arena, &frames, Coherency::Coherent, unit, references);
        for domid in [DOM0, GUEST, OTHER] {
            let made = xen.create_domain(PhysAddr::new(base(domid)), PAGES);
            assert_eq!(made, Ok(domid));
        }
        Self { arena, xen }
    }

    /// With an I/O space for bus 1 of [`GUEST`], bus 2 of [`OTHER`] and bus 3 of dom0.
    pub(crate) fn with_spaces(references: FrameReferences) -> Self {
        let mut machine = Self::new(references);
        let detected = IommuOp::IommuDetected {
            first_bus: 1,
            last_bus: 9,
        };
        machine.ok(DOM0, detected);
        for (bus, domid) in [(1, GUEST), (2, OTHER), (3, DOM0)] {
            machine.ok(
                DOM0,
                IommuOp::CreateIoSpace {
                    bdf: on(bus),
                    domid,
                },
            );
        }
        machine
    }

    pub(crate) fn call(&mut self, caller: Domid, call: IommuOp) -> Result<(), XenError> {
        self.xen.hypercall(caller, &call)
    }

    pub(crate) fn ok(&mut self, caller: Domid, call: IommuOp) {
        assert_eq!(self.call(caller, call), Ok(()), "{call:?}");
    }

    /// Returns the machine address that a device reaches at a page.
    pub(crate) fn reach(&mut self, bus: u8, page: u64, access: Access) -> Option<PhysAddr> {
        let request = DmaRequest {
            device: on(bus),
            iova: Iova::new(page << 12),
            bytes: 1,
            access,
        };
        let mut reached = Reached::default();
        let HostUnit::Modelled { hardware, .. } = &mut self.xen.unit else {
            panic!("a modelled unit");
        };
        let done = hardware.probe(&self.arena, &request, &mut reached);
        assert_eq!(done.is_ok(), reached.0.is_some());
        reached.0
    }
}

pub(crate) fn map(bus: u8, page: u64, gpfn: u64, permissions: Permissions) -> IommuOp {
    IommuOp::MapEntry {
        bdf: on(bus),
        page: Pfn::new(page),
        gpfn,
        permissions,
    }
}

pub(crate) fn unmap(bus: u8, page: u64, flush: TceFlush) -> IommuOp {
    IommuOp::UnmapEntry {
        bdf: on(bus),
        page: Pfn::new(page),
        flush,
    }
}

/// CG05: dom0 detects, the hypervisor owns; a space belongs to one domain; entries map own pages.
#[test]
fn each_hypercall_is_checked() {
    use IommuOp::{CreateIoSpace, DestroyIoSpace, FlushIoSpace, IommuDetected, MapWholeGuest};
    use TceFlush::{Deferred, Now};
    use XenError as E;
    let mut machine = Machine::new(FrameReferences::Counted);
    let buses = |first_bus, last_bus| IommuDetected {
        first_bus,
        last_bus,
    };
    let create = |bus, domid| CreateIoSpace {
        bdf: on(bus),
        domid,
    };
    let destroy = |bus| DestroyIoSpace { bdf: on(bus) };
    let cases = [
        (DOM0, create(1, GUEST), Err(E::NotDetected)),
        (GUEST, buses(1, 9), Err(E::NotPrivileged)),
        (DOM0, buses(9, 1), Err(E::NoSuchBus)),
        (DOM0, buses(1, 9), Ok(())),
        (DOM0, buses(1, 9), Err(E::AlreadyDetected)),
        (GUEST, create(1, GUEST), Err(E::NotPrivileged)),
        (DOM0, create(10, GUEST), Err(E::NoSuchBus)),
        (DOM0, create(1, Domid::new(7)), Err(E::NoSuchDomain)),
        (DOM0, create(1, GUEST), Ok(())),
        // Another device of the bus shares the space: no other domain gets one.
        (DOM0, create(1, OTHER), Err(E::SpaceExists)),
        (DOM0, create(2, OTHER), Ok(())),
        (Domid::new(7), map(1, 5, 0, RW), Err(E::NoSuchDomain)),
        (OTHER, map(1, 5, 0, RW), Err(E::NoSpace)),
        (DOM0, map(1, 5, 0, RW), Err(E::NoSpace)),
        (GUEST, map(3, 5, 0, RW), Err(E::NoSpace)),
        (GUEST, map(1, 5, PAGES, RW), Err(E::NoFrame)),
        (GUEST, map(1, 5, u64::MAX, RW), Err(E::NoFrame)),
        (GUEST, map(1, 1 << 20, 0, RW), Err(E::BeyondSpace)),
        (GUEST, map(1, u64::MAX, 0, RW), Err(E::BeyondSpace)),
        (GUEST, map(1, 5, 3, READ), Ok(())),
        (GUEST, map(1, 5, 4, RW), Err(E::Occupied)),
        (OTHER, unmap(1, 5, Now), Err(E::NoSpace)),
        (GUEST, unmap(1, 6, Now), Err(E::NotMapped)),
        (GUEST, unmap(1, u64::MAX, Now), Err(E::NotMapped)),
        (OTHER, FlushIoSpace { bdf: on(1) }, Err(E::NoSpace)),
        (GUEST, MapWholeGuest { bdf: on(1) }, Err(E::Occupied)),
        (GUEST, unmap(1, 5, Deferred), Ok(())),
        (GUEST, FlushIoSpace { bdf: on(1) }, Ok(())),
        (GUEST, map(1, 5, 4, RW), Ok(())),
        (GUEST, destroy(1), Err(E::NotPrivileged)),
        (DOM0, destroy(4), Err(E::NoSpace)),
        (DOM0, destroy(1), Ok(())),
        (GUEST, map(1, 5, 3, RW), Err(E::NoSpace)),
        (DOM0, create(1, OTHER), Ok(())),
    ];
    for (number, (caller, call, expected)) in cases.into_iter().enumerate() {
        assert_eq!(machine.call(caller, call), expected, "{number}: {call:?}");
    }
    // The new owner's space is empty, and the old owner's frame is free to go.
    assert_eq!(machine.reach(1, 5, Access::Read), None);
    assert_eq!(machine.xen.decrease_reservation(GUEST, 4), Ok(()));
}

/// CG06: a device reaches a page from the map to the unmap, with the rights of the map.
#[test]
fn entries_on_demand_open_only_what_is_in_use() {
    let mut machine = Machine::with_spaces(FrameReferences::Counted);
    machine.ok(GUEST, map(1, 100, 7, READ));
    let frame = PhysAddr::new(base(GUEST) + 7 * 4096);
    assert_eq!(machine.reach(1, 100, Access::Read), Some(frame));
    assert_eq!(machine.reach(1, 100, Access::Write), None);
    assert_eq!(machine.reach(1, 7, Access::Read), None);
    assert_eq!(machine.reach(2, 100, Access::Read), None, "the other bus");
    machine.ok(GUEST, unmap(1, 100, TceFlush::Now));
    assert_eq!(machine.reach(1, 100, Access::Read), None);
}

/// CG11: until the flush, the device reaches the page, and the page stays with its owner.
#[test]
fn a_deferred_flush_keeps_the_frame_and_never_longer() {
    let mut machine = Machine::with_spaces(FrameReferences::Counted);
    let frame = Some(PhysAddr::new(base(GUEST) + 7 * 4096));
    machine.ok(GUEST, map(1, 100, 7, RW));
    assert_eq!(machine.reach(1, 100, Access::Write), frame);
    machine.ok(GUEST, unmap(1, 100, TceFlush::Deferred));
    assert_eq!(machine.reach(1, 100, Access::Write), frame, "still cached");
    let busy = Err(XenError::Busy);
    assert_eq!(machine.xen.decrease_reservation(GUEST, 7), busy);
    assert_eq!(
        machine.xen.transfer(GUEST, 7, OTHER, PAGES - 1),
        Err(XenError::Occupied)
    );
    machine.ok(GUEST, IommuOp::FlushIoSpace { bdf: on(1) });
    assert_eq!(machine.reach(1, 100, Access::Write), None);
    assert_eq!(machine.xen.decrease_reservation(GUEST, 7), Ok(()));
    // A guest that reuses the entry without a flush makes the hypervisor flush.
    machine.ok(GUEST, map(1, 100, 8, RW));
    let old = machine.reach(1, 100, Access::Write);
    machine.ok(GUEST, unmap(1, 100, TceFlush::Deferred));
    machine.ok(GUEST, map(1, 100, 9, RW));
    assert_ne!(machine.reach(1, 100, Access::Write), old);
    assert_eq!(machine.xen.stats().forced_flushes, 1);
    assert_eq!(machine.xen.decrease_reservation(GUEST, 8), Ok(()));
}

/// CG12: a multicall is one crossing; a refused call stops no other; its length is bounded.
#[test]
fn a_multicall_crosses_once() {
    let mut machine = Machine::with_spaces(FrameReferences::Counted);
    let before = machine.xen.stats();
    let calls: Vec<_> = [0, 1, PAGES, 3]
        .iter()
        .map(|&gpfn| map(1, gpfn, gpfn, RW))
        .collect();
    let mut results = Vec::new();
    let done = machine
        .xen
        .multicall(GUEST, calls.iter(), |_, result| results.push(result));
    assert_eq!(done, Ok(()));
    assert_eq!(results, [Ok(()), Ok(()), Err(XenError::NoFrame), Ok(())]);
    let stats = machine.xen.stats();
    assert_eq!(stats.hypercalls - before.hypercalls, 1);
    assert_eq!(stats.calls - before.calls, 4);
    let long = vec![map(1, 50, 50, RW); MAX_MULTICALL + 1];
    let done = machine
        .xen
        .multicall(GUEST, long.iter(), |_, _| panic!("performed"));
    assert_eq!(done, Err(XenError::TooManyCalls));
    assert_eq!(machine.reach(1, 50, Access::Read), None);
}

/// CG07: DMA addresses equal guest pseudo-physical ones. The map isolates the guest from others and
/// protects nothing inside it.
#[test]
fn a_whole_guest_map_isolates_guests_and_not_buffers() {
    let mut machine = Machine::with_spaces(FrameReferences::Counted);
    machine.ok(GUEST, IommuOp::MapWholeGuest { bdf: on(1) });
    for gpfn in 0..PAGES {
        let frame = machine.xen.machine_address(GUEST, gpfn);
        for access in [Access::Read, Access::Write] {
            assert_eq!(machine.reach(1, gpfn, access), frame, "page {gpfn}");
        }
    }
    assert_eq!(machine.reach(1, PAGES, Access::Read), None);
    assert_eq!(machine.reach(2, 0, Access::Read), None);
    // One call at start-up, and none for each DMA.
    assert_eq!(machine.xen.stats().entries_moved, 0);
}

/// CG07: page flipping and ballooning under a whole-guest map, judged by the oracle. The hypervisor
/// either moves the entries (counted references), or the device reaches the frame that another
/// domain now has.
#[test]
fn page_flipping_breaks_a_whole_guest_map_that_xen_does_not_follow() {
    for (references, outcome) in [
        (FrameReferences::Counted, Verdict::Stopped),
        (FrameReferences::NotCounted, Verdict::Stale),
    ] {
        let mut machine = Machine::with_spaces(references);
        machine.ok(GUEST, IommuOp::MapWholeGuest { bdf: on(1) });
        // The other domain ballooned, so it has room for the flipped page.
        assert_eq!(machine.xen.decrease_reservation(OTHER, 9), Ok(()));
        machine.ok(OTHER, IommuOp::MapWholeGuest { bdf: on(2) });
        let follows = references == FrameReferences::Counted;
        let frame = machine.xen.machine_address(GUEST, 5).unwrap();
        assert_eq!(machine.reach(1, 5, Access::Write), Some(frame));
        let mut oracle = Oracle::new(Ownership::Page);
        let page = PhysRange::new(frame, 4096).unwrap();
        let iova = Pfn::new(5).iova();
        let range = ringfence_types::PfnRange::new(Pfn::new(5), 1)
            .unwrap()
            .iovas();
        let id = oracle.grant(0, range, &[page], Direction::FromDevice);
        let verdict = oracle.allowed(0, iova, 64, Access::Write, frame);
        assert_eq!(verdict, Verdict::Granted);
        // The received page moves to the other domain.
        oracle.release(id);
        assert_eq!(machine.xen.transfer(GUEST, 5, OTHER, 9), Ok(()));
        assert_eq!(machine.xen.owner(frame), Some(OTHER));
        assert_eq!(machine.xen.machine_address(OTHER, 9), Some(frame));
        let verdict = match machine.reach(1, 5, Access::Write) {
            Some(reached) => {
                assert_eq!(machine.xen.owner(reached), Some(OTHER), "a foreign frame");
                oracle.allowed(0, iova, 64, Access::Write, reached)
            }
            None => oracle.faulted(0, iova, 64, Access::Write),
        };
        assert_eq!(verdict, outcome, "{references:?}");
        let moved = machine.xen.stats().entries_moved;
        assert_eq!(moved > 0, follows);
        for access in [Access::Read, Access::Write] {
            let reached = machine.reach(2, 9, access);
            assert_eq!(
                reached,
                follows.then_some(frame),
                "the new owner: {access:?}"
            );
        }
        // The hole gets a new frame, which the map must follow: DMA address = guest page.
        assert_eq!(machine.xen.increase_reservation(GUEST, 5), Ok(()));
        let fresh = machine.xen.machine_address(GUEST, 5);
        assert_ne!(fresh, Some(frame));
        for access in [Access::Read, Access::Write] {
            let reached = machine.reach(1, 5, access);
            assert_eq!(reached == fresh, follows, "{references:?} {access:?}");
        }
    }
}

/// CG14: the hypercalls that map and unmap grants store and clear the entries of the driver
/// domain's device. Direct access to own pages has no grant.
#[test]
fn grants_open_a_page_to_the_driver_domains_device() {
    use XenError as E;
    let mut machine = Machine::with_spaces(FrameReferences::Counted);
    let frame = Some(PhysAddr::new(base(GUEST) + 7 * 4096));
    let xen = &mut machine.xen;
    let read_only = xen.grant_access(GUEST, DOM0, 7, READ).unwrap();
    let others = xen.grant_access(GUEST, OTHER, 7, RW).unwrap();
    let no_page = xen.grant_access(GUEST, DOM0, PAGES, RW).unwrap();
    let own = xen.grant_access(DOM0, DOM0, 7, RW).unwrap();
    let grant = |granter, reference, permissions, page| GrantMap {
        granter,
        reference,
        bdf: on(3),
        page: Pfn::new(page),
        permissions,
    };
    let cases = [
        (grant(GUEST, read_only, RW, 40), E::BadGrant),
        (grant(GUEST, others, RW, 40), E::BadGrant),
        (grant(GUEST, no_page, RW, 40), E::BadGrant),
        (grant(GUEST, GrantRef::new(999), RW, 40), E::BadGrant),
        (grant(DOM0, own, RW, 40), E::BadGrant),
        (grant(OTHER, GrantRef::new(0), RW, 40), E::BadGrant),
        (grant(GUEST, read_only, READ, 1 << 20), E::BeyondSpace),
    ];
    for (map, expected) in cases {
        let mut result = None;
        machine
            .xen
            .map_grants(DOM0, &[map], |r| result = Some(r))
            .unwrap();
        assert_eq!(result, Some(Err(expected)), "{map:?}");
        assert_eq!(machine.reach(3, 40, Access::Read), None, "{map:?}");
    }
    let crossings = machine.xen.stats().hypercalls;
    let mut handle = None;
    let good = grant(GUEST, read_only, READ, 40);
    machine
        .xen
        .map_grants(DOM0, &[good], |r| handle = r.ok())
        .unwrap();
    let handle = handle.unwrap();
    assert_eq!(machine.reach(3, 40, Access::Read), frame);
    assert_eq!(machine.reach(3, 40, Access::Write), None);
    // Until the unmap, neither the granter nor the hypervisor can remove the page.
    assert_eq!(machine.xen.end_access(GUEST, read_only), Err(E::Busy));
    assert_eq!(machine.xen.decrease_reservation(GUEST, 7), Err(E::Busy));
    let unmapped = machine.call(DOM0, unmap(3, 40, TceFlush::Now));
    assert_eq!(unmapped, Err(E::Busy), "the grant holds the entry");
    let mut results = Vec::new();
    let handles = [handle, handle, GrantHandle::new(77)];
    machine
        .xen
        .unmap_grants(DOM0, &handles, |r| results.push(r))
        .unwrap();
    assert_eq!(
        results,
        [Ok(()), Err(E::NoSuchHandle), Err(E::NoSuchHandle)]
    );
    assert_eq!(machine.reach(3, 40, Access::Read), None);
    // One crossing to map and one to unmap; the refused entry call is the third.
    assert_eq!(machine.xen.stats().hypercalls - crossings, 3 + 1);
    assert_eq!(machine.xen.end_access(GUEST, read_only), Ok(()));
    assert_eq!(machine.xen.decrease_reservation(GUEST, 7), Ok(()));
}

/// A call that a hostile guest may make.
#[derive(Debug, Clone)]
enum Action {
    Call(IommuOp),
    Balloon(u64),
    Inflate(u64),
    Flip(u64, u64),
    Grant(u64, bool),
    MapGrant(u32, u64, bool),
    UnmapGrant(u32),
    EndGrant(u32),
}

fn actions() -> impl Strategy<Value = (u16, Action)> {
    let bus = 1_u8..5;
    let page = prop_oneof![0_u64..6, Just(1 << 20), Just(u64::MAX)];
    let gpfn = prop_oneof![0_u64..4, Just(PAGES), Just(u64::MAX)];
    let rights = any::<bool>().prop_map(|write| if write { RW } else { READ });
    let flush = any::<bool>().prop_map(|now| {
        if now {
            TceFlush::Now
        } else {
            TceFlush::Deferred
        }
    });
    let call = prop_oneof![
        4 => (bus.clone(), page.clone(), gpfn.clone(), rights)
            .prop_map(|(bus, page, gpfn, rights)| map(bus, page, gpfn, rights)),
        4 => (bus.clone(), page.clone(), flush)
            .prop_map(|(bus, page, flush)| unmap(bus, page, flush)),
        1 => bus.clone().prop_map(|bus| IommuOp::FlushIoSpace { bdf: on(bus) }),
        1 => bus.clone().prop_map(|bus| IommuOp::DestroyIoSpace { bdf: on(bus) }),
        1 => (bus, 0_u16..4).prop_map(|(bus, domid)| IommuOp::CreateIoSpace {
            bdf: on(bus),
            domid: Domid::new(domid),
        }),
    ];
    let action = prop_oneof![
        8 => call.prop_map(Action::Call),
        1 => gpfn.clone().prop_map(Action::Balloon),
        1 => gpfn.clone().prop_map(Action::Inflate),
        1 => (gpfn.clone(), gpfn.clone()).prop_map(|(from, to)| Action::Flip(from, to)),
        1 => (gpfn, any::<bool>()).prop_map(|(gpfn, write)| Action::Grant(gpfn, write)),
        2 => (0_u32..4, page, any::<bool>())
            .prop_map(|(number, page, write)| Action::MapGrant(number, page, write)),
        1 => (0_u32..4).prop_map(Action::UnmapGrant),
        1 => (0_u32..4).prop_map(Action::EndGrant),
    ];
    (0_u16..4, action)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    /// After any hypercalls, a device reaches only frames of the domain that owns its I/O space,
    /// and frames that other domains grant to that domain.
    #[test]
    fn no_sequence_of_hypercalls_opens_another_domains_frame(
        script in proptest::collection::vec(actions(), 1..60)
    ) {
        let mut machine = Machine::with_spaces(FrameReferences::Counted);
        // The reference: the domain of each bus, and the frames that grants may open to a domain.
        let mut spaces = BTreeMap::from([(1_u8, GUEST), (2, OTHER), (3, DOM0)]);
        let mut grants: BTreeMap<(Domid, GrantRef), (Domid, PhysAddr)> = BTreeMap::new();
        for (caller, action) in script {
            let caller = Domid::new(caller);
            let next = Domid::new((caller.get() + 1) % 3);
            match action {
                Action::Call(call) => {
                    let done = machine.call(caller, call);
                    match call {
                        IommuOp::CreateIoSpace { bdf, domid } if done.is_ok() => {
                            prop_assert_eq!(caller, DOM0);
                            prop_assert_eq!(spaces.insert(bdf.bus(), domid), None);
                        }
                        IommuOp::DestroyIoSpace { bdf } if done.is_ok() => {
                            prop_assert_eq!(caller, DOM0);
                            prop_assert!(spaces.remove(&bdf.bus()).is_some());
                        }
                        IommuOp::MapEntry { bdf, .. } | IommuOp::UnmapEntry { bdf, .. }
                            if done.is_ok() =>
                        {
                            prop_assert_eq!(spaces.get(&bdf.bus()), Some(&caller));
                        }
                        _ => {}
                    }
                }
                Action::Balloon(gpfn) => drop(machine.xen.decrease_reservation(caller, gpfn)),
                Action::Inflate(gpfn) => drop(machine.xen.increase_reservation(caller, gpfn)),
                Action::Flip(from, to) => drop(machine.xen.transfer(caller, from, next, to)),
                Action::Grant(gpfn, write) => {
                    let rights = if write { RW } else { READ };
                    let made = machine.xen.grant_access(caller, next, gpfn, rights);
                    let at = machine.xen.machine_address(caller, gpfn);
                    if let (Ok(made), Some(at)) = (made, at) {
                        grants.insert((caller, made), (next, at));
                    }
                }
                Action::MapGrant(number, page, write) => {
                    let granter = Domid::new((caller.get() + 2) % 3);
                    let bus = spaces.iter().find(|(_, owner)| **owner == caller);
                    let bus = bus.map_or(1, |(bus, _)| *bus);
                    let map = GrantMap {
                        granter,
                        reference: GrantRef::new(number),
                        bdf: on(bus),
                        page: Pfn::new(page),
                        permissions: if write { RW } else { READ },
                    };
                    let _ = machine.xen.map_grants(caller, &[map], |_| {});
                }
                Action::UnmapGrant(number) => {
                    let handles = [GrantHandle::new(number)];
                    let _ = machine.xen.unmap_grants(caller, &handles, |_| {});
                }
                Action::EndGrant(number) => {
                    let reference = GrantRef::new(number);
                    if machine.xen.end_access(caller, reference).is_ok() {
                        grants.remove(&(caller, reference));
                    }
                }
            }
            for bus in 1..5 {
                for page in 0..6 {
                    let Some(reached) = machine.reach(bus, page, Access::Read) else {
                        continue;
                    };
                    let Some(domain) = spaces.get(&bus) else {
                        panic!("bus {bus} has no space and reaches {reached}");
                    };
                    let owner = machine.xen.owner(reached);
                    let granted = grants
                        .iter()
                        .any(|((granter, _), (to, at))| {
                            owner == Some(*granter) && to == domain && *at == reached
                        });
                    prop_assert!(
                        owner == Some(*domain) || granted,
                        "bus {} of {} reaches {} of {:?}", bus, domain, reached, owner
                    );
                }
            }
        }
    }
}
