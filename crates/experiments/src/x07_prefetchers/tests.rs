//! Claims, recorded devices and lines of X07.

mod rates;

use super::*;
use crate::prefetch::{Addresses, DeviceStream, Synthetic, histories, measure as feed};

/// A stream that goes around its ring five times, with the same addresses in every lap.
fn ring_of(entries: u32) -> DeviceStream {
    let ring = Synthetic {
        rings: vec![entries],
        burst: 1,
        laps: 5,
        addresses: Addresses::Scattered,
        seed: 1,
    };
    ring.stream().unwrap()
}

/// The rows of [`ring_of`] under a name.
fn device(name: &str, entries: u32) -> Vec<PrefetchRow> {
    let mut stream = ring_of(entries);
    stream.name = name.into();
    feed(&stream, &histories(&stream))
}

#[test]
fn recorded_devices_are_counted_per_claim() {
    let mut setting = Setting::smoke();
    setting.recorded = device("large", 256);
    setting.recorded.extend(device("small", 64));
    let mut found = Findings::default();
    recorded(&setting.recorded, &mut found);
    // Both sets of claims for the one ring, a count of each kind, and the device's six shape
    // measures.
    assert_eq!(found.rows.len(), 2 * CLAIMS.len() + Kind::ALL.len() + 6);
    let of = |what: &str| {
        found
            .rows
            .iter()
            .find(|row| row.quantity.contains(what))
            .unwrap()
    };
    // The small ring has too few uses.
    for kind in Kind::ALL {
        let what = format!("recorded devices: {}", kind.name());
        let row = found.rows.iter().find(|row| row.quantity == what);
        let devices = f64::from(u8::from(kind == Kind::Ring));
        assert_eq!(row.unwrap().measured.unwrap().median, devices, "{what}");
    }
    let row = of("recorded, rings: Markov, history of the ring or more");
    assert_eq!(
        (row.published.as_ref().unwrap().value, row.holds),
        (1.0, Some(true))
    );
    // With bursts of one, the invalidation removes the prefetched entry.
    let row = of("recorded, in order and ahead: two entries per ring, invalidated by bursts");
    assert_eq!((row.measured.unwrap().median, row.holds), (0.0, None));
    let row = of("recorded, in order and ahead: two entries, uninvalidated: wrong predictions");
    assert_eq!((row.measured.unwrap().median, row.holds), (1.0, Some(true)));
    assert_eq!(
        of("large: Recency, history below the ring")
            .measured
            .unwrap()
            .median,
        0.0
    );
    assert!(
        found
            .rows
            .iter()
            .all(|row| !row.quantity.starts_with("small"))
    );
}

/// Two rings whose addresses recur, and a device of new addresses: a claim about rings must hold
/// for both rings, and one about devices in order for all three.
#[test]
fn claims_are_counted_over_all_devices_that_they_cover() {
    let fresh = Synthetic {
        rings: vec![256],
        burst: 1,
        laps: 5,
        addresses: Addresses::Fresh,
        seed: 1,
    };
    let fresh = fresh.stream().unwrap();
    let mut rows = device("one", 256);
    rows.extend(device("two", 300));
    rows.extend(feed(&fresh, &histories(&fresh)));
    let mut found = Findings::default();
    recorded(&rows, &mut found);
    let of = |what: &str| {
        let row = found.rows.iter().find(|row| {
            let rest = row.quantity.strip_prefix(what);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
        });
        let row = row.expect(what);
        let printed = row.published.as_ref().map(|printed| printed.value);
        (row.measured.unwrap().median, printed, row.holds)
    };
    assert_eq!(of("recorded devices: ring"), (2.0, None, None));
    assert_eq!(of("recorded devices: new addresses"), (1.0, None, None));
    let rings = of("recorded, rings: Markov, history of the ring or more");
    assert_eq!(rings, (2.0, Some(2.0), Some(true)));
    let ordered = of("recorded, in order and ahead: two entries, uninvalidated: wrong predictions");
    assert_eq!(ordered, (3.0, Some(3.0), Some(true)));
    // A history does not predict an address that never recurs.
    let new = of("recorded, new addresses: Markov, history of the ring or more");
    assert_eq!(new, (0.0, None, None));
}

