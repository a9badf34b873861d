//! Address newtypes: the compiler rejects an I/O virtual address where a physical one is expected.

use core::fmt;
use core::marker::PhantomData;

/// Marks addresses that a device issues on the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceVisible {}

/// Marks addresses of memory behind the IOMMU: host-physical on bare metal. Under a hypervisor, the
/// embedder's [`PhysMemory`](crate::PhysMemory) defines them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Physical {}

/// Marks addresses of a guest's memory, which a second stage translates to host addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GuestPhysical {}

/// A byte address in one address space.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Address<Space>(u64, PhantomData<Space>);

/// I/O virtual address: the address that the device uses.
pub type Iova = Address<DeviceVisible>;

/// Physical address: the address that the memory controller uses.
pub type PhysAddr = Address<Physical>;

/// Guest-physical address: the input of the second stage of a nested translation.
pub type GuestPhysAddr = Address<GuestPhysical>;

impl<Space> Address<Space> {
    /// The lowest address, 0.
    pub const ZERO: Self = Self::new(0);

    /// Wraps a raw byte address.
    #[inline]
    pub const fn new(raw: u64) -> Self {
        Self(raw, PhantomData)
    }

    /// Returns the raw byte address.
    #[inline]
    pub const fn get(&self) -> u64 {
        self.0
    }

    /// Adds `bytes`. `None` if the sum exceeds 2^64 - 1.
    #[inline]
    pub const fn checked_add(&self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(raw) => Some(Self::new(raw)),
            None => None,
        }
    }

    /// Adds `bytes` modulo 2^64. For offsets inside a range that is known not to wrap.
    #[inline]
    pub const fn wrapping_add(&self, bytes: u64) -> Self {
        Self::new(self.0.wrapping_add(bytes))
    }

    /// Returns the distance in bytes from `base` up to this address. `None` if the address is below
    /// `base`.
    #[inline]
    pub const fn offset_from(&self, base: &Self) -> Option<u64> {
        self.0.checked_sub(base.0)
    }

    /// Rounds the address down to a multiple of `size` bytes. `size` must be a power of two.
    #[inline]
    pub const fn align_down(&self, size: u64) -> Self {
        Self::new(self.0 & !(size.wrapping_sub(1)))
    }

    /// Returns true if the address is a multiple of `size` bytes. `size` must be a power of two.
    #[inline]
    pub const fn is_aligned(&self, size: u64) -> bool {
        self.0 & size.wrapping_sub(1) == 0
    }

    /// Returns the offset of the address in its naturally aligned block of `size` bytes. `size`
    /// must be a power of two.
    #[inline]
    pub const fn offset_in(&self, size: u64) -> u64 {
        self.0 & size.wrapping_sub(1)
    }
}

impl<Space> fmt::Debug for Address<Space> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl<Space> fmt::Display for Address<Space> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl<Space> fmt::LowerHex for Address<Space> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::LowerHex::fmt(&self.0, f)
    }
}
