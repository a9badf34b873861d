//! X12: freelists of capacity k in strict, run by run (EIOVAR Figs. 4, 5 and 6).

use ringfence_iova::Capacity;

use super::experiment::Experiment;

use super::figure::{Figure, Series};
use super::finding::{FindingRow, Findings, NullModel, Requirement};
use super::published::Sheet;
use super::setting::Setting;
use super::stream::{
    SHAPES, SIZES, by_run, counted, gain_percent, last, name, packet, runs, runs_of, throughput,
    timed,
};
use ringfence_lab::LabError;
use ringfence_lab::modes::FlushKind;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X12",
    title: "Freelists of capacity k under strict protection",
    source: "EIOVAR section 6.1, Figs. 4-6",
    measure,
};

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let runs = runs(setting)?;
    let mut found = Findings::with_method(format!(
        "{} runs of mlx stream on one interface for each freelist capacity. Searches and list \
        lengths are counted, the DMA layer is timed, and throughput follows by the model from 1816 \
        cycles plus twice the cost of a map and an unmap.",
        runs.len()
    ));
    let facts = Sheet::named("eiovar_k_threshold_facts")?;
    let [mut speed, mut hits, mut held, mut search] = [const { Vec::new() }; 4];
    let all = timed(setting, &runs, &SIZES, FlushKind::PerUnmap)?;
    let mut baseline = None;
    for (size, costs) in SIZES.into_iter().zip(&all) {
        let name = name(size);
        let counts = counted(&runs, size, 1)?;
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
        search.push(Series::line(
            &name,
            by_run(counts.iter().map(|run| run.mean_steps())),
        ));
        let (count, cost) = (last(&counts)?, last(costs)?);
        found.push(FindingRow::new(
            format!("{name}: cycles per packet, last run"),
            "cycles",
            packet(&cost, &setting.profile),
        ));
        match size {
            None => baseline = Some(cost),
            Some(capacity) => {
                let baseline = baseline.as_ref().ok_or(LabError::Internal("baseline"))?;
                let gain = gain_percent(&cost, baseline, &setting.profile);
                let wanted = [("protection", "strict"), ("unit", "% better")];
                let row = |what: &str| {
                    FindingRow::new(format!("{name}: {what}"), "%", gain)
                        .with_null_model(NullModel::exactly(0.0))
                };
                let lower = facts.printed(&wanted, "value")?;
                let upper = lower.clone().read_as(60.0);
                found.push(row("throughput over baseline").at_least(lower));
                found.push(row("throughput over baseline, upper end").at_most(upper));
                let subject = if capacity == Capacity::AtMost(1) {
                    "eiovar_1"
                } else {
                    "eiovar_k>1"
                };
                let wanted = [("protection", "strict"), ("subject", subject)];
                let row = FindingRow::counted(
                    format!("{name}: freed ranges in the lists, mean"),
                    "nodes",
                    count.mean_held(),
                );
                let row = row.with_published(facts.printed(&wanted, "value")?);
                // The same two addresses wait with every capacity above 1: one of these rows is
                // judged.
                let judged = matches!(size, Some(Capacity::AtMost(1 | 8)));
                let row = match judged {
                    true => row.require(Requirement::Near),
                    false => row,
                };
                found.push(row.ordered_within("held"));
            }
        }
        if size == Some(Capacity::AtMost(1)) {
            let wanted = [("unit", "% of allocs"), ("protection", "strict")];
            let row = FindingRow::counted(
                format!("{name}: allocations from the list"),
                "%",
                100.0 * count.hit_rate(),
            );
            found.push(row.near(facts.printed(&wanted, "value")?));
        }
    }
    by_shape(setting, &facts, &mut found)?;
    let mut figure = |title: &str, y, series| {
        found.figures.push(Figure::linear(title, "run", y, series));
    };
    figure("Fig. 4a: throughput by the model", "Gbit/s", speed);
    figure("Fig. 4b: allocations from the lists", "%", hits);
    figure("Fig. 4c: freed ranges in the lists", "nodes", held);
    figure("Fig. 5: mean search", "rb_prev", search);
    found.explain(
        "Lists: the driver of mlx maps no acknowledgement, because it copies small frames into \
        their descriptors. Netserver's response at the start of a run has two mapped buffers. When \
        the driver's timer has reclaimed them, their two addresses wait in the lists, in addition \
        to the one that alternates: the paper's \"two additional (de)allocation that are performed \
        when Netperf starts running\". The mean over a run is a little below 2.5, because the \
        response is mapped at its start. The rows with every frame mapped are those of a driver \
        without this threshold: a burst of acknowledgements waits at once.",
    );
    found.explain(
        "Throughput: the gain equals the cost of the search. The baseline's search grows with each \
        run (X11), and these are ten runs of a hundredth of the paper's length, so the gain \
        depends on history that the paper does not print (erratum 4). The paper's own two \
        experiments, 20% to 60% here and 137% in Table 2, differ by more than that.",
    );
    found.note(
        "The paper prints 20% to 60%: one row for each end. A larger gain means a longer search of \
        the baseline.",
    );
    Ok(found)
}

