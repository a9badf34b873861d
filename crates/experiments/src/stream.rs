//! Common parts of the allocator experiments: the stream benchmark on mlx, many runs on one
//! interface, and throughput from the model.

#[cfg(test)]
use std::collections::HashMap;

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::{BURST, NetperfStream};
use ringfence_iova::Capacity;

use super::allocators::{Counts, DrivenAllocator};
use super::capture::{Capture, Run};
#[cfg(test)]
use super::figure::Figure;
use super::finding::{Measured, median};
use super::model::{cycles_per_packet, gbps};
use super::published::{BASELINE_CYCLES, CLOCK_GHZ, IOVAS_PER_PACKET};
use super::setting::Setting;
#[cfg(test)]
use super::timed::with_costs_of;
use super::timed::{Cost, CountedSteps, TimedReplays, TimedSubject, run_in_turns};
use ringfence_lab::LabError;
use ringfence_lab::Profile;
use ringfence_lab::modes::{Alloc, FlushKind, Mode};
#[cfg(test)]
use ringfence_lab::plan::Step;
#[cfg(test)]
use ringfence_types::PageSize;

/// Freelist sizes that EIOVAR plots; `None` for no freelists.
pub(super) const SIZES: [Option<Capacity>; 6] = [
    None,
    Some(Capacity::AtMost(1)),
    Some(Capacity::AtMost(8)),
    Some(Capacity::AtMost(64)),
    Some(Capacity::AtMost(512)),
    Some(Capacity::Unbounded),
];

/// Name of a freelist size in EIOVAR's plots.
pub(super) fn name(size: Option<Capacity>) -> String {
    match size {
        None => "baseline".into(),
        Some(Capacity::AtMost(k)) => format!("eiovar_{k}"),
        Some(Capacity::Unbounded) => "eiovar_inf".into(),
    }
}

