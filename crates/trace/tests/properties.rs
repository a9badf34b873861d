//! Properties: rendered text parses back, the size of reads does not matter, and anonymising keeps
//! the structure.

use std::io::{self, Read};

use proptest::prelude::*;
use ringfence_trace::text::{ExecutionContext, ListSpan, RawChunk, RawEvent, RawKind, TraceReader};
use ringfence_trace::{
    Anonymise, Chunk, DeviceIndex, Info, KernelPfn, Op, Operations, PageChange, PageEvent, SAMPLE,
    Summary, TaskName, TraceOptions, TraceSource, render,
};
use ringfence_types::{Direction, Iova, Nanos, PhysAddr, PhysRange};

/// Returns the bytes in reads of the given sizes, cyclically.
struct Parts<'a> {
    bytes: &'a [u8],
    sizes: Vec<usize>,
    next: usize,
}

impl Read for Parts<'_> {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        let size = self.sizes[self.next % self.sizes.len()].max(1);
        self.next += 1;
        let count = size.min(self.bytes.len()).min(space.len());
        space[..count].copy_from_slice(&self.bytes[..count]);
        self.bytes = &self.bytes[count..];
        Ok(count)
    }
}

const NAMES: [&str; 3] = ["0000:00:03.0", "virtio0", "10000:e1:00.7"];

fn range() -> impl Strategy<Value = (u64, u64)> {
    (any::<u64>(), 0u32..37).prop_flat_map(|(start, bits)| {
        let most = (1u64 << bits).min(u64::MAX - start).max(1);
        (Just(start), 1..=most)
    })
}

fn direction() -> impl Strategy<Value = Direction> {
    prop::sample::select(Direction::ALL.to_vec())
}

/// A kind, and the lists and marks that it refers to.
fn kind() -> impl Strategy<Value = (RawKind, Vec<Vec<u64>>, Option<String>)> {
    let device = (0u16..3).prop_map(DeviceIndex);
    let plain = |kind| (kind, Vec::new(), None);
    prop_oneof![
        (device.clone(), direction(), range(), any::<u64>()).prop_map(
            move |(device, direction, (iova, size), phys)| {
                let phys = phys.min(u64::MAX - size);
                let iova = if iova == u64::MAX { 0 } else { iova };
                plain(RawKind::Map {
                    device,
                    direction,
                    iova: Iova::new(iova),
                    size,
                    phys: PhysAddr::new(phys),
                })
            }
        ),
        (device.clone(), direction(), range()).prop_map(
            move |(device, direction, (iova, size))| {
                plain(RawKind::Unmap {
                    device,
                    direction,
                    iova: Iova::new(iova),
                    size,
                })
            }
        ),
        (device.clone(), direction(), range()).prop_map(
            move |(device, direction, (iova, size))| {
                plain(RawKind::Free {
                    device,
                    direction,
                    iova: Iova::new(iova),
                    size,
                })
            }
        ),
        (
            device.clone(),
            direction(),
            range(),
            prop::collection::vec(any::<u64>(), 0..4)
        )
            .prop_map(|(device, direction, (iova, size), phys)| {
                let kind = RawKind::Alloc {
                    device,
                    direction,
                    iova: Iova::new(iova),
                    size,
                    phys_addrs: ListSpan::default(),
                };
                (kind, vec![phys], None)
            }),
        (
            device.clone(),
            direction(),
            prop::collection::vec(range(), 1..9),
            prop::collection::vec(any::<u64>(), 1..9),
            0u32..5
        )
            .prop_filter("at most 64 GiB", |(_, _, dma, _, _)| dma
                .iter()
                .map(|range| range.1)
                .sum::<u64>()
                <= 1 << 36)
            .prop_map(|(device, direction, dma, phys, more)| {
                let (starts, sizes): (Vec<u64>, Vec<u64>) = dma.into_iter().unzip();
                let kind = RawKind::MapSg {
                    device,
                    direction,
                    nents: phys.len() as u32 + more,
                    ents: starts.len() as u32 + more / 2,
                    dma_addrs: ListSpan::default(),
                    sizes: ListSpan::default(),
                    phys_addrs: ListSpan::default(),
                };
                (kind, vec![starts, sizes, phys], None)
            }),
        (
            device.clone(),
            direction(),
            prop::collection::vec(any::<u64>(), 1..300)
        )
            .prop_map(|(device, direction, phys)| {
                (
                    RawKind::UnmapSg {
                        device,
                        direction,
                        phys_addrs: ListSpan::default(),
                    },
                    vec![phys],
                    None,
                )
            }),
        device
            .clone()
            .prop_map(move |device| plain(RawKind::Sync { device })),
        (device.clone(), direction(), range()).prop_map(
            move |(device, direction, (iova, size))| plain(RawKind::Access {
                device,
                direction,
                iova: Iova::new(iova),
                size,
            })
        ),
        device.prop_map(move |device| plain(RawKind::Void { device })),
        (range(), any::<u64>()).prop_map(move |((iova, size), phys)| {
            let phys = phys.min(u64::MAX - size);
            plain(RawKind::IommuMap {
                iova: Iova::new(iova),
                phys: PhysAddr::new(phys),
                size,
            })
        }),
        range().prop_map(move |(iova, size)| plain(RawKind::IommuUnmap {
            iova: Iova::new(iova),
            size
        })),
        (
            prop::sample::select(vec![PageChange::Allocated, PageChange::Freed]),
            1u64..1 << 48,
            0u8..=20
        )
            .prop_map(move |(change, pfn, order)| plain(RawKind::Page(PageEvent {
                change,
                pfn: KernelPfn(pfn),
                order,
                task: TaskName::new(b"task"),
            }))),
        "([!-~][ -~]{0,40})?".prop_map(|text| (RawKind::Mark(0), Vec::new(), Some(text))),
    ]
}

