//! Identifiers of the device that issues a DMA and of the domain that confines it.

use core::fmt;

/// PCI requester ID: the 16 bits of bus, device and function that accompany every DMA
/// (rIOMMU section 2.2; PCI Express Base Specification, "Transaction Descriptor").
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct RequesterId(u16);

impl RequesterId {
    /// Wraps a raw requester ID.
    #[inline]
    pub const fn new(requester_id: u16) -> Self {
        Self(requester_id)
    }

    /// Combines bus (8 bits), device (5 bits) and function (3 bits). `None` if `device` or
    /// `function` is out of range.
    #[inline]
    pub const fn from_parts(bus: u8, device: u8, function: u8) -> Option<Self> {
        if device > 31 || function > 7 {
            return None;
        }
        Some(Self(
            (bus as u16) << 8 | (device as u16) << 3 | function as u16,
        ))
    }

    /// Returns the raw requester ID.
    #[inline]
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Returns the bus number, which indexes the root table.
    #[inline]
    pub const fn bus(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Returns the device and function number, which indexes the context table.
    #[inline]
    pub const fn devfn(self) -> u8 {
        self.0 as u8
    }
}

impl fmt::Display for RequesterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:02x}:{:02x}.{}",
            self.bus(),
            self.devfn() >> 3,
            self.devfn() & 7
        )
    }
}

/// Identifier of a domain: one I/O virtual address space and its table. The IOMMU tags IOTLB
/// entries with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DomainId(u16);

impl DomainId {
    /// Wraps a raw domain identifier.
    #[inline]
    pub const fn new(raw: u16) -> Self {
        Self(raw)
    }

    /// Returns the raw identifier.
    #[inline]
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl fmt::Display for DomainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
