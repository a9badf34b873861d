//! Transmit buffers that wait for a batch, and receive buffers that do not, in a space that maps
//! large buffers with all of their pages.

use std::cell::RefCell;

use ringfence_dma::flush::TransmitBatch;
use ringfence_dma::space::{
    HybridPolicy, HybridSpace, Paged, Rounding, ShadowPool, SharedPages, Thresholds,
};
use ringfence_dma::{Dma, Mapping, UnmapReason};
use ringfence_types::{Access, Direction, Invalidation, InvalidationError, Iova, IovaRange};

use super::machine::*;
use crate::rig::*;

/// Transmit buffers are mapped from 2 pages on, receive buffers from 4.
const FENCE: HybridPolicy = HybridPolicy {
    thresholds: Thresholds {
        transmit: 2 * PAGE,
        receive: 4 * PAGE,
    },
    shared_pages: SharedPages::Mapped,
    ..POLICY
};

fn machine() -> Machine<TransmitBatch> {
    Machine::new(64, FENCE, TransmitBatch::default())
}

/// Returns the number of pages of buffers that are mapped as a whole.
fn direct_pages(m: &Machine<TransmitBatch>) -> u64 {
    m.space().shadow_space().direct_pages()
}

#[test]
fn size_and_direction_decide_the_way_of_a_buffer() {
    use Direction::{Bidirectional as Both, FromDevice as Rx, ToDevice as Tx};
    for offset in [0, 1, 0x800, PAGE - 1] {
        for (direction, threshold) in [(Tx, 2 * PAGE), (Rx, 4 * PAGE), (Both, 4 * PAGE)] {
            for bytes in [1, threshold - 1, threshold, threshold + 1] {
                let name = format!("{direction} {bytes:#x} bytes at {offset:#x}");
                let mut m = machine();
                let start = 0x10_0000 + offset;
                let mapping = m.map(memory(start, bytes), direction).unwrap();
                let (range, is_mapped) = (mapping.range(), bytes >= threshold);
                assert_eq!(range.start().offset_in(PAGE), start % PAGE, "{name}");
                assert_eq!(direct_pages(&m) > 0, is_mapped, "{name}");
                let access = match direction {
                    Rx => Access::Write,
                    _ => Access::Read,
                };
                // The whole range is the buffer itself, or none of it is.
                for byte in (0..bytes).step_by(PAGE as usize).chain([bytes - 1]) {
                    let at = m
                        .translate(range.start().wrapping_add(byte), access)
                        .unwrap();
                    assert_eq!(at.get() == start + byte, is_mapped, "{name}: {byte:#x}");
                    assert_eq!(at.get() >= POOL, !is_mapped, "{name}: {byte:#x}");
                }
                let before = m.board.port.log.len();
                let back = m.unmap(mapping);
                let is_withheld = is_mapped && direction == Tx;
                assert_eq!(back, (!is_withheld).then_some(start), "{name}");
                let log = &m.board.port.log[before..];
                // A mapped receive buffer is invalidated before its return.
                let invalidated = is_mapped && direction != Tx;
                assert_eq!(log.len(), usize::from(invalidated), "{name}: {log:?}");
                assert_eq!(
                    m.translate(range.start(), access).is_none(),
                    is_mapped,
                    "{name}"
                );
                let ended: Vec<u64> = m.end_burst(direction);
                assert_eq!(
                    ended,
                    Vec::from_iter(is_withheld.then_some(start)),
                    "{name}"
                );
                let wanted = usize::from(is_mapped);
                assert_eq!(m.board.port.log.len() - before, wanted, "{name}");
            }
        }
    }
}