/// A device whose addresses never recur is counted. The claims about histories do not cover it;
/// the claim about two entries does.
#[test]
fn claims_judge_only_the_devices_that_they_cover() {
    let ring = Synthetic {
        rings: vec![256],
        burst: 1,
        laps: 5,
        addresses: Addresses::Fresh,
        seed: 1,
    };
    let stream = ring.stream().unwrap();
    let mut setting = Setting::smoke();
    setting.recorded = feed(&stream, &histories(&stream));
    let mut found = Findings::default();
    recorded(&setting.recorded, &mut found);
    let of = |what: &str| found.rows.iter().find(|row| row.quantity.contains(what));
    let counted = |what: &str| of(what).unwrap().measured.unwrap().median;
    assert_eq!(counted("recorded devices: new addresses"), 1.0);
    assert_eq!(counted("recorded devices: ring"), 0.0);
    assert!(of("recorded, rings:").is_none());
    let row = of("recorded, new addresses: Recency, history of the ring or more").unwrap();
    assert_eq!((row.measured.unwrap().median, row.holds), (0.0, None));
    let row = of("recorded, in order and ahead: two entries per ring, uninvalidated").unwrap();
    assert_eq!((row.measured.unwrap().median, row.holds), (1.0, None));
    let row = of("recorded, in order and ahead: two entries, uninvalidated: wrong").unwrap();
    assert_eq!(row.holds, Some(true));
    assert!(
        found
            .explanation
            .iter()
            .any(|text| text.contains("no recorded device tests it"))
    );
}

/// A ring whose addresses recur has every claim. Of a stream of new addresses, only the wrong
/// predictions of two entries are judged, and of a device with one request in flight nothing.
#[test]
fn claims_judge_only_the_streams_that_they_cover() {
    let stream = |addresses, entries| {
        let ring = Synthetic {
            rings: vec![entries],
            burst: 1,
            laps: if entries == 1 { 2000 } else { 5 },
            addresses,
            seed: 1,
        };
        let stream = ring.stream().unwrap();
        let rows = feed(&stream, &histories(&stream));
        let mut found = Findings::default();
        judged(&rows, &mut found);
        let [summary] = &summarise(&rows)[..] else {
            panic!("one stream")
        };
        (summary.clone(), found.rows)
    };
    let judged_of = |rows: &[FindingRow]| {
        let judged = rows.iter().filter(|row| row.holds.is_some());
        judged.count()
    };
    let (ring, rows) = stream(Addresses::Scattered, 256);
    assert_eq!(ring.shape.kind(), Kind::Ring);
    // All but the two shares of two entries.
    assert_eq!(judged_of(&rows), CLAIMS.len() - 2);
    let (mut new, rows) = stream(Addresses::Fresh, 256);
    assert_eq!(new.shape.kind(), Kind::NewAddresses);
    assert_eq!(rows.len(), CLAIMS.len());
    let judged: Vec<_> = rows.iter().filter(|row| row.holds.is_some()).collect();
    let [wrong] = judged[..] else {
        panic!("{judged:?}")
    };
    assert!(wrong.quantity.ends_with(WRONG), "{}", wrong.quantity);
    assert_eq!(wrong.requirement, Requirement::Exact);
    assert_eq!(wrong.published.as_ref().unwrap().value, 0.0);
    assert_eq!(wrong.holds, Some(true));
    // One wrong prediction is too many.
    new.riotlb_mispredicted = 1;
    let claim = CLAIMS.iter().find(|claim| claim.what == WRONG).unwrap();
    assert_eq!(claim.judge(&new).holds, Some(false));
    assert!(!claim.holds(&new));
    let (one, rows) = stream(Addresses::Fresh, 1);
    assert_eq!(one.shape.kind(), Kind::OneAtATime);
    assert_eq!(judged_of(&rows), 0);
    let of = |below, above| PrefetchSummary {
        distance_below: below,
        distance_above: above,
        best_baseline: 0.5,
        ..ring.clone()
    };
    let text = by_distance(&[of(0.4, 0.6), of(0.5, 0.9), of(0.1, 0.2)]);
    let wanted = "accesses of 1 with a history below the ring, and of 2 with a longer one";
    assert!(text.starts_with("Of 3 ") && text.contains(wanted), "{text}");
    assert!(text.ends_with("most of 3."), "{text}");
}

