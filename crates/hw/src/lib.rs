//! What the silicon does: it translates a device's accesses by tables in memory, caches
//! translations until it is told not to, stops and records what has none.
//!
//! [`Iommu`] is the unit that walks tables; [`VtdUnit`] and [`CalgaryUnit`] are the two that exist.
//! [`RingUnit`] is the one that looks up rings, and a [`IommuRouter`] has one of each. A unit reads
//! [`PhysMemory`](ringfence_types::PhysMemory) in the hardware's formats and obeys
//! [`Invalidator`](ringfence_types::Invalidator) requests, and never sees a structure of the
//! mapping layer: the two meet in memory, as a kernel and its hardware do.
//!
//! An access goes through [`translate`](Iommu::translate) (`translate.rs`) to the IOTLB
//! (`iotlb.rs`), on a miss to the walk caches and [`walk`](ringfence_pgtable::walk) (`walker.rs`),
//! and ends as a [`Translation`] or in the [`FaultLog`].
//!
//! [`prefetch`] holds no part of the unit: TLB prefetchers of the literature, to be compared with a
//! ring's.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod cache;
mod context_cache;
mod context_lookup;
pub mod fake;
mod fault;
mod geometry;
mod host_bridge;
mod invalidation;
mod iotlb;
pub mod prefetch;
mod ring;
mod root_table;
mod router;
mod stats;
mod tag;
mod translate;
mod translation;
mod unit;
mod walk_cache;
mod walker;

pub use cache::Replacement;
pub use context_lookup::{ContextEntry, ContextLookup, TableRoot};
pub use fault::{FaultLog, FaultRecord};
pub use geometry::{Geometry, GeometryError};
pub use host_bridge::{HostBridge, HostBridges};
pub use ring::{
    ByValue, FixedLogic, LogicAsPublished, NoSuccessorPolicy, ParameterPassing, Prefetch,
    RingLogic, RingStats, RingUnit, RingUnitConfig,
};
pub use root_table::RootTable;
pub use router::{IommuKind, IommuRouter, Translate};
pub use stats::{InvalidationCounts, IommuStats};
pub use translate::MAX_TRANSLATED_BYTES;
pub use translation::Translation;
pub use unit::{CalgaryUnit, InvalidationGranularity, Iommu, UnitConfig, VtdUnit};
pub use walk_cache::WALK_CACHES;
