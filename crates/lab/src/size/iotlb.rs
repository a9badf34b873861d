//! Simulates IOTLBs of several geometries in page-granular modes, each with the modelled unit of
//! `compare`.
//!
//! A trace has no device accesses. A device that accessed a page only once would miss with any
//! IOTLB. Here the device accesses each page twice: when its buffer is mapped and before it is
//! unmapped. The trace determines how many other pages it accesses in between. The second access
//! hits if the IOTLB still holds the first translation, so at most half of the lookups hit.

use ringfence_hw::IommuStats;

use crate::compare::{self, Runner, runner};
use crate::error::LabError;
use crate::limits::ReplayLimits;
use crate::modes::Mode;
use crate::{IotlbPrefetch, Profile};

use super::advice::{IotlbAdvice, IotlbPoint, IotlbStrategy};

/// Numbers of entries to try.
pub const ENTRIES: [u32; 5] = [16, 64, 256, 1024, 4096];
/// Numbers of ways to try with each number of entries.
pub const WAYS: [u32; 3] = [1, 4, 16];

/// Sets and ways with which the prefetches are tried: 64 entries.
const STRATEGY_GEOMETRY: (u32, u32) = (16, 4);

const GEOMETRIES: usize = ENTRIES.len() * WAYS.len();
const TRIALS: usize = GEOMETRIES + IotlbPrefetch::ALL.len();

/// Returns the (sets, ways) pairs to try, ordered by ways.
pub fn geometries() -> impl Iterator<Item = (u32, u32)> {
    WAYS.into_iter()
        .flat_map(|ways| ENTRIES.map(|entries| (entries / ways, ways)))
}

/// A mode and an IOTLB geometry.
#[derive(Clone)]
pub(super) struct Shape<'a> {
    mode: &'a Mode,
    sets: u32,
    ways: u32,
    prefetch: IotlbPrefetch,
}

/// Returns `modes` with all geometries, in order of the modes.
pub(super) fn shapes(modes: &[Mode]) -> impl Iterator<Item = Shape<'_>> {
    let trials = || {
        let plain = geometries().map(|geometry| (geometry, IotlbPrefetch::None));
        let prefetches = IotlbPrefetch::ALL.map(|prefetch| (STRATEGY_GEOMETRY, prefetch));
        plain.chain(prefetches)
    };
    modes.iter().flat_map(move |mode| {
        trials().map(move |((sets, ways), prefetch)| Shape {
            mode,
            sets,
            ways,
            prefetch,
        })
    })
}

impl Shape<'_> {
    /// Creates the replay.
    ///
    /// # Errors
    /// The mode is not built in.
    pub(super) fn runner(
        &self,
        profile: &Profile,
        limits: ReplayLimits,
    ) -> Result<Runner, LabError> {
        let mut profile = profile.clone();
        (profile.iotlb_sets, profile.iotlb_ways) = (self.sets, self.ways);
        profile.iotlb_prefetch = self.prefetch;
        let options = compare::CompareOptions {
            limits,
            profile,
            repetitions: 0,
            attack: false,
            early_touches: true,
            ..compare::CompareOptions::new()
        };
        runner(self.mode, &options)
    }
}

/// Turns the results into advice, mode by mode.
pub(super) fn advice(results: &[(Shape<'_>, IommuStats)]) -> Vec<IotlbAdvice> {
    results
        .chunks(TRIALS)
        .filter_map(|results| {
            let (first, _) = results.first()?;
            let (geometries, prefetches) = results.split_at_checked(GEOMETRIES)?;
            let strategies = prefetches
                .iter()
                .map(|(shape, stats)| IotlbStrategy {
                    prefetch: shape.prefetch.name(),
                    misses: stats.iotlb_misses,
                    prefetched: stats.prefetched,
                    words_read: stats.walk_references + stats.prefetch_references,
                })
                .collect();
            let mut most = 0;
            let points = geometries
                .iter()
                .map(|(shape, stats)| {
                    let lookups = stats.lookups();
                    most = most.max(lookups);
                    IotlbPoint {
                        sets: shape.sets,
                        ways: shape.ways,
                        entries: shape.sets * shape.ways,
                        hit_rate: (lookups > 0).then(|| stats.iotlb_hits as f64 / lookups as f64),
                        evictions: stats.iotlb_evictions,
                    }
                })
                .collect();
            Some(IotlbAdvice::new(&first.mode.name, most, points, strategies))
        })
        .collect()
}
