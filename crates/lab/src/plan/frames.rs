//! Contiguous frames for large buffers: a permutation of the frames of a trace.
//!
//! The pages of a buffer of at least 16 pages (64 KiB) move to contiguous, aligned frames, and the
//! pages of those frames move to the frames that become free. The frame of a page never changes
//! once a buffer has used the page. So two buffers of the plan share a page exactly if they share
//! one in the trace, and buffers of fewer pages stay where they were recorded, unless they use a
//! moved page.

use ringfence_trace::ARENA_BYTES;
use ringfence_types::{PageSize, PhysAddr, PhysRange};

use crate::error::LabError;

const GRANULE: u64 = PageSize::Size4K.bytes();
const FRAMES: u64 = ARENA_BYTES / GRANULE;
/// Fewest pages of a buffer that moves: one large entry.
const SMALLEST: u64 = PageSize::Size64K.granules();
/// Largest alignment of a buffer.
const LARGEST: u64 = PageSize::Size2M.granules();
/// Most pieces of all buffers, in addition to those recorded. A page that moved splits every later
/// segment around it.
const MAX_SPLITS: u64 = 1 << 24;

/// Frames that differ from those of the trace.
#[derive(Debug)]
pub(super) struct ContiguousFrames {
    /// Frame of each page, plus 1; 0 for a page that has not moved. Zeroed memory that is never
    /// touched takes no space.
    moved: Vec<u32>,
    /// A bit for each page that a buffer has used.
    used: Vec<u64>,
    /// The frames from here on are taken.
    free_below: u64,
    splits: u64,
    max_splits: u64,
    /// The pages of the current buffer.
    pages: Vec<u64>,
    /// The pieces of the current buffer.
    pieces: Vec<PhysRange>,
}

impl ContiguousFrames {
    pub(super) fn new() -> Self {
        Self {
            moved: vec![0; FRAMES as usize],
            used: vec![0; (FRAMES / 64) as usize],
            free_below: FRAMES,
            splits: 0,
            max_splits: MAX_SPLITS,
            pages: Vec::new(),
            pieces: Vec::new(),
        }
    }

    /// Assigns frames to the pages of `buffer` that no buffer has used yet. Returns the pieces of
    /// `buffer` in their frames.
    ///
    /// # Errors
    /// Moved pages split the buffers of the trace into too many pieces.
    pub(super) fn assign(&mut self, buffer: &[PhysRange]) -> Result<&[PhysRange], LabError> {
        let count: u64 = buffer.iter().map(count).sum();
        self.settle(buffer, count);
        self.pieces.clear();
        for piece in buffer {
            self.split(piece, count >= SMALLEST);
        }
        let added = self.pieces.len().saturating_sub(buffer.len()) as u64;
        self.splits = self.splits.saturating_add(added);
        let limit = self.max_splits;
        match self.splits > limit {
            true => Err(LabError::SplitBuffers { limit }),
            false => Ok(&self.pieces),
        }
    }

    /// Decides the frames of the `count` pages of `buffer`.
    fn settle(&mut self, buffer: &[PhysRange], count: u64) {
        if count < SMALLEST {
            for piece in buffer {
                each(piece, |page| _ = self.mark(page));
            }
            return;
        }
        // The index in the buffer of each page that no buffer has used yet.
        let mut fresh = std::mem::take(&mut self.pages);
        fresh.clear();
        let mut index = 0;
        for piece in buffer {
            each(piece, |page| {
                if self.mark(page) {
                    fresh.extend([index, page]);
                }
                index += 1;
            });
        }
        let aligned = self.is_aligned(buffer);
        if !fresh.is_empty()
            && !aligned
            && let Some(first) = self.find_room(count)
        {
            for pair in fresh.chunks_exact(2) {
                self.swap(pair[1], first + pair[0]);
            }
        }
        self.pages = fresh;
    }

    /// Returns true if the buffer lies in aligned, contiguous frames already.
    fn is_aligned(&self, buffer: &[PhysRange]) -> bool {
        let [only] = buffer else {
            return false;
        };
        let (first, last) = pages(only);
        let stays = (first..=last).all(|page| self.frame(page) == page);
        stays && first.is_multiple_of(alignment(count(only)))
    }

