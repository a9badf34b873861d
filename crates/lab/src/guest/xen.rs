//! A guest of Xen whose I/O spaces the hypervisor owns (CG05, CG06, CG11, CG12, CG14).
//!
//! The guest is dom0, or a driver domain that maps grants. Its table sends hypercalls to [`Xen`].
//! Each crossing counts as a kick, which the profile prices: `xen_hypercall_cycles`.

use std::collections::BTreeMap;
use std::rc::Rc;

use ringfence_dma::Platform;
use ringfence_dma::space::IoPageTable;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, MapError, MapRequest, UnmapError};
use ringfence_types::{
    CachedLevels, DomainId, Invalidation, InvalidationError, Pfn, PfnRange, PhysAddr, RequesterId,
    Ticket, Unmapped,
};

use super::{HostBackend, HostUnit, KickCause, QueueStats, SharedHost, VirtIommuHardware};
use crate::components::{HostOf, LAST_PAGE_32_BIT, MakeTable, ReplayTable};
use crate::error::LabError;
use crate::hardware::Calgary;
use crate::modes::{FlushKind, Owner};
use crate::platform::MEMORY_BYTES;
use crate::xen::{
    Domid, FrameReferences, GrantHandle, GrantMap, GrantRef, IommuOp, MAX_MULTICALL, TceFlush, Xen,
    XenError,
};

/// The calls that a guest makes, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Calls {
    /// One hypercall for each entry.
    Single,
    /// One crossing for up to [`MAX_MULTICALL`] entries.
    Multicall,
    /// The hypercalls that map and unmap grants store the entries.
    Grants,
}

/// The time at which an unmapped entry is cleared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Clearing {
    /// With the flush: the hypercall that clears the last entry flushes.
    AtFlush,
    /// At the unmap. The flush is a hypercall of its own, later.
    AtUnmap,
}

/// The domain whose pages a driver domain maps.
const GUEST: Domid = Domid::new(1);

/// A grant that the driver domain has mapped.
#[derive(Debug, Clone, Copy)]
struct HeldGrant {
    handle: GrantHandle,
    reference: GrantRef,
}

/// A set of buses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Buses([u64; 4]);

impl Buses {
    #[inline]
    fn contains(self, bus: u8) -> bool {
        self.0[usize::from(bus >> 6)] >> (bus & 63) & 1 == 1
    }

    #[inline]
    fn insert(&mut self, bus: u8) {
        self.0[usize::from(bus >> 6)] |= 1 << (bus & 63);
    }

    #[inline]
    fn remove(&mut self, bus: u8) {
        self.0[usize::from(bus >> 6)] &= !(1 << (bus & 63));
    }

    #[inline]
    fn is_empty(self) -> bool {
        self == Self::default()
    }
}

/// Xen, and the state of its guest's xen-iommu driver.
#[derive(Debug)]
pub struct XenHost {
    xen: Xen,
    calls: Calls,
    clearing: Clearing,
    /// Calls that wait for the crossing.
    waiting: Vec<IommuOp>,
    /// Grants by space and page, in modes that map grants.
    grants: BTreeMap<(u8, u64), HeldGrant>,
    /// Grants whose unmap waits for the crossing.
    waiting_grants: Vec<(u8, u64)>,
    /// Spaces with cleared entries that are not flushed.
    owed: Buses,
    /// Pages that the current map has stored.
    stored: Vec<Pfn>,
    /// The first refused map that the driver has not reported yet.
    refused: Option<XenError>,
    /// True if an unmap or a flush failed. The device may then still reach any page.
    broken: bool,
    commits: u64,
    traffic: QueueStats,
}

impl HostBackend for XenHost {
    type Unit = Calgary;

