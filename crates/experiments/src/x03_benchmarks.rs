//! X03: throughput and CPU utilisation of five benchmarks on two adapters in seven modes (rIOMMU
//! Fig. 12 and Table 2).

mod explanations;
mod request_response;

use super::benchmarks::{Extra, extra, timed_first};
use super::experiment::Experiment;
use super::finding::{FindingRow, Findings, Measured, NullModel};
use super::history::timed_runs;
use super::model::PACKET_BYTES;
use super::published::{
    BASELINE_CYCLES, BASELINES, Baseline, Benchmark, CLOCK_GHZ, Metric, Nic, Sheet, TABLE_2,
    TABLE_3, Table2Row, Variant,
};
use super::setting::Setting;
use super::timed::CountedSteps;
use super::x04_latency::round_trips;
use ringfence_lab::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X03",
    title: "Five benchmarks, two adapters, seven modes",
    source: "rIOMMU Fig. 12, Table 2",
    measure,
};

/// Group names of the rows of Table 2: one benchmark on one adapter each.
const GROUPS: [&str; 10] = [
    "mlx stream",
    "mlx rr",
    "mlx apache 1M",
    "mlx apache 1K",
    "mlx memcached",
    "brcm stream",
    "brcm rr",
    "brcm apache 1M",
    "brcm apache 1K",
    "brcm memcached",
];

/// Quantity of the rows of C_none.
const FRAME: &str = "cycles per frame without protection";
/// Quantity of the rows of the wire's limit.
const WIRE: &str = "cycles per frame at the rate of the wire";
/// Quantity of the rows that count the search.
const STEPS: &str = "strict, search steps per allocation";

/// Quantity of the rows of the cycles that `mode` adds.
fn added(mode: &str) -> String {
    format!("{mode}, additional cycles per frame")
}

/// Cell of Table 2 to which a row was fitted: metric and baseline of `riommu`.
type Cell = (Metric, Baseline);

/// Cost model of a frame: cycles without protection, and the minimum cycles per frame that the wire
/// rate imposes (0 for no limit).
#[derive(Debug, Clone, Copy)]
pub(super) struct Frame {
    c_none: f64,
    floor: f64,
    fitted: Option<Cell>,
}

impl Frame {
    /// A frame whose `c_none` is known.
    pub(super) const fn new(c_none: f64, floor: f64) -> Self {
        Self {
            c_none,
            floor,
            fitted: None,
        }
    }

    /// Frames per cycle if protection adds `extra` cycles to each frame.
    pub(super) fn throughput(&self, extra: f64) -> f64 {
        // NaN, if no C_none fits, stays NaN.
        let cycles = self.c_none + extra;
        1.0 / if cycles < self.floor {
            self.floor
        } else {
            cycles
        }
    }

    /// CPU utilisation: 1 unless the wire is saturated.
    pub(super) fn cpu(&self, extra: f64) -> f64 {
        match self.floor {
            floor if self.c_none + extra > floor => 1.0,
            floor => (self.c_none + extra) / floor,
        }
    }

    /// The cost model for one row of Table 2, from timed runs without a history. Also returns the
    /// rows of the model, named `group`: its cycles, and the costs that it is fitted to.
    ///
    /// # Errors
    /// The workload cannot continue, or memory is exhausted.
    pub(super) fn of(
        setting: &Setting,
        nic: Nic,
        benchmark: Benchmark,
        group: &str,
    ) -> Result<(Self, Vec<FindingRow>), LabError> {
        let mut rows = TABLE_2.iter();
        let row = rows.find(|row| row.nic == nic && row.benchmark == benchmark);
        let row = row.ok_or(LabError::Internal("a row of Table 2"))?;
        let setting = Setting {
            history: 0,
            ..setting.clone()
        };
        let costs = extra(&setting, nic, benchmark, CountedSteps::All)?.cycles;
        let frame = frame(row, |mode| overhead(&costs, mode));
        let mut rows = frame.rows(group);
        if let Some((_, baseline)) = frame.fitted {
            let modes = [Variant::Coherent.name(), baseline.name()];
            let costs = costs.iter().filter(|(mode, _)| modes.contains(mode));
            rows.extend(costs.map(|(mode, cost)| {
                let what = format!("{group}: {}, without a history", added(mode));
                FindingRow::new(what, "cycles", *cost)
            }));
        }
        Ok((frame, rows))
    }

