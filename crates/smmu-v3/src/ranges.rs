//! The commands that a range of pages needs.

use ringfence_types::{PageSize, PfnRange};

use crate::command::{Range, Span};

/// NUM has 5 bits.
const NUM_BITS: u32 = 5;
/// The largest SCALE.
const SCALE: u32 = 31;

/// Granules from `first`, an index of granules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Granules {
    pub(crate) first: u64,
    pub(crate) count: u64,
    pub(crate) size: PageSize,
}

impl Granules {
    /// Returns the granules that contain a page of `range`.
    pub(crate) const fn covering(range: &PfnRange, size: PageSize) -> Self {
        let shift = size.shift().wrapping_sub(PageSize::Size4K.shift());
        let (first, last) = (range.lo().get() >> shift, range.hi().get() >> shift);
        Self {
            first,
            count: last.wrapping_sub(first).wrapping_add(1),
            size,
        }
    }

    /// Returns the first byte.
    pub(crate) const fn address(&self) -> u64 {
        self.first << self.size.shift()
    }

    /// Covers the granules by at most two commands: the part that the five highest bits of the
    /// count express, and the rest, rounded up to five bits. `None` if there are too many.
    pub(crate) fn commands(&self) -> Option<[Option<Span>; 2]> {
        let (front, covered) = self.largest(u64::wrapping_shr)?;
        let rest = Self {
            first: self.first.wrapping_add(covered),
            count: self.count.wrapping_sub(covered),
            size: self.size,
        };
        if rest.count == 0 {
            return Some([Some(front), None]);
        }
        let round_up = |count: u64, scale| count.div_ceil(1_u64.wrapping_shl(scale));
        let (back, _) = rest.largest(round_up)?;
        Some([Some(front), Some(back)])
    }

    /// Returns the command for the granules divided by a power of two, and their number.
    fn largest(&self, divide: impl Fn(u64, u32) -> u64) -> Option<(Span, u64)> {
        let bits = u64::BITS.wrapping_sub(self.count.leading_zeros());
        let scale = bits.saturating_sub(NUM_BITS);
        let units = divide(self.count, scale);
        if scale > SCALE {
            return None;
        }
        let range = Range {
            num: u32::try_from(units.wrapping_sub(1)).ok()?,
            scale,
            granule: self.size,
        };
        // One granule as a range is reserved.
        let is_range = units != 1 || scale != 0;
        let span = Span {
            first: self.address(),
            range: is_range.then_some(range),
        };
        Some((span, units.wrapping_shl(scale)))
    }
}
