//! `map_multi` and `unmap_multi`: many buffers in one call, one invalidation for all (CG10), and
//! the immediate take-down that undoing a mapping needs whatever the flush policy is.

use alloc::vec::Vec;
use core::fmt;

use ringfence_types::{Direction, InvalidationError, IovaRange, PhysRange};

use crate::flush::{Flush, FlushContext, Outcome, PendingUnmap};
use crate::mapping::LiveMapping;
use crate::space::{IotlbSync, Space};
use crate::{
    Attachment, Cpu, Dma, MapError, MapReason, Mapping, NotInvalidated, Platform, UnmapError,
    UnmapReason,
};

/// One buffer of [`Dma::map_multi`].
#[derive(Debug)]
pub struct MapMultiRequest<B> {
    /// What stands for the buffer.
    pub buffer: B,
    /// Its memory.
    pub memory: PhysRange,
    /// Its direction.
    pub direction: Direction,
}

/// The requests of a [`Dma::map_multi`] that mapped nothing, in order, and why.
pub type MapMultiError<B> = (Vec<MapMultiRequest<B>>, MapError);

/// What a call to [`Dma::unmap_multi`] could not do. Mappings that are not named here are unmapped,
/// and their buffers were handed up.
#[derive(Debug)]
pub struct UnmapMultiError<B> {
    /// The first mapping that was refused, unchanged.
    pub refused: Option<UnmapError<B>>,
    /// The mappings after it, untouched.
    pub rest: Vec<Mapping<B>>,
    /// Mappings that are cleared but whose invalidation failed; see [`Dma::retry_invalidation`].
    pub not_invalidated: Vec<NotInvalidated<B>>,
    /// Why that invalidation failed.
    pub invalidation: Option<InvalidationError>,
}

impl<B> fmt::Display for UnmapMultiError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(refused) = &self.refused {
            write!(f, "{refused}; {} more not tried. ", self.rest.len())?;
        }
        if let Some(error) = &self.invalidation {
            write!(
                f,
                "{} mappings are owed: {error}",
                self.not_invalidated.len()
            )?;
        }
        Ok(())
    }
}

impl<B: fmt::Debug> core::error::Error for UnmapMultiError<B> {}