#[test]
fn one_invalidation_returns_a_batch_across_maps_and_receives() {
    let mut m = machine();
    let mut sent = Vec::new();
    for number in 0..20_u64 {
        let start = 0x10_0800 + number * 4 * PAGE;
        let mapping = m.map(memory(start, 2 * PAGE), Direction::ToDevice).unwrap();
        assert_eq!(m.unmap(mapping), None);
        sent.push(start);
        // Receive buffers in between come back at once, and end no batch.
        let mapping = m.map(memory(0x60_0000, 1500), Direction::FromDevice);
        assert_eq!(m.unmap(mapping.unwrap()), Some(0x60_0000));
    }
    assert_eq!(m.board.port.log, []);
    assert_eq!(m.end_burst(Direction::FromDevice), []);
    assert_eq!(m.board.port.log, []);
    assert_eq!(m.end_burst(Direction::ToDevice), sent);
    let domain = m.at.domain();
    let log = &m.board.port.log;
    assert!(
        matches!(log[..], [Invalidation::Pages { .. }])
            || log[..] == [Invalidation::Domain(domain)],
        "{log:?}"
    );
}

#[test]
fn a_failed_invalidation_returns_no_buffer() {
    let mut m = machine();
    let [sent, received] = [0x10_0000, 0x20_0000];
    let tx = m.map(memory(sent, 4 * PAGE), Direction::ToDevice).unwrap();
    let rx = m
        .map(memory(received, 4 * PAGE), Direction::FromDevice)
        .unwrap();
    assert_eq!(m.unmap(tx), None);
    m.board.port.fail(0, 9, InvalidationFailure::Failed);
    let error = m.try_unmap(rx).unwrap_err();
    let UnmapReason::NotFlushed(InvalidationError::Failed, token) = error.reason else {
        panic!("{error}");
    };
    let (cpu, board) = (&mut m.cpu, &mut m.board);
    let mut back = Vec::new();
    let ended = m
        .dma
        .end_burst(cpu, board, &m.at, Direction::ToDevice, |buffer| {
            back.push(buffer)
        });
    assert_eq!(
        (ended, &back[..]),
        (Err(InvalidationError::Failed), &[][..])
    );
    board.port.trouble = None;
    let retried = m.dma.retry_invalidation(cpu, board, token).unwrap();
    assert_eq!(retried.0, received);
    assert_eq!(m.end_burst(Direction::ToDevice), [sent]);
    assert_eq!((direct_pages(&m), m.bytes_in_use()), (0, 0));
}

#[test]
fn a_batch_has_a_bound() {
    let mut m = Machine::new(64, FENCE, TransmitBatch::default().with_most(2));
    for number in 0..3_u64 {
        let start = 0x10_0000 + number * 2 * PAGE;
        let mapping = m.map(memory(start, 2 * PAGE), Direction::ToDevice).unwrap();
        match m.try_unmap(mapping) {
            Ok(back) => assert_eq!((back, number < 2), (None, true)),
            Err(error) => {
                assert!(matches!(error.reason, UnmapReason::BurstFull(_)), "{error}");
                assert_eq!(number, 2);
            }
        }
    }
    assert_eq!(m.end_burst(Direction::ToDevice).len(), 2);
    assert!(direct_pages(&m) > 0);
}

/// A pool without a free slot refuses small buffers. It never maps them.
#[test]
fn an_exhausted_pool_maps_no_small_buffer() {
    let mut m = Machine::new(2, FENCE, TransmitBatch::default());
    let [one, two] = [0x10_0000, 0x20_0000].map(|start| memory(start, PAGE));
    let first = m.map(one, Direction::ToDevice).unwrap();
    let second = m.map(two, Direction::ToDevice).unwrap();
    let refused = m.map(memory(0x30_0000, 100), Direction::ToDevice);
    assert!(
        matches!(
            refused.unwrap_err().reason,
            ringfence_dma::MapReason::Shadow(_)
        ),
        "a small buffer is exposed"
    );
    let large = m
        .map(memory(0x30_0800, 2 * PAGE), Direction::ToDevice)
        .unwrap();
    assert_eq!(m.unmap(large), None);
    for mapping in [first, second] {
        assert!(m.unmap(mapping).is_some());
    }
}

