//! X11: length of the allocator's search, call by call (EIOVAR Figs. 3 and 9).

use ringfence_devices::nic::{Fill, NicProfile, Replace};
use ringfence_devices::workload::{BURST, NetperfStream};
use ringfence_iova::Capacity;

use super::allocators::{DrivenAllocator, W};
use super::capture::{Capture, Run};
use super::experiment::Experiment;
use super::figure::{Figure, Series, thinned};
use super::finding::{FindingRow, Findings, Published, Requirement};
use super::published::Sheet;
use super::setting::Setting;
use super::stream::{MAPPED, counted, last, runs, runs_of};
use ringfence_lab::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X11",
    title: "Length of the allocator's search, call by call",
    source: "EIOVAR Figs. 3 and 9, Table 2",
    measure,
};

/// Number of calls in Fig. 3.
const CALLS: usize = 40_000;

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let runs = runs(setting)?;
    let mut found = Findings::with_method(format!(
        "{} runs of mlx stream (decision 0011), one after the other on the same interface. The \
        figures show the last {CALLS} searches of each allocator.",
        runs.len()
    ));
    let facts = Sheet::named("eiovar_k_threshold_facts")?;
    let alone: Vec<Run> = runs.iter().map(Run::receive_only).collect();
    let mapped = runs_of(setting, &MAPPED, setting.runs.max(1))?;

    let strict = searches(&runs, None, 1, CALLS)?;
    found.figures.push(Figure::linear(
        "Fig. 3: strict, no freelists",
        "alloc_iova calls",
        "rb_prev steps, largest of each 50 calls",
        vec![line("baseline", &strict)],
    ));
    let mut series = Vec::new();
    for k in [64, 240, 250] {
        let capacity = Some(Capacity::AtMost(k));
        let all = searches(&runs, capacity, W, CALLS)?;
        series.push(line(&format!("eiovar_{k}"), &all));
        for (what, all) in [
            ("receive rings alone", searches(&alone, capacity, W, CALLS)?),
            ("all rings", all),
            ("every frame mapped", searches(&mapped, capacity, W, CALLS)?),
        ] {
            let searching = all.iter().filter(|steps| **steps > 0).count();
            let count = FindingRow::counted(
                format!(
                    "defer, k = {k}, {what}: calls that search, of the last {}",
                    all.len()
                ),
                "",
                searching as f64,
            );
            let longest = all.iter().copied().max().unwrap_or(0);
            let row = FindingRow::counted(
                format!("defer, k = {k}, {what}: longest search"),
                "rb_prev",
                f64::from(longest),
            );
            let printed = match k < W {
                true => Published::new("spikes", 1.0, "EIOVAR Fig. 9"),
                false => facts.printed(&[("subject", "eiovar_k>=W")], "value")?,
            };
            found.push(match what {
                "every frame mapped" => row.with_published(printed),
                _ if k < W => row.at_least(printed),
                _ => row.exact(printed),
            });
            found.push(count);
        }
    }
    found.figures.push(Figure::linear(
        "Fig. 9: deferred, freelists below and at W = 250",
        "alloc_iova calls",
        "rb_prev steps, largest of each 50 calls",
        series,
    ));

    for (protection, batch) in [("strict", 1), ("defer", W)] {
        let counts = counted(&runs, Some(Capacity::Unbounded), batch)?;
        let row = FindingRow::counted(
            format!("{protection}, freelists: mean search of the last run"),
            "rb_prev",
            // Table 2 prints whole numbers.
            last(&counts)?.mean_steps().round(),
        );
        found.push(row.exact(cell(protection, "eiovar")?));
    }
    history(setting, &mut found)?;
    found.explain(
        "Why the search grows: the papers' drivers map a packet's replacement before they unmap it \
        (decision 0011). One receive address is therefore always free when the driver sends a \
        mapped frame, and the frame takes it. The next map of the receive ring takes an address \
        elsewhere: the exchange of section 5, and permanent. The driver of mlx copies small frames \
        into their descriptors and maps none of the acknowledgements. What it maps is netserver's \
        response on the control connection, so the exchange happens once a run.",
    );
    found.explain(
        "If every frame is mapped, the exchange happens at each turn from receiving to sending, \
        and the search grows much faster. In the long run the ring's addresses are in random \
        order, and a search is as long as the mean distance downward between two places: a sixth \
        of the addresses in between. That is 2048 of one ring if rings are filled one after the \
        other (341 steps), and all 8192 if they are filled in turns (1365 steps).",
    );
    found.explain(
        "Why the search does not grow in the order of section 4, unmap before map: receive \
        addresses lie above transmit addresses, because the driver fills the receive rings first. \
        A receive address is free only between the two calls of a pair, when nothing is sent. A \
        transmit address that is freed there lies below C and does not move it. No address is \
        exchanged, and each turn costs one search through the ring, independent of history. Table \
        1 has its H above L and does not explain how it got there.",
    );
    found.explain(
        "With k = W no call searches while maps and unmaps alternate, as in the receive rings \
        alone. A response takes two buffers more. Lists of W then lack up to two addresses at the \
        start of a run, and as many calls may search; the rest of the run has none. The paper's \
        figure shows calls of one run. If every frame is mapped, a transmit interrupt frees a \
        burst of addresses without a map in between, and many calls search (X13 shows the \
        threshold of each).",
    );
    found.note(
        "Erratum 4: the two papers, on one machine, differ by a factor of 2 in the cost of this \
        search.",
    );
    found.note("Every number is counted; nothing is timed or modelled.");
    Ok(found)
}

