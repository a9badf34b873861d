//! The guest's table of a domain: it sends requests to the host that owns the table.

use std::rc::Rc;

use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, MapError, MapRequest};
use ringfence_types::{DomainId, InvalidationError, Iova, PfnRange, PhysAddr};
use ringfence_virtio_iommu::DomainId as VirtioDomain;
use ringfence_virtio_iommu::spec::VIRTIO_IOMMU_S_NOMEM;

use super::{DomainMode, VirtioHost};
use crate::components::{HostOf, MakeTable, ReplayTable};
use crate::error::LabError;
use crate::guest::request_table::{RequestTable, TableRequests, pages_of};
use crate::guest::{HostHardware, KickCause, SharedHost};
use crate::modes::Owner;

/// A domain's table in a guest.
pub type VirtioTable = RequestTable<VirtioHost>;

impl VirtioTable {
    /// Attaches a new device to a new domain of `host`.
    ///
    /// # Errors
    /// The host is out of memory.
    pub fn new(
        host: &SharedHost<VirtioHost>,
        domain: DomainId,
        mode: DomainMode,
    ) -> Result<Self, LabError> {
        let name = VirtioDomain::new(domain.get().into());
        let root = host.with(|host| host.attach(domain, mode))?;
        Ok(Self::from_parts(host, domain, name, root))
    }
}

/// Creates the table of a domain that a host behind a virtio-iommu owns.
fn table<const LAZY: bool>(
    domain: DomainId,
    _: Coherency,
    _: &Arena,
    _: &Frames<Rc<Arena>>,
    host: Option<&HostOf<VirtioTable>>,
) -> Result<VirtioTable, LabError> {
    let host = host.ok_or(LabError::Internal("a guest without a host"))?;
    let mode = match LAZY {
        false => DomainMode::Strict,
        true => DomainMode::Lazy,
    };
    VirtioTable::new(host, domain, mode)
}

/// Returns the constructor of the tables of `owner`, a host behind a virtio-iommu. Replays are
/// compiled once for both modes of a domain.
pub(crate) fn virtio_table(owner: Owner) -> MakeTable<VirtioTable> {
    match owner {
        Owner::VirtioIommuLazy => table::<true>,
        _ => table::<false>,
    }
}

impl ReplayTable for VirtioTable {
    type Hardware = HostHardware<VirtioHost>;

    fn root(&self) -> PhysAddr {
        self.host_root()
    }
}

impl TableRequests for VirtioHost {
    type Name = VirtioDomain;

    #[inline]
    fn map(&mut self, table: VirtioDomain, request: &MapRequest) -> Result<(), MapError> {
        let range = pages_of(request)?;
        self.add_map(table, request);
        self.kick(KickCause::Map);
        match self.take_refusal(table, range) {
            None => Ok(()),
            Some(status) => Err(refusal(status, request.iova)),
        }
    }

    #[inline]
    fn queue_map(&mut self, table: VirtioDomain, request: &MapRequest) -> Result<(), MapError> {
        self.add_map(table, request);
        Ok(())
    }

    #[inline]
    fn map_result(
        &mut self,
        table: VirtioDomain,
        range: PfnRange,
    ) -> Result<(), InvalidationError> {
        match self.take_refusal(table, range) {
            None => Ok(()),
            Some(_) => Err(InvalidationError::Failed),
        }
    }

    #[inline]
    fn unmap(&mut self, table: VirtioDomain, range: PfnRange) {
        self.add_unmap(table, range);
    }

    fn is_empty(&mut self, table: VirtioDomain) -> bool {
        self.kick(KickCause::Unmap);
        self.device.sink().is_empty(table)
    }

    /// Kicks for maps. Unmaps wait for their invalidation or for the next map.
    #[inline]
    fn sync(&mut self) {
        if self.maps_waiting > 0 {
            self.kick(KickCause::Map);
        }
    }
}

/// Converts the status of a refused map to an error.
#[cold]
fn refusal(status: u8, iova: Iova) -> MapError {
    match status {
        VIRTIO_IOMMU_S_NOMEM => MapError::OutOfFrames,
        _ => MapError::Refused { iova },
    }
}
