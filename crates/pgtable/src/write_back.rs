//! Write-back of dirty cache lines of page tables to memory.

use ringfence_types::{PhysAddr, PhysMemory};

use crate::Coherency;
use crate::coherency::LINE;

/// Decides when the cache lines that an operation dirtied are written back.
pub(crate) trait WriteBackPolicy {
    /// Records that the operation stored `bytes` bytes at `at`.
    fn touched<M: PhysMemory + ?Sized>(&mut self, mem: &M, at: PhysAddr, bytes: u64);
    /// Ends the operation.
    fn finish<M: PhysMemory + ?Sized>(&mut self, mem: &M);
}

/// Writes back each line at once and waits at the end of the operation.
pub(crate) struct ImmediateWriteBack(pub(crate) Coherency);

impl WriteBackPolicy for ImmediateWriteBack {
    #[inline]
    fn touched<M: PhysMemory + ?Sized>(&mut self, mem: &M, at: PhysAddr, bytes: u64) {
        self.0.write_back(mem, at, bytes);
    }

    #[inline]
    fn finish<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        self.0.drain(mem);
    }
}

/// Records dirty lines in a [`DirtyLines`].
pub(crate) struct DeferredWriteBack<'a>(pub(crate) Coherency, pub(crate) &'a mut DirtyLines);

impl WriteBackPolicy for DeferredWriteBack<'_> {
    #[inline]
    fn touched<M: PhysMemory + ?Sized>(&mut self, mem: &M, at: PhysAddr, bytes: u64) {
        if self.0 == Coherency::NonCoherent {
            self.1.add(mem, at, bytes);
        }
    }

    #[inline]
    fn finish<M: PhysMemory + ?Sized>(&mut self, _mem: &M) {}
}

/// Number of slots: one per cache line of a table page, and one bit each in a word.
const SLOTS: usize = 64;
/// Prefetch distance in lines.
const PREFETCH_LINES: u64 = 4;
/// Cache lines of a table page.
const TABLE_LINES: u64 = 64;
/// Marks an empty slot. Line numbers have 58 bits, so this value is free.
const NO_LINE: u64 = u64::MAX;

/// Dirty cache lines of a burst of operations. Owned by one CPU.
///
/// A line that several operations dirty is recorded and written back once. Each line maps to one
/// slot. A new line evicts the old one, which is written back at once without waiting;
/// [`sync`](Self::sync) waits for it. Lines of the same table page never evict each other.
///
/// # Contract
/// Between a deferred operation and [`sync`](Self::sync), a walker that does not snoop may see the
/// table with or without the operation. Before `sync` returns, the driver must not give a newly
/// mapped address to a device, nor invalidate a newly unmapped range. Dropping a non-empty
/// `DirtyLines` breaks this contract. Tables of a coherent platform never add lines.
#[derive(Debug)]
pub struct DirtyLines {
    /// Line number in each slot, or [`NO_LINE`].
    slots: [u64; SLOTS],
    /// Bitmap of occupied slots.
    occupied: u64,
}

impl Default for DirtyLines {
    fn default() -> Self {
        Self::new()
    }
}

impl DirtyLines {
    /// Creates an empty set.
    pub const fn new() -> Self {
        Self {
            slots: [NO_LINE; SLOTS],
            occupied: 0,
        }
    }

    /// Returns true if every recorded line has reached memory.
    #[inline]
    pub fn is_clean(&self) -> bool {
        self.occupied == 0
    }

    /// Returns the number of lines that await write-back.
    #[inline]
    pub fn lines(&self) -> usize {
        self.occupied.count_ones() as usize
    }

    /// Writes back all recorded lines and waits once.
    #[inline]
    pub fn sync<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        if self.is_clean() {
            return;
        }
        while self.occupied != 0 {
            if let Some(slot) = self.slots.get_mut(self.occupied.trailing_zeros() as usize) {
                write_back(mem, core::mem::replace(slot, NO_LINE));
            }
            self.occupied &= self.occupied.wrapping_sub(1);
        }
        mem.drain();
    }

    #[inline]
    fn add<M: PhysMemory + ?Sized>(&mut self, mem: &M, at: PhysAddr, bytes: u64) {
        let last = at.wrapping_add(bytes.saturating_sub(1)).get() / LINE;
        let mut line = at.get() / LINE;
        while line < last {
            self.add_line(mem, line);
            line = line.wrapping_add(1);
        }
        self.add_line(mem, last);
    }

    #[inline]
    fn add_line<M: PhysMemory + ?Sized>(&mut self, mem: &M, line: u64) {
        let index = slot_of(line);
        if self.slots.get(index) != Some(&line) {
            self.keep(mem, index, line);
        }
    }

    #[inline(never)]
    fn keep<M: PhysMemory + ?Sized>(&mut self, mem: &M, index: usize, line: u64) {
        let Some(slot) = self.slots.get_mut(index) else {
            return;
        };
        let before = core::mem::replace(slot, line);
        if before != NO_LINE {
            // No wait here: the new line occupies the slot, so `sync` will wait.
            write_back(mem, before);
        }
        self.occupied |= 1 << index;
        // `write_back` evicted the neighbours from the cache. Allocators hand out addresses in
        // ascending or descending runs, so prefetch along the run.
        let next = if self.holds(line.wrapping_sub(1)) {
            line.wrapping_add(PREFETCH_LINES)
        } else if self.holds(line.wrapping_add(1)) {
            line.wrapping_sub(PREFETCH_LINES)
        } else {
            return;
        };
        if next / TABLE_LINES == line / TABLE_LINES {
            mem.prefetch(PhysAddr::new(next.wrapping_mul(LINE)));
        }
    }

    /// Returns true if `line` awaits write-back.
    #[inline]
    fn holds(&self, line: u64) -> bool {
        self.slots.get(slot_of(line)) == Some(&line)
    }
}

/// Returns the slot of `line`. Mixes in the page number: otherwise the first lines of all table
/// pages would share one slot.
#[inline]
fn slot_of(line: u64) -> usize {
    (line ^ (line >> 6)) as usize % SLOTS
}

#[inline]
fn write_back<M: PhysMemory + ?Sized>(mem: &M, line: u64) {
    mem.write_back(PhysAddr::new(line.wrapping_mul(LINE)), LINE);
}
