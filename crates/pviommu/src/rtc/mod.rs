//! The reverse translation cache: mappings that a driver has released and the host still has, found
//! again by the pages they lead to.
//!
//! Source: Tang et al., section 4.5. The role [`ReverseCache`] has three implementors: the
//! document's radix tree and queue as they are printed ([`RtcAsPublished`]), the same repaired
//! ([`Rtc`]), and a flat table of ours ([`FlatRtc`]) whose residency is either the document's or
//! follows how soon mappings are used again. None has a clock or a queue of requests: who owns the
//! cache says when a cycle ends and sends them.
//!
//! **What a cache promises.** A mapping that nobody uses leaves with the (C + 1)th end of a cycle
//! after its last release, or before. With cycles of T that is T x (C + 1) at the longest, and so
//! long its pages are exposed: a mode with a cache is `bounded`, never strict.

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
