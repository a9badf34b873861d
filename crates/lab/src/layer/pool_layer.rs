//! The layer of a mode whose drivers take their buffers from a pool that stays mapped.
//!
//! A trace's buffers have addresses of their own. This layer therefore replays each map as the
//! allocation of a buffer of the same size, and each unmap as the driver's copy of the bytes that
//! it inspects and the return of the buffer to the pool. The trace's address of a buffer only names
//! the memory that the driver copies these bytes to.

use std::hint::black_box;

use ringfence_dma::flush::FlushPolicy;
use ringfence_dma::space::{CopyPool, LendingSpace, Space};
use ringfence_dma::{DmaSegment, MapError, MapReason, NotInvalidated, ShadowError};
use ringfence_trace::DeviceIndex;
use ringfence_types::{
    Direction, DomainId, Invalidator, IovaRange, Nanos, PageSize, PfnRange, PhysAddr, PhysRange,
    RequesterId,
};

use super::mapping_token::LentBuffer;
use super::{
    ContextTarget, DmaLayer, DmaOps, HasPlatform, LayerPlatform, Mapped, MappingToken, OpKey,
    Refusal, SpaceTraits, UnmapOutcome,
};
use crate::error::LabError;

/// Bytes of the largest buffer of a pool (assumed: the largest packet without jumbograms).
pub const LARGEST_BUFFER: u64 = 64 << 10;

/// Bytes of a received buffer that the driver inspects, unless the options say otherwise (assumed:
/// room for the headers of the link, the network and the transport).
pub const INSPECTED_BYTES: u32 = 128;

/// The destination of the bytes that the driver inspects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inspected {
    /// An array of the layer, for timed replays: the bytes are copied once.
    Array,
    /// The buffer's own address in the trace as well, which is the driver's memory.
    TraceBuffer,
}

/// A layer that lends its buffers to the driver.
pub struct PoolLayer<S: Space, F: FlushPolicy<S, u64>, I> {
    layer: DmaLayer<S, F, I>,
    inspected: Vec<u8>,
    to: Inspected,
}

impl<S: Space + LendingSpace, F: FlushPolicy<S, u64>, I: Invalidator> PoolLayer<S, F, I> {
    /// Lends buffers of the spaces of `layer`. The driver inspects the first `bytes` bytes of each
    /// buffer that the device writes.
    pub fn new(layer: DmaLayer<S, F, I>, bytes: u32, to: Inspected) -> Self {
        Self {
            layer,
            inspected: vec![0; bytes as usize],
            to,
        }
    }

    /// Copies the bytes that the driver inspects, and frees the buffer.
    #[inline(always)]
    fn finish(&mut self, key: OpKey, lent: LentBuffer) -> UnmapOutcome {
        let Some(own) = self.layer.parts(key) else {
            return UnmapOutcome::Refused(Refusal::Other);
        };
        let LentBuffer {
            posted,
            buffer,
            driver,
        } = lent;
        if posted.domain() != own.at.domain() {
            return UnmapOutcome::Refused(Refusal::OtherOwner);
        }
        let written = match posted.direction() {
            Direction::ToDevice => 0,
            _ => posted.range().bytes(),
        };
        let Ok(mut received) = posted.unmap(written) else {
            return UnmapOutcome::Refused(Refusal::Other);
        };
        let bytes = written.min(self.inspected.len() as u64) as usize;
        let inspected = &mut self.inspected[..bytes];
        let read = own.dma.read_buffer(own.platform, &mut received, inspected);
        black_box(&inspected);
        if read.is_ok() && self.to == Inspected::TraceBuffer {
            let arena = &own.platform.arena;
            // A trace's address may lie outside memory; then nobody reads the bytes.
            let _ = arena.write_bytes(driver, inspected);
        }
        let freed = own.dma.free_buffer(own.cpu, received.into_buffer());
        if read.is_err() || freed.is_err() {
            return UnmapOutcome::Refused(Refusal::Other);
        }
        UnmapOutcome::Returned {
            buffer,
            stale: false,
        }
    }
}

impl<S: Space, F: FlushPolicy<S, u64>, I> HasPlatform<I> for PoolLayer<S, F, I> {
    fn platform(&self) -> &LayerPlatform<I> {
        self.layer.platform()
    }
}

