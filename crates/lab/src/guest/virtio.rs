//! The stock virtio-iommu, driver and device (virtio 1.3, section 5.13).
//!
//! The driver follows Linux (`drivers/iommu/virtio-iommu.c`, 6.12). A map adds a MAP and kicks. A
//! list adds a MAP for each segment and kicks once (`iotlb_sync_map`). An unmap adds an UNMAP. A
//! strict flush kicks it (`iotlb_sync`); a lazy flush leaves it to the kick of the next map or of
//! the flush queue (`flush_iotlb_all`). Linux kicks at that flush even if no request waits; this
//! driver does not.
//!
//! With a domain in lazy mode (issue 204 of the specification, `ringfence_virtio_iommu::lazy`), an
//! UNMAP invalidates nothing, and the flush adds an `IOTLB_FLUSH` and kicks it. No Linux driver has
//! this yet.

use std::rc::Rc;

use ringfence_dma::Platform;
use ringfence_dma::space::IoPageTable;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, MapError, MapRequest, UnmapError};
use ringfence_types::{
    Access, CachedLevels, DomainId, Invalidation, InvalidationError, Iova, PfnRange, PhysAddr,
    Ticket, Unmapped,
};
use ringfence_virtio_iommu::lazy::{
    IOTLB_FLUSH_BYTES, VIRTIO_IOMMU_ATTACH_F_LAZY, VIRTIO_IOMMU_T_IOTLB_FLUSH,
};
use ringfence_virtio_iommu::spec::{
    ATTACH_BYTES, DETACH_BYTES, MAP_BYTES, TAIL_BYTES, UNMAP_BYTES, VIRTIO_IOMMU_MAP_F_READ,
    VIRTIO_IOMMU_MAP_F_WRITE, VIRTIO_IOMMU_S_NOMEM, VIRTIO_IOMMU_S_OK, VIRTIO_IOMMU_T_ATTACH,
    VIRTIO_IOMMU_T_DETACH, VIRTIO_IOMMU_T_MAP, VIRTIO_IOMMU_T_UNMAP,
};
use ringfence_virtio_iommu::{
    Device, DomainId as VirtioDomain, EndpointError, EndpointId, Options, VirtioIommuLimits,
};

use super::tables::DomainTables;
use super::{HostBackend, HostUnit, KickCause, QueueStats, SharedHost, VirtIommuHardware};
use crate::components::{HostOf, MakeTable, ReplayTable};
use crate::error::LabError;
use crate::hardware::Vtd;
use crate::modes::Owner;

/// Requests that can wait. The queue of `crates/live` has 256 descriptors, and a request takes two.
const SLOTS: usize = 128;

/// Maximum number of mappings that a host keeps: all pages of a replay's memory.
const MAPPINGS: usize = 1 << 24;

/// A request and its reply buffer.
#[derive(Debug, Clone, Copy)]
struct RequestSlot {
    request: [u8; MAP_BYTES],
    bytes: usize,
    reply: [u8; TAIL_BYTES],
}

const EMPTY: RequestSlot = RequestSlot {
    request: [0; MAP_BYTES],
    bytes: 0,
    reply: [0; TAIL_BYTES],
};

/// A virtio-iommu device with its request queue and the driver's state.
#[derive(Debug)]
pub struct VirtioHost {
    device: Device<DomainTables>,
    slots: Box<[RequestSlot]>,
    /// Number of used slots, from the first one on.
    waiting: usize,
    /// Number of MAPs among them.
    maps_waiting: usize,
    /// Number of requests so far: the position of the last one.
    added: u64,
    /// Position of the last completed request.
    answered: u64,
    /// Status of the first refused MAP that the driver has not reported yet.
    refused: Option<u8>,
    /// True if the device refused an UNMAP or does not answer. It may then still translate any
    /// address.
    broken: bool,
    /// Domains in lazy mode.
    lazy: Vec<DomainId>,
    traffic: QueueStats,
}

impl HostBackend for VirtioHost {
    type Unit = Vtd;

