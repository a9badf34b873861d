//! Stubs that return the recorded results of the real components, for ablation.

mod rings;

pub use rings::{FlushForRings, ReplayRing, ReplayedRings};

use std::marker::PhantomData;
use std::rc::Rc;

use ringfence_dma::Platform;
use ringfence_dma::flush::FlushPolicy;
use ringfence_dma::space::{IoPageTable, Paged};
use ringfence_iova::{AllocError, AllocRequest, Allocation, FreeProof, IovaAllocator};
use ringfence_pgtable::{MapError, MapRequest, UnmapError};
use ringfence_types::{
    CachedLevels, DomainId, Flushed, Invalidation, Pending, Pfn, PfnRange, Unmapped, WholeDomain,
};

use crate::alloc_trace::AllocTrace;
use crate::error::LabError;
use crate::layer::{Dispatch, FreeInvalidator, StaticDispatch};

/// An allocator that replays an [`AllocTrace`].
#[derive(Debug)]
pub struct ReplayedAlloc<R> {
    trace: Rc<AllocTrace>,
    returned: PhantomData<fn() -> R>,
}

impl<R> ReplayedAlloc<R> {
    /// Creates an allocator that replays `trace`.
    pub fn new(trace: Rc<AllocTrace>) -> Self {
        Self {
            trace,
            returned: PhantomData,
        }
    }
}

impl<R: FreeProof> IovaAllocator for ReplayedAlloc<R> {
    type PerCpu = ();
    type FreeProof = R;

    const HAS_LOOKUP: bool = false;

    fn per_cpu(&self) {}

    #[inline]
    fn alloc(&self, (): &mut (), request: &AllocRequest) -> Result<Allocation, AllocError> {
        match self.trace.next() {
            Some(range) => Ok(Allocation { range, steps: 0 }),
            None => Err(AllocError::BadRequest {
                pages: request.pages,
                align_order: request.align_order,
            }),
        }
    }

    #[inline]
    fn find(&self, (): &mut (), _page: Pfn) -> Option<PfnRange> {
        None
    }

    #[inline]
    fn free(&self, (): &mut (), _range: R) -> bool {
        true
    }

    fn footprint(&self) -> usize {
        0
    }
}

/// An allocator without lookups.
#[derive(Debug)]
pub struct NoFind<A>(pub A);

impl<A: IovaAllocator> IovaAllocator for NoFind<A> {
    type PerCpu = A::PerCpu;
    type FreeProof = A::FreeProof;

    const HAS_LOOKUP: bool = false;

    fn per_cpu(&self) -> A::PerCpu {
        self.0.per_cpu()
    }

    #[inline]
    fn alloc(&self, cpu: &mut A::PerCpu, request: &AllocRequest) -> Result<Allocation, AllocError> {
        self.0.alloc(cpu, request)
    }

    #[inline]
    fn find(&self, _cpu: &mut A::PerCpu, _page: Pfn) -> Option<PfnRange> {
        None
    }

    #[inline]
    fn free(&self, cpu: &mut A::PerCpu, range: A::FreeProof) -> bool {
        self.0.free(cpu, range)
    }

    fn flushed(&self, cpu: &mut A::PerCpu, proof: Flushed<WholeDomain>) {
        self.0.flushed(cpu, proof);
    }

    fn drain(&self, cpu: &mut A::PerCpu) {
        self.0.drain(cpu);
    }

    fn footprint(&self) -> usize {
        self.0.footprint()
    }
}

/// An allocator that a replay can use, with the types of its stubs.
pub trait ReplayAlloc: IovaAllocator + Sized + 'static {
    /// The binding time of calls in timed replays with this allocator.
    type Dispatch: Dispatch;
    /// The allocator without lookups.
    type NoFind: IovaAllocator<FreeProof = Self::FreeProof> + 'static;
    /// The allocator that replays recorded results.
    type Replayed: IovaAllocator<FreeProof = Self::FreeProof> + 'static;

    /// Converts the allocator into one whose lookups find nothing, at no cost.
    fn without_find(self) -> Self::NoFind;

    /// Creates an allocator that replays `tape`.
    fn replayed(tape: Rc<AllocTrace>) -> Self::Replayed;
}

/// A flush policy that works with an allocator and a table, real or stubbed.
pub trait FlushFor<A: ReplayAlloc, T: IoPageTable>:
    FlushPolicy<Paged<A, T>, u64>
    + FlushPolicy<Paged<A::NoFind, T>, u64>
    + FlushPolicy<Paged<A::Replayed, T>, u64>
    + FlushPolicy<Paged<A::Replayed, NullTable>, u64>
    + FlushPolicy<Paged<A, NullTable>, u64>
{
}

impl<A: ReplayAlloc, T: IoPageTable, F> FlushFor<A, T> for F where
    F: FlushPolicy<Paged<A, T>, u64>
        + FlushPolicy<Paged<A::NoFind, T>, u64>
        + FlushPolicy<Paged<A::Replayed, T>, u64>
        + FlushPolicy<Paged<A::Replayed, NullTable>, u64>
        + FlushPolicy<Paged<A, NullTable>, u64>
{
}

/// An allocator whose stubs have static types, so that timed operations need no dispatch.
pub trait StaticStubs: IovaAllocator + 'static {}

impl<A: StaticStubs> ReplayAlloc for A {
    type Dispatch = StaticDispatch;
    type NoFind = NoFind<A>;
    type Replayed = ReplayedAlloc<A::FreeProof>;

    fn without_find(self) -> NoFind<A> {
        NoFind(self)
    }

    fn replayed(tape: Rc<AllocTrace>) -> ReplayedAlloc<A::FreeProof> {
        ReplayedAlloc::new(tape)
    }
}

/// The stub of a table without entries.
#[derive(Debug)]
pub struct NullTable(pub DomainId);

impl IoPageTable for NullTable {
    type PerCpu = ();
    type Pages = ();

    fn per_cpu(&self) {}

    #[inline]
    fn domain(&self) -> DomainId {
        self.0
    }

    #[inline]
    fn map<P: Platform>(&self, (): &mut (), _: &mut P, _: MapRequest) -> Result<(), MapError> {
        Ok(())
    }

    #[inline]
    fn unmap<P: Platform>(
        &self,
        (): &mut (),
        _: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        // There are no entries to clear.
        Ok((
            Unmapped::attest_cleared(self.0, range),
            CachedLevels::Leaves,
            (),
        ))
    }

    fn is_empty<P: Platform>(&self, _: &P) -> bool {
        true
    }

    #[inline]
    fn sync<P: Platform>(&self, (): &mut (), _: &mut P) {}
}

/// Returns the proof that `range` was flushed, for an allocator without a table: no entry maps it.
///
/// # Errors
/// None in practice: [`FreeInvalidator`] never refuses and never fails.
pub(crate) fn flushed_without_table(range: PfnRange) -> Result<Flushed, LabError> {
    const DEFECT: LabError = LabError::Internal("an invalidator that does not fail");
    let unmapped = Unmapped::attest_cleared(DomainId::new(0), range);
    Pending::submit(&mut FreeInvalidator, Invalidation::Global, unmapped)
        .map_err(|_| DEFECT)?
        .wait(&mut FreeInvalidator)
        .map_err(|_| DEFECT)
}
