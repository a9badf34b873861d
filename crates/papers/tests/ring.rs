//! Defects of the ring driver as published, which the fixed driver does not have.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_dma::ring::SlotChoice;
use ringfence_dma::space::Rings;
use ringfence_dma::{Cpu, Dma, MapReason, Mapping, ReleasedStale};
use ringfence_papers::{BurstAsPublished, RingAsPublished, clear_as_published, store_as_published};
use ringfence_pgtable::{Coherency, RingPte};
use ringfence_types::{Direction, Invalidation, Iova, Permissions, RingId};

#[allow(dead_code)]
#[path = "../../dma/tests/ring/rig.rs"]
mod rig;

use rig::*;

const READ: Permissions = Permissions::READ;

fn as_published(board: &Board, slots: u32) -> RingAsPublished {
    board.rings(SlotChoice::Tail, &[slots]).remove(0).into()
}

/// Erratum 7: map A, map B, unmap B, map C: C overwrites A's slot.
#[test]
fn a_live_entry_is_overwritten() {
    let board = Board::new(Coherency::Coherent);
    let mem = &*board.memory;
    let mut ring = as_published(&board, 2);
    let a = ring.map(mem, &buffer(0xa000, 64), READ).unwrap();
    let b = ring.map(mem, &buffer(0xb000, 64), READ).unwrap();
    ring.unmap(mem, b).unwrap();
    let c = ring.map(mem, &buffer(0xc000, 64), READ).unwrap();
    assert_eq!(a, c);
    assert_eq!(
        board.entry(slot_key(a)).start().get(),
        0xc000,
        "A's driver still uses it"
    );
}

/// Erratum 7: an unmap without effect still decrements the count, and the ring accepts more maps
/// than it has slots.
#[test]
fn a_double_unmap_is_counted() {
    let board = Board::new(Coherency::Coherent);
    let mem = &*board.memory;
    let mut ring = as_published(&board, 2);
    let a = ring.map(mem, &buffer(0xa000, 64), READ).unwrap();
    ring.map(mem, &buffer(0xb000, 64), READ).unwrap();
    assert!(is_full(ring.map(mem, &buffer(0, 1), READ).unwrap_err()));
    ring.unmap(mem, a).unwrap();
    ring.unmap(mem, a).unwrap();
    assert_eq!(ring.nmapped(), 0, "B is mapped");
    ring.map(mem, &buffer(0xc000, 64), READ).unwrap();
    let over = ring.map(mem, &buffer(0xd000, 64), READ).unwrap();
    assert_eq!(board.entry(slot_key(over)).start().get(), 0xd000, "over B");
    let mut empty = as_published(&Board::new(Coherency::Coherent), 2);
    empty.unmap(mem, a).unwrap();
    assert_eq!(empty.nmapped(), (1 << 18) - 1, "18 bits");
}

/// Erratum 8: buffers are returned, and slots reused, while the cached entry still refers to the
/// old buffer.
#[test]
fn buffers_are_back_before_the_invalidation() {
    type Space = Rings<RingAsPublished, RefCell<RingAsPublished>>;
    let mut board = Board::new(Coherency::Coherent);
    let mut dma: Dma<Space, BurstAsPublished, u64> = Dma::new(BurstAsPublished);
    let at = dma
        .attach(DEVICE, Iova::new(u64::MAX), |domain| {
            let rings = board.rings(SlotChoice::Tail, &[1]);
            Ok::<_, ()>(Rings::new(domain, DEVICE, rings, RefCell::new))
        })
        .unwrap();
    let mut cpu: Cpu<Space, BurstAsPublished, u64> = dma.cpu();
    let to = Direction::ToDevice;
    let map = |id, start, cpu: &mut _, board: &mut Board| -> Result<Mapping<u64>, MapReason> {
        dma.map_single(cpu, board, &at, id, buffer(start, 64), to)
            .map(|(mapping, _)| mapping)
            .map_err(|(_, error)| error.reason)
    };
    let a = map(1, 0xa000, &mut cpu, &mut board).unwrap();
    board.warm();
    let ReleasedStale(1) = dma.unmap_single(&mut cpu, &mut board, &at, a).unwrap() else {
        panic!();
    };
    assert!(!board.entry((0, 0)).is_valid());
    assert_eq!(
        board.reachable()[&(0, 0)].len(),
        1,
        "A, though its buffer is back"
    );
    let b = map(2, 0xb000, &mut cpu, &mut board).unwrap();
    assert_eq!(board.reachable()[&(0, 0)].len(), 2, "A through B's address");
    assert!(board.port.log.is_empty());
    dma.end_burst(&mut cpu, &mut board, &at, to, |_| {})
        .unwrap();
    dma.end_burst(&mut cpu, &mut board, &at, to, |_| {})
        .unwrap();
    let ring = Invalidation::Ring {
        domain: DOMAIN,
        device: DEVICE,
        ring: RingId::new(0),
    };
    assert_eq!(board.port.log, [ring], "one a burst");
    assert_eq!(board.reachable()[&(0, 0)].len(), 1, "B");
    let ReleasedStale(2) = dma.unmap_single(&mut cpu, &mut board, &at, b).unwrap() else {
        panic!();
    };
}

/// In ring order, and with a unit that does not lag, the driver as published behaves like the
/// fixed one.
#[test]
fn in_order_nothing_is_wrong_with_the_table() {
    for coherency in [Coherency::Coherent, Coherency::NonCoherent] {
        let board = Board::new(coherency);
        let mem = &*board.memory;
        let mut ring = as_published(&board, 4);
        for lap in 0..10_u64 {
            let iova = ring.map(mem, &buffer(lap * 64, 64), READ).unwrap();
            assert_eq!(slot_key(iova), (0, (lap % 4) as u32));
            assert_eq!(board.entry(slot_key(iova)).start().get(), lap * 64);
            ring.unmap(mem, iova).unwrap();
            assert!(!board.entry(slot_key(iova)).is_valid());
        }
    }
}

/// Stores over an entry with every bit set except `valid`: unused bits keep their value.
#[test]
fn fields_are_stored_one_by_one_and_valid_alone_is_cleared() {
    let at = [AtomicU64::new(!0), AtomicU64::new(!(1 << 32))];
    store_as_published(RingPte::new(&buffer(0xc001, 100), READ).unwrap(), &at);
    let read = RingPte::load(&at);
    assert_eq!(
        (read.start().get(), read.bytes(), read.permissions()),
        (0xc001, 100, Some(READ))
    );
    assert_eq!(at[1].load(Ordering::Relaxed) >> 33, !0 >> 33);
    assert_eq!(
        (clear_as_published(&at), clear_as_published(&at)),
        (true, false)
    );
    assert_eq!(RingPte::load(&at).bytes(), 100, "valid alone is cleared");
}