    /// The rows of the model's cycles, named `group`.
    fn rows(&self, group: &str) -> Vec<FindingRow> {
        let row = |what: &str, cycles| {
            let cycles = Measured::cost(0.0, cycles, 0.0);
            FindingRow::new(format!("{group}: {what}"), "cycles", cycles)
        };
        let without = row(FRAME, self.c_none);
        let mut rows = vec![if self.fitted.is_some() {
            without.fitted()
        } else {
            without
        }];
        if self.floor > 0.0 {
            rows.push(row(WIRE, self.floor));
        }
        rows
    }
}

/// Cycles that `mode` adds to a frame; 0 for `none`.
fn overhead(costs: &[(&'static str, Measured)], mode: &str) -> f64 {
    let found = costs.iter().find(|(name, _)| *name == mode);
    found.map_or(0.0, |(_, cost)| cost.median)
}

/// Returns `value` of one mode over that of another. The spread is the distance between the ratios
/// at the ends of both spreads.
fn ratio_of(
    costs: &[(&'static str, Measured)],
    (one, other): (&str, &str),
    value: impl Fn(f64) -> f64,
) -> Measured {
    let half = |mode: &str| {
        let found = costs.iter().find(|(name, _)| *name == mode);
        found.map_or(0.0, |(_, cost)| cost.spread / 2.0)
    };
    let ratio = |sign: f64| {
        value(overhead(costs, one) + sign * half(one))
            / value(overhead(costs, other) - sign * half(other))
    };
    Measured::counted(ratio(0.0)).with_spread((ratio(1.0) - ratio(-1.0)).abs())
}

/// Returns the cost c of a frame without protection at which the model's ratio of `riommu` to a
/// mode is the printed `ratio`. `riommu` and `mode` are the cycles that each adds to a frame. The
/// ratio is (c + mode) / (c + riommu) for throughput and its inverse for CPU utilisation. NaN if no
/// positive c exists.
fn fit(metric: Metric, ratio: f64, riommu: f64, mode: f64) -> f64 {
    let (ratio, above, below) = match metric {
        Metric::Throughput => (ratio, mode, riommu),
        Metric::Cpu => (ratio, riommu, mode),
    };
    let c_none = (above - ratio * below) / (ratio - 1.0);
    if c_none > 0.0 { c_none } else { f64::NAN }
}

/// Returns the cost model of a row. The row alone determines the source of `c_none` (decision
/// 0011):
///
/// - mlx stream: printed (Fig. 7).
/// - Request-response: half of the round trip without protection, which has two frames (Table 3).
/// - brcm rows that saturate the wire: fitted to the CPU utilisation of riommu over defer.
/// - All other rows: fitted to the throughput of riommu over strict+.
fn frame(row: &Table2Row, cost: impl Fn(&str) -> f64) -> Frame {
    let wire = CLOCK_GHZ * PACKET_BYTES * 8.0 / 10.0;
    let fitted = |(metric, baseline): Cell, floor| {
        let ratio = row.ratio(metric, Variant::Coherent, baseline);
        Frame {
            c_none: fit(metric, ratio, cost("riommu"), cost(baseline.name())),
            floor,
            fitted: Some((metric, baseline)),
        }
    };
    let known = |c_none| Frame::new(c_none, 0.0);
    match (row.nic, row.benchmark) {
        (Nic::Mlx, Benchmark::Stream) => known(BASELINE_CYCLES),
        (nic, Benchmark::Rr) => {
            let table = TABLE_3.iter().find(|table| table.nic == nic);
            let microseconds =
                table.map_or(f64::NAN, |table| table.baselines[Baseline::None as usize]);
            known(microseconds * CLOCK_GHZ * 1e3 / 2.0)
        }
        (Nic::Brcm, Benchmark::Stream | Benchmark::Apache1M) => {
            fitted((Metric::Cpu, Baseline::Defer), wire)
        }
        _ => fitted((Metric::Throughput, Baseline::StrictPlus), 0.0),
    }
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let mut found = Findings::default();
    for (table, group) in TABLE_2.iter().zip(GROUPS) {
        let extra = extra(setting, table.nic, table.benchmark, CountedSteps::All)?;
        for row in rows_of(table, group, &extra)? {
            found.push(row);
        }
        if table.benchmark == Benchmark::Rr {
            let round_trips = round_trips(setting, table.nic)?;
            let rows = request_response::rows(table.nic, group, &extra.cycles, &round_trips)?;
            rows.into_iter().for_each(|row| found.push(row));
        }
    }
    found.method = method(setting, &found.rows);
    found.explain(explanations::absorbed(&found.rows));
    for text in explanations::of_failing(&found.rows) {
        found.explain(text);
    }
    for (table, group) in TABLE_2.iter().zip(GROUPS) {
        if table.benchmark == Benchmark::Rr
            && let Some(text) = request_response::explanation(table.nic, group, &found.rows)
        {
            found.explain(text);
        }
    }
    found.note(
        "Fitted: one printed cell per row of the table, marked there. It is the throughput of \
        riommu over strict+, or, where brcm saturates its wire, the CPU utilisation of riommu over \
        defer; the fit gives the cycles per frame without protection. All other cells are \
        predictions. For mlx stream that cost is printed; for request-response it follows from \
        Table 3. The choice was made before the results were seen.",
    );
    found.note(
        "CPU utilisation of request-response: the cycles of a transaction over its round trip, at \
        3.1 GHz. The round trips are those of X04. The maps and unmaps of both frames count, also \
        those that the reply does not wait for. The cycles without protection are fitted to one \
        cell for each adapter, that of strict+ in EIOVAR Table 2.",
    );
    Ok(found)
}

/// The method with the numbers of runs of `setting`, and the benchmarks of `rows` that the wire
/// limits.
fn method(setting: &Setting, rows: &[FindingRow]) -> String {
    let first = timed_first(setting);
    let history = setting.history.max(first);
    let limited = rows.iter().filter_map(|row| {
        let group = row.quantity.strip_suffix(WIRE)?;
        group.strip_suffix(": ")
    });
    let limit = match limited.collect::<Vec<_>>().join(" and ") {
        none if none.is_empty() => String::new(),
        groups => format!(", limited to 10 Gbit/s on {groups}"),
    };
    format!(
        "{first} runs of each benchmark; the last one counts. The allocators of strict and defer \
        go on alone to {history} runs in all, and what an allocation takes more at the end \
        (median of the last {}) is added. A frame costs its cycles without protection plus the \
        measured and modelled cycles of its maps and unmaps. Throughput is the inverse{limit}.",
        timed_runs(first, history)
    )
}

/// Rows of one row of Table 2, named `group`.
fn rows_of(
    table: &Table2Row,
    group: &'static str,
    extra: &Extra,
) -> Result<Vec<FindingRow>, LabError> {
    let costs = &extra.cycles;
    let frame = frame(table, |mode| overhead(costs, mode));
    let mut out = frame.rows(group);
    let wanted = [
        ("nic", table.nic.name()),
        ("metric", "search_len"),
        ("protection", "strict"),
        ("benchmark", &table.benchmark.name().replace(' ', "")),
    ];
    let steps = FindingRow::counted(format!("{group}: {STEPS}"), "", extra.steps);
    out.push(steps.with_published(Sheet::named("eiovar_table2")?.printed(&wanted, "baseline")?));
    for (mode, cost) in costs {
        let what = format!("{group}: {}", added(mode));
        out.push(FindingRow::new(what, "cycles", *cost));
    }
    let metrics = match table.benchmark {
        Benchmark::Rr => &[Metric::Throughput][..],
        _ => &[Metric::Throughput, Metric::Cpu],
    };
    let sheet = Sheet::named("riommu_table2")?;
    for metric in metrics {
        let value = |extra| match metric {
            Metric::Throughput => frame.throughput(extra),
            Metric::Cpu => frame.cpu(extra),
        };
        let name = match metric {
            Metric::Throughput => "throughput",
            Metric::Cpu => "cpu",
        };
        for variant in Variant::ALL {
            for baseline in BASELINES {
                let wanted = [
                    ("nic", table.nic.name()),
                    ("benchmark", table.benchmark.name()),
                    ("metric", name),
                    ("variant", variant.name()),
                    ("divided_by", baseline.name()),
                ];
                let ratio = ratio_of(costs, (variant.name(), baseline.name()), value);
                let what = format!("{group}: {name}, {} / {}", variant.name(), baseline.name());
                let row = FindingRow::new(what, "", ratio);
                let row = row.overhead(sheet.printed(&wanted, "value")?, NullModel::RATIO);
                let cell =
                    variant == Variant::Coherent && frame.fitted == Some((*metric, baseline));
                let row = if cell { row.fitted() } else { row };
                // The ratios of one variant order the baselines.
                let ordered = *metric == Metric::Throughput && variant == Variant::Coherent;
                out.push(if ordered {
                    row.ordered_within(group)
                } else {
                    row
                });
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
