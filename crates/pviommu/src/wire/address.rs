//! Names of devices and of guest memory as they stand in requests.

use core::fmt;

use ringfence_types::Address;

/// Marks addresses of a guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GuestPhysical {}

/// Guest-physical address: what the guest takes for physical, and what a second stage leads on to
/// host memory.
pub type Gpa = Address<GuestPhysical>;

/// A device as requests name it: a PCI requester id, with the segment in bits 16 to 31
/// (`docs/PVIOMMU.md`, "The device"). The field has 64 bits and a guest may write any of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Devid(u64);

impl Devid {
    /// From the raw field.
    #[inline]
    pub const fn new(raw: u64) -> Self {
        Self(raw)
    }

    /// The raw field.
    #[inline]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Devid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
