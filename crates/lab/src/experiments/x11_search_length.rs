//! X11: how far the allocator searches, call by call (EIOVAR Figs. 3 and 9).

use ringfence_iova::Capacity;

use super::allocators::{Driven, W};
use super::catalogue::{Experiment, Setting};
use super::figure::{Figure, Series, thinned};
use super::finding::{Demand, FindingRow, Findings, Measured, Printed};
use super::printed::Sheet;
use super::stream::{by_run, counted, last, runs};
use crate::error::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X11",
    title: "Length of the allocator's search, call by call",
    source: "EIOVAR Figs. 3 and 9, Table 2",
    measure,
};

/// Calls that Fig. 3 plots.
const CALLS: usize = 40_000;

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let runs = runs(setting)?;
    let mut found = Findings::by(format!(
        "{} runs of mlx stream (decision 0011), one after the other on the same interface; the last {CALLS} searches of each \
         allocator are plotted.",
        runs.len()
    ));
    let sheet = Sheet::named("eiovar_table2")?;
    let facts = Sheet::named("eiovar_k_threshold_facts")?;
    let searches = |size, batch: usize, acknowledged: bool| -> Result<Vec<u32>, LabError> {
        let mut driven = Driven::new(size, batch)?;
        let mut all = Vec::new();
        for (number, run) in runs.iter().enumerate() {
            if number == 1 {
                // The first run fills the rings.
                all.clear();
            }
            match acknowledged {
                true => driven.run(&run.plan, |steps| all.push(steps))?,
                false => driven.run(&run.receive_only(), |steps| all.push(steps))?,
            };
        }
        let skipped = all.len().saturating_sub(CALLS);
        Ok(all.split_off(skipped))
    };
    let line = |name: &str, all: &[u32]| {
        let points: Vec<(f64, f64)> = (0..)
            .zip(all)
            .map(|(x, y)| (f64::from(x), f64::from(*y)))
            .collect();
        Series::line(name, thinned(&points, 800))
    };

    let strict = searches(None, 1, true)?;
    found.figures.push(Figure {
        title: "Fig. 3: strict, no freelists".into(),
        x: "alloc_iova calls",
        y: "rb_prev steps, largest of each 50 calls",
        log_x: false,
        series: vec![line("baseline", &strict)],
    });
    let mut series = Vec::new();
    for k in [64, 240, 250] {
        let all = searches(Some(Capacity::AtMost(k)), W, true)?;
        series.push(line(&format!("eiovar_{k}"), &all));
        let alone = searches(Some(Capacity::AtMost(k)), W, false)?;
        for (what, all) in [
            ("receive rings alone", alone),
            ("with acknowledgements", all),
        ] {
            let longest = all.iter().copied().max().unwrap_or(0);
            let row = FindingRow::new(
                format!("defer, k = {k}, {what}: longest search"),
                "rb_prev",
                Measured::counted(f64::from(longest)),
            );
            found.push(if k < W {
                let printed = Printed {
                    text: "spikes".into(),
                    value: 1.0,
                    source: "EIOVAR Fig. 9".into(),
                };
                row.beside(printed).held_to(Demand::AtLeast)
            } else {
                let printed = facts.printed(&[("subject", "eiovar_k>=W")], "value")?;
                row.beside(printed).held_to(Demand::Exact)
            });
        }
    }
    found.figures.push(Figure {
        title: "Fig. 9: deferred, freelists below and at W = 250".into(),
        x: "alloc_iova calls",
        y: "rb_prev steps, largest of each 50 calls",
        log_x: false,
        series,
    });

    let cell = |protection, column| {
        let wanted = [
            ("nic", "mlx"),
            ("metric", "search_len"),
            ("protection", protection),
            ("benchmark", "stream"),
        ];
        sheet.printed(&wanted, column)
    };
    let mut history = Vec::new();
    for (protection, batch) in [("strict", 1), ("defer", W)] {
        let counts = counted(&runs, None, batch)?;
        let mean = last(&counts)?.mean_steps();
        let row = FindingRow::new(
            format!("{protection}: mean search of the last run"),
            "rb_prev",
            Measured::counted(mean),
        );
        let row = row.beside(cell(protection, "baseline")?);
        found.push(row.held_to(Demand::Near).ordered_in("baseline"));
        let with = last(&counted(&runs, Some(Capacity::Unbounded), batch)?)?;
        let row = FindingRow::new(
            format!("{protection}, freelists: mean search of the last run"),
            "rb_prev",
            // The table prints whole numbers.
            Measured::counted(with.mean_steps().round()),
        );
        found.push(
            row.beside(cell(protection, "eiovar")?)
                .held_to(Demand::Exact),
        );
        let means = counts.iter().map(|counts| counts.mean_steps());
        let mut points = by_run(means);
        if let Some(first) = points.first_mut() {
            // The rings are filled in the first run, which takes no search.
            first.0 = 1.0;
        }
        history.push(Series::line(protection, points));
    }
    if let [strict, _] = history.as_slice()
        && let ([first, ..], [.., end]) = (strict.points.as_slice(), strict.points.as_slice())
        && strict.points.len() > 1
    {
        let row = FindingRow::new(
            "strict: mean search, last run over first",
            "",
            Measured::counted(end.1 / first.1.max(f64::MIN_POSITIVE)),
        );
        let printed = Printed {
            text: "grows".into(),
            value: 1.0,
            source: "EIOVAR section 5: the pathology develops as the system runs (erratum 4)"
                .into(),
        };
        found.push(row.beside(printed).held_to(Demand::AtLeast));
    }
    found.figures.push(Figure {
        title: "Mean search by run: history (erratum 4)".into(),
        x: "run",
        y: "rb_prev steps",
        log_x: false,
        series: history,
    });
    found.explain(
        "How long the tree searches depends on how often a transmit interrupt has been taken inside a receive loop, and where: the \
         document prints neither. Decision 0011 draws the place from a seed; the means above are what that gives, not what was wished.",
    );
    found.explain(
        "With k = W nothing is searched as long as a map follows each unmap, as in the receive rings alone. Acknowledgements are mapped \
         in one burst and unmapped in another: more than W addresses are then free at times, the lists take no more than k, and the \
         rest goes to the tree and is searched for later. Figure 9 shows none of that; how many acknowledgements were in flight there is \
         not printed.",
    );
    found.note("Erratum 4: the two documents, on one machine, differ by a factor of 2 in the cost of this search.");
    found.note("Every number is counted; nothing is timed or charged.");
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receive_rings_alone_never_search_lists_of_w() {
        let mut setting = Setting::smoke();
        setting.runs = 2;
        let found = EXPERIMENT.run(&setting).unwrap();
        let alone = |k: usize| {
            let what = format!("defer, k = {k}, receive rings alone: longest search");
            let row = found.rows.iter().find(|row| row.what == what);
            row.and_then(|row| row.measured).unwrap().median
        };
        assert!(alone(64) > 0.0 && alone(240) > 0.0);
        assert_eq!(alone(250), 0.0);
        assert_eq!(found.figures.len(), 3);
    }
}
