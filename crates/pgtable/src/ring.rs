//! The tables of a ring IOMMU in memory: how the operating system changes an entry under the eyes
//! of the hardware, and how the hardware finds it (rIOMMU Fig. 10 `rtable_walk`, Fig. 11).
//!
//! An entry is 128 bits in two words, and no store writes both (erratum of Fig. 9). So `valid` is
//! stored last and cleared first, and a reader that sees the second word change takes the entry for
//! absent.

use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{FaultReason, PhysAddr, PhysMemory, RingId, RingSlot};

use crate::fmt::{
    DIR, DIR_SHIFT, MAX_RING_BUFFER, RingDevice, RingFormatError, RingPte, RingTable, VALID,
};

/// Two words of memory that hold an rDEVICE, an rRING or an rPTE.
pub type RingWords = [AtomicU64; 2];

/// Why the hardware finds no entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum RingWalkError {
    /// The device has no such ring.
    RingBeyondDevice,
    /// The ring has no such slot.
    SlotBeyondRing,
    /// The slot's entry is not valid.
    NotPresent,
    /// An array is not 16-byte aligned.
    Misaligned,
    /// An array lies outside memory.
    TableAccess,
}

impl RingWalkError {
    /// How the hardware reports this.
    #[inline]
    pub const fn fault_reason(self) -> FaultReason {
        match self {
            Self::RingBeyondDevice => FaultReason::RingBeyondDevice,
            Self::SlotBeyondRing => FaultReason::SlotBeyondRing,
            Self::NotPresent => FaultReason::NotPresent,
            // The low bits of an array's address are reserved.
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

/// The two words at `at`.
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

/// A word of an entry; a trait so that a test can put other accesses in between.
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

/// Both words as they stood at one moment; `None` if the entry was changing. It is made anew once
/// at most while this reads it: whoever uses a slot again has had it invalidated, and an
/// invalidation waits for walks. A third entry with the second word of the first could pass for it,
/// with the address of the second.
///
/// The second word is the same before and after the first is read. Had the entry been cleared and
/// made anew in between, with the same second word, then either the first word is the old one and
/// the entry is the old one, or it is the new one, and then the clearing, which came before it, is
/// visible to the last load.
#[inline]
fn load<W: Word>([first, second]: [&W; 2]) -> Option<[u64; 2]> {
    let control = second.get(Ordering::Acquire);
    let address = first.get(Ordering::Acquire);
    (second.get(Ordering::Relaxed) == control).then_some([address, control])
}

/// The first word, then the one that makes it count. What was there has been cleared.
#[inline]
fn store<W: Word>([first, second]: &[W; 2], [address, control]: [u64; 2]) {
    first.put(address);
    second.put(control);
}

/// The word that makes the first one count.
#[inline]
fn clear<W: Word>([_, second]: &[W; 2]) {
    second.put(0);
}

impl RingPte {
    /// Reads an entry as the hardware does: absent while it changes. It may be made anew once
    /// meanwhile, not twice: in between comes an invalidation, which waits for this.
    #[inline]
    pub fn load(words: &RingWords) -> Self {
        load(words.each_ref()).map_or(Self::ABSENT, Self::from_words)
    }

    /// Whether the entry is valid.
    #[inline]
    pub fn is_set([_, control]: &RingWords) -> bool {
        control.load(Ordering::Relaxed) & VALID != 0
    }

    /// Whether the entry is valid and its buffer has `bytes` bytes.
    #[inline]
    pub fn is_set_to([_, control]: &RingWords, bytes: u64) -> bool {
        // Where the lengths agree, nothing is left of the word but `valid` above `dir`, and which
        // `dir` does not matter.
        let rest = control.load(Ordering::Relaxed).wrapping_sub(bytes);
        bytes <= MAX_RING_BUFFER && rest.rotate_right(DIR_SHIFT) & !DIR == VALID >> DIR_SHIFT
    }

    /// Fills an entry that is clear: `phys_addr`, then everything else with `valid`.
    #[inline]
    pub fn store(self, words: &RingWords) {
        store(words, self.words());
    }

    /// Clears an entry. The word with `valid` goes; the address that stays means nothing.
    #[inline]
    pub fn clear(words: &RingWords) {
        clear(words);
    }

    /// Fills an entry as Fig. 11 does: field by field, whatever the entry holds, in no order that
    /// the hardware could rely on. A live entry stays valid while it changes (errata 7 and 9).
    #[inline]
    pub fn store_as_published(self, [first, second]: &RingWords) {
        let [address, _] = self.words();
        first.store(address, Ordering::Relaxed);
        for control in self.field_by_field(second.load(Ordering::Relaxed)) {
            second.store(control, Ordering::Relaxed);
        }
    }

    /// Clears an entry as Fig. 11 does: `valid` alone, in no order. Whether it was set.
    #[inline]
    pub fn clear_as_published([_, control]: &RingWords) -> bool {
        let was = control.load(Ordering::Relaxed);
        control.store(was & !VALID, Ordering::Relaxed);
        was & VALID != 0
    }

    /// The entry of `slot` in `table`, valid or not.
    ///
    /// # Errors
    /// [`RingWalkError`]: there is no such slot, or the table lies outside memory.
    #[inline]
    pub fn read<M: PhysMemory + ?Sized>(
        mem: &M,
        table: &RingTable,
        slot: RingSlot,
    ) -> Result<Self, RingWalkError> {
        let at = table.entry(slot).ok_or(RingWalkError::SlotBeyondRing)?;
        Ok(Self::load(ring_words(mem, at)?))
    }

    /// The entry of `slot` in `table`, which is valid.
    ///
    /// # Errors
    /// [`RingWalkError`]: as for [`read`](Self::read), or the entry is not valid.
    #[inline]
    pub fn find<M: PhysMemory + ?Sized>(
        mem: &M,
        table: &RingTable,
        slot: RingSlot,
    ) -> Result<Self, RingWalkError> {
        let at = table.entry(slot).ok_or(RingWalkError::SlotBeyondRing)?;
        // Word by word: two addresses are compared faster than a range of them. An entry is
        // aligned, so the second has not wrapped.
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
    /// Reads the rRING of `ring` as the hardware does. One that is changing has no slots.
    ///
    /// # Errors
    /// [`RingWalkError`]: the device has no such ring, or an array is misplaced.
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

    /// Fills an rRING that is clear.
    #[inline]
    pub fn store(&self, words: &RingWords) {
        store(words, self.encode());
    }

    /// Makes an rRING one without slots.
    #[inline]
    pub fn clear(words: &RingWords) {
        clear(words);
    }
}

impl RingDevice {
    /// Reads the rDEVICE at `at` as the hardware does. One that is changing has no rings.
    ///
    /// # Errors
    /// [`RingWalkError`]: it or its array is misplaced.
    #[inline]
    pub fn read<M: PhysMemory + ?Sized>(mem: &M, at: PhysAddr) -> Result<Self, RingWalkError> {
        Ok(Self::decode(
            load(ring_words(mem, at)?.each_ref()).unwrap_or([0, 0]),
        )?)
    }

    /// Fills an rDEVICE that is clear.
    #[inline]
    pub fn store(&self, words: &RingWords) {
        store(words, self.encode());
    }

    /// Makes an rDEVICE one without rings.
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

    /// A word whose stores are written down, and before each of whose loads the next stores of a
    /// script are carried out.
    struct Scripted<'a> {
        index: usize,
        entry: &'a Entry,
    }

    #[derive(Default)]
    struct Entry {
        now: Cell<[u64; 2]>,
        stores: RefCell<Vec<(usize, u64)>>,
        /// How many stores of the script happen before each load.
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

    /// However a reader's loads fall between a writer's stores, it sees one of the entries that
    /// there were, or none: with an entry made anew once, and twice where not every second word is
    /// another's.
    #[test]
    fn no_interleaving_shows_a_mixture() {
        let entries = [
            [0x1000, VALID | 1],
            [0x2000, VALID | 1],
            [0x3000, VALID | 2],
        ];
        assert_eq!(mixtures(entries), 0);
    }

    /// What [`load`] asks of whoever changes entries: without an invalidation in between, one can
    /// be taken for another.
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

    /// In how many ways a reader's loads can fall between the stores of a writer of these entries
    /// so that it sees none of them and not nothing.
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
