//! Memory that keeps every past value, so that a reference knows all values that hardware may have
//! cached.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{MemoryError, PhysAddr, PhysMemory, TABLE_WORDS};

pub(super) const PAGES: u64 = 16;
pub(super) const PAGE_BYTES: u64 = 4096;

/// Time of an event: the number of the operation.
pub(super) type Time = u32;

/// End of a value that is still present.
const EVER: Time = Time::MAX;

/// The 16 bytes that hardware reads at once, from a time on. They are valid until the time of the
/// next version.
struct Version {
    from: Time,
    words: [AtomicU64; 2],
}

impl Version {
    const fn new(from: Time, words: [u64; 2]) -> Self {
        let [low, high] = words;
        Self {
            from,
            words: [AtomicU64::new(low), AtomicU64::new(high)],
        }
    }
}

/// All versions of memory. Pages without a store are outside memory.
#[derive(Default)]
pub(super) struct History {
    /// Versions by page and index of the 16 bytes: never empty, oldest first.
    versions: BTreeMap<(u64, u64), Vec<Version>>,
    /// By page: the time of its first store, and its contents where nothing was stored.
    born: BTreeMap<u64, Version>,
}

impl History {
    /// Stores a word at `now`; `page` and `index` are within memory.
    pub(super) fn store(&mut self, now: Time, page: u64, index: u64, word: u64) {
        let born = self
            .born
            .entry(page)
            .or_insert_with(|| Version::new(now, [0, 0]))
            .from;
        let versions = self
            .versions
            .entry((page, index / 2))
            .or_insert_with(|| vec![Version::new(born, [0, 0])]);
        let last = versions.last().expect("never empty");
        let mut words = [&last.words[0], &last.words[1]].map(|word| word.load(Ordering::Relaxed));
        words[(index % 2) as usize] = word;
        versions.push(Version::new(now, words));
    }

    /// Returns every version of the 16 bytes around `at` that was valid at `since` or later, with
    /// its end.
    fn versions(&self, at: PhysAddr, since: Time) -> Vec<(&[AtomicU64; 2], Time)> {
        let page = at.get() / PAGE_BYTES;
        let Some(blank) = self.born.get(&page) else {
            return Vec::new();
        };
        let Some(versions) = self.versions.get(&(page, at.offset_in(PAGE_BYTES) / 16)) else {
            return vec![(&blank.words, EVER)];
        };
        let ends = versions[1..].iter().map(|next| next.from).chain([EVER]);
        versions
            .iter()
            .zip(ends)
            .filter(|(version, end)| *end > since && *end > version.from)
            .map(|(version, end)| (&version.words, end))
            .collect()
    }
}

/// Memory as hardware may have read it at `since` or later: each read chooses one of the values
/// since then. At the present time each read has only one choice.
pub(super) struct View<'a> {
    history: &'a History,
    since: Time,
    chosen: RefCell<Chosen>,
}

#[derive(Default)]
struct Chosen {
    /// Choice of each read, and its number of choices, in the order of the reads.
    digits: Vec<(usize, usize)>,
    /// Number of reads so far.
    reads: usize,
    /// End of the value of the last read.
    end: Time,
}

impl<'a> View<'a> {
    pub(super) fn new(history: &'a History, since: Time) -> Self {
        Self {
            history,
            since,
            chosen: RefCell::default(),
        }
    }

    /// Returns true if the last read returned a value that is still present.
    pub(super) fn last_is_present(&self) -> bool {
        self.chosen.borrow().end == EVER
    }

    /// Returns true if the value of the last read was valid at `since` or later.
    pub(super) fn last_held(&self, since: Time) -> bool {
        self.chosen.borrow().end > since
    }

    /// Calls `look` once for every combination of choices, at most `limit` times; false if there
    /// are more.
    pub(super) fn every(&self, limit: usize, mut look: impl FnMut(&Self)) -> bool {
        for _ in 0..limit {
            {
                let mut chosen = self.chosen.borrow_mut();
                chosen.reads = 0;
                chosen.end = EVER;
            }
            look(self);
            let digits = &mut self.chosen.borrow_mut().digits;
            // Count up; the last read changes fastest.
            while digits
                .pop_if(|(chosen, count)| *chosen + 1 == *count)
                .is_some()
            {}
            match digits.last_mut() {
                Some((chosen, _)) => *chosen += 1,
                None => return true,
            }
        }
        false
    }
}

impl PhysMemory for View<'_> {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        Ok(&self.words(at, 1)?[0])
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        panic!("hardware reads 16 bytes at once, not the whole table at {at}");
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        if !at.is_aligned(8) {
            return Err(MemoryError::Misaligned { at });
        }
        let outside = MemoryError::Outside {
            at,
            words: count as u64,
        };
        let versions = self.history.versions(at, self.since);
        let mut chosen = self.chosen.borrow_mut();
        let read = chosen.reads;
        chosen.reads += 1;
        if read == chosen.digits.len() {
            chosen.digits.push((0, versions.len().max(1)));
        }
        let (digit, _) = chosen.digits[read];
        // A page that does not exist now never existed.
        chosen.end = EVER;
        let (pair, end) = *versions.get(digit).ok_or(outside)?;
        chosen.end = end;
        let first = (at.get() / 8 % 2) as usize;
        pair.get(first..first + count).ok_or(outside)
    }

    fn write_back(&self, _at: PhysAddr, _bytes: u64) {}

    fn drain(&self) {}
}
