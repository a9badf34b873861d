//! DMA as a driver sees it.
//!
//! A driver maps buffers, unmaps them, and says when a burst of unmaps ends. Any protection mode
//! can stand behind [`DmaApi`], without dynamic dispatch: [`LayerApi`] is the mapping layer of this
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

/// The ring of a device that a mapping belongs to (rIOMMU section 4): modes that translate by ring
/// need to know, others ignore it. Buffers that descriptors point to and the memory of the
/// descriptors themselves have a table each; the call tells which.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceRing {
    /// The queue's number among those of the device.
    pub queue: u16,
    /// The direction of the ring's data.
    pub direction: Direction,
}

/// A live mapping: what goes into a descriptor, and what unmap takes.
#[must_use = "a mapping that is dropped stays reachable by the device for ever"]
#[derive(Debug)]
pub struct Mapped<H> {
    /// What the device is told.
    pub iova: Iova,
    /// For unmap.
    pub handle: H,
}

/// A buffer that was not mapped.
#[derive(Debug)]
pub struct FailedMap {
    /// The buffer, back.
    pub buffer: Buffer,
    /// Why.
    pub failure: MapFailure,
}

/// Why a buffer was not mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapFailure {
    /// The ring has no entry free now (rIOMMU section 4: overflow is legal, the driver should slow
    /// down). Try again after an unmap, or after the end of a burst.
    Busy,
    /// The mode translates by ring, and the device has no such ring.
    NoSuchRing,
    /// It cannot be mapped.
    Failed(MapError),
}

/// DMA for the driver of one device.
pub trait DmaApi {
    /// What stands for a live mapping.
    type Handle;
    /// Memory as the driver's processor reaches it.
    type Memory: ByteMemory;

    /// Memory as the driver's processor reaches it.
    fn memory(&self) -> &Self::Memory;

    /// Makes `memory`, which lies in `buffer`, reachable by the device in the ring's direction.
    ///
    /// # Errors
    /// The buffer comes back with the reason.
    fn map(
        &mut self,
        ring: DeviceRing,
        buffer: Buffer,
        memory: PhysRange,
    ) -> Result<Mapped<Self::Handle>, FailedMap>;

    /// Takes a mapping down. The buffer comes back now, or, as `None` says, at the end of the
    /// burst.
    ///
    /// # Errors
    /// The device may still reach the buffer, so it is lost to its pool.
    fn unmap(&mut self, ring: DeviceRing, handle: Self::Handle)
    -> Result<Option<Buffer>, ApiError>;

    /// Ends the ring's burst of unmaps; `back` receives the buffers that were withheld.
    ///
    /// # Errors
    /// The invalidation failed: buffers stay withheld.
    fn end_burst(&mut self, ring: DeviceRing, back: impl FnMut(Buffer)) -> Result<(), ApiError>;

    /// Makes everything mapped so far visible to the hardware: before the device is told of it by a
    /// write to its doorbell.
    fn sync_map(&mut self, ring: DeviceRing);

    /// Memory for the descriptors of `ring`: zeroed, reachable both ways, whole pages.
    ///
    /// # Errors
    /// Nothing was allocated.
    fn alloc_coherent(&mut self, ring: DeviceRing, pages: usize) -> Result<Coherent, ApiError>;

    /// Gives the memory of descriptors back.
    ///
    /// # Errors
    /// The memory comes back with the reason: the device may still reach it. Another call tries
    /// again.
    fn free_coherent(&mut self, ring: DeviceRing, memory: Coherent) -> Result<(), Box<NotFreed>>;
}

/// Coherent memory that was not freed.
#[must_use = "memory that is dropped stays reachable by the device for ever"]
#[derive(Debug)]
pub struct NotFreed {
    /// The memory, back.
    pub memory: Coherent,
    /// Why.
    pub error: ApiError,
}

/// What a driver is told when the mapping layer fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ApiError {
    /// A map failed.
    Map(MapError),
    /// An unmap failed.
    Unmap {
        /// The device.
        device: RequesterId,
        /// The addresses.
        range: IovaRange,
        /// Why.
        cause: UnmapCause,
    },
    /// The invalidation at the end of a burst failed.
    EndBurst {
        /// The device.
        device: RequesterId,
        /// Why.
        cause: InvalidationError,
    },
    /// The mode translates by ring, and the device has no such ring.
    NoSuchRing(DeviceRing),
    /// Coherent memory was not freed.
    FreeCoherent {
        /// The device.
        device: RequesterId,
        /// The addresses.
        range: IovaRange,
    },
}

/// Why an unmap failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnmapCause {
    /// The range is not mapped, or only part of it.
    NotMapped,
    /// It is another domain's.
    OtherDomain(DomainId),
    /// The burst withholds as many buffers as it may: it has to end first.
    BurstFull,
    /// The translation is cleared, but the invalidation failed.
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
