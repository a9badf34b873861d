//! The versions of the ring unit's algorithm (rIOMMU Fig. 10).

use core::fmt::Debug;

use ringfence_pgtable::RingPte;
use ringfence_types::PhysRange;

/// A version of Fig. 10. A unit has one version, fixed at compile time.
///
/// Hardware has [`FixedLogic`]. The trait is a seam: studies of the paper supply other versions,
/// and run them on the caches, tables and fault records of this unit.
pub trait RingLogic: Debug + Clone {
    /// True if `riotlb_entry_sync` and `rprefetch` change the entry in the rIOTLB; false if they
    /// change a copy, and the changes are lost.
    const UPDATES_ENTRY: bool;
    /// True if a prefetch that finds no valid successor clears `next`; false if `next` keeps the
    /// successor of another slot.
    const CLEARS_NEXT: bool;

    /// Returns true if `bytes` bytes at `offset` lie inside a buffer of `size` bytes, as far as
    /// this version checks.
    fn is_inside(offset: u64, bytes: u64, size: u64) -> bool;
}

/// Fixed logic, used by the ring modes: checks the whole length, and `next` is either the
/// successor of the current slot or absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FixedLogic {}

impl RingLogic for FixedLogic {
    const UPDATES_ENTRY: bool = true;
    const CLEARS_NEXT: bool = true;

    #[inline]
    fn is_inside(offset: u64, bytes: u64, size: u64) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= size)
    }
}

/// Returns the physical range of `bytes` bytes at `offset` of the entry's buffer; `None` if it
/// exceeds 2^64.
#[inline]
pub(super) fn target(pte: RingPte, offset: u64, bytes: u64) -> Option<PhysRange> {
    PhysRange::new(pte.start().checked_add(offset)?, bytes)
}
