//! `map_multi` and `unmap_multi`: many buffers in one call (CG10). The maps share the requests to
//! the owner of the table, and the unmaps share one invalidation. Also the immediate unmap that
//! undoes a map under every flush policy.

use alloc::vec::Vec;
use core::fmt;

use ringfence_types::{Direction, InvalidationError, IovaRange, PhysRange};

use crate::domain_table::domain_index;
use crate::error::UnmapRefusal;
use crate::flush::{FlushPolicy, OpenBursts};
use crate::map::map_error;
use crate::space::Space;
use crate::token::{Attachment, LiveMapping, Mapping, NotInvalidated, Outcome, PendingUnmap};
use crate::{Cpu, Dma, MapError, MapReason, Platform, UnmapError, UnmapFailure, UnmapReason};

/// One buffer of [`Dma::map_multi`].
#[derive(Debug)]
pub struct MapMultiRequest<B> {
    /// The embedder's representation of the buffer.
    pub buffer: B,
    /// The buffer's memory.
    pub memory: PhysRange,
    /// The direction of the mapping.
    pub direction: Direction,
}

/// All requests of a failed [`Dma::map_multi`], in order, with the error.
pub type MapMultiError<B> = (Vec<MapMultiRequest<B>>, MapError);

/// The mappings that [`Dma::unmap_multi`] did not complete. All other mappings of the call are
/// unmapped, and `each` received their buffers.
#[derive(Debug)]
pub struct UnmapMultiError<B> {
    /// The first mapping that was rejected, unchanged.
    pub refused: Option<UnmapError<B>>,
    /// The untouched mappings after the rejected one.
    pub rest: Vec<Mapping<B>>,
    /// Mappings whose entries are cleared and whose invalidation failed; see
    /// [`Dma::retry_invalidation`].
    pub not_invalidated: Vec<NotInvalidated<B>>,
    /// The first error of their invalidations.
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
                "{} mappings are not invalidated: {error}",
                self.not_invalidated.len()
            )?;
        }
        Ok(())
    }
}

impl<B: fmt::Debug> core::error::Error for UnmapMultiError<B> {}

impl<S: Space, F: FlushPolicy<S, B>, B> Dma<S, F, B> {
    /// Maps every buffer of `requests`, or none. A space that
    /// [maps many](crate::space::SgSpace::MAPS_MANY) makes them visible together. If it is short of
    /// addresses for all of them, the layer maps one after the other and frees addresses on demand.
    ///
    /// # Errors
    /// Returns the requests in order. The layer is unchanged, unless the reason is
    /// [`MapReason::RollbackFailed`](crate::MapReason::RollbackFailed).
    pub fn map_multi<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        requests: Vec<MapMultiRequest<B>>,
    ) -> Result<Vec<Mapping<B>>, MapMultiError<B>> {
        if !S::MAPS_MANY || requests.len() < 2 {
            return self.map_one_by_one(cpu, platform, at, requests);
        }
        self.refresh_if_stale(cpu);
        let mut placed = Vec::with_capacity(requests.len());
        let pieces = requests
            .iter()
            .map(|request| (&request.memory, request.direction.permissions()));
        let mapped = match self.space_and_cpu(&mut cpu.spaces, at) {
            Some((space, own)) => space.map_many(own, platform, pieces, at.limits, &mut placed),
            None => Err(MapReason::NotAttached),
        };
        match mapped {
            Ok(()) => {}
            Err(MapReason::Alloc(_)) => return self.map_one_by_one(cpu, platform, at, requests),
            Err(reason) => {
                // A refusal of the table names its buffer. A refusal of all names the first.
                let buffer = requests.get(placed.len()).or(requests.first());
                let error = map_error(at, buffer.map(|request| request.memory), reason);
                return Err((requests, error));
            }
        }
        let mappings = requests
            .into_iter()
            .zip(placed)
            .map(|(request, range)| Mapping {
                live: LiveMapping::new(at, range, request.direction, request.buffer),
                bounce: None,
            });
        Ok(mappings.collect())
    }

    /// Maps every buffer of `requests` with a map of its own, or none.
    fn map_one_by_one<P: Platform>(
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
                    error.reason.fail_rollback(failed);
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

    /// Unmaps many mappings; `each` receives the buffers that the policy releases. If the policy
    /// invalidates at every unmap, one invalidation covers them all. Under other policies each
    /// mapping is unmapped separately, within the bound of a burst: the first mapping above the
    /// bound is rejected, and the later ones are returned untouched.
    ///
    /// # Errors
    /// See [`UnmapMultiError`].
    #[expect(
        clippy::result_large_err,
        reason = "the error owns the mappings, and a box could fail to allocate"
    )]
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
                // Queue it now, so that the policy counts it before the check for the next mapping.
                Ok(item) => self.queue_one_unmap(cpu, platform, at, item, &mut each, &mut failed),
                // The domain was detached: no device reaches the buffer.
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
            let ctx = self.flush_ctx(&mut cpu.spaces, at.domain());
            let retired = self
                .flush
                .queue_unmap_many(shared, flush, ctx, platform, items, each);
            if let Err((error, token)) = retired {
                failed.invalidation = Some(error);
                failed.not_invalidated = token;
            }
        }
        if failed.refused.is_none() && failed.invalidation.is_none() {
            Ok(())
        } else {
            Err(failed)
        }
    }

    /// Queues one cleared mapping with the flush policy. Passes its buffer to `each` if the policy
    /// releases it.
    fn queue_one_unmap<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        item: PendingUnmap<S::UnmapResult, B>,
        each: impl FnMut(B),
        failed: &mut UnmapMultiError<B>,
    ) {
        let Some((shared, flush)) = self.flush_state(&mut cpu.flush, at) else {
            return;
        };
        let ctx = self.flush_ctx(&mut cpu.spaces, at.domain());
        match self.flush.queue_unmap(shared, flush, ctx, platform, item) {
            Ok(outcome) => outcome.into_buffer().into_iter().for_each(each),
            Err((error, token)) => {
                failed.invalidation.get_or_insert(error);
                failed.not_invalidated.push(token);
            }
        }
    }

    fn clear<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        mapping: Mapping<B>,
    ) -> Result<PendingUnmap<S::UnmapResult, B>, UnmapError<B>> {
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
                Ok(result) => {
                    if let (Some(pool), Some(slot)) = (&self.bounce, &bounce) {
                        pool.finish(platform.memory(), slot, live.direction);
                    }
                    return Ok(live.into_pending_unmap(result, at.ring()));
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
        own.get(domain_index(at.domain()))
            .and_then(Option::as_ref)
            .is_none_or(|own| own.has_room(live.burst_key(at.ring())))
    }

    /// Unmaps and invalidates a range at once under every policy, because no driver has received
    /// its address.
    ///
    /// # Errors
    /// The device may still reach the range. The layer never reuses its addresses.
    #[cold]
    pub(crate) fn undo_map<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        range: IovaRange,
    ) -> Result<(), UnmapFailure> {
        let unmapped = match self.space_and_cpu(&mut cpu.spaces, at) {
            Some((space, own)) => {
                // The device wrote nothing for the driver.
                space.set_received(range, 0);
                space.unmap(own, platform, range)
            }
            None => Err(UnmapRefusal::NotAllocated),
        };
        let unmapped = unmapped.map_err(UnmapFailure::Refused)?;
        self.flush_ctx(&mut cpu.spaces, at.domain())
            .iotlb_sync(unmapped, platform)
            .map_err(|(error, _)| UnmapFailure::NotFlushed(error))
    }
}
