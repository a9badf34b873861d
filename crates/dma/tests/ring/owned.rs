//! Rejections of an owned ring: mappings of other rings, ranges that are not mapped, and rings that
//! were used before.

use ringfence_dma::ring::{DirtyRingLines, OwnedRing, RingError, RingMapping, SlotChoice};
use ringfence_pgtable::Coherency;
use ringfence_types::{
    Direction, DomainId, Iova, IovaRange, Permissions, RingId, RingIova, RingSlot,
};

use crate::rig::*;

const BYTES: u64 = 100;

#[test]
fn a_mapping_of_another_device_is_refused() {
    let boards = [(); 2].map(|()| Board::new(Coherency::Coherent));
    let mut rings: Vec<_> = boards
        .iter()
        .zip([DOMAIN, DomainId::new(2)])
        .map(|(board, domain)| {
            let ring = board.rings(SlotChoice::Tail, &[4]).remove(0);
            OwnedRing::new(ring, &*board.memory, domain, DEVICE).unwrap()
        })
        .collect();
    let mut map = |which: usize| {
        let memory = &*boards[which].memory;
        let to = buffer(0x1000, BYTES);
        rings[which].map(memory, which, &to, Direction::ToDevice)
    };
    let (own, of_other) = (map(0).unwrap(), map(1).unwrap());
    assert_eq!(
        own.range(),
        of_other.range(),
        "nothing but the domain differs"
    );
    let memory = &*boards[0].memory;
    let of_other = rings[0].unmap(memory, of_other).unwrap_err().0;
    assert_eq!((rings[0].live(), rings[1].live()), (1, 1));
    let _ = rings[0].unmap(memory, own).unwrap();
    let _ = rings[1].unmap(&*boards[1].memory, of_other).unwrap();
}

/// Wherever the unmap cursor is, and however far the range is from it.
#[test]
fn a_range_that_is_not_exactly_a_mapping_is_refused() {
    const SLOTS: u32 = 4;
    let mut board = Board::new(Coherency::Coherent);
    let ring = board.rings(SlotChoice::Tail, &[2, SLOTS]).remove(1);
    let memory = board.memory.clone();
    let mut ring = OwnedRing::new(ring, &*memory, DOMAIN, DEVICE).unwrap();
    let start = |id, slot| RingIova::start(RingId::new(id), RingSlot::new(slot).unwrap());
    let mut tried = 0;
    for passed in 0..SLOTS {
        // The unmap cursor is at slot `passed`, which is live, as are all later slots.
        let mut held: Vec<_> = (0..SLOTS)
            .map(|n| {
                ring.map(&*memory, n, &buffer(0x1000, BYTES), Direction::ToDevice)
                    .unwrap()
            })
            .collect();
        for mapping in held.drain(..passed as usize) {
            let _ = ring.unmap(&*memory, mapping).unwrap();
        }
        let before = words(&board);
        let mut refuse = |at: Iova, bytes: u64| {
            let Some(range) = IovaRange::new(at, bytes) else {
                return;
            };
            let Some(claimed) = RingMapping::claim(&ring, range, 9) else {
                return;
            };
            tried += 1;
            assert!(ring.unmap(&*memory, claimed).is_err(), "{range}");
        };
        for id in [0, 1, 2, 1 << 15] {
            for slot in (0..16).chain([1 << 16, (1 << 18) - 1]) {
                let live = id == 1 && (passed..SLOTS).contains(&slot);
                for bytes in [
                    1,
                    BYTES - 1,
                    BYTES,
                    BYTES + 1,
                    BYTES | 1 << 29,
                    (1 << 30) - 1,
                ] {
                    if !live || bytes != BYTES {
                        refuse(start(id, slot).iova(), bytes);
                    }
                }
                refuse(start(id, slot).iova().wrapping_add(1), BYTES);
            }
        }
        assert_eq!(words(&board), before, "a refused unmap changes nothing");
        assert_eq!((ring.live(), ring.withheld()), (SLOTS - passed, passed));
        for mapping in held {
            let _ = ring.unmap(&*memory, mapping).unwrap();
        }
        let mut back = 0;
        ring.end_burst(&*memory, &mut board.port, |_| back += 1)
            .unwrap();
        assert_eq!(back, SLOTS);
    }
    assert!(tried > 1000, "{tried}");
}

#[test]
fn a_ring_that_was_used_before_is_refused() {
    let board = Board::new(Coherency::Coherent);
    let mut ring = board.rings(SlotChoice::Tail, &[4]).remove(0);
    let (memory, mut lines) = (&*board.memory, DirtyRingLines::none());
    ring.map(
        memory,
        &mut lines,
        &buffer(0x1000, BYTES),
        Permissions::READ,
    )
    .unwrap();
    let refused = OwnedRing::<()>::new(ring, memory, DOMAIN, DEVICE);
    assert_eq!(refused.err(), Some(RingError::NotEmpty));
}
