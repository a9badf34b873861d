//! Tests of X17.

use super::*;
use ringfence_lab::meter::Components;

/// Packets take 1816 + 2 x (20 + 30 + 42) = 2000 cycles with the fix, and
/// 1816 + 2 x (20 + 1030 + 42) = 4000 as published.
#[test]
fn fewer_cycles_of_an_unmap_are_a_gain() {
    let cycles = |unmap_table| Cycles {
        map_table: 20.0,
        unmap_table,
        ..Cycles::default()
    };
    let [fixed, as_published] = [cycles(30.0), cycles(1030.0)];
    assert_eq!(gain(&fixed, &as_published, 42.0), 2.0);
    assert_eq!(gain(&as_published, &fixed, 42.0), 0.5);
}

#[test]
fn text_agrees_with_the_numbers() {
    let text = saved_by("CLWB", 8.6, 1.001, 3000.0);
    assert!(
        text.contains("saves 9 cycles at each unmap, 0.1 for"),
        "{text}"
    );
    assert!(
        text.contains("lines, no more than the paper's 159"),
        "{text}"
    );
    assert!(
        text.ends_with("1.00, no more than the paper's 1.76."),
        "{text}"
    );
    let text = saved_by("CLFLUSH", 63_000.0, 4.0, 3000.0);
    assert!(text.contains("lines, more than the paper's 159"), "{text}");
    assert!(
        text.ends_with("4.00, more than the paper's 1.76."),
        "{text}"
    );
}

/// A neighbour keeps the leaf table of almost every page from becoming empty.
#[test]
fn an_unmap_writes_back_a_page_as_published_and_a_line_if_fixed() {
    let mut setting = Setting::smoke();
    setting.runs = 2;
    let runs = runs(&setting).unwrap();
    let fixed = counts(&runs, None).unwrap();
    let mut found = Findings::default();
    counted(&runs, &mut found).unwrap();
    let [whole_page, entry, nodes] = found.rows.as_slice() else {
        panic!("{found:?}");
    };
    let row = |row: &FindingRow, what: &str, printed: f64| {
        assert_eq!(row.quantity, what);
        assert_eq!(row.published.as_ref().unwrap().value, printed, "{what}");
        assert!(row.holds.is_some(), "{what}");
        row.measured.unwrap().median
    };
    let lines = row(whole_page, "unmap as published: lines written back", 64.0);
    assert!((64.0..65.0).contains(&lines), "{lines}");
    let lines = row(entry, "unmap fixed: lines written back", 1.0);
    assert!((1.0..1.1).contains(&lines), "{lines}");
    assert_eq!(lines, fixed.lines);
    // The tree does not depend on the table.
    let visited = row(nodes, "map: nodes visited per allocation", 11.0);
    assert_eq!(visited, fixed.nodes);
    assert!((1.0..20.0).contains(&visited), "{visited}");
}

/// Components of 10, 20, 30, 40, 50 and 60 cycles, scaled, with an error of a tenth of a scale.
fn parts(mode: &str, scale: f64) -> Column {
    let parts = Components {
        cycles: Cycles {
            map_iova_alloc: 10.0 * scale,
            map_table: 20.0 * scale,
            unmap_iova_find: 30.0 * scale,
            unmap_iova_free: 40.0 * scale,
            unmap_table: 50.0 * scale,
            ..Cycles::default()
        },
        measured: scale,
        order_spread: 0.1,
        ..Components::default()
    };
    Column {
        mode: mode.into(),
        parts,
        invalidations: 1.0,
        layer: "",
        coherencies: Vec::new(),
    }
}

/// Results of each mode are found by the name of the mode: 40 units for FreeBSD as published, 4
/// for the fix and 1 for Linux.
fn scale(mode: &str) -> Result<f64, LabError> {
    match mode {
        "freebsd-paper" => Ok(40.0),
        "freebsd" => Ok(4.0),
        "strict+" => Ok(1.0),
        _ => Err(LabError::NoSuchMode(mode.into())),
    }
}

/// Asserts the rows of `found`: quantity, median, spread, and published number.
fn assert_rows(found: &Findings, wanted: &[(&str, f64, f64, Option<f64>)]) {
    assert_eq!(found.rows.len(), wanted.len(), "{found:?}");
    for (row, (what, median, spread, printed)) in found.rows.iter().zip(wanted) {
        assert_eq!(row.quantity, *what);
        let measured = row.measured.unwrap();
        let near = |one: f64, other: f64| (one - other).abs() < 1e-9;
        assert!(
            near(measured.median, *median),
            "{what}: {measured:?}, not {median}"
        );
        assert!(
            near(measured.spread, *spread),
            "{what}: {measured:?}, not {spread}"
        );
        let published = row.published.as_ref().map(|printed| printed.value);
        assert_eq!(published, *printed, "{what}");
    }
}

