//! X07: TLB prefetchers against the rIOTLB's two entries (rIOMMU section 5.4).
//!
//! The document states, without numbers: the prefetchers as published are ineffective on DMA,
//! because addresses are invalidated right after use; Recency and Markov, if they keep invalidated
//! addresses and walk the table before they propose, predict most accesses, but only with a history
//! larger than the ring; Distance stays ineffective; two entries for a ring are always right.
//!
//! [`measure`] feeds one [`DeviceStream`] to every prefetcher at several sizes of history, and to a
//! pair of entries for each ring. Streams come from [`Synthetic`] rings and from [`recorded`]
//! traces.
//!
//! What comes out agrees with the document on rings whose addresses recur: Markov and Recency
//! predict nothing with a history smaller than the ring and everything after the first lap with a
//! larger one, and two entries predict everything at once. It departs in three points, and each is
//! a row here rather than a remark. Distance is effective wherever neighbours of a ring, or pages
//! of a buffer, lie side by side, even as published if a burst is used before it is unmapped; rows
//! count the first pages of buffers apart, because a ring's entry spans its buffer. Addresses that
//! do not come again, or late because frees are deferred, leave Markov and Recency nothing, or ask
//! for a longer history. And the two entries are right but not free: the invalidation that ends a
//! burst takes them, so each burst begins with a walk, and a ring with a single buffer in flight
//! has no next entry to fetch.

pub mod recorded;
mod shape;
mod stream;
mod synthetic;

use std::collections::{HashMap, HashSet};
use std::io::Read;

use ringfence_hw::prefetch::{
    Distance, LookupOutcome, Markov, PrefetchConfig, PrefetchStats, Prefetcher, PrefetchingIotlb,
    Recency, RingPair, Variant,
};
use ringfence_types::Pfn;
use serde::Serialize;

pub use shape::{Kind, Shape};
pub use stream::{BufferEvent, DeviceStream};
pub use synthetic::{Addresses, Synthetic};

use crate::error::LabError;

/// Sizes of history that are tried, in quarters of the most pages that the device has mapped at
/// once.
pub const QUARTERS: [u64; 7] = [1, 2, 3, 4, 5, 8, 32];

/// Buffers that a recorded device has to use to be counted: of fewer, no share says anything.
pub const USES: u64 = 1000;

/// Entries of the IOTLB beside a prefetcher. Pages used once are in it for a moment only, so it
/// hardly matters.
pub const IOTLB_ENTRIES: u32 = 64;

/// Entries of the buffer for what was prefetched.
pub const BUFFER_ENTRIES: u32 = 16;

/// What predicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Predictor {
    /// [`Markov`] as published.
    Markov,
    /// [`Recency`] as published.
    Recency,
    /// [`Distance`] as published.
    Distance,
    /// [`Markov`], modified.
    MarkovModified,
    /// [`Recency`], modified.
    RecencyModified,
    /// [`Distance`], modified.
    DistanceModified,
    /// [`RingPair`]s, each invalidated at the end of a burst of its ring: what rIOMMU does.
    Riotlb,
    /// [`RingPair`]s that nothing invalidates: their predictions alone, as the prefetchers are
    /// judged, and no safe IOMMU.
    RiotlbUninvalidated,
}

impl Predictor {
    /// Those with a history.
    pub const PREFETCHERS: [Self; 6] = [
        Self::Markov,
        Self::Recency,
        Self::Distance,
        Self::MarkovModified,
        Self::RecencyModified,
        Self::DistanceModified,
    ];
}

/// One predictor on one stream.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PrefetchRow {
    /// The stream.
    pub source: String,
    /// Rings of the device.
    pub rings: u64,
    /// Buffers that they hold at once, at most.
    pub ring_entries: u64,
    /// Pages that these buffers have, at most.
    pub ring_pages: u64,
    /// What the device is like.
    pub shape: Shape,
    /// What predicts.
    pub predictor: Predictor,
    /// Entries it remembers: of the history, or two for each ring.
    pub history: u64,
    /// Accesses that were not cached: of pages, and of buffers for the two of the rIOTLB.
    pub misses: u64,
    /// Of these, predicted.
    pub predicted: u64,
    /// Predictions followed in vain.
    pub mispredicted: u64,
    /// Predictions that an invalidation took before they were used.
    pub discarded: u64,
    /// Walks that verified a prediction before it was followed.
    pub verification_walks: u64,
    /// Predictions that this dropped.
    pub rejected: u64,
    /// `predicted / misses`; 0 without misses.
    pub hit_rate: f64,
    /// Of the misses, those of a buffer's first page. The others follow it at a distance of one.
    pub first_misses: u64,
    /// Of these, predicted: what a prefetcher knows of the order of buffers, as two entries a ring
    /// do.
    pub first_predicted: u64,
    /// `first_predicted / first_misses`; 0 without any.
    pub first_hit_rate: f64,
}

