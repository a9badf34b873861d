//! Directions of a mapping and of a single access. Both take the DMA API's point of view: the
//! device reads `ToDevice` data.

use core::fmt;

/// The direction of a DMA mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// The device reads memory.
    ToDevice,
    /// The device writes memory.
    FromDevice,
    /// The device reads and writes memory.
    Bidirectional,
}

impl Direction {
    /// All directions, in order of declaration.
    pub const ALL: [Self; 3] = [Self::ToDevice, Self::FromDevice, Self::Bidirectional];

    /// Returns the accesses that a mapping of this direction allows the device.
    #[inline]
    pub const fn permissions(self) -> Permissions {
        match self {
            Self::ToDevice => Permissions::READ,
            Self::FromDevice => Permissions::WRITE,
            Self::Bidirectional => Permissions::READ_WRITE,
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ToDevice => "to-device",
            Self::FromDevice => "from-device",
            Self::Bidirectional => "bidirectional",
        })
    }
}

/// The kind of a single device access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// The device reads memory.
    Read,
    /// The device writes memory.
    Write,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// A non-empty set of the accesses that a translation allows.
///
/// The bits are those of a VT-d second-stage entry (VT-d specification, section 9.8): bit 0 read,
/// bit 1 write.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Permissions(u8);

impl Permissions {
    /// The device may only read.
    pub const READ: Self = Self(1);
    /// The device may only write.
    pub const WRITE: Self = Self(2);
    /// Reads and writes.
    pub const READ_WRITE: Self = Self(3);

    /// Creates a set from the two low bits of `bits`. `None` if neither is set.
    #[inline]
    pub const fn from_bits(bits: u64) -> Option<Self> {
        match bits & 3 {
            0 => None,
            set => Some(Self(set as u8)),
        }
    }

    /// Returns the bits of a VT-d entry: bit 0 read, bit 1 write.
    #[inline]
    pub const fn bits(self) -> u64 {
        self.0 as u64
    }

    /// Returns true if the set allows `access`.
    #[inline]
    pub const fn allows(self, access: Access) -> bool {
        let bit = match access {
            Access::Read => Self::READ.0,
            Access::Write => Self::WRITE.0,
        };
        self.0 & bit != 0
    }

    /// Returns true if this set allows every access that `other` allows.
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the accesses that both sets allow. `None` if they have none in common.
    #[inline]
    pub const fn intersect(self, other: Self) -> Option<Self> {
        Self::from_bits((self.0 & other.0) as u64)
    }

    /// Returns the accesses that either set allows.
    #[inline]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for Permissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            1 => "r-",
            2 => "-w",
            _ => "rw",
        })
    }
}
