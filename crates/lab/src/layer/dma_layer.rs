//! The implementation of [`DmaOps`] for every space and flush policy.

use std::hint::black_box;

use ringfence_dma::flush::{FlushPolicy, Released};
use ringfence_dma::space::{CopyPool, Space};
use ringfence_dma::{
    AttachError, Attachment, Cpu, Dma, DmaSegment, MapError, MapMultiRequest, MapReason, Mapping,
    NotInvalidated, Outcome, SgLimits, SgRequest, Teardown, UnmapReason,
};
use ringfence_trace::DeviceIndex;
use ringfence_types::{
    Direction, DomainId, Invalidator, Iova, IovaRange, Nanos, PfnRange, PhysRange, RequesterId,
};

use super::{
    AttachInfo, Attachments, ContextTarget, DmaOps, HasPlatform, LayerPlatform, Mapped,
    MappingToken, OpKey, Refusal, SpaceResult, SpaceTraits, UnmapOutcome,
};
use crate::error::LabError;
use crate::withholds::Withholds;

/// Creates the space of a device, and the target of its context entry.
pub type MakeSpace<S, I> = Box<dyn FnMut(&AttachInfo, &LayerPlatform<I>) -> SpaceResult<S>>;

/// A DMA layer with its CPU handles, on its own platform.
pub struct DmaLayer<S: Space, F: FlushPolicy<S, u64>, I> {
    dma: Dma<S, F, u64>,
    cpus: Vec<Cpu<S, F, u64>>,
    attachments: Vec<Option<Attachments>>,
    segments: Vec<DmaSegment>,
    /// Memory, clock and invalidator of the layer.
    pub platform: LayerPlatform<I>,
    make: MakeSpace<S, I>,
    withholds: Withholds,
}

/// The parts of a layer that an operation uses.
pub(super) struct Parts<'a, S: Space, F: FlushPolicy<S, u64>, I> {
    pub(super) dma: &'a Dma<S, F, u64>,
    pub(super) cpu: &'a mut Cpu<S, F, u64>,
    pub(super) platform: &'a mut LayerPlatform<I>,
    pub(super) at: &'a Attachment,
    segments: &'a mut [DmaSegment],
}

impl<S: Space, F: FlushPolicy<S, u64>, I: Invalidator> DmaLayer<S, F, I> {
    /// Creates a layer without domains. `make` creates the space of each device.
    pub fn new(
        flush: F,
        platform: LayerPlatform<I>,
        make: impl FnMut(&AttachInfo, &LayerPlatform<I>) -> SpaceResult<S> + 'static,
    ) -> Self {
        Self::boxed(flush, platform, Box::new(make))
    }

    /// The part of [`new`](Self::new) that layers of one type share.
    #[inline(never)]
    fn boxed(flush: F, platform: LayerPlatform<I>, make: MakeSpace<S, I>) -> Self {
        Self {
            dma: Dma::new(flush),
            cpus: Vec::new(),
            attachments: Vec::new(),
            segments: Vec::new(),
            platform,
            make,
            withholds: Withholds::All,
        }
    }

    /// Sets the buffers that the driver's descriptors withhold, if the policy has descriptors.
    pub fn withholding(self, withholds: Withholds) -> Self {
        Self { withholds, ..self }
    }

    /// Returns the parts for an operation; `None` if its device or its CPU is unknown.
    #[inline(always)]
    pub(super) fn parts(&mut self, key: OpKey) -> Option<Parts<'_, S, F, I>> {
        let attachments = self.attachments.get(key.device.index())?.as_ref()?;
        Some(Parts {
            dma: &self.dma,
            cpu: self.cpus.get_mut(usize::from(key.cpu))?,
            platform: &mut self.platform,
            at: attachments.for_direction(key.direction),
            segments: &mut self.segments,
        })
    }
}

impl<S: Space, F: FlushPolicy<S, u64>, I> HasPlatform<I> for DmaLayer<S, F, I> {
    fn platform(&self) -> &LayerPlatform<I> {
        &self.platform
    }
}

impl<S: Space, F: FlushPolicy<S, u64>, I: Invalidator> DmaOps for DmaLayer<S, F, I> {
    #[inline(always)]
    fn space_traits(&self) -> SpaceTraits {
        SpaceTraits {
            contiguous_sg: S::CONTIGUOUS_SG,
            caches_unmapped: S::CACHES_UNMAPPED,
            can_be_full: S::CAN_BE_FULL,
            lends: false,
            descriptors: F::BURST_IS_DESCRIPTOR.then_some(self.withholds),
        }
    }

    #[inline(always)]
    fn set_time(&mut self, now: Nanos) {
        self.platform.now = now;
    }

    fn reserve(&mut self, cpus: usize, segments: usize) -> Result<(), LabError> {
        while self.cpus.len() < cpus {
            self.cpus.push(self.dma.cpu());
        }
        if self.segments.len() < segments {
            let range = IovaRange::new(Iova::ZERO, 1).ok_or(LabError::Internal("segment"))?;
            self.segments.resize(segments, DmaSegment { range });
        }
        Ok(())
    }

