//! `rprefetch`, immediate and deferred.

use ringfence_hw::{FixedLogic, Geometry, Prefetch, RingLogic, RingUnitConfig};
use ringfence_types::FaultReason::NotPresent;

use crate::rig::{NIC, RW, Rig, Seen, arena, geometry, iova, pte, roomy};
use crate::ring_logic::LogicAsPublished;

fn address_of(slot: u32) -> u64 {
    u64::from(slot + 1) << 12
}

fn filled<L: RingLogic>(mem: &ringfence_memory::Arena, prefetch: Prefetch) -> Rig<'_, L> {
    let rig = Rig::new(mem, &roomy(prefetch), 8);
    for slot in 0..8 {
        rig.map(NIC, 0, slot, pte(address_of(slot), 64, RW));
    }
    rig
}

/// Outcomes of twenty accesses in ring order: (misses, prefetch hits, slot walks).
#[test]
fn a_device_in_ring_order() {
    let mem = arena();
    for (prefetch, complete, expected) in [
        (Prefetch::Immediate, false, (1, 19, 0)),
        (Prefetch::Absent, false, (1, 0, 19)),
        (Prefetch::Deferred, true, (1, 19, 0)),
        (Prefetch::Deferred, false, (1, 0, 19)),
    ] {
        let mut rig = filled::<FixedLogic>(&mem, prefetch);
        for access in 0..20 {
            let slot = access % 8;
            assert_eq!(rig.touch(NIC, 0, slot), Ok((address_of(slot), 1)));
            while complete && rig.unit.complete_prefetch(&mem) {}
        }
        let stats = rig.unit.stats();
        let served = (stats.misses, stats.prefetch_hits, stats.slot_walks);
        assert_eq!(served, expected, "{prefetch:?}, completed: {complete}");
        assert!(rig.unit.prefetches_waiting() <= 32, "bounded");
    }
}

/// A deferred prefetch reads the memory contents at its completion and is ignored if its ring has
/// moved on.
#[test]
fn late_prefetches() {
    let mem = arena();
    // Unmap before completion: the unit prefetches no entry, so no stale one is reachable.
    let mut rig = filled::<FixedLogic>(&mem, Prefetch::Deferred);
    assert!(rig.touch(NIC, 0, 0).is_ok());
    rig.unmap(NIC, 0, 1);
    assert!(rig.unit.complete_prefetch(&mem));
    assert_eq!(rig.unit.stats().prefetches, 0);
    assert_eq!(rig.touch(NIC, 0, 1), Err((iova(0, 1, 0), NotPresent)));
    // Unmap after completion: the copy is stale until the invalidation.
    let mut rig = filled::<FixedLogic>(&mem, Prefetch::Deferred);
    assert!(rig.touch(NIC, 0, 0).is_ok());
    assert!(rig.unit.complete_prefetch(&mem));
    rig.unmap(NIC, 0, 1);
    assert!(rig.touch(NIC, 0, 1).is_ok());
    // Invalidation before completion: the prefetch does not restore an entry.
    let mut rig = filled::<FixedLogic>(&mem, Prefetch::Deferred);
    assert!(rig.touch(NIC, 0, 0).is_ok());
    rig.invalidate(NIC, 0);
    assert!(rig.unit.complete_prefetch(&mem));
    assert_eq!(
        (rig.unit.riotlb_live(), rig.unit.stats().prefetches),
        (0, 0)
    );
    assert!(!rig.unit.complete_prefetch(&mem));
    // The ring has moved on: the prefetch of slot 1 does not apply to slot 5.
    let mut rig = filled::<FixedLogic>(&mem, Prefetch::Deferred);
    assert!(rig.touch(NIC, 0, 0).is_ok() && rig.touch(NIC, 0, 4).is_ok());
    assert!(rig.unit.complete_prefetch(&mem));
    assert_eq!(rig.unit.stats().prefetches, 0);
    assert!(rig.unit.complete_prefetch(&mem));
    assert_eq!(rig.unit.stats().prefetches, 1);
    assert_eq!(rig.touch(NIC, 0, 5), Ok((address_of(5), 1)));
    assert_eq!(rig.unit.stats().prefetch_hits, 1);
}

