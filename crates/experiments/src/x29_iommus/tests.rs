use super::*;
use crate::experiment::Experiment;
use crate::finding::{Finding, Verdict};
use crate::guest_loads::{
    GuestLoads, KernelLoads, Load, LoadCounts, PROTECTIONS, Promise, StaleAccesses,
};
use crate::setting::Setting;

/// Counts of a protection whose values all differ: `cost` is added to each of them.
fn counts(cost: f64, promise: Promise) -> GuestLoads {
    let load = |base: f64| LoadCounts {
        instructions: base + cost,
        spread: base / 1000.0,
        exits: cost / 1000.0,
        device_exits: Some(base / 7.0),
        invalidations: cost / 30_000.0,
        unmaps: Some(cost / 500.0),
    };
    GuestLoads {
        map_unmap: 148.0 + cost,
        uncopied: (promise == Promise::Pool).then_some(230.0),
        exposure: Some(StaleAccesses {
            tried: 1,
            reached: match promise {
                Promise::Strict | Promise::Burst => 0,
                Promise::None | Promise::Lazy | Promise::Cache | Promise::Pool => 1,
            },
        }),
        loads: vec![
            (Load::Read4K, load(17_000.0)),
            (Load::Read128K, load(60_000.0)),
            (Load::Stream, load(5000.0)),
            (Load::RoundTrip, load(9000.0)),
            (Load::NvmeRead4K, one_each(load(20_000.0))),
            (Load::NvmeRead128K, load(40_000.0)),
        ],
    }
}

/// A load with one invalidation for each operation.
fn one_each(load: LoadCounts) -> LoadCounts {
    LoadCounts {
        invalidations: 1.0,
        ..load
    }
}

/// Costs in the paper's order.
fn cost(name: &str) -> f64 {
    match name {
        "none" | "none-qemu" => 0.0,
        "riommu-strict" => 140.0,
        "riommu-burst-paper" => 100.0,
        "riommu-burst" => 110.0,
        "intel-lazy" => 900.0,
        "intel-strict" => 1400.0,
        _ => 3000.0,
    }
}

fn kernel(version: &str) -> KernelLoads {
    let guests = PROTECTIONS.iter().map(|protection| LoadGuest {
        protection,
        counts: Ok(counts(cost(protection.name), protection.promise)),
    });
    KernelLoads {
        kernel: version.into(),
        guests: guests.collect(),
    }
}

fn found(loads: Loads) -> Finding {
    let mut setting = Setting::smoke();
    setting.loads = loads;
    Experiment::find("X29").unwrap().run(&setting).unwrap()
}

/// The finding of two kernels after `change` to one guest of the second.
fn changed(name: &str, change: impl Fn(&mut GuestLoads)) -> Finding {
    let mut kernels = vec![kernel("6.12"), kernel("7.2")];
    let guests = kernels[1].guests.iter_mut();
    for guest in guests.filter(|guest| guest.protection.name == name) {
        guest.counts.iter_mut().for_each(&change);
    }
    found(Loads::Counted(kernels))
}

#[test]
fn verdict_without_guests_is_not_run() {
    for loads in [
        Loads::None("no QEMU".into()),
        Loads::Failed("no QEMU".into()),
    ] {
        let found = found(loads);
        assert_eq!(found.verdict, Verdict::NotRun);
        assert!(found.explanation[0].contains("Not run: no QEMU"));
        assert!(found.rows.is_empty());
        for claim in EXPECTED {
            assert!(
                found.notes.iter().any(|note| note.starts_with(claim)),
                "{claim}"
            );
        }
    }
}

#[test]
fn order_of_the_paper_is_judged_in_both_kernels() {
    let right = changed("none", |_| ());
    assert_eq!(right.verdict, Verdict::Reproduced, "{:#?}", right.rows);
    // Four modes have six pairs, of four quantities in each kernel.
    let orders = right.score.orders;
    assert_eq!((orders.asked, orders.held, orders.reversed), (48, 48, 0));
    // Each quantity of each mode alone can reverse the order.
    let load = |guest: &mut GuestLoads, load: Load, by: f64| {
        let one = guest.loads.iter_mut().find(|(one, _)| *one == load);
        one.unwrap().1.instructions += by;
    };
    type Change<'a> = (&'static str, &'a dyn Fn(&mut GuestLoads));
    let changes: [Change<'_>; 5] = [
        ("intel-strict", &|guest| guest.map_unmap -= 600.0),
        ("intel-lazy", &|guest| load(guest, Load::Stream, 600.0)),
        ("intel-lazy", &|guest| load(guest, Load::RoundTrip, -1000.0)),
        ("intel-lazy", &|guest| {
            guest.loads.iter_mut().for_each(|(_, one)| one.exits = 2.0);
        }),
        // The devices of QEMU have a baseline of their own.
        ("none-qemu", &|guest| guest.map_unmap += 1000.0),
    ];
    for (index, (name, change)) in changes.into_iter().enumerate() {
        let wrong = changed(name, change);
        assert_eq!(wrong.verdict, Verdict::Differs, "{index}");
    }
}

