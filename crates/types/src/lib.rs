//! Basic types of Ringfence: addresses, ranges, directions, faults and the obligations of a DMA
//! mapping. It also defines the ports through which the core reaches memory, table frames and the
//! IOMMU's invalidation interface.
//!
//! Every other crate depends on this one (`docs/ARCHITECTURE.md`). It is `no_std`, does not
//! allocate, performs no I/O and does not panic on any input.
//!
//! The obligations order unmap, invalidation and reuse. [`Pending`] takes an [`Unmapped`] range and
//! a request that covers it, and becomes the [`Flushed`] with which an allocator frees the range:
//!
//! ```
//! use ringfence_types::{
//!     CachedLevels, DomainId, Invalidation, InvalidationError, Invalidator, Iova, IovaRange,
//!     Pending, PfnRange, Ticket, Unmapped,
//! };
//!
//! /// The port to a unit whose queue completes one request between two polls.
//! #[derive(Default)]
//! struct Queue {
//!     submitted: u64,
//!     completed: u64,
//! }
//!
//! impl Invalidator for Queue {
//!     fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
//!         self.submitted += 1;
//!         Ok(Ticket::new(self.submitted))
//!     }
//!     fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
//!         self.completed += 1;
//!         Ok(self.completed > ticket.get())
//!     }
//! }
//!
//! let (mut queue, domain) = (Queue::default(), DomainId::new(1));
//! let buffer = IovaRange::new(Iova::new(0xffff_d040), 9000).ok_or("wraps")?;
//! let pages = PfnRange::covering(&buffer);
//! assert_eq!(pages.pages(), 3);
//! let invalidate = |range| Invalidation::Pages { domain, range, levels: CachedLevels::Leaves };
//!
//! // The table's unmap returns this after it has cleared the entries.
//! let unmapped = Unmapped::attest_cleared(domain, pages);
//! // An invalidation of the first page alone does not release all three.
//! let first = PfnRange::new(pages.lo(), 1).ok_or("empty")?;
//! let Err((unmapped, error)) = Pending::submit(&mut queue, invalidate(first), unmapped) else {
//!     panic!("two pages are still cached");
//! };
//! assert_eq!(error, InvalidationError::ScopeTooNarrow);
//!
//! let pending = Pending::submit(&mut queue, invalidate(pages), unmapped).map_err(|(_, e)| e)?;
//! let flushed = pending.wait(&mut queue).map_err(|(_, e)| e)?;
//! assert_eq!((flushed.domain(), flushed.range()), (domain, pages));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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
pub use memory::{MemoryError, PhysMemory, TABLE_WORDS, is_zeroed};
pub use obligation::{Batch, DrainUnmapped, Flushed, Pending, Unmapped, WholeDomain};
pub use page::PageSize;
pub use pfn::{Pfn, PfnRange};
pub use range::{AddressRange, IovaRange, PhysRange};
pub use registers::{Registers, poll_until};
pub use ring::{RingId, RingIova, RingSlot};
pub use sequence::Sequence;
pub use time::Nanos;
