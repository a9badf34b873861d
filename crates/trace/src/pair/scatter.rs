//! Computes the segments of a scatterlist. Linux prints the starts of the caller's segments and the
//! lengths of the DMA segments after merging, but not the lengths of the caller's segments.

use super::window::Piece;

const PAGE: u64 = 4096;

/// One segment: start and number of bytes.
pub(super) type Segment = (u64, u64);

/// Origin of the lengths of a scatterlist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lengths {
    /// From `iommu:map` lines, or printed in the trace.
    Exact,
    /// Guessed, because merging has hidden them.
    Guessed,
}

/// Appends the caller's segments to `out`.
///
/// With `iommu:map` lines, the function follows each DMA segment through them. They give the
/// physical address of each of its bytes, so the result is exact at the ends of DMA segments. Linux
/// merges only at page boundaries, so it is exact between them too. A piece is split at each start
/// of the caller's list that lies inside it. Pieces after the end of a truncated list become
/// segments.
///
/// Without such lines, the lengths are the printed ones if there are as many DMA segments as
/// segments. Otherwise merging has hidden the lengths. Each segment then ends at the end of its
/// page, where Linux may merge, and the last segment of a DMA segment takes the remaining bytes.
pub(super) fn segments(
    dma: (&[u64], &[u64]),
    phys_addrs: &[u64],
    pieces: &[Piece],
    out: &mut Vec<Segment>,
) -> Lengths {
    let before = out.len();
    if !pieces.is_empty() && follow(dma, phys_addrs, pieces, out).is_some() {
        return Lengths::Exact;
    }
    out.truncate(before);
    let (starts, sizes) = dma;
    if starts.len() == phys_addrs.len() {
        out.extend(phys_addrs.iter().copied().zip(sizes.iter().copied()));
        return Lengths::Exact;
    }
    guess(sizes, phys_addrs, out);
    Lengths::Guessed
}

/// Returns `None` if the pieces do not cover the DMA segments.
fn follow(
    (starts, sizes): (&[u64], &[u64]),
    phys_addrs: &[u64],
    pieces: &[Piece],
    out: &mut Vec<Segment>,
) -> Option<()> {
    let mut list = phys_addrs.iter().copied().peekable();
    let mut pieces = pieces.iter().copied().peekable();
    for (&start, &size) in starts.iter().zip(sizes) {
        let mut at = start;
        let mut left = size;
        while left > 0 {
            while !pieces.peek()?.contains(at) {
                pieces.next();
            }
            let piece = pieces.peek()?;
            let offset = at.wrapping_sub(piece.iova);
            let run = left.min(piece.size - offset);
            push_run(piece.phys.wrapping_add(offset), run, &mut list, out);
            at = at.wrapping_add(run);
            left -= run;
        }
    }
    // The list of DMA segments may be truncated: append the remaining pieces whole.
    let end = starts.last().zip(sizes.last())?;
    let end = end.0.wrapping_add(*end.1);
    let following = pieces.skip_while(|piece| piece.iova.wrapping_sub(end) > u64::MAX / 2);
    for piece in following {
        push_run(piece.phys, piece.size, &mut list, out);
    }
    Some(())
}

/// Appends contiguous bytes. Splits them at the starts of the caller's list, and otherwise merges
/// them with the previous segment.
fn push_run(
    mut phys: u64,
    mut bytes: u64,
    list: &mut std::iter::Peekable<impl Iterator<Item = u64>>,
    out: &mut Vec<Segment>,
) {
    while bytes > 0 {
        let listed = list.next_if_eq(&phys).is_some();
        // Ends at the next start if it lies inside this run.
        let part = match list.peek() {
            Some(&next) if next > phys && next - phys < bytes => next - phys,
            _ => bytes,
        };
        match out.last_mut() {
            Some((start, length)) if !listed && start.wrapping_add(*length) == phys => {
                *length += part;
            }
            _ => out.push((phys, part)),
        }
        phys = phys.wrapping_add(part);
        bytes -= part;
    }
}

