//! Open addressing with linear probing, without tombstones: what follows a removed entry moves up.

use alloc::vec::Vec;
use core::mem;

use super::slot::Slot;

/// At most this share of the entries is occupied.
const FULL: (usize, usize) = (3, 4);

/// Entries of the smallest table.
const SMALLEST: usize = 16;

#[derive(Debug)]
pub(super) struct Table {
    slots: Vec<Slot>,
    occupied: usize,
    /// As many entries as the limit asks for.
    most: usize,
}

impl Table {
    /// An empty table that will hold `limit` keys at most.
    pub(super) fn new(limit: usize) -> Self {
        let most = (limit / FULL.0).saturating_add(1).saturating_mul(FULL.1);
        Self {
            slots: Vec::new(),
            occupied: 0,
            most: most.max(SMALLEST),
        }
    }

    #[inline]
    pub(super) fn occupied(&self) -> usize {
        self.occupied
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity().saturating_mul(size_of::<Slot>())
    }

    /// Where the search for `key` begins: the high bits of a product with 2^64 over the golden ratio, scaled to the table, which may have any size.
    #[inline]
    fn home(key: u64, slots: usize) -> usize {
        let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((u128::from(hash) * slots as u128) >> 64) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 < self.slots.len() { at + 1 } else { 0 }
    }

    /// The entry of `key`.
    #[inline]
    pub(super) fn find(&mut self, key: u64) -> Option<&mut Slot> {
        let at = self.place(key).ok()?;
        self.slots.get_mut(at)
    }

    /// Where `key` is, or else where it would go.
    #[inline]
    fn place(&self, key: u64) -> Result<usize, usize> {
        let mut at = Self::home(key, self.slots.len());
        // Ends at a free entry, of which there is always one.
        while let Some(slot) = self.slots.get(at) {
            if slot.key() == key {
                return Ok(at);
            }
            if slot.key() == 0 {
                return Err(at);
            }
            at = self.after(at);
        }
        // The table has no entries.
        Err(0)
    }

    /// Puts `slot` in, in the place of the one with its key if there is one; false without memory.
    pub(super) fn put(&mut self, slot: Slot) -> bool {
        if self.occupied >= self.slots.len() / FULL.1 * FULL.0 {
            let doubled = self.slots.len().saturating_mul(2);
            let wanted = doubled.clamp(SMALLEST, self.most);
            if wanted <= self.slots.len() || !self.resize(wanted) {
                return false;
            }
        }
        let (at, new) = match self.place(slot.key()) {
            Ok(at) => (at, false),
            Err(at) => (at, true),
        };
        if let Some(entry) = self.slots.get_mut(at) {
            *entry = slot;
            self.occupied = self.occupied.saturating_add(usize::from(new));
        }
        true
    }

    /// Puts all entries into a table of `slots`; false without memory.
    fn resize(&mut self, slots: usize) -> bool {
        let mut larger = Vec::new();
        if larger.try_reserve_exact(slots).is_err() {
            return false;
        }
        larger.resize(slots, Slot::default());
        for slot in mem::replace(&mut self.slots, larger) {
            if slot.key() != 0
                && let Err(at) = self.place(slot.key())
                && let Some(entry) = self.slots.get_mut(at)
            {
                *entry = slot;
            }
        }
        true
    }

    /// Gives memory back if less than an eighth of the table is occupied. Without memory for the smaller one it stays.
    pub(super) fn shrink(&mut self) {
        let wanted = self.occupied.saturating_mul(4).max(SMALLEST);
        if wanted < self.slots.len() / 2 {
            self.resize(wanted);
        }
    }

    /// Shows each entry to `keep`, which may change anything but the key; those for which it says false are removed. An entry may be shown twice.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&mut Slot) -> bool) {
        let mut at = 0;
        while let Some(slot) = self.slots.get_mut(at) {
            if slot.key() == 0 || keep(slot) {
                at += 1;
            } else {
                // What moves up into this place is looked at next.
                self.remove_at(at);
            }
        }
    }

    /// Empties the entry at `hole` and closes the gap: an entry further on moves up if its search passes the hole.
    fn remove_at(&mut self, mut hole: usize) {
        let slots = self.slots.len();
        let mut at = hole;
        for _ in 1..slots {
            at = self.after(at);
            let Some(slot) = self.slots.get(at).copied() else {
                break;
            };
            if slot.key() == 0 {
                break;
            }
            let home = Self::home(slot.key(), slots);
            // How far the entry and the hole are from the entry's home, going round.
            let distance = |place: usize| {
                place
                    .checked_sub(home)
                    .unwrap_or_else(|| place.wrapping_add(slots).wrapping_sub(home))
            };
            if distance(hole) < distance(at)
                && let Some(entry) = self.slots.get_mut(hole)
            {
                *entry = slot;
                hole = at;
            }
        }
        if let Some(entry) = self.slots.get_mut(hole) {
            *entry = Slot::default();
            self.occupied = self.occupied.saturating_sub(1);
        }
    }
}
