//! The in-memory tables of a ring IOMMU: how the operating system updates an entry while the
//! hardware reads it, and how the hardware finds it (rIOMMU Fig. 10 `rtable_walk`, Fig. 11).
//!
//! An entry is 128 bits in two words, and no single store writes both (erratum of Fig. 9). The
//! writer therefore stores the word with `valid` last and clears it first. A reader that sees this
//! word change treats the entry as absent.

use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{FaultReason, PhysAddr, PhysMemory, RingId, RingSlot};

use crate::fmt::{
    DIR, DIR_SHIFT, MAX_RING_BUFFER, RingDevice, RingFormatError, RingPte, RingTable, VALID,
};

/// The two words of an rDEVICE, an rRING or an rPTE in memory.
pub type RingWords = [AtomicU64; 2];

/// Reason why the hardware finds no entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum RingWalkError {
    /// The device has no ring with this number.
    RingBeyondDevice,
    /// The ring has no slot with this number.
    SlotBeyondRing,
    /// The entry of the slot is not valid.
    NotPresent,
    /// An array is not 16-byte aligned.
    Misaligned,
    /// An array lies outside memory.
    TableAccess,
}

impl RingWalkError {
    /// Returns the fault reason that the hardware records.
    #[inline]
    pub const fn fault_reason(self) -> FaultReason {
        match self {
            Self::RingBeyondDevice => FaultReason::RingBeyondDevice,
            Self::SlotBeyondRing => FaultReason::SlotBeyondRing,
            Self::NotPresent => FaultReason::NotPresent,
            // The low bits of an array address are reserved.
            Self::Misaligned => FaultReason::ReservedBit,
            Self::TableAccess => FaultReason::TableAccess,
        }
    }
}

impl core::fmt::Display for RingWalkError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.fault_reason().fmt(f)
    }
}

impl core::error::Error for RingWalkError {}

impl From<RingFormatError> for RingWalkError {
    fn from(_: RingFormatError) -> Self {
        Self::Misaligned
    }
}

/// Returns the two words at `at`.
///
/// # Errors
/// [`RingWalkError::TableAccess`] if they lie outside memory.
#[inline]
pub fn ring_words<M: PhysMemory + ?Sized>(
    mem: &M,
    at: PhysAddr,
) -> Result<&RingWords, RingWalkError> {
    mem.words(at, 2)
        .ok()
        .and_then(<[AtomicU64]>::first_chunk)
        .ok_or(RingWalkError::TableAccess)
}

/// One word of an entry. A trait, so that a test can interleave accesses.
trait Word {
    fn get(&self, order: Ordering) -> u64;
    fn put(&self, value: u64);
}

impl Word for AtomicU64 {
    #[inline]
    fn get(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    #[inline]
    fn put(&self, value: u64) {
        self.store(value, Ordering::Release);
    }
}

/// Reads both words of an entry consistently; `None` if the entry changed during the read.
///
/// The caller must ensure that the entry is refilled at most once during the read. Ring drivers do:
/// they invalidate a slot before reuse, and an invalidation waits for walks in progress. With two
/// refills, the first and the third entry may have the same second word. The reader could then
/// return this word with the address of the second entry.
///
/// Correctness: the second word has the same value before and after the load of the first. Suppose
/// the writer cleared and refilled the entry in between, with the same second word. If the first
/// word is the old one, the result is the old entry. If it is the new one, the clear precedes it
/// and is visible to the last load.
#[inline]
fn load<W: Word>([first, second]: [&W; 2]) -> Option<[u64; 2]> {
    let control = second.get(Ordering::Acquire);
    let address = first.get(Ordering::Acquire);
    (second.get(Ordering::Relaxed) == control).then_some([address, control])
}

/// Stores the first word, then the word with `valid`. The entry must be clear.
#[inline]
fn store<W: Word>([first, second]: &[W; 2], [address, control]: [u64; 2]) {
    first.put(address);
    second.put(control);
}

/// Clears the word with `valid`.
#[inline]
fn clear<W: Word>([_, second]: &[W; 2]) {
    second.put(0);
}

impl RingPte {
    /// Reads an entry as the hardware does. An entry that changes during the read counts as absent.
    ///
    /// The entry may be refilled at most once during the read. A second refill requires an
    /// invalidation, which waits for this read.
    #[inline]
    pub fn load(words: &RingWords) -> Self {
        load(words.each_ref()).map_or(Self::ABSENT, Self::from_words)
    }

