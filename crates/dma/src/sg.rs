//! `map_sg` and `unmap_sg`: scatterlists.

use alloc::vec::Vec;

use ringfence_types::{Direction, DomainId, Iova, IovaRange, PhysRange};

use crate::error::UnmapRefusal;
use crate::flush::Flush;
use crate::map::{Layout, MapArgs, map_error};
use crate::space::{GRANULE, Space, SpaceUnmap};
use crate::token::{
    Attachment, BounceSlot, ClearedRange, DmaSegment, LiveMapping, MapResult, NotInvalidated,
};
use crate::{Cpu, Dma, MapError, MapReason, Platform, UnmapError, UnmapFailure, UnmapReason};

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
    /// the last. `None` in spaces that do not map lists
    /// [contiguously](crate::space::SgSpace::CONTIGUOUS_SG): there only the segments that
    /// [`Dma::map_sg`] wrote describe the pieces.
    #[inline]
    pub fn range(&self) -> Option<IovaRange> {
        self.contiguous.then_some(self.live.range)
    }

    /// Returns the range of each piece, in spaces that
    /// [keep](crate::space::CachingSpace::CACHES_UNMAPPED) unmapped mappings. Empty in other
    /// spaces.
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
        let mut piece_ranges = Vec::new();
        let mapped = if S::CACHES_UNMAPPED {
            self.map_per_segment(cpu, platform, at, &request, &mut piece_ranges)
        } else {
            let wanted = MapArgs {
                pieces,
                layout: Layout::List,
                direction: request.direction,
            };
            self.map_common(cpu, platform, at, wanted)
        };
        match mapped {
            Ok(found) => {
                let used = if S::CACHES_UNMAPPED {
                    segments(piece_ranges.iter().copied(), limits, request.out)
                } else {
                    segments(
                        space.pieces(found.range.start(), pieces),
                        limits,
                        request.out,
                    )
                };
                let Some(used) = used else {
                    // The addresses decide which pieces cross a boundary. The driver wrote no
                    // descriptor, but the device may have guessed the addresses: invalidate the
                    // ranges before they are freed.
                    if !S::CACHES_UNMAPPED {
                        piece_ranges.push(found.range);
                    }
                    let mut reason = MapReason::TooManySegments;
                    for range in piece_ranges {
                        if let Err(failed) = self.undo_map(cpu, platform, at, range) {
                            reason = MapReason::RollbackFailed(failed);
                        }
                    }
                    return Err(request.into_map_error(at, reason));
                };
                let mapping = SgMapping {
                    live: LiveMapping::new(at, found.range, request.direction, request.buffer),
                    contiguous: S::CONTIGUOUS_SG,
                    piece_ranges,
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
            return self.unmap_sg_bounced(cpu, platform, at, mapping);
        }
        if S::CACHES_UNMAPPED {
            return self.unmap_sg_per_segment(cpu, platform, at, mapping);
        }
        self.unmap_common(cpu, platform, at, mapping.live)
    }

    /// Maps each piece of a list separately, so that a later list can reuse it. The result has the
    /// range of the first piece.
    fn map_per_segment<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        request: &SgRequest<'_, B>,
        ranges: &mut Vec<IovaRange>,
    ) -> Result<MapResult, MapReason> {
        let permissions = request.direction.permissions();
        let mut flushed = false;
        let steps = loop {
            self.refresh_if_stale(cpu);
            let parts = self.space_and_cpu(&mut cpu.spaces, at);
            let (space, own) = parts.ok_or(MapReason::NotAttached)?;
            ranges.clear();
            match space.map_per_segment(
                own,
                platform,
                request.pieces,
                permissions,
                at.limits,
                ranges,
            ) {
                // Flushing frees cached mappings that no driver uses.
                Err(MapReason::Alloc(_)) if !flushed => {
                    flushed = true;
                    self.flush(cpu, platform, at).map_err(MapReason::Flush)?;
                }
                other => break other?,
            }
        };
        let range = ranges.first().copied().ok_or(MapReason::Empty)?;
        Ok(MapResult { range, steps })
    }

    /// Unmaps each piece of a list. If the space keeps any piece cached, the whole list counts as
    /// cached, and the policy returns the buffer accordingly.
    ///
    /// # Errors
    /// If the first piece is rejected, nothing changed. After a later failure, the remaining pieces
    /// are still unmapped and invalidated as far as possible. A retry can complete the unmap if
    /// every piece is cleared; otherwise the reason is [`UnmapReason::PartlyUnmapped`].
    fn unmap_sg_per_segment<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        mapping: SgMapping<B>,
    ) -> Result<F::Outcome, UnmapError<B>> {
        let SgMapping {
            live, piece_ranges, ..
        } = mapping;
        let range = live.range;
        let failed = |reason| UnmapError {
            device: at.device,
            range,
            reason,
        };
        self.refresh_if_stale(cpu);
        let known = live.domain_handle == at.domain_handle
            && self.space_and_cpu(&mut cpu.spaces, at).is_some()
            && self.flush_state(&mut cpu.flush, at).is_some();
        if !known {
            return Err(failed(self.wrong_domain(live)));
        }
        // The policy receives the result of one piece: a cached one if the space keeps any.
        let mut left: Option<S::UnmapResult> = None;
        let mut failure: Option<UnmapFailure> = None;
        let mut not_invalidated: Vec<ClearedRange> = Vec::new();
        for range in piece_ranges {
            let unmapped = match self.space_and_cpu(&mut cpu.spaces, at) {
                Some((space, own)) => space.unmap(own, platform, range),
                None => Err(UnmapRefusal::NotAllocated),
            };
            let gone = match unmapped {
                Ok(gone) => gone,
                Err(refusal) if left.is_none() => {
                    return Err(failed(refusal.with(live.into_still_mapped())));
                }
                Err(refusal) => {
                    failure = Some(UnmapFailure::Refused(refusal));
                    continue;
                }
            };
            let leaves = if left.as_ref().is_some_and(SpaceUnmap::is_cached) {
                Some(gone)
            } else {
                left.replace(gone)
            };
            let mut ctx = self.flush_ctx(&mut cpu.spaces, at.domain());
            if let Some(leaves) = leaves
                && let Err((error, range)) = ctx.iotlb_sync(leaves, platform)
            {
                failure.get_or_insert(UnmapFailure::NotFlushed(error));
                not_invalidated.push(range);
            }
        }
        let Some(gone) = left else {
            return Err(failed(
                UnmapRefusal::NotAllocated.with(live.into_still_mapped()),
            ));
        };
        if let Some(failure) = failure {
            let is_cached = gone.is_cached();
            let mut ctx = self.flush_ctx(&mut cpu.spaces, at.domain());
            if let Err((_, range)) = ctx.iotlb_sync(gone, platform) {
                not_invalidated.push(range);
            }
            return Err(failed(match (failure, not_invalidated.pop()) {
                (UnmapFailure::NotFlushed(error), Some(range)) if !is_cached => {
                    let owed = NotInvalidated {
                        mapping: live.into_pending_unmap(range, at.ring()),
                        further: not_invalidated.into(),
                    };
                    UnmapReason::NotFlushed(error, owed)
                }
                _ => UnmapReason::PartlyUnmapped(failure, live.into_still_mapped()),
            }));
        }
        let Some((shared, own)) = self.flush_state(&mut cpu.flush, at) else {
            let failure = UnmapFailure::Refused(UnmapRefusal::NotAllocated);
            return Err(failed(UnmapReason::PartlyUnmapped(
                failure,
                live.into_still_mapped(),
            )));
        };
        let item = live.into_pending_unmap(gone, at.ring());
        let ctx = self.flush_ctx(&mut cpu.spaces, at.domain());
        self.flush
            .queue_unmap(shared, own, ctx, platform, item)
            .map_err(|(error, owed)| failed(UnmapReason::NotFlushed(error, owed)))
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