    fn is_attached(&self, index: DeviceIndex) -> bool {
        matches!(self.attachments.get(index.index()), Some(Some(_)))
    }

    fn attach(
        &mut self,
        index: DeviceIndex,
        device: RequesterId,
    ) -> Result<(DomainId, ContextTarget), LabError> {
        let (platform, make) = (&self.platform, &mut self.make);
        let mut target = ContextTarget::PassThrough;
        // Use dynamic dispatch, so that layers with the same space on different platforms share
        // one copy of the caller.
        let make: &mut dyn FnMut(DomainId) -> Result<S, LabError> = &mut |domain| {
            let info = AttachInfo {
                domain,
                device,
                index,
            };
            let (space, to) = make(&info, platform)?;
            target = to;
            Ok(space)
        };
        let at = self.dma.attach(device, Iova::new(u64::MAX), make);
        let at = at.map_err(|error| match error {
            AttachError::Space(error) => error,
            _ => LabError::TooManyDevices,
        })?;
        if self.attachments.len() <= index.index() {
            self.attachments.resize(index.index() + 1, None);
        }
        self.attachments[index.index()] = Some(Attachments::new(&self.dma, at));
        Ok((at.domain(), target))
    }

    fn detach(&mut self, index: DeviceIndex) -> Result<(), LabError> {
        let attachments = self.attachments.get_mut(index.index());
        let (Some(attachments), Some(cpu)) = (attachments, self.cpus.first_mut()) else {
            return Err(LabError::Internal("a detach without a device or a CPU"));
        };
        let found = attachments.ok_or(LabError::Internal("a detach of an unknown device"))?;
        let at = found.for_direction(Direction::ToDevice);
        let (platform, forced) = (&mut self.platform, Teardown::Forced);
        let detached = self
            .dma
            .detach(cpu, platform, at, forced, |_| (), discard_buffer);
        detached.map_err(|_| LabError::Internal("a detach that the layer refuses"))?;
        *attachments = None;
        Ok(())
    }

    fn claim(&mut self, key: OpKey, range: IovaRange, buffer: u64) -> Option<MappingToken> {
        let own = self.parts(key)?;
        let claimed = Mapping::claim(own.at, range, key.direction, buffer);
        Some(MappingToken::Single(claimed))
    }

    #[inline(always)]
    fn map(&mut self, key: OpKey, buffer: u64, pieces: &[PhysRange]) -> Result<Mapped, MapError> {
        let Some(own) = self.parts(key) else {
            return Err(not_attached(key));
        };
        let (dma, direction) = (own.dma, key.direction);
        let mapped = if let [piece] = pieces {
            dma.map_single(own.cpu, own.platform, own.at, buffer, *piece, direction)
                .map(|(mapping, placed)| Mapped {
                    token: MappingToken::Single(mapping),
                    steps: placed.steps,
                })
        } else {
            let request = SgRequest {
                buffer,
                pieces,
                direction,
                limits: SgLimits::default(),
                out: own.segments,
            };
            dma.map_sg(own.cpu, own.platform, own.at, request)
                .map(|(mapping, _)| Mapped {
                    steps: mapping.steps,
                    token: MappingToken::List(mapping),
                })
        };
        mapped.map_err(|(_, error)| error)
    }

    fn map_multi(
        &mut self,
        key: OpKey,
        buffers: &[(u64, PhysRange)],
    ) -> Result<Vec<MappingToken>, MapError> {
        let Some(own) = self.parts(key) else {
            return Err(not_attached(key));
        };
        let requests = buffers
            .iter()
            .map(|(buffer, memory)| MapMultiRequest {
                buffer: *buffer,
                memory: *memory,
                direction: key.direction,
            })
            .collect();
        let mapped = own
            .dma
            .map_multi(own.cpu, own.platform, own.at, requests)
            .map_err(|(_, error)| error)?;
        Ok(mapped.into_iter().map(MappingToken::Single).collect())
    }

    fn segments(&self) -> &[DmaSegment] {
        &self.segments
    }

    fn each_reserved(
        &self,
        key: OpKey,
        token: &MappingToken,
        pieces: usize,
        each: &mut dyn FnMut(Option<PfnRange>),
    ) {
        if let (MappingToken::List(_), None, false) = (token, token.range(), S::CONTIGUOUS_SG) {
            for segment in self.segments.iter().take(pieces) {
                each(Some(PfnRange::covering(&segment.range)));
            }
            return;
        }
        let reserved = || {
            let mapped = PfnRange::covering(&token.range()?);
            let attachments = self.attachments.get(key.device.index())?.as_ref()?;
            let space = self.dma.space(attachments.for_direction(key.direction))?;
            Some(space.reserved(mapped))
        };
        each(reserved());
    }

