//! One row of a comparison: a trace in a mode.

use serde::Serialize;

use crate::ReplayStatus;
use crate::guest::RtcParams;
use crate::meter::Components;
use crate::modes::{Mode, Safety};
use crate::oracle::Tally;
use crate::replay::Outcomes;

/// Version of the JSON form. Fields may be added under the same version, never removed or given
/// another meaning. Version 2 writes null for a number that was not measured.
pub const SCHEMA: u32 = 2;

/// Violations by class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Violations {
    /// Through the mapping of an address that was released.
    pub stale: u64,
    /// Where there never was a mapping.
    pub never: u64,
    /// Against the direction of the mapping.
    pub direction: u64,
    /// Through another device's mapping.
    pub foreign: u64,
    /// All of them.
    pub total: u64,
}

impl From<Tally> for Violations {
    fn from(tally: Tally) -> Self {
        Self {
            stale: tally.stale,
            never: tally.never,
            direction: tally.direction,
            foreign: tally.foreign,
            total: tally.violations(),
        }
    }
}

/// A trace in a mode. `docs/JSON.md` says what every field means. A field that is `None` was not
/// measured.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Row {
    /// Name of the trace.
    pub trace: String,
    /// Name of the mode.
    pub mode: String,
    /// What the mode promises: `byte-granular`, `strict`, `bounded` or `none`.
    pub safety: String,
    /// The bound of a bounded mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<String>,
    /// `ok`, or what keeps the row from being taken at its word.
    pub status: ReplayStatus,
    /// Mappings made.
    pub maps: u64,
    /// Mappings ended.
    pub unmaps: u64,
    /// Average cycles of a map, executed and charged. `None` without a timed replay or a map.
    pub map_cycles: Option<f64>,
    /// Average cycles of an unmap, executed and charged. `None` without a timed replay or an unmap.
    pub unmap_cycles: Option<f64>,
    /// The same by component. `None` without a timed replay or a map.
    pub components: Option<Components>,
    /// Cycles that the profile charges for a map and an unmap, timed or not. `None` without both.
    pub charged_cycles: Option<f64>,
    /// Share of map and unmap cycles that was charged by the profile.
    pub charged_share: Option<f64>,
    /// c / (c + map + unmap).
    pub relative_throughput: Option<f64>,
    /// Average length of the allocator's search. `None` without a map.
    pub search_len_mean: Option<f64>,
    /// Longest search.
    pub search_len_max: u32,
    /// Invalidation commands.
    pub invalidations: u64,
    /// Hits of the IOTLB in the metered pass, as a share of its lookups. `None` without a lookup.
    pub iotlb_hit_rate: Option<f64>,
    /// Hits of the walk caches of level 1, 2, 3 as shares of their lookups. `None` without a
    /// lookup.
    pub walk_cache_hit_rate: [Option<f64>; 3],
    /// Words read from tables per walk. `None` without a walk.
    pub walk_references: Option<f64>,
    /// Most mappings alive at once.
    pub live_max: u64,
    /// Bytes of tables, at most.
    pub table_bytes: u64,
    /// Accesses of the device in the metered pass: one a page of each mapping.
    pub accesses: u64,
    /// Accesses of the attackers in the hostile pass. `None` without that pass.
    pub attempts: Option<u64>,
    /// Accesses let through outside live grants, both passes. `None` without the hostile pass.
    pub violations: Option<Violations>,
    /// Accesses let through beside a buffer on its page. `None` without the hostile pass.
    pub colocated: Option<u64>,
    /// Accesses stopped inside a live grant, in the passes that were run.
    pub false_faults: u64,
    /// Longest time from unmap's return to the end of the invalidation, on the trace's clock.
    pub stale_window_max_ns: u64,
    /// Bytes times seconds of all such windows.
    pub stale_byte_seconds: f64,
    /// Longest time a buffer was withheld.
    pub release_delay_max_ns: u64,
    /// Mappings alive when the trace ends.
    pub live_at_end: u64,
    /// [`ReplayStatus::code`] of `status`.
    pub status_code: &'static str,
    /// Maps that waited for a slot of their ring.
    pub stalls: u64,
    /// Maps that never got one: their mapping ended, or the trace, while they waited. They are not
    /// among `maps` and `unmaps`.
    pub stalled_out: u64,
    /// Requests to a host to map or to unmap; 0 where the kernel does it itself.
    pub requests: u64,
    /// Notifications of the host: requests that wait together have one.
    pub kicks: u64,
    /// Walks of the guest's second stage by the host; 0 where guest-physical is physical.
    pub host_walks: u64,
    /// Words of the second stage that finding pages has read, by walks or through the pointer to
    /// the last table.
    pub host_reads: u64,
    /// Frames given to pages of the guest that had none.
    pub host_frames: u64,
    /// Those of them that were not in the host's pool, and were asked for while the guest waited.
    pub host_frames_awaited: u64,
    /// Mappings that nobody used and a cache still kept when the trace ended.
    pub kept_at_end: u64,
    /// Their part of `stale_byte_seconds`: until the end of the trace, not of their residency.
    pub kept_byte_seconds: f64,
    /// Like `stale_window_max_ns`, to the end of the last window: modes with a cache run on after
    /// the trace.
    pub exposed_max_ns: u64,
    /// Like `stale_byte_seconds`, to the end of the last window.
    pub exposed_byte_seconds: f64,
    /// From the end of the trace to the invalidation of the last mapping that a cache kept.
    pub exposed_after_end_ns: u64,
    /// Accesses of the attackers let through outside live grants after the trace's end; not among
    /// `violations`. `None` without the hostile pass.
    pub reached_after_end: Option<u64>,
    /// Mappings that a cache still kept when the time of its bound was over.
    pub overdue: u64,
}

