//! Device ids and guest-physical addresses, as requests encode them.

use core::fmt;

use ringfence_types::Address;

/// Address space of guest-physical addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GuestPhysical {}

/// Guest-physical address. The host's second stage translates it to host memory.
pub type Gpa = Address<GuestPhysical>;

/// Device id of a request: a PCI requester ID, with the segment in bits 16 to 31
/// (`docs/PVIOMMU.md`, "The device"). The field has 64 bits and a guest may write any of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Devid(u64);

impl Devid {
    /// Creates an id from the raw field.
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
