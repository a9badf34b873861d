//! Processors for threads that are to run at the same time. Left to the scheduler, two of them may
//! share one, and then they take turns.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A processor that this process may use.
#[derive(Clone, Copy)]
pub(crate) struct Processor(usize);

impl Processor {
    /// The calling thread runs here and nowhere else.
    pub(crate) fn take(self) {
        let mut only = CpuSet::new();
        only.set(self.0);
        sched_setaffinity(None, &only).expect("it was allowed before");
    }
}

/// Two processors for two threads, if this process may use as many.
pub(crate) fn two() -> Option<[Processor; 2]> {
    let allowed = sched_getaffinity(None).ok()?;
    let mut processors = (0..CpuSet::MAX_CPU).filter(|number| allowed.is_set(*number));
    let (one, other) = (processors.next()?, processors.next_back()?);
    Some([one, other].map(Processor))
}
