//! Copies at map, unmap and sync.

use ringfence_dma::space::{FromDevice, ShadowPolicy};
use ringfence_dma::{DmaSegment, Mapping, Released, SgLimits, SgRequest};
use ringfence_types::{Access, Direction, Iova, IovaRange};

use super::machine::*;
use crate::rig::*;

const FRAME: usize = 3 * PAGE as usize;

fn part(range: IovaRange, offset: u64, bytes: u64) -> IovaRange {
    IovaRange::new(range.start().wrapping_add(offset), bytes).unwrap()
}

#[test]
fn device_reaches_the_bytes_of_the_buffer_and_nothing_else() {
    for direction in Direction::ALL {
        let mut m = Machine::new(64, POLICY);
        // An earlier, longer buffer leaves its bytes in the slot.
        m.write(0x1000, &pattern(FRAME, 7));
        let earlier = m.map(memory(0x1080, 0x800), direction).unwrap();
        m.unmap(earlier);
        m.write(0x5000, &pattern(FRAME, 100));
        let mapping = m.map(memory(0x5123, 0x300), direction).unwrap();
        assert_eq!(mapping.iova().offset_in(PAGE), 0x123);
        let page = m.device_read(pages_of(mapping.range()));
        if direction == Direction::FromDevice {
            assert_eq!(
                page,
                [],
                "a slot that the device only writes is not readable"
            );
        } else {
            let mut wanted = vec![0; PAGE as usize];
            let buffer = m.read(0x5123, 0x300);
            wanted[0x123..0x423].copy_from_slice(&buffer);
            assert_eq!(page, wanted, "{direction}: residue beside the buffer (A34)");
        }
        m.unmap(mapping);
        for access in [Access::Read, Access::Write] {
            for page in 0..=LAST_PAGE {
                let reached = m.translate(Iova::new(page << 12), access);
                let inside =
                    reached.is_none_or(|at| at.get() >= POOL && at.get() < POOL + 64 * PAGE);
                assert!(inside, "{reached:?} is not memory of the pool");
            }
        }
    }
}

#[test]
fn unmap_copies_what_the_device_wrote_inside_the_buffer() {
    for direction in Direction::ALL {
        let mut m = Machine::new(64, POLICY);
        let frame = pattern(FRAME, 3);
        m.write(0x2000, &frame);
        let mapping = m.map(memory(0x2ff9, 0x20e), direction).unwrap();
        // The device fills the pages of the buffer, and skips some bytes inside it.
        let whole = pages_of(mapping.range());
        let skipped = 0x1000..0x1005;
        for at in (0..whole.bytes()).filter(|at| !skipped.contains(at)) {
            m.device_write(whole.start().wrapping_add(at), &[0xdd]);
        }
        assert_eq!(m.unmap(mapping), Some(0x2ff9));
        m.device_write(whole.start(), &vec![0xee; 2 * PAGE as usize]);
        let mut wanted = frame.clone();
        if direction != Direction::ToDevice {
            wanted[0xff9..0x1207].fill(0xdd);
            wanted[0x1000..0x1005].copy_from_slice(&frame[0x1000..0x1005]);
        }
        assert_eq!(m.read(0x2000, FRAME), wanted, "{direction}");
        assert_eq!(m.board.port.log, [], "no translation changed");
    }
}

#[test]
fn unmap_copies_only_the_received_bytes() {
    for from_device in [FromDevice::Kept, FromDevice::Unspecified] {
        let mut m = Machine::new(
            64,
            ShadowPolicy {
                from_device,
                ..POLICY
            },
        );
        let frame = pattern(FRAME, 3);
        for received in [0, 1, 7, 8, 0x87, 0x7ff, 0x800] {
            m.write(0x2000, &frame);
            let mapping = m.map(memory(0x2801, 0x800), Direction::FromDevice).unwrap();
            m.device_write(mapping.iova(), &[0xdd; 0x900]);
            m.unmap_received(mapping, received);
            let mut wanted = frame.clone();
            wanted[0x801..0x801 + received as usize].fill(0xdd);
            assert_eq!(m.read(0x2000, FRAME), wanted, "{received} bytes");
        }
        // The number of one mapping does not limit the next one in the slot.
        let mapping = m.map(memory(0x2801, 0x800), Direction::FromDevice).unwrap();
        m.device_write(mapping.iova(), &[0xaa; 0x800]);
        m.unmap(mapping);
        assert_eq!(m.read(0x2801, 0x800), [0xaa; 0x800]);
    }
}

