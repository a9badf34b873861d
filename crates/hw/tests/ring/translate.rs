//! Single accesses: translations, and every fault reason.

use ringfence_hw::{FixedLogic, Prefetch, RingUnitConfig, Translate};
use ringfence_pgtable::{MAX_RING_BUFFER, MAX_RING_SLOTS};
use ringfence_types::FaultReason::*;
use ringfence_types::{Iova, PhysAddr, RequesterId};

use crate::rig::{
    HBA, NIC, NOBODY, R, READ, RW, Rig, SSD, W, WRITE, arena, geometry, iova, pte, roomy,
};
use crate::ring_logic::LogicAsPublished;

#[test]
fn buffers_of_any_place_and_length() {
    let mem = arena();
    for config in [
        roomy(Prefetch::Immediate),
        roomy(Prefetch::Deferred),
        roomy(Prefetch::Absent),
        RingUnitConfig::UNCACHED,
    ] {
        let mut rig = Rig::<FixedLogic>::new(&mem, &config, 8);
        let slots = [
            (0, pte(0x1234_5677, 1, RW)),
            (1, pte(0x1234_5678, 1500, R)),
            (2, pte(0x1234_5c54, 1500, W)),
            (3, pte(0xffff_ffff_0000_0001, MAX_RING_BUFFER, RW)),
        ];
        for (slot, entry) in slots {
            rig.map(SSD, 3, slot, entry);
        }
        // In ring order, then out of order, which is also allowed.
        for index in [0, 1, 2, 3, 3, 1, 0, 2, 1] {
            let (slot, entry) = slots[index];
            let start = entry.start().get();
            let size = entry.bytes();
            let last = (size - 1) as u32;
            for access in [READ, WRITE] {
                let whole = rig.dma(SSD, iova(3, slot, 0), size, access);
                let tail = rig.dma(SSD, iova(3, slot, last), 1, access);
                if entry.allows(access) {
                    assert_eq!(whole, Ok((start, size)));
                    // The device may access any offset inside the buffer.
                    assert_eq!(tail, Ok((start + u64::from(last), 1)));
                } else {
                    let denied = if access == READ {
                        ReadDenied
                    } else {
                        WriteDenied
                    };
                    assert_eq!(whole, Err((iova(3, slot, 0), denied)));
                    assert_eq!(tail, Err((iova(3, slot, last), denied)));
                }
            }
        }
    }
}

