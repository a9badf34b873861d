//! The mappings of one domain, in order of address.
//!
//! The store has two levels: leaves of at most 32 sorted mappings, and an array of the first
//! address of each leaf. A lookup is a binary search in the array, which stays in the CPU cache,
//! and another in a leaf. An insertion moves half a leaf on average. A request near the previous
//! one finds its leaf without a search. `benches/request.rs` compares the store with a balanced
//! tree.
//!
//! Drivers nearly always unmap exactly one mapping, from its first address to its last. A hint
//! table (`position_hints.rs`) gives its likely position. The store checks the entry there, which
//! does not depend on the number of mappings. It searches only after a wrong hint.
//!
//! Drivers often map again what they unmapped last, because Linux's IOVA caches are stacks. After
//! the removal of a single mapping, its slot therefore stays vacant until a mapping reuses it or
//! the store changes elsewhere.
//!
//! Memory is bounded: two adjacent leaves hold more than half a leaf together. So there are at most
//! `4 n / 32 + 1` leaves for n mappings, and at most four hints of 4 bytes per mapping.

mod leaves;
mod position_hints;

use self::leaves::{LEAF, Leaves};
use self::position_hints::PositionHints;

/// A mapping, packed so that it does not cross a cache line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(align(32))]
pub(crate) struct Entry {
    /// First IOVA of the mapping.
    pub(crate) start: u64,
    /// Last address, at least `start`.
    pub(crate) last: u64,
    /// Guest-physical address of the first byte.
    pub(crate) physical: u64,
    /// Flags of the MAP request.
    pub(crate) flags: u32,
}

impl Entry {
    #[inline]
    const fn is_vacant(&self) -> bool {
        self.flags & VACANT != 0
    }
}

/// Marks the vacant slot in an entry's flags. No request can set this flag.
const VACANT: u32 = 1 << 31;

/// Two adjacent leaves with no more mappings than this are merged.
const SPARSE: usize = LEAF / 2;

/// The mappings of one domain.
#[derive(Debug, Default)]
pub(crate) struct MappingStore {
    leaves: Leaves,
    /// Position of the last changed leaf, as a hint.
    hot: usize,
    hints: PositionHints,
    len: usize,
    /// Slot of the last removed mapping. The entry keeps its position in the order but is not
    /// valid.
    vacant: Option<EntryPosition>,
}

/// Position of a mapping. Valid until an insertion or removal in the same leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EntryPosition {
    /// Number of the leaf, which stays valid when other leaves are added or removed.
    leaf: usize,
    at: usize,
}

/// Consecutive mappings found by [`MappingStore::covered`]. Valid until the next change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    /// Position of the first mapping.
    first: EntryPosition,
    /// Position of its leaf. Not valid if `count` is 1.
    position: usize,
    pub(crate) count: usize,
}

/// Reason why a mapping was not inserted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InsertError {
    /// It overlaps an existing mapping.
    Overlap,
    /// Out of host memory.
    OutOfMemory,
}

impl MappingStore {
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Inserts `entry` unless it overlaps another mapping.
    #[inline]
    pub(crate) fn insert(&mut self, entry: Entry) -> Result<(), InsertError> {
        if let Some(vacant) = self.vacant {
            if let Some(slot) = self.leaves.entry_mut(vacant.leaf, vacant.at)
                && slot.start == entry.start
                && slot.last >= entry.last
            {
                // The removed mapping overlapped nothing, and the new one is not longer.
                *slot = entry;
                self.vacant = None;
                self.len += 1;
                return Ok(());
            }
            self.close();
        }
        self.insert_anywhere(entry)
    }

