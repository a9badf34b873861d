//! Costs by hand: a test sets the measured cycles of each subject, and compares the rows of an
//! experiment with them.

use std::cell::RefCell;

use ringfence_lab::plan::Step;

use super::steps::Block;
use super::{Cost, TimedReplays, TimedSubject};
use crate::capture::Run;

thread_local! {
    static COSTS: RefCell<Vec<(TimedSubject, f64)>> = const { RefCell::new(Vec::new()) };
}

/// Calls `run`, in which a map and an unmap cost these cycles in the mode of each name, with a
/// spread of an eighth. Pairs whose unmap does not count cost nothing. Other modes cannot be timed.
pub(crate) fn with_costs<T>(costs: &[(&str, f64)], run: impl FnOnce() -> T) -> T {
    let subject = |name| TimedSubject::from_name(name).unwrap();
    with_costs_of(costs.iter().map(|of| (subject(of.0), of.1)), run)
}

/// Like [`with_costs`], for subjects without a name of their own.
pub(crate) fn with_costs_of<T>(
    costs: impl Iterator<Item = (TimedSubject, f64)>,
    run: impl FnOnce() -> T,
) -> T {
    COSTS.set(costs.collect());
    let result = run();
    COSTS.take();
    result
}

/// Replaces the measured cycles of `costs`, which are those of `subjects`, if the test set any.
pub(super) fn replace(
    costs: Vec<Cost>,
    subjects: &[TimedReplays],
    run: &Run,
    blocks: &[Block],
) -> Vec<Cost> {
    let known = COSTS.with_borrow(Clone::clone);
    if known.is_empty() {
        return costs;
    }
    let uncounted = blocks.iter().filter(|block| !block.counts);
    let uncounted = uncounted.flat_map(|block| block.steps(&run.plan));
    let uncounted = uncounted.filter(|timed| matches!(timed.step, Step::Unmap { .. }));
    let uncounted = uncounted.count() as u64;
    let by_hand = |(cost, timed): (Cost, &TimedReplays)| {
        let of = known.iter().find(|(subject, _)| *subject == timed.subject);
        let (_, cycles) = of.unwrap_or_else(|| panic!("{:?} is timed", timed.subject));
        let measured = cycles * (cost.pairs - uncounted) as f64;
        Cost {
            measured,
            repetitions: vec![measured; cost.repetitions.len()],
            spread: measured / 8.0,
            ..cost
        }
    };
    costs.into_iter().zip(subjects).map(by_hand).collect()
}
