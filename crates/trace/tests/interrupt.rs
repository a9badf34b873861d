//! Reads that end early, positions of errors, and bursts one by one.
#![cfg(feature = "parquet")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ringfence_trace::{
    Chunk, FlowBursts, Info, Interrupt, Operations, TraceError, TraceOptions, write_parquet,
};

fn options(interrupt: Interrupt) -> TraceOptions {
    let mut options = TraceOptions::default();
    options.interrupt = interrupt;
    options
}

/// Returns the number of chunks before the error.
fn chunks_until_error(path: &Path, interrupt: Interrupt) -> (usize, TraceError) {
    let mut operations = Operations::open(path, options(interrupt)).unwrap();
    let mut chunk = Chunk::default();
    let mut chunks = 0;
    loop {
        match operations.next_chunk(&mut chunk) {
            Ok(true) => chunks += 1,
            Ok(false) => panic!("the read did not end early"),
            Err(error) => {
                assert!(
                    !operations.next_chunk(&mut chunk).unwrap(),
                    "the error is the end"
                );
                return (chunks, error);
            }
        }
    }
}

#[test]
fn an_interrupt_ends_the_read_of_text_and_of_parquet() {
    let directory = tempfile::tempdir().unwrap();
    let line = "a-1 [000] ..... 1.000000: dma_map_phys: d dir=TO_DEVICE dma_addr=1000 size=64 \
        phys_addr=5000 attrs=\n";
    let text = directory.path().join("long.txt");
    std::fs::write(&text, line.repeat(100_000)).unwrap();
    let parquet = directory.path().join("long.parquet");
    let mut operations = Operations::open(&text, TraceOptions::default()).unwrap();
    write_parquet(&mut operations, std::fs::File::create(&parquet).unwrap()).unwrap();
    for path in [text, parquet] {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let third = Interrupt::new(move || count.fetch_add(1, Ordering::Relaxed) == 2);
        let (chunks, error) = chunks_until_error(&path, third);
        let file = path.display().to_string();
        assert_eq!(error.to_string(), format!("{file}: interrupted"));
        assert!(matches!(error, TraceError::Interrupted { file: name } if name == file));
        assert_eq!(asked.load(Ordering::Relaxed), 3);
        assert!(chunks <= 3, "{chunks}");
    }
}

#[test]
fn an_error_has_its_file_and_line() {
    let text = "# comment\na-1 [000] ..... 1.000000: dma_map_phys: d dir=SIDEWAYS\n";
    let mut operations = Operations::new("x.txt", text.as_bytes(), TraceOptions::default());
    let error = Info::read(&mut operations).unwrap_err();
    assert_eq!((&*error.file(), error.line()), ("x.txt", Some(2)));

    let error = Operations::open(Path::new("no/such"), TraceOptions::default()).unwrap_err();
    assert_eq!((&*error.file(), error.line()), ("no/such", None));
}

#[test]
fn bursts_are_those_that_info_counts() {
    let sample = || Operations::sample(TraceOptions::default()).unwrap();
    let info = Info::read(&mut sample()).unwrap();
    let mut counts: BTreeMap<(u16, String, bool), (u64, u64, u64)> = BTreeMap::new();
    let mut operations = sample();
    let mut chunk = Chunk::default();
    let mut bursts = FlowBursts::default();
    let mut found = Vec::new();
    while operations.next_chunk(&mut chunk).unwrap() {
        found.extend(chunk.ops.iter().filter_map(|op| bursts.add(op)));
    }
    found.extend(bursts.finish());
    for flow in &found {
        let burst = flow.burst;
        assert!(burst.first_ns <= burst.last_ns && burst.unmaps > 0);
        let key = (flow.device.0, flow.direction.to_string(), flow.iommu_only);
        let count = counts.entry(key).or_default();
        *count = (
            count.0 + 1,
            count.1 + burst.unmaps,
            count.2.max(burst.unmaps),
        );
    }
    let mut expected = BTreeMap::new();
    for (device, flows) in (0u16..).zip(&info.devices) {
        for flow in flows.flows.iter().filter(|flow| flow.bursts.count > 0) {
            let key = (device, flow.direction.clone(), flow.iommu_only);
            let bursts = flow.bursts;
            expected.insert(key, (bursts.count, bursts.unmaps, bursts.max.unwrap()));
        }
    }
    assert!(!expected.is_empty());
    assert_eq!(counts, expected);
}
