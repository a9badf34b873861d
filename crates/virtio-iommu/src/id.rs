//! Ids of endpoints and domains.

use core::fmt;

/// An endpoint: a device whose DMA this IOMMU translates. The platform defines the number (virtio
/// 1.3, section 5.13.6.3). With ACPI's VIOT it is the requester ID plus an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct EndpointId(u32);

impl EndpointId {
    /// Creates the id from the number in a request.
    #[inline]
    pub const fn new(raw: u32) -> Self {
        Self(raw)
    }

    /// Returns the number.
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

/// Id of a domain, which the driver chooses. It has 32 bits, unlike the hardware's IOTLB tags
/// ([`ringfence_types::DomainId`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DomainId(u32);

impl DomainId {
    /// Creates the id from the number in a request.
    #[inline]
    pub const fn new(raw: u32) -> Self {
        Self(raw)
    }

    /// Returns the number.
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
