//! Byte ranges that cannot be empty and cannot wrap.

use core::fmt;

use crate::{Address, DeviceVisible, PageSize, Physical};

/// A non-empty byte range of one address space whose last byte is at most 2^64 - 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressRange<Space> {
    start: Address<Space>,
    /// Length minus one, so that a range of 2^64 bytes can be expressed and an empty one cannot.
    extra: u64,
}

/// A range of I/O virtual addresses.
pub type IovaRange = AddressRange<DeviceVisible>;
/// A range of physical addresses.
pub type PhysRange = AddressRange<Physical>;

impl<Space: Copy> AddressRange<Space> {
    /// The whole address space, 2^64 bytes.
    pub const ALL: Self = Self::spanning(Address::new(0), u64::MAX);

    /// Creates the range of `bytes` bytes from `start`. `None` if `bytes` is zero or the last byte
    /// would be past 2^64 - 1.
    #[inline]
    pub const fn new(start: Address<Space>, bytes: u64) -> Option<Self> {
        if bytes == 0 {
            return None;
        }
        match start.get().checked_add(bytes - 1) {
            Some(_) => Some(Self {
                start,
                extra: bytes - 1,
            }),
            None => None,
        }
    }

    /// Creates the range from `start` to `last`, both included. `None` if `last` is below `start`.
    #[inline]
    pub const fn inclusive(start: Address<Space>, last: Address<Space>) -> Option<Self> {
        match last.get().checked_sub(start.get()) {
            Some(extra) => Some(Self { start, extra }),
            None => None,
        }
    }

    /// Creates the range of `extra + 1` bytes from `start`. The caller guarantees that it does not
    /// wrap.
    #[inline]
    pub(crate) const fn spanning(start: Address<Space>, extra: u64) -> Self {
        Self { start, extra }
    }

    /// Returns the first byte's address.
    #[inline]
    pub const fn start(&self) -> Address<Space> {
        self.start
    }

    /// Returns the last byte's address (inclusive).
    #[inline]
    pub const fn last(&self) -> Address<Space> {
        self.start.wrapping_add(self.extra)
    }

    /// Returns the length in bytes. A length of 2^64 saturates to `u64::MAX`.
    #[inline]
    pub const fn bytes(&self) -> u64 {
        self.extra.saturating_add(1)
    }

    /// Returns true if every byte of `other` is in this range.
    #[inline]
    pub const fn contains(&self, other: &Self) -> bool {
        self.start.get() <= other.start.get() && other.last().get() <= self.last().get()
    }

    /// Returns true if `address` is in this range.
    #[inline]
    pub const fn contains_address(&self, address: Address<Space>) -> bool {
        self.start.get() <= address.get() && address.get() <= self.last().get()
    }

    /// Returns true if the two ranges share a byte.
    #[inline]
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.start.get() <= other.last().get() && other.start.get() <= self.last().get()
    }

    /// Returns the smallest range of whole pages that contains this one.
    #[inline]
    pub const fn to_pages(&self, page: PageSize) -> Self {
        let mask = page.bytes() - 1;
        let start = self.start.get() & !mask;
        let last = self.last().get() | mask;
        Self {
            start: Address::new(start),
            extra: last - start,
        }
    }

    /// Returns the number of pages of size `page` that the range touches.
    #[inline]
    pub const fn pages(&self, page: PageSize) -> u64 {
        let shift = page.shift();
        ((self.last().get() >> shift) - (self.start.get() >> shift)).saturating_add(1)
    }
}

impl<Space: Copy> fmt::Debug for AddressRange<Space> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..={}", self.start, self.last())
    }
}

impl<Space: Copy> fmt::Display for AddressRange<Space> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..={}", self.start, self.last())
    }
}
