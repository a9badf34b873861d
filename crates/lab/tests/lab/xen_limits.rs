//! Xen's refusals: nothing changes, and the references to frames stay exact.

use ringfence_lab::guest::HostUnit;
use ringfence_lab::layer::TimedInvalidationQueue;
use ringfence_lab::xen::{
    Domid, FrameReferences, GrantHandle, GrantMap, GrantRef, IommuOp, MAX_MULTICALL, TceFlush,
    XenError as E,
};
use ringfence_types::{Access, Pfn, PhysAddr};

use crate::xen::*;

/// Entries of a grant table, and handles of a domain (Xen 3).
const GRANTS: u64 = 1 << 14;
/// The bus of dom0, the driver domain.
const DRIVER: u8 = 3;

fn machine() -> Machine {
    Machine::with_spaces(FrameReferences::Counted)
}

fn frame(gpfn: u64) -> Option<PhysAddr> {
    Some(PhysAddr::new(base(GUEST) + gpfn * 4096))
}

/// A map of the guest's grant at a page of the driver domain's device.
fn grant_map(reference: GrantRef, page: u64) -> GrantMap {
    GrantMap {
        granter: GUEST,
        reference,
        bdf: on(DRIVER),
        page: Pfn::new(page),
        permissions: RW,
    }
}

impl Machine {
    fn grant(&mut self, gpfn: u64) -> GrantRef {
        self.xen.grant_access(GUEST, DOM0, gpfn, RW).unwrap()
    }

    fn map_grant(&mut self, reference: GrantRef, page: u64) -> Result<GrantHandle, E> {
        let mut result = Err(E::BadGrant);
        let map = [grant_map(reference, page)];
        self.xen.map_grants(DOM0, &map, |r| result = r).unwrap();
        result
    }

    fn unmap_grant(&mut self, handle: GrantHandle) -> Result<(), E> {
        let mut result = Err(E::BadGrant);
        let done = self.xen.unmap_grants(DOM0, &[handle], |r| result = r);
        done.and(result)
    }

    /// Adds a second space of the guest, for bus 4.
    fn second_space(&mut self) {
        let (bdf, domid) = (on(4), GUEST);
        self.ok(DOM0, IommuOp::CreateIoSpace { bdf, domid });
    }

    /// Calls `act` while every flush fails.
    fn broken<R>(&mut self, act: impl FnOnce(&mut Self) -> R) -> R {
        let outside = PhysAddr::new(1 << 40);
        let queue = TimedInvalidationQueue::new(self.arena.clone(), outside, outside);
        let unit = std::mem::replace(&mut self.xen.unit, HostUnit::CostOnly(queue));
        let result = act(self);
        self.xen.unit = unit;
        result
    }
}

/// CG14: a space keeps its owner while a grant holds an entry, so a handle never names an entry of
/// the next owner.
#[test]
fn a_space_is_not_destroyed_while_a_grant_holds_an_entry() {
    let mut machine = machine();
    let destroy = IommuOp::DestroyIoSpace { bdf: on(DRIVER) };
    let reference = machine.grant(7);
    let handle = machine.map_grant(reference, 40).unwrap();
    assert_eq!(machine.call(DOM0, destroy), Err(E::Busy));
    assert_eq!(machine.reach(DRIVER, 40, Access::Write), frame(7));
    assert_eq!(machine.unmap_grant(handle), Ok(()));
    machine.ok(DOM0, destroy);
    let (bdf, domid) = (on(DRIVER), OTHER);
    machine.ok(DOM0, IommuOp::CreateIoSpace { bdf, domid });
    machine.ok(OTHER, map(DRIVER, 40, 3, RW));
    assert_eq!(machine.unmap_grant(handle), Err(E::NoSuchHandle));
    let of_other = Some(PhysAddr::new(base(OTHER) + 3 * 4096));
    assert_eq!(machine.reach(DRIVER, 40, Access::Write), of_other);
}

/// CG12, CG14: batches of grants have the bound of a multicall.
#[test]
fn batches_of_grants_are_bounded() {
    let mut machine = machine();
    let reference = machine.grant(7);
    let maps = |count: usize| -> Vec<_> {
        let pages = 0..count as u64;
        pages.map(|page| grant_map(reference, page)).collect()
    };
    let long = maps(MAX_MULTICALL + 1);
    let done = machine.xen.map_grants(DOM0, &long, |_| panic!("mapped"));
    assert_eq!(done, Err(E::TooManyCalls));
    assert_eq!(machine.reach(DRIVER, 0, Access::Read), None);
    let mut handles = Vec::new();
    let full = maps(MAX_MULTICALL);
    let each = |handle: Result<_, _>| handles.push(handle.unwrap());
    machine.xen.map_grants(DOM0, &full, each).unwrap();
    handles.push(GrantHandle::new(77));
    let xen = &mut machine.xen;
    let done = xen.unmap_grants(DOM0, &handles, |_| panic!("unmapped"));
    assert_eq!(done, Err(E::TooManyCalls));
    assert_eq!(machine.reach(DRIVER, 0, Access::Read), frame(7));
    handles.pop();
    let each = |result| assert_eq!(result, Ok(()));
    machine.xen.unmap_grants(DOM0, &handles, each).unwrap();
    assert_eq!(machine.reach(DRIVER, 0, Access::Read), None);
}

