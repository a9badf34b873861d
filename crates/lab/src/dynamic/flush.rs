//! The enum-dispatched flush policy.

use std::sync::Arc;

use ringfence_dma::flush::{
    Burst, BurstCpu, BurstKey, Flush, FlushContext, FlushQueue, Outcome, PendingUnmap, Released,
    ReleasedStale, Strict, Withheld,
};
use ringfence_dma::space::{ClearedRange, Space};
use ringfence_dma::{NotInvalidated, Platform};
use ringfence_types::InvalidationError;

use crate::mode_dispatch::{DeferredFlush, PerCpuFlush, ThreadCell};

/// Any policy for tables that keep their table pages.
pub(super) enum DynFlush {
    Strict,
    Deferred(DeferredFlush),
    PerCpu(PerCpuFlush),
    Burst(Burst),
}

/// The per-CPU part of any policy.
pub(super) enum DynFlushCpu {
    None(()),
    Ring(Arc<ThreadCell<FlushQueue>>),
    Burst(Box<BurstCpu<u64>>),
}

/// The per-domain part of any policy.
pub(super) enum DynFlushDomain {
    None(()),
    Rings(ThreadCell<Vec<Arc<ThreadCell<FlushQueue>>>>),
}

/// The outcome of an unmap under any policy.
pub(super) enum DynUnmapOutcome {
    Released(Released<u64>),
    Stale(ReleasedStale<u64>),
    Withheld(Withheld),
}

impl Outcome<u64> for DynUnmapOutcome {
    fn is_stale(&self) -> bool {
        match self {
            Self::Released(outcome) => outcome.is_stale(),
            Self::Stale(outcome) => outcome.is_stale(),
            Self::Withheld(outcome) => Outcome::<u64>::is_stale(outcome),
        }
    }

    fn into_buffer(self) -> Option<u64> {
        match self {
            Self::Released(outcome) => outcome.into_buffer(),
            Self::Stale(outcome) => outcome.into_buffer(),
            Self::Withheld(outcome) => outcome.into_buffer(),
        }
    }
}

impl<S: Space<UnmapResult = ClearedRange>> Flush<S, u64> for DynFlush {
    type PerCpu = DynFlushCpu;
    type PerDomain = DynFlushDomain;
    type Outcome = DynUnmapOutcome;

    fn per_domain(&self) -> DynFlushDomain {
        match self {
            Self::PerCpu(queues) => DynFlushDomain::Rings(Flush::<S, u64>::per_domain(queues)),
            Self::Strict | Self::Deferred(_) | Self::Burst(_) => DynFlushDomain::None(()),
        }
    }

    fn per_cpu(&self, domain: &DynFlushDomain) -> DynFlushCpu {
        match (self, domain) {
            (Self::PerCpu(queues), DynFlushDomain::Rings(rings)) => {
                DynFlushCpu::Ring(Flush::<S, u64>::per_cpu(queues, rings))
            }
            (Self::Burst(burst), _) => {
                DynFlushCpu::Burst(Box::new(Flush::<S, u64>::per_cpu(burst, &())))
            }
            _ => DynFlushCpu::None(()),
        }
    }

    fn queue_unmap<P: Platform>(
        &self,
        shared: &DynFlushDomain,
        own: &mut DynFlushCpu,
        home: FlushContext<'_, S>,
        platform: &mut P,
        item: PendingUnmap<S, u64>,
    ) -> Result<DynUnmapOutcome, (InvalidationError, NotInvalidated<u64>)> {
        match (self, shared, own) {
            (Self::Deferred(queue), _, DynFlushCpu::None(own)) => queue
                .queue_unmap(&(), own, home, platform, item)
                .map(DynUnmapOutcome::Stale),
            (Self::PerCpu(queues), DynFlushDomain::Rings(rings), DynFlushCpu::Ring(own)) => queues
                .queue_unmap(rings, own, home, platform, item)
                .map(DynUnmapOutcome::Stale),
            (Self::Burst(burst), _, DynFlushCpu::Burst(own)) => burst
                .queue_unmap(&(), own, home, platform, item)
                .map(DynUnmapOutcome::Withheld),
            // Strict, and impossible combinations: flush handles of another policy at once.
            _ => Strict
                .queue_unmap(&(), &mut (), home, platform, item)
                .map(DynUnmapOutcome::Released),
        }
    }

    fn tick<P: Platform>(
        &self,
        shared: &DynFlushDomain,
        home: FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        match (self, shared) {
            (Self::Deferred(queue), _) => Flush::<S, u64>::tick(queue, &(), home, platform),
            (Self::PerCpu(queues), DynFlushDomain::Rings(rings)) => {
                Flush::<S, u64>::tick(queues, rings, home, platform)
            }
            _ => Ok(()),
        }
    }

    fn flush<P: Platform>(
        &self,
        shared: &DynFlushDomain,
        home: FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        match (self, shared) {
            (Self::Deferred(queue), _) => Flush::<S, u64>::flush(queue, &(), home, platform),
            (Self::PerCpu(queues), DynFlushDomain::Rings(rings)) => {
                Flush::<S, u64>::flush(queues, rings, home, platform)
            }
            _ => Ok(()),
        }
    }

    #[inline]
    fn has_room(&self, own: &DynFlushCpu, lane: BurstKey) -> bool {
        match (self, own) {
            (Self::Burst(burst), DynFlushCpu::Burst(own)) => {
                Flush::<S, u64>::has_room(burst, own, lane)
            }
            _ => true,
        }
    }

    fn drain_cpu<P: Platform>(
        &self,
        own: &mut DynFlushCpu,
        home: FlushContext<'_, S>,
        platform: &mut P,
        each: impl FnMut(u64),
    ) -> Result<(), InvalidationError> {
        match (self, own) {
            (Self::PerCpu(queues), DynFlushCpu::Ring(own)) => {
                queues.drain_cpu(own, home, platform, each)
            }
            (Self::Burst(burst), DynFlushCpu::Burst(own)) => {
                burst.drain_cpu(own, home, platform, each)
            }
            _ => Ok(()),
        }
    }

    fn withholds(&self, own: &DynFlushCpu) -> bool {
        match (self, own) {
            (Self::Burst(burst), DynFlushCpu::Burst(own)) => Flush::<S, u64>::withholds(burst, own),
            _ => false,
        }
    }

    fn release_withheld(&self, own: DynFlushCpu, each: impl FnMut(u64)) {
        if let (Self::Burst(burst), DynFlushCpu::Burst(own)) = (self, own) {
            Flush::<S, u64>::release_withheld(burst, *own, each);
        }
    }

    fn end_burst<P: Platform>(
        &self,
        own: &mut DynFlushCpu,
        home: FlushContext<'_, S>,
        platform: &mut P,
        lane: BurstKey,
        each: impl FnMut(u64),
    ) -> Result<(), InvalidationError> {
        match (self, own) {
            (Self::Burst(burst), DynFlushCpu::Burst(own)) => {
                burst.end_burst(own, home, platform, lane, each)
            }
            _ => Ok(()),
        }
    }
}
