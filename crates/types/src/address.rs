//! Addresses as types: an I/O virtual address is never mistaken for a physical one.

use core::fmt;
use core::marker::PhantomData;

/// Marks addresses that a device puts on the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceVisible {}

/// Marks addresses of memory behind the IOMMU: host-physical on bare metal, whatever the embedder's
/// [`PhysMemory`](crate::PhysMemory) understands under a hypervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Physical {}

/// A byte address in one address space.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Address<Space>(u64, PhantomData<Space>);

/// I/O virtual address: what the device sees.
pub type Iova = Address<DeviceVisible>;

/// Physical address: what the memory controller sees.
pub type PhysAddr = Address<Physical>;

impl<Space> Address<Space> {
    /// Address zero.
    pub const ZERO: Self = Self::new(0);

    /// Wraps a raw byte address.
    #[inline]
    pub const fn new(raw: u64) -> Self {
        Self(raw, PhantomData)
    }

    /// The raw byte address.
    #[inline]
    pub const fn get(&self) -> u64 {
        self.0
    }

    /// The address `bytes` further up, or `None` past 2^64 - 1.
    #[inline]
    pub const fn checked_add(&self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(raw) => Some(Self::new(raw)),
            None => None,
        }
    }

    /// The address `bytes` further up, modulo 2^64. For addresses inside a range already known not
    /// to wrap.
    #[inline]
    pub const fn wrapping_add(&self, bytes: u64) -> Self {
        Self::new(self.0.wrapping_add(bytes))
    }

    /// How many bytes this address lies above `base`, or `None` if it lies below.
    #[inline]
    pub const fn offset_from(&self, base: &Self) -> Option<u64> {
        self.0.checked_sub(base.0)
    }

    /// The address rounded down to a multiple of `size` bytes; `size` is a power of two.
    #[inline]
    pub const fn align_down(&self, size: u64) -> Self {
        Self::new(self.0 & !(size.wrapping_sub(1)))
    }

    /// Whether the address is a multiple of `size` bytes; `size` is a power of two.
    #[inline]
    pub const fn is_aligned(&self, size: u64) -> bool {
        self.0 & size.wrapping_sub(1) == 0
    }

    /// The offset of the address inside its naturally aligned block of `size` bytes; `size` is a
    /// power of two.
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
