//! Traces that request more than their size warrants. Each ends with an error that names the line
//! and the limit, or costs no more than its size.

use std::io::{self, Cursor, Read};

use ringfence_trace::{
    Anonymise, Chunk, Info, LimitExceeded, MARK_BYTES, Malformed, OpKind, Operations, TraceError,
    TraceOptions, TraceSource,
};

const GIB: u64 = 1 << 30;

fn read(text: impl Read, options: TraceOptions) -> Result<Vec<Chunk>, TraceError> {
    let mut operations = Operations::new("t", text, options);
    let mut chunks = Vec::new();
    let mut chunk = Chunk::default();
    while operations.next_chunk(&mut chunk)? {
        chunks.push(std::mem::take(&mut chunk));
    }
    Ok(chunks)
}

fn refusal(text: &str) -> (u64, LimitExceeded) {
    match read(text.as_bytes(), TraceOptions::default()) {
        Err(TraceError::Limit { line, excess, .. }) => (line, excess),
        other => panic!("{:?}", other.map(|chunks| chunks.len())),
    }
}

fn map(at: u64, bytes: u64) -> String {
    format!(
        "t-1 [000] ..... 1.0: dma_map_phys: d dir=TO_DEVICE dma_addr={at:x} size={bytes} \
         phys_addr={at:x} attrs=\n"
    )
}

#[test]
fn one_mapping_is_a_gibibyte_at_most() {
    let limit = GIB;
    let bytes = GIB + 1;
    let text = map(0, GIB) + &map(GIB, bytes);
    assert_eq!(refusal(&text), (2, LimitExceeded::Mapping { bytes, limit }));
    let sg = "t-1 [0] ..... 1.0: dma_map_sg: d dir=TO_DEVICE nents=2/2 ents=2/2 \
              dma_addrs={0x0,0x40000000} sizes={0x40000000,0x1} phys_addrs={0x0,0x40000000} \
              attrs=\n";
    assert_eq!(refusal(sg), (1, LimitExceeded::Mapping { bytes, limit }));
    let mut options = TraceOptions::default();
    options.limits.mapping = 2 * GIB;
    assert!(read(text.as_bytes(), options).is_ok());
}

#[test]
fn live_and_total_mappings_are_bounded() {
    // Lines without a mapping let 16 GiB be mapped.
    let idle = "t-1 [000] ..... 1.0: sched_switch: x\n".repeat(4096);
    let text: String = (0..17).map(|n| map(n * GIB, GIB)).collect();
    let limit = 16 * GIB;
    let refused = (4096 + 17, LimitExceeded::Live { limit });
    assert_eq!(refusal(&(idle + &text)), refused);
    // Each map replaces the previous one of the same memory.
    let text = map(0, GIB).repeat(10);
    let limit = 8 * GIB + 9 * (2 << 20);
    assert_eq!(refusal(&text), (9, LimitExceeded::Mapped { limit }));
}

