//! Completion of commands: the sequence number that the last `IOFENCE.C` of a burst writes.

use core::sync::atomic::Ordering;

use ringfence_types::{PhysAddr, PhysMemory, Sequence, Ticket};

/// Numbers of the bursts, and the word to which the unit writes the low 32 bits of a number.
#[derive(Debug)]
pub(crate) struct Completion {
    pub(crate) word: PhysAddr,
    pub(crate) bursts: Sequence,
    /// Polls since the last progress.
    pub(crate) stalled: u32,
    /// The queue has stopped at an error.
    pub(crate) failed: bool,
}

impl Completion {
    /// Begins with no burst; the word is zero.
    pub(crate) fn new(word: PhysAddr) -> Self {
        Self {
            word,
            bursts: Sequence::default(),
            stalled: 0,
            failed: false,
        }
    }

    /// Reads the word, and returns true if the burst of `ticket` has completed.
    pub(crate) fn is_complete<M: PhysMemory>(&mut self, memory: &M, ticket: Ticket) -> bool {
        if !self.bursts.is_complete(ticket)
            && let Ok(word) = memory.word(self.word)
            && self.bursts.complete(word.load(Ordering::Acquire) as u32)
        {
            self.stalled = 0;
        }
        self.bursts.is_complete(ticket)
    }
}
