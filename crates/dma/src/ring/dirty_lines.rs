//! The cache lines of a table that the driver must write back for a walker that does not snoop
//! (rIOMMU Fig. 11 `sync_mem`, by cache lines).
//!
//! Four entries share a line, and a burst changes them in order. The driver writes a line back when
//! the burst leaves it, while it fills the next one, and waits once at the end. A line that changes
//! again is written back again; any other line is written back once. At the same moment the driver
//! prefetches a line further ahead: a written-back line may have left the cache, and a ring reuses
//! its lines in a known order.
//!
//! Each CPU tracks its own lines, not the ring, because the wait is a fence. A fence waits only for
//! write-backs of its own CPU. If another CPU wrote back this CPU's line, no CPU would wait for it.

use ringfence_pgtable::{RING_ENTRY_BYTES, RingTable};
use ringfence_types::{PhysAddr, PhysMemory};

/// Bytes of a cache line.
pub(super) const LINE: u64 = 64;

/// Prefetch distance in lines.
const AHEAD: u64 = 16;

/// Marks the absence of a line: line numbers have 58 bits.
const NONE: u64 = u64::MAX;

/// The lines of one ring that one CPU has changed and may not have written back. Maps and unmaps
/// each advance around the ring, so there is one line for each.
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
    /// Creates a state without changed lines.
    pub const fn none() -> Self {
        Self {
            filled: Line::none(),
            cleared: Line::none(),
        }
    }

    /// Records that the entry at `at` of `table` was filled.
    #[inline]
    pub(super) fn filled<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        table: &RingTable,
        at: PhysAddr,
    ) {
        self.filled.touch(mem, table, at);
    }

    /// Records that the entry at `at` of `table` was cleared.
    #[inline]
    pub(super) fn cleared<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        table: &RingTable,
        at: PhysAddr,
    ) {
        self.cleared.touch(mem, table, at);
    }

    /// Writes the remaining lines back without waiting. Returns true if any line was written back
    /// since the last call.
    #[inline]
    pub(crate) fn write_back<M: PhysMemory + ?Sized>(&mut self, mem: &M) -> bool {
        // `|` does not short-circuit: both lines are written back.
        self.filled.write_back(mem) | self.cleared.write_back(mem)
    }

    /// Makes every change visible to a walker that does not snoop: one write-back per line, and one
    /// wait (Fig. 11 `sync_mem`, per burst instead of per entry). Call it before the device
    /// receives new addresses, and before an invalidation.
    #[inline]
    pub fn sync<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        if self.write_back(mem) {
            mem.drain();
        }
    }
}

/// The current line of maps, or of unmaps.
#[derive(Debug)]
struct Line(u64);

impl Line {
    /// Creates a state without a line.
    const fn none() -> Self {
        Self(NONE)
    }

    /// Records that the entry at `at` of `table` changed.
    #[inline]
    fn touch<M: PhysMemory + ?Sized>(&mut self, mem: &M, table: &RingTable, at: PhysAddr) {
        let line = at.get() / LINE;
        if line != self.0 {
            self.switch_line(mem, table, at);
        }
    }

    /// Writes the line back and changes to the line of the entry at `at`.
    // Not inlined: a call is cheap compared with a write-back, and the path within a line stays
    // short.
    #[inline(never)]
    fn switch_line<M: PhysMemory + ?Sized>(&mut self, mem: &M, table: &RingTable, at: PhysAddr) {
        self.write_back(mem);
        self.0 = at.get() / LINE;
        mem.prefetch(prefetch_target(table, at));
    }

    /// Writes the line back without waiting. Returns true if there was a line; the caller must then
    /// wait.
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

/// Returns the address of the entry [`AHEAD`] lines after `at`, with wrap-around in `table`.
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
