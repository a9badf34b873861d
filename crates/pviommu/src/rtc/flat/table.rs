//! Open addressing by cache lines: four entries to a line, and the next line when one is full.
//! There are no tombstones.
//!
//! An entry lies in its home line or in the first one after it that had room; every line between is
//! full. So a search ends at the first line with room, and only [`retain`](Table::retain) has to
//! restore that, because nothing else removes.

use alloc::vec::Vec;
use core::mem;

use super::slot::CacheEntry;

/// Entries of a line.
const WAYS: usize = 4;

/// At most this share of the entries is occupied. More, and entries away from home make hits hard
/// to foretell for a processor.
const FULL: (usize, usize) = (5, 8);

/// Lines of the smallest table.
const SMALLEST: usize = 4;

/// A table that has been too large for so many cycles gives memory back: what came once comes
/// again.
const PATIENCE: u8 = 16;

#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
struct Line([CacheEntry; WAYS]);

impl Line {
    /// Where `key` is. All entries are compared: a branch for each would be foretold wrongly.
    #[inline]
    fn find(&self, key: u64) -> Option<usize> {
        let mut found = WAYS;
        for (way, slot) in self.0.iter().enumerate() {
            if slot.key() == key {
                found = way;
            }
        }
        (found < WAYS).then_some(found)
    }

    /// A bit for each entry that is not free.
    #[inline]
    fn occupied(&self) -> u32 {
        let bits = self.0.iter().enumerate();
        bits.fold(0, |bits, (way, slot)| {
            bits | u32::from(slot.key() != 0) << way
        })
    }
}

/// A place that was looked for: where the key is, or where it would go.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry(Result<(usize, usize), (usize, usize)>);

#[derive(Debug)]
pub(super) struct Table {
    lines: Vec<Line>,
    occupied: usize,
    /// As many lines as the limit asks for.
    most: usize,
    /// For how many cycles the table has been too large.
    sparse: u8,
}