    fn new(
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
        coherency: Coherency,
        unit: HostUnit,
    ) -> Result<Self, LabError> {
        let options = Options {
            limits: VirtioIommuLimits {
                mappings: MAPPINGS,
                domains: 1 << 16,
                endpoints: 1 << 16,
                ..VirtioIommuLimits::default()
            },
            lazy_domains: true,
            ..Options::default()
        };
        let tables = DomainTables::new(memory, frames, coherency, unit);
        let mut device =
            Device::new(options, tables).map_err(|_| LabError::Internal("virtio-iommu options"))?;
        device.accept_features(device.features());
        Ok(Self {
            device,
            slots: vec![EMPTY; SLOTS].into_boxed_slice(),
            waiting: 0,
            maps_waiting: 0,
            added: 0,
            answered: 0,
            refused: None,
            broken: false,
            lazy: Vec::new(),
            traffic: QueueStats::default(),
        })
    }

    #[inline]
    fn with_unit<R>(&mut self, act: impl FnOnce(&mut HostUnit) -> R) -> R {
        act(&mut self.device.sink_mut().unit)
    }

    /// Kicks. Of a domain in lazy mode, the host has nothing invalidated yet, so this first adds a
    /// flush.
    #[inline]
    fn commit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        if !self.lazy.is_empty() {
            self.add_flushes(request);
        }
        self.kick(KickCause::Unmap);
        self.is_completed(Ticket::new(self.added))?;
        Ok(Ticket::new(self.added))
    }

    #[inline]
    fn is_completed(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        if self.broken {
            return Err(InvalidationError::Failed);
        }
        Ok(self.answered >= ticket.get())
    }

    fn traffic(&self) -> QueueStats {
        QueueStats {
            invalidations: self.device.sink().unit.invalidations(),
            ..self.traffic
        }
    }
}

impl VirtioHost {
    /// Attaches the endpoint of a domain and returns the root of the domain's table. An endpoint
    /// whose driver is bound again first leaves its old domain of the same number, which ends with
    /// all its mappings. These requests do not count as traffic.
    fn attach(&mut self, id: DomainId, mode: DomainMode) -> Result<PhysAddr, LabError> {
        let domain = VirtioDomain::new(id.get().into());
        let endpoint = EndpointId::new(domain.get());
        match self.device.add_endpoint(endpoint, &[]) {
            Ok(()) => {}
            Err(EndpointError::Exists(_)) => self.detach(domain, endpoint)?,
            Err(_) => return Err(LabError::TooManyDevices),
        }
        let mut request = [0; ATTACH_BYTES];
        request[0] = VIRTIO_IOMMU_T_ATTACH;
        request[4..8].copy_from_slice(&domain.get().to_le_bytes());
        request[8..12].copy_from_slice(&endpoint.get().to_le_bytes());
        if mode == DomainMode::Lazy {
            request[12..16].copy_from_slice(&VIRTIO_IOMMU_ATTACH_F_LAZY.to_le_bytes());
            if !self.lazy.contains(&id) {
                self.lazy.push(id);
            }
        }
        let mut reply = [u8::MAX; TAIL_BYTES];
        let answered = self.device.handle(&request, &mut reply);
        if answered.is_err() || reply[0] != VIRTIO_IOMMU_S_OK {
            return Err(LabError::Internal("the host attaches no endpoint"));
        }
        let root = self.device.sink().root(domain);
        root.ok_or(LabError::Internal("a domain without a table"))
    }

    /// Completes the waiting requests, then detaches an endpoint.
    fn detach(&mut self, domain: VirtioDomain, endpoint: EndpointId) -> Result<(), LabError> {
        self.kick(KickCause::Unmap);
        let mut request = [0; DETACH_BYTES];
        request[0] = VIRTIO_IOMMU_T_DETACH;
        request[4..8].copy_from_slice(&domain.get().to_le_bytes());
        request[8..12].copy_from_slice(&endpoint.get().to_le_bytes());
        let mut reply = [u8::MAX; TAIL_BYTES];
        let answered = self.device.handle(&request, &mut reply);
        if self.broken || answered.is_err() || reply[0] != VIRTIO_IOMMU_S_OK {
            return Err(LabError::Internal("the host detaches no endpoint"));
        }
        Ok(())
    }

    /// Adds a flush of each domain in lazy mode that the layer's invalidation covers.
    fn add_flushes(&mut self, covered: Invalidation) {
        for index in 0..self.lazy.len() {
            let domain = self.lazy[index];
            match covered {
                Invalidation::Pages { domain: one, .. } | Invalidation::Domain(one)
                    if one != domain => {}
                _ => self.add_flush(domain),
            }
        }
    }