/// A map takes 30 units and an unmap 120 units and 2000 cycles.
#[test]
fn rows_have_the_components_of_their_system() {
    let systems = Systems::each(|mode| Ok(parts(mode, scale(mode)?))).unwrap();
    let mut found = Findings::default();
    table_3(&systems, 2000.0, &mut found).unwrap();
    let table = [
        ("map: iova", 400.0, 4.0, Some(1103.0)),
        ("map: all the rest", 800.0, 4.0, Some(8557.0)),
        ("map: total", 1200.0, 4.0, Some(9660.0)),
        ("unmap: iova", 2800.0, 4.0, Some(2178.0)),
        ("unmap: all the rest", 4000.0, 4.0, Some(13_825.0)),
        ("unmap: total", 6800.0, 4.0, Some(16_003.0)),
    ];
    assert_rows(&found, &table);
    found.rows.clear();
    saving(&systems, 2000.0, &mut found).unwrap();
    let [pub_pair, fixed_pair, linux_pair] = [8000.0, 2600.0, 2150.0];
    let gain = (1816.0 + 2.0 * pub_pair) / (1816.0 + 2.0 * fixed_pair);
    let slower = pub_pair / linux_pair;
    let slower_spread = slower * (4.0 / pub_pair + 0.1 / linux_pair);
    let rows = [
        ("unmap: saved by the fix", 4320.0, 4.4, Some(10_000.0)),
        ("map and unmap: total, fixed", fixed_pair, 0.4, None),
        (
            "throughput: fixed over as published",
            gain,
            gain * 4.0 / pub_pair,
            Some(935.0 / 530.0),
        ),
        (
            "map and unmap: FreeBSD over Linux",
            slower,
            slower_spread,
            Some(4.0),
        ),
    ];
    assert_rows(&found, &rows);
    let judged = found.rows.iter().filter(|row| row.holds.is_some());
    assert_eq!(judged.count(), 3);
    found.rows.clear();
    charged(&systems.as_published, 2000.0, &mut found).unwrap();
    let what = "unmap: total, with 63 lines at a declared 159 cycles each";
    assert_rows(&found, &[(what, 16_800.0, 0.0, Some(16_003.0))]);
    assert!(found.rows[0].fitted);
}

/// Each system has the meter of its mode: FreeBSD's allocator with its table, and Linux's with
/// freelists.
#[test]
fn each_system_is_metered_in_its_mode() {
    let mut setting = Setting::smoke();
    setting.packets = 256;
    let runs = runs(&setting).unwrap();
    let found = systems(&setting, &runs).unwrap();
    for (column, name, tree, reclaims) in [
        (&found.as_published, "freebsd-paper", "::FreeBsdTree", true),
        (&found.fixed, "freebsd", "::FreeBsdTree", true),
        (&found.linux, "strict+", "::Eiovar<", false),
    ] {
        assert_eq!(column.mode, name);
        assert!(column.layer.contains(tree), "{name}: {}", column.layer);
        let reclaiming = column.layer.contains("Reclaiming");
        assert_eq!(reclaiming, reclaims, "{name}: {}", column.layer);
    }
}

/// With CLFLUSH, too, each system is replayed in its mode.
#[test]
fn each_system_is_timed_in_its_mode_with_clflush() {
    if !WriteBack::Clflush.is_available() {
        return;
    }
    let mut setting = Setting::smoke();
    setting.packets = 256;
    let runs = runs(&setting).unwrap();
    let timed = clflush_replays(&setting).unwrap();
    for replays in &timed {
        assert_eq!(replays.write_backs(), [WriteBack::Clflush]);
    }
    let costs = clflush_costs(timed, &runs).unwrap();
    let ran = costs.into_iter().map(|(name, cost)| (name, cost.subject));
    let wanted = ["freebsd-paper", "freebsd", "strict+"]
        .map(|name| (name, Some(TimedSubject::from_name(name).unwrap())));
    assert_eq!(ran.collect::<Vec<_>>(), wanted);
}

