//! The backend over the software IOMMU: a domain for each device, and the guest's memory as its client shares it.

mod records;

use std::collections::VecDeque;

use ringfence_pviommu::backend::{
    Backend, BackendError, IoError, IoTables, Limits, Resident, Slot,
};
use ringfence_pviommu::wire::{Config, Devid, Event, Gpa, PAGE_BYTES, Status};
use ringfence_softiommu::{IommuError, Limits as UnitLimits, MapReason, Reader, SoftIommu};
use ringfence_types::{
    Access, AddressRange, DeviceId, Direction, DomainId, Iova, IovaRange, PhysAddr,
};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// The page at 0 is never mapped: drivers take its address for none. What the software IOMMU's tables can map ends the window.
const WINDOW: (u64, u64) = (PAGE_BYTES, (1 << 48) - 1);
/// Most pages of one request: 64 KiB of a map.
const PAGES_MAX: u32 = 4096;
/// Unmapped pages that are remembered, so that an access to one is counted as stale.
const REMEMBERED: usize = 4096;

/// Why there is no such unit.
#[derive(Debug)]
pub enum UnitError {
    /// The configuration makes no sense.
    Config,
    /// The backend says no.
    Backend(BackendError),
    /// The software IOMMU does.
    Iommu(IommuError),
}

impl std::fmt::Display for UnitError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Config => f.write_str("no such configuration"),
            Self::Backend(error) => error.fmt(f),
            Self::Iommu(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for UnitError {}

impl From<IommuError> for UnitError {
    fn from(error: IommuError) -> Self {
        Self::Iommu(error)
    }
}

/// The IOMMU behind its lock.
pub(crate) struct Unit {
    backend: Backend<Resident, Domains>,
    devices: Vec<DeviceId>,
    running: bool,
}

/// The requester id of `device`.
fn devid(device: DeviceId) -> Devid {
    Devid::new(device.get().into())
}

fn page(iova: Iova) -> Iova {
    iova.align_down(PAGE_BYTES)
}

impl Unit {
    /// One for `devices`, which reach nothing yet.
    pub(super) fn new(devices: &[DeviceId]) -> Result<Self, UnitError> {
        let mut devices = devices.to_vec();
        devices.sort_unstable();
        let id = |device: Option<&DeviceId>| device.map_or(0, |id| u32::from(id.get()));
        let (first, last) = WINDOW;
        let config = IovaRange::inclusive(Iova::new(first), Iova::new(last))
            .and_then(|window| {
                Config::new(window, PAGES_MAX, id(devices.first()), id(devices.last())).ok()
            })
            .ok_or(UnitError::Config)?;
        let mut iommu = SoftIommu::new(UnitLimits::default(), GuestMemoryMmap::default());
        for (device, number) in devices.iter().zip(0..) {
            iommu.add_endpoint(*device)?;
            iommu.create_domain(DomainId::new(number))?;
        }
        let tables = Domains {
            iommu,
            leaving: Vec::new(),
            gone: VecDeque::new(),
        };
        let ids = devices.iter().copied().map(devid);
        let memory = Resident::new(Vec::new());
        let backend = Backend::new(config, Limits::default(), ids, memory, tables);
        Ok(Self {
            backend: backend.map_err(UnitError::Backend)?,
            devices,
            running: false,
        })
    }

    pub(super) fn reader(
        &mut self,
        device: DeviceId,
    ) -> Result<Reader<GuestMemoryMmap>, IommuError> {
        self.backend.tables().iommu.reader(device)
    }

    /// When it returns, no device holds anything of the memory before.
    pub(super) fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        let ranges = memory.iter().filter_map(|region| {
            let start = Gpa::new(region.start_addr().raw_value());
            AddressRange::new(start, region.len())
        });
        *self.backend.backing() = Resident::new(ranges.collect());
        // Whoever calls is no reader, so it is not refused.
        let _ = self.backend.tables().iommu.set_memory(memory.clone());
    }

    /// What the driver is told.
    pub(crate) fn config(&self) -> &Config {
        self.backend.config()
    }

    /// The driver begins: what it maps is what devices reach.
    pub(crate) fn start(&mut self) {
        for (device, number) in self.devices.iter().zip(0..) {
            let iommu = &mut self.backend.tables().iommu;
            // Both are there, and whoever calls is no reader.
            let _ = iommu.attach(*device, DomainId::new(number));
        }
        self.running = true;
    }

    /// When it returns, devices reach nothing and no mapping is left.
    pub(crate) fn reset(&mut self) {
        for device in &self.devices {
            let _ = self.backend.tables().iommu.detach(*device);
        }
        // Nobody is attached any more, so nothing can be left due.
        let _ = self.backend.reset();
        self.backend.tables().gone.clear();
        self.running = false;
    }

    /// Does what `request` asks, as a whole or not at all.
    pub(crate) fn handle(&mut self, request: &[u8]) -> Status {
        let status = self.backend.handle(request);
        self.backend.maintain();
        status
    }

    /// Whether the page at `iova` is mapped for such an access.
    pub(super) fn reaches(&mut self, device: DeviceId, iova: Iova, access: Access) -> bool {
        let mapping = self.backend.mapping(devid(device), page(iova));
        mapping.is_some_and(|(_, direction)| direction.permissions().allows(access))
    }

    /// Keeps for the driver that an access was stopped; whether its page is among those that were unmapped last.
    pub(super) fn report(&mut self, device: DeviceId, access: Access, iova: Iova) -> bool {
        // Nobody is there to be told.
        if self.running {
            self.backend.report(devid(device), access, iova);
        }
        let mapped = self.backend.mapping(devid(device), page(iova)).is_some();
        let number = self.devices.iter().position(|one| *one == device);
        let mut gone = self.backend.tables().gone.iter();
        !mapped && gone.any(|(slot, at)| Some(slot.index()) == number && *at == page(iova))
    }

    /// The next event that the driver has not been told of.
    pub(crate) fn next_event(&mut self) -> Option<Event> {
        self.backend.next_event()
    }
}

