//! Guest memory that keeps its history, and that can change between two lookups of an access.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{MemoryError, PhysAddr, PhysMemory, TABLE_WORDS};

/// Number of pages with memory.
pub(crate) const PAGES: u64 = 8;
/// Distance between two pages. Only their first words are memory, so that tables and the fault
/// queue can leave it.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// Words of a page that are memory: as many as [`Memory::unchecked`] has bits for.
pub(crate) const PAGE_WORDS: u64 = u64::BITS as u64;
const WORDS: usize = (PAGES * PAGE_WORDS) as usize;
/// Bytes of an entry of any table.
pub(crate) const ENTRY_BYTES: u64 = 16;

/// Two words of an entry.
pub(crate) type Entry = [u64; 2];

/// Index of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WordIndex(usize);

impl WordIndex {
    /// Returns a word of memory for any number.
    pub(crate) fn any(number: u64) -> Self {
        Self((number % WORDS as u64) as usize)
    }

    /// Returns the word at `at`, which must be aligned; `None` outside memory.
    pub(crate) fn at(at: u64) -> Option<Self> {
        let (page, word) = (at / PAGE_BYTES, at % PAGE_BYTES / 8);
        let inside = at.is_multiple_of(8) && page < PAGES && word < PAGE_WORDS;
        inside.then_some(Self((page * PAGE_WORDS + word) as usize))
    }
}

/// A former value of a word, until `until`.
#[derive(Clone, Copy, Debug)]
struct Former {
    until: u64,
    word: WordIndex,
    value: u64,
}

/// A change that waits for the lookups of an access.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingChange {
    /// Lookups before the change.
    pub(crate) after: u8,
    /// Word that changes.
    pub(crate) word: WordIndex,
    /// Bits that flip.
    pub(crate) flip: u64,
}

/// Guest memory that can change between two reads of a walk.
pub(crate) struct Memory {
    words: Box<[AtomicU64; WORDS]>,
    /// The values that the words must have: all but the function changes memory through
    /// [`store`](Self::store).
    known: RefCell<Box<[u64; WORDS]>>,
    /// Words that [`check`](Self::check) has to compare, one bit for each word of a page: those
    /// that the function could store to, and those that it must have stored. Only
    /// [`words`](PhysMemory::words) gives it access to memory.
    unchecked: [Cell<u64>; PAGES as usize],
    /// Time: the number of changes so far.
    now: Cell<u64>,
    formers: RefCell<Vec<Former>>,
    pending: Cell<Option<PendingChange>>,
    /// Entries that the access looked up, without repetitions in a row.
    looked_up: Cell<u32>,
    last: Cell<u64>,
}

impl Memory {
    pub(crate) fn new() -> Self {
        Self {
            words: Box::new([const { AtomicU64::new(0) }; WORDS]),
            known: RefCell::new(Box::new([0; WORDS])),
            unchecked: [const { Cell::new(0) }; PAGES as usize],
            now: Cell::new(0),
            formers: RefCell::default(),
            pending: Cell::new(None),
            looked_up: Cell::new(0),
            last: Cell::new(u64::MAX),
        }
    }

    /// Returns the current time. Each change advances it.
    pub(crate) fn now(&self) -> u64 {
        self.now.get()
    }

    /// Stores a word; returns true if its value changed.
    pub(crate) fn store(&self, word: WordIndex, value: u64) -> bool {
        let WordIndex(index) = word;
        self.words[index].store(value, Ordering::Relaxed);
        self.expect(word, value)
    }

    /// Notes that the function must have stored a word; returns true if that changed it.
    pub(crate) fn expect(&self, word: WordIndex, value: u64) -> bool {
        let WordIndex(index) = word;
        self.check_later(word, 1);
        let former = std::mem::replace(&mut self.known.borrow_mut()[index], value);
        if former == value {
            return false;
        }
        let now = self.now.get() + 1;
        self.now.set(now);
        self.formers.borrow_mut().push(Former {
            until: now,
            word,
            value: former,
        });
        true
    }

