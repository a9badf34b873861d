//! Wrong arguments, rejected unmaps, coherent memory and detach.

use ringfence_dma::space::{FromDevice, ShadowPolicy};
use ringfence_dma::{
    DetachError, MapMultiRequest, MapReason, Mapping, OutsideMapping, ShadowError, Teardown,
    UnmapReason,
};
use ringfence_types::{Access, Direction, IovaRange, MemoryError, PhysAddr};

use super::machine::*;
use crate::rig::*;

#[test]
fn more_received_bytes_than_the_mapping_has_are_rejected() {
    let mut m = Machine::new(16, POLICY);
    let frame = pattern(0x200, 1);
    m.write(0x1000, &frame);
    let mapping = m.map(memory(0x1000, 0x100), Direction::FromDevice).unwrap();
    let range = mapping.range();
    m.device_write(range.start(), &[0xdd; 0x200]);
    let (board, dma, cpu, at) = m.parts();
    let refused = dma
        .unmap_received(cpu, board, at, mapping, 0x101)
        .unwrap_err();
    let UnmapReason::TooManyReceived(0x101, buffer) = refused.reason else {
        panic!("{refused}");
    };
    assert_eq!(m.read(0x1000, 0x200), frame, "nothing was copied");
    let mapping = Mapping::claim(&m.at, range, Direction::FromDevice, buffer.into_buffer());
    m.unmap(mapping);
    assert_eq!(m.read(0x1000, 0x100), [0xdd; 0x100]);
    assert_eq!(m.read(0x1100, 0x100), frame[0x100..]);
}

#[test]
fn a_part_outside_the_mapping_is_rejected() {
    let mut m = Machine::new(16, POLICY);
    let mapping = m
        .map(memory(0x1010, 0x100), Direction::Bidirectional)
        .unwrap();
    let range = mapping.range();
    m.device_write(pages_of(range).start(), &[0xdd; PAGE as usize]);
    for (back, bytes) in [(1, 1), (1, 0x101), (0, 0x101)] {
        let start = range.start().wrapping_add(0_u64.wrapping_sub(back));
        let part = IovaRange::new(start, bytes).unwrap();
        let outside = OutsideMapping {
            part,
            mapping: range,
        };
        assert_eq!(
            m.dma.sync_part_for_cpu(&m.board, &mapping, part),
            Err(outside)
        );
        assert_eq!(
            m.dma.sync_part_for_device(&m.board, &mapping, part),
            Err(outside)
        );
    }
    assert_eq!(m.read(0x1000, 0x200), [0; 0x200]);
    m.unmap(mapping);
}

#[test]
fn unmap_accepts_only_whole_live_mappings() {
    let mut m = Machine::new(16, POLICY);
    m.write(0x1000, &pattern(0x3000, 1));
    let frame = m.read(0, 0x8000);
    let mapping = m
        .map(memory(0x1010, 0x1800), Direction::FromDevice)
        .unwrap();
    let range = mapping.range();
    let _still_mapped = mapping;
    m.device_write(range.start(), &[0xdd; 0x1800]);
    let at =
        |start: u64, bytes: u64| IovaRange::new(range.start().wrapping_add(start), bytes).unwrap();
    let wrong = [
        at(0, 0x17ff),
        at(0, 0x1801),
        at(1, 0x17ff),
        at(0x1000, 0x800),
        at(0u64.wrapping_sub(0x10), 0x1810),
        at(0x2000, 0x1800),
        at(0xf000, 8),
        at(0x80_0000, 8),
    ];
    for range in wrong {
        let claimed = Mapping::claim(&m.at, range, Direction::FromDevice, 9);
        let (cpu, board) = (&mut m.cpu, &mut m.board);
        let refused = m.dma.unmap_single(cpu, board, &m.at, claimed).unwrap_err();
        assert!(
            matches!(
                refused.reason,
                UnmapReason::NotAllocated(_) | UnmapReason::Table(..)
            ),
            "{range}: {refused}"
        );
        assert_eq!(m.read(0, 0x8000), frame, "{range}");
    }
    for round in 0..2 {
        let claimed = Mapping::claim(&m.at, range, Direction::FromDevice, 9);
        let (cpu, board) = (&mut m.cpu, &mut m.board);
        let unmapped = m.dma.unmap_single(cpu, board, &m.at, claimed);
        assert_eq!(unmapped.is_ok(), round == 0, "an unmap that is repeated");
    }
}

