//! A trace that is larger than the memory of the process is replayed. The file has one test,
//! because it measures the memory of its process.

mod common;

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use common::{Scratch, trace};
use ringfence_sweep::run;

/// Bytes of the text of an event that concerns no mapping.
const OTHER_EVENT: usize = 1000;

/// Writes `parts` times the same mappings, and other events between them. Returns the size.
fn write(path: &Path, parts: u64) -> u64 {
    let part = trace(2, 2000, 1);
    let other = "x".repeat(OTHER_EVENT);
    let mut file = BufWriter::new(File::create(path).unwrap());
    for number in 0..parts {
        for line in part.lines().filter(|line| !line.starts_with('#')) {
            // Each part begins at its own second.
            let (front, rest) = line.split_once("  1.").unwrap();
            let second = number + 1;
            writeln!(file, "{front}  {second}.{rest}").unwrap();
            let (prefix, _) = front.split_once(" .").unwrap();
            writeln!(
                file,
                "{prefix} .....  {second}.{}: console: {other}",
                &rest[..6]
            )
            .unwrap();
        }
    }
    file.flush().unwrap();
    fs::metadata(path).unwrap().len()
}

/// Returns the peak of the resident memory in bytes since the last call.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes: u64 = peak
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    fs::write("/proc/self/clear_refs", "5").unwrap();
    kilobytes << 10
}

#[test]
fn memory_does_not_grow_with_the_length_of_a_trace() {
    let scratch = Scratch::new();
    let peak_of = |parts| {
        let size = write(&scratch.path().join("t.txt"), parts);
        let tasks = scratch.tasks("traces = [\"t.txt\"]\nmodes = [\"linux-strict\"]\n");
        peak();
        let row = run(&tasks[0]).result.unwrap();
        assert_eq!(row.maps, 2000 * parts);
        (peak(), size)
    };
    let (short, _) = peak_of(1);
    let (long, size) = peak_of(24);
    assert!(
        long < size,
        "{long} bytes of memory for {size} bytes of text"
    );
    assert!(long < short + (8 << 20), "{short} bytes, then {long}");
}
