//! Page numbers of the I/O virtual address space, the currency of the IOVA allocators.

use core::fmt;

use crate::{Iova, IovaRange, PageSize};

/// Number of a 4 KiB page of the I/O virtual address space ("pfn" in Linux's allocator).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Pfn(u64);

impl Pfn {
    /// The highest page number whose byte address fits 64 bits.
    pub const MAX: Self = Self(u64::MAX >> 12);

    /// Page number `raw`, cut to 52 bits so that its byte address fits 64.
    #[inline]
    pub const fn new(raw: u64) -> Self {
        Self(raw & Self::MAX.0)
    }

    /// The page that holds `iova`.
    #[inline]
    pub const fn containing(iova: Iova) -> Self {
        Self(iova.get() >> 12)
    }

    /// The raw page number.
    #[inline]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Address of the page's first byte.
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
    /// The `pages` pages from `lo`; `None` if there are none or they pass the highest page number.
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

    /// The pages from `lo` to `hi`, both included; `None` if `hi` lies below `lo`.
    #[inline]
    pub const fn inclusive(lo: Pfn, hi: Pfn) -> Option<Self> {
        if lo.0 <= hi.0 {
            Some(Self { lo, hi })
        } else {
            None
        }
    }

    /// The pages from `lo` to `hi`, for callers whose own invariant puts them in that order.
    #[inline]
    pub(crate) const fn spanning(lo: Pfn, hi: Pfn) -> Self {
        Self { lo, hi }
    }

    /// The pages that `range` touches.
    #[inline]
    pub const fn covering(range: &IovaRange) -> Self {
        Self {
            lo: Pfn::containing(range.start()),
            hi: Pfn::containing(range.last()),
        }
    }

    /// First page.
    #[inline]
    pub const fn lo(&self) -> Pfn {
        self.lo
    }

    /// Last page (inclusive).
    #[inline]
    pub const fn hi(&self) -> Pfn {
        self.hi
    }

    /// Number of pages.
    #[inline]
    pub const fn pages(&self) -> u64 {
        self.hi.0 - self.lo.0 + 1
    }

    /// Whether every page of `other` lies in this range.
    #[inline]
    pub const fn contains(&self, other: &Self) -> bool {
        self.lo.0 <= other.lo.0 && other.hi.0 <= self.hi.0
    }

    /// Whether the two ranges share a page.
    #[inline]
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.lo.0 <= other.hi.0 && other.lo.0 <= self.hi.0
    }

    /// The byte range of these pages.
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
