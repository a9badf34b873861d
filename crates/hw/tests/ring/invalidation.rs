//! Scope of each invalidation request, lifetime of cached state, and capacity.

use ringfence_hw::{FixedLogic, Prefetch, Replacement, RingUnitConfig};
use ringfence_pgtable::{RingPte, RingTable, ring_words};
use ringfence_types::FaultReason::{NotPresent, RingBeyondDevice, SlotBeyondRing};
use ringfence_types::{
    CachedLevels, Invalidation, InvalidationError, Invalidator, PfnRange, RingId, RingIova,
    RingSlot, Ticket,
};

use crate::rig::{
    DEVICES, NIC, RINGS, RW, Rig, SSD, arena, geometry, iova, number, pa, pte, ring_request, roomy,
};

#[test]
fn scopes() {
    let slot =
        |ring, slot| RingIova::start(RingId::new(ring), RingSlot::new(slot).unwrap()).slot_pages();
    let pages = |range| Invalidation::Pages {
        domain: DEVICES[0].1,
        range,
        levels: CachedLevels::Leaves,
    };
    let two = PfnRange::inclusive(slot(1, 0).hi(), slot(2, 0).lo()).unwrap();
    // Expected hits afterwards: rings 1 and 2 of the first device, ring 1 of the second.
    let cases = [
        ("ring", ring_request(NIC, 1), [false, true, true]),
        (
            "ring of the other",
            ring_request(SSD, 1),
            [true, true, false],
        ),
        ("a ring that is not cached", ring_request(NIC, 3), [true; 3]),
        ("a slot's pages", pages(slot(1, 0)), [false, true, true]),
        (
            "pages of another slot",
            pages(slot(1, 9)),
            [false, true, true],
        ),
        ("pages of two rings", pages(two), [false, false, true]),
        (
            "domain",
            Invalidation::Domain(DEVICES[0].1),
            [false, false, true],
        ),
        (
            "the other domain",
            Invalidation::Domain(DEVICES[1].1),
            [true, true, false],
        ),
        ("device", Invalidation::Context(SSD), [true, true, false]),
        ("everything", Invalidation::Global, [false; 3]),
    ];
    let mem = arena();
    for (name, request, left) in cases {
        let mut rig = Rig::<FixedLogic>::new(&mem, &roomy(Prefetch::Immediate), 8);
        let rings = [(NIC, 1), (NIC, 2), (SSD, 1)];
        for (device, ring) in rings {
            for slot in 0..2 {
                rig.map(device, ring, slot, pte(0x7000, 64, RW));
            }
            assert!(rig.touch(device, ring, 0).is_ok());
            rig.unmap(device, ring, 0);
            rig.unmap(device, ring, 1);
        }
        let ticket = rig.unit.submit(request).unwrap();
        assert_eq!(rig.unit.poll(ticket), Ok(true));
        for ((device, ring), left) in rings.into_iter().zip(left) {
            let before = rig.unit.stats().prefetch_hits;
            let stale = [0, 1].map(|slot| rig.touch(device, ring, slot).is_ok());
            assert_eq!(stale, [left; 2], "{name}: {device} ring {ring}");
            let by_prefetch = rig.unit.stats().prefetch_hits - before;
            assert_eq!(
                by_prefetch,
                u64::from(left),
                "{name}: the copy of the next slot"
            );
        }
        assert_eq!(rig.unit.stats().invalidations.total(), 1);
    }
    let mut rig = Rig::<FixedLogic>::new(&mem, &roomy(Prefetch::Immediate), 8);
    let unknown = rig.unit.poll(Ticket::new(1));
    assert_eq!(unknown, Err(InvalidationError::Failed));
}

