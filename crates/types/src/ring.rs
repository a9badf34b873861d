//! Addresses of a ring IOMMU: a ring, a slot of the ring, and an offset into the slot's buffer
//! (rIOMMU Fig. 9d, "rIOVA").

use core::fmt;

use crate::{Iova, Pfn, PfnRange};

/// Bits 0..=29: the offset.
const OFFSET_BITS: u32 = 30;
/// Bits 30..=47: the slot ("rentry").
const SLOT_BITS: u32 = 18;
/// Bits 48..=63: the ring ("rid").
const RING_SHIFT: u32 = OFFSET_BITS + SLOT_BITS;
const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;
const SLOT_MASK: u64 = (1 << SLOT_BITS) - 1;
const PAGE_SHIFT: u32 = 12;

/// Index of a ring table among the ring tables of a device ("rid").
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct RingId(u16);

impl RingId {
    /// Wraps a raw index.
    #[inline]
    pub const fn new(raw: u16) -> Self {
        Self(raw)
    }

    /// Returns the raw index.
    #[inline]
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Returns all pages whose addresses select this ring: 2^48 bytes.
    #[inline]
    pub const fn pages(self) -> PfnRange {
        span((self.0 as u64) << RING_SHIFT, RING_SHIFT)
    }
}

impl fmt::Display for RingId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Index of an entry of a ring table ("rentry"), 18 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct RingSlot(u32);

impl RingSlot {
    /// The first slot.
    pub const FIRST: Self = Self(0);
    /// The highest index that an address can encode.
    pub const MAX: Self = Self(SLOT_MASK as u32);

    /// Wraps a raw index. `None` if it does not fit in 18 bits.
    #[inline]
    pub const fn new(raw: u32) -> Option<Self> {
        if raw > Self::MAX.0 {
            return None;
        }
        Some(Self(raw))
    }

    /// Returns the raw index.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the next slot in a table of `entries` entries. The last slot, and any slot beyond
    /// the table, wraps to the first.
    #[inline]
    pub const fn next(self, entries: u32) -> Self {
        // The result fits in 18 bits: a slot is at most MAX, and MAX wraps to the first.
        let next = self.0.wrapping_add(1);
        if next < entries && next <= Self::MAX.0 {
            Self(next)
        } else {
            Self::FIRST
        }
    }
}

impl fmt::Display for RingSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// An address of a ring IOMMU with its three fields. Every 64-bit address is valid (rIOMMU Fig.
/// 9d).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct RingIova(u64);

impl RingIova {
    /// Width of the offset field; the slot field begins above it.
    pub const OFFSET_BITS: u32 = OFFSET_BITS;

    /// The largest offset, 2^30 - 1.
    pub const MAX_OFFSET: u32 = OFFSET_MASK as u32;

    /// Returns the address of byte `offset` of the buffer in `slot` of `ring`. `None` if the offset
    /// does not fit in 30 bits. The offset may lie beyond the buffer.
    #[inline]
    pub const fn new(ring: RingId, slot: RingSlot, offset: u32) -> Option<Self> {
        if offset > Self::MAX_OFFSET {
            return None;
        }
        Some(Self(Self::start(ring, slot).0 | offset as u64))
    }

    /// Returns the address of the first byte of the buffer in `slot` of `ring`.
    #[inline]
    pub const fn start(ring: RingId, slot: RingSlot) -> Self {
        Self((ring.0 as u64) << RING_SHIFT | (slot.0 as u64) << OFFSET_BITS)
    }

    /// Returns the ring field.
    #[inline]
    pub const fn ring(self) -> RingId {
        RingId((self.0 >> RING_SHIFT) as u16)
    }

    /// Returns the slot field.
    #[inline]
    pub const fn slot(self) -> RingSlot {
        RingSlot((self.0 >> OFFSET_BITS & SLOT_MASK) as u32)
    }

    /// Returns the offset from the start of the buffer, in bytes.
    #[inline]
    pub const fn offset(self) -> u32 {
        (self.0 & OFFSET_MASK) as u32
    }

    /// Returns the address as an I/O virtual address.
    #[inline]
    pub const fn iova(self) -> Iova {
        Iova::new(self.0)
    }

