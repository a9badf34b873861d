//! The memory that a device reaches at a mapping of which the layer copies parts.

use ringfence_types::{IovaRange, PageSize, PhysRange};

use crate::error::LabError;

/// Returns the memory that a device reaches at the mapping of `pieces` at `range`, in runs at
/// consecutive pages. `copies` are the copied parts of pages as the layer reports them, in the
/// order of addresses: the addresses of each, and its copy. All other bytes are the buffer's own.
///
/// # Errors
/// A copy is not in `pool`, or does not replace a part of a page at its offset in the page.
pub fn with_copies(
    pieces: &[PhysRange],
    range: IovaRange,
    copies: &[(IovaRange, PhysRange)],
    pool: PhysRange,
) -> Result<Vec<PhysRange>, LabError> {
    let size = PageSize::Size4K.bytes();
    let mut reached = Vec::with_capacity(pieces.len() + copies.len());
    let mut copies = copies.iter().peekable();
    let mut page = range.start().align_down(size);
    for piece in pieces {
        let mut left = Some(*piece);
        while let Some(rest) = left {
            let offset = rest.start().offset_in(size);
            let bytes = match rest.bytes() {
                bytes if offset > 0 => bytes.min(size - offset),
                bytes if bytes >= size => bytes - bytes % size,
                bytes => bytes,
            };
            let run = PhysRange::new(rest.start(), bytes).ok_or(NO_RUN)?;
            let at = page.wrapping_add(offset);
            let replaces = |(of, copy): &&(IovaRange, PhysRange)| {
                of.start() == at
                    && of.bytes() == bytes
                    && bytes < size
                    && copy.bytes() == bytes
                    && copy.start().offset_in(size) == offset
                    && pool.contains(copy)
            };
            reached.push(copies.next_if(replaces).map_or(run, |(_, copy)| *copy));
            page = page.wrapping_add(run.pages(PageSize::Size4K) << PageSize::Size4K.shift());
            let next = rest.start().wrapping_add(bytes);
            left = PhysRange::new(next, rest.bytes() - bytes);
        }
    }
    match copies.next() {
        None => Ok(reached),
        Some(_) => Err(LabError::Internal("a copy of no part of a page")),
    }
}

const NO_RUN: LabError = LabError::Internal("an empty run");

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_types::{Iova, PhysAddr};

    fn pa(start: u64, bytes: u64) -> PhysRange {
        PhysRange::new(PhysAddr::new(start), bytes).unwrap()
    }

    fn io(start: u64, bytes: u64) -> IovaRange {
        IovaRange::new(Iova::new(start), bytes).unwrap()
    }

    #[test]
    fn only_copies_of_parts_of_pages_in_the_pool_replace_bytes() {
        let pool = pa(0x80_0000, 0x1_0000);
        let pieces = [pa(0x1f00, 0x1200), pa(0x7000, 0x1008)];
        let range = io(0x4_0f00, 0x3108);
        let head = (io(0x4_0f00, 0x100), pa(0x80_0f00, 0x100));
        let tail = (io(0x4_2000, 0x100), pa(0x80_2000, 0x100));
        let last = (io(0x4_4000, 8), pa(0x80_3000, 8));
        let reached = |copies: &[_]| with_copies(&pieces, range, copies, pool).ok();
        let own = [pa(0x1f00, 0x100), pa(0x2000, 0x1000), pa(0x3000, 0x100)];
        let next = [pa(0x7000, 0x1000), pa(0x8000, 8)];
        assert_eq!(reached(&[]), Some([&own[..], &next].concat()));
        let all = [head.1, own[1], tail.1, next[0], last.1];
        assert_eq!(reached(&[head, tail, last]), Some(all.to_vec()));
        let wrong = [
            (head.0, pa(0x80_0f08, 0x100)),
            (head.0, pa(0x70_0f00, 0x100)),
            (head.0, pa(0x80_0f00, 0xff)),
            (io(0x4_0f01, 0xff), pa(0x80_0f01, 0xff)),
            (io(0x4_1000, 0x1000), pa(0x80_1000, 0x1000)),
            (io(0x4_5000, 8), pa(0x80_1000, 8)),
        ];
        for copy in wrong {
            assert_eq!(reached(&[copy]), None, "{copy:?}");
        }
        assert_eq!(reached(&[tail, head]), None, "out of order");
    }
}
