//! The state of one page of a shadow pool.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ringfence_types::{Iova, IovaRange, Permissions, PhysAddr, PhysRange};

use crate::space::GRANULE;

/// Flag of a piece word: the piece is the first one of its mapping.
const FIRST: u64 = 1 << 32;
/// Flag of a piece word: another piece of the mapping begins on the page after this one.
const MORE: u64 = 1 << 33;
/// Flag of a piece word: the piece is a part of a buffer whose other pages are mapped themselves.
const PART: u64 = 1 << 34;

/// Number of slot sizes: 1 to 4096 pages, in powers of two.
pub(super) const ORDERS: usize = 13;

/// The size and the permissions of a slot. They never change: the device keeps its access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlotKind {
    /// Binary logarithm of the number of pages.
    pub(super) order: u8,
    pub(super) permissions: Permissions,
}

impl SlotKind {
    /// Number of values of permission bits; 0 is none.
    pub(super) const PERMISSIONS: usize = 4;

    /// Returns the kind of the smallest slot of `pages` pages; `None` if no slot is so large.
    #[inline]
    pub(super) fn for_pages(pages: u64, permissions: Permissions) -> Option<Self> {
        let order = pages.checked_next_power_of_two()?.trailing_zeros();
        let order = u8::try_from(order).ok()?;
        (usize::from(order) < ORDERS).then_some(Self { order, permissions })
    }

    /// Returns the number of pages.
    #[inline]
    pub(super) const fn pages(self) -> u32 {
        1 << (self.order & 31)
    }

    /// Returns the index of the free list.
    #[inline]
    pub(super) fn list(self) -> usize {
        // Read, write, or both: 1 to 3.
        let permissions = self.permissions.bits() as usize & 3;
        permissions * ORDERS + usize::from(self.order)
    }

    fn word(self) -> u32 {
        u32::from(self.order) << 8 | self.permissions.bits() as u32
    }

    fn from_word(word: u32) -> Option<Self> {
        Some(Self {
            order: (word >> 8) as u8,
            permissions: Permissions::from_bits(u64::from(word & 0xff))?,
        })
    }
}

/// The bytes of a page or of a piece from `lo` up to, but not including, `hi`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Extent {
    pub(super) lo: u32,
    pub(super) hi: u32,
}

impl Extent {
    #[inline]
    pub(super) const fn is_empty(self) -> bool {
        self.lo >= self.hi
    }

    /// Returns the parts before and after `other`, which may be empty.
    #[inline]
    pub(super) fn without(self, other: Self) -> [Self; 2] {
        if other.is_empty() {
            return [self, Self::default()];
        }
        let Self { lo, hi } = self;
        [
            Self {
                lo,
                hi: hi.min(other.lo),
            },
            Self {
                lo: lo.max(other.hi),
                hi,
            },
        ]
    }

    /// Returns the smallest extent that contains both.
    #[inline]
    pub(super) fn hull(self, other: Self) -> Self {
        match (self.is_empty(), other.is_empty()) {
            (true, _) => other,
            (_, true) => self,
            _ => Self {
                lo: self.lo.min(other.lo),
                hi: self.hi.max(other.hi),
            },
        }
    }

    #[inline]
    const fn word(self) -> u64 {
        (self.hi as u64) << 32 | self.lo as u64
    }

    #[inline]
    const fn from_word(word: u64) -> Self {
        Self {
            lo: word as u32,
            hi: (word >> 32) as u32,
        }
    }
}

/// A part of a driver's buffer, from its record in the page of its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) original: PhysRange,
    /// True if another piece of the mapping follows.
    pub(super) more: bool,
}

impl Piece {
    /// Returns the number of pages of the copy.
    #[inline]
    pub(super) fn pages(&self) -> u32 {
        self.original.pages(GRANULE) as u32
    }

    /// Returns the offset of the first byte in its page, in the buffer and in the copy.
    #[inline]
    pub(super) fn offset(&self) -> u64 {
        self.original.start().offset_in(GRANULE.bytes())
    }

    /// Returns the bytes of a piece mapped at `start` that lie in `part`.
    pub(super) fn overlap(&self, start: Iova, part: IovaRange) -> Extent {
        let within = |at: u64| at.saturating_sub(start.get()).min(self.original.bytes()) as u32;
        Extent {
            lo: within(part.start().get()),
            hi: within(part.last().get().saturating_add(1)),
        }
    }
}

