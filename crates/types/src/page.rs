//! Page sizes of leaf entries.

use core::fmt;

/// The page sizes of a leaf entry. The granule of every table is [`PageSize::Size4K`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageSize {
    /// 4 KiB, the granule of every table.
    Size4K,
    /// 2 MiB, or 512 granules.
    Size2M,
    /// 1 GiB, or 262144 granules.
    Size1G,
}

impl PageSize {
    /// All sizes, smallest first.
    pub const ALL: [Self; 3] = [Self::Size4K, Self::Size2M, Self::Size1G];

    /// Binary logarithm of the size in bytes.
    #[inline]
    pub const fn shift(self) -> u32 {
        match self {
            Self::Size4K => 12,
            Self::Size2M => 21,
            Self::Size1G => 30,
        }
    }

    /// Size in bytes.
    #[inline]
    pub const fn bytes(self) -> u64 {
        1 << self.shift()
    }

    /// Size in 4 KiB granules.
    #[inline]
    pub const fn granules(self) -> u64 {
        1 << (self.shift() - 12)
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Size4K => "4K",
            Self::Size2M => "2M",
            Self::Size1G => "1G",
        })
    }
}
