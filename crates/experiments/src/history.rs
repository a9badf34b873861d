//! Allocators after the papers' hundred runs. Only their state depends on history, so they run
//! without the rest of the layer.

use ringfence_devices::workload::Workload;
use ringfence_iova::Capacity;

use super::allocators::{Counts, DrivenAllocator};
use super::capture::{Capture, Run};
use super::finding::median;
use ringfence_lab::LabError;

/// Number of runs at the end of a history that are timed.
const TIMED: usize = 3;

/// Number of timed runs at the end of `history` runs, of which the first `first` come before it.
pub(super) fn timed_runs(first: usize, history: usize) -> usize {
    history.saturating_sub(first).clamp(1, TIMED)
}

/// Cycles of a call.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct CallCycles {
    pub(super) alloc: f64,
    pub(super) free: f64,
}

/// An allocator's cost before and after a history.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct HistoryCost {
    /// Mean search steps of an allocation in the last run.
    pub(super) steps: f64,
    /// Cycles in the last of the first runs.
    pub(super) fresh: CallCycles,
    /// Cycles in the last runs: of each, the median over the [`TIMED`] last ones.
    pub(super) aged: CallCycles,
    /// Largest minus smallest cycles of an allocation over the last runs.
    pub(super) spread: f64,
    /// Largest minus smallest cycles of a free over the last runs.
    pub(super) free_spread: f64,
}

impl CallCycles {
    /// Returns the mean cycles of each call of `counts`, without those of two clock reads.
    fn of(counts: &Counts, overhead: f64) -> Self {
        let each =
            |ticks: u64, calls: u64| (ticks as f64 / calls.max(1) as f64 - overhead).max(0.0);
        Self {
            alloc: each(counts.alloc_ticks, counts.allocs),
            free: each(counts.free_ticks, counts.frees),
        }
    }
}

impl HistoryCost {
    /// Returns the cost of a history from the calls of each run. The first `first` runs come before
    /// it, and an allocation of the last one takes `steps` search steps.
    fn of(runs: &[CallCycles], first: usize, steps: f64) -> Result<Self, LabError> {
        let fresh = runs[..first.min(runs.len())].last();
        let fresh = *fresh.ok_or(LabError::Internal("no runs"))?;
        let timed = timed_runs(first, runs.len());
        let end = &runs[runs.len().saturating_sub(timed)..];
        let of = |call: fn(&CallCycles) -> f64| median(&end.iter().map(call).collect::<Vec<_>>());
        Ok(Self {
            steps,
            fresh,
            aged: CallCycles {
                alloc: of(|call| call.alloc).middle,
                free: of(|call| call.free).middle,
            },
            spread: of(|call| call.alloc).spread,
            free_spread: of(|call| call.free).spread,
        })
    }

    /// Cycles that a history adds to an allocation. It adds none to a free, which searches nothing.
    pub(super) fn added(&self) -> f64 {
        self.aged.alloc - self.fresh.alloc
    }
}

/// Runs each of `sides` (capacity of its freelists, and number of unmaps that free together)
/// through `first`, the runs that `capture` has made, and then on to `history` runs in all. `now`
/// reads the clock.
///
/// # Errors
/// The workload cannot continue, or the IOVA space is exhausted.
pub(super) fn run_history<W: Workload>(
    history: usize,
    capture: &mut Capture<W>,
    first: &[Run],
    sides: &[(Option<Capacity>, usize)],
    now: &dyn Fn() -> u64,
) -> Result<Vec<HistoryCost>, LabError> {
    let overhead = clock_overhead(now);
    let mut drivers = sides
        .iter()
        .map(|(lists, batch)| Ok((DrivenAllocator::new(*lists, *batch)?, Vec::new(), 0.0)))
        .collect::<Result<Vec<_>, LabError>>()?;
    let mut drive = |run: &Run| {
        for (driven, costs, steps) in &mut drivers {
            let counts = driven.run_with_clock(&run.plan, |_| {}, now)?;
            *steps = counts.mean_steps();
            costs.push(CallCycles::of(&counts, overhead));
        }
        Ok::<_, LabError>(())
    };
    for run in first {
        drive(run)?;
    }
    for _ in first.len()..history {
        drive(&capture.run()?)?;
    }
    let finish =
        |(_, costs, steps): (_, Vec<CallCycles>, f64)| HistoryCost::of(&costs, first.len(), steps);
    let costs = drivers.into_iter().map(finish).collect();
    #[cfg(test)]
    let costs = by_hand::replace(costs);
    costs
}

