//! Tests of the rows of the remedies.

use super::super::machine::rate;
use super::super::modes::{axes, costs, mode};
use super::*;
use crate::finding::Requirement;

/// The remedies of the slides, and the modes that run them.
#[rustfmt::skip]
const SLIDES: [(&str, &str); 12] = [
    ("straightforward hypercalls", "xen"),
    ("multicalls", "xen-multicall"),
    ("deferred TCE flush", "xen-lazy"),
    ("deferred TCE flush, multicalls",
        "alloc=bitmap,table=flat,flush=per-wrap,owner=xen-multicall"),
    ("batched unmaps with multicalls",
        "alloc=bitmap,table=flat,flush=burst,owner=xen-multicall"),
    ("cache of mappings", "alloc=linux-rcache,table=flat,flush=map-cache,owner=xen"),
    ("cache of mappings, multicalls",
        "alloc=linux-rcache,table=flat,flush=map-cache,owner=xen-multicall"),
    ("never free", "alloc=linux-rcache,table=flat,flush=never-free,owner=xen"),
    ("never free, multicalls",
        "alloc=linux-rcache,table=flat,flush=never-free,owner=xen-multicall"),
    ("grant table integration", "xen-grant"),
    ("whole guest in advance", "alloc=identity,table=static-flat,flush=never,owner=xen"),
    ("no IOMMU", "none"),
];

/// Drivers of the slides, each in its mode. The counts of 512 frames and 256 acknowledgements:
/// crossings at open, then crossings, flushes and reached buffers of 768 pairs.
#[rustfmt::skip]
const OF_DRIVERS: [(&str, Driver, &str, [f64; 4]); 3] = [
    ("persistent allocation", Driver::Persistent, "xen", [576.0, 0.0, 0.0, 768.0]),
    ("map_multi and unmap_multi", Driver::Batches, "xen", [264.0, 1536.0, 64.0, 0.0]),
    ("map_multi and unmap_multi, multicalls", Driver::Batches, "xen-multicall",
        [17.0, 128.0, 64.0, 0.0]),
];

#[test]
fn remedies_and_drivers_run_the_modes_of_their_names() {
    assert_eq!(REMEDIES, SLIDES);
    let drivers = OF_DRIVERS.map(|(name, driver, mode, _)| (name, driver, mode));
    assert_eq!(DRIVERS, drivers);
    let found = costs(REMEDIES, &Profile::r210_2015(), 64, 0).unwrap();
    let ran = found.into_iter().map(|(name, cost)| (name, cost.ran));
    let wanted = SLIDES.map(|(name, of)| (name, Some(axes(&mode(of).unwrap()))));
    assert_eq!(ran.collect::<Vec<_>>(), wanted);
}

/// A row: quantity, value, modelled part, and the requirement with the number of the slides.
type RemedyRow = (String, f64, Option<f64>, Option<(Requirement, f64)>);

/// The rows of `found`, in order.
fn rows(found: &Findings) -> Vec<RemedyRow> {
    let row = |row: &FindingRow| {
        let measured = row.measured.unwrap();
        let printed = row.published.as_ref();
        (
            row.quantity.clone(),
            measured.median,
            measured.modelled_part,
            printed.map(|printed| (row.requirement, printed.value)),
        )
    };
    found.rows.iter().map(row).collect()
}

fn assert_same(found: &[RemedyRow], wanted: &[RemedyRow]) {
    for (found, wanted) in found.iter().zip(wanted) {
        let near = (found.1 - wanted.1).abs() < 1e-9 * wanted.1.abs().max(1.0);
        assert!(near, "{found:?}, not {wanted:?}");
        assert_eq!(
            (&found.0, found.2, found.3),
            (&wanted.0, wanted.2, wanted.3),
            "{wanted:?}"
        );
    }
    assert_eq!(found.len(), wanted.len());
}

/// A cost whose numbers all differ from those of other indices.
fn cost_by_hand(index: usize) -> ModeCost {
    let unit = (index + 1) as f64;
    ModeCost {
        measured: 100.0 * unit,
        spread: 10.0,
        flushes: 2000.0 + 30.0 * unit,
        crossings: 500.0 + 7.0 * unit,
        crossed: 0.01 * unit,
        flushed: 0.002 * unit,
        reached: 40 + index as u64,
        window_ns: 1_000_000 * (index as u64 + 1),
        ran: None,
    }
}