/// The pages mapped, each with the number of mappings that have it.
#[derive(Debug, Default)]
struct Mapped(HashMap<Pfn, u32>);

impl Mapped {
    fn add(&mut self, page: Pfn) {
        *self.0.entry(page).or_default() += 1;
    }

    /// Whether that was the last mapping of the page.
    fn remove(&mut self, page: Pfn) -> bool {
        let Some(count) = self.0.get_mut(&page) else {
            return false;
        };
        *count -= 1;
        let last = *count == 0;
        if last {
            self.0.remove(&page);
        }
        last
    }
}

/// What happened to the first pages of buffers.
#[derive(Debug, Clone, Copy, Default)]
struct First {
    misses: u64,
    predicted: u64,
}

impl First {
    fn count(&mut self, served: LookupOutcome) {
        self.misses += u64::from(matches!(
            served,
            LookupOutcome::Predicted | LookupOutcome::Walked
        ));
        self.predicted += u64::from(served == LookupOutcome::Predicted);
    }
}

/// A prefetcher whose type is forgotten.
trait DynPrefetcher {
    fn access(&mut self, page: Pfn, mapped: &Mapped) -> LookupOutcome;
    fn unmap(&mut self, page: Pfn);
    fn stats(&self) -> PrefetchStats;
}

impl<P: Prefetcher> DynPrefetcher for PrefetchingIotlb<P> {
    fn access(&mut self, page: Pfn, mapped: &Mapped) -> LookupOutcome {
        Self::access(self, page, |page| mapped.0.contains_key(&page))
    }

    fn unmap(&mut self, page: Pfn) {
        Self::unmap(self, page);
    }

    fn stats(&self) -> PrefetchStats {
        *Self::stats(self)
    }
}

fn fed<P: Prefetcher + 'static>(variant: Variant, history: u32) -> Box<dyn DynPrefetcher> {
    let config = PrefetchConfig::new(variant, history);
    Box::new(PrefetchingIotlb::<P>::new(
        config,
        IOTLB_ENTRIES,
        BUFFER_ENTRIES,
    ))
}

fn prefetcher(predictor: Predictor, history: u32) -> Option<Box<dyn DynPrefetcher>> {
    use Variant::{Baseline, Modified};
    Some(match predictor {
        Predictor::Markov => fed::<Markov>(Baseline, history),
        Predictor::Recency => fed::<Recency>(Baseline, history),
        Predictor::Distance => fed::<Distance>(Baseline, history),
        Predictor::MarkovModified => fed::<Markov>(Modified, history),
        Predictor::RecencyModified => fed::<Recency>(Modified, history),
        Predictor::DistanceModified => fed::<Distance>(Modified, history),
        Predictor::Riotlb | Predictor::RiotlbUninvalidated => return None,
    })
}

