//! The cache lines of a table that a walker that does not snoop has yet to see (rIOMMU Fig. 11
//! `sync_mem`, by lines).
//!
//! Four entries share a line, and a burst goes through them in order: a line is written back when
//! the burst leaves it, while the next one is being filled, and waited for once, at the end. A line
//! that is come back to is written back again; one that is left for good is written back once. A
//! line further on is asked for at the same moment: the walker makes the driver write back what it
//! will need again, and what is needed again is known, since rings go round.
//!
//! Lines are a processor's and not the ring's: the wait is a fence, which waits for what its own
//! processor has written back and for nothing else. Had the next processor at the ring to leave
//! this one's line, nobody would wait for it.

use ringfence_pgtable::{RING_ENTRY_BYTES, RingTable};
use ringfence_types::{PhysAddr, PhysMemory};

/// Bytes of a cache line.
pub(super) const LINE: u64 = 64;

/// How many lines ahead the next ones are asked for.
const AHEAD: u64 = 16;

/// No line: line numbers have 58 bits.
const NONE: u64 = u64::MAX;

/// The lines of one ring that one processor has changed and may not have written back yet. Maps and
/// unmaps follow each other round the ring, so there is one of each.
#[derive(Debug)]
pub struct DirtyRingLines {
    filled: Line,
    cleared: Line,
}

impl Default for DirtyRingLines {
    fn default() -> Self {
        Self::none()
    }
}

impl DirtyRingLines {
    /// No lines.
    pub const fn none() -> Self {
        Self {
            filled: Line::none(),
            cleared: Line::none(),
        }
    }

    /// The entry at `at` of `table` has been filled.
    #[inline]
    pub(super) fn filled<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        table: &RingTable,
        at: PhysAddr,
    ) {
        self.filled.touch(mem, table, at);
    }

    /// The entry at `at` of `table` has been cleared.
    #[inline]
    pub(super) fn cleared<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        table: &RingTable,
        at: PhysAddr,
    ) {
        self.cleared.touch(mem, table, at);
    }

    /// Writes back what is left, without waiting. Whether something has been written back since the
    /// last time.
    #[inline]
    pub(crate) fn write_back<M: PhysMemory + ?Sized>(&mut self, mem: &M) -> bool {
        // Neither is cut short: both are left.
        self.filled.write_back(mem) | self.cleared.write_back(mem)
    }

    /// Makes every change visible to a walker that does not snoop: each line once, and one wait
    /// (Fig. 11 `sync_mem`, once a burst instead of once an entry). Before the device is told of
    /// new addresses, and before an invalidation.
    #[inline]
    pub fn sync<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        if self.write_back(mem) {
            mem.drain();
        }
    }
}

/// The line that one kind of change, maps or unmaps, is at.
#[derive(Debug)]
struct Line(u64);

impl Line {
    /// At no line.
    const fn none() -> Self {
        Self(NONE)
    }

    /// The entry at `at` of `table` has changed.
    #[inline]
    fn touch<M: PhysMemory + ?Sized>(&mut self, mem: &M, table: &RingTable, at: PhysAddr) {
        let line = at.get() / LINE;
        if line != self.0 {
            self.switch_line(mem, table, at);
        }
    }

    /// Writes the line back and goes on to that of the entry at `at`.
    // Out of line: a call is nothing beside a write-back, and what touches the same line again
    // stays short.
    #[inline(never)]
    fn switch_line<M: PhysMemory + ?Sized>(&mut self, mem: &M, table: &RingTable, at: PhysAddr) {
        self.write_back(mem);
        self.0 = at.get() / LINE;
        mem.prefetch(prefetch_target(table, at));
    }

    /// Writes the line back, without waiting. Whether there was one: then something has been
    /// written back and not waited for.
    #[inline]
    fn write_back<M: PhysMemory + ?Sized>(&mut self, mem: &M) -> bool {
        if self.0 == NONE {
            return false;
        }
        mem.write_back(PhysAddr::new(self.0.wrapping_mul(LINE)), LINE);
        self.0 = NONE;
        true
    }
}

/// The entry [`AHEAD`] of the one at `at`, round the `table`.
#[inline]
fn prefetch_target(table: &RingTable, at: PhysAddr) -> PhysAddr {
    let bytes = u64::from(table.slots()).wrapping_mul(RING_ENTRY_BYTES);
    let mut offset = at.get().wrapping_sub(table.base().get());
    offset = offset.wrapping_add(AHEAD * LINE);
    if offset >= bytes {
        offset = offset.checked_rem(bytes).unwrap_or(0);
    }
    table.base().wrapping_add(offset)
}
