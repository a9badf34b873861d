//! Geometry of a cache.

use core::fmt;

/// Sets and ways of a cache, both powers of two; or no cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    sets: u32,
    ways: u32,
}

/// Reason why a cache geometry is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GeometryError {
    /// Sets and ways must be powers of two, because they select address bits.
    NotPowerOfTwo {
        /// Requested number of sets.
        sets: u32,
        /// Requested number of ways.
        ways: u32,
    },
    /// The cache would have more than [`Geometry::MAX_ENTRIES`] entries.
    TooLarge {
        /// Requested number of sets.
        sets: u32,
        /// Requested number of ways.
        ways: u32,
    },
}

impl fmt::Display for GeometryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotPowerOfTwo { sets, ways } => {
                write!(
                    f,
                    "a cache of {sets}x{ways}: sets and ways must be powers of two"
                )
            }
            Self::TooLarge { sets, ways } => write!(
                f,
                "a cache of {sets}x{ways} has more than {} entries",
                Geometry::MAX_ENTRIES
            ),
        }
    }
}

impl core::error::Error for GeometryError {}

impl Geometry {
    /// No cache: every lookup misses and fills are ignored.
    pub const ABSENT: Self = Self { sets: 0, ways: 0 };

    /// Maximum number of entries of a cache. It bounds the memory that a configuration can
    /// allocate.
    pub const MAX_ENTRIES: u64 = 1 << 20;

    /// Creates a geometry of `sets` sets of `ways` entries.
    ///
    /// # Errors
    /// [`GeometryError`] if either is not a power of two, or the cache would be too large.
    pub const fn new(sets: u32, ways: u32) -> Result<Self, GeometryError> {
        if !sets.is_power_of_two() || !ways.is_power_of_two() {
            return Err(GeometryError::NotPowerOfTwo { sets, ways });
        }
        // Two u32 factors cannot overflow u64.
        if sets as u64 * ways as u64 > Self::MAX_ENTRIES {
            return Err(GeometryError::TooLarge { sets, ways });
        }
        Ok(Self { sets, ways })
    }

    /// Returns the number of sets; 0 if there is no cache.
    #[inline]
    pub const fn sets(&self) -> u32 {
        self.sets
    }

    /// Returns the number of entries in a set; 0 if there is no cache.
    #[inline]
    pub const fn ways(&self) -> u32 {
        self.ways
    }

    /// Returns the number of entries.
    #[inline]
    pub const fn entries(&self) -> u32 {
        // At most MAX_ENTRIES by construction.
        self.sets.wrapping_mul(self.ways)
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.sets, self.ways)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometry_is_checked() {
        for (sets, ways) in [(0, 1), (1, 0), (3, 4), (4, 3), (0, 0)] {
            assert_eq!(
                Geometry::new(sets, ways),
                Err(GeometryError::NotPowerOfTwo { sets, ways })
            );
        }
        assert_eq!(
            Geometry::new(1 << 31, 1 << 31),
            Err(GeometryError::TooLarge {
                sets: 1 << 31,
                ways: 1 << 31
            })
        );
        assert_eq!(Geometry::new(1 << 20, 1).map(|g| g.entries()), Ok(1 << 20));
        assert!(Geometry::new(1 << 20, 2).is_err());
    }
}
