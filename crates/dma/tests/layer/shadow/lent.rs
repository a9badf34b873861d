//! Buffers that the driver takes from the pool: bounds, wrong arguments, the bytes that the driver
//! reads, and detach.

use ringfence_dma::flush::Strict;
use ringfence_dma::{
    DetachError, Dma, MapReason, Mapping, PoolBuffer, PoolBufferError, PostedBuffer, ShadowError,
    Teardown, TooManyReceived, UnmapReason,
};
use ringfence_types::{Access, Direction, Invalidation, PhysAddr};

use super::machine::*;
use crate::rig::*;

impl Machine {
    pub(super) fn alloc(
        &mut self,
        bytes: u64,
        direction: Direction,
    ) -> Result<PoolBuffer, MapReason> {
        let (cpu, board) = (&mut self.cpu, &mut self.board);
        self.dma
            .alloc_buffer(cpu, board, &self.at, bytes, direction)
            .map_err(|error| error.reason)
    }

    pub(super) fn free(&mut self, buffer: PoolBuffer) {
        self.dma.free_buffer(&mut self.cpu, buffer).unwrap();
    }

    fn posted(&mut self, bytes: u64, direction: Direction) -> PostedBuffer {
        self.alloc(bytes, direction).unwrap().for_device()
    }
}

const RX: Direction = Direction::FromDevice;
const TX: Direction = Direction::ToDevice;

#[test]
fn the_device_changes_the_buffer_but_not_what_the_driver_has_read() {
    let mut m = Machine::new(16, POLICY);
    let posted = m.posted(1500, RX);
    let frame = pattern(1500, 3);
    let iova = posted.iova();
    assert_eq!(m.device_write(iova, &frame), 1500);
    let mut received = posted.unmap(1400).unwrap();
    assert!(m.board.port.log.is_empty());
    // An odd length: the next part begins inside a word.
    let mut header = [0; 13];
    m.dma
        .read_buffer(&m.board, &mut received, &mut header)
        .unwrap();
    assert_eq!(header, frame[..13]);
    assert_eq!(m.device_write(iova, &[0xee; 1500]), 1500);
    assert_eq!(header, frame[..13]);
    // The bytes that the driver has not read are the device's; no byte is read twice.
    received.skip(7);
    let mut rest = vec![0; 1380];
    assert_eq!(received.left(), 1380);
    m.dma
        .read_buffer(&m.board, &mut received, &mut rest)
        .unwrap();
    assert!(rest.iter().all(|byte| *byte == 0xee));
    let refused = m.dma.read_buffer(&m.board, &mut received, &mut [0]);
    let outside = PoolBufferError::Outside { bytes: 1, left: 0 };
    assert_eq!(refused, Err(outside));
    m.free(received.into_buffer());
}

#[test]
fn buffers_cost_no_invalidation_and_no_new_pages() {
    let mut m = Machine::new(64, POLICY);
    for round in 0..1_000_u64 {
        for direction in Direction::ALL {
            let buffer = m.alloc(1 + round * 37 % 4096, direction).unwrap();
            let back = buffer.for_device().unmap(0).unwrap().into_buffer();
            m.free(back);
        }
    }
    let pool = m.space().pool();
    assert_eq!(
        (pool.bytes_in_use(), pool.mapped_bytes()),
        (0, 3 * 16 * PAGE)
    );
    assert!(m.board.port.log.is_empty());
}

#[test]
fn an_exhausted_pool_refuses_until_a_buffer_is_freed() {
    let mut m = Machine::new(4, POLICY);
    let mut live: Vec<_> = (0..4).map(|_| m.alloc(PAGE, RX).unwrap()).collect();
    let exhausted = |pages| MapReason::Shadow(ShadowError::Exhausted { pages, pool: 4 });
    let (none, other) = (m.alloc(1, RX), m.alloc(1, TX));
    assert_eq!((none, other), (Err(exhausted(1)), Err(exhausted(1))));
    let copied = m.map(memory(0x1000, 8), RX);
    assert_eq!(copied.unwrap_err().reason, exhausted(1));
    m.free(live.pop().unwrap());
    let again = m.alloc(1, RX).unwrap();
    // The page keeps its direction.
    m.free(again);
    assert_eq!(m.alloc(1, TX), Err(exhausted(1)));
    assert_eq!(m.alloc(2 * PAGE, RX), Err(exhausted(2)));
    let too_long = ShadowError::TooLong {
        pages: 4097,
        slot: 4096,
    };
    assert_eq!(
        m.alloc(4096 * PAGE + 1, RX),
        Err(MapReason::Shadow(too_long))
    );
    assert_eq!(m.alloc(0, RX), Err(MapReason::Empty));
    assert!(m.alloc(u64::MAX, RX).is_err());
    assert_eq!(m.space().pool().bytes_in_use(), 3 * PAGE);
}

