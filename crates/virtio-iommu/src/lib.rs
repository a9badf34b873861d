//! A virtio-iommu device (virtio 1.3, section 5.13) without I/O: the bytes of a request in, the
//! bytes of the reply out.
//!
//! [`Device::handle`] takes the device-readable part of one descriptor chain and fills the
//! device-writable one. What the driver maps is kept here and told to a [`Sink`], through which a
//! monitor forwards it to a software IOTLB, VFIO or iommufd. Faults wait in the device until the
//! driver gives a buffer for them. Queues, threads, notifications and guest memory are the
//! embedder's; the feature `virtio-queue` adds an adapter to rust-vmm's queues. The feature
//! `conformance` adds 40 statements of the specification as a suite that any implementation can be
//! run against.
//!
//! An endpoint that is attached to nothing reaches nothing, unless the embedder lets the driver
//! decide otherwise ([`BypassPolicy`]). What happens when a sink fails is decision 0014
//! (`docs/decisions/0014-when-a-sink-fails.md`): a request to unmap that was found valid always
//! ends with the range unreachable.
//!
//! Part of the core: `no_std` with `alloc`, no unsafe code, no I/O, no clock, no panic on any
//! input, and no allocation that the options do not bound.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;

#[cfg(feature = "conformance")]
pub mod conformance;
mod device;
mod domain;
mod endpoint;
mod error;
mod fault;
mod id;
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