/// The bundled trace has DMAs, so no row of its devices rests on an assumption.
#[test]
fn finding_names_the_origin_of_accesses() {
    let mut rows = bundled().unwrap();
    assert!(
        rows.iter()
            .all(|row| row.accesses == AccessSource::Recorded)
    );
    let mut assumed = device("assumed", 256);
    for row in &mut assumed {
        row.accesses = AccessSource::Assumed;
    }
    rows.extend(assumed);
    let mut found = Findings::default();
    recorded(&rows, &mut found);
    let count = |text: &str| {
        let rows = found.rows.iter();
        rows.filter(|row| row.quantity.contains(text)).count()
    };
    let per_device = CLAIMS.len() + 6;
    let devices = summarise(&rows)
        .into_iter()
        .filter(|one| one.first_misses >= USES);
    let devices = devices.count() - 1;
    assert!(devices >= 1);
    assert_eq!(count("guest-dmas-6.12"), devices * per_device);
    assert_eq!(count(" (DMAs recorded)"), devices * per_device);
    assert_eq!(count("assumed (accesses assumed)"), per_device);
    let note = found.notes.last().unwrap();
    let wanted = format!("Of {devices} devices the trace has the DMAs");
    assert!(
        note.contains(&wanted) && note.contains("of which 0 were outside"),
        "{note}"
    );
}

/// Each claim takes its own share, Distance the larger of its two.
#[test]
fn claims_take_their_own_shares() {
    let [ring] = &summarise(&device("ring", 64))[..] else {
        panic!("one stream")
    };
    let summary = PrefetchSummary {
        best_baseline: 0.1,
        markov_below: 0.2,
        markov_above: 0.3,
        recency_below: 0.4,
        recency_above: 0.5,
        distance_below: 0.6,
        distance_above: 0.7,
        riotlb: 0.8,
        riotlb_uninvalidated: 0.9,
        riotlb_mispredicted: 3,
        ..ring.clone()
    };
    let shares = CLAIMS.map(|claim| (claim.what, (claim.of)(&summary)));
    assert_eq!(
        shares,
        [
            ("best as published", 0.1),
            ("Markov, history below the ring", 0.2),
            ("Markov, history of the ring or more", 0.3),
            ("Recency, history below the ring", 0.4),
            ("Recency, history of the ring or more", 0.5),
            ("Distance, any history", 0.7),
            ("two entries per ring, uninvalidated", 0.9),
            ("two entries per ring, invalidated by bursts", 0.8),
            (WRONG, 3.0),
        ]
    );
    let distance = CLAIMS
        .iter()
        .find(|claim| claim.what.starts_with("Distance"));
    let below = PrefetchSummary {
        distance_below: 0.8,
        ..summary
    };
    assert_eq!((distance.unwrap().of)(&below), 0.8);
}

/// Each line has the rows of its own predictor, and of the one stream.
#[test]
fn lines_are_those_of_their_predictors() {
    let mut rows = device("this", 64);
    for (number, row) in rows.iter_mut().enumerate() {
        row.first_hit_rate = number as f64;
    }
    let points = |predictor| -> Vec<(f64, f64)> {
        let of = rows.iter().filter(|row| row.predictor == predictor);
        of.map(|row| (row.history as f64, row.first_hit_rate))
            .collect()
    };
    let wanted = [
        ("Markov, modified", points(Predictor::MarkovModified)),
        ("Recency, modified", points(Predictor::RecencyModified)),
        ("Distance, modified", points(Predictor::DistanceModified)),
        ("Markov", points(Predictor::Markov)),
    ];
    let mut all = rows.clone();
    all.extend(device("other", 64));
    let lines = lines(&all, "this");
    assert_eq!(lines.len(), wanted.len());
    for (line, (name, points)) in lines.iter().zip(wanted) {
        assert!(points.len() > 1);
        assert_eq!((line.name.as_str(), &line.points), (name, &points));
    }
}

#[test]
fn finding_without_traces_names_the_option() {
    let mut found = Findings::default();
    name_option(&Setting::smoke(), &mut found);
    assert!(found.notes[0].contains("--trace"));
}
