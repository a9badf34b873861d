//! The guest's IOMMU, shared by the thread that serves it and the threads of the devices behind it.
//!
//! One guest has one memory, which the client of the IOMMU device shares. An endpoint's session
//! ignores the memory that the endpoint's own client shares.

mod assigned;
#[cfg(test)]
mod conformance;
mod endpoints;
mod guest_iommu;
mod recorded_mappings;
mod sandboxed_endpoints;
mod unmap_history;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_softiommu::{IommuError, IommuSink, Reader, SoftIommuLimits};
use ringfence_types::{Access, Fault, FaultReason, Iova, IovaRange, RequesterId};
use ringfence_virtio_iommu::{
    Device, EndpointError, EndpointId, Options, ReservedRegion, ReservedRegionKind, SinkError,
    SnapshotError, TranslationFault, TranslationFaultReason,
};
use rustix::event::{EventfdFlags, eventfd};
use vm_memory::GuestMemoryMmap;

pub use guest_iommu::{EndpointDma, GuestIommu};

pub use crate::dma::EndpointMemory;
pub use crate::record::{PENDING_BYTES, RecordState, Recorder};

use self::recorded_mappings::RecordedMappings;
use self::unmap_history::GuestIommuSink;
use crate::assigned::{AssignedDma, AssignedTable, Hardware};
use crate::counters::DeviceCounters;
use crate::dma::{Direct, Dma, FaultReporter, MemoryInUse};
use crate::grants::Grants;
use crate::host::Host;
use crate::limits::GuestLimits;
use crate::record::{DmaRecord, RecordFile};

/// First and last address of the MSI window on a PC (Intel SDM volume 3, section 12.11.1).
const DOORBELLS: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);
/// Last address that the software IOMMU's tables can map.
const LAST_IOVA: u64 = (1 << 48) - 1;

type Unit = Device<GuestIommuSink<GuestMemoryMmap>>;

/// The virtio-iommu. Clones share it.
#[derive(Clone)]
pub struct VirtioIommu {
    shared: Arc<Shared>,
}

struct Shared {
    /// A holder of this lock may wait for readers, so it must not be a reader.
    unit: Mutex<Unit>,
    /// Eventfd that is readable while faults may wait for the driver.
    faults: OwnedFd,
    counters: Arc<DeviceCounters>,
    /// Record of the endpoints' DMAs, if it is on.
    dmas: Arc<DmaRecord>,
}

/// Reason why a device cannot be placed behind the IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// The virtio-iommu refused the endpoint.
    #[error(transparent)]
    Endpoint(EndpointError),
    /// The software IOMMU refused the endpoint.
    #[error(transparent)]
    Unit(IommuError),
    /// This device cannot be sandboxed.
    #[error("device {0} cannot run in a sandbox process")]
    Sandboxed(RequesterId),
    /// The ring IOMMU does not list the device.
    #[error("device {0} is not behind the ring IOMMU")]
    Unlisted(RequesterId),
    /// The device is not emulated, or would need a second reader.
    #[error("device {0} cannot be behind a ring IOMMU: it has to be emulated")]
    Ring(RequesterId),
}

impl std::fmt::Debug for VirtioIommu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("VirtioIommu")
    }
}

impl VirtioIommu {
    /// Creates an IOMMU with the default [`GuestLimits`]. It blocks all accesses of an endpoint
    /// until the driver attaches it.
    ///
    /// # Errors
    /// The host has no descriptors left.
    pub fn new(counters: Arc<DeviceCounters>) -> io::Result<Self> {
        Self::with_limits(&GuestLimits::default(), counters)
    }

