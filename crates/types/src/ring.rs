//! Addresses of a ring IOMMU: a ring, a slot of it, an offset into the buffer behind it (rIOMMU
//! Fig. 9d, "rIOVA").

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

/// Index of a ring table among those of its device ("rid").
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct RingId(u16);

impl RingId {
    /// From the raw index.
    #[inline]
    pub const fn new(raw: u16) -> Self {
        Self(raw)
    }

    /// The raw index.
    #[inline]
    pub const fn get(self) -> u16 {
        self.0
    }

    /// All pages whose addresses name this ring: 2^48 bytes.
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
    /// The highest index that an address can name.
    pub const MAX: Self = Self(SLOT_MASK as u32);

    /// From the raw index; `None` if it takes more than 18 bits.
    #[inline]
    pub const fn new(raw: u32) -> Option<Self> {
        if raw > Self::MAX.0 {
            return None;
        }
        Some(Self(raw))
    }

    /// The raw index.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The slot after this one in a table of `entries` entries: the first one after the last, and
    /// after any slot beyond the table.
    #[inline]
    pub const fn next(self, entries: u32) -> Self {
        // Within 18 bits: a slot is at most MAX, and one that is MAX is not followed by a greater
        // one.
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

/// An address of a ring IOMMU, taken apart. Every 64-bit address is one (rIOMMU Fig. 9d).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct RingIova(u64);

impl RingIova {
    /// Bits of the offset; those of the slot are above them.
    pub const OFFSET_BITS: u32 = OFFSET_BITS;

    /// The greatest offset, 2^30 - 1.
    pub const MAX_OFFSET: u32 = OFFSET_MASK as u32;

    /// Byte `offset` of the buffer in `slot` of `ring`; `None` if the offset takes more than 30
    /// bits. It need not lie inside the buffer.
    #[inline]
    pub const fn new(ring: RingId, slot: RingSlot, offset: u32) -> Option<Self> {
        if offset > Self::MAX_OFFSET {
            return None;
        }
        Some(Self(Self::start(ring, slot).0 | offset as u64))
    }

    /// The first byte of the buffer in `slot` of `ring`.
    #[inline]
    pub const fn start(ring: RingId, slot: RingSlot) -> Self {
        Self((ring.0 as u64) << RING_SHIFT | (slot.0 as u64) << OFFSET_BITS)
    }

    /// The ring.
    #[inline]
    pub const fn ring(self) -> RingId {
        RingId((self.0 >> RING_SHIFT) as u16)
    }

    /// The slot.
    #[inline]
    pub const fn slot(self) -> RingSlot {
        RingSlot((self.0 >> OFFSET_BITS & SLOT_MASK) as u32)
    }

    /// Bytes from the start of the buffer.
    #[inline]
    pub const fn offset(self) -> u32 {
        (self.0 & OFFSET_MASK) as u32
    }

    /// As the device sees it.
    #[inline]
    pub const fn iova(self) -> Iova {
        Iova::new(self.0)
    }

    /// All pages whose addresses name this slot: 2^30 bytes, whatever the size of the buffer.
    #[inline]
    pub const fn slot_pages(self) -> PfnRange {
        span(self.0 & !OFFSET_MASK, OFFSET_BITS)
    }
}

/// The pages of the `2^bits` bytes from `start`, which is a multiple of that.
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
        // By hand: ring << 48 | slot << 30 | offset.
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
