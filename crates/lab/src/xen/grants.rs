//! Grant tables, integrated with the I/O map (CG14).
//!
//! A guest grants a page to a driver domain by an entry in memory, without a hypercall. The driver
//! domain maps the grant for its device: the hypercall that maps the grant also stores the TCE. The
//! hypercall that unmaps the grant clears the TCE and flushes. The DMA API therefore makes no other
//! hypercalls. A domain cannot map its own pages in this way: direct access needs the other calls.

use std::collections::BTreeMap;

use ringfence_types::{Access, Permissions, Pfn, RequesterId};

use super::hypervisor::{Xen, space_of};
use super::{Domid, MAX_MULTICALL, XenError};

/// Entries of a grant table, and handles of a domain: 32 frames of 512 entries in Xen 3.
const GRANTS: usize = 1 << 14;

/// Index of an entry in a domain's grant table (`grant_ref_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantRef(u32);

impl GrantRef {
    /// Creates a reference.
    pub const fn new(raw: u32) -> Self {
        Self(raw)
    }
}

/// Handle of a grant that a driver domain has mapped (`grant_handle_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantHandle(u32);

impl GrantHandle {
    /// Creates a handle.
    pub const fn new(raw: u32) -> Self {
        Self(raw)
    }
}

/// One operation of `GNTTABOP_map_grant_ref`, with the device's DMA address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrantMap {
    /// The domain that granted the page.
    pub granter: Domid,
    /// The entry of its grant table.
    pub reference: GrantRef,
    /// The device that will access the page.
    pub bdf: RequesterId,
    /// The page of the DMA address, in the I/O address space of `bdf`.
    pub page: Pfn,
    /// The rights of the device.
    pub permissions: Permissions,
}

#[derive(Debug, Clone, Copy)]
struct GrantEntry {
    grantee: Domid,
    gpfn: u64,
    permissions: Permissions,
    /// Number of live maps of this entry.
    maps: u32,
}

#[derive(Debug, Clone, Copy)]
struct Mapped {
    granter: Domid,
    reference: GrantRef,
    bdf: RequesterId,
    page: Pfn,
}