/// A line of Fig. 3 or 9: the longest search of each 50 calls, if `all` has 40,000.
fn line(name: &str, all: &[u32]) -> Series {
    let points: Vec<(f64, f64)> = (0..)
        .zip(all)
        .map(|(x, y)| (f64::from(x), f64::from(*y)))
        .collect();
    Series::line(name, thinned(&points, 800))
}

/// Returns the steps of the last `most` allocations of `runs`, without those of the first run,
/// which fills the rings.
fn searches(
    runs: &[Run],
    size: Option<Capacity>,
    batch: usize,
    most: usize,
) -> Result<Vec<u32>, LabError> {
    let mut driven = DrivenAllocator::new(size, batch)?;
    let mut all = Vec::new();
    for (number, run) in runs.iter().enumerate() {
        if number == 1 {
            all.clear();
        }
        driven.run(&run.plan, |steps| all.push(steps))?;
    }
    let skipped = all.len().saturating_sub(most);
    Ok(all.split_off(skipped))
}

/// Search length that EIOVAR prints for mlx stream, in steps.
fn cell(protection: &str, column: &str) -> Result<Published, LabError> {
    let wanted = [
        ("nic", "mlx"),
        ("metric", "search_len"),
        ("protection", protection),
        ("benchmark", "stream"),
    ];
    Sheet::named("eiovar_table2")?.printed(&wanted, column)
}

/// Returns the allocations in the first window of [`windows`]. Each window ends at twice as many as
/// the previous one. The first covers the start of a run, which may have the run's only search: a
/// packet has at most two allocations.
const fn first_window(setting: &Setting) -> u64 {
    (2 * setting.packets).next_power_of_two()
}

