//! Variants of single cells: each mechanism with and without its defence. The matrix of all modes
//! is in `matrix.rs`.

mod common;

use ringfence_attack::{Class, Options, Status, run};
use ringfence_lab::modes::Mode;

use common::check;

/// A ring is coherent memory, which no mode copies: the device changes it in every mode.
#[test]
fn rings_of_modes_with_a_pool() {
    for mode in ["copy", "copy-hybrid", "pool", "virtio-bounce", "fence"] {
        check(
            "A18",
            mode,
            &[
                ("driver reads the ring back", 100, 100),
                ("network driver, forged descriptor", 0, 8),
                ("network driver, forged completion", 0, 6),
            ],
        );
    }
}

#[test]
fn fabric() {
    for mode in ["fence", "linux-strict", "riommu", "calgary", "pviommu"] {
        check(
            "A12",
            mode,
            &[
                ("without ACS", 40, 40),
                ("ACS source validation", 0, 40),
                ("behind a bridge", 40, 40),
                ("behind a bridge, ACS source validation", 40, 40),
            ],
        );
    }
    check(
        "A15",
        "fence",
        &[
            ("without interrupt remapping", 8, 12),
            ("interrupt remapping", 0, 12),
        ],
    );
    check(
        "A16",
        "fence",
        &[("without ACS", 16, 16), ("ACS request redirect", 0, 16)],
    );
    // Without an IOMMU, a redirected request comes back.
    check("A16", "none", &[("ACS request redirect", 16, 16)]);
}

#[test]
fn device_tlbs() {
    // An honest device translates again. The baseline's guest maps all of its memory for ever.
    for (mode, honest) in [
        ("fence", 0),
        ("linux-lazy", 0),
        ("pviommu", 0),
        ("kvm-baseline", 20),
    ] {
        for (class, attempts) in [("A13", 32), ("A14", 20)] {
            check(
                class,
                mode,
                &[
                    ("device TLB permitted", attempts, attempts),
                    ("device TLB not permitted", 0, attempts),
                    ("host address checked", 0, attempts),
                ],
            );
        }
        check("A14", mode, &[("honest device", honest, 20)]);
    }
}

#[test]
fn page_requests() {
    for mode in ["fence", "swpt", "pviommu+rtc"] {
        check(
            "A38",
            mode,
            &[
                ("storm", 20, 20),
                ("page requests not permitted", 0, 20),
                ("unsolicited request", 0, 16),
                ("handler maps every page", 16, 16),
            ],
        );
    }
}

/// A walker that does not snoop needs every write-back.
#[test]
fn write_backs() {
    for mode in [
        "fence",
        "freebsd",
        "riommu-",
        "calgary",
        "virtio-lazy",
        "pviommu+rtc",
        "xen",
    ] {
        check(
            "A21",
            mode,
            &[("written back", 0, 32), ("write-backs lost", 32, 32)],
        );
    }
    // Five mappings of two pages and five of three: the last page of each.
    check("A21", "rtc-paper", &[("written back", 10, 32)]);
    for mode in [
        "fence",
        "freebsd",
        "emulated-strict",
        "nested-strict",
        "pviommu",
    ] {
        // Three addresses and one page beside them need no entry that a skipped line holds.
        check(
            "A22",
            mode,
            &[
                ("zeros before the link", 0, 76),
                ("zeros not written back", 72, 76),
            ],
        );
    }
}

/// A flat table is one level, so each page that the scenario tries has its own old word.
#[test]
fn flat_tables_are_written_back_before_the_attach() {
    for mode in ["calgary", "xen"] {
        let without = ("zeros not written back", 76, 76);
        check("A22", mode, &[("zeros before the link", 0, 76), without]);
    }
}

/// A first stage has no write-only pages; its second stage has.
#[test]
fn directions() {
    for mode in ["linux-strict", "nested-strict", "shared", "pviommu+rtc"] {
        let both = ("page with both directions", 0, 4);
        check("A06", mode, &[("against the direction", 0, 4), both]);
    }
    // The first mapping of a page gives its direction to the second.
    let both = ("page with both directions", 2, 4);
    check("A06", "rtc-paper", &[both]);
}

