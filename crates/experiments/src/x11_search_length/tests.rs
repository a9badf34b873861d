//! Tests of X11.

use super::*;

#[test]
fn receive_rings_alone_never_search_lists_of_w() {
    let mut setting = Setting::smoke();
    setting.runs = 2;
    setting.history = 8;
    let found = EXPERIMENT.run(&setting).unwrap();
    let alone = |k: usize| {
        let what = format!("defer, k = {k}, receive rings alone: longest search");
        let row = found.rows.iter().find(|row| row.quantity == what);
        row.and_then(|row| row.measured).unwrap().median
    };
    assert!(alone(64) > 0.0 && alone(240) > 0.0);
    assert_eq!(alone(250), 0.0);
    // A response takes two buffers. If every frame is mapped, a burst of them is taken.
    let calls = |what: &str| {
        let what = format!("defer, k = 250, {what}: calls that search");
        let row = found
            .rows
            .iter()
            .find(|row| row.quantity.starts_with(&what));
        row.and_then(|row| row.measured).unwrap().median
    };
    assert!(calls("all rings") <= 2.0, "{}", calls("all rings"));
    assert!(
        calls("every frame mapped") > 20.0,
        "{}",
        calls("every frame mapped")
    );
    assert_eq!(found.figures.len(), 3);
    assert_searches(&found.rows, &found.figures, &setting);
    let grown = found
        .rows
        .iter()
        .find(|row| row.quantity.starts_with("strict: growth over"));
    assert_eq!(grown.unwrap().holds, Some(true), "{grown:?}");
    let mut mean = found
        .rows
        .iter()
        .filter(|row| row.quantity.starts_with("strict: mean") && row.published.is_some());
    assert!(mean.all(|row| row.holds.is_none()));
    // With the order of EIOVAR section 4 no address changes its ring, so the search does not
    // grow. With the drivers' order addresses do.
    let last = |name: &str| {
        let row = found.rows.iter().rfind(|row| {
            row.quantity
                .starts_with(&format!("strict, {name}: mean search"))
        });
        row.and_then(|row| row.measured).unwrap().median
    };
    for filled in ["ring by ring", "rings in turns"] {
        let unmapped_first = last(&format!("unmap, map; {filled}"));
        assert!(unmapped_first < 20.0, "{filled}: {unmapped_first}");
    }
    let mapped_first = last("map, unmap; ring by ring");
    assert!(mapped_first > 20.0, "{mapped_first}");
}

/// Compares Figs. 3 and 9, and the rows of searches, with the searches of their allocators.
fn assert_searches(rows: &[FindingRow], figures: &[Figure], setting: &Setting) {
    let row = |what: &str| rows.iter().find(|row| row.quantity == what).unwrap();
    let all = runs(setting).unwrap();
    let alone: Vec<Run> = all.iter().map(Run::receive_only).collect();
    let mapped = runs_of(setting, &MAPPED, setting.runs).unwrap();
    let of = |runs: &[Run], size, batch| searches(runs, size, batch, 40_000).unwrap();
    assert_eq!(CALLS, 40_000);

    let strict = of(&all, None, 1);
    assert!(strict.iter().any(|steps| *steps > 0));
    assert!(figures[0].title.starts_with("Fig. 3: strict, no freelists"));
    assert_eq!(figures[0].series, [line("baseline", &strict)]);
    let lines = [64, 240, 250].map(|k| {
        let deferred = of(&all, Some(Capacity::AtMost(k)), 250);
        line(&format!("eiovar_{k}"), &deferred)
    });
    assert!(figures[1].title.starts_with("Fig. 9: deferred"));
    assert_eq!(figures[1].series, lines);

    for k in [64, 240, 250] {
        for (what, runs) in [
            ("receive rings alone", &alone),
            ("all rings", &all),
            ("every frame mapped", &mapped),
        ] {
            let steps = of(runs, Some(Capacity::AtMost(k)), 250);
            let of = format!("defer, k = {k}, {what}: ");
            let longest = row(&format!("{of}longest search"));
            let most = f64::from(*steps.iter().max().unwrap());
            assert_eq!(longest.measured.unwrap().median, most, "{of}");
            let wanted = match (what, k) {
                ("every frame mapped", _) => Requirement::Shown,
                (_, 250) => Requirement::Exact,
                _ => Requirement::AtLeast,
            };
            assert_eq!(longest.requirement, wanted, "{of}");
            let printed = longest.published.as_ref().unwrap().value;
            assert_eq!(printed, if k == 250 { 0.0 } else { 1.0 }, "{of}");
            let last = steps.len();
            let calls = row(&format!("{of}calls that search, of the last {last}"));
            let searching = steps.iter().filter(|steps| **steps > 0).count() as f64;
            assert_eq!(calls.measured.unwrap().median, searching, "{of}");
        }
    }
    for protection in ["strict", "defer"] {
        let what = format!("{protection}, freelists: mean search of the last run");
        assert_eq!(row(&what).requirement, Requirement::Exact);
        assert_eq!(row(&what).holds, Some(true), "{:?}", row(&what));
    }
}

#[test]
fn searches_are_the_last_calls_after_the_first_run() {
    let mut setting = Setting::smoke();
    setting.runs = 2;
    let runs = runs(&setting).unwrap();
    let all = searches(&runs, None, 1, 100_000).unwrap();
    let ten = searches(&runs, None, 1, 10).unwrap();
    assert_eq!(ten, all[all.len() - 10..]);
    // The first run fills the rings, and its calls are left out.
    assert_eq!(all.len() as u64, runs[1].plan.maps);
    let points: Vec<_> = (0..2000).collect();
    let thin = line("name", &points);
    assert_eq!((thin.name.as_str(), thin.points.len()), ("name", 667));
    assert_eq!(thin.points[..2], [(2.0, 2.0), (5.0, 5.0)]);
}
