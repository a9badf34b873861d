//! X07 and the streams that it uses.

use std::collections::HashMap;

use std::io::Read;

use ringfence_experiments::prefetch::{
    AccessSource, Addresses, BufferEvent, DeviceStream, GUEST_DMAS, Predictor, PrefetchRow,
    Synthetic, bundled, histories, measure, of_trace, recorded, summarise,
};
use ringfence_lab::LabError;
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

/// Every line of these traces names 16 MiB, so a measurement takes 43 ms or 200 KB for each.
#[test]
fn pages_of_all_buffers_are_bounded() {
    let huge = 4096 * 4096_u64;
    let access = |n| {
        line(
            0,
            n,
            &format!("dma_access: {NIC} dir=TO_DEVICE dma_addr=100000000 size={huge}"),
        )
    };
    let alive = |n: u64| line(0, n, &map(NIC, "TO_DEVICE", (n + 256) << 24, huge));
    let reused = |n: u64| {
        line(0, n, &map(NIC, "TO_DEVICE", 1 << 32, huge))
            + &line(0, n, &unmap(NIC, "TO_DEVICE", 1 << 32, huge))
    };
    let accessed = |n| if n == 0 { alive(n) } else { access(n) };
    let traces: [(&dyn Fn(u64) -> String, u64); 3] =
        [(&alive, 1 << 11), (&reused, 1 << 10), (&accessed, 1 << 11)];
    for (line, lines) in traces {
        let text: String = (0..lines).map(line).collect();
        let error = recorded::streams("t", text.as_bytes()).unwrap_err();
        assert!(
            matches!(error, LabError::StreamPages { limit } if limit < 1 << 21),
            "{error}"
        );
        let few: String = (0..16).map(line).collect();
        assert!(recorded::streams("t", few.as_bytes()).is_ok());
    }
}

