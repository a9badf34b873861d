//! X07: TLB prefetchers compared with the rIOTLB's two entries per ring (rIOMMU section 5.4).
//!
//! The rIOMMU paper makes four claims, without numbers:
//!
//! - The prefetchers as published are ineffective on DMA, because the driver invalidates addresses
//!   right after use.
//! - Modified Recency and Markov keep invalidated addresses and walk the table before they propose
//!   a page. They predict most accesses, but only with a history larger than the ring.
//! - Distance stays ineffective.
//! - Two entries per ring are always right.
//!
//! [`measure`] feeds one [`DeviceStream`] to every prefetcher at several history sizes, and to a
//! pair of entries per ring. Streams come from [`Synthetic`] rings and from [`recorded`] traces.
//! Traces of an emulated IOMMU have the DMAs; for others the accesses are assumed
//! ([`AccessSource`]).
//!
//! The results agree with the paper on rings whose addresses recur. Markov and Recency predict
//! nothing with a history smaller than the ring, and everything after the first lap with a larger
//! one. Two entries predict everything from the start. The results depart from the paper in three
//! points, each of which has rows:
//!
//! - Distance is effective if neighbours of a ring, or pages of a buffer, have adjacent addresses.
//!   This holds even as published if the device uses a burst before the driver unmaps it. Rows
//!   count the first pages of buffers separately, because a ring entry spans its whole buffer.
//! - Markov and Recency cannot predict addresses that never recur. Addresses that recur late,
//!   because frees are deferred, require a longer history.
//! - The two entries are right but not free. The invalidation at the end of a burst removes them,
//!   so each burst begins with a walk. A ring with a single buffer in flight has no next entry to
//!   fetch.

mod bursts;
mod mapped_ranges;
#[cfg(test)]
mod predictors;
pub mod recorded;
mod shape;
mod stream;
mod synthetic;

use std::collections::{HashMap, HashSet};
use std::io::Read;

use ringfence_papers::prefetch::{
    Distance, LookupOutcome, Markov, PrefetchConfig, PrefetchStats, Prefetcher, PrefetchingIotlb,
    Recency, RingPair, Variant,
};
use ringfence_trace::TraceSource;
use ringfence_types::Pfn;
use serde::Serialize;

pub use shape::{Kind, Shape};
pub use stream::{AccessSource, BufferEvent, DeviceStream};
pub use synthetic::{Addresses, Synthetic};

use ringfence_lab::LabError;

/// History sizes to try, in quarters of the maximum number of pages that the device has mapped at
/// once.
pub const QUARTERS: [u64; 7] = [1, 2, 3, 4, 5, 8, 32];

/// Minimum number of buffer uses of a recorded device. With fewer, shares are not meaningful.
pub const USES: u64 = 1000;

/// Entries of the IOTLB that a prefetcher fills. The size hardly matters, because pages used once
/// stay only briefly.
pub const IOTLB_ENTRIES: u32 = 64;

/// Entries of the prefetch buffer.
pub const BUFFER_ENTRIES: u32 = 16;

/// A prefetcher, or the rIOTLB, whose predictions a row measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Predictor {
    /// [`Markov`] as published.
    Markov,
    /// [`Recency`] as published.
    Recency,
    /// [`Distance`] as published.
    Distance,
    /// [`Markov`] as modified in the rIOMMU paper ([`Variant::Modified`]).
    MarkovModified,
    /// [`Recency`] as modified in the rIOMMU paper ([`Variant::Modified`]).
    RecencyModified,
    /// [`Distance`] as modified in the rIOMMU paper ([`Variant::Modified`]).
    DistanceModified,
    /// [`RingPair`]s, each invalidated at the end of a burst of its ring, as in rIOMMU.
    Riotlb,
    /// [`RingPair`]s that are never invalidated. They show the predictions alone, as for the
    /// prefetchers, but are no safe IOMMU.
    RiotlbUninvalidated,
}

impl Predictor {
    /// The predictors with a history.
    pub const PREFETCHERS: [Self; 6] = [
        Self::Markov,
        Self::Recency,
        Self::Distance,
        Self::MarkovModified,
        Self::RecencyModified,
        Self::DistanceModified,
    ];
}

/// Results of one predictor on one stream.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PrefetchRow {
    /// Name of the stream.
    pub source: String,
    /// Origin of the accesses.
    pub accesses: AccessSource,
    /// Number of rings of the device.
    pub rings: u64,
    /// Maximum number of buffers in the rings at once.
    pub ring_entries: u64,
    /// Maximum number of pages that the device has mapped at once.
    pub ring_pages: u64,
    /// Recorded DMAs outside all mappings.
    pub unmapped_accesses: u64,
    /// Access pattern of the device.
    pub shape: Shape,
    /// Predictor of this row.
    pub predictor: Predictor,
    /// Entries of the history, or two per ring.
    pub history: u64,
    /// Accesses that missed: pages, or buffers for the rIOTLB's predictors.
    pub misses: u64,
    /// Misses that were predicted.
    pub predicted: u64,
    /// Prefetches that were not used, or whose page was not mapped.
    pub mispredicted: u64,
    /// Predictions that an invalidation removed before use.
    pub discarded: u64,
    /// Walks that verified a prediction before the prefetch.
    pub verification_walks: u64,
    /// Predictions dropped because such a walk found the page unmapped.
    pub rejected: u64,
    /// `predicted / misses`; 0 without misses.
    pub hit_rate: f64,
    /// Misses on the first page of a buffer. The other pages follow it at a distance of one.
    pub first_misses: u64,
    /// First-page misses that were predicted. They show the prefetcher's knowledge of the order of
    /// buffers, comparable to two entries per ring.
    pub first_predicted: u64,
    /// `first_predicted / first_misses`; 0 without first-page misses.
    pub first_hit_rate: f64,
}