/// Port of a sweep: name in the rows, adapter, and completions for each interrupt.
pub(super) type Shape = (&'static str, NicProfile, u32);

/// Ports of the sweeps over bursts. The first is the default. Those with every frame mapped have
/// transmit interrupts too, as before the third amendment of decision 0011.
pub(super) const SHAPES: [Shape; 7] = [
    (
        "bursts of at most 44",
        NicProfile::MLX,
        NicProfile::MLX.rx_frames,
    ),
    ("bursts of at most 200", NicProfile::MLX, BURST),
    ("bursts of at most 1", NicProfile::MLX, 1),
    (
        "every frame mapped, bursts of at most 200",
        NicProfile::MLX_MAPPED,
        BURST,
    ),
    (
        "every frame mapped, bursts of at most 50",
        NicProfile::MLX_MAPPED,
        50,
    ),
    (
        "every frame mapped, bursts of at most 10",
        NicProfile::MLX_MAPPED,
        10,
    ),
    (
        "every frame mapped, bursts of at most 1",
        NicProfile::MLX_MAPPED,
        1,
    ),
];

/// The default port.
const DEFAULT: Shape = SHAPES[0];
/// The port with every frame mapped, with its default of 200 completions.
pub(super) const MAPPED: Shape = SHAPES[3];

/// The papers' runs of stream on mlx.
///
/// # Errors
/// The workload cannot continue.
pub(super) fn runs(setting: &Setting) -> Result<Vec<Run>, LabError> {
    runs_of(setting, &DEFAULT, setting.runs.max(1))
}

/// Runs of stream on the port `shape`.
///
/// # Errors
/// As [`runs`].
pub(super) fn runs_of(
    setting: &Setting,
    (_, adapter, burst): &Shape,
    runs: usize,
) -> Result<Vec<Run>, LabError> {
    let stream = NetperfStream::default();
    let mut capture = Capture::with(*adapter, stream, *burst, setting.packets)?;
    (0..runs).map(|_| capture.run()).collect()
}

/// Allocator counts of each run.
///
/// # Errors
/// The IOVA space is exhausted.
pub(super) fn counted(
    runs: &[Run],
    size: Option<Capacity>,
    batch: usize,
) -> Result<Vec<Counts>, LabError> {
    let mut driven = DrivenAllocator::new(size, batch)?;
    runs.iter()
        .map(|run| driven.run(&run.plan, |_| {}))
        .collect()
}

/// The mode of Linux 3.4 with freelists of `size`.
fn mode(size: Option<Capacity>, flush: FlushKind) -> Result<Mode, LabError> {
    let base = Mode::find("strict").ok_or(LabError::Internal("mode strict"))?;
    Ok(Mode {
        name: name(size),
        alloc: match size {
            None => Alloc::CachedRbTree,
            Some(Capacity::AtMost(k)) => Alloc::Eiovar(Some(k)),
            Some(Capacity::Unbounded) => Alloc::Eiovar(None),
        },
        flush,
        ..base
    })
}

/// Costs of each run with freelists of each of `sizes`: indexed by size, then by run.
///
/// # Errors
/// Memory is exhausted, or the layer refused a map.
pub(super) fn timed(
    setting: &Setting,
    runs: &[Run],
    sizes: &[Option<Capacity>],
    flush: FlushKind,
) -> Result<Vec<Vec<Cost>>, LabError> {
    let subjects = sizes
        .iter()
        .map(|size| Ok(TimedSubject::Mode(mode(*size, flush)?)));
    in_turns(
        setting,
        runs,
        subjects.collect::<Result<Vec<_>, LabError>>()?,
    )
}

/// Costs of each run with each of `subjects`, interleaved: indexed by subject, then by run.
///
/// # Errors
/// Memory is exhausted, or the layer refused a map.
pub(super) fn in_turns(
    setting: &Setting,
    runs: &[Run],
    subjects: Vec<TimedSubject>,
) -> Result<Vec<Vec<Cost>>, LabError> {
    in_turns_of(setting, runs, subjects, CountedSteps::All)
}

/// Like [`in_turns`], but only the steps in `counted` cost anything.
///
/// # Errors
/// As for [`in_turns`].
pub(super) fn in_turns_of(
    setting: &Setting,
    runs: &[Run],
    subjects: Vec<TimedSubject>,
    counted: CountedSteps,
) -> Result<Vec<Vec<Cost>>, LabError> {
    let (profile, repetitions) = (&setting.profile, setting.repetitions);
    let subjects = subjects.into_iter();
    let mut timed = subjects
        .map(|subject| TimedReplays::new(subject, profile, repetitions))
        .collect::<Result<Vec<_>, _>>()?;
    let mut costs = vec![Vec::new(); timed.len()];
    for run in runs {
        for (costs, cost) in costs
            .iter_mut()
            .zip(run_in_turns(&mut timed, run, counted)?)
        {
            costs.push(cost);
        }
    }
    Ok(costs)
}

/// Cycles per packet, if each of its buffers costs a pair of `cost`.
pub(super) fn packet(cost: &Cost, profile: &Profile) -> Measured {
    let measured_part = IOVAS_PER_PACKET * cost.measured_per_pair();
    let modelled = cycles_per_packet(
        BASELINE_CYCLES,
        IOVAS_PER_PACKET,
        0.0,
        cost.modelled_per_pair(profile),
    );
    Measured::cost(measured_part, modelled, 0.0)
        .with_spread(IOVAS_PER_PACKET * cost.spread_per_pair())
}

/// Cycles per packet in each repetition.
pub(super) fn packets(cost: &Cost, profile: &Profile) -> Vec<f64> {
    let each = cost.each_per_pair(profile).into_iter();
    each.map(|pair| cycles_per_packet(BASELINE_CYCLES, IOVAS_PER_PACKET, pair, 0.0))
        .collect()
}

/// The model's throughput in Gbit/s at the papers' clock, with the spread of the repetitions.
pub(super) fn throughput(cost: &Cost, profile: &Profile) -> Measured {
    let speeds = packets(cost, profile).into_iter();
    let speeds: Vec<f64> = speeds.map(|cycles| gbps(CLOCK_GHZ, cycles)).collect();
    let median_of_blocks = gbps(CLOCK_GHZ, packet(cost, profile).median);
    Measured::counted(median_of_blocks).with_spread(median(&speeds).spread)
}

/// Throughput of `one` over that of `other`, with the spread of the ratio over the repetitions.
pub(super) fn relative_throughput(one: &Cost, other: &Cost, profile: &Profile) -> Measured {
    let pairs = packets(one, profile)
        .into_iter()
        .zip(packets(other, profile));
    let ratios: Vec<f64> = pairs.map(|(one, other)| other / one).collect();
    let median_of_blocks = packet(other, profile).median / packet(one, profile).median;
    Measured::counted(median_of_blocks).with_spread(median(&ratios).spread)
}

/// Gain of throughput of `one` over that of `other`, in percent.
pub(super) fn gain_percent(one: &Cost, other: &Cost, profile: &Profile) -> Measured {
    let ratio = relative_throughput(one, other, profile);
    Measured::counted(100.0 * (ratio.median - 1.0)).with_spread(100.0 * ratio.spread)
}

/// Returns the last element.
///
/// # Errors
/// `of` is empty.
pub(super) fn last<T: Clone>(of: &[T]) -> Result<T, LabError> {
    of.last().cloned().ok_or(LabError::Internal("no runs"))
}

/// Numbers the values from 1 and returns them as points (run, value).
pub(super) fn by_run(numbers: impl Iterator<Item = f64>) -> Vec<(f64, f64)> {
    (1..).map(f64::from).zip(numbers).collect()
}

/// Calls `run`, in which a map and an unmap cost these cycles with freelists of each size.
#[cfg(test)]
pub(super) fn with_costs_of_sizes<T>(
    costs: &[(Option<Capacity>, f64)],
    flush: FlushKind,
    run: impl FnOnce() -> T,
) -> T {
    let subject = |size| TimedSubject::Mode(mode(size, flush).unwrap());
    with_costs_of(costs.iter().map(|of| (subject(of.0), of.1)), run)
}

/// Allocations, allocations from the lists, frees, and the sum of the lists' lengths after each
/// call, of each run. The lists hold at most `size` freed ranges, and `batch` unmaps free together
/// (EIOVAR section 6).
#[cfg(test)]
pub(super) fn counted_by_hand(
    runs: &[Run],
    size: Option<Capacity>,
    batch: usize,
) -> Vec<(u64, u64, u64, u64)> {
    let most = match size {
        None => 0,
        Some(Capacity::AtMost(k)) => k,
        Some(Capacity::Unbounded) => usize::MAX,
    };
    // A list for each power of two, of which only the length counts.
    let (mut lists, mut held) = ([0_u64; 64], 0);
    let mut live = HashMap::new();
    let mut waiting = Vec::new();
    let count = |run: &Run| {
        let (mut allocs, mut from_list, mut frees, mut sum) = (0, 0, 0, 0);
        for timed in &run.plan.steps {
            match timed.step {
                Step::Map {
                    id, first, count, ..
                } => {
                    for piece in run.plan.segments(first, count) {
                        let pages = piece.pages(PageSize::Size4K).next_power_of_two();
                        let list = pages.trailing_zeros() as usize;
                        if lists[list] > 0 {
                            lists[list] -= 1;
                            held -= 1;
                            from_list += 1;
                        }
                        allocs += 1;
                        sum += held as u64;
                        live.insert(id.0, list);
                    }
                }
                Step::Unmap { id, .. } => waiting.push(live.remove(&id.0).unwrap()),
                _ => {}
            }
            if waiting.len() == batch {
                for list in waiting.drain(..) {
                    if held < most {
                        lists[list] += 1;
                        held += 1;
                    }
                    frees += 1;
                    sum += held as u64;
                }
            }
        }
        (allocs, from_list, frees, sum)
    };
    runs.iter().map(count).collect()
}

/// Asserts that `figure` has a line for each of [`SIZES`], with a point for each run: the `value`
/// of the allocator's counts with frees in batches of `batch`.
#[cfg(test)]
pub(super) fn assert_counted(
    figure: &Figure,
    runs: &[Run],
    batch: usize,
    value: impl Fn(&Counts) -> f64,
) {
    assert_eq!(figure.series.len(), SIZES.len(), "{}", figure.title);
    for (line, size) in figure.series.iter().zip(SIZES) {
        assert_eq!(line.name, name(size), "{}", figure.title);
        let counts = counted(runs, size, batch).unwrap();
        let wanted = (1..).map(f64::from).zip(counts.iter().map(&value));
        let wanted: Vec<_> = wanted.collect();
        assert_eq!(line.points, wanted, "{}, {}", figure.title, line.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The papers' adapter has two buffers per packet, and takes an interrupt for 44 of them.
    #[test]
    fn runs_are_those_of_the_papers_adapter() {
        let setting = Setting {
            runs: 2,
            ..Setting::smoke()
        };
        let stream = NetperfStream::default();
        let mut capture = Capture::with(NicProfile::MLX, stream, 44, 2048).unwrap();
        let runs = runs(&setting).unwrap();
        assert_eq!(runs.len(), 2);
        for run in runs {
            let wanted = capture.run().unwrap();
            assert_eq!(run.step_rings, wanted.step_rings);
            assert_eq!(run.plan.steps.len(), wanted.plan.steps.len());
            assert_eq!(run.bursts(), wanted.bursts());
        }
    }

    /// Each size of freelists is a mode of its own with either flush policy.
    #[test]
    fn modes_have_the_freelists_of_their_sizes() {
        for flush in [FlushKind::PerUnmap, FlushKind::Deferred] {
            for size in SIZES {
                let mode = mode(size, flush).unwrap();
                let alloc = match size {
                    None => Alloc::CachedRbTree,
                    Some(Capacity::AtMost(k)) => Alloc::Eiovar(Some(k)),
                    Some(Capacity::Unbounded) => Alloc::Eiovar(None),
                };
                assert_eq!((mode.alloc, mode.flush), (alloc, flush));
                assert_eq!(mode.name, name(size));
            }
        }
    }

    /// The layer that is timed for a size is that of its mode.
    #[test]
    fn sizes_are_timed_in_their_modes() {
        let setting = Setting {
            runs: 1,
            ..Setting::smoke()
        };
        let runs = runs(&setting).unwrap();
        for flush in [FlushKind::PerUnmap, FlushKind::Deferred] {
            let all = timed(&setting, &runs, &SIZES, flush).unwrap();
            for (size, costs) in SIZES.into_iter().zip(all) {
                let wanted = Some(TimedSubject::Mode(mode(size, flush).unwrap()));
                assert_eq!(costs[0].subject, wanted);
            }
        }
    }

    /// C is 1816 cycles plus two pairs, and throughput is 1500 x 8 x 3.1 / C = 37200 / C.
    #[test]
    fn cycles_throughput_and_ratio_follow_from_the_pairs() {
        let mut profile = Profile::r210_2015();
        profile.invalidation_cycles = 1000;
        let cost = |repetitions: [f64; 2], invalidations| Cost {
            measured: 920.0,
            repetitions: repetitions.to_vec(),
            spread: repetitions[1] - repetitions[0],
            invalidations,
            pairs: 10,
            ..Cost::default()
        };
        // Pairs of 92 and of 92 + 1000 cycles.
        let [fast, slow] = [cost([820.0, 1020.0], 0), cost([900.0, 940.0], 10)];
        for (cost, median, modelled, spread) in
            [(&fast, 2000.0, 1816.0, 40.0), (&slow, 4000.0, 3816.0, 8.0)]
        {
            let found = packet(cost, &profile);
            let found = (found.median, found.modelled_part, found.spread);
            assert_eq!(found, (median, Some(modelled), spread));
        }
        assert_eq!(packets(&fast, &profile), [1980.0, 2020.0]);
        assert_eq!(packets(&slow, &profile), [3996.0, 4004.0]);
        let near = |found: Measured, median: f64, spread: f64| {
            let off = (found.median - median).abs() + (found.spread - spread).abs();
            assert!(
                off < 1e-9,
                "{found:?}, not {median} with a spread of {spread}"
            );
        };
        let speed = throughput(&fast, &profile);
        near(speed, 18.6, 37_200.0 / 1980.0 - 37_200.0 / 2020.0);
        let speed = throughput(&slow, &profile);
        near(speed, 9.3, 37_200.0 / 3996.0 - 37_200.0 / 4004.0);
        // The faster one comes first.
        let ratio = relative_throughput(&fast, &slow, &profile);
        near(ratio, 2.0, 3996.0 / 1980.0 - 4004.0 / 2020.0);
        let ratio = relative_throughput(&slow, &fast, &profile);
        near(ratio, 0.5, 2020.0 / 4004.0 - 1980.0 / 3996.0);
        let gain = gain_percent(&fast, &slow, &profile);
        near(gain, 100.0, 100.0 * (3996.0 / 1980.0 - 4004.0 / 2020.0));
    }

    /// Each capacity and batch has the counts of lists by hand, on every port.
    #[test]
    fn counts_are_those_of_lists_by_hand() {
        let setting = Setting::smoke();
        for shape in &SHAPES {
            let runs = runs_of(&setting, shape, 2).unwrap();
            for size in SIZES {
                for batch in [1, 250] {
                    let found = counted(&runs, size, batch).unwrap();
                    let found: Vec<_> = found
                        .iter()
                        .map(|of| (of.allocs, of.from_list, of.frees, of.held))
                        .collect();
                    let wanted = counted_by_hand(&runs, size, batch);
                    assert_eq!(found, wanted, "{}, {size:?}, {batch}", shape.0);
                }
            }
        }
    }
}
