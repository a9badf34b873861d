//! The meter of modes with a reverse translation cache.
//!
//! The ablations remove allocator and table behind the cache. Only cache misses and expired
//! mappings reach them. The cache itself is part of every timed replay except `idle`, so it counts
//! as `other`.

use std::rc::Rc;

use ringfence_dma::space::{IoPageTable, Paged, Rounding};
use ringfence_iova::{AllocError, AllocRequest, Allocation, IovaAllocator};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{DomainId, Flushed, Invalidator, Pfn, PfnRange, WholeDomain};

use super::ablations::AblationSet;
use super::{Ablations, AllocTrace, Clock, EmptyLoop, NullTable, ReplayAlloc, TimedReplay};
use crate::components::{HostOf, RcacheAlloc, ReplayTable};
use crate::error::LabError;
use crate::hardware::Host;
use crate::layer::{AttachInfo, ContextTarget, LayerPlatform};
use crate::mapping_cache::{CachedParts, CycleParams, DynCachedSpace};
use crate::plan::Plan;
use crate::replay::{DynTimedReplay, PlanResources};

type Memory = Rc<Arena>;
type TableFrames = Frames<Rc<Arena>>;

/// An allocator that can record its results. A map that hits in the cache allocates nothing, so the
/// replay cannot record results per map.
#[derive(Debug)]
struct RecordingAlloc<A> {
    inner: A,
    trace: Option<Rc<AllocTrace>>,
}

impl<A: IovaAllocator> IovaAllocator for RecordingAlloc<A> {
    type PerCpu = A::PerCpu;
    type FreeProof = A::FreeProof;

    const HAS_LOOKUP: bool = A::HAS_LOOKUP;

    fn has_lookup(&self) -> bool {
        self.inner.has_lookup()
    }

    fn per_cpu(&self) -> A::PerCpu {
        self.inner.per_cpu()
    }

    #[inline]
    fn alloc(&self, cpu: &mut A::PerCpu, request: &AllocRequest) -> Result<Allocation, AllocError> {
        let answer = self.inner.alloc(cpu, request);
        if let Some(tape) = &self.trace {
            tape.record(answer.as_ref().ok().map(|found| found.range));
        }
        answer
    }

    #[inline]
    fn find(&self, cpu: &mut A::PerCpu, page: Pfn) -> Option<PfnRange> {
        self.inner.find(cpu, page)
    }

    #[inline]
    fn free(&self, cpu: &mut A::PerCpu, range: A::FreeProof) -> bool {
        self.inner.free(cpu, range)
    }

    fn flushed(&self, cpu: &mut A::PerCpu, proof: Flushed<WholeDomain>) {
        self.inner.flushed(cpu, proof);
    }

    fn drain(&self, cpu: &mut A::PerCpu) {
        self.inner.drain(cpu);
    }

    fn footprint(&self) -> usize {
        self.inner.footprint()
    }
}

/// A timed replay whose allocator records its own results.
struct SelfRecording(Box<dyn DynTimedReplay>);

impl DynTimedReplay for SelfRecording {
    fn prepare_for(&mut self, needs: &PlanResources) -> Result<(), LabError> {
        self.0.prepare_for(needs)
    }

    fn run_plan(&mut self, plan: &Plan, clock: &mut Clock, _: Option<&AllocTrace>) {
        self.0.run_plan(plan, clock, None);
    }

    fn refusals(&self) -> Option<(u64, ringfence_dma::MapError)> {
        self.0.refusals()
    }

    fn layer_type(&self) -> &'static str {
        self.0.layer_type()
    }
}

/// Common inputs for the timed replays of a mode.
struct RtcReplays<T: ReplayTable> {
    parts: CachedParts<T>,
    params: CycleParams,
    coherency: Coherency,
}

impl<T: ReplayTable> Clone for RtcReplays<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: ReplayTable> Copy for RtcReplays<T> {}

