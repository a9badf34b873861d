//! Page sizes of leaf entries.

use core::fmt;

/// The size of a page that a leaf maps: a power of two, at least 4 KiB.
///
/// The named sizes are those of a table with 4 KiB pages and 512 entries. Other formats have more:
/// 64 KiB with RISC-V Svnapot, or any power of two with AMD-Vi.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct PageSize(u8);

#[allow(non_upper_case_globals)] // named like the sizes of an enum
impl PageSize {
    /// 4 KiB, the unit of [`Pfn`](crate::Pfn).
    pub const Size4K: Self = Self(12);
    /// 16 KiB, a granule of Arm.
    pub const Size16K: Self = Self(14);
    /// 64 KiB, a granule of Arm and a page of RISC-V Svnapot.
    pub const Size64K: Self = Self(16);
    /// 2 MiB, or 512 granules.
    pub const Size2M: Self = Self(21);
    /// 1 GiB, or 262144 granules.
    pub const Size1G: Self = Self(30);
}

impl PageSize {
    /// The page sizes of a table with 4 KiB pages and 512 entries, smallest first.
    pub const ALL: [Self; 3] = [Self::Size4K, Self::Size2M, Self::Size1G];

    /// Creates the size of 2^`shift` bytes; `None` outside 4 KiB to 2^63 bytes.
    #[inline]
    pub const fn from_shift(shift: u32) -> Option<Self> {
        if shift < Self::Size4K.shift() || shift > 63 {
            return None;
        }
        Some(Self(shift as u8))
    }

    /// Binary logarithm of the size in bytes.
    #[inline]
    pub const fn shift(self) -> u32 {
        self.0 as u32
    }

    /// Size in bytes.
    #[inline]
    pub const fn bytes(self) -> u64 {
        1_u64.wrapping_shl(self.shift())
    }

    /// Size in 4 KiB granules.
    #[inline]
    pub const fn granules(self) -> u64 {
        self.bytes() >> Self::Size4K.shift()
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [char; 6] = ['K', 'M', 'G', 'T', 'P', 'E'];
        let exponent = self.shift().saturating_sub(10);
        let unit = UNITS.get((exponent / 10) as usize).unwrap_or(&'E');
        write!(f, "{}{unit}", 1_u64 << (exponent % 10))
    }
}