/// Feeds `stream` to every prefetcher at each of `histories`, and to the pairs of its rings: a row
/// for each.
pub fn measure(stream: &DeviceStream, histories: &[u32]) -> Vec<PrefetchRow> {
    let mut prefetchers = Vec::new();
    for predictor in Predictor::PREFETCHERS {
        for &history in histories {
            let fed = prefetcher(predictor, history);
            prefetchers.extend(fed.map(|fed| (predictor, history, First::default(), fed)));
        }
    }
    let mut mapped = Mapped::default();
    let mut pairs = vec![[RingPair::new(), RingPair::new()]; stream.rings()];
    let mut valid: HashSet<(u16, u64)> = HashSet::new();
    let pages = |buffer| {
        let ranges = stream.pages(buffer).iter();
        ranges.flat_map(|range| (range.lo().get()..=range.hi().get()).map(Pfn::new))
    };
    for &event in stream.events() {
        match event {
            BufferEvent::Map(buffer) => {
                pages(buffer).for_each(|page| mapped.add(page));
                valid.insert(stream.ring_position(buffer));
            }
            BufferEvent::Use(buffer) => {
                for (at, page) in pages(buffer).enumerate() {
                    for (_, _, first, fed) in &mut prefetchers {
                        let served = fed.access(page, &mapped);
                        if at == 0 {
                            first.count(served);
                        }
                    }
                }
                let (ring, entry) = stream.ring_position(buffer);
                for pair in pairs.iter_mut().skip(usize::from(ring)).take(1).flatten() {
                    pair.access(entry, |other| valid.contains(&(ring, other)));
                }
            }
            BufferEvent::Unmap(buffer) => {
                for page in pages(buffer) {
                    if mapped.remove(page) {
                        for (.., fed) in &mut prefetchers {
                            fed.unmap(page);
                        }
                    }
                }
                valid.remove(&stream.ring_position(buffer));
            }
            BufferEvent::EndBurst(ring) => {
                if let Some([pair, _]) = pairs.get_mut(usize::from(ring)) {
                    pair.invalidate();
                }
            }
        }
    }
    let shape = Shape::of(stream);
    let mut rows: Vec<PrefetchRow> = prefetchers
        .iter()
        .map(|(predictor, history, first, fed)| {
            let history = u64::from(*history);
            row(stream, shape, (*predictor, history), &fed.stats(), *first)
        })
        .collect();
    let entries = 2 * stream.rings() as u64;
    let [invalidated, kept] = [0, 1].map(|which| sum(pairs.iter().map(|pair| pair[which].stats())));
    for (predictor, stats) in [
        (Predictor::Riotlb, invalidated),
        (Predictor::RiotlbUninvalidated, kept),
    ] {
        let first = First {
            misses: stats.misses,
            predicted: stats.predicted,
        };
        rows.push(row(stream, shape, (predictor, entries), &stats, first));
    }
    rows
}

fn sum<'a>(all: impl Iterator<Item = &'a PrefetchStats>) -> PrefetchStats {
    all.fold(PrefetchStats::default(), |sum, stats| PrefetchStats {
        hits: sum.hits + stats.hits,
        misses: sum.misses + stats.misses,
        predicted: sum.predicted + stats.predicted,
        mispredicted: sum.mispredicted + stats.mispredicted,
        discarded: sum.discarded + stats.discarded,
        verification_walks: sum.verification_walks + stats.verification_walks,
        rejected: sum.rejected + stats.rejected,
        faults: sum.faults + stats.faults,
    })
}

fn row(
    stream: &DeviceStream,
    shape: Shape,
    (predictor, history): (Predictor, u64),
    stats: &PrefetchStats,
    first: First,
) -> PrefetchRow {
    PrefetchRow {
        source: stream.name.clone(),
        rings: stream.rings() as u64,
        ring_entries: stream.ring_entries(),
        ring_pages: stream.live_pages(),
        shape,
        predictor,
        history,
        misses: stats.misses,
        predicted: stats.predicted,
        mispredicted: stats.mispredicted,
        discarded: stats.discarded,
        verification_walks: stats.verification_walks,
        rejected: stats.rejected,
        hit_rate: stats.hit_rate(),
        first_misses: first.misses,
        first_predicted: first.predicted,
        first_hit_rate: match first.misses {
            0 => 0.0,
            misses => first.predicted as f64 / misses as f64,
        },
    }
}

/// Histories around the size of the stream's rings: [`QUARTERS`] of its pages, without doubles.
pub fn histories(stream: &DeviceStream) -> Vec<u32> {
    let quarters = QUARTERS.map(|quarters| stream.live_pages().saturating_mul(quarters) / 4);
    let mut sizes: Vec<u32> = quarters
        .into_iter()
        .map(|size| u32::try_from(size).unwrap_or(u32::MAX))
        .collect();
    sizes.dedup();
    sizes
}

/// The synthetic devices of X07, as rings and longest burst: single rings of three sizes whose
/// buffers are unmapped one by one, the largest again with the document's bursts of 200, and a
/// receive with a transmit ring.
pub const DEVICES: [(&[u32], u32); 5] = [
    (&[64], 1),
    (&[256], 1),
    (&[1024], 1),
    (&[1024], 200),
    (&[512, 256], 16),
];

