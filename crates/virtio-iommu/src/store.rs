//! The mappings of one domain, in order of address.
//!
//! Two levels: leaves of at most 32 mappings, each a sorted vector, and beside them the first address of each. A search is a binary
//! search in the vector of firsts, which stays in the processor's cache, then one in a leaf; an insertion moves half a leaf. A request that
//! arrives beside the last one finds its leaf without a search. What it costs against a balanced tree: `benches/request.rs`.
//!
//! Drivers map again what they unmapped last: Linux's caches of addresses are stacks. So the last mapping that was removed alone leaves its
//! place vacant, until it is taken again or something else changes.
//!
//! Memory is bounded: any two neighbouring leaves hold more than half a leaf together, so there are at most `4 n / 32 + 1` leaves for n mappings.

use alloc::vec::Vec;

/// One mapping, packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// First address.
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

/// Mappings in a leaf at most.
const LEAF: usize = 32;

/// Neighbours that together hold no more than this become one leaf.
const SPARSE: usize = LEAF / 2;

/// The mappings of one domain.
#[derive(Debug, Default)]
pub(crate) struct Store {
    /// The first address of each leaf.
    firsts: Vec<u64>,
    /// No leaf is empty, and every one has room for `LEAF` mappings.
    leaves: Vec<Vec<Entry>>,
    /// The leaf of the last change: a guess for the next.
    hot: usize,
    /// An empty leaf kept for the next split, so that a mapping that comes and goes allocates nothing.
    spare: Vec<Entry>,
    len: usize,
    /// The place of the mapping that was removed last, and alone. It keeps its order and is none.
    vacant: Option<(usize, usize)>,
}

/// Marks the vacant place in an entry's flags. No request has this one.
const VACANT: u32 = 1 << 31;

/// Mappings that follow each other, found by [`Store::covered`]. Good until the next change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    leaf: usize,
    at: usize,
    pub(crate) count: usize,
}

/// Why a mapping was not inserted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InsertError {
    /// It overlaps one that is there.
    Overlap,
    /// The host has no memory.
    OutOfMemory,
}

