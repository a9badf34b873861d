//! The guest's table of an I/O space.

use ringfence_dma::Platform;
use ringfence_dma::space::IoPageTable;
use ringfence_pgtable::{MapError, MapRequest, UnmapError};
use ringfence_types::{
    CachedLevels, DomainId, InvalidationError, PageSize, Pfn, PfnRange, PhysAddr, RequesterId,
    Unmapped,
};

use super::{Calls, Clearing, GUEST, XenHost, device_of};
use crate::components::{HostOf, LAST_PAGE_32_BIT, MakeTable, ReplayTable};
use crate::error::LabError;
use crate::guest::{KickCause, SharedHost, VirtIommuHardware};
use crate::modes::{FlushKind, Owner};
use crate::xen::{Domid, IommuOp, TceFlush, XenError};

/// Table of a domain's I/O space in Xen. Each change is a hypercall.
#[derive(Debug)]
pub struct XenTable {
    host: SharedHost<XenHost>,
    calls: Calls,
    domain: DomainId,
    bdf: RequesterId,
    root: PhysAddr,
}

fn host_of(host: Option<&SharedHost<XenHost>>) -> Result<&SharedHost<XenHost>, LabError> {
    host.ok_or(LabError::Internal("a guest without a hypervisor"))
}

/// Creates the I/O space of a domain, whose table the given hypercalls change.
fn create(
    domain: DomainId,
    host: Option<&SharedHost<XenHost>>,
    calls: Calls,
    clearing: Clearing,
) -> Result<XenTable, LabError> {
    let host = host_of(host)?;
    let owner = match calls {
        Calls::Grants => Domid::DOM0,
        _ => GUEST,
    };
    let root = host.with(|host| {
        host.calls = calls;
        host.clearing = clearing;
        host.create_space(domain, owner)
    })?;
    Ok(XenTable {
        host: host.clone(),
        calls,
        domain,
        bdf: device_of(domain),
        root,
    })
}

/// Returns the constructor of the tables of a mode whose owner is Xen.
pub(crate) fn xen_table(owner: Owner, flush: FlushKind) -> MakeTable<XenTable> {
    use Calls::{Grants, Multicall, Single};
    use Clearing::{AtFlush, AtUnmap};
    // A cache of mappings clears entries only in order to flush them at once.
    let flushes_at_once =
        matches!(flush, FlushKind::PerUnmap | FlushKind::Burst) || flush.has_cache();
    let clearing = if flushes_at_once { AtFlush } else { AtUnmap };
    match (owner, clearing) {
        (Owner::XenGrant, _) => |domain, _, _, _, host| create(domain, host, Grants, AtFlush),
        (Owner::XenMulticall, AtFlush) => {
            |domain, _, _, _, host| create(domain, host, Multicall, AtFlush)
        }
        (Owner::XenMulticall, AtUnmap) => {
            |domain, _, _, _, host| create(domain, host, Multicall, AtUnmap)
        }
        (Owner::Xen, AtFlush) => |domain, _, _, _, host| create(domain, host, Single, AtFlush),
        (Owner::Xen, AtUnmap) => |domain, _, _, _, host| create(domain, host, Single, AtUnmap),
        _ => |_, _, _, _, _| Err(LabError::Internal("the owner of the table is not Xen")),
    }
}

/// Creates the table of a whole-guest map, and returns its root.
///
/// # Errors
/// [`LabError::TooFewBuses`] above 256 domains. [`LabError::Internal`] without a host, or if Xen
/// refuses the map.
pub(crate) fn whole_guest(
    domain: DomainId,
    host: Option<&HostOf<XenTable>>,
) -> Result<PhysAddr, LabError> {
    let host = host_of(host)?;
    host.with(|host| host.map_whole_guest(domain))
}

impl ReplayTable for XenTable {
    type Hardware = VirtIommuHardware<XenHost>;
    const LAST_PAGE: u64 = LAST_PAGE_32_BIT;

    fn root(&self) -> PhysAddr {
        self.root
    }
}

impl XenTable {
    /// Adds the calls of a map. Stops when Xen has refused one of its pages.
    fn add_map(&self, host: &mut XenHost, range: PfnRange, request: &MapRequest) {
        if self.calls == Calls::Grants {
            host.map_grants(self.bdf, request);
            return;
        }
        host.maps_waiting = true;
        let frame = request.pa.get() >> PageSize::Size4K.shift();
        for page in 0..request.pages {
            let call = IommuOp::MapEntry {
                bdf: self.bdf,
                page: Pfn::new(range.lo().get() + page),
                gpfn: frame + page,
                permissions: request.permissions,
            };
            host.add(call, KickCause::Map);
            if host.refusal(self.bdf, range).is_some() {
                break;
            }
        }
    }

