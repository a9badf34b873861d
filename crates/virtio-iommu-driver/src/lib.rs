//! Driver of a virtio-iommu device (virtio 1.3, section 5.13): it confines endpoints to mappings
//! that the device keeps, and reads fault events.
//!
//! [`Unit::new`] starts the device over a [`Transport`] with all endpoints blocked.
//! [`Unit::unmap`] queues an UNMAP request; the invalidation that its token owes completes when the
//! device has answered. A range is therefore free only when no endpoint can reach it.
//!
//! ```
//! use ringfence_memory::{Arena, Frames};
//! use ringfence_pgtable::MapRequest;
//! use ringfence_types::{
//!     Access, CachedLevels, DomainId, Invalidation, Iova, IovaRange, Pending, Permissions,
//!     PfnRange, PhysAddr, PhysRange, RequesterId,
//! };
//! use ringfence_virtio_iommu::{Device, EndpointId};
//! use ringfence_virtio_iommu_driver::{FaultRecord, LocalDevice, Options, Unit};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory = Arena::new(1 << 20)?;
//! let region = PhysRange::new(PhysAddr::new(0x1_0000), 0x1_0000).ok_or("no region")?;
//! let frames = Frames::new(&memory, region);
//! // The other side: a device of `ringfence-virtio-iommu` with one endpoint.
//! let endpoint = EndpointId::new(0x20);
//! let mut device = Device::new(ringfence_virtio_iommu::Options::default(), ())?;
//! device.add_endpoint(endpoint, &[])?;
//! let device = LocalDevice::new(device, &memory);
//!
//! let options = Options { first_endpoint: 0, poll_limit: 1_000_000 };
//! let mut unit = Unit::new(&device, &memory, &frames, &options)?;
//! let domain = DomainId::new(1);
//! unit.attach(RequesterId::new(0x20), domain)?;
//! let iova = Iova::new(0x5000);
//! unit.map(domain, MapRequest {
//!     iova,
//!     pa: PhysAddr::new(0x8000),
//!     pages: 2,
//!     permissions: Permissions::READ,
//! })?;
//! let byte = IovaRange::new(Iova::new(0x6fff), 1).ok_or("no range")?;
//! assert!(device.access(endpoint, byte, Access::Read).is_ok());
//!
//! let range = PfnRange::covering(&IovaRange::new(iova, 0x2000).ok_or("no range")?);
//! let unmapped = unit.unmap(domain, range)?;
//! let request = Invalidation::Pages { domain, range, levels: CachedLevels::Leaves };
//! let pending = Pending::submit(&mut unit, request, unmapped).map_err(|(_, error)| error)?;
//! let flushed = pending.wait(&mut unit).map_err(|(_, error)| error)?;
//! assert_eq!(flushed.range(), range);
//! assert!(device.access(endpoint, byte, Access::Read).is_err());
//! let event = unit.next_fault();
//! assert!(matches!(event, Some(FaultRecord::Fault(fault)) if fault.endpoint == endpoint));
//!
//! unit.detach(RequesterId::new(0x20))?;
//! unit.disable()?;
//! assert_eq!(frames.in_use(), 0);
//! # Ok(())
//! # }
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod attach;
mod capabilities;
mod domain;
mod error;
mod events;
mod fault;
mod frames;
mod invalidate;
mod io_page_table;
mod map;
mod probe;
mod registers;
mod request;
mod requests;
mod transport;
mod unit;
mod unmap_of;
mod virtqueue;

pub use capabilities::Capabilities;
pub use error::{Failure, Feature, Status, UnitError};
pub use fault::{Fault, FaultReason, FaultRecord};
pub use io_page_table::{DomainTable, SharedUnit};
pub use registers::NarrowRegisters;
pub use transport::{
    CapabilityError, LocalDevice, Location, PciCapabilities, QueueParts, Transport, VirtioMmio,
    VirtioPci,
};
pub use unit::{Options, Unit};
