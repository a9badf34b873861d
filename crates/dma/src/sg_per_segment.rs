//! Scatterlists in spaces that [keep](crate::space::CachingSpace::CACHES_UNMAPPED) unmapped
//! mappings. The layer maps and unmaps each piece separately, so that a later list can reuse it.

use alloc::vec::Vec;
use core::mem;

use ringfence_types::IovaRange;

use crate::error::UnmapRefusal;
use crate::flush::FlushPolicy;
use crate::map::AllocRetries;
use crate::space::{Space, SpaceUnmap};
use crate::token::{Attachment, ClearedRange, LiveMapping, MapResult, NotInvalidated};
use crate::{
    Cpu, Dma, MapReason, Platform, SgMapping, SgRequest, UnmapError, UnmapFailure, UnmapReason,
};

/// A list of which the space has unmapped the first piece, and the others as far as possible.
struct UnmappedPieces<R> {
    /// The result that represents the list, not yet invalidated: a cached one if the space keeps
    /// any piece. The results of all other pieces are invalidated.
    result: R,
    /// The first reason why a piece is not unmapped or not invalidated. A rejected piece takes
    /// precedence.
    failure: Option<UnmapFailure>,
    /// Cleared ranges whose invalidation failed.
    not_invalidated: Vec<ClearedRange>,
}

impl<R: SpaceUnmap> UnmappedPieces<R> {
    /// Adds the result of a piece. Returns the result that no longer represents the list.
    fn replace(&mut self, unmapped: R) -> R {
        if self.result.is_cached() {
            unmapped
        } else {
            mem::replace(&mut self.result, unmapped)
        }
    }
}

impl<S: Space, F: FlushPolicy<S, B>, B> Dma<S, F, B> {
    /// Maps each piece of a list. If addresses are exhausted, flushes and retries. The result has
    /// the range of the first piece.
    pub(crate) fn map_per_segment<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        request: &SgRequest<'_, B>,
        ranges: &mut Vec<IovaRange>,
    ) -> Result<MapResult, MapReason> {
        let permissions = request.direction.permissions();
        let (pieces, limits) = (request.pieces, at.limits);
        let mut retries = AllocRetries::default();
        loop {
            self.refresh_if_stale(cpu);
            let parts = self.space_and_cpu(&mut cpu.spaces, at);
            let (space, own) = parts.ok_or(MapReason::NotAttached)?;
            ranges.clear();
            match space.map_per_segment(own, platform, pieces, permissions, limits, ranges) {
                Ok(steps) => {
                    let range = ranges.first().copied().ok_or(MapReason::Empty)?;
                    return Ok(MapResult { range, steps });
                }
                Err(MapReason::Alloc(error)) => {
                    self.free_addresses(cpu, platform, at, error, &mut retries)?;
                }
                Err(reason) => return Err(reason),
            }
        }
    }

    /// Unmaps each piece of a list. If the space keeps any piece cached, the whole list counts as
    /// cached, and the policy returns the buffer accordingly.
    ///
    /// # Errors
    /// If the first piece is rejected, nothing changed. After a later failure, the remaining pieces
    /// are still unmapped and invalidated as far as possible. A retry can complete the unmap if
    /// every piece is cleared; otherwise the reason is [`UnmapReason::PartlyUnmapped`].
    pub(crate) fn unmap_per_segment<P: Platform>(
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
        if live.domain_handle != at.domain_handle || self.space(at).is_none() {
            return Err(failed(self.wrong_domain(live)));
        }
        match self.unmap_pieces(cpu, platform, at, &piece_ranges) {
            Ok(pieces) => match pieces.failure {
                None => self.queue_pieces(cpu, platform, at, live, pieces.result),
                Some(failure) => Err(self.fail_pieces(cpu, platform, at, live, pieces, failure)),
            },
            Err(refusal) => Err(refusal.with(live.into_still_mapped())),
        }
        .map_err(failed)
    }

    /// Unmaps the pieces, and invalidates all of them except the one that represents the list.
    ///
    /// # Errors
    /// The space rejected the first piece. Nothing changed.
    fn unmap_pieces<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        ranges: &[IovaRange],
    ) -> Result<UnmappedPieces<S::UnmapResult>, UnmapRefusal> {
        let (first, rest) = ranges.split_first().ok_or(UnmapRefusal::NotAllocated)?;
        let mut pieces = UnmappedPieces {
            result: self.unmap_piece(cpu, platform, at, *first)?,
            failure: None,
            not_invalidated: Vec::new(),
        };
        for range in rest {
            let unmapped = match self.unmap_piece(cpu, platform, at, *range) {
                Ok(unmapped) => unmapped,
                Err(refusal) => {
                    if !matches!(pieces.failure, Some(UnmapFailure::Refused(_))) {
                        pieces.failure = Some(UnmapFailure::Refused(refusal));
                    }
                    continue;
                }
            };
            let replaced = pieces.replace(unmapped);
            let mut ctx = self.flush_ctx(&mut cpu.spaces, at.domain());
            if let Err((error, cleared)) = ctx.iotlb_sync(replaced, platform) {
                let failure = UnmapFailure::NotFlushed(error);
                pieces.failure.get_or_insert(failure);
                pieces.not_invalidated.push(cleared);
            }
        }
        Ok(pieces)
    }

    fn unmap_piece<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        range: IovaRange,
    ) -> Result<S::UnmapResult, UnmapRefusal> {
        match self.space_and_cpu(&mut cpu.spaces, at) {
            Some((space, own)) => space.unmap(own, platform, range),
            None => Err(UnmapRefusal::NotAllocated),
        }
    }

    /// Queues a list with the flush policy. Every piece but the one of `result` is invalidated.
    fn queue_pieces<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        live: LiveMapping<B>,
        result: S::UnmapResult,
    ) -> Result<F::Outcome, UnmapReason<B>> {
        let Some((shared, own)) = self.flush_state(&mut cpu.flush, at) else {
            let failure = UnmapFailure::Refused(UnmapRefusal::NotAllocated);
            let buffer = live.into_still_mapped();
            return Err(UnmapReason::PartlyUnmapped(failure, buffer));
        };
        let item = live.into_pending_unmap(result, at.ring());
        let ctx = self.flush_ctx(&mut cpu.spaces, at.domain());
        self.flush
            .queue_unmap(shared, own, ctx, platform, item)
            .map_err(|(error, token)| UnmapReason::NotFlushed(error, token))
    }

    /// Invalidates the last piece of a list of which another piece failed. Returns the driver's
    /// error.
    #[cold]
    fn fail_pieces<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        live: LiveMapping<B>,
        pieces: UnmappedPieces<S::UnmapResult>,
        failure: UnmapFailure,
    ) -> UnmapReason<B> {
        let is_cached = pieces.result.is_cached();
        let mut not_invalidated = pieces.not_invalidated;
        let mut ctx = self.flush_ctx(&mut cpu.spaces, at.domain());
        if let Err((_, cleared)) = ctx.iotlb_sync(pieces.result, platform) {
            not_invalidated.push(cleared);
        }
        match (failure, not_invalidated.pop()) {
            (UnmapFailure::NotFlushed(error), Some(cleared)) if !is_cached => {
                let token = NotInvalidated {
                    mapping: live.into_pending_unmap(cleared, at.ring()),
                    further: not_invalidated.into(),
                };
                UnmapReason::NotFlushed(error, token)
            }
            _ => UnmapReason::PartlyUnmapped(failure, live.into_still_mapped()),
        }
    }
}