/// CG07: a page in a whole-guest map and in an entry on demand keeps both, because it does not
/// move.
#[test]
fn a_page_with_an_entry_on_demand_keeps_its_whole_guest_entry() {
    type Move = fn(&mut Machine) -> Result<(), E>;
    let mut machine = machine();
    machine.second_space();
    machine.ok(GUEST, IommuOp::MapWholeGuest { bdf: on(1) });
    machine.ok(GUEST, map(4, 100, 5, RW));
    assert_eq!(machine.xen.decrease_reservation(OTHER, 9), Ok(()));
    let moves: [Move; 2] = [
        |machine| machine.xen.decrease_reservation(GUEST, 5),
        |machine| machine.xen.transfer(GUEST, 5, OTHER, 9),
    ];
    for leave in moves {
        assert_eq!(leave(&mut machine), Err(E::Busy));
        assert_eq!(machine.reach(1, 5, Access::Write), frame(5));
        assert_eq!(machine.reach(4, 100, Access::Write), frame(5));
        assert_eq!(machine.xen.stats().entries_moved, 0);
    }
    machine.ok(GUEST, unmap(4, 100, TceFlush::Now));
    assert_eq!(machine.xen.decrease_reservation(GUEST, 5), Ok(()));
    assert_eq!(machine.reach(1, 5, Access::Write), None);
}

/// CG07: a guest that used the hole of a whole-guest map for an entry of its own keeps that entry,
/// and the new frame has no reference. An entry whose flush is due is flushed first.
#[test]
fn a_used_hole_keeps_its_entry() {
    let mut machine = machine();
    machine.ok(GUEST, IommuOp::MapWholeGuest { bdf: on(1) });
    assert_eq!(machine.xen.decrease_reservation(GUEST, 5), Ok(()));
    machine.ok(GUEST, map(1, 5, 6, RW));
    assert_eq!(machine.xen.increase_reservation(GUEST, 5), Ok(()));
    assert_eq!(machine.reach(1, 5, Access::Write), frame(6));
    assert_eq!(machine.xen.decrease_reservation(GUEST, 5), Ok(()));
    machine.ok(GUEST, unmap(1, 5, TceFlush::Deferred));
    assert_eq!(machine.reach(1, 5, Access::Write), frame(6), "still cached");
    assert_eq!(machine.xen.increase_reservation(GUEST, 5), Ok(()));
    assert_eq!(machine.reach(1, 5, Access::Write), frame(5));
    assert_eq!(machine.xen.stats().forced_flushes, 1);
}

/// Only a hole of the memory that a domain began with takes a frame.
#[test]
fn a_frame_goes_only_to_a_hole() {
    let mut machine = machine();
    assert_eq!(machine.xen.decrease_reservation(OTHER, 9), Ok(()));
    for (domid, gpfn, expected) in [
        (GUEST, 5, E::Occupied),
        (GUEST, PAGES, E::NoFrame),
        (GUEST, u64::MAX, E::NoFrame),
        (Domid::new(7), 0, E::NoSuchDomain),
    ] {
        let given = machine.xen.increase_reservation(domid, gpfn);
        assert_eq!(given, Err(expected), "{domid}: {gpfn}");
        let moved = machine.xen.transfer(OTHER, 3, domid, gpfn);
        assert_eq!(moved, Err(expected), "{domid}: {gpfn}");
        let kept = machine.xen.machine_address(OTHER, 3);
        assert_eq!(kept, Some(PhysAddr::new(base(OTHER) + 3 * 4096)));
    }
    assert_eq!(machine.xen.increase_reservation(OTHER, 9), Ok(()));
}

/// CG14: grant tables and handles are bounded.
#[test]
fn grants_and_handles_are_bounded() {
    let mut machine = machine();
    let references: Vec<_> = (0..GRANTS).map(|_| machine.grant(7)).collect();
    let more = machine.xen.grant_access(GUEST, DOM0, 7, RW);
    assert_eq!(more, Err(E::NoMemory));
    let last = references[GRANTS as usize - 1];
    assert_eq!(machine.xen.end_access(GUEST, last), Ok(()));
    assert_eq!(machine.grant(7), last);
    let mut handle = None;
    for page in 0..GRANTS {
        handle = Some(machine.map_grant(last, page).unwrap());
    }
    assert_eq!(machine.map_grant(last, GRANTS), Err(E::NoMemory));
    assert_eq!(machine.reach(DRIVER, GRANTS, Access::Read), None);
    assert_eq!(machine.unmap_grant(handle.unwrap()), Ok(()));
    assert!(machine.map_grant(last, GRANTS).is_ok());
}

