//! Tests of X02.

use super::*;
use crate::model::printed_crosses;
use crate::timed::with_costs;

#[test]
fn text_on_the_components_follows_from_their_rows() {
    let row = |what: &str, measured| {
        let row = FindingRow::counted(what, "", measured);
        row.with_published(Published::new("2.00", 2.0, "test"))
            .fitted()
    };
    let first = format!("{BY_COMPONENTS}riommu / strict");
    let near = [row(&first, 2.2), row("another", 9.0)];
    let text = by_components(&near);
    assert!(
        text.contains("by 10% at most, so the counts do not"),
        "{text}"
    );
    let text = by_components(&[row(&first, 2.2), row(&first, 1.0)]);
    assert!(
        text.contains("by 50% at most, so counts or components are"),
        "{text}"
    );
}

#[test]
fn every_mode_has_its_cross() {
    let mut setting = Setting::smoke();
    // The first run mostly maps, to fill the rings, and unmaps little.
    setting.runs = 2;
    let found = EXPERIMENT.run(&setting).unwrap();
    let clflush = if WriteBack::Clflush.is_available() {
        6 + 4
    } else {
        0
    };
    assert_eq!(found.rows.len(), 7 + 7 + 1 + 10 + 8 + 2 + clflush + 1);
    // The counts do not depend on execution speed. The rows are not judged: printed numbers go
    // in.
    let structure = found
        .rows
        .iter()
        .filter(|row| row.quantity.starts_with("the paper's components"));
    let near = |row: &FindingRow| (row.ratio.unwrap() - 1.0).abs() <= TOLERANCE;
    assert!(structure.clone().all(near));
    assert!(
        structure
            .clone()
            .all(|row| row.fitted && row.holds.is_none())
    );
    assert_eq!(structure.count(), 8);
    assert_eq!(found.figures[0].series[2].points.len(), 7);
    let none = found
        .rows
        .iter()
        .find(|row| row.quantity == "none: C")
        .unwrap();
    assert_eq!((none.ratio, none.holds), (Some(1.0), None));
    let of = |what: &str| {
        let row = found.rows.iter().find(|row| row.quantity == what);
        row.unwrap().measured.unwrap().median
    };
    // Throughput is proportional to 1 / C.
    for variant in Variant::ALL.map(Variant::name) {
        for baseline in BASELINES.map(Baseline::name) {
            let ratio = of(&format!("throughput, {variant} / {baseline}"));
            let wanted = of(&format!("{baseline}: C")) / of(&format!("{variant}: C"));
            let case = format!("{variant} / {baseline}: {ratio}, not {wanted}");
            assert!((ratio - wanted).abs() < 1e-9, "{case}");
        }
    }
    assert_crosses(&found.rows, &found.figures[0]);
    if WriteBack::Clflush.is_available() {
        assert_clflush(&found.rows);
    }
    // The text has the numbers of the rows.
    let beyond = format!(
        "{:.0} cycles in {AS_PUBLISHED}",
        of("riommu--paper: C beyond that of riommu")
    );
    let slower = format!("{:.0} in riommu-", of("riommu-: C") - of("riommu: C"));
    for text in [beyond, slower] {
        assert!(
            found.explanation.iter().any(|line| line.contains(&text)),
            "{text}: {:?}",
            found.explanation
        );
    }
    // An unprotected packet is the null model of every other C.
    let null = found.rows.iter().find(|row| row.quantity == "strict: C");
    assert_eq!(null.unwrap().null_model.unwrap().value, BASELINE_CYCLES);
}

fn row<'a>(rows: &'a [FindingRow], what: &str) -> &'a FindingRow {
    rows.iter().find(|row| row.quantity == what).unwrap()
}

/// Compares the lines of Fig. 8 with the rows, and the throughput of each row with its C: 1500 x 8
/// x 3.1 / C.
fn assert_crosses(rows: &[FindingRow], figure: &Figure) {
    let names = figure.series.iter().map(|line| line.name.as_str());
    let wanted = [
        "model",
        "packet loop, busy-waiting",
        "modes, measured",
        "modes, paper",
    ];
    assert!(names.eq(wanted));
    let [model, packet_loop, here, paper] = &figure.series[..] else {
        panic!("four lines");
    };
    let modes = [
        "strict", "strict+", "defer", "defer+", "riommu-", "riommu", "none",
    ];
    for (index, mode) in modes.into_iter().enumerate() {
        let cycles = row(rows, &format!("{mode}: C"));
        let speed = row(rows, &format!("{mode}: throughput by the model"));
        let cross = (
            cycles.measured.unwrap().median,
            speed.measured.unwrap().median,
        );
        assert!((cross.1 - 37_200.0 / cross.0).abs() < 1e-9, "{mode}");
        assert_eq!(here.points[index].0, cross.0, "{mode}");
        assert!((here.points[index].1 - cross.1).abs() < 1e-9, "{mode}");
        let printed = printed_crosses()
            .into_iter()
            .find(|(name, _)| *name == mode);
        let (_, printed) = printed.unwrap();
        let printed = (printed.cycles.value, printed.gbps.value);
        assert_eq!(paper.points[index], printed, "{mode}");
        let value = |row: &FindingRow| row.published.as_ref().unwrap().value;
        assert_eq!((value(cycles), value(speed)), printed, "{mode}");
    }
    let off = |points: &[(f64, f64)]| {
        let off = points.iter().map(|(x, y)| (y / (37_200.0 / x) - 1.0).abs());
        off.fold(0.0, f64::max)
    };
    assert!(off(&model.points) < 1e-12);
    assert_eq!(packet_loop.points.len(), 10);
    let worst = row(
        rows,
        "lengthened packet loop: largest deviation from the model",
    );
    let worst = worst.measured.unwrap().median;
    assert!((worst - 100.0 * off(&packet_loop.points)).abs() < 1e-9);
}