/// The slot after the only slot of a ring is that slot itself, and it is not prefetched.
#[test]
fn a_ring_of_one_slot_has_no_next_slot() {
    let mem = arena();
    for prefetch in [Prefetch::Immediate, Prefetch::Deferred] {
        let mut rig = Rig::<FixedLogic>::new(&mem, &roomy(prefetch), 1);
        rig.map(NIC, 0, 0, pte(address_of(0), 64, RW));
        for _ in 0..3 {
            assert_eq!(rig.touch(NIC, 0, 0), Ok((address_of(0), 1)));
            while rig.unit.complete_prefetch(&mem) {}
        }
        let stats = rig.unit.stats();
        assert_eq!((stats.prefetches, stats.prefetch_hits), (0, 0));
    }
}

/// While a prefetch is pending, a fixed entry has no `next`. A published one still has the
/// `next` of the previous slot.
#[test]
fn between_a_walk_and_its_late_prefetch() {
    fn outcome<L: RingLogic>() -> Seen {
        let mem = arena();
        let mut rig = filled::<L>(&mem, Prefetch::Deferred);
        assert!(rig.touch(NIC, 0, 0).is_ok());
        assert!(rig.unit.complete_prefetch(&mem));
        assert!(rig.touch(NIC, 0, 4).is_ok());
        rig.touch(NIC, 0, 5)
    }
    assert_eq!(outcome::<FixedLogic>(), Ok((address_of(5), 1)));
    assert_eq!(
        outcome::<LogicAsPublished>(),
        Ok((address_of(1), 1)),
        "slot 1's buffer"
    );
}

/// A deferred prefetch does not count as a use of its ring. A full queue drops the oldest one, so
/// that the prefetches of slots that rings have left do not displace that of a current slot.
#[test]
fn late_prefetches_and_replacement() {
    let mem = arena();
    let config = RingUnitConfig {
        riotlb: geometry(1, 2),
        ..roomy(Prefetch::Deferred)
    };
    let mut rig = Rig::<FixedLogic>::new(&mem, &config, 8);
    for ring in 0..3 {
        for slot in 0..8 {
            rig.map(NIC, ring, slot, pte(address_of(slot), 64, RW));
        }
    }
    assert!(rig.touch(NIC, 0, 0).is_ok() && rig.touch(NIC, 1, 0).is_ok());
    assert!(rig.unit.complete_prefetch(&mem), "ring 0's");
    assert!(rig.touch(NIC, 2, 0).is_ok(), "instead of ring 0");
    assert!(rig.touch(NIC, 1, 0).is_ok());
    assert_eq!((rig.unit.stats().hits, rig.unit.stats().evictions), (1, 1));
    for slot in 1..8 {
        assert!(rig.touch(NIC, 1, slot).is_ok());
    }
    let stats = *rig.unit.stats();
    assert_eq!(
        (rig.unit.prefetches_waiting(), stats.prefetches_dropped),
        (2, 7)
    );
    while rig.unit.complete_prefetch(&mem) {}
    assert!(rig.touch(NIC, 1, 0).is_ok(), "the successor of slot 7");
    assert_eq!(rig.unit.stats().prefetch_hits, stats.prefetch_hits + 1);
}

/// A queue without capacity drops every prefetch.
#[test]
fn a_unit_without_entries_prefetches_nothing() {
    let mem = arena();
    let config = RingUnitConfig {
        riotlb: Geometry::ABSENT,
        ..roomy(Prefetch::Deferred)
    };
    let mut rig = Rig::<FixedLogic>::new(&mem, &config, 8);
    rig.map(NIC, 0, 0, pte(address_of(0), 64, RW));
    assert!(rig.touch(NIC, 0, 0).is_ok());
    assert_eq!(rig.unit.stats().prefetches_dropped, 1);
    assert!(!rig.unit.complete_prefetch(&mem));
}
