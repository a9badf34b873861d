//! The backend over the software IOMMU, a domain for each device, and over the model of the
//! hardware, a table for each assigned one; and the guest's memory as its client shares it.

mod records;
mod tables;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use ringfence_pviommu::backend::{AnyTables, Backend, BackendLimits, DeviceSlot};
use ringfence_pviommu::wire::{Config, Devid, Event, PAGE_BYTES, Request, Status};
use ringfence_softiommu::{IommuError, Reader};
use ringfence_types::{Access, Iova, IovaRange, RequesterId};
use vm_memory::GuestMemoryMmap;

use self::tables::Domains;
use crate::assigned::{AssignedTables, Hardware};
use crate::counters::DeviceCounters;
use crate::host::{Host, HostPagePool, Memory};
use crate::sandbox::Grants;

/// The page at 0 is never mapped: drivers take its address for none. What the software IOMMU's
/// tables can map ends the window.
const WINDOW: (u64, u64) = (PAGE_BYTES, (1 << 48) - 1);
/// Most pages of one request: 64 KiB of a map.
const PAGES_MAX: u32 = 4096;
/// Unmapped pages that are remembered, so that an access to one is counted as stale.
const REMEMBERED: usize = 4096;

/// Why there is no such unit.
#[derive(Debug)]
pub enum UnitError {
    /// The host has no memory for the hardware's tables.
    Host(io::Error),
    /// A device stands there twice, or there are too many.
    Config,
    /// The software IOMMU does.
    Iommu(IommuError),
}

