//! X07: TLB prefetchers compared with the rIOTLB's two entries per ring (rIOMMU section 5.4), on
//! synthetic rings and on recorded devices.

use super::catalogue::{Experiment, Setting};
use super::figure::{Figure, Series};
use super::finding::{FindingRow, Findings, Published, Requirement};
use super::prefetch::{
    AccessSource, Kind, Predictor, PrefetchRow, PrefetchSummary, Shape, USES, bundled, summarise,
    synthetic,
};
use ringfence_lab::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X07",
    title: "TLB prefetchers compared with two entries per ring",
    source: "rIOMMU section 5.4",
    measure,
};

/// Threshold of "most accesses": the paper prints no number.
const MOST: f64 = 0.5;

/// A claim of the paper about a stream, in words.
struct Claim {
    what: &'static str,
    text: &'static str,
    of: fn(&PrefetchSummary) -> f64,
    demand: Requirement,
    /// Returns true if the claim covers recorded devices of this kind. `devices` names them.
    covers: fn(Kind) -> bool,
    devices: &'static str,
}

const RINGS: fn(Kind) -> bool = |kind| kind == Kind::Ring;
const RINGS_NAME: &str = "rings";
const ORDERED: fn(Kind) -> bool = Kind::in_order_and_ahead;
const ORDERED_NAME: &str = "in order and ahead";

const CLAIMS: [Claim; 9] = [
    Claim {
        what: "best as published",
        text: FEW,
        of: |summary| summary.best_baseline,
        demand: Requirement::AtMost,
        covers: RINGS,
        devices: RINGS_NAME,
    },
    Claim {
        what: "Markov, history below the ring",
        text: FEW,
        of: |summary| summary.markov_below,
        demand: Requirement::AtMost,
        covers: RINGS,
        devices: RINGS_NAME,
    },
    Claim {
        what: "Markov, history of the ring or more",
        text: SOME,
        of: |summary| summary.markov_above,
        demand: Requirement::AtLeast,
        covers: RINGS,
        devices: RINGS_NAME,
    },
    Claim {
        what: "Recency, history below the ring",
        text: FEW,
        of: |summary| summary.recency_below,
        demand: Requirement::AtMost,
        covers: RINGS,
        devices: RINGS_NAME,
    },
    Claim {
        what: "Recency, history of the ring or more",
        text: SOME,
        of: |summary| summary.recency_above,
        demand: Requirement::AtLeast,
        covers: RINGS,
        devices: RINGS_NAME,
    },
    Claim {
        what: "Distance, any history",
        text: FEW,
        of: |summary| summary.distance_below.max(summary.distance_above),
        demand: Requirement::AtMost,
        covers: RINGS,
        devices: RINGS_NAME,
    },
    Claim {
        what: "two entries per ring, uninvalidated",
        text: "always",
        of: |summary| summary.riotlb_uninvalidated,
        demand: Requirement::Shown,
        covers: ORDERED,
        devices: ORDERED_NAME,
    },
    Claim {
        what: "two entries per ring, invalidated by bursts",
        text: "always",
        of: |summary| summary.riotlb,
        demand: Requirement::Shown,
        covers: ORDERED,
        devices: ORDERED_NAME,
    },
    Claim {
        what: WRONG,
        text: "always right",
        of: |summary| summary.riotlb_mispredicted as f64,
        demand: Requirement::Exact,
        covers: ORDERED,
        devices: ORDERED_NAME,
    },
];

/// Quantity of the claim that two entries are always right.
const WRONG: &str = "two entries, uninvalidated: wrong predictions";

const FEW: &str = "ineffective";
const SOME: &str = "most accesses";

impl Claim {
    fn holds(&self, summary: &PrefetchSummary) -> bool {
        match self.demand {
            Requirement::AtMost => (self.of)(summary) <= MOST,
            Requirement::Exact => (self.of)(summary) == 0.0,
            _ => (self.of)(summary) >= MOST,
        }
    }

    /// The row of a stream whose pattern the claim covers or not (decision 0013).
    fn judge(&self, summary: &PrefetchSummary) -> FindingRow {
        let row = self.row(summary);
        match (self.covers)(summary.shape.kind()) {
            true => row.require(self.demand),
            false => row,
        }
    }

