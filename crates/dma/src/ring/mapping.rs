//! What the driver of an owned ring holds of each mapping.

use core::fmt;
use core::mem::ManuallyDrop;

use ringfence_types::{DomainId, Iova, IovaRange, RequesterId, RingIova};

use super::owned::OwnedRing;
use crate::mapping::HeldBuffer;

/// A domain and a device as mappings keep them: in one word, as wide as most names of buffers,
/// since a mapping with a gap is put together bit by bit wherever it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RingTag(u32);

impl RingTag {
    /// Of the rings of `device` in `domain`.
    #[inline]
    pub(super) const fn new(domain: DomainId, device: RequesterId) -> Self {
        Self((domain.get() as u32) << 16 | device.get() as u32)
    }
}

/// A live mapping of an [`OwnedRing`]; owns the driver's buffer, and leaks it if dropped.
#[must_use = "a mapping that is dropped stays reachable by the device for ever"]
#[derive(Debug, PartialEq, Eq)]
pub struct RingMapping<B> {
    /// Behind the buffer's last byte: slot and length in one word, since offsets count from the
    /// buffer's start.
    end: RingIova,
    tag: RingTag,
    buffer: HeldBuffer<B>,
}

impl<B> RingMapping<B> {
    /// The mapping of `buffer` that ends before `end`, in a ring with this tag.
    #[inline]
    pub(super) fn new(end: RingIova, tag: RingTag, buffer: B) -> Self {
        Self {
            end,
            tag,
            buffer: ManuallyDrop::new(buffer),
        }
    }

    /// Behind the buffer's last byte.
    #[inline]
    pub(super) fn end(&self) -> RingIova {
        self.end
    }

    /// Whether its ring has this tag.
    #[inline]
    pub(super) fn is_of(&self, tag: RingTag) -> bool {
        self.tag == tag
    }

    /// The buffer, once the mapping is gone.
    #[inline]
    pub(super) fn into_held_buffer(self) -> HeldBuffer<B> {
        self.buffer
    }

    /// What the device is told: the buffer's first byte. A driver may move the offset within the
    /// buffer (section 4, "Software").
    #[inline]
    pub fn iova(&self) -> Iova {
        RingIova::start(self.end.ring(), self.end.slot()).iova()
    }

    /// The device-visible bytes.
    #[inline]
    pub fn range(&self) -> Option<IovaRange> {
        IovaRange::new(self.iova(), u64::from(self.end.offset()))
    }

    /// What stands for the buffer.
    #[inline]
    pub fn buffer(&self) -> &B {
        &self.buffer
    }

    /// A mapping of `ring` from what a driver remembers of it, for embedders whose interface passes
    /// addresses; `None` if no slot takes that many bytes, or no buffer begins there. What is not
    /// mapped is refused by unmap.
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

/// A mapping that was not unmapped: none of this ring is live exactly there. Nothing has changed.
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
