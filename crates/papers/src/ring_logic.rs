//! The rIOMMU algorithm, Fig. 10, as published (errata 6).

use ringfence_hw::RingLogic;

/// Fig. 10 as its authors must have run it, with its other defects. It checks only the first byte
/// against the size, and an unsuccessful prefetch keeps the old `next`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogicAsPublished {}

impl RingLogic for LogicAsPublished {
    const UPDATES_ENTRY: bool = true;
    const CLEARS_NEXT: bool = false;

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
    const UPDATES_ENTRY: bool = false;
    const CLEARS_NEXT: bool = false;

    #[inline]
    fn is_inside(offset: u64, bytes: u64, size: u64) -> bool {
        LogicAsPublished::is_inside(offset, bytes, size)
    }
}
