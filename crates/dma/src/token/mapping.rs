//! Tokens that a driver holds while a device may reach its buffer.

use core::mem::ManuallyDrop;

use ringfence_types::{Direction, DomainId, Iova, IovaRange, PhysRange, RingId};

use super::{Attachment, BurstKey, DomainHandle, PendingUnmap, StillMapped};

/// A buffer that must not be dropped while a device may reach it.
pub(crate) type HeldBuffer<B> = ManuallyDrop<B>;

/// The state that every token of a live mapping keeps for its unmap.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LiveMapping<B> {
    pub(crate) range: IovaRange,
    pub(crate) domain_handle: DomainHandle,
    pub(crate) direction: Direction,
    pub(crate) buffer: HeldBuffer<B>,
}

impl<B> LiveMapping<B> {
    /// Creates the mapping of `buffer` at `range` for the attachment `at`.
    #[inline]
    pub(crate) fn new(at: &Attachment, range: IovaRange, direction: Direction, buffer: B) -> Self {
        Self {
            range,
            domain_handle: at.domain_handle,
            direction,
            buffer: ManuallyDrop::new(buffer),
        }
    }

    /// Returns the burst that the unmap of this mapping belongs to, if it is in `ring`.
    #[inline]
    pub(crate) fn burst_key(&self, ring: RingId) -> BurstKey {
        BurstKey {
            ring,
            direction: self.direction,
        }
    }

    /// Creates the entry that the flush policy receives after the space has cleared the mapping.
    #[inline]
    pub(crate) fn into_pending_unmap<R>(self, result: R, ring: RingId) -> PendingUnmap<R, B> {
        PendingUnmap {
            result,
            burst_key: self.burst_key(ring),
            domain_handle: self.domain_handle,
            buffer: self.buffer,
        }
    }

    /// Returns the buffer of a mapping whose unmap was rejected.
    #[cold]
    pub(crate) fn into_still_mapped(self) -> StillMapped<B> {
        StillMapped(self.buffer)
    }

    /// Returns the buffer. The caller guarantees that no device can reach it.
    #[inline]
    pub(crate) fn into_buffer(self) -> B {
        ManuallyDrop::into_inner(self.buffer)
    }
}

/// A live mapping. It owns the driver's `buffer` until unmap returns it, so the driver cannot touch
/// or free memory under DMA by accident. Dropping a mapping leaks its buffer, because the device
/// still reaches it. `B` is the embedder's representation of a buffer: a pinned page, an index, or
/// `()`.
#[must_use = "a mapping that is dropped stays reachable by the device for ever"]
#[derive(Debug, PartialEq, Eq)]
pub struct Mapping<B> {
    pub(crate) live: LiveMapping<B>,
    pub(crate) bounce: Option<BounceSlot>,
}

impl<B> Mapping<B> {
    /// Returns the DMA address for the device: the first byte, at the buffer's offset in its page.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.live.range.start()
    }

    /// Returns the mapped bytes of the I/O virtual address space.
    #[inline]
    pub fn range(&self) -> IovaRange {
        self.live.range
    }

    /// Returns the embedder's representation of the buffer.
    #[inline]
    pub fn buffer(&self) -> &B {
        &self.live.buffer
    }

    /// Returns the direction.
    #[inline]
    pub fn direction(&self) -> Direction {
        self.live.direction
    }

    /// Returns the domain that maps the buffer.
    #[inline]
    pub fn domain(&self) -> DomainId {
        self.live.domain_handle.domain()
    }

    /// Returns the bounce slot that the device uses in place of the buffer. `None` if the buffer is
    /// not bounced.
    #[inline]
    pub fn bounce(&self) -> Option<&BounceSlot> {
        self.bounce.as_ref()
    }

    /// Rebuilds the mapping of device `at` from a driver's own records. For embedders whose
    /// interface passes addresses (Linux's `dma_unmap_page`). Unmap rejects an address that is not
    /// mapped. A bounced mapping cannot be claimed.
    ///
    /// `range` must be the range of one whole mapping. The allocator decides what a partial range
    /// does:
    ///
    /// - Tree allocators know the allocated ranges, and unmap rejects a partial one.
    /// - A bitmap frees page by page. The given part is unmapped and freed; the remaining part
    ///   stays mapped and can be claimed.
    /// - Magazines trust the caller, as Linux does. After a wrong size they allocate addresses that
    ///   are still mapped, and a later map fails with
    ///   [`AlreadyMapped`](ringfence_pgtable::MapError::AlreadyMapped). No device gains access that
    ///   it should not have. Debug builds withhold such addresses instead.
    ///
    /// An embedder that cannot trust its callers should keep the mappings themselves.
    ///
    /// A table in another machine ([`IoPageTable::is_mapped`](crate::space::IoPageTable::is_mapped)
    /// is `None`) rejects nothing. With such a table, tree allocators still reject an address that
    /// is not allocated. With other allocators the layer asks the host to unmap it, and the host's
    /// rejection ends the channel.
    #[inline]
    pub fn claim(at: &Attachment, range: IovaRange, direction: Direction, buffer: B) -> Self {
        Self {
            live: LiveMapping::new(at, range, direction, buffer),
            bounce: None,
        }
    }
}

/// The addresses of a new mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapResult {
    /// The bytes in the I/O virtual address space, from the first byte of the first piece to the
    /// last byte of the last piece.
    pub range: IovaRange,
    /// Number of steps of the allocator's search.
    pub steps: u32,
}

/// A run of slots of a bounce pool that holds the device's copy of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BounceSlot {
    pub(crate) word: u32,
    pub(crate) first: u8,
    pub(crate) count: u8,
    /// The device's copy, at the buffer's offset in the first slot.
    pub(crate) copy: PhysRange,
    /// The driver's memory.
    pub(crate) original: PhysRange,
}

impl BounceSlot {
    /// Returns the memory that the device uses.
    pub fn copy(&self) -> PhysRange {
        self.copy
    }

    /// Returns the driver's memory.
    pub fn original(&self) -> PhysRange {
        self.original
    }
}

/// One entry of the list that the device receives for a scatterlist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaSegment {
    /// The bytes of the I/O virtual address space.
    pub range: IovaRange,
}
