//! What follows from the counts and the sweeps: sizes, whether a ring fits, and a recommendation in
//! two sentences.

use serde::Serialize;

use super::usage::RingDemand;
use crate::ring::RingSizes;

/// Bytes of a slot in memory (rIOMMU Fig. 9c).
const SLOT_BYTES: u64 = 16;

/// Maps that had to wait, of one ring of one size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Stalls {
    /// Maps that waited for a slot, or behind one that did.
    pub stalls: u64,
    /// Those of them that never got one.
    pub stalled_out: u64,
    /// Lists with more pieces than the ring has slots.
    pub refused: u64,
}

/// One ring at one size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct SizePoint {
    /// N.
    pub entries: u32,
    /// Bytes of its table.
    pub bytes: u64,
    /// Takes the slot at its tail only (mode `riommu`): what the model of slots predicts.
    pub in_order_predicted: Stalls,
    /// The same, as replayed on the driver.
    pub in_order: Stalls,
    /// Takes any free slot (mode `riommu-ooo`): predicted.
    pub any_order_predicted: Stalls,
    /// The same, replayed.
    pub any_order: Stalls,
}

/// Which ring fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fit {
    /// The document's ring, which takes the slot at its tail.
    InOrder,
    /// One that takes any free slot: unmaps are out of order.
    AnyOrder,
    /// Buffers stay mapped: entries of a ring's static table (RI13), written once.
    Static,
    /// None: more is mapped at once than a ring can name.
    None,
}

impl Fit {
    /// As reports print it.
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
    /// As the trace prints it.
    pub device: String,
    /// `to-device`, `from-device`, `bidirectional`.
    pub direction: String,
    /// Mappings made and ended.
    pub maps: u64,
    /// See there.
    pub unmaps: u64,
    /// L: most slots mapped at once.
    pub live_max: u64,
    /// D: most mappings alive at once.
    pub mappings_max: u64,
    /// K: most slots of one mapping.
    pub pieces_max: u64,
    /// B: slots of the longest burst of unmaps.
    pub burst_max: u64,
    /// Most slots withheld at once in open bursts.
    pub withheld_max: u64,
    /// L and what bursts withhold: N from here on never stalls a ring that takes any free slot.
    pub rule: u64,
    /// D x K and what bursts withhold.
    pub descriptor_rule: u64,
    /// Fewest slots with which this trace stalls no map in a ring that takes any free slot.
    pub any_order_need: u64,
    /// The same for a ring that takes the slot at its tail.
    pub in_order_need: u64,
    /// Unmaps of another mapping than the oldest.
    pub out_of_order: u64,
    /// Older mappings alive at an unmap: at most.
    pub overtaken_max: u64,
    /// On average; none without unmaps.
    pub overtaken_mean: Option<f64>,
    /// Share of unmaps of the slot after the one unmapped before: there a prefetched next entry is
    /// right. None without unmaps.
    pub next_in_turn: Option<f64>,
    /// Mappings alive at the end of the trace.
    pub live_at_end: u64,
    /// Which ring fits.
    pub fit: Fit,
    /// Why.
    pub why: String,
    /// N to choose: a power of two; 0 where none fits.
    pub entries: u32,
    /// Bytes of its table.
    pub bytes: u64,
    /// The sizes that were tried.
    pub sweep: Vec<SizePoint>,
}

impl RingAdvice {
    /// What the counts alone say.
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
            live_max: ring.live_max,
            mappings_max: ring.mappings_max,
            pieces_max: ring.pieces_max,
            burst_max: ring.burst_max,
            withheld_max: ring.withheld_max,
            rule: ring.rule(),
            descriptor_rule: ring.descriptor_rule(),
            any_order_need: ring.any_order_need,
            in_order_need: ring.in_order_need,
            out_of_order: ring.out_of_order,
            overtaken_max: ring.overtaken_max,
            overtaken_mean: ratio(ring.overtaken_sum, ring.unmaps),
            next_in_turn: ratio(ring.next_in_turn, ring.unmaps),
            live_at_end: ring.live_at_end,
            fit,
            why: why(fit, ring, in_order),
            entries,
            bytes: u64::from(entries) * SLOT_BYTES,
            sweep: Vec::new(),
        }
    }

    /// A point of the sweep, with nothing measured yet.
    pub(super) fn point(entries: u32) -> SizePoint {
        SizePoint {
            entries,
            bytes: u64::from(entries) * SLOT_BYTES,
            ..SizePoint::default()
        }
    }
}

/// The power of two that holds `need` slots, if a replay has such rings.
pub(super) fn power(need: u64) -> Option<u32> {
    let power = need.max(1).checked_next_power_of_two()?;
    u32::try_from(power)
        .ok()
        .filter(|power| *power <= RingSizes::MAX_SLOTS)
}