/// Compares the rows of CLFLUSH with each other and with those of the usual write-back.
fn assert_clflush(rows: &[FindingRow]) {
    let cycles = |mode: &str| row(rows, &format!("{mode}: C with write-backs by CLFLUSH"));
    for mode in ["strict", "strict+", "defer", "defer+", "riommu-", "riommu"] {
        let usual = row(rows, &format!("{mode}: C")).measured.unwrap();
        // The instruction does not change the number of invalidations.
        let modelled = cycles(mode).measured.unwrap().modelled_part;
        assert_eq!(modelled, usual.modelled_part, "{mode}");
    }
    for mode in ["strict", "strict+", "defer", "defer+"] {
        let ratio = row(rows, &format!("throughput with CLFLUSH, riommu / {mode}"));
        let [one, other] = ["riommu", mode].map(|mode| cycles(mode).measured.unwrap().median);
        let off = ratio.measured.unwrap().median - other / one;
        assert!(off.abs() < 1e-9, "{mode}: {ratio:?}");
        let usual = row(rows, &format!("throughput, riommu / {mode}"));
        let printed = [ratio, usual].map(|row| row.published.as_ref().unwrap().value);
        assert_eq!(printed[0], printed[1], "{mode}");
    }
}

#[test]
fn rows_of_clflush_are_timed_with_clflush() {
    let profile = Profile::r210_2015();
    let names = ["strict", "riommu-", "riommu"];
    for name in names {
        let subject = TimedSubject::from_name(name).unwrap();
        let usual = TimedReplays::new(subject, &profile, 2).unwrap();
        assert_eq!(usual.write_backs(), [WriteBack::best(); 2], "{name}");
    }
    if WriteBack::Clflush.is_available() {
        let timed = clflush_replays(&names, &profile).unwrap();
        assert_eq!(timed.len(), names.len());
        for replays in timed {
            assert_eq!(replays.write_backs(), [WriteBack::Clflush]);
        }
    }
}

#[test]
fn modes_are_in_order_if_their_costs_fall() {
    let setting = Setting {
        repetitions: 4,
        ..Setting::smoke()
    };
    let cost = |repetitions: [f64; 4]| Cost {
        repetitions: repetitions.to_vec(),
        pairs: 1,
        ..Cost::default()
    };
    // The costs of two repetitions fall, those of the third are equal, and those of the last rise.
    let all = HashMap::from([
        ("first", cost([300.0, 9.0, 100.0, 100.0])),
        ("second", cost([200.0, 8.0, 100.0, 200.0])),
        ("third", cost([100.0, 7.0, 100.0, 300.0])),
    ]);
    let row = whole_order(&setting, &["first", "second", "third"], &all);
    assert_eq!(row.measured.unwrap().median, 2.0);
    assert_eq!(row.published.unwrap().value, 4.0);
}

/// Each row follows from the cycles and the invalidations of its own mode.
#[test]
fn each_mode_has_the_cycles_of_its_own_replays() {
    const COSTS: [(&str, f64); 7] = [
        ("strict", 800.0),
        ("strict+", 640.0),
        ("defer", 480.0),
        ("defer+", 320.0),
        ("riommu-", 160.0),
        ("riommu", 80.0),
        (AS_PUBLISHED, 240.0),
    ];
    let mut setting = Setting::smoke();
    setting.profile.invalidation_cycles = 1000;
    let found = with_costs(&COSTS, || EXPERIMENT.run(&setting)).unwrap();
    let [run] = &runs(&setting).unwrap()[..] else {
        panic!("one run");
    };
    let (unmaps, bursts) = (run.plan.unmaps, run.bursts());
    let cycles = |what: &str| row(&found.rows, what).measured.unwrap();
    let per_pair = |count: u64| 1000.0 * count as f64 / run.plan.maps as f64;
    for ((mode, pair), invalidations) in COSTS.into_iter().zip([
        unmaps,
        unmaps,
        unmaps / 250,
        unmaps / 250,
        bursts,
        bursts,
        bursts,
    ]) {
        let mut rows = vec![cycles(&format!("{mode}: C"))];
        if WriteBack::Clflush.is_available() && mode != AS_PUBLISHED {
            rows.push(cycles(&format!("{mode}: C with write-backs by CLFLUSH")));
        }
        for found in rows {
            let parts = (found.measured_part, found.spread);
            assert_eq!(parts, (Some(2.0 * pair), 2.0 * pair / 8.0), "{mode}");
            let off = found.modelled_part.unwrap() - 1816.0 - 2.0 * per_pair(invalidations);
            assert!(off.abs() < 1e-9, "{mode}: {found:?}");
        }
    }
    let beyond = cycles("riommu--paper: C beyond that of riommu").median;
    assert!((beyond - 2.0 * (240.0 - 80.0)).abs() < 1e-9, "{beyond}");
    let order = found.rows.iter();
    let mut order = order.filter(|row| row.quantity.starts_with("repetitions in which all modes"));
    assert_eq!(order.next().unwrap().measured.unwrap().median, 1.0);
    // The text has the modelled shares of its modes.
    let share = |mode: &str| {
        let found = cycles(&format!("{mode}: C"));
        100.0 * found.modelled_part.unwrap() / found.median
    };
    let [strict, plus, riommu] = ["strict", "strict+", "riommu"].map(share);
    let text =
        format!("Of C, {strict:.0}% in strict, {plus:.0}% in strict+ and {riommu:.0}% in riommu ");
    assert!(
        found.explanation.iter().any(|line| line.starts_with(&text)),
        "{text}"
    );
}
