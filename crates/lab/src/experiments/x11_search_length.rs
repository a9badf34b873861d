//! X11: how far the allocator searches, call by call (EIOVAR Figs. 3 and 9).

use ringfence_devices::workload::BURST;
use ringfence_iova::Capacity;

use super::allocators::{Driven, W};
use super::catalogue::{Experiment, Setting, built};
use super::figure::{Figure, Series, thinned};
use super::finding::{Demand, FindingRow, Findings, Measured, Printed};
use super::printed::Sheet;
use super::stream::{capture, counted, last, runs};
use crate::error::LabError;
use crate::plan::{Step, Timed};

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X11",
    title: "Length of the allocator's search, call by call",
    source: "EIOVAR Figs. 3 and 9, Table 2",
    measure: built(measure),
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
                false => driven.run(&run.receive_only().plan, |steps| all.push(steps))?,
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

    for (protection, batch) in [("strict", 1), ("defer", W)] {
        let counts = counted(&runs, Some(Capacity::Unbounded), batch)?;
        let row = FindingRow::new(
            format!("{protection}, freelists: mean search of the last run"),
            "rb_prev",
            // The table prints whole numbers.
            Measured::counted(last(&counts)?.mean_steps().round()),
        );
        found.push(
            row.beside(cell(protection, "eiovar")?)
                .held_to(Demand::Exact),
        );
    }
    history(setting, &mut found)?;
    found.explain(
        "History: while its rings are first filled an interface searches nothing; with the first transmit interrupts the search gets the \
         length above within a few hundred allocations, and keeps it over two million. That longer histories lengthen it further, as the \
         document's 150 runs do (Fig. 6), is not reproduced: what in its runs goes on mixing the rings is not known here.",
    );
    found.explain(
        "How long the tree searches depends on how often a transmit interrupt has been taken inside a receive loop, and where: the \
         document prints neither. Decision 0011 draws the place from a seed; the means above are what that gives, not what was wished.",
    );
    found.explain(
        "With k = W nothing is searched as long as a map follows each unmap, as in the receive rings alone. A transmit interrupt gives a \
         burst of addresses back that no map follows at once: more than W are then free, the lists take no more than k, and the rest goes to \
         the tree and is searched for later (X13 has the threshold by burst).",
    );
    found.note("Erratum 4: the two documents, on one machine, differ by a factor of 2 in the cost of this search.");
    found.note("Every number is counted; nothing is timed or charged.");
    Ok(found)
}

/// Steps of a search that the document prints for mlx stream.
fn cell(protection: &str, column: &str) -> Result<Printed, LabError> {
    let wanted = [
        ("nic", "mlx"),
        ("metric", "search_len"),
        ("protection", protection),
        ("benchmark", "stream"),
    ];
    Sheet::named("eiovar_table2")?.printed(&wanted, column)
}

/// Allocations of the first window of [`history`]; each window ends at twice as many as the one before.
const FIRST: u64 = 256;

/// Mean searches of one interface from its first replaced buffer on, without freelists: over windows that end at [`FIRST`] allocations, at
/// twice as many, and so on.
fn history(setting: &Setting, found: &mut Findings) -> Result<(), LabError> {
    let runs = setting.history.max(2);
    let mut capture = capture(setting, BURST)?;
    let mut sides = Vec::new();
    for (protection, batch) in [("strict", 1), ("defer", W)] {
        sides.push((protection, Driven::new(None, batch)?, Windows::default()));
    }
    for _ in 0..runs {
        let run = capture.run()?;
        for (_, driven, windows) in &mut sides {
            let filled = windows.began;
            windows.began = true;
            // The driver fills its rings before anything is unmapped: these allocations search nothing.
            let first = run
                .plan
                .steps
                .iter()
                .position(|timed| matches!(timed.step, Step::Unmap { .. }));
            let maps = |timed: &&Timed| matches!(timed.step, Step::Map { .. });
            let filling = run
                .plan
                .steps
                .iter()
                .take(first.unwrap_or(0))
                .filter(maps)
                .count();
            let mut skip = if filled { 0 } else { filling };
            driven.run(&run.plan, |steps| match skip {
                0 => windows.add(steps),
                _ => skip -= 1,
            })?;
        }
    }
    let mut series = Vec::new();
    for (protection, _, mut windows) in sides {
        windows.close();
        let points = windows.means;
        let (first, end) = (points.first().copied(), points.last().copied());
        let (Some(first), Some(end)) = (first, end) else {
            return Err(LabError::Internal("no allocations"));
        };
        let row = FindingRow::new(
            format!("{protection}: mean search up to allocation {:.0}", end.0),
            "rb_prev",
            Measured::counted(end.1),
        );
        let row = row.beside(cell(protection, "baseline")?);
        found.push(row.held_to(Demand::Near).ordered_in("baseline"));
        let row = FindingRow::new(
            format!(
                "{protection}: that beyond the mean search up to allocation {:.0}",
                first.0
            ),
            "rb_prev",
            Measured::counted(end.1 - first.1),
        );
        let printed = Printed {
            text: "grows".into(),
            value: 0.0,
            source: "EIOVAR section 5: the pathology develops as the system runs (erratum 4)"
                .into(),
        };
        found.push(if protection == "strict" {
            row.beside(printed).held_to(Demand::AtLeast)
        } else {
            row.beside(printed)
        });
        let settled = points.iter().find(|(_, mean)| *mean >= 0.9 * end.1);
        let row = FindingRow::new(
            format!("{protection}: allocations after which it is nine tenths of that"),
            "",
            Measured::counted(settled.map_or(end.0, |(at, _)| *at)),
        );
        found.push(row);
        series.push(Series::line(protection, points));
    }
    found.figures.push(Figure {
        title: "Mean search by length of history (erratum 4)".into(),
        x: "allocations since the rings were filled",
        y: "rb_prev steps",
        log_x: true,
        series,
    });
    Ok(())
}

/// Means over windows of doubling ends.
#[derive(Debug, Default)]
struct Windows {
    began: bool,
    seen: u64,
    count: u64,
    steps: u64,
    means: Vec<(f64, f64)>,
}

impl Windows {
    fn add(&mut self, steps: u32) {
        self.seen += 1;
        self.count += 1;
        self.steps += u64::from(steps);
        if self.seen >= FIRST && self.seen.is_power_of_two() {
            self.close();
        }
    }

    /// Ends a window; one that is short says little, and is left out.
    fn close(&mut self) {
        if 4 * self.count >= self.seen {
            let mean = self.steps as f64 / self.count as f64;
            self.means.push((self.seen as f64, mean));
        }
        (self.count, self.steps) = (0, 0);
    }
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
        let grown = found
            .rows
            .iter()
            .find(|row| row.what.starts_with("strict: that beyond"));
        assert_eq!(grown.unwrap().holds, Some(true), "{grown:?}");
    }
}
