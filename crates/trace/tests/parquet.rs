//! Operations through Parquet and back, and hostile files.
#![cfg(feature = "parquet")]

use std::fs;
use std::io::Read;
use std::path::PathBuf;

use ringfence_trace::{
    Chunk, Info, MappingId, Mark, Op, OpKind, OpStore, Operations, ParquetProblem, SAMPLE, Summary,
    TraceError, TraceOptions, TraceSource, write_parquet,
};
use ringfence_types::PhysRange;

/// A file that is removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(tempfile::tempdir().unwrap().keep().join(name))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(self.0.parent().unwrap());
    }
}

fn open(text: &'static [u8]) -> Operations<TraceSource> {
    let source = TraceSource::from_reader("text", text).unwrap();
    Operations::new("text", source, options())
}

/// Options that admit the mapping of 5 GiB in [`ODD`].
fn options() -> TraceOptions {
    let mut options = TraceOptions::default();
    options.limits.mapping = 8 << 30;
    options
}

/// All contents of a trace.
#[derive(Debug, PartialEq)]
struct All {
    ops: Vec<(Op, Vec<PhysRange>)>,
    marks: Vec<Mark>,
    devices: Vec<ringfence_trace::TraceDevice>,
    summary: Summary,
    live: Vec<MappingId>,
}

fn add(chunk: &mut Chunk, all: &mut All) {
    let before = all.ops.len() as u32;
    for op in &chunk.ops {
        let mut op = *op;
        let mut segments = Vec::new();
        if let OpKind::Map { segments: span, .. } = &mut op.kind {
            segments = chunk.segments_of(*span).to_vec();
            // Depends on where a chunk begins.
            span.first = 0;
        }
        all.ops.push((op, segments));
    }
    all.marks.extend(chunk.marks.drain(..).map(|mark| Mark {
        before_op: mark.before_op + before,
        ..mark
    }));
}

fn all<R: Read>(mut operations: Operations<R>) -> Result<All, TraceError> {
    let mut chunk = Chunk::default();
    let mut all = All {
        ops: Vec::new(),
        marks: Vec::new(),
        devices: Vec::new(),
        summary: Summary::default(),
        live: Vec::new(),
    };
    while operations.next_chunk(&mut chunk)? {
        add(&mut chunk, &mut all);
    }
    assert!(chunk.ops.is_empty() && chunk.marks.is_empty());
    assert!(!operations.next_chunk(&mut chunk)?, "the end stays the end");
    let devices = operations.devices();
    all.devices = devices.iter().map(|(_, device)| device.clone()).collect();
    for (index, device) in devices.iter() {
        if device.name != "(iommu only)" {
            assert_eq!(devices.find(&device.name), Some(index));
        }
    }
    all.summary = operations.summary().clone();
    all.live = operations.live().collect();
    Ok(all)
}

fn write(text: &'static [u8], scratch: &Scratch) {
    let file = fs::File::create(&scratch.0).unwrap();
    write_parquet(&mut open(text), file).unwrap();
}

/// Every class, lists, marks between operations and at the end, a mapping of 5 GiB, an address
/// above 64 GiB, a 5 s gap, two devices, iommu lines of neither, a replaced mapping, and one live
/// at the end.
const ODD: &[u8] = b"t-1 [0] ..... 1.0: tracing_mark_write: begin \"quoted\"\n\
    t-1 [0] ..... 1.0: dma_map_phys: 0000:00:03.0 dir=TO_DEVICE dma_addr=0 size=5368709120 \
    phys_addr=0 attrs=\n\
    t-1 [0] ..... 6.5: dma_unmap_phys: 0000:00:03.0 dir=TO_DEVICE dma_addr=0 size=5368709120 \
    attrs=\n\
    t-1 [1] ..... 6.6: dma_map_sg: usb dir=FROM_DEVICE nents=2/2 ents=2/2 \
    dma_addrs={0x1000,0x5000} sizes={0x1000,0x10} phys_addrs={0x1000,0x5000} attrs=\n\
    t-1 [1] ..... 6.6: tracing_mark_write: between\n\
    t-1 [1] ..... 6.7: dma_alloc: usb dir=BIDIRECTIONAL dma_addr=9000 size=64 virt_addr=1 flags=x \
    attrs=\n\
    t-1 [0] ..... 6.8: dma_map_phys: usb dir=TO_DEVICE dma_addr=2000000000 size=64 \
    phys_addr=2000000000 attrs=\n\
    t-1 [0] ..... 6.8: dma_map_phys: usb dir=TO_DEVICE dma_addr=2000000000 size=64 \
    phys_addr=2000000000 attrs=\n\
    t-1 [0] ..... 6.9: map: IOMMU: iova=0x0000000000700000 - 0x0000000000701000 \
    paddr=0x0000000000042000 size=4096\n\
    t-1 [0] ..... 7.0: tracing_mark_write: end\n\
    t-1 [0] ..... 7.0: tracing_mark_write: end\n";

