//! Errors of the mapping layer. A failed map leaves the layer unchanged, except for
//! [`MapReason::RollbackFailed`].

mod ring;
mod shadow;

use core::fmt;

use ringfence_iova::AllocError;
use ringfence_pgtable::{MapError as TableMapError, UnmapError as TableUnmapError};
use ringfence_types::{DomainId, InvalidationError, IovaRange, PhysRange, RequesterId, RingId};

pub use ring::{FullReason, RingError, RingFull, RingRefusal};
pub use shadow::ShadowError;

use crate::token::{NotInvalidated, StillMapped};

/// A map that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapError {
    /// The device of the attachment.
    pub device: RequesterId,
    /// The buffer, or the first segment of the list.
    pub buffer: Option<PhysRange>,
    /// The reason for the failure.
    pub reason: MapReason,
}

/// The reason why a map failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MapReason {
    /// The list of segments or buffers is empty.
    Empty,
    /// The segments together have more pages than page numbers can count.
    TooLarge,
    /// The caller's array is too short for the device's segments.
    TooManySegments,
    /// The boundary of the segment limits is not a power of two, or is smaller than a page.
    BadLimits,
    /// The allocator returned no I/O virtual address.
    Alloc(AllocError),
    /// The table could not install the translation.
    Table(TableMapError),
    /// The memory lies beyond the device's DMA mask, and no bounce buffer is configured or free.
    BeyondMask,
    /// A space without translation cannot map scattered memory contiguously.
    NotContiguous,
    /// The space must be flushed before it reuses addresses, and the flush failed.
    Flush(InvalidationError),
    /// The domain was flushed `flushes` times, but other CPUs allocated every released address. Try
    /// again later.
    FlushRetriesExhausted {
        /// Number of flushes of the domain.
        flushes: u32,
    },
    /// Out of memory for the layer's records or for coherent pages.
    OutOfMemory,
    /// The ring's slot is in use. This is back-pressure, not an error: try again when the slot is
    /// unmapped or its burst has ended.
    RingFull(RingFull),
    /// The ring rejects the buffer.
    Ring(RingRefusal),
    /// The pool has no shadow for the buffer, and the space maps no buffer without one.
    Shadow(ShadowError),
    /// The attachment belongs to another layer, or its domain was detached.
    NotAttached,
    /// The map failed half-way, and undoing it failed too: the space rejected the unmap, or the
    /// invalidation failed. The layer never reuses the addresses. No device received them, but a
    /// device that guesses them may still reach the first pieces: the returned buffer is exposed.
    RollbackFailed(UnmapFailure),
}

