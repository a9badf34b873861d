//! The device's configuration and features (virtio 1.3, sections 5.13.3 and 5.13.4).

use ringfence_types::{DomainId, Iova, IovaRange, PageSize, PfnRange};
use ringfence_virtio_iommu::spec::{
    CONFIG_BYPASS, CONFIG_DOMAIN_RANGE, CONFIG_INPUT_RANGE, CONFIG_PAGE_SIZE_MASK,
    CONFIG_PROBE_SIZE, TAIL_BYTES, VIRTIO_IOMMU_F_BYPASS_CONFIG, VIRTIO_IOMMU_F_DOMAIN_RANGE,
    VIRTIO_IOMMU_F_INPUT_RANGE, VIRTIO_IOMMU_F_MAP_UNMAP, VIRTIO_IOMMU_F_PROBE,
};

use crate::error::{Feature, UnitError};
use crate::requests::PROPERTIES_AT;
use crate::transport::Transport;

/// Feature bit (section 6): the device complies with version 1.
const VIRTIO_F_VERSION_1: u32 = 32;
/// Attempts to read a configuration that does not change meanwhile.
const ATTEMPTS: usize = 16;

/// The features that the driver uses, and the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Capabilities {
    /// Accepted feature bits.
    pub features: u64,
    /// Page sizes, one bit each. Mappings are aligned to the smallest one.
    pub page_size_mask: u64,
    /// Addresses that can be mapped.
    pub input_range: IovaRange,
    /// First and last id of domains.
    pub domain_range: (u32, u32),
    /// Bytes of properties in the reply to PROBE; `None` if the device lacks it.
    pub probe_bytes: Option<u32>,
}

/// The words of the configuration that the driver reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Configuration {
    pub(crate) page_size_mask: u64,
    pub(crate) input_range: [u64; 2],
    pub(crate) domain_range: [u32; 2],
    pub(crate) probe_size: u32,
}

/// Returns the features to accept of those that the device offers.
///
/// # Errors
/// The device lacks a feature that the driver needs.
pub(crate) const fn choose(offered: u64) -> Result<u64, UnitError> {
    // Without `VIRTIO_IOMMU_F_BYPASS`, endpoints without a domain are blocked (section 5.13.6.2).
    const USED: u64 = 1 << VIRTIO_IOMMU_F_INPUT_RANGE
        | 1 << VIRTIO_IOMMU_F_DOMAIN_RANGE
        | 1 << VIRTIO_IOMMU_F_MAP_UNMAP
        | 1 << VIRTIO_IOMMU_F_PROBE
        | 1 << VIRTIO_IOMMU_F_BYPASS_CONFIG
        | 1 << VIRTIO_F_VERSION_1;
    if offered >> VIRTIO_F_VERSION_1 & 1 == 0 {
        return Err(UnitError::Unsupported(Feature::Version1));
    }
    if offered >> VIRTIO_IOMMU_F_MAP_UNMAP & 1 == 0 {
        return Err(UnitError::Unsupported(Feature::MapUnmap));
    }
    Ok(offered & USED)
}

impl Configuration {
    /// Reads the configuration between two reads of the same generation (section 2.5.1).
    pub(crate) fn read(transport: &impl Transport) -> Result<Self, UnitError> {
        let word = |offset: usize| transport.read_config(offset as u64);
        let double =
            |offset: usize| u64::from(word(offset)) | u64::from(word(offset.wrapping_add(4))) << 32;
        for _ in 0..ATTEMPTS {
            let before = transport.config_generation();
            let found = Self {
                page_size_mask: double(CONFIG_PAGE_SIZE_MASK),
                input_range: [double(CONFIG_INPUT_RANGE), double(CONFIG_INPUT_RANGE + 8)],
                domain_range: [word(CONFIG_DOMAIN_RANGE), word(CONFIG_DOMAIN_RANGE + 4)],
                probe_size: word(CONFIG_PROBE_SIZE),
            };
            if transport.config_generation() == before {
                return Ok(found);
            }
        }
        Err(UnitError::ConfigurationChanges)
    }
}

impl Capabilities {
    /// Combines accepted features and configuration.
    ///
    /// # Errors
    /// [`UnitError::Configuration`].
    pub(crate) fn decode(features: u64, config: &Configuration) -> Result<Self, UnitError> {
        let has = |bit: u32| features >> bit & 1 != 0;
        let [first, last] = match has(VIRTIO_IOMMU_F_INPUT_RANGE) {
            true => config.input_range,
            false => [0, u64::MAX],
        };
        let input_range = IovaRange::inclusive(Iova::new(first), Iova::new(last));
        let [low, high] = match has(VIRTIO_IOMMU_F_DOMAIN_RANGE) {
            true => config.domain_range,
            false => [0, u32::MAX],
        };
        let probe_bytes = has(VIRTIO_IOMMU_F_PROBE).then_some(config.probe_size);
        // Properties and tail share a frame with the request.
        let room = PageSize::Size4K.bytes() - PROPERTIES_AT - TAIL_BYTES as u64;
        let is_too_long = probe_bytes.is_some_and(|bytes| u64::from(bytes) > room);
        if config.page_size_mask == 0 || low > high || is_too_long {
            return Err(UnitError::Configuration);
        }
        Ok(Self {
            features,
            page_size_mask: config.page_size_mask,
            input_range: input_range.ok_or(UnitError::Configuration)?,
            domain_range: (low, high),
            probe_bytes,
        })
    }

