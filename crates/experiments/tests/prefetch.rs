//! X07 and the streams that it uses.

use std::collections::HashMap;

use ringfence_experiments::prefetch::{
    Addresses, BufferEvent, DeviceStream, Predictor, PrefetchRow, Synthetic, histories, measure,
    of_trace, recorded, summarise,
};
use ringfence_trace::{Chunk, MapClass, OpKind, Operations, SAMPLE, TraceOptions, TraceSource};
use ringfence_types::PhysRange;

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

fn of(rows: &[PrefetchRow], predictor: Predictor) -> impl Iterator<Item = &PrefetchRow> {
    rows.iter().filter(move |row| row.predictor == predictor)
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

#[test]
fn streams_have_the_requested_rings() {
    for addresses in Addresses::ALL {
        let device = Synthetic {
            rings: vec![40, 8],
            burst: 4,
            laps: 6,
            addresses,
            seed: 3,
        };
        let stream = device.stream().unwrap();
        assert_eq!(
            (stream.rings(), stream.ring_entries(), stream.live_pages()),
            (2, 48, 48)
        );
        // Each buffer is mapped, used and unmapped, oldest first. No page is mapped twice at once.
        let mut live: HashMap<u64, u32> = HashMap::new();
        let mut used = [0_u64; 2];
        for &event in stream.events() {
            match event {
                BufferEvent::Map(buffer) => {
                    let [page] = *stream.pages(buffer) else {
                        panic!("one page")
                    };
                    assert_eq!(live.insert(page.lo().get(), buffer), None);
                }
                BufferEvent::Use(buffer) => {
                    let (ring, entry) = stream.ring_position(buffer);
                    assert_eq!(entry, used[usize::from(ring)]);
                    used[usize::from(ring)] += 1;
                }
                BufferEvent::Unmap(buffer) => {
                    let page = stream.pages(buffer)[0].lo().get();
                    assert_eq!(live.remove(&page), Some(buffer));
                }
                BufferEvent::Access { .. } => panic!("{event:?}"),
                BufferEvent::EndBurst(_) => {}
            }
        }
        assert_eq!(live.len(), 48);
        let all = used[0] + used[1];
        assert!((48 * 6..48 * 6 + 4).contains(&all), "{all}");
        // Bursts are drawn in proportion to the rings' sizes.
        assert!(used[0] > 3 * used[1], "{used:?}");
        assert_eq!(stream.events(), device.stream().unwrap().events());
    }
    let nothing = Synthetic {
        rings: vec![],
        burst: 0,
        laps: 1,
        addresses: Addresses::Tree,
        seed: 0,
    };
    assert!(nothing.stream().unwrap().events().is_empty());
    let empty = Synthetic {
        rings: vec![0, 0],
        ..nothing
    };
    assert!(empty.stream().unwrap().events().is_empty());
}

/// A trace line.
fn line(cpu: u16, us: u64, what: &str) -> String {
    format!("            task-1       [{cpu:03}] .....     1.{us:06}: {what} attrs=\n")
}

fn map(device: &str, direction: &str, iova: u64, size: u64) -> String {
    format!(
        "dma_map_phys: {device} dir={direction} dma_addr={iova:x} size={size} phys_addr=7{:03x}",
        iova & 0xfff
    )
}

fn unmap(device: &str, direction: &str, iova: u64, size: u64) -> String {
    format!("dma_unmap_phys: {device} dir={direction} dma_addr={iova:x} size={size}")
}

const NIC: &str = "0000:00:03.0";
const DISK: &str = "0000:00:1f.2";

#[test]
fn a_trace_gives_the_addresses_that_it_prints() {
    use BufferEvent::{EndBurst, Map, Unmap, Use};
    let text = [
        line(0, 0, &map(NIC, "FROM_DEVICE", 0xff00_0840, 100)),
        line(0, 1, &map(NIC, "FROM_DEVICE", 0xff00_2ff0, 0x1011)),
        line(0, 2, &map(NIC, "TO_DEVICE", 0xff00_5000, 1)),
        line(
            0,
            3,
            "dma_alloc: 0000:00:03.0 dir=BIDIRECTIONAL dma_addr=ff009000 size=4096 \
            virt_addr=0000000000000001 flags=GFP_KERNEL",
        ),
        line(0, 4, &unmap(NIC, "FROM_DEVICE", 0xff00_0840, 100)),
        line(0, 5, &unmap(NIC, "FROM_DEVICE", 0xff00_2ff0, 0x1011)),
        // This map is on another ring, so the burst stays open. The next map ends it.
        line(0, 6, &map(NIC, "TO_DEVICE", 0xff00_6000, 1)),
        line(0, 7, &map(NIC, "FROM_DEVICE", 0xff00_0840, 100)),
        // An unmap on another CPU, and one after the burst's 50 us.
        line(1, 8, &unmap(NIC, "FROM_DEVICE", 0xff00_0840, 100)),
        line(0, 58, &unmap(NIC, "TO_DEVICE", 0xff00_5000, 1)),
        // The unmap of an unmapped address has no effect. A replaced mapping counts as unused.
        line(0, 59, &unmap(NIC, "TO_DEVICE", 0xff00_5000, 1)),
        line(0, 60, &map(NIC, "TO_DEVICE", 0xff00_6000, 1)),
    ]
    .concat();
    let streams = recorded::streams("t", text.as_bytes()).unwrap();
    let [stream] = &streams[..] else {
        panic!("{streams:?}")
    };
    assert_eq!(stream.name, "t 0000:00:03.0");
    assert_eq!(
        (stream.rings(), stream.ring_entries(), stream.live_pages()),
        (2, 4, 5)
    );
    let pages = |buffer| -> Vec<(u64, u64)> {
        let ranges = stream.pages(buffer).iter();
        ranges
            .map(|range| (range.lo().get(), range.hi().get()))
            .collect()
    };
    assert_eq!(pages(0), [(0xff000, 0xff000)]);
    assert_eq!(pages(1), [(0xff002, 0xff004)]);
    assert_eq!(pages(2), [(0xff005, 0xff005)]);
    assert_eq!(
        [0, 1, 2, 3, 4].map(|buffer| stream.ring_position(buffer)),
        [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]
    );
    let expected = [
        Map(0),
        Map(1),
        Map(2),
        Use(0),
        Unmap(0),
        Use(1),
        Unmap(1),
        Map(3),
        EndBurst(0),
        Map(4),
        Use(4),
        Unmap(4),
        EndBurst(0),
        Use(2),
        Unmap(2),
        // The replaced mapping, then the burst that the new one ends.
        Unmap(3),
        EndBurst(1),
        Map(5),
    ];
    assert_eq!(stream.events(), expected);
}

#[test]
fn scatterlists_are_matched_per_device() {
    use BufferEvent::{EndBurst, Map, Unmap, Use};
    let list = |addrs: &str, starts: &str| {
        format!(
            "dma_map_sg: {DISK} dir=TO_DEVICE nents=2/2 ents=2/2 dma_addrs={{{addrs}}} \
            sizes={{0x1000,0x2000}} phys_addrs={{{starts}}}"
        )
    };
    let end = |starts: &str| format!("dma_unmap_sg: {DISK} dir=TO_DEVICE phys_addrs={{{starts}}}");
    let text = [
        line(0, 0, &list("0xff000000,0xff010000", "0x1000,0x8000")),
        line(0, 1, &map(NIC, "TO_DEVICE", 0xff00_0000, 1)),
        line(0, 2, &list("0xff020000,0xff030000", "0x1000,0x9000")),
        line(0, 3, &end("0x1000,0x9000")),
        line(0, 4, &end("0x1000,0xa000")),
        line(0, 5, &end("0x1000,0x8000")),
    ]
    .concat();
    let streams = recorded::streams("t", text.as_bytes()).unwrap();
    let [disk, nic] = &streams[..] else {
        panic!("{streams:?}")
    };
    assert_eq!(
        (disk.name.as_str(), nic.name.as_str()),
        ("t 0000:00:1f.2", "t 0000:00:03.0")
    );
    assert_eq!(nic.events(), [Map(0)]);
    assert_eq!(
        disk.events(),
        [
            Map(0),
            Map(1),
            Use(1),
            Unmap(1),
            Use(0),
            Unmap(0),
            EndBurst(0)
        ]
    );
    let pages: Vec<u64> = disk.pages(0).iter().map(|range| range.lo().get()).collect();
    assert_eq!(pages, [0xff000, 0xff010]);
    assert_eq!((disk.live_pages(), disk.ring_entries()), (6, 2));
}

#[test]
fn a_buffer_costs_bounded_work() {
    let huge = 64_u64 << 30;
    let text = [
        line(0, 0, &map(NIC, "TO_DEVICE", 0x1_0000_0000, huge)),
        line(0, 1, &unmap(NIC, "TO_DEVICE", 0x1_0000_0000, huge)),
    ]
    .concat();
    let streams = recorded::streams("t", text.as_bytes()).unwrap();
    assert_eq!((streams[0].live_pages(), streams[0].cut_buffers), (4096, 1));
    assert!(recorded::streams("t", &b"nonsense\n"[..]).is_err());
    assert!(recorded::streams("t", &b""[..]).unwrap().is_empty());
}

/// Compares the bundled trace with a count over its operations, which another parser path produces
/// and which have no IOVAs.
#[test]
fn every_page_of_every_unmap_of_the_sample_is_accessed_once() {
    let mut operations = Operations::new("sample", sample(), TraceOptions::default());
    let mut chunk = Chunk::default();
    let mut live: HashMap<u32, Option<u64>> = HashMap::new();
    let (mut expected, mut buffers) = (0, 0);
    while operations.next_chunk(&mut chunk).unwrap() {
        for op in &chunk.ops {
            match op.kind {
                OpKind::Map {
                    id,
                    class,
                    segments,
                    ..
                } => {
                    let streaming = matches!(class, MapClass::Single | MapClass::Sg);
                    let pages = |range: &PhysRange| {
                        (range.last().get() >> 12) - (range.start().get() >> 12) + 1
                    };
                    let pages = chunk.segments_of(segments).iter().map(pages).sum();
                    live.insert(id.0, streaming.then_some(pages));
                }
                OpKind::Unmap { id } => {
                    if let Some(pages) = live.remove(&id.0).flatten() {
                        expected += pages;
                        buffers += 1;
                    }
                }
            }
        }
    }
    assert!(expected > 1000, "{expected}");
    let rows = of_trace("sample", sample()).unwrap();
    for row in &rows {
        match row.predictor {
            Predictor::Riotlb | Predictor::RiotlbUninvalidated => {
                assert_eq!(row.misses, buffers, "{row:?}")
            }
            _ => assert_eq!(row.misses, expected, "{row:?}"),
        }
        assert!(row.predicted <= row.misses);
        assert_eq!(row.first_misses, buffers, "{row:?}");
        assert!(row.first_predicted <= row.predicted);
        assert!(row.rejected <= row.verification_walks);
    }
    let [summary] = &summarise(&rows)[..] else {
        panic!("one device")
    };
    let best = |predictor| {
        of(&rows, predictor)
            .map(|row| row.first_hit_rate)
            .fold(0.0, f64::max)
    };
    assert_eq!(
        summary.markov_above.max(summary.markov_below),
        best(Predictor::MarkovModified)
    );
    assert_eq!(summary.riotlb, best(Predictor::Riotlb));
    assert_eq!(summary.first_misses, buffers);
}

/// The bundled sample.
fn sample() -> TraceSource {
    TraceSource::from_reader("sample", SAMPLE).unwrap()
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
