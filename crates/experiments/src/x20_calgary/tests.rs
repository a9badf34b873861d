//! Tests of X20.

use super::modes::cost;
use super::*;
use crate::experiment::Experiment;
use crate::finding::Requirement;
use crate::setting::Setting;

#[test]
fn rows_are_judged_against_the_slides_and_the_remedies_keep_their_promises() {
    let setting = Setting {
        repetitions: 0,
        ..Setting::smoke()
    };
    let found = Experiment::find("X20").unwrap().run(&setting).unwrap();
    // Every cell of the slides about throughput or processors is judged or excluded by them.
    let judged = |of: &str| {
        let rows = found.rows.iter().filter(|row| row.holds.is_some());
        rows.filter(|row| row.quantity.starts_with(of)).count()
    };
    assert_eq!(judged("bare metal"), 3);
    assert_eq!(judged("direct access (dom0)"), 4);
    assert_eq!(judged("driver domain (domU via dom0)"), 3);
    // The promises that depend on counts alone hold.
    let row = |what: &str| found.rows.iter().find(|row| row.quantity == what).unwrap();
    for what in [
        "straightforward hypercalls: attackers' accesses let through",
        "whole guest in advance: attackers' accesses let through",
        "deferred TCE flush: attackers' accesses let through",
        "multicalls: crossings per pair",
        "cache of mappings: crossings per pair",
        "cache of mappings, multicalls: crossings per pair",
        "never free: crossings per pair",
        "never free: attackers' accesses let through",
        "never free, multicalls: attackers' accesses let through",
        "persistent allocation: crossings per pair",
        "map_multi and unmap_multi, multicalls: crossings per pair",
        "whole guest in advance: cycles at run time, of a frame",
    ] {
        assert_eq!(row(what).holds, Some(true), "{:?}", row(what));
        assert_ne!(row(what).requirement, Requirement::Shown, "{what}");
    }
    // Of the models of virtual I/O, only an IOMMU stops a hostile owner of the device.
    for (model, open) in [
        ("front and back drivers", true),
        ("direct access, no IOMMU", true),
        ("direct access", false),
        ("driver domain", false),
    ] {
        let row = row(&format!("model {model}: attackers' accesses let through"));
        assert_eq!(row.measured.unwrap().median > 0.0, open, "{row:?}");
    }
    let prefix = "model emulation: attackers";
    assert!(
        !found
            .rows
            .iter()
            .any(|row| row.quantity.starts_with(prefix))
    );
    // Three scenarios, two plots each, with two lines over 15 message sizes. The interfaces
    // have one figure. The disk has as many as the network, over six sizes of commands.
    assert_eq!(found.figures.len(), 7 + 6);
    let network = found.figures[..6].iter().map(|figure| (figure, 15));
    let disk = found.figures[7..].iter().map(|figure| (figure, 6));
    for (figure, points) in network.chain(disk) {
        assert_eq!(figure.series.len(), 2);
        let counts = figure.series.iter().map(|line| line.points.len());
        assert!(
            counts.into_iter().all(|count| count == points),
            "{figure:?}"
        );
    }
    assert_eq!(
        Scenario::ALL.map(Scenario::mode),
        ["calgary-lazy", "xen", "xen"]
    );
    // Linux as merged on bare metal, and the straightforward hypercalls behind Xen.
    let profile = profile(&setting.profile);
    let costs = ["calgary-lazy", "xen", "xen"];
    let costs = costs.map(|mode| cost(mode, &profile, setting.packets, 0).unwrap());
    assert_scenarios(&found.rows, &found.figures, &costs);
    // Throughput and processor use, random and sequential, judged for each scenario.
    for name in Scenario::ALL.map(Scenario::name) {
        assert_eq!(judged(&format!("disk, {name}, ")), 4, "{name}");
    }
}

#[test]
fn an_iommu_costs_small_messages_throughput_and_large_ones_processor() {
    let small = overhead(Scenario::DirectAccess, 64, 10_000.0, 1.0);
    assert!(small.lost > 30.0, "{small:?}");
    let large = overhead(Scenario::DirectAccess, 65536, 10_000.0, 1.0);
    assert!(large.lost < 1.0 && large.more > 30.0, "{large:?}");
    let behind = overhead(Scenario::DriverDomain, 64, 10_000.0, 1.0);
    assert!(behind.lost < small.lost, "{behind:?}");
    assert_eq!(
        overhead(Scenario::BareMetal, 64, 0.0, 1.0),
        Overhead {
            lost: 0.0,
            more: 0.0
        }
    );
}

/// The message sizes of the plots.
const SIZES: [u64; 15] = [
    64, 128, 256, 512, 1024, 1460, 1480, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144,
];

/// A judged row: scenario, row, message sizes, metric, requirement and number of the slides.
type JudgedRow = (
    Scenario,
    &'static str,
    &'static [u64],
    Metric,
    Requirement,
    f64,
);

