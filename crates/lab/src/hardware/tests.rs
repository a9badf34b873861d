//! The granularity of invalidations of each unit.

use super::*;

#[test]
fn calgary_invalidates_all_and_vtd_selects() {
    let profile = Profile::r210_2015();
    let memory = Rc::new(Arena::new(1 << 20).unwrap());
    let region = PhysRange::new(PhysAddr::new(4096), (1 << 20) - 4096).unwrap();
    let frames = Rc::new(Frames::new(Rc::clone(&memory), region));
    let calgary = Calgary::new(&profile, &memory, &frames).unwrap();
    let vtd = Vtd::new(&profile, &memory, &frames).unwrap();
    assert_eq!(
        calgary.unit.invalidation_granularity(),
        InvalidationGranularity::GlobalOnly
    );
    assert_eq!(
        vtd.unit.invalidation_granularity(),
        InvalidationGranularity::Selective
    );
}
