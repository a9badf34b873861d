//! The cache lines of a table that a walker that does not snoop has yet to see (rIOMMU Fig. 11 `sync_mem`, by lines).
//!
//! Four entries share a line, and a burst goes through them in order: a line is written back when the burst leaves it, while the next
//! one is being filled, and waited for once, at the end. A line that is come back to is written back again; one that is left for good
//! is written back once.

use ringfence_types::{PhysAddr, PhysMemory};

/// Bytes of a cache line.
pub(super) const LINE: u64 = 64;

/// No line: line numbers have 58 bits.
const NONE: u64 = u64::MAX;

/// The line that one kind of change, maps or unmaps, is at.
#[derive(Debug)]
pub(super) struct Line(u64);

impl Line {
    /// At no line.
    pub(super) const fn none() -> Self {
        Self(NONE)
    }

    /// The entry at `at` has changed.
    #[inline]
    pub(super) fn touch<M: PhysMemory + ?Sized>(&mut self, mem: &M, at: PhysAddr) {
        let line = at.get() / LINE;
        if line != self.0 {
            self.leave(mem);
            self.0 = line;
        }
    }

    /// Writes the line back, without waiting. Whether there was one: then something has been written back and not waited for.
    // Out of line: a call is nothing beside a write-back, and what touches the same line again stays short.
    #[inline(never)]
    pub(super) fn leave<M: PhysMemory + ?Sized>(&mut self, mem: &M) -> bool {
        if self.0 == NONE {
            return false;
        }
        mem.write_back(PhysAddr::new(self.0.wrapping_mul(LINE)), LINE);
        self.0 = NONE;
        true
    }
}