#[test]
fn bytes_that_a_sync_copied_are_not_copied_again() {
    let mut m = Machine::new(64, POLICY);
    let mapping = m.map(memory(0x3010, 0x100), Direction::FromDevice).unwrap();
    let range = mapping.range();
    m.device_write(range.start(), &[1; 0x100]);
    m.dma
        .sync_part_for_cpu(&m.board, &mapping, part(range, 0, 0x20))
        .unwrap();
    assert_eq!(m.read(0x3010, 0x20), [1; 0x20]);
    assert_eq!(m.read(0x3030, 0xe0), [0; 0xe0], "only the part is copied");
    // The driver has checked the header. The device changes it, and the rest.
    m.device_write(range.start(), &[2; 0x100]);
    m.dma
        .sync_part_for_cpu(&m.board, &mapping, part(range, 0x10, 0x20))
        .unwrap();
    assert_eq!(m.read(0x3010, 0x20), [1; 0x20]);
    assert_eq!(m.read(0x3030, 0x10), [2; 0x10]);
    m.device_write(range.start(), &[3; 0x100]);
    m.unmap(mapping);
    assert_eq!(
        m.read(0x3010, 0x20),
        [1; 0x20],
        "the device changed examined bytes"
    );
    assert_eq!(
        m.read(0x3030, 0x10),
        [2; 0x10],
        "the device changed examined bytes"
    );
    assert_eq!(m.read(0x3040, 0xd0), [3; 0xd0]);
}

#[test]
fn a_sync_for_the_device_lets_the_device_change_the_part_again() {
    let mut m = Machine::new(64, POLICY);
    let mapping = m
        .map(memory(0x3010, 0x100), Direction::Bidirectional)
        .unwrap();
    let range = mapping.range();
    m.device_write(range.start(), &[1; 0x100]);
    m.dma.sync_for_cpu(&m.board, &mapping);
    assert_eq!(m.read(0x3010, 0x100), [1; 0x100]);
    m.write(0x3010, &[9; 0x100]);
    m.dma
        .sync_part_for_device(&m.board, &mapping, part(range, 0x80, 0x40))
        .unwrap();
    let mut wanted = vec![1; 0x100];
    wanted[0x80..0xc0].fill(9);
    assert_eq!(m.device_read(range), wanted, "only the part is copied");
    m.device_write(range.start(), &[5; 0x100]);
    m.unmap(mapping);
    assert_eq!(
        m.read(0x3010, 0x80),
        [9; 0x80],
        "the CPU still owned this part"
    );
    assert_eq!(m.read(0x3090, 0x80), [5; 0x80]);
}

#[test]
fn mappings_that_share_a_buffer_keep_their_copies_apart() {
    let mut m = Machine::new(64, POLICY);
    m.write(0x4000, &pattern(0x40, 1));
    let before = m.read(0x4000, 0x40);
    let [one, two] = [(); 2].map(|()| m.map(memory(0x4000, 0x40), Direction::ToDevice).unwrap());
    m.write(0x4000, &[0xcc; 0x40]);
    m.unmap(one);
    assert_eq!(m.device_read(two.range()), before);
    m.unmap(two);
    // Two buffers divide a word: each unmap changes its own bytes.
    let left = m.map(memory(0x4001, 0x2), Direction::FromDevice).unwrap();
    let right = m.map(memory(0x4003, 0x4), Direction::FromDevice).unwrap();
    assert_ne!(left.iova().align_down(PAGE), right.iova().align_down(PAGE));
    m.device_write(right.iova(), &[0x22; 0x40]);
    m.device_write(left.iova(), &[0x11; 0x40]);
    m.unmap(left);
    assert_eq!(
        m.read(0x4000, 8),
        [0xcc, 0x11, 0x11, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc]
    );
    m.unmap(right);
    assert_eq!(
        m.read(0x4000, 8),
        [0xcc, 0x11, 0x11, 0x22, 0x22, 0x22, 0x22, 0xcc]
    );
}

