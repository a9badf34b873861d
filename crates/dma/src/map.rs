//! `map_single` and `unmap_single`: the path of one DMA through the layer.
//!
//! Map (rIOMMU Fig. 4): allocate an IOVA, install the translation, make it visible, return the
//! address for the descriptor. Unmap (Fig. 6), in this order: clear the entry, invalidate the
//! IOTLB, free the IOVA, return the buffer.

use core::mem::ManuallyDrop;

use ringfence_iova::AllocError;
use ringfence_types::{Direction, InvalidationError, PhysRange};

use crate::flush::{FlushPolicy, OpenBursts, Strict};
use crate::space::{Space, SpaceUnmap};
use crate::token::{
    Attachment, BurstKey, LiveMapping, MapResult, Mapping, NotInvalidated, Released,
};
use crate::{Cpu, Dma, MapError, MapReason, Platform, UnmapError, UnmapFailure, UnmapReason};

/// The placement of a request's pieces in the I/O virtual address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// The pieces are mapped at consecutive pages.
    Contiguous,
    /// As `Contiguous`, but the space does not
    /// [keep](crate::space::CachingSpace::CACHES_UNMAPPED) the mapping after its unmap.
    BypassCache,
    /// The space chooses the address of each piece.
    List,
}

/// The memory to map, with its layout and direction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MapArgs<'a> {
    pub(crate) pieces: &'a [PhysRange],
    pub(crate) layout: Layout,
    pub(crate) direction: Direction,
}

impl<'a> MapArgs<'a> {
    /// Describes a single buffer.
    #[inline]
    pub(crate) fn one(memory: &'a PhysRange, direction: Direction) -> Self {
        Self {
            pieces: core::slice::from_ref(memory),
            layout: Layout::Contiguous,
            direction,
        }
    }
}

/// Limit on domain flushes for one map. One flush releases every address that was freed before it.
/// Another is needed only if other CPUs have allocated, used and freed all of those since.
const MAX_FLUSHES: u32 = 8;

/// The steps by which the layer has freed addresses for one map.
#[derive(Debug, Default)]
pub(crate) struct AllocRetries {
    /// Number of flushes of the domain.
    flushes: u32,
    /// True if the flush queue and this CPU's address caches were emptied.
    drained: bool,
}