/// Ranges whose pages are not those of a live mapping, for a buffer whose ends are mapped. The
/// space has no record of it: the allocator's lookup and the table reject them, as behind `Paged`.
#[test]
fn unmap_accepts_only_the_pages_of_live_mappings() {
    for direction in Direction::ALL {
        let mut m = machine();
        let mapping = m.map(memory(0x10_0810, 0x4800), direction).unwrap();
        let range = mapping.range();
        let at = |start: u64, bytes: u64| {
            IovaRange::new(range.start().wrapping_add(start), bytes).unwrap()
        };
        for wrong in [
            at(0, 0x47f0),
            at(0, 0x57f1),
            at(0x7f0, 0x1000),
            at(0x17f0, 0x3010),
            at(0u64.wrapping_sub(0x2000), 0x6800),
        ] {
            let claimed = Mapping::claim(&m.at, wrong, direction, 9);
            let refused = m.try_unmap(claimed).unwrap_err();
            let reason = &refused.reason;
            assert!(
                matches!(
                    reason,
                    UnmapReason::NotAllocated(_) | UnmapReason::Table(..)
                ),
                "{wrong}: {refused}"
            );
            assert_eq!(direct_pages(&m), 6, "{wrong}");
        }
        let access = match direction {
            Direction::FromDevice => Access::Write,
            _ => Access::Read,
        };
        assert_eq!(m.translate(range.start(), access).unwrap().get(), 0x10_0810);
        m.unmap(mapping);
        m.end_burst(direction);
        let again = Mapping::claim(&m.at, range, direction, 9);
        m.try_unmap(again).unwrap_err();
    }
}

/// The layer learns only in the space that a buffer was copied, so a full batch refuses it too.
/// After the batch, it is returned at once.
#[test]
fn a_full_batch_refuses_copied_transmit_buffers() {
    let mut m = Machine::new(64, FENCE, TransmitBatch::default().with_most(1));
    let large = m
        .map(memory(0x10_0000, 4 * PAGE), Direction::ToDevice)
        .unwrap();
    let small = m.map(memory(0x20_0000, 100), Direction::ToDevice).unwrap();
    assert_eq!(m.unmap(large), None);
    let refused = m.try_unmap(small).unwrap_err();
    let UnmapReason::BurstFull(buffer) = refused.reason else {
        panic!("{:?}", refused.reason);
    };
    let buffer = *buffer.buffer();
    assert_eq!(m.end_burst(Direction::ToDevice), [0x10_0000]);
    let small = Mapping::claim(&m.at, refused.range, Direction::ToDevice, buffer);
    assert_eq!(m.unmap(small), Some(0x20_0000));
}

/// An allocator without a lookup accepts the claimed unmap of a part. The other pages stay mapped,
/// and the space is not empty until each page is unmapped.
#[test]
fn parts_of_a_mapping_keep_the_space_in_use() {
    let mut board = Board::new();
    let mut dma = Dma::new(TransmitBatch::default());
    let at = dma
        .attach(DEVICE, Iova::new(u64::MAX), |domain| {
            let table = Plain::make(&board, domain);
            let paged = Paged::new(Bits::make(LAST_PAGE), table, Rounding::Exact);
            let pool = ShadowPool::new(memory(POOL, 64 * PAGE), RefCell::new).unwrap();
            Ok::<_, ()>(HybridSpace::new(paged, pool, FENCE, RefCell::new))
        })
        .unwrap();
    let mut cpu = dma.cpu();
    let direction = Direction::FromDevice;
    let [one, other] = [0x10_0000, 0x20_0000].map(|start| {
        let buffer = memory(start, 8 * PAGE);
        let mapped = dma.map_single(&mut cpu, &mut board, &at, start, buffer, direction);
        mapped.unwrap().0.range()
    });
    let half = |of: IovaRange, which: u64| {
        let start = of.start().wrapping_add(which * 4 * PAGE);
        IovaRange::new(start, 4 * PAGE).unwrap()
    };
    let mut left = 16;
    for range in [half(one, 0), half(other, 1), half(one, 1), half(other, 0)] {
        let direct = dma.space(&at).unwrap().shadow_space().direct_pages();
        assert_eq!(direct, left);
        let claimed = Mapping::claim(&at, range, direction, 9);
        let unmapped = dma.unmap_single(&mut cpu, &mut board, &at, claimed);
        assert!(unmapped.is_ok(), "{unmapped:?}");
        left -= 4;
    }
    assert_eq!(dma.space(&at).unwrap().shadow_space().direct_pages(), 0);
}
