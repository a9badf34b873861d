//! The set of free slots of a ring, with a search for the next free one.
//!
//! A bitmap with one bit per slot and two summary levels. 64 x 64 x 64 bits cover all slots that an
//! address can encode. A search for the next free slot reads at most five words, whatever the
//! ring's size and the distribution of its free slots.

use alloc::vec;
use alloc::vec::Vec;

/// The free slots of one ring.
#[derive(Debug)]
pub(super) struct FreeSlots {
    /// One bit per slot; 1 = free.
    slots: Vec<u64>,
    /// One bit per word of `slots`; 1 = the word is not zero.
    words: Vec<u64>,
    /// One bit per word of `words`; 1 = the word is not zero.
    top: u64,
    /// Number of bits set in `slots`.
    count: u32,
}

/// Returns the word that holds bit `index`, and the bit in it.
#[inline]
fn split(index: u32) -> (usize, u64) {
    ((index / 64) as usize, 1 << (index % 64))
}

/// Returns the first set bit of `word` at or above `from`.
#[inline]
fn first_set(word: u64, from: u32) -> Option<u32> {
    let rest = word & u64::MAX.checked_shl(from)?;
    (rest != 0).then(|| rest.trailing_zeros())
}

/// Returns the first set bit of `words` at or above `from`, within the word of `from`.
#[inline]
fn in_word(words: &[u64], from: u32) -> Option<u32> {
    let word = words.get((from / 64) as usize)?;
    Some((from & !63) + first_set(*word, from % 64)?)
}

impl FreeSlots {
    /// Creates a set of `slots` slots, at most 2^18, all free.
    pub(super) fn all(slots: u32) -> Self {
        let mut free = Self {
            slots: vec![0; slots.div_ceil(64) as usize],
            words: vec![0; slots.div_ceil(64 * 64) as usize],
            top: 0,
            count: 0,
        };
        free.give_run(0, slots);
        free
    }

    /// Returns the number of free slots.
    #[inline]
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Returns true if `slot` is free.
    #[inline]
    pub(super) fn contains(&self, slot: u32) -> bool {
        let (word, bit) = split(slot);
        self.slots.get(word).is_some_and(|word| word & bit != 0)
    }

    /// Takes the consecutive free slots from `slot` up, within one word, and returns their number.
    /// A ring reserves a run at a time, so the set changes once per up to 64 maps.
    #[inline(never)]
    pub(super) fn take_run(&mut self, slot: u32) -> u32 {
        let (index, _) = split(slot);
        let Some(word) = self.slots.get_mut(index) else {
            return 0;
        };
        let run = (*word >> (slot % 64)).trailing_ones();
        // `run` is at most 64 - slot % 64.
        let bits = u64::MAX.checked_shr(64 - run).unwrap_or(0) << (slot % 64);
        *word &= !bits;
        let emptied = *word == 0;
        self.count -= run;
        if emptied {
            self.word_is_empty(slot / 64);
        }
        run
    }

    fn word_is_empty(&mut self, word: u32) {
        let (index, bit) = split(word);
        if let Some(words) = self.words.get_mut(index) {
            *words &= !bit;
            if *words == 0 {
                self.top &= !(1 << (index % 64));
            }
        }
    }

    /// Frees the `count` slots from `first`. Returns the number of slots that were not free before.
    #[inline]
    pub(super) fn give_run(&mut self, first: u32, count: u32) -> u32 {
        let mut given = 0_u32;
        let mut at = first;
        let mut left = count;
        while left > 0 {
            let here = left.min(64 - at % 64);
            let bits = (u64::MAX >> (64 - here)) << (at % 64);
            let index = (at / 64) as usize;
            let Some(word) = self.slots.get_mut(index) else {
                break;
            };
            given += (bits & !*word).count_ones();
            *word |= bits;
            let (index, bit) = split(at / 64);
            if let Some(words) = self.words.get_mut(index) {
                *words |= bit;
                self.top |= 1 << (index % 64);
            }
            at += here;
            left -= here;
        }
        self.count += given;
        given
    }

    /// Returns the first free slot at or after `slot`, with wrap-around.
    #[inline]
    pub(super) fn next(&self, slot: u32) -> Option<u32> {
        self.at_or_above(slot).or_else(|| self.at_or_above(0))
    }

    fn at_or_above(&self, slot: u32) -> Option<u32> {
        if let Some(found) = in_word(&self.slots, slot) {
            return Some(found);
        }
        // From here, search whole words for the next one with a bit set.
        let word = slot / 64 + 1;
        let word = in_word(&self.words, word).or_else(|| {
            let group = first_set(self.top, word / 64 + 1)?;
            in_word(&self.words, group * 64)
        })?;
        in_word(&self.slots, word * 64)
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const MOST: u32 = (1 << 18) - 1;

    fn sizes() -> impl Strategy<Value = u32> {
        prop_oneof![
            1..=200_u32,
            Just(4096),
            4000..=4200_u32,
            MOST - 70..=MOST,
            Just(MOST)
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::with_cases(64)
        })]

        #[test]
        fn behaves_as_a_set(
            size in sizes(),
            sparse in any::<bool>(),
            steps in prop::collection::vec((any::<u32>(), 1..300_u32, 0..4_u8), 1..60),
        ) {
            let mut free = FreeSlots::all(size);
            let mut model: BTreeSet<u32> = (0..size).collect();
            if sparse {
                let mut at = 0;
                while at < size {
                    at += free.take_run(at);
                }
                model.clear();
            }
            for (at, count, kind) in steps {
                let slot = at % size;
                if kind == 0 {
                    let count = count.min(size - slot);
                    let new = (slot..slot + count).filter(|s| model.insert(*s)).count();
                    prop_assert_eq!(free.give_run(slot, count), new as u32);
                } else if kind == 1 {
                    // Take the next free slots, as the tail does.
                    for _ in 0..count / 16 {
                        let Some(next) = free.next(slot) else { break };
                        let run = free.take_run(next);
                        prop_assert!(run > 0);
                        for slot in next..next + run {
                            prop_assert!(model.remove(&slot));
                        }
                        prop_assert!(
                            (next + run).is_multiple_of(64) || !model.contains(&(next + run))
                        );
                    }
                    prop_assert!(model.contains(&slot) || free.take_run(slot) == 0);
                }
                let expected = model.range(slot..).next().or_else(|| model.first()).copied();
                prop_assert_eq!(free.next(slot), expected);
                prop_assert_eq!(free.contains(slot), model.contains(&slot));
                prop_assert_eq!(free.count() as usize, model.len());
            }
        }
    }
}
