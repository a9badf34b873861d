//! The meter of modes with a reverse translation cache.
//!
//! The ablations remove allocator and table behind the cache. Only cache misses and expired
//! mappings reach them. The cache itself is part of every timed replay except `idle`, so it counts
//! as `other`.

use std::rc::Rc;

use ringfence_dma::space::{IoPageTable, Paged, Rounding};
use ringfence_iova::{AllocError, AllocRequest, Allocation, IovaAllocator};
use ringfence_pgtable::Coherency;
use ringfence_types::{DomainId, Flushed, Invalidator, Pfn, PfnRange, WholeDomain};

use super::ablations::AblationSet;
use super::dyn_replay::{
    DynTimedReplay, Memory, TableFrames, free_invalidator, queue_platform, timed_platform,
};
use super::{
    Ablations, AllocTrace, Clock, EmptyLoop, NullTable, PlanResources, ReplayedAlloc,
    TimedPlatform, TimedReplay,
};
use crate::error::LabError;
use crate::guest::{
    DynRtcSpace, PviommuHost, PviommuTable, RtcParams, RtcParts, SharedHost, allocator,
};
use crate::hardware::Host;
use crate::mode_dispatch::RcacheAlloc;
use crate::plan::Plan;
use crate::replay::AttachInfo;

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
}

/// Common inputs for the timed replays of a mode.
#[derive(Clone, Copy)]
struct RtcReplicaParts {
    recipe: RtcParts,
    cycling: RtcParams,
    coherency: Coherency,
}

impl RtcReplicaParts {
    /// Creates a timed replay with a host, or without a table and with free invalidation.
    fn replica<A, T, I>(
        self,
        alloc: impl Fn(&Memory, &TableFrames) -> Result<A, LabError> + 'static,
        table: impl Fn(DomainId, &TimedPlatform<I>) -> Result<T, LabError> + 'static,
        bench: TimedPlatform<I>,
    ) -> Box<dyn DynTimedReplay>
    where
        A: IovaAllocator + 'static,
        T: IoPageTable<Pages = ()> + 'static,
        I: Invalidator + 'static,
    {
        let make = move |of: &AttachInfo,
                         bench: &TimedPlatform<I>|
              -> Result<DynRtcSpace<A, T>, LabError> {
            let alloc = alloc(&bench.arena, &bench.frames)?;
            let paged = Paged::new(alloc, table(of.domain, bench)?, Rounding::Exact);
            Ok(self.recipe.with_cache(paged, self.cycling))
        };
        Box::new(TimedReplay::new(RtcParts::flush(), bench, make))
    }

    fn hosted<A: IovaAllocator + 'static>(
        self,
        alloc: impl Fn(&Memory, &TableFrames) -> Result<A, LabError> + 'static,
    ) -> Result<Box<dyn DynTimedReplay>, LabError> {
        let TimedPlatform {
            arena, frames, now, ..
        } = timed_platform(free_invalidator)?;
        let (host, invalidator) = SharedHost::<PviommuHost>::for_meter(&arena, self.coherency)?;
        let Self {
            recipe, coherency, ..
        } = self;
        let table =
            move |domain: DomainId, bench: &TimedPlatform<_>| -> Result<PviommuTable, LabError> {
                (recipe.table)(
                    domain,
                    coherency,
                    &bench.arena,
                    &bench.frames,
                    host.as_ref(),
                )
            };
        let bench = TimedPlatform {
            arena,
            frames,
            invalidator,
            now,
        };
        Ok(self.replica(alloc, table, bench))
    }

    fn untabled<A: IovaAllocator + 'static>(
        self,
        alloc: impl Fn(&Memory, &TableFrames) -> Result<A, LabError> + 'static,
    ) -> Result<Box<dyn DynTimedReplay>, LabError> {
        let table = |domain, _: &TimedPlatform<_>| Ok(NullTable(domain));
        Ok(self.replica(alloc, table, queue_platform(free_invalidator)?))
    }
}

impl Ablations {
    /// Creates the meter of a mode with a reverse translation cache.
    ///
    /// # Errors
    /// Memory is short.
    pub fn cached(
        recipe: RtcParts,
        cycling: RtcParams,
        coherency: Coherency,
        repetitions: usize,
    ) -> Result<Self, LabError> {
        let tape = Rc::new(AllocTrace::default());
        let common = RtcReplicaParts {
            recipe,
            cycling,
            coherency,
        };
        let real = |tape: Option<Rc<AllocTrace>>| {
            move |memory: &Memory, frames: &TableFrames| {
                let inner: RcacheAlloc = allocator(memory, frames, None)?;
                let tape = tape.clone();
                Ok(RecordingAlloc { inner, trace: tape })
            }
        };
        let recorded = {
            let tape = Rc::clone(&tape);
            move |_: &Memory, _: &TableFrames| {
                Ok(
                    ReplayedAlloc::<<RcacheAlloc as IovaAllocator>::FreeProof>::new(Rc::clone(
                        &tape,
                    )),
                )
            }
        };
        let scout = Box::new(SelfRecording(common.hosted(real(Some(Rc::clone(&tape))))?));
        Self::new(repetitions, Rc::clone(&tape), scout, &mut || {
            Ok(AblationSet {
                replicas: [
                    Some(common.hosted(real(None))?),
                    None,
                    Some(common.hosted(recorded.clone())?),
                    None,
                    Some(common.untabled(recorded.clone())?),
                    None,
                    Some(common.untabled(real(None))?),
                    Some(Box::new(EmptyLoop::default())),
                ],
            })
        })
    }
}