    fn insert_anywhere(&mut self, entry: Entry) -> Result<(), InsertError> {
        let mut leaf = self.leaf_for(entry.start);
        let Some(run) = self.leaves.run(leaf) else {
            return self.add_leaf(0, entry);
        };
        let mut at = upper(run, entry.start);
        let below = at.checked_sub(1).and_then(|below| run.get(below));
        if below.is_some_and(|below| below.last >= entry.start) {
            return Err(InsertError::Overlap);
        }
        let above = match run.get(at) {
            Some(above) => Some(above.start),
            None => self.leaves.first(leaf + 1),
        };
        if above.is_some_and(|above| above <= entry.last) {
            return Err(InsertError::Overlap);
        }
        if run.len() >= LEAF {
            // Mappings often come in ascending or descending order. Then full leaves stay full.
            if at == 0 {
                return self.add_leaf(leaf, entry);
            }
            if at == run.len() && leaf + 1 == self.leaves.len() {
                return self.add_leaf(leaf + 1, entry);
            }
            self.leaves.split(leaf)?;
            let above = self.leaves.first(leaf + 1);
            if above.is_some_and(|first| first <= entry.start) {
                leaf += 1;
                at -= LEAF / 2;
            }
        }
        self.leaves.put(leaf, at, entry);
        self.inserted(leaf, at, entry);
        Ok(())
    }

    /// Creates a leaf with only `entry` at position `leaf`.
    fn add_leaf(&mut self, leaf: usize, entry: Entry) -> Result<(), InsertError> {
        self.leaves.add(leaf, entry)?;
        self.inserted(leaf, 0, entry);
        Ok(())
    }

    fn inserted(&mut self, leaf: usize, at: usize, entry: Entry) {
        self.len += 1;
        self.hot = leaf;
        if self.hints.is_too_small(self.len) {
            self.hints.rebuild(self.len, self.leaves.slots());
        }
        if let Some(leaf) = self.leaves.number(leaf) {
            self.hints.put(entry.start, leaf, at);
        }
    }

    /// Returns the mapping that contains `address`.
    #[inline]
    pub(crate) fn lookup(&self, address: u64) -> Option<&Entry> {
        let run = self.leaves.run(self.leaf_for(address))?;
        let entry = run.get(upper(run, address).checked_sub(1)?)?;
        // No other mapping overlaps the vacant slot.
        (entry.last >= address && !entry.is_vacant()).then_some(entry)
    }

    /// Returns true if a mapping overlaps `start..=last`.
    pub(crate) fn touches(&self, start: u64, last: u64) -> bool {
        let (leaf, at) = self.first_from(start);
        self.entries_from(leaf, at)
            .find(|entry| !entry.is_vacant())
            .is_some_and(|entry| entry.start <= last)
    }

    /// Returns the mappings that overlap `start..=last`, if the range covers all of them. Otherwise
    /// returns the first one that it covers only in part.
    #[inline]
    pub(crate) fn covered(&mut self, start: u64, last: u64) -> Result<Span, Entry> {
        self.close();
        if let Some(hint) = self.hints.get(start)
            && let Some(entry) = self.entry(hint)
            && (entry.start, entry.last) == (start, last)
        {
            return Ok(Span {
                first: hint,
                position: 0,
                count: 1,
            });
        }
        self.search(start, last)
    }

    /// Slow path of [`covered`](Self::covered), without a hint or after a wrong one.
    #[inline(never)]
    fn search(&mut self, start: u64, last: u64) -> Result<Span, Entry> {
        let (position, at) = self.first_from(start);
        let mut count = 0;
        for entry in self.entries_from(position, at) {
            if entry.start > last {
                break;
            }
            if entry.start < start || entry.last > last {
                return Err(*entry);
            }
            count += 1;
        }
        let leaf = self.leaves.number(position).unwrap_or_default();
        if count > 0 {
            self.hints.put(start, leaf, at);
        }
        Ok(Span {
            first: EntryPosition { leaf, at },
            position,
            count,
        })
    }

    /// Returns the mappings of `span`, in order.
    #[inline]
    pub(crate) fn span(&self, span: Span) -> impl Iterator<Item = &Entry> {
        let first = self.entry(span.first).filter(|_| span.count > 0);
        let rest = self.entries_from(span.position, span.first.at + 1);
        first
            .into_iter()
            .chain(rest.take(span.count.saturating_sub(1)))
    }

