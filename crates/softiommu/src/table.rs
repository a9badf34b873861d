//! A domain's radix table: memory, geometry, entries.
//!
//! All tables of a domain lie in one block of words. An entry is one word:
//!
//! | entry | absent | present |
//! |---|---|---|
//! | leaf | 0 | page address; permissions in bits 0 and 1 as in a VT-d second-stage entry |
//! | other | 0 | index of the first word of the next table |
//!
//! The root begins at word 0. No entry points to it, so 0 can mean absent. Code accesses words only
//! by checked index. A corrupt entry can therefore cause a wrong translation, but never an invalid
//! memory access.

use ringfence_types::{Iova, IovaRange, PageSize, Permissions, PhysAddr};

use crate::sync::{AtomicU64, INDEX_BITS, Ordering, zeroed};

/// Number of entries in a table.
pub(crate) const ENTRIES: usize = 1 << INDEX_BITS;

/// Binary logarithm of the page size.
pub(crate) const GRANULE_SHIFT: u32 = PageSize::Size4K.shift();

/// Binary logarithm of the number of bytes that a leaf table translates.
pub(crate) const TABLE_SHIFT: u32 = GRANULE_SHIFT + INDEX_BITS;

const PERMISSION_BITS: u64 = Permissions::READ_WRITE.bits();

/// Number of I/O virtual address bits that a table translates. Accesses to higher addresses fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Width(u32);

impl Width {
    /// 39 bits, three levels: one level fewer than most IOMMUs.
    pub const BITS_39: Self = Self(39);
    /// 48 bits, four levels, as in most IOMMUs.
    pub const BITS_48: Self = Self(48);

    /// Creates a width of `bits` bits; `None` unless `bits` is between 13 and 64.
    pub const fn new(bits: u32) -> Option<Self> {
        if bits > GRANULE_SHIFT && bits <= u64::BITS {
            Some(Self(bits))
        } else {
            None
        }
    }

    /// Returns the number of bits.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Returns the number of levels of a table of this width.
    pub(crate) const fn levels(self) -> u32 {
        (self.0 - GRANULE_SHIFT).div_ceil(INDEX_BITS)
    }

    /// Returns true if the whole range can be translated.
    #[inline]
    pub(crate) const fn holds(self, range: &IovaRange) -> bool {
        // Two shifts, because a shift by 64 bits overflows.
        (range.last().get() >> (self.0 - 1)) >> 1 == 0
    }

    /// Returns the part of `range` that can be translated.
    #[inline]
    pub(crate) fn part(self, range: &IovaRange) -> Option<IovaRange> {
        let highest = Iova::new(u64::MAX >> (u64::BITS - self.0));
        IovaRange::inclusive(range.start(), range.last().min(highest))
    }
}

/// The state of a domain that readers and the writer share.
pub(crate) struct Table {
    words: Box<[AtomicU64]>,
    width: Width,
    /// Bit position of the root's index in an address.
    top: u32,
}

impl Table {
    /// Creates an empty table with memory for at most `tables` tables, including the root, and at
    /// least for the root. `None` if there is no memory for them.
    pub(crate) fn new(width: Width, tables: usize) -> Option<Self> {
        Some(Self {
            words: zeroed(tables.max(1).checked_mul(ENTRIES)?)?,
            width,
            top: GRANULE_SHIFT + (width.levels() - 1) * INDEX_BITS,
        })
    }

    /// Returns the maximum number of tables, including the root.
    pub(crate) fn capacity(&self) -> usize {
        self.words.len() / ENTRIES
    }

    pub(crate) fn width(&self) -> Width {
        self.width
    }

    /// Returns the bit position of the root's index in an address.
    #[inline]
    pub(crate) fn top(&self) -> u32 {
        self.top
    }

    /// Returns all words.
    #[inline]
    pub(crate) fn all(&self) -> &[AtomicU64] {
        &self.words
    }

    /// Returns the word at `at`; `None` outside the block, to which no valid entry points.
    #[inline]
    pub(crate) fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.words.get(at)
    }
}

/// Returns the table index of `address` at `shift`.
#[inline]
pub(crate) const fn index(address: u64, shift: u32) -> usize {
    (address >> shift) as usize & (ENTRIES - 1)
}

/// A leaf entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Leaf(u64);

impl Leaf {
    /// The word of an absent entry.
    pub(crate) const ABSENT: u64 = 0;

    /// An absent entry.
    pub(crate) const NONE: Self = Self(Self::ABSENT);

    /// Creates an entry. `page` must be page-aligned.
    #[inline]
    pub(crate) const fn new(page: PhysAddr, permissions: Permissions) -> Self {
        Self(page.get() | permissions.bits())
    }

    /// R3. Reads an entry as a reader.
    #[inline]
    pub(crate) fn read(word: &AtomicU64) -> Self {
        // Acquire: a reader that sees a mapping sees all writes to the page before the map.
        Self(word.load(Ordering::Acquire))
    }

    /// Reads an entry as the writer, the only thread that stores.
    #[inline]
    pub(crate) fn peek(word: &AtomicU64) -> Self {
        Self(word.load(Ordering::Relaxed))
    }

    /// Stores the entry.
    #[inline]
    pub(crate) fn put(self, word: &AtomicU64) {
        // Release: see R3.
        word.store(self.0, Ordering::Release);
    }

    /// W1. Clears an entry. Returns true if it was present.
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

    /// Returns true if the entry is present and allows all of `required`.
    #[inline]
    pub(crate) const fn allows(self, required: Permissions) -> bool {
        self.0 & required.bits() == required.bits()
    }

    /// Returns the address of the page.
    #[inline]
    pub(crate) const fn page(self) -> PhysAddr {
        PhysAddr::new(self.0 & !PERMISSION_BITS)
    }
}