fn guess(sizes: &[u64], phys_addrs: &[u64], out: &mut Vec<Segment>) {
    let mut starts = phys_addrs.iter().copied();
    let mut remaining = phys_addrs.len();
    for (index, &size) in sizes.iter().enumerate() {
        let mut left = size;
        // Each later DMA segment needs at least one start.
        let later = sizes.len() - index - 1;
        while left > 0 {
            let Some(start) = starts.next() else {
                // There are more bytes than starts; the last segment is longer.
                if let Some((_, length)) = out.last_mut() {
                    *length = length.saturating_add(left);
                }
                break;
            };
            remaining -= 1;
            let bytes = match remaining <= later {
                true => left,
                false => left.min(PAGE - start % PAGE),
            };
            out.push((start, bytes));
            left -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(
        dma: &[(u64, u64)],
        phys: &[u64],
        pieces: &[(u64, u64, u64)],
    ) -> (Vec<Segment>, Lengths) {
        let (starts, sizes): (Vec<u64>, Vec<u64>) = dma.iter().copied().unzip();
        let pieces: Vec<Piece> = pieces
            .iter()
            .map(|&(iova, phys, size)| Piece { iova, phys, size })
            .collect();
        let mut out = Vec::new();
        let lengths = segments((&starts, &sizes), phys, &pieces, &mut out);
        (out, lengths)
    }

    #[test]
    fn lengths_follow_the_iommu_lines() {
        use Lengths::{Exact, Guessed};
        type Case<'a> = (
            &'a str,
            &'a [(u64, u64)],
            &'a [u64],
            &'a [(u64, u64, u64)],
            &'a [Segment],
            Lengths,
        );
        let cases: [Case<'_>; 10] = [
            (
                "a buffer inside a page",
                &[(0xffe6_c900, 0x200)],
                &[0x1900],
                &[(0xffe6_c000, 0x1000, 0x1000)],
                &[(0x1900, 0x200)],
                Exact,
            ),
            (
                "two merged, the first from the middle of a page",
                &[(0x10800, 0x1800)],
                &[0x1800, 0x5000],
                &[(0x10000, 0x1000, 0x1000), (0x11000, 0x5000, 0x1000)],
                &[(0x1800, 0x800), (0x5000, 0x1000)],
                Exact,
            ),
            (
                "physically contiguous segments are one piece",
                &[(0x10000, 0x3000)],
                &[0x4000, 0x5000],
                &[(0x10000, 0x4000, 0x3000)],
                &[(0x4000, 0x1000), (0x5000, 0x2000)],
                Exact,
            ),
            (
                "a segment of several pieces stays one",
                &[(0x10000, 0x3000)],
                &[0x4000],
                &[(0x10000, 0x4000, 0x1000), (0x11000, 0x5000, 0x2000)],
                &[(0x4000, 0x3000)],
                Exact,
            ),
            (
                "a cut list: pieces behind it stand for themselves",
                &[(0x10000, 0x3000)],
                &[0x4000],
                &[
                    (0x10000, 0x4000, 0x1000),
                    (0x11000, 0x8000, 0x1000),
                    (0x12000, 0x9000, 0x1000),
                ],
                &[(0x4000, 0x1000), (0x8000, 0x2000)],
                Exact,
            ),
            (
                "a cut list of DMA segments",
                &[(0x10000, 0x1000)],
                &[0x4000],
                &[(0x10000, 0x4000, 0x1000), (0x11000, 0x8000, 0x2000)],
                &[(0x4000, 0x1000), (0x8000, 0x2000)],
                Exact,
            ),
            (
                "no IOMMU: as printed",
                &[(0x4000, 0x1000), (0x9000, 0x200)],
                &[0x4000, 0x9000],
                &[],
                &[(0x4000, 0x1000), (0x9000, 0x200)],
                Exact,
            ),
            (
                "merged and no lines: page ends",
                &[(0x10800, 0x2800)],
                &[0x1800, 0x5000, 0x7000],
                &[],
                &[(0x1800, 0x800), (0x5000, 0x1000), (0x7000, 0x1000)],
                Guessed,
            ),
            (
                "pieces that do not cover: as without",
                &[(0x10800, 0x1800)],
                &[0x1800, 0x5000],
                &[(0x10000, 0x1000, 0x1000)],
                &[(0x1800, 0x800), (0x5000, 0x1000)],
                Guessed,
            ),
            (
                "every later DMA segment gets a start",
                &[(0x10000, 0x4000), (0x20000, 0x100)],
                &[0x1000, 0x9000, 0x5000],
                &[],
                &[(0x1000, 0x1000), (0x9000, 0x3000), (0x5000, 0x100)],
                Guessed,
            ),
        ];
        for (name, dma, phys, pieces, expected, lengths) in cases {
            assert_eq!(
                run(dma, phys, pieces),
                (expected.to_vec(), lengths),
                "{name}"
            );
        }
    }

    #[test]
    fn no_byte_is_lost_or_invented() {
        let mut seed = 1u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(99);
            (seed >> 33) % below
        };
        for _ in 0..2000 {
            let dma: Vec<(u64, u64)> = (0..=random(4))
                .map(|n| (n << 20 | random(4096), 1 + random(0x8000)))
                .collect();
            let phys: Vec<u64> = (0..=random(9)).map(|_| random(1 << 40)).collect();
            let (out, _) = run(&dma, &phys, &[]);
            // With fewer starts than DMA segments, the bytes without a start cannot be placed.
            let total = |list: &[(u64, u64)]| list.iter().map(|segment| segment.1).sum::<u64>();
            if phys.len() >= dma.len() {
                assert_eq!(total(&out), total(&dma), "{dma:x?} {phys:x?}");
            }
        }
    }
}
