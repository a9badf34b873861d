//! The addresses that the layer of a mode gives to its first buffers (OS15, AL07).

use ringfence_lab::compare::{CompareOptions, testbed};
use ringfence_lab::layer::OpKey;
use ringfence_trace::DeviceIndex;
use ringfence_types::{Direction, Pfn, PfnRange, RequesterId};

use crate::script::{memory, mode};

/// Returns the ranges that a layer reserves for two buffers of 3 pages.
fn reserved(name: &str) -> [PfnRange; 2] {
    let mut bed = testbed(&mode(name), &CompareOptions::new()).unwrap();
    bed.layer.reserve(1, 1).unwrap();
    let device = DeviceIndex(0);
    bed.layer.attach(device, RequesterId::new(0x1000)).unwrap();
    let key = OpKey::new(device, 0, Direction::FromDevice);
    [0, 1].map(|id| {
        let buffer = memory((id + 1) << 20, 3 << 12);
        let made = bed.layer.map(key, id, &[buffer]).unwrap();
        let mut found = None;
        let mut each = |range| found = range;
        bed.layer.each_reserved(key, &made.token, 1, &mut each);
        let found: PfnRange = found.unwrap();
        let start = made.token.range().unwrap().start();
        assert_eq!(Pfn::containing(start), found.lo(), "{name}");
        found
    })
}

/// OS15: a mode of Linux 3.4 reserves 4 pages for 3, aligned to 4, and other modes reserve 3.
#[test]
fn layers_reserve_what_their_modes_round_to() {
    for (name, rounds) in [
        ("strict", true),
        ("strict+", true),
        ("defer", true),
        ("defer+", true),
        ("alloc=eiovar-8,table=radix,flush=burst", true),
        ("strict-bitmap", false),
        ("bitmap", false),
        ("calgary", false),
        ("freebsd", false),
    ] {
        let pages = if rounds { 4 } else { 3 };
        let [first, second] = reserved(name);
        assert_eq!(
            [first, second].map(|range| range.pages()),
            [pages; 2],
            "{name}"
        );
        let [first, second] = [first, second].map(|range| range.lo().get());
        assert_eq!(first.abs_diff(second), pages, "{name}");
        assert!(!rounds || first % 4 == 0, "{name}: {first}");
    }
}

/// AL07: FreeBSD's tree gives the lowest pages. That of FreeBSD 14 leaves a page before each range.
#[test]
fn freebsd_14_leaves_a_page_unused() {
    let pages = |name: &str| reserved(name).map(|range| range.lo().get());
    assert_eq!(pages("freebsd"), [1, 4]);
    assert_eq!(pages("freebsd-paper"), [1, 4]);
    assert_eq!(pages("freebsd-14"), [2, 6]);
}