    fn row(&self, summary: &PrefetchSummary) -> FindingRow {
        let what = format!("{}: {}", device(summary), self.what);
        let row = FindingRow::counted(what, "", (self.of)(summary));
        let bound = match self.demand {
            Requirement::Exact => 0.0,
            _ => MOST,
        };
        row.beside(Published::new(self.text, bound, SOURCE))
    }
}

/// Names a stream, and the origin of its accesses if it is recorded.
fn device(summary: &PrefetchSummary) -> String {
    format!("{}{}", summary.source, summary.accesses.label())
}

const SOURCE: &str = "rIOMMU section 5.4, in words (claims.csv R54)";

/// Adds the results of each recorded device, and the number of devices for which each claim holds.
/// A claim must hold for every device that it covers (decision 0013).
fn recorded(rows: &[PrefetchRow], found: &mut Findings) {
    let all = summarise(rows);
    let used: Vec<&PrefetchSummary> = all.iter().filter(|one| one.first_misses >= USES).collect();
    let holds_of = |claim: &Claim, kinds: &dyn Fn(Kind) -> bool| {
        let of = used.iter().filter(|one| kinds(one.shape.kind()));
        let holds = of.clone().filter(|summary| claim.holds(summary)).count();
        (holds as f64, of.count() as f64)
    };
    for claim in &CLAIMS {
        let (holds, devices) = holds_of(claim, &|kind| (claim.covers)(kind));
        if devices > 0.0 {
            let what = format!(
                "recorded, {}: {}: {}",
                claim.devices, claim.what, claim.text
            );
            let row = FindingRow::counted(what, "devices", holds);
            let printed = Published::new(format!("all {devices}"), devices, SOURCE);
            // The share that two entries predict is shown.
            found.push(match claim.demand {
                Requirement::Shown => row.beside(printed),
                _ => row.exact(printed),
            });
        }
    }
    for kind in Kind::ALL {
        let devices = used.iter().filter(|one| one.shape.kind() == kind).count();
        let what = format!("recorded devices: {}", kind.name());
        found.push(FindingRow::counted(what, "devices", devices as f64));
        if devices == 0 {
            continue;
        }
        found.note(format!("{}: {}.", kind.name(), kind.reason()));
        for claim in CLAIMS.iter().filter(|claim| !(claim.covers)(kind)) {
            let (holds, _) = holds_of(claim, &|of| of == kind);
            let what = format!("recorded, {}: {}: {}", kind.name(), claim.what, claim.text);
            found.push(FindingRow::counted(what, "devices", holds));
        }
    }
    for summary in &used {
        let Shape {
            in_order,
            ahead,
            again,
            same_next,
            same_next_in_ring,
            reuse,
        } = summary.shape;
        let kind = summary.shape.kind().name();
        for (what, value) in [
            ("in order", in_order),
            ("ahead", ahead),
            ("again", again),
            ("same next", same_next),
            ("same next in its ring", same_next_in_ring),
            ("reuse", reuse),
        ] {
            let what = format!("{} ({kind}): {what}", device(summary));
            found.push(FindingRow::counted(what, "", value));
        }
        for claim in &CLAIMS {
            found.push(claim.row(summary));
        }
    }
    let rings = used.iter().filter(|one| one.shape.kind() == Kind::Ring);
    found.explain(match rings.count() {
        0 => "Recorded devices: none has a ring whose addresses recur in the same order after one \
        lap. The paper's claim about Markov and Recency covers only such rings, so no recorded \
        device tests it. The explanations below classify each device and give the effect on a \
        history."
            .into(),
        rings => format!(
            "Recorded devices: {rings} of {} have a ring whose addresses recur in the same order \
            after one lap. The paper's claim about Markov and Recency covers these devices only. \
            The explanations below classify the others and give the effect on a history.",
            used.len()
        ),
    });
    found.explain(
        "Two entries do not depend on addresses. They predict devices whose buffers are unmapped \
        in ring order and whose next buffer is mapped while the current one is used. They do not \
        predict devices with one request in flight, with several queues per direction, or with \
        unmaps in order of completion; the paper keeps such devices on the baseline unit.",
    );
    let with = |source| used.iter().filter(|one| one.accesses == source).count();
    let unmapped: u64 = used.iter().map(|one| one.unmapped_accesses).sum();
    found.note(format!(
        "Recorded: {} devices, of {} with any streaming mapping; the others use fewer than {USES} \
        buffers. Of {} devices the trace has the DMAs (\"DMAs recorded\"), of which {unmapped} \
        were outside all mappings. Of {} it has maps and unmaps only; the replay assumes that \
        the device uses a buffer just before its unmap (\"accesses assumed\"). A ring is a \
        device's mappings of one direction; several queues share one.",
        used.len(),
        all.len(),
        with(AccessSource::Recorded),
        with(AccessSource::Assumed),
    ));
}