impl Table {
    /// An empty table that will hold `limit` keys at most.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            lines: Vec::new(),
            occupied: 0,
            most: Self::lines_for(limit),
            sparse: 0,
        }
    }

    fn lines_for(keys: usize) -> usize {
        let slots = (keys / FULL.0).saturating_add(1).saturating_mul(FULL.1);
        slots.div_ceil(WAYS).max(SMALLEST)
    }

    #[inline]
    pub(super) fn occupied(&self) -> usize {
        self.occupied
    }

    pub(super) fn bytes(&self) -> usize {
        self.lines.capacity().saturating_mul(size_of::<Line>())
    }

    /// The home of `key`: the high bits of a product with 2^64 over the golden ratio, scaled to the
    /// table, which may have any size.
    #[inline]
    fn home_line(key: u64, lines: usize) -> usize {
        let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((u128::from(hash) * lines as u128) >> 64) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 < self.lines.len() { at + 1 } else { 0 }
    }

    /// The entry of `key`.
    #[inline]
    pub(super) fn find(&mut self, key: u64) -> Option<&mut CacheEntry> {
        let (at, way) = self.place(key).ok()?;
        self.lines.get_mut(at)?.0.get_mut(way)
    }

    /// The line and entry of `key`, or else of the first room for it.
    #[inline]
    fn place(&self, key: u64) -> Result<(usize, usize), (usize, usize)> {
        let mut at = Self::home_line(key, self.lines.len());
        // Ends at a line with room, of which there is always one.
        while let Some(line) = self.lines.get(at) {
            if let Some(way) = line.find(key) {
                return Ok((at, way));
            }
            if let Some(way) = line.find(0) {
                return Err((at, way));
            }
            at = self.after(at);
        }
        // The table has no lines.
        Err((0, 0))
    }

    /// Where `key` is, or would go.
    #[inline]
    pub(super) fn entry(&self, key: u64) -> Entry {
        Entry(self.place(key))
    }

    /// What is at `entry`, if it is there.
    #[inline]
    pub(super) fn get(&self, Entry(place): Entry) -> Option<&CacheEntry> {
        let (at, way) = place.ok()?;
        self.lines.get(at)?.0.get(way)
    }

    /// Puts `slot` at `entry`, which was found for its key and since which nothing was changed;
    /// false without memory.
    #[inline]
    pub(super) fn put(&mut self, Entry(mut place): Entry, slot: CacheEntry) -> bool {
        if place.is_err() && self.occupied >= self.lines.len() * WAYS / FULL.1 * FULL.0 {
            if !self.grow() {
                return false;
            }
            place = self.place(slot.key());
        }
        let (Ok((at, way)) | Err((at, way))) = place;
        if let Some(line) = self.lines.get_mut(at)
            && let Some(entry) = line.0.get_mut(way)
        {
            self.occupied += usize::from(place.is_err());
            *entry = slot;
        }
        true
    }

    #[cold]
    fn grow(&mut self) -> bool {
        let doubled = self.lines.len().saturating_mul(2);
        let wanted = doubled.clamp(SMALLEST, self.most);
        wanted > self.lines.len() && self.resize(wanted)
    }

    /// Puts all entries into a table of so many lines; false without memory.
    fn resize(&mut self, lines: usize) -> bool {
        let mut other = Vec::new();
        if other.try_reserve_exact(lines).is_err() {
            return false;
        }
        other.resize(lines, Line::default());
        for line in mem::replace(&mut self.lines, other) {
            for slot in line.0 {
                if slot.key() != 0
                    && let Err((at, way)) = self.place(slot.key())
                    && let Some(line) = self.lines.get_mut(at)
                    && let Some(entry) = line.0.get_mut(way)
                {
                    *entry = slot;
                }
            }
        }
        true
    }

    /// Gives memory back if less than an eighth of the table has been occupied for some cycles.
    /// Without memory for a smaller one it stays.
    ///
    /// Says whether more calls would change nothing as long as no entry leaves.
    pub(super) fn shrink(&mut self) -> bool {
        let has_its_size =
            self.occupied >= self.lines.len() * WAYS / 8 || self.lines.len() <= SMALLEST;
        if has_its_size {
            self.sparse = 0;
        } else if self.sparse < PATIENCE {
            self.sparse += 1;
        } else if self.resize(Self::lines_for(self.occupied.saturating_mul(2))) {
            self.sparse = 0;
        }
        has_its_size
    }

    /// Shows each entry to `keep`, which may change anything but the key; those for which it says
    /// false are removed.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&mut CacheEntry) -> bool) {
        // No entry has gone past a line with room: from there on, what comes before a line is
        // settled when the line's turn comes.
        let Some(start) = self.lines.iter().position(|line| line.find(0).is_some()) else {
            return;
        };
        let lines = self.lines.len();
        let before = self.occupied;
        for at in (start + 1..lines).chain(0..=start) {
            let Some(line) = self.lines.get_mut(at) else {
                continue;
            };
            let mut astray = false;
            let mut ways = line.occupied();
            while ways != 0 {
                let way = ways.trailing_zeros() as usize;
                ways &= ways - 1;
                let Some(slot) = line.0.get_mut(way) else {
                    continue;
                };
                if keep(slot) {
                    astray |= Self::home_line(slot.key(), lines) != at;
                } else {
                    *slot = CacheEntry::default();
                    self.occupied = self.occupied.saturating_sub(1);
                }
            }
            if astray && self.occupied < before {
                self.shift_back(at);
            }
        }
    }

    /// Moves entries of the line that are not at home back to the first line with room, if that
    /// comes before it.
    fn shift_back(&mut self, at: usize) {
        let lines = self.lines.len();
        for way in 0..WAYS {
            let Some(slot) = self.lines.get(at).and_then(|line| line.0.get(way).copied()) else {
                continue;
            };
            let mut before = Self::home_line(slot.key(), lines);
            while slot.key() != 0 && before != at {
                let Some(line) = self.lines.get_mut(before) else {
                    break;
                };
                if let Some(entry) = line.find(0).and_then(|free| line.0.get_mut(free)) {
                    *entry = slot;
                    if let Some(line) = self.lines.get_mut(at)
                        && let Some(entry) = line.0.get_mut(way)
                    {
                        *entry = CacheEntry::default();
                    }
                    break;
                }
                before = self.after(before);
            }
        }
    }
}
