//! Whether the hardware's table walk snoops the processor's caches (HW08).

use ringfence_types::{PhysAddr, PhysMemory};

/// Bytes of a cache line: what is written back at a time.
pub(crate) const LINE: u64 = 64;

/// Whether the IOMMU's reads of tables snoop the processor's caches (VT-d extended capability C).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Coherency {
    /// They do: stores need to be ordered, nothing else.
    Coherent,
    /// They do not: every line touched must be written back to memory, and that waited for.
    NonCoherent,
}

impl Coherency {
    /// Writes the lines of `bytes` bytes from `at` back, where that is needed.
    #[inline]
    pub(crate) fn write_back<M: PhysMemory + ?Sized>(self, mem: &M, at: PhysAddr, bytes: u64) {
        if self == Self::NonCoherent {
            write_back_slow(mem, at, bytes);
        }
    }

    /// Waits for earlier write-backs, where there were any.
    #[inline]
    pub(crate) fn drain<M: PhysMemory + ?Sized>(self, mem: &M) {
        if self == Self::NonCoherent {
            drain_slow(mem);
        }
    }
}

// Out of line: a call is nothing beside a write-back, and the coherent path stays short.

#[inline(never)]
fn write_back_slow<M: PhysMemory + ?Sized>(mem: &M, at: PhysAddr, bytes: u64) {
    mem.write_back(at, bytes);
}

#[inline(never)]
fn drain_slow<M: PhysMemory + ?Sized>(mem: &M) {
    mem.drain();
}