    /// Returns true if the entry is valid.
    #[inline]
    pub fn is_set([_, control]: &RingWords) -> bool {
        control.load(Ordering::Relaxed) & VALID != 0
    }

    /// Returns true if the entry is valid and its buffer has `bytes` bytes.
    #[inline]
    pub fn is_set_to([_, control]: &RingWords, bytes: u64) -> bool {
        // If the lengths agree, subtraction leaves only `valid` and `dir`. The mask ignores `dir`.
        let rest = control.load(Ordering::Relaxed).wrapping_sub(bytes);
        bytes <= MAX_RING_BUFFER && rest.rotate_right(DIR_SHIFT) & !DIR == VALID >> DIR_SHIFT
    }

    /// Fills a clear entry: stores `phys_addr`, then the other fields together with `valid`.
    #[inline]
    pub fn store(self, words: &RingWords) {
        store(words, self.words());
    }

    /// Clears the word with `valid`. The stale address remains and has no meaning.
    #[inline]
    pub fn clear(words: &RingWords) {
        clear(words);
    }

    /// Reads the entry of `slot` in `table`, valid or not.
    ///
    /// # Errors
    /// [`RingWalkError`] if the slot does not exist or the table lies outside memory.
    #[inline]
    pub fn read<M: PhysMemory + ?Sized>(
        mem: &M,
        table: &RingTable,
        slot: RingSlot,
    ) -> Result<Self, RingWalkError> {
        let at = table.entry(slot).ok_or(RingWalkError::SlotBeyondRing)?;
        Ok(Self::load(ring_words(mem, at)?))
    }

    /// Reads the entry of `slot` in `table`, which must be valid.
    ///
    /// # Errors
    /// [`RingWalkError`] as for [`read`](Self::read), or if the entry is not valid.
    #[inline]
    pub fn find<M: PhysMemory + ?Sized>(
        mem: &M,
        table: &RingTable,
        slot: RingSlot,
    ) -> Result<Self, RingWalkError> {
        let at = table.entry(slot).ok_or(RingWalkError::SlotBeyondRing)?;
        // Look up each word on its own: two address checks are faster than one range check. The
        // entry is aligned, so the address of the second word does not wrap.
        let words = (mem.word(at), mem.word(at.wrapping_add(8)));
        let (Ok(first), Ok(second)) = words else {
            return Err(RingWalkError::TableAccess);
        };
        match load([first, second]) {
            Some([address, control]) if control & VALID != 0 => {
                Ok(Self::from_words([address, control]))
            }
            _ => Err(RingWalkError::NotPresent),
        }
    }
}

impl RingTable {
    /// Reads the rRING of `ring` as the hardware does. An rRING that changes during the read has no
    /// slots.
    ///
    /// # Errors
    /// [`RingWalkError`] if the device has no such ring, or an array is misaligned or outside
    /// memory.
    #[inline]
    pub fn read<M: PhysMemory + ?Sized>(
        mem: &M,
        device: &RingDevice,
        ring: RingId,
    ) -> Result<Self, RingWalkError> {
        let at = device.ring(ring).ok_or(RingWalkError::RingBeyondDevice)?;
        Ok(Self::decode(
            load(ring_words(mem, at)?.each_ref()).unwrap_or([0, 0]),
        )?)
    }

    /// Fills a clear rRING.
    #[inline]
    pub fn store(&self, words: &RingWords) {
        store(words, self.encode());
    }

    /// Clears an rRING: the ring then has no slots.
    #[inline]
    pub fn clear(words: &RingWords) {
        clear(words);
    }
}

impl RingDevice {
    /// Reads the rDEVICE at `at` as the hardware does. An rDEVICE that changes during the read has
    /// no rings.
    ///
    /// # Errors
    /// [`RingWalkError`] if the rDEVICE or its array is misaligned or outside memory.
    #[inline]
    pub fn read<M: PhysMemory + ?Sized>(mem: &M, at: PhysAddr) -> Result<Self, RingWalkError> {
        Ok(Self::decode(
            load(ring_words(mem, at)?.each_ref()).unwrap_or([0, 0]),
        )?)
    }

