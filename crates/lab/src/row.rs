//! One row of a comparison: a trace in a mode.

use serde::Serialize;

use crate::ReplayStatus;
use crate::iommu_family::IommuFamily;
use crate::machine::{Baseline, DeviceSide, Prices};
use crate::mapping_cache::CycleParams;
use crate::meter::Components;
use crate::modes::{FlushKind, Mode, Safety};
use crate::oracle::{StaleBytes, VerdictCounts};
use crate::replay::{BufferCounts, Outcomes};
use crate::round_trips::{RoundTripCost, RoundTrips};

/// Version of the JSON form. A version may gain fields, but never removes a field or changes its
/// meaning. Version 2 writes null for a number that was not measured, version 3 also for a number
/// of the profile that no source states.
pub const SCHEMA: u32 = 3;

/// The side of a machine that limits a mode's throughput.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Limit {
    /// The processor: map and unmap take its cycles.
    Processor,
    /// The device: its transfers wait for page walks.
    Device,
}

impl Limit {
    /// Returns the name, as in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Processor => "processor",
            Self::Device => "device",
        }
    }
}

/// Violations by class: accesses that the IOMMU let through outside live grants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Violations {
    /// Accesses through the mapping of a released address.
    pub stale: u64,
    /// Accesses to addresses that never had a mapping.
    pub never: u64,
    /// Accesses against the direction of the mapping.
    pub direction: u64,
    /// Accesses to pages that only another device has mapped.
    pub foreign: u64,
    /// Sum of all classes.
    pub total: u64,
}

impl From<VerdictCounts> for Violations {
    fn from(tally: VerdictCounts) -> Self {
        Self {
            stale: tally.stale,
            never: tally.never,
            direction: tally.direction,
            foreign: tally.foreign,
            total: tally.violations(),
        }
    }
}

