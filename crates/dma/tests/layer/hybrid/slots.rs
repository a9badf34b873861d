//! Slots of split buffers: their use, their bound, and their return with the invalidation.

use ringfence_dma::flush::{Burst, Strict};
use ringfence_dma::{
    DmaSegment, MapReason, Mapping, NotInvalidated, Released, SgLimits, SgRequest, ShadowError,
    UnmapReason,
};
use ringfence_types::{Direction, Iova, IovaRange, PfnRange};

use super::machine::*;
use crate::rig::*;

const EXHAUSTED: MapReason = MapReason::Shadow(ShadowError::Exhausted { pages: 1, pool: 2 });

/// A buffer of one whole page with parts on two others.
fn buffer(number: u64) -> ringfence_types::PhysRange {
    memory(0x10_0800 + number * 0x1_0000, 2 * PAGE)
}

#[test]
fn slots_of_a_burst_return_with_its_invalidation() {
    let mut m = Machine::new(2, POLICY, Burst::default());
    let mapping = m.map(buffer(0), Direction::FromDevice).unwrap();
    assert_eq!(m.bytes_in_use(), 2 * PAGE);
    let pages = PfnRange::covering(&mapping.range());
    let domain = mapping.domain();
    m.board.port.touch(domain, pages);
    m.device_write(mapping.iova(), &[0xdd; 2 * PAGE as usize]);
    assert_eq!(m.unmap(mapping), None, "a split buffer is withheld");
    let written = m.read(buffer(0).start().get(), 2 * PAGE as usize);
    assert!(written.iter().all(|byte| *byte == 0xdd));
    // The device still has the translation: a new buffer in the slots would receive its writes.
    for _ in 0..3 {
        let refused = m.map(buffer(1), Direction::FromDevice).unwrap_err();
        assert_eq!(refused.reason, EXHAUSTED);
        assert!(m.board.port.reaches(domain, pages));
    }
    assert_eq!(
        m.end_burst(Direction::FromDevice),
        [buffer(0).start().get()]
    );
    assert!(!m.board.port.reaches(domain, pages));
    let again = m.map(buffer(1), Direction::FromDevice).unwrap();
    assert_eq!(m.unmap(again), None);
    assert_eq!(m.end_burst(Direction::FromDevice).len(), 1);
    assert_eq!(m.bytes_in_use(), 0);
}

#[test]
fn a_burst_returns_copied_buffers_at_once() {
    let mut m = Machine::new(16, POLICY, Burst::default());
    let small = m.map(memory(0x2000, 64), Direction::FromDevice).unwrap();
    let split = m.map(buffer(0), Direction::FromDevice).unwrap();
    m.device_write(small.iova(), &[7; 64]);
    assert_eq!(m.unmap(small), Some(0x2000));
    assert_eq!(m.read(0x2000, 64), [7; 64]);
    assert_eq!(m.unmap(split), None);
    assert_eq!(m.board.port.log, []);
    assert_eq!(
        m.end_burst(Direction::FromDevice),
        [buffer(0).start().get()]
    );
    assert_eq!(m.board.port.log.len(), 1);
}

#[test]
fn slots_wait_for_an_invalidation_that_fails() {
    let mut m = Machine::new(2, POLICY, Strict);
    let mapping = m.map(buffer(0), Direction::FromDevice).unwrap();
    m.board.port.fail(0, 1, InvalidationFailure::Failed);
    let error = m.try_unmap(mapping).unwrap_err();
    let UnmapReason::NotFlushed(_, token) = error.reason else {
        panic!("{error}");
    };
    let refused = m.map(buffer(1), Direction::FromDevice).unwrap_err();
    assert_eq!(refused.reason, EXHAUSTED);
    let token: NotInvalidated<u64> = token;
    let Machine {
        board, dma, cpu, ..
    } = &mut m;
    let Ok(Released(back)) = dma.retry_invalidation(cpu, board, token) else {
        panic!("the port works again");
    };
    assert_eq!(back, buffer(0).start().get());
    let again = m.map(buffer(1), Direction::FromDevice).unwrap();
    m.unmap(again);
}

