//! Reverse translation caches. A cache knows the mappings of one device, in use and released, and
//! finds them by their pages. Several users of the same pages share one mapping.
//!
//! The [retention](Retention) decides how long a released mapping stays. One mechanism implements
//! these systems:
//!
//! | system | retention |
//! |---|---|
//! | shared mappings (Willmann et al.) | none: the cache removes a mapping with its last user |
//! | optimistic teardown (Amit et al.) | a few cycles of 1 ms, for a bounded number of mappings |
//! | reverse translation cache (Tang et al., the PVIOMMU paper, section 4.5) | cycles of 10 s |
//! | map caches (Yassour et al.; Calgary slides) | until the quota is full |
//! | "never free" (Calgary slides) | until addresses are needed |
//!
//! [`FlatCache`] implements [`ReverseCache`] with a flat table. The PVIOMMU paper's radix tree and
//! queue are in `ringfence-papers`. A cache has no clock and clears no entries: the
//! [space](crate::space::CachedSpace) calls [`tick`](ReverseCache::tick) at the end of each cycle
//! and unmaps the expired mappings.
//!
//! **Guarantee.** With a residency of C cycles of T, a released mapping expires at the latest at
//! the (C + 1)th end of a cycle after its last release. Its pages stay exposed for at most T x (C +
//! 1). A mode with such a cache is `bounded`. Without retention, only pages of live mappings are
//! exposed; such a mode is `strict`. With a residency until the quota is full, the number of
//! exposed pages is bounded, but not the time.

mod cycles;
mod flat;
mod key;
mod reuse;
mod reverse_cache;

pub use cycles::Cycles;
pub use flat::FlatCache;
pub use key::MappingKey;
pub use reuse::{ResidencyPolicy, Retention};
pub use reverse_cache::{CacheStats, EvictionBudget, NotCached, NotInUse, Retained, ReverseCache};
