//! `map_sg` and `unmap_sg`: scatterlists.

use alloc::vec::Vec;
use ringfence_types::{Direction, DomainId, Iova, IovaRange, PhysRange};

use crate::flush::Flush;
use crate::map::{Layout, MapArgs, map_error};
use crate::space::{GRANULE, Space, SpaceUnmap};
use crate::token::{Attachment, BounceSlot, DmaSegment, LiveMapping};
use crate::{Cpu, Dma, MapError, MapReason, Platform, UnmapError};

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
    fn are_valid(&self) -> bool {
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

/// The arguments of [`Dma::map_sg`].
#[derive(Debug)]
pub struct SgRequest<'a, B> {
    /// The embedder's representation of the memory of all pieces.
    pub buffer: B,
    /// The memory, in the order of the device's accesses.
    pub pieces: &'a [PhysRange],
    /// The direction of all pieces.
    pub direction: Direction,
    /// The device's limits on a segment.
    pub limits: SgLimits,
    /// Output array for the device's segments. It needs one entry per piece; fewer if pieces merge,
    /// more if a piece crosses a boundary.
    pub out: &'a mut [DmaSegment],
}

/// A live scatterlist mapping. It owns the driver's buffer until unmap. Dropping it leaks the
/// buffer.
#[must_use = "a mapping that is dropped stays reachable by the device for ever"]
#[derive(Debug, PartialEq, Eq)]
pub struct SgMapping<B> {
    /// The whole list, or its first piece if the space does not map lists contiguously.
    pub(crate) live: LiveMapping<B>,
    /// True if the pieces are mapped at consecutive pages.
    pub(crate) contiguous: bool,
    /// The range of each piece, in spaces that keep unmapped mappings.
    pub(crate) piece_ranges: Vec<IovaRange>,
    /// Copies of pieces that the device cannot reach. Empty in spaces with a table.
    pub(crate) bounced: Vec<BounceSlot>,
    /// Number of steps of the allocator's search.
    pub steps: u32,
}

impl<B> SgMapping<B> {
    /// Returns the whole list's range, from the first byte of the first segment to the last byte of
    /// the last. `None` in spaces that do not map lists contiguously ([`SgSpace::CONTIGUOUS_SG`](crate::space::SgSpace::CONTIGUOUS_SG)):
    /// there only the segments that [`Dma::map_sg`] wrote describe the pieces.
    #[inline]
    pub fn range(&self) -> Option<IovaRange> {
        self.contiguous.then_some(self.live.range)
    }

    /// Returns the range of each piece, in spaces that [keep](crate::space::CachingSpace::CACHES_UNMAPPED) unmapped
    /// mappings. Empty in other spaces.
    #[inline]
    pub fn piece_ranges(&self) -> &[IovaRange] {
        &self.piece_ranges
    }

    /// Returns the embedder's representation of the buffer.
    #[inline]
    pub fn buffer(&self) -> &B {
        &self.live.buffer
    }

    /// Returns the direction.
    #[inline]
    pub fn direction(&self) -> Direction {
        self.live.direction
    }

    /// Returns the domain that maps the list.
    #[inline]
    pub fn domain(&self) -> DomainId {
        self.live.domain_handle.domain()
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

impl<S: Space, F: Flush<S, B>, B> Dma<S, F, B> {
    /// Maps the pieces of a scatterlist. A space with a page table maps them at consecutive pages,
    /// an identity space at their own addresses, and a ring at one slot each. Returns the mapping
    /// and the number of entries of `request.out` that describe it to the device. That number is
    /// the number of pieces, less merged ones, plus those split at a boundary.
    ///
    /// # Errors
    /// Returns the buffer. The layer is unchanged, except for [`MapReason::RollbackFailed`]. If
    /// `request.out` is too short, nothing stays mapped.
    pub fn map_sg<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        request: SgRequest<'_, B>,
    ) -> Result<(SgMapping<B>, usize), (B, MapError)> {
        let (pieces, limits) = (request.pieces, request.limits);
        if !limits.are_valid() {
            return Err(request.into_map_error(at, MapReason::BadLimits));
        }
        // Reject before mapping a list that does not fit in `out` at any address.
        let anywhere = SgLimits {
            boundary: None,
            ..limits
        };
        let Some(space) = self.space(at) else {
            return Err(request.into_map_error(at, MapReason::NotAttached));
        };
        if request.out.len() < pieces.len()
            && segments(space.pieces(Iova::ZERO, pieces), anywhere, request.out).is_none()
        {
            return Err(request.into_map_error(at, MapReason::TooManySegments));
        }
        if S::CACHES_UNMAPPED {
            return self.map_sg_per_segment(cpu, platform, at, request);
        }
        let wanted = MapArgs {
            pieces,
            layout: Layout::List,
            direction: request.direction,
        };
        match self.map_common(cpu, platform, at, wanted) {
            Ok(found) => {
                let ranges = space.pieces(found.range.start(), pieces);
                let Some(used) = segments(ranges, limits, request.out) else {
                    // The addresses decide which pieces cross a boundary. The driver wrote no
                    // descriptor, but the device may have guessed the addresses: invalidate the
                    // range before it is freed.
                    let reason = match self.undo_map(cpu, platform, at, found.range) {
                        Ok(()) => MapReason::TooManySegments,
                        Err(failed) => MapReason::RollbackFailed(failed),
                    };
                    return Err(request.into_map_error(at, reason));
                };
                let mapping = SgMapping {
                    live: LiveMapping::new(at, found.range, request.direction, request.buffer),
                    contiguous: S::CONTIGUOUS_SG,
                    piece_ranges: Vec::new(),
                    bounced: Vec::new(),
                    steps: found.steps,
                };
                Ok((mapping, used))
            }
            // The copies are mapped one by one. A space with a table could not undo that as a
            // whole.
            Err(MapReason::BeyondMask) if !S::UnmapResult::HAS_TABLE => {
                self.map_list_bounced(cpu, platform, at, request)
            }
            Err(reason) => Err(request.into_map_error(at, reason)),
        }
    }

    /// Unmaps a scatterlist mapping.
    ///
    /// # Errors
    /// As for [`unmap_single`](Self::unmap_single), and
    /// [`PartlyUnmapped`](crate::UnmapReason::PartlyUnmapped).
    #[inline]
    pub fn unmap_sg<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        mapping: SgMapping<B>,
    ) -> Result<F::Outcome, UnmapError<B>> {
        if !S::UnmapResult::HAS_TABLE && !mapping.bounced.is_empty() {
            return self.unmap_list_bounced(cpu, platform, at, mapping);
        }
        if S::CACHES_UNMAPPED {
            return self.unmap_sg_per_segment(cpu, platform, at, mapping);
        }
        self.unmap_common(cpu, platform, at, mapping.live)
    }
}

impl<B> SgRequest<'_, B> {
    /// Creates the error of a rejected list. The error names the list's first piece.
    #[cold]
    pub(crate) fn into_map_error(self, at: &Attachment, reason: MapReason) -> (B, MapError) {
        let first = self.pieces.first().copied();
        (self.buffer, map_error(at, first, reason))
    }
}
