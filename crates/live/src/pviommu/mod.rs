//! The para-virtual IOMMU of a guest, shared by the thread that serves its queues and the threads
//! of the devices behind it.
//!
//! As with [`VirtioIommu`](crate::iommu::VirtioIommu), the memory is what the IOMMU's own client
//! shares, and a device behind it translates by a software IOMMU. Until a driver has begun, devices
//! reach nothing.

mod unit;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_softiommu::IommuError;
use ringfence_types::{Access, Iova, IovaRange, RequesterId};
use rustix::event::{EventfdFlags, eventfd};
use vm_memory::GuestMemoryMmap;

pub(crate) use unit::Unit;
pub use unit::UnitError;

use crate::assigned::AssignedDma;
use crate::counters::DeviceCounters;
use crate::dma::{Direct, Dma};
use crate::host::HostPagePool;
use crate::iommu::{EndpointMemory, GuestIommu};
use crate::sandbox::Grants;

/// The IOMMU. Clones are the same one.
#[derive(Clone)]
pub struct PvIommu {
    shared: Arc<Shared>,
}

struct Shared {
    /// Whoever holds it may wait for readers, and so is none.
    unit: Mutex<Unit>,
    /// Readable while there may be events that the driver has not been told of.
    events: OwnedFd,
    counters: Arc<DeviceCounters>,
}

impl std::fmt::Debug for PvIommu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PvIommu")
    }
}

impl PvIommu {
    /// An IOMMU for `devices`, which reach nothing until the driver begins, and then what it maps.
    ///
    /// # Errors
    /// If the host has no descriptors left, or a device stands there twice.
    pub fn new(devices: &[RequesterId], counters: Arc<DeviceCounters>) -> io::Result<Self> {
        Self::with_assigned(devices, &[], HostPagePool::Off, counters)
    }

    /// The same, where the model of the hardware translates the accesses of those of `devices` that
    /// are also `assigned`.
    ///
    /// # Errors
    /// The same, or if the host has no memory for tables.
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

    /// What its driver maps from now on is locked into the host's memory for as long as it is
    /// mapped. To be called before there is a driver.
    pub fn lock_mapped(&self) {
        self.unit().lock(Arc::clone(&self.shared.counters));
    }

    /// What the accesses of a device go through; one for each thread that makes any.
    ///
    /// # Errors
    /// If there is no such device, or it has too many.
    pub fn reader(&self, device: RequesterId) -> Result<EndpointMemory, IommuError> {
        let reader = self.unit().reader(device)?;
        Ok(EndpointMemory::new(
            GuestIommu::Para(self.clone()),
            device,
            reader,
        ))
    }

    /// What the accesses of an assigned device go through. What the hardware does for it is counted
    /// by `counters`.
    ///
    /// # Errors
    /// If it is none.
    pub fn assigned(
        &self,
        device: RequesterId,
        counters: Arc<DeviceCounters>,
    ) -> io::Result<AssignedDma> {
        let hardware = self.unit().hardware_of(device);
        let hardware = hardware.ok_or(io::ErrorKind::NotFound)?;
        let behind = GuestIommu::Para(self.clone());
        Ok(AssignedDma::with_iommu(behind, &hardware, device, counters))
    }

    /// One of its devices, which nothing is mapped for yet, is the process that has these grants.
    /// False if it is none of them, or was set apart before.
    #[must_use = "the process may reach what its device does not"]
    pub fn set_sandboxed(&self, device: RequesterId, grants: Grants) -> bool {
        self.unit().set_apart(device, grants)
    }

    /// Does something with the grants of such a device.
    pub fn with_grants<R>(
        &self,
        device: RequesterId,
        with: impl FnOnce(&mut Grants) -> R,
    ) -> Option<R> {
        self.unit().with_grants(device, with)
    }

    /// What the IOMMU itself reaches memory through: directly. The memory that its client shares is
    /// the guest's.
    pub fn memory(&self) -> PvDma {
        PvDma {
            iommu: self.clone(),
            direct: Direct::default(),
        }
    }

    /// Whether the driver has mapped the first byte of `range` for such an access. Nobody is told.
    pub(crate) fn reaches(&self, device: RequesterId, range: &IovaRange, access: Access) -> bool {
        self.unit().reaches(device, range.start(), access)
    }

    /// Whoever panicked while he held it has left it whole: it changes nothing before it has
    /// checked everything.
    pub(crate) fn unit(&self) -> MutexGuard<'_, Unit> {
        let unit = self.shared.unit.lock();
        unit.unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the driver of an access that was stopped, as soon as it gives a buffer for that.
    pub(crate) fn report(&self, device: RequesterId, iova: Iova, access: Access) {
        let mut unit = self.unit();
        if unit.report(device, access, iova) {
            self.shared.counters.stale.add(1);
        }
        drop(unit);
        self.shared.counters.faults.add(1);
        self.poll_events();
    }

    /// There may be events that the driver has not been told of.
    pub(crate) fn poll_events(&self) {
        let _ = rustix::io::write(&self.shared.events, &1u64.to_ne_bytes());
    }

    /// Readable after [`report`](Self::report).
    pub(crate) fn reported(&self) -> BorrowedFd<'_> {
        self.shared.events.as_fd()
    }

    /// The reports up to now are being looked after.
    pub(crate) fn clear_reported(&self) {
        let _ = rustix::io::read(&self.shared.events, &mut [0; 8]);
    }
}

/// The guest's memory as the IOMMU's client shares it.
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

    /// When it returns, no endpoint holds anything of the memory before.
    fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        self.direct.set_memory(memory);
        self.iommu.unit().set_memory(memory);
    }
}