/// Cycles between two reads of the clock with nothing in between: the smallest of many.
fn clock_overhead(now: &dyn Fn() -> u64) -> f64 {
    let reads = (0..1000).map(|_| {
        let begin = now();
        now().wrapping_sub(begin)
    });
    reads.min().unwrap_or(0) as f64
}

/// Histories by hand: a test sets the cost of each side, and compares the rows of an experiment
/// with them.
#[cfg(test)]
pub(super) mod by_hand {
    use std::cell::RefCell;

    use super::HistoryCost;
    use ringfence_lab::LabError;

    thread_local! {
        static HISTORIES: RefCell<Vec<HistoryCost>> = const { RefCell::new(Vec::new()) };
    }

    /// Calls `run`, in which the histories of all sides have these costs, in order.
    pub(crate) fn with_histories<T>(costs: &[HistoryCost], run: impl FnOnce() -> T) -> T {
        HISTORIES.set(costs.to_vec());
        let result = run();
        HISTORIES.take();
        result
    }

    /// Replaces `costs`, if the test set any.
    pub(super) fn replace(
        costs: Result<Vec<HistoryCost>, LabError>,
    ) -> Result<Vec<HistoryCost>, LabError> {
        let known = HISTORIES.with_borrow(Clone::clone);
        if known.is_empty() {
            return costs;
        }
        assert_eq!(costs?.len(), known.len());
        Ok(known)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::vec::IntoIter;

    use ringfence_devices::nic::NicProfile;
    use ringfence_devices::workload::RequestResponse;
    use ringfence_lab::meter::cycles;
    use ringfence_lab::plan::Step;

    use super::*;

    /// Three runs come first, and the last three of nine are timed: the third is fresh.
    #[test]
    fn a_history_has_its_fresh_and_its_aged_calls() {
        let calls = |alloc, free| CallCycles { alloc, free };
        let runs = [
            calls(900.0, 90.0),
            calls(800.0, 80.0),
            calls(100.0, 40.0),
            calls(700.0, 70.0),
            calls(600.0, 60.0),
            calls(500.0, 50.0),
            calls(340.0, 21.0),
            calls(300.0, 27.0),
            calls(310.0, 22.0),
        ];
        let found = HistoryCost::of(&runs, 3, 5.5).unwrap();
        let wanted = HistoryCost {
            steps: 5.5,
            fresh: calls(100.0, 40.0),
            aged: calls(310.0, 22.0),
            spread: 40.0,
            free_spread: 6.0,
        };
        assert_eq!(found, wanted);
        assert_eq!(found.added(), 210.0);
        assert!(HistoryCost::of(&runs, 0, 0.0).is_err());
        let counts = Counts {
            allocs: 10,
            alloc_ticks: 700,
            frees: 4,
            free_ticks: 200,
            ..Counts::default()
        };
        assert_eq!(CallCycles::of(&counts, 30.0), calls(40.0, 20.0));
        assert_eq!(CallCycles::of(&counts, 60.0), calls(10.0, 0.0));
    }

    #[test]
    fn a_history_lengthens_the_search_without_freelists_only() {
        let nic = NicProfile::BRCM;
        let workload = RequestResponse::default();
        let mut capture = Capture::with(nic, workload, nic.rx_frames, 2048).unwrap();
        let first = [capture.run().unwrap(), capture.run().unwrap()];
        let sides = [(None, 1), (Some(Capacity::Unbounded), 1)];
        let found = run_history(30, &mut capture, &first, &sides, &cycles).unwrap();
        // The same runs again, by hand.
        let workload = RequestResponse::default();
        let mut capture = Capture::with(nic, workload, nic.rx_frames, 2048).unwrap();
        let mut alone = DrivenAllocator::new(None, 1).unwrap();
        let runs = (0..30).map(|_| capture.run().unwrap());
        let steps: Vec<f64> = runs
            .map(|run| alone.run(&run.plan, |_| {}).unwrap().mean_steps())
            .collect();
        assert_eq!(found[0].steps, steps[29]);
        assert!(steps[29] > steps[1], "{steps:?}");
        assert_eq!(found[1].steps, 0.0);
        // Each call has the spread of its own times.
        assert!(
            found.iter().all(|of| of.free_spread != of.spread),
            "{found:?}"
        );
    }

    /// Cycles of an allocation and of a free in a run, on one side: each pair of numbers is unique.
    fn ticks(run: usize, side: usize) -> (u64, u64) {
        let (run, side) = (run as u64, side as u64);
        (
            100 * run * run + 10 * side + 7,
            10_000 * run * run + 1000 * side + 3,
        )
    }

    /// The readings of a clock that two of its own reads take `overhead` cycles apart, while
    /// `sides` execute `runs`.
    fn readings(runs: &[Run], sides: &[(Option<Capacity>, usize)], overhead: u64) -> Vec<u64> {
        let mut now = 0;
        let mut readings = Vec::new();
        let mut call = |cycles: u64| {
            readings.extend([now, now + overhead + cycles]);
            now += overhead + cycles + 1;
        };
        (0..1000).for_each(|_| call(0));
        let mut waiting = vec![0; sides.len()];
        for (number, run) in runs.iter().enumerate() {
            for (side, (_, batch)) in sides.iter().enumerate() {
                let (alloc, free) = ticks(number, side);
                for timed in &run.plan.steps {
                    match timed.step {
                        Step::Map { count, .. } => (0..count).for_each(|_| call(alloc)),
                        Step::Unmap { .. } => waiting[side] += 1,
                        _ => {}
                    }
                    if waiting[side] == *batch {
                        (0..*batch).for_each(|_| call(free));
                        waiting[side] = 0;
                    }
                }
            }
        }
        readings
    }

    /// On a clock by hand, each cost is that of its own call, side and runs: the second of the
    /// first two is fresh, and the last three are aged.
    #[test]
    fn costs_are_those_of_their_calls_sides_and_runs() {
        let nic = NicProfile::BRCM;
        let capture = || {
            let workload = RequestResponse::default();
            Capture::with(nic, workload, nic.rx_frames, 2048).unwrap()
        };
        let mut runs = capture();
        let runs: Vec<_> = (0..6).map(|_| runs.run().unwrap()).collect();
        let lists = Some(Capacity::Unbounded);
        let sides = [(None, 1), (lists, 1), (None, 250), (lists, 250)];
        let clock: RefCell<IntoIter<u64>> = RefCell::new(readings(&runs, &sides, 5).into_iter());
        let now = || clock.borrow_mut().next().unwrap();
        let mut again = capture();
        let first = [again.run().unwrap(), again.run().unwrap()];
        let found = run_history(6, &mut again, &first, &sides, &now).unwrap();
        assert_eq!(clock.borrow().len(), 0);
        for (side, cost) in found.iter().enumerate() {
            let [second, fourth, fifth, sixth] = [1, 3, 4, 5].map(|run| ticks(run, side));
            let both = |calls: CallCycles| (calls.alloc, calls.free);
            let wanted = |(alloc, free): (u64, u64)| (alloc as f64, free as f64);
            assert_eq!(both(cost.fresh), wanted(second), "side {side}");
            assert_eq!(both(cost.aged), wanted(fifth), "side {side}");
            let spread = (sixth.0 - fourth.0, sixth.1 - fourth.1);
            assert_eq!(
                (cost.spread, cost.free_spread),
                wanted(spread),
                "side {side}"
            );
        }
    }
}