/// A trace in a mode. `docs/JSON.md` specifies every field. A `None` field was not measured.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Row {
    /// Name of the trace.
    pub trace: String,
    /// Name of the mode.
    pub mode: String,
    /// The hardware that translates: a family of IOMMUs, `calgary`, `riommu` or `none`.
    pub iommu: String,
    /// The promised protection: `byte-granular`, `strict`, `own-pool`, `bounded` or `none`.
    pub safety: String,
    /// The stated bound of a bounded mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<String>,
    /// `ok`, or the reason why the row is not valid.
    pub status: ReplayStatus,
    /// Maps that succeeded; refused maps are not included.
    pub maps: u64,
    /// Unmaps that the replay performed, including refused ones.
    pub unmaps: u64,
    /// Average cycles of a map, measured and modelled. `None` without a timed replay or a map.
    pub map_cycles: Option<f64>,
    /// Average cycles of an unmap, measured and modelled. `None` without timing or an unmap.
    pub unmap_cycles: Option<f64>,
    /// The same cycles by component. `None` without a timed replay or a map.
    pub components: Option<Components>,
    /// Modelled cycles of a map and an unmap, with or without a timed replay.
    /// `None` without a map or an unmap, or if the profile does not state their price.
    pub modelled_cycles: Option<f64>,
    /// Modelled cycles as a share of the map and unmap cycles.
    pub modelled_share: Option<f64>,
    /// The smaller of `processor_throughput` and `device_throughput`; the former if the profile has
    /// no device side.
    pub relative_throughput: Option<f64>,
    /// c: cycles without protection, per mapping. `None` if the profile does not state them.
    pub baseline_cycles: Option<f64>,
    /// c / (c + map + unmap).
    pub processor_throughput: Option<f64>,
    /// Throughput of the device with this mode's page walks, as a share of that without
    /// translation. `None` without a device side or an access.
    pub device_throughput: Option<f64>,
    /// The side that sets `relative_throughput`. `None` without a device side or with an unknown
    /// side.
    pub limited_by: Option<Limit>,
    /// Ceiling of the device's side with the machine's page walkers, in Gb/s.
    pub device_ceiling_gbps: Option<f64>,
    /// The same ceiling with [`Prices::walkers`] times the walkers.
    pub parallel_ceiling_gbps: Option<f64>,
    /// Translations that the unit did not have cached, per page accessed. `None` without an access.
    pub misses_per_page: Option<f64>,
    /// Memory reads of page walks per page accessed: the M of F&S. `None` without an access.
    pub reads_per_page: Option<f64>,
    /// Memory reads of prefetches per page accessed, which M does not include. `None` without a
    /// prefetch or an access.
    pub prefetch_reads_per_page: Option<f64>,
    /// Average number of steps of the allocator's search. `None` without a map.
    pub search_steps_mean: Option<f64>,
    /// Number of steps of the longest search.
    pub search_steps_max: u32,
    /// Number of invalidations, each with one wait for its completion.
    pub invalidations: u64,
    /// Number of commands of these invalidations. `None` for VT-d, whose model executes each
    /// invalidation exactly, and for hardware of no family.
    pub invalidation_commands: Option<u64>,
    /// IOTLB hits in the metered pass, as a share of the lookups. `None` without a lookup.
    pub iotlb_hit_rate: Option<f64>,
    /// Hits of the walk caches of levels 1, 2 and 3, as shares of their lookups. `None` without a
    /// lookup.
    pub walk_cache_hit_rate: [Option<f64>; 3],
    /// Words read from tables per walk. `None` without a walk.
    pub words_per_walk: Option<f64>,
    /// Peak number of live mappings.
    pub live_mappings_max: u64,
    /// Peak size of the tables in bytes.
    pub table_bytes: u64,
    /// Bytes of the pools that devices reach at all times; they never shrink. 0 in modes without
    /// pools.
    pub pool_bytes: u64,
    /// Bytes that maps and unmaps copied, per byte of the mapped buffers. `None` without a map.
    pub copied_per_byte: Option<f64>,
    /// Unmapped buffers of the metered pass by the memory that the device used and by their return.
    pub ways: BufferCounts,
    /// Accesses of the device in the metered pass: one for each page of each mapping.
    pub accesses: u64,
    /// Accesses of the attackers in the attack pass. `None` without that pass.
    pub attack_accesses: Option<u64>,
    /// Accesses outside live grants that the IOMMU let through, in both passes. `None` without the
    /// attack pass.
    pub violations: Option<Violations>,
    /// Accesses that read a live buffer which the device may only write, in a family whose tables
    /// have no write-only pages; `violations` does not count them. 0 in other families. `None`
    /// without the attack pass.
    pub reads_against_direction: Option<u64>,
    /// Accesses beside a buffer on its page that the IOMMU let through. `None` without the attack
    /// pass.
    pub colocated: Option<u64>,
    /// Accesses outside live grants that reached only the device's own pool, without those of
    /// `mutable_after_release`. They read only what the pool holds for this device, and write
    /// nothing that a driver receives. `None` without the attack pass.
    pub shadow_accesses: Option<u64>,
    /// Accesses inside a live grant that the IOMMU stopped, in all passes that ran.
    pub false_faults: u64,
    /// Longest time from the return of an unmap to the end of the invalidation, on the trace's
    /// clock.
    pub stale_window_max_ns: u64,
    /// Sum over all such windows of bytes times seconds.
    pub stale_byte_seconds: f64,
    /// Bytes in open windows, over time; not part of the JSON form.
    #[serde(skip)]
    pub stale_bytes: StaleBytes,
    /// Time from an unmap to the return of its buffer that half of the buffers do not exceed,
    /// rounded up by at most 1/64, as all percentiles. `None` without an unmap.
    pub release_delay_median_ns: Option<u64>,
    /// The same for 99% of the buffers.
    pub release_delay_p99_ns: Option<u64>,
    /// Longest time for which the layer withheld a buffer.
    pub release_delay_max_ns: u64,
    /// The 99% of the buffers that the device may write. `None` without such an unmap.
    pub receive_delay_p99_ns: Option<u64>,
    /// The 99% of the buffers that the device may only read. `None` without such an unmap.
    pub transmit_delay_p99_ns: Option<u64>,
    /// Number of live mappings at the end of the trace.
    pub live_mappings_at_end: u64,
    /// [`ReplayStatus::code`] of `status`.
    pub status_code: &'static str,
    /// Maps that waited for a slot of their ring.
    pub stalled_maps: u64,
    /// Maps that never got a slot: their mapping or the trace ended while they waited. `maps` and
    /// `unmaps` do not count them.
    pub maps_without_slot: u64,
    /// Map and unmap requests to a host; 0 if the kernel owns the table.
    pub requests: u64,
    /// Notifications of the host. Requests that wait together share one.
    pub kicks: u64,
    /// Walks of the guest's second stage by the host; 0 if guest-physical addresses equal physical
    /// ones.
    pub host_walks: u64,
    /// Words of the second stage that the host read to find pages, by walks or through the pointer
    /// to the last table.
    pub host_words_read: u64,
    /// Frames that the host gave to guest pages without one.
    pub host_frames: u64,
    /// Those of `host_frames` that the host allocated outside its pool while the guest waited.
    pub host_frames_awaited: u64,
    /// Unused mappings that a cache still kept at the end of the trace.
    pub kept_mappings_at_end: u64,
    /// Share of these mappings in `stale_byte_seconds`: up to the end of the trace, not of their
    /// residency.
    pub kept_byte_seconds: f64,
    /// Like `stale_window_max_ns`, up to the end of the last window. Modes with a cache run on
    /// after the end of the trace.
    pub exposed_max_ns: u64,
    /// Like `stale_byte_seconds`, up to the end of the last window.
    pub exposed_byte_seconds: f64,
    /// Time from the end of the trace to the invalidation of the last mapping that a cache kept.
    pub exposed_after_end_ns: u64,
    /// Accesses of the attackers outside live grants that the IOMMU let through after the end of
    /// the trace. `violations` does not count them. `None` without the attack pass.
    pub violations_after_end: Option<u64>,
    /// Mappings that a cache kept beyond its stated bound.
    pub overdue_mappings: u64,
    /// Accesses that wrote a released buffer in the device's own pool, whose bytes the driver may
    /// still use. 0 in modes whose drivers do not take their buffers from a pool. `None` without
    /// the attack pass.
    pub mutable_after_release: Option<u64>,
    /// Round trips of a request-response trace. `None` for other traces.
    pub round_trip: Option<RoundTripCost>,
}

