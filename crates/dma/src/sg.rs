//! `map_sg` and `unmap_sg`: scatterlists.

use alloc::vec::Vec;
use ringfence_types::{Direction, DomainId, Iova, IovaRange, PhysRange};

use crate::flush::Flush;
use crate::layer::GRANULE;
use crate::map::{Layout, MapArgs, map_error};
use crate::mapping::LiveMapping;
use crate::space::{IotlbSync, Space};
use crate::{
    Attachment, BounceSlot, Cpu, Dma, DmaSegment, MapError, MapReason, Platform, UnmapError,
};

/// What a device accepts as one segment. A piece that is longer than `max_bytes` is passed on as it
/// is: who makes the list knows the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SgLimits {
    /// Longest segment in bytes that pieces are merged into.
    pub max_bytes: u64,
    /// A segment never crosses a multiple of this power of two, 4 KiB or more; `None` for no such
    /// limit. A piece that would cross one where it is placed becomes several segments.
    pub boundary: Option<u64>,
}

impl SgLimits {
    /// Whether the boundary is a power of two that pages do not cross.
    fn are_valid(&self) -> bool {
        self.boundary
            .is_none_or(|b| b.is_power_of_two() && b >= GRANULE.bytes())
    }
}

impl Default for SgLimits {
    /// 64 KiB segments that cross no 4 GiB boundary: Linux's defaults.
    fn default() -> Self {
        Self {
            max_bytes: 65536,
            boundary: Some(1 << 32),
        }
    }
}

/// What [`Dma::map_sg`] is to map, and where it tells of it.
#[derive(Debug)]
pub struct SgRequest<'a, B> {
    /// What stands for the memory of all pieces.
    pub buffer: B,
    /// The memory, in the order in which the device shall see it.
    pub pieces: &'a [PhysRange],
    /// The direction.
    pub direction: Direction,
    /// What the device accepts as a segment.
    pub limits: SgLimits,
    /// Room for the segments that the device is told of: as many as there are pieces, unless they
    /// merge or cross a boundary.
    pub out: &'a mut [DmaSegment],
}

/// A live scatterlist mapping; owns the driver's buffer until unmap, and leaks it if dropped.
#[must_use = "a mapping that is dropped stays reachable by the device for ever"]
#[derive(Debug, PartialEq, Eq)]
pub struct SgMapping<B> {
    /// The whole list, or its first piece if the space does not join lists.
    pub(crate) live: LiveMapping<B>,
    /// Whether the pieces lie at consecutive pages.
    pub(crate) contiguous: bool,
    /// Where each piece is, in spaces that keep what is unmapped.
    pub(crate) piece_ranges: Vec<IovaRange>,
    /// Copies of pieces that the device cannot reach; none behind a table.
    pub(crate) bounced: Vec<BounceSlot>,
    /// Steps that the allocator's search took.
    pub steps: u32,
}

impl<B> SgMapping<B> {
    /// The I/O virtual pages of the whole list, as bytes from the first byte of the first segment
    /// to the last of the last. `None` in spaces that do not join lists ([`Space::CONTIGUOUS_SG`]):
    /// there only the segments that [`Dma::map_sg`] wrote say where the pieces are.
    #[inline]
    pub fn range(&self) -> Option<IovaRange> {
        self.contiguous.then_some(self.live.range)
    }

    /// Where each piece is, in spaces that [keep](Space::CACHES_UNMAPPED) what is unmapped; empty
    /// in others.
    #[inline]
    pub fn piece_ranges(&self) -> &[IovaRange] {
        &self.piece_ranges
    }

    /// What stands for the buffer.
    #[inline]
    pub fn buffer(&self) -> &B {
        &self.live.buffer
    }

    /// The direction.
    #[inline]
    pub fn direction(&self) -> Direction {
        self.live.direction
    }

    /// The domain whose devices reach it.
    #[inline]
    pub fn domain(&self) -> DomainId {
        self.live.domain_handle.domain()
    }
}

/// Writes the device's segments into `out`, merging those that are contiguous as far as `limits`
/// allow and splitting those that cross a boundary.
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

/// The parts of a range between multiples of `boundary`.
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

/// Whether the range stays between two multiples of `boundary`.
fn within(range: &IovaRange, boundary: Option<u64>) -> bool {
    boundary.is_none_or(|b| range.start().align_down(b) == range.last().align_down(b))
}

impl<S: Space, F: Flush<S, B>, B> Dma<S, F, B> {
    /// Makes the pieces of a scatterlist reachable: at consecutive pages behind a page table, in
    /// place where nothing is translated, at a slot each in a ring. Returns the mapping and how
    /// many entries of `request.out` describe it to the device: as many as there are pieces, fewer
    /// where contiguous ones merge, more where one crosses a boundary.
    ///
    /// # Errors
    /// The buffer comes back; the layer is as before. Nothing is mapped if `request.out` is too
    /// short.
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
        // What no placement could make fit is refused before anything is mapped.
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
                    // Where the addresses lie decides what crosses a boundary. No descriptor was
                    // written, but the device may have guessed: the range is invalidated before it
                    // is free again.
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
            // Copies are placed one by one, which could not be undone as a whole where something is
            // installed.
            Err(MapReason::BeyondMask) if !S::UnmapResult::HAS_TABLE => {
                self.map_list_bounced(cpu, platform, at, request)
            }
            Err(reason) => Err(request.into_map_error(at, reason)),
        }
    }

    /// Takes a scatterlist mapping down.
    ///
    /// # Errors
    /// As for [`unmap_single`](Self::unmap_single).
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
    /// The error of a refused list, which names its first piece.
    #[cold]
    pub(crate) fn into_map_error(self, at: &Attachment, reason: MapReason) -> (B, MapError) {
        let first = self.pieces.first().copied();
        (self.buffer, map_error(at, first, reason))
    }
}