fn why(fit: Fit, ring: &RingDemand, in_order: Option<u32>) -> String {
    let disorder = || {
        format!(
            "{:.0}% of unmaps are not of the oldest mapping, which up to {} others overtake",
            100.0 * ring.out_of_order_share(),
            ring.overtaken_max
        )
    };
    match fit {
        Fit::InOrder if ring.out_of_order == 0 => {
            "unmaps come in the order of the maps: the tail always finds its slot free".into()
        }
        Fit::InOrder => format!(
            "{}; in this trace the tail's slot is free in time all the same, but only a ring that takes any free slot promises that",
            disorder()
        ),
        Fit::AnyOrder => match in_order {
            Some(slots) => format!(
                "{}; a ring that takes only its tail's slot would need N = {slots}",
                disorder()
            ),
            None => format!(
                "{}; a ring that takes only its tail's slot would have to hold the {} slots from the oldest mapping on, more than \
                 a ring can have",
                disorder(),
                ring.in_order_need
            ),
        },
        Fit::Static => "nothing is unmapped: these buffers belong in a ring's static table".into(),
        Fit::None => format!(
            "{} slots at once are more than the {} a ring is given",
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
    /// Sets.
    pub sets: u32,
    /// Ways.
    pub ways: u32,
    /// Sets times ways.
    pub entries: u32,
    /// Hits as a share of lookups; none without lookups.
    pub hit_rate: Option<f64>,
    /// Entries that had to go to make room for others.
    pub evictions: u64,
}

/// Advice on the IOTLB in one mode.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IotlbAdvice {
    /// The mode.
    pub mode: String,
    /// Pages looked up.
    pub lookups: u64,
    /// The best hit rate of all geometries; none without lookups.
    pub attainable: Option<f64>,
    /// Fewest entries with which 90% of that is reached, whatever the ways; none where nothing ever
    /// hits.
    pub entries_90: Option<u32>,
    /// The same for 99%.
    pub entries_99: Option<u32>,
    /// What was tried.
    pub points: Vec<IotlbPoint>,
}

impl IotlbAdvice {
    pub(super) fn new(mode: &str, lookups: u64, points: Vec<IotlbPoint>) -> Self {
        let attainable = points.iter().filter_map(|point| point.hit_rate);
        let attainable = attainable.max_by(f64::total_cmp);
        let reaching = |share: f64| {
            let enough = share * attainable.filter(|best| *best > 0.0)?;
            let good = points
                .iter()
                .filter(|point| point.hit_rate.is_some_and(|rate| rate >= enough));
            good.map(|point| point.entries).min()
        };
        Self {
            mode: mode.to_owned(),
            lookups,
            attainable,
            entries_90: reaching(0.9),
            entries_99: reaching(0.99),
            points,
        }
    }

    /// The best hit rate, to rank modes by: without lookups the last.
    fn best(&self) -> f64 {
        self.attainable.unwrap_or(0.0)
    }
}

/// Advice for one trace.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TraceSizing {
    /// Its name.
    pub trace: String,
    /// What keeps the counts from being taken at their word; `ok` otherwise.
    pub status: String,
    /// By ring.
    pub rings: Vec<RingAdvice>,
    /// By mode.
    pub iotlb: Vec<IotlbAdvice>,
    /// Two sentences.
    pub recommendation: String,
}

impl TraceSizing {
    /// Slots and bytes of all rings that are advised.
    pub fn total(&self) -> (u64, u64) {
        let entries: u64 = self.rings.iter().map(|ring| u64::from(ring.entries)).sum();
        (entries, entries * SLOT_BYTES)
    }

    pub(super) fn recommend(rings: &[RingAdvice], iotlb: &[IotlbAdvice]) -> String {
        let of = |fit: Fit| rings.iter().filter(move |ring| ring.fit == fit);
        let Some(busiest) = rings.iter().max_by_key(|ring| ring.maps) else {
            return "The trace maps nothing: there is nothing to size. Record one under load with ringfence trace record.".into();
        };
        let bytes: u64 = rings.iter().map(|ring| ring.bytes).sum();
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
                "; {any} of them {} a ring that takes any free slot (riommu-ooo), for their drivers unmap out of order",
                if any == 1 { "needs" } else { "need" }
            ));
        }
        if none > 0 {
            first.push_str(&format!(
                "; {none} cannot have a ring, keep the page-granular IOMMU there (fence-burst)"
            ));
        }
        first.push('.');
        let hits = iotlb.iter().max_by(|a, b| a.best().total_cmp(&b.best()));
        let second = match hits {
            Some(best) => match best.entries_90 {
                Some(entries) if best.best() >= 0.01 => format!(
                    "With pages instead of rings, an IOTLB of {entries} entries keeps nine of ten translations that any of those tried keeps \
                     from map to unmap ({}); more buys little.",
                    best.mode
                ),
                _ => "With pages instead of rings, no IOTLB of those tried keeps a translation from map to unmap.".into(),
            },
            None => "The IOTLB was not looked at.".into(),
        };
        format!("{first} {second}")
    }
}