/// Mapped pages, each with its number of mappings.
#[derive(Debug, Default)]
struct Mapped(HashMap<Pfn, u32>);

impl Mapped {
    fn add(&mut self, page: Pfn) {
        *self.0.entry(page).or_default() += 1;
    }

    /// Removes one mapping of `page`. Returns true if it was the last.
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

/// Counts on the first pages of buffers.
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

/// Object-safe interface to a [`PrefetchingIotlb`] with any prefetcher.
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

/// Feeds `stream` to every prefetcher at each of `histories`, and to the pairs of its rings.
/// Returns one row for each.
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
            BufferEvent::Use(buffer) | BufferEvent::Access { buffer, .. } => {
                let (from, count) = match event {
                    BufferEvent::Access { first, count, .. } => (first as usize, count as usize),
                    _ => (0, usize::MAX),
                };
                for (at, page) in pages(buffer).enumerate().skip(from).take(count) {
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
        accesses: stream.accesses,
        rings: stream.rings() as u64,
        ring_entries: stream.ring_entries(),
        ring_pages: stream.live_pages(),
        unmapped_accesses: stream.unmapped_accesses,
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

/// History sizes around the size of the stream's rings: [`QUARTERS`] of its pages, without
/// duplicates.
pub fn histories(stream: &DeviceStream) -> Vec<u32> {
    let quarters = QUARTERS.map(|quarters| stream.live_pages().saturating_mul(quarters) / 4);
    let mut sizes: Vec<u32> = quarters
        .into_iter()
        .map(|size| u32::try_from(size).unwrap_or(u32::MAX))
        .collect();
    sizes.dedup();
    sizes
}

/// The synthetic devices of X07, as ring sizes and burst limit. Three single rings are unmapped
/// buffer by buffer; the largest also appears with the paper's bursts of 200. The last device has a
/// receive and a transmit ring.
pub const DEVICES: [(&[u32], u32); 5] = [
    (&[64], 1),
    (&[256], 1),
    (&[1024], 1),
    (&[1024], 200),
    (&[512, 256], 16),
];

/// The streams of the synthetic half of X07: [`DEVICES`] with each kind of address, each ten laps.
pub fn synthetic_streams() -> Vec<Synthetic> {
    let of = |addresses| {
        DEVICES.map(|(rings, burst)| Synthetic {
            rings: rings.to_vec(),
            burst,
            laps: 10,
            addresses,
            seed: 7,
        })
    };
    Addresses::ALL.into_iter().flat_map(of).collect()
}

/// The rows of synthetic streams, each with histories around the size of its own rings.
///
/// # Errors
/// As [`Synthetic::stream`].
pub fn rows_of(streams: &[Synthetic]) -> Result<Vec<PrefetchRow>, LabError> {
    let mut rows = Vec::new();
    for synthetic in streams {
        let stream = synthetic.stream()?;
        rows.extend(measure(&stream, &histories(&stream)));
    }
    Ok(rows)
}

/// The bundled trace with DMAs (`docs/TRACES.md`): a network device and a disk of a Debian guest
/// with kernel 6.12, behind the virtio-iommu of this project in strict mode.
pub const GUEST_DMAS: &[u8] = include_bytes!("../../data/guest-dmas-6.12.trace.zst");

/// Computes the rows of the devices of [`GUEST_DMAS`].
///
/// # Errors
/// As [`recorded::streams`].
pub fn bundled() -> Result<Vec<PrefetchRow>, LabError> {
    let name = "guest-dmas-6.12";
    of_trace(
        name,
        TraceSource::from_reader(name, GUEST_DMAS).map_err(LabError::Trace)?,
    )
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

/// Summary of one stream's rows. Rates are shares of buffers whose first page was predicted, with
/// the best history of the range.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PrefetchSummary {
    /// Name of the stream.
    pub source: String,
    /// Origin of the accesses.
    pub accesses: AccessSource,
    /// Recorded DMAs outside all mappings.
    pub unmapped_accesses: u64,
    /// Maximum number of pages that the device has mapped at once.
    pub ring_pages: u64,
    /// Access pattern of the device.
    pub shape: Shape,
    /// Buffer uses whose first page missed.
    pub first_misses: u64,
    /// Best rate of the three prefetchers as published, at any history.
    pub best_baseline: f64,
    /// Modified Markov, with a history smaller than the ring.
    pub markov_below: f64,
    /// Modified Markov, with a history of the ring's size or larger.
    pub markov_above: f64,
    /// Modified Recency, with a history smaller than the ring.
    pub recency_below: f64,
    /// Modified Recency, with a history of the ring's size or larger.
    pub recency_above: f64,
    /// Modified Distance, with a history smaller than the ring.
    pub distance_below: f64,
    /// Modified Distance, with a history of the ring's size or larger.
    pub distance_above: f64,
    /// Two entries per ring, invalidated at the end of each burst.
    pub riotlb: f64,
    /// Two entries per ring, never invalidated.
    pub riotlb_uninvalidated: f64,
    /// Prefetches of the two uninvalidated entries that were not used, or whose page was not
    /// mapped.
    pub riotlb_mispredicted: u64,
}

/// Summarises the rows of [`measure`]: one summary for each stream, in the order of the rows.
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
                accesses: first.accesses,
                unmapped_accesses: first.unmapped_accesses,
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
