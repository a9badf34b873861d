//! The Parquet reader on untrusted files.
//!
//! If byte 0 of the input is 0, the rest is the file. Otherwise it selects one of the [`BASES`],
//! written as a file, and the rest edits that file in steps of 4 bytes. A step has a position (2
//! bytes, little-endian, modulo the length), an operation (modulo 4: overwrite, exclusive or,
//! truncate, insert) and a value. A few bytes of input therefore reach deep into a valid file.
//!
//! The decoder is an external crate, and the reader reports its panics as damage. Panic hooks see
//! such panics too, and libFuzzer's hook would end the run. The target therefore silences them and
//! panics again if a panic leaves the reader.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::Path;
use std::sync::{Once, OnceLock};

use ringfence_trace::{
    Chunk, Op, Operations, ParquetProblem, TraceError, TraceOptions, TraceSource, write_parquet,
};
use ringfence_types::PhysRange;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::OutcomeHook;
use crate::trace_operations::{Live, gather};

/// Outcomes that the corpus reaches: every reason to refuse a file, including each column with a
/// value that no operation can have.
pub const OUTCOMES: &[&str] = &[
    "operations",
    "marks",
    "nothing",
    "text",
    "Damaged",
    "Metadata",
    "Column",
    "Compressed",
    "TooLarge",
    "Limit",
    "row: time_ns",
    "row: event",
    "row: device",
    "row: cpu",
    "row: lines",
    "row: mapping",
    "row: direction",
    "row: class",
    "row: flags",
    "row: phys_addr",
    "row: bytes",
    "row: text",
];

/// Texts of traces. One has every class, a list, marks, an address above 64 GiB, several devices,
/// and a mapping live at the end; the other is empty.
const BASES: [&[u8]; 2] = [ODD, b""];

const ODD: &[u8] = b"t-1 [0] ..... 1.0: tracing_mark_write: begin\n\
    t-1 [0] ..... 1.0: dma_map_phys: 0000:00:03.0 dir=TO_DEVICE dma_addr=0 size=4096 phys_addr=0 \
    attrs=\n\
    t-1 [0] ..... 6.5: dma_unmap_phys: 0000:00:03.0 dir=TO_DEVICE dma_addr=0 size=4096 attrs=\n\
    t-1 [1] ..... 6.6: dma_map_sg: usb dir=FROM_DEVICE nents=2/2 ents=2/2 \
    dma_addrs={0x1000,0x5000} sizes={0x1000,0x10} phys_addrs={0x1000,0x5000} attrs=\n\
    t-1 [1] ..... 6.6: tracing_mark_write: between\n\
    t-1 [1] ..... 6.7: dma_alloc: usb dir=BIDIRECTIONAL dma_addr=9000 size=64 virt_addr=1 flags=x \
    attrs=\n\
    t-1 [0] ..... 6.8: dma_map_phys: usb dir=TO_DEVICE dma_addr=2000000000 size=64 \
    phys_addr=2000000000 attrs=\n\
    t-1 [0] ..... 6.9: map: IOMMU: iova=0x0000000000700000 - 0x0000000000701000 \
    paddr=0x0000000000042000 size=4096\n";

/// Returns the bases as files.
fn bases() -> &'static [Vec<u8>] {
    static FILES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    FILES.get_or_init(|| {
        let write = |base: &&'static [u8]| {
            let source = TraceSource::from_reader("base", *base).expect("text");
            let mut operations = Operations::new("base", source, TraceOptions::default());
            let mut file = Vec::new();
            write_parquet(&mut operations, &mut file).expect("a sound trace");
            file
        };
        BASES.iter().map(write).collect()
    })
}

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    let Some((base, rest)) = data.split_first() else {
        return;
    };
    let file = match usize::from(*base).checked_sub(1) {
        None => rest.to_vec(),
        Some(base) => edited(&bases()[base % BASES.len()], rest),
    };
    hush();
    SILENT.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(|| judge(&file, reached)));
    SILENT.set(false);
    if outcome.is_err() {
        panic!("{}", LAST.take());
    }
}

