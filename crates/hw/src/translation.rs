//! What a translated access is told.

use core::ops::Deref;
use core::slice;

use ringfence_types::PhysRange;

/// The physical bytes of one access, in the order of its addresses: never none, physically adjacent
/// pages joined. Valid until the unit is used again, as a translation in hardware is.
#[derive(Debug, Clone, Copy)]
pub struct Translation<'a> {
    single: PhysRange,
    /// Empty if `single` is all there is: the common case touches no memory.
    several: &'a [PhysRange],
}

impl<'a> Translation<'a> {
    #[inline]
    pub(crate) const fn one(range: PhysRange) -> Self {
        Self {
            single: range,
            several: &[],
        }
    }

    /// `None` if there are no ranges.
    #[inline]
    pub(crate) fn many(ranges: &'a [PhysRange]) -> Option<Self> {
        Some(Self {
            single: *ranges.first()?,
            several: ranges,
        })
    }

    /// The first range.
    #[inline]
    pub const fn first(&self) -> PhysRange {
        self.single
    }

    /// All ranges.
    #[inline]
    pub const fn as_slice(&self) -> &[PhysRange] {
        if self.several.is_empty() {
            slice::from_ref(&self.single)
        } else {
            self.several
        }
    }
}

impl Deref for Translation<'_> {
    type Target = [PhysRange];

    #[inline]
    fn deref(&self) -> &[PhysRange] {
        self.as_slice()
    }
}
