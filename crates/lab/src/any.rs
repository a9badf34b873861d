//! Parts that dispatch at each operation, for rows that nobody has named. Named modes never come here.

use std::marker::PhantomData;
use std::sync::Arc;

use ringfence_dma::flush::{
    Burst, BurstCpu, Flush, Home, Lane, Outcome, PerWrap, Released, ReleasedStale, Retiring, Ring,
    Strict, Withheld,
};
use ringfence_dma::space::{Gone, Rounding, Space};
use ringfence_dma::{Owed, Platform};
use ringfence_iova::{AllocError, Allocation, IovaAllocator, Request};
use ringfence_types::{Flushed, InvalidationError, Pfn, PfnRange, WholeDomain};

use crate::build::{
    Cached, Flat, Freelists, Gas, Job, Next, Plain, Product, Queue, Queues, Rcache, Recipe,
    Reclaimer, Single, Site, TableBits, Tree, bitmap, bitmap_literal, freelists, gas, product,
    queue, queues, rcache, table_bitmap, tree,
};
use crate::error::LabError;
use crate::modes::{Alloc, FlushKind, Mode, TableKind};

/// Any allocator that takes flushed ranges back.
// There is one a domain, and it stays where it is.
#[allow(clippy::large_enum_variant)]
pub(crate) enum AnyAlloc {
    Tree(Tree),
    Freelists(Freelists),
    Bitmap(Next),
    TableBitmap(TableBits),
    Gas(Gas),
    Rcache(Rcache),
    Magazines(Product),
}

/// One processor's part of any allocator.
pub(crate) enum AnyAllocCpu {
    None(()),
    Bitmap(<Next as IovaAllocator>::PerCpu),
    TableBitmap(<TableBits as IovaAllocator>::PerCpu),
    Rcache(Box<<Rcache as IovaAllocator>::PerCpu>),
    Magazines(Box<<Product as IovaAllocator>::PerCpu>),
}

fn alloc(site: &Site<'_>) -> Result<AnyAlloc, LabError> {
    Ok(match site.answer {
        Alloc::CachedRbTree => AnyAlloc::Tree(tree(site)?),
        Alloc::Eiovar(_) => AnyAlloc::Freelists(freelists(site)?),
        Alloc::Bitmap => AnyAlloc::Bitmap(bitmap(site)?),
        Alloc::TableBitmap => AnyAlloc::TableBitmap(table_bitmap(site)?),
        Alloc::FreeBsd => AnyAlloc::Gas(gas(site)?),
        Alloc::LinuxRcache => AnyAlloc::Rcache(rcache(site)?),
        Alloc::Magazine => AnyAlloc::Magazines(product(site)?),
        Alloc::Identity
        | Alloc::BitmapLiteral
        | Alloc::RingTail
        | Alloc::RingFree
        | Alloc::RingTailLiteral => {
            return Err(LabError::Internal("allocator without a composed form"));
        }
    })
}

impl IovaAllocator for AnyAlloc {
    type PerCpu = AnyAllocCpu;
    type Returned = Flushed;

    fn per_cpu(&self) -> AnyAllocCpu {
        match self {
            Self::Bitmap(a) => AnyAllocCpu::Bitmap(a.per_cpu()),
            Self::TableBitmap(a) => AnyAllocCpu::TableBitmap(a.per_cpu()),
            Self::Rcache(a) => AnyAllocCpu::Rcache(Box::new(a.per_cpu())),
            Self::Magazines(a) => AnyAllocCpu::Magazines(Box::new(a.per_cpu())),
            Self::Tree(_) | Self::Freelists(_) | Self::Gas(_) => AnyAllocCpu::None(()),
        }
    }

