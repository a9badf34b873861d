//! Errors of the mapping layer. After a failed map the layer is as it was before the call, but for
//! [`MapReason::RollbackFailed`].

use core::fmt;
use core::mem::ManuallyDrop;

use ringfence_iova::AllocError;
use ringfence_pgtable::{MapError as TableMapError, UnmapError as TableUnmapError};
use ringfence_types::{
    Direction, DomainId, InvalidationError, IovaRange, PhysRange, RequesterId, RingId,
};

use crate::flush::ClearedMapping;
use crate::mapping::HeldBuffer;
use crate::ring::{RingFull, RingRefusal};

/// A mapping that was not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapError {
    /// The device it was for.
    pub device: RequesterId,
    /// The buffer, or the first segment of the list.
    pub buffer: Option<PhysRange>,
    /// Why.
    pub reason: MapReason,
}

/// Why a mapping was not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MapReason {
    /// The list of segments, or of buffers, is empty.
    Empty,
    /// The pages of all segments together exceed what page numbers can count.
    TooLarge,
    /// The caller's array has no room for the segments that the device would be given.
    TooManySegments,
    /// The boundary of the segment limits is no power of two, or smaller than a page.
    BadLimits,
    /// No I/O virtual address.
    Alloc(AllocError),
    /// No translation could be installed.
    Table(TableMapError),
    /// The memory lies beyond the device's DMA mask, and no bounce buffer is configured or free.
    BeyondMask,
    /// Scattered memory cannot be made contiguous without translation.
    NotContiguous,
    /// The space must be flushed before addresses are reused, and the flush failed.
    Flush(InvalidationError),
    /// So often was the domain flushed for addresses, and each time other processors took all that
    /// were released: try again later.
    FlushRetriesExhausted {
        /// Number of flushes.
        flushes: u32,
    },
    /// No memory for the layer's own records or for coherent pages.
    OutOfMemory,
    /// The ring's slot is not free: back-pressure and no error. Try again when the slot is
    /// unmapped, or its burst has ended.
    RingFull(RingFull),
    /// The ring cannot take the buffer.
    Ring(RingRefusal),
    /// The attachment is not one of this layer, or its domain was detached.
    NotAttached,
    /// The mapping failed half-way, and so did the invalidation that should undo it. The addresses
    /// are given up. No device was told of them, but one that guessed them may still reach the
    /// first pieces: the buffer comes back exposed.
    RollbackFailed(InvalidationError),
}

impl fmt::Display for MapReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("nothing to map"),
            Self::TooLarge => f.write_str("more pages than can be counted"),
            Self::TooManySegments => f.write_str("no room for the device's segments"),
            Self::BadLimits => f.write_str("impossible segment boundary"),
            Self::Alloc(e) => e.fmt(f),
            Self::Table(e) => e.fmt(f),
            Self::BeyondMask => f.write_str("beyond the device's DMA mask, and no bounce buffer"),
            Self::NotContiguous => f.write_str("scattered memory without translation"),
            Self::Flush(e) => e.fmt(f),
            Self::FlushRetriesExhausted { flushes } => {
                write!(f, "no address after {flushes} flushes of the domain")
            }
            Self::OutOfMemory => f.write_str("out of memory"),
            Self::RingFull(full) => full.fmt(f),
            Self::Ring(refusal) => refusal.fmt(f),
            Self::NotAttached => f.write_str("device is not attached"),
            Self::RollbackFailed(e) => write!(f, "half-way, and not undone: {e}"),
        }
    }
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.buffer {
            Some(buffer) => write!(
                f,
                "cannot map {buffer} for {}: {}",
                self.device, self.reason
            ),
            None => write!(f, "cannot map for {}: {}", self.device, self.reason),
        }
    }
}

impl core::error::Error for MapError {}

/// A mapping that was not taken down.
#[derive(Debug)]
pub struct UnmapError<B> {
    /// The device.
    pub device: RequesterId,
    /// The addresses that were to be unmapped.
    pub range: IovaRange,
    /// Why, with what is still owed.
    pub reason: UnmapReason<B>,
}

/// Why a mapping was not taken down.
#[derive(Debug)]
#[non_exhaustive]
pub enum UnmapReason<B> {
    /// The table refused: the range is not mapped (any more), or only part of it. Nothing was
    /// changed.
    Table(TableUnmapError, StillMapped<B>),
    /// The address space knows no allocated range that starts there, or one of another size.
    /// Nothing was changed.
    NotAllocated(StillMapped<B>),
    /// The translation is cleared in the table, but the invalidation failed: the device may still
    /// reach the buffer, which is therefore not handed back. Try again with
    /// [`Dma::retry_invalidation`](crate::Dma::retry_invalidation).
    NotFlushed(InvalidationError, NotInvalidated<B>),
    /// The attachment is not one of this layer.
    NotAttached(StillMapped<B>),
    /// The mapping's domain was detached with it, so that no device reaches the buffer any more. It
    /// is the driver's again.
    Detached(B),
    /// The burst withholds as many buffers as it may. Nothing was changed: the device still reaches
    /// the buffer. End the burst, then [`Mapping::claim`](crate::Mapping::claim) it and unmap it
    /// again.
    BurstFull(StillMapped<B>),
    /// The mapping belongs to this domain, which is not the attachment's (attack A25). Nothing was
    /// changed: the device still reaches the buffer. [`Mapping::claim`](crate::Mapping::claim) it
    /// for its own device.
    OtherDomain(DomainId, StillMapped<B>),
    /// The mapping belongs to this ring of the device, which is not the attachment's. Nothing was
    /// changed.
    OtherRing(RingId, StillMapped<B>),
}

/// The buffer of a mapping that unmap has refused: as far as the layer knows, the device still
/// reaches it. Dropped, it leaks, as the mapping would have.
#[must_use = "the buffer may still be reachable by the device"]
#[derive(Debug)]
pub struct StillMapped<B>(pub(crate) HeldBuffer<B>);

impl<B> StillMapped<B> {
    /// What stands for the buffer.
    pub fn buffer(&self) -> &B {
        &self.0
    }

    /// Hands it out: to [claim](crate::Mapping::claim) the mapping again, or because the driver
    /// knows that nothing was mapped.
    pub fn into_buffer(self) -> B {
        ManuallyDrop::into_inner(self.0)
    }
}

/// A cleared range and its buffer whose invalidation has failed so far.
#[must_use = "the buffer may still be reachable by the device"]
#[derive(Debug)]
pub struct NotInvalidated<B> {
    pub(crate) mapping: ClearedMapping<B>,
}

impl<B> NotInvalidated<B> {
    /// The direction of the mapping.
    pub fn direction(&self) -> Direction {
        self.mapping.direction
    }
}

impl<B> fmt::Display for UnmapError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot unmap {} of {}: ", self.range, self.device)?;
        match &self.reason {
            UnmapReason::Table(e, _) => e.fmt(f),
            UnmapReason::NotAllocated(_) => {
                f.write_str("no allocated range of that start and size")
            }
            UnmapReason::NotFlushed(e, _) => e.fmt(f),
            UnmapReason::NotAttached(_) => f.write_str("device is not attached"),
            UnmapReason::BurstFull(_) => f.write_str("the burst must end first"),
            UnmapReason::Detached(_) => f.write_str("its domain was detached"),
            UnmapReason::OtherDomain(domain, _) => write!(f, "mapped in domain {domain}"),
            UnmapReason::OtherRing(ring, _) => write!(f, "mapped in ring {ring}"),
        }
    }
}

impl<B: fmt::Debug> core::error::Error for UnmapError<B> {}
