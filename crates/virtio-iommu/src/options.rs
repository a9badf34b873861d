//! What the embedder decides about a device, once.

use core::fmt;

use ringfence_types::{Iova, IovaRange, PhysAddr, PhysRange};

use crate::DomainId;
use crate::spec::RESV_MEM_BYTES;

/// What an endpoint reaches that is attached to no domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BypassPolicy {
    /// Nothing, whatever the driver wishes: `VIRTIO_IOMMU_F_BYPASS_CONFIG` is not offered.
    Deny,
    /// What field `bypass` of the configuration says, which the driver may write once it has
    /// accepted `VIRTIO_IOMMU_F_BYPASS_CONFIG`. Bypass domains are available too.
    DriverDecides {
        /// Whether endpoints bypass the IOMMU before the driver decides: whoever boots from a disk
        /// that knows nothing of IOMMUs needs it, and every device has the guest's memory until a
        /// driver takes it away.
        bypass_at_first: bool,
    },
}

/// Domains that the driver may name, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DomainRange {
    /// Smallest.
    pub first: DomainId,
    /// Largest.
    pub last: DomainId,
}

impl DomainRange {
    /// Whether `domain` is one of them.
    pub fn contains(&self, domain: DomainId) -> bool {
        self.first <= domain && domain <= self.last
    }
}

/// Bounds of what one guest can make the host keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VirtioIommuLimits {
    /// Mappings of all domains together; each costs the device at most 128 bytes.
    pub mappings: usize,
    /// Domains at a time.
    pub domains: usize,
    /// Endpoints. Endpoints are added by the embedder, who gets the error.
    pub endpoints: usize,
    /// Faults that wait for a buffer. Further ones are dropped and counted.
    pub events: usize,
}

impl Default for VirtioIommuLimits {
    /// 65536 mappings, 256 domains, 256 endpoints, 256 events.
    fn default() -> Self {
        Self {
            mappings: 1 << 16,
            domains: 256,
            endpoints: 256,
            events: 256,
        }
    }
}

/// What a device offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Options {
    /// Page sizes as a mask of bytes; the lowest bit is the granule in which everything is mapped.
    pub page_size_mask: u64,
    /// Addresses that can be mapped.
    pub input: IovaRange,
    /// Guest-physical addresses that can be mapped to.
    pub physical: PhysRange,
    /// Domains that there can be.
    pub domains: DomainRange,
    /// What endpoints reach before they are attached.
    pub unattached: BypassPolicy,
    /// Whether `VIRTIO_IOMMU_F_MMIO` is offered.
    pub mmio: bool,
    /// Bytes of properties in a PROBE; 0: `VIRTIO_IOMMU_F_PROBE` is not offered, and no endpoint
    /// can have reserved regions.
    pub probe_bytes: u32,
    /// Bounds.
    pub limits: VirtioIommuLimits,
}

/// Most bytes of properties: 170 regions. A PROBE makes the device fill that many.
pub(crate) const MAX_PROBE_BYTES: u32 = 4096;

impl Default for Options {
    /// 4 KiB pages over 2^64 bytes, all physical addresses, all domains, nothing before attachment,
    /// no MMIO, 512 bytes of properties.
    fn default() -> Self {
        Self {
            page_size_mask: !0xfff,
            input: whole(),
            physical: all_physical(),
            domains: DomainRange {
                first: DomainId::new(0),
                last: DomainId::new(u32::MAX),
            },
            unattached: BypassPolicy::Deny,
            mmio: false,
            probe_bytes: 512,
            limits: VirtioIommuLimits::default(),
        }
    }
}

fn whole() -> IovaRange {
    const {
        match IovaRange::inclusive(Iova::ZERO, Iova::new(u64::MAX)) {
            Some(range) => range,
            None => panic!("0 is not above 2^64 - 1"),
        }
    }
}

fn all_physical() -> PhysRange {
    const {
        match PhysRange::inclusive(PhysAddr::ZERO, PhysAddr::new(u64::MAX)) {
            Some(range) => range,
            None => panic!("0 is not above 2^64 - 1"),
        }
    }
}

impl Options {
    /// Bytes of a granule; 0 without page sizes, which [`Options::check`] refuses.
    #[inline]
    pub(crate) const fn granule(&self) -> u64 {
        self.page_size_mask & self.page_size_mask.wrapping_neg()
    }

    /// Whether a device can be made of this.
    pub fn check(&self) -> Result<(), OptionsError> {
        if self.page_size_mask == 0 {
            return Err(OptionsError::NoPageSize);
        }
        let granule = self.granule();
        if !self.input.start().is_aligned(granule)
            || !self.input.last().wrapping_add(1).is_aligned(granule)
        {
            return Err(OptionsError::InputMisaligned(self.input));
        }
        if self.domains.last < self.domains.first {
            return Err(OptionsError::NoDomains);
        }
        if self.probe_bytes > MAX_PROBE_BYTES {
            return Err(OptionsError::ProbeTooLong(self.probe_bytes));
        }
        Ok(())
    }

    /// How many reserved regions a PROBE can describe.
    pub(crate) const fn most_reserved(&self) -> usize {
        self.probe_bytes as usize / RESV_MEM_BYTES
    }
}

/// Why no device can be made of some options.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OptionsError {
    /// `page_size_mask` is 0 (virtio 1.3, section 5.13.4.2: at least one bit is set).
    NoPageSize,
    /// The input range is not made of whole granules.
    InputMisaligned(IovaRange),
    /// The domain range ends before it begins.
    NoDomains,
    /// More than 4096 bytes of properties.
    ProbeTooLong(u32),
}

impl fmt::Display for OptionsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPageSize => f.write_str("no page size"),
            Self::InputMisaligned(range) => {
                write!(f, "input range {range} is not made of whole granules")
            }
            Self::NoDomains => f.write_str("the domain range ends before it begins"),
            Self::ProbeTooLong(bytes) => {
                write!(f, "{bytes} bytes of properties, at most {MAX_PROBE_BYTES}")
            }
        }
    }
}

impl core::error::Error for OptionsError {}
