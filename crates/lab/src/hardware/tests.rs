//! The granularity of invalidations of each unit.

use super::*;
use crate::platform::ReplayPlatform;

#[test]
fn calgary_invalidates_all_and_vtd_selects() {
    let profile = Profile::r210_2015();
    let calgary = ReplayPlatform::<Calgary>::new(&profile, true).unwrap();
    let vtd = ReplayPlatform::<Vtd>::new(&profile, true).unwrap();
    assert_eq!(
        calgary.iommu.hardware.unit.invalidation_granularity(),
        InvalidationGranularity::GlobalOnly
    );
    assert_eq!(
        vtd.iommu.hardware.unit.invalidation_granularity(),
        InvalidationGranularity::Selective
    );
}
