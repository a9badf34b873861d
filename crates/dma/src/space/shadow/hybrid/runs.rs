//! The division of a buffer into parts of pages, which are copied, and whole pages, which are
//! mapped themselves.

use ringfence_types::PhysRange;

use crate::space::GRANULE;

/// Adjacent bytes of a piece of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Run {
    /// A part of one page. The page may hold other data.
    Part(PhysRange),
    /// Whole pages. They hold nothing but the buffer.
    Pages(PhysRange),
}

/// Returns the runs of `piece` in order: the part on its first page, whole pages, and the part on
/// its last page. A run that has no byte is left out.
#[inline]
pub(super) fn runs(piece: &PhysRange) -> impl Iterator<Item = Run> + use<> {
    let (start, size) = (piece.start(), GRANULE.bytes());
    let head = match start.offset_in(size) {
        0 => 0,
        offset => size.saturating_sub(offset).min(piece.bytes()),
    };
    let rest = piece.bytes().saturating_sub(head);
    let tail = rest % size;
    let whole = rest.saturating_sub(tail);
    let pages = start.wrapping_add(head);
    [
        PhysRange::new(start, head).map(Run::Part),
        PhysRange::new(pages, whole).map(Run::Pages),
        PhysRange::new(pages.wrapping_add(whole), tail).map(Run::Part),
    ]
    .into_iter()
    .flatten()
}

/// Returns the bytes of `pieces`.
#[inline]
pub(super) fn bytes_of(pieces: &[PhysRange]) -> u64 {
    let bytes = pieces.iter().map(PhysRange::bytes);
    bytes.fold(0, u64::saturating_add)
}

/// Returns the bytes of `pieces` on whole pages.
#[inline]
pub(super) fn whole_bytes(pieces: &[PhysRange]) -> u64 {
    let whole = pieces.iter().flat_map(runs).map(|run| match run {
        Run::Pages(pages) => pages.bytes(),
        Run::Part(_) => 0,
    });
    whole.fold(0, u64::saturating_add)
}

/// Returns true if all pieces have whole pages only.
#[inline]
pub(super) fn has_whole_pages_only(pieces: &[PhysRange]) -> bool {
    let size = GRANULE.bytes();
    pieces
        .iter()
        .all(|piece| piece.start().is_aligned(size) && piece.bytes().is_multiple_of(size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use ringfence_types::PhysAddr;

    const PAGE: u64 = 4096;

    /// Compares with the owner of each page, for all offsets and lengths around the boundaries of
    /// three pages.
    #[test]
    fn runs_divide_a_piece_at_the_boundaries_of_its_whole_pages() {
        let near = [0, 1, 2, 7, 8, 2048, PAGE - 8, PAGE - 1];
        for offset in near {
            for pages in 0..4 {
                for more in near.into_iter().chain([PAGE]) {
                    let bytes = pages * PAGE + more;
                    let start = PhysAddr::new(5 * PAGE + offset);
                    let Some(piece) = PhysRange::new(start, bytes) else {
                        assert_eq!(bytes, 0);
                        continue;
                    };
                    let found: Vec<Run> = runs(&piece).collect();
                    let mut next = piece.start();
                    let mut whole = 0;
                    for run in &found {
                        let (Run::Part(range) | Run::Pages(range)) = run;
                        assert_eq!(range.start(), next, "{piece}");
                        next = range.start().wrapping_add(range.bytes());
                        match run {
                            Run::Part(part) => {
                                assert!(part.bytes() < PAGE, "{piece}");
                                assert_eq!(part.pages(GRANULE), 1, "{piece}");
                            }
                            Run::Pages(range) => {
                                assert!(range.start().is_aligned(PAGE), "{piece}");
                                whole += range.bytes();
                            }
                        }
                    }
                    assert_eq!(next, piece.start().wrapping_add(bytes), "{piece}");
                    // A page is whole if both of its ends belong to the piece.
                    let inside = |page: u64| {
                        let last = page * PAGE + PAGE - 1;
                        start.get() <= page * PAGE && last < start.get() + bytes
                    };
                    let wanted = (5..12).filter(|page| inside(*page)).count() as u64 * PAGE;
                    assert_eq!(whole, wanted, "{piece}");
                    assert_eq!(whole_bytes(&[piece, piece]), 2 * wanted);
                    assert_eq!(bytes_of(&[piece, piece]), 2 * bytes);
                    assert_eq!(has_whole_pages_only(&[piece]), wanted == bytes, "{piece}");
                }
            }
        }
    }
}