impl std::fmt::Display for UnitError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Config => {
                f.write_str("a device twice, or more devices than the para-virtual IOMMU can list")
            }
            Self::Iommu(error) => error.fmt(f),
            Self::Host(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for UnitError {}

impl From<IommuError> for UnitError {
    fn from(error: IommuError) -> Self {
        Self::Iommu(error)
    }
}

impl From<io::Error> for UnitError {
    fn from(error: io::Error) -> Self {
        Self::Host(error)
    }
}

/// The IOMMU behind its lock.
pub(crate) struct Unit {
    backend: Backend<Memory, AnyTables<AssignedTables, Domains>>,
    devices: Vec<RequesterId>,
    /// Those of them that are not assigned: what counts the slots of their domains.
    simulated: Vec<RequesterId>,
    running: bool,
    /// What was unmapped last.
    recently_unmapped: VecDeque<(Devid, Iova)>,
}

/// The requester id of `device`.
fn devid(device: RequesterId) -> Devid {
    Devid::new(device.get().into())
}

fn page(iova: Iova) -> Iova {
    iova.align_down(PAGE_BYTES)
}

impl Unit {
    /// One for `devices`, which reach nothing yet; the hardware translates those of them that are
    /// `assigned`. What the host does for them goes to `counters`.
    pub(super) fn new(
        devices: &[RequesterId],
        assigned: &[RequesterId],
        optimisations: HostPagePool,
        counters: &Arc<DeviceCounters>,
    ) -> Result<Self, UnitError> {
        let mut devices = devices.to_vec();
        devices.sort_unstable();
        let is_assigned = |device: &RequesterId| assigned.contains(device);
        let (assigned, simulated): (Vec<_>, Vec<_>) = devices.iter().partition(|d| is_assigned(d));
        let ids = devices.iter().map(|id| u32::from(id.get()));
        let (first, last) = WINDOW;
        let config = IovaRange::inclusive(Iova::new(first), Iova::new(last))
            .and_then(|window| Config::new(window, PAGES_MAX, ids).ok())
            .ok_or(UnitError::Config)?;
        // The second stage is the guest's: all of its devices are behind the same.
        let host = Arc::new(Host::new(Arc::clone(counters))?);
        let memory = Memory::on_demand(&host, optimisations)?;
        let domains = Domains::new(&simulated, Arc::clone(host.places()))?;
        let hardware = Arc::new(Hardware::new(host)?);
        let sides = devices.iter().map(is_assigned);
        let tables = AnyTables::new(AssignedTables::new(&hardware, &assigned)?, domains, sides);
        Ok(Self {
            backend: Backend::new(config, BackendLimits::default(), memory, tables),
            devices,
            simulated,
            running: false,
            recently_unmapped: VecDeque::new(),
        })
    }

    /// The hardware that translates the accesses of an assigned device.
    pub(super) fn hardware_of(&mut self, device: RequesterId) -> Option<Arc<Hardware>> {
        let tables = self.backend.tables().assigned();
        let hardware = tables.has(device).then(|| tables.hardware());
        hardware.map(Arc::clone)
    }

    fn domains(&mut self) -> &mut Domains {
        self.backend.tables().simulated()
    }

    pub(super) fn reader(
        &mut self,
        device: RequesterId,
    ) -> Result<Reader<GuestMemoryMmap>, IommuError> {
        self.domains().reader(device)
    }

    /// What this device reaches is a process of its own, which has these grants. False if there is
    /// no such device.
    pub(super) fn set_apart(&mut self, device: RequesterId, grants: Grants) -> bool {
        let slot = self.slot(device);
        slot.is_some_and(|slot| self.domains().set_apart(slot, grants))
    }

    /// Does something with the grants of such a device.
    pub(super) fn with_grants<R>(
        &mut self,
        device: RequesterId,
        with: impl FnOnce(&mut Grants) -> R,
    ) -> Option<R> {
        let slot = self.slot(device)?;
        self.domains().grants(slot).map(with)
    }

    /// The device's place among those with a domain.
    fn slot(&self, device: RequesterId) -> Option<DeviceSlot> {
        let index = self.simulated.iter().position(|one| *one == device)?;
        u32::try_from(index).ok().map(DeviceSlot::new)
    }

    /// What the driver maps from now on is locked into the host's memory, and counted. It has
    /// mapped nothing yet.
    pub(super) fn lock(&mut self, counters: Arc<DeviceCounters>) {
        self.backend.backing().lock(counters);
    }

    /// When it returns, no device holds anything of the memory before.
    pub(super) fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        self.backend.backing().set_memory(memory);
        self.backend.tables().assigned().set_memory(memory);
        self.domains().set_memory(memory);
    }

    /// What the driver is told.
    pub(crate) fn config(&self) -> &Config {
        self.backend.config()
    }

    /// The driver begins: what it maps is what devices reach.
    pub(crate) fn start(&mut self) {
        let Self {
            backend, simulated, ..
        } = self;
        backend.tables().simulated().attach(simulated);
        backend.tables().assigned().attach();
        self.running = true;
    }

    /// When it returns, devices reach nothing and no mapping is left.
    pub(crate) fn reset(&mut self) {
        let Self {
            backend, simulated, ..
        } = self;
        backend.tables().simulated().detach(simulated);
        backend.tables().assigned().detach();
        // Nobody is attached any more. What is left due is a process that hangs in the kernel:
        // nothing is done for its device until it is gone.
        let _ = self.backend.reset();
        self.domains().clear();
        self.recently_unmapped.clear();
        self.running = false;
    }

    /// Does what `request` asks, as a whole or not at all.
    pub(crate) fn handle(&mut self, request: &[u8]) -> Status {
        let status = self.backend.handle(request);
        if status == Status::Ok
            && let Ok(Request::Unmap(unmap)) = Request::decode(request, PAGES_MAX)
        {
            let pages = unmap.giovas.iter().map(|giova| (unmap.device, giova));
            self.recently_unmapped.extend(pages);
            let more = self.recently_unmapped.len().saturating_sub(REMEMBERED);
            self.recently_unmapped.drain(..more);
        }
        status
    }

    /// What need not delay an answer: to be called when some were given.
    pub(crate) fn maintain(&mut self) {
        self.backend.maintain();
    }

    /// Whether the page at `iova` is mapped for such an access.
    pub(super) fn reaches(&mut self, device: RequesterId, iova: Iova, access: Access) -> bool {
        let mapping = self.backend.mapping(devid(device), page(iova));
        mapping.is_some_and(|(_, direction)| direction.permissions().allows(access))
    }

    /// Keeps for the driver that an access was stopped; whether its page is among those that were
    /// unmapped last.
    pub(super) fn report(&mut self, device: RequesterId, access: Access, iova: Iova) -> bool {
        // Nobody is there to be told.
        if self.running {
            self.backend.report(devid(device), access, iova);
        }
        let mapped = self.backend.mapping(devid(device), page(iova)).is_some();
        !mapped
            && self
                .recently_unmapped
                .contains(&(devid(device), page(iova)))
    }

    /// The next event that the driver has not been told of.
    pub(crate) fn next_event(&mut self) -> Option<Event> {
        self.backend.next_event()
    }
}
