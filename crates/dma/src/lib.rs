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
//!
//! A receive buffer belongs to the layer from its map until the device cannot reach it any more:
//!
//! ```
//! use std::cell::RefCell;
//!
//! use ringfence_dma::flush::Strict;
//! use ringfence_dma::space::{Paged, PlainTable, Rounding};
//! use ringfence_dma::{Dma, Platform, Released};
//! use ringfence_iova::{MagazineLimits, Magazines};
//! use ringfence_memory::{Arena, Frames};
//! use ringfence_pgtable::{Coherency, Levels, SecondStage, Table};
//! use ringfence_types::{
//!     Direction, Invalidation, InvalidationError, Invalidator, Iova, Nanos, Pfn, PfnRange,
//!     PhysAddr, PhysRange, RequesterId, Ticket,
//! };
//!
//! /// Your IOMMU. This one completes each invalidation at once.
//! #[derive(Default)]
//! struct Unit(u64);
//!
//! impl Invalidator for Unit {
//!     fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
//!         self.0 += 1;
//!         Ok(Ticket::new(self.0))
//!     }
//!     fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
//!         Ok(true)
//!     }
//! }
//!
//! /// Your ports.
//! struct Machine<'a> {
//!     memory: &'a Arena,
//!     frames: Frames<&'a Arena>,
//!     unit: Unit,
//! }
//!
//! impl<'a> Platform for Machine<'a> {
//!     type Memory = Arena;
//!     type Frames = Frames<&'a Arena>;
//!     type Invalidator = Unit;
//!
//!     fn memory(&self) -> &Arena {
//!         self.memory
//!     }
//!     fn frames(&self) -> &Self::Frames {
//!         &self.frames
//!     }
//!     fn invalidator(&mut self) -> &mut Unit {
//!         &mut self.unit
//!     }
//!     fn now(&self) -> Nanos {
//!         Nanos(0)
//!     }
//! }
//!
//! let memory = Arena::new(16 << 20)?;
//! let tables = PhysRange::new(PhysAddr::new(8 << 20), 8 << 20).ok_or("no room for tables")?;
//! let mut machine = Machine {
//!     memory: &memory,
//!     frames: Frames::new(&memory, tables),
//!     unit: Unit::default(),
//! };
//!
//! // Attach a network card to a new domain. `Strict` invalidates at each unmap.
//! let mut dma = Dma::new(Strict);
//! let at = dma
//!     .attach(RequesterId::new(0x18), Iova::new(u64::from(u32::MAX)), |domain| {
//!         let format = SecondStage::new(Levels::Four);
//!         let table = Table::new(format, domain, Coherency::Coherent, &memory, &machine.frames)
//!             .map_err(|_| "no frames")?;
//!         let pages = PfnRange::inclusive(Pfn::new(1), Pfn::new(0xf_ffff)).ok_or("no pages")?;
//!         let alloc = Magazines::new(pages, MagazineLimits::DEFAULT, RefCell::new)
//!             .map_err(|_| "no allocator")?;
//!         Ok::<_, &str>(Paged::new(alloc, PlainTable(table), Rounding::Exact))
//!     })
//!     .map_err(|_| "not attached")?;
//! let reaches = |iova| {
//!     let space = dma.space(&at)?;
//!     Some(space.table().0.lookup(&memory, iova)?.translate(iova))
//! };
//!
//! let mut cpu = dma.cpu();
//! let bytes = PhysRange::new(PhysAddr::new(0x5040), 1500).ok_or("no buffer")?;
//! let (mapping, _) = dma
//!     .map_single(&mut cpu, &mut machine, &at, vec![0_u8; 1500], bytes, Direction::FromDevice)
//!     .map_err(|(_, error)| error.to_string())?;
//! let iova = mapping.iova();
//! assert_eq!(reaches(iova), Some(bytes.start()));
//!
//! // `Released` returns the buffer: the invalidation has completed.
//! let Released(buffer) = dma
//!     .unmap_single(&mut cpu, &mut machine, &at, mapping)
//!     .map_err(|_| "not invalidated")?;
//! assert_eq!((buffer.len(), machine.unit.0), (1500, 1));
//! assert_eq!(reaches(iova), None);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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
