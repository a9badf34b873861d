//! The tokens a driver holds while a device may reach its buffer.

use core::mem::ManuallyDrop;

use ringfence_types::{Direction, DomainId, Iova, IovaRange, RingId};

use crate::domain_table::DomainHandle;
use crate::flush::{BurstKey, ClearedMapping, PendingUnmap};
use crate::space::{ClearedRange, Space};
use crate::{Attachment, BounceSlot, NotInvalidated, StillMapped};

/// A buffer that must not be dropped while a device may reach it.
pub(crate) type HeldBuffer<B> = ManuallyDrop<B>;

/// What every token of a live mapping remembers, to be taken down.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LiveMapping<B> {
    pub(crate) range: IovaRange,
    pub(crate) domain_handle: DomainHandle,
    pub(crate) direction: Direction,
    pub(crate) buffer: HeldBuffer<B>,
}

impl<B> LiveMapping<B> {
    /// The mapping of `buffer` at `range` for the device `at`.
    #[inline]
    pub(crate) fn new(at: &Attachment, range: IovaRange, direction: Direction, buffer: B) -> Self {
        Self {
            range,
            domain_handle: at.domain_handle,
            direction,
            buffer: ManuallyDrop::new(buffer),
        }
    }

    /// Among which unmaps of a device's `ring` its own is.
    #[inline]
    pub(crate) fn burst_key(&self, ring: RingId) -> BurstKey {
        BurstKey {
            ring,
            direction: self.direction,
        }
    }

    /// What the flush policy takes over once the mapping, of a device's `ring`, has left the space.
    #[inline]
    pub(crate) fn into_pending_unmap<S: Space>(
        self,
        gone: S::UnmapResult,
        ring: RingId,
    ) -> PendingUnmap<S, B> {
        PendingUnmap {
            result: gone,
            burst_key: self.burst_key(ring),
            domain_handle: self.domain_handle,
            buffer: self.buffer,
        }
    }

    /// The buffer of a mapping that is not taken down.
    #[cold]
    pub(crate) fn into_still_mapped(self) -> StillMapped<B> {
        StillMapped(self.buffer)
    }

    /// What is owed of a mapping that has left the table and was not invalidated.
    #[cold]
    pub(crate) fn into_not_invalidated(self, gone: ClearedRange) -> NotInvalidated<B> {
        NotInvalidated {
            mapping: ClearedMapping {
                range: gone,
                direction: self.direction,
                domain_handle: self.domain_handle,
                buffer: self.buffer,
            },
        }
    }

    /// The buffer, once the mapping is gone.
    #[inline]
    pub(crate) fn into_buffer(self) -> B {
        ManuallyDrop::into_inner(self.buffer)
    }
}

/// A live mapping. Owns the driver's `buffer` until unmap hands it back, so that memory under DMA
/// cannot be touched or freed by accident: a mapping that is dropped leaks its buffer, because the
/// device still reaches it. `B` is whatever stands for the buffer in the embedder: a pinned page,
/// an index, or `()`.
#[must_use = "a mapping that is dropped stays reachable by the device for ever"]
#[derive(Debug, PartialEq, Eq)]
pub struct Mapping<B> {
    pub(crate) live: LiveMapping<B>,
    pub(crate) bounce: Option<BounceSlot>,
}

impl<B> Mapping<B> {
    /// What the device is told: the address of the first byte, at the buffer's own offset in its
    /// page.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.live.range.start()
    }

    /// The device-visible bytes.
    #[inline]
    pub fn range(&self) -> IovaRange {
        self.live.range
    }

    /// What stands for the buffer.
    #[inline]
    pub fn buffer(&self) -> &B {
        &self.live.buffer
    }

    /// The direction.
    #[inline]
    pub fn direction(&self) -> Direction {
        self.live.direction
    }

    /// The domain whose devices reach it.
    #[inline]
    pub fn domain(&self) -> DomainId {
        self.live.domain_handle.domain()
    }

    /// The bounce slot that stands in for the buffer, if any.
    #[inline]
    pub fn bounce(&self) -> Option<&BounceSlot> {
        self.bounce.as_ref()
    }

    /// A mapping of the device `at` from what a driver remembers of it, for embedders whose
    /// interface passes addresses (Linux's `dma_unmap_page`). An address that is not mapped is
    /// refused by unmap. A bounced mapping cannot be claimed.
    ///
    /// The range is to be that of one whole mapping. Trees know, and unmap refuses a part. A bitmap
    /// frees page by page: a part is unmapped and freed, the rest stays mapped and can be claimed.
    /// Magazines trust the caller, as Linux does: a wrong size gives addresses of the rest out
    /// while they are mapped, which maps of other buffers then meet as
    /// [`AlreadyMapped`](ringfence_pgtable::MapError::AlreadyMapped); no device reaches what it
    /// should not, and debug builds keep the addresses instead. Whoever cannot trust its callers
    /// keeps the mappings themselves.
    ///
    /// A table that another machine keeps
    /// ([`IoPageTable::is_mapped`](crate::space::IoPageTable::is_mapped) is `None`) refuses
    /// nothing. Behind it trees refuse an address that is not allocated; with other allocators the
    /// host is asked to unmap it, and its refusal ends the channel.
    #[inline]
    pub fn claim(at: &Attachment, range: IovaRange, direction: Direction, buffer: B) -> Self {
        Self {
            live: LiveMapping::new(at, range, direction, buffer),
            bounce: None,
        }
    }
}

/// One entry of the list that the device is given for a scatterlist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaSegment {
    /// The device-visible bytes.
    pub range: IovaRange,
}