    fn alloc(&self, cpu: &mut AnyAllocCpu, request: &Request) -> Result<Allocation, AllocError> {
        match (self, cpu) {
            (Self::Tree(a), AnyAllocCpu::None(cpu)) => a.alloc(cpu, request),
            (Self::Freelists(a), AnyAllocCpu::None(cpu)) => a.alloc(cpu, request),
            (Self::Gas(a), AnyAllocCpu::None(cpu)) => a.alloc(cpu, request),
            (Self::Bitmap(a), AnyAllocCpu::Bitmap(cpu)) => a.alloc(cpu, request),
            (Self::TableBitmap(a), AnyAllocCpu::TableBitmap(cpu)) => a.alloc(cpu, request),
            (Self::Rcache(a), AnyAllocCpu::Rcache(cpu)) => a.alloc(cpu, request),
            (Self::Magazines(a), AnyAllocCpu::Magazines(cpu)) => a.alloc(cpu, request),
            _ => Err(AllocError::OutOfMemory),
        }
    }

    fn find(&self, cpu: &mut AnyAllocCpu, page: Pfn) -> Option<PfnRange> {
        match (self, cpu) {
            (Self::Tree(a), AnyAllocCpu::None(cpu)) => a.find(cpu, page),
            (Self::Freelists(a), AnyAllocCpu::None(cpu)) => a.find(cpu, page),
            (Self::Gas(a), AnyAllocCpu::None(cpu)) => a.find(cpu, page),
            _ => None,
        }
    }

    fn free(&self, cpu: &mut AnyAllocCpu, range: Flushed) -> bool {
        match (self, cpu) {
            (Self::Tree(a), AnyAllocCpu::None(cpu)) => a.free(cpu, range),
            (Self::Freelists(a), AnyAllocCpu::None(cpu)) => a.free(cpu, range),
            (Self::Gas(a), AnyAllocCpu::None(cpu)) => a.free(cpu, range),
            (Self::Bitmap(a), AnyAllocCpu::Bitmap(cpu)) => a.free(cpu, range.into()),
            (Self::TableBitmap(a), AnyAllocCpu::TableBitmap(cpu)) => a.free(cpu, range.into()),
            (Self::Rcache(a), AnyAllocCpu::Rcache(cpu)) => a.free(cpu, range),
            (Self::Magazines(a), AnyAllocCpu::Magazines(cpu)) => a.free(cpu, range),
            _ => false,
        }
    }

    fn flushed(&self, cpu: &mut AnyAllocCpu, proof: Flushed<WholeDomain>) {
        match (self, cpu) {
            (Self::Bitmap(a), AnyAllocCpu::Bitmap(cpu)) => a.flushed(cpu, proof),
            (Self::TableBitmap(a), AnyAllocCpu::TableBitmap(cpu)) => a.flushed(cpu, proof),
            _ => {}
        }
    }

    fn drain(&self, cpu: &mut AnyAllocCpu) {
        match (self, cpu) {
            (Self::Rcache(a), AnyAllocCpu::Rcache(cpu)) => a.drain(cpu),
            (Self::Magazines(a), AnyAllocCpu::Magazines(cpu)) => a.drain(cpu),
            _ => {}
        }
    }

    fn footprint(&self) -> usize {
        match self {
            Self::Tree(a) => a.footprint(),
            Self::Freelists(a) => a.footprint(),
            Self::Bitmap(a) => a.footprint(),
            Self::TableBitmap(a) => a.footprint(),
            Self::Gas(a) => a.footprint(),
            Self::Rcache(a) => a.footprint(),
            Self::Magazines(a) => a.footprint(),
        }
    }
}

/// Any policy for tables that keep their pages.
pub(crate) enum AnyFlush {
    Strict,
    Deferred(Queue),
    PerCpu(Queues),
    Burst(Burst),
}

/// One processor's part of any policy.
pub(crate) enum AnyFlushCpu {
    None(()),
    Ring(Arc<Single<Ring>>),
    Burst(Box<BurstCpu<u64>>),
}

/// The shared part of any policy.
pub(crate) enum AnyFlushDomain {
    None(()),
    Rings(Single<Vec<Arc<Single<Ring>>>>),
}

