//! Any flush policy.

use std::sync::Arc;

use ringfence_dma::flush::{
    Burst, BurstCpu, Flush, Home, Lane, Outcome, Released, ReleasedStale, Retiring, Ring, Strict,
    Withheld,
};
use ringfence_dma::space::{Gone, Space};
use ringfence_dma::{Owed, Platform};
use ringfence_types::InvalidationError;

use crate::build::{Queue, Queues, Single};

/// Any policy for tables that keep their pages.
pub(super) enum AnyFlush {
    Strict,
    Deferred(Queue),
    PerCpu(Queues),
    Burst(Burst),
}

/// One processor's part of any policy.
pub(super) enum AnyFlushCpu {
    None(()),
    Ring(Arc<Single<Ring>>),
    Burst(Box<BurstCpu<u64>>),
}

/// The shared part of any policy.
pub(super) enum AnyFlushDomain {
    None(()),
    Rings(Single<Vec<Arc<Single<Ring>>>>),
}

/// What unmap gives back under any policy.
pub(super) enum AnyOutcome {
    Released(Released<u64>),
    Stale(ReleasedStale<u64>),
    Withheld(Withheld),
}

impl Outcome<u64> for AnyOutcome {
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

impl<S: Space<Gone = Gone>> Flush<S, u64> for AnyFlush {
    type PerCpu = AnyFlushCpu;
    type PerDomain = AnyFlushDomain;
    type Outcome = AnyOutcome;

    fn per_domain(&self) -> AnyFlushDomain {
        match self {
            Self::PerCpu(queues) => AnyFlushDomain::Rings(Flush::<S, u64>::per_domain(queues)),
            Self::Strict | Self::Deferred(_) | Self::Burst(_) => AnyFlushDomain::None(()),
        }
    }

    fn per_cpu(&self, domain: &AnyFlushDomain) -> AnyFlushCpu {
        match (self, domain) {
            (Self::PerCpu(queues), AnyFlushDomain::Rings(rings)) => {
                AnyFlushCpu::Ring(Flush::<S, u64>::per_cpu(queues, rings))
            }
            (Self::Burst(burst), _) => {
                AnyFlushCpu::Burst(Box::new(Flush::<S, u64>::per_cpu(burst, &())))
            }
            _ => AnyFlushCpu::None(()),
        }
    }

    fn retire<P: Platform>(
        &self,
        shared: &AnyFlushDomain,
        own: &mut AnyFlushCpu,
        home: Home<'_, S>,
        platform: &mut P,
        item: Retiring<S, u64>,
    ) -> Result<AnyOutcome, (InvalidationError, Owed<u64>)> {
        match (self, shared, own) {
            (Self::Deferred(queue), _, AnyFlushCpu::None(own)) => queue
                .retire(&(), own, home, platform, item)
                .map(AnyOutcome::Stale),
            (Self::PerCpu(queues), AnyFlushDomain::Rings(rings), AnyFlushCpu::Ring(own)) => queues
                .retire(rings, own, home, platform, item)
                .map(AnyOutcome::Stale),
            (Self::Burst(burst), _, AnyFlushCpu::Burst(own)) => burst
                .retire(&(), own, home, platform, item)
                .map(AnyOutcome::Withheld),
            // Strict, and what cannot be: handles of another policy are flushed at once.
            _ => Strict
                .retire(&(), &mut (), home, platform, item)
                .map(AnyOutcome::Released),
        }
    }

    fn tick<P: Platform>(
        &self,
        shared: &AnyFlushDomain,
        home: Home<'_, S>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        match (self, shared) {
            (Self::Deferred(queue), _) => Flush::<S, u64>::tick(queue, &(), home, platform),
            (Self::PerCpu(queues), AnyFlushDomain::Rings(rings)) => {
                Flush::<S, u64>::tick(queues, rings, home, platform)
            }
            _ => Ok(()),
        }
    }

    fn flush<P: Platform>(
        &self,
        shared: &AnyFlushDomain,
        home: Home<'_, S>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        match (self, shared) {
            (Self::Deferred(queue), _) => Flush::<S, u64>::flush(queue, &(), home, platform),
            (Self::PerCpu(queues), AnyFlushDomain::Rings(rings)) => {
                Flush::<S, u64>::flush(queues, rings, home, platform)
            }
            _ => Ok(()),
        }
    }

    #[inline]
    fn admits(&self, own: &AnyFlushCpu, lane: Lane) -> bool {
        match (self, own) {
            (Self::Burst(burst), AnyFlushCpu::Burst(own)) => {
                Flush::<S, u64>::admits(burst, own, lane)
            }
            _ => true,
        }
    }

    fn leave<P: Platform>(
        &self,
        own: &mut AnyFlushCpu,
        home: Home<'_, S>,
        platform: &mut P,
        each: impl FnMut(u64),
    ) -> Result<(), InvalidationError> {
        match (self, own) {
            (Self::PerCpu(queues), AnyFlushCpu::Ring(own)) => {
                queues.leave(own, home, platform, each)
            }
            (Self::Burst(burst), AnyFlushCpu::Burst(own)) => burst.leave(own, home, platform, each),
            _ => Ok(()),
        }
    }

    fn withholds(&self, own: &AnyFlushCpu) -> bool {
        match (self, own) {
            (Self::Burst(burst), AnyFlushCpu::Burst(own)) => Flush::<S, u64>::withholds(burst, own),
            _ => false,
        }
    }

    fn let_go(&self, own: AnyFlushCpu, each: impl FnMut(u64)) {
        if let (Self::Burst(burst), AnyFlushCpu::Burst(own)) = (self, own) {
            Flush::<S, u64>::let_go(burst, *own, each);
        }
    }

    fn end_burst<P: Platform>(
        &self,
        own: &mut AnyFlushCpu,
        home: Home<'_, S>,
        platform: &mut P,
        lane: Lane,
        each: impl FnMut(u64),
    ) -> Result<(), InvalidationError> {
        match (self, own) {
            (Self::Burst(burst), AnyFlushCpu::Burst(own)) => {
                burst.end_burst(own, home, platform, lane, each)
            }
            _ => Ok(()),
        }
    }
}