#[test]
fn every_reason_to_be_stopped() {
    let mem = arena();
    for config in [roomy(Prefetch::Immediate), RingUnitConfig::UNCACHED] {
        let mut rig = Rig::<FixedLogic>::new(&mem, &config, 8);
        rig.map(NIC, 0, 0, pte(0x5001, 100, RW));
        rig.map(NIC, 0, 1, pte(0x6000, MAX_RING_BUFFER, R));
        rig.map(NIC, 0, 3, pte(u64::MAX - 9, 10, RW));
        // An entry that no driver here writes: its buffer ends above the highest address.
        rig.map(NIC, 0, 4, pte(0, 100, RW));
        let [first, _] = rig.words(NIC, 0, 4);
        first.store(u64::MAX - 9, std::sync::atomic::Ordering::Relaxed);
        let last = u32::try_from(MAX_RING_BUFFER).unwrap();
        let cases = [
            (
                "one byte past the end",
                NIC,
                iova(0, 0, 100),
                1,
                READ,
                (iova(0, 0, 100), BeyondBuffer),
            ),
            (
                "ends one byte past",
                NIC,
                iova(0, 0, 99),
                2,
                READ,
                (iova(0, 0, 100), BeyondBuffer),
            ),
            (
                "the whole and one more",
                NIC,
                iova(0, 0, 0),
                101,
                WRITE,
                (iova(0, 0, 100), BeyondBuffer),
            ),
            (
                "far past",
                NIC,
                iova(0, 0, last),
                1,
                READ,
                (iova(0, 0, last), BeyondBuffer),
            ),
            (
                "the last offset of the longest",
                NIC,
                iova(0, 1, last),
                1,
                READ,
                (iova(0, 1, last), BeyondBuffer),
            ),
            (
                "into the next slot",
                NIC,
                iova(0, 1, last - 1),
                2,
                READ,
                (iova(0, 1, last), BeyondBuffer),
            ),
            (
                "2^30 bytes",
                NIC,
                iova(0, 1, 0),
                1 << 30,
                READ,
                (iova(0, 1, last), BeyondBuffer),
            ),
            (
                "more than any request",
                NIC,
                iova(0, 1, 0),
                (1 << 30) + 1,
                READ,
                (iova(0, 1, 0), BadLength),
            ),
            (
                "2^64 - 1 bytes",
                NIC,
                iova(0, 0, 1),
                u64::MAX,
                READ,
                (iova(0, 0, 1), BadLength),
            ),
            (
                "no bytes",
                NIC,
                iova(0, 0, 0),
                0,
                READ,
                (iova(0, 0, 0), BadLength),
            ),
            (
                "no bytes, nothing there",
                NIC,
                iova(0, 2, 0),
                0,
                READ,
                (iova(0, 2, 0), BadLength),
            ),
            (
                "direction",
                NIC,
                iova(0, 1, 7),
                1,
                WRITE,
                (iova(0, 1, 7), WriteDenied),
            ),
            (
                "an invalid slot",
                NIC,
                iova(0, 2, 0),
                1,
                READ,
                (iova(0, 2, 0), NotPresent),
            ),
            (
                "past the highest address",
                NIC,
                iova(0, 4, 9),
                2,
                READ,
                (iova(0, 4, 9), TableAccess),
            ),
            (
                "wrapped past it",
                NIC,
                iova(0, 4, 10),
                1,
                READ,
                (iova(0, 4, 10), TableAccess),
            ),
            (
                "a slot too many",
                NIC,
                iova(0, 8, 0),
                1,
                READ,
                (iova(0, 8, 0), SlotBeyondRing),
            ),
            (
                "the slot in no ring",
                NIC,
                iova(0, MAX_RING_SLOTS, 0),
                1,
                READ,
                (iova(0, MAX_RING_SLOTS, 0), SlotBeyondRing),
            ),
            (
                "a ring too many",
                NIC,
                iova(4, 0, 0),
                1,
                READ,
                (iova(4, 0, 0), RingBeyondDevice),
            ),
            (
                "the last address",
                NIC,
                Iova::new(u64::MAX),
                1,
                READ,
                (Iova::new(u64::MAX), RingBeyondDevice),
            ),
            (
                "another device's ring",
                SSD,
                iova(0, 0, 0),
                1,
                READ,
                (iova(0, 0, 0), NotPresent),
            ),
            (
                "a device without a context",
                NOBODY,
                iova(0, 0, 0),
                1,
                READ,
                (iova(0, 0, 0), ContextNotPresent),
            ),
        ];
        for (name, device, at, bytes, access, expected) in cases {
            // With and without an rIOTLB entry of the ring, and with another slot current.
            for before in [None, Some(0), Some(1)] {
                rig.invalidate(NIC, 0);
                if let Some(slot) = before {
                    assert!(rig.touch(NIC, 0, slot).is_ok());
                }
                let log = rig.unit.faults();
                while log.take().is_some() {}
                assert_eq!(
                    rig.dma(device, at, bytes, access),
                    Err(expected),
                    "{name} after {before:?}"
                );
                let record = rig.unit.faults().take().expect("recorded");
                assert_eq!(
                    (record.source, record.reason),
                    (device, expected.1.code()),
                    "{name}"
                );
            }
        }
        assert_eq!(rig.dma(NIC, iova(0, 3, 9), 1, READ), Ok((u64::MAX, 1)));
        assert_eq!(rig.dma(NIC, iova(0, 0, 99), 1, WRITE), Ok((0x5001 + 99, 1)));
    }
}