    fn new(
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
        coherency: Coherency,
        unit: HostUnit<Calgary>,
    ) -> Result<Self, LabError> {
        let references = FrameReferences::Counted;
        let mut xen = Xen::new(memory, frames, coherency, unit, references);
        // Domains have separate frames; dom0 of a driver domain needs none of its own here.
        let refused = |_| LabError::Internal("Xen refuses its first domain");
        let end = PhysAddr::new(MEMORY_BYTES);
        let dom0 = xen.create_domain(end, 0).map_err(refused)?;
        let detected = IommuOp::IommuDetected {
            first_bus: 0,
            last_bus: u8::MAX,
        };
        xen.hypercall(dom0, &detected).map_err(refused)?;
        // The guest's memory: frames equal guest-physical pages (decision 0019).
        xen.create_domain(PhysAddr::ZERO, MEMORY_BYTES >> 12)
            .map_err(refused)?;
        Ok(Self {
            xen,
            calls: Calls::Single,
            clearing: Clearing::AtFlush,
            waiting: Vec::with_capacity(MAX_MULTICALL),
            grants: BTreeMap::new(),
            waiting_grants: Vec::new(),
            owed: Buses::default(),
            stored: Vec::new(),
            refused: None,
            broken: false,
            commits: 0,
            traffic: QueueStats::default(),
        })
    }

    #[inline]
    fn with_unit<R>(&mut self, act: impl FnOnce(&mut HostUnit<Calgary>) -> R) -> R {
        act(&mut self.xen.unit)
    }

    #[inline]
    fn commit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        match self.clearing {
            Clearing::AtFlush => self.flush_waiting(),
            Clearing::AtUnmap => self.flush_spaces(request),
        }
        self.commits += 1;
        let ticket = Ticket::new(self.commits);
        self.is_completed(ticket)?;
        Ok(ticket)
    }

    #[inline]
    fn is_completed(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        if self.broken {
            return Err(InvalidationError::Failed);
        }
        Ok(self.commits >= ticket.get())
    }

    fn traffic(&self) -> QueueStats {
        QueueStats {
            invalidations: self.xen.unit.invalidations(),
            ..self.traffic
        }
    }
}

/// Returns the device of a domain's space: each domain has a bus (see [`Calgary`]).
fn device_of(domain: DomainId) -> RequesterId {
    RequesterId::new(domain.get().wrapping_sub(1) << 8)
}

impl XenHost {
    /// Creates the I/O space of a domain and returns the root of its table. The start-up calls do
    /// not count as traffic.
    fn create_space(&mut self, domain: DomainId, owner: Domid) -> Result<PhysAddr, LabError> {
        if domain.get() > 256 || domain.get() == 0 {
            return Err(LabError::TooFewBuses { limit: 256 });
        }
        let bdf = device_of(domain);
        let create = IommuOp::CreateIoSpace { bdf, domid: owner };
        self.xen
            .hypercall(Domid::DOM0, &create)
            .map_err(|_| LabError::Internal("Xen creates no I/O space"))?;
        let root = self.xen.root(bdf);
        root.ok_or(LabError::Internal("an I/O space without a table"))
    }

    /// Creates a space that maps all of the guest's memory, and returns the root of its table
    /// (CG07).
    ///
    /// # Errors
    /// Memory is short.
    pub(crate) fn map_whole_guest(&mut self, domain: DomainId) -> Result<PhysAddr, LabError> {
        let root = self.create_space(domain, GUEST)?;
        let bdf = device_of(domain);
        self.xen
            .hypercall(GUEST, &IommuOp::MapWholeGuest { bdf })
            .map_err(|_| LabError::Internal("Xen does not map the guest"))?;
        Ok(root)
    }

    /// Adds a call, and crosses if the guest makes single calls or the batch is full.
    #[inline]
    fn add(&mut self, call: IommuOp, cause: KickCause) {
        self.push(call, cause);
        if self.calls == Calls::Single {
            self.cross(cause);
        }
    }

    /// Adds a call that waits for the next crossing.
    #[inline]
    fn push(&mut self, call: IommuOp, cause: KickCause) {
        if self.waiting.len() >= MAX_MULTICALL {
            self.cross(cause);
        }
        self.traffic.requests += 1;
        self.waiting.push(call);
    }

