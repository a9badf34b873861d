//! Wrong arguments, failed maps and detach.

use ringfence_dma::flush::Strict;
use ringfence_dma::{
    DetachError, MapReason, Mapping, ShadowError, Teardown, UnmapFailure, UnmapReason,
};
use ringfence_types::{Direction, InvalidationError, IovaRange, MemoryError, PhysAddr};

use super::machine::*;
use crate::rig::*;

#[test]
fn unmap_accepts_only_whole_live_mappings() {
    let mut m = Machine::new(16, POLICY, Strict);
    m.write(0x10_0000, &pattern(0x6000, 1));
    let frame = m.read(0x10_0000, 0x6000);
    let mapping = m
        .map(memory(0x10_0810, 0x2800), Direction::FromDevice)
        .unwrap();
    let range = mapping.range();
    let _still_mapped = mapping;
    let mut wanted = frame.clone();
    wanted[0x1000..0x3000].fill(0xdd);
    m.device_write(range.start(), &[0xdd; 0x2800]);
    let at =
        |start: u64, bytes: u64| IovaRange::new(range.start().wrapping_add(start), bytes).unwrap();
    let mut slots = Vec::new();
    let pool = m.space().shadow_space().pool().memory();
    for page in 0..=LAST_PAGE {
        let iova = ringfence_types::Iova::new(page << 12);
        let reached = m.translate(iova, ringfence_types::Access::Write);
        if reached.is_some_and(|at| pool.contains_address(at)) {
            slots.push(IovaRange::new(iova.wrapping_add(0x810), 0x7f0).unwrap());
        }
    }
    assert!(slots.len() > 2);
    let wrong = [
        at(0, 0x27ff),
        at(0, 0x2801),
        at(1, 0x27ff),
        at(0x7f0, 0x2000),
        at(0x7f0, 0x1000),
        at(0x1000, 0x800),
        at(0u64.wrapping_sub(0x10), 0x2810),
        at(0u64.wrapping_sub(0x2000), 0x4800),
        at(0x80_0000, 8),
    ];
    // An address of the slot in the pool is none of the driver's.
    for range in wrong.into_iter().chain(slots) {
        let claimed = Mapping::claim(&m.at, range, Direction::FromDevice, 9);
        let refused = m.try_unmap(claimed).unwrap_err();
        assert!(
            matches!(
                refused.reason,
                UnmapReason::NotAllocated(_) | UnmapReason::Table(..)
            ),
            "{range}: {refused}"
        );
        assert!(m.read(0x10_0000, 0x6000) == wanted, "{range}");
        assert_eq!(m.bytes_in_use(), 2 * PAGE, "{range}");
    }
    for round in 0..2 {
        let claimed = Mapping::claim(&m.at, range, Direction::FromDevice, 9);
        assert_eq!(m.try_unmap(claimed).is_ok(), round == 0, "a repeated unmap");
    }
}

#[test]
fn a_refused_unmap_changes_nothing() {
    let mut m = Machine::new(16, POLICY, Strict);
    let mapping = m
        .map(memory(0x10_0800, 2 * PAGE), Direction::FromDevice)
        .unwrap();
    let range = mapping.range();
    m.device_write(range.start(), &[0xdd; 0x800]);
    // A defective embedder has cleared a page behind the layer's back.
    let missing = ringfence_types::Pfn::containing(range.start().wrapping_add(PAGE));
    let table = &m.space().shadow_space().paged().table().0;
    let one = ringfence_types::PfnRange::new(missing, 1).unwrap();
    let _cleared = table.unmap(&*m.board.arena, one).unwrap();
    let refused = m.try_unmap(mapping).unwrap_err();
    assert!(
        matches!(refused.reason, UnmapReason::Table(..)),
        "{refused}"
    );
    assert_eq!(m.read(0x10_0800, 0x800), [0; 0x800], "nothing was copied");
    assert_eq!(
        (m.bytes_in_use(), m.space().split_mappings()),
        (2 * PAGE, 1)
    );
}