    /// Fills a clear rDEVICE.
    #[inline]
    pub fn store(&self, words: &RingWords) {
        store(words, self.encode());
    }

    /// Clears an rDEVICE: the device then has no rings.
    #[inline]
    pub fn clear(words: &RingWords) {
        clear(words);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;
    use std::vec::Vec;

    use super::*;

    /// A word that logs its stores. Before each load it applies the next stores of a script.
    struct Scripted<'a> {
        index: usize,
        entry: &'a Entry,
    }

    #[derive(Default)]
    struct Entry {
        now: Cell<[u64; 2]>,
        stores: RefCell<Vec<(usize, u64)>>,
        /// Number of scripted stores to apply before each load.
        pauses: RefCell<Vec<usize>>,
        script: RefCell<Vec<(usize, u64)>>,
    }

    impl Entry {
        fn words(&self) -> [Scripted<'_>; 2] {
            [0, 1].map(|index| Scripted { index, entry: self })
        }

        fn change(&self, (index, value): (usize, u64)) {
            let mut now = self.now.get();
            now[index] = value;
            self.now.set(now);
        }
    }

    impl Word for Scripted<'_> {
        fn get(&self, _: Ordering) -> u64 {
            let steps = self.entry.pauses.borrow_mut().remove(0);
            for step in self.entry.script.borrow_mut().drain(..steps) {
                self.entry.change(step);
            }
            self.entry.now.get()[self.index]
        }

        fn put(&self, value: u64) {
            self.entry.stores.borrow_mut().push((self.index, value));
        }
    }

    /// For every interleaving of the reader's loads with the writer's stores, the reader sees one
    /// of the written entries or none. Covers one refill, and two refills if no two entries share
    /// the second word.
    #[test]
    fn no_interleaving_shows_a_mixture() {
        let entries = [
            [0x1000, VALID | 1],
            [0x2000, VALID | 1],
            [0x3000, VALID | 2],
        ];
        assert_eq!(mixtures(entries), 0);
    }

    /// Shows why [`load`] needs its precondition: with two refills and no invalidation in between,
    /// a reader can combine words of two entries.
    #[test]
    fn made_anew_twice_during_a_read_shows_one() {
        let entries = [
            [0x1000, VALID | 1],
            [0x2000, VALID | 2],
            [0x3000, VALID | 1],
        ];
        assert!(mixtures(entries) > 0);
        assert_eq!(mixtures([entries[0], entries[1]]), 0);
        assert_eq!(mixtures([entries[1], entries[2]]), 0);
    }

    /// Counts the interleavings in which the reader sees neither one of `entries` nor an absent
    /// entry.
    fn mixtures<const N: usize>(entries: [[u64; 2]; N]) -> usize {
        let writer = Entry::default();
        for entry in entries {
            clear(&writer.words());
            store(&writer.words(), entry);
        }
        let script: Rc<[_]> = writer.stores.take().into();
        let mut seen = [0; N];
        let (mut nothing, mut mixtures) = (0, 0);
        let steps = script.len();
        for before in 0..=steps {
            for between in 0..=steps - before {
                for after in 0..=steps - before - between {
                    let reader = Entry::default();
                    reader.script.borrow_mut().extend(script.iter());
                    reader.pauses.borrow_mut().extend([before, between, after]);
                    let words =
                        load(reader.words().each_ref()).filter(|[_, control]| control & VALID != 0);
                    let Some(words) = words else {
                        nothing += 1;
                        continue;
                    };
                    match entries.iter().position(|entry| *entry == words) {
                        Some(which) => seen[which] += 1,
                        None => mixtures += 1,
                    }
                }
            }
        }
        assert!(
            nothing > 0 && seen.iter().all(|count| *count > 0),
            "{seen:?}"
        );
        mixtures
    }
}
