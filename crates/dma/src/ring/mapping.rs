//! The token that the driver of an owned ring holds for each mapping.

use core::fmt;
use core::mem::ManuallyDrop;

use ringfence_types::{DomainId, Iova, IovaRange, RequesterId, RingIova};

use super::owned::OwnedRing;
use crate::token::HeldBuffer;

/// A domain and a device in one word. Its size matches most buffer types, because the CPU stores a
/// mapping with a gap field by field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RingTag(u32);

impl RingTag {
    /// Creates the tag of the rings of `device` in `domain`.
    #[inline]
    pub(super) const fn new(domain: DomainId, device: RequesterId) -> Self {
        Self((domain.get() as u32) << 16 | device.get() as u32)
    }
}

/// A live mapping of an [`OwnedRing`]. It owns the driver's buffer. Dropping it leaks the buffer.
#[must_use = "a mapping that is dropped stays reachable by the device for ever"]
#[derive(Debug, PartialEq, Eq)]
pub struct RingMapping<B> {
    /// The address after the buffer's last byte. It encodes slot and length in one word, because
    /// offsets count from the buffer's start.
    end: RingIova,
    tag: RingTag,
    buffer: HeldBuffer<B>,
}

impl<B> RingMapping<B> {
    /// Creates the mapping of `buffer` that ends before `end`, in a ring with this tag.
    #[inline]
    pub(super) fn new(end: RingIova, tag: RingTag, buffer: B) -> Self {
        Self {
            end,
            tag,
            buffer: ManuallyDrop::new(buffer),
        }
    }

    /// Returns the address after the buffer's last byte.
    #[inline]
    pub(super) fn end(&self) -> RingIova {
        self.end
    }

    /// Returns true if the mapping's ring has this tag.
    #[inline]
    pub(super) fn is_of(&self, tag: RingTag) -> bool {
        self.tag == tag
    }

    /// Returns the buffer. The caller has cleared the mapping.
    #[inline]
    pub(super) fn into_held_buffer(self) -> HeldBuffer<B> {
        self.buffer
    }

    /// Returns the DMA address for the device: the buffer's first byte. A driver may change the
    /// offset within the buffer (section 4, "Software").
    #[inline]
    pub fn iova(&self) -> Iova {
        RingIova::start(self.end.ring(), self.end.slot()).iova()
    }

    /// Returns the mapped bytes of the I/O virtual address space.
    #[inline]
    pub fn range(&self) -> Option<IovaRange> {
        IovaRange::new(self.iova(), u64::from(self.end.offset()))
    }

    /// Returns the embedder's representation of the buffer.
    #[inline]
    pub fn buffer(&self) -> &B {
        &self.buffer
    }

    /// Rebuilds a mapping of `ring` from a driver's own records, for embedders whose interface
    /// passes addresses. `None` if a slot cannot hold that many bytes, or if the range does not
    /// begin at the start of a slot. Unmap rejects a range that is not mapped.
    #[inline]
    pub fn claim(ring: &OwnedRing<'_, B>, range: IovaRange, buffer: B) -> Option<Self> {
        let start = RingIova::from(range.start());
        let bytes = u32::try_from(range.bytes()).ok()?;
        if start.offset() != 0 {
            return None;
        }
        let end = RingIova::new(start.ring(), start.slot(), bytes)?;
        Some(Self::new(end, ring.tag(), buffer))
    }
}

/// A mapping that was not unmapped, because no live mapping of this ring has its range. Nothing
/// changed.
#[derive(Debug)]
pub struct RingUnmapError<B>(pub RingMapping<B>);

impl<B> fmt::Display for RingUnmapError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mapping = &self.0;
        write!(
            f,
            "no mapping of {} bytes at {} in this ring",
            mapping.end.offset(),
            mapping.iova()
        )
    }
}

impl<B: fmt::Debug> core::error::Error for RingUnmapError<B> {}