impl<S: Space, F: FlushPolicy<S, B>, B> Dma<S, F, B> {
    /// Maps the bytes of `memory` for the device in `direction`. The mapping owns `buffer` until
    /// unmap.
    ///
    /// # Errors
    /// Returns the buffer. The layer is unchanged, except for [`MapReason::RollbackFailed`].
    #[inline]
    pub fn map_single<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        buffer: B,
        memory: PhysRange,
        direction: Direction,
    ) -> Result<(Mapping<B>, MapResult), (B, MapError)> {
        // Build the `Mapping` here for bounced buffers as well. Building it in `map_bounced` forces
        // it through memory and causes a store-forwarding stall on the common path.
        let (buffer, bounce, placed) =
            match self.map_common(cpu, platform, at, MapArgs::one(&memory, direction)) {
                Ok(placed) => (buffer, None, placed),
                Err(MapReason::BeyondMask) if !S::UnmapResult::HAS_TABLE => {
                    let bounced = self.map_bounced(cpu, platform, at, buffer, memory, direction);
                    let (buffer, slot, placed) = bounced?;
                    (buffer, Some(slot), placed)
                }
                Err(reason) => return Err((buffer, map_error(at, Some(memory), reason))),
            };
        let live = LiveMapping::new(at, placed.range, direction, buffer);
        Ok((Mapping { live, bounce }, placed))
    }

    /// Unmaps a mapping. The flush policy defines the result: see [`Outcome`](crate::Outcome).
    ///
    /// # Errors
    /// See [`UnmapReason`]. Either nothing changed, or the buffer is withheld because its
    /// invalidation failed.
    #[inline]
    pub fn unmap_single<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        mapping: Mapping<B>,
    ) -> Result<F::Outcome, UnmapError<B>> {
        let Mapping { live, bounce } = mapping;
        // A space with a table never bounces; this code is not compiled for it.
        if !S::UnmapResult::HAS_TABLE
            && let Some(slot) = bounce
        {
            return self.unmap_bounced(cpu, platform, at, live, &[slot]);
        }
        self.unmap_common(cpu, platform, at, live)
    }

    /// Allocates addresses for a request and installs the translations. If addresses are exhausted,
    /// flushes and retries.
    #[inline]
    pub(crate) fn map_common<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        wanted: MapArgs<'_>,
    ) -> Result<MapResult, MapReason> {
        match self.try_map(cpu, platform, at, wanted) {
            Err(MapReason::Alloc(error)) => self.map_cold(cpu, platform, at, wanted, Some(error)),
            other => other,
        }
    }

    #[inline]
    fn try_map<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        wanted: MapArgs<'_>,
    ) -> Result<MapResult, MapReason> {
        self.refresh_if_stale(cpu);
        let parts = self.space_and_cpu(&mut cpu.spaces, at);
        let (space, own) = parts.ok_or(MapReason::NotAttached)?;
        let permissions = wanted.direction.permissions();
        match wanted.layout {
            Layout::Contiguous => space.map(own, platform, wanted.pieces, permissions, at.limits),
            Layout::List => space.map_list(own, platform, wanted.pieces, permissions, at.limits),
            Layout::BypassCache => {
                space.map_bypass_cache(own, platform, wanted.pieces, permissions, at.limits)
            }
        }
    }

    /// Maps like [`map_common`](Self::map_common), out of the path of one DMA. Frees addresses as
    /// the allocator's `error` of an earlier attempt requires.
    #[cold]
    #[inline(never)]
    pub(crate) fn map_cold<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        wanted: MapArgs<'_>,
        mut error: Option<AllocError>,
    ) -> Result<MapResult, MapReason> {
        let mut retries = AllocRetries::default();
        loop {
            if let Some(error) = error {
                self.free_addresses(cpu, platform, at, error, &mut retries)?;
            }
            match self.try_map(cpu, platform, at, wanted) {
                Err(MapReason::Alloc(next)) => error = Some(next),
                other => return other,
            }
        }
    }

    /// Frees addresses as the allocator's `error` requires. The caller then retries its map.
    ///
    /// # Errors
    /// The flush failed, or no retry can succeed.
    #[cold]
    pub(crate) fn free_addresses<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        error: AllocError,
        retries: &mut AllocRetries,
    ) -> Result<(), MapReason> {
        let AllocRetries { flushes, drained } = retries;
        match error {
            AllocError::NeedsFlush if *flushes < MAX_FLUSHES => {
                *flushes += 1;
                self.flush_domain(cpu, platform, at)
                    .map_err(MapReason::Flush)
            }
            AllocError::NeedsFlush => Err(MapReason::FlushRetriesExhausted { flushes: *flushes }),
            // Freed addresses may wait in the flush queue or in this CPU's caches.
            AllocError::Exhausted { .. } if !*drained => {
                *drained = true;
                match self.flush(cpu, platform, at) {
                    // The space keeps the refused ranges, and the others are free now.
                    Ok(()) | Err(UnmapFailure::Refused(_)) => {}
                    Err(UnmapFailure::NotFlushed(error)) => return Err(MapReason::Flush(error)),
                }
                if let Some((space, own)) = self.space_and_cpu(&mut cpu.spaces, at) {
                    space.drain(own);
                }
                Ok(())
            }
            other => Err(MapReason::Alloc(other)),
        }
    }

    /// Clears the translations of a mapping and queues it with the flush policy.
    #[inline]
    pub(crate) fn unmap_common<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        live: LiveMapping<B>,
    ) -> Result<F::Outcome, UnmapError<B>> {
        let range = live.range;
        let failed = |reason| UnmapError {
            device: at.device,
            range,
            reason,
        };
        // A queue that several domains share may make this CPU free ranges of any of them.
        self.refresh_if_stale(cpu);
        if live.domain_handle != at.domain_handle {
            return Err(failed(self.wrong_domain(live)));
        }
        let (Some((space, own)), Some((shared, flush))) = (
            self.space_and_cpu(&mut cpu.spaces, at),
            self.flush_state(&mut cpu.flush, at),
        ) else {
            return Err(failed(self.wrong_domain(live)));
        };
        let ring = space.ring_of(&range);
        if ring != at.ring() {
            return Err(failed(UnmapReason::OtherRing(
                ring,
                live.into_still_mapped(),
            )));
        }
        if !flush.has_room(live.burst_key(ring)) {
            return Err(failed(UnmapReason::BurstFull(live.into_still_mapped())));
        }
        let result = match space.unmap(own, platform, range) {
            Ok(result) => result,
            Err(refusal) => return Err(failed(refusal.with(live.into_still_mapped()))),
        };
        let item = live.into_pending_unmap(result, ring);
        let ctx = self.flush_ctx(&mut cpu.spaces, at.domain());
        self.flush
            .queue_unmap(shared, flush, ctx, platform, item)
            .map_err(|(error, token)| failed(UnmapReason::NotFlushed(error, token)))
    }

    /// Returns the reason why the attachment cannot unmap this mapping: another domain, a detached
    /// domain, or another layer.
    #[cold]
    pub(crate) fn wrong_domain(&self, live: LiveMapping<B>) -> UnmapReason<B> {
        let handle = live.domain_handle;
        if self.domains.space_of(handle).is_some() {
            UnmapReason::OtherDomain(handle.domain(), live.into_still_mapped())
        } else if self.domains.is_stale(handle) {
            UnmapReason::Detached(live.into_buffer())
        } else {
            UnmapReason::NotAttached(live.into_still_mapped())
        }
    }

    /// Ends the burst of unmaps of one direction on this CPU and, if the device has rings, of the
    /// attachment's ring. The layer performs one invalidation, then `each` receives every withheld
    /// buffer. Does nothing under policies that withhold nothing. If the domain was detached
    /// since, `each` receives all buffers that this CPU withheld in it, of all rings and
    /// directions.
    ///
    /// # Errors
    /// The invalidation failed. Buffers that the device may still reach stay withheld.
    #[inline]
    pub fn end_burst<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        direction: Direction,
        each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        self.refresh_if_stale(cpu);
        if self.space(at).is_none() {
            self.release_withheld(cpu, Some(at.domain_handle), each);
            return Ok(());
        }
        let Some((_, flush)) = self.flush_state(&mut cpu.flush, at) else {
            return Ok(());
        };
        let ctx = self.flush_ctx(&mut cpu.spaces, at.domain());
        let ring = at.ring();
        let key = BurstKey { ring, direction };
        flush.end_burst(ctx, platform, key, each)
    }
}