    /// Like [`new`](Self::new), with these limits.
    ///
    /// # Errors
    /// The host has no descriptors left.
    pub fn with_limits(limits: &GuestLimits, counters: Arc<DeviceCounters>) -> io::Result<Self> {
        let mut options = Options::default();
        options.limits.mappings = limits.mappings;
        options.limits.domains = limits.domains;
        let limits = SoftIommuLimits {
            domains: limits.domains,
            tables: limits.tables,
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
                dmas: Arc::default(),
            }),
        })
    }

    /// Adds an endpoint under its ID in the VIOT table, and returns its view of guest memory.
    ///
    /// # Errors
    /// The endpoint exists already, or there are too many.
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
        Ok(self.endpoint_memory(device, reader))
    }

    /// Declares that a sandboxed process with these grants implements the device. Call it before
    /// adding the endpoint.
    pub fn set_sandboxed(&self, device: RequesterId, grants: Grants) {
        let endpoint = EndpointId::new(device.get().into());
        self.unit().sink_mut().sandboxed.add(endpoint, grants);
    }

    /// Adds an endpoint whose accesses the hardware model translates. The endpoint gets its own
    /// table, which receives every mapping of its domain.
    ///
    /// # Errors
    /// The endpoint exists already, there are too many, or the host has no memory for its tables.
    pub fn assign(
        &self,
        device: RequesterId,
        counters: Arc<DeviceCounters>,
    ) -> io::Result<AssignedDma> {
        // The hardware model translates its accesses, so the endpoint needs no reader.
        drop(self.add_endpoint(device).map_err(io::Error::other)?);
        let host = Host::new(Arc::clone(&self.shared.counters))?;
        let hardware = Arc::new(Hardware::new(Arc::new(host))?);
        let mapped = AssignedTable::new(&hardware, device)?;
        let endpoint = EndpointId::new(device.get().into());
        self.unit().sink_mut().assigned.add(endpoint, mapped);
        let iommu = Arc::new(self.clone());
        Ok(AssignedDma::with_iommu(iommu, &hardware, device, counters))
    }

    /// Calls `with` on the grants of a sandboxed device. `None` if the device is not sandboxed.
    pub fn with_grants<R>(
        &self,
        device: RequesterId,
        with: impl FnOnce(&mut Grants) -> R,
    ) -> Option<R> {
        let endpoint = EndpointId::new(device.get().into());
        self.unit().sink_mut().sandboxed.get(endpoint).map(with)
    }

    /// Adds a further reader of guest memory to an existing endpoint.
    ///
    /// # Errors
    /// The endpoint does not exist, or has too many readers.
    pub fn add_reader(&self, device: RequesterId) -> Result<EndpointMemory, AddError> {
        let reader = self.unit().sink_mut().inner.reader(device);
        let reader = reader.map_err(AddError::Unit)?;
        Ok(self.endpoint_memory(device, reader))
    }

    fn endpoint_memory(
        &self,
        device: RequesterId,
        reader: Reader<GuestMemoryMmap>,
    ) -> EndpointMemory {
        let dmas = Arc::clone(&self.shared.dmas);
        EndpointMemory::new(Arc::new(self.clone()), device, reader).recorded_in(dmas)
    }

    /// Prepares [`record_dmas`](Self::record_dmas): the mappings of all endpoints are known from
    /// here on. Call it before the first request, or before [`restore`](Self::restore).
    pub(crate) fn follow_mappings(&self) {
        let recorded = RecordedMappings::new(Arc::clone(&self.shared.dmas));
        self.unit().sink_mut().recorded = Some(recorded);
    }

    /// Records all further maps, unmaps and DMAs in `file`.
    pub(crate) fn record_dmas(&self, file: RecordFile) {
        self.shared.dmas.start(file);
    }

    /// Creates a record of DMAs at `path`, of at most `most` bytes. Call it before the first
    /// request.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create_dma_record(&self, path: &Path, most: u64) -> io::Result<()> {
        let file = DmaRecord::create(path, most)?;
        self.follow_mappings();
        self.record_dmas(file);
        Ok(())
    }

    /// Returns the record of DMAs.
    pub(crate) fn dmas(&self) -> &DmaRecord {
        &self.shared.dmas
    }

    /// Restores the state of another process's IOMMU. All endpoints must be added and the guest's
    /// memory set.
    ///
    /// # Errors
    /// The snapshot is invalid, or a mapping has no room.
    pub(crate) fn restore(&self, snapshot: &[u8]) -> Result<(), SnapshotError> {
        let mut unit = self.unit();
        unit.restore(snapshot)?;
        // The other process had room for every mapping.
        if unit.sink().is_incomplete() {
            return Err(SnapshotError::Sink(SinkError::OutOfMemory));
        }
        Ok(())
    }

    /// Returns true if the driver has accepted exactly these features, not counting transport
    /// features.
    pub(crate) fn has_accepted(&self, features: u64) -> bool {
        let unit = self.unit();
        unit.accepted() == features & unit.features()
    }

    /// Returns the memory view of the IOMMU device itself, which has no translation. Its client
    /// shares the guest's memory.
    pub fn memory(&self) -> GuestDma {
        GuestDma {
            iommu: self.clone(),
            direct: Direct::default(),
        }
    }

    /// Accepts all offered features, in place of a driver.
    pub fn accept_all_features(&self) {
        let mut unit = self.unit();
        let features = unit.features();
        unit.accept_features(features);
    }

    /// Handles a request that comes from no virtqueue.
    ///
    /// # Errors
    /// The request is malformed or refused.
    pub fn handle(&self, request: &[u8]) -> io::Result<()> {
        let mut reply = [0; 4];
        let handled = self.unit().handle(request, &mut reply);
        handled
            .map_err(io::Error::other)?
            .result
            .map_err(io::Error::other)
    }

    /// Locks the device. A panic of another thread leaves it consistent: every change is preceded
    /// by its checks.
    pub(crate) fn unit(&self) -> MutexGuard<'_, Unit> {
        let unit = self.shared.unit.lock();
        unit.unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports a stopped access to the driver, once it provides a buffer for the fault.
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

    /// Wakes the IOMMU's thread to deliver pending faults.
    pub(crate) fn poll_faults(&self) {
        let _ = rustix::io::write(&self.shared.faults, &1u64.to_ne_bytes());
    }

    /// Returns a descriptor that is readable after [`report`](Self::report).
    pub(crate) fn reported(&self) -> BorrowedFd<'_> {
        self.shared.faults.as_fd()
    }

    /// Resets the descriptor before the pending reports are handled.
    pub(crate) fn clear_reported(&self) {
        let _ = rustix::io::read(&self.shared.faults, &mut [0; 8]);
    }
}