    /// Notes that `count` words of one page are to be compared.
    fn check_later(&self, WordIndex(first): WordIndex, count: usize) {
        let (page, word) = (first / PAGE_WORDS as usize, first % PAGE_WORDS as usize);
        let unused = PAGE_WORDS as u32 - count as u32;
        let bits = u64::MAX.checked_shr(unused).unwrap_or(0) << word;
        let unchecked = &self.unchecked[page];
        unchecked.set(unchecked.get() | bits);
    }

    /// Panics if the function has stored anything but what it must store since the last check.
    pub(crate) fn check(&self) {
        let known = self.known.borrow();
        for (page, unchecked) in self.unchecked.iter().enumerate() {
            let mut bits = unchecked.take();
            while bits != 0 {
                let index = page * PAGE_WORDS as usize + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let word = self.words[index].load(Ordering::Relaxed);
                assert_eq!(word, known[index], "word {index}");
            }
        }
    }

    /// Panics if any word of memory is not what it must be.
    pub(crate) fn check_all(&self) {
        let known = self.known.borrow();
        let mut words = self.words.iter().zip(known.iter());
        let wrong = words.position(|(word, known)| word.load(Ordering::Relaxed) != *known);
        assert_eq!(wrong, None, "a word has changed");
    }

    pub(crate) fn load(&self, WordIndex(index): WordIndex) -> u64 {
        self.known.borrow()[index]
    }

    /// Stores an entry: the first word, then the second. Outside memory, it stores nothing.
    pub(crate) fn store_entry(&self, at: u64, entry: Entry) {
        for (at, value) in (at..).step_by(8).zip(entry) {
            if let Some(word) = WordIndex::at(at) {
                self.store(word, value);
            }
        }
    }

    /// Returns every value that the entry at `at` had since `since`, newest first, each with the
    /// time at which it ended. `None` if the entry lies outside memory.
    pub(crate) fn values_since(&self, at: u64, since: u64) -> Option<Vec<(Entry, u64)>> {
        let words = [WordIndex::at(at)?, WordIndex::at(at.checked_add(8)?)?];
        let mut entry = words.map(|word| self.load(word));
        let mut values = vec![(entry, u64::MAX)];
        for former in self.formers.borrow().iter().rev() {
            if former.until <= since {
                break;
            }
            for (value, word) in entry.iter_mut().zip(words) {
                if word == former.word {
                    *value = former.value;
                    values.push((entry, former.until));
                    break;
                }
            }
        }
        Some(values)
    }

    /// Lets memory change during the next access.
    pub(crate) fn change_later(&self, change: PendingChange) {
        self.pending.set(Some(change));
    }

    /// Begins to count the entries that an access looks up.
    pub(crate) fn begin(&self) {
        self.looked_up.set(0);
        self.last.set(u64::MAX);
    }

    /// Returns the number of entries looked up since [`begin`](Self::begin). A change that still
    /// waits does not happen.
    pub(crate) fn end(&self) -> u32 {
        self.pending.set(None);
        self.looked_up.get()
    }

    fn look_up(&self, at: PhysAddr) {
        if let Some(change) = self.pending.get() {
            if change.after == 0 {
                self.pending.set(None);
                let value = self.load(change.word);
                self.store(change.word, value ^ change.flip);
            } else {
                let after = change.after - 1;
                self.pending.set(Some(PendingChange { after, ..change }));
            }
        }
        let entry = at.get() / ENTRY_BYTES;
        if self.last.replace(entry) != entry {
            self.looked_up.set(self.looked_up.get() + 1);
        }
    }
}

impl PhysMemory for Memory {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.words(at, 1).map(|words| &words[0])
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        let words = TABLE_WORDS as u64;
        Err(MemoryError::Outside { at, words })
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        self.look_up(at);
        let words = count as u64;
        let outside = MemoryError::Outside { at, words };
        if !at.is_aligned(8) {
            return Err(MemoryError::Misaligned { at });
        }
        let word = WordIndex::at(at.get()).ok_or(outside)?;
        let WordIndex(first) = word;
        let left = PAGE_WORDS as usize - first % PAGE_WORDS as usize;
        if count > left {
            return Err(outside);
        }
        self.check_later(word, count);
        self.words.get(first..first + count).ok_or(outside)
    }

    fn write_back(&self, _at: PhysAddr, _bytes: u64) {}

    fn drain(&self) {}
}