impl<S: Space, F: FlushPolicy<S, B>, B> Dma<S, F, B> {
    /// Makes this CPU's new mappings visible to hardware that does not snoop. The driver calls it
    /// before it writes the doorbell. Only rings defer the write-back to this call, so a burst of
    /// maps writes back cache lines, not single entries.
    #[inline]
    pub fn sync_map<P: Platform>(&self, cpu: &mut Cpu<S, F, B>, platform: &mut P, at: &Attachment) {
        self.refresh_if_stale(cpu);
        if let Some((space, own)) = self.space_and_cpu(&mut cpu.spaces, at) {
            space.sync(own, platform);
        }
    }

    /// Retries the invalidation of one cleared mapping. If its domain was detached since, the
    /// detach already invalidated it.
    ///
    /// # Errors
    /// Returns `token` if an invalidation failed again, or if it belongs to another unit
    /// ([`InvalidationError::Unsupported`]).
    pub fn retry_invalidation<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        token: NotInvalidated<B>,
    ) -> Result<Released<B>, (InvalidationError, NotInvalidated<B>)> {
        self.refresh_if_stale(cpu);
        let handle = token.mapping.domain_handle;
        if self.domains.is_stale(handle) {
            return Ok(Released(ManuallyDrop::into_inner(token.mapping.buffer)));
        }
        if self.domains.space_of(handle).is_none() {
            return Err((InvalidationError::Unsupported, token));
        }
        let mut ctx = self.flush_ctx(&mut cpu.spaces, handle.domain());
        let NotInvalidated { mapping, further } = token;
        let mut further = further.into_vec();
        while let Some(range) = further.pop() {
            if let Err((error, range)) = ctx.invalidate_and_release(range, platform) {
                further.push(range);
                let further = further.into();
                return Err((error, NotInvalidated { mapping, further }));
            }
        }
        Strict::invalidate(&mut ctx, platform, mapping)
    }
}

/// Creates the error of a failed map.
#[cold]
pub(crate) fn map_error(at: &Attachment, buffer: Option<PhysRange>, reason: MapReason) -> MapError {
    MapError {
        device: at.device,
        buffer,
        reason,
    }
}