/// The synthetic half of X07: [`DEVICES`] with each kind of addresses.
///
/// # Errors
/// As [`Synthetic::stream`].
pub fn synthetic() -> Result<Vec<PrefetchRow>, LabError> {
    let mut rows = Vec::new();
    for addresses in Addresses::ALL {
        for (rings, burst) in DEVICES {
            let stream = Synthetic {
                rings: rings.to_vec(),
                burst,
                laps: 10,
                addresses,
                seed: 7,
            }
            .stream()?;
            rows.extend(measure(&stream, &histories(&stream)));
        }
    }
    Ok(rows)
}

/// The recorded half of X07: the devices of one trace.
///
/// # Errors
/// As [`recorded::streams`].
pub fn of_trace<R: Read>(name: &str, reader: R) -> Result<Vec<PrefetchRow>, LabError> {
    let streams = recorded::streams(name, reader)?;
    Ok(streams
        .iter()
        .flat_map(|stream| measure(stream, &histories(stream)))
        .collect())
}

/// The rows of one stream at a glance: shares of buffers whose first page was predicted, with the
/// best history of the range.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PrefetchSummary {
    /// The stream.
    pub source: String,
    /// Pages that the device has mapped at once, at most.
    pub ring_pages: u64,
    /// What the device is like.
    pub shape: Shape,
    /// Buffers used whose first page was not cached.
    pub first_misses: u64,
    /// The best of the three as published, at any history.
    pub best_baseline: f64,
    /// Markov modified, with a history smaller than the ring.
    pub markov_below: f64,
    /// Markov modified, with a history as large as the ring or larger.
    pub markov_above: f64,
    /// Recency modified, with a history smaller than the ring.
    pub recency_below: f64,
    /// Recency modified, with a history as large as the ring or larger.
    pub recency_above: f64,
    /// Distance modified, with a history smaller than the ring.
    pub distance_below: f64,
    /// Distance modified, with a history as large as the ring or larger.
    pub distance_above: f64,
    /// Two entries a ring, invalidated at the end of each burst.
    pub riotlb: f64,
    /// Two entries a ring, never invalidated.
    pub riotlb_uninvalidated: f64,
    /// Of the predictions of the latter, those followed in vain.
    pub riotlb_mispredicted: u64,
}

/// Sums up the rows of [`measure`]: a line for each stream, in their order.
pub fn summarise(rows: &[PrefetchRow]) -> Vec<PrefetchSummary> {
    let same = |a: &PrefetchRow, b: &PrefetchRow| a.source == b.source;
    rows.chunk_by(same)
        .filter_map(|rows| {
            let first = rows.first()?;
            let best = |wanted: &dyn Fn(&PrefetchRow) -> bool| {
                let rates = rows.iter().filter(|row| wanted(row));
                rates.map(|row| row.first_hit_rate).fold(0.0, f64::max)
            };
            let of = |predictor| best(&|row| row.predictor == predictor);
            let below =
                |predictor| best(&|row| row.predictor == predictor && row.history < row.ring_pages);
            let above = |predictor| {
                best(&|row| row.predictor == predictor && row.history >= row.ring_pages)
            };
            let kept = Predictor::RiotlbUninvalidated;
            let in_vain = rows.iter().filter(|row| row.predictor == kept);
            Some(PrefetchSummary {
                source: first.source.clone(),
                ring_pages: first.ring_pages,
                shape: first.shape,
                first_misses: first.first_misses,
                best_baseline: of(Predictor::Markov)
                    .max(of(Predictor::Recency))
                    .max(of(Predictor::Distance)),
                markov_below: below(Predictor::MarkovModified),
                markov_above: above(Predictor::MarkovModified),
                recency_below: below(Predictor::RecencyModified),
                recency_above: above(Predictor::RecencyModified),
                distance_below: below(Predictor::DistanceModified),
                distance_above: above(Predictor::DistanceModified),
                riotlb: of(Predictor::Riotlb),
                riotlb_uninvalidated: of(kept),
                riotlb_mispredicted: in_vain.map(|row| row.mispredicted).sum(),
            })
        })
        .collect()
}