impl MapReason {
    /// Changes the reason to [`RollbackFailed`](Self::RollbackFailed). Keeps the first failure of a
    /// rollback. A rejected unmap takes precedence over a failed invalidation.
    pub(crate) fn fail_rollback(&mut self, failure: UnmapFailure) {
        match (*self, failure) {
            (Self::RollbackFailed(UnmapFailure::Refused(_)), _)
            | (Self::RollbackFailed(_), UnmapFailure::NotFlushed(_)) => {}
            _ => *self = Self::RollbackFailed(failure),
        }
    }
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
            Self::NotContiguous => {
                f.write_str("scattered memory needs translation or a bounce buffer")
            }
            Self::Flush(e) => e.fmt(f),
            Self::FlushRetriesExhausted { flushes } => {
                write!(
                    f,
                    "no free address after {flushes} flushes: other CPUs took every released \
                    address"
                )
            }
            Self::OutOfMemory => f.write_str("out of memory"),
            Self::RingFull(full) => full.fmt(f),
            Self::Ring(refusal) => refusal.fmt(f),
            Self::Shadow(error) => error.fmt(f),
            Self::NotAttached => f.write_str("device is not attached"),
            Self::RollbackFailed(e) => {
                write!(f, "rollback failed: {e}; the addresses are not reused")
            }
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

/// An unmap that failed.
#[derive(Debug)]
pub struct UnmapError<B> {
    /// The device of the attachment.
    pub device: RequesterId,
    /// The addresses that the caller tried to unmap.
    pub range: IovaRange,
    /// The reason for the failure, with the buffer.
    pub reason: UnmapReason<B>,
}

/// The reason why an unmap failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum UnmapReason<B> {
    /// The table rejected the unmap: the range is not mapped, or only partly mapped. Nothing
    /// changed.
    Table(TableUnmapError, StillMapped<B>),
    /// No allocated range starts at this address with this size. Nothing changed.
    NotAllocated(StillMapped<B>),
    /// The table entries are cleared, but the invalidation failed. The device may still reach the
    /// buffer, so the layer withholds it. Try again with
    /// [`Dma::retry_invalidation`](crate::Dma::retry_invalidation).
    NotFlushed(InvalidationError, NotInvalidated<B>),
    /// The attachment belongs to another layer.
    NotAttached(StillMapped<B>),
    /// The mapping's domain was detached, so no device reaches the buffer any more. The driver gets
    /// it back.
    Detached(B),
    /// The burst already withholds its maximum of buffers. Nothing changed: the device still
    /// reaches the buffer. End the burst, [`Mapping::claim`](crate::Mapping::claim) the buffer and
    /// unmap it again.
    BurstFull(StillMapped<B>),
    /// The mapping belongs to this domain, which is not the attachment's (attack A25). Nothing
    /// changed: the device still reaches the buffer. [`Mapping::claim`](crate::Mapping::claim) it
    /// for its own device.
    OtherDomain(DomainId, StillMapped<B>),
    /// The mapping belongs to this ring of the device, which is not the attachment's. Nothing
    /// changed.
    OtherRing(RingId, StillMapped<B>),
    /// The driver reported this number of received bytes, which exceeds the mapping. Nothing was
    /// copied, and nothing changed.
    TooManyReceived(u64, StillMapped<B>),
    /// Some pieces of a list are unmapped, and at least one is not. Either the space rejected a
    /// piece, or an invalidation failed while the space
    /// [keeps](crate::space::CachingSpace::CACHES_UNMAPPED) another piece. The layer never
    /// reuses the addresses of a piece whose invalidation failed. The device may reach the buffer
    /// until its domain is detached.
    PartlyUnmapped(UnmapFailure, StillMapped<B>),
}

/// The reason why a range was not unmapped. Nothing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnmapRefusal {
    /// The table rejected the unmap.
    Table(TableUnmapError),
    /// No allocated range starts at this address with this size.
    NotAllocated,
}

impl fmt::Display for UnmapRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table(error) => error.fmt(f),
            Self::NotAllocated => f.write_str("no allocated range of that start and size"),
        }
    }
}

impl UnmapRefusal {
    /// Converts to the driver's error, with the buffer.
    #[cold]
    pub(crate) fn with<B>(self, buffer: StillMapped<B>) -> UnmapReason<B> {
        match self {
            Self::Table(error) => UnmapReason::Table(error, buffer),
            Self::NotAllocated => UnmapReason::NotAllocated(buffer),
        }
    }
}

/// The reason why a mapping, or a part of it, may still be reachable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnmapFailure {
    /// The space rejected the unmap.
    Refused(UnmapRefusal),
    /// The table entries are cleared, but the invalidation failed.
    NotFlushed(InvalidationError),
}

impl fmt::Display for UnmapFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => refusal.fmt(f),
            Self::NotFlushed(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for UnmapFailure {}

impl From<InvalidationError> for UnmapFailure {
    fn from(error: InvalidationError) -> Self {
        Self::NotFlushed(error)
    }
}

impl<B> fmt::Display for UnmapError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot unmap {} of {}: ", self.range, self.device)?;
        match &self.reason {
            UnmapReason::Table(e, _) => e.fmt(f),
            UnmapReason::NotAllocated(_) => UnmapRefusal::NotAllocated.fmt(f),
            UnmapReason::NotFlushed(e, _) => e.fmt(f),
            UnmapReason::NotAttached(_) => f.write_str("device is not attached"),
            UnmapReason::BurstFull(_) => f.write_str("the burst must end first"),
            UnmapReason::Detached(_) => f.write_str("its domain was detached"),
            UnmapReason::OtherDomain(domain, _) => write!(f, "mapped in domain {domain}"),
            UnmapReason::TooManyReceived(bytes, _) => {
                write!(f, "{bytes} received bytes exceed the mapping")
            }
            UnmapReason::OtherRing(ring, _) => write!(f, "mapped in ring {ring}"),
            UnmapReason::PartlyUnmapped(failure, _) => write!(f, "only partly unmapped: {failure}"),
        }
    }
}

impl<B: fmt::Debug> core::error::Error for UnmapError<B> {}
