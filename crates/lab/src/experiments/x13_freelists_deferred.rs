//! X13: freelists of k in deferred, and the threshold at W (EIOVAR Figs. 7 and 8).

use ringfence_iova::Capacity;

use super::allocators::{Counts, Driven, W};
use super::capture::Run;
use super::catalogue::{Experiment, Setting};
use super::figure::{Figure, Series};
use super::finding::{Demand, FindingRow, Findings, Measured, Printed};
use super::printed::Sheet;
use super::stream::{SIZES, by_run, counted, last, name, packet, runs, throughput, timed};
use crate::error::LabError;
use crate::modes::FlushKind;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X13",
    title: "Freelists of k under deferred protection, and the threshold at W = 250",
    source: "EIOVAR section 6.2, Figs. 7 and 8",
    measure,
};

/// Sizes of the sweep.
const SWEEP: [usize; 15] = [
    0, 1, 8, 32, 64, 128, 200, 240, 249, 250, 300, 350, 400, 450, 512,
];

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let runs = runs(setting)?;
    let mut found = Findings::by(format!(
        "{} runs of mlx stream on one interface, frees deferred until {W} wait, for each size of the freelists.",
        runs.len()
    ));
    let facts = Sheet::named("eiovar_k_threshold_facts")?;
    let fact = |subject: &str, unit: &str| {
        facts.printed(
            &[
                ("subject", subject),
                ("unit", unit),
                ("protection", "deferred"),
            ],
            "value",
        )
    };
    let [mut speed, mut hits, mut held] = [const { Vec::new() }; 3];
    for size in SIZES {
        let name = name(size);
        let counts = counted(&runs, size, W)?;
        let costs = timed(setting, &runs, size, FlushKind::Deferred)?;
        let of_run = |cost| throughput(cost, &setting.profile);
        speed.push(Series::line(
            &name,
            by_run(costs.iter().map(|cost| of_run(cost).median)),
        ));
        hits.push(Series::line(
            &name,
            by_run(counts.iter().map(|run| 100.0 * run.hit_rate())),
        ));
        held.push(Series::line(
            &name,
            by_run(counts.iter().map(|run| run.mean_held())),
        ));
        let (count, cost) = (last(&counts)?, last(&costs)?);
        found.push(FindingRow::new(
            format!("{name}: cycles a packet, last run"),
            "cycles",
            packet(&cost, &setting.profile),
        ));
        let large = matches!(size, Some(Capacity::AtMost(512) | Capacity::Unbounded));
        let printed = if large {
            fact("eiovar_512, eiovar_inf", "Gbps")?
        } else {
            fact("baseline, eiovar_1, eiovar_8, eiovar_64", "Gbps")?
        };
        let row = FindingRow::new(
            format!("{name}: throughput, last run"),
            "Gbit/s",
            of_run(&cost),
        );
        let demand = if large { Demand::AtLeast } else { Demand::Near };
        found.push(row.beside(printed).held_to(demand).ordered_in("throughput"));
        if size == Some(Capacity::AtMost(64)) {
            let row = FindingRow::new(
                "eiovar_64: allocations from the lists",
                "%",
                Measured::counted(100.0 * count.hit_rate()),
            );
            found.push(row.beside(fact("eiovar_64", "%")?).held_to(Demand::Near));
            let row = FindingRow::new(
                "eiovar_64: freed ranges in the lists, mean",
                "nodes",
                Measured::counted(count.mean_held()),
            );
            found.push(
                row.beside(fact("eiovar_64", "nodes")?)
                    .held_to(Demand::Near)
                    .ordered_in("held"),
            );
        }
        if size == Some(Capacity::Unbounded) {
            let row = FindingRow::new(
                "eiovar_inf: freed ranges in the lists, mean",
                "nodes",
                Measured::counted(count.mean_held()),
            );
            found.push(
                row.beside(fact("eiovar_inf", "nodes")?)
                    .held_to(Demand::Near)
                    .ordered_in("held"),
            );
        }
    }

    let [mut search, mut acknowledged, mut occupancy, mut while_any] = [const { Vec::new() }; 4];
    let mut needed: Option<usize> = None;
    for k in SWEEP {
        let whole = last(&counted(&runs, Some(Capacity::AtMost(k)), W)?)?;
        acknowledged.push((k as f64, whole.mean_steps()));
        if whole.steps == 0 {
            needed.get_or_insert(k);
        }
        let count = alone(&runs, k)?;
        search.push((k as f64, count.mean_steps()));
        occupancy.push((k as f64, count.mean_held()));
        while_any.push((k as f64, mean_while_any(&count)));
        let row = FindingRow::new(
            format!("receive rings alone, k = {k}: mean search"),
            "rb_prev",
            Measured::counted(count.mean_steps()),
        );
        if k >= W {
            found.push(
                row.beside(fact("eiovar_k>=W", "rb_prev")?)
                    .held_to(Demand::Exact),
            );
        } else {
            let printed = Printed {
                text: "> 0".into(),
                value: 0.0,
                source: "EIOVAR Fig. 8: the threshold".into(),
            };
            // A search of any length is more than none.
            let row = row.beside(printed);
            found.push(match count.steps {
                0 => FindingRow {
                    holds: Some(false),
                    ..row.held_to(Demand::AtLeast)
                },
                _ => row.held_to(Demand::AtLeast),
            });
        }
        if (1..W).contains(&k) {
            let row = FindingRow::new(
                format!(
                    "receive rings alone, k = {k}: freed ranges in the lists while any are there"
                ),
                "nodes",
                Measured::counted(mean_while_any(&count)),
            );
            let source = "EIOVAR section 6.2: (1/(k+1)) sum of 0..k = k/2";
            let printed = Printed::derived(k as f64 / 2.0, source);
            // A list of one that was used is empty: the formula's 1/2 counts the state before.
            let demand = if k < 8 { Demand::Shown } else { Demand::Near };
            found.push(row.beside(printed).held_to(demand).ordered_in("occupancy"));
        }
    }
    let row = FindingRow::new(
        "with acknowledgements: smallest k of the sweep without any search",
        "",
        Measured::counted(needed.map_or(f64::INFINITY, |k| k as f64)),
    );
    let printed = facts.printed(&[("subject", "W")], "value")?;
    found.push(row.beside(printed).held_to(Demand::Near));
    let gain = |k: usize| -> Result<Measured, LabError> {
        let costs = timed(
            setting,
            &runs,
            Some(Capacity::AtMost(k)),
            FlushKind::Deferred,
        )?;
        Ok(throughput(&last(&costs)?, &setting.profile))
    };
    let (below, at) = (gain(W - 10)?, gain(W)?);
    let row = FindingRow::new(
        "throughput at k = 250 over k = 240",
        "%",
        Measured::timed(
            100.0 * (at.median / below.median - 1.0),
            at.spread + below.spread,
        ),
    );
    let printed = facts.printed(&[("subject", "eiovar_k"), ("unit", "%")], "value")?;
    found.push(row.beside(printed).held_to(Demand::Near));

    let mut figure = |title: &str, x, y, series| {
        found.figures.push(Figure {
            title: title.into(),
            x,
            y,
            log_x: false,
            series,
        });
    };
    figure("Fig. 7a: throughput by the model", "run", "Gbit/s", speed);
    figure("Fig. 7b: allocations from the lists", "run", "%", hits);
    figure("Fig. 7c: freed ranges in the lists", "run", "nodes", held);
    let series = vec![
        Series::line("receive rings alone", search),
        Series::line("with acknowledgements", acknowledged),
    ];
    figure("Fig. 8: the threshold at W", "k", "rb_prev", series);
    let series = vec![
        Series::line("over all allocations", occupancy),
        Series::line("while any are there", while_any),
    ];
    figure("Occupancy of the lists", "k", "nodes", series);
    found.explain(
        "Throughput: the document's ratio at k = 250 is that of what a processor of 2012 spent in searches to all that a packet cost it. \
         Here a step of the search and the rest of the layer cost what they cost on this processor, and 1816 cycles are charged for \
         the packet, so a jump in the search shows less in throughput.",
    );
    found.explain(
        "The threshold is at W exactly where a map follows each unmap: in the receive rings alone. With the acknowledgements of decision \
         0011, which are mapped in one burst and unmapped in another, more than W addresses are free at times, and the lists have to hold \
         these too: the jump comes at a larger k, and k = 240 and 250 differ by noise.",
    );
    found.explain(
        "Occupancy: k freed ranges are used up by the first k of 250 allocations; the formula is their mean over these. Over all 250 \
         allocations the mean is k/2 x k/250, which is the other line.",
    );
    Ok(found)
}

/// The last run of the receive rings alone.
fn alone(runs: &[Run], k: usize) -> Result<Counts, LabError> {
    let mut driven = Driven::new(Some(Capacity::AtMost(k)), W)?;
    let mut counts = Counts::default();
    for run in runs {
        counts = driven.run(&run.receive_only(), |_| {})?;
    }
    Ok(counts)
}

/// Mean number of freed ranges over the allocations that found any: those are as many as came from a list.
fn mean_while_any(count: &Counts) -> f64 {
    count.held as f64 / count.from_list.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threshold_is_at_w_exactly() {
        let found = EXPERIMENT.run(&Setting::smoke()).unwrap();
        let searches = found
            .rows
            .iter()
            .filter(|row| row.what.ends_with(": mean search"));
        let holds: Vec<_> = searches.map(|row| (row.what.as_str(), row.holds)).collect();
        assert_eq!(holds.len(), SWEEP.len());
        for (what, holds) in holds {
            assert_eq!(holds, Some(true), "{what}");
        }
    }
}