impl<T: ReplayTable<Pages = ()>> RtcReplays<T> {
    /// Creates a timed replay with the allocator and the table that the functions return.
    fn replay<A, U, I>(
        self,
        alloc: impl Fn(&Memory, &TableFrames) -> Result<A, LabError> + 'static,
        table: impl Fn(DomainId, &LayerPlatform<I>) -> Result<U, LabError> + 'static,
        platform: LayerPlatform<I>,
    ) -> Box<dyn DynTimedReplay>
    where
        A: IovaAllocator + 'static,
        U: IoPageTable<Pages = ()> + 'static,
        I: Invalidator + 'static,
    {
        let make = move |of: &AttachInfo, platform: &LayerPlatform<I>| {
            let alloc = alloc(&platform.arena, &platform.frames)?;
            let paged = Paged::new(alloc, table(of.domain, platform)?, Rounding::Exact);
            let space: DynCachedSpace<U, A> = self.parts.with_cache(paged, self.params);
            Ok((space, ContextTarget::PassThrough))
        };
        Box::new(TimedReplay::new(CachedParts::<T>::flush(), platform, make))
    }

    /// Creates a timed replay with the mode's table.
    fn with_host<A: IovaAllocator + 'static>(
        self,
        alloc: impl Fn(&Memory, &TableFrames) -> Result<A, LabError> + 'static,
    ) -> Result<Box<dyn DynTimedReplay>, LabError> {
        let platform = LayerPlatform::timed()?;
        let (host, invalidator) = HostOf::<T>::for_meter(&platform.arena, self.coherency)?;
        let Self {
            parts, coherency, ..
        } = self;
        let table = move |domain: DomainId, own: &LayerPlatform<_>| -> Result<T, LabError> {
            (parts.table)(domain, coherency, &own.arena, &own.frames, host.as_ref())
        };
        Ok(self.replay(alloc, table, platform.map_invalidator(|_| invalidator)))
    }

    /// Creates a timed replay without a table and with free invalidation.
    fn without_table<A: IovaAllocator + 'static>(
        self,
        alloc: impl Fn(&Memory, &TableFrames) -> Result<A, LabError> + 'static,
    ) -> Result<Box<dyn DynTimedReplay>, LabError> {
        let table = |domain, _: &LayerPlatform<_>| Ok(NullTable(domain));
        Ok(self.replay(alloc, table, LayerPlatform::without_tables()?))
    }
}

impl Ablations {
    /// Creates the meter of a mode with a reverse translation cache.
    ///
    /// # Errors
    /// Memory is short.
    pub fn cached<T: ReplayTable<Pages = ()>>(
        parts: CachedParts<T>,
        params: CycleParams,
        coherency: Coherency,
        repetitions: usize,
    ) -> Result<Self, LabError> {
        let trace = Rc::new(AllocTrace::default());
        let of = RtcReplays {
            parts,
            params,
            coherency,
        };
        let real = |trace: Option<Rc<AllocTrace>>| {
            move |memory: &Memory, frames: &TableFrames| {
                let inner = CachedParts::<T>::allocator(memory, frames, None)?;
                let trace = trace.clone();
                Ok(RecordingAlloc { inner, trace })
            }
        };
        let replayed = {
            let trace = Rc::clone(&trace);
            move |_: &Memory, _: &TableFrames| Ok(RcacheAlloc::replayed(Rc::clone(&trace)))
        };
        let recorder = of.with_host(real(Some(Rc::clone(&trace))))?;
        let recorder = Box::new(SelfRecording(recorder));
        Self::new(repetitions, trace, recorder, &mut || {
            Ok(AblationSet {
                replicas: [
                    Some(of.with_host(real(None))?),
                    None,
                    Some(of.with_host(replayed.clone())?),
                    None,
                    Some(of.without_table(replayed.clone())?),
                    None,
                    Some(of.without_table(real(None))?),
                    Some(Box::new(EmptyLoop::default())),
                ],
            })
        })
    }
}
