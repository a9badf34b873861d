//! The state of one page of a shadow pool.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ringfence_types::{Iova, IovaRange, Permissions, PhysAddr, PhysRange};

use crate::space::GRANULE;

/// Bits of a piece word that hold its number of bytes. A slot has 2^24 bytes at most.
const BYTES: u32 = (1 << 28) - 1;
/// Flag of a piece word: the piece is the first one of its mapping.
const FIRST: u32 = 1 << 28;
/// Flag of a piece word: another piece of the mapping begins on the page after this one.
const MORE: u32 = 1 << 29;
/// Flag of a piece word: the piece is a part of a buffer whose other pages are mapped themselves.
const PART: u32 = 1 << 30;

/// The position of a piece in its mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PieceFlags(u32);

impl PieceFlags {
    /// The piece is the whole mapping.
    pub(super) const ONLY: Self = Self(FIRST);
    /// The piece is a part of a buffer whose other pages are mapped themselves. Its page begins no
    /// mapping.
    pub(super) const PART: Self = Self(PART);

    /// Returns the flags of a piece of a list.
    pub(super) const fn of_list(is_first: bool, more: bool) -> Self {
        let first = if is_first { FIRST } else { 0 };
        Self(if more { first | MORE } else { first })
    }
}

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
    /// Number of free lists. Orders have four bits, so that an index needs no multiplication.
    pub(super) const LISTS: usize = 64;

    /// Returns the kind of the smallest slot of `pages` pages; `None` if no slot is so large.
    #[inline]
    pub(super) fn for_pages(pages: u64, permissions: Permissions) -> Option<Self> {
        // Most buffers have one page, and AMD's bit scan takes 8 micro-operations.
        let order = match pages {
            1 => 0,
            _ => u64::BITS - pages.checked_sub(1)?.leading_zeros(),
        };
        ((order as usize) < ORDERS).then_some(Self {
            order: order as u8,
            permissions,
        })
    }

    /// Returns the number of pages.
    #[inline]
    pub(super) const fn pages(self) -> u32 {
        1 << (self.order & 31)
    }

    /// Returns the index of the free list, below [`LISTS`](Self::LISTS).
    #[inline]
    pub(super) const fn list(self) -> usize {
        self.word() as usize & (Self::LISTS - 1)
    }

    /// Returns a word that is not 0.
    #[inline]
    const fn word(self) -> u32 {
        // Read, write, or both: 1 to 3.
        (self.permissions.bits() as u32) << 4 | self.order as u32
    }

    #[inline]
    const fn from_word(word: u32) -> Option<Self> {
        match Permissions::from_bits((word >> 4) as u64) {
            Some(permissions) => Some(Self {
                order: (word & 15) as u8,
                permissions,
            }),
            None => None,
        }
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

    /// Returns the first `bytes` bytes.
    #[inline]
    pub(super) const fn first(bytes: u64) -> Self {
        Self {
            lo: 0,
            hi: bytes as u32,
        }
    }

    /// Returns the number of bytes.
    #[inline]
    pub(super) const fn bytes(self) -> u32 {
        self.hi.saturating_sub(self.lo)
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
pub(super) struct BufferPart {
    /// First byte of the buffer's part.
    pub(super) start: PhysAddr,
    /// Number of bytes, not 0.
    pub(super) bytes: u64,
    /// True if another piece of the mapping follows.
    pub(super) more: bool,
}

impl BufferPart {
    /// Returns the number of pages of the copy.
    #[inline]
    pub(super) fn pages(&self) -> u32 {
        let end = self.offset().wrapping_add(self.bytes);
        end.div_ceil(GRANULE.bytes()) as u32
    }

    /// Returns the offset of the first byte in its page, in the buffer and in the copy.
    #[inline]
    pub(super) fn offset(&self) -> u64 {
        self.start.offset_in(GRANULE.bytes())
    }

    /// Returns the bytes of a piece mapped at `start` that lie in `part`.
    pub(super) fn overlap(&self, start: Iova, part: IovaRange) -> Extent {
        let within = |at: u64| at.saturating_sub(start.get()).min(self.bytes) as u32;
        Extent {
            lo: within(part.start().get()),
            hi: within(part.last().get().saturating_add(1)),
        }
    }
}

/// The state of one page of a pool, half a cache line. Only the owner of the page's slot changes
/// it: a CPU that has taken the slot from a free list, or the holder of the mapping. The locks of
/// the free lists order the accesses of different owners.
#[derive(Debug, Default)]
#[repr(align(32))]
pub(super) struct Page {
    /// First byte of the piece that begins on this page.
    original: AtomicU64,
    /// Extent of that piece that the CPU has received by a sync.
    synced: AtomicU64,
    /// Bytes of that piece, with flags; 0 without one.
    piece: AtomicU32,
    /// Bytes of the mapping that its unmap copies; of the first page of a mapping. `u32::MAX` for
    /// all.
    received: AtomicU32,
    /// Extent of the page that may hold bytes of a buffer, with ends of 16 bits.
    residue: AtomicU32,
    /// Kind of the slot that begins on this page; 0 for other pages.
    kind: AtomicU32,
}

const _: () = assert!(size_of::<Page>() == 32);

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
    pub(super) fn put(&self, original: PhysRange, flags: PieceFlags) {
        let word = (original.bytes() as u32 & BYTES) | flags.0;
        self.original
            .store(original.start().get(), Ordering::Relaxed);
        self.synced.store(0, Ordering::Relaxed);
        self.received.store(u32::MAX, Ordering::Relaxed);
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

    /// Returns true if the slot that begins on this page holds a copy.
    #[inline]
    pub(super) fn begins_copy(&self) -> bool {
        self.piece.load(Ordering::Relaxed) & (FIRST | PART) != 0
    }

    /// Returns the piece that begins on this page.
    #[inline]
    pub(super) fn piece(&self) -> Option<BufferPart> {
        self.piece_of(self.piece.load(Ordering::Relaxed))
    }

    /// Returns the kind of the slot and the first piece of the mapping that begins on this page.
    #[inline]
    pub(super) fn mapping(&self) -> Option<(SlotKind, BufferPart)> {
        let word = self.piece.load(Ordering::Relaxed);
        if word & FIRST == 0 {
            return None;
        }
        Some((self.kind()?, self.piece_of(word)?))
    }

    #[inline]
    fn piece_of(&self, word: u32) -> Option<BufferPart> {
        let bytes = word & BYTES;
        (bytes != 0).then(|| BufferPart {
            start: PhysAddr::new(self.original.load(Ordering::Relaxed)),
            bytes: u64::from(bytes),
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

    /// Returns the bytes of the mapping that its unmap copies; more than it has for all.
    #[inline]
    pub(super) fn received(&self) -> u64 {
        u64::from(self.received.load(Ordering::Relaxed))
    }

    #[inline]
    pub(super) fn set_received(&self, bytes: u64) {
        let bytes = bytes.min(u64::from(u32::MAX)) as u32;
        self.received.store(bytes, Ordering::Relaxed);
    }

    /// Replaces the residue of the page. Returns the previous one if it was another.
    #[inline]
    pub(super) fn replace_residue(&self, extent: Extent) -> Option<Extent> {
        let old = self.residue.load(Ordering::Relaxed);
        let new = extent.hi << 16 | extent.lo;
        if old == new {
            return None;
        }
        self.residue.store(new, Ordering::Relaxed);
        Some(Extent {
            lo: old & 0xffff,
            hi: old >> 16,
        })
    }
}
