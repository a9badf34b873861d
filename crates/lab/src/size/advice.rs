//! Advice from counts and sweeps: ring sizes, the ring that fits, and a recommendation of two
//! sentences.

use serde::Serialize;

use super::usage::RingDemand;
use crate::ring::RingSizes;

/// Bytes of a slot in memory (rIOMMU Fig. 9c).
const SLOT_BYTES: u64 = 16;

/// Stalled maps of one ring at one size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Stalls {
    /// Maps that waited for a slot, or behind a waiting map.
    #[serde(rename = "stalled_maps")]
    pub stalls: u64,
    /// Waiting maps that never got a slot.
    #[serde(rename = "maps_without_slot")]
    pub stalled_out: u64,
    /// Scatterlists with more segments than the ring has slots.
    #[serde(rename = "refused_maps")]
    pub refused: u64,
}

/// The results for one ring at one size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct SizePoint {
    /// N: number of slots.
    pub entries: u32,
    /// Bytes of the ring's table.
    pub table_bytes: u64,
    /// Prediction of the slot model for a ring that uses only the slot at its tail (mode `riommu`).
    pub in_order_predicted: Stalls,
    /// Result of the replay for that ring.
    pub in_order: Stalls,
    /// Prediction of the slot model for a ring that uses any free slot (mode `riommu-ooo`).
    pub any_order_predicted: Stalls,
    /// Result of the replay for that ring.
    pub any_order: Stalls,
}

/// The kind of ring that fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fit {
    /// The ring as published (rIOMMU), which uses the slot at its tail.
    InOrder,
    /// A ring that uses any free slot, because unmaps are out of order.
    AnyOrder,
    /// A ring's static table (RI13), written once, because buffers stay mapped.
    Static,
    /// No ring: more slots are mapped at once than a ring can name.
    None,
}

impl Fit {
    /// Returns the name that reports print.
    pub const fn name(self) -> &'static str {
        match self {
            Self::InOrder => "in-order",
            Self::AnyOrder => "any-order",
            Self::Static => "static",
            Self::None => "none",
        }
    }
}

/// Advice for one ring.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RingAdvice {
    /// Device name, as in the trace.
    pub device: String,
    /// Direction: `to-device`, `from-device` or `bidirectional`.
    pub direction: String,
    /// Number of maps.
    pub maps: u64,
    /// Number of unmaps.
    pub unmaps: u64,
    /// L: peak number of mapped slots.
    pub live_slots_max: u64,
    /// D: peak number of live mappings.
    pub live_mappings_max: u64,
    /// K: slots of the largest mapping.
    pub mapping_slots_max: u64,
    /// Slots of the longest burst of unmaps.
    pub burst_slots_max: u64,
    /// B: peak number of slots that open bursts withhold.
    pub withheld_slots_max: u64,
    /// L + B: with this many slots, a ring that uses any free slot never stalls.
    pub rule_slots: u64,
    /// D x K + B.
    pub descriptor_rule_slots: u64,
    /// Smallest number of slots with which no map of this trace stalls in a ring that uses any free
    /// slot.
    pub any_order_slots: u64,
    /// Smallest number of slots with which no map of this trace stalls in a ring that uses the slot
    /// at its tail.
    pub in_order_slots: u64,
    /// Unmaps of a mapping other than the oldest.
    pub out_of_order_unmaps: u64,
    /// Peak number of older live mappings at an unmap.
    pub overtaken_mappings_max: u64,
    /// Average number of older live mappings at an unmap; `None` without unmaps.
    pub overtaken_mappings_mean: Option<f64>,
    /// Share of unmaps of the slot after the previously unmapped one, for which a prefetched next
    /// entry is right. `None` without unmaps.
    pub next_slot_share: Option<f64>,
    /// Live mappings at the end of the trace.
    pub live_mappings_at_end: u64,
    /// The kind of ring that fits.
    pub fit: Fit,
    /// The reason for `fit`.
    pub reason: String,
    /// N to choose: a power of two; 0 if no ring fits.
    pub entries: u32,
    /// Bytes of the ring's table.
    pub table_bytes: u64,
    /// The results of the sweep, by size.
    pub sweep: Vec<SizePoint>,
}

