//! X07: TLB prefetchers against the rIOTLB's two entries (rIOMMU section 5.4), on synthetic rings.

use super::catalogue::{Experiment, Setting};
use super::figure::{Figure, Series};
use super::finding::{Demand, FindingRow, Findings, Measured, Printed};
use super::prefetch::{Predictor, summarise, synthetic};
use crate::error::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X07",
    title: "TLB prefetchers against two entries a ring",
    source: "rIOMMU section 5.4",
    measure,
};

/// "Most accesses", and what is less: the document prints no number.
const MOST: f64 = 0.5;

fn measure(_: &Setting) -> Result<Findings, LabError> {
    let rows = synthetic()?;
    let mut found = Findings::by(
        "Rings of five shapes with five kinds of addresses; each stream is fed to Markov, Recency and Distance, as published and modified, \
         with histories from a quarter to eight times the ring, and to two entries a ring. Shares of buffers whose first page was predicted.",
    );
    let printed = |text: &str| Printed {
        text: text.into(),
        value: MOST,
        source: "rIOMMU section 5.4, in words (claims.csv R54)".into(),
    };
    for summary in summarise(&rows) {
        let name = &summary.source;
        let mut push = |what: &str, value: f64, text: &str, demand| {
            let row = FindingRow::new(format!("{name}: {what}"), "", Measured::counted(value));
            found.rows.push(row.beside(printed(text)).held_to(demand));
        };
        let (few, most) = ("ineffective", "most accesses");
        push(
            "best as published",
            summary.best_baseline,
            few,
            Demand::AtMost,
        );
        push(
            "Markov, history below the ring",
            summary.markov_below,
            few,
            Demand::AtMost,
        );
        push(
            "Markov, history of the ring or more",
            summary.markov_above,
            most,
            Demand::AtLeast,
        );
        push(
            "Recency, history below the ring",
            summary.recency_below,
            few,
            Demand::AtMost,
        );
        push(
            "Recency, history of the ring or more",
            summary.recency_above,
            most,
            Demand::AtLeast,
        );
        let distance = summary.distance_below.max(summary.distance_above);
        push("Distance, any history", distance, few, Demand::AtMost);
        push(
            "two entries a ring, uninvalidated",
            summary.riotlb_uninvalidated,
            "always",
            Demand::AtLeast,
        );
        push(
            "two entries a ring, invalidated by bursts",
            summary.riotlb,
            "always",
            Demand::AtLeast,
        );
    }
    // The document's own case: one ring whose addresses recur without being neighbours.
    let named = |row: &&super::prefetch::PrefetchRow| {
        row.ring_entries == 1024 && row.source.contains("scattered")
    };
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
    found.figures.push(Figure {
        title: format!("Share predicted by history: {source}"),
        x: "entries of the history",
        y: "share predicted",
        log_x: true,
        series: vec![
            line("Markov, modified", Predictor::MarkovModified),
            line("Recency, modified", Predictor::RecencyModified),
            line("Distance, modified", Predictor::DistanceModified),
            line("Markov", Predictor::Markov),
        ],
    });
    found.explain(
        "Distance predicts wherever neighbours of a ring lie side by side (tidy, fresh and tree addresses), even as published when a burst \
         is used before it is unmapped. Addresses that do not come again leave Markov and Recency nothing. Two entries are right \
         whenever there is a next buffer, but the invalidation that ends a burst takes them: with bursts of one, every access walks.",
    );
    found.note("The document prints no rate; \"most\" is read as half, fixed before the runs.");
    Ok(found)
}
