//! Set-associative array, used by the IOTLB and the walk caches.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::Range;

use crate::Geometry;

/// Replacement policy: the entry of a full set to evict.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Replacement {
    /// The least recently used entry.
    #[default]
    Lru,
    /// The oldest entry, regardless of use.
    Fifo,
}

/// One entry. Key 0 marks a free entry.
#[derive(Debug, Clone, Copy)]
struct Slot<V> {
    key: u64,
    /// Time of the fill or, under LRU, of the last use. The entry with the lowest age in a set is
    /// evicted first. 0 if free.
    age: u64,
    value: V,
}

/// Sets of ways. The newest entry of a set is at the front, so that a repeated hit costs one
/// comparison. The other entries are in any order; their ages make replacement exact for any number
/// of ways.
///
/// The caller chooses which bits form the key and which select the set. A key must not be zero and
/// must always map to the same set.
#[derive(Debug, Clone)]
pub(crate) struct SetAssociative<V> {
    slots: Box<[Slot<V>]>,
    set_mask: u64,
    ways: usize,
    way_shift: u32,
    live: u32,
    /// The last age assigned.
    clock: u64,
    replacement: Replacement,
}

impl<V: Copy> SetAssociative<V> {
    /// Creates an empty cache. `filler` is a placeholder value for free entries and is never
    /// returned.
    pub(crate) fn new(geometry: Geometry, replacement: Replacement, filler: V) -> Self {
        let free = Slot {
            key: 0,
            age: 0,
            value: filler,
        };
        let mut slots = Vec::new();
        slots.resize(geometry.entries() as usize, free);
        Self {
            slots: slots.into_boxed_slice(),
            set_mask: u64::from(geometry.sets()).saturating_sub(1),
            ways: geometry.ways() as usize,
            way_shift: geometry.ways().trailing_zeros() & 31,
            live: 0,
            clock: 0,
            replacement,
        }
    }

    /// Returns the number of entries in use.
    #[inline]
    pub(crate) const fn live(&self) -> u32 {
        self.live
    }

    /// Returns the number of sets.
    #[inline]
    pub(crate) const fn sets(&self) -> u64 {
        self.set_mask.wrapping_add(1)
    }

    /// Returns the slots of the set that `selector` selects.
    #[inline]
    fn set_range(&self, selector: u64) -> Range<usize> {
        let first = ((selector & self.set_mask) as usize) << self.way_shift;
        first..first.wrapping_add(self.ways)
    }

    #[inline]
    fn set(&mut self, selector: u64) -> &mut [Slot<V>] {
        let range = self.set_range(selector);
        self.slots.get_mut(range).unwrap_or_default()
    }

    /// Returns the value under `key` and counts as a use.
    #[inline]
    pub(crate) fn lookup(&mut self, selector: u64, key: u64) -> Option<&mut V> {
        let range = self.set_range(selector);
        let set = self.slots.get_mut(range)?;
        let mut at = 0;
        if set.first()?.key != key {
            at = set.iter().position(|slot| slot.key == key)?;
            if self.replacement == Replacement::Lru {
                self.clock = self.clock.wrapping_add(1);
                move_to_front(set, at)?.age = self.clock;
                at = 0;
            }
        }
        set.get_mut(at).map(|slot| &mut slot.value)
    }

    /// Returns the value under `key` if it is the newest of its set. This covers most hits at the
    /// cost of one comparison.
    #[inline]
    pub(crate) fn newest(&self, selector: u64, key: u64) -> Option<&V> {
        let base = ((selector & self.set_mask) as usize) << self.way_shift;
        let slot = self.slots.get(base)?;
        (slot.key == key).then_some(&slot.value)
    }

    /// Mutable version of [`newest`](Self::newest).
    #[inline]
    pub(crate) fn newest_mut(&mut self, selector: u64, key: u64) -> Option<&mut V> {
        let first = self.set_range(selector).start;
        let slot = self.slots.get_mut(first)?;
        (slot.key == key).then_some(&mut slot.value)
    }