#[test]
fn an_exhausted_pool_refuses_and_keeps_nothing() {
    for pages in [1, 2, 3] {
        let mut m = Machine::new(pages, POLICY, Strict);
        m.write(0x2000, &pattern(64, 3));
        m.write(buffer(9).start().get(), &pattern(2 * PAGE as usize, 7));
        let mut live = Vec::new();
        for _ in 0..pages / 2 {
            live.push(
                m.map(buffer(live.len() as u64), Direction::ToDevice)
                    .unwrap(),
            );
        }
        let refused = m.map(buffer(9), Direction::ToDevice).unwrap_err();
        let exhausted = ShadowError::Exhausted {
            pages: 1,
            pool: pages,
        };
        assert_eq!(refused.reason, MapReason::Shadow(exhausted));
        assert_eq!(m.bytes_in_use(), pages / 2 * 2 * PAGE);
        // The slot that the refused buffer had is free, and holds none of its bytes.
        if pages % 2 == 1 {
            let small = m.map(memory(0x2000, 64), Direction::ToDevice).unwrap();
            let page = m.device_read(pages_of(small.range()));
            assert_eq!(page[..64], m.read(0x2000, 64));
            assert!(page[64..].iter().all(|byte| *byte == 0));
            m.unmap(small);
        }
        // A buffer of whole pages needs no slot.
        let whole = memory(0x40_0000, 4 * PAGE);
        live.push(m.map(whole, Direction::ToDevice).unwrap());
        for mapping in live {
            m.unmap(mapping);
        }
        assert_eq!((m.bytes_in_use(), m.space().split_mappings()), (0, 0));
    }
}

#[test]
fn a_list_has_a_slot_for_each_part_of_a_page() {
    let pieces = [
        memory(0x10_0ff0, 0x20 + PAGE),
        memory(0x20_0003, 5),
        memory(0x30_0000, 2 * PAGE),
        memory(0x40_0000, PAGE + 1),
    ];
    let mut m = Machine::new(64, POLICY, Strict);
    for (index, piece) in pieces.iter().enumerate() {
        let bytes = piece.bytes() as usize;
        m.write(piece.start().get(), &pattern(bytes, index as u8));
    }
    let mut out = [DmaSegment {
        range: IovaRange::new(Iova::ZERO, 1).unwrap(),
    }; 4];
    let (board, dma, cpu, at) = m.parts();
    let request = SgRequest {
        buffer: 1,
        pieces: &pieces,
        direction: Direction::Bidirectional,
        limits: SgLimits::default(),
        out: &mut out,
    };
    let (list, _) = dma.map_sg(cpu, board, at, request).unwrap();
    // Two parts, one part, none, and one.
    assert_eq!(m.bytes_in_use(), 4 * PAGE);
    let range = list.range().unwrap();
    let found = m.device_read(pages_of(range));
    let mut page = 0;
    for piece in &pieces {
        let at = page + (piece.start().get() % PAGE) as usize;
        let bytes = piece.bytes() as usize;
        assert_eq!(
            found[at..at + bytes],
            m.read(piece.start().get(), bytes),
            "{piece}"
        );
        page += piece.pages(ringfence_types::PageSize::Size4K) as usize * PAGE as usize;
    }
    assert_eq!(page, found.len());
    m.device_write(pages_of(range).start(), &vec![0xdd; page]);
    m.dma.sync_sg_for_cpu(&m.board, &list);
    assert_eq!(m.read(0x20_0002, 7), [0, 0xdd, 0xdd, 0xdd, 0xdd, 0xdd, 0]);
    m.device_write(pages_of(range).start(), &vec![0xee; page]);
    let (board, dma, cpu, at) = m.parts();
    let Released(1) = dma.unmap_sg(cpu, board, at, list).unwrap() else {
        panic!("another buffer");
    };
    // The parts keep what the CPU has examined. The device may change whole pages to the end.
    assert_eq!(m.read(0x20_0003, 5), [0xdd; 5]);
    let whole = m.read(0x30_0000, 2 * PAGE as usize);
    assert!(whole.iter().all(|byte| *byte == 0xee));
    assert_eq!(m.bytes_in_use(), 0);
    assert_eq!(m.board.port.log.len(), 1, "one invalidation for the list");
}

#[test]
fn slots_of_a_removed_cpu_serve_the_others() {
    let mut m = Machine::new(2, POLICY, Strict);
    let mapping: Mapping<u64> = m.map(buffer(0), Direction::ToDevice).unwrap();
    let mut other = m.dma.cpu();
    let unmapped = m.dma.unmap_single(&mut other, &mut m.board, &m.at, mapping);
    let Released(_) = unmapped.unwrap();
    assert!(m.map(buffer(1), Direction::ToDevice).is_err());
    let removed = m.dma.remove_cpu(other, &mut m.board, drop);
    assert!(removed.is_ok());
    let mapping = m.map(buffer(1), Direction::ToDevice).unwrap();
    m.unmap(mapping);
}
