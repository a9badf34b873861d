//! The guest's table of an I/O space.

use ringfence_pgtable::{MapError, MapRequest};
use ringfence_types::{
    DomainId, InvalidationError, PageSize, Pfn, PfnRange, PhysAddr, RequesterId,
};

use super::{Calls, Clearing, GUEST, XenHost, device_of};
use crate::components::{HostOf, LAST_PAGE_32_BIT, MakeTable, ReplayTable};
use crate::error::LabError;
use crate::guest::request_table::{RequestTable, TableRequests, pages_of};
use crate::guest::{HostHardware, KickCause, SharedHost};
use crate::modes::{FlushKind, Owner};
use crate::xen::{Domid, IommuOp, TceFlush, XenError};

/// Table of a domain's I/O space in Xen. Each change is a hypercall.
pub type XenTable = RequestTable<XenHost>;

/// An I/O space, and the hypercalls that change its table.
#[derive(Debug, Clone, Copy)]
pub struct XenSpace {
    bdf: RequesterId,
    calls: Calls,
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
    let bdf = device_of(domain);
    Ok(XenTable::from_parts(
        host,
        domain,
        XenSpace { bdf, calls },
        root,
    ))
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
    type Hardware = HostHardware<XenHost>;
    const LAST_PAGE: u64 = LAST_PAGE_32_BIT;

    fn root(&self) -> PhysAddr {
        self.host_root()
    }
}

impl XenHost {
    /// Adds the calls of a map. Stops when Xen has refused one of its pages.
    fn add_map_calls(&mut self, space: XenSpace, range: PfnRange, request: &MapRequest) {
        if space.calls == Calls::Grants {
            self.map_grants(space.bdf, request);
            return;
        }
        self.maps_waiting = true;
        let frame = request.pa.get() >> PageSize::Size4K.shift();
        for page in 0..request.pages {
            let call = IommuOp::MapEntry {
                bdf: space.bdf,
                page: Pfn::new(range.lo().get() + page),
                gpfn: frame + page,
                permissions: request.permissions,
            };
            self.add(call, KickCause::Map);
            if self.refusal(space.bdf, range).is_some() {
                break;
            }
        }
    }

    /// Removes the entries that a refused map has stored. Its calls count as calls of the map.
    #[cold]
    fn undo_map(&mut self, space: XenSpace) {
        for page in std::mem::take(&mut self.stored) {
            if space.calls == Calls::Grants {
                self.waiting_grants.push((space.bdf.bus(), page.get()));
                continue;
            }
            let call = IommuOp::UnmapEntry {
                bdf: space.bdf,
                page,
                flush: TceFlush::Now,
            };
            self.add(call, KickCause::Map);
        }
        self.unmap_waiting_grants();
        self.cross(KickCause::Map);
    }
}

impl TableRequests for XenHost {
    type Name = XenSpace;

    #[inline]
    fn map(&mut self, space: XenSpace, request: &MapRequest) -> Result<(), MapError> {
        let range = pages_of(request)?;
        if self.maps_waiting {
            // A refusal of this map undoes its own entries, not those of waiting maps.
            self.cross(KickCause::Map);
        }
        self.stored.clear();
        self.add_map_calls(space, range, request);
        self.cross(KickCause::Map);
        match self.take_refusal(space.bdf, range) {
            None => Ok(()),
            Some(error) => {
                self.undo_map(space);
                Err(map_error(error, request))
            }
        }
    }

    #[inline]
    fn queue_map(&mut self, space: XenSpace, request: &MapRequest) -> Result<(), MapError> {
        let range = pages_of(request)?;
        self.add_map_calls(space, range, request);
        Ok(())
    }

    /// Sends the waiting maps. The caller unmaps a refused list.
    #[inline]
    fn map_result(&mut self, space: XenSpace, range: PfnRange) -> Result<(), InvalidationError> {
        self.cross(KickCause::Map);
        self.stored.clear();
        match self.take_refusal(space.bdf, range) {
            None => Ok(()),
            Some(_) => Err(InvalidationError::Failed),
        }
    }

    /// Clears the entries, or queues their unmaps. The entries are cleared no later than the commit
    /// of the invalidation. If Xen refuses to clear one, that and all later invalidations of the
    /// guest fail (`XenHost::broken`).
    #[inline]
    fn unmap(&mut self, space: XenSpace, range: PfnRange) {
        for page in range.lo().get()..=range.hi().get() {
            if space.calls == Calls::Grants {
                self.traffic.requests += 1;
                self.waiting_grants.push((space.bdf.bus(), page));
                continue;
            }
            let call = IommuOp::UnmapEntry {
                bdf: space.bdf,
                page: Pfn::new(page),
                flush: TceFlush::Deferred,
            };
            // The last call waits for the flush. The others need no flush of their own.
            if self.clearing == Clearing::AtFlush && page == range.hi().get() {
                self.push(call, KickCause::Unmap);
            } else {
                self.add(call, KickCause::Unmap);
            }
        }
    }

    /// Sends the waiting calls and flushes first.
    fn is_empty(&mut self, space: XenSpace) -> bool {
        self.flush_waiting();
        self.xen.is_empty(space.bdf)
    }
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
