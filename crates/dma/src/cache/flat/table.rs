//! Open addressing with lines of four entries. When a line is full, the next line takes the entry.
//! There are no tombstones.
//!
//! An entry is in its home line, or in the first later line that had room; every line in between is
//! full. A lookup therefore ends at the first line with room. [`remove`](Table::remove) and
//! [`retain`](Table::retain) remove entries and restore this order.

use alloc::vec::Vec;
use core::mem;

use super::slot::CacheEntry;

/// Entries per line.
const WAYS: usize = 4;

/// Maximum load factor. With more, entries outside their home line make the branches of a lookup
/// hard to predict.
const FULL: (usize, usize) = (5, 8);

/// Lines of the smallest table.
const SMALLEST: usize = 4;

/// Number of cycles for which the table must be too large before it shrinks. A load that occurred
/// once is likely to return.
const SHRINK_CYCLES: u8 = 16;

#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
struct Line([CacheEntry; WAYS]);

impl Line {
    /// Returns the position of `key`. Compares all entries, because a branch per entry mispredicts.
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

    /// Returns a bit mask of the occupied entries.
    #[inline]
    fn occupied(&self) -> u32 {
        let bits = self.0.iter().enumerate();
        bits.fold(0, |bits, (way, slot)| {
            bits | u32::from(slot.key() != 0) << way
        })
    }
}

/// Result of a lookup: the position of the key, or the position at which to insert it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry(Result<(usize, usize), (usize, usize)>);

#[derive(Debug)]
pub(super) struct Table {
    lines: Vec<Line>,
    occupied: usize,
    /// Maximum number of lines, from the limit of keys.
    max_lines: usize,
    /// Number of cycles for which the table has been too large.
    sparse: u8,
}

impl Table {
    /// Creates an empty table for at most `limit` keys.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            lines: Vec::new(),
            occupied: 0,
            max_lines: Self::lines_for(limit),
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

    /// Returns the home line of `key`: the high bits of its product with 2^64 / golden ratio,
    /// scaled to the number of lines, which may be any number.
    #[inline]
    fn home_line(key: u64, lines: usize) -> usize {
        let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((u128::from(hash) * lines as u128) >> 64) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 < self.lines.len() { at + 1 } else { 0 }
    }

    /// Returns the entry of `key`.
    #[inline]
    pub(super) fn find(&mut self, key: u64) -> Option<&mut CacheEntry> {
        let (at, way) = self.locate(key).ok()?;
        self.lines.get_mut(at)?.0.get_mut(way)
    }