/// Driver loops whose histories are compared (decision 0011): name, adapter and burst limit. The
/// first is the default. The others map every frame; the second is EIOVAR section 4's.
fn loops() -> [(&'static str, NicProfile, u32); 6] {
    let adapter = |replace, fill| NicProfile {
        replace,
        fill,
        ..NicProfile::MLX_MAPPED
    };
    let (after, before) = (Replace::AfterUnmap, Replace::BeforeUnmap);
    let (by_ring, in_turns) = (Fill::RingByRing, Fill::InTurns);
    let default = NicProfile::MLX;
    [
        ("small frames inlined", default, default.rx_frames),
        ("unmap, map; ring by ring", adapter(after, by_ring), BURST),
        (
            "unmap, map; rings in turns",
            adapter(after, in_turns),
            BURST,
        ),
        ("map, unmap; ring by ring", adapter(before, by_ring), BURST),
        (
            "map, unmap; rings in turns",
            adapter(before, in_turns),
            BURST,
        ),
        (
            "map, unmap; rings in turns; bursts of 10",
            adapter(before, in_turns),
            10,
        ),
    ]
}

/// Adds mean search lengths by length of history, without freelists, for each loop.
fn history(setting: &Setting, found: &mut Findings) -> Result<(), LabError> {
    let mut series = Vec::new();
    for (name, adapter, burst) in loops() {
        // The default mlx adapter is compared with the paper, in both protections. The other loops
        // are compared with each other, in strict only.
        let ours = adapter == NicProfile::MLX;
        let protections: &[_] = match ours {
            true => &[("strict", 1), ("defer", W)],
            false => &[("strict", 1)],
        };
        let runs = if ours {
            setting.history
        } else {
            setting.history / 2
        };
        for (protection, points) in windows(setting, adapter, burst, runs, protections)? {
            let (first, end) = (points.first().copied(), points.last().copied());
            let (Some(first), Some(end)) = (first, end) else {
                return Err(LabError::Internal("no allocations"));
            };
            if !ours {
                for (at, mean) in [first, end] {
                    let what =
                        format!("{protection}, {name}: mean search up to allocation {at:.0}");
                    found.push(FindingRow::counted(what, "rb_prev", mean));
                }
                series.push(Series::line(format!("{protection}, {name}"), points));
                continue;
            }
            let what = format!("{protection}: mean search up to allocation {:.0}", end.0);
            let row = FindingRow::counted(what, "rb_prev", end.1);
            let row = row.with_published(cell(protection, "baseline")?);
            // The search of strict grows with every run, so its length after one number of runs is
            // shown; that of deferred has settled.
            let settles = protection != "strict";
            let requirement = match settles {
                true => Requirement::Near,
                false => Requirement::Shown,
            };
            found.push(row.require(requirement).ordered_within("baseline"));
            let what = format!(
                "{protection}: growth over the mean search up to allocation {:.0}, or over one \
                step",
                first.0
            );
            let row = FindingRow::counted(what, "", end.1 / first.1.max(1.0));
            let printed = Published::new(
                "grows",
                GROWN,
                "EIOVAR section 5: the pathology develops as the system runs (erratum 4); \
                required here: a factor of two",
            );
            found.push(if protection == "strict" {
                row.at_least(printed)
            } else {
                row.with_published(printed)
            });
            let settled = points.iter().find(|(_, mean)| *mean >= 0.9 * end.1);
            let row = FindingRow::counted(
                format!(
                    "{protection}: allocations until the search reaches nine tenths of its \
                final length"
                ),
                "",
                settled.map_or(end.0, |(at, _)| *at),
            );
            found.push(row);
            series.push(Series::line(format!("{protection}, {name}"), points));
        }
    }
    found.figures.push(Figure::logarithmic(
        "Mean search by length of history (erratum 4)",
        "allocations since the rings were filled",
        "rb_prev steps",
        series,
    ));
    Ok(())
}

/// Minimum ratio of a long history's search to a short history's that counts as growth.
const GROWN: f64 = 2.0;

/// A protection and its points: the allocation that ends a window, and the window's mean search.
type Means = (&'static str, Vec<(f64, f64)>);

/// For each protection, the mean search lengths of one interface after the rings were filled. The
/// windows end at [`first_window`] allocations, at twice as many, and so on.
fn windows(
    setting: &Setting,
    adapter: NicProfile,
    burst: u32,
    runs: usize,
    protections: &[(&'static str, usize)],
) -> Result<Vec<Means>, LabError> {
    let mut capture = Capture::with(adapter, NetperfStream::default(), burst, setting.packets)?;
    let sides = protections.iter();
    let mut sides = sides
        .map(|(protection, batch)| {
            Ok((
                *protection,
                DrivenAllocator::new(None, *batch)?,
                Windows::new(first_window(setting)),
            ))
        })
        .collect::<Result<Vec<_>, LabError>>()?;
    // The driver fills its rings before it receives anything. Those allocations do not search.
    let mut filling = adapter.receive_at_most();
    for _ in 0..runs.max(2) {
        let run = capture.run()?;
        let filled = std::mem::take(&mut filling);
        for (_, driven, windows) in &mut sides {
            let mut skip = filled;
            driven.run(&run.plan, |steps| match skip {
                0 => windows.add(steps),
                _ => skip -= 1,
            })?;
        }
    }
    let close = |(protection, _, mut windows): (_, _, Windows)| {
        windows.close();
        (protection, windows.means)
    };
    Ok(sides.into_iter().map(close).collect())
}

/// Means over windows whose ends double.
#[derive(Debug, Default)]
struct Windows {
    first: u64,
    seen: u64,
    count: u64,
    steps: u64,
    means: Vec<(f64, f64)>,
}

impl Windows {
    fn new(first: u64) -> Self {
        Self {
            first,
            ..Self::default()
        }
    }

    fn add(&mut self, steps: u32) {
        self.seen += 1;
        self.count += 1;
        self.steps += u64::from(steps);
        if self.seen >= self.first && self.seen.is_power_of_two() {
            self.close();
        }
    }

    /// Ends a window. Discards it if it has less than a quarter of all allocations so far.
    fn close(&mut self) {
        if 4 * self.count >= self.seen {
            let mean = self.steps as f64 / self.count as f64;
            self.means.push((self.seen as f64, mean));
        }
        (self.count, self.steps) = (0, 0);
    }
}

#[cfg(test)]
mod tests;