/// The table in the documentation of [`ringfence_hw::RingUnit`]: an rRING is cached as long as the
/// ring's entry, an rDEVICE as long as the context.
#[test]
fn lifetime_of_cached_entries() {
    let mem = arena();
    let mut rig = Rig::<FixedLogic>::new(&mem, &roomy(Prefetch::Immediate), 8);
    for slot in 0..8 {
        rig.map(NIC, 0, slot, pte(0x7000, 64, RW));
    }
    assert!(rig.touch(NIC, 0, 0).is_ok());
    // Shrink the ring to two slots.
    let words = ring_words(&mem, Rig::<FixedLogic>::ring(NIC, 0)).unwrap();
    let [base, _] = words
        .each_ref()
        .map(|word| word.load(std::sync::atomic::Ordering::Relaxed));
    RingTable::clear(words);
    RingTable::new(pa(base), 2).unwrap().store(words);
    assert!(rig.touch(NIC, 0, 5).is_ok(), "still the old one");
    rig.invalidate(NIC, 0);
    assert_eq!(rig.touch(NIC, 0, 5), Err((iova(0, 5, 0), SlotBeyondRing)));
    assert!(rig.touch(NIC, 0, 1).is_ok());
    // Remove all rings of the device.
    ringfence_pgtable::RingDevice::clear(ring_words(&mem, Rig::<FixedLogic>::device(NIC)).unwrap());
    rig.invalidate(NIC, 0);
    assert!(
        rig.touch(NIC, 0, 1).is_ok(),
        "the rDEVICE is cached with the context"
    );
    rig.unit.invalidate(&Invalidation::Context(NIC));
    assert_eq!(rig.touch(NIC, 0, 1), Err((iova(0, 1, 0), RingBeyondDevice)));
}

/// At most one entry per ring, and at most as many rings as the geometry allows.
#[test]
fn capacity() {
    let mem = arena();
    for (rings, replacement, target) in [
        (1, Replacement::Lru, 2),
        (2, Replacement::Lru, 1),
        (2, Replacement::Fifo, 0),
        (4, Replacement::Lru, u16::MAX),
    ] {
        let config = RingUnitConfig {
            riotlb: geometry(1, rings),
            replacement,
            ..roomy(Prefetch::Immediate)
        };
        let mut rig = Rig::<FixedLogic>::new(&mem, &config, 8);
        for ring in 0..4 {
            for slot in 0..8 {
                rig.map(NIC, ring, slot, pte(0x7000, 64, RW));
            }
        }
        for slot in 0..8 {
            assert!(rig.touch(NIC, 0, slot).is_ok());
        }
        assert_eq!(rig.unit.riotlb_live(), 1, "eight slots, one entry");
        for ring in [1, 0, 2] {
            assert!(rig.touch(NIC, ring, 0).is_ok());
        }
        assert_eq!(rig.unit.riotlb_live(), rings.min(3));
        let evicted = rig.unit.stats().evictions;
        assert_eq!(evicted > 0, target != u16::MAX);
        if target < 2 {
            for slot in 0..8 {
                rig.unmap(NIC, target, slot);
            }
            assert_eq!(
                rig.touch(NIC, target, 0),
                Err((iova(target, 0, 0), NotPresent))
            );
        }
    }
}

/// Entries are keyed by bus, function and ring: the same ring number of another device is a
/// different entry, also if only the bus or only the function differs.
#[test]
fn every_device_and_ring_has_its_own() {
    let mem = arena();
    let mut rig = Rig::<FixedLogic>::new(&mem, &roomy(Prefetch::Immediate), 2);
    let address_of =
        |device, ring: u16| 0x10_0000 + (u64::from(ring) << 12) + (number(device) << 16);
    let devices = DEVICES.map(|(device, _)| device);
    for device in devices {
        for ring in 0..RINGS {
            RingPte::store(
                pte(address_of(device, ring), 64, RW),
                rig.words(device, ring, 0),
            );
        }
    }
    for _ in 0..2 {
        for ring in 0..RINGS {
            for device in devices {
                assert_eq!(
                    rig.touch(device, ring, 0),
                    Ok((address_of(device, ring), 1))
                );
            }
        }
    }
    let entries = devices.len() as u64 * u64::from(RINGS);
    assert_eq!(
        (rig.unit.stats().misses, rig.unit.stats().hits),
        (entries, entries)
    );
}
