//! Versions of the rIOMMU algorithm, Fig. 10, as published and with its defects fixed (errata 6).

use core::fmt::Debug;

use ringfence_pgtable::RingPte;
use ringfence_types::PhysRange;

/// A version of Fig. 10. A unit has one version, fixed at compile time.
pub trait RingLogic: Debug + Clone {
    /// Parameter passing of `riotlb_entry_sync` and `rprefetch`. It decides whether they change the
    /// entry in the rIOTLB or a copy.
    const PASSING: ParameterPassing;
    /// Value of `e.next` after `rprefetch` if the successor is not valid.
    const NO_SUCCESSOR: NoSuccessorPolicy;

    /// Returns true if `bytes` bytes at `offset` lie inside a buffer of `size` bytes, as far as
    /// this version checks.
    fn is_inside(offset: u64, bytes: u64, size: u64) -> bool;
}

/// Parameter passing of an rIOTLB entry to a routine of Fig. 10.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterPassing {
    /// By reference, as the authors must have intended: the routine changes the entry in the
    /// rIOTLB.
    Reference,
    /// By value, as published: the routine changes a copy, and the changes are lost.
    Value,
}

/// Effect of an unsuccessful prefetch on an earlier `next`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoSuccessorPolicy {
    /// Clears `next`, so that it is absent.
    Clears,
    /// Keeps `next`, which may later be used as the successor of a different slot.
    Keeps,
}

/// Repaired logic, used by the ring modes: checks the whole length, and `next` is either the
/// successor of the current slot or absent.
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

/// Fig. 10 as its authors must have run it, with its other defects. It checks only the first byte
/// against the size, and an unsuccessful prefetch keeps the old `next`.
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

/// Fig. 10 exactly as published: entries are passed by value, so nothing is ever prefetched. An
/// access to a slot other than the cached one uses the cached slot's entry. No mode uses it; it
/// shows that the figure cannot be taken literally.
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

/// Returns the physical range of `bytes` bytes at `offset` of the entry's buffer; `None` if it
/// exceeds 2^64.
#[inline]
pub(super) fn target(pte: RingPte, offset: u64, bytes: u64) -> Option<PhysRange> {
    PhysRange::new(pte.start().checked_add(offset)?, bytes)
}