#[test]
fn wrong_lengths_are_rejected_and_change_nothing() {
    let mut m = Machine::new(32, POLICY);
    for (direction, received) in [(RX, 101), (RX, u64::MAX), (TX, 1)] {
        let posted = m.posted(100, direction);
        let range = posted.range();
        let TooManyReceived {
            received: reported,
            buffer,
        } = posted.unmap(received).unwrap_err();
        assert_eq!((reported, buffer.range()), (received, range));
        let back = buffer.unmap(0).unwrap().into_buffer();
        m.free(back);
    }
    let mut buffer = m.alloc(100, TX).unwrap();
    for (offset, bytes, left) in [(0, 101, 100), (1, 100, 99), (101, 1, 0), (u64::MAX, 1, 0)] {
        let wrong = vec![0xcc; bytes as usize];
        let refused = m
            .dma
            .fill_buffer(&m.board, &mut buffer, offset, &wrong)
            .unwrap_err();
        assert_eq!(refused, PoolBufferError::Outside { bytes, left });
    }
    m.dma
        .fill_buffer(&m.board, &mut buffer, 97, b"end")
        .unwrap();
    let posted = buffer.for_device();
    let found = m.device_read(pages_of(posted.range()));
    assert_eq!(&found[97..100], b"end");
    assert_eq!(found.iter().filter(|byte| **byte != 0).count(), 3);
    m.free(posted.unmap(0).unwrap().into_buffer());
}

#[test]
fn a_mapping_cannot_name_a_buffer_of_the_pool() {
    let mut m = Machine::new(16, POLICY);
    let posted = m.posted(64, RX);
    let mapping = Mapping::claim(&m.at, posted.range(), RX, 0x1000);
    m.dma.sync_for_cpu(&m.board, &mapping);
    let (board, dma, cpu, at) = m.parts();
    let error = dma.unmap_single(cpu, board, at, mapping).unwrap_err();
    assert!(matches!(error.reason, UnmapReason::NotAllocated(_)));
    assert_eq!(m.space().pool().bytes_in_use(), PAGE);
    m.free(posted.unmap(0).unwrap().into_buffer());
    assert_eq!(m.space().pool().bytes_in_use(), 0);
}

#[test]
fn copies_and_buffers_of_one_pool_do_not_mix() {
    let mut m = Machine::new(1, POLICY);
    // The driver's own bytes are beside the copy that takes the slot next.
    let mut buffer = m.alloc(PAGE, TX).unwrap();
    let secret = pattern(PAGE as usize, 9);
    m.dma
        .fill_buffer(&m.board, &mut buffer, 0, &secret)
        .unwrap();
    m.free(buffer);
    m.write(0x1100, &[7; 64]);
    let mapping = m.map(memory(0x1100, 64), TX).unwrap();
    let page = m.device_read(pages_of(mapping.range()));
    let mut wanted = vec![0; PAGE as usize];
    wanted[0x100..0x140].fill(7);
    assert_eq!(page, wanted);
    let reused = m.alloc(1, TX);
    assert!(reused.is_err(), "{reused:?}");
    m.unmap(mapping);
    let buffer = m.alloc(1, TX).unwrap();
    m.free(buffer);
}

