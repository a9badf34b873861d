//! Completion of commands: the sequence number that the last `IOFENCE.C` of a burst writes.

use core::sync::atomic::Ordering;

use ringfence_types::{PhysAddr, PhysMemory};

/// Sequence numbers of submitted and completed bursts. The unit writes the low 32 bits of a number
/// to a word in memory.
#[derive(Debug)]
pub(crate) struct Completion {
    word: PhysAddr,
    submitted: u64,
    completed: u64,
    /// Polls since the last progress.
    pub(crate) stalled: u32,
    /// The queue has stopped at an error.
    pub(crate) failed: bool,
}

impl Completion {
    /// Begins with `first` as the last number that is submitted and complete; the word at `word`
    /// holds its low bits.
    pub(crate) const fn new(word: PhysAddr, first: u64) -> Self {
        Self {
            word,
            submitted: first,
            completed: first,
            stalled: 0,
            failed: false,
        }
    }

    pub(crate) const fn word(&self) -> PhysAddr {
        self.word
    }

    /// Returns the number of the next burst.
    pub(crate) const fn next(&self) -> u64 {
        self.submitted.wrapping_add(1)
    }

    /// Counts a burst that the unit can see.
    pub(crate) fn submit(&mut self) -> u64 {
        self.submitted = self.next();
        self.submitted
    }

    /// Returns true if the number was given to a burst.
    pub(crate) const fn is_submitted(&self, sequence: u64) -> bool {
        sequence <= self.submitted
    }

    /// Reads the word, and returns true if the burst `sequence` has completed.
    pub(crate) fn is_complete<M: PhysMemory>(&mut self, memory: &M, sequence: u64) -> bool {
        if sequence <= self.completed {
            return true;
        }
        let Ok(word) = memory.word(self.word) else {
            return false;
        };
        let low = word.load(Ordering::Acquire) as u32;
        // The distance is right as long as fewer than 2^32 bursts are outstanding. A word outside
        // the outstanding numbers is not one that the unit was told to write.
        let distance = u64::from((self.submitted as u32).wrapping_sub(low));
        let outstanding = self.submitted.wrapping_sub(self.completed);
        if distance < outstanding {
            self.completed = self.submitted.wrapping_sub(distance);
            self.stalled = 0;
        }
        sequence <= self.completed
    }
}