    /// Performs all waiting calls: in one crossing, or with one crossing for each.
    #[inline]
    fn cross(&mut self, cause: KickCause) {
        let batch = match self.calls {
            Calls::Single => 1,
            _ => MAX_MULTICALL,
        };
        let Self {
            xen,
            waiting,
            stored,
            refused,
            broken,
            owed,
            traffic,
            ..
        } = self;
        for calls in waiting.chunks(batch) {
            traffic.kick(cause);
            let done = xen.multicall(GUEST, calls.iter(), |call, result| match (call, result) {
                (IommuOp::MapEntry { page, .. }, Ok(())) => stored.push(*page),
                (IommuOp::MapEntry { .. }, Err(error)) => *refused = refused.or(Some(error)),
                (IommuOp::UnmapEntry { bdf, flush, .. }, Ok(())) => match flush {
                    TceFlush::Now => owed.remove(bdf.bus()),
                    TceFlush::Deferred => owed.insert(bdf.bus()),
                },
                // A refused list leaves pages without entries. The flush is still due.
                (IommuOp::UnmapEntry { bdf, .. }, Err(XenError::NotMapped)) => {
                    owed.insert(bdf.bus());
                }
                (IommuOp::FlushIoSpace { bdf }, Ok(())) => owed.remove(bdf.bus()),
                (_, Ok(())) => {}
                (_, Err(_)) => *broken = true,
            });
            *broken |= done.is_err();
        }
        waiting.clear();
    }

    /// Clears the entries of waiting unmaps and flushes. The last unmap of a space asks for the
    /// flush.
    #[inline]
    fn flush_waiting(&mut self) {
        if !self.waiting_grants.is_empty() {
            self.unmap_waiting_grants();
        }
        let mut asked = Buses::default();
        for call in self.waiting.iter_mut().rev() {
            if let IommuOp::UnmapEntry { bdf, flush, .. } = call {
                if !asked.contains(bdf.bus()) {
                    asked.insert(bdf.bus());
                    *flush = TceFlush::Now;
                }
            }
        }
        self.cross(KickCause::Unmap);
        if !self.owed.is_empty() {
            for bdf in self.xen.devices() {
                if self.owed.contains(bdf.bus()) {
                    self.push(IommuOp::FlushIoSpace { bdf }, KickCause::Unmap);
                }
            }
            self.cross(KickCause::Unmap);
        }
    }

    /// Sends waiting calls, and a flush of the spaces that `request` names.
    fn flush_spaces(&mut self, request: Invalidation) {
        let spaces = match request {
            Invalidation::Pages { domain, .. } | Invalidation::Domain(domain) => {
                vec![device_of(domain)]
            }
            _ => self.xen.devices(),
        };
        for bdf in spaces {
            self.push(IommuOp::FlushIoSpace { bdf }, KickCause::Unmap);
        }
        self.cross(KickCause::Unmap);
    }