    /// Removes the entries that a refused map has stored. Its calls count as calls of the map.
    #[cold]
    fn undo_map(&self, host: &mut XenHost) {
        for page in std::mem::take(&mut host.stored) {
            if self.calls == Calls::Grants {
                host.waiting_grants.push((self.bdf.bus(), page.get()));
                continue;
            }
            let call = IommuOp::UnmapEntry {
                bdf: self.bdf,
                page,
                flush: TceFlush::Now,
            };
            host.add(call, KickCause::Map);
        }
        host.unmap_waiting_grants();
        host.cross(KickCause::Map);
    }
}

impl IoPageTable for XenTable {
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
        let range = pages_of(&request)?;
        self.host.with(|host| {
            if host.maps_waiting {
                // A refusal of this map undoes its own entries, not those of waiting maps.
                host.cross(KickCause::Map);
            }
            host.stored.clear();
            self.add_map(host, range, &request);
            host.cross(KickCause::Map);
            match host.take_refusal(self.bdf, range) {
                None => Ok(()),
                Some(error) => {
                    self.undo_map(host);
                    Err(map_error(error, &request))
                }
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
        let range = pages_of(&request)?;
        self.host.with(|host| self.add_map(host, range, &request));
        Ok(())
    }

    /// Sends the waiting maps of [`map_nosync`](Self::map_nosync). Fails if Xen refused a page of
    /// `range`; the error has no room for the reason. The caller rolls back.
    #[inline]
    fn iotlb_sync_map<P: Platform>(
        &self,
        _: &mut P,
        range: PfnRange,
    ) -> Result<(), InvalidationError> {
        self.host.with(|host| {
            host.cross(KickCause::Map);
            // The caller unmaps a refused list.
            host.stored.clear();
            match host.take_refusal(self.bdf, range) {
                None => Ok(()),
                Some(_) => Err(InvalidationError::Failed),
            }
        })
    }

    /// Clears the entries, or queues their unmaps. The entries are cleared no later than the commit
    /// of the invalidation. If Xen refuses to clear one, that and all later invalidations of the
    /// guest fail (`XenHost::broken`).
    #[inline]
    fn unmap<P: Platform>(
        &self,
        (): &mut (),
        _: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        self.host.with(|host| {
            for page in range.lo().get()..=range.hi().get() {
                if self.calls == Calls::Grants {
                    host.traffic.requests += 1;
                    host.waiting_grants.push((self.bdf.bus(), page));
                    continue;
                }
                let call = IommuOp::UnmapEntry {
                    bdf: self.bdf,
                    page: Pfn::new(page),
                    flush: TceFlush::Deferred,
                };
                // The last call waits for the flush. The others need no flush of their own.
                if host.clearing == Clearing::AtFlush && page == range.hi().get() {
                    host.push(call, KickCause::Unmap);
                } else {
                    host.add(call, KickCause::Unmap);
                }
            }
        });
        let unmapped = Unmapped::attest_cleared(self.domain, range);
        Ok((unmapped, CachedLevels::Leaves, ()))
    }

    /// Sends the waiting calls and flushes first.
    fn is_empty<P: Platform>(&self, _: &P) -> bool {
        self.host.with(|host| {
            host.flush_waiting();
            host.xen.is_empty(self.bdf)
        })
    }

    /// Has no effect: [`iotlb_sync_map`](Self::iotlb_sync_map) sends waiting maps, and the flush or
    /// the next map sends waiting unmaps.
    #[inline]
    fn sync<P: Platform>(&self, (): &mut (), _: &mut P) {}
}

/// Returns the pages of a request.
fn pages_of(request: &MapRequest) -> Result<PfnRange, MapError> {
    let first = Pfn::containing(request.iova);
    PfnRange::new(first, request.pages).ok_or(MapError::Empty)
}

/// Converts the error of a refused map.
#[cold]
fn map_error(error: XenError, request: &MapRequest) -> MapError {
    match error {
        XenError::NoMemory => MapError::OutOfFrames,
        XenError::Occupied => MapError::AlreadyMapped { iova: request.iova },
        XenError::BeyondSpace => MapError::BeyondWidth { iova: request.iova },
        XenError::NoFrame => MapError::PhysicalBeyondWidth { at: request.pa },
        _ => MapError::Refused { iova: request.iova },
    }
}

#[cfg(test)]
mod tests;
