//! Demands of the claims of X07, rates of a summary, and streams of the finding.

use super::*;
use crate::prefetch::DEVICES;

/// Prefetchers fail at or below half, or predict at least half, as the paper's words demand.
#[test]
fn claims_have_the_demands_of_the_paper() {
    use Requirement::{AtLeast, AtMost, Exact, Shown};
    let claims = CLAIMS.map(|claim| (claim.what, claim.text, claim.demand, claim.devices));
    let (few, some) = ("ineffective", "most accesses");
    let ordered = "in order and ahead";
    assert_eq!(
        claims,
        [
            ("best as published", few, AtMost, "rings"),
            ("Markov, history below the ring", few, AtMost, "rings"),
            (
                "Markov, history of the ring or more",
                some,
                AtLeast,
                "rings"
            ),
            ("Recency, history below the ring", few, AtMost, "rings"),
            (
                "Recency, history of the ring or more",
                some,
                AtLeast,
                "rings"
            ),
            ("Distance, any history", few, AtMost, "rings"),
            (
                "two entries per ring, uninvalidated",
                "always",
                Shown,
                ordered
            ),
            (
                "two entries per ring, invalidated by bursts",
                "always",
                Shown,
                ordered
            ),
            (WRONG, "always right", Exact, ordered),
        ]
    );
    let [ring] = &summarise(&device("ring", 64))[..] else {
        panic!("one stream")
    };
    for share in [0.25, 0.5, 0.75] {
        let summary = PrefetchSummary {
            best_baseline: share,
            markov_below: share,
            markov_above: share,
            recency_below: share,
            recency_above: share,
            distance_below: share,
            distance_above: share,
            riotlb: share,
            riotlb_uninvalidated: share,
            riotlb_mispredicted: 0,
            ..ring.clone()
        };
        for claim in &CLAIMS {
            let wanted = match claim.demand {
                AtMost => share <= 0.5,
                Exact => true,
                _ => share >= 0.5,
            };
            assert_eq!(claim.holds(&summary), wanted, "{}: {share}", claim.what);
            let judged = (claim.demand != Shown).then_some(wanted);
            let row = claim.judge(&summary);
            assert_eq!(row.holds, judged, "{}: {share}", claim.what);
        }
    }
    for claim in &CLAIMS {
        let covered = Kind::ALL.into_iter().filter(|kind| (claim.covers)(*kind));
        let wanted = match claim.devices {
            "rings" => &[Kind::Ring][..],
            _ => &Kind::ALL[2..],
        };
        assert!(covered.eq(wanted.iter().copied()), "{}", claim.what);
    }
    assert_eq!(Kind::ALL[..2], [Kind::OutOfOrder, Kind::OneAtATime]);
}

/// Sixteen rows of a stream with different rates. The ring has 64 pages.
#[test]
fn a_summary_has_the_rates_of_its_predictors() {
    use Predictor::{
        Distance, DistanceModified, Markov, MarkovModified, Recency, RecencyModified, Riotlb,
        RiotlbUninvalidated,
    };
    let any = device("ring", 64).remove(0);
    assert_eq!(any.ring_pages, 64);
    let row = |predictor, history, rate, mispredicted| PrefetchRow {
        predictor,
        history,
        first_hit_rate: rate,
        mispredicted,
        ..any.clone()
    };
    let mut rows = vec![
        row(Markov, 63, 0.01, 1),
        row(Markov, 64, 0.02, 2),
        row(Recency, 63, 0.03, 3),
        row(Recency, 64, 0.04, 4),
        row(Distance, 63, 0.05, 5),
        row(Distance, 64, 0.06, 6),
        row(MarkovModified, 63, 0.17, 7),
        row(MarkovModified, 64, 0.28, 8),
        row(RecencyModified, 63, 0.19, 9),
        row(RecencyModified, 64, 0.30, 10),
        row(DistanceModified, 63, 0.41, 11),
        row(DistanceModified, 64, 0.52, 12),
        // The best history of a range counts.
        row(MarkovModified, 16, 0.13, 13),
        row(MarkovModified, 256, 0.34, 14),
        row(Riotlb, 2, 0.85, 15),
        row(RiotlbUninvalidated, 2, 0.96, 16),
    ];
    let summary = |rows: &[PrefetchRow]| match &summarise(rows)[..] {
        [summary] => summary.clone(),
        more => panic!("{more:?}"),
    };
    let found = summary(&rows);
    let wanted = PrefetchSummary {
        source: "ring".into(),
        accesses: any.accesses,
        unmapped_accesses: any.unmapped_accesses,
        ring_pages: 64,
        shape: any.shape,
        first_misses: any.first_misses,
        best_baseline: 0.06,
        markov_below: 0.17,
        markov_above: 0.34,
        recency_below: 0.19,
        recency_above: 0.30,
        distance_below: 0.41,
        distance_above: 0.52,
        riotlb: 0.85,
        riotlb_uninvalidated: 0.96,
        riotlb_mispredicted: 16,
    };
    assert_eq!(found, wanted);
    for (index, rate) in [(0, 0.07), (3, 0.08), (4, 0.09)] {
        rows[index].first_hit_rate = rate;
        assert_eq!(summary(&rows).best_baseline, rate, "{index}");
    }
}

