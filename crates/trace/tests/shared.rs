//! Compares every shared trace with two independent counts: `tests/independent/count.py` and
//! `index.json`.
//!
//! The traces are outside the repository: in `RINGFENCE_TRACES`, or in `../shared/traces` next to
//! it. Without them the test prints that it did not run, and fails if `CI` is set.

use std::path::{Path, PathBuf};
use std::process::Command;

use ringfence_trace::{Info, Operations, TraceOptions};
use serde_json::Value;

fn folder() -> Option<PathBuf> {
    let folder = std::env::var_os("RINGFENCE_TRACES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces"),
        PathBuf::from,
    );
    if folder.join("index.json").is_file() {
        return Some(folder);
    }
    let text = format!(
        "NOT RUN: no shared traces at {}; set RINGFENCE_TRACES",
        folder.display()
    );
    assert!(std::env::var_os("CI").is_none(), "{text}");
    // Write directly to the terminal: the harness hides the output of tests that pass.
    use std::io::Write;
    let _ = writeln!(std::io::stderr().lock(), "\n{text}");
    None
}

fn info(path: &Path) -> Info {
    let mut operations = Operations::open(path, TraceOptions::default()).expect("a sound trace");
    Info::read(&mut operations).expect("a sound trace")
}

/// Returns the counts of `Info` in the format of the script.
fn as_counted(info: &Info) -> Value {
    let flows = || {
        let dma = |flow: &&_| {
            matches!(
                flow,
                ringfence_trace::Flow {
                    iommu_only: false,
                    unmaps: 1..,
                    ..
                }
            )
        };
        let devices = info.devices.iter();
        devices.flat_map(move |device| {
            let flows = device.flows.iter().filter(dma);
            flows.map(move |flow| {
                let direction = flow.direction.to_uppercase().replace('-', "_");
                (format!("{} {direction}", device.name), flow)
            })
        })
    };
    let ring: serde_json::Map<String, Value> = flows()
        .map(|(key, flow)| (key, serde_json::json!([flow.unmaps, flow.oldest_first])))
        .collect();
    let bursts: serde_json::Map<String, Value> = flows()
        .map(|(key, flow)| {
            let bursts = &flow.bursts;
            (
                key,
                serde_json::json!([bursts.count, bursts.unmaps, bursts.max.unwrap_or(0)]),
            )
        })
        .collect();
    let pages = |pages: &ringfence_trace::Pages| {
        serde_json::json!({
            "distinct": pages.distinct,
            "touches": pages.touches
        })
    };
    serde_json::json!({
        "lines": info.lines,
        "events": info.events,
        "map_events": info.map_events,
        "unmap_events": info.unmap_events,
        "allocs": info.allocs,
        "frees": info.frees,
        "iommu_map": info.iommu_map,
        "iommu_unmap": info.iommu_unmap,
        "unmatched_unmaps": info.unmatched_unmaps,
        "replaced": info.replaced,
        "duration_us": info.duration_ns / 1000,
        "live_at_end": info.live_at_end,
        "max_live": info.max_live,
        "dma_pages": pages(&info.dma_pages),
        "iommu_pages": pages(&info.iommu_pages),
        "ring": ring,
        "bursts": bursts,
    })
}

#[test]
fn info_equals_the_independent_count_and_the_index() {
    let Some(folder) = folder() else { return };
    let index = std::fs::read_to_string(folder.join("index.json")).expect("index.json");
    let index: Vec<Value> = serde_json::from_str(&index).expect("index.json");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/independent/count.py");
    assert!(index.len() >= 39, "{} traces", index.len());
    // One after another would take minutes; run as many at once as there are CPUs.
    let next = std::sync::Mutex::new(index.iter());
    let at_once = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(entry) = { next.lock().expect("nobody panics with it").next() } {
                    agrees(&folder, &script, entry);
                }
            });
        }
    });
}

fn agrees(folder: &Path, script: &Path, entry: &Value) {
    let name = entry["name"].as_str().expect("a name");
    let path = folder.join(entry["file"].as_str().expect("a file"));
    let info = info(&path);
    let output = Command::new("python3").arg(script).arg(&path).output();
    let output = output.expect("python3 and zstd are installed");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let mut counted: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    counted.as_object_mut().expect("an object").remove("trace");
    assert_eq!(
        as_counted(&info),
        counted,
        "{name}: against the independent count"
    );

    let window = &entry["file_window"];
    let ours = [
        ("map_events", info.map_events),
        ("unmap_events", info.unmap_events),
        ("iommu_map", info.iommu_map),
        ("iommu_unmap", info.iommu_unmap),
        ("distinct_pages", info.dma_pages.distinct),
        ("live_at_end", info.live_at_end),
        ("unmatched_unmaps", info.unmatched_unmaps),
    ];
    for (key, ours) in ours {
        assert_eq!(
            window[key].as_u64(),
            Some(ours),
            "{name}: {key} against the index"
        );
    }
    let seconds = window["duration_s"].as_f64().expect("a duration");
    let off = (seconds - info.duration_ns as f64 / 1e9).abs();
    assert!(off <= 0.000_501, "{name}: duration");
    if entry["trimmed"] == Value::Bool(false) {
        assert_eq!(
            entry["max_live"].as_u64(),
            Some(info.max_live),
            "{name}: max_live"
        );
        let full = &entry["full"];
        assert_eq!(
            full["page_touches"].as_u64(),
            Some(info.dma_pages.touches),
            "{name}"
        );
        let iommu_basis = entry["page_basis"]
            .as_str()
            .is_some_and(|basis| basis.starts_with("iommu"));
        let pages = match iommu_basis {
            true => info.iommu_pages,
            false => info.dma_pages,
        };
        assert_eq!(
            entry["distinct_pages"].as_u64(),
            Some(pages.distinct),
            "{name}"
        );
        let reuse = entry["reuse_per_page"].as_f64().expect("a number");
        assert!(
            (reuse - pages.reuse()).abs() <= 0.005_1,
            "{name}: reuse {reuse} {}",
            pages.reuse()
        );
    }
}
