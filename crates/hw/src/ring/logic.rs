//! What the documents' ring IOMMU gets wrong, and what is done about it (errata 6): the parts of
//! rIOMMU Fig. 10 of which there is more than one version.

use core::fmt::Debug;

use ringfence_pgtable::RingPte;
use ringfence_types::PhysRange;

/// A version of Fig. 10. A unit is made for one; there is nothing to switch while it runs.
pub trait RingLogic: Debug + Clone {
    /// Whether what `riotlb_entry_sync` and `rprefetch` do to the entry they are given is done to
    /// the entry in the rIOTLB.
    const PASSING: ParameterPassing;
    /// What `rprefetch` leaves in `e.next` if the successor is not valid.
    const NO_SUCCESSOR: NoSuccessorPolicy;

    /// Whether `bytes` bytes at `offset` lie inside a buffer of `size` bytes, as far as this
    /// version looks.
    fn is_inside(offset: u64, bytes: u64, size: u64) -> bool;
}

/// How a routine of Fig. 10 is given its entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterPassing {
    /// As it must be meant: the routine changes the entry in the rIOTLB.
    Reference,
    /// As it is written: the routine changes a copy, and what it did is lost.
    Value,
}

/// What a prefetch without a result does to an earlier one's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoSuccessorPolicy {
    /// It goes.
    Clears,
    /// It stays, and passes for the successor of another slot later.
    Keeps,
}

/// What the ring modes run on: the whole length is checked, `next` is the successor of the current
/// slot or nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FixedLogic {}

impl RingLogic for FixedLogic {
    const PASSING: ParameterPassing = ParameterPassing::Reference;
    const NO_SUCCESSOR: NoSuccessorPolicy = NoSuccessorPolicy::Clears;

    #[inline]
    fn is_inside(offset: u64, bytes: u64, size: u64) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= size)
    }
}

/// Fig. 10 as its authors must have run it, with its other defects: only the first byte is checked
/// against the size, and a prefetch that finds nothing leaves what was there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogicAsPublished {}

impl RingLogic for LogicAsPublished {
    const PASSING: ParameterPassing = ParameterPassing::Reference;
    const NO_SUCCESSOR: NoSuccessorPolicy = NoSuccessorPolicy::Keeps;

    #[inline]
    fn is_inside(offset: u64, _bytes: u64, size: u64) -> bool {
        offset < size
    }
}

/// Fig. 10 to the letter: entries are passed by value, so nothing is ever prefetched, and an access
/// that does not name the cached slot is translated by the entry of that slot all the same. No mode
/// runs on it; it shows that the figure cannot be meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ByValue {}

impl RingLogic for ByValue {
    const PASSING: ParameterPassing = ParameterPassing::Value;
    const NO_SUCCESSOR: NoSuccessorPolicy = NoSuccessorPolicy::Keeps;

    #[inline]
    fn is_inside(offset: u64, bytes: u64, size: u64) -> bool {
        LogicAsPublished::is_inside(offset, bytes, size)
    }
}

/// Where `bytes` bytes at `offset` of an entry's buffer are; `None` if some have no address.
#[inline]
pub(super) fn target(pte: RingPte, offset: u64, bytes: u64) -> Option<PhysRange> {
    PhysRange::new(pte.start().checked_add(offset)?, bytes)
}
