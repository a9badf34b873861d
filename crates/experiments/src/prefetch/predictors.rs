//! Each row is measured with the predictor of its name.

use std::collections::{HashMap, HashSet};

use ringfence_papers::prefetch::{
    Distance, LookupOutcome, Markov, PrefetchConfig, PrefetchStats, Prefetcher, PrefetchingIotlb,
    Recency, RingPair, Variant,
};
use ringfence_types::{Pfn, PfnRange};

use super::{BufferEvent, DeviceStream, Predictor, PrefetchRow, measure};

/// Misses, predicted and mispredicted ones, discarded entries, walks, rejected proposals; misses of
/// first pages and predicted ones.
type Counters = [u64; 8];

fn counters(stats: &PrefetchStats, first: [u64; 2]) -> Counters {
    let PrefetchStats {
        misses,
        predicted,
        mispredicted,
        discarded,
        verification_walks,
        rejected,
        ..
    } = *stats;
    let walks = verification_walks;
    let [first, of_first] = first;
    [
        misses,
        predicted,
        mispredicted,
        discarded,
        walks,
        rejected,
        first,
        of_first,
    ]
}

fn of_row(row: &PrefetchRow) -> Counters {
    [
        row.misses,
        row.predicted,
        row.mispredicted,
        row.discarded,
        row.verification_walks,
        row.rejected,
        row.first_misses,
        row.first_predicted,
    ]
}

/// Eighty buffers, more than the IOTLB has entries: sixty in an order without equal distances, and
/// twenty with equal ones. Each third buffer is unmapped after its use from the second lap on, and
/// mapped again. Buffers have one or two pages.
fn by_hand() -> DeviceStream {
    let mut stream = DeviceStream::new("by hand".into());
    let ring = stream.add_ring();
    let pages = |at: u64| {
        let start = match at {
            0..60 => 4 * (at * at % 127),
            _ => 2000 + 12 * at,
        };
        PfnRange::new(Pfn::new(start), 1 + at % 2)
    };
    let mut buffers: Vec<u32> = (0..80).map(|at| stream.map(ring, pages(at))).collect();
    for lap in 0..4 {
        for (at, buffer) in (0..).zip(&mut buffers) {
            stream.use_buffer(*buffer);
            if lap > 0 && at % 3 == 0 {
                stream.unmap(*buffer);
                *buffer = stream.map(ring, pages(at));
            }
        }
        stream.end_burst(ring);
    }
    stream
}

fn pages(stream: &DeviceStream, buffer: u32) -> Vec<Pfn> {
    let ranges = stream.pages(buffer).iter();
    let pages = ranges.flat_map(|range| range.lo().get()..=range.hi().get());
    pages.map(Pfn::new).collect()
}

/// Feeds `stream` to one prefetcher, with an IOTLB of 64 entries and a buffer of 16.
fn fed<P: Prefetcher>(stream: &DeviceStream, variant: Variant, history: u32) -> Counters {
    let config = PrefetchConfig::new(variant, history);
    let mut iotlb = PrefetchingIotlb::<P>::new(config, 64, 16);
    let mut mapped: HashMap<Pfn, u32> = HashMap::new();
    let mut first = [0, 0];
    for &event in stream.events() {
        match event {
            BufferEvent::Map(buffer) => {
                for page in pages(stream, buffer) {
                    *mapped.entry(page).or_default() += 1;
                }
            }
            BufferEvent::Use(buffer) => {
                for (at, page) in pages(stream, buffer).into_iter().enumerate() {
                    let served = iotlb.access(page, |page| mapped.contains_key(&page));
                    let missed = match served {
                        LookupOutcome::Predicted => [1, 1],
                        LookupOutcome::Walked => [1, 0],
                        _ => [0, 0],
                    };
                    if at == 0 {
                        first = [first[0] + missed[0], first[1] + missed[1]];
                    }
                }
            }
            BufferEvent::Unmap(buffer) => {
                for page in pages(stream, buffer) {
                    mapped.remove(&page);
                    iotlb.unmap(page);
                }
            }
            _ => {}
        }
    }
    counters(iotlb.stats(), first)
}

/// Feeds the entries of the only ring to two entries, which the end of a burst may invalidate.
fn pair(stream: &DeviceStream, invalidates: bool) -> Counters {
    let mut pair = RingPair::new();
    let mut valid = HashSet::new();
    for &event in stream.events() {
        match event {
            BufferEvent::Map(buffer) => {
                valid.insert(stream.ring_position(buffer).1);
            }
            BufferEvent::Use(buffer) => {
                let (_, entry) = stream.ring_position(buffer);
                pair.access(entry, |other| valid.contains(&other));
            }
            BufferEvent::Unmap(buffer) => {
                valid.remove(&stream.ring_position(buffer).1);
            }
            BufferEvent::EndBurst(_) if invalidates => pair.invalidate(),
            _ => {}
        }
    }
    let stats = pair.stats();
    counters(stats, [stats.misses, stats.predicted])
}

/// Each predictor counts something else on this stream, so no two can be exchanged.
#[test]
fn each_row_has_the_predictions_of_its_predictor() {
    use Variant::{Baseline, Modified};
    let stream = by_hand();
    let rows = measure(&stream, &[20, 80, 200]);
    let mut wanted = Vec::new();
    for history in [20, 80, 200] {
        let of = [
            (Predictor::Markov, fed::<Markov>(&stream, Baseline, history)),
            (
                Predictor::Recency,
                fed::<Recency>(&stream, Baseline, history),
            ),
            (
                Predictor::Distance,
                fed::<Distance>(&stream, Baseline, history),
            ),
            (
                Predictor::MarkovModified,
                fed::<Markov>(&stream, Modified, history),
            ),
            (
                Predictor::RecencyModified,
                fed::<Recency>(&stream, Modified, history),
            ),
            (
                Predictor::DistanceModified,
                fed::<Distance>(&stream, Modified, history),
            ),
        ];
        wanted.extend(of.map(|(predictor, counters)| (predictor, u64::from(history), counters)));
    }
    let of = |predictor: Predictor| {
        let of = wanted.iter().filter(move |of| of.0 == predictor);
        of.map(|of| of.2).collect::<Vec<Counters>>()
    };
    for (index, predictor) in Predictor::PREFETCHERS.into_iter().enumerate() {
        for other in &Predictor::PREFETCHERS[..index] {
            assert_ne!(of(predictor), of(*other), "{predictor:?} and {other:?}");
        }
    }
    for (predictor, invalidates) in [
        (Predictor::Riotlb, true),
        (Predictor::RiotlbUninvalidated, false),
    ] {
        wanted.push((predictor, 2, pair(&stream, invalidates)));
    }
    assert_eq!(rows.len(), wanted.len());
    for (predictor, history, counters) in wanted {
        let of = |row: &&PrefetchRow| row.predictor == predictor && row.history == history;
        let row = rows.iter().find(of).unwrap();
        assert_eq!(of_row(row), counters, "{predictor:?}, {history}");
        let rate = |of: u64, misses: u64| of as f64 / misses as f64;
        assert_eq!(row.hit_rate, rate(counters[1], counters[0]));
        assert_eq!(row.first_hit_rate, rate(counters[7], counters[6]));
    }
}
