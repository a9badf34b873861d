//! The reverse translation cache. It keeps mappings that the driver has released and the host still
//! holds, and finds them again by their guest pages.
//!
//! Source: Tang et al. (the PVIOMMU paper), section 4.5. [`FlatRtc`] implements [`ReverseCache`]
//! with a flat table. Its residency is either the paper's or adapts to the reuse interval. The
//! paper's radix tree and queue are in `ringfence-papers`. A cache has no clock and sends no
//! requests: the owner calls [`tick`](ReverseCache::tick) at the end of each cycle and sends the
//! unmaps.
//!
//! **Guarantee.** An unused mapping leaves at the latest with the (C + 1)th end of a cycle after
//! its last release. With cycles of T, its pages stay exposed for at most T x (C + 1). A mode with
//! a cache is therefore `bounded`, never strict.

mod cycles;
mod flat;
mod key;
mod reuse;
mod reverse_cache;

pub use cycles::Cycles;
pub use flat::FlatRtc;
pub use key::MappingKey;
pub use reuse::ResidencyPolicy;
pub use reverse_cache::{EvictionBudget, NotCached, NotInUse, ReverseCache, RtcStats};
