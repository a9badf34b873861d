//! The DMA API of a driver.
//!
//! A driver maps buffers, unmaps them, and ends bursts of unmaps. Any protection mode can implement
//! [`DmaApi`], without dynamic dispatch. [`LayerApi`] implements it with the mapping layer of this
//! project.

mod attachments;
mod hooks;
mod layer;

pub use attachments::{Attachments, RingAttachments};
pub use hooks::{AttackHook, DmaHooks, HasBus, UnmapOutcome};
pub use layer::LayerApi;

use core::fmt;

use ringfence_dma::{Coherent, MapError};
use ringfence_types::{
    Direction, DomainId, InvalidationError, Iova, IovaRange, PhysRange, RequesterId,
};

use crate::{Buffer, ByteMemory};

/// The ring of a device to which a mapping belongs (rIOMMU section 4). Modes that translate by ring
/// use it; others ignore it. The buffers of a ring and the memory of its descriptors have separate
/// tables, selected by the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceRing {
    /// Index of the queue in the device.
    pub queue: u16,
    /// Direction of the ring's data.
    pub direction: Direction,
}

/// A live mapping.
#[must_use = "a mapping that is dropped stays reachable by the device for ever"]
#[derive(Debug)]
pub struct Mapped<H> {
    /// Address for the descriptor.
    pub iova: Iova,
    /// Handle for the unmap.
    pub handle: H,
}

/// Error: a buffer was not mapped.
#[derive(Debug)]
pub struct FailedMap {
    /// The buffer, which the caller owns again.
    pub buffer: Buffer,
    /// Reason why it was not mapped.
    pub failure: MapFailure,
}

/// Reason why a buffer was not mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapFailure {
    /// The ring has no free entry now (rIOMMU section 4: overflow is legal, the driver should slow
    /// down). Try again after an unmap or after the end of a burst.
    Busy,
    /// The mode translates by ring, and the device has no such ring.
    NoSuchRing,
    /// The layer failed to map it.
    Failed(MapError),
}

/// The DMA API of one device's driver.
pub trait DmaApi {
    /// Handle of a live mapping.
    type Handle;
    /// Type of the memory.
    type Memory: ByteMemory;

    /// Returns the memory as the driver's CPU accesses it.
    fn memory(&self) -> &Self::Memory;

    /// Maps `memory`, a part of `buffer`, for the device, in the ring's direction.
    ///
    /// # Errors
    /// Returns the buffer with the reason.
    fn map(
        &mut self,
        ring: DeviceRing,
        buffer: Buffer,
        memory: PhysRange,
    ) -> Result<Mapped<Self::Handle>, FailedMap>;

    /// Unmaps a mapping. Returns the buffer; `None` if the layer withholds it until the end of the
    /// burst.
    ///
    /// # Errors
    /// The device may still access the buffer, so it is leaked.
    fn unmap(&mut self, ring: DeviceRing, handle: Self::Handle)
    -> Result<Option<Buffer>, ApiError>;

    /// Ends the ring's burst of unmaps, and passes the withheld buffers to `back`.
    ///
    /// # Errors
    /// The invalidation failed: buffers stay withheld.
    fn end_burst(&mut self, ring: DeviceRing, back: impl FnMut(Buffer)) -> Result<(), ApiError>;

    /// Makes all mappings so far visible to the hardware. Call this before the doorbell write that
    /// tells the device of them.
    fn sync_map(&mut self, ring: DeviceRing);

    /// Allocates memory for the descriptors of `ring`: zeroed whole pages, accessible in both
    /// directions.
    ///
    /// # Errors
    /// Nothing was allocated.
    fn alloc_coherent(&mut self, ring: DeviceRing, pages: usize) -> Result<Coherent, ApiError>;

    /// Frees the memory of descriptors.
    ///
    /// # Errors
    /// Returns the memory with the reason: the device may still access it. The caller may try
    /// again.
    fn free_coherent(&mut self, ring: DeviceRing, memory: Coherent) -> Result<(), Box<NotFreed>>;
}

/// Error: coherent memory was not freed.
#[must_use = "memory that is dropped stays reachable by the device for ever"]
#[derive(Debug)]
pub struct NotFreed {
    /// The memory, which the device may still access.
    pub memory: Coherent,
    /// Reason why it was not freed.
    pub error: ApiError,
}

/// Error of the mapping layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ApiError {
    /// A map failed.
    Map(MapError),
    /// An unmap failed.
    Unmap {
        /// Device of the mapping.
        device: RequesterId,
        /// Range of addresses.
        range: IovaRange,
        /// Reason why the unmap failed.
        cause: UnmapCause,
    },
    /// The invalidation at the end of a burst failed.
    EndBurst {
        /// Device of the burst.
        device: RequesterId,
        /// Error of the invalidation.
        cause: InvalidationError,
    },
    /// The mode translates by ring, and the device has no such ring.
    NoSuchRing(DeviceRing),
    /// Coherent memory was not freed.
    FreeCoherent {
        /// Device of the memory's ring.
        device: RequesterId,
        /// Range of addresses.
        range: IovaRange,
    },
}

/// Reason why an unmap failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnmapCause {
    /// The range is not mapped, or only in part.
    NotMapped,
    /// The range belongs to another domain.
    OtherDomain(DomainId),
    /// The burst withholds the maximum number of buffers and must end first.
    BurstFull,
    /// The translation is cleared, but its invalidation failed.
    NotFlushed(InvalidationError),
}

impl fmt::Display for UnmapCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotMapped => f.write_str("not mapped as it was"),
            Self::OtherDomain(domain) => write!(f, "mapped in domain {domain}"),
            Self::BurstFull => f.write_str("the burst must end first"),
            Self::NotFlushed(error) => error.fmt(f),
        }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Map(error) => error.fmt(f),
            Self::Unmap {
                device,
                range,
                cause,
            } => write!(f, "cannot unmap {range} of {device}: {cause}"),
            Self::EndBurst { device, cause } => {
                write!(f, "cannot end a burst of {device}: {cause}")
            }
            Self::NoSuchRing(DeviceRing { queue, direction }) => {
                write!(f, "no tables for queue {queue} ({direction})")
            }
            Self::FreeCoherent { device, range } => {
                write!(f, "cannot free coherent memory {range} of {device}")
            }
        }
    }
}

impl core::error::Error for ApiError {}