/// A table whose handles are indices. A removed item's handle is reused.
#[derive(Debug)]
struct HandleTable<T> {
    items: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for HandleTable<T> {
    fn default() -> Self {
        Self {
            items: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T: Copy> HandleTable<T> {
    fn add(&mut self, item: T) -> Result<u32, XenError> {
        if let Some(number) = self.free.pop() {
            self.items[number as usize] = Some(item);
            return Ok(number);
        }
        if self.items.len() >= GRANTS {
            return Err(XenError::NoMemory);
        }
        self.items.push(Some(item));
        Ok((self.items.len() - 1) as u32)
    }

    fn get(&self, number: u32) -> Option<T> {
        self.items.get(number as usize).copied().flatten()
    }

    fn remove(&mut self, number: u32) {
        let item = self.items.get_mut(number as usize);
        if item.is_some_and(|item| item.take().is_some()) {
            self.free.push(number);
        }
    }
}

/// The grant tables of all domains, and the grants that they have mapped.
#[derive(Debug, Default)]
pub(super) struct GrantTables {
    granted: BTreeMap<Domid, HandleTable<GrantEntry>>,
    mapped: BTreeMap<Domid, HandleTable<Mapped>>,
}

impl Xen {
    /// Grants the page `gpfn` of `granter` to `grantee`: writes an entry of `granter`'s grant
    /// table. No hypercall: the table is shared memory.
    ///
    /// # Errors
    /// [`XenError::NoMemory`]: the table is full.
    pub fn grant_access(
        &mut self,
        granter: Domid,
        grantee: Domid,
        gpfn: u64,
        permissions: Permissions,
    ) -> Result<GrantRef, XenError> {
        let table = self.grants.granted.entry(granter).or_default();
        let entry = GrantEntry {
            grantee,
            gpfn,
            permissions,
            maps: 0,
        };
        table.add(entry).map(GrantRef)
    }

    /// Removes an entry of `granter`'s grant table. No hypercall.
    ///
    /// # Errors
    /// [`XenError::Busy`]: a domain still maps the grant. [`XenError::BadGrant`]: no such entry.
    pub fn end_access(&mut self, granter: Domid, reference: GrantRef) -> Result<(), XenError> {
        let table = self.grants.granted.get_mut(&granter);
        let table = table.ok_or(XenError::BadGrant)?;
        let entry = table.get(reference.0).ok_or(XenError::BadGrant)?;
        if entry.maps > 0 {
            return Err(XenError::Busy);
        }
        table.remove(reference.0);
        Ok(())
    }

    /// Maps grants for devices of `caller`, in one hypercall. Calls `each` for each map, with its
    /// handle or the reason for the refusal.
    ///
    /// # Errors
    /// [`XenError::TooManyCalls`]: the batch is too long, and no grant was mapped.
    pub fn map_grants(
        &mut self,
        caller: Domid,
        maps: &[GrantMap],
        mut each: impl FnMut(Result<GrantHandle, XenError>),
    ) -> Result<(), XenError> {
        self.stats.hypercalls += 1;
        if maps.len() > MAX_MULTICALL {
            return Err(XenError::TooManyCalls);
        }
        for map in maps {
            self.stats.calls += 1;
            each(self.map_grant(caller, map));
        }
        Ok(())
    }

    fn map_grant(&mut self, caller: Domid, map: &GrantMap) -> Result<GrantHandle, XenError> {
        let table = self.grants.granted.get(&map.granter);
        let entry = table.and_then(|table| table.get(map.reference.0));
        let entry = entry.ok_or(XenError::BadGrant)?;
        let allowed = [Access::Read, Access::Write]
            .iter()
            .all(|access| !map.permissions.allows(*access) || entry.permissions.allows(*access));
        if entry.grantee != caller || map.granter == caller || !allowed {
            return Err(XenError::BadGrant);
        }
        // The granting guest chose `gpfn`: look it up before use.
        let frame = self.frames.frame(map.granter, entry.gpfn);
        let frame = frame.ok_or(XenError::BadGrant)?;
        let mapped = Mapped {
            granter: map.granter,
            reference: map.reference,
            bdf: map.bdf,
            page: map.page,
        };
        let number = self.grants.mapped.entry(caller).or_default().add(mapped)?;
        if let Err(error) = self.map_frame(caller, map.bdf, map.page, frame, map.permissions) {
            self.grants.mapped.entry(caller).or_default().remove(number);
            return Err(error);
        }
        if let Ok(space) = space_of(&mut self.spaces, caller, map.bdf) {
            space.set_granted(map.page, true);
        }
        self.count_maps(map.granter, map.reference, 1);
        Ok(GrantHandle(number))
    }

    fn count_maps(&mut self, granter: Domid, reference: GrantRef, by: i32) {
        let table = self.grants.granted.get_mut(&granter);
        let item = table.and_then(|table| table.items.get_mut(reference.0 as usize));
        if let Some(Some(entry)) = item {
            entry.maps = entry.maps.saturating_add_signed(by);
        }
    }

    /// Unmaps grants of `caller`, in one hypercall: clears their TCEs, and flushes once for each
    /// bus. Calls `each` with the result of each unmap.
    ///
    /// # Errors
    /// [`XenError::TooManyCalls`]: the batch is too long, and nothing was unmapped.
    /// [`XenError::FlushFailed`]: the TCEs are cleared, and the frames stay referenced.
    pub fn unmap_grants(
        &mut self,
        caller: Domid,
        handles: &[GrantHandle],
        mut each: impl FnMut(Result<(), XenError>),
    ) -> Result<(), XenError> {
        self.stats.hypercalls += 1;
        if handles.len() > MAX_MULTICALL {
            return Err(XenError::TooManyCalls);
        }
        let mut buses: Vec<u8> = Vec::new();
        for handle in handles {
            self.stats.calls += 1;
            let cleared = self.clear_grant(caller, *handle);
            if let Ok(bus) = cleared
                && !buses.contains(&bus)
            {
                buses.push(bus);
            }
            each(cleared.map(drop));
        }
        self.dirty.sync(&*self.memory);
        for bus in buses {
            self.flush(bus)?;
        }
        Ok(())
    }

    fn clear_grant(&mut self, caller: Domid, handle: GrantHandle) -> Result<u8, XenError> {
        let table = self.grants.mapped.get_mut(&caller);
        let table = table.ok_or(XenError::NoSuchHandle)?;
        let mapped = table.get(handle.0).ok_or(XenError::NoSuchHandle)?;
        let space = space_of(&mut self.spaces, caller, mapped.bdf)?;
        space.unmap(&self.memory, &mut self.dirty, mapped.page)?;
        table.remove(handle.0);
        self.count_maps(mapped.granter, mapped.reference, -1);
        Ok(mapped.bdf.bus())
    }
}