/// The judged rows of the network.
#[rustfmt::skip]
const JUDGED: [JudgedRow; 10] = {
    use {Metric::{Processor, Throughput}, Requirement::{AtLeast, AtMost, Near}};
    use Scenario::{BareMetal, DirectAccess, DriverDomain};
    const SMALL: &[u64] = &[64, 128, 256, 512];
    const LARGE: &[u64] = SIZES.split_at(4).1;
    const BELOW_512: &[u64] = &[64, 128, 256];
    const FROM_512: &[u64] = SIZES.split_at(3).1;
    let reaches = "more processor use reaches the printed range";
    [
        (BareMetal, "throughput lost, at most", &SIZES, Throughput, AtMost, 5.0),
        (BareMetal, "more processor use, at most", &SIZES, Processor, AtMost, 30.0),
        (BareMetal, reaches, &SIZES, Processor, AtLeast, 15.0),
        (DirectAccess, "throughput lost below 1024 bytes", SMALL, Throughput, Near, 45.0),
        (DirectAccess, "throughput lost from 1024 bytes", LARGE, Throughput, AtMost, 5.0),
        (DirectAccess, "more processor use from 1024 bytes", LARGE, Processor, AtMost, 60.0),
        (DirectAccess, reaches, LARGE, Processor, AtLeast, 40.0),
        (DriverDomain, "throughput lost below 512 bytes", BELOW_512, Throughput, Near, 15.0),
        (DriverDomain, "throughput lost from 512 bytes", FROM_512, Throughput, AtMost, 5.0),
        (DriverDomain, "more processor use from 512 bytes", FROM_512, Processor, Near, 40.0),
    ]
};

/// Compares the rows and the first six figures with the rates at `costs`, which are those of bare
/// metal, of direct access and of the driver domain.
fn assert_scenarios(rows: &[FindingRow], figures: &[Figure], costs: &[ModeCost; 3]) {
    let added = |scenario: Scenario| {
        let cost = &costs[scenario as usize];
        // A frame has its buffer and half of an acknowledgement.
        1.5 * (cost.measured + cost.flushes + cost.crossings)
    };
    let most = |scenario, sizes: &[u64], metric, factor| {
        let values = sizes.iter().map(|&message| {
            let off = rate(scenario, message, 0.0, factor);
            let on = rate(scenario, message, added(scenario), factor);
            match metric {
                Metric::Throughput => 100.0 * (1.0 - on.mbps / off.mbps),
                Metric::Processor => 100.0 * (on.busy / off.busy - 1.0),
            }
        });
        values.fold(f64::NEG_INFINITY, f64::max)
    };
    let row = |scenario: Scenario, what: &str| {
        let what = format!("{}: {what}", scenario.name());
        rows.iter().find(|row| row.quantity == what).unwrap()
    };
    let near = |row: &FindingRow, wanted: f64| {
        let off = row.measured.unwrap().median - wanted;
        assert!(off.abs() < 1e-9, "{row:?}, not {wanted}");
    };
    for (scenario, what, sizes, metric, requirement, printed) in JUDGED {
        let row = row(scenario, what);
        near(row, most(scenario, sizes, metric, 1.0));
        assert_eq!(row.requirement, requirement, "{row:?}");
        assert_eq!(row.published.as_ref().unwrap().value, printed, "{row:?}");
    }
    let mut figures = figures.iter();
    for scenario in [
        Scenario::BareMetal,
        Scenario::DirectAccess,
        Scenario::DriverDomain,
    ] {
        for (text, factor) in [("0.5", 0.5), ("1", 1.0), ("2", 2.0)] {
            for (what, metric) in [
                ("throughput lost", Metric::Throughput),
                ("more processor use", Metric::Processor),
            ] {
                let row = row(scenario, &format!("{what}, with native work x{text}"));
                near(row, most(scenario, &SIZES, metric, factor));
            }
        }
        for (title, y, metric) in [
            ("Throughput", "Mb/s", Metric::Throughput),
            ("CPU use", "% of a processor", Metric::Processor),
        ] {
            let figure = figures.next().unwrap();
            assert_eq!(figure.title, format!("{}: {title}", scenario.name()));
            assert_eq!((figure.y, figure.log_x), (y, true));
            let line = |name: &str, added| {
                let points = SIZES.map(|message| {
                    let rate = rate(scenario, message, added, 1.0);
                    let value = match metric {
                        Metric::Throughput => rate.mbps,
                        Metric::Processor => 100.0 * rate.busy,
                    };
                    (message as f64, value)
                });
                Series::line(name, points.to_vec())
            };
            let lines = [line("IOMMU off", 0.0), line("IOMMU on", added(scenario))];
            assert_eq!(figure.series, lines, "{}", figure.title);
        }
    }
}

fn cost_by_hand(measured: f64, flushes: f64, crossings: f64) -> ModeCost {
    ModeCost {
        measured,
        spread: 0.1 * measured,
        flushes,
        crossings,
        crossed: 0.0,
        flushed: 0.0,
        reached: 0,
        window_ns: 0,
        ran: None,
    }
}

