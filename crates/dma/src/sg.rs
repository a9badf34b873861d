//! `map_sg` and `unmap_sg`: scatterlists.

use alloc::vec::Vec;

use ringfence_types::{Direction, DomainId, Iova, IovaRange, PhysRange};

use crate::flush::FlushPolicy;
use crate::map::{Layout, MapArgs, map_error};
use crate::sg_segments::{SgLimits, segments};
use crate::space::{Space, SpaceUnmap};
use crate::token::{Attachment, BounceSlot, DmaSegment, LiveMapping, MapResult};
use crate::{Cpu, Dma, MapError, MapReason, Platform, UnmapError};

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

impl<S: Space, F: FlushPolicy<S, B>, B> Dma<S, F, B> {
    /// Maps the pieces of a scatterlist. A space with a page table maps them at consecutive pages,
    /// an identity space at their own addresses, and a ring at one slot each. Returns the mapping
    /// and the number of entries of `request.out` that describe it to the device. That number is
    /// the number of pieces, less merged ones, plus those split at a boundary.
    ///
    /// # Errors
    /// Returns the buffer. The layer is unchanged, except for [`MapReason::RollbackFailed`]. If
    /// `request.out` is too short, nothing stays mapped, except in a caching space: it keeps pieces
    /// as after an unmap, and the device reaches them until their cycle ends.
    pub fn map_sg<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        mut request: SgRequest<'_, B>,
    ) -> Result<(SgMapping<B>, usize), (B, MapError)> {
        let mut piece_ranges = Vec::new();
        match self.try_map_sg(cpu, platform, at, &mut request, &mut piece_ranges) {
            Ok((placed, used)) => {
                let mapping = SgMapping {
                    live: LiveMapping::new(at, placed.range, request.direction, request.buffer),
                    contiguous: S::CONTIGUOUS_SG,
                    piece_ranges,
                    bounced: Vec::new(),
                    steps: placed.steps,
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

    /// Maps the pieces and writes the device's segments. `piece_ranges` receives the range of each
    /// piece if the space keeps unmapped mappings.
    #[inline]
    fn try_map_sg<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        request: &mut SgRequest<'_, B>,
        piece_ranges: &mut Vec<IovaRange>,
    ) -> Result<(MapResult, usize), MapReason> {
        let space = self.check_sg(at, request)?;
        let (pieces, limits) = (request.pieces, request.limits);
        let (placed, used) = if S::CACHES_UNMAPPED {
            let placed = self.map_per_segment(cpu, platform, at, request, piece_ranges)?;
            let ranges = piece_ranges.iter().copied();
            (placed, segments(ranges, limits, request.out))
        } else {
            let wanted = MapArgs {
                pieces,
                layout: Layout::List,
                direction: request.direction,
            };
            let placed = self.map_common(cpu, platform, at, wanted)?;
            let ranges = space.pieces(placed.range.start(), pieces);
            (placed, segments(ranges, limits, request.out))
        };
        match used {
            Some(used) => Ok((placed, used)),
            None => Err(self.undo_map_sg(cpu, platform, at, placed.range, piece_ranges)),
        }
    }

    /// Checks the limits, and the length of `out` if the layout of the list is known before it is
    /// mapped. Returns the space of the attachment.
    #[inline]
    fn check_sg(&self, at: &Attachment, request: &mut SgRequest<'_, B>) -> Result<&S, MapReason> {
        let (pieces, limits) = (request.pieces, request.limits);
        if !limits.are_valid() {
            return Err(MapReason::BadLimits);
        }
        let space = self.space(at).ok_or(MapReason::NotAttached)?;
        if S::CONTIGUOUS_SG && request.out.len() < pieces.len() {
            // The addresses decide which pieces cross a boundary, but not which pieces are
            // adjacent. A piece that is split at a boundary can share segments with both of its
            // neighbours, so lengths prove nothing where there is a boundary.
            let anywhere = SgLimits {
                boundary: None,
                max_bytes: match limits.boundary {
                    Some(_) => u64::MAX,
                    None => limits.max_bytes,
                },
            };
            segments(space.pieces(Iova::ZERO, pieces), anywhere, request.out)
                .ok_or(MapReason::TooManySegments)?;
        }
        Ok(space)
    }

    /// Undoes the map of a list whose segments do not fit. The driver wrote no descriptor, but the
    /// device may have guessed the addresses: the layer invalidates the ranges before it frees
    /// them. A caching space keeps them, as after an unmap: another live mapping may share their
    /// addresses.
    #[cold]
    fn undo_map_sg<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        whole: IovaRange,
        piece_ranges: &[IovaRange],
    ) -> MapReason {
        let ranges = if S::CACHES_UNMAPPED {
            piece_ranges
        } else {
            core::slice::from_ref(&whole)
        };
        let mut reason = MapReason::TooManySegments;
        for range in ranges {
            if let Err(failed) = self.undo_map(cpu, platform, at, *range) {
                reason.fail_rollback(failed);
            }
        }
        reason
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
            return self.unmap_per_segment(cpu, platform, at, mapping);
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
