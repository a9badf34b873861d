//! A device that maps a small set of pages repeatedly, like the paper's TCP_STREAM (PVIOMMU Table
//! 5).

use ringfence_trace::{Chunk, DeviceIndex, MapClass, MapFlags, MappingId, Op, OpKind, SegmentSpan};
use ringfence_types::{Direction, Nanos, PhysAddr, PhysRange};

use ringfence_lab::LabError;

/// Duration of the paper's benchmark, in nanoseconds.
pub(super) const DURATION: u64 = 10_000_000_000;
/// First page frame number. One second-stage table covers it and the pages after it.
const FIRST: u64 = 512;
const PAGE: u64 = 4096;

/// Returns `creates` mappings of one page each, every one unmapped before the next. They cycle
/// through `pages` pages, begin at `begin` (ns) and last [`DURATION`].
pub(super) fn stream(creates: u64, pages: u64, begin: u64) -> Result<Chunk, LabError> {
    let mut chunk = Chunk::default();
    for number in 0..creates {
        let page = FIRST + number % pages.max(1);
        let piece = PhysRange::new(PhysAddr::new(page * PAGE), PAGE);
        chunk
            .segments
            .push(piece.ok_or(LabError::Internal("a page"))?);
        let id = MappingId(0);
        let map = OpKind::Map {
            id,
            direction: Direction::FromDevice,
            class: MapClass::Single,
            flags: MapFlags::NONE,
            segments: SegmentSpan {
                first: number as u32,
                count: 1,
            },
        };
        let apart = DURATION / creates.max(1);
        for (half, kind) in [map, OpKind::Unmap { id }].into_iter().enumerate() {
            chunk.ops.push(Op {
                time: Nanos(begin + number * apart + half as u64 * apart / 2),
                device: DeviceIndex(0),
                cpu: 0,
                lines: 1,
                kind,
            });
        }
    }
    Ok(chunk)
}
