//! A virtio-iommu device (virtio 1.3, section 5.13) without I/O: it turns the bytes of a request
//! into the bytes of a reply.
//!
//! [`Device::handle`] takes the device-readable part of a descriptor chain and fills the
//! device-writable part. The device stores the driver's mappings and forwards them to a [`Sink`],
//! through which a VMM programs a software IOTLB, VFIO or iommufd. Faults wait in the device until
//! the driver provides a buffer.
//!
//! The embedder owns queues, threads, notifications and guest memory. The feature `virtio-queue`
//! adds an adapter to rust-vmm's queues.
//!
//! An unattached endpoint has no access, unless the embedder lets the driver decide
//! ([`BypassPolicy`]). Decision 0014 (`docs/decisions/0014-when-a-sink-fails.md`) defines the
//! behaviour when a sink fails: after a valid UNMAP, the range is always inaccessible.
//!
//! Part of the core: `no_std` with `alloc`, no unsafe code, no I/O, no clock, no panic on any
//! input, and no allocation that the options do not bound.
//!
//! A driver attaches endpoint 8 to domain 1, maps a page for reads and removes it:
//!
//! ```
//! use ringfence_types::{Access, Iova, IovaRange, PhysAddr};
//! use ringfence_virtio_iommu::spec::{
//!     VIRTIO_IOMMU_MAP_F_READ, VIRTIO_IOMMU_T_ATTACH, VIRTIO_IOMMU_T_MAP, VIRTIO_IOMMU_T_UNMAP,
//! };
//! use ringfence_virtio_iommu::{AccessTarget, Device, EndpointId, Options, TranslationFaultReason};
//!
//! // The sink `()` ignores all changes: this VMM asks the device for each translation.
//! let mut device = Device::new(Options::default(), ())?;
//! let disk = EndpointId::new(8);
//! device.add_endpoint(disk, &[])?;
//! device.accept_features(device.features());
//!
//! let send = |device: &mut Device<()>, kind: u8, body: &[u8]| {
//!     let mut reply = [0xff; 4];
//!     let request = [&[kind, 0, 0, 0][..], body].concat();
//!     device.handle(&request, &mut reply).map(|outcome| outcome.result)
//! };
//! let domain = 1_u32.to_le_bytes();
//! let page = [0x1000_u64, 0x1fff].map(u64::to_le_bytes).concat();
//! send(&mut device, VIRTIO_IOMMU_T_ATTACH, &[&domain[..], &[8, 0, 0, 0], &[0; 8]].concat())??;
//! let target = [&0xa000_u64.to_le_bytes()[..], &VIRTIO_IOMMU_MAP_F_READ.to_le_bytes()].concat();
//! send(&mut device, VIRTIO_IOMMU_T_MAP, &[&domain[..], &page, &target].concat())??;
//!
//! let access = IovaRange::new(Iova::new(0x1010), 16).ok_or("wraps")?;
//! let read = device.translate(disk, access, Access::Read);
//! assert!(matches!(read, Ok(AccessTarget::Memory { physical, .. })
//!     if physical.start() == PhysAddr::new(0xa010)));
//! let write = device.translate(disk, access, Access::Write).map_err(|fault| fault.reason);
//! assert_eq!(write, Err(TranslationFaultReason::Permission));
//!
//! send(&mut device, VIRTIO_IOMMU_T_UNMAP, &[&domain[..], &page, &[0; 4]].concat())??;
//! assert!(device.translate(disk, access, Access::Read).is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;

mod device;
mod domain;
mod endpoint;
mod error;
mod fault;
mod id;
pub mod lazy;
mod mapping;
mod options;
#[cfg(feature = "virtio-queue")]
mod queue;
mod request;
mod sink;
mod snapshot;
pub mod spec;
mod store;

pub use device::{Device, RequestBatch, RequestOutcome};
pub use endpoint::{EndpointError, ReservedRegion, ReservedRegionKind, ReservedRegionsError};
pub use error::{LimitReached, RequestError, Status};
pub use fault::{BufferTooSmall, TranslationFault, TranslationFaultReason};
pub use id::{DomainId, EndpointId};
pub use mapping::{AccessTarget, Mapping, MemoryKind};
pub use options::{BypassPolicy, DomainRange, Options, OptionsError, VirtioIommuLimits};
#[cfg(feature = "virtio-queue")]
pub use queue::{QueueProgress, Queues, ServeError};
pub use sink::{Sink, SinkError, SinkHandle};
pub use snapshot::SnapshotError;