    /// Returns the line and entry of `key`, or `Err` with the first free entry for it.
    #[inline]
    fn locate(&self, key: u64) -> Result<(usize, usize), (usize, usize)> {
        let mut at = Self::home_line(key, self.lines.len());
        // Terminates: at least one line always has room.
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

    /// Looks up `key`, for [`get`](Self::get) and [`put`](Self::put).
    #[inline]
    pub(super) fn entry(&self, key: u64) -> Entry {
        Entry(self.locate(key))
    }

    /// Returns the entry that the lookup found, if any.
    #[inline]
    pub(super) fn get(&self, Entry(locate): Entry) -> Option<&CacheEntry> {
        let (at, way) = locate.ok()?;
        self.lines.get(at)?.0.get(way)
    }

    /// Stores `slot` at `entry`, which must be the result of a lookup of its key without changes in
    /// between. Returns false if out of memory.
    #[inline]
    pub(super) fn put(&mut self, Entry(mut locate): Entry, slot: CacheEntry) -> bool {
        if locate.is_err() && self.occupied >= self.lines.len() * WAYS / FULL.1 * FULL.0 {
            if !self.grow() {
                return false;
            }
            locate = self.locate(slot.key());
        }
        let (Ok((at, way)) | Err((at, way))) = locate;
        if let Some(line) = self.lines.get_mut(at)
            && let Some(entry) = line.0.get_mut(way)
        {
            self.occupied += usize::from(locate.is_err());
            *entry = slot;
        }
        true
    }

    #[cold]
    fn grow(&mut self) -> bool {
        let doubled = self.lines.len().saturating_mul(2);
        let wanted = doubled.clamp(SMALLEST, self.max_lines);
        wanted > self.lines.len() && self.resize(wanted)
    }

    /// Rehashes all entries into a table of `lines` lines; false if out of memory.
    fn resize(&mut self, lines: usize) -> bool {
        let mut other = Vec::new();
        if other.try_reserve_exact(lines).is_err() {
            return false;
        }
        other.resize(lines, Line::default());
        for line in mem::replace(&mut self.lines, other) {
            for slot in line.0 {
                if slot.key() != 0
                    && let Err((at, way)) = self.locate(slot.key())
                    && let Some(line) = self.lines.get_mut(at)
                    && let Some(entry) = line.0.get_mut(way)
                {
                    *entry = slot;
                }
            }
        }
        true
    }

    /// Shrinks the table if less than an eighth of it has been occupied for [`SHRINK_CYCLES`]
    /// cycles. Keeps the table if memory for a smaller one is not available.
    ///
    /// Returns true if further calls would change nothing until an entry leaves.
    pub(super) fn shrink(&mut self) -> bool {
        let has_its_size =
            self.occupied >= self.lines.len() * WAYS / 8 || self.lines.len() <= SMALLEST;
        if has_its_size {
            self.sparse = 0;
        } else if self.sparse < SHRINK_CYCLES {
            self.sparse += 1;
        } else if self.resize(Self::lines_for(self.occupied.saturating_mul(2))) {
            self.sparse = 0;
        }
        has_its_size
    }

    /// Removes the entry of `key`, if there is one.
    pub(super) fn remove(&mut self, key: u64) {
        let Ok((mut hole, mut way)) = self.locate(key) else {
            return;
        };
        self.occupied = self.occupied.saturating_sub(1);
        loop {
            let Some(line) = self.lines.get_mut(hole) else {
                return;
            };
            let was_full = line.find(0).is_none();
            if let Some(slot) = line.0.get_mut(way) {
                *slot = CacheEntry::default();
            }
            // Entries of later lines have probed past this line only if it was full.
            let moved = if was_full { self.past(hole) } else { None };
            let Some((from, from_way, slot)) = moved else {
                return;
            };
            if let Some(entry) = self
                .lines
                .get_mut(hole)
                .and_then(|line| line.0.get_mut(way))
            {
                *entry = slot;
            }
            (hole, way) = (from, from_way);
        }
    }

    /// Returns an entry that probed past the line `hole`, with its line and position.
    fn past(&self, hole: usize) -> Option<(usize, usize, CacheEntry)> {
        let lines = self.lines.len();
        let distance = |from: usize, to: usize| (to + lines - from) % lines;
        let mut at = self.after(hole);
        while at != hole {
            let line = self.lines.get(at)?;
            for (way, slot) in line.0.iter().enumerate() {
                let home = Self::home_line(slot.key(), lines);
                if slot.key() != 0 && distance(home, at) >= distance(hole, at) {
                    return Some((at, way, *slot));
                }
            }
            if line.find(0).is_some() {
                return None;
            }
            at = self.after(at);
        }
        None
    }

    /// Calls `keep` for each entry and removes those for which it returns false. `keep` must not
    /// change the key.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&mut CacheEntry) -> bool) {
        // No entry has probed past a line with room. Starting there, every line that an entry may
        // move back to is final when the walk reaches the entry.
        let Some(start) = self.lines.iter().position(|line| line.find(0).is_some()) else {
            return;
        };
        let lines = self.lines.len();
        let before = self.occupied;
        for at in (start + 1..lines).chain(0..=start) {
            let Some(line) = self.lines.get_mut(at) else {
                continue;
            };
            let mut misplaced = false;
            let mut ways = line.occupied();
            while ways != 0 {
                let way = ways.trailing_zeros() as usize;
                ways &= ways - 1;
                let Some(slot) = line.0.get_mut(way) else {
                    continue;
                };
                if keep(slot) {
                    misplaced |= Self::home_line(slot.key(), lines) != at;
                } else {
                    *slot = CacheEntry::default();
                    self.occupied = self.occupied.saturating_sub(1);
                }
            }
            if misplaced && self.occupied < before {
                self.shift_back(at);
            }
        }
    }

    /// Moves entries of the line that are not in their home line back to an earlier line with room,
    /// if one precedes it.
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
