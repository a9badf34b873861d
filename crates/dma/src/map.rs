//! `map_single` and `unmap_single`: the path of one DMA through the layer.
//!
//! Map (rIOMMU Fig. 4): allocate an IOVA, install the translation, make it visible, return the address to write into the
//! descriptor. Unmap (Fig. 6), in this order: remove the entry, purge the IOTLB, free the IOVA, hand the buffer up.

use ringfence_iova::AllocError;
use ringfence_types::{Direction, InvalidationError, PhysRange};

use crate::flush::{Cleared, Flush, Home, Lane, Released, Strict};
use crate::mapping::Live;
use crate::space::{Placed, Space};
use crate::{
    Attachment, Cpu, Dma, MapError, MapReason, Mapping, Owed, Platform, UnmapError, UnmapReason,
};

/// How the pieces of a request lie in the device's eyes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// At consecutive pages.
    Run,
    /// Wherever the space puts each.
    List,
}

impl<S: Space, F: Flush<S, B>, B> Dma<S, F, B> {
    /// Makes the bytes of `memory` reachable by the device in `direction`, and takes `buffer` into custody until unmap.
    ///
    /// # Errors
    /// The buffer comes back; the layer is as before.
    #[inline]
    pub fn map_single<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        buffer: B,
        memory: PhysRange,
        direction: Direction,
    ) -> Result<(Mapping<B>, Placed), (B, MapError)> {
        match self.place(
            cpu,
            platform,
            at,
            Shape::Run,
            core::slice::from_ref(&memory),
            direction,
        ) {
            Ok(placed) => Ok((
                Mapping {
                    live: Live::new(at, placed.range, direction, buffer),
                    bounce: None,
                },
                placed,
            )),
            Err(MapReason::BeyondMask) => {
                self.map_bounced(cpu, platform, at, buffer, memory, direction)
            }
            Err(reason) => Err((buffer, refused(at, Some(memory), reason))),
        }
    }

    /// Takes a mapping down. What comes back depends on the flush policy: see [`Outcome`](crate::Outcome).
    ///
    /// # Errors
    /// See [`UnmapReason`]: either nothing has changed, or the buffer is still owed because its invalidation failed.
    #[inline]
    pub fn unmap_single<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        mapping: Mapping<B>,
    ) -> Result<F::Outcome, UnmapError<B>> {
        if let Some(slot) = mapping.bounce {
            return self.unmap_bounced(cpu, platform, at, mapping, slot);
        }
        self.take_down(cpu, platform, at, mapping.live)
    }

    /// Finds addresses for `pieces` and installs them; flushes and tries once more when addresses have run out.
    #[inline]
    pub(crate) fn place<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        shape: Shape,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Result<Placed, MapReason> {
        match self.try_place(cpu, platform, at, shape, pieces, direction) {
            Err(MapReason::Alloc(AllocError::NeedsFlush)) => {
                self.flush_domain(cpu, platform, at.index)
                    .map_err(MapReason::Flush)?;
                self.try_place(cpu, platform, at, shape, pieces, direction)
            }
            Err(MapReason::Alloc(AllocError::Exhausted { .. })) => {
                // Addresses may be waiting for their flush, or in this processor's caches.
                self.flush(cpu, platform, at).map_err(MapReason::Flush)?;
                if let (Some(space), Some(own)) =
                    (self.spaces.get(at.index), cpu.spaces.get_mut(at.index))
                {
                    space.drain(own);
                }
                self.try_place(cpu, platform, at, shape, pieces, direction)
            }
            other => other,
        }
    }

    #[inline]
    fn try_place<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        shape: Shape,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Result<Placed, MapReason> {
        if at.index >= cpu.spaces.len() {
            self.extend(cpu);
        }
        let (Some(space), Some(own)) = (self.spaces.get(at.index), cpu.spaces.get_mut(at.index))
        else {
            return Err(MapReason::NotAttached);
        };
        let permissions = direction.permissions();
        match shape {
            Shape::Run => space.map(own, platform, pieces, permissions, at.limits),
            Shape::List => space.map_list(own, platform, pieces, permissions, at.limits),
        }
    }

    /// Clears the translations of a mapping and hands the rest to the flush policy.
    #[inline]
    pub(crate) fn take_down<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        live: Live<B>,
    ) -> Result<F::Outcome, UnmapError<B>> {
        let (range, domain) = (live.range, live.domain);
        let failed = |reason| UnmapError {
            device: at.device,
            range,
            reason,
        };
        // A queue that several domains share may hand this processor ranges of any of them to free.
        if cpu.spaces.len() < self.spaces.len() {
            self.extend(cpu);
        }
        if domain != at.domain() {
            return Err(failed(UnmapReason::OtherDomain(domain, live.into_buffer())));
        }
        let (Some(space), Some(shared), Some(own), Some(flush)) = (
            self.spaces.get(at.index),
            self.shared.get(at.index),
            cpu.spaces.get_mut(at.index),
            cpu.flush.get_mut(at.index),
        ) else {
            return Err(failed(UnmapReason::NotAttached(live.into_buffer())));
        };
        let ring = space.ring_of(&range);
        if ring != at.ring() {
            return Err(failed(UnmapReason::OtherRing(ring, live.into_buffer())));
        }
        let gone = match space.unmap(own, platform, range) {
            Ok(gone) => gone,
            Err(refusal) => return Err(failed(refusal.with(live.into_buffer()))),
        };
        let item = live.retiring(gone, ring);
        let home = Home {
            spaces: &self.spaces,
            cpus: &mut cpu.spaces,
            here: at.index,
        };
        self.flush
            .retire(shared, flush, home, platform, item)
            .map_err(|(error, owed)| failed(UnmapReason::NotFlushed(error, owed)))
    }

    /// Ends the burst of unmaps of one direction and, where the device has rings, of the attachment's ring on this processor: one invalidation, then `each` receives every withheld buffer.
    /// Does nothing under policies that withhold nothing.
    ///
    /// # Errors
    /// The invalidation failed: buffers that are not safe stay withheld.
    #[inline]
    pub fn end_burst<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        direction: Direction,
        each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        let Some(flush) = cpu.flush.get_mut(at.index) else {
            return Ok(());
        };
        let home = Home {
            spaces: &self.spaces,
            cpus: &mut cpu.spaces,
            here: at.index,
        };
        let lane = Lane {
            ring: at.ring(),
            direction,
        };
        self.flush.end_burst(flush, home, platform, lane, each)
    }
}

