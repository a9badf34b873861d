//! Accesses through rings, and invalidations.

use ringfence_riommu_device::{InvalidateScope, InvalidateWord, register};
use ringfence_types::{Access, FaultReason, RequesterId, RingId};

use crate::rig::{DISK, READ, Rig, SLOTS, TABLES, WRITE, cached, riova};

#[test]
fn an_access_reaches_the_bytes_of_its_buffer_only() {
    let mut rig = Rig::started(&cached());
    rig.map(1, 3, 0x8123, 100, READ);
    assert_eq!(rig.reads(riova(1, 3, 0), 100), Ok(0x8123));
    assert_eq!(rig.reads(riova(1, 3, 99), 1), Ok(0x8123 + 99));
    for (offset, bytes) in [(0, 101), (99, 2), (100, 1), (4096, 1)] {
        let reads = rig.reads(riova(1, 3, offset), bytes);
        assert_eq!(reads, Err(FaultReason::BeyondBuffer), "{offset} {bytes}");
    }
    let write = rig.access(riova(1, 3, 0), 4, Access::Write);
    assert_eq!(write.unwrap_err().reason, FaultReason::WriteDenied);
}

#[test]
fn each_table_that_ends_early_has_its_reason() {
    let mut rig = Rig::started(&cached());
    let rings = TABLES.len() as u64;
    let cases = [
        (riova(0, 0, 0), FaultReason::NotPresent),
        (riova(0, SLOTS, 0), FaultReason::SlotBeyondRing),
        (riova(rings, 0, 0), FaultReason::RingBeyondDevice),
    ];
    for (iova, reason) in cases {
        assert_eq!(rig.reads(iova, 4), Err(reason), "{iova:#x}");
    }
}

/// Each scope removes what it names: the ring, the device, everything. The other ring of the device
/// stays cached, so an invalidation of a ring is not one of the device.
#[test]
fn each_scope_removes_the_cached_slots_that_it_names() {
    let cases = [
        (InvalidateScope::Ring(DISK, RingId::new(0)), true),
        (InvalidateScope::Device(DISK), false),
        (InvalidateScope::All, false),
    ];
    for (scope, other_stays) in cases {
        let mut rig = Rig::started(&cached());
        for ring in [0, 1] {
            rig.map(ring, 0, 0x8000, 64, READ | WRITE);
            assert!(rig.reads(riova(ring as u64, 0, 0), 4).is_ok());
            rig.clear(ring, 0);
            assert!(rig.reads(riova(ring as u64, 0, 0), 4).is_ok(), "cached");
        }
        rig.invalidate(scope);
        let first = rig.reads(riova(0, 0, 0), 4);
        assert_eq!(first, Err(FaultReason::NotPresent), "{scope:?}");
        assert_eq!(
            rig.reads(riova(1, 0, 0), 4).is_ok(),
            other_stays,
            "{scope:?}"
        );
        assert_eq!(rig.status(), 0);
    }
}

/// A removed context entry stays cached over an invalidation of a ring, not over one of the device.
#[test]
fn the_cached_context_goes_with_its_device() {
    let cases = [
        (InvalidateScope::Ring(DISK, RingId::new(0)), Ok(0x8000)),
        (
            InvalidateScope::Device(DISK),
            Err(FaultReason::ContextNotPresent),
        ),
        (InvalidateScope::All, Err(FaultReason::ContextNotPresent)),
    ];
    for (scope, expected) in cases {
        let mut rig = Rig::started(&cached());
        rig.map(0, 0, 0x8000, 64, READ);
        assert!(rig.reads(riova(0, 0, 0), 4).is_ok());
        rig.remove_context();
        assert!(rig.reads(riova(0, 0, 0), 4).is_ok(), "cached");
        rig.invalidate(scope);
        assert_eq!(rig.reads(riova(0, 0, 0), 4), expected, "{scope:?}");
    }
}

#[test]
fn another_devices_invalidation_removes_nothing() {
    let other = RequesterId::new(DISK.get() + 1);
    for scope in [
        InvalidateScope::Ring(other, RingId::new(0)),
        InvalidateScope::Device(other),
    ] {
        let mut rig = Rig::started(&cached());
        rig.map(0, 0, 0x8000, 64, READ);
        assert!(rig.reads(riova(0, 0, 0), 4).is_ok());
        rig.clear(0, 0);
        rig.invalidate(scope);
        assert!(rig.reads(riova(0, 0, 0), 4).is_ok(), "{scope:?}");
    }
}

/// A driver that writes a reserved value has no stale entries left, and can see its error.
#[test]
fn a_malformed_invalidation_removes_everything() {
    let ring_0 = InvalidateWord::new(InvalidateScope::Ring(DISK, RingId::new(0))).get();
    let words = [
        3 << 32,
        ring_0 | 1 << 34,
        ring_0 | 1 << 63,
        // A ring in an invalidation of the device; a device in one of everything.
        ring_0 | 1 << 32 | 1 << 16,
        2 << 32 | 1,
    ];
    for word in words {
        let mut rig = Rig::started(&cached());
        rig.map(1, 0, 0x8000, 64, READ);
        assert!(rig.reads(riova(1, 0, 0), 4).is_ok());
        rig.clear(1, 0);
        rig.device.write(register::INV, 8, word);
        let reads = rig.reads(riova(1, 0, 0), 4);
        assert_eq!(reads, Err(FaultReason::NotPresent), "{word:#x}");
        assert_eq!(rig.status(), register::BAD_INVALIDATION.into());
        let bit = register::BAD_INVALIDATION.into();
        rig.device.write(register::STS, 4, bit);
        assert_eq!(rig.status(), 0);
    }
}

/// The copy of the next slot goes with the ring's entry.
#[test]
fn the_prefetched_slot_is_invalidated_with_its_ring() {
    let mut rig = Rig::started(&cached());
    rig.map(0, 0, 0x8000, 64, READ);
    rig.map(0, 1, 0x9000, 64, READ);
    assert_eq!(rig.reads(riova(0, 0, 0), 4), Ok(0x8000));
    rig.clear(0, 1);
    let ring = RingId::new(0);
    rig.invalidate(InvalidateScope::Ring(DISK, ring));
    assert_eq!(rig.reads(riova(0, 1, 0), 4), Err(FaultReason::NotPresent));
}
