//! The addresses that the layer of a mode gives to its first buffers (OS15, AL07).

use ringfence_lab::compare::{CompareOptions, testbed};
use ringfence_lab::layer::OpKey;
use ringfence_trace::DeviceIndex;
use ringfence_types::{Direction, Pfn, RequesterId};

use crate::script::{memory, mode};

/// Returns the first pages of two buffers of 3 pages.
fn pages(name: &str) -> [u64; 2] {
    let mut bed = testbed(&mode(name), &CompareOptions::new()).unwrap();
    bed.layer.reserve(1, 1).unwrap();
    let device = DeviceIndex(0);
    bed.layer.attach(device, RequesterId::new(0x1000)).unwrap();
    let key = OpKey::new(device, 0, Direction::FromDevice);
    [0, 1].map(|id| {
        let buffer = memory((id + 1) << 20, 3 << 12);
        let made = bed.layer.map(key, id, &[buffer]).unwrap();
        Pfn::containing(made.token.range().unwrap().start()).get()
    })
}

/// OS15: a mode of Linux 3.4 reserves 4 pages for 3, aligned to 4, and other modes reserve 3.
#[test]
fn layers_reserve_what_their_modes_round_to() {
    for name in [
        "strict",
        "strict+",
        "defer",
        "defer+",
        "alloc=eiovar-8,table=radix,flush=burst",
    ] {
        let [first, second] = pages(name);
        assert_eq!((first % 4, second % 4), (0, 0), "{name}");
        assert_eq!(first.abs_diff(second), 4, "{name}");
    }
    for name in ["strict-bitmap", "bitmap", "calgary", "freebsd"] {
        let [first, second] = pages(name);
        assert_eq!(first.abs_diff(second), 3, "{name}");
    }
}

/// AL07: FreeBSD's tree gives the lowest pages. That of FreeBSD 14 leaves a page before each range.
#[test]
fn freebsd_14_leaves_a_page_unused() {
    assert_eq!(pages("freebsd"), [1, 4]);
    assert_eq!(pages("freebsd-paper"), [1, 4]);
    assert_eq!(pages("freebsd-14"), [2, 6]);
}