impl Store {
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Inserts `entry` unless it overlaps another one.
    #[inline]
    pub(crate) fn insert(&mut self, entry: Entry) -> Result<(), InsertError> {
        if let Some((leaf, at)) = self.vacant {
            let next = self.next_start(leaf, at + 1);
            if let Some(place) = self.leaves.get_mut(leaf).and_then(|run| run.get_mut(at))
                && place.start == entry.start
            {
                // What is below did not overlap the mapping before either.
                if next.is_some_and(|next| next <= entry.last) {
                    return Err(InsertError::Overlap);
                }
                *place = entry;
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
        let Some(run) = self.leaves.get(leaf) else {
            return self.add_leaf(0, entry);
        };
        let mut at = upper(run, entry.start);
        let below = at.checked_sub(1).and_then(|below| run.get(below));
        if below.is_some_and(|below| below.last >= entry.start) {
            return Err(InsertError::Overlap);
        }
        let above = self.next_start(leaf, at);
        if above.is_some_and(|above| above <= entry.last) {
            return Err(InsertError::Overlap);
        }
        if run.len() >= LEAF {
            // Mappings often come in order, up or down: then full leaves stay full.
            if at == 0 {
                return self.add_leaf(leaf, entry);
            }
            if at == run.len() && leaf + 1 == self.leaves.len() {
                return self.add_leaf(leaf + 1, entry);
            }
            self.split(leaf)?;
            if self
                .firsts
                .get(leaf + 1)
                .is_some_and(|first| *first <= entry.start)
            {
                leaf += 1;
                at -= LEAF / 2;
            }
        }
        if let (Some(run), Some(first)) = (self.leaves.get_mut(leaf), self.firsts.get_mut(leaf)) {
            run.insert(at.min(run.len()), entry);
            if at == 0 {
                *first = entry.start;
            }
            self.len += 1;
            self.hot = leaf;
        }
        Ok(())
    }

    /// The mapping that holds `address`.
    #[inline]
    pub(crate) fn lookup(&self, address: u64) -> Option<&Entry> {
        let run = self.leaves.get(self.leaf_for(address))?;
        let entry = run.get(upper(run, address).checked_sub(1)?)?;
        // Nothing else lies where the vacant place did.
        (entry.last >= address && !entry.is_vacant()).then_some(entry)
    }

    /// Whether a mapping has a byte of `start..=last`.
    pub(crate) fn touches(&self, start: u64, last: u64) -> bool {
        let (leaf, at) = self.first_from(start);
        self.entries_from(leaf, at)
            .find(|entry| !entry.is_vacant())
            .is_some_and(|entry| entry.start <= last)
    }

    /// The mappings with a byte of `start..=last`, provided each lies in it entirely; otherwise the first that does not.
    #[inline]
    pub(crate) fn covered(&mut self, start: u64, last: u64) -> Result<Span, Entry> {
        self.close();
        let (leaf, at) = self.first_from(start);
        let mut count = 0;
        for entry in self.entries_from(leaf, at) {
            if entry.start > last {
                break;
            }
            if entry.start < start || entry.last > last {
                return Err(*entry);
            }
            count += 1;
        }
        Ok(Span { leaf, at, count })
    }

    /// The mappings of `span`, in order.
    #[inline]
    pub(crate) fn span(&self, span: Span) -> impl Iterator<Item = &Entry> {
        self.entries_from(span.leaf, span.at).take(span.count)
    }

    /// All mappings, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.leaves.iter().flatten().filter(|e| !e.is_vacant())
    }

    /// Removes the mappings of `span`. It cannot fail.
    #[inline]
    pub(crate) fn remove(&mut self, span: Span) {
        if span.count == 1
            && let Some(run) = self.leaves.get_mut(span.leaf)
            && let Some(entry) = run.get_mut(span.at)
        {
            entry.flags |= VACANT;
            self.vacant = Some((span.leaf, span.at));
            self.len -= 1;
            self.hot = span.leaf;
            return;
        }
        self.remove_all(span);
    }

    /// Gives the vacant place up, if there is one.
    #[inline]
    fn close(&mut self) {
        if let Some((leaf, at)) = self.vacant.take() {
            self.give_up(leaf, at);
        }
    }

    #[cold]
    fn give_up(&mut self, leaf: usize, at: usize) {
        self.len += 1;
        self.remove_all(Span { leaf, at, count: 1 });
    }

    fn remove_all(&mut self, span: Span) {
        let Span {
            mut leaf,
            at,
            count,
        } = span;
        if count == 0 {
            return;
        }
        let mut left = count;
        // The end of the first leaf, or its middle.
        if at > 0 || self.leaves.get(leaf).is_some_and(|run| run.len() > left) {
            left -= self.drain(leaf, at, left);
            if left > 0 {
                leaf += 1;
            }
        }
        // Leaves that go as a whole, at once: what is behind them moves once.
        let mut whole = 0;
        while let Some(run) = self.leaves.get(leaf + whole)
            && left > 0
            && run.len() <= left
        {
            left -= run.len();
            self.len -= run.len();
            whole += 1;
        }
        self.drop_leaves(leaf, whole);
        if left > 0 {
            self.drain(leaf, 0, left);
        }
        self.join(leaf);
        self.join(leaf.saturating_sub(1));
        self.hot = leaf.min(self.leaves.len().saturating_sub(1));
    }

    /// Takes the mapping that starts at `start` away.
    pub(crate) fn remove_at(&mut self, start: u64) {
        self.close();
        let leaf = self.leaf_for(start);
        let found = self
            .leaves
            .get(leaf)
            .and_then(|run| run.binary_search_by_key(&start, |entry| entry.start).ok());
        if let Some(at) = found {
            self.remove(Span { leaf, at, count: 1 });
        }
    }

    /// The leaf that a mapping starting at `address` belongs to.
    #[inline]
    fn leaf_for(&self, address: u64) -> usize {
        let hot = self.hot;
        if self.firsts.get(hot).is_some_and(|first| *first <= address)
            && self.firsts.get(hot + 1).is_none_or(|next| address < *next)
        {
            return hot;
        }
        self.firsts
            .partition_point(|first| *first <= address)
            .saturating_sub(1)
    }

    /// Where the first mapping with a byte at or above `address` stands.
    #[inline]
    fn first_from(&self, address: u64) -> (usize, usize) {
        let leaf = self.leaf_for(address);
        let Some(run) = self.leaves.get(leaf) else {
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

    /// Where the first mapping from a place on begins.
    #[inline]
    fn next_start(&self, leaf: usize, at: usize) -> Option<u64> {
        match self.leaves.get(leaf)?.get(at) {
            Some(entry) => Some(entry.start),
            None => self.firsts.get(leaf + 1).copied(),
        }
    }

    #[inline]
    fn entries_from(&self, leaf: usize, at: usize) -> impl Iterator<Item = &Entry> {
        let first = self.leaves.get(leaf).and_then(|run| run.get(at..));
        let rest = self.leaves.get(leaf.saturating_add(1)..);
        first
            .unwrap_or_default()
            .iter()
            .chain(rest.unwrap_or_default().iter().flatten())
    }

    /// Makes a leaf of `entry` alone, as number `leaf`.
    #[cold]
    fn add_leaf(&mut self, leaf: usize, entry: Entry) -> Result<(), InsertError> {
        let mut run = self.new_leaf()?;
        run.push(entry);
        let leaf = leaf.min(self.leaves.len());
        self.leaves.insert(leaf, run);
        self.firsts.insert(leaf, entry.start);
        self.len += 1;
        self.hot = leaf;
        Ok(())
    }

    /// Moves the upper half of `leaf` into one behind it.
    #[cold]
    fn split(&mut self, leaf: usize) -> Result<(), InsertError> {
        let mut above = self.new_leaf()?;
        if let Some(run) = self.leaves.get_mut(leaf) {
            above.extend(run.drain((LEAF / 2).min(run.len())..));
        }
        if let Some(first) = above.first().map(|entry| entry.start) {
            self.leaves.insert(leaf + 1, above);
            self.firsts.insert(leaf + 1, first);
        }
        Ok(())
    }

    /// An empty leaf, with room for it in the vectors.
    fn new_leaf(&mut self) -> Result<Vec<Entry>, InsertError> {
        let out = |_| InsertError::OutOfMemory;
        self.leaves.try_reserve(1).map_err(out)?;
        self.firsts.try_reserve(1).map_err(out)?;
        let mut leaf = core::mem::take(&mut self.spare);
        leaf.try_reserve_exact(LEAF).map_err(out)?;
        Ok(leaf)
    }

    /// Removes up to `count` mappings of a leaf that keeps some: how many it were.
    fn drain(&mut self, leaf: usize, at: usize, count: usize) -> usize {
        let Some(run) = self.leaves.get_mut(leaf) else {
            return 0;
        };
        let count = count.min(run.len().saturating_sub(at));
        if count == 1 {
            run.remove(at);
        } else {
            run.drain(at..at + count);
        }
        self.len -= count;
        if at == 0
            && let (Some(entry), Some(first)) = (run.first(), self.firsts.get_mut(leaf))
        {
            *first = entry.start;
        }
        count
    }

    /// Drops `count` leaves from `leaf` on, and keeps one of them as a spare.
    fn drop_leaves(&mut self, leaf: usize, count: usize) {
        if count == 0 {
            return;
        }
        let end = (leaf + count).min(self.leaves.len());
        if let Some(run) = self.leaves.get_mut(leaf) {
            self.spare = core::mem::take(run);
            self.spare.clear();
        }
        self.leaves.drain(leaf.min(end)..end);
        let end = end.min(self.firsts.len());
        self.firsts.drain(leaf.min(end)..end);
    }

    /// Makes one leaf of `leaf` and the one behind it if both are sparse.
    #[inline]
    fn join(&mut self, leaf: usize) {
        let (Some(run), Some(next)) = (self.leaves.get(leaf), self.leaves.get(leaf + 1)) else {
            return;
        };
        if run.len() + next.len() > SPARSE {
            return;
        }
        if let (low, [high, ..]) = self.leaves.split_at_mut(leaf + 1)
            && let Some(run) = low.last_mut()
        {
            run.append(high);
        }
        self.drop_leaves(leaf + 1, 1);
    }
}

/// How many mappings of `run` start at or below `address`.
#[inline]
fn upper(run: &[Entry], address: u64) -> usize {
    run.partition_point(|entry| entry.start <= address)
}