impl<S: Space, F: Flush<S, B>, B> Dma<S, F, B> {
    /// Maps every buffer of `requests`, or none.
    ///
    /// # Errors
    /// The requests come back in order; the layer is as before, unless the reason is
    /// [`MapReason::RollbackFailed`].
    pub fn map_multi<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        requests: Vec<MapMultiRequest<B>>,
    ) -> Result<Vec<Mapping<B>>, MapMultiError<B>> {
        let mut made: Vec<(Mapping<B>, PhysRange)> = Vec::with_capacity(requests.len());
        let mut requests = requests.into_iter();
        while let Some(MapMultiRequest {
            buffer,
            memory,
            direction,
        }) = requests.next()
        {
            let (buffer, mut error) =
                match self.map_single(cpu, platform, at, buffer, memory, direction) {
                    Ok((mapping, _)) => {
                        made.push((mapping, memory));
                        continue;
                    }
                    Err(refused) => refused,
                };
            let mut back = Vec::with_capacity(made.len() + 1 + requests.len());
            for (mapping, memory) in made {
                if let Err(failed) = self.undo_map(cpu, platform, at, mapping.range()) {
                    error.reason = MapReason::RollbackFailed(failed);
                }
                if let (Some(pool), Some(slot)) = (&self.bounce, &mapping.bounce) {
                    pool.free(slot);
                }
                back.push(MapMultiRequest {
                    direction: mapping.direction(),
                    buffer: mapping.live.into_buffer(),
                    memory,
                });
            }
            back.push(MapMultiRequest {
                buffer,
                memory,
                direction,
            });
            back.extend(requests);
            return Err((back, error));
        }
        Ok(made.into_iter().map(|(mapping, _)| mapping).collect())
    }

    /// Takes many mappings down; `each` receives the buffers that are back. Where the policy
    /// flushes at every unmap, one invalidation covers them all; otherwise as if each were unmapped
    /// by itself. That includes the bound of a burst: the mapping that would be one too many is
    /// refused, and the ones after it come back untouched.
    ///
    /// # Errors
    /// See [`UnmapMultiError`].
    pub fn unmap_multi<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        mappings: Vec<Mapping<B>>,
        mut each: impl FnMut(B),
    ) -> Result<(), UnmapMultiError<B>> {
        self.refresh_if_stale(cpu);
        let mut failed = UnmapMultiError {
            refused: None,
            rest: Vec::new(),
            not_invalidated: Vec::new(),
            invalidation: None,
        };
        let mut items = Vec::with_capacity(if F::BATCHES_INVALIDATION {
            mappings.len()
        } else {
            0
        });
        let mut mappings = mappings.into_iter();
        for mapping in mappings.by_ref() {
            match self.clear(cpu, platform, at, mapping) {
                Ok(item) if F::BATCHES_INVALIDATION => items.push(item),
                // At once, so that the policy counts it before it is asked for room for the next.
                Ok(item) => self.queue_one_unmap(cpu, platform, at, item, &mut each, &mut failed),
                // No device reaches it any more.
                Err(UnmapError {
                    reason: UnmapReason::Detached(buffer),
                    ..
                }) => each(buffer),
                Err(error) => {
                    failed.refused = Some(error);
                    break;
                }
            }
        }
        failed.rest = mappings.collect();
        if let Some((shared, flush)) = self.flush_state(&mut cpu.flush, at)
            && !items.is_empty()
        {
            let home = FlushContext {
                domain_slots: &self.domain_slots,
                cpus: &mut cpu.spaces,
                domain_index: at.domain_handle.index(),
            };
            let retired = self
                .flush
                .queue_unmap_many(shared, flush, home, platform, items, each);
            if let Err((error, owed)) = retired {
                failed.invalidation = Some(error);
                failed.not_invalidated = owed;
            }
        }
        if failed.refused.is_none() && failed.invalidation.is_none() {
            Ok(())
        } else {
            Err(failed)
        }
    }

    /// Hands one cleared mapping to the flush policy, and its buffer to `each` if it is back.
    fn queue_one_unmap<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        item: PendingUnmap<S, B>,
        each: impl FnMut(B),
        failed: &mut UnmapMultiError<B>,
    ) {
        let Some((shared, flush)) = self.flush_state(&mut cpu.flush, at) else {
            return;
        };
        let home = FlushContext {
            domain_slots: &self.domain_slots,
            cpus: &mut cpu.spaces,
            domain_index: at.domain_handle.index(),
        };
        match self.flush.queue_unmap(shared, flush, home, platform, item) {
            Ok(outcome) => outcome.into_buffer().into_iter().for_each(each),
            Err((error, owed)) => {
                failed.invalidation = Some(error);
                failed.not_invalidated.push(owed);
            }
        }
    }

    fn clear<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        mapping: Mapping<B>,
    ) -> Result<PendingUnmap<S, B>, UnmapError<B>> {
        let Mapping { live, bounce } = mapping;
        let range = live.range;
        let here = live.domain_handle == at.domain_handle;
        let parts = self.space_and_cpu(&mut cpu.spaces, at).filter(|_| here);
        let reason = match parts {
            Some((space, _)) if space.ring_of(&range) != at.ring() => {
                UnmapReason::OtherRing(space.ring_of(&range), live.into_still_mapped())
            }
            Some(_) if !self.burst_has_room(&cpu.flush, at, &live) => {
                UnmapReason::BurstFull(live.into_still_mapped())
            }
            Some((space, own)) => match space.unmap(own, platform, range) {
                Ok(gone) => {
                    if let (Some(pool), Some(slot)) = (&self.bounce, &bounce) {
                        pool.finish(platform.memory(), slot, live.direction);
                    }
                    return Ok(live.into_pending_unmap(gone, at.ring()));
                }
                Err(refusal) => refusal.with(live.into_still_mapped()),
            },
            None => self.wrong_domain(live),
        };
        if let (UnmapReason::Detached(_), Some(pool), Some(slot)) = (&reason, &self.bounce, &bounce)
        {
            pool.free(slot);
        }
        Err(UnmapError {
            device: at.device,
            range,
            reason,
        })
    }

    fn burst_has_room(
        &self,
        own: &[Option<F::PerCpu>],
        at: &Attachment,
        live: &LiveMapping<B>,
    ) -> bool {
        own.get(at.domain_handle.index())
            .and_then(Option::as_ref)
            .is_none_or(|own| self.flush.has_room(own, live.burst_key(at.ring())))
    }

    /// Takes a range down at once, whatever the policy, because nobody was told of it. If the
    /// invalidation fails, its addresses are given up rather than reused.
    ///
    /// # Errors
    /// That invalidation failed.
    #[cold]
    pub(crate) fn undo_map<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        range: IovaRange,
    ) -> Result<(), InvalidationError> {
        if let Some((space, own)) = self.space_and_cpu(&mut cpu.spaces, at)
            && let Ok(gone) = space.unmap(own, platform, range)
        {
            return gone
                .iotlb_sync(&mut self.flush_ctx(cpu, at), platform)
                .map_err(|(error, _)| error);
        }
        Ok(())
    }
}
