//! Coherency of the IOMMU's table walk with CPU caches.

use ringfence_types::{PhysAddr, PhysMemory};

/// Bytes of a cache line, the unit of write-back.
pub(crate) const LINE: u64 = 64;

/// Coherency of the IOMMU's table walk with CPU caches (VT-d extended capability C).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Coherency {
    /// The walk snoops CPU caches. Stores need ordering only.
    Coherent,
    /// The walk does not snoop. The CPU must write back every dirty line, and order the write-backs
    /// before later accesses.
    NonCoherent,
}

impl Coherency {
    /// Writes back the cache lines of `bytes` bytes at `at` if the walk does not snoop.
    #[inline]
    pub(crate) fn write_back<M: PhysMemory + ?Sized>(self, mem: &M, at: PhysAddr, bytes: u64) {
        if self == Self::NonCoherent {
            write_back_slow(mem, at, bytes);
        }
    }

    /// Orders earlier write-backs before every later access if the walk does not snoop.
    #[inline]
    pub(crate) fn drain<M: PhysMemory + ?Sized>(self, mem: &M) {
        if self == Self::NonCoherent {
            drain_slow(mem);
        }
    }
}

// Out of line: the call costs little next to a write-back, and the coherent path stays short.

#[inline(never)]
fn write_back_slow<M: PhysMemory + ?Sized>(mem: &M, at: PhysAddr, bytes: u64) {
    mem.write_back(at, bytes);
}

#[inline(never)]
fn drain_slow<M: PhysMemory + ?Sized>(mem: &M) {
    mem.drain();
}
