//! The segments of a scatterlist, as the device's descriptors need them.

use ringfence_types::IovaRange;

use crate::space::GRANULE;
use crate::token::DmaSegment;

/// The device's limits on one segment. `map_sg` passes on a piece longer than `max_bytes`
/// unchanged: the driver that builds the list knows the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SgLimits {
    /// Longest segment, in bytes, that `map_sg` creates by merging pieces.
    pub max_bytes: u64,
    /// A segment never crosses a multiple of this power of two (4 KiB or more). `map_sg` splits a
    /// piece whose addresses cross one. `None` if there is no such limit.
    pub boundary: Option<u64>,
}

impl SgLimits {
    /// Returns true if the boundary is a power of two of at least a page.
    pub(crate) fn are_valid(&self) -> bool {
        self.boundary
            .is_none_or(|b| b.is_power_of_two() && b >= GRANULE.bytes())
    }
}

impl Default for SgLimits {
    /// Returns Linux's defaults: 64 KiB segments that do not cross a 4 GiB boundary.
    fn default() -> Self {
        Self {
            max_bytes: 65536,
            boundary: Some(1 << 32),
        }
    }
}

/// Writes the device's segments into `out`. Merges adjacent ranges as far as `limits` allow, and
/// splits ranges that cross a boundary. Returns the number of segments, or `None` if `out` is too
/// short.
pub(crate) fn segments(
    ranges: impl Iterator<Item = IovaRange>,
    limits: SgLimits,
    out: &mut [DmaSegment],
) -> Option<usize> {
    let mut used = 0_usize;
    for range in ranges.flat_map(|range| split(range, limits.boundary)) {
        if let Some(last) = used.checked_sub(1).and_then(|i| out.get_mut(i))
            && last.range.last().checked_add(1) == Some(range.start())
            && let Some(merged) = IovaRange::inclusive(last.range.start(), range.last())
            && merged.bytes() <= limits.max_bytes
            && within(&merged, limits.boundary)
        {
            last.range = merged;
            continue;
        }
        *out.get_mut(used)? = DmaSegment { range };
        used += 1;
    }
    Some(used)
}

/// Splits a range at multiples of `boundary`.
fn split(range: IovaRange, boundary: Option<u64>) -> impl Iterator<Item = IovaRange> {
    let mut rest = Some(range);
    core::iter::from_fn(move || {
        let whole = rest.take()?;
        if within(&whole, boundary) {
            return Some(whole);
        }
        let block = boundary?;
        let last = whole.start().align_down(block).wrapping_add(block - 1);
        rest = IovaRange::inclusive(last.checked_add(1)?, whole.last());
        IovaRange::inclusive(whole.start(), last)
    })
}

/// Returns true if the range does not cross a multiple of `boundary`.
fn within(range: &IovaRange, boundary: Option<u64>) -> bool {
    boundary.is_none_or(|b| range.start().align_down(b) == range.last().align_down(b))
}
