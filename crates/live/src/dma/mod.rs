//! A device's access to the guest's memory.

mod endpoint_memory;
mod part_slices;
mod recorded_view;
mod translated;

use std::io;

use vm_memory::{GuestMemory, GuestMemoryMmap};

pub use endpoint_memory::EndpointMemory;
pub(crate) use endpoint_memory::FaultReporter;
pub(crate) use part_slices::{Part, PartSlices};
pub use recorded_view::RecordedView;
pub(crate) use translated::{PAGE_BYTES, RangeAccess};

/// A killed device process is stuck in the kernel and may still access the old guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInUse;

/// One device's view of the guest's memory.
///
/// Anything that a closure borrows ends with it. A device that waits for a disk or a peer copies
/// its data, leaves the closure, waits, and enters again. Each entry translates every address anew,
/// so the device does not see pages that the guest has unmapped since.
pub trait Dma: Send {
    /// Memory type that rust-vmm crates accept.
    type View<'a>: GuestMemory
    where
        Self: 'a;

    /// Runs `access` on the current memory. `access` must not block.
    fn with<R>(&mut self, access: impl FnOnce(&Self::View<'_>) -> R) -> R;

    /// Returns true if the last [`with`](Self::with) missed a translation that has now arrived, so
    /// that a retry is useful. May block, but only for a device that requests translations.
    fn should_retry(&mut self) -> bool {
        false
    }

    /// Returns true if a wait for a translation was aborted because the device must stop. The
    /// device must then leave its current request as if it had not begun it.
    fn interrupted(&self) -> bool {
        false
    }

    /// Retries [`with`](Self::with) until no translation is missing. `access` may run several
    /// times, so it must be idempotent except for writes to guest memory.
    fn with_retry<R>(&mut self, mut access: impl FnMut(&Self::View<'_>) -> R) -> R {
        loop {
            let result = self.with(&mut access);
            if !self.should_retry() {
                return result;
            }
        }
    }

    /// Locks in `memory`, which is to replace the guest's memory, the pages that must stay locked
    /// because devices can access them. The default locks nothing.
    ///
    /// # Errors
    /// The host cannot lock one of them, so `memory` must not replace the guest's memory.
    fn lock_pinned(&mut self, _memory: &GuestMemoryMmap) -> io::Result<()> {
        Ok(())
    }

    /// Replaces the guest's memory and discards all translations of the old one.
    ///
    /// # Errors
    /// [`MemoryInUse`]: the memory was replaced, but something may still access the old one. The
    /// caller calls this or [`complete_set_memory`](Self::complete_set_memory) until it succeeds.
    fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), MemoryInUse>;

    /// Returns `Ok` when nothing can access the memory that a refused
    /// [`set_memory`](Self::set_memory) replaced. Does not wait and changes no mapping.
    ///
    /// # Errors
    /// [`MemoryInUse`]. The default does not know, so `set_memory` must be repeated.
    fn complete_set_memory(&mut self) -> Result<(), MemoryInUse> {
        Err(MemoryInUse)
    }

    /// Returns true if a hardware IOMMU model translates the accesses.
    fn is_assigned(&self) -> bool {
        false
    }

    /// For tests: lets the device use stale translations where it has no current one. Only a device
    /// that caches translations itself can do so: see [`sandbox`](crate::sandbox).
    fn use_stale(&mut self, _on: bool) {}
}

/// Access without translation: the device uses guest-physical addresses. For the IOMMU itself, and
/// for guests without an IOMMU.
#[derive(Debug, Default)]
pub struct Direct {
    memory: GuestMemoryMmap,
}

impl Dma for Direct {
    type View<'a> = GuestMemoryMmap;

    fn with<R>(&mut self, access: impl FnOnce(&GuestMemoryMmap) -> R) -> R {
        access(&self.memory)
    }

    fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), MemoryInUse> {
        self.memory = memory.clone();
        Ok(())
    }
}
