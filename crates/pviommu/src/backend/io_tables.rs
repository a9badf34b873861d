//! The interface of the devices' I/O page tables.

use core::fmt;

use ringfence_types::{Direction, Iova, PhysAddr};

/// Index of a device among the backend's devices, in ascending order of ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceSlot(u32);

impl DeviceSlot {
    /// Creates the slot with this index.
    #[inline]
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// Returns the index.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The I/O page tables of all devices (PVIOMMU paper, section 4.1).
///
/// The backend calls these methods in the order of requests, page by page, and calls
/// [`commit`](Self::commit) before it answers. It never maps a mapped page and never unmaps an
/// unmapped one.
pub trait IoTables {
    /// Maps `giova` to `frame`. Takes effect at the latest with the next [`commit`](Self::commit).
    ///
    /// # Errors
    /// The table is unchanged.
    fn map(
        &mut self,
        device: DeviceSlot,
        giova: Iova,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<(), IoError>;

    /// Unmaps `giova`. Takes effect at the latest with the next [`commit`](Self::commit).
    ///
    /// # Errors
    /// The table is unchanged.
    fn unmap(&mut self, device: DeviceSlot, giova: Iova) -> Result<(), IoError>;

    /// Returns when every earlier map and unmap has taken effect for `device`. No access through an
    /// unmapped page is in progress, and none will start.
    ///
    /// # Errors
    /// The device may still access unmapped pages. The next call waits for them as well.
    fn commit(&mut self, device: DeviceSlot) -> Result<(), IoError>;
}

/// Tables that their embedder changes while a [`Backend`](super::Backend) owns them.
///
/// The handle should not provide a `&mut` to the tables. Otherwise the embedder could swap the
/// tables of two backends, and each would keep what the other's driver unmaps.
pub trait TablesHandle: IoTables {
    /// Handle with which the embedder may change the tables.
    type Handle<'t>
    where
        Self: 't;

    /// Returns the handle, for as long as the backend is borrowed.
    fn handle(&mut self) -> Self::Handle<'_>;
}

/// Reason why a table operation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IoError {
    /// A limit of the host: no frame for a table, no room in the simulator's address space.
    NoRoom,
    /// Any other failure.
    Failed,
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoRoom => "a limit of the host was reached",
            Self::Failed => "the host failed to change the table",
        })
    }
}

impl core::error::Error for IoError {}
