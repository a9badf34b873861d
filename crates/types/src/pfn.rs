//! Page frame numbers of the I/O virtual address space, the unit of the IOVA allocators.

use core::fmt;

use crate::{Iova, IovaRange, PageSize};

/// Number of a 4 KiB page of the I/O virtual address space ("pfn" in Linux's allocator).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Pfn(u64);

impl Pfn {
    /// The highest page number whose byte address fits in 64 bits.
    pub const MAX: Self = Self(u64::MAX >> 12);

    /// Creates page number `raw`, truncated to 52 bits so that its byte address fits in 64 bits.
    #[inline]
    pub const fn new(raw: u64) -> Self {
        Self(raw & Self::MAX.0)
    }

    /// Returns the page that contains `iova`.
    #[inline]
    pub const fn containing(iova: Iova) -> Self {
        Self(iova.get() >> 12)
    }

    /// Returns the raw page number.
    #[inline]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the address of the page's first byte.
    #[inline]
    pub const fn iova(self) -> Iova {
        Iova::new(self.0 << 12)
    }
}

impl fmt::Display for Pfn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A range `[lo, hi]` of page numbers, both ends included, never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PfnRange {
    lo: Pfn,
    hi: Pfn,
}

impl PfnRange {
    /// Creates the range of `pages` pages from `lo`. `None` if `pages` is zero or the range passes
    /// [`Pfn::MAX`].
    #[inline]
    pub const fn new(lo: Pfn, pages: u64) -> Option<Self> {
        if pages == 0 || pages - 1 > Pfn::MAX.0 - lo.0 {
            return None;
        }
        Some(Self {
            lo,
            hi: Pfn(lo.0 + (pages - 1)),
        })
    }

    /// Creates the range from `lo` to `hi`, both included. `None` if `hi` is below `lo`.
    #[inline]
    pub const fn inclusive(lo: Pfn, hi: Pfn) -> Option<Self> {
        if lo.0 <= hi.0 {
            Some(Self { lo, hi })
        } else {
            None
        }
    }

    /// Creates the range from `lo` to `hi`. The caller guarantees `lo <= hi`.
    #[inline]
    pub(crate) const fn spanning(lo: Pfn, hi: Pfn) -> Self {
        Self { lo, hi }
    }

    /// Returns the pages that `range` touches.
    #[inline]
    pub const fn covering(range: &IovaRange) -> Self {
        Self {
            lo: Pfn::containing(range.start()),
            hi: Pfn::containing(range.last()),
        }
    }

    /// Returns the first page.
    #[inline]
    pub const fn lo(&self) -> Pfn {
        self.lo
    }

    /// Returns the last page (inclusive).
    #[inline]
    pub const fn hi(&self) -> Pfn {
        self.hi
    }

    /// Returns the number of pages.
    #[inline]
    pub const fn pages(&self) -> u64 {
        self.hi.0 - self.lo.0 + 1
    }

    /// Returns true if every page of `other` is in this range.
    #[inline]
    pub const fn contains(&self, other: &Self) -> bool {
        self.lo.0 <= other.lo.0 && other.hi.0 <= self.hi.0
    }

    /// Returns true if the two ranges share a page.
    #[inline]
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.lo.0 <= other.hi.0 && other.lo.0 <= self.hi.0
    }

    /// Returns the byte range of these pages.
    #[inline]
    pub const fn iovas(&self) -> IovaRange {
        IovaRange::spanning(
            self.lo.iova(),
            (self.hi.0 - self.lo.0) << 12 | (PageSize::Size4K.bytes() - 1),
        )
    }
}

impl fmt::Display for PfnRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {}]", self.lo, self.hi)
    }
}
