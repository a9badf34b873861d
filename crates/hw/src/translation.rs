//! Result of a translated access.

use core::ops::Deref;
use core::slice;

use ringfence_types::PhysRange;

/// The physical ranges of one access, in address order. Never empty; physically adjacent pages are
/// merged. Borrowed from the unit, so it is valid until the next use of the unit.
#[derive(Debug, Clone, Copy)]
pub struct Translation<'a> {
    single: PhysRange,
    /// Empty if `single` is the only range, so that the common case accesses no memory.
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

    /// Creates a translation of several ranges; `None` if `ranges` is empty.
    #[inline]
    pub fn many(ranges: &'a [PhysRange]) -> Option<Self> {
        Some(Self {
            single: *ranges.first()?,
            several: ranges,
        })
    }

    /// Returns the first range.
    #[inline]
    pub const fn first(&self) -> PhysRange {
        self.single
    }

    /// Returns all ranges.
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
