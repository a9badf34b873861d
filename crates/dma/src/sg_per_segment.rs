//! Scatterlists in spaces that keep unmapped mappings. Each piece is a separate mapping, so that a
//! later list can reuse it.

use alloc::vec::Vec;

use ringfence_types::IovaRange;

use crate::error::UnmapRefusal;
use crate::flush::Flush;
use crate::sg::segments;
use crate::space::{Space, SpaceUnmap};
use crate::token::{Attachment, ClearedRange, LiveMapping};
use crate::{
    Cpu, Dma, MapError, MapReason, Platform, SgMapping, SgRequest, UnmapError, UnmapFailure,
    UnmapReason,
};

impl<S: Space, F: Flush<S, B>, B> Dma<S, F, B> {
    pub(crate) fn map_sg_per_segment<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        request: SgRequest<'_, B>,
    ) -> Result<(SgMapping<B>, usize), (B, MapError)> {
        let mut apart = Vec::with_capacity(request.pieces.len());
        let mut placed = self.try_map_per_segment(cpu, platform, at, &request, &mut apart);
        if let Err(MapReason::Alloc(_)) = placed {
            // Flushing frees cached mappings that no driver uses.
            let flushed = self.flush(cpu, platform, at).map_err(MapReason::Flush);
            placed = flushed.and_then(|()| {
                apart.clear();
                self.try_map_per_segment(cpu, platform, at, &request, &mut apart)
            });
        }
        let (steps, first) = match (placed, apart.first().copied()) {
            (Ok(steps), Some(first)) => (steps, first),
            (Ok(_), None) => return Err(request.into_map_error(at, MapReason::Empty)),
            (Err(reason), _) => return Err(request.into_map_error(at, reason)),
        };
        let Some(used) = segments(apart.iter().copied(), request.limits, request.out) else {
            let mut reason = MapReason::TooManySegments;
            for range in apart {
                if let Err(failed) = self.undo_map(cpu, platform, at, range) {
                    reason = MapReason::RollbackFailed(failed);
                }
            }
            return Err(request.into_map_error(at, reason));
        };
        let mapping = SgMapping {
            live: LiveMapping::new(at, first, request.direction, request.buffer),
            contiguous: false,
            piece_ranges: apart,
            bounced: Vec::new(),
            steps,
        };
        Ok((mapping, used))
    }

    fn try_map_per_segment<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        request: &SgRequest<'_, B>,
        apart: &mut Vec<IovaRange>,
    ) -> Result<u32, MapReason> {
        self.refresh_if_stale(cpu);
        let parts = self.space_and_cpu(&mut cpu.spaces, at);
        let (space, own) = parts.ok_or(MapReason::NotAttached)?;
        let permissions = request.direction.permissions();
        space.map_per_segment(own, platform, request.pieces, permissions, at.limits, apart)
    }

    /// Unmaps each piece of a list. If the space keeps any piece cached, the whole list counts as
    /// cached, and the policy returns the buffer accordingly.
    ///
    /// # Errors
    /// If the first piece is rejected, nothing changed. After a later failure, the remaining pieces
    /// are still unmapped and invalidated as far as possible. A retry can complete the unmap if
    /// every piece is cleared; otherwise the reason is [`UnmapReason::PartlyUnmapped`].
    pub(crate) fn unmap_sg_per_segment<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        mapping: SgMapping<B>,
    ) -> Result<F::Outcome, UnmapError<B>> {
        let SgMapping {
            live,
            piece_ranges: apart,
            ..
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
        for range in apart {
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
                    let owed = live.into_not_invalidated(range, not_invalidated);
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