/// The inputs of a row.
pub struct RowInputs<'a> {
    /// Name of the trace.
    pub trace: &'a str,
    /// The mode of the row.
    pub mode: &'a Mode,
    /// The machine's family of IOMMUs.
    pub iommu: IommuFamily,
    /// Outcomes of the metered pass.
    pub metered: &'a Outcomes,
    /// Outcomes of the attack pass; `None` without that pass.
    pub attack: Option<&'a Outcomes>,
    /// Cycles from the meter; `None` without a timed replay.
    pub components: Option<Components>,
    /// Prices of the modelled work, c, and the device's side.
    pub prices: Prices,
    /// Round trips of the trace, if it is request-response.
    pub round_trips: Option<RoundTrips>,
    /// T and C of modes with a cache.
    pub cache_cycles: CycleParams,
    /// `Ok` if the row may claim safety; otherwise the reason why not.
    pub status: ReplayStatus,
}

/// Returns the modelled cycles of `events` for each of `per`. NaN, which JSON writes as null, if
/// there are events and the profile does not state their price.
fn modelled(events: u64, price: Option<u64>, per: u64) -> f64 {
    match price {
        _ if events == 0 || per == 0 => 0.0,
        Some(cycles) => events.saturating_mul(cycles) as f64 / per as f64,
        None => f64::NAN,
    }
}

/// The throughput of a mode at both sides of the machine.
struct Throughput {
    baseline: Option<f64>,
    processor: Option<f64>,
    device: Option<f64>,
    has_device_side: bool,
    ceiling_gbps: Option<f64>,
    parallel_ceiling_gbps: Option<f64>,
    misses_per_page: Option<f64>,
    reads_per_page: Option<f64>,
    prefetch_reads_per_page: Option<f64>,
}

impl Throughput {
    /// Computes the throughput from the metered pass and the cycles of a map plus an unmap.
    fn new(metered: &Outcomes, mode: &Mode, prices: &Prices, both: Option<f64>) -> Self {
        let hardware = &metered.hardware;
        let pages = metered.tally.accesses;
        // A ring's entries have two words, and the unit reads one at a time.
        let words = if mode.has_rings() { 2 } else { 1 };
        let reads_per_page = ratio(hardware.walk_references / words, pages);
        let baseline = prices.baseline.and_then(|baseline| match baseline {
            Baseline::PerMapping(cycles) => Some(cycles),
            Baseline::PerPage(cycles) => Some(cycles * ratio(pages, metered.unmaps)?),
        });
        let device_side = prices.device_side;
        let of_device = |value: fn(&DeviceSide, f64, u32) -> f64, walkers| {
            let (side, reads) = (device_side?, reads_per_page?);
            Some(value(&side, reads, walkers))
        };
        Self {
            baseline,
            processor: baseline
                .zip(both)
                .map(|(baseline, both)| baseline / (baseline + both)),
            device: of_device(|side, reads, _| side.relative_throughput(reads), 1),
            has_device_side: device_side.is_some(),
            ceiling_gbps: of_device(DeviceSide::ceiling_gbps, 1),
            parallel_ceiling_gbps: of_device(DeviceSide::ceiling_gbps, prices.walkers),
            misses_per_page: ratio(hardware.iotlb_misses, pages),
            reads_per_page,
            prefetch_reads_per_page: match hardware.prefetch_references {
                0 => None,
                reads => ratio(reads, pages),
            },
        }
    }