/// The modes of the other test cost bare metal nothing without timed repetitions.
#[test]
fn rows_and_plots_of_the_scenarios_follow_from_their_costs() {
    let costs = [
        cost_by_hand(700.0, 300.0, 0.0),
        cost_by_hand(900.0, 6320.0, 2456.0),
        cost_by_hand(1100.0, 3160.0, 1228.0),
    ];
    let mut found = Findings::with_method("test");
    let sheet = Sheet::named("calgary_results").unwrap();
    let scenarios_costs: Vec<_> = Scenario::ALL.into_iter().zip(costs).collect();
    scenarios(&mut found, &scenarios_costs, &sheet).unwrap();
    assert_eq!(found.figures.len(), 6);
    assert_scenarios(&found.rows, &found.figures, &costs);
    let spread = |what: &str| {
        let row = found.rows.iter().find(|row| row.quantity == what);
        row.unwrap().measured.unwrap().spread
    };
    // 1.5 times the spread of a pair, of 11,584 native cycles.
    let wanted = 100.0 * 1.5 * 70.0 / 11_584.0;
    assert!((spread("bare metal: throughput lost, at most") - wanted).abs() < 1e-9);
}

/// With repetitions, the cycles of the layer and of the hypervisor's code count. Bare metal pays
/// for nothing else.
#[test]
fn cycles_are_measured_in_repetitions() {
    let found = measure(&Setting::smoke().profile, 64, 1).unwrap();
    let row = |what: &str| {
        let row = found.rows.iter().find(|row| row.quantity == what);
        row.and_then(|row| row.measured).expect(what)
    };
    for (name, _) in REMEDIES {
        // Two of them do nothing at a map or an unmap.
        if !["whole guest in advance", "no IOMMU"].contains(&name) {
            let cycles = row(&format!("{name}: cycles of a map and an unmap"));
            assert!(cycles.measured_part.unwrap() > 0.0, "{name}: {cycles:?}");
        }
    }
    let bare = row("bare metal: more processor use, at most");
    assert!(bare.median > 0.0, "{bare:?}");
}

/// Each model of virtual I/O has the rate of its own work: behind an IOMMU with the cost of the
/// straightforward hypercalls, and in emulation with its counted exits at both costs of an exit.
#[test]
fn rows_of_the_models_follow_from_their_work() {
    let straight = cost_by_hand(900.0, 6320.0, 2456.0);
    let attacked = |reached| ModeCost {
        reached,
        ..cost_by_hand(1.0, 2.0, 3.0)
    };
    let by_remedy = [
        ("straightforward hypercalls", straight),
        ("no IOMMU", attacked(7)),
        ("grant table integration", attacked(5)),
    ];
    let mut found = Findings::with_method("test");
    virtual_io(&mut found, &by_remedy).unwrap();
    let value = |what: &str| {
        let row = found.rows.iter().find(|row| row.quantity == what);
        row.unwrap_or_else(|| panic!("{what}"))
            .measured
            .unwrap()
            .median
    };
    let near = |what: &str, wanted: f64| {
        let here = value(what);
        assert!(
            (here - wanted).abs() < 1e-9 * wanted.abs(),
            "{what}: {here}"
        );
    };
    // A message of 1460 bytes takes two frames: cycles of a bit without protection, and a byte
    // copied each. The maps of a frame are one and a half.
    let native = 2.0 * (8.0 * 1448.0 - 1448.0) + 1460.0;
    let added = 1.5 * (900.0 + 6320.0 + 2456.0);
    let [driver, both] = [0.93 / 1.35, 0.39 / 1.18].map(|share| native / share);
    let guest = both - driver;
    let assert_model = |name: &str, work: [f64; 2]| {
        let rate = machine::Rate::of(1460, work);
        near(
            &format!("model {name}: throughput at 1460 bytes"),
            rate.mbps,
        );
        let busy = format!("model {name}: processor use at 1460 bytes");
        near(&busy, 100.0 * rate.busy);
    };
    assert_model("front and back drivers", [driver, guest]);
    assert_model("driver domain", [driver + 2.0 * added, guest]);
    assert_model("direct access, no IOMMU", [driver, 0.0]);
    assert_model("direct access", [driver + 2.0 * added, 0.0]);
    for coalesced in [1, 44] {
        let exits = emulation::count(coalesced, 2000).unwrap().per_frame();
        near(
            &format!("emulation, {coalesced} frames an interrupt: exits of a frame"),
            exits,
        );
        for cycles in [2000.0, 20_000.0] {
            let host = native + 1460.0 + 2.0 * exits * cycles;
            let with = format!("{coalesced} frames an interrupt, {cycles} cycles an exit");
            assert_model(&format!("emulation, {with}"), [host, native]);
        }
    }
    for (name, reached) in [
        ("front and back drivers", 7.0),
        ("direct access, no IOMMU", 7.0),
        ("direct access", 0.0),
        ("driver domain", 5.0),
    ] {
        let what = format!("model {name}: attackers' accesses let through");
        assert_eq!(value(&what), reached, "{name}");
    }
}
