//! Allocator, table and invalidation port that log all events.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::Platform;
use ringfence_dma::space::{IoPageTable, PlainTable};
use ringfence_hw::VtdUnit;
use ringfence_iova::{AllocError, AllocRequest, Allocation, FreeProof, IovaAllocator};
use ringfence_pgtable::{MapError, MapRequest, SecondStage, UnmapError};
use ringfence_types::{
    CachedLevels, DomainId, FaultReason, Flushed, Invalidation, InvalidationError, Invalidator,
    Pfn, PfnRange, Ticket, Unmapped, WholeDomain,
};

/// Events in the order of their occurrence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    /// The allocator returned this many pages from this one on.
    Alloc(u64, u64),
    /// The allocator looked up the range around a page.
    Find(u64),
    /// The table mapped this many pages from this one on.
    Install(u64, u64),
    /// The table refused a map.
    Refuse(MapError),
    /// Stored entries are visible to the hardware.
    Sync,
    /// The hardware permitted an access to this address.
    Reach(u64, u64),
    /// The hardware stopped an access.
    Stop(FaultReason),
    /// The table cleared this many pages from this one on.
    Clear(u64, u64),
    /// An invalidation was submitted.
    Submit(Invalidation),
    /// An invalidation was found complete.
    Complete,
    /// The allocator freed pages.
    Free(u64, u64),
    /// The driver has its buffer back.
    Back(u64),
    /// The layer withholds the buffer from the driver.
    Withheld,
}

pub(super) use Event::*;

pub(super) type Log = Rc<RefCell<Vec<Event>>>;

pub(super) struct Allocator<A> {
    pub(super) inner: A,
    pub(super) log: Log,
}

impl<A: IovaAllocator> IovaAllocator for Allocator<A> {
    type PerCpu = A::PerCpu;
    type FreeProof = A::FreeProof;

    const HAS_LOOKUP: bool = A::HAS_LOOKUP;

    fn per_cpu(&self) -> A::PerCpu {
        self.inner.per_cpu()
    }

    fn alloc(&self, cpu: &mut A::PerCpu, request: &AllocRequest) -> Result<Allocation, AllocError> {
        let found = self.inner.alloc(cpu, request)?;
        let range = found.range;
        self.log
            .borrow_mut()
            .push(Alloc(range.lo().get(), range.pages()));
        Ok(found)
    }

    fn find(&self, cpu: &mut A::PerCpu, page: Pfn) -> Option<PfnRange> {
        self.log.borrow_mut().push(Find(page.get()));
        self.inner.find(cpu, page)
    }

    fn free(&self, cpu: &mut A::PerCpu, range: A::FreeProof) -> bool {
        let pages = range.range();
        self.log
            .borrow_mut()
            .push(Free(pages.lo().get(), pages.pages()));
        self.inner.free(cpu, range)
    }

    fn flushed(&self, cpu: &mut A::PerCpu, proof: Flushed<WholeDomain>) {
        self.inner.flushed(cpu, proof);
    }

    fn footprint(&self) -> usize {
        self.inner.footprint()
    }
}

pub(super) struct Traced {
    pub(super) inner: PlainTable<SecondStage>,
    pub(super) log: Log,
}

impl Traced {
    pub(super) fn note(
        &self,
        request: MapRequest,
        made: Result<(), MapError>,
    ) -> Result<(), MapError> {
        self.log.borrow_mut().push(match made {
            Ok(()) => Install(Pfn::containing(request.iova).get(), request.pages),
            Err(error) => Refuse(error),
        });
        made
    }
}

impl IoPageTable for Traced {
    type PerCpu = ringfence_pgtable::DirtyLines;
    type Pages = ();

    fn per_cpu(&self) -> Self::PerCpu {
        self.inner.per_cpu()
    }

    fn domain(&self) -> DomainId {
        self.inner.domain()
    }

    fn map<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.note(request, self.inner.map(cpu, platform, request))
    }

    fn map_nosync<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.note(request, self.inner.map_nosync(cpu, platform, request))
    }

    fn unmap<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        let done = self.inner.unmap(cpu, platform, range)?;
        self.log
            .borrow_mut()
            .push(Clear(range.lo().get(), range.pages()));
        Ok(done)
    }

    fn is_empty<P: Platform>(&self, platform: &P) -> bool {
        self.inner.is_empty(platform)
    }

    fn sync<P: Platform>(&self, cpu: &mut Self::PerCpu, platform: &mut P) {
        self.log.borrow_mut().push(Sync);
        self.inner.sync(cpu, platform);
    }
}

pub(super) struct Watched {
    pub(super) unit: VtdUnit,
    pub(super) log: Log,
}

impl Invalidator for Watched {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.log.borrow_mut().push(Submit(request));
        self.unit.submit(request)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        let done = self.unit.poll(ticket)?;
        self.log.borrow_mut().push(Complete);
        Ok(done)
    }
}