impl FaultReporter for VirtioIommu {
    fn report_fault(&self, fault: &Fault) {
        self.report(TranslationFault {
            endpoint: EndpointId::new(fault.device.get().into()),
            iova: fault.iova,
            access: fault.access,
            reason: reason(fault),
        });
    }

    fn reaches(&self, device: RequesterId, range: &IovaRange, access: Access) -> bool {
        let endpoint = EndpointId::new(device.get().into());
        self.unit().translate(endpoint, *range, access).is_ok()
    }
}

/// Returns the fault reason that the driver receives.
fn reason(fault: &Fault) -> TranslationFaultReason {
    match fault.reason {
        FaultReason::Blocked | FaultReason::RootNotPresent | FaultReason::ContextNotPresent => {
            TranslationFaultReason::Unattached
        }
        FaultReason::ReadDenied | FaultReason::WriteDenied => TranslationFaultReason::Permission,
        _ => TranslationFaultReason::NotMapped,
    }
}

/// The guest's memory as the client of the IOMMU device shares it.
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

    /// Replaces the guest's memory. When it returns `Ok`, no endpoint holds any of the old memory.
    fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), MemoryInUse> {
        let mut unit = self.iommu.unit();
        let sink = unit.sink_mut();
        // The call fails only for a reader, and this thread is not one.
        let _ = sink.inner.set_memory(memory.clone());
        let sandboxed = sink.sandboxed.set_memory(memory);
        let assigned = sink.assigned.set_memory(memory);
        self.direct.set_memory(memory)?;
        sandboxed.and(assigned).map_err(|_| MemoryInUse)
    }

    fn complete_set_memory(&mut self) -> Result<(), MemoryInUse> {
        // Only a sandboxed process can keep the old memory.
        let committed = self.iommu.unit().sink_mut().sandboxed.commit();
        committed.map_err(|_| MemoryInUse)
    }
}