/// Repeats the measurement on other ports: list occupancy, and hit rate of a single entry.
fn by_shape(setting: &Setting, facts: &Sheet, found: &mut Findings) -> Result<(), LabError> {
    for shape in &SHAPES {
        let runs = runs_of(setting, shape, setting.runs.clamp(1, 4))?;
        let one = last(&counted(&runs, Some(Capacity::AtMost(1)), 1)?)?;
        let all = last(&counted(&runs, Some(Capacity::Unbounded), 1)?)?;
        for (what, unit, subject, value) in [
            (
                "eiovar_1: allocations from the list",
                "%",
                ("unit", "% of allocs"),
                100.0 * one.hit_rate(),
            ),
            (
                "eiovar_1: freed ranges in the list, mean",
                "nodes",
                ("subject", "eiovar_1"),
                one.mean_held(),
            ),
            (
                "eiovar_inf: freed ranges in the lists, mean",
                "nodes",
                ("subject", "eiovar_k>1"),
                all.mean_held(),
            ),
        ] {
            let what = format!("{}, {what}", shape.0);
            let printed = facts.printed(&[("protection", "strict"), subject], "value")?;
            found.push(FindingRow::counted(what, unit, value).with_published(printed));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocators::Counts;
    use crate::stream::{assert_counted, counted_by_hand, with_costs_of_sizes};

    /// Compares the rows of each size with the counts and invalidations of strict, and the lines
    /// of the figures with both.
    fn assert_rows_and_lines(rows: &[FindingRow], figures: &[Figure], setting: &Setting) {
        let runs = runs(setting).unwrap();
        let last = |size| *counted(&runs, size, 1).unwrap().last().unwrap();
        let row = |what: &str| rows.iter().find(|row| row.quantity == what).unwrap();
        let plan = &runs.last().unwrap().plan;
        let invalidations = plan.unmaps as f64 / plan.maps.max(plan.unmaps) as f64;
        for (size, line) in SIZES.into_iter().zip(&figures[0].series) {
            let (name, counts) = (name(size), last(size));
            let cycles = row(&format!("{name}: cycles per packet, last run"));
            let cycles = cycles.measured.unwrap();
            // Each of two buffers is invalidated when it is unmapped.
            let modelled = 1816.0 + 2.0 * 2150.0 * invalidations;
            let off = cycles.modelled_part.unwrap() - modelled;
            assert!(off.abs() < 1e-9, "{name}: {cycles:?}");
            assert_eq!((&line.name, line.points.len()), (&name, runs.len()));
            let (run, speed) = line.points[runs.len() - 1];
            assert_eq!(run, runs.len() as f64);
            assert!((speed - 37_200.0 / cycles.median).abs() < 1e-9, "{name}");
            if size.is_none() {
                continue;
            }
            for (what, requirement, printed) in [
                ("throughput over baseline", Requirement::AtLeast, 20.0),
                (
                    "throughput over baseline, upper end",
                    Requirement::AtMost,
                    60.0,
                ),
            ] {
                let row = row(&format!("{name}: {what}"));
                assert_eq!(row.requirement, requirement, "{row:?}");
                assert_eq!(row.published.as_ref().unwrap().value, printed, "{row:?}");
                // Without an effect, the gain is 0.
                assert_eq!(row.null_model, Some(NullModel::exactly(0.0)), "{row:?}");
            }
            let held = row(&format!("{name}: freed ranges in the lists, mean"));
            assert_eq!(held.measured.unwrap().median, counts.mean_held());
            let printed = if name == "eiovar_1" { 0.5 } else { 2.5 };
            assert_eq!(held.published.as_ref().unwrap().value, printed, "{held:?}");
            let demand = match name.as_str() {
                "eiovar_1" | "eiovar_8" => Requirement::Near,
                _ => Requirement::Shown,
            };
            assert_eq!((held.requirement, held.group), (demand, Some("held")));
        }
        let hits = row("eiovar_1: allocations from the list");
        let counts = last(Some(Capacity::AtMost(1)));
        assert_eq!(hits.measured.unwrap().median, 100.0 * counts.hit_rate());
        assert_eq!(hits.published.as_ref().unwrap().value, 100.0);
        assert_eq!(hits.requirement, Requirement::Near);
        type Value = fn(&Counts) -> f64;
        let counted: [(&str, Value); 3] = [
            ("Fig. 4b: allocations from the lists", |counts| {
                100.0 * (counts.from_list as f64 / counts.allocs as f64)
            }),
            ("Fig. 4c: freed ranges in the lists", |counts| {
                counts.held as f64 / (counts.allocs + counts.frees) as f64
            }),
            ("Fig. 5: mean search", |counts| {
                counts.steps as f64 / counts.allocs as f64
            }),
        ];
        assert!(figures[0].title.starts_with("Fig. 4a: throughput"));
        for (figure, (title, value)) in figures[1..].iter().zip(counted) {
            assert_eq!(figure.title, title);
            assert_counted(figure, &runs, 1, value);
        }
    }

    #[test]
    fn every_size_has_its_rows_and_lines() {
        let mut setting = Setting::smoke();
        // The first run fills the rings: it allocates more than it frees.
        setting.runs = 2;
        let found = EXPERIMENT.run(&setting).unwrap();
        assert_eq!(found.figures.len(), 4);
        assert!(
            found
                .figures
                .iter()
                .all(|figure| figure.series.len() == SIZES.len())
        );
        assert_eq!(found.rows.len(), 6 + 5 * 3 + 1 + SHAPES.len() * 3);
        let of = |what: &str| {
            let row = found.rows.iter().find(|row| row.quantity == what);
            row.and_then(|row| row.measured).unwrap().median
        };
        // Fewer cycles per packet are a gain, and more are a loss.
        let cycles = |name: &str| of(&format!("{name}: cycles per packet, last run"));
        for name in SIZES.into_iter().map(name).skip(1) {
            let wanted = 100.0 * (cycles("baseline") / cycles(&name) - 1.0);
            for what in [
                "throughput over baseline",
                "throughput over baseline, upper end",
            ] {
                let gain = of(&format!("{name}: {what}"));
                assert!((gain - wanted).abs() < 1e-9, "{name}: {gain}, not {wanted}");
            }
        }
        assert_rows_and_lines(&found.rows, &found.figures, &setting);
        // One range alternates between list and ring: it is in the list after each free and not
        // after each allocation. Completed transmissions of a burst add to it.
        let held = |burst| {
            of(&format!(
                "every frame mapped, bursts of at most {burst}, eiovar_inf: freed ranges in the \
                lists, mean"
            ))
        };
        assert!(held(1) >= 0.5 && held(1) < 5.0, "{}", held(1));
        assert!(held(50) > 2.0 * held(10) && held(10) > held(1));
        // With small frames inlined, two addresses of a response wait in addition, as soon as its
        // timer has expired: after a fifth of this short run. The burst does not matter.
        for burst in [44, 200, 1] {
            let of = |what: &str| of(&format!("bursts of at most {burst}, {what}"));
            let held = of("eiovar_inf: freed ranges in the lists, mean");
            assert!((1.9..2.5).contains(&held), "{burst}: {held}");
            let hits = of("eiovar_1: allocations from the list");
            assert!(hits > 99.8, "{burst}: {hits}");
        }
        assert!(
            found
                .rows
                .iter()
                .all(|row| row.measured.is_some_and(|m| m.median.is_finite()))
        );
    }

    /// The rows of each port are those of lists by hand: two of a single entry, and one of
    /// unbounded lists, each beside its own printed number.
    #[test]
    fn rows_of_each_port_have_the_counts_of_their_own_lists() {
        let setting = Setting {
            runs: 2,
            ..Setting::smoke()
        };
        let facts = Sheet::named("eiovar_k_threshold_facts").unwrap();
        let mut found = Findings::default();
        by_shape(&setting, &facts, &mut found).unwrap();
        let mut rows = found.rows.iter();
        for shape in &SHAPES {
            let runs = runs_of(&setting, shape, 2).unwrap();
            let by_hand = |size| counted_by_hand(&runs, Some(size), 1)[1];
            let (allocs, hits, frees, one) = by_hand(Capacity::AtMost(1));
            let (_, _, _, all) = by_hand(Capacity::Unbounded);
            let calls = (allocs + frees) as f64;
            assert!(one as f64 / calls < 1.0 && all > one, "{}", shape.0);
            for (what, value, printed) in [
                (
                    "eiovar_1: allocations from the list",
                    100.0 * (hits as f64 / allocs as f64),
                    100.0,
                ),
                (
                    "eiovar_1: freed ranges in the list, mean",
                    one as f64 / calls,
                    0.5,
                ),
                (
                    "eiovar_inf: freed ranges in the lists, mean",
                    all as f64 / calls,
                    2.5,
                ),
            ] {
                let row = rows.next().unwrap();
                assert_eq!(row.quantity, format!("{}, {what}", shape.0));
                assert_eq!(row.measured.unwrap().median, value, "{row:?}");
                assert_eq!(row.published.as_ref().unwrap().value, printed, "{row:?}");
                assert_eq!(row.requirement, Requirement::Shown, "{row:?}");
            }
        }
        assert!(rows.next().is_none());
    }

    /// A map and an unmap cost another number of cycles with each size: each row and each line has
    /// the cost of its own.
    #[test]
    fn each_size_has_the_cost_of_its_own_freelists() {
        let setting = Setting {
            runs: 2,
            ..Setting::smoke()
        };
        let costs = [900.0, 700.0, 500.0, 400.0, 300.0, 100.0];
        let costs: Vec<_> = SIZES.into_iter().zip(costs).collect();
        let runs = runs(&setting).unwrap();
        let (found, of_runs) = with_costs_of_sizes(&costs, FlushKind::PerUnmap, || {
            let of_runs = timed(&setting, &runs, &SIZES, FlushKind::PerUnmap).unwrap();
            (EXPERIMENT.run(&setting).unwrap(), of_runs)
        });
        let of = |what: &str| {
            let row = found.rows.iter().find(|row| row.quantity == what);
            row.and_then(|row| row.measured).unwrap()
        };
        let cycles = |size| of(&format!("{}: cycles per packet, last run", name(size)));
        let lines = found.figures[0].series.iter().zip(of_runs);
        for ((size, cost), (line, of_runs)) in costs.into_iter().zip(lines) {
            let name = name(size);
            let cycles = cycles(size);
            let measured = cycles.median - cycles.modelled_part.unwrap();
            assert!((measured - 2.0 * cost).abs() < 1e-6, "{name}: {measured}");
            assert_eq!(line.name, name);
            // The first run invalidates less: it fills the rings. Each point is that of its run.
            let points = of_runs
                .iter()
                .map(|of| throughput(of, &setting.profile).median);
            assert_eq!(line.points, by_run(points), "{name}");
            assert_ne!(line.points[0].1, line.points[1].1, "{name}");
            let (_, speed) = line.points[1];
            assert!(
                (speed - 37_200.0 / cycles.median).abs() < 1e-9,
                "{name}: {speed}"
            );
        }
    }
}
