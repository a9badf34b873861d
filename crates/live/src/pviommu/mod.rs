//! The guest's para-virtual IOMMU, shared by the thread that serves its queues and the threads of
//! the devices behind it.
//!
//! As with [`VirtioIommu`](crate::iommu::VirtioIommu), the client of the IOMMU device shares the
//! guest's memory, and a software IOMMU translates for the devices. All accesses of a device are
//! blocked until a driver starts.

mod unit;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_softiommu::IommuError;
use ringfence_types::{Access, Fault, IovaRange, RequesterId};
use rustix::event::{EventfdFlags, eventfd};
use vm_memory::GuestMemoryMmap;

pub(crate) use unit::Unit;
pub use unit::{PviommuState, UnitError};

use crate::assigned::AssignedDma;
use crate::counters::DeviceCounters;
use crate::dma::{Direct, Dma, EndpointMemory, FaultReporter, MemoryInUse};
use crate::grants::{Grants, StuckProcess};
use crate::host::HostPagePool;

/// The para-virtual IOMMU. Clones share it.
#[derive(Clone)]
pub struct PvIommu {
    shared: Arc<Shared>,
}

struct Shared {
    /// A holder of this lock may wait for readers, so it must not be a reader.
    unit: Mutex<Unit>,
    /// Eventfd that is readable while events may wait for the driver.
    events: OwnedFd,
    counters: Arc<DeviceCounters>,
}

impl std::fmt::Debug for PvIommu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PvIommu")
    }
}

impl PvIommu {
    /// Creates an IOMMU for `devices`. It blocks their accesses until the driver starts; then they
    /// can access the mapped pages.
    ///
    /// # Errors
    /// The host has no descriptors left, or `devices` contains a device twice.
    pub fn new(devices: &[RequesterId], counters: Arc<DeviceCounters>) -> io::Result<Self> {
        Self::with_assigned(devices, &[], HostPagePool::Off, counters)
    }

    /// Like [`new`](Self::new), but the hardware model translates for the devices that are also in
    /// `assigned`.
    ///
    /// # Errors
    /// As for [`new`](Self::new), or the host has no memory for tables.
    pub fn with_assigned(
        devices: &[RequesterId],
        assigned: &[RequesterId],
        optimisations: HostPagePool,
        counters: Arc<DeviceCounters>,
    ) -> io::Result<Self> {
        let events = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let unit = Unit::new(devices, assigned, optimisations, &counters);
        let unit = Mutex::new(unit.map_err(io::Error::other)?);
        Ok(Self {
            shared: Arc::new(Shared {
                unit,
                events,
                counters,
            }),
        })
    }

    /// Locks all pages that the driver maps into host memory while they are mapped. Must be called
    /// before a driver starts.
    pub fn lock_mapped(&self) {
        self.unit().lock(Arc::clone(&self.shared.counters));
    }

    /// Returns a view of guest memory for a device; each thread that accesses memory needs one.
    ///
    /// # Errors
    /// The device does not exist, or has too many readers.
    pub fn reader(&self, device: RequesterId) -> Result<EndpointMemory, IommuError> {
        let reader = self.unit().reader(device)?;
        Ok(EndpointMemory::new(Arc::new(self.clone()), device, reader))
    }

    /// Returns the memory view of an assigned device. `counters` count the hardware model's work
    /// for it.
    ///
    /// # Errors
    /// The device is not assigned.
    pub fn assigned(
        &self,
        device: RequesterId,
        counters: Arc<DeviceCounters>,
    ) -> io::Result<AssignedDma> {
        let hardware = self.unit().hardware_of(device);
        let hardware = hardware.ok_or(io::ErrorKind::NotFound)?;
        let iommu = Arc::new(self.clone());
        Ok(AssignedDma::with_iommu(iommu, &hardware, device, counters))
    }

    /// Declares that a sandboxed process with these grants implements the device. The device must
    /// have no mappings yet. Returns false if the device does not exist or is sandboxed already.
    #[must_use = "the process may reach what its device does not"]
    pub fn set_sandboxed(&self, device: RequesterId, grants: Grants) -> bool {
        self.unit().set_sandboxed(device, grants)
    }

    /// Calls `with` on the grants of a sandboxed device. `None` if the device is not sandboxed.
    pub fn with_grants<R>(
        &self,
        device: RequesterId,
        with: impl FnOnce(&mut Grants) -> R,
    ) -> Option<R> {
        self.unit().with_grants(device, with)
    }

    /// Returns the memory view of the IOMMU device itself, which has no translation. Its client
    /// shares the guest's memory.
    pub fn memory(&self) -> PvDma {
        PvDma {
            iommu: self.clone(),
            direct: Direct::default(),
        }
    }

    /// Locks the device. A panic of another thread leaves it consistent: every change is preceded
    /// by its checks.
    pub(crate) fn unit(&self) -> MutexGuard<'_, Unit> {
        let unit = self.shared.unit.lock();
        unit.unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the IOMMU's thread to deliver pending events.
    pub(crate) fn poll_events(&self) {
        let _ = rustix::io::write(&self.shared.events, &1u64.to_ne_bytes());
    }

    /// Returns a descriptor that is readable after [`report`](Self::report).
    pub(crate) fn reported(&self) -> BorrowedFd<'_> {
        self.shared.events.as_fd()
    }

    /// Resets the descriptor before the pending reports are handled.
    pub(crate) fn clear_reported(&self) {
        let _ = rustix::io::read(&self.shared.events, &mut [0; 8]);
    }
}

impl FaultReporter for PvIommu {
    fn report_fault(&self, fault: &Fault) {
        let mut unit = self.unit();
        // The para-virtual IOMMU takes the reason from its own record.
        if unit.report(fault.device, fault.access, fault.iova) {
            self.shared.counters.stale.add(1);
        }
        drop(unit);
        self.shared.counters.faults.add(1);
        self.poll_events();
    }

    fn reaches(&self, device: RequesterId, range: &IovaRange, access: Access) -> bool {
        self.unit().reaches(device, range.start(), access)
    }
}

/// The guest's memory as the client of the IOMMU device shares it.
#[derive(Debug)]
pub struct PvDma {
    iommu: PvIommu,
    direct: Direct,
}

impl Dma for PvDma {
    type View<'a> = GuestMemoryMmap;

    fn with<R>(&mut self, access: impl FnOnce(&GuestMemoryMmap) -> R) -> R {
        self.direct.with(access)
    }

    fn lock_pinned(&mut self, memory: &GuestMemoryMmap) -> io::Result<()> {
        self.iommu.unit().lock_pinned(memory)
    }

    /// Replaces the guest's memory. When it returns `Ok`, no endpoint holds any of the old memory.
    fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), MemoryInUse> {
        self.direct.set_memory(memory)?;
        let set = self.iommu.unit().set_memory(memory);
        set.map_err(|StuckProcess| MemoryInUse)
    }

    fn complete_set_memory(&mut self) -> Result<(), MemoryInUse> {
        let committed = self.iommu.unit().commit_grants();
        committed.map_err(|StuckProcess| MemoryInUse)
    }
}
