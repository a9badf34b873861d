//! Which cache lines of tables still have to reach memory.

use ringfence_types::{PhysAddr, PhysMemory};

use crate::Coherency;
use crate::coherency::LINE;

/// What becomes of the lines that an operation has touched.
pub(crate) trait WriteBackPolicy {
    /// `bytes` bytes from `at` were stored to.
    fn touched<M: PhysMemory + ?Sized>(&mut self, mem: &M, at: PhysAddr, bytes: u64);
    /// The operation is complete.
    fn finish<M: PhysMemory + ?Sized>(&mut self, mem: &M);
}

/// Write back at once, wait at the end of the operation.
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

/// Leave it to a [`DirtyLines`].
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

/// Slots: as many as a table has lines, and bits in a word.
const SLOTS: usize = 64;
/// How many lines ahead the next one of a row is asked for.
const PREFETCH_LINES: u64 = 4;
/// Lines of a table.
const TABLE_LINES: u64 = 64;
/// No line: line numbers have 58 bits.
const NO_LINE: u64 = u64::MAX;

/// The lines that a burst of operations has touched. Belongs to one processor.
///
/// A line that comes back finds itself here and is written back once. Every line has one slot; the
/// line that held it before is written back at once, without waiting, and the wait still comes
/// once. The lines of one table never drive each other out.
///
/// # Contract
/// Between a deferred operation and [`sync`](Self::sync), a walker that does not snoop may see the
/// table with or without it: no address mapped in between is told to a device, and no range
/// unmapped in between is invalidated, before `sync` returns. Dropping it with lines in it breaks
/// that contract; tables of a coherent platform never put any in.
#[derive(Debug)]
pub struct DirtyLines {
    /// Numbers of the lines that wait, each in its slot.
    slots: [u64; SLOTS],
    /// A bit for each slot that holds a line.
    occupied: u64,
}

impl Default for DirtyLines {
    fn default() -> Self {
        Self::new()
    }
}

impl DirtyLines {
    /// An empty set.
    pub const fn new() -> Self {
        Self {
            slots: [NO_LINE; SLOTS],
            occupied: 0,
        }
    }

    /// Whether every line touched has reached memory.
    #[inline]
    pub fn is_clean(&self) -> bool {
        self.occupied == 0
    }

    /// Lines waiting.
    #[inline]
    pub fn lines(&self) -> usize {
        self.occupied.count_ones() as usize
    }

    /// Writes back every line touched since the last time and waits once.
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
            // The line that takes its place sees to the wait.
            write_back(mem, before);
        }
        self.occupied |= 1 << index;
        // What was written back is far away, and allocators hand out addresses in rows, upward or
        // downward.
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

    /// Whether `line` waits.
    #[inline]
    fn holds(&self, line: u64) -> bool {
        self.slots.get(slot_of(line)) == Some(&line)
    }
}

/// The slot of `line`. Tables begin at the first line of a page: without the page's number, all
/// their first lines would meet in one.
#[inline]
fn slot_of(line: u64) -> usize {
    (line ^ (line >> 6)) as usize % SLOTS
}

#[inline]
fn write_back<M: PhysMemory + ?Sized>(mem: &M, line: u64) {
    mem.write_back(PhysAddr::new(line.wrapping_mul(LINE)), LINE);
}