impl RingAdvice {
    /// Returns the advice that follows from the counts alone.
    pub(super) fn new(device: &str, direction: &str, ring: &RingDemand) -> Self {
        let any_order = power(ring.rule());
        let in_order = power(ring.rule().max(ring.in_order_need));
        let fit = if any_order.is_none() {
            Fit::None
        } else if ring.unmaps == 0 {
            Fit::Static
        } else if in_order.is_some() && in_order == any_order {
            Fit::InOrder
        } else {
            Fit::AnyOrder
        };
        let entries = match fit {
            Fit::None => 0,
            _ => any_order.unwrap_or(0),
        };
        Self {
            device: device.to_owned(),
            direction: direction.to_owned(),
            maps: ring.maps,
            unmaps: ring.unmaps,
            live_slots_max: ring.live_max,
            live_mappings_max: ring.mappings_max,
            mapping_slots_max: ring.pieces_max,
            burst_slots_max: ring.burst_max,
            withheld_slots_max: ring.withheld_max,
            rule_slots: ring.rule(),
            descriptor_rule_slots: ring.descriptor_rule(),
            any_order_slots: ring.any_order_need,
            in_order_slots: ring.in_order_need,
            out_of_order_unmaps: ring.out_of_order,
            overtaken_mappings_max: ring.overtaken_max,
            overtaken_mappings_mean: ratio(ring.overtaken_sum, ring.unmaps),
            next_slot_share: ratio(ring.next_in_turn, ring.unmaps),
            live_mappings_at_end: ring.live_at_end,
            fit,
            reason: why(fit, ring, in_order),
            entries,
            table_bytes: u64::from(entries) * SLOT_BYTES,
            sweep: Vec::new(),
        }
    }

    /// Returns a point of the sweep without results.
    pub(super) fn point(entries: u32) -> SizePoint {
        SizePoint {
            entries,
            table_bytes: u64::from(entries) * SLOT_BYTES,
            ..SizePoint::default()
        }
    }
}

/// Returns the smallest power of two that holds `need` slots; `None` above the largest ring of a
/// replay.
pub(super) fn power(need: u64) -> Option<u32> {
    let power = need.max(1).checked_next_power_of_two()?;
    u32::try_from(power)
        .ok()
        .filter(|power| *power <= RingSizes::MAX_SLOTS)
}

fn why(fit: Fit, ring: &RingDemand, in_order: Option<u32>) -> String {
    let disorder = || {
        format!(
            "{:.0}% of unmaps are out of order and overtake up to {} older mappings",
            100.0 * ring.out_of_order_share(),
            ring.overtaken_max
        )
    };
    match fit {
        Fit::InOrder if ring.out_of_order == 0 => {
            "unmaps come in the order of the maps, so the slot at the tail is always free".into()
        }
        Fit::InOrder => format!(
            "{}; in this trace the slot at the tail is still free in time, but only a ring that \
            uses any free slot guarantees it",
            disorder()
        ),
        Fit::AnyOrder => match in_order {
            Some(slots) => format!(
                "{}; a ring that uses only the slot at its tail would need N = {slots}",
                disorder()
            ),
            None => format!(
                "{}; a ring that uses only the slot at its tail would need {} slots, more than a \
                ring can have",
                disorder(),
                ring.in_order_need
            ),
        },
        Fit::Static => "no buffer is unmapped; use a ring's static table for these buffers".into(),
        Fit::None => format!(
            "{} slots are needed at once; a ring has at most {}",
            ring.rule(),
            RingSizes::MAX_SLOTS
        ),
    }
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// The IOTLB at one geometry.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct IotlbPoint {
    /// Number of sets.
    pub sets: u32,
    /// Number of ways.
    pub ways: u32,
    /// Sets times ways.
    pub entries: u32,
    /// Hits as a share of lookups; `None` without lookups.
    pub hit_rate: Option<f64>,
    /// Entries that the IOTLB evicted.
    pub evictions: u64,
}

/// Result of a prefetch into an IOTLB of 16 sets and 4 ways.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IotlbStrategy {
    /// Name of the prefetch.
    pub prefetch: &'static str,
    /// Lookups that missed.
    pub misses: u64,
    /// Pages that the unit prefetched.
    pub prefetched: u64,
    /// Words that walks and prefetches read from tables.
    pub words_read: u64,
}