#[test]
fn operations_round_trip() {
    for (name, text) in [("odd", ODD), ("sample", SAMPLE), ("empty", b"")] {
        let scratch = Scratch::new(name);
        write(text, &scratch);
        let direct = all(open(text)).unwrap();
        let again = Operations::open(&scratch.0, options()).unwrap();
        assert_eq!(all(again).unwrap(), direct, "{name}");
    }
    // The same through a store; and from Parquet to Parquet, byte for byte.
    let (first, second) = (Scratch::new("first"), Scratch::new("second"));
    write(SAMPLE, &first);
    let mut operations = Operations::open(&first.0, options()).unwrap();
    write_parquet(&mut operations, fs::File::create(&second.0).unwrap()).unwrap();
    assert_eq!(fs::read(&first.0).unwrap(), fs::read(&second.0).unwrap());
    let mut operations = Operations::open(&first.0, options()).unwrap();
    let store = OpStore::read(&mut operations).unwrap();
    let direct = OpStore::read(&mut open(SAMPLE)).unwrap();
    let (mut a, mut b) = (store.replay(), direct.replay());
    let (mut left, mut right) = (Chunk::default(), Chunk::default());
    while b.next_chunk(&mut right) {
        assert!(a.next_chunk(&mut left));
        assert_eq!(left, right);
    }
    assert!(!a.next_chunk(&mut left));
}

#[test]
fn many_row_groups_are_one_trace() {
    // More operations than two groups hold, with a mark at the end of a group.
    let mut text = String::new();
    for n in 0..140_000u64 {
        let line = |event: &str, rest: &str| {
            format!(
                "t-1 [0] ..... {}.{:06}: {event}: d dir=TO_DEVICE dma_addr={:x} size=64 \
                {rest}attrs=\n",
                n / 1000,
                n % 1000,
                0x1000 * (n + 1)
            )
        };
        text += &line("dma_map_phys", "phys_addr=1000 ");
        text += &line("dma_unmap_phys", "");
        if n % 16_384 == 0 {
            text += &format!(
                "t-1 [0] ..... {}.{:06}: tracing_mark_write: {n}\n",
                n / 1000,
                n % 1000
            );
        }
    }
    let text: &'static [u8] = text.leak().as_bytes();
    let scratch = Scratch::new("groups");
    let file = fs::File::create(&scratch.0).unwrap();
    let written = write_parquet(&mut open(text), file).unwrap();
    assert_eq!((written.operations, written.marks), (280_000, 9));
    assert!(written.groups > 2, "{written:?}");
    let again = Operations::open(&scratch.0, options()).unwrap();
    assert_eq!(all(again).unwrap(), all(open(text)).unwrap());
}

#[test]
fn parquet_has_no_lines() {
    let scratch = Scratch::new("lines");
    write(ODD, &scratch);
    let no_lines = |result: Result<(), TraceError>| {
        let problem = match result {
            Err(TraceError::Parquet { problem, .. }) => problem,
            other => panic!("{other:?}"),
        };
        assert_eq!(problem, ParquetProblem::NoLines);
    };
    no_lines(TraceSource::open(&scratch.0).map(drop));
    let mut operations = Operations::open(&scratch.0, options()).unwrap();
    no_lines(Info::read(&mut operations).map(drop));
    let stream = TraceSource::from_reader("stdin", &b"PAR1 and so on"[..]);
    assert!(matches!(
        stream,
        Err(TraceError::Parquet {
            problem: ParquetProblem::NotSeekable,
            ..
        })
    ));
}

/// A damaged file gives operations or an error; ids stay dense for any contents.
fn survives(scratch: &Scratch, bytes: &[u8]) -> Result<usize, TraceError> {
    fs::write(&scratch.0, bytes).unwrap();
    let mut operations = Operations::open(&scratch.0, options())?;
    let mut chunk = Chunk::default();
    let mut seen = 0;
    while operations.next_chunk(&mut chunk)? {
        for op in &chunk.ops {
            seen += 1;
            assert!(operations.devices().get(op.device).is_some());
            if let OpKind::Map { id, segments, .. } = op.kind {
                assert!(id.index() < seen, "dense");
                let segments = chunk.segments_of(segments);
                assert!(!segments.is_empty());
                assert!(
                    segments
                        .iter()
                        .all(|segment| segment.last().get() < ringfence_trace::ARENA_BYTES)
                );
            }
        }
    }
    Ok(seen)
}

#[test]
fn a_harmed_file_is_an_error_or_other_operations() {
    // The reader catches the decoder's panics and reports them as damage. Their messages would hide
    // those of the test.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|info| {
        let path = info.location().map(|location| location.file().to_owned());
        if !path.is_some_and(|file| file.contains("parquet-")) {
            eprintln!("{info}");
        }
    }));
    let scratch = Scratch::new("harm");
    write(ODD, &scratch);
    let good = fs::read(&scratch.0).unwrap();
    let mut tally = std::collections::BTreeMap::<&str, u32>::new();
    let mut judge = |bytes: &[u8]| {
        let outcome = match survives(&scratch, bytes) {
            Ok(_) => "passed",
            // The first bytes are no longer the magic number of Parquet.
            Err(TraceError::Malformed { .. }) => "text",
            Err(TraceError::Parquet { problem, .. }) => match problem {
                ParquetProblem::Damaged { .. } => "damaged",
                ParquetProblem::Metadata { .. } => "metadata",
                ParquetProblem::Column { .. } => "column",
                ParquetProblem::Compressed { .. } => "compressed",
                ParquetProblem::TooLarge { .. } => "too large",
                ParquetProblem::Row { .. } => "row",
                ParquetProblem::Limit { .. } => "limit",
                other => panic!("{other}"),
            },
            Err(other) => panic!("{other}"),
        };
        *tally.entry(outcome).or_default() += 1;
    };
    for at in 0..good.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = good.clone();
            bytes[at] ^= flip;
            judge(&bytes);
        }
    }
    for end in (4..good.len()).step_by(7) {
        judge(&good[..end]);
    }
    std::panic::set_hook(hook);
    for outcome in ["damaged", "metadata", "column", "row", "limit"] {
        assert!(tally.contains_key(outcome), "{outcome}: {tally:?}");
    }
}