/// Each order row has the number of its mode, and the difference of its own guests.
#[test]
fn order_rows_have_their_own_numbers() {
    let found = found(Loads::Counted(vec![kernel("6.12")]));
    let rows = found.rows.iter().filter_map(|row| {
        let (what, mode) = row.quantity.split_once(", in place of ")?;
        let printed = row.published.as_ref()?;
        Some((what, mode, row.measured?.median, printed.value))
    });
    let of = |name: &str, what: &str| format!("Linux 6.12, {name}: {what}");
    let mut wanted = Vec::new();
    for (what, [none, riommu, strict, defer], [ring_cost, strict_cost, defer_cost]) in [
        (
            "instructions added to a map and unmap",
            [0.0, 271.0, 3794.0, 1967.0],
            [100.0, 1400.0, 900.0],
        ),
        (
            "instructions added to a datagram of a stream",
            [0.0, 542.0, 8278.0, 4245.0],
            [100.0, 1400.0, 900.0],
        ),
        (
            "exits for the IOMMU added to a datagram of a stream",
            [0.0, 542.0, 8278.0, 4245.0],
            [0.1, 1.4, 0.9],
        ),
        (
            "instructions added to a round trip",
            [0.0, 0.5, 1.7, 1.0],
            [100.0, 1400.0, 900.0],
        ),
    ] {
        wanted.push((of("none", what), "none", 0.0, none));
        wanted.push((of("riommu-burst-paper", what), "riommu", ring_cost, riommu));
        wanted.push((of("intel-strict", what), "strict+", strict_cost, strict));
        wanted.push((of("intel-lazy", what), "defer+", defer_cost, defer));
    }
    let rows: Vec<_> = rows.collect();
    assert_eq!(rows.len(), wanted.len());
    for (row, wanted) in rows.iter().zip(&wanted) {
        assert_eq!((row.0, row.1), (wanted.0.as_str(), wanted.1));
        assert!((row.2 - wanted.2).abs() < 1e-9, "{row:?} {wanted:?}");
        assert!((row.3 - wanted.3).abs() < 1e-9, "{row:?} {wanted:?}");
    }
}

#[test]
fn targets_are_judged() {
    let right = changed("none", |_| ());
    let judged = |found: &Finding, what: &str| -> Vec<Option<bool>> {
        let rows = found.rows.iter().filter(|row| row.quantity.contains(what));
        rows.map(|row| row.holds).collect()
    };
    let what = "riommu-strict: instructions per map and unmap, against the target";
    assert_eq!(judged(&right, what), [Some(true); 2]);
    let slower = changed("riommu-strict", |guest| guest.map_unmap = 301.0);
    assert_eq!(judged(&slower, what), [Some(true), Some(false)]);
    assert_eq!(slower.verdict, Verdict::OrderingOnly);
    // A burst ends after at least 20 unmaps, and reads take at most 3% more than without an IOMMU.
    for (what, load, change) in [
        (
            "riommu-burst: stream, invalidations per unmap",
            2,
            (|one| one.invalidations = 0.051 * one.unmaps.unwrap()) as fn(&mut LoadCounts),
        ),
        (
            "riommu-burst: read-128k, instructions over those of none",
            1,
            |one| one.instructions = 1.031 * 60_000.0,
        ),
    ] {
        let held = changed("riommu-burst", |guest| {
            guest.loads[2].1.invalidations = 0.049 * guest.loads[2].1.unmaps.unwrap();
        });
        assert_eq!(judged(&held, what), [judged(&right, what)[0], Some(true)]);
        let missed = changed("riommu-burst", |guest| change(&mut guest.loads[load].1));
        assert_eq!(judged(&missed, what)[1], Some(false), "{what}");
    }
    let what = "pool: instructions per map and unmap without the copy, against the target";
    assert_eq!(judged(&right, what), [Some(true); 2]);
    let slower = changed("pool", |guest| guest.uncopied = Some(251.0));
    assert_eq!(judged(&slower, what), [Some(true), Some(false)]);
}

/// A strict IOMMU invalidates once for an NVMe read: the data is its only mapping.
#[test]
fn invalidations_of_nvme_reads_are_judged() {
    let what = ": nvme-read-4k, invalidations per read, as expected";
    let names = |found: &Finding, held| -> Vec<String> {
        let rows = found.rows.iter().filter_map(|row| {
            let name = row.quantity.strip_suffix(what)?;
            (row.holds == Some(held)).then(|| name.to_owned())
        });
        rows.collect()
    };
    let strict = ["virtio-strict", "pviommu", "riommu-strict", "intel-strict"];
    let all = ["6.12", "7.2"].map(|kernel| strict.map(|name| format!("Linux {kernel}, {name}")));
    assert_eq!(names(&changed("none", |_| ()), true), all.concat());
    let four = changed("intel-strict", |guest| guest.loads[4].1.invalidations = 4.0);
    assert_eq!(names(&four, false), ["Linux 7.2, intel-strict"]);
    assert_eq!(four.verdict, Verdict::OrderingOnly);
    // A lazy mode is not judged.
    let lazy = changed("intel-lazy", |guest| guest.loads[4].1.invalidations = 4.0);
    assert_eq!(lazy.verdict, Verdict::Reproduced);
}