#[test]
fn logic_as_published_rejects_zero_length() {
    let mem = arena();
    let mut rig = Rig::<LogicAsPublished>::new(&mem, &roomy(Prefetch::Immediate), 4);
    rig.map(NIC, 0, 0, pte(0x5000, 100, RW));
    for _ in 0..2 {
        assert_eq!(
            rig.dma(NIC, iova(0, 0, 0), 0, READ),
            Err((iova(0, 0, 0), BadLength))
        );
        assert!(rig.touch(NIC, 0, 0).is_ok());
    }
}

#[test]
fn slots_follow_each_other_round_the_largest_ring() {
    let mem = arena();
    let mut rig = Rig::<FixedLogic>::new(&mem, &roomy(Prefetch::Immediate), 1 << 16);
    let last = (1 << 16) - 1;
    for slot in [last - 1, last, 0, 1] {
        rig.map(NIC, 1, slot, pte(0x10_0000 + u64::from(slot), 1, RW));
    }
    for slot in [last - 1, last, 0, 1] {
        assert_eq!(
            rig.touch(NIC, 1, slot),
            Ok((0x10_0000 + u64::from(slot), 1))
        );
    }
    let stats = rig.unit.stats();
    assert_eq!(
        (stats.misses, stats.prefetch_hits, stats.slot_walks),
        (1, 3, 0)
    );
    // The only slot of a ring is its own successor and is not prefetched.
    let mut rig = Rig::<FixedLogic>::new(&mem, &roomy(Prefetch::Immediate), 1);
    rig.map(NIC, 1, 0, pte(0x7000, 1, RW));
    assert!(rig.touch(NIC, 1, 0).is_ok() && rig.touch(NIC, 1, 0).is_ok());
    let stats = rig.unit.stats();
    assert_eq!((stats.misses, stats.hits, stats.prefetches), (1, 1, 0));
}

#[test]
fn power_and_root_table() {
    let mem = arena();
    let mut rig = Rig::<FixedLogic>::new(&mem, &roomy(Prefetch::Immediate), 4);
    rig.map(NIC, 0, 0, pte(0x5000, 100, RW));
    assert_eq!(rig.touch(NIC, 0, 0), Ok((0x5000, 1)));
    rig.unit.disable();
    let at = iova(0, 0, 7);
    assert_eq!(rig.dma(NIC, at, 200, WRITE), Ok((7, 200)));
    assert_eq!(rig.dma(NIC, at, 0, WRITE), Err((at, BadLength)));
    rig.unit.enable();
    assert_eq!(rig.touch(NIC, 0, 0), Ok((0x5000, 1)));
    // A new root table drops all cached entries.
    rig.unit.set_root_table(PhysAddr::new(0x3f_0000));
    assert_eq!(rig.unit.riotlb_live(), 0);
    assert_eq!(rig.touch(NIC, 0, 0), Err((iova(0, 0, 0), RootNotPresent)));
    let mut fresh = ringfence_hw::RingUnit::<FixedLogic>::new(&roomy(Prefetch::Immediate));
    fresh.enable();
    let fault = fresh.translate(&mem, NIC, at, 1, READ).map(|_| ());
    assert_eq!(fault.map_err(|fault| fault.reason), Err(Blocked));
}

/// Two devices of one function on two buses: each reaches its own rings, from the tables and from a
/// cache of one context, and a third bus reaches none.
#[test]
fn the_bus_selects_the_rdevice() {
    let mem = arena();
    let config = RingUnitConfig {
        contexts: geometry(1, 1),
        ..roomy(Prefetch::Absent)
    };
    for config in [config, RingUnitConfig::UNCACHED] {
        let mut rig = Rig::<FixedLogic>::new(&mem, &config, 8);
        rig.map(NIC, 0, 0, pte(0x5000, 64, RW));
        rig.map(HBA, 0, 0, pte(0x6000, 64, RW));
        for _ in 0..2 {
            assert_eq!(rig.touch(NIC, 0, 0), Ok((0x5000, 1)));
            assert_eq!(rig.touch(HBA, 0, 0), Ok((0x6000, 1)));
        }
        assert_eq!(
            rig.touch(RequesterId::new(0x0300), 0, 0),
            Err((iova(0, 0, 0), RootNotPresent))
        );
    }
}