impl<S: Space + LendingSpace, F: FlushPolicy<S, u64>, I: Invalidator> DmaOps
    for PoolLayer<S, F, I>
{
    #[inline(always)]
    fn space_traits(&self) -> SpaceTraits {
        SpaceTraits {
            lends: true,
            ..self.layer.space_traits()
        }
    }

    #[inline(always)]
    fn set_time(&mut self, now: Nanos) {
        self.layer.set_time(now);
    }

    fn reserve(&mut self, cpus: usize, segments: usize) -> Result<(), LabError> {
        self.layer.reserve(cpus, segments)
    }

    fn is_attached(&self, index: DeviceIndex) -> bool {
        self.layer.is_attached(index)
    }

    fn attach(
        &mut self,
        index: DeviceIndex,
        device: RequesterId,
    ) -> Result<(DomainId, ContextTarget), LabError> {
        self.layer.attach(index, device)
    }

    fn detach(&mut self, index: DeviceIndex) -> Result<(), LabError> {
        self.layer.detach(index)
    }

    /// Claims a mapping of the layer's other path. It has none: buffers of the pool have no address
    /// that a driver could claim.
    fn claim(&mut self, key: OpKey, range: IovaRange, buffer: u64) -> Option<MappingToken> {
        self.layer.claim(key, range, buffer)
    }

    #[inline(always)]
    fn map(&mut self, key: OpKey, buffer: u64, pieces: &[PhysRange]) -> Result<Mapped, MapError> {
        let Some(own) = self.layer.parts(key) else {
            return Err(error(key, pieces, MapReason::NotAttached));
        };
        // A list has one buffer for all of its segments.
        let sizes = pieces.iter().map(PhysRange::bytes);
        let bytes = sizes.fold(0, u64::saturating_add);
        if bytes > LARGEST_BUFFER {
            return Err(error(key, pieces, too_long(bytes)));
        }
        let (dma, direction) = (own.dma, key.direction);
        let lent = dma.alloc_buffer(own.cpu, own.platform, own.at, bytes, direction)?;
        Ok(Mapped {
            token: MappingToken::Lent(LentBuffer {
                posted: lent.for_device(),
                buffer,
                driver: pieces.first().map_or(PhysAddr::ZERO, PhysRange::start),
            }),
            steps: 0,
        })
    }

    fn segments(&self) -> &[DmaSegment] {
        self.layer.segments()
    }

    fn each_reserved(
        &self,
        key: OpKey,
        token: &MappingToken,
        pieces: usize,
        each: &mut dyn FnMut(Option<PfnRange>),
    ) {
        self.layer.each_reserved(key, token, pieces, each);
    }

    fn shadow(&self, key: OpKey, range: IovaRange) -> Option<PhysRange> {
        self.layer.shadow(key, range)
    }

    fn copies(&self, device: DeviceIndex) -> Option<CopyPool> {
        self.layer.copies(device)
    }

    #[inline(always)]
    fn unmap(&mut self, key: OpKey, token: MappingToken) -> UnmapOutcome {
        match token {
            MappingToken::Lent(lent) => self.finish(key, lent),
            other => self.layer.unmap(key, other),
        }
    }

    fn retry_invalidation(
        &mut self,
        token: NotInvalidated<u64>,
    ) -> Result<u64, NotInvalidated<u64>> {
        self.layer.retry_invalidation(token)
    }

    fn end_burst(&mut self, key: OpKey, returned: Option<&mut Vec<u64>>) {
        self.layer.end_burst(key, returned);
    }

    #[inline(always)]
    fn sync_map(&mut self, key: OpKey) {
        self.layer.sync_map(key);
    }

    fn tick(&mut self) {
        self.layer.tick();
    }
}

/// Returns the reason why a buffer is larger than any of the pool.
#[cold]
fn too_long(bytes: u64) -> MapReason {
    let page = PageSize::Size4K.bytes();
    MapReason::Shadow(ShadowError::TooLong {
        pages: bytes.div_ceil(page),
        slot: LARGEST_BUFFER / page,
    })
}

#[cold]
fn error(key: OpKey, pieces: &[PhysRange], reason: MapReason) -> MapError {
    MapError {
        device: RequesterId::new(key.device.0),
        buffer: pieces.first().copied(),
        reason,
    }
}