    fn add_flush(&mut self, domain: DomainId) {
        let mut request = [0; IOTLB_FLUSH_BYTES];
        request[0] = VIRTIO_IOMMU_T_IOTLB_FLUSH;
        request[4..8].copy_from_slice(&u32::from(domain.get()).to_le_bytes());
        self.add(&request, KickCause::Unmap);
    }

    #[inline]
    fn add<const BYTES: usize>(&mut self, request: &[u8; BYTES], cause: KickCause) {
        if self.waiting == self.slots.len() {
            self.kick(cause);
        }
        if let Some(slot) = self.slots.get_mut(self.waiting) {
            slot.request[..BYTES].copy_from_slice(request);
            slot.bytes = BYTES;
            self.waiting += 1;
            self.added += 1;
            self.traffic.requests += 1;
            self.maps_waiting += usize::from(cause == KickCause::Map);
        }
    }

    #[inline]
    fn add_map(&mut self, domain: VirtioDomain, map: &MapRequest) {
        let mut request = [0; MAP_BYTES];
        let start = map.iova.get();
        let last = start.wrapping_add((map.pages << 12).wrapping_sub(1));
        let mut flags = 0;
        if map.permissions.allows(Access::Read) {
            flags |= VIRTIO_IOMMU_MAP_F_READ;
        }
        if map.permissions.allows(Access::Write) {
            flags |= VIRTIO_IOMMU_MAP_F_WRITE;
        }
        request[0] = VIRTIO_IOMMU_T_MAP;
        request[4..8].copy_from_slice(&domain.get().to_le_bytes());
        request[8..16].copy_from_slice(&start.to_le_bytes());
        request[16..24].copy_from_slice(&last.to_le_bytes());
        request[24..32].copy_from_slice(&map.pa.get().to_le_bytes());
        request[32..36].copy_from_slice(&flags.to_le_bytes());
        self.add(&request, KickCause::Map);
    }

    #[inline]
    fn add_unmap(&mut self, domain: VirtioDomain, range: PfnRange) {
        let mut request = [0; UNMAP_BYTES];
        let start = range.lo().iova().get();
        let last = start.wrapping_add((range.pages() << 12).wrapping_sub(1));
        request[0] = VIRTIO_IOMMU_T_UNMAP;
        request[4..8].copy_from_slice(&domain.get().to_le_bytes());
        request[8..16].copy_from_slice(&start.to_le_bytes());
        request[16..24].copy_from_slice(&last.to_le_bytes());
        self.add(&request, KickCause::Unmap);
    }

    /// Notifies the host, which completes all waiting requests; then checks the replies.
    #[inline]
    fn kick(&mut self, cause: KickCause) {
        if self.waiting == 0 {
            return;
        }
        self.traffic.kick(cause);
        let slots = self.slots.iter_mut().take(self.waiting);
        let done = self.device.batch().and_then(|mut batch| {
            for slot in slots {
                slot.reply = [u8::MAX; TAIL_BYTES];
                let request = slot.request.get(..slot.bytes).unwrap_or_default();
                batch.handle(request, &mut slot.reply);
            }
            batch.commit()
        });
        if done.is_err() {
            self.broken = true;
            self.refused.get_or_insert(u8::MAX);
        }
        for slot in self.slots.iter().take(self.waiting) {
            let [status, ..] = slot.reply;
            if status != VIRTIO_IOMMU_S_OK {
                match slot.request {
                    [VIRTIO_IOMMU_T_MAP, ..] => self.refused = self.refused.or(Some(status)),
                    _ => self.broken = true,
                }
            }
        }
        self.answered = self.added;
        self.waiting = 0;
        self.maps_waiting = 0;
    }
}

/// The mode in which a driver attaches a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DomainMode {
    /// The host invalidates at each UNMAP.
    Strict,
    /// The host invalidates at the driver's flushes.
    Lazy,
}

/// The guest's table of a domain: it sends requests to the host that owns the table.
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
        self.host.with(|host| {
            host.add_map(self.name, &request);
            host.kick(KickCause::Map);
            match host.refused.take() {
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
    fn iotlb_sync_map<P: Platform>(&self, _: &mut P, _: PfnRange) -> Result<(), InvalidationError> {
        match self.host.with(|host| host.refused.take()) {
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