#[test]
fn mappings_are_bounded_by_compressed_size() {
    let text: String = (0..80_000).map(|n| map(n * 4096, 1)).collect();
    // As plain text, every line allows a mapping.
    assert!(read(text.as_bytes(), TraceOptions::default()).is_ok());
    let packed = zstd::encode_all(text.as_bytes(), 19).unwrap();
    let limit = 65_536 + packed.len() as u64 / 8;
    assert!(limit < 80_000, "{}", packed.len());
    let source = TraceSource::from_reader("t", Cursor::new(packed)).unwrap();
    let mut operations = Operations::from_source("t", source, TraceOptions::default());
    match Info::read(&mut operations) {
        Err(TraceError::Limit { line, excess, .. }) => {
            assert_eq!(
                (line, excess),
                (limit + 1, LimitExceeded::Segments { limit })
            );
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_bomb_ends_where_its_text_is_too_much() {
    let line = "t-1 [000] ..... 1.0: sched_switch: x\n";
    let lines = (64 << 20) / line.len();
    let packed = zstd::encode_all(line.repeat(lines).as_bytes(), 3).unwrap();
    assert!(packed.len() < 100_000);
    let open = |max: Option<u64>| {
        let mut options = TraceOptions::default();
        options.limits.text = max;
        let source = TraceSource::from_reader("t", Cursor::new(packed.clone())).unwrap();
        Info::read(&mut Operations::from_source("t", source, options))
    };
    match open(None) {
        Err(TraceError::Limit { line, excess, .. }) => {
            let LimitExceeded::Text { limit } = excess else {
                panic!("{excess}");
            };
            assert!(limit <= (16 << 20) + 200 * packed.len() as u64);
            assert!(line > 1 && (line as usize) < lines);
            let message = excess.to_string();
            assert!(message.contains("--max-text"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(open(Some(64 << 20)).unwrap().lines, lines as u64);
}

#[test]
fn marks_are_cut_and_do_not_gather_in_one_chunk() {
    let long = format!(
        "t-1 [000] ..... 0.0: tracing_mark_write: {}\n",
        "A".repeat(60_000)
    );
    let mut seen = 0;
    let mut operations = Operations::new(
        "t",
        Repeated::new(long.as_bytes(), 9000),
        TraceOptions::default(),
    );
    let mut chunk = Chunk::default();
    while operations.next_chunk(&mut chunk).unwrap() {
        assert!(
            chunk.marks.len() <= 2 * Chunk::MARKS,
            "{}",
            chunk.marks.len()
        );
        assert!(chunk.marks.iter().all(|mark| mark.text.len() == MARK_BYTES));
        seen += chunk.marks.len();
    }
    assert_eq!(seen, 9000);
    // A trace that contains only marks exceeds the limit after this many lines.
    let mut options = TraceOptions::default();
    options.limits.marks = Some(10 << 20);
    let source = Repeated::new(b"t-1 [0] ..... 0.0: tracing_mark_write: x\n", 200_000);
    match read(source, options) {
        Err(TraceError::Limit { line, excess, .. }) => {
            let limit = 10 << 20;
            assert_eq!(
                (line, excess),
                (limit / 97 + 1, LimitExceeded::Marks { limit })
            );
        }
        other => panic!("{:?}", other.map(|chunks| chunks.len())),
    }
}

/// A byte string, repeated several times.
struct Repeated<'a>(&'a [u8], usize, usize);

impl<'a> Repeated<'a> {
    fn new(bytes: &'a [u8], times: usize) -> Self {
        Self(bytes, times, 0)
    }
}

impl Read for Repeated<'_> {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        if self.2 == self.0.len() {
            self.2 = 0;
            self.1 -= 1;
        }
        if self.1 == 0 {
            return Ok(0);
        }
        let count = space.len().min(self.0.len() - self.2);
        space[..count].copy_from_slice(&self.0[self.2..self.2 + count]);
        self.2 += count;
        Ok(count)
    }
}

#[test]
fn a_split_of_many_pieces_does_not_gather_in_one_chunk() {
    // 256 pieces of one call without a `dma:*` line form one mapping of 256 segments. Each unmap of
    // one page then leaves a remainder of all pieces above it.
    let mut text = map(0, 1);
    let at = |n: u64| (1 << 32) + n * 4096;
    for round in 0..64 {
        for n in 0..256 {
            let (iova, end, phys) = (at(n), at(n + 1), at(2 * n + 9));
            text += &format!(
                "t-1 [000] ..... 1.{round:03}: map: IOMMU: iova=0x{iova:016x} - 0x{end:016x} \
                 paddr=0x{phys:016x} size=4096\n"
            );
        }
        for n in 0..256 {
            let (iova, end) = (at(n), at(n + 1));
            text += &format!(
                "t-1 [000] ..... 2.0: unmap: IOMMU: iova=0x{iova:016x} - 0x{end:016x} size=4096 \
                 unmapped_size=4096\n"
            );
        }
    }
    let chunks = read(text.as_bytes(), TraceOptions::default()).unwrap();
    let most = chunks.iter().map(|chunk| chunk.segments.len()).max();
    assert!(most.unwrap() <= Chunk::SEGMENTS + 512 * 256, "{most:?}");
    assert!(chunks.len() > 4, "the trace is long enough to show it");
}

#[test]
fn a_stream_without_line_ends_is_refused() {
    for lenient in [false, true] {
        for byte in [0, b'x'] {
            let mut options = TraceOptions::default();
            options.lenient = lenient;
            let mut operations = Operations::new("t", io::repeat(byte), options);
            let error = operations.next_chunk(&mut Chunk::default()).unwrap_err();
            let TraceError::Malformed { reason, .. } = error else {
                panic!("{error}");
            };
            let limit = 1 << 20;
            assert_eq!(reason, Malformed::TooLong { limit });
        }
    }
}

/// The mappings of one key form a doubly linked list. Removing the youngest must not walk the list:
/// with 400,000 mappings, one walk each would take hours.
#[test]
fn the_youngest_of_many_equal_lists_is_replaced_at_once() {
    let count = 200_000;
    let sg = |at: u64| {
        format!(
            "t-1 [000] ..... 1.0: dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=1/1 \
             dma_addrs={{0x{at:x}}} sizes={{0x1000}} phys_addrs={{0x1000}} attrs=\n"
        )
    };
    let mut text: String = (1..=count).map(|n| sg(n << 12)).collect();
    for _ in 0..count {
        text += &sg(count << 12);
    }
    text += "t-1 [000] ..... 1.0: dma_unmap_sg: d dir=TO_DEVICE phys_addrs={0x1000} attrs=\n";
    let chunks = read(text.as_bytes(), TraceOptions::default()).unwrap();
    let ops = chunks.iter().flat_map(|chunk| &chunk.ops);
    let unmaps: Vec<_> = ops
        .filter_map(|op| match op.kind {
            OpKind::Unmap { id } => Some(id.index() as u64),
            OpKind::Map { .. } => None,
        })
        .collect();
    let (last, replaced) = unmaps.split_last().unwrap();
    assert_eq!(replaced.len() as u64, count);
    assert!(replaced.iter().all(|&id| id == count - 1));
    assert_eq!(*last, 0, "the oldest is unmapped first");
}

/// The window searches only the CPUs with waiting lines, not all CPUs of the trace. Searching 65536
/// CPUs for each line would take minutes.
#[test]
fn processors_without_waiting_lines_cost_nothing() {
    let mut text = String::new();
    for cpu in 0..=u16::MAX {
        text += &format!(
            "t-1 [{cpu}] ..... 1.0: dma_sync_single_for_cpu: d dir=TO_DEVICE dma_addr=1 size=1 \
            attrs=\n"
        );
    }
    for n in 0..100_000_u64 {
        text += &format!(
            "t-1 [9] ..... 2.0: unmap: IOMMU: iova=0x{0:016x} - 0x{1:016x} size=4096 \
            unmapped_size=4096\n",
            n << 12,
            (n + 1) << 12
        );
    }
    assert!(read(text.as_bytes(), TraceOptions::default()).is_ok());
}

#[test]
fn other_compressions_name_the_program_that_reads_them() {
    for (head, program) in [
        (&b"\x1f\x8b\x08\0\0\0\0\0\0\x03"[..], "zcat"),
        (b"\xfd7zXZ\0\0\x04\xe6\xd6\xb4", "xzcat"),
        (b"BZh91AY&SY", "bzcat"),
    ] {
        let error = TraceSource::from_reader("t.gz", head)
            .unwrap_err()
            .to_string();
        assert!(error.contains(&format!("`{program} t.gz |")), "{error}");
    }
}

#[test]
fn a_byte_order_mark_is_no_part_of_the_first_line() {
    for first in ["# tracer: nop\n", ""] {
        let text = format!("\u{feff}{first}{}", map(4096, 1));
        let chunks = read(text.as_bytes(), TraceOptions::default()).unwrap();
        assert_eq!(chunks[0].ops.len(), 1);
    }
}

#[test]
fn names_and_marks_cannot_steer_a_terminal() {
    let text = "t-1 [0] ..... 1.0: tracing_mark_write: \u{1b}[2J\n\
                t-1 [0] ..... 1.0: dma_map_phys: \u{1b}]0;owned\u{7} dir=TO_DEVICE dma_addr=1000 \
                size=1 phys_addr=1000 attrs=\n";
    let mut operations = Operations::new("t", text.as_bytes(), TraceOptions::default());
    let info = Info::read(&mut operations).unwrap();
    assert_eq!(info.devices[0].name, "\\u{1b}]0;owned\\u{7}");
    assert_eq!(info.marks[0].1, "\\u{1b}[2J");
    assert!(!info.to_string().contains('\u{1b}'));
}

/// The seed also hides the address of a stray unmap. Without it, nobody can tabulate the new
/// address of every page of a machine's memory.
#[test]
fn strays_of_two_seeds_differ() {
    let text = "t-7 [000] ..... 5.0: dma_map_phys: 0000:00:03.0 dir=TO_DEVICE dma_addr=10f305000 \
                size=4096 phys_addr=10f305000 attrs=\n\
                t-7 [000] ..... 5.1: dma_unmap_phys: 0000:00:03.0 dir=TO_DEVICE \
                dma_addr=23b7654c80 size=90 attrs=\n";
    let run = |seed| {
        let anonymise = Anonymise {
            seed,
            from_zero: true,
        };
        let mut out = Vec::new();
        let (first, second) = (text.as_bytes(), text.as_bytes());
        let options = TraceOptions::default();
        anonymise
            .run("t", first, second, &options, &mut out)
            .unwrap();
        let text = String::from_utf8(out).unwrap();
        let unexplained_line = text.lines().find(|line| line.contains("unmap")).unwrap();
        let (_, rest) = unexplained_line.split_once("dma_addr=").unwrap();
        rest.split(' ').next().unwrap().to_owned()
    };
    let unexplained: std::collections::BTreeSet<String> = (0..16).map(run).collect();
    assert_eq!(unexplained.len(), 16, "{unexplained:?}");
    assert_eq!(run(3), run(3));
}