#[test]
fn memory_outside_the_port_is_rejected_and_frees_the_slot() {
    let mut m = Machine::new(48, POLICY);
    let end = m.board.arena.bytes();
    for direction in Direction::ALL {
        let refused = m.map(memory(end - 8, 16), direction).unwrap_err();
        let at = PhysAddr::new(end - 8);
        let error = MemoryError::Outside { at, words: 2 };
        assert_eq!(
            refused.reason,
            MapReason::Shadow(ShadowError::Memory(error))
        );
        assert_eq!(m.space().pool().bytes_in_use(), 0);
    }
    let long = m
        .map(memory(0, 4097 * PAGE), Direction::ToDevice)
        .unwrap_err();
    let too_long = ShadowError::TooLong {
        pages: 4097,
        slot: 4096,
    };
    assert_eq!(long.reason, MapReason::Shadow(too_long));
    let mapping = m.map(memory(0x1000, 16), Direction::ToDevice).unwrap();
    m.unmap(mapping);
}

#[test]
fn a_batch_that_fails_changes_no_buffer() {
    // Copies that do not begin as copies of their buffers.
    let from_device = FromDevice::Unspecified;
    let mut m = Machine::new(
        2,
        ShadowPolicy {
            from_device,
            ..POLICY
        },
    );
    let frame = pattern(0x4000, 1);
    m.write(0x1000, &frame);
    let (board, dma, cpu, at) = m.parts();
    let request = |number: u64| MapMultiRequest {
        buffer: number,
        memory: memory(0x1000 + number * PAGE, 0x100),
        direction: Direction::FromDevice,
    };
    let requests = (0..3).map(request).collect();
    let (back, error) = dma.map_multi(cpu, board, at, requests).unwrap_err();
    assert_eq!(back.len(), 3);
    assert!(matches!(
        error.reason,
        MapReason::Shadow(ShadowError::Exhausted { .. })
    ));
    assert_eq!(m.read(0x1000, 0x4000), frame);
    assert_eq!(m.space().pool().bytes_in_use(), 0);
}

#[test]
fn a_refused_table_leaves_the_pool_unchanged() {
    let mut m = Machine::new(16, POLICY);
    m.board.frames.fail_after(0);
    let refused = m.map(memory(0x1000, 8), Direction::ToDevice).unwrap_err();
    assert!(matches!(refused.reason, MapReason::Table(_)), "{refused}");
    assert_eq!(m.space().pool().mapped_bytes(), 0);
    m.board.frames.recover();
    let mapping = m.map(memory(0x1000, 8), Direction::ToDevice).unwrap();
    assert_eq!(m.space().pool().mapped_bytes(), 16 * PAGE);
    m.unmap(mapping);
}

#[test]
fn coherent_memory_is_mapped_itself() {
    let mut m = Machine::new(16, POLICY);
    let (board, dma, cpu, at) = m.parts();
    let ring = dma.alloc_coherent(cpu, board, at, 2).unwrap();
    assert_eq!(
        m.translate(ring.range().start(), Access::Write),
        Some(ring.frames()[0])
    );
    let (board, dma, cpu, at) = m.parts();
    dma.free_coherent(cpu, board, at, ring).unwrap();
    assert_eq!(m.space().direct_pages(), 0);
}

#[test]
fn a_detach_needs_free_slots_or_force() {
    let mut m = Machine::new(16, POLICY);
    m.write(0x1000, &[1; 8]);
    let mapping = m.map(memory(0x1000, 8), Direction::FromDevice).unwrap();
    m.device_write(mapping.iova(), &[0xdd; 8]);
    let (board, dma, cpu, at) = m.parts();
    let live = dma.detach(cpu, board, at, Teardown::IfUnused, |_| {}, drop);
    assert_eq!(live.err(), Some(DetachError::MappingsLive(DEVICE)));
    let detached = dma.detach(cpu, board, at, Teardown::Forced, |_| {}, drop);
    assert!(matches!(detached, Ok(Some(_))));
    let error = dma.unmap_single(cpu, board, at, mapping).unwrap_err();
    assert!(matches!(error.reason, UnmapReason::Detached(0x1000)));
    assert_eq!(m.read(0x1000, 8), [1; 8]);
    let mut m = Machine::new(16, POLICY);
    let mapping = m.map(memory(0x1000, 8), Direction::FromDevice).unwrap();
    m.unmap(mapping);
    let (board, dma, cpu, at) = m.parts();
    let detached = dma.detach(cpu, board, at, Teardown::IfUnused, |_| {}, drop);
    assert!(
        matches!(detached, Ok(Some(_))),
        "free slots do not prevent a detach"
    );
}
