//! The DMA mapping layer of the operating system.
//!
//! The axes of a mode are type parameters of [`Dma`]. The [`Space`] selects the IOVA allocator and
//! the I/O page table. The [`FlushPolicy`] selects when stale translations are invalidated. The
//! code is monomorphised over both: no path of a DMA uses dynamic dispatch.
//!
//! | file | one concept |
//! |---|---|
//! | `layer.rs` | the layer of one IOMMU: domains, attach, per-CPU handles |
//! | `domain_table.rs` | domain identifiers and their generations |
//! | `detach.rs` | removal of devices, domains and CPUs |
//! | `map.rs` | `map_single`, `unmap_single`: the path of one DMA |
//! | `sg.rs`, `sg_segments.rs` | `map_sg`, `unmap_sg`: scatterlists and the device's segments |
//! | `sg_per_segment.rs` | scatterlists in spaces that keep unmapped mappings |
//! | `link.rs` | requests whose pieces are linked one by one |
//! | `multi.rs`, `coherent.rs` | batches, coherent memory |
//! | `premapped.rs` | buffers mapped once and used many times |
//! | `pool_buffer.rs` | buffers of a pool that stays mapped: the driver copies what it reads |
//! | `cache/` | caches of mappings: found again by their pages, kept for a bounded time or space |
//! | `bounce.rs`, `bounce_pool.rs` | memory that the device cannot reach |
//! | `sync.rs`, `copy.rs` | transfers of live mappings, received bytes, copies |
//! | `ring/` | the entries of a ring IOMMU's rings |
//! | `token/` | the states of a mapping: who owns its buffer |
//! | `space/` | spaces: an IOVA allocator with an I/O page table, or one object for both |
//! | `flush/` | flush policies: when the range of an unmap is invalidated and freed |
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod bounce;
mod bounce_pool;
pub mod cache;
mod coherent;
mod copy;
mod detach;
pub mod dma_ops_choice;
mod domain_table;
mod error;
pub mod flush;
mod layer;
mod link;
mod map;
mod multi;
mod platform;
mod pool_buffer;
mod premapped;
pub mod ring;
mod sg;
mod sg_per_segment;
mod sg_segments;
pub mod space;
mod sync;
mod token;

pub use bounce_pool::BouncePool;
pub use coherent::{Coherent, FreeCoherentError};
pub use detach::{DetachError, Detached, Teardown};
pub use error::{MapError, MapReason, ShadowError, UnmapError, UnmapFailure, UnmapReason};
pub use flush::FlushPolicy;
pub use layer::{AttachError, Cpu, Dma};
pub use link::LinkedRequest;
pub use multi::{MapMultiError, MapMultiRequest, UnmapMultiError};
pub use platform::Platform;
pub use pool_buffer::{PoolBuffer, PoolBufferError, PostedBuffer, ReceivedBuffer, TooManyReceived};
pub use premapped::{CpuOwned, DeviceOwned, Premapped, PremappedError};
pub use sg::{SgMapping, SgRequest};
pub use sg_segments::SgLimits;
pub use space::Space;
pub use sync::OutsideMapping;
pub use token::{
    Attachment, BounceSlot, BurstKey, DmaSegment, Mapping, NotInvalidated, Outcome, Released,
    ReleasedOrWithheld, ReleasedStale, StillMapped, Withheld,
};
