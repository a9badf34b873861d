//! The role of the devices' I/O page tables.

use core::fmt;

use ringfence_types::{Direction, Iova, PhysAddr};

/// Which device, counted among those that a backend was made for, in the order of their ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceSlot(u32);

impl DeviceSlot {
    /// The device of that number.
    #[inline]
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// Its number.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where mappings take effect: an I/O page table for each device (section 4.1).
///
/// The backend calls in order of requests, page by page, and [`commit`](Self::commit) before it
/// answers. It never maps what is mapped and never unmaps what is not.
pub trait IoTables {
    /// `giova` leads to `frame` from the next [`commit`](Self::commit) on at the latest.
    ///
    /// # Errors
    /// Nothing has changed.
    fn map(
        &mut self,
        device: DeviceSlot,
        giova: Iova,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<(), IoError>;

    /// `giova` leads nowhere from the next [`commit`](Self::commit) on at the latest.
    ///
    /// # Errors
    /// Nothing has changed.
    fn unmap(&mut self, device: DeviceSlot, giova: Iova) -> Result<(), IoError>;

    /// Returns when every map and unmap so far has taken effect for `device`: no access through
    /// what was unmapped is under way, and none begins.
    ///
    /// # Errors
    /// What was unmapped may still be reached. It stays due: the next call waits for it too.
    fn commit(&mut self, device: DeviceSlot) -> Result<(), IoError>;
}

/// Why a table was not changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IoError {
    /// A limit of the host: no frame for a table, no room in the simulator's address space.
    NoRoom,
    /// Anything else.
    Failed,
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoRoom => "a limit of the host",
            Self::Failed => "the table could not be changed",
        })
    }
}

impl core::error::Error for IoError {}
