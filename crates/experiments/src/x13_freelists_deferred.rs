//! X13: freelists of capacity k in deferred, and the threshold at W (EIOVAR Figs. 7 and 8).

use ringfence_iova::Capacity;

use super::allocators::{DrivenAllocator, W};
use super::capture::Run;
use super::experiment::Experiment;
use super::figure::{Figure, Series};
use super::finding::{FindingRow, Findings, Measured, NullModel, Published, Requirement};
use super::model::gbps;
use super::published::{BASELINE_CYCLES, CLOCK_GHZ, Sheet};
use super::setting::Setting;
use super::stream::{
    SHAPES, SIZES, by_run, counted, gain_percent, last, name, packet, runs, runs_of, throughput,
    timed,
};
use super::timed::Cost;
use ringfence_lab::LabError;
use ringfence_lab::Profile;
use ringfence_lab::modes::FlushKind;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X13",
    title: "Freelists of capacity k under deferred protection, and the threshold at W = 250",
    source: "EIOVAR section 6.2, Figs. 7 and 8",
    measure,
};

/// Capacities of the sweep.
const SWEEP: [usize; 15] = [
    0, 1, 8, 32, 64, 128, 200, 240, 249, 250, 300, 350, 400, 450, 512,
];

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let runs = runs(setting)?;
    let mut found = Findings::with_method(format!(
        "{} runs of mlx stream on one interface for each freelist capacity; frees are deferred \
        until {W} wait.",
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
    let all = timed(setting, &runs, &SIZES, FlushKind::Deferred)?;
    for (size, costs) in SIZES.into_iter().zip(&all) {
        let name = name(size);
        let counts = counted(&runs, size, W)?;
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
        let (count, cost) = (last(&counts)?, last(costs)?);
        found.push(FindingRow::new(
            format!("{name}: cycles per packet, last run"),
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
        let demand = if large {
            Requirement::AtLeast
        } else {
            Requirement::Near
        };
        let none = NullModel::exactly(gbps(CLOCK_GHZ, BASELINE_CYCLES));
        let row = row.with_published(printed).with_null_model(none);
        found.push(row.require(demand).ordered_within("throughput"));
        if size == Some(Capacity::AtMost(64)) {
            let row = FindingRow::counted(
                "eiovar_64: allocations from the lists",
                "%",
                100.0 * count.hit_rate(),
            );
            found.push(row.near(fact("eiovar_64", "%")?));
            let row = FindingRow::counted(
                "eiovar_64: freed ranges in the lists, mean",
                "nodes",
                count.mean_held(),
            );
            found.push(row.near(fact("eiovar_64", "nodes")?).ordered_within("held"));
        }
        if size == Some(Capacity::Unbounded) {
            let row = FindingRow::counted(
                "eiovar_inf: freed ranges in the lists, mean",
                "nodes",
                count.mean_held(),
            );
            found.push(
                row.near(fact("eiovar_inf", "nodes")?)
                    .ordered_within("held"),
            );
        }
    }

    let alone: Vec<Run> = runs.iter().map(Run::receive_only).collect();
    let [mut search, mut all_rings, mut held_alone, mut held_with] = [const { Vec::new() }; 4];
    for k in SWEEP {
        let whole = last(&counted(&runs, Some(Capacity::AtMost(k)), W)?)?;
        all_rings.push((k as f64, whole.mean_steps()));
        held_with.push((k as f64, whole.mean_held()));
        let count = last(&counted(&alone, Some(Capacity::AtMost(k)), W)?)?;
        search.push((k as f64, count.mean_steps()));
        held_alone.push((k as f64, count.mean_held()));
        let row = FindingRow::counted(
            format!("receive rings alone, k = {k}: mean search"),
            "rb_prev",
            count.mean_steps(),
        );
        if k >= W {
            found.push(row.exact(fact("eiovar_k>=W", "rb_prev")?));
        } else {
            let printed = Published::new("> 0", 0.0, "EIOVAR Fig. 8: the threshold");
            // A search of any positive length passes.
            found.push(row.with_published(printed).require(Requirement::Above));
        }
        if (1..W).contains(&k) {
            let source = "EIOVAR section 6.2: (1/(k+1)) sum of 0..k = k/2";
            for (rings, configuration, count) in [
                ("receive rings alone", "occupancy, receive rings", &count),
                ("all rings", "occupancy, all rings", &whole),
            ] {
                let row = FindingRow::counted(
                    format!("{rings}, k = {k}: freed ranges in the lists, mean"),
                    "nodes",
                    count.mean_held(),
                );
                let printed = Published::derived(k as f64 / 2.0, source).rounded_by(0.0);
                found.push(row.near(printed).ordered_within(configuration));
            }
        }
    }
    let printed = facts.printed(&[("subject", "W")], "value")?;
    let row = FindingRow::counted(
        "receive rings alone: smallest k without any search",
        "",
        threshold(&alone)?,
    );
    found.push(row.exact(printed.clone()));
    let what = "receive rings alone: maximum of free addresses";
    found.push(FindingRow::counted(what, "", most_free(&alone)?));
    for shape @ (name, ..) in &SHAPES {
        let runs = runs_of(setting, shape, setting.runs.clamp(2, 4))?;
        let row = FindingRow::counted(
            format!("all rings, {name}: smallest k without any search"),
            "",
            threshold(&runs)?,
        );
        let row = row.with_published(printed.clone());
        found.push(if *shape == SHAPES[0] {
            row.require(Requirement::Near)
        } else {
            row
        });
        let what = format!("all rings, {name}: maximum of free addresses");
        found.push(FindingRow::counted(what, "", most_free(&runs)?));
    }
    let printed = facts.printed(&[("subject", "eiovar_k"), ("unit", "%")], "value")?;
    let mut gains = Vec::new();
    for (rings, costs) in costs_around_w(setting, &alone, &runs)? {
        let percent = gain_at_w(&costs, &setting.profile);
        gains.push(gained(rings, &percent, printed.value));
        let row = FindingRow::new(
            format!("{rings}: throughput at k = 250 over k = 240"),
            "%",
            percent,
        )
        .with_null_model(NullModel::exactly(0.0));
        found.push(row.near(printed.clone()));
    }

    let mut figure = |title: &str, x, y, series| {
        found.figures.push(Figure::linear(title, x, y, series));
    };
    figure("Fig. 7a: throughput by the model", "run", "Gbit/s", speed);
    figure("Fig. 7b: allocations from the lists", "run", "%", hits);
    figure("Fig. 7c: freed ranges in the lists", "run", "nodes", held);
    let series = vec![
        Series::line("receive rings alone", search),
        Series::line("all rings", all_rings),
    ];
    figure("Fig. 8: the threshold at W", "k", "rb_prev", series);
    let series = vec![
        Series::line("receive rings alone", held_alone),
        Series::line("all rings", held_with),
        Series::line("k/2", SWEEP.map(|k| (k as f64, k as f64 / 2.0)).to_vec()),
    ];
    figure("Occupancy of the lists", "k", "nodes", series);
    found.explain(format!(
        "Throughput: the paper's ratio at k = 250 compares a 2012 processor's search cycles with \
        all its cycles per packet. Here the search and the rest of the DMA layer cost what they \
        cost on this processor, and 1816 cycles are modelled per packet. The same jump in the \
        search changes throughput by {}.",
        gains.join(", and by "),
    ));
    found.explain(
        "The threshold follows from a model: allocations never reach the tree if the lists can \
        hold every address that was allocated before and is free now. Where maps and unmaps \
        alternate, as in the receive rings alone, the number of addresses that are allocated or \
        wait for invalidation moves between L and L + W, so at most W are free: exactly 250. All \
        rings have the two buffers of a control message more, at most W + 2, for every length of a \
        burst. If every frame is mapped, a transmit ring holds b acknowledgements before its \
        interrupt and none after it, so at most W + b are free: 450 with bursts of 200, and 251 \
        with bursts of one.",
    );
    found.explain(
        "Occupancy follows from the same model: W addresses are freed and then reused. The lists \
        hold 1 to k, then k for W - k frees; k - 1 to 0, then 0 for W - k allocations. This is kW \
        over 2W calls, exactly k/2. Unbounded lists hold W/2 and the response's two addresses. The \
        paper derives k/2 from the k allocations that the lists satisfy.",
    );
    Ok(found)
}

/// Capacities whose throughput is compared.
const AROUND_W: [usize; 2] = [W - 10, W];

/// Costs of the last run, in the order of [`AROUND_W`], for the receive rings alone and for all
/// rings.
fn costs_around_w(
    setting: &Setting,
    alone: &[Run],
    all: &[Run],
) -> Result<[(&'static str, [Cost; 2]); 2], LabError> {
    let sizes = AROUND_W.map(|k| Some(Capacity::AtMost(k)));
    let costs = |runs| {
        let costs = timed(setting, runs, &sizes, FlushKind::Deferred)?;
        let [below, at] = costs.as_slice() else {
            return Err(LabError::Internal("two costs"));
        };
        Ok([last(below)?, last(at)?])
    };
    Ok([
        ("receive rings alone", costs(alone)?),
        ("all rings", costs(all)?),
    ])
}

/// Gain of throughput at the second capacity of [`AROUND_W`] over the first, in percent.
fn gain_at_w([below, at]: &[Cost; 2], profile: &Profile) -> Measured {
    gain_percent(at, below, profile)
}

/// Compares the gain of throughput at W, in percent, with the `printed` one.
fn gained(rings: &str, gain: &Measured, printed: f64) -> String {
    let off = gain.median - printed;
    let than = match off {
        _ if off.is_nan() || off.abs() <= gain.spread || gain.spread.is_nan() => {
            "the paper's gain, within the spread"
        }
        less if less < 0.0 => "less than in the paper",
        _ => "more than in the paper",
    };
    format!("{:.1}% with {rings} ({than})", gain.median)
}

/// Returns the maximum number of addresses that were allocated before and are free at the same
/// time. Lists of this capacity leave nothing to the tree.
fn most_free(runs: &[Run]) -> Result<f64, LabError> {
    let mut driven = DrivenAllocator::new(Some(Capacity::Unbounded), W)?;
    for run in runs {
        driven.run(&run.plan, |_| {})?;
    }
    Ok(driven.unused().0 as f64)
}

/// Returns the smallest k for which the last of `runs` has no search.
fn threshold(runs: &[Run]) -> Result<f64, LabError> {
    // The upper bound is above the number of addresses that are ever free.
    let (mut searching, mut quiet) = (0, 1 << 14);
    while quiet - searching > 1 {
        let k = searching + (quiet - searching) / 2;
        match last(&counted(runs, Some(Capacity::AtMost(k)), W)?)?.steps {
            0 => quiet = k,
            _ => searching = k,
        }
    }
    Ok(quiet as f64)
}

#[cfg(test)]
mod tests;
