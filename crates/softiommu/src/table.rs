//! A domain's radix table: its memory, its shape, its entries.
//!
//! All tables of a domain lie in one block of words. An entry is a word:
//!
//! | entry | absent | present |
//! |---|---|---|
//! | of the last level | 0 | address of the page, permissions in bits 0 and 1 as in a VT-d second-stage entry |
//! | of any other | 0 | index of the first word of the next table |
//!
//! The root begins at word 0, so no entry refers to it, and 0 is free to mean absent. Words are
//! reached by checked index only: a reader that is wrong about a table is wrong about a
//! translation, never about memory.

use ringfence_types::{Iova, IovaRange, PageSize, Permissions, PhysAddr};

use crate::sync::{AtomicU64, INDEX_BITS, Ordering, zeroed};

/// Entries of one table.
pub(crate) const ENTRIES: usize = 1 << INDEX_BITS;

/// Binary logarithm of the granule.
pub(crate) const GRANULE_SHIFT: u32 = PageSize::Size4K.shift();

/// Binary logarithm of the bytes that one table of the last level translates.
pub(crate) const TABLE_SHIFT: u32 = GRANULE_SHIFT + INDEX_BITS;

const PERMISSION_BITS: u64 = Permissions::READ_WRITE.bits();

/// How many bits of an I/O virtual address a table translates; every address beyond faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Width(u32);

impl Width {
    /// 39 bits, three levels: what one level less costs at best.
    pub const BITS_39: Self = Self(39);
    /// 48 bits, four levels: what most IOMMUs have.
    pub const BITS_48: Self = Self(48);

    /// `bits` bits; `None` unless there are between 13 and 64.
    pub const fn new(bits: u32) -> Option<Self> {
        if bits > GRANULE_SHIFT && bits <= u64::BITS {
            Some(Self(bits))
        } else {
            None
        }
    }

    /// The number of bits.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Levels of a table this wide.
    pub(crate) const fn levels(self) -> u32 {
        (self.0 - GRANULE_SHIFT).div_ceil(INDEX_BITS)
    }

    /// Whether the whole range can be translated.
    #[inline]
    pub(crate) const fn holds(self, range: &IovaRange) -> bool {
        // Twice, because a shift by all 64 bits is none.
        (range.last().get() >> (self.0 - 1)) >> 1 == 0
    }

    /// The part of `range` that can be translated.
    #[inline]
    pub(crate) fn part(self, range: &IovaRange) -> Option<IovaRange> {
        let highest = Iova::new(u64::MAX >> (u64::BITS - self.0));
        IovaRange::inclusive(range.start(), range.last().min(highest))
    }
}

/// What readers and the writer share of a domain.
pub(crate) struct Table {
    words: Box<[AtomicU64]>,
    width: Width,
    /// Position of the root's index in an address.
    top: u32,
}

impl Table {
    /// An empty table of at most `tables` tables, the root among them; at least the root. `None`
    /// where there is no memory for so many.
    pub(crate) fn new(width: Width, tables: usize) -> Option<Self> {
        Some(Self {
            words: zeroed(tables.max(1).checked_mul(ENTRIES)?)?,
            width,
            top: GRANULE_SHIFT + (width.levels() - 1) * INDEX_BITS,
        })
    }

    /// How many tables there can be, the root included.
    pub(crate) fn capacity(&self) -> usize {
        self.words.len() / ENTRIES
    }

    pub(crate) fn width(&self) -> Width {
        self.width
    }

    /// Position of the root's index in an address.
    #[inline]
    pub(crate) fn top(&self) -> u32 {
        self.top
    }

    /// All words.
    #[inline]
    pub(crate) fn all(&self) -> &[AtomicU64] {
        &self.words
    }

    /// The word at `at`; `None` outside the block, which no entry leads to.
    #[inline]
    pub(crate) fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.words.get(at)
    }
}

/// The index into a table that `address` has at `shift`.
#[inline]
pub(crate) const fn index(address: u64, shift: u32) -> usize {
    (address >> shift) as usize & (ENTRIES - 1)
}

/// An entry of the last level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Leaf(u64);

impl Leaf {
    /// The word of an absent entry.
    pub(crate) const ABSENT: u64 = 0;

    /// An absent entry.
    pub(crate) const NONE: Self = Self(Self::ABSENT);

    /// `page` is aligned to the granule.
    #[inline]
    pub(crate) const fn new(page: PhysAddr, permissions: Permissions) -> Self {
        Self(page.get() | permissions.bits())
    }

    /// R3. What a reader finds in `word`.
    #[inline]
    pub(crate) fn read(word: &AtomicU64) -> Self {
        // Acquire: whoever sees a mapping sees what was done to the page before it was mapped.
        Self(word.load(Ordering::Acquire))
    }

    /// What the writer finds in `word`, where nobody else stores.
    #[inline]
    pub(crate) fn peek(word: &AtomicU64) -> Self {
        Self(word.load(Ordering::Relaxed))
    }

    /// Makes it what readers find in `word`.
    #[inline]
    pub(crate) fn put(self, word: &AtomicU64) {
        // Release: see R3.
        word.store(self.0, Ordering::Release);
    }

    /// W1. Readers find nothing in `word` any more. Whether they did before.
    #[inline]
    pub(crate) fn clear(word: &AtomicU64) -> bool {
        let present = !Self::peek(word).is_absent();
        if present {
            // Relaxed: the wait for readers orders it.
            word.store(Self::ABSENT, Ordering::Relaxed);
        }
        present
    }

    #[inline]
    pub(crate) const fn is_absent(self) -> bool {
        self.0 == Self::ABSENT
    }

    /// Whether the entry is present and allows all of `wanted`.
    #[inline]
    pub(crate) const fn allows(self, wanted: Permissions) -> bool {
        self.0 & wanted.bits() == wanted.bits()
    }

    /// Address of the page.
    #[inline]
    pub(crate) const fn page(self) -> PhysAddr {
        PhysAddr::new(self.0 & !PERMISSION_BITS)
    }
}
