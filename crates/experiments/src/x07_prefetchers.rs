//! X07: TLB prefetchers compared with the rIOTLB's two entries per ring (rIOMMU section 5.4), on
//! synthetic rings and on recorded devices.

use super::experiment::Experiment;

use super::figure::{Figure, Series};
use super::finding::{FindingRow, Findings, Published, Requirement};
use super::prefetch::{
    AccessSource, Kind, Predictor, PrefetchRow, PrefetchSummary, Shape, USES, bundled, rows_of,
    summarise, synthetic_streams,
};
use super::setting::Setting;
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
        row.with_published(Published::new(self.text, bound, SOURCE))
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
                Requirement::Shown => row.with_published(printed),
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

/// The predicted share of the stream `source` over the history, for each predictor of the figure.
fn lines(rows: &[PrefetchRow], source: &str) -> Vec<Series> {
    let line = |(name, predictor)| {
        let of = rows
            .iter()
            .filter(|row| row.source == source && row.predictor == predictor);
        let points = of.map(|row| (row.history as f64, row.first_hit_rate));
        Series::line(name, points.collect())
    };
    [
        ("Markov, modified", Predictor::MarkovModified),
        ("Recency, modified", Predictor::RecencyModified),
        ("Distance, modified", Predictor::DistanceModified),
        ("Markov", Predictor::Markov),
    ]
    .map(line)
    .into()
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let mut traces = bundled()?;
    traces.extend(setting.recorded.iter().cloned());
    Ok(found(setting, &rows_of(&synthetic_streams())?, &traces))
}

/// The finding about the synthetic streams of `rows` and the recorded devices of `traces`.
fn found(setting: &Setting, rows: &[PrefetchRow], traces: &[PrefetchRow]) -> Findings {
    let mut found = Findings::with_method(
        "Rings of five shapes with five kinds of addresses. Each stream is fed to Markov, Recency \
        and Distance, as published and modified, with histories from a quarter to eight times the \
        ring, and to two entries per ring. The rows show the share of buffers whose first page was \
        predicted. A claim is judged on the streams whose measured pattern it covers; two entries \
        are judged by their wrong predictions.",
    );
    judged(rows, &mut found);
    recorded(traces, &mut found);
    name_option(setting, &mut found);
    // The paper's own case: one ring whose addresses recur but are not adjacent.
    let named =
        |row: &&PrefetchRow| row.ring_entries == 1024 && row.source.starts_with("Scattered");
    let source = rows
        .iter()
        .find(named)
        .map(|row| row.source.clone())
        .unwrap_or_default();
    found.figures.push(Figure::logarithmic(
        format!("Predicted share over history size: {source}"),
        "history entries",
        "predicted share",
        lines(rows, &source),
    ));
    found.explain(by_distance(&summarise(rows)));
    found.explain(
        "Markov and Recency cannot predict addresses that never recur. Two entries are right \
        whenever a next buffer is mapped, but the invalidation at the end of a burst removes them: \
        with bursts of one, every access walks.",
    );
    found.note("The paper prints no rate; \"most\" is interpreted as half, fixed before the runs.");
    found
}

#[cfg(test)]
mod tests;
