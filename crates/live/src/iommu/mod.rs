//! The guest's IOMMU, shared by the thread that serves it and the threads of the devices behind it.

mod view;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_types::{Iova, IovaRange};
use ringfence_virtio_iommu::{
    Denied, Device, EndpointError, EndpointId, Options, Reserved, ReservedKind,
};
use rustix::event::{EventfdFlags, eventfd};

pub use view::{Translated, View};

use crate::counters::DeviceCounters;

/// First and last address at which writes are interrupts on a PC (Intel SDM volume 3, section 12.11.1).
const DOORBELLS: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);

/// The IOMMU. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Iommu {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    device: Mutex<Device<()>>,
    /// Readable while there may be faults that the driver has not been told of.
    faults: OwnedFd,
    counters: Arc<DeviceCounters>,
}

impl Iommu {
    /// An IOMMU whose endpoints reach nothing until they are attached.
    ///
    /// # Errors
    /// If the host has no descriptors left.
    pub fn new(counters: Arc<DeviceCounters>) -> io::Result<Self> {
        let device = Device::new(Options::default(), ()).map_err(io::Error::other)?;
        let faults = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            shared: Arc::new(Shared {
                device: Mutex::new(device),
                faults,
                counters,
            }),
        })
    }

    /// Adds an endpoint: the number under which VIOT names it.
    ///
    /// # Errors
    /// If it is there already, or one too many.
    pub fn add_endpoint(&self, endpoint: EndpointId) -> Result<(), EndpointError> {
        let (first, last) = DOORBELLS;
        let doorbells = IovaRange::inclusive(Iova::new(first), Iova::new(last));
        let reserved = doorbells.map(|range| Reserved {
            range,
            kind: ReservedKind::Msi,
        });
        self.device().add_endpoint(endpoint, reserved.as_slice())
    }

    /// What an endpoint's accesses go through.
    pub fn translated(&self, endpoint: EndpointId) -> Translated {
        Translated::new(self.clone(), endpoint)
    }

    /// The device. A thread that panicked while it held it has left it whole: it changes nothing before it has checked everything.
    pub(crate) fn device(&self) -> MutexGuard<'_, Device<()>> {
        let device = self.shared.device.lock();
        device.unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the driver of an access that was stopped, as soon as it gives a buffer for that.
    pub(crate) fn report(&self, device: &mut Device<()>, denied: Denied) {
        device.report(denied);
        self.shared.counters.faults.add(1);
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
