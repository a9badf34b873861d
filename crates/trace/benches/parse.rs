//! Compares the speed of converting text to raw events with a simple reader: lines, split, parse.
//!
//! `cargo bench -p ringfence-trace` prints, for the traces of a NIC and disks, the GB/s of both
//! readers and their ratio, as medians of interleaved repetitions. `RINGFENCE_TRACES` names the
//! folder of the shared traces; without them the benchmark repeats the bundled sample.

use std::hint::black_box;
use std::io::{BufRead, Read};
use std::path::PathBuf;
use std::time::Instant;

use ringfence_trace::text::{RawChunk, TraceReader};
use ringfence_trace::{Chunk, Operations, SAMPLE, TraceOptions, TraceSource};

const ROUNDS: usize = 9;

fn main() {
    for name in [
        "t1-e1000e-tcp-tx",
        "t1-ahci-seqwrite128k",
        "t1-nvme-seqwrite128k",
    ] {
        let text = load(name);
        let mut times = [const { Vec::new() }; 3];
        let mut events = [0u64; 3];
        for _ in 0..ROUNDS {
            for (index, run) in [ours, split_and_parse, operations].into_iter().enumerate() {
                let start = Instant::now();
                events[index] = black_box(run(&text));
                times[index].push(start.elapsed().as_secs_f64());
            }
        }
        let rate = |times: &[f64]| text.len() as f64 / median(times) / 1e9;
        assert_eq!(events[0], events[1], "both readers see the same events");
        let [ours, naive, operations] = times;
        let spread = |times: &[f64]| {
            let least = times.iter().copied().fold(f64::MAX, f64::min);
            let most = times.iter().copied().fold(0.0, f64::max);
            (most - least) / median(times) * 100.0
        };
        println!(
            "{name}: {} MB, {} events; reader {:.2} GB/s (best {:.2}, {:.1} M events/s, spread \
            {:.0}%), split-and-parse {:.2} GB/s (spread {:.0}%), ratio {:.1}; to operations {:.2} \
            GB/s ({:.1} M events/s)",
            text.len() / 1_000_000,
            events[0],
            rate(&ours),
            text.len() as f64 / ours.iter().copied().fold(f64::MAX, f64::min) / 1e9,
            events[0] as f64 / median(&ours) / 1e6,
            spread(&ours),
            rate(&naive),
            spread(&naive),
            median(&naive) / median(&ours),
            rate(&operations),
            events[0] as f64 / median(&operations) / 1e6,
        );
    }
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn load(name: &str) -> Vec<u8> {
    let folder = std::env::var_os("RINGFENCE_TRACES").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces"),
        PathBuf::from,
    );
    let path = folder.join(format!("raw/{name}.trace.zst"));
    let mut text = Vec::new();
    match TraceSource::open(&path) {
        Ok(mut source) => {
            source.read_to_end(&mut text).expect("a readable trace");
        }
        Err(error) => {
            println!("{error}: the bundled sample is used");
            let mut once = Vec::new();
            let mut source = TraceSource::from_reader("sample", SAMPLE).expect("a sound sample");
            source.read_to_end(&mut once).expect("a sound sample");
            while text.len() < 30_000_000 {
                text.extend_from_slice(&once);
            }
        }
    }
    text
}

fn ours(text: &[u8]) -> u64 {
    let mut reader = TraceReader::new("bench", text, &TraceOptions::default());
    let mut chunk = RawChunk::default();
    while reader.next_chunk(&mut chunk).expect("a sound trace") {
        black_box(&chunk);
    }
    reader.counts().events
}

fn operations(text: &[u8]) -> u64 {
    let mut operations = Operations::new("bench", text, TraceOptions::default());
    let mut chunk = Chunk::default();
    while operations.next_chunk(&mut chunk).expect("a sound trace") {
        black_box(&chunk);
    }
    operations.summary().events
}

/// Contents of an event that the simple reader keeps.
#[allow(dead_code, reason = "built to be paid for, as the real one is")]
enum Simple {
    Range {
        device: String,
        direction: String,
        dma: u64,
        size: u64,
        phys: u64,
    },
    Lists {
        device: String,
        direction: String,
        dma: Vec<u64>,
        sizes: Vec<u64>,
        phys: Vec<u64>,
    },
    Iommu {
        iova: u64,
        phys: u64,
        size: u64,
    },
    Other,
}

/// The simple reader: lines, `split_whitespace`, `split_once('=')`, `from_str_radix`.
fn split_and_parse(text: &[u8]) -> u64 {
    let mut events = 0;
    for line in text.lines() {
        let line = line.expect("UTF-8");
        if line.starts_with('#') || line.trim().is_empty() {
            continue;
        }
        let (prefix, rest) = line.split_once(": ").expect("a prefix");
        let mut columns = prefix.split_whitespace().rev();
        let time: f64 = columns
            .next()
            .and_then(|time| time.parse().ok())
            .expect("a time");
        let cpu = columns.find(|column| column.starts_with('['));
        let cpu = cpu.map(|cpu| cpu.trim_matches(['[', ']']).parse::<u16>());
        black_box((time, cpu));
        let (event, payload) = rest.split_once(':').expect("an event");
        let words: Vec<&str> = payload.split_whitespace().collect();
        let value = |key: &str| {
            let mut pairs = words.iter().filter_map(|word| word.split_once('='));
            let found = pairs.find(|(name, _)| *name == key);
            found.map(|(_, value)| value.to_owned()).unwrap_or_default()
        };
        let hex =
            |key: &str| u64::from_str_radix(value(key).trim_start_matches("0x"), 16).unwrap_or(0);
        let decimal = |key: &str| value(key).parse().unwrap_or(0);
        let list = |key: &str| -> Vec<u64> {
            let text = value(key);
            let entries = text.trim_matches(['{', '}']).split(',');
            entries
                .filter_map(|entry| u64::from_str_radix(entry.trim_start_matches("0x"), 16).ok())
                .collect()
        };
        let device = || words.first().copied().unwrap_or("").to_owned();
        black_box(match event {
            "map" | "unmap" => Simple::Iommu {
                iova: hex("iova"),
                phys: hex("paddr"),
                size: decimal("size"),
            },
            "dma_map_sg" | "dma_unmap_sg" => Simple::Lists {
                device: device(),
                direction: value("dir"),
                dma: list("dma_addrs"),
                sizes: list("sizes"),
                phys: list("phys_addrs"),
            },
            event if event.starts_with("dma_") => Simple::Range {
                device: device(),
                direction: value("dir"),
                dma: hex("dma_addr"),
                size: decimal("size"),
                phys: hex("phys_addr"),
            },
            _ => Simple::Other,
        });
        events += 1;
    }
    events
}