#[test]
fn promises_are_judged() {
    let what = ", of 1";
    let right = changed("none", |_| ());
    let rows = right.rows.iter().filter(|row| row.quantity.ends_with(what));
    assert_eq!(rows.count(), 2 * PROTECTIONS.len());
    for protection in PROTECTIONS {
        let found = changed(protection.name, |guest| {
            let exposure = guest.exposure.as_mut().unwrap();
            exposure.reached = 1 - exposure.reached;
        });
        // A flush before the access keeps the promise of the lazy mode.
        let wanted = match protection.promise {
            Promise::Lazy => Verdict::Reproduced,
            _ => Verdict::Differs,
        };
        assert_eq!(found.verdict, wanted, "{}", protection.name);
    }
    let twice = changed("virtio-lazy", |guest| {
        guest.exposure.as_mut().unwrap().reached = 2
    });
    assert_eq!(twice.verdict, Verdict::OrderingOnly);
    // A disk that tried nothing has no row.
    let untried = changed("pviommu", |guest| guest.exposure = None);
    let rows = untried
        .rows
        .iter()
        .filter(|row| row.quantity.ends_with(what));
    assert_eq!(rows.count(), 2 * PROTECTIONS.len() - 1);
}

#[test]
fn each_row_of_a_guest_has_its_own_count() {
    let found = found(Loads::Counted(vec![kernel("6.12")]));
    let begin = "Linux 6.12, intel-lazy: ";
    let rows = found.rows.iter().filter_map(|row| {
        let what = row.quantity.strip_prefix(begin)?;
        Some((what.to_owned(), row.measured?.median))
    });
    let mut wanted = vec![("guest instructions per map and unmap".to_owned(), 1048.0)];
    for (load, operation, base) in [
        ("read-4k", "read", 17_000.0),
        ("read-128k", "read", 60_000.0),
        ("stream", "datagram", 5000.0),
        ("round-trip", "round trip", 9000.0),
        ("nvme-read-4k", "read", 20_000.0),
        ("nvme-read-128k", "read", 40_000.0),
    ] {
        let invalidations = match load {
            "nvme-read-4k" => 1.0,
            _ => 0.03,
        };
        for (what, value) in [
            ("guest instructions", base + 900.0),
            ("exits for the IOMMU", 0.9),
            ("exits for the device", base / 7.0),
            ("invalidations", invalidations),
            ("unmaps", 1.8),
        ] {
            wanted.push((format!("{load}, {what} per {operation}"), value));
        }
    }
    let rows: Vec<_> = rows.take(wanted.len()).collect();
    assert_eq!(rows, wanted);
}

/// Rounds that differ by more than the modes decide no order.
#[test]
fn spread_of_the_rounds_decides_no_order() {
    let wide = changed("intel-lazy", |guest| {
        guest
            .loads
            .iter_mut()
            .for_each(|(_, one)| one.spread = 501.0);
    });
    // Of six pairs, the one with strict+ is undecided, for the stream and for round trips.
    let orders = wide.score.orders;
    assert_eq!((orders.held, orders.reversed), (46, 0));
    let spreads = wide.rows.iter().filter_map(|row| {
        let lazy = row.quantity.starts_with("Linux 7.2, intel-lazy: ");
        lazy.then_some(row.measured?.spread)
    });
    // Six loads, and 5 and 9 of the baseline in the rows of the order.
    let spreads: Vec<f64> = spreads.filter(|spread| *spread > 0.0).collect();
    let own = [501.0; 6];
    assert_eq!(spreads, [&own[..], &[506.0, 510.0]].concat());
}

/// A failed guest has a note and no row, and nothing is computed from it.
#[test]
fn failed_guests_have_no_rows() {
    let mut one = kernel("6.12");
    for guest in &mut one.guests {
        if ["none-qemu", "pviommu"].contains(&guest.protection.name) {
            guest.counts = Err("no answer".into());
        }
    }
    let loads = Loads::Counted(vec![one]);
    assert_eq!(loads.failed(), 2);
    let found = found(loads);
    for name in ["none-qemu", "pviommu"] {
        let begin = format!("Linux 6.12, {name}: ");
        assert!(
            !found
                .rows
                .iter()
                .any(|row| row.quantity.starts_with(&begin))
        );
        let note = format!("{begin}failed, no answer.");
        assert!(found.notes.contains(&note), "{name}");
    }
    // Without their baseline, the modes behind QEMU have no position in the order.
    let placed = found.rows.iter().filter(|row| row.group.is_some());
    assert_eq!(placed.count(), 2 * 4);
}
