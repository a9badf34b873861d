//! The attachment of a device to a domain.

use ringfence_types::{DomainId, Pfn, RequesterId, RingId};

/// One domain, distinct from earlier and later domains with its identifier, and from domains of
/// other units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DomainHandle {
    pub(crate) unit: u16,
    pub(crate) domain: DomainId,
    pub(crate) generation: u32,
}

impl DomainHandle {
    /// Returns true if both domains belong to the same unit.
    pub(crate) const fn same_iommu(self, other: Self) -> bool {
        self.unit == other.unit
    }

    /// Returns the identifier.
    #[inline]
    pub(crate) const fn domain(self) -> DomainId {
        self.domain
    }
}

/// The limits on the addresses of a mapping. The space tries the preferred limit first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressLimits {
    /// Highest page that needs no dual-address cycle on the bus (32 bit). Never above `mask`.
    pub preferred: Pfn,
    /// Highest page that the device's DMA mask allows.
    pub mask: Pfn,
    /// The device's ring for the mapping. Spaces without rings ignore it.
    pub ring: RingId,
}

/// The attachment of a device to a domain. It becomes invalid when
/// [`Dma::detach`](crate::Dma::detach) removes the domain, even if another domain gets the same
/// identifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attachment {
    pub(crate) device: RequesterId,
    pub(crate) domain_handle: DomainHandle,
    pub(crate) limits: AddressLimits,
}

impl Attachment {
    /// Returns the attached device.
    pub fn device(&self) -> RequesterId {
        self.device
    }

    /// Returns the domain.
    pub fn domain(&self) -> DomainId {
        self.domain_handle.domain()
    }

    /// Returns the device's ring for new mappings: the first one unless
    /// [`Dma::on_ring`](crate::Dma::on_ring) selected another.
    pub fn ring(&self) -> RingId {
        self.limits.ring
    }
}
