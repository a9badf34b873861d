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

mod table;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::rc::Rc;

use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, MapRequest};
use ringfence_types::{
    Access, DomainId, Invalidation, InvalidationError, PfnRange, PhysAddr, Ticket,
};
use ringfence_virtio_iommu::lazy::{
    IOTLB_FLUSH_BYTES, VIRTIO_IOMMU_ATTACH_F_LAZY, VIRTIO_IOMMU_T_IOTLB_FLUSH,
};
use ringfence_virtio_iommu::spec::{
    ATTACH_BYTES, DETACH_BYTES, MAP_BYTES, TAIL_BYTES, UNMAP_BYTES, VIRTIO_IOMMU_MAP_F_READ,
    VIRTIO_IOMMU_MAP_F_WRITE, VIRTIO_IOMMU_S_OK, VIRTIO_IOMMU_T_ATTACH, VIRTIO_IOMMU_T_DETACH,
    VIRTIO_IOMMU_T_MAP, VIRTIO_IOMMU_T_UNMAP,
};
use ringfence_virtio_iommu::{
    Device, DomainId as VirtioDomain, EndpointError, EndpointId, Options, VirtioIommuLimits,
};

pub use table::VirtioTable;
pub(crate) use table::virtio_table;

use super::tables::DomainTables;
use super::{HostBackend, HostUnit, KickCause, QueueStats};
use crate::error::LabError;
use crate::hardware::Vtd;

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

/// A domain and an address in it.
type DomainAddress = (u32, u64);

impl RequestSlot {
    /// Returns the first and last address of a MAP or UNMAP.
    fn range(&self) -> Option<RangeInclusive<DomainAddress>> {
        let (_, fields) = self.request.split_at_checked(4)?;
        let (domain, fields) = fields.split_first_chunk()?;
        let (start, fields) = fields.split_first_chunk()?;
        let domain = u32::from_le_bytes(*domain);
        let [start, end] = [start, fields.first_chunk()?].map(|at| u64::from_le_bytes(*at));
        (start <= end).then_some((domain, start)..=(domain, end))
    }
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
    /// Status of each refused MAP that the driver has not reported yet, by domain and first
    /// address.
    refused: BTreeMap<DomainAddress, u8>,
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
            refused: BTreeMap::new(),
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

    /// Completes the waiting requests, then detaches an endpoint. The domain's mappings end, and
    /// with them its refusals.
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
        self.refused.retain(|(of, _), _| *of != domain.get());
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

    /// Returns the status of the first refused MAP of a range, and forgets those of the range.
    #[inline]
    fn take_refusal(&mut self, domain: VirtioDomain, range: PfnRange) -> Option<u8> {
        if self.refused.is_empty() {
            return None;
        }
        let ends = [range.lo(), range.hi()].map(|page| (domain.get(), page.iova().get()));
        let [first, last] = ends;
        let status = *self.refused.range(first..=last).next()?.1;
        self.refused.retain(|at, _| !(first..=last).contains(at));
        Some(status)
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
        self.broken |= done.is_err();
        for slot in self.slots.iter().take(self.waiting) {
            let status = match done {
                Ok(_) => slot.reply[0],
                Err(_) => u8::MAX,
            };
            match (slot.request[0], status) {
                (VIRTIO_IOMMU_T_UNMAP, VIRTIO_IOMMU_S_OK) if !self.refused.is_empty() => {
                    // The layer undoes a list, and will not ask for its result.
                    if let Some(range) = slot.range() {
                        self.refused.retain(|at, _| !range.contains(at));
                    }
                }
                (_, VIRTIO_IOMMU_S_OK) => {}
                (VIRTIO_IOMMU_T_MAP, _) => {
                    if let Some(range) = slot.range() {
                        self.refused.insert(*range.start(), status);
                    }
                }
                _ => self.broken = true,
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

#[cfg(test)]
mod tests;