fn name_option(setting: &Setting, found: &mut Findings) {
    if setting.recorded.is_empty() {
        found.note(
            "Recorded devices are those of the bundled trace. --trace FILE... adds those of other \
            traces.",
        );
    }
}

/// Adds the claims about each synthetic stream. A stream must meet the claims that cover it.
fn judged(rows: &[PrefetchRow], found: &mut Findings) {
    for summary in summarise(rows) {
        for claim in &CLAIMS {
            found.push(claim.judge(&summary));
        }
    }
}

/// Names the numbers of streams of which Distance predicts most accesses.
fn by_distance(streams: &[PrefetchSummary]) -> String {
    let most = |rate: fn(&PrefetchSummary) -> f64| {
        let streams = streams.iter().filter(|stream| rate(stream) >= MOST);
        streams.count()
    };
    format!(
        "Of {} synthetic streams, modified Distance predicts most accesses of {} with a history \
        below the ring, and of {} with a longer one. The best prefetcher as published predicts \
        most of {}.",
        streams.len(),
        most(|stream| stream.distance_below),
        most(|stream| stream.distance_above),
        most(|stream| stream.best_baseline),
    )
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let rows = synthetic()?;
    let mut found = Findings::with_method(
        "Rings of five shapes with five kinds of addresses. Each stream is fed to Markov, Recency \
        and Distance, as published and modified, with histories from a quarter to eight times the \
        ring, and to two entries per ring. The rows show the share of buffers whose first page was \
        predicted. A claim is judged on the streams whose measured pattern it covers; two entries \
        are judged by their wrong predictions.",
    );
    judged(&rows, &mut found);
    let mut traces = bundled()?;
    traces.extend(setting.recorded.iter().cloned());
    recorded(&traces, &mut found);
    name_option(setting, &mut found);
    // The paper's own case: one ring whose addresses recur but are not adjacent.
    let named = |row: &&PrefetchRow| row.ring_entries == 1024 && row.source.contains("scattered");
    let source = rows
        .iter()
        .find(named)
        .map(|row| row.source.clone())
        .unwrap_or_default();
    let line = |name: &str, predictor| {
        let of = rows
            .iter()
            .filter(|row| row.source == source && row.predictor == predictor);
        Series::line(
            name,
            of.map(|row| (row.history as f64, row.first_hit_rate))
                .collect(),
        )
    };
    found.figures.push(Figure::logarithmic(
        format!("Predicted share over history size: {source}"),
        "history entries",
        "predicted share",
        vec![
            line("Markov, modified", Predictor::MarkovModified),
            line("Recency, modified", Predictor::RecencyModified),
            line("Distance, modified", Predictor::DistanceModified),
            line("Markov", Predictor::Markov),
        ],
    ));
    found.explain(by_distance(&summarise(&rows)));
    found.explain(
        "Markov and Recency cannot predict addresses that never recur. Two entries are right \
        whenever a next buffer is mapped, but the invalidation at the end of a burst removes them: \
        with bursts of one, every access walks.",
    );
    found.note("The paper prints no rate; \"most\" is interpreted as half, fixed before the runs.");
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefetch::{Addresses, Synthetic, histories, measure as feed};

    /// A device that goes around its ring five times, with the same addresses in every lap.
    fn device(name: &str, entries: u32) -> Vec<crate::prefetch::PrefetchRow> {
        let ring = Synthetic {
            rings: vec![entries],
            burst: 1,
            laps: 5,
            addresses: Addresses::Scattered,
            seed: 1,
        };
        let mut stream = ring.stream().unwrap();
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

    #[test]
    fn finding_without_traces_names_the_option() {
        let mut found = Findings::default();
        name_option(&Setting::smoke(), &mut found);
        assert!(found.notes[0].contains("--trace"));
    }
}