impl<S: Space, F: Flush<S, B>, B> Dma<S, F, B> {
    /// Makes what this processor has mapped visible to hardware that does not snoop: before the device is told of new addresses by the
    /// write to its doorbell. Only rings leave that to this call, so that a burst of maps writes lines back and not entries.
    #[inline]
    pub fn doorbell<P: Platform>(&self, cpu: &mut Cpu<S, F, B>, platform: &mut P, at: &Attachment) {
        if let (Some(space), Some(own)) = (self.spaces.get(at.index), cpu.spaces.get_mut(at.index))
        {
            space.sync(own, platform);
        }
    }

    /// Tries the invalidation of an owed mapping again, by itself.
    ///
    /// # Errors
    /// It failed again: what is owed comes back.
    pub fn settle<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        owed: Owed<B>,
    ) -> Result<Released<B>, (InvalidationError, Owed<B>)> {
        self.extend(cpu);
        let mut home = self.home(cpu, at);
        let Cleared {
            gone,
            direction,
            buffer,
        } = owed.cleared;
        Strict::purge(&mut home, platform, gone, direction, buffer)
    }
}

/// The error of a refused map.
#[cold]
pub(crate) fn refused(at: &Attachment, buffer: Option<PhysRange>, reason: MapReason) -> MapError {
    MapError {
        device: at.device,
        buffer,
        reason,
    }
}