/// What a row is made of.
pub struct RowInputs<'a> {
    /// Name of the trace.
    pub trace: &'a str,
    /// The mode.
    pub mode: &'a Mode,
    /// The metered pass.
    pub metered: &'a Outcomes,
    /// The hostile pass.
    pub attack: Option<&'a Outcomes>,
    /// The meter; `None` without a timed replay.
    pub components: Option<Components>,
    /// The c of `relative_throughput`.
    pub baseline_cycles: f64,
    /// Cycles charged for an invalidation.
    pub invalidation_cycles: u64,
    /// Cycles charged for a notification of the host.
    pub kick_cycles: u64,
    /// T and C of modes with a cache.
    pub rtc: RtcParams,
    /// Whether safety may be claimed, and if not, why.
    pub status: ReplayStatus,
}

/// `None` where there is nothing to take a share of.
fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

impl Row {
    /// A row of zeros as a run over a trace with maps and unmaps gives one: `timed` with
    /// repetitions, `hostile` with the hostile pass. It says which fields have a value.
    pub fn of_run(timed: bool, hostile: bool) -> Self {
        let cycles = timed.then_some(0.0);
        let count = hostile.then_some(0);
        Self {
            bound: Some(String::new()),
            map_cycles: cycles,
            unmap_cycles: cycles,
            components: timed.then(Components::default),
            charged_cycles: Some(0.0),
            charged_share: cycles,
            relative_throughput: cycles,
            search_len_mean: Some(0.0),
            iotlb_hit_rate: Some(0.0),
            walk_cache_hit_rate: [Some(0.0); 3],
            walk_references: Some(0.0),
            attempts: count,
            violations: hostile.then(Violations::default),
            colocated: count,
            reached_after_end: count,
            ..Self::default()
        }
    }

    /// Cycles of a map and an unmap together, if both were measured.
    pub fn cycles(&self) -> Option<f64> {
        Some(self.map_cycles? + self.unmap_cycles?)
    }

