//! A driver domain's maps and unmaps of grants (CG14).

use ringfence_pgtable::MapRequest;
use ringfence_types::{Pfn, RequesterId};

use super::{GUEST, HeldGrant, XenHost};
use crate::guest::KickCause;
use crate::xen::{Domid, GrantMap, MAX_MULTICALL};

impl XenHost {
    /// Grants the pages of a map to the driver domain and maps them, one hypercall for up to
    /// [`MAX_MULTICALL`] pages.
    pub(super) fn map_grants(&mut self, bdf: RequesterId, request: &MapRequest) {
        let first = Pfn::containing(request.iova).get();
        let mut page = 0;
        let mut is_refused = false;
        while page < request.pages && !is_refused {
            let mut maps = Vec::with_capacity(MAX_MULTICALL);
            while page < request.pages && maps.len() < MAX_MULTICALL {
                let gpfn = (request.pa.get() >> 12) + page;
                match self
                    .xen
                    .grant_access(GUEST, Domid::DOM0, gpfn, request.permissions)
                {
                    Ok(reference) => maps.push(GrantMap {
                        granter: GUEST,
                        reference,
                        bdf,
                        page: Pfn::new(first + page),
                        permissions: request.permissions,
                    }),
                    Err(error) => {
                        self.refused.insert((bdf.bus(), first + page), error);
                        is_refused = true;
                        break;
                    }
                }
                page += 1;
            }
            self.traffic.requests += maps.len() as u64;
            self.traffic.kick(KickCause::Map);
            let mut mapped = Vec::with_capacity(maps.len());
            let sent = self
                .xen
                .map_grants(Domid::DOM0, &maps, |result| mapped.push(result));
            for (map, result) in maps.iter().zip(mapped) {
                match result {
                    Ok(handle) => {
                        let held = HeldGrant {
                            handle,
                            reference: map.reference,
                        };
                        self.grants.insert((bdf.bus(), map.page.get()), held);
                        self.stored.push(map.page);
                    }
                    Err(error) => {
                        self.refused.insert((bdf.bus(), map.page.get()), error);
                        is_refused = true;
                        self.broken |= self.xen.end_access(GUEST, map.reference).is_err();
                    }
                }
            }
            self.broken |= sent.is_err();
        }
    }

    /// Unmaps all grants that the driver domain has mapped for devices of a bus.
    pub(super) fn unmap_grants_of(&mut self, bus: u8) {
        let of_bus = self.grants.range((bus, 0)..=(bus, u64::MAX));
        let left: Vec<_> = of_bus.map(|(at, _)| *at).collect();
        self.waiting_grants.extend(left);
        self.unmap_waiting_grants();
    }

    /// Unmaps the waiting grants, one hypercall for up to [`MAX_MULTICALL`] pages. The guest then
    /// withdraws them.
    pub(super) fn unmap_waiting_grants(&mut self) {
        let waiting = std::mem::take(&mut self.waiting_grants);
        for batch in waiting.chunks(MAX_MULTICALL) {
            let mut held = Vec::with_capacity(batch.len());
            for at in batch {
                self.refused.remove(at);
                held.extend(self.grants.remove(at));
            }
            let handles: Vec<_> = held.iter().map(|held| held.handle).collect();
            if handles.is_empty() {
                continue;
            }
            self.traffic.kick(KickCause::Unmap);
            // A refused list leaves pages without grants.
            let mut refused = false;
            let sent = self
                .xen
                .unmap_grants(Domid::DOM0, &handles, |result| refused |= result.is_err());
            self.broken |= refused | sent.is_err();
            for held in held {
                self.broken |= self.xen.end_access(GUEST, held.reference).is_err();
            }
        }
        self.waiting_grants = waiting;
        self.waiting_grants.clear();
    }
}