    /// Returns all pages whose addresses select this slot: 2^30 bytes, whatever the size of the
    /// buffer.
    #[inline]
    pub const fn slot_pages(self) -> PfnRange {
        span(self.0 & !OFFSET_MASK, OFFSET_BITS)
    }
}

/// Returns the pages of the `2^bits` bytes from `start`. `start` must be a multiple of `2^bits`.
#[inline]
const fn span(start: u64, bits: u32) -> PfnRange {
    PfnRange::spanning(
        Pfn::new(start >> PAGE_SHIFT),
        Pfn::new((start >> PAGE_SHIFT) | ((1 << (bits - PAGE_SHIFT)) - 1)),
    )
}

impl From<Iova> for RingIova {
    #[inline]
    fn from(iova: Iova) -> Self {
        Self(iova.get())
    }
}

impl From<RingIova> for Iova {
    #[inline]
    fn from(iova: RingIova) -> Self {
        iova.iova()
    }
}

impl fmt::Debug for RingIova {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ring {} slot {} offset {:#x}",
            self.ring(),
            self.slot(),
            self.offset()
        )
    }
}

impl fmt::Display for RingIova {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_those_of_figure_9d() {
        // Computed by hand: ring << 48 | slot << 30 | offset.
        let cases = [
            (0, 0, 0, 0x0000_0000_0000_0000),
            (0, 0, 0x3fff_ffff, 0x0000_0000_3fff_ffff),
            (0, 1, 0, 0x0000_0000_4000_0000),
            (0, 0x3_ffff, 0, 0x0000_ffff_c000_0000),
            (1, 0, 0, 0x0001_0000_0000_0000),
            (0xffff, 0, 0, 0xffff_0000_0000_0000),
            (0x1234, 0x2_5678, 0x2abc_def0, 0x1234_959e_2abc_def0),
            (0xffff, 0x3_ffff, 0x3fff_ffff, u64::MAX),
        ];
        for (ring, slot, offset, raw) in cases {
            let (ring, slot) = (RingId::new(ring), RingSlot::new(slot).unwrap());
            let made = RingIova::new(ring, slot, offset).unwrap();
            assert_eq!(made.iova(), Iova::new(raw), "{made}");
            let read = RingIova::from(Iova::new(raw));
            assert_eq!(
                (read.ring(), read.slot(), read.offset()),
                (ring, slot, offset)
            );
            assert!(
                made.slot_pages().contains(
                    &PfnRange::inclusive(
                        Pfn::containing(made.iova()),
                        Pfn::containing(made.iova())
                    )
                    .unwrap()
                )
            );
        }
    }

    #[test]
    fn fields_that_do_not_fit_are_refused() {
        assert_eq!(RingSlot::new(1 << 18), None);
        assert_eq!(RingSlot::new((1 << 18) - 1), Some(RingSlot::MAX));
        let (ring, slot) = (RingId::new(3), RingSlot::FIRST);
        assert_eq!(RingIova::new(ring, slot, 1 << 30), None);
        assert!(RingIova::new(ring, slot, (1 << 30) - 1).is_some());
    }

    #[test]
    fn slots_follow_each_other_round_the_table() {
        let next = |slot, entries| RingSlot::new(slot).unwrap().next(entries).get();
        assert_eq!(
            [(0, 1), (0, 2), (1, 2), (6, 8), (7, 8), (9, 8), (0, 0)].map(|(s, n)| next(s, n)),
            [0, 1, 0, 7, 0, 0, 0]
        );
        assert_eq!(next((1 << 18) - 1, u32::MAX), 0);
    }

    #[test]
    fn pages_of_rings_and_slots_meet_without_overlap() {
        let start = |ring, slot| RingIova::start(RingId::new(ring), RingSlot::new(slot).unwrap());
        let slot = start(7, 0x3_ffff).slot_pages();
        assert_eq!(slot.pages(), 1 << 18);
        assert_eq!(slot.hi(), RingId::new(7).pages().hi());
        assert_eq!(start(7, 0).slot_pages().lo(), RingId::new(7).pages().lo());
        assert_eq!(
            slot.hi().get() + 1,
            start(8, 0).slot_pages().lo().get(),
            "the next ring"
        );
        assert_eq!(RingId::new(u16::MAX).pages().hi(), Pfn::MAX);
    }
}
