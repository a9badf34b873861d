//! A table that the guest changes only by requests to its host.

use std::fmt::Debug;

use ringfence_dma::Platform;
use ringfence_dma::space::IoPageTable;
use ringfence_pgtable::{MapError, MapRequest, UnmapError};
use ringfence_types::{
    CachedLevels, DomainId, InvalidationError, Pfn, PfnRange, PhysAddr, Unmapped,
};

use super::{HostBackend, SharedHost};

/// Requests of a guest that change a table of its host.
pub trait TableRequests: HostBackend {
    /// Identifies a table, and how requests change it.
    type Name: Debug + Copy;

    /// Maps pages, and waits for the result.
    ///
    /// # Errors
    /// The host refused the map. Nothing changed.
    fn map(&mut self, table: Self::Name, request: &MapRequest) -> Result<(), MapError>;

    /// Adds the requests of a map. [`map_result`](Self::map_result) returns the result.
    ///
    /// # Errors
    /// The request has no page.
    fn queue_map(&mut self, table: Self::Name, request: &MapRequest) -> Result<(), MapError>;

    /// Returns the result of the requests of [`queue_map`](Self::queue_map) for `range`.
    ///
    /// # Errors
    /// The host refused a page of `range`; the error has no room for the reason.
    fn map_result(&mut self, table: Self::Name, range: PfnRange) -> Result<(), InvalidationError>;

    /// Clears the entries of `range`, or queues their unmaps. The host clears the entries before
    /// the layer's invalidation completes, and only that frees the range.
    fn unmap(&mut self, table: Self::Name, range: PfnRange);

    /// Completes the waiting requests. Returns true if the table has no entry.
    fn is_empty(&mut self, table: Self::Name) -> bool;

    /// Sends waiting maps to the host, unless [`map_result`](Self::map_result) does.
    fn sync(&mut self) {}
}

/// A domain's table in a guest. Each change is a request to the host.
#[derive(Debug)]
pub struct RequestTable<H: TableRequests> {
    host: SharedHost<H>,
    domain: DomainId,
    pub(super) name: H::Name,
    root: PhysAddr,
}

impl<H: TableRequests> RequestTable<H> {
    pub(super) fn from_parts(
        host: &SharedHost<H>,
        domain: DomainId,
        name: H::Name,
        root: PhysAddr,
    ) -> Self {
        Self {
            host: host.clone(),
            domain,
            name,
            root,
        }
    }

    /// Returns the root of the host's table. The guest does not know it.
    pub(super) fn host_root(&self) -> PhysAddr {
        self.root
    }
}

/// Returns the pages of a request.
pub(super) fn pages_of(request: &MapRequest) -> Result<PfnRange, MapError> {
    let first = Pfn::containing(request.iova);
    PfnRange::new(first, request.pages).ok_or(MapError::Empty)
}

impl<H: TableRequests> IoPageTable for RequestTable<H> {
    type PerCpu = ();
    type Pages = ();

    fn per_cpu(&self) {}

    #[inline]
    fn domain(&self) -> DomainId {
        self.domain
    }

    #[inline]
    fn map<P: Platform>(
        &self,
        (): &mut (),
        _: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.host.with(|host| host.map(self.name, &request))
    }

    #[inline]
    fn map_nosync<P: Platform>(
        &self,
        (): &mut (),
        _: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.host.with(|host| host.queue_map(self.name, &request))
    }

    /// Returns the result of the requests of [`map_nosync`](Self::map_nosync). On an error,
    /// the caller unmaps `range`.
    #[inline]
    fn iotlb_sync_map<P: Platform>(
        &self,
        _: &mut P,
        range: PfnRange,
    ) -> Result<(), InvalidationError> {
        self.host.with(|host| host.map_result(self.name, range))
    }

    #[inline]
    fn unmap<P: Platform>(
        &self,
        (): &mut (),
        _: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        self.host.with(|host| host.unmap(self.name, range));
        let unmapped = Unmapped::attest_cleared(self.domain, range);
        Ok((unmapped, CachedLevels::Leaves, ()))
    }

    fn is_empty<P: Platform>(&self, _: &P) -> bool {
        self.host.with(|host| host.is_empty(self.name))
    }

    #[inline]
    fn sync<P: Platform>(&self, (): &mut (), _: &mut P) {
        self.host.with(H::sync);
    }
}