fn edited(base: &[u8], edits: &[u8]) -> Vec<u8> {
    let mut file = base.to_vec();
    let (edits, _) = edits.as_chunks::<4>();
    for [low, high, what, value] in edits {
        if file.is_empty() {
            break;
        }
        let at = usize::from(u16::from_le_bytes([*low, *high])) % file.len();
        match what % 4 {
            0 => file[at] = *value,
            1 => file[at] ^= value,
            2 => file.truncate(at),
            _ => file.insert(at, *value),
        }
    }
    file
}

thread_local! {
    static SILENT: Cell<bool> = const { Cell::new(false) };
    /// The last panic that was silenced.
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Installs a panic hook that is silent while `SILENT` is set.
fn hush() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let loud = take_hook();
        set_hook(Box::new(move |info| {
            if SILENT.get() {
                LAST.set(info.to_string());
            } else {
                loud(info);
            }
        }));
    });
}

/// Contents of a file.
type Read = (Vec<(Op, Vec<PhysRange>)>, usize);

fn judge(file: &[u8], reached: OutcomeHook<'_>) {
    match read(file) {
        Ok((ops, marks)) => {
            reached(if ops.is_empty() {
                "nothing"
            } else {
                "operations"
            });
            if marks > 0 {
                reached("marks");
            }
            if !file.starts_with(b"PAR1") {
                return;
            }
            // A valid file can be written again with the same contents.
            let mut again = Vec::new();
            let mut operations = open_bytes(file, TraceOptions::default()).expect("opened before");
            if write_parquet(&mut operations, &mut again).is_ok() {
                assert_eq!(read(&again).expect("just written"), (ops, marks));
            }
        }
        Err(TraceError::Parquet { problem, .. }) => {
            let _ = problem.to_string();
            reached(name(&problem));
        }
        // The file does not begin with the magic number of Parquet.
        Err(_) => {
            assert!(!file.starts_with(b"PAR1"));
            reached("text");
        }
    }
}

/// Opens an input as an unnamed file, because the reader accepts only files.
pub(crate) fn open_bytes(
    bytes: &[u8],
    options: TraceOptions,
) -> Result<Operations<TraceSource>, TraceError> {
    let file = memfd_create("trace.parquet", MemfdFlags::CLOEXEC).expect("a file in memory");
    let mut file = File::from(file);
    file.write_all(bytes).expect("a file in memory");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Operations::open(Path::new(&path), options)
}

/// Reads all operations and checks their guarantees.
fn read(bytes: &[u8]) -> Result<Read, TraceError> {
    let mut operations = open_bytes(bytes, TraceOptions::default())?;
    let mut chunk = Chunk::default();
    let mut live = Live::default();
    let mut ops = Vec::new();
    let mut marks = 0;
    loop {
        let more = operations.next_chunk(&mut chunk);
        for op in &chunk.ops {
            assert!(operations.devices().get(op.device).is_some(), "{op:?}");
            live.take(op, &chunk);
        }
        gather(&chunk, &mut ops);
        marks += chunk.marks.len();
        match more {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                assert!(
                    !operations
                        .next_chunk(&mut chunk)
                        .expect("an error is the end")
                );
                return Err(error);
            }
        }
    }
    let ids: Vec<_> = operations.live().collect();
    assert_eq!(ids, live.ids());
    Ok((ops, marks))
}

/// A variant added later has no name here, which the corpus test reports.
fn name(problem: &ParquetProblem) -> &'static str {
    match problem {
        ParquetProblem::Damaged { .. } => "Damaged",
        ParquetProblem::Metadata { .. } => "Metadata",
        ParquetProblem::Column { .. } => "Column",
        ParquetProblem::Compressed { .. } => "Compressed",
        ParquetProblem::TooLarge { .. } => "TooLarge",
        ParquetProblem::Limit { .. } => "Limit",
        ParquetProblem::Row { path, .. } => match *path {
            "time_ns" => "row: time_ns",
            "event" => "row: event",
            "device" => "row: device",
            "cpu" => "row: cpu",
            "lines" => "row: lines",
            "mapping" => "row: mapping",
            "direction" => "row: direction",
            "class" => "row: class",
            "flags" => "row: flags",
            "segments.list.element.phys_addr" => "row: phys_addr",
            "segments.list.element.bytes" => "row: bytes",
            "text" => "row: text",
            _ => "unknown column",
        },
        _ => "unknown problem",
    }
}
