//! Compares the operations of small real traces with stored results. `BLESS=1` rewrites them.

use std::fmt::Write;
use std::path::Path;

use ringfence_trace::{Chunk, Info, MapClass, OpKind, Operations, TraceOptions};

/// FNV-1a over the debug text of all operations; it changes with any operation.
fn fingerprint(hash: &mut u64, text: &str) {
    for byte in text.bytes() {
        *hash = (*hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
}

fn describe(path: &Path) -> String {
    let mut operations = Operations::open(path, TraceOptions::default()).unwrap();
    let mut chunk = Chunk::default();
    let mut hash = 0xcbf2_9ce4_8422_2325;
    let mut classes = [(0u64, 0u64); 4];
    let mut out = String::new();
    let mut shown = 0;
    while operations.next_chunk(&mut chunk).unwrap() {
        for op in &chunk.ops {
            let text = match op.kind {
                OpKind::Map { segments, .. } => format!("{op:?} {:?}", chunk.segments_of(segments)),
                OpKind::Unmap { .. } => format!("{op:?}"),
            };
            fingerprint(&mut hash, &text);
            if let OpKind::Map {
                class, segments, ..
            } = op.kind
            {
                let index = MapClass::ALL.iter().position(|&one| one == class).unwrap();
                classes[index].0 += 1;
                classes[index].1 += u64::from(segments.count);
                // Show the first of each class in full.
                if classes[index].0 == 1 || (segments.count > 1 && shown < 3) {
                    shown += 1;
                    writeln!(out, "{text}").unwrap();
                }
            }
        }
    }
    writeln!(
        out,
        "(maps, segments) by class {:?}: {classes:?}",
        MapClass::ALL
    )
    .unwrap();
    writeln!(out, "operations {hash:016x}").unwrap();
    writeln!(out, "{:#?}", operations.summary()).unwrap();
    let info = Info::read(&mut Operations::open(path, TraceOptions::default()).unwrap()).unwrap();
    writeln!(out, "{info}").unwrap();
    out
}

#[test]
fn small_real_traces_match_their_golden_files() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let mut traces = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "zst") {
            continue;
        }
        traces += 1;
        let expected = path.with_extension("expected");
        let got = describe(&path);
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&expected, &got).unwrap();
        }
        let wanted = std::fs::read_to_string(&expected).unwrap_or_default();
        assert_eq!(got, wanted, "{}; BLESS=1 accepts it", path.display());
    }
    assert_eq!(traces, 8);
}

#[test]
fn perf_script_gives_the_operations_of_tracefs() {
    // perf prints no flags, so only the process identifies a context. The pairing must give the
    // same result.
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/ahci-7.2.trace.zst");
    let mut text = String::new();
    let mut source = ringfence_trace::TraceSource::open(&path).unwrap();
    std::io::Read::read_to_string(&mut source, &mut text).unwrap();
    let mut perf = String::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (task, rest) = line.split_at(line.find('[').unwrap());
        let (comm, pid) = task.trim().rsplit_once('-').unwrap();
        let (cpu, rest) = rest.split_once(' ').unwrap();
        let (_, rest) = rest.split_once(' ').unwrap();
        let (time, event) = rest.trim().split_once(": ").unwrap();
        let system = match event.split(':').next().unwrap() {
            "map" | "unmap" => "iommu:",
            name if name.starts_with("dma_") => "dma:",
            _ => "",
        };
        writeln!(
            perf,
            "{comm:>16} {pid:>5} {cpu} {time:>12}:   {system}{event}"
        )
        .unwrap();
    }
    let run = |text: &str| {
        let mut operations = Operations::new("x", text.as_bytes(), TraceOptions::default());
        let mut chunk = Chunk::default();
        let mut all = Vec::new();
        while operations.next_chunk(&mut chunk).unwrap() {
            for op in &chunk.ops {
                let segments = match op.kind {
                    OpKind::Map { segments, .. } => chunk.segments_of(segments).to_vec(),
                    OpKind::Unmap { .. } => Vec::new(),
                };
                all.push((op.time, op.device, op.cpu, op.lines, segments));
            }
        }
        all
    };
    let (tracefs, perf) = (run(&text), run(&perf));
    assert!(tracefs.len() > 200);
    assert_eq!(tracefs, perf);
}
