//! The predictors on synthetic rings, and on buffers of several pages.

use ringfence_experiments::prefetch::{
    Addresses, DeviceStream, Predictor, Synthetic, histories, measure, recorded,
};

use super::lines::{NIC, line, map, unmap};
use super::of;

fn ring(entries: u32, burst: u32, addresses: Addresses) -> DeviceStream {
    let device = Synthetic {
        rings: vec![entries],
        burst,
        laps: 5,
        addresses,
        seed: 1,
    };
    device.stream().unwrap()
}

/// The main result of X07: Recency and Markov predict only with a history of the ring's size or
/// larger, and the rIOTLB's two entries always predict.
#[test]
fn recency_and_markov_need_a_history_of_the_ring() {
    for addresses in [Addresses::Tidy, Addresses::Scattered, Addresses::Tree] {
        for entries in [16, 64, 300] {
            let stream = ring(entries, 1, addresses);
            let rows = measure(&stream, &histories(&stream));
            // The predictors learn from the first of five laps and the first page of the second.
            let taught = u64::from(entries) * 4 - 1;
            for predictor in [Predictor::MarkovModified, Predictor::RecencyModified] {
                for row in of(&rows, predictor) {
                    let expected = if row.history < row.ring_pages {
                        0
                    } else {
                        taught
                    };
                    assert_eq!(row.predicted, expected, "{row:?}");
                }
            }
            for predictor in [Predictor::Markov, Predictor::Recency, Predictor::Distance] {
                for row in of(&rows, predictor) {
                    assert_eq!((row.predicted, row.verification_walks), (0, 0), "{row:?}");
                }
            }
            let pair = of(&rows, Predictor::RiotlbUninvalidated).next().unwrap();
            assert_eq!((pair.history, pair.mispredicted), (2, 0));
            assert_eq!(pair.predicted, pair.misses - 1);
        }
    }
}

/// The invalidation that a ring needs for safety costs one walk per burst, for any addresses.
#[test]
fn an_invalidation_costs_two_entries_one_walk() {
    for addresses in Addresses::ALL {
        for burst in [1, 8, 64] {
            let rows = measure(&ring(64, burst, addresses), &[]);
            let [pair] = of(&rows, Predictor::Riotlb).collect::<Vec<_>>()[..] else {
                panic!("one row");
            };
            assert_eq!(pair.misses, 5 * 64);
            assert_eq!(pair.predicted, pair.misses - pair.misses / u64::from(burst));
            assert_eq!(pair.mispredicted, 0);
        }
    }
}

/// Departures from the rIOMMU paper: Distance works if neighbours of a ring have adjacent
/// addresses. No history helps Markov and Recency if no address recurs before a flush.
#[test]
fn predictability_depends_on_addresses() {
    let rate = |addresses, predictor, history: u32| {
        let rows = measure(&ring(128, 1, addresses), &[history]);
        of(&rows, predictor).next().unwrap().hit_rate
    };
    assert!(rate(Addresses::Tidy, Predictor::DistanceModified, 2) > 0.98);
    assert!(rate(Addresses::Fresh, Predictor::DistanceModified, 2) > 0.98);
    assert!(rate(Addresses::Scattered, Predictor::DistanceModified, 32) < 0.2);
    for predictor in [Predictor::MarkovModified, Predictor::RecencyModified] {
        assert_eq!(rate(Addresses::Fresh, predictor, 4096), 0.0);
        // Deferred frees lengthen the lap by the addresses that wait for the flush.
        assert_eq!(rate(Addresses::TreeDeferred, predictor, 128), 0.0);
        assert!(rate(Addresses::TreeDeferred, predictor, 128 + 2 * 250) > 0.2);
    }
}

/// Distance predicts the pages inside a buffer but not the next buffer.
#[test]
fn first_pages_are_counted_separately() {
    let buffers = [0xf0_0000_u64, 0x10_0000, 0x77_0000, 0x30_0000];
    let text: String = (0..8)
        .map(|n| {
            let iova = buffers[n % 4];
            let (begin, end) = (
                map(NIC, "TO_DEVICE", iova, 0x8000),
                unmap(NIC, "TO_DEVICE", iova, 0x8000),
            );
            line(0, 2 * n as u64, &begin) + &line(0, 2 * n as u64 + 1, &end)
        })
        .collect();
    let streams = recorded::streams("t", text.as_bytes()).unwrap();
    let rows = measure(&streams[0], &[16]);
    let row = of(&rows, Predictor::DistanceModified).next().unwrap();
    assert_eq!((row.misses, row.first_misses), (64, 8));
    assert_eq!(row.first_predicted, 0);
    assert!(row.predicted > 40, "{row:?}");
}