    /// Marks a page as used. Returns true if it was not.
    fn mark(&mut self, page: u64) -> bool {
        let Some(word) = self.used.get_mut((page / 64) as usize) else {
            return false;
        };
        let bit = 1 << (page % 64);
        let first = *word & bit == 0;
        *word |= bit;
        first
    }

    fn frame(&self, page: u64) -> u64 {
        match self.moved.get(page as usize) {
            Some(0) | None => page,
            Some(frame) => u64::from(*frame) - 1,
        }
    }

    /// Finds `count` frames whose pages are not used and have not moved, from the top down. The
    /// search never returns to frames above, so all searches together are linear.
    fn find_room(&mut self, count: u64) -> Option<u64> {
        let align = alignment(count);
        loop {
            let first = self.free_below.checked_sub(count)? / align * align;
            let taken = (first..first + count).rev().find(|page| {
                let word = self.used.get((*page / 64) as usize).copied();
                word.is_none_or(|word| word & 1 << (*page % 64) != 0) || self.frame(*page) != *page
            });
            self.free_below = taken.unwrap_or(first);
            if taken.is_none() {
                return Some(first);
            }
        }
    }

    /// Gives `page` the frame `to`, and the page that has it the frame of `page`.
    fn swap(&mut self, page: u64, to: u64) {
        let from = self.frame(page);
        for (page, frame) in [(to, from), (page, to)] {
            if let Some(entry) = self.moved.get_mut(page as usize) {
                *entry = u32::try_from(frame + 1).unwrap_or_default();
            }
        }
    }

    /// Appends `piece` in its frames to the pieces. Merges adjacent frames of the piece, and with
    /// `large` also whole pages of adjacent segments, as the block layer does.
    fn split(&mut self, piece: &PhysRange, large: bool) {
        let (mut at, last) = (piece.start().get(), piece.last().get());
        let first = self.pieces.len();
        while at <= last {
            let end = (at | (GRANULE - 1)).min(last);
            let frame = self.frame(at / GRANULE) * GRANULE;
            let [start, end_at] = [at, end].map(|at| PhysAddr::new(frame + at % GRANULE));
            let whole = large && start.is_aligned(GRANULE);
            let open = self.pieces.len() > first || whole;
            let merged = match self.pieces.last() {
                Some(before) if open && before.last().get() + 1 == start.get() => {
                    PhysRange::inclusive(before.start(), end_at)
                }
                _ => None,
            };
            match (merged, self.pieces.last_mut()) {
                (Some(merged), Some(before)) => *before = merged,
                _ => self.pieces.extend(PhysRange::inclusive(start, end_at)),
            }
            at = end + 1;
        }
    }
}

/// Returns the alignment of a buffer of `count` pages, in pages: that of Linux's IOVAs, up to a
/// leaf of 2 MiB.
fn alignment(count: u64) -> u64 {
    count.next_power_of_two().min(LARGEST)
}

/// Returns the first and the last page of a piece.
fn pages(piece: &PhysRange) -> (u64, u64) {
    (piece.start().get() / GRANULE, piece.last().get() / GRANULE)
}

/// Returns the number of pages of a piece.
fn count(piece: &PhysRange) -> u64 {
    let (first, last) = pages(piece);
    last - first + 1
}

fn each(piece: &PhysRange, each: impl FnMut(u64)) {
    let (first, last) = pages(piece);
    (first..=last).for_each(each);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_bounded() {
        let pages =
            |first, count| PhysRange::new(PhysAddr::new(first * GRANULE), count * GRANULE).unwrap();
        let mut frames = ContiguousFrames::new();
        frames.max_splits = 64;
        // Every second page moves, so the whole range becomes 32 pieces.
        let scattered: Vec<_> = (0..16).map(|index| pages(2 * index + 1, 1)).collect();
        assert_eq!(frames.assign(&scattered).unwrap().len(), 1);
        assert_eq!(frames.assign(&[pages(0, 32)]).unwrap().len(), 32);
        assert_eq!(frames.assign(&[pages(0, 32)]).unwrap().len(), 32);
        let over = frames.assign(&[pages(0, 32)]);
        assert!(matches!(over, Err(LabError::SplitBuffers { limit: 64 })));
    }
}