#[test]
fn a_list_has_one_slot_and_every_piece_its_own_pages() {
    let pieces = [
        memory(0x1ff0, 0x20),
        memory(0x5003, 5),
        memory(0x9000, PAGE),
    ];
    let mut m = Machine::new(64, POLICY);
    for (index, piece) in pieces.iter().enumerate() {
        m.write(
            piece.start().get(),
            &pattern(piece.bytes() as usize, index as u8),
        );
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
    let (list, used) = dma.map_sg(cpu, board, at, request).unwrap();
    assert_eq!(used, 3);
    for (piece, segment) in pieces.iter().zip(out) {
        let buffer = m.read(piece.start().get(), piece.bytes() as usize);
        assert_eq!(m.device_read(segment.range), buffer);
    }
    let whole = pages_of(list.range().unwrap());
    assert_eq!(whole.bytes(), 4 * PAGE);
    m.device_write(whole.start(), &vec![0xdd; whole.bytes() as usize]);
    m.dma.sync_sg_for_cpu(&m.board, &list);
    assert_eq!(
        m.read(0x1fef, 0x22),
        [&[0][..], &[0xdd; 0x20], &[0]].concat()
    );
    m.device_write(whole.start(), &vec![0xee; whole.bytes() as usize]);
    let (board, dma, cpu, at) = m.parts();
    let Released(1) = dma.unmap_sg(cpu, board, at, list).unwrap() else {
        panic!("another buffer");
    };
    assert_eq!(m.read(0x5002, 7), [0, 0xdd, 0xdd, 0xdd, 0xdd, 0xdd, 0]);
    assert!(
        m.read(0x9000, PAGE as usize)
            .iter()
            .all(|byte| *byte == 0xdd)
    );
    assert_eq!(m.space().pool().bytes_in_use(), 0);
}

/// The first bytes of a list are those of its first pieces, not counting the rest of their pages.
#[test]
fn received_bytes_of_a_list_end_in_a_piece() {
    let pieces = [
        memory(0x1ff0, 0x20),
        memory(0x5003, 5),
        memory(0x9000, 0x40),
    ];
    for (received, wanted) in [
        (0, [0, 0, 0]),
        (0x1f, [0x1f, 0, 0]),
        (0x20, [0x20, 0, 0]),
        (0x22, [0x20, 2, 0]),
        (0x25, [0x20, 5, 0]),
        (0x26, [0x20, 5, 1]),
        (0x65, [0x20, 5, 0x40]),
    ] {
        let mut m = Machine::new(64, POLICY);
        let mut out = [DmaSegment {
            range: IovaRange::new(Iova::ZERO, 1).unwrap(),
        }; 4];
        let (board, dma, cpu, at) = m.parts();
        let request = SgRequest {
            buffer: 1,
            pieces: &pieces,
            direction: Direction::FromDevice,
            limits: SgLimits::default(),
            out: &mut out,
        };
        let (list, _) = dma.map_sg(cpu, board, at, request).unwrap();
        let range = list.range().unwrap();
        drop(list);
        let whole = pages_of(range);
        m.device_write(whole.start(), &vec![0xdd; whole.bytes() as usize]);
        let mapping = Mapping::claim(&m.at, range, Direction::FromDevice, 1);
        assert_eq!(m.unmap_received(mapping, received), Some(1));
        for (piece, wanted) in pieces.iter().zip(wanted) {
            let bytes = m.read(piece.start().get(), piece.bytes() as usize);
            let count = bytes.iter().take_while(|byte| **byte == 0xdd).count();
            assert_eq!(count, wanted, "{received} bytes, piece {piece:?}");
            assert!(
                bytes.iter().skip(wanted).all(|byte| *byte == 0),
                "{received} bytes"
            );
        }
        assert_eq!(m.space().pool().bytes_in_use(), 0);
    }
}
