//! A software IOMMU for emulated devices. Readers translate without a lock. Unmap returns only when
//! no reader can still access the unmapped page.
//!
//! Each thread of a device owns a [`Reader`]. The thread goes [`online`](Reader::online) for a
//! batch of work and takes a [`ReadGuard`] for each request (a descriptor chain). Under the guard
//! it translates any number of addresses.
//!
//! [`SoftIommu`] is the writer side. Unmap, detach and a change of memory return only when no guard
//! remains that could have seen the old state. After the return, no translation and no slice
//! reaches the page. Decision 0015 (`docs/decisions/0015-readers-and-unmap.md`) proves this step by
//! step. `tests/loom.rs` checks every interleaving and reordering that loom models, on these source
//! files.
//!
//! ```
//! use ringfence_softiommu::{SoftIommuLimits, SoftIommu};
//! use ringfence_types::{Access, RequesterId, DomainId, Iova, IovaRange, Permissions, PhysAddr};
//!
//! const DISK: RequesterId = RequesterId::new(0x20);
//! let mut iommu = SoftIommu::new(SoftIommuLimits::default(), ());
//! iommu.add_endpoint(DISK)?;
//! let mut reader = iommu.reader(DISK)?;
//!
//! let mut domain = iommu.create_domain(DomainId::new(1))?;
//! let page = IovaRange::new(Iova::new(0x1000), 0x1000).ok_or("wraps")?;
//! domain.map(page, PhysAddr::new(0x7000), Permissions::READ)?;
//! iommu.attach(DISK, DomainId::new(1))?;
//!
//! let access = IovaRange::new(Iova::new(0x1010), 16).ok_or("wraps")?;
//! let mut section = reader.online();
//! let guard = section.guard();
//! assert_eq!(guard.translate(access, Access::Read)?.first().start(), PhysAddr::new(0x7010));
//! assert!(guard.translate(access, Access::Write).is_err());
//! // A thread that holds a guard would wait for itself:
//! assert!(iommu.detach(DISK).is_err());
//! drop(section);
//! iommu.detach(DISK)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Embedder contract
//! **A read section or a guard must not span a blocking call.** Unmap waits for both. Go offline
//! (drop the [`ReadSection`]) before waiting for an event, a lock or a disk.
//!
//! [`ReadSection`] and [`ReadGuard`] are not `Send`, so an executor that moves tasks between
//! threads cannot hold one across an `.await`. A slice taken under a [`ReadGuard`] ends before the
//! section's next guard. A thread that blocks in a read section delays unmap, but
//! never makes it unsafe.

#![deny(unsafe_code)]

mod domain;
mod domain_mut;
mod endpoint;
mod error;
mod guard_count;
#[cfg(feature = "vm-memory")]
mod guest_memory;
mod iommu;
pub mod iotlb;
mod leaf_tables;
mod membarrier;
mod phys_ranges;
mod prefetchw;
mod qsbr;
mod reader;
#[cfg(feature = "virtio-iommu")]
mod sink;
mod sync;
mod table;
mod table_alloc;
mod walk;
mod walk_cache;
mod zeroed;

pub use domain_mut::DomainMut;
pub use error::{DomainMapError, DomainMapReason, DomainUnmapError, IommuError, ReadSectionOpen};
#[cfg(feature = "vm-memory")]
pub use guest_memory::AccessError;
pub use iommu::{SoftIommu, SoftIommuLimits};
pub use phys_ranges::PhysRanges;
pub use reader::{ReadGuard, ReadSection, Reader};
#[cfg(feature = "virtio-iommu")]
pub use sink::{IommuSink, IommuSinkMut};
pub use table::Width;
