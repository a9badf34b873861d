//! The backend of the para-virtual IOMMU. It keeps a domain of the software IOMMU for each
//! simulated device and a table of the hardware model for each assigned one. It also holds the
//! guest's memory as the client shares it.

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

pub use self::records::PviommuState;
use self::tables::Domains;
use crate::assigned::{AssignedTables, Hardware};
use crate::counters::DeviceCounters;
use crate::grants::{Grants, StuckProcess};
use crate::host::{Host, HostPagePool, Memory};

/// IOVAs offered to the driver. Page 0 is excluded because drivers treat address 0 as invalid; the
/// window ends with the software IOMMU's address width.
const WINDOW: (u64, u64) = (PAGE_BYTES, (1 << 48) - 1);
/// Most pages of one request. A map request of this size has 64 KiB.
const PAGES_MAX: u32 = 4096;
/// Unmapped pages in the history that identifies stale accesses.
const REMEMBERED: usize = 4096;

/// Reason why the unit cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum UnitError {
    /// The host has no memory for the hardware model's tables.
    #[error(transparent)]
    Host(#[from] io::Error),
    /// The configuration has too many devices, or one twice.
    #[error("the para-virtual IOMMU has too many devices, or one twice")]
    Config,
    /// The software IOMMU refused a device.
    #[error(transparent)]
    Iommu(#[from] IommuError),
}

/// State of the IOMMU, protected by its lock.
pub(crate) struct Unit {
    backend: Backend<Memory, AnyTables<AssignedTables, Domains>>,
    devices: Vec<RequesterId>,
    /// Devices that are not assigned. The position of a device is its domain slot.
    simulated: Vec<RequesterId>,
    running: bool,
    /// Pages unmapped last, oldest first.
    recently_unmapped: VecDeque<(Devid, Iova)>,
}

/// Returns the requester ID of `device`.
fn devid(device: RequesterId) -> Devid {
    Devid::new(device.get().into())
}

fn page(iova: Iova) -> Iova {
    iova.align_down(PAGE_BYTES)
}

impl Unit {
    /// Creates a unit for `devices`, all blocked. The hardware model translates for those in
    /// `assigned`. `counters` count the host's work for them.
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
        // One second stage per guest: all of its devices share it.
        let host = Arc::new(Host::new(Arc::clone(counters))?);
        let memory = Memory::on_demand(&host, optimisations)?;
        let domains = Domains::new(&simulated, Arc::clone(host.rmap()))?;
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

    /// Returns the hardware model that translates for an assigned device. `None` for any other
    /// device.
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

    /// Declares that a sandboxed process with these grants implements the device. Returns false if
    /// there is no such device.
    pub(super) fn set_sandboxed(&mut self, device: RequesterId, grants: Grants) -> bool {
        let slot = self.slot(device);
        slot.is_some_and(|slot| self.domains().set_sandboxed(slot, grants))
    }

    /// Calls `with` on the grants of a sandboxed device.
    pub(super) fn with_grants<R>(
        &mut self,
        device: RequesterId,
        with: impl FnOnce(&mut Grants) -> R,
    ) -> Option<R> {
        let slot = self.slot(device)?;
        self.domains().grants(slot).map(with)
    }

    /// Returns the device's domain slot. `None` if it is assigned or unknown.
    fn slot(&self, device: RequesterId) -> Option<DeviceSlot> {
        let index = self.simulated.iter().position(|one| *one == device)?;
        u32::try_from(index).ok().map(DeviceSlot::new)
    }

    /// Locks and counts all pages that the driver maps. The driver must not have mapped any page
    /// yet.
    pub(super) fn lock(&mut self, counters: Arc<DeviceCounters>) {
        self.backend.backing().lock(counters);
    }

    /// Locks the pinned pages that exist in `memory`, which is to replace the guest's memory.
    ///
    /// # Errors
    /// The host cannot lock one of them.
    pub(super) fn lock_pinned(&mut self, memory: &GuestMemoryMmap) -> io::Result<()> {
        self.backend.backing().lock_pinned(memory)
    }

    /// Replaces the guest's memory. When it returns `Ok`, no device holds any of the old memory.
    ///
    /// # Errors
    /// As for [`Grants::set_memory`].
    pub(super) fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), StuckProcess> {
        self.backend.backing().set_memory(memory);
        self.backend.tables().assigned().set_memory(memory);
        self.domains().set_memory(memory)
    }

    /// Commits the grants of every sandboxed process.
    ///
    /// # Errors
    /// As for [`Grants::commit`].
    pub(super) fn commit_grants(&mut self) -> Result<(), StuckProcess> {
        self.domains().commit_grants()
    }

    /// Returns the configuration that the driver reads.
    pub(crate) fn config(&self) -> &Config {
        self.backend.config()
    }

    /// Starts the driver's session: devices can access the pages that it maps.
    pub(crate) fn start(&mut self) {
        let Self {
            backend, simulated, ..
        } = self;
        backend.tables().simulated().attach(simulated);
        backend.tables().assigned().attach();
        self.running = true;
    }

    /// Ends the driver's session. When it returns `Ok`, all devices are blocked and no mapping
    /// remains.
    ///
    /// # Errors
    /// [`StuckProcess`]: the same, except for the pages of a killed process that is stuck in the
    /// kernel (decision 0018). The caller must call it again until it succeeds.
    pub(crate) fn reset(&mut self) -> Result<(), StuckProcess> {
        let Self {
            backend, simulated, ..
        } = self;
        backend.tables().simulated().detach(simulated);
        backend.tables().assigned().detach();
        // All devices are detached. Only a process stuck in the kernel can leave a revocation
        // incomplete. Its frames stay pinned until the reset succeeds.
        let reset = self.backend.reset().map_err(|_| StuckProcess);
        let cleared = self.domains().clear();
        self.recently_unmapped.clear();
        self.running = false;
        reset.and(cleared)
    }

    /// Executes `request` completely or not at all.
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

    /// Does maintenance that must not delay a reply. The caller runs it after sending replies.
    pub(crate) fn maintain(&mut self) {
        self.backend.maintain();
    }

    /// Returns true if the page at `iova` is mapped for `access`.
    pub(super) fn reaches(&mut self, device: RequesterId, iova: Iova, access: Access) -> bool {
        let mapping = self.backend.mapping(devid(device), page(iova));
        mapping.is_some_and(|(_, direction)| direction.permissions().allows(access))
    }

    /// Queues an event about a stopped access for the driver. Returns true if its page was unmapped
    /// recently.
    pub(super) fn report(&mut self, device: RequesterId, access: Access, iova: Iova) -> bool {
        // Without a driver the event has no receiver.
        if self.running {
            self.backend.report(devid(device), access, iova);
        }
        let mapped = self.backend.mapping(devid(device), page(iova)).is_some();
        !mapped
            && self
                .recently_unmapped
                .contains(&(devid(device), page(iova)))
    }

    /// Returns the next event that was not delivered to the driver.
    pub(crate) fn next_event(&mut self) -> Option<Event> {
        self.backend.next_event()
    }
}
