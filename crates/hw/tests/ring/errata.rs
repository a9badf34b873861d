//! Hardware defects in the rIOMMU paper, on the unit as published and on the fixed one (errata 6
//! and 8).

use ringfence_hw::{FixedLogic, Prefetch, RingLogic};
use ringfence_types::FaultReason::{BeyondBuffer, NotPresent};

use crate::rig::{NIC, READ, RW, Rig, arena, iova, pte, roomy};
use crate::ring_entry::{clear_as_published, store_as_published};
use crate::ring_logic::{ByValue, LogicAsPublished};

/// Buffers of 64 bytes, one per page.
fn filled<L: RingLogic>(mem: &ringfence_memory::Arena, slots: u32, live: u32) -> Rig<'_, L> {
    let rig = Rig::new(mem, &roomy(Prefetch::Immediate), slots);
    for slot in 0..live {
        rig.map(NIC, 0, slot, pte(address_of(slot), 64, RW));
    }
    rig
}

fn address_of(slot: u32) -> u64 {
    u64::from(slot + 1) << 12
}

/// Errata 6: the published unit checks only the start of an access. An access that starts inside a
/// buffer can extend beyond it.
#[test]
fn a_straddle() {
    let mem = arena();
    let at = iova(0, 0, 63);
    let mut as_published = filled::<LogicAsPublished>(&mem, 8, 1);
    assert_eq!(
        as_published.dma(NIC, at, 64, READ),
        Ok((address_of(0) + 63, 64))
    );
    assert_eq!(
        as_published.dma(NIC, iova(0, 0, 64), 1, READ),
        Err((iova(0, 0, 64), BeyondBuffer))
    );
    let mut fixed = filled::<FixedLogic>(&mem, 8, 1);
    assert_eq!(
        fixed.dma(NIC, at, 64, READ),
        Err((iova(0, 0, 64), BeyondBuffer))
    );
    assert_eq!(fixed.dma(NIC, at, 1, READ), Ok((address_of(0) + 63, 1)));
}

/// Errata 6: after a walk to a slot without a valid successor, the published unit keeps the `next`
/// of another slot. It later uses that entry for the successor.
#[test]
fn a_next_that_is_not_cleared() {
    fn outcome<L: RingLogic>() -> crate::rig::Seen {
        let mem = arena();
        let mut rig = filled::<L>(&mem, 8, 2);
        rig.map(NIC, 0, 5, pte(address_of(5), 64, RW));
        // Slot 0 is current and 1 is prefetched. Then slot 5 becomes current; its successor 6 is
        // not mapped.
        assert_eq!(rig.touch(NIC, 0, 0), Ok((address_of(0), 1)));
        assert_eq!(rig.touch(NIC, 0, 5), Ok((address_of(5), 1)));
        rig.touch(NIC, 0, 6)
    }
    assert_eq!(
        outcome::<LogicAsPublished>(),
        Ok((address_of(1), 1)),
        "slot 6 leads to slot 1's buffer"
    );
    assert_eq!(outcome::<FixedLogic>(), Err((iova(0, 6, 0), NotPresent)));
}

/// Errata 6: with entries passed by value as published, the unit translates every slot through the
/// first entry of the ring.
#[test]
fn entries_passed_by_value() {
    let mem = arena();
    let mut rig = filled::<ByValue>(&mem, 8, 3);
    assert_eq!(rig.touch(NIC, 0, 1), Ok((address_of(1), 1)));
    for slot in [0, 2] {
        assert_eq!(rig.touch(NIC, 0, slot), Ok((address_of(1), 1)));
    }
    assert_eq!(rig.touch(NIC, 0, 3), Err((iova(0, 3, 0), NotPresent)));
    assert_eq!(
        rig.unit.stats().prefetch_hits,
        0,
        "nothing prefetched stays"
    );
    let mut meant = filled::<LogicAsPublished>(&mem, 8, 3);
    for slot in [1, 0, 2] {
        assert_eq!(meant.touch(NIC, 0, slot), Ok((address_of(slot), 1)));
    }
}

/// Errata 8: until the invalidation, the current and the prefetched entry still lead to unmapped
/// buffers, but no third one does. The hardware repair does not change this. The driver must
/// withhold the buffers.
#[test]
fn the_two_stale_entries() {
    fn outcome<L: RingLogic>() {
        let mem = arena();
        let mut rig = filled::<L>(&mem, 8, 4);
        assert_eq!(rig.touch(NIC, 0, 0), Ok((address_of(0), 1)));
        rig.unmap(NIC, 0, 0);
        assert_eq!(
            rig.touch(NIC, 0, 0),
            Ok((address_of(0), 1)),
            "the current entry"
        );
        rig.unmap(NIC, 0, 1);
        assert_eq!(
            rig.touch(NIC, 0, 1),
            Ok((address_of(1), 1)),
            "the prefetched one"
        );
        assert_eq!(
            rig.touch(NIC, 0, 0),
            Err((iova(0, 0, 0), NotPresent)),
            "an older one"
        );
        rig.unmap(NIC, 0, 2);
        rig.invalidate(NIC, 0);
        for slot in 0..3 {
            assert_eq!(rig.touch(NIC, 0, slot), Err((iova(0, slot, 0), NotPresent)));
        }
        assert_eq!(rig.touch(NIC, 0, 3), Ok((address_of(3), 1)));
    }
    outcome::<LogicAsPublished>();
    outcome::<FixedLogic>();
}

/// Errata 8, quantified: a burst of 200 unmaps with one invalidation at its end.
#[test]
fn buffers_reached_after_their_unmap() {
    #[derive(Clone, Copy)]
    enum Attacker {
        /// Accesses the whole ring once, then tries each buffer after its unmap.
        Replayer,
        /// Accesses each buffer just before its unmap and tries it afterwards.
        Racer,
    }
    fn reached<L: RingLogic>(attacker: Attacker, prefetch: Prefetch) -> usize {
        let mem = arena();
        let mut rig = Rig::<L>::new(&mem, &roomy(prefetch), 256);
        for slot in 0..200 {
            rig.map(NIC, 0, slot, pte(address_of(slot), 64, RW));
        }
        for slot in 0..200 {
            assert!(rig.touch(NIC, 0, slot).is_ok());
        }
        let mut reached = 0;
        for slot in 0..200 {
            if let Attacker::Racer = attacker {
                let _ = rig.touch(NIC, 0, slot);
            }
            assert!(clear_as_published(rig.words(NIC, 0, slot)));
            if slot == 199 {
                rig.invalidate(NIC, 0);
            }
            reached += usize::from(rig.touch(NIC, 0, slot).is_ok());
        }
        reached
    }
    for prefetch in [Prefetch::Immediate, Prefetch::Absent] {
        assert_eq!(reached::<LogicAsPublished>(Attacker::Replayer, prefetch), 0);
        assert_eq!(reached::<LogicAsPublished>(Attacker::Racer, prefetch), 199);
        assert_eq!(reached::<FixedLogic>(Attacker::Racer, prefetch), 199);
    }
}

/// Errata 7 in hardware: a live slot is overwritten field by field and then translates to another
/// buffer.
#[test]
fn a_live_slot_overwritten() {
    let mem = arena();
    let mut rig = filled::<LogicAsPublished>(&mem, 2, 2);
    rig.unmap(NIC, 0, 1);
    rig.invalidate(NIC, 0);
    store_as_published(pte(address_of(7), 64, RW), rig.words(NIC, 0, 0));
    assert_eq!(rig.touch(NIC, 0, 0), Ok((address_of(7), 1)));
}
