//! Compares trace-cmd's binary recordings with the output of `trace-cmd report` from the time of
//! the recording.
//!
//! The test needs trace-cmd, which `cargo xtask test` installs, and the shared traces (see
//! `shared.rs`). Without them it prints that it did not run, and fails if `CI` is set.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringfence_trace::{Chunk, Info, OpKind, Operations, TraceError, TraceOptions};

fn not_run(why: &str) {
    let text = format!("NOT RUN: {why}");
    assert!(std::env::var_os("CI").is_none(), "{text}");
    // Write directly to the terminal: the harness hides the output of tests that pass.
    let _ = writeln!(std::io::stderr().lock(), "\n{text}");
}

fn has_trace_cmd() -> bool {
    // `trace-cmd --version` of 3.1 prints its version and fails; a successful start is enough.
    let found = Command::new("trace-cmd").arg("--version").output().is_ok();
    if !found {
        not_run("trace-cmd is not installed");
    }
    found
}

fn recording() -> Option<(PathBuf, PathBuf)> {
    let folder = std::env::var_os("RINGFENCE_TRACES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces"),
        PathBuf::from,
    );
    let name = |ending: &str| folder.join(format!("dat/k612-e1000e-1s.{ending}"));
    let (binary, report) = (name("dat"), name("report.zst"));
    if binary.is_file() && report.is_file() {
        return Some((binary, report));
    }
    let shown = folder.display();
    not_run(&format!(
        "no recording under {shown}/dat; set RINGFENCE_TRACES"
    ));
    None
}

/// Returns all operations as text.
fn operations(path: &Path) -> Vec<String> {
    let mut operations = Operations::open(path, TraceOptions::default()).unwrap();
    let mut chunk = Chunk::default();
    let mut all = Vec::new();
    while operations.next_chunk(&mut chunk).unwrap() {
        all.extend(chunk.ops.iter().map(|op| match op.kind {
            OpKind::Map { segments, .. } => format!("{op:?} {:?}", chunk.segments_of(segments)),
            OpKind::Unmap { .. } => format!("{op:?}"),
        }));
    }
    all
}

fn info(path: &Path) -> serde_json::Value {
    let mut operations = Operations::open(path, TraceOptions::default()).unwrap();
    serde_json::to_value(Info::read(&mut operations).unwrap()).unwrap()
}

#[test]
fn a_binary_recording_reads_as_its_report() {
    let (true, Some((binary, report))) = (has_trace_cmd(), recording()) else {
        return;
    };
    let got = info(&binary);
    assert_eq!(got, info(&report));
    assert_eq!(got["map_events"], 12_014);
    let (got, wanted) = (operations(&binary), operations(&report));
    let differs = got.iter().zip(&wanted).position(|(a, b)| a != b);
    assert_eq!((got.len(), differs), (wanted.len(), None));
    assert!(got.len() > 20_000);
}

#[test]
fn a_cut_recording_is_an_error_and_not_an_empty_trace() {
    let (true, Some((binary, _))) = (has_trace_cmd(), recording()) else {
        return;
    };
    let bytes = std::fs::read(binary).unwrap();
    let cut = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cut.dat");
    // After the magic number; within the format descriptions; within the events.
    for length in [16, 4096, bytes.len() / 2, bytes.len() - 4096] {
        std::fs::write(&cut, &bytes[..length]).unwrap();
        let error = Operations::open(&cut, TraceOptions::default())
            .and_then(|mut operations| Info::read(&mut operations))
            .unwrap_err();
        let TraceError::TraceCmdFailed { file, message } = &error else {
            panic!("{length}: {error:?}");
        };
        assert_eq!(file, &cut);
        assert!(!message.is_empty(), "{length}");
    }
}