/// 10 maps and unmaps with an invalidation of 2150 cycles each.
#[test]
fn rows_with_clflush_have_the_cost_of_their_mode() {
    let cost = |mode: &'static str| {
        let cycles = 100.0 * scale(mode).unwrap();
        let cost = Cost {
            measured: 10.0 * cycles,
            repetitions: vec![10.0 * cycles; 2],
            spread: cycles,
            invalidations: 10,
            pairs: 10,
            ..Cost::default()
        };
        (mode, cost)
    };
    let mut found = Findings::default();
    clflush_rows(&MODES.map(cost), &Profile::r210_2015(), &mut found).unwrap();
    let [as_published, fixed, linux] = [6150.0, 2550.0, 2250.0];
    let gain = (1816.0 + 2.0 * as_published) / (1816.0 + 2.0 * fixed);
    let slower = as_published / linux;
    let slower_spread = slower * (400.0 / as_published + 10.0 / linux);
    let rows = [
        (
            "freebsd-paper: map and unmap with CLFLUSH",
            as_published,
            400.0,
            None,
        ),
        ("freebsd: map and unmap with CLFLUSH", fixed, 40.0, None),
        ("strict+: map and unmap with CLFLUSH", linux, 10.0, None),
        (
            "map and unmap with CLFLUSH: saved by the fix",
            3600.0,
            440.0,
            Some(10_000.0),
        ),
        (
            "throughput with CLFLUSH: fixed over as published",
            gain,
            0.0,
            Some(935.0 / 530.0),
        ),
        (
            "map and unmap with CLFLUSH: FreeBSD over Linux",
            slower,
            slower_spread,
            Some(4.0),
        ),
    ];
    assert_rows(&found, &rows);
}

#[test]
fn components_add_up_and_the_text_has_the_saving() {
    let mut setting = Setting::smoke();
    setting.runs = 2;
    let found = EXPERIMENT.run(&setting).unwrap();
    let of = |what: &str| {
        let row = found.rows.iter().find(|row| row.quantity == what);
        row.and_then(|row| row.measured).unwrap()
    };
    for operation in ["map", "unmap"] {
        let parts = ["iova", "all the rest"].map(|part| of(&format!("{operation}: {part}")).median);
        let total = of(&format!("{operation}: total")).median;
        assert!((parts[0] + parts[1] - total).abs() < 1e-6, "{operation}");
    }
    assert_eq!(of("unmap: total").modelled_part, Some(2150.0));
    // The lines that FreeBSD writes back as published cost the saving that the paper prints.
    let charged = of("unmap: total, with 63 lines at a declared 159 cycles each").median;
    let lines = charged - of("unmap: total").median;
    assert!((lines - 10_000.0).abs() < 1e-6, "{lines}");
    // C is 1816 cycles and two pairs; throughput is proportional to 1 / C.
    let as_published = of("map: total").median + of("unmap: total").median;
    let [fixed, as_published] =
        [of("map and unmap: total, fixed").median, as_published].map(|pair| 1816.0 + 2.0 * pair);
    let gain = of("throughput: fixed over as published").median;
    let wanted = as_published / fixed;
    assert!((gain - wanted).abs() < 1e-9, "{gain}, not {wanted}");
    let saved = format!(
        "the fix saves {:.0} cycles",
        of("unmap: saved by the fix").median
    );
    assert!(
        found.explanation.iter().any(|text| text.contains(&saved)),
        "{saved}"
    );
    let clflush = found
        .rows
        .iter()
        .filter(|row| row.quantity.contains("CLFLUSH"));
    let rows = clflush.count();
    assert_eq!(found.rows.len(), 14 + rows);
    if !WriteBack::Clflush.is_available() {
        assert_eq!(rows, 0);
        return;
    }
    assert_eq!(rows, 6);
    let [as_published, fixed, linux] =
        MODES.map(|mode| of(&format!("{mode}: map and unmap with CLFLUSH")));
    for mode in [as_published, fixed, linux] {
        assert_eq!(mode.modelled_part, Some(2150.0));
    }
    let saved = of("map and unmap with CLFLUSH: saved by the fix").median;
    assert!(
        (saved - (as_published.median - fixed.median)).abs() < 1e-6,
        "{saved}"
    );
    let slower = of("map and unmap with CLFLUSH: FreeBSD over Linux").median;
    assert!(
        (slower - as_published.median / linux.median).abs() < 1e-9,
        "{slower}"
    );
}
