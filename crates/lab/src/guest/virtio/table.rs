//! The guest's table of a domain: it sends requests to the host that owns the table.

use std::rc::Rc;

use ringfence_dma::Platform;
use ringfence_dma::space::IoPageTable;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, MapError, MapRequest, UnmapError};
use ringfence_types::{
    CachedLevels, DomainId, InvalidationError, Iova, Pfn, PfnRange, PhysAddr, Unmapped,
};
use ringfence_virtio_iommu::DomainId as VirtioDomain;
use ringfence_virtio_iommu::spec::VIRTIO_IOMMU_S_NOMEM;

use super::{DomainMode, VirtioHost};
use crate::components::{HostOf, MakeTable, ReplayTable};
use crate::error::LabError;
use crate::guest::{KickCause, SharedHost, VirtIommuHardware};
use crate::modes::Owner;

/// A domain's table in a guest.
#[derive(Debug)]
pub struct VirtioTable {
    host: SharedHost<VirtioHost>,
    domain: DomainId,
    name: VirtioDomain,
    root: PhysAddr,
}

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
        Ok(Self {
            host: host.clone(),
            domain,
            name,
            root,
        })
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
    type Hardware = VirtIommuHardware<VirtioHost>;

    /// The root of the host's table. The guest does not know it.
    fn root(&self) -> PhysAddr {
        self.root
    }
}

impl IoPageTable for VirtioTable {
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
        let range = PfnRange::new(Pfn::containing(request.iova), request.pages);
        let range = range.ok_or(MapError::Empty)?;
        self.host.with(|host| {
            host.add_map(self.name, &request);
            host.kick(KickCause::Map);
            match host.take_refusal(self.name, range) {
                None => Ok(()),
                Some(status) => Err(refusal(status, request.iova)),
            }
        })
    }

    #[inline]
    fn map_nosync<P: Platform>(
        &self,
        (): &mut (),
        _: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.host.with(|host| host.add_map(self.name, &request));
        Ok(())
    }

    /// Returns the result of the requests of [`map_nosync`](Self::map_nosync).
    #[inline]
    fn iotlb_sync_map<P: Platform>(
        &self,
        _: &mut P,
        range: PfnRange,
    ) -> Result<(), InvalidationError> {
        let refused = self.host.with(|host| host.take_refusal(self.name, range));
        match refused {
            None => Ok(()),
            Some(_) => Err(InvalidationError::Failed),
        }
    }

    /// Queues the unmap. The host clears the entries before the layer's invalidation completes, and
    /// only that frees the range.
    #[inline]
    fn unmap<P: Platform>(
        &self,
        (): &mut (),
        _: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        self.host.with(|host| host.add_unmap(self.name, range));
        let unmapped = Unmapped::attest_cleared(self.domain, range);
        Ok((unmapped, CachedLevels::Leaves, ()))
    }

    fn is_empty<P: Platform>(&self, _: &P) -> bool {
        self.host.with(|host| {
            host.kick(KickCause::Unmap);
            host.device.sink().is_empty(self.name)
        })
    }

    /// Kicks for maps. Unmaps wait for their invalidation or for the next map.
    #[inline]
    fn sync<P: Platform>(&self, (): &mut (), _: &mut P) {
        self.host.with(|host| {
            if host.maps_waiting > 0 {
                host.kick(KickCause::Map);
            }
        });
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