#[test]
fn a_buffer_freed_on_another_cpu_returns_to_the_pool() {
    let mut m = Machine::new(16, POLICY);
    let mut other = m.dma.cpu();
    for _ in 0..100 {
        let live: Vec<_> = (0..16).map(|_| m.alloc(PAGE, RX).unwrap()).collect();
        for buffer in live {
            m.dma.free_buffer(&mut other, buffer).unwrap();
        }
        let removed = m.dma.remove_cpu(other, &mut m.board, drop);
        assert!(removed.is_ok());
        other = m.dma.cpu();
    }
    assert_eq!(m.space().pool().bytes_in_use(), 0);
}

#[test]
fn a_detach_needs_all_buffers_or_force_and_precedes_any_other_use_of_the_pages() {
    let mut m = Machine::new(32, POLICY);
    let filled = m.alloc(64, TX).unwrap();
    let posted = m.posted(64, RX);
    let mut received = m.posted(64, RX).unmap(64).unwrap();
    let iova = posted.iova();
    let (board, dma, cpu, at) = m.parts();
    let live = dma.detach(cpu, board, at, Teardown::IfUnused, |_| {}, drop);
    assert_eq!(live.err(), Some(DetachError::MappingsLive(DEVICE)));
    assert!(board.port.log.is_empty());
    let mut contexts = None;
    let disconnect = |board: &mut Board| contexts = Some(board.port.log.len());
    let detached = dma.detach(cpu, board, at, Teardown::Forced, disconnect, drop);
    let detached = detached.unwrap().unwrap();
    // The context entry is cleared first; then one invalidation of each cache.
    assert_eq!(contexts, Some(0));
    let wanted = [
        Invalidation::Context(DEVICE),
        Invalidation::Domain(at.domain()),
    ];
    assert_eq!(board.port.log, wanted);
    assert_eq!(detached.space.pool().memory(), memory(POOL, 32 * PAGE));
    // The embedder uses the memory for something else: old tokens do not reach it.
    let all = pattern(32 * PAGE as usize, 1);
    board.arena.write_bytes(PhysAddr::new(POOL), &all).unwrap();
    let mut filled = filled;
    let fill = dma.fill_buffer(board, &mut filled, 0, &[1; 8]);
    let read = dma.read_buffer(board, &mut received, &mut [0; 8]);
    let gone = Err(PoolBufferError::Detached);
    assert_eq!((fill, read), (gone, gone));
    let received_late = posted.unmap(64).unwrap().into_buffer();
    for buffer in [filled, received.into_buffer(), received_late] {
        dma.free_buffer(cpu, buffer).unwrap();
    }
    let alloc = dma.alloc_buffer(cpu, board, at, 8, RX).unwrap_err();
    assert_eq!(alloc.reason, MapReason::NotAttached);
    assert_eq!(m.read(POOL, 32 * PAGE as usize), all);
    let _ = iova;
}

#[test]
fn another_layer_takes_no_buffer() {
    let mut m = Machine::new(16, POLICY);
    let mut buffer = m.alloc(8, TX).unwrap();
    let other: Dma<Shadowed, Strict, u64> = Dma::for_unit(1, Strict);
    let fill = other.fill_buffer(&m.board, &mut buffer, 0, &[1]);
    assert_eq!(fill, Err(PoolBufferError::Detached));
    let mut cpu = other.cpu();
    let buffer = other.free_buffer(&mut cpu, buffer).unwrap_err();
    m.free(buffer);
}

#[test]
fn a_device_beyond_the_pool_gets_no_buffer() {
    let mut m = Machine::new(16, POLICY);
    let buffer = m.alloc(8, TX).unwrap();
    let first = buffer.for_device();
    let reach = m.translate(first.iova(), Access::Read);
    assert_eq!(reach, Some(PhysAddr::new(POOL)));
    // A second device of the domain with a mask below the pool's addresses.
    let narrow = m
        .dma
        .attach_to(
            ringfence_types::RequesterId::new(0x99),
            ringfence_types::Iova::new(0xfff),
            &m.at,
        )
        .unwrap();
    let (cpu, board) = (&mut m.cpu, &mut m.board);
    let refused = m.dma.alloc_buffer(cpu, board, &narrow, 8, TX).unwrap_err();
    assert_eq!(refused.reason, MapReason::Shadow(ShadowError::BeyondMask));
    m.free(first.unmap(0).unwrap().into_buffer());
}
