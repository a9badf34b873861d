//! Cells of drivers that fail: wrong unmaps (A25), and devices without a driver (A36).

mod common;

use common::{Row, check};

#[test]
fn devices_without_a_driver() {
    let off = ("before the unit is enabled", 4, 4);
    for mode in ["fence", "calgary", "riommu", "pviommu", "xen"] {
        // Another function on the victim's bus shares the space of a host bridge: the mapped
        // address, read and written.
        let open = if ["calgary", "xen"].contains(&mode) {
            2
        } else {
            0
        };
        let rows = [("not attached", open, 8), ("after the unbind", 0, 4), off];
        check("A36", mode, &rows);
    }
    check("A36", "none", &[("after the unbind", 4, 4), off]);
}

/// The second driver of a device reaches nothing of the first one's mappings, leaked or released,
/// unless a map of all memory comes back with the context entry.
#[test]
fn rebound_devices() {
    const RESISTS: [&str; 23] = [
        "strict",
        "linux-lazy",
        "fence",
        "riommu",
        "nested-strict",
        "emulated-strict",
        "shared",
        "never-free",
        "sidecore",
        "calgary",
        "virtio-strict",
        "virtio-lazy",
        "virtio-lazy-domain",
        "virtio-bounce",
        "xen",
        "xen-multicall",
        "xen-lazy",
        "xen-grant",
        "pviommu",
        "rtc-paper",
        "pviommu+rtc",
        "pviommu+rtc+hopt",
        "pviommu+map-cache",
    ];
    let both = |successes| {
        [
            ("after the rebind", successes, 16),
            ("released before the rebind", successes, 16),
        ]
    };
    for mode in RESISTS {
        check("A36", mode, &both(0));
    }
    for mode in ["none", "hwpt", "swpt", "kvm-baseline"] {
        check("A36", mode, &both(16));
    }
}

/// As published, nothing ends with the driver: the device keeps what it leaks, and what the reverse
/// translation cache has kept.
#[test]
fn rebound_devices_as_published() {
    for (mode, released) in [
        ("pviommu", 0),
        ("rtc-paper", 16),
        ("pviommu+rtc", 16),
        ("pviommu+rtc+hopt", 16),
        ("pviommu+rtc-adaptive", 16),
        ("pviommu+map-cache", 16),
    ] {
        let leaked = ("leaked, as published", 16, 16);
        let released = ("released, as published", released, 16);
        check("A36", mode, &[leaked, released]);
    }
    let cell = check("A36", "fence", &[]);
    assert!(cell.executed.named("leaked, as published").is_none());
}

const REFUSED: &str = "refused, and nothing changes";

/// The unmaps of another device's token, of an address twice, of two claims of a mapping, and of
/// another length. The layer's allocator, or a cache of mappings, knows the length.
#[test]
fn wrong_unmaps() {
    let lost = "accepted; the device loses the first page, loses the last and loses another buffer";
    let part = "accepted; the device loses the first page, keeps the last and keeps another buffer";
    let all = "accepted; the device loses the first page, loses the last and keeps another buffer";
    let later =
        "accepted; the device keeps the first page, keeps the last and keeps another buffer";
    let cases = [
        ("strict", 0, 0, [REFUSED, REFUSED]),
        ("freebsd", 0, 0, [REFUSED, REFUSED]),
        ("shared", 0, 0, [REFUSED, REFUSED]),
        ("pviommu+rtc", 0, 0, [REFUSED, REFUSED]),
        ("riommu", 0, 0, [REFUSED, REFUSED]),
        ("strict-bitmap", 0, 1, [part, REFUSED]),
        ("calgary", 0, 1, [part, REFUSED]),
        ("linux-strict", 0, 2, [part, lost]),
        ("linux-lazy", 0, 2, [later, later]),
        ("fence", 0, 2, [part, lost]),
        ("fence-burst", 0, 2, [part, lost]),
        ("sidecore-strict", 0, 2, [part, lost]),
        // As published, an unmap checks nothing.
        ("riommu-paper", 2, 2, [all, all]),
        // The layer cannot read a host's table, and a sidecore checks later.
        ("virtio-strict", 2, 2, [later, lost]),
        ("pviommu", 2, 2, [part, lost]),
        ("xen", 2, 2, [part, all]),
        ("sidecore", 2, 2, [later, later]),
    ];
    for (mode, twice, lengths, notes) in cases {
        let rows: [Row; 4] = [
            ("unmap by another device", 0, 40),
            ("second unmap", twice, 2),
            ("mapping claimed twice", twice, 2),
            ("claim with another length", lengths, 2),
        ];
        let cell = check("A25", mode, &rows);
        let [token, shorter, longer] = &cell.executed.notes[..] else {
            panic!("{mode} {:?}", cell.executed.notes);
        };
        assert!(token.contains("Mapping::claim"), "{mode}");
        assert_eq!(
            [&**shorter, longer],
            [
                format!("unmap of a shorter range: {}", notes[0]),
                format!("unmap of a longer range: {}", notes[1]),
            ],
            "{mode}"
        );
    }
}

/// A mapping of one ring is not unmapped in another ring of its device: six pairs of rings. Modes
/// without rings have no such attempt.
#[test]
fn unmaps_in_another_ring() {
    let row = "unmap in another ring";
    for mode in ["riommu", "riommu-", "riommu-ooo", "riommu-paper"] {
        check("A25", mode, &[(row, 0, 6)]);
    }
    let cell = check("A25", "fence", &[]);
    assert!(cell.executed.named(row).is_none());
}

/// Copies are of live mappings only, a cache counts the users of a mapping, and a pool lets no
/// driver claim its buffers.
#[test]
fn claims_of_pools_and_caches() {
    for mode in [
        "copy",
        "copy-hybrid",
        "virtio-bounce",
        "pool",
        "premap",
        "optimistic",
        "map-cache",
        "never-free",
        "persistent",
        "pviommu+map-cache",
    ] {
        let twice = ("mapping claimed twice", 0, 2);
        check("A25", mode, &[("second unmap", 0, 2), twice]);
    }
}

/// A claim names an address. Once another buffer has the address, no layer can tell a claim of
/// the old buffer from one of the new.
#[test]
fn claims_of_reused_addresses() {
    for mode in [
        "strict",
        "linux-strict",
        "fence",
        "shared",
        "virtio-strict",
        "pviommu",
    ] {
        check("A25", mode, &[("claim of a reused address", 1, 1)]);
    }
    // The address waits for a flush, or for the wrap of the ring or of the search.
    for mode in ["linux-lazy", "riommu", "calgary"] {
        check("A25", mode, &[("claim of a reused address", 0, 0)]);
    }
    // A pool lets no driver claim its buffers.
    check("A25", "pool", &[("claim of a reused address", 0, 1)]);
}