fn chunk() -> impl Strategy<Value = RawChunk> {
    let event = (
        kind(),
        0u64..1 << 60,
        any::<u16>(),
        any::<u32>(),
        prop::sample::select(vec![0, b'.', b's', b'h', b'H']),
    );
    prop::collection::vec(event, 0..40).prop_map(|events| {
        let mut chunk = RawChunk::default();
        for (line, ((mut kind, lists, mark), time, cpu, pid, level)) in (4u64..).zip(events) {
            let mut spans = lists.iter().map(|list| {
                let first = chunk.words.len() as u32;
                chunk.words.extend_from_slice(list);
                let count = list.len() as u32;
                // The parser gives an empty list the default span.
                ListSpan {
                    first: if count == 0 { 0 } else { first },
                    count,
                }
            });
            match &mut kind {
                RawKind::MapSg {
                    dma_addrs,
                    sizes,
                    phys_addrs,
                    ..
                } => {
                    *dma_addrs = spans.next().unwrap();
                    *sizes = spans.next().unwrap();
                    *phys_addrs = spans.next().unwrap();
                }
                RawKind::UnmapSg { phys_addrs, .. } | RawKind::Alloc { phys_addrs, .. } => {
                    *phys_addrs = spans.next().unwrap();
                }
                RawKind::Mark(index) => *index = chunk.marks.len() as u32,
                _ => {}
            }
            drop(spans);
            chunk.marks.extend(mark);
            chunk.events.push(RawEvent {
                time: Nanos(time),
                line,
                cpu,
                context: ExecutionContext { pid, level },
                kind,
            });
        }
        chunk
    })
}

/// Text whose first three lines name the devices, so that they are numbered as in [`NAMES`].
fn text_of(chunk: &RawChunk) -> String {
    let mut text = String::new();
    for index in 0..3 {
        let event = RawEvent {
            time: Nanos(0),
            line: 0,
            cpu: 0,
            context: ExecutionContext {
                pid: 0,
                level: b'.',
            },
            kind: RawKind::Sync {
                device: DeviceIndex(index),
            },
        };
        render(
            &event,
            chunk,
            |device| NAMES[device.index()].to_owned(),
            &mut text,
        )
        .unwrap();
        text.push('\n');
    }
    for event in &chunk.events {
        render(
            event,
            chunk,
            |device| NAMES[device.index()].to_owned(),
            &mut text,
        )
        .unwrap();
        text.push('\n');
    }
    text
}

fn operations_of(reader: impl Read) -> (Vec<Op>, Vec<PhysRange>, Summary) {
    let mut operations = Operations::new("p", reader, TraceOptions::default());
    let (mut ops, mut segments) = (Vec::new(), Vec::new());
    let mut chunk = Chunk::default();
    while operations.next_chunk(&mut chunk).unwrap() {
        ops.append(&mut chunk.ops);
        segments.append(&mut chunk.segments);
    }
    (ops, segments, operations.summary().clone())
}

