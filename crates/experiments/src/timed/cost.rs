//! Cost of a run, from the cycles of its blocks in each repetition.

use ringfence_lab::Profile;
use ringfence_lab::plan::Plan;

use crate::finding::median;

/// Cost of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Cost {
    /// Measured cycles without the replay's own loop: the sum over blocks of steps of each block's
    /// median over the repetitions. The medians suppress disturbances on the CPU.
    pub(crate) measured: f64,
    /// Measured cycles of each repetition, in the order in which they ran.
    pub(crate) repetitions: Vec<f64>,
    /// Largest minus smallest repetition, in cycles.
    pub(crate) spread: f64,
    /// Number of invalidation commands.
    pub(crate) invalidations: u64,
    /// Number of map/unmap pairs: the larger of the numbers of maps and unmaps.
    pub(crate) pairs: u64,
    /// The subject that was timed.
    #[cfg(test)]
    pub(crate) subject: Option<super::TimedSubject>,
}

impl Cost {
    /// Cost of `plan` from `repetitions`, each a list of cycles per block. `own` is the part that
    /// the replay's own loop takes.
    pub(crate) fn of(repetitions: &[Vec<u64>], plan: &Plan, own: f64, invalidations: u64) -> Self {
        let each: Vec<f64> = repetitions
            .iter()
            .map(|blocks| (blocks.iter().sum::<u64>() as f64 - own).max(0.0))
            .collect();
        Self {
            measured: (sum_of_medians(repetitions) - own).max(0.0),
            spread: median(&each).spread,
            repetitions: each,
            invalidations,
            pairs: plan.maps.max(plan.unmaps),
            #[cfg(test)]
            subject: None,
        }
    }

    /// Measured cycles per map/unmap pair.
    pub(crate) fn measured_per_pair(&self) -> f64 {
        self.measured / self.pairs.max(1) as f64
    }

    /// Spread of the measured cycles per map/unmap pair.
    pub(crate) fn spread_per_pair(&self) -> f64 {
        self.spread / self.pairs.max(1) as f64
    }

    /// Cycles that `profile` models per map/unmap pair.
    pub(crate) fn modelled_per_pair(&self, profile: &Profile) -> f64 {
        self.invalidations_per_pair() * profile.invalidation_cycles as f64
    }

    /// Invalidation commands per map/unmap pair.
    pub(crate) fn invalidations_per_pair(&self) -> f64 {
        self.invalidations as f64 / self.pairs.max(1) as f64
    }

    /// Measured and modelled cycles per map/unmap pair.
    pub(crate) fn per_pair(&self, profile: &Profile) -> f64 {
        self.measured_per_pair() + self.modelled_per_pair(profile)
    }

    /// Measured and modelled cycles per map/unmap pair, for each repetition.
    pub(crate) fn each_per_pair(&self, profile: &Profile) -> Vec<f64> {
        let (pairs, modelled) = (self.pairs.max(1) as f64, self.modelled_per_pair(profile));
        let each = self.repetitions.iter();
        each.map(|measured_part| measured_part / pairs + modelled)
            .collect()
    }
}

/// Sums, over all blocks, each block's median over the repetitions.
pub(crate) fn sum_of_medians(repetitions: &[Vec<u64>]) -> f64 {
    let count = repetitions.iter().map(Vec::len).min().unwrap_or(0);
    let block = |block: usize| {
        let times = repetitions.iter().map(|blocks| blocks[block] as f64);
        median(&times.collect::<Vec<_>>()).middle
    };
    (0..count).map(block).sum()
}