/// Advice on the IOTLB in one mode.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IotlbAdvice {
    /// Name of the mode.
    pub mode: String,
    /// Number of page lookups.
    pub lookups: u64,
    /// The best hit rate of all geometries; `None` without lookups.
    pub best_hit_rate: Option<f64>,
    /// Smallest number of entries that reaches 90% of `best_hit_rate` with any number of ways.
    /// `None` if no lookup ever hits.
    pub entries_for_90_percent: Option<u32>,
    /// The same for 99%.
    pub entries_for_99_percent: Option<u32>,
    /// Results by geometry.
    pub points: Vec<IotlbPoint>,
    /// Results by prefetch, with one geometry.
    pub strategies: Vec<IotlbStrategy>,
}

impl IotlbAdvice {
    pub(super) fn new(
        mode: &str,
        lookups: u64,
        points: Vec<IotlbPoint>,
        strategies: Vec<IotlbStrategy>,
    ) -> Self {
        let best_hit_rate = points.iter().filter_map(|point| point.hit_rate);
        let best_hit_rate = best_hit_rate.max_by(f64::total_cmp);
        let reaching = |share: f64| {
            let enough = share * best_hit_rate.filter(|best| *best > 0.0)?;
            let good = points
                .iter()
                .filter(|point| point.hit_rate.is_some_and(|rate| rate >= enough));
            good.map(|point| point.entries).min()
        };
        Self {
            mode: mode.to_owned(),
            lookups,
            best_hit_rate,
            entries_for_90_percent: reaching(0.9),
            entries_for_99_percent: reaching(0.99),
            points,
            strategies,
        }
    }

    /// Returns the best hit rate, for ranking modes; 0 without lookups.
    fn best(&self) -> f64 {
        self.best_hit_rate.unwrap_or(0.0)
    }
}

/// Advice for one trace.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TraceSizing {
    /// Name of the trace.
    pub trace: String,
    /// `ok`, or the reason why the counts are not valid.
    pub status: String,
    /// Advice by ring.
    pub rings: Vec<RingAdvice>,
    /// Advice by mode.
    pub iotlb: Vec<IotlbAdvice>,
    /// A recommendation of two sentences.
    pub recommendation: String,
}

impl TraceSizing {
    /// Returns the slots and bytes of all advised rings.
    pub fn total(&self) -> (u64, u64) {
        let entries: u64 = self.rings.iter().map(|ring| u64::from(ring.entries)).sum();
        (entries, entries * SLOT_BYTES)
    }

    pub(super) fn recommend(rings: &[RingAdvice], iotlb: &[IotlbAdvice]) -> String {
        let of = |fit: Fit| rings.iter().filter(move |ring| ring.fit == fit);
        let Some(busiest) = rings.iter().max_by_key(|ring| ring.maps) else {
            return "The trace contains no map. Record one under load with ringfence trace record."
                .into();
        };
        let bytes: u64 = rings.iter().map(|ring| ring.table_bytes).sum();
        let kib = bytes.div_ceil(1024);
        let any = of(Fit::AnyOrder).count();
        let none = of(Fit::None).count();
        let mut first = format!(
            "Give the busiest ring, {} {}, {} slots, and {} {kib} KiB in all",
            busiest.device,
            busiest.direction,
            busiest.entries,
            match rings.len() {
                1 => "spend".to_owned(),
                count => format!("the {count} rings, as listed,"),
            },
        );
        if any > 0 {
            first.push_str(&format!(
                "; {any} of them {} a ring that uses any free slot (riommu-ooo), because their \
                drivers unmap out of order",
                if any == 1 { "needs" } else { "need" }
            ));
        }
        if none > 0 {
            first.push_str(&format!(
                "; {none} cannot have a ring: keep the page-granular IOMMU there (fence-burst)"
            ));
        }
        first.push('.');
        let hits = iotlb.iter().max_by(|a, b| a.best().total_cmp(&b.best()));
        let second = match hits {
            Some(best) => match best.entries_for_90_percent {
                Some(entries) if best.best() >= 0.01 => format!(
                    "With pages instead of rings, an IOTLB of {entries} entries reaches 90% of the \
                    best hit rate of all sizes tried ({}); more entries gain little.",
                    best.mode
                ),
                _ => {
                    "With pages instead of rings, no IOTLB size tried keeps a translation from map \
                    to unmap."
                        .into()
                }
            },
            None => "No IOTLB was tried.".into(),
        };
        format!("{first} {second}")
    }
}
