//! A guest of Xen whose I/O spaces the hypervisor owns (CG05, CG06, CG11, CG12, CG14).
//!
//! The guest drives its own device, or is behind a driver domain that maps grants. Its table sends
//! hypercalls to [`Xen`]. Each crossing counts as a kick, which the profile prices
//! (`hypercall_cycles`).

mod grants;
mod table;

pub use table::XenTable;
pub(crate) use table::{whole_guest, xen_table};

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::rc::Rc;

use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{
    DomainId, Invalidation, InvalidationError, Pfn, PfnRange, PhysAddr, RequesterId, Ticket,
};

use super::{HostBackend, HostUnit, KickCause, QueueStats};
use crate::error::LabError;
use crate::hardware::Calgary;
use crate::replay_platform::MEMORY_BYTES;
use crate::xen::{
    Domid, FrameReferences, GrantHandle, GrantRef, IommuOp, MAX_MULTICALL, TceFlush, Xen, XenError,
};

/// The hypercalls by which a guest stores its entries.
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
    /// At the unmap; with multicalls, at the next crossing. The flush is a hypercall of its own,
    /// later.
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
    /// True if maps are among the waiting calls.
    maps_waiting: bool,
    /// Grants by space and page, in modes that map grants.
    grants: BTreeMap<(u8, u64), HeldGrant>,
    /// Grants whose unmap waits for the crossing.
    waiting_grants: Vec<(u8, u64)>,
    /// Spaces with cleared entries that are not flushed.
    unflushed: Buses,
    /// Pages that the current map has stored.
    stored: Vec<Pfn>,
    /// Pages, by space, whose map Xen refused. The driver has not reported them yet.
    refused: BTreeMap<(u8, u64), XenError>,
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
            maps_waiting: false,
            grants: BTreeMap::new(),
            waiting_grants: Vec::new(),
            unflushed: Buses::default(),
            stored: Vec::new(),
            refused: BTreeMap::new(),
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

/// Returns the pages of a range by space, as keys of a map.
fn pages_of(bdf: RequesterId, range: PfnRange) -> RangeInclusive<(u8, u64)> {
    (bdf.bus(), range.lo().get())..=(bdf.bus(), range.hi().get())
}

/// Returns the device of a domain's space: each domain has a bus (see [`Calgary`]).
fn device_of(domain: DomainId) -> RequesterId {
    RequesterId::new(domain.get().wrapping_sub(1) << 8)
}

impl XenHost {
    /// Creates the I/O space of a domain and returns the root of its table. A space that the device
    /// already has, for a driver that was bound before, is destroyed first. Xen destroys no space
    /// with entries of grants, so the driver domain first unmaps those that the driver has left.
    /// These calls do not count as traffic.
    fn create_space(&mut self, domain: DomainId, owner: Domid) -> Result<PhysAddr, LabError> {
        if domain.get() > 256 || domain.get() == 0 {
            return Err(LabError::TooFewBuses { limit: 256 });
        }
        let bdf = device_of(domain);
        if self.xen.root(bdf).is_some() {
            let counted = self.traffic;
            self.cross(KickCause::Unmap);
            self.unmap_grants_of(bdf.bus());
            self.traffic = counted;
            self.xen
                .hypercall(Domid::DOM0, &IommuOp::DestroyIoSpace { bdf })
                .map_err(|_| LabError::Internal("Xen destroys no I/O space"))?;
        }
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

    /// Returns the refusal of the lowest page of a range whose map Xen refused.
    #[inline]
    fn refusal(&self, bdf: RequesterId, range: PfnRange) -> Option<XenError> {
        if self.refused.is_empty() {
            return None;
        }
        let mut refusals = self.refused.range(pages_of(bdf, range));
        refusals.next().map(|(_, error)| *error)
    }

    /// As [`refusal`](Self::refusal), and forgets the refusals of all pages of the range.
    #[inline]
    fn take_refusal(&mut self, bdf: RequesterId, range: PfnRange) -> Option<XenError> {
        let lowest = self.refusal(bdf, range)?;
        let pages = pages_of(bdf, range);
        self.refused.retain(|at, _| !pages.contains(at));
        Some(lowest)
    }

    /// Adds a call. Enters the hypervisor if the guest makes single calls or the batch is full.
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

    /// Enters the hypervisor with all waiting calls, in batches of the mode's size.
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
            unflushed,
            traffic,
            ..
        } = self;
        for calls in waiting.chunks(batch) {
            traffic.kick(cause);
            let done = xen.multicall(GUEST, calls.iter(), |call, result| match (call, result) {
                (IommuOp::MapEntry { page, .. }, Ok(())) => stored.push(*page),
                (IommuOp::MapEntry { bdf, page, .. }, Err(error)) => {
                    refused.insert((bdf.bus(), page.get()), error);
                }
                (IommuOp::UnmapEntry { bdf, flush, .. }, Ok(())) => match flush {
                    TceFlush::Now => unflushed.remove(bdf.bus()),
                    TceFlush::Deferred => unflushed.insert(bdf.bus()),
                },
                // A refused list leaves pages without entries. The flush is still due.
                (IommuOp::UnmapEntry { bdf, page, .. }, Err(XenError::NotMapped)) => {
                    refused.remove(&(bdf.bus(), page.get()));
                    unflushed.insert(bdf.bus());
                }
                (IommuOp::FlushIoSpace { bdf }, Ok(())) => unflushed.remove(bdf.bus()),
                (_, Ok(())) => {}
                (_, Err(_)) => *broken = true,
            });
            *broken |= done.is_err();
        }
        waiting.clear();
        self.maps_waiting = false;
    }

    /// Clears the entries of waiting unmaps and flushes. The last unmap of each space requests its
    /// flush.
    #[inline]
    fn flush_waiting(&mut self) {
        if !self.waiting_grants.is_empty() {
            self.unmap_waiting_grants();
        }
        let mut flushed = Buses::default();
        for call in self.waiting.iter_mut().rev() {
            if let IommuOp::UnmapEntry { bdf, flush, .. } = call
                && !flushed.contains(bdf.bus())
            {
                flushed.insert(bdf.bus());
                *flush = TceFlush::Now;
            }
        }
        self.cross(KickCause::Unmap);
        if !self.unflushed.is_empty() {
            for bdf in self.xen.devices() {
                if self.unflushed.contains(bdf.bus()) {
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
}
