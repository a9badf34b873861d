//! The mapping layer behind a driver's view of it.

use ringfence_dma::{
    Attachment, Coherent, Cpu, Dma, Flush, Mapping as LayerMapping, Outcome, Platform, Space,
    UnmapReason,
};
use ringfence_types::PhysRange;

use super::{ApiError, DmaApi, Handback, Mapped, Refused, Ring, Stop, UnmapCause, Witness};
use crate::buffer::Custody;
use crate::{Buffer, ByteMemory, Mapping};

/// A device's DMA through a [`Dma`] on one processor, under the eyes of a witness. Borrows everything and costs nothing to make.
pub struct LayerApi<'a, S: Space, F: Flush<S, B>, B, P, W> {
    /// The layer.
    pub dma: &'a Dma<S, F, B>,
    /// The processor's handle.
    pub cpu: &'a mut Cpu<S, F, B>,
    /// The processor's ports.
    pub platform: &'a mut P,
    /// The device.
    pub at: &'a Attachment,
    /// Who is told.
    pub witness: W,
}

impl<S: Space, F: Flush<S, B>, B, P, W> LayerApi<'_, S, F, B, P, W> {
    fn mapping(&self, handle: &LayerMapping<B>) -> Mapping {
        Mapping {
            device: self.at.device(),
            range: handle.range(),
            direction: handle.direction(),
        }
    }
}

impl<S, F, B, P, W> DmaApi for LayerApi<'_, S, F, B, P, W>
where
    S: Space,
    F: Flush<S, B>,
    B: Custody,
    P: Platform<Memory: ByteMemory>,
    W: Witness<P>,
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
        ring: Ring,
        buffer: Buffer,
        memory: PhysRange,
    ) -> Result<Mapped<Self::Handle>, Refused> {
        let made = self.dma.map_single(
            self.cpu,
            self.platform,
            self.at,
            B::hold(buffer),
            memory,
            ring.direction,
        );
        match made {
            Ok((handle, _)) => {
                let mapping = self.mapping(&handle);
                self.witness.mapped(self.platform, &mapping, memory);
                Ok(Mapped {
                    iova: handle.iova(),
                    handle,
                })
            }
            Err((buffer, error)) => Err(Refused {
                buffer: buffer.release(),
                stop: Stop::Failed(error),
            }),
        }
    }

    #[inline]
    fn unmap(&mut self, _ring: Ring, handle: Self::Handle) -> Result<Option<Buffer>, ApiError> {
        let mapping = self.mapping(&handle);
        self.witness.unmapping(self.platform, &mapping);
        let outcome = self
            .dma
            .unmap_single(self.cpu, self.platform, self.at, handle)
            .map_err(|error| ApiError::Unmap {
                device: error.device,
                range: error.range,
                cause: match error.reason {
                    UnmapReason::NotFlushed(error, _) => UnmapCause::NotFlushed(error),
                    UnmapReason::OtherDomain(domain, _) => UnmapCause::OtherDomain(domain),
                    _ => UnmapCause::NotMapped,
                },
            })?;
        let stale = outcome.is_stale();
        let buffer = outcome.into_buffer().map(B::release);
        let handback = match (&buffer, stale) {
            (None, _) => Handback::Withheld,
            (Some(_), true) => Handback::Stale,
            (Some(_), false) => Handback::Released,
        };
        self.witness.unmapped(self.platform, &mapping, handback);
        Ok(buffer)
    }

    #[inline]
    fn end_burst(&mut self, ring: Ring, mut back: impl FnMut(Buffer)) -> Result<(), ApiError> {
        // The witness looks at the platform, which the layer has in use until the burst has ended.
        let mut buffers = Vec::new();
        let ended =
            self.dma
                .end_burst(self.cpu, self.platform, self.at, ring.direction, |buffer| {
                    buffers.push(buffer.release());
                });
        for buffer in buffers {
            self.witness.released(self.platform, &buffer);
            back(buffer);
        }
        ended.map_err(|cause| ApiError::EndBurst {
            device: self.at.device(),
            cause,
        })
    }

    fn alloc_coherent(&mut self, _ring: Ring, pages: usize) -> Result<Coherent, ApiError> {
        self.dma
            .alloc_coherent(self.cpu, self.platform, self.at, pages)
            .map_err(ApiError::Map)
    }

    fn free_coherent(&mut self, _ring: Ring, memory: Coherent) -> Result<(), ApiError> {
        let range = memory.range();
        self.dma
            .free_coherent(self.cpu, self.platform, self.at, memory)
            .map_err(|_| ApiError::FreeCoherent {
                device: self.at.device(),
                range,
            })
    }
}
