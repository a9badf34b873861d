//! CPU pinning for threads that must run concurrently. The scheduler may otherwise put two of
//! them on one CPU, where they alternate.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A CPU in this process's affinity mask.
#[derive(Clone, Copy)]
pub(crate) struct Processor(usize);

impl Processor {
    /// Pins the calling thread to this CPU.
    pub(crate) fn take(self) {
        let mut only = CpuSet::new();
        only.set(self.0);
        sched_setaffinity(None, &only).expect("it was allowed before");
    }
}

/// Returns two CPUs for two threads; `None` if the affinity mask has fewer.
pub(crate) fn two() -> Option<[Processor; 2]> {
    let allowed = sched_getaffinity(None).ok()?;
    let mut processors = (0..CpuSet::MAX_CPU).filter(|number| allowed.is_set(*number));
    let (one, other) = (processors.next()?, processors.next_back()?);
    Some([one, other].map(Processor))
}