fn sample() -> Vec<u8> {
    let mut text = Vec::new();
    TraceSource::from_reader("s", SAMPLE)
        .unwrap()
        .read_to_end(&mut text)
        .unwrap();
    text
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        rng_seed: proptest::test_runner::RngSeed::Fixed(7),
        ..ProptestConfig::default()
    })]

    #[test]
    fn rendered_traces_parse_back(chunk in chunk()) {
        let text = text_of(&chunk);
        let options = TraceOptions::default().with_page_events();
        let mut reader = TraceReader::new("p", text.as_bytes(), &options);
        let mut back = RawChunk::default();
        reader.next_chunk(&mut back).unwrap();
        back.events.drain(..3);
        prop_assert_eq!(back, chunk);
    }

    #[test]
    fn no_sequence_of_events_breaks_the_pairing(chunk in chunk()) {
        // For any input, live ids are unique, unmaps name live ids, and segments are present.
        let text = text_of(&chunk);
        let mut operations = Operations::new("p", text.as_bytes(), TraceOptions::default());
        let mut live = std::collections::HashSet::new();
        let mut out = Chunk::default();
        let mut time = 0;
        loop {
            let more = operations.next_chunk(&mut out);
            for op in &out.ops {
                prop_assert!(op.time.0 >= time);
                time = op.time.0;
                match op.kind {
                    ringfence_trace::OpKind::Map { id, segments, .. } => {
                        prop_assert!(live.insert(id));
                        prop_assert!(segments.count > 0);
                        prop_assert_eq!(out.segments_of(segments).len(), segments.count as usize);
                        for segment in out.segments_of(segments) {
                            prop_assert!(segment.last().get() < ringfence_trace::ARENA_BYTES);
                        }
                    }
                    ringfence_trace::OpKind::Unmap { id } => prop_assert!(live.remove(&id)),
                }
            }
            // Random addresses cover more than the arena holds, which is an error.
            if !matches!(more, Ok(true)) {
                break;
            }
        }
        let left: std::collections::HashSet<_> = operations.live().collect();
        prop_assert_eq!(left, live);
    }

    #[test]
    fn how_the_bytes_arrive_does_not_matter(
        chunk in chunk(),
        sizes in prop::collection::vec(1usize..200, 1..9),
    ) {
        let text = text_of(&chunk);
        let read = |reader: &mut dyn Read| {
            let mut reader = TraceReader::new("p", reader, &TraceOptions::default());
            let mut back = RawChunk::default();
            reader.next_chunk(&mut back).unwrap();
            back
        };
        let whole = read(&mut text.as_bytes());
        let parts = read(&mut Parts { bytes: text.as_bytes(), sizes, next: 0 });
        prop_assert_eq!(whole, parts);
    }

    #[test]
    fn no_bytes_make_the_reader_panic(
        mut bytes in prop::collection::vec(any::<u8>(), 0..3000),
        at in 0usize..400_000,
    ) {
        // Random bytes alone, and random bytes inside a valid trace.
        let sample = sample();
        let at = at.min(sample.len() - 1);
        let mut inside = sample[at..(at + 20_000).min(sample.len())].to_vec();
        let middle = inside.len() / 2;
        inside.splice(middle..middle, bytes.drain(..).take(200).collect::<Vec<_>>());
        for options in [TraceOptions::default(), TraceOptions::default().lenient()] {
            let mut operations = Operations::new("p", inside.as_slice(), options);
            let mut chunk = Chunk::default();
            while let Ok(true) = operations.next_chunk(&mut chunk) {}
        }
    }
}

#[test]
fn operations_of_the_sample_do_not_depend_on_the_split() {
    let text = sample();
    let whole = operations_of(text.as_slice());
    assert!(whole.0.len() > 8000);
    for sizes in [vec![1000, 3], vec![4096], vec![262_144, 7], vec![65_537]] {
        assert_eq!(
            operations_of(Parts {
                bytes: &text,
                sizes,
                next: 0
            }),
            whole
        );
    }
}

/// Returns the info of an anonymised trace, and that of the original without the parts that must
/// differ.
fn both_infos(text: &[u8], anonymise: Anonymise) -> (Info, Info, String) {
    let mut out = Vec::new();
    anonymise
        .run("a", text, text, &TraceOptions::default(), &mut out)
        .unwrap();
    let read = |text: &[u8]| {
        let mut info =
            Info::read(&mut Operations::new("a", text, TraceOptions::default())).unwrap();
        info.lines = 0;
        info.events -= info.unknown;
        info.unknown = 0;
        let start = info.marks.first().map_or(0, |mark| mark.0);
        for mark in &mut info.marks {
            mark.1.clear();
            mark.0 -= start;
        }
        for device in &mut info.devices {
            device.name.clear();
        }
        info
    };
    (read(text), read(&out), String::from_utf8(out).unwrap())
}

#[test]
fn anonymised_traces_keep_info_and_no_address() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let mut traces = vec![sample()];
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "zst") {
            let mut text = Vec::new();
            TraceSource::open(&path)
                .unwrap()
                .read_to_end(&mut text)
                .unwrap();
            traces.push(text);
        }
    }
    assert!(traces.len() >= 7);
    for text in traces {
        for from_zero in [false, true] {
            let anonymise = Anonymise {
                seed: 42,
                from_zero,
            };
            let (original, anonymised, out) = both_infos(&text, anonymise);
            assert_eq!(original, anonymised);
            assert!(original.events > 1000);
            for secret in [
                "netperf",
                "kworker",
                "modprobe",
                "0000:00:1f.2",
                "driver load",
                "119798000",
            ] {
                assert!(!out.contains(secret), "{secret}");
            }
        }
    }
}
