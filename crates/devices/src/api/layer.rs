//! The DMA API on top of the mapping layer.

use ringfence_dma::{
    Coherent, Cpu, Dma, FlushPolicy, MapReason, Mapping as LayerMapping, Outcome, Platform,
    Released, Space, UnmapError, UnmapFailure, UnmapReason,
};
use ringfence_types::{PhysRange, RequesterId};

use super::{
    ApiError, Attachments, DeviceRing, DmaApi, DmaHooks, FailedMap, MapFailure, Mapped, NotFreed,
    UnmapCause, UnmapOutcome,
};
use crate::buffer::BufferOwner;
use crate::{Buffer, ByteMemory, DeviceMapping};

/// A device's DMA through a [`Dma`] on one CPU, with hooks. Borrows everything, so creating it
/// costs nothing.
pub struct LayerApi<'a, S: Space, F: FlushPolicy<S, B>, B, P, A, W> {
    /// The mapping layer.
    pub dma: &'a Dma<S, F, B>,
    /// The CPU's handle.
    pub cpu: &'a mut Cpu<S, F, B>,
    /// The CPU's platform.
    pub platform: &'a mut P,
    /// The device's attachments, by ring if necessary.
    pub at: &'a A,
    /// Hooks that the layer calls at each map, unmap, release and sync.
    pub hooks: W,
}

fn mapping<B>(device: RequesterId, handle: &LayerMapping<B>) -> DeviceMapping {
    DeviceMapping {
        device,
        range: handle.range(),
        direction: handle.direction(),
    }
}

impl<S, F, B, P, A, W> LayerApi<'_, S, F, B, P, A, W>
where
    S: Space,
    F: FlushPolicy<S, B>,
    P: Platform,
{
    /// Returns the buffer of an unmap that the layer refused, if no device can access it any more:
    /// its domain was detached, or a retry of the failed invalidation succeeds.
    ///
    /// # Errors
    /// The device may still access the buffer. It is leaked.
    #[cold]
    fn undone(&mut self, error: UnmapError<B>) -> Result<B, ApiError> {
        let UnmapError {
            device,
            range,
            reason,
        } = error;
        let cause = match reason {
            UnmapReason::Detached(buffer) => return Ok(buffer),
            UnmapReason::NotFlushed(_, token) => {
                match self.dma.retry_invalidation(self.cpu, self.platform, token) {
                    Ok(Released(buffer)) => return Ok(buffer),
                    Err((error, _)) => UnmapCause::NotFlushed(error),
                }
            }
            UnmapReason::PartlyUnmapped(UnmapFailure::NotFlushed(error), _) => {
                UnmapCause::NotFlushed(error)
            }
            UnmapReason::BurstFull(_) => UnmapCause::BurstFull,
            UnmapReason::OtherDomain(domain, _) => UnmapCause::OtherDomain(domain),
            _ => UnmapCause::NotMapped,
        };
        Err(ApiError::Unmap {
            device,
            range,
            cause,
        })
    }
}

impl<S, F, B, P, A, W> DmaApi for LayerApi<'_, S, F, B, P, A, W>
where
    S: Space,
    F: FlushPolicy<S, B>,
    B: BufferOwner,
    P: Platform<Memory: ByteMemory>,
    A: Attachments,
    W: DmaHooks<P>,
{
    type Handle = LayerMapping<B>;
    type Memory = P::Memory;

    #[inline]
    fn memory(&self) -> &P::Memory {
        self.platform.memory()
    }

    #[inline]
    fn map(
        &mut self,
        ring: DeviceRing,
        buffer: Buffer,
        memory: PhysRange,
    ) -> Result<Mapped<Self::Handle>, FailedMap> {
        let Some(at) = self.at.targets(ring) else {
            let stop = MapFailure::NoSuchRing;
            return Err(FailedMap {
                buffer,
                failure: stop,
            });
        };
        let made = self.dma.map_single(
            self.cpu,
            self.platform,
            at,
            B::hold(buffer),
            memory,
            ring.direction,
        );
        match made {
            Ok((handle, _)) => {
                let mapping = mapping(at.device(), &handle);
                self.hooks.mapped(self.platform, &mapping, memory);
                Ok(Mapped {
                    iova: handle.iova(),
                    handle,
                })
            }
            Err((buffer, error)) => Err(FailedMap {
                buffer: buffer.release(),
                failure: match error.reason {
                    MapReason::RingFull(_) => MapFailure::Busy,
                    _ => MapFailure::Failed(error),
                },
            }),
        }
    }

    #[inline]
    fn unmap(
        &mut self,
        ring: DeviceRing,
        handle: Self::Handle,
    ) -> Result<Option<Buffer>, ApiError> {
        let at = self.at.targets(ring).ok_or(ApiError::NoSuchRing(ring))?;
        let mapping = mapping(at.device(), &handle);
        self.hooks.unmapping(self.platform, &mapping);
        let released = self.dma.unmap_single(self.cpu, self.platform, at, handle);
        let (buffer, outcome) = match released {
            Ok(released) => {
                let stale = released.is_stale();
                match released.into_buffer() {
                    Some(buffer) if stale => (Some(buffer), UnmapOutcome::Stale),
                    Some(buffer) => (Some(buffer), UnmapOutcome::Released),
                    None => (None, UnmapOutcome::Withheld),
                }
            }
            Err(error) => {
                let buffer = self.undone(error)?;
                (Some(buffer), UnmapOutcome::Released)
            }
        };
        let buffer = buffer.map(B::release);
        self.hooks.unmapped(self.platform, &mapping, outcome);
        Ok(buffer)
    }

    #[inline]
    fn end_burst(
        &mut self,
        ring: DeviceRing,
        mut back: impl FnMut(Buffer),
    ) -> Result<(), ApiError> {
        let at = self.at.targets(ring).ok_or(ApiError::NoSuchRing(ring))?;
        // The hooks use the platform, which the layer borrows until the burst has ended.
        let mut buffers = Vec::new();
        let ended = self
            .dma
            .end_burst(self.cpu, self.platform, at, ring.direction, |buffer| {
                buffers.push(buffer.release());
            });
        for buffer in buffers {
            self.hooks.released(self.platform, &buffer);
            back(buffer);
        }
        ended.map_err(|cause| ApiError::EndBurst {
            device: at.device(),
            cause,
        })
    }

    #[inline]
    fn sync_map(&mut self, ring: DeviceRing) {
        if let Some(at) = self.at.targets(ring) {
            self.dma.sync_map(self.cpu, self.platform, at);
            self.hooks.synced(self.platform);
        }
    }

    fn alloc_coherent(&mut self, ring: DeviceRing, pages: usize) -> Result<Coherent, ApiError> {
        let at = self.at.descriptors(ring);
        let at = at.ok_or(ApiError::NoSuchRing(ring))?;
        self.dma
            .alloc_coherent(self.cpu, self.platform, at, pages)
            .map_err(ApiError::Map)
    }

    fn free_coherent(&mut self, ring: DeviceRing, memory: Coherent) -> Result<(), Box<NotFreed>> {
        let Some(at) = self.at.descriptors(ring) else {
            let error = ApiError::NoSuchRing(ring);
            return Err(Box::new(NotFreed { memory, error }));
        };
        let range = memory.range();
        let freed = self.dma.free_coherent(self.cpu, self.platform, at, memory);
        freed.map_err(|(_, memory)| {
            let error = ApiError::FreeCoherent {
                device: at.device(),
                range,
            };
            Box::new(NotFreed { memory, error })
        })
    }
}
