//! The guest's ring IOMMU (docs/RIOMMU-DEVICE.md), shared by the thread that serves its registers
//! and the threads of the devices behind it.
//!
//! The guest's memory is that which the client of the IOMMU shares. Tables and fault queue lie in
//! it, so the unit reads what the guest wrote.

mod clear_oracle;
mod fair_lock;
mod function;
mod memory;
mod state;
mod view;

#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringfence_hw::{Geometry, Prefetch};
use ringfence_riommu_device::{Config, RiommuDevice};
use ringfence_types::RequesterId;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use vm_memory::GuestMemoryMmap;

use crate::counters::DeviceCounters;

use self::clear_oracle::ClearOracle;
use self::fair_lock::{FairGuard, FairLock};
pub use function::RiommuFunction;
pub use state::RiommuState;
pub use view::{RingDma, RingView};

/// Rings with a cached slot. Linux's driver has three for each device.
const RIOTLB_ENTRIES: u32 = 64;
/// Devices with a cached context.
const CONTEXT_ENTRIES: u32 = 16;

/// The ring IOMMU. Clones share it.
#[derive(Clone, Debug)]
pub struct RingIommu {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// An access holds this lock from its translation to its last byte. A register write takes the
    /// lock, so an invalidation waits for all earlier accesses, and for no later one.
    model: FairLock<Model>,
    /// Eventfd that is readable while an interrupt is due.
    interrupts: OwnedFd,
    counters: Arc<DeviceCounters>,
}

/// State behind the lock.
#[derive(Debug)]
struct Model {
    device: RiommuDevice,
    oracle: ClearOracle,
    /// The guest's memory as the client shares it.
    guest: GuestMemoryMmap,
    /// Bus Master Enable of the IOMMU: without it, it reads no tables and all devices are blocked.
    is_master: bool,
}

impl RingIommu {
    /// Creates an IOMMU for `devices`, all blocked.
    ///
    /// # Errors
    /// The host has no descriptors left, or `devices` has one twice or too many.
    pub fn new(devices: &[RequesterId], counters: Arc<DeviceCounters>) -> io::Result<Self> {
        let geometry = |entries| Geometry::new(1, entries).map_err(io::Error::other);
        let config = Config {
            riotlb: geometry(RIOTLB_ENTRIES)?,
            contexts: geometry(CONTEXT_ENTRIES)?,
            prefetch: Prefetch::Immediate,
        };
        let device = RiommuDevice::new(&config, devices).map_err(io::Error::other)?;
        let interrupts = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            shared: Arc::new(Shared {
                model: FairLock::new(Model {
                    device,
                    oracle: ClearOracle::new(),
                    guest: GuestMemoryMmap::default(),
                    is_master: false,
                }),
                interrupts,
                counters,
            }),
        })
    }

    /// Returns the view of guest memory of a device behind the IOMMU. `None` if it is not listed:
    /// the guest would not know that the IOMMU blocks it.
    pub fn endpoint(&self, device: RequesterId, counters: Arc<DeviceCounters>) -> Option<RingDma> {
        let is_listed = self.model().device.devices().contains(&device);
        is_listed.then(|| RingDma::new(self.clone(), device, counters))
    }

    /// Locks the IOMMU. A panic of another thread leaves it consistent: a translation changes
    /// caches, counters and the fault queue only.
    fn model(&self) -> FairGuard<'_, Model> {
        self.shared.model.lock()
    }

    /// Wakes the IOMMU's thread to deliver an interrupt.
    fn wake(&self) {
        let _ = rustix::io::write(&self.shared.interrupts, &1u64.to_ne_bytes());
    }

    fn interrupts(&self) -> BorrowedFd<'_> {
        self.shared.interrupts.as_fd()
    }

    /// Returns true if an interrupt is to be delivered.
    fn has_interrupt(&self) -> bool {
        let mut waits = [PollFd::new(&self.shared.interrupts, PollFlags::IN)];
        poll(&mut waits, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    fn clear_interrupts(&self) {
        let _ = rustix::io::read(&self.shared.interrupts, &mut [0; 8]);
    }
}