/// Each remedy has the rows of its own cost, and what the slides say about it.
#[test]
fn rows_of_the_remedies_follow_from_their_costs() {
    use Requirement::{AtLeast, AtMost, Exact};
    let by_remedy: Vec<_> = (0..12)
        .map(|index| (SLIDES[index].0, cost_by_hand(index)))
        .collect();
    let mut found = Findings::with_method("test");
    add(&mut found, &by_remedy);
    let mut wanted = Vec::new();
    for (name, cost) in by_remedy {
        let crossings = match name {
            // As many as the straightforward hypercalls.
            "multicalls" => Some((Exact, 0.01)),
            "cache of mappings"
            | "cache of mappings, multicalls"
            | "never free"
            | "never free, multicalls" => Some((AtMost, 1.0)),
            _ => None,
        };
        let reached = match name {
            "straightforward hypercalls" => Some((Exact, 0.0)),
            "whole guest in advance"
            | "deferred TCE flush"
            | "deferred TCE flush, multicalls"
            | "never free"
            | "never free, multicalls" => Some((AtLeast, 1.0)),
            _ => None,
        };
        let mut row = |what: &str, value, modelled, printed| {
            wanted.push((format!("{name}: {what}"), value, modelled, printed));
        };
        row("crossings per pair", cost.crossed, None, crossings);
        row("flushes per pair", cost.flushed, None, None);
        let modelled = cost.flushes + cost.crossings;
        let cycles = cost.measured + modelled;
        row("cycles of a map and an unmap", cycles, Some(modelled), None);
        for scenario in [Scenario::DirectAccess, Scenario::DriverDomain] {
            // A driver domain crosses for its grants without an IOMMU too, and dom0 maps none.
            let added = 1.5
                * match name {
                    "grant table integration" => cost.measured + cost.flushes,
                    _ => cycles,
                };
            if name == "grant table integration" && scenario == Scenario::DirectAccess {
                continue;
            }
            let [off, on] = [0.0, added].map(|added| rate(scenario, 64, added, 1.0).mbps);
            let lost = 100.0 * (1.0 - on / off);
            let [off, on] = [0.0, added].map(|added| rate(scenario, 16_384, added, 1.0).busy);
            let more = 100.0 * (on / off - 1.0);
            let scenario = scenario.name();
            let what = format!("{scenario}: throughput lost at 64 bytes");
            row(&what, lost, None, None);
            let what = format!("{scenario}: more processor use at 16 KiB");
            row(&what, more, None, None);
        }
        let what = "attackers' accesses let through";
        row(what, cost.reached as f64, None, reached);
        let window = cost.window_ns as f64 / 1e6;
        row("longest time reachable after the unmap", window, None, None);
        if name == "whole guest in advance" {
            // Of 8 x 1448 cycles.
            let share = 100.0 * 1.5 * cycles / 11_584.0;
            let printed = Some((AtMost, 1.0));
            row("cycles at run time, of a frame", share, None, printed);
        }
    }
    assert_same(&rows(&found), &wanted);
}

/// Each driver has the rows of its own counts, with the profile's cycles.
#[test]
fn rows_of_the_drivers_follow_from_their_counts() {
    use Requirement::{AtMost, Exact};
    let profile = Profile::r210_2015();
    let mut found = Findings::with_method("test");
    add_drivers(&mut found, &profile, 512).unwrap();
    let mut wanted = Vec::new();
    for (name, _, _, [at_open, crossings, flushes, reached]) in OF_DRIVERS {
        let [crossed, flushed] = [crossings, flushes].map(|count| count / 768.0);
        let printed = match name {
            "persistent allocation" => Some((Exact, 0.0)),
            "map_multi and unmap_multi, multicalls" => Some((AtMost, 1.0)),
            _ => None,
        };
        let cycles = crossed * 1228.0 + flushed * 2150.0;
        for (what, value, printed) in [
            ("crossings per pair", crossed, printed),
            ("crossings at open", at_open, None),
            ("flushes per pair", flushed, None),
            ("modelled cycles of a map and an unmap", cycles, None),
            ("attackers' accesses let through", reached, None),
        ] {
            wanted.push((format!("{name}: {what}"), value, None, printed));
        }
    }
    assert_same(&rows(&found), &wanted);
}