/// The state of one page of a pool. Only the owner of the page's slot changes it: a CPU that has
/// taken the slot from a free list, or the holder of the mapping. The locks of the free lists order
/// the accesses of different owners.
#[derive(Debug, Default)]
pub(super) struct Page {
    /// First byte of the piece that begins on this page.
    original: AtomicU64,
    /// Bytes of that piece, with flags; 0 without one.
    piece: AtomicU64,
    /// Extent of that piece that the CPU has received by a sync.
    synced: AtomicU64,
    /// Extent of the page that may hold bytes of a buffer.
    residue: AtomicU64,
    /// Bytes of the mapping that its unmap copies; of the first page of a mapping.
    received: AtomicU64,
    /// Kind of the slot that begins on this page; 0 for other pages.
    kind: AtomicU32,
}

impl Page {
    /// Makes the page the first one of a slot.
    pub(super) fn set_kind(&self, kind: SlotKind) {
        self.kind.store(kind.word(), Ordering::Relaxed);
    }

    /// Returns the kind of the slot that begins on this page.
    #[inline]
    pub(super) fn kind(&self) -> Option<SlotKind> {
        SlotKind::from_word(self.kind.load(Ordering::Relaxed))
    }

    /// Records the piece that begins on this page.
    #[inline]
    pub(super) fn put(&self, original: PhysRange, is_first: bool, more: bool) {
        let first = if is_first { FIRST } else { 0 };
        let more = if more { MORE } else { 0 };
        self.put_flagged(original, first | more);
    }

    /// Records a part of a buffer whose other pages are mapped themselves. The page begins no
    /// mapping.
    #[inline]
    pub(super) fn put_part(&self, original: PhysRange) {
        self.put_flagged(original, PART);
    }

    #[inline]
    fn put_flagged(&self, original: PhysRange, flags: u64) {
        let word = (original.bytes() & u64::from(u32::MAX)) | flags;
        self.original
            .store(original.start().get(), Ordering::Relaxed);
        self.synced.store(0, Ordering::Relaxed);
        self.received.store(u64::MAX, Ordering::Relaxed);
        self.piece.store(word, Ordering::Relaxed);
    }

    /// Records that the driver uses the slot itself, without a piece.
    #[inline]
    pub(super) fn lend(&self) {
        self.piece.store(FIRST, Ordering::Relaxed);
    }

    /// Returns true if the driver uses the slot that begins on this page.
    #[inline]
    pub(super) fn is_lent(&self) -> bool {
        self.piece.load(Ordering::Relaxed) == FIRST
    }

    /// Removes the record of the piece.
    #[inline]
    pub(super) fn clear(&self) {
        self.piece.store(0, Ordering::Relaxed);
    }

    /// Returns true if a mapping or a lent slot begins on this page.
    #[inline]
    pub(super) fn begins_mapping(&self) -> bool {
        self.piece.load(Ordering::Relaxed) & FIRST != 0
    }

    /// Returns true if the slot that begins on this page holds a copy.
    #[inline]
    pub(super) fn begins_copy(&self) -> bool {
        self.piece.load(Ordering::Relaxed) & (FIRST | PART) != 0
    }

    /// Returns the piece that begins on this page.
    #[inline]
    pub(super) fn piece(&self) -> Option<Piece> {
        let word = self.piece.load(Ordering::Relaxed);
        let start = PhysAddr::new(self.original.load(Ordering::Relaxed));
        Some(Piece {
            original: PhysRange::new(start, word & u64::from(u32::MAX))?,
            more: word & MORE != 0,
        })
    }

    #[inline]
    pub(super) fn synced(&self) -> Extent {
        Extent::from_word(self.synced.load(Ordering::Relaxed))
    }

    pub(super) fn set_synced(&self, extent: Extent) {
        self.synced.store(extent.word(), Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    pub(super) fn set_received(&self, bytes: u64) {
        self.received.store(bytes, Ordering::Relaxed);
    }

    /// Replaces the residue of the page and returns the previous one.
    #[inline]
    pub(super) fn replace_residue(&self, extent: Extent) -> Extent {
        let old = self.residue.load(Ordering::Relaxed);
        if old != extent.word() {
            self.residue.store(extent.word(), Ordering::Relaxed);
        }
        Extent::from_word(old)
    }
}