/// Each measure of a device's pattern has its own row.
#[test]
fn rows_of_a_pattern_have_their_own_measures() {
    let mut rows = device("large", 256);
    for row in &mut rows {
        row.shape = Shape {
            in_order: 0.95,
            ahead: 0.9,
            again: 0.85,
            same_next: 0.8,
            same_next_in_ring: 0.75,
            reuse: 0.7,
        };
    }
    let mut found = Findings::default();
    recorded(&rows, &mut found);
    for (what, wanted) in [
        ("in order", 0.95),
        ("ahead", 0.9),
        ("again", 0.85),
        ("same next", 0.8),
        ("same next in its ring", 0.75),
        ("reuse", 0.7),
    ] {
        let end = format!(" (ring): {what}");
        let row = found.rows.iter().find(|row| row.quantity.ends_with(&end));
        assert_eq!(row.unwrap().measured.unwrap().median, wanted, "{what}");
    }
}

/// The finding judges each synthetic stream and shows each recorded device.
#[test]
fn the_finding_has_all_streams() {
    let mut rows = device("one", 64);
    rows.extend(device("other", 256));
    let traces = device("recorded", 256);
    let finding = found(&Setting::smoke(), &rows, &traces);
    let (mut synthetic, mut shown) = (Findings::default(), Findings::default());
    judged(&rows, &mut synthetic);
    recorded(&traces, &mut shown);
    assert_eq!(synthetic.rows.len(), 2 * CLAIMS.len());
    assert_eq!(finding.rows, [synthetic.rows, shown.rows].concat());
    assert_eq!(finding.figures.len(), 1);
    // The figure shows the scattered addresses of a ring of 1024 entries.
    let source = "Scattered addresses, rings of [1024]";
    let mut drawn = device("Sequential addresses", 1024);
    drawn.extend(device(source, 1024));
    drawn.extend(device("Scattered addresses, rings of [64]", 64));
    let figure = found(&Setting::smoke(), &drawn, &[]).figures.remove(0);
    assert!(figure.title.ends_with(source), "{}", figure.title);
    assert_eq!(figure.series, lines(&drawn, source));
    assert!(figure.series.iter().all(|line| !line.points.is_empty()));
    let text = by_distance(&summarise(&rows));
    assert!(finding.explanation.contains(&text), "{text}");
}

#[test]
fn streams_have_the_sizes_of_rings_and_histories() {
    let devices: [(&[u32], u32); 5] = [
        (&[64], 1),
        (&[256], 1),
        (&[1024], 1),
        (&[1024], 200),
        (&[512, 256], 16),
    ];
    assert_eq!(DEVICES, devices);
    assert_eq!(Addresses::ALL.len(), 5);
    // A quarter, a half, and so on, to eight times the ring.
    let stream = ring_of(64);
    assert_eq!(histories(&stream), [16, 32, 48, 64, 80, 128, 512]);
}

/// The synthetic half is five devices with five kinds of addresses, each ten laps, and the finding
/// has all claims about each of them.
#[test]
fn the_finding_has_the_claims_about_25_streams_of_ten_laps() {
    let wanted = Addresses::ALL.into_iter().flat_map(|addresses| {
        [
            (&[64][..], 1),
            (&[256], 1),
            (&[1024], 1),
            (&[1024], 200),
            (&[512, 256], 16),
        ]
        .map(|(rings, burst)| (rings.to_vec(), burst, 10, addresses))
    });
    let streams = synthetic_streams();
    let of = |stream: &Synthetic| {
        let Synthetic { rings, burst, .. } = stream;
        (rings.clone(), *burst, stream.laps, stream.addresses)
    };
    let got: Vec<_> = streams.iter().map(of).collect();
    assert_eq!(got, wanted.collect::<Vec<_>>());
    let found = EXPERIMENT.run(&Setting::smoke()).unwrap();
    let mut names: Vec<_> = streams
        .iter()
        .map(|stream| stream.stream().unwrap().name)
        .collect();
    let mut rows = found.rows.iter();
    for name in &names {
        for claim in &CLAIMS {
            let row = rows.next().unwrap();
            assert_eq!(row.quantity, format!("{name}: {}", claim.what));
        }
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 25);
    let text = found.explanation.iter();
    let of_25 = text.filter(|text| text.starts_with("Of 25 synthetic streams"));
    assert_eq!(of_25.count(), 1);
    let [figure] = &found.figures[..] else {
        panic!("one figure")
    };
    // Histories of a quarter to eight times the ring of 1024 entries.
    for line in &figure.series {
        let histories = line.points.iter().map(|point| point.0);
        let wanted = [256.0, 512.0, 768.0, 1024.0, 1280.0, 2048.0, 8192.0];
        assert_eq!(histories.collect::<Vec<_>>(), wanted, "{}", line.name);
    }
}

/// Each stream has the rows of its own laps and histories.
#[test]
fn rows_of_streams_are_measured_with_their_own_histories() {
    let stream = |entries, laps| Synthetic {
        rings: vec![entries],
        burst: 1,
        laps,
        addresses: Addresses::Scattered,
        seed: 1,
    };
    let streams = [stream(32, 5), stream(128, 3)];
    let wanted = streams.iter().flat_map(|stream| {
        let stream = stream.stream().unwrap();
        feed(&stream, &histories(&stream))
    });
    let rows = rows_of(&streams).unwrap();
    assert_eq!(rows, wanted.collect::<Vec<_>>());
    let uses = |entries| {
        let of = rows.iter().filter(|row| row.ring_entries == entries);
        let mut uses: Vec<_> = of.map(|row| row.first_misses).collect();
        uses.dedup();
        uses
    };
    assert_eq!((uses(32), uses(128)), (vec![160], vec![384]));
}