    /// Returns true if the device has bypass domains, and its field `bypass` exists.
    pub const fn has_bypass(&self) -> bool {
        self.features >> VIRTIO_IOMMU_F_BYPASS_CONFIG & 1 != 0
    }

    /// Returns the alignment of mappings: the smallest page size, but at least 4 KiB.
    pub const fn granule(&self) -> u64 {
        let smallest = self.page_size_mask & self.page_size_mask.wrapping_neg();
        let page = PageSize::Size4K.bytes();
        if smallest > page { smallest } else { page }
    }

    pub(crate) fn check_domain(&self, domain: DomainId) -> Result<(), UnitError> {
        let (first, last) = self.domain_range;
        match (first..=last).contains(&domain.get().into()) {
            true => Ok(()),
            false => Err(UnitError::Domain(domain)),
        }
    }

    pub(crate) const fn check_range(&self, range: PfnRange) -> Result<(), UnitError> {
        match self.input_range.contains(&range.iovas()) {
            true => Ok(()),
            false => Err(UnitError::OutsideInput(range)),
        }
    }
}

/// Blocks endpoints that are attached to no domain.
///
/// # Errors
/// [`UnitError::Configuration`] if the field keeps its value.
pub(crate) fn block_unattached(transport: &mut impl Transport) -> Result<(), UnitError> {
    let offset = CONFIG_BYPASS as u64;
    transport.write_config_byte(offset, 0);
    match transport.read_config_byte(offset) {
        0 => Ok(()),
        _ => Err(UnitError::Configuration),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: Configuration = Configuration {
        page_size_mask: 0xffff_ffff_ffff_f000,
        input_range: [0x1000, 0xffff_ffff_ffff],
        domain_range: [2, 9],
        probe_size: 512,
    };
    const ALL: u64 = 1 << 32 | 0x7f;

    #[test]
    fn features() {
        assert_eq!(choose(0x4), Err(UnitError::Unsupported(Feature::Version1)));
        let without = choose(1 << 32 | 0x73);
        assert_eq!(without, Err(UnitError::Unsupported(Feature::MapUnmap)));
        // Neither the superseded BYPASS (3) nor MMIO (5), nor any other.
        assert_eq!(choose(u64::MAX), Ok(1 << 32 | 0b101_0111));
    }

    #[test]
    fn configuration() {
        let found = Capabilities::decode(ALL, &CONFIG).unwrap();
        let (first, last) = (found.input_range.start(), found.input_range.last());
        assert_eq!((first.get(), last.get()), (0x1000, 0xffff_ffff_ffff));
        assert_eq!((found.domain_range, found.probe_bytes), ((2, 9), Some(512)));
        assert!(found.has_bypass());
        let none = Capabilities::decode(1 << 32 | 4, &CONFIG).unwrap();
        assert_eq!(none.input_range.last().get(), u64::MAX);
        assert_eq!((none.domain_range, none.probe_bytes), ((0, u32::MAX), None));
        assert!(!none.has_bypass());
        for (mask, granule) in [
            (u64::MAX, 0x1000),
            (0x3000, 0x1000),
            (0x1_0000, 0x1_0000),
            (1 << 63, 1 << 63),
        ] {
            let config = Configuration {
                page_size_mask: mask,
                ..CONFIG
            };
            let found = Capabilities::decode(ALL, &config).unwrap();
            assert_eq!(found.granule(), granule, "{mask:x}");
        }
    }

    #[test]
    fn contradictory_configurations() {
        for config in [
            Configuration {
                page_size_mask: 0,
                ..CONFIG
            },
            Configuration {
                input_range: [2, 1],
                ..CONFIG
            },
            Configuration {
                domain_range: [3, 2],
                ..CONFIG
            },
            Configuration {
                probe_size: 3965,
                ..CONFIG
            },
            Configuration {
                probe_size: u32::MAX,
                ..CONFIG
            },
        ] {
            let found = Capabilities::decode(ALL, &config);
            assert_eq!(found, Err(UnitError::Configuration), "{config:?}");
        }
        let largest = Configuration {
            probe_size: 3964,
            ..CONFIG
        };
        assert!(Capabilities::decode(ALL, &largest).is_ok());
    }
}
