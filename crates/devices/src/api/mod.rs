//! The DMA API of a driver.
//!
//! A driver maps buffers, unmaps them, and ends bursts of unmaps. Any protection mode can implement
//! [`DmaApi`], without dynamic dispatch. [`LayerApi`] implements it with the mapping layer of this
//! project.

mod attachments;
mod hooks;
mod layer;
mod persistent;
mod regions;

pub use attachments::{Attachments, RingAttachments};
pub use hooks::{AttackHook, DmaHooks, HasBus, UnmapOutcome};
pub use layer::LayerApi;
pub use persistent::{
    PersistentApi, PersistentBuffers, PersistentError, PersistentHandle, PersistentStats,
    PersistentUse,
};
pub use regions::{RegionApi, RegionHandle, RegionStats, Regions};

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

impl DeviceRing {
    /// The ring of `queue` for data in `direction`.
    pub const fn new(queue: u16, direction: Direction) -> Self {
        Self { queue, direction }
    }
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ApiError {
    /// A map failed.
    #[error(transparent)]
    Map(MapError),
    /// An unmap failed.
    #[error("cannot unmap {range} of {device}: {cause}")]
    Unmap {
        /// Device of the mapping.
        device: RequesterId,
        /// Range of addresses.
        range: IovaRange,
        /// Reason why the unmap failed.
        cause: UnmapCause,
    },
    /// The invalidation at the end of a burst failed.
    #[error("cannot end a burst of {device}: {cause}")]
    EndBurst {
        /// Device of the burst.
        device: RequesterId,
        /// Error of the invalidation.
        cause: InvalidationError,
    },
    /// The mode translates by ring, and the device has no such ring.
    #[error("queue {} ({}) has no ring tables", .0.queue, .0.direction)]
    NoSuchRing(DeviceRing),
    /// Coherent memory was not freed.
    #[error("cannot free coherent memory {range} of {device}")]
    FreeCoherent {
        /// Device of the memory's ring.
        device: RequesterId,
        /// Range of addresses.
        range: IovaRange,
    },
}

/// Reason why an unmap failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnmapCause {
    /// The range is not mapped, or only in part.
    #[error("no mapping has exactly this range")]
    NotMapped,
    /// The range belongs to another domain.
    #[error("the range belongs to domain {0}")]
    OtherDomain(DomainId),
    /// The burst withholds the maximum number of buffers and must end first.
    #[error("the burst is full; end it first")]
    BurstFull,
    /// The translation is cleared, but its invalidation failed.
    #[error(transparent)]
    NotFlushed(InvalidationError),
}
