//! The DMA mapping layer of the operating system.
//!
//! The axes of a mode are type parameters of [`Dma`]. The [`Space`] selects the IOVA allocator
//! (question 1) and the I/O page table (question 2). The [`Flush`] policy selects when stale
//! translations are invalidated (question 3). The code is monomorphised over both: no path of a DMA
//! uses dynamic dispatch.
//!
//! | file | one concept |
//! |---|---|
//! | `layer.rs` | the layer of one IOMMU: domains, attach, per-CPU handles |
//! | `domain_table.rs` | domain identifiers and their generations |
//! | `detach.rs` | removal of devices, domains and CPUs |
//! | `map.rs` | `map_single`, `unmap_single`: the path of one DMA |
//! | `sg.rs`, `multi.rs`, `coherent.rs` | scatterlists, batches, coherent memory |
//! | `premapped.rs` | buffers mapped once and used many times |
//! | `bounce.rs` | memory that the device cannot reach |
//! | `ring/` | the entries of a ring IOMMU's rings |
//! | `space/` | answers to questions 1 and 2 |
//! | `flush/` | answers to question 3 |
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod bounce;
mod coherent;
mod detach;
mod domain_table;
mod error;
pub mod flush;
mod layer;
mod map;
mod mapping;
mod multi;
mod platform;
mod premapped;
pub mod ring;
mod sg;
mod sg_per_segment;
pub mod space;

pub use bounce::{BouncePool, BounceSlot};
pub use coherent::{Coherent, FreeCoherentError};
pub use detach::{DetachError, Detached, Teardown};
pub use error::{
    MapError, MapReason, NotInvalidated, StillMapped, UnmapError, UnmapFailure, UnmapReason,
};
pub use flush::{BurstKey, Flush, Outcome, Released, ReleasedStale, Withheld};
pub use layer::{AttachError, Attachment, Cpu, Dma};
pub use mapping::{DmaSegment, Mapping};
pub use multi::{MapMultiError, MapMultiRequest, UnmapMultiError};
pub use platform::Platform;
pub use premapped::{CpuOwned, DeviceOwned, Premapped, PremappedError};
pub use sg::{SgLimits, SgMapping, SgRequest};
pub use space::Space;