    /// Returns the value under `key` without counting as a use.
    pub(crate) fn peek(&mut self, selector: u64, key: u64) -> Option<&mut V> {
        let set = self.set(selector);
        let slot = set.iter_mut().find(|slot| slot.key == key)?;
        Some(&mut slot.value)
    }

    /// Inserts an entry whose key must not be present. Returns the key of the evicted entry.
    #[inline]
    pub(crate) fn insert(&mut self, selector: u64, key: u64, value: V) -> Option<u64> {
        let age = self.clock.wrapping_add(1);
        self.clock = age;
        let set = self.set(selector);
        let first = move_to_front(set, victim(set))?;
        let old = core::mem::replace(first, Slot { key, age, value }).key;
        if old == 0 {
            self.live = self.live.wrapping_add(1);
            return None;
        }
        Some(old)
    }

    /// Removes the entry under `key`. Returns true if it was present.
    #[inline]
    pub(crate) fn remove(&mut self, selector: u64, key: u64) -> bool {
        let set = self.set(selector);
        let Some(at) = set.iter().position(|slot| slot.key == key) else {
            return false;
        };
        if let Some(slot) = set.get_mut(at) {
            slot.free();
        }
        self.live = self.live.wrapping_sub(1);
        true
    }

    /// Removes every entry for which `matches` returns true.
    pub(crate) fn remove_if(&mut self, mut matches: impl FnMut(u64, &V) -> bool) {
        if self.live == 0 {
            return;
        }
        for slot in &mut self.slots {
            if slot.key != 0 && matches(slot.key, &slot.value) {
                slot.free();
                self.live = self.live.wrapping_sub(1);
            }
        }
    }

    /// Removes all entries.
    pub(crate) fn clear(&mut self) {
        if self.live == 0 {
            return;
        }
        for slot in &mut self.slots {
            slot.free();
        }
        self.live = 0;
    }
}

impl<V> Slot<V> {
    #[inline]
    fn free(&mut self) {
        self.key = 0;
        self.age = 0;
    }
}

/// Returns the index of the first free entry or, if none is free, of the oldest.
#[inline]
fn victim<V>(set: &[Slot<V>]) -> usize {
    let mut found = 0;
    let mut lowest = u64::MAX;
    for (at, slot) in set.iter().enumerate() {
        if slot.age < lowest {
            (found, lowest) = (at, slot.age);
            if lowest == 0 {
                break;
            }
        }
    }
    found
}