/// The count of a frame's references never wraps: the frame would look free.
#[test]
fn references_of_a_frame_are_bounded() {
    let mut machine = machine();
    let limit = u64::from(u16::MAX);
    for page in 0..limit {
        machine.ok(GUEST, map(1, page, 7, RW));
    }
    assert_eq!(machine.call(GUEST, map(1, limit, 7, RW)), Err(E::NoMemory));
    assert_eq!(machine.reach(1, limit, Access::Read), None);
    assert_eq!(machine.xen.decrease_reservation(GUEST, 7), Err(E::Busy));
    machine.ok(GUEST, unmap(1, 0, TceFlush::Now));
    machine.ok(GUEST, map(1, limit, 7, RW));
    assert_eq!(machine.reach(1, limit, Access::Read), frame(7));
}

/// After a failed flush the device may still reach the frame, so the frame keeps its owner until a
/// flush succeeds.
#[test]
fn frames_stay_referenced_after_a_failed_flush() {
    let failed = Err(E::FlushFailed);
    let entry = |machine: &mut Machine| machine.ok(GUEST, map(1, 100, 7, RW));
    let whole = |machine: &mut Machine| machine.ok(GUEST, IommuOp::MapWholeGuest { bdf: on(1) });
    let deferred = |machine: &mut Machine| {
        machine.ok(GUEST, map(1, 100, 7, RW));
        machine.reach(1, 100, Access::Write);
        machine.ok(GUEST, unmap(1, 100, TceFlush::Deferred));
    };
    type Step<'a> = (
        &'a str,
        u64,
        &'a dyn Fn(&mut Machine),
        &'a dyn Fn(&mut Machine) -> Result<(), E>,
    );
    let flush = IommuOp::FlushIoSpace { bdf: on(1) };
    let destroy = IommuOp::DestroyIoSpace { bdf: on(1) };
    let cases: [Step<'_>; 6] = [
        ("unmap", 100, &entry, &|machine| {
            machine.call(GUEST, unmap(1, 100, TceFlush::Now))
        }),
        ("flush", 100, &deferred, &|machine| {
            machine.call(GUEST, flush)
        }),
        ("reuse", 100, &deferred, &|machine| {
            machine.call(GUEST, map(1, 100, 8, RW))
        }),
        ("balloon", 7, &whole, &|machine| {
            machine.xen.decrease_reservation(GUEST, 7)
        }),
        ("flip", 7, &whole, &|machine| {
            machine.xen.transfer(GUEST, 7, OTHER, 9)
        }),
        ("destroy", 100, &entry, &|machine| {
            machine.call(DOM0, destroy)
        }),
    ];
    for (name, page, before, call) in cases {
        let mut machine = machine();
        assert_eq!(machine.xen.decrease_reservation(OTHER, 9), Ok(()));
        before(&mut machine);
        let cached = machine.reach(1, page, Access::Write);
        assert_eq!(cached, frame(7), "{name}");
        assert_eq!(machine.broken(call), failed, "{name}");
        // The unit still holds the translation.
        let reached = machine.reach(1, page, Access::Write);
        assert_eq!(reached, frame(7), "{name}");
        assert_eq!(machine.xen.owner(frame(7).unwrap()), Some(GUEST), "{name}");
        let leave = machine.xen.decrease_reservation(GUEST, 7);
        assert_eq!(leave, Err(E::Busy), "{name}");
        machine.ok(GUEST, flush);
        assert_eq!(machine.reach(1, page, Access::Write), None, "{name}");
        let leave = machine.xen.decrease_reservation(GUEST, 7);
        assert_eq!(leave, Ok(()), "{name}");
    }
}

/// CG14: the same for the unmap of a grant, whose handle is gone.
#[test]
fn a_grants_frame_stays_referenced_after_a_failed_flush() {
    let mut machine = machine();
    let reference = machine.grant(7);
    let handle = machine.map_grant(reference, 40).unwrap();
    assert_eq!(machine.reach(DRIVER, 40, Access::Write), frame(7));
    let failed = machine.broken(|machine| machine.unmap_grant(handle));
    assert_eq!(failed, Err(E::FlushFailed));
    assert_eq!(machine.reach(DRIVER, 40, Access::Write), frame(7));
    assert_eq!(machine.unmap_grant(handle), Err(E::NoSuchHandle));
    assert_eq!(machine.xen.decrease_reservation(GUEST, 7), Err(E::Busy));
    machine.ok(DOM0, IommuOp::FlushIoSpace { bdf: on(DRIVER) });
    assert_eq!(machine.reach(DRIVER, 40, Access::Write), None);
    assert_eq!(machine.xen.decrease_reservation(GUEST, 7), Ok(()));
}