#[test]
fn memory_outside_the_port_is_rejected_and_frees_the_slots() {
    for direction in Direction::ALL {
        let mut m = Machine::new(2, POLICY, Strict);
        let end = m.board.arena.bytes();
        // The tail lies outside; the head is copied before.
        let outside = memory(end - 2 * PAGE + 0x800, 2 * PAGE);
        let refused = m.map(outside, direction).unwrap_err();
        let at = PhysAddr::new(end);
        let error = MemoryError::Outside { at, words: 0x100 };
        assert_eq!(
            refused.reason,
            MapReason::Shadow(ShadowError::Memory(error))
        );
        assert_eq!(m.bytes_in_use(), 0);
        let mapping = m.map(memory(0x10_0800, 2 * PAGE), direction).unwrap();
        m.unmap(mapping);
    }
}

#[test]
fn a_map_that_fails_half_way_leaves_nothing() {
    let buffer = memory(0x10_0800, 0x500 * PAGE);
    let mut refused = 0;
    for allowed in 0.. {
        let mut m = Machine::new(2, POLICY, Strict);
        // The pool's own tables exist.
        let small = m.map(memory(0x2000, 8), Direction::ToDevice).unwrap();
        m.unmap(small);
        let accounts = m
            .space()
            .shadow_space()
            .paged()
            .allocator()
            .out
            .borrow()
            .len();
        m.board.frames.fail_after(allowed);
        let mapped = m.map(buffer, Direction::ToDevice);
        m.board.frames.recover();
        match mapped {
            Ok(mapping) => {
                m.unmap(mapping);
                break;
            }
            Err(error) => {
                assert!(matches!(error.reason, MapReason::Table(_)), "{error}");
                refused += 1;
            }
        }
        assert_eq!((m.bytes_in_use(), m.space().split_mappings()), (0, 0));
        let out = m
            .space()
            .shadow_space()
            .paged()
            .allocator()
            .out
            .borrow()
            .len();
        assert_eq!(out, accounts, "addresses are lost");
        let mapping = m.map(buffer, Direction::ToDevice).unwrap();
        m.unmap(mapping);
    }
    assert!(refused >= 2, "{refused}");
}

#[test]
fn slots_that_the_device_may_reach_for_ever_are_not_reused() {
    let mut m = Machine::new(2, POLICY, Strict);
    let small = m.map(memory(0x2000, 8), Direction::ToDevice).unwrap();
    m.unmap(small);
    // The head is mapped, the pages are not, and the invalidation of the head fails.
    m.board.frames.fail_after(1);
    m.board.port.fail(0, 1, InvalidationFailure::Failed);
    let error = m
        .map(memory(0x10_0800, 0x500 * PAGE), Direction::ToDevice)
        .unwrap_err();
    let failed = UnmapFailure::NotFlushed(InvalidationError::Failed);
    assert_eq!(error.reason, MapReason::RollbackFailed(failed));
    m.board.frames.recover();
    let refused = m.map(memory(0x2000, 8), Direction::ToDevice).unwrap_err();
    assert!(matches!(
        refused.reason,
        MapReason::Shadow(ShadowError::Exhausted { .. })
    ));
}

#[test]
fn a_detach_needs_unmapped_buffers_or_force() {
    let mut m = Machine::new(16, POLICY, Strict);
    m.write(0x10_0800, &[1; 8]);
    for bytes in [2 * PAGE, 4 * PAGE] {
        let start = if bytes == 2 * PAGE {
            0x10_0800
        } else {
            0x20_0000
        };
        let mapping = m.map(memory(start, bytes), Direction::FromDevice).unwrap();
        let (board, dma, cpu, at) = m.parts();
        let live = dma.detach(cpu, board, at, Teardown::IfUnused, |_| {}, drop);
        assert_eq!(live.err(), Some(DetachError::MappingsLive(DEVICE)));
        m.unmap(mapping);
    }
    let mapping = m
        .map(memory(0x10_0800, 2 * PAGE), Direction::FromDevice)
        .unwrap();
    m.device_write(mapping.iova(), &[0xdd; 8]);
    let (board, dma, cpu, at) = m.parts();
    let detached = dma.detach(cpu, board, at, Teardown::Forced, |_| {}, drop);
    assert!(matches!(detached, Ok(Some(_))));
    let error = dma.unmap_single(cpu, board, at, mapping).unwrap_err();
    assert!(matches!(error.reason, UnmapReason::Detached(0x10_0800)));
    assert_eq!(m.read(0x10_0800, 8), [1; 8]);
}
