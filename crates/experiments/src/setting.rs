//! The setting of a run: the size of its workloads, and the inputs that the command supplies.

use ringfence_devices::workload::PACKETS_PER_RUN;

use super::guest_loads::Loads;
use super::guests::Guests;
use super::prefetch::PrefetchRow;
use super::reuse::ReuseRow;
use ringfence_lab::Profile;

/// Workload size and inputs of the experiments.
#[derive(Debug, Clone)]
pub struct Setting {
    /// Cost profile of the modelled machine.
    pub profile: Profile,
    /// Consecutive runs of a workload on one interface. Allocator state carries over from run to
    /// run: decision 0011 calls it history.
    pub runs: usize,
    /// Runs of the allocators alone (X03, X04, X11, X14, X15).
    pub history: usize,
    /// Packets of a run.
    pub packets: u64,
    /// Passes over the whole IOVA space (X19). X26 makes one, or none if this is 0.
    pub wraps: u64,
    /// Timed repetitions of each run.
    pub repetitions: usize,
    /// Prefetcher results on recorded traces (X07), from [`of_trace`](super::prefetch::of_trace),
    /// concatenated trace by trace.
    pub recorded: Vec<PrefetchRow>,
    /// Page reuse of recorded devices (X22), from [`of_trace`](super::reuse::of_trace).
    pub reuse: Vec<ReuseRow>,
    /// Counts from booted guests (X21).
    pub guests: Guests,
    /// Counts of loads in booted guests (X29).
    pub loads: Loads,
}

impl Setting {
    /// The setting of `ringfence reproduce`. It makes ten of the papers' hundred runs, on a profile
    /// whose page walks do not snoop (rIOMMU section 3.2; decision 0011).
    pub fn full() -> Self {
        Self {
            profile: Profile::r210_2015(),
            runs: 10,
            history: 100,
            packets: PACKETS_PER_RUN,
            wraps: 2,
            repetitions: 5,
            recorded: Vec::new(),
            reuse: Vec::new(),
            guests: Guests::default(),
            loads: Loads::default(),
        }
    }

    /// A minimal workload for tests of structure. Its timed numbers are meaningless.
    pub fn smoke() -> Self {
        Self {
            runs: 1,
            history: 3,
            packets: 2048,
            wraps: 1,
            repetitions: 1,
            ..Self::full()
        }
    }
}
