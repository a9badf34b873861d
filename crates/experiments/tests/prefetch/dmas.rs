//! Streams of traces whose DMAs are recorded, in place of assumed accesses.

use std::collections::HashMap;
use std::io::Read;

use ringfence_experiments::prefetch::{
    AccessSource, BufferEvent, DeviceStream, GUEST_DMAS, Predictor, bundled, measure, recorded,
};
use ringfence_trace::TraceSource;

use super::lines::{DISK, NIC, access, line, map, unmap};
use super::of;

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