/// Each device's domain. What is unmapped stays until it is settled, so that one wait does for all of a request.
struct Domains {
    iommu: SoftIommu<GuestMemoryMmap>,
    leaving: Vec<(Slot, Iova)>,
    gone: VecDeque<(Slot, Iova)>,
}

fn domain_of(device: Slot) -> DomainId {
    DomainId::new(u16::try_from(device.index()).unwrap_or(u16::MAX))
}

impl IoTables for Domains {
    fn map(
        &mut self,
        device: Slot,
        giova: Iova,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<(), IoError> {
        // Put back what has not left yet.
        let waiting = self.leaving.iter().position(|one| *one == (device, giova));
        if let Some(at) = waiting {
            self.leaving.swap_remove(at);
            return Ok(());
        }
        let range = IovaRange::new(giova, PAGE_BYTES).ok_or(IoError::Failed)?;
        let domain = self.iommu.domain(domain_of(device));
        let domain = domain.map_err(|_| IoError::Failed)?;
        let mapped = domain.map(range, frame, direction.permissions());
        mapped.map_err(|error| match error.reason {
            MapReason::OutOfTables => IoError::NoRoom,
            _ => IoError::Failed,
        })
    }

    fn unmap(&mut self, device: Slot, giova: Iova) -> Result<(), IoError> {
        self.leaving.push((device, giova));
        Ok(())
    }

    fn settle(&mut self, device: Slot) -> Result<(), IoError> {
        let of_device = |(slot, _): &&(Slot, Iova)| *slot == device;
        let pages = self.leaving.iter().filter(of_device);
        let ranges = pages.filter_map(|(_, giova)| IovaRange::new(*giova, PAGE_BYTES));
        let domain = self.iommu.domain(domain_of(device));
        let domain = domain.map_err(|_| IoError::Failed)?;
        domain.unmap_all(ranges).map_err(|_| IoError::Failed)?;
        let Self { leaving, gone, .. } = self;
        leaving.retain(|one| {
            let left = one.0 == device;
            if left {
                gone.push_back(*one);
            }
            !left
        });
        gone.drain(..gone.len().saturating_sub(REMEMBERED));
        Ok(())
    }
}
