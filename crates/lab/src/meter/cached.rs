//! The meter of modes with a reverse translation cache.
//!
//! Allocator and table are taken away behind the cache, and are asked by what it misses and by what leaves it; the cache itself is in every
//! replica but the idle one, and so part of `other`.

use std::rc::Rc;

use ringfence_dma::space::{Paged, Rounding, Translations};
use ringfence_iova::{AllocError, Allocation, IovaAllocator, Request};
use ringfence_pgtable::Coherency;
use ringfence_types::{DomainId, Flushed, Invalidator, Pfn, PfnRange, WholeDomain};

use super::driven::{Driven, Memory, TableFrames, bare_bench, bench, immediate};
use super::metered::Set;
use super::{Bench, Clock, Idle, Needs, NullTable, Recorded, Replica, Sets, Tape};
use crate::build::Rcache;
use crate::error::LabError;
use crate::hardware::Host;
use crate::hosted::{
    CachedRecipe, CachedSpace, Cycling, PviommuHost, PviommuTable, Shared, allocator,
};
use crate::plan::Plan;
use crate::replay::Newcomer;

/// An allocator that may note its answers: a map that the cache knows asks for none, so that they cannot be noted map by map.
#[derive(Debug)]
struct Noting<A> {
    inner: A,
    tape: Option<Rc<Tape>>,
}

impl<A: IovaAllocator> IovaAllocator for Noting<A> {
    type PerCpu = A::PerCpu;
    type Returned = A::Returned;

    const FINDS: bool = A::FINDS;

    fn finds(&self) -> bool {
        self.inner.finds()
    }

    fn per_cpu(&self) -> A::PerCpu {
        self.inner.per_cpu()
    }

    #[inline]
    fn alloc(&self, cpu: &mut A::PerCpu, request: &Request) -> Result<Allocation, AllocError> {
        let answer = self.inner.alloc(cpu, request);
        if let Some(tape) = &self.tape {
            tape.record(answer.as_ref().ok().map(|found| found.range));
        }
        answer
    }

    #[inline]
    fn find(&self, cpu: &mut A::PerCpu, page: Pfn) -> Option<PfnRange> {
        self.inner.find(cpu, page)
    }

    #[inline]
    fn free(&self, cpu: &mut A::PerCpu, range: A::Returned) -> bool {
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

/// A replica whose allocator notes its answers itself.
struct Untaped(Box<dyn Driven>);

impl Driven for Untaped {
    fn provide(&mut self, needs: &Needs) -> Result<(), LabError> {
        self.0.provide(needs)
    }

    fn drive(&mut self, plan: &Plan, clock: &mut Clock, _: Option<&Tape>) {
        self.0.drive(plan, clock, None);
    }

    fn refusals(&self) -> Option<(u64, ringfence_dma::MapError)> {
        self.0.refusals()
    }
}

/// What the replicas of a mode have in common.
#[derive(Clone, Copy)]
struct Common {
    recipe: CachedRecipe,
    cycling: Cycling,
    coherency: Coherency,
}

impl Common {
    /// A replica with a host, or without a table and an invalidation that costs nothing.
    fn replica<A, T, I>(
        self,
        alloc: impl Fn(&Memory, &TableFrames) -> Result<A, LabError> + 'static,
        table: impl Fn(DomainId, &Bench<I>) -> Result<T, LabError> + 'static,
        bench: Bench<I>,
    ) -> Box<dyn Driven>
    where
        A: IovaAllocator + 'static,
        T: Translations<Pages = ()> + 'static,
        I: Invalidator + 'static,
    {
        let make = move |of: &Newcomer, bench: &Bench<I>| -> Result<CachedSpace<A, T>, LabError> {
            let alloc = alloc(&bench.arena, &bench.frames)?;
            let paged = Paged::new(alloc, table(of.domain, bench)?, Rounding::Exact);
            Ok(self.recipe.in_front(paged, self.cycling))
        };
        Box::new(Replica::new(CachedRecipe::flush(), bench, make))
    }

    fn hosted<A: IovaAllocator + 'static>(
        self,
        alloc: impl Fn(&Memory, &TableFrames) -> Result<A, LabError> + 'static,
    ) -> Result<Box<dyn Driven>, LabError> {
        let Bench {
            arena, frames, now, ..
        } = bench(immediate)?;
        let (host, invalidator) = Shared::<PviommuHost>::metered(&arena, self.coherency)?;
        let Self {
            recipe, coherency, ..
        } = self;
        let table = move |domain: DomainId, bench: &Bench<_>| -> Result<PviommuTable, LabError> {
            (recipe.table)(
                domain,
                coherency,
                &bench.arena,
                &bench.frames,
                host.as_ref(),
            )
        };
        let bench = Bench {
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
    ) -> Result<Box<dyn Driven>, LabError> {
        let table = |domain, _: &Bench<_>| Ok(NullTable(domain));
        Ok(self.replica(alloc, table, bare_bench(immediate)?))
    }
}

impl Sets {
    /// The meter of a mode with a reverse translation cache.
    ///
    /// # Errors
    /// No room.
    pub fn cached(
        recipe: CachedRecipe,
        cycling: Cycling,
        coherency: Coherency,
        repetitions: usize,
    ) -> Result<Self, LabError> {
        let tape = Rc::new(Tape::default());
        let common = Common {
            recipe,
            cycling,
            coherency,
        };
        let real = |tape: Option<Rc<Tape>>| {
            move |memory: &Memory, frames: &TableFrames| {
                let inner: Rcache = allocator(memory, frames, None)?;
                let tape = tape.clone();
                Ok(Noting { inner, tape })
            }
        };
        let recorded = {
            let tape = Rc::clone(&tape);
            move |_: &Memory, _: &TableFrames| {
                Ok(Recorded::<<Rcache as IovaAllocator>::Returned>::new(
                    Rc::clone(&tape),
                ))
            }
        };
        let scout = Box::new(Untaped(common.hosted(real(Some(Rc::clone(&tape))))?));
        Self::new(repetitions, Rc::clone(&tape), scout, &mut || {
            Ok(Set {
                replicas: [
                    Some(common.hosted(real(None))?),
                    None,
                    Some(common.hosted(recorded.clone())?),
                    None,
                    Some(common.untabled(recorded.clone())?),
                    None,
                    Some(common.untabled(real(None))?),
                    Some(Box::new(Idle::default())),
                ],
            })
        })
    }
}