    /// Grants the pages of a map to the driver domain and maps them, one hypercall for up to
    /// [`MAX_MULTICALL`] pages.
    fn map_grants(&mut self, bdf: RequesterId, request: &MapRequest) {
        let first = Pfn::containing(request.iova).get();
        let mut page = 0;
        while page < request.pages && self.refused.is_none() {
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
                        self.refused = Some(error);
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
                        self.refused = self.refused.or(Some(error));
                        self.broken |= self.xen.end_access(GUEST, map.reference).is_err();
                    }
                }
            }
            self.broken |= sent.is_err();
        }
    }

    /// Unmaps the waiting grants, one hypercall for up to [`MAX_MULTICALL`] pages. The guest then
    /// withdraws them.
    fn unmap_waiting_grants(&mut self) {
        let waiting = std::mem::take(&mut self.waiting_grants);
        for batch in waiting.chunks(MAX_MULTICALL) {
            let held: Vec<_> = batch
                .iter()
                .filter_map(|at| self.grants.remove(at))
                .collect();
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

/// The guest's table of an I/O space.
#[derive(Debug)]
pub struct XenTable {
    host: SharedHost<XenHost>,
    calls: Calls,
    domain: DomainId,
    bdf: RequesterId,
    root: PhysAddr,
}

fn make(
    domain: DomainId,
    host: Option<&SharedHost<XenHost>>,
    calls: Calls,
    clearing: Clearing,
) -> Result<XenTable, LabError> {
    let host = host.ok_or(LabError::Internal("a guest without a hypervisor"))?;
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
    use {Calls as C, Clearing::AtFlush, Clearing::AtUnmap};
    let at_flush = matches!(flush, FlushKind::PerUnmap | FlushKind::Burst);
    match (owner, at_flush) {
        (Owner::XenGrant, _) => |d, _, _, _, host| make(d, host, C::Grants, AtFlush),
        (Owner::XenMulticall, true) => |d, _, _, _, host| make(d, host, C::Multicall, AtFlush),
        (Owner::XenMulticall, false) => |d, _, _, _, host| make(d, host, C::Multicall, AtUnmap),
        (_, true) => |d, _, _, _, host| make(d, host, C::Single, AtFlush),
        (_, false) => |d, _, _, _, host| make(d, host, C::Single, AtUnmap),
    }
}

/// Creates the table of a whole-guest map, and returns its root.
///
/// # Errors
/// Memory is short.
pub(crate) fn whole_guest(
    domain: DomainId,
    host: Option<&HostOf<XenTable>>,
) -> Result<PhysAddr, LabError> {
    let host = host.ok_or(LabError::Internal("a guest without a hypervisor"))?;
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
    fn add_map(&self, host: &mut XenHost, request: &MapRequest) {
        if self.calls == Calls::Grants {
            host.map_grants(self.bdf, request);
            return;
        }
        let first = Pfn::containing(request.iova).get();
        for page in 0..request.pages {
            let call = IommuOp::MapEntry {
                bdf: self.bdf,
                page: Pfn::new(first + page),
                gpfn: (request.pa.get() >> 12) + page,
                permissions: request.permissions,
            };
            host.add(call, KickCause::Map);
            if host.refused.is_some() {
                break;
            }
        }
    }

    /// Removes the entries that a refused map has stored.
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
        self.host.with(|host| {
            host.stored.clear();
            self.add_map(host, &request);
            host.cross(KickCause::Map);
            match host.refused.take() {
                None => Ok(()),
                Some(error) => {
                    self.undo_map(host);
                    Err(refusal(error, &request))
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
        self.host.with(|host| {
            host.stored.clear();
            self.add_map(host, &request);
        });
        Ok(())
    }

    /// Returns the result of the calls of [`map_nosync`](Self::map_nosync).
    #[inline]
    fn iotlb_sync_map<P: Platform>(&self, _: &mut P, _: PfnRange) -> Result<(), InvalidationError> {
        self.host.with(|host| {
            host.cross(KickCause::Map);
            match host.refused.take() {
                None => Ok(()),
                Some(_) => Err(InvalidationError::Failed),
            }
        })
    }

    /// Clears the entries, or leaves that to the flush, which is due before the range is free.
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

    fn is_empty<P: Platform>(&self, _: &P) -> bool {
        self.host.with(|host| {
            host.flush_waiting();
            host.xen.is_empty(self.bdf)
        })
    }

    /// Nothing waits without a crossing that is due: maps cross in
    /// [`iotlb_sync_map`](Self::iotlb_sync_map), unmaps at the flush or with the next map.
    #[inline]
    fn sync<P: Platform>(&self, (): &mut (), _: &mut P) {}
}

/// Converts the error of a refused map.
#[cold]
fn refusal(error: XenError, request: &MapRequest) -> MapError {
    match error {
        XenError::NoMemory => MapError::OutOfFrames,
        XenError::Occupied => MapError::AlreadyMapped { iova: request.iova },
        XenError::BeyondSpace => MapError::BeyondWidth { iova: request.iova },
        XenError::NoFrame => MapError::PhysicalBeyondWidth { at: request.pa },
        _ => MapError::Corrupt { iova: request.iova },
    }
}