#[test]
fn devices_are_bounded() {
    let lines = |count: u64| -> String {
        let device = |n| line(0, n, &map(&format!("device{n}"), "TO_DEVICE", 0x1000, 1));
        (0..count).map(device).collect()
    };
    let streams = |count| recorded::streams("t", lines(count).as_bytes());
    assert_eq!(streams(256).unwrap().len(), 256);
    let error = streams(257).unwrap_err();
    assert!(
        matches!(error, LabError::StreamDevices { limit: 256 }),
        "{error}"
    );
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

fn access(device: &str, direction: &str, iova: u64, size: u64) -> String {
    format!("dma_access: {device} dir={direction} dma_addr={iova:x} size={size}")
}

/// Lines of two buffers and a coherent one, with DMAs in another order than the unmaps.
fn lines_with_dmas() -> Vec<String> {
    vec![
        map(NIC, "BIDIRECTIONAL", 0xff00_0000, 0x2000),
        map(NIC, "FROM_DEVICE", 0xff00_4000, 0x3000),
        map(NIC, "FROM_DEVICE", 0xff00_8000, 0x1000),
        access(NIC, "TO_DEVICE", 0xff00_1010, 16),
        access(NIC, "FROM_DEVICE", 0xff00_8200, 64),
        access(NIC, "FROM_DEVICE", 0xff00_5ff0, 0x20),
        access(NIC, "FROM_DEVICE", 0xff00_4000, 1),
        unmap(NIC, "FROM_DEVICE", 0xff00_4000, 0x3000),
        unmap(NIC, "FROM_DEVICE", 0xff00_8000, 0x1000),
    ]
}

fn streams_of(lines: &[String]) -> Vec<DeviceStream> {
    let lines = lines.iter().enumerate();
    let text: String = lines.map(|(at, what)| line(0, at as u64, what)).collect();
    recorded::streams("t", text.as_bytes()).unwrap()
}

#[test]
fn recorded_dmas_take_the_place_of_assumed_accesses() {
    use BufferEvent::{Access, EndBurst, Map, Unmap, Use};
    let lines = lines_with_dmas();
    let at = |buffer, first, count| Access {
        buffer,
        first,
        count,
    };
    let [stream] = &streams_of(&lines)[..] else {
        panic!("one device")
    };
    assert_eq!(stream.accesses, AccessSource::Recorded);
    assert_eq!(
        (
            stream.unmapped_accesses,
            stream.rings(),
            stream.live_pages()
        ),
        (0, 1, 4)
    );
    let expected = [
        Map(0),
        Map(1),
        at(1, 0, 1),
        at(0, 1, 2),
        at(0, 0, 1),
        Unmap(0),
        Unmap(1),
        EndBurst(0),
    ];
    assert_eq!(stream.events(), expected);
    // The first pages of both buffers miss once, in the order of the DMAs and not of the unmaps.
    let rows = measure(stream, &[16]);
    let row = of(&rows, Predictor::Markov).next().unwrap();
    assert_eq!(
        (row.accesses, row.misses, row.first_misses),
        (AccessSource::Recorded, 4, 2)
    );
    let pair = of(&rows, Predictor::RiotlbUninvalidated).next().unwrap();
    assert_eq!((pair.misses, pair.predicted), (2, 0));

    // The same trace without its DMAs: both directions stream, and every page is used before the
    // unmap.
    let silent: Vec<String> = lines
        .into_iter()
        .filter(|line| !line.contains("access"))
        .collect();
    let [stream] = &streams_of(&silent)[..] else {
        panic!("one device")
    };
    assert_eq!(stream.accesses, AccessSource::Assumed);
    let expected = [
        Map(0),
        Map(1),
        Map(2),
        Use(1),
        Unmap(1),
        Use(2),
        Unmap(2),
        EndBurst(1),
    ];
    assert_eq!(stream.events(), expected);
    let rows = measure(stream, &[16]);
    let row = of(&rows, Predictor::Markov).next().unwrap();
    assert_eq!((row.accesses, row.misses), (AccessSource::Assumed, 4));
}

/// A DMA after its unmap is no access of the buffer: the stream counts it.
#[test]
fn dmas_outside_mappings_are_counted() {
    let mut lines = lines_with_dmas();
    let late = lines.remove(4);
    lines.push(late);
    // Partly before the first buffer.
    lines.insert(4, access(NIC, "FROM_DEVICE", 0xff00_3ff0, 0x20));
    // Another device's DMA at a mapped address.
    lines.insert(5, access(DISK, "FROM_DEVICE", 0xff00_8000, 1));
    let [stream] = &streams_of(&lines)[..] else {
        panic!("one device")
    };
    assert_eq!(stream.unmapped_accesses, 2);
    let accessed = |buffer| {
        let events = stream.events().iter();
        events
            .filter(
                |event| matches!(event, BufferEvent::Access { buffer: of, .. } if *of == buffer),
            )
            .count()
    };
    assert_eq!((accessed(0), accessed(1)), (2, 0));
}

/// The bundled trace is in order: each of its DMAs is inside a mapping that permits it. The streams
/// have as many accessed pages as a plain search over the lines finds.
#[test]
fn bundled_dmas_are_all_between_map_and_unmap() {
    let mut text = String::new();
    TraceSource::from_reader("bundled", GUEST_DMAS)
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert!(text.ends_with("\n# end\n") && !text.contains("LOST"));
    let mut live: Vec<(&str, &str, u64, u64)> = Vec::new();
    let mut pages: HashMap<&str, u64> = HashMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (_, rest) = line.split_once(": ").unwrap();
        let words: Vec<&str> = rest.split(' ').collect();
        let field = |at: usize| words[at].split_once('=').unwrap().1;
        let (device, direction) = (words[1], field(2));
        let start = u64::from_str_radix(field(3), 16).unwrap();
        let end = start + field(4).parse::<u64>().unwrap();
        let mapping = (device, direction, start, end);
        match words[0] {
            "dma_map_phys:" => live.push(mapping),
            "dma_unmap_phys:" => {
                let at = live.iter().position(|one| *one == mapping).expect(line);
                live.swap_remove(at);
            }
            "dma_access:" => {
                let inside = |one: &&(&str, &str, u64, u64)| {
                    one.0 == device && one.2 <= start && end <= one.3
                };
                let (_, permitted, ..) = live.iter().find(inside).expect(line);
                assert!(["BIDIRECTIONAL", direction].contains(permitted), "{line}");
                if *permitted != "BIDIRECTIONAL" {
                    *pages.entry(device).or_default() += ((end - 1) >> 12) - (start >> 12) + 1;
                }
            }
            other => panic!("{other}"),
        }
    }
    let streams = recorded::streams("b", text.as_bytes()).unwrap();
    assert_eq!(streams.len(), 2);
    for stream in &streams {
        let events = stream.events().iter().map(|event| match event {
            BufferEvent::Access { count, .. } => u64::from(*count),
            BufferEvent::Use(_) => panic!("assumed"),
            _ => 0,
        });
        let device = stream.name.strip_prefix("b ").unwrap();
        assert_eq!(events.sum::<u64>(), pages[device], "{device}");
        assert!(pages[device] > 1000);
    }
    let rows = bundled().unwrap();
    assert!(
        rows.iter()
            .all(|row| row.unmapped_accesses == 0 && row.first_misses > 1000)
    );
}
