//! The reverse translation cache. It keeps mappings that the driver has released and the host still
//! holds, and finds them again by their guest pages.
//!
//! Source: Tang et al. (the PVIOMMU paper), section 4.5. [`ReverseCache`] has three
//! implementations: the paper's radix tree and queue as published ([`RtcAsPublished`]), the same
//! repaired ([`Rtc`]), and a flat table ([`FlatRtc`]). The flat table's residency is either the
//! paper's or adapts to the reuse interval. The caches have no clock and send no requests: the
//! owner calls [`tick`](ReverseCache::tick) at the end of each cycle and sends the unmaps.
//!
//! **Guarantee.** An unused mapping leaves at the latest with the (C + 1)th end of a cycle after
//! its last release. With cycles of T, its pages stay exposed for at most T x (C + 1). A mode with
//! a cache is therefore `bounded`, never strict.

mod as_published;
mod cycles;
mod fixed;
mod flat;
mod key;
pub mod residency;
mod reuse;
mod reverse_cache;
pub mod tables;
pub mod tree;

pub use as_published::RtcAsPublished;
pub use cycles::Cycles;
pub use fixed::Rtc;
pub use flat::FlatRtc;
pub use key::MappingKey;
pub use reuse::ResidencyPolicy;
pub use reverse_cache::{NotCached, NotInUse, ReverseCache, RtcStats};