/// What unmap gives back under any policy.
pub(crate) enum AnyOutcome {
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

/// Calls the job with parts that dispatch.
pub(crate) fn dispatch<J: Job>(mode: &Mode, job: J) -> Result<J::Output, LabError> {
    use {Alloc as A, FlushKind as F, TableKind as T};
    fn recipe<A, T, F>(
        mode: &Mode,
        alloc: fn(&Site<'_>) -> Result<A, LabError>,
        flush: fn() -> F,
    ) -> Recipe<A, T, F> {
        let rounding = match mode.alloc {
            Alloc::CachedRbTree | Alloc::Eiovar(_) => Rounding::PowerOfTwo,
            _ => Rounding::Exact,
        };
        Recipe {
            alloc,
            answer: mode.alloc,
            flush,
            rounding,
            table: PhantomData,
        }
    }
    let flush: fn() -> AnyFlush = match mode.flush {
        F::PerUnmap => || AnyFlush::Strict,
        F::Deferred => || AnyFlush::Deferred(queue()),
        F::PerCpuQueue => || AnyFlush::PerCpu(queues()),
        F::Burst => || AnyFlush::Burst(Burst::default()),
        F::PerWrap | F::Never | F::BurstLiteral => || AnyFlush::Strict,
    };
    let not_built = || Err(LabError::NotBuilt(mode.name.clone()));
    Ok(match (mode.alloc, mode.table, mode.flush) {
        (A::Identity | A::RingTail | A::RingFree | A::RingTailLiteral, _, _)
        | (
            _,
            T::None
            | T::PassThrough
            | T::StaticRadix
            | T::Ring
            | T::RingNonCoherent
            | T::RingLiteral
            | T::RingNonCoherentLiteral,
            _,
        )
        | (_, _, F::Never | F::BurstLiteral) => return not_built(),
        (A::Bitmap, T::CachedRadix, F::PerWrap) => {
            job.paged::<Next, Cached, PerWrap>(recipe(mode, bitmap, || PerWrap))
        }
        (A::BitmapLiteral, T::CachedRadix, F::PerWrap) => {
            job.paged::<Next, Cached, PerWrap>(recipe(mode, bitmap_literal, || PerWrap))
        }
        (A::Bitmap, T::Flat, F::PerWrap) => {
            job.paged::<Next, Flat, PerWrap>(recipe(mode, bitmap, || PerWrap))
        }
        (A::BitmapLiteral, T::Flat, F::PerWrap) => {
            job.paged::<Next, Flat, PerWrap>(recipe(mode, bitmap_literal, || PerWrap))
        }
        (A::TableBitmap, T::Flat, F::PerWrap) => {
            job.paged::<TableBits, Flat, PerWrap>(recipe(mode, table_bitmap, || PerWrap))
        }
        (A::BitmapLiteral, _, _) | (_, _, F::PerWrap) => return not_built(),
        (_, T::Flat, _) => job.paged::<AnyAlloc, Flat, AnyFlush>(recipe(mode, alloc, flush)),
        (A::TableBitmap, _, _) => return not_built(),
        (_, T::Radix, _) => job.paged::<AnyAlloc, Plain, AnyFlush>(recipe(mode, alloc, flush)),
        (_, T::CachedRadix, _) => {
            job.paged::<AnyAlloc, Cached, AnyFlush>(recipe(mode, alloc, flush))
        }
        (_, T::RadixReclaimPage, F::PerUnmap) => {
            job.paged::<AnyAlloc, Reclaimer<true>, Strict>(recipe(mode, alloc, || Strict))
        }
        (_, T::RadixReclaim, F::PerUnmap) => {
            job.paged::<AnyAlloc, Reclaimer<false>, Strict>(recipe(mode, alloc, || Strict))
        }
        (_, T::RadixReclaimPage | T::RadixReclaim, _) => return not_built(),
    })
}