#[test]
fn posted_writes() {
    let drains = "invalidation drains writes";
    for mode in ["fence", "fence-burst", "riommu"] {
        let without = ("invalidation without draining", 20, 20);
        check("A23", mode, &[(drains, 0, 20), without]);
    }
    check("A23", "linux-lazy", &[(drains, 20, 20)]);
}

#[test]
fn hosts_with_requests() {
    check(
        "A30",
        "pviommu",
        &[
            ("host checks requests", 0, 14),
            ("destination checks records", 0, 4),
            ("host without checks", 3, 3),
        ],
    );
    check("A30", "xen", &[("Xen checks hypercalls", 0, 12)]);
    for mode in ["virtio-strict", "virtio-lazy"] {
        check("A30", mode, &[("device checks requests", 0, 28)]);
    }
    let lazy = ("device with lazy domains checks requests", 0, 28);
    check("A30", "virtio-lazy-domain", &[lazy]);
    check(
        "A31",
        "pviommu",
        &[
            ("process with grants", 0, 2047),
            ("thread of the VMM", 2047, 2047),
        ],
    );
    check("A31", "kvm-baseline", &[("thread of the VMM", 2047, 2047)]);
    check(
        "A32",
        "pviommu",
        &[
            ("mapped frames are pinned", 0, 16),
            ("without pin counts", 16, 16),
        ],
    );
    check(
        "A32",
        "xen",
        &[
            ("frames are counted", 0, 16),
            ("frames not counted", 16, 16),
        ],
    );
    check(
        "A33",
        "pviommu+rtc+hopt",
        &[
            ("pointer ends with its table", 0, 1),
            ("as published", 1, 1),
        ],
    );
}

#[test]
fn windows_and_tables() {
    for mode in ["fence", "fence-burst", "riommu"] {
        check(
            "A17",
            mode,
            &[("racer", 0, 100), ("checked before the unmap", 100, 100)],
        );
        check("A37", mode, &[("released buffers", 0, 5632)]);
    }
    check("A17", "linux-lazy", &[("racer", 100, 100)]);
    for mode in ["fence", "freebsd", "freebsd-paper"] {
        check("A20", mode, &[("forged entries", 0, 511)]);
    }
    check("A37", "linux-lazy", &[("released buffers", 512, 5632)]);
}

#[test]
fn contention() {
    check(
        "A24",
        "fence",
        &[
            ("fault storm", 1, 1),
            ("evicted victim", 60, 60),
            ("timing channel", 1, 1),
        ],
    );
    check(
        "A24",
        "riommu",
        &[
            ("fault storm", 1, 1),
            ("evicted victim", 0, 60),
            ("timing channel", 0, 1),
        ],
    );
}

/// A cell without an outcome gives its reason.
#[test]
fn a_cell_that_is_not_executed_says_why() {
    for (class, mode) in [("A22", "riommu"), ("A22", "riommu-paper")] {
        let classes = [Class::find(class).unwrap()];
        let modes = [Mode::find(mode).unwrap()];
        let matrix = run(&modes, &classes, &Options::default(), |_| Ok(())).unwrap();
        let cell = &matrix.cells[0];
        assert_eq!(cell.status, Status::NotExecuted, "{class} {mode}");
        assert!(cell.reason.is_some() && !cell.unexpected, "{class} {mode}");
    }
}

/// A user of a shared mapping that unmaps first: its attempts in all six classes.
#[test]
fn two_users_of_a_mapping() {
    // 22 moments, both ends, both directions; a header of each packet; a write of each buffer.
    for (class, tries) in [
        ("A02", 88),
        ("A03", 88),
        ("A05", 88),
        ("A17", 100),
        ("A23", 20),
        ("A35", 88 * 64),
    ] {
        let held = ("another user holds the page", tries, tries);
        check(
            class,
            "shared",
            &[held, ("after the last user's unmap", 0, tries)],
        );
        for mode in ["optimistic", "map-cache", "pviommu+rtc"] {
            check(class, mode, &[held]);
        }
    }
}