/// Swaps the entry at `at` with the first entry.
#[inline]
fn move_to_front<V>(set: &mut [Slot<V>], at: usize) -> Option<&mut Slot<V>> {
    let (first, others) = set.split_first_mut()?;
    if let Some(before) = at.checked_sub(1) {
        core::mem::swap(first, others.get_mut(before)?);
    }
    Some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_cache_keeps_nothing() {
        let mut cache = SetAssociative::new(Geometry::ABSENT, Replacement::Lru, 0_u64);
        assert_eq!(cache.insert(3, 7, 1), None);
        assert_eq!(cache.lookup(3, 7), None);
        assert!(!cache.remove(3, 7));
        cache.clear();
        assert_eq!(cache.live(), 0);
    }

    /// One step on a set of four ways, with its expected result.
    enum Step {
        /// Fills a key and expects this key to be evicted.
        Fill(u64, Option<u64>),
        /// Looks up a key and expects a hit or a miss.
        Use(u64, bool),
        /// Removes a key.
        Remove(u64),
    }
    use Step::*;

    #[test]
    fn replacement_sequences_are_exact() {
        let fill4 = [Fill(1, None), Fill(2, None), Fill(3, None), Fill(4, None)];
        let cases: [(&str, Replacement, &[Step]); 5] = [
            (
                "LRU without uses evicts in order of filling",
                Replacement::Lru,
                &[
                    Fill(5, Some(1)),
                    Fill(6, Some(2)),
                    Fill(7, Some(3)),
                    Fill(8, Some(4)),
                    Fill(9, Some(5)),
                ],
            ),
            (
                "LRU keeps what was used",
                Replacement::Lru,
                &[
                    Use(1, true),
                    Use(3, true),
                    Fill(5, Some(2)),
                    Use(2, false),
                    Fill(6, Some(4)),
                    Fill(7, Some(1)),
                    Fill(8, Some(3)),
                ],
            ),
            (
                "FIFO does not",
                Replacement::Fifo,
                &[
                    Use(1, true),
                    Use(3, true),
                    Fill(5, Some(1)),
                    Use(1, false),
                    Fill(6, Some(2)),
                    Fill(7, Some(3)),
                    Fill(8, Some(4)),
                ],
            ),
            (
                "a removed entry is filled first, the order of the others stays",
                Replacement::Lru,
                &[
                    Remove(3),
                    Use(3, false),
                    Fill(5, None),
                    Fill(6, Some(1)),
                    Fill(7, Some(2)),
                    Fill(8, Some(4)),
                    Fill(9, Some(5)),
                ],
            ),
            (
                "the oldest removed",
                Replacement::Fifo,
                &[
                    Remove(1),
                    Remove(2),
                    Fill(5, None),
                    Fill(6, None),
                    Fill(7, Some(3)),
                    Fill(8, Some(4)),
                    Fill(9, Some(5)),
                ],
            ),
        ];
        for (name, replacement, steps) in cases {
            let geometry = Geometry::new(1, 4).unwrap();
            let mut cache = SetAssociative::new(geometry, replacement, 0);
            for step in fill4.iter().chain(steps) {
                match *step {
                    Fill(key, evicted) => assert_eq!(
                        cache.insert(0, key, key * 10),
                        evicted,
                        "{name}: fill {key}"
                    ),
                    Use(key, hit) => assert_eq!(
                        cache.lookup(0, key),
                        hit.then_some(&mut (key * 10)),
                        "{name}: use {key}"
                    ),
                    Remove(key) => assert!(cache.remove(0, key), "{name}: remove {key}"),
                }
            }
            assert_eq!(cache.live(), 4, "{name}");
        }
    }

    #[test]
    fn removed_entries_are_reused_first() {
        for replacement in [Replacement::Lru, Replacement::Fifo] {
            let mut cache = SetAssociative::new(Geometry::new(1, 4).unwrap(), replacement, 0);
            for key in 1..=4 {
                assert_eq!(cache.insert(0, key, key), None);
            }
            cache.remove_if(|key, _| key == 3);
            assert_eq!((cache.insert(0, 5, 5), cache.live()), (None, 4));
            cache.remove(0, 4);
            assert_eq!((cache.insert(0, 6, 6), cache.live()), (None, 4));
            for key in [1, 2, 5, 6] {
                assert_eq!(cache.lookup(0, key), Some(&mut key.clone()));
            }
        }
    }

    #[test]
    fn sets_do_not_disturb_each_other() {
        let mut cache = SetAssociative::new(Geometry::new(4, 1).unwrap(), Replacement::Lru, 0);
        for key in 1..=4_u64 {
            assert_eq!(cache.insert(key, key, key), None);
        }
        assert_eq!(cache.insert(5, 5, 5), Some(1));
        assert_eq!(cache.lookup(2, 2), Some(&mut 2));
        cache.remove_if(|key, _| key % 2 == 0);
        assert_eq!(cache.live(), 2);
        assert_eq!(cache.lookup(2, 2), None);
        assert_eq!(cache.lookup(3, 3), Some(&mut 3));
        cache.clear();
        assert_eq!(cache.live(), 0);
        assert_eq!(cache.lookup(3, 3), None);
    }
}
