//! The ring IOMMU of rIOMMU section 4.
//!
//! An access encodes a ring and a slot ([`RingIova`](ringfence_types::RingIova)). The unit caches
//! one entry per ring, which holds the slot used last and possibly the next one (`riotlb.rs`). It
//! reads other slots from the ring's flat table by index, without a walk. `translate.rs` implements
//! Fig. 10 step by step; `logic.rs` has what its versions decide differently.

mod invalidation;
mod logic;
mod prefetch;
mod riotlb;
mod stats;
mod translate;
mod unit;

pub use logic::{FixedLogic, RingLogic};
pub use prefetch::Prefetch;
pub use stats::RingStats;
pub use unit::{RingUnit, RingUnitConfig};