    /// Returns the smaller side; `None` if a side of the machine is unknown.
    fn relative(&self) -> Option<f64> {
        if self.has_device_side {
            Some(self.processor?.min(self.device?))
        } else {
            self.processor
        }
    }

    /// Returns the side that sets the relative throughput. If neither takes anything, or both take
    /// the same share, it is the processor.
    fn limit(&self) -> Option<Limit> {
        if self.device? < self.processor? {
            Some(Limit::Device)
        } else {
            Some(Limit::Processor)
        }
    }
}

/// Returns `part / whole`; `None` if `whole` is 0.
fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

impl Row {
    /// Returns a row of zeros with the same `Some` fields as a run over a trace with maps and
    /// unmaps. `timed` is true for a run with repetitions, `attack` for one with the attack pass.
    pub fn of_run(timed: bool, attack: bool) -> Self {
        let cycles = timed.then_some(0.0);
        let count = attack.then_some(0);
        Self {
            bound: Some(String::new()),
            map_cycles: cycles,
            unmap_cycles: cycles,
            components: timed.then(Components::default),
            modelled_cycles: Some(0.0),
            modelled_share: cycles,
            relative_throughput: cycles,
            baseline_cycles: Some(0.0),
            processor_throughput: cycles,
            device_throughput: Some(0.0),
            device_ceiling_gbps: Some(0.0),
            parallel_ceiling_gbps: Some(0.0),
            misses_per_page: Some(0.0),
            reads_per_page: Some(0.0),
            prefetch_reads_per_page: Some(0.0),
            search_steps_mean: Some(0.0),
            invalidation_commands: Some(0),
            iotlb_hit_rate: Some(0.0),
            walk_cache_hit_rate: [Some(0.0); 3],
            words_per_walk: Some(0.0),
            copied_per_byte: Some(0.0),
            release_delay_median_ns: Some(0),
            release_delay_p99_ns: Some(0),
            receive_delay_p99_ns: Some(0),
            transmit_delay_p99_ns: Some(0),
            attack_accesses: count,
            violations: attack.then(Violations::default),
            reads_against_direction: count,
            colocated: count,
            shadow_accesses: count,
            violations_after_end: count,
            mutable_after_release: count,
            round_trip: Some(RoundTripCost::of_run(timed)),
            ..Self::default()
        }
    }

    /// Returns the cycles of a map plus an unmap; `None` unless both were measured.
    pub fn cycles(&self) -> Option<f64> {
        Some(self.map_cycles? + self.unmap_cycles?)
    }

