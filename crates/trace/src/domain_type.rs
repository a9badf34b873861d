//! Types of the IOMMU domains of the recorded host.

use std::collections::HashMap;

use serde::Serialize;

/// Maximum number of devices whose type is kept: more have no row in a trace.
const MAX_DEVICES: usize = 65_535;

/// Type of a device's IOMMU domain, as `/sys/kernel/iommu_groups/*/type` shows it
/// (Documentation/ABI/testing/sysfs-kernel-iommu_groups).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DomainType {
    /// `DMA`: an unmap returns after its invalidation.
    Strict,
    /// `DMA-FQ`: invalidations wait in flush queues.
    Lazy,
    /// `identity`: the device reaches all memory.
    Identity,
}

impl DomainType {
    fn parse(name: &[u8]) -> Option<Self> {
        match name {
            b"DMA" => Some(Self::Strict),
            b"DMA-FQ" => Some(Self::Lazy),
            b"identity" => Some(Self::Identity),
            _ => None,
        }
    }
}

/// The types that the comments of a recording give: `# iommu_group DEVICE TYPE`.
#[derive(Debug, Clone, Default)]
pub(crate) struct DomainTypes {
    by_name: HashMap<Box<[u8]>, DomainType>,
}

impl DomainTypes {
    /// Begin of the comment, after its `#`.
    pub(crate) const KEY: &str = " iommu_group ";

    /// Adds the type from a comment, without its `#`. Other comments have no effect.
    pub(crate) fn add(&mut self, comment: &[u8]) {
        let Some(rest) = comment.strip_prefix(Self::KEY.as_bytes()) else {
            return;
        };
        let mut words = rest.trim_ascii().split(|&byte| byte == b' ');
        if let (Some(device), Some(kind), None) = (words.next(), words.next(), words.next())
            && let Some(kind) = DomainType::parse(kind)
            && self.by_name.len() < MAX_DEVICES
        {
            self.by_name.insert(device.into(), kind);
        }
    }

    /// Returns the type for the device of this name.
    pub(crate) fn get(&self, device: &str) -> Option<DomainType> {
        self.by_name.get(device.as_bytes()).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_give_the_types_of_devices() {
        let mut types = DomainTypes::default();
        for comment in [
            " iommu_group 0000:00:03.0 DMA-FQ",
            " iommu_group 0000:00:04.0 DMA",
            " iommu_group usb identity",
            " iommu_group x blocked",
            " iommu_group y",
            " iommu_group z DMA DMA",
            "iommu_group w DMA",
        ] {
            types.add(comment.as_bytes());
        }
        assert_eq!(types.get("0000:00:03.0"), Some(DomainType::Lazy));
        assert_eq!(types.get("0000:00:04.0"), Some(DomainType::Strict));
        assert_eq!(types.get("usb"), Some(DomainType::Identity));
        for device in ["x", "y", "z", "w"] {
            assert_eq!(types.get(device), None, "{device}");
        }
    }
}
