//! Basic types of Ringfence: addresses, ranges, directions, faults and the obligations of a DMA
//! mapping. It also defines the ports through which the core reaches memory, table frames and the
//! IOMMU's invalidation interface.
//!
//! Every other crate depends on this one (`docs/ARCHITECTURE.md`). It is `no_std`, does not
//! allocate, performs no I/O and does not panic on any input.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

#[cfg(feature = "std")]
extern crate std;

mod address;
mod block;
mod device;
mod direction;
mod fault;
mod frames;
mod invalidate;
mod lock;
mod memory;
mod obligation;
mod page;
mod pfn;
mod range;
mod registers;
mod ring;
mod sequence;
mod time;

pub use address::{Address, DeviceVisible, GuestPhysAddr, GuestPhysical, Iova, PhysAddr, Physical};
pub use block::PfnBlock;
pub use device::{DomainId, Pasid, RequesterId};
pub use direction::{Access, Direction, Permissions};
pub use fault::{Fault, FaultReason};
pub use frames::{FrameSource, OutOfFrames};
pub use invalidate::{CachedLevels, Invalidation, InvalidationError, Invalidator, Ticket};
pub use lock::Lock;
pub use memory::{MemoryError, PhysMemory, TABLE_WORDS};
pub use obligation::{Batch, DrainUnmapped, Flushed, Pending, Unmapped, WholeDomain};
pub use page::PageSize;
pub use pfn::{Pfn, PfnRange};
pub use range::{AddressRange, IovaRange, PhysRange};
pub use registers::{Registers, poll_until};
pub use ring::{RingId, RingIova, RingSlot};
pub use sequence::Sequence;
pub use time::Nanos;