    /// Returns all mappings, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.entries_from(0, 0).filter(|entry| !entry.is_vacant())
    }

    /// Removes the mappings of `span`. Cannot fail.
    #[inline]
    pub(crate) fn remove(&mut self, span: Span) {
        let first = span.first;
        if span.count == 1
            && let Some(entry) = self.leaves.entry_mut(first.leaf, first.at)
        {
            entry.flags |= VACANT;
            self.vacant = Some(first);
            self.len -= 1;
            return;
        }
        self.remove_all(span.position, first.at, span.count);
    }

    /// Frees the vacant slot, if any.
    #[inline]
    fn close(&mut self) {
        if let Some(entry_position) = self.vacant.take() {
            self.give_up(entry_position);
        }
    }

    #[cold]
    fn give_up(&mut self, entry_position: EntryPosition) {
        if let Some(entry) = self.entry(entry_position) {
            let position = self.leaf_for(entry.start);
            self.len += 1;
            self.remove_all(position, entry_position.at, 1);
        }
    }

    /// Removes `count` mappings, starting at slot `at` of the leaf at position `leaf`.
    fn remove_all(&mut self, mut leaf: usize, at: usize, count: usize) {
        if count == 0 {
            return;
        }
        let mut left = count;
        // The end or the middle of the first leaf.
        if at > 0 || self.leaves.run(leaf).is_some_and(|run| run.len() > left) {
            left -= self.leaves.drain(leaf, at, left);
            if left > 0 {
                leaf += 1;
            }
        }
        // Remove whole leaves together, so that the leaves after them move only once.
        let mut whole_runs = 0;
        while let Some(run) = self.leaves.run(leaf + whole_runs)
            && left > 0
            && run.len() <= left
        {
            left -= run.len();
            whole_runs += 1;
        }
        self.leaves.unlink(leaf, whole_runs);
        if left > 0 {
            left -= self.leaves.drain(leaf, 0, left);
        }
        self.len -= count - left;
        self.join(leaf);
        self.join(leaf.saturating_sub(1));
        self.hot = leaf.min(self.leaves.len().saturating_sub(1));
    }

    /// Removes the mapping that starts at `start`.
    pub(crate) fn remove_at(&mut self, start: u64) {
        self.close();
        let leaf = self.leaf_for(start);
        let found = self
            .leaves
            .run(leaf)
            .and_then(|run| run.binary_search_by_key(&start, |entry| entry.start).ok());
        if let Some(at) = found {
            self.remove_all(leaf, at, 1);
        }
    }

    #[inline]
    fn entry(&self, entry_position: EntryPosition) -> Option<&Entry> {
        self.leaves
            .numbered(entry_position.leaf)?
            .get(entry_position.at)
    }

    /// Returns the position of the leaf for a mapping that starts at `address`.
    #[inline]
    fn leaf_for(&self, address: u64) -> usize {
        let hot = self.hot;
        let first = self.leaves.first(hot);
        if first.is_some_and(|first| first <= address)
            && self.leaves.first(hot + 1).is_none_or(|next| address < next)
        {
            return hot;
        }
        self.leaves.position_of(address)
    }

    /// Returns the position of the leaf and the slot of the first mapping that ends at or above
    /// `address`.
    #[inline]
    fn first_from(&self, address: u64) -> (usize, usize) {
        let leaf = self.leaf_for(address);
        let Some(run) = self.leaves.run(leaf) else {
            return (leaf, 0);
        };
        let at = upper(run, address);
        let below = at.checked_sub(1).and_then(|below| run.get(below));
        if below.is_some_and(|below| below.last >= address) {
            return (leaf, at - 1);
        }
        if at == run.len() {
            (leaf + 1, 0)
        } else {
            (leaf, at)
        }
    }

    #[inline]
    fn entries_from(&self, leaf: usize, at: usize) -> impl Iterator<Item = &Entry> {
        let first = self.leaves.run(leaf).and_then(|run| run.get(at..));
        let rest = self.leaves.runs_from(leaf.saturating_add(1));
        first.unwrap_or_default().iter().chain(rest.flatten())
    }

    /// Merges the leaf at position `leaf` with the next one if both are sparse.
    #[inline]
    fn join(&mut self, leaf: usize) {
        if let (Some(run), Some(next)) = (self.leaves.run(leaf), self.leaves.run(leaf + 1))
            && run.len() + next.len() <= SPARSE
        {
            self.leaves.merge(leaf);
        }
    }
}

/// Returns the number of mappings of `run` that start at or below `address`.
#[inline]
fn upper(run: &[Entry], address: u64) -> usize {
    run.partition_point(|entry| entry.start <= address)
}