/// The exposure scan: the last 32 buffers of the second device are in the IOTLB of 64 entries. The
/// mode invalidates them after 10 ms: 32 x 4160 bytes x 10 ms. Of them 22 may be read.
#[test]
fn exposure_scans() {
    for (mode, exposure, at_release) in [
        ("fence", "0.000000", 0),
        ("defer", "0.001331", 44),
        ("linux-lazy", "0.001331", 44),
    ] {
        let scans = [
            ("scan at the release", at_release, 512),
            ("scan of the address space", 0, 512),
        ];
        check("A37", mode, &scans);
        let (class, mode) = (Class::find("A37").unwrap(), Mode::find(mode).unwrap());
        let matrix = run(&[mode], &[class], &Options { scan_pages: 512 }, |_| Ok(())).unwrap();
        let note = format!("exposure in 50 s: {exposure} MB s");
        assert_eq!(matrix.cells[0].executed.notes, [note]);
    }
}

/// Old addresses that come back, before and after the wrap of a search.
#[test]
fn reused_addresses() {
    let wrapped = ("unmapped before the wrap", 0, 128);
    for mode in ["bitmap", "strict-bitmap", "calgary", "xen"] {
        check("A04", mode, &[wrapped]);
    }
    let ahead = "unmapped ahead of the search";
    check("A04", "bitmap-paper", &[wrapped, (ahead, 128, 128)]);
    // The last 64 of 576 buffers have slots of the first ones.
    let slots = ("new buffer at an old address", 0, 128);
    for mode in ["riommu", "riommu-", "riommu-ooo", "riommu-paper"] {
        check("A04", mode, &[slots]);
    }
    // The fixed bitmap withholds freed pages until the next wrap, also with a flush per unmap.
    check("A04", "bitmap", &[(ahead, 0, 0)]);
    check("A04", "strict-bitmap", &[(ahead, 0, 0)]);
    for mode in [
        "map-cache",
        "never-free",
        "persistent",
        "pviommu+rtc",
        "linux-lazy",
    ] {
        check("A04", mode, &[]);
    }
}

#[test]
fn functions_behind_a_host_bridge() {
    for mode in ["calgary", "calgary-lazy", "xen", "never-free"] {
        check(
            "A11",
            mode,
            &[("other device", 0, 6), ("same host bridge", 8, 8)],
        );
    }
    check(
        "A11",
        "fence",
        &[("other device", 0, 6), ("same domain", 8, 8)],
    );
}

fn composed(class: &str, row: &str) -> ringfence_attack::Cell {
    let classes = [Class::find(class).unwrap()];
    let modes = [ringfence_lab::compose::compose(row).unwrap()];
    run(&modes, &classes, &Options::default(), |_| Ok(()))
        .unwrap()
        .cells[0]
        .clone()
}

/// A multicall holds unmaps back from Xen's table; a hypercall for each entry does not.
#[test]
fn multicalls_keep_entries_until_their_crossing() {
    for (owner, status, reason) in [
        ("xen", Status::Stopped, None),
        (
            "xen-multicall",
            Status::Succeeded,
            Some("the unmap waits in a multicall"),
        ),
    ] {
        let row = format!("alloc=bitmap,table=flat,flush=per-wrap,owner={owner}");
        let cell = composed("A03", &row);
        assert_eq!(cell.status, status, "{owner} {cell:#?}");
        assert!(cell.total.attempts > 0 && !cell.unexpected, "{cell:#?}");
        let found = cell
            .departure
            .map(|found| found.starts_with(reason.unwrap_or("none")));
        assert_eq!(found, reason.map(|_| true), "{owner}");
    }
}

/// The shipped network driver and bounce pool stop what the mode lets through.
#[test]
fn drivers_and_pools() {
    for mode in ["none", "fence", "linux-lazy", "riommu", "calgary", "shared"] {
        let forged = ("network driver, forged descriptor", 0, 8);
        check(
            "A18",
            mode,
            &[forged, ("network driver, forged completion", 0, 6)],
        );
        if mode != "none" {
            check("A34", mode, &[("bounce pool", 0, 248)]);
        }
    }
}
