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
