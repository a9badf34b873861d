//! Tests of X15.

use super::*;

#[test]
fn text_has_the_directions_of_the_rows() {
    assert_eq!(trend(&[1.0, 2.0, 3.0]), "grows");
    assert_eq!(trend(&[3.0, 2.0, 1.0]), "falls");
    for mixed in [[1.0, 3.0, 2.0], [1.0, 1.0, 2.0], [f64::NAN, 1.0, 2.0]] {
        assert_eq!(trend(&mixed), "neither grows nor falls throughout");
    }
    let different = by_turn("falls", "grows");
    assert!(different.contains("determines") && different.contains("falls with turns of one"));
    assert!(by_turn("falls", "falls").contains("does not change"));
}

#[test]
fn cheaper_protection_raises_throughput() {
    assert_eq!(factor(1000.0, 10_000.0, 1000.0), 5.5);
    assert_eq!(factor(1000.0, 1000.0, 1000.0), 1.0);
}

#[test]
fn a_frame_without_protection_has_the_ratio_that_it_is_fitted_to() {
    let c_none = none_cycles(500.0, 1.25);
    assert_eq!((c_none, factor(c_none, 500.0, 0.0)), (2000.0, 1.25));
}

#[test]
fn both_sweeps_have_their_rows_and_lines() {
    let found = found(&Setting::smoke(), 600).unwrap();
    // Nine sizes in four modes, each with cycles and a throughput; the same sizes, gathered.
    let messages = 1 + 9 * 4 * 2 + 1 + (2 + 9);
    assert_eq!(found.rows.len(), messages + 1 + 6 * 4 + 2 * (4 + 1));
    assert_eq!(found.figures.len(), 4);
    assert_eq!(found.figures[0].series.len(), 4);
    let fitted = found.rows.iter().filter(|row| row.fitted);
    // The cycles without protection of both figures, and the anchor of the first; two constants of
    // gathered messages and their anchors.
    assert_eq!(fitted.count(), 3 + 4);
    let of = |what: &str| {
        let row = found.rows.iter().find(|row| row.quantity.starts_with(what));
        let row = row.unwrap();
        (row.requirement, row.null_model)
    };
    let gain = of("32 clients: throughput");
    assert_eq!(gain, (Requirement::Overhead, Some(NullModel::RATIO)));
    let value = |what: &str| {
        let row = found.rows.iter().find(|row| row.quantity == what);
        row.and_then(|row| row.measured).unwrap().median
    };
    // At 32 clients, none over strict+ is 1.19 / 0.83 (rIOMMU Table 2, Memcached on mlx).
    let c_none = value("Memcached on mlx: cycles per frame without protection");
    let added = |clients: u32, mode: &str| {
        value(&format!(
            "{clients} clients: {mode}, additional cycles per frame"
        ))
    };
    let ratio = (c_none + added(32, "strict+")) / c_none;
    assert!((ratio - 1.19 / 0.83).abs() < 1e-9, "{ratio}");
    for clients in CLIENTS {
        let gain = value(&format!(
            "{clients} clients: throughput, strict EIOVAR / baseline"
        ));
        let [strict, plus] = ["strict", "strict+"].map(|mode| c_none + added(clients, mode));
        assert!((gain - strict / plus).abs() < 1e-9, "{clients}: {gain}");
    }
    let steps = |clients: u32| {
        let what = format!("{clients} clients: strict, search steps");
        let row = found.rows.iter().find(|row| row.quantity == what);
        row.and_then(|row| row.measured).unwrap().median
    };
    let steps = CLIENTS.map(steps);
    for (place, of) in steps.iter().enumerate() {
        assert!(!steps[..place].contains(of), "{steps:?}");
    }
    let growth = of(&format!("bursts of at most {RX_FRAMES}, 32 clients over 1"));
    assert_eq!(growth.0, Requirement::Above);
}
