//! The driver's names for endpoints and domains.

use core::fmt;

/// An endpoint: a device whose DMA this IOMMU translates. What the number means is the platform's
/// matter (virtio 1.3, section 5.13.6.3); behind ACPI's VIOT it is the requester ID plus an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct EndpointId(u32);

impl EndpointId {
    /// From the number in a request.
    #[inline]
    pub const fn new(raw: u32) -> Self {
        Self(raw)
    }

    /// The number.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A domain by the number that the driver chose for it: 32 bits, unlike the identifiers with which
/// hardware tags its IOTLB ([`ringfence_types::DomainId`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DomainId(u32);

impl DomainId {
    /// From the number in a request.
    #[inline]
    pub const fn new(raw: u32) -> Self {
        Self(raw)
    }

    /// The number.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for DomainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