    fn shadow(&self, key: OpKey, range: IovaRange) -> Option<PhysRange> {
        let attachments = self.attachments.get(key.device.index())?.as_ref()?;
        let space = self.dma.space(attachments.for_direction(key.direction))?;
        space.shadow(range)
    }

    fn copied_parts(&self, key: OpKey, range: IovaRange) -> Vec<(IovaRange, PhysRange)> {
        let mut parts = Vec::new();
        let attachments = self.attachments.get(key.device.index());
        let at = attachments.and_then(Option::as_ref);
        let at = at.map(|at| at.for_direction(key.direction));
        if let Some(space) = at.and_then(|at| self.dma.space(at)) {
            space.each_copied_part(range, &mut |iova, copy| parts.push((iova, copy)));
        }
        parts
    }

    fn copies(&self, device: DeviceIndex) -> Option<CopyPool> {
        let attachments = self.attachments.get(device.index())?.as_ref()?;
        let at = attachments.for_direction(Direction::ToDevice);
        self.dma.space(at)?.copies()
    }

    #[inline(always)]
    fn unmap(&mut self, key: OpKey, token: MappingToken) -> UnmapOutcome {
        let Some(own) = self.parts(key) else {
            return UnmapOutcome::Refused(Refusal::Other);
        };
        let outcome = match token {
            MappingToken::None | MappingToken::Lent(_) => {
                return UnmapOutcome::Refused(Refusal::Other);
            }
            MappingToken::Single(mapping) => {
                own.dma.unmap_single(own.cpu, own.platform, own.at, mapping)
            }
            MappingToken::List(mapping) => own.dma.unmap_sg(own.cpu, own.platform, own.at, mapping),
        };
        match outcome {
            Ok(outcome) => {
                let stale = outcome.is_stale();
                match outcome.into_buffer() {
                    Some(buffer) => UnmapOutcome::Returned { buffer, stale },
                    None => UnmapOutcome::Withheld,
                }
            }
            Err(error) => match error.reason {
                UnmapReason::NotFlushed(_, token) => UnmapOutcome::NotInvalidated(token),
                UnmapReason::PartlyUnmapped(..) => UnmapOutcome::PartlyUnmapped,
                reason => UnmapOutcome::Refused(refusal(&reason)),
            },
        }
    }

    fn unmap_multi(
        &mut self,
        key: OpKey,
        tokens: Vec<MappingToken>,
        returned: &mut Vec<u64>,
    ) -> bool {
        let Some(own) = self.parts(key) else {
            return false;
        };
        let mut mappings = Vec::with_capacity(tokens.len());
        for token in tokens {
            let MappingToken::Single(mapping) = token else {
                return false;
            };
            mappings.push(mapping);
        }
        let each = |buffer| returned.push(buffer);
        own.dma
            .unmap_multi(own.cpu, own.platform, own.at, mappings, each)
            .is_ok()
    }

    fn retry_invalidation(
        &mut self,
        token: NotInvalidated<u64>,
    ) -> Result<u64, NotInvalidated<u64>> {
        let Some(cpu) = self.cpus.first_mut() else {
            return Err(token);
        };
        match self.dma.retry_invalidation(cpu, &mut self.platform, token) {
            Ok(Released(buffer)) => Ok(buffer),
            Err((_, token)) => Err(token),
        }
    }

    #[inline(always)]
    fn end_burst(&mut self, key: OpKey, returned: Option<&mut Vec<u64>>) {
        let Some(own) = self.parts(key) else {
            return;
        };
        let (dma, direction) = (own.dma, key.direction);
        let _ = match returned {
            None => dma.end_burst(own.cpu, own.platform, own.at, direction, discard_buffer),
            Some(list) => {
                let each = |buffer| list.push(buffer);
                dma.end_burst(own.cpu, own.platform, own.at, direction, each)
            }
        };
    }

    #[inline(always)]
    fn sync_map(&mut self, key: OpKey) {
        if let Some(own) = self.parts(key) {
            own.dma.sync_map(own.cpu, own.platform, own.at);
        }
    }

    #[inline(always)]
    fn tick(&mut self) {
        if let Some(cpu) = self.cpus.first_mut() {
            let _ = self.dma.tick(cpu, &mut self.platform);
        }
    }
}

/// Consumes a returned buffer. A function rather than a closure, so that all layers share one copy.
#[inline]
fn discard_buffer(buffer: u64) {
    black_box(buffer);
}

/// Returns the reason of a refused unmap without its buffer.
#[cold]
fn refusal(reason: &UnmapReason<u64>) -> Refusal {
    match reason {
        UnmapReason::Table(..) | UnmapReason::NotAllocated(_) => Refusal::NotMapped,
        UnmapReason::OtherDomain(..) | UnmapReason::OtherRing(..) => Refusal::OtherOwner,
        _ => Refusal::Other,
    }
}

/// Returns the error of a map whose device or CPU is unknown.
#[cold]
fn not_attached(key: OpKey) -> MapError {
    MapError {
        device: RequesterId::new(key.device.0),
        buffer: None,
        reason: MapReason::NotAttached,
    }
}