    /// Builds a row.
    pub fn new(parts: &RowInputs<'_>) -> Self {
        let RowInputs {
            trace,
            mode,
            iommu,
            metered,
            attack,
            components,
            prices,
            ..
        } = *parts;
        let traffic = metered.traffic;
        let (maps, unmaps) = (metered.maps, metered.unmaps);
        let crossing = prices.crossing_cycles(mode.owner);
        let invalidation = modelled(metered.invalidations, prices.invalidation_cycles, unmaps);
        let map_kick = modelled(traffic.kicks_in_maps, crossing, maps);
        let unmap_kick = modelled(traffic.kicks_in_unmaps, crossing, unmaps);
        let components = components.filter(|_| maps > 0).map(|mut components| {
            let cycles = &mut components.cycles;
            cycles.unmap_invalidation_modelled = invalidation;
            cycles.map_kick_modelled = map_kick;
            cycles.unmap_kick_modelled = unmap_kick;
            components
        });
        let known = |cycles: f64| Some(cycles).filter(|cycles| cycles.is_finite());
        let modelled = known(invalidation + map_kick + unmap_kick);
        let modelled = modelled.filter(|_| maps > 0 && unmaps > 0);
        let map = components.and_then(|components| known(components.cycles.map()));
        let unmap = components.filter(|_| unmaps > 0);
        let unmap = unmap.and_then(|components| known(components.cycles.unmap()));
        let both = map.zip(unmap).map(|(map, unmap)| map + unmap);
        let throughput = Throughput::new(metered, mode, &prices, both);
        let mut tally = metered.tally;
        if let Some(attack) = attack {
            tally.add(&attack.tally);
        }
        let iommu_name = mode.hardware(iommu);
        // Only the tables of the family itself have its format.
        let readable = iommu_name == iommu.name() && !iommu.has_write_only_pages();
        let reads_against_direction = if readable { tally.direction_reads } else { 0 };
        if readable {
            tally = tally.without_direction_reads();
        }
        let hardware = &metered.hardware;
        let walks = hardware.iotlb_misses;
        let delays = &metered.release_delays;
        let all_delays = delays.all();
        let safe = parts.status.is_ok();
        // A row does not repeat a promise that the oracle saw broken.
        let promise = mode.safety();
        let broken = promise > Safety::Bounded && tally.violations() > 0;
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
            iommu: iommu_name.to_owned(),
            safety: if safe && !broken {
                promise.to_string()
            } else {
                Safety::None.to_string()
            },
            bound: match mode.flush {
                // The bound computed from T and C is the same for both.
                FlushKind::PerCycle | FlushKind::PerCycleAdaptive => {
                    Some(parts.cache_cycles.to_string())
                }
                _ => mode.bound().map(str::to_owned),
            },
            status_code: status.code(),
            status,
            maps: metered.maps,
            unmaps: metered.unmaps,
            map_cycles: map,
            unmap_cycles: unmap,
            components,
            modelled_cycles: modelled,
            modelled_share: modelled
                .zip(both)
                .filter(|(_, both)| *both > 0.0)
                .map(|(modelled, both)| modelled / both),
            relative_throughput: throughput.relative(),
            baseline_cycles: throughput.baseline,
            processor_throughput: throughput.processor,
            device_throughput: throughput.device,
            limited_by: throughput.limit(),
            device_ceiling_gbps: throughput.ceiling_gbps,
            parallel_ceiling_gbps: throughput.parallel_ceiling_gbps,
            misses_per_page: throughput.misses_per_page,
            reads_per_page: throughput.reads_per_page,
            prefetch_reads_per_page: throughput.prefetch_reads_per_page,
            search_steps_mean: ratio(metered.search_steps, maps),
            search_steps_max: metered.search_max,
            invalidations: metered.invalidations,
            invalidation_commands: (iommu != IommuFamily::Vtd && iommu_name == iommu.name())
                .then(|| hardware.invalidations.total()),
            iotlb_hit_rate: ratio(hardware.iotlb_hits, hardware.lookups()),
            walk_cache_hit_rate: core::array::from_fn(|level| {
                let hits = hardware.walk_cache_hits[level];
                ratio(hits, hits + hardware.walk_cache_misses[level])
            }),
            words_per_walk: ratio(hardware.walk_references, walks),
            live_mappings_max: metered.live_max,
            table_bytes: metered.table_bytes,
            pool_bytes: metered.pool_bytes,
            copied_per_byte: ratio(metered.copied_bytes, metered.mapped_bytes),
            ways: metered.ways,
            accesses: metered.tally.accesses,
            attack_accesses: attack.map(|attack| attack.attempts),
            violations: attack.map(|_| tally.into()),
            reads_against_direction: attack.map(|_| reads_against_direction),
            colocated: attack.map(|_| tally.colocated),
            shadow_accesses: attack.map(|_| tally.shadow),
            false_faults: tally.false_faults,
            stale_window_max_ns: metered.stale_max_ns,
            stale_byte_seconds: metered.stale_byte_seconds,
            stale_bytes: metered.stale_bytes.clone(),
            release_delay_median_ns: all_delays.percentile(50),
            release_delay_p99_ns: all_delays.percentile(99),
            release_delay_max_ns: metered.release_delay_max_ns,
            receive_delay_p99_ns: delays.receive.percentile(99),
            transmit_delay_p99_ns: delays.transmit.percentile(99),
            live_mappings_at_end: metered.alive_at_end,
            stalled_maps: metered.stalls,
            maps_without_slot: metered.stalled_out,
            requests: traffic.requests,
            kicks: traffic.kicks_in_maps + traffic.kicks_in_unmaps,
            host_walks: traffic.lookups.walks,
            host_words_read: traffic.lookups.reads,
            host_frames: traffic.lookups.frames,
            host_frames_awaited: traffic.lookups.frames_awaited,
            kept_mappings_at_end: metered.kept_at_end,
            kept_byte_seconds: metered.kept_byte_seconds,
            exposed_max_ns: metered.exposure.max_ns,
            exposed_byte_seconds: metered.exposure.byte_seconds,
            exposed_after_end_ns: metered.exposure.after_end_ns,
            violations_after_end: attack.map(|attack| attack.exposure.reached_after_end),
            overdue_mappings: metered.exposure.overdue,
            mutable_after_release: attack.map(|_| tally.mutable),
            round_trip: parts
                .round_trips
                .map(|trips| trips.cost(map.zip(unmap), prices.clock_ghz, delays.receive.mean())),
        }
    }
}
