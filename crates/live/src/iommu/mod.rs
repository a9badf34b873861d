//! The guest's IOMMU, shared by the thread that serves it and the threads of the devices behind it.
//!
//! There is one guest, so there is one memory: what the IOMMU's own client shares. What an
//! endpoint's client shares besides is known to its session and not used.

mod assigned;
mod endpoint_memory;
mod guest_iommu;
mod record;
mod sandboxed_endpoints;
mod unmap_history;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_softiommu::{IommuError, IommuSink, SoftIommuLimits};
use ringfence_types::{Iova, IovaRange, RequesterId};
use ringfence_virtio_iommu::{
    Device, EndpointError, EndpointId, Options, ReservedRegion, ReservedRegionKind, SinkError,
    SnapshotError, TranslationFault,
};
use rustix::event::{EventfdFlags, eventfd};
use vm_memory::GuestMemoryMmap;

pub use endpoint_memory::EndpointMemory;
pub(crate) use endpoint_memory::reason;
pub use guest_iommu::GuestIommu;
pub use record::{PENDING_BYTES, Recorder};

use self::unmap_history::GuestIommuSink;
use crate::assigned::{AssignedDma, AssignedTable, Hardware};
use crate::counters::DeviceCounters;
use crate::dma::{Direct, Dma};
use crate::host::Host;
use crate::limits::GuestLimits;
use crate::sandbox::Grants;

/// First and last address at which writes are interrupts on a PC (Intel SDM volume 3, section
/// 12.11.1).
const DOORBELLS: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);
/// What the software IOMMU's tables can map.
const LAST_IOVA: u64 = (1 << 48) - 1;

type Unit = Device<GuestIommuSink<GuestMemoryMmap>>;

/// The IOMMU. Clones are the same one.
#[derive(Clone)]
pub struct VirtioIommu {
    shared: Arc<Shared>,
}

struct Shared {
    /// Whoever holds it may wait for readers, and so is none.
    unit: Mutex<Unit>,
    /// Readable while there may be faults that the driver has not been told of.
    faults: OwnedFd,
    counters: Arc<DeviceCounters>,
}

/// Why a device cannot stand behind the IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddError {
    /// The virtio-iommu says no.
    Endpoint(EndpointError),
    /// The software IOMMU does.
    Unit(IommuError),
    /// A process cannot stand for this device.
    Sandboxed(RequesterId),
}

impl std::fmt::Display for AddError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Endpoint(error) => error.fmt(f),
            Self::Unit(error) => error.fmt(f),
            Self::Sandboxed(device) => write!(f, "no process can stand for device {device}"),
        }
    }
}

impl std::error::Error for AddError {}

impl std::fmt::Debug for VirtioIommu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("VirtioIommu")
    }
}

impl VirtioIommu {
    /// An IOMMU whose endpoints reach nothing until they are attached, within the default
    /// [`GuestLimits`].
    ///
    /// # Errors
    /// If the host has no descriptors left.
    pub fn new(counters: Arc<DeviceCounters>) -> io::Result<Self> {
        Self::with_limits(&GuestLimits::default(), counters)
    }

