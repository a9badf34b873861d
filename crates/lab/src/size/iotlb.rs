//! The IOTLB in several shapes under modes that map pages: the modelled unit of `compare`, once for each.
//!
//! A trace has no accesses. A device that touched a page only once would miss whatever the IOTLB; here it touches each page twice, when its
//! buffer is mapped and before it is unmapped. How many other pages it touches meanwhile is the trace's, and the question is whether an
//! IOTLB still holds the first translation: half of the lookups can hit at most.

use crate::Profile;
use crate::compare::{self, Runner, runner};
use crate::error::LabError;
use crate::limits::ReplayLimits;
use crate::modes::Mode;

use super::advice::{IotlbAdvice, IotlbPoint};

/// Entries that are tried.
pub const ENTRIES: [u32; 5] = [16, 64, 256, 1024, 4096];
/// Ways that each number of entries is tried with.
pub const WAYS: [u32; 3] = [1, 4, 16];

const TRIALS: usize = ENTRIES.len() * WAYS.len();

/// Sets and ways that are tried, by ways.
pub fn geometries() -> impl Iterator<Item = (u32, u32)> {
    WAYS.into_iter()
        .flat_map(|ways| ENTRIES.map(|entries| (entries / ways, ways)))
}

/// A replay at one geometry.
pub(super) struct IotlbTrial {
    pub(super) mode: String,
    sets: u32,
    ways: u32,
    pub(super) runner: Runner,
}

/// Replays of `modes` at all geometries, in order of the modes.
///
/// # Errors
/// A mode is not built in.
pub(super) fn trials(
    modes: &[Mode],
    profile: &Profile,
    limits: ReplayLimits,
) -> Result<Vec<IotlbTrial>, LabError> {
    let mut out = Vec::with_capacity(modes.len() * TRIALS);
    for mode in modes {
        for (sets, ways) in geometries() {
            let mut profile = profile.clone();
            (profile.iotlb_sets, profile.iotlb_ways) = (sets, ways);
            let options = compare::CompareOptions {
                limits,
                profile,
                repetitions: 0,
                attack: false,
                early_touches: true,
                ..compare::CompareOptions::new()
            };
            out.push(IotlbTrial {
                mode: mode.name.clone(),
                sets,
                ways,
                runner: runner(mode, &options)?,
            });
        }
    }
    Ok(out)
}

/// What came of them, mode by mode.
pub(super) fn advice(
    trials: &mut [IotlbTrial],
    alive: &[(ringfence_trace::MappingId, ringfence_trace::DeviceIndex)],
) -> Vec<IotlbAdvice> {
    trials
        .chunks_mut(TRIALS)
        .filter_map(|trials| {
            let mode = trials.first()?.mode.clone();
            let mut most = 0;
            let points = trials
                .iter_mut()
                .map(|trial| {
                    let stats = trial.runner.metered.finish(alive).hardware;
                    let lookups = stats.lookups();
                    most = most.max(lookups);
                    IotlbPoint {
                        sets: trial.sets,
                        ways: trial.ways,
                        entries: trial.sets * trial.ways,
                        hit_rate: (lookups > 0).then(|| stats.iotlb_hits as f64 / lookups as f64),
                        evictions: stats.iotlb_evictions,
                    }
                })
                .collect();
            Some(IotlbAdvice::new(&mode, most, points))
        })
        .collect()
}
