//! The ring IOMMU: what the silicon of rIOMMU section 4 does.
//!
//! An access names a ring and a slot of it ([`RingIova`](ringfence_types::RingIova)). The unit
//! keeps one entry for a ring, which holds the slot used last and perhaps the next one
//! (`riotlb.rs`); it finds others in the ring's flat table by index. There is nothing to walk.
//! `translate.rs` is Fig. 10, step by step; `logic.rs` is where its versions differ.

mod invalidation;
mod logic;
mod prefetch;
mod riotlb;
mod stats;
mod translate;
mod unit;

pub use logic::{
    ByValue, FixedLogic, LogicAsPublished, NoSuccessorPolicy, ParameterPassing, RingLogic,
};
pub use prefetch::Prefetch;
pub use stats::RingStats;
pub use unit::{RingUnit, RingUnitConfig};
