//! The states of a mapping from its unmap to the return of its buffer.

use alloc::boxed::Box;
use core::mem::ManuallyDrop;

use ringfence_types::{CachedLevels, Direction, RingId, Unmapped};

use super::{DomainHandle, HeldBuffer};

/// A range whose table entries are cleared, and the scope of its invalidation. `T` holds table
/// pages that the unmap unlinked. `invalidate` is in `space/io_pgtable.rs`.
#[must_use = "the range may still be cached by the hardware"]
#[derive(Debug, PartialEq, Eq)]
pub struct ClearedRange<T = ()> {
    /// The reserved range, with its entries cleared.
    pub unmapped: Unmapped,
    /// The kinds of cached entries that the invalidation must remove.
    pub levels: CachedLevels,
    /// Table pages that may be freed after the same invalidation.
    pub tables: T,
}

/// A returned buffer that no device can reach.
#[must_use = "the buffer is lost unless it is taken out"]
#[derive(Debug, PartialEq, Eq)]
pub struct Released<B>(pub B);

/// A returned buffer that the device may still reach through a stale translation. Deferred modes
/// return it.
#[must_use = "the buffer is lost unless it is taken out"]
#[derive(Debug, PartialEq, Eq)]
pub struct ReleasedStale<B>(pub B);

/// The layer withholds the buffer until its burst ends.
#[must_use = "end the burst, or the buffer never comes back"]
#[derive(Debug, PartialEq, Eq)]
pub struct Withheld;

/// The result of an unmap in a space in which a device uses copies of some buffers.
#[must_use = "the buffer is lost unless it is taken out"]
#[derive(Debug, PartialEq, Eq)]
pub enum ReleasedOrWithheld<B> {
    /// The device used a copy. The driver has the buffer back.
    Released(B),
    /// The layer withholds the buffer until its burst ends.
    Withheld,
}

/// Identifies a burst: it collects the unmaps of one ring and direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BurstKey {
    /// The device's ring; 0 if the device has no rings.
    pub ring: RingId,
    /// Direction of the unmapped buffers.
    pub direction: Direction,
}

impl BurstKey {
    /// Returns the index of the burst among all bursts of a device.
    #[inline]
    pub fn index(self) -> usize {
        let direction = match self.direction {
            Direction::ToDevice => 0,
            Direction::FromDevice => 1,
            Direction::Bidirectional => 2,
        };
        usize::from(self.ring.get()) * 3 + direction
    }
}

/// The result of an unmap, for code that is generic over policies.
pub trait Outcome<B> {
    /// Returns true if the buffer was returned while a device may still reach it.
    #[inline]
    fn is_stale(&self) -> bool {
        false
    }
    /// Returns the buffer. `None` if the layer withholds it.
    fn into_buffer(self) -> Option<B>;
}

impl<B> Outcome<B> for Released<B> {
    #[inline]
    fn into_buffer(self) -> Option<B> {
        Some(self.0)
    }
}

impl<B> Outcome<B> for ReleasedStale<B> {
    #[inline]
    fn is_stale(&self) -> bool {
        true
    }
    #[inline]
    fn into_buffer(self) -> Option<B> {
        Some(self.0)
    }
}

impl<B> Outcome<B> for Withheld {
    #[inline]
    fn into_buffer(self) -> Option<B> {
        None
    }
}

impl<B> Outcome<B> for ReleasedOrWithheld<B> {
    #[inline]
    fn into_buffer(self) -> Option<B> {
        match self {
            Self::Released(buffer) => Some(buffer),
            Self::Withheld => None,
        }
    }
}

/// The entry that unmap queues with the policy. `R` is the result of the space's unmap.
#[derive(Debug)]
pub struct PendingUnmap<R, B> {
    /// The result of the space's unmap.
    pub result: R,
    /// The mapping's ring and direction.
    pub burst_key: BurstKey,
    pub(crate) domain_handle: DomainHandle,
    /// The buffer. The policy may release it only if no device can reach it, or if its outcome
    /// reports that one still may.
    pub buffer: HeldBuffer<B>,
}

impl<R, B> PendingUnmap<R, B> {
    /// Separates the result of the unmap from the rest.
    #[inline]
    pub(crate) fn split(self) -> (R, PendingUnmap<(), B>) {
        let rest = PendingUnmap {
            result: (),
            burst_key: self.burst_key,
            domain_handle: self.domain_handle,
            buffer: self.buffer,
        };
        (self.result, rest)
    }
}

impl<B> PendingUnmap<(), B> {
    /// Reverses [`split`](PendingUnmap::split), perhaps with another result.
    #[inline]
    pub(crate) fn with<R>(self, result: R) -> PendingUnmap<R, B> {
        PendingUnmap {
            result,
            burst_key: self.burst_key,
            domain_handle: self.domain_handle,
            buffer: self.buffer,
        }
    }
}

/// The buffer of a mapping whose unmap was rejected, or was only partly done. The device may still
/// reach the buffer. Dropping it leaks the buffer, as dropping the mapping does.
#[must_use = "the buffer may still be reachable by the device"]
#[derive(Debug)]
pub struct StillMapped<B>(pub(crate) HeldBuffer<B>);

impl<B> StillMapped<B> {
    /// Returns the embedder's representation of the buffer.
    pub fn buffer(&self) -> &B {
        &self.0
    }

    /// Returns the buffer, to [claim](crate::Mapping::claim) the mapping again. Also for drivers
    /// that know that nothing was mapped, or that detached the domain of a
    /// [partly unmapped](crate::UnmapReason::PartlyUnmapped) list.
    pub fn into_buffer(self) -> B {
        ManuallyDrop::into_inner(self.0)
    }
}

/// A cleared mapping whose invalidation has failed so far, with its buffer.
#[must_use = "the buffer may still be reachable by the device"]
#[derive(Debug)]
pub struct NotInvalidated<B> {
    pub(crate) mapping: PendingUnmap<ClearedRange, B>,
    /// Further cleared ranges of a list that was mapped piece by piece.
    pub(crate) further: Box<[ClearedRange]>,
}

impl<B> NotInvalidated<B> {
    /// Creates the token of a mapping of one range.
    #[cold]
    pub(crate) fn new(mapping: PendingUnmap<ClearedRange, B>) -> Self {
        Self {
            mapping,
            further: Box::default(),
        }
    }

    /// Returns the direction of the mapping.
    pub fn direction(&self) -> Direction {
        self.mapping.burst_key.direction
    }
}
