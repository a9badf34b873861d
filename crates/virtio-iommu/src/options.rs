//! Options of a device, which the embedder chooses when it creates the device.

use core::fmt;

use ringfence_types::{Iova, IovaRange, PhysAddr, PhysRange};

use crate::DomainId;
use crate::spec::RESV_MEM_BYTES;

/// Access of endpoints that are attached to no domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BypassPolicy {
    /// No access. The device does not offer `VIRTIO_IOMMU_F_BYPASS_CONFIG`.
    Deny,
    /// As in field `bypass` of the configuration. The driver may write it after it has accepted
    /// `VIRTIO_IOMMU_F_BYPASS_CONFIG`, and may use bypass domains.
    DriverDecides {
        /// Initial value of `bypass`. True lets firmware without an IOMMU driver boot from a disk,
        /// but gives every device access to all guest memory until a driver disables it.
        bypass_at_first: bool,
    },
}

/// Domain ids that the driver may use, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DomainRange {
    /// Lowest valid domain id.
    pub first: DomainId,
    /// Highest valid domain id.
    pub last: DomainId,
}

impl DomainRange {
    /// Returns true if `domain` is in the range.
    pub fn contains(&self, domain: DomainId) -> bool {
        self.first <= domain && domain <= self.last
    }
}

/// Limits of a guest's use of host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VirtioIommuLimits {
    /// Maximum number of mappings in all domains. Each takes at most 128 bytes.
    pub mappings: usize,
    /// Maximum number of domains.
    pub domains: usize,
    /// Maximum number of endpoints. The embedder adds endpoints and gets the error.
    pub endpoints: usize,
    /// Maximum number of faults that wait for a buffer. Further ones are dropped and counted.
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

/// Options of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Options {
    /// Page sizes as a mask in bytes. The lowest bit is the granule of all mappings.
    pub page_size_mask: u64,
    /// IOVAs that can be mapped.
    pub input: IovaRange,
    /// Guest-physical addresses that mappings may target.
    pub physical: PhysRange,
    /// Valid domain ids.
    pub domains: DomainRange,
    /// Access of unattached endpoints.
    pub unattached: BypassPolicy,
    /// True if the device offers `VIRTIO_IOMMU_F_MMIO`.
    pub mmio: bool,
    /// Bytes of properties in a PROBE. If 0, the device does not offer `VIRTIO_IOMMU_F_PROBE`, and
    /// endpoints cannot have reserved regions.
    pub probe_bytes: u32,
    /// True if the device offers domains in [lazy mode](crate::lazy). Virtio 1.3 has none.
    pub lazy_domains: bool,
    /// Limits of the guest's use of host memory.
    pub limits: VirtioIommuLimits,
}

/// Maximum of `probe_bytes`: 170 regions. The device fills this many bytes for each PROBE.
pub(crate) const MAX_PROBE_BYTES: u32 = 4096;

impl Default for Options {
    /// 4 KiB pages over 2^64 bytes, all physical addresses, all domains, no access before
    /// attachment, no MMIO, 512 bytes of properties, no domains in lazy mode.
    fn default() -> Self {
        Self {
            page_size_mask: !0xfff,
            input: full_range(),
            physical: all_physical(),
            domains: DomainRange {
                first: DomainId::new(0),
                last: DomainId::new(u32::MAX),
            },
            unattached: BypassPolicy::Deny,
            mmio: false,
            probe_bytes: 512,
            lazy_domains: false,
            limits: VirtioIommuLimits::default(),
        }
    }
}

fn full_range() -> IovaRange {
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
    /// Returns the granule in bytes; 0 without page sizes, which [`Options::check`] rejects.
    #[inline]
    pub(crate) const fn granule(&self) -> u64 {
        self.page_size_mask & self.page_size_mask.wrapping_neg()
    }

    /// Validates the options.
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

    /// Returns the number of reserved regions that a PROBE can describe.
    pub(crate) const fn most_reserved(&self) -> usize {
        self.probe_bytes as usize / RESV_MEM_BYTES
    }
}

/// Reason why options are invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OptionsError {
    /// `page_size_mask` is 0 (virtio 1.3, section 5.13.4.2: at least one bit is set).
    NoPageSize,
    /// The input range is not aligned to the granule.
    InputMisaligned(IovaRange),
    /// The last domain id is below the first.
    NoDomains,
    /// `probe_bytes` exceeds 4096.
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
