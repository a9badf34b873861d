//! Which cache lines of tables still have to reach memory.

use alloc::vec::Vec;

use ringfence_types::{PhysAddr, PhysMemory};

use crate::Coherency;
use crate::coherency::LINE;

/// What becomes of the lines that an operation has touched.
pub(crate) trait Sink {
    /// `bytes` bytes from `at` were stored to.
    fn touched<M: PhysMemory + ?Sized>(&mut self, mem: &M, at: PhysAddr, bytes: u64);
    /// The operation is complete.
    fn finish<M: PhysMemory + ?Sized>(&mut self, mem: &M);
}

/// Write back at once, wait at the end of the operation.
pub(crate) struct PerOperation(pub(crate) Coherency);

impl Sink for PerOperation {
    #[inline]
    fn touched<M: PhysMemory + ?Sized>(&mut self, mem: &M, at: PhysAddr, bytes: u64) {
        self.0.write_back(mem, at, bytes);
    }

    #[inline]
    fn finish<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        self.0.drain(mem);
    }
}

/// Leave it to a [`Dirty`].
pub(crate) struct Deferred<'a>(pub(crate) Coherency, pub(crate) &'a mut Dirty);

impl Sink for Deferred<'_> {
    #[inline]
    fn touched<M: PhysMemory + ?Sized>(&mut self, mem: &M, at: PhysAddr, bytes: u64) {
        if self.0 == Coherency::NonCoherent {
            self.1.touch(mem, at, bytes);
        }
    }

    #[inline]
    fn finish<M: PhysMemory + ?Sized>(&mut self, _mem: &M) {}
}

/// Slots of the set, a power of two. A burst of 200 single pages touches at most 200 lines, mostly far fewer.
const SLOTS: usize = 512;
/// Lines kept: half the slots, so that a probe ends soon.
const LINES: usize = SLOTS / 2;

/// The lines that a burst of operations has touched, each once. Belongs to one processor.
///
/// # Contract
/// Between a deferred operation and [`sync`](Self::sync), a walker that does not snoop may see the table with or without it:
/// no address mapped in between is told to a device, and no range unmapped in between is invalidated, before `sync`
/// returns. Dropping it with lines in it breaks that contract; tables of a coherent platform never put any in.
///
/// Holds 256 lines: when it is full, it writes them back without waiting and starts anew; the wait still comes once.
#[derive(Debug)]
pub struct Dirty {
    /// Lines in the order of their first touch: number, and slot.
    lines: Vec<(u64, usize)>,
    /// Open addressing: 0 or 1 + line number.
    slots: Vec<u64>,
    /// The last line touched: runs and bursts come back to it.
    last: u64,
    /// Some line was written back early and not waited for.
    undrained: bool,
}

/// No line: line numbers have 58 bits.
const NO_LINE: u64 = u64::MAX;

impl Default for Dirty {
    fn default() -> Self {
        Self::new()
    }
}

impl Dirty {
    /// An empty set. Allocates on its first line only.
    pub const fn new() -> Self {
        Self {
            lines: Vec::new(),
            slots: Vec::new(),
            last: NO_LINE,
            undrained: false,
        }
    }

    /// Whether every line touched has reached memory.
    #[inline]
    pub fn is_clean(&self) -> bool {
        self.lines.is_empty() && !self.undrained
    }

    /// Lines waiting.
    #[inline]
    pub fn lines(&self) -> usize {
        self.lines.len()
    }

    /// Writes back every line touched since the last time, each once, and waits once.
    #[inline]
    pub fn sync<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        if self.is_clean() {
            return;
        }
        self.write_back(mem);
        mem.drain();
        self.undrained = false;
    }

    /// `bytes` bytes from `at` were stored to.
    #[inline]
    pub fn touch<M: PhysMemory + ?Sized>(&mut self, mem: &M, at: PhysAddr, bytes: u64) {
        let first = at.get() / LINE;
        let last = at.wrapping_add(bytes.saturating_sub(1)).get() / LINE;
        if first == last && first == self.last {
            return;
        }
        for line in first..=last {
            self.insert(mem, line);
        }
        self.last = last;
    }

    #[inline(never)]
    fn insert<M: PhysMemory + ?Sized>(&mut self, mem: &M, line: u64) {
        if self.slots.is_empty() {
            self.slots.resize(SLOTS, 0);
            self.lines.reserve(LINES);
        }
        if self.lines.len() >= LINES {
            self.write_back(mem);
        }
        let key = line.wrapping_add(1);
        // Multiplicative hashing: tables are page-aligned, so the low bits alone would collide.
        let mut slot = (line.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 55) as usize;
        // At most half the slots are taken, so the probe ends.
        while let Some(held) = self.slots.get_mut(slot) {
            if *held == key {
                return;
            }
            if *held == 0 {
                *held = key;
                self.lines.push((line, slot));
                return;
            }
            slot = slot.wrapping_add(1) & (SLOTS - 1);
        }
    }

    fn write_back<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        for (line, slot) in self.lines.drain(..) {
            mem.write_back(PhysAddr::new(line.wrapping_mul(LINE)), LINE);
            if let Some(slot) = self.slots.get_mut(slot) {
                *slot = 0;
            }
        }
        self.last = NO_LINE;
        self.undrained = true;
    }
}