    /// The same, within these.
    ///
    /// # Errors
    /// If the host has no descriptors left.
    pub fn with_limits(caps: &GuestLimits, counters: Arc<DeviceCounters>) -> io::Result<Self> {
        let mut options = Options::default();
        options.limits.mappings = caps.mappings;
        options.limits.domains = caps.domains;
        let limits = SoftIommuLimits {
            domains: caps.domains,
            tables: caps.tables,
            ..SoftIommuLimits::default()
        };
        if let Some(input) = IovaRange::inclusive(Iova::ZERO, Iova::new(LAST_IOVA)) {
            options.input = input;
        }
        let sink = IommuSink::new(limits, GuestMemoryMmap::default());
        let unit = Device::new(options, GuestIommuSink::new(sink)).map_err(io::Error::other)?;
        let faults = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            shared: Arc::new(Shared {
                unit: Mutex::new(unit),
                faults,
                counters,
            }),
        })
    }

    /// Adds an endpoint under the number by which VIOT names it; what its accesses go through.
    ///
    /// # Errors
    /// If it is there already, or one too many.
    pub fn add_endpoint(&self, device: RequesterId) -> Result<EndpointMemory, AddError> {
        let (first, last) = DOORBELLS;
        let doorbells = IovaRange::inclusive(Iova::new(first), Iova::new(last));
        let reserved = doorbells.map(|range| ReservedRegion {
            range,
            kind: ReservedRegionKind::Msi,
        });
        let endpoint = EndpointId::new(device.get().into());
        let mut unit = self.unit();
        let sink = &mut unit.sink_mut().inner;
        sink.add_endpoint(endpoint, device)
            .map_err(AddError::Unit)?;
        let reader = sink.reader(device).map_err(AddError::Unit)?;
        unit.add_endpoint(endpoint, reserved.as_slice())
            .map_err(AddError::Endpoint)?;
        Ok(EndpointMemory::new(
            GuestIommu::Virtio(self.clone()),
            device,
            reader,
        ))
    }

    /// The device of an endpoint that is yet to be added is the process that has these grants.
    pub fn set_sandboxed(&self, device: RequesterId, grants: Grants) {
        let endpoint = EndpointId::new(device.get().into());
        self.unit().sink_mut().sandboxed.add(endpoint, grants);
    }

    /// Adds an endpoint whose accesses the model of the hardware translates, by a table of its own
    /// into which every mapping of its domain goes.
    ///
    /// # Errors
    /// If it is there already, or one too many, or the host has no memory for its tables.
    pub fn assign(
        &self,
        device: RequesterId,
        counters: Arc<DeviceCounters>,
    ) -> io::Result<AssignedDma> {
        // What it is told of it needs no reader there.
        drop(self.add_endpoint(device).map_err(io::Error::other)?);
        let host = Host::new(Arc::clone(&self.shared.counters))?;
        let hardware = Arc::new(Hardware::new(Arc::new(host))?);
        let mapped = AssignedTable::new(&hardware, device)?;
        let endpoint = EndpointId::new(device.get().into());
        self.unit().sink_mut().assigned.add(endpoint, mapped);
        let behind = GuestIommu::Virtio(self.clone());
        Ok(AssignedDma::with_iommu(behind, &hardware, device, counters))
    }

    /// Does something with the grants of such a device.
    pub fn with_grants<R>(
        &self,
        device: RequesterId,
        with: impl FnOnce(&mut Grants) -> R,
    ) -> Option<R> {
        let endpoint = EndpointId::new(device.get().into());
        self.unit().sink_mut().sandboxed.get(endpoint).map(with)
    }

    /// Another way to memory of an endpoint that is there already.
    ///
    /// # Errors
    /// If it is not, or has too many.
    pub fn add_reader(&self, device: RequesterId) -> Result<EndpointMemory, AddError> {
        let reader = self.unit().sink_mut().inner.reader(device);
        let reader = reader.map_err(AddError::Unit)?;
        Ok(EndpointMemory::new(
            GuestIommu::Virtio(self.clone()),
            device,
            reader,
        ))
    }

    /// Takes over what another process's IOMMU held. All endpoints have been added, and the guest's
    /// memory is here.
    ///
    /// # Errors
    /// It is not to be used.
    pub(crate) fn restore(&self, snapshot: &[u8]) -> Result<(), SnapshotError> {
        let mut unit = self.unit();
        unit.restore(snapshot)?;
        // Where it was, all of it was reached.
        if unit.sink().is_incomplete() {
            return Err(SnapshotError::Sink(SinkError::OutOfMemory));
        }
        Ok(())
    }

    /// Whether these are the features that the driver has accepted, those of the transport aside.
    pub(crate) fn has_accepted(&self, features: u64) -> bool {
        let unit = self.unit();
        unit.accepted() == features & unit.features()
    }

    /// What the IOMMU itself reaches memory through: directly. The memory that its client shares is
    /// the guest's.
    pub fn memory(&self) -> GuestDma {
        GuestDma {
            iommu: self.clone(),
            direct: Direct::default(),
        }
    }

    /// The device. A thread that panicked while it held it has left it whole: it changes nothing
    /// before it has checked everything.
    pub(crate) fn unit(&self) -> MutexGuard<'_, Unit> {
        let unit = self.shared.unit.lock();
        unit.unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the driver of an access that was stopped, as soon as it gives a buffer for that.
    pub(crate) fn report(&self, denied: TranslationFault) {
        let mut unit = self.unit();
        if unit.sink().is_stale(&denied) {
            self.shared.counters.stale.add(1);
        }
        unit.report(denied);
        drop(unit);
        self.shared.counters.faults.add(1);
        self.poll_faults();
    }

    /// There may be faults that the driver has not been told of.
    pub(crate) fn poll_faults(&self) {
        let _ = rustix::io::write(&self.shared.faults, &1u64.to_ne_bytes());
    }

    /// Readable after [`report`](Self::report).
    pub(crate) fn reported(&self) -> BorrowedFd<'_> {
        self.shared.faults.as_fd()
    }

    /// The reports up to now are being looked after.
    pub(crate) fn clear_reported(&self) {
        let _ = rustix::io::read(&self.shared.faults, &mut [0; 8]);
    }
}

/// The guest's memory as the IOMMU's client shares it.
#[derive(Debug)]
pub struct GuestDma {
    iommu: VirtioIommu,
    direct: Direct,
}

impl Dma for GuestDma {
    type View<'a> = GuestMemoryMmap;

    fn with<R>(&mut self, access: impl FnOnce(&GuestMemoryMmap) -> R) -> R {
        self.direct.with(access)
    }

    /// When it returns, no endpoint holds anything of the memory before.
    fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        self.direct.set_memory(memory);
        let mut unit = self.iommu.unit();
        let sink = unit.sink_mut();
        // This thread is no reader, so it is not refused.
        let _ = sink.inner.set_memory(memory.clone());
        // A process that hangs in the kernel keeps the memory's pages, which are nobody else's by
        // that.
        let _ = sink.sandboxed.set_memory(memory);
        sink.assigned.set_memory(memory);
    }
}
