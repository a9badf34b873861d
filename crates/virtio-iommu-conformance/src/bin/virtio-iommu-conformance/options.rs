//! Options of Ringfence's device for a setup.

use ringfence_types::{Iova, IovaRange};
use ringfence_virtio_iommu::{
    BypassPolicy, DomainId, DomainRange, Options, ReservedRegion, ReservedRegionKind,
    VirtioIommuLimits,
};
use ringfence_virtio_iommu_conformance::Setup;

/// The endpoints of all devices.
pub(crate) const ENDPOINTS: [u32; 3] = [0x20, 0x21, 0x22];

/// Returns the options of a device.
pub(crate) fn options(setup: &Setup) -> Options {
    let defaults = Options::default();
    let limits = setup.limits.map(|limits| VirtioIommuLimits {
        mappings: limits.mappings,
        domains: limits.domains,
        ..defaults.limits
    });
    let (first, last) = setup.domains;
    Options {
        input: range(setup.input),
        domains: DomainRange {
            first: DomainId::new(first),
            last: DomainId::new(last),
        },
        unattached: match setup.bypass {
            None => BypassPolicy::Deny,
            Some(bypass_at_first) => BypassPolicy::DriverDecides { bypass_at_first },
        },
        mmio: setup.mmio,
        probe_bytes: if setup.probe { defaults.probe_bytes } else { 0 },
        limits: limits.unwrap_or(defaults.limits),
        ..defaults
    }
}

/// Returns the reserved regions of an endpoint.
pub(crate) fn regions(setup: &Setup, endpoint: u32) -> Vec<ReservedRegion> {
    let regions = setup.regions.iter().filter(|_| endpoint == ENDPOINTS[1]);
    let region = |region: &ringfence_virtio_iommu_conformance::Region| ReservedRegion {
        range: range((region.first, region.last)),
        kind: match region.msi {
            true => ReservedRegionKind::Msi,
            false => ReservedRegionKind::Reserved,
        },
    };
    regions.map(region).collect()
}

fn range((first, last): (u64, u64)) -> IovaRange {
    IovaRange::inclusive(Iova::new(first), Iova::new(last)).expect("a range of the suite")
}