    /// Puts a row together.
    pub fn new(parts: &RowInputs<'_>) -> Self {
        let RowInputs {
            trace,
            mode,
            metered,
            attack: hostile,
            components,
            baseline_cycles: c_none,
            invalidation_cycles,
            kick_cycles,
            ..
        } = *parts;
        let traffic = metered.traffic;
        let (maps, unmaps) = (metered.maps, metered.unmaps);
        let invalidation = ratio(metered.invalidations * invalidation_cycles, unmaps);
        let map_kick = ratio(traffic.kicks_in_maps * kick_cycles, maps);
        let unmap_kick = ratio(traffic.kicks_in_unmaps * kick_cycles, unmaps);
        let components = components.filter(|_| maps > 0).map(|mut components| {
            let cycles = &mut components.cycles;
            cycles.unmap_invalidation_charged = invalidation.unwrap_or(0.0);
            cycles.map_kick_charged = map_kick.unwrap_or(0.0);
            cycles.unmap_kick_charged = unmap_kick.unwrap_or(0.0);
            components
        });
        let sum = |parts: [Option<f64>; 3]| parts.into_iter().sum::<Option<f64>>();
        let charged = sum([invalidation, map_kick, unmap_kick]);
        let map = components.map(|components| components.cycles.map());
        let unmap = components.filter(|_| unmaps > 0);
        let unmap = unmap.map(|components| components.cycles.unmap());
        let both = map.zip(unmap).map(|(map, unmap)| map + unmap);
        let mut tally = metered.tally;
        if let Some(hostile) = hostile {
            tally.add(&hostile.tally);
        }
        let hardware = &metered.hardware;
        let walks = hardware.iotlb_misses;
        let safe = parts.status.is_ok();
        // Exposure is measured: a promise that the oracle saw broken is not repeated.
        let promise = mode.safety();
        let broken = promise >= Safety::Strict && tally.violations() > 0;
        let status = if safe && broken {
            ReplayStatus::Broken {
                violations: tally.violations(),
                promise,
            }
        } else {
            parts.status.clone()
        };
        Self {
            trace: trace.to_owned(),
            mode: mode.name.clone(),
            safety: if safe && !broken {
                promise.to_string()
            } else {
                Safety::None.to_string()
            },
            bound: match parts.rtc.for_mode(mode) {
                // The bound is the same whatever the cycles are that a mode has it in.
                Some(_) if promise == Safety::Bounded => Some(parts.rtc.to_string()),
                _ => mode.bound().map(str::to_owned),
            },
            status_code: status.code(),
            status,
            maps: metered.maps,
            unmaps: metered.unmaps,
            map_cycles: map,
            unmap_cycles: unmap,
            components,
            charged_cycles: charged,
            charged_share: charged
                .zip(both)
                .filter(|(_, both)| *both > 0.0)
                .map(|(charged, both)| charged / both),
            relative_throughput: both.map(|both| c_none / (c_none + both)),
            search_len_mean: ratio(metered.search_steps, maps),
            search_len_max: metered.search_max,
            invalidations: metered.invalidations,
            iotlb_hit_rate: ratio(hardware.iotlb_hits, hardware.lookups()),
            walk_cache_hit_rate: core::array::from_fn(|level| {
                let hits = hardware.walk_cache_hits[level];
                ratio(hits, hits + hardware.walk_cache_misses[level])
            }),
            walk_references: ratio(hardware.walk_references, walks),
            live_max: metered.live_max,
            table_bytes: metered.table_bytes,
            accesses: metered.tally.accesses,
            attempts: hostile.map(|hostile| hostile.attempts),
            violations: hostile.map(|_| tally.into()),
            colocated: hostile.map(|_| tally.colocated),
            false_faults: tally.false_faults,
            stale_window_max_ns: metered.stale_max_ns,
            stale_byte_seconds: metered.stale_byte_seconds,
            release_delay_max_ns: metered.release_delay_max_ns,
            live_at_end: metered.alive_at_end,
            stalls: metered.stalls,
            stalled_out: metered.stalled_out,
            requests: traffic.requests,
            kicks: traffic.kicks_in_maps + traffic.kicks_in_unmaps,
            host_walks: traffic.lookups.walks,
            host_reads: traffic.lookups.reads,
            host_frames: traffic.lookups.frames,
            host_frames_awaited: traffic.lookups.frames_awaited,
            kept_at_end: metered.kept_at_end,
            kept_byte_seconds: metered.kept_byte_seconds,
            exposed_max_ns: metered.exposure.max_ns,
            exposed_byte_seconds: metered.exposure.byte_seconds,
            exposed_after_end_ns: metered.exposure.after_end_ns,
            reached_after_end: hostile.map(|hostile| hostile.exposure.reached_after_end),
            overdue: metered.exposure.overdue,
        }
    }
}
