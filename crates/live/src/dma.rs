//! How a device reaches the guest's memory.

use vm_memory::{GuestMemory, GuestMemoryMmap};

use crate::handover::{DeviceState, HandOverBlocker};

/// One device's view of the guest's memory.
///
/// What a closure borrows ends with it. A device that has to wait, for a disk or a peer, copies,
/// leaves, waits and comes back: then everything is looked up anew, and what the guest has unmapped
/// meanwhile is gone.
pub trait Dma: Send {
    /// The memory, as crates of the rust-vmm family take it.
    type View<'a>: GuestMemory
    where
        Self: 'a;

    /// Runs `access` on the memory as it is now. `access` must not wait for anything.
    fn with<R>(&mut self, access: impl FnOnce(&Self::View<'_>) -> R) -> R;

    /// Whether the last [`with`](Self::with) met an address that was not known and is now: then it
    /// is worth doing again. May wait; never does where translations are not asked for.
    fn should_retry(&mut self) -> bool {
        false
    }

    /// Whether waiting for a translation was cut short: the device is to stop. What it has in hand
    /// is to be left as if it had not begun.
    fn interrupted(&self) -> bool {
        false
    }

    /// [`with`](Self::with), as often as it takes for every translation to be there that is to be
    /// had. Of what `access` changes beside the guest's memory nothing may depend on how often it
    /// ran.
    fn with_retry<R>(&mut self, mut access: impl FnMut(&Self::View<'_>) -> R) -> R {
        loop {
            let result = self.with(&mut access);
            if !self.should_retry() {
                return result;
            }
        }
    }

    /// The guest's memory is another one now; what was known of the old one is forgotten.
    fn set_memory(&mut self, memory: &GuestMemoryMmap);

    /// What another process is told of the device whose accesses go through here: what it reaches
    /// stands in the IOMMU's state, or is all of memory.
    ///
    /// # Errors
    /// It cannot have it.
    fn hand_over(&self, device: DeviceState) -> Result<DeviceState, HandOverBlocker> {
        Ok(device)
    }

    /// For tests: whether the device goes on using, where it has none, the translations that it
    /// once had. Only one that keeps them itself can: see [`sandbox`](crate::sandbox).
    fn use_stale(&mut self, _on: bool) {}
}

/// Without translation: the device sees guest-physical memory. For the IOMMU itself, and for guests
/// without one.
#[derive(Debug, Default)]
pub struct Direct {
    memory: GuestMemoryMmap,
}

impl Dma for Direct {
    type View<'a> = GuestMemoryMmap;

    fn with<R>(&mut self, access: impl FnOnce(&GuestMemoryMmap) -> R) -> R {
        access(&self.memory)
    }

    fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        self.memory = memory.clone();
    }
}
