//! The first and the last page of a buffer, for all offsets and lengths around their boundaries.

use ringfence_dma::flush::Strict;
use ringfence_dma::space::{HybridPolicy, Thresholds};
use ringfence_types::{Access, Direction, Invalidation, Iova, PfnRange};

use super::machine::*;
use crate::rig::*;

const NEAR: [u64; 8] = [0, 1, 7, 8, 9, 2048, PAGE - 8, PAGE - 1];
const BASE: u64 = 0x10_0000;
/// Bytes around all buffers, from `BASE - PAGE`.
const AROUND: usize = 7 * PAGE as usize;

/// Calls `each` with every start and length.
fn each_buffer(mut each: impl FnMut(u64, u64)) {
    for offset in NEAR {
        for pages in 0..4 {
            for more in NEAR {
                let bytes = pages * PAGE + more;
                if bytes > 0 {
                    each(BASE + offset, bytes);
                }
            }
        }
    }
}

/// Returns true if every byte of a page belongs to the buffer.
fn is_whole(page: u64, start: u64, bytes: u64) -> bool {
    start <= page && page + PAGE <= start + bytes
}

#[test]
fn the_device_reaches_whole_pages_and_copies_of_parts() {
    for direction in Direction::ALL {
        let mut m = Machine::new(64, POLICY, Strict);
        let mut number = 0;
        each_buffer(|start, bytes| {
            number += 1;
            let frame = pattern(AROUND, number as u8);
            m.write(BASE - PAGE, &frame);
            let mapping = m.map(memory(start, bytes), direction).unwrap();
            let name = format!("{direction} {start:#x} {bytes:#x}");
            assert_eq!(mapping.range().bytes(), bytes, "{name}");
            assert_eq!(mapping.iova().offset_in(PAGE), start % PAGE, "{name}");
            let pages = pages_of(mapping.range());
            let (first, last) = (start - start % PAGE, start + bytes - 1);
            let any = (first..=last)
                .step_by(PAGE as usize)
                .any(|page| is_whole(page, start, bytes));
            assert_eq!(m.space().split_mappings(), usize::from(any), "{name}");
            let access = match direction {
                Direction::FromDevice => Access::Write,
                _ => Access::Read,
            };
            for page in (first..=last).step_by(PAGE as usize) {
                let iova = pages.start().wrapping_add(page - first);
                let reached = m.translate(iova, access).unwrap().get();
                if is_whole(page, start, bytes) {
                    assert_eq!(reached, page, "{name}: a whole page is copied");
                } else {
                    assert!(reached >= POOL, "{name}: page {page:#x} is not copied");
                }
            }
            // The device reads the buffer. Beside it are zeroes, or what it wrote itself.
            if direction != Direction::FromDevice {
                let found = m.device_read(pages);
                let lead = (start - first) as usize;
                let (before, rest) = found.split_at(lead);
                let (buffer, after) = rest.split_at(bytes as usize);
                assert!(buffer == m.read(start, bytes as usize), "{name}");
                let own = if direction == Direction::ToDevice {
                    0
                } else {
                    0xdd
                };
                let mut beside = before.iter().chain(after);
                assert!(beside.all(|byte| [0, own].contains(byte)), "{name}");
            }
            // It writes all that it reaches. The bytes of the buffer change, and no others.
            let mut wanted = frame.clone();
            if direction != Direction::ToDevice {
                m.device_write(pages.start(), &vec![0xdd; pages.bytes() as usize]);
                let lead = (start - (BASE - PAGE)) as usize;
                wanted[lead..lead + bytes as usize].fill(0xdd);
            }
            let before = m.board.port.log.len();
            assert_eq!(m.unmap(mapping), Some(start), "{name}");
            assert!(m.read(BASE - PAGE, AROUND) == wanted, "{name}");
            // Only a split buffer is invalidated, with all its pages, and is out of reach then.
            let log = &m.board.port.log[before..];
            let inside = m.translate(pages.start(), access).is_some();
            assert_eq!((log.len(), inside), (usize::from(any), !any), "{name}");
            if let [Invalidation::Pages { range, .. }] = log {
                assert_eq!(*range, PfnRange::covering(&pages), "{name}");
            }
        });
        assert_eq!(m.bytes_in_use(), 0);
        // After all unmaps the device reaches nothing but the pool.
        for page in 0..=LAST_PAGE {
            let iova = Iova::new(page << 12);
            let reached = [Access::Read, Access::Write].map(|access| m.translate(iova, access));
            let mut reached = reached.iter().flatten();
            assert!(reached.all(|at| at.get() >= POOL), "{iova}");
        }
    }
}

#[test]
fn an_unmap_copies_the_received_bytes_of_a_part() {
    let mut m = Machine::new(64, POLICY, Strict);
    let (start, bytes) = (BASE + 0xf00, 0x100 + PAGE + 0x80);
    let (head, tail) = (0x100, 0x100 + PAGE);
    for received in [
        0,
        1,
        0xff,
        0x100,
        0x101,
        tail - 1,
        tail,
        tail + 1,
        bytes - 1,
        bytes,
    ] {
        let frame = pattern(AROUND, 9);
        m.write(BASE - PAGE, &frame);
        let mapping = m.map(memory(start, bytes), Direction::FromDevice).unwrap();
        m.device_write(mapping.iova(), &vec![0xdd; bytes as usize]);
        m.unmap_received(mapping, received);
        let lead = (start - (BASE - PAGE)) as usize;
        for (at, byte) in m.read(BASE - PAGE, AROUND).into_iter().enumerate() {
            let offset = (at as u64).wrapping_sub(lead as u64);
            // The device wrote the whole page itself.
            let is_written = (head..tail).contains(&offset) || offset < received.min(bytes);
            let wanted = if is_written { 0xdd } else { frame[at] };
            assert_eq!(byte, wanted, "{received} bytes, at {offset:#x}");
        }
    }
}

#[test]
fn the_threshold_counts_whole_pages() {
    let threshold = 2 * PAGE;
    let mut m = Machine::new(
        64,
        HybridPolicy {
            thresholds: Thresholds::both(threshold),
            ..POLICY
        },
        Strict,
    );
    for (offset, bytes, split) in [
        (0, 2 * PAGE - 1, false),
        (0, 2 * PAGE, true),
        (1, 3 * PAGE - 2, false),
        (1, 3 * PAGE - 1, true),
        (0x800, 2 * PAGE, false),
        (0x800, 3 * PAGE, true),
    ] {
        let mapping = m
            .map(memory(BASE + offset, bytes), Direction::ToDevice)
            .unwrap();
        assert_eq!(
            m.space().split_mappings(),
            usize::from(split),
            "{bytes:#x} bytes at {offset:#x}"
        );
        m.unmap(mapping);
    }
    let mut m = Machine::new(
        64,
        HybridPolicy {
            thresholds: Thresholds::both(u64::MAX),
            ..POLICY
        },
        Strict,
    );
    let mapping = m.map(memory(BASE, 32 * PAGE), Direction::ToDevice).unwrap();
    assert_eq!(m.space().split_mappings(), 0);
    m.unmap(mapping);
}
