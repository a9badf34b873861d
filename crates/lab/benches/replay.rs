//! Events per second of the metered pass with the oracle, for each mode:
//! `cargo bench -p ringfence-lab --bench replay [-- TRACE]`.
//!
//! The benchmark counts the trace lines that the operations stand for, iommu lines included.
//! Parsing is not timed. Modes are interleaved. The output is the median of the repetitions, their
//! spread, and the ratio to `none` of the same run.

use std::path::PathBuf;
use std::time::Instant;

use ringfence_lab::compare::{CompareOptions, runner};
use ringfence_lab::modes::Mode;
use ringfence_lab::plan::{Plan, Planner};
use ringfence_trace::{Chunk, Operations, SAMPLE, TraceError, TraceOptions};

const REPETITIONS: usize = 5;

struct Input {
    chunks: Vec<Chunk>,
    lines: u64,
    devices: ringfence_trace::Devices,
}

fn read<R: std::io::Read>(mut operations: Operations<R>) -> Result<Input, TraceError> {
    let mut chunks = Vec::new();
    let mut chunk = Chunk::default();
    let mut more = true;
    while more {
        more = operations.next_chunk(&mut chunk)?;
        chunks.push(chunk.clone());
    }
    let lines = chunks
        .iter()
        .flat_map(|chunk| &chunk.ops)
        .map(|op| u64::from(op.lines))
        .sum();
    Ok(Input {
        chunks,
        lines,
        devices: operations.devices().clone(),
    })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().skip(1).find(|arg| !arg.starts_with("--"));
    let input = match path.map(PathBuf::from) {
        Some(path) => read(Operations::open(&path, TraceOptions::default())?)?,
        None => {
            let source = ringfence_trace::TraceSource::from_reader("sample", SAMPLE)?;
            read(Operations::new("sample", source, TraceOptions::default()))?
        }
    };
    let options = CompareOptions {
        repetitions: 0,
        attack: false,
        ..CompareOptions::default()
    };
    let modes = Mode::named();
    let mut seconds = vec![Vec::new(); modes.len()];
    for _ in 0..REPETITIONS {
        for (mode, seconds) in modes.iter().zip(&mut seconds) {
            let mut runner = runner(mode, &options)?;
            let mut planner = Planner::new();
            let mut plan = Plan::default();
            let start = Instant::now();
            for chunk in &input.chunks {
                planner.plan(chunk, &mut plan)?;
                runner.metered.run(&plan, &input.devices)?;
            }
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    println!("{} lines, median of {REPETITIONS} interleaved", input.lines);
    println!(
        "{:16} {:>12} {:>10} {:>9}",
        "mode", "M events/s", "/ none", "spread"
    );
    let mut none = None;
    for (mode, seconds) in modes.iter().zip(&mut seconds) {
        seconds.sort_by(f64::total_cmp);
        let median = seconds[REPETITIONS / 2];
        let none = *none.get_or_insert(median);
        println!(
            "{:16} {:12.2} {:10.2} {:8.0}%",
            mode.name,
            input.lines as f64 / median / 1e6,
            none / median,
            (seconds[REPETITIONS - 1] - seconds[0]) / median * 100.0
        );
    }
    Ok(())
}
