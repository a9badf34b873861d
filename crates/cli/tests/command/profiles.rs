//! The bundled profiles, in `compare`, its help and the documents.

use std::fmt::Write as _;

use ringfence_lab::{IommuFamily, MachineProfile, Operation};
use serde_json::Value;

use crate::{Scratch, failed, ringfence, root, succeeded};

const ARGS: [&str; 6] = [
    "compare",
    "--modes",
    "none,fence",
    "--repeat",
    "1",
    "--profile",
];

fn compare(profile: &str, more: &[&str]) -> String {
    let args: Vec<&str> = ARGS
        .into_iter()
        .chain([profile])
        .chain(more.iter().copied())
        .collect();
    succeeded(&ringfence(&args))
}

fn fence(report: &Value) -> &Value {
    let rows = report["results"].as_array().unwrap();
    rows.iter().find(|row| row["mode"] == "fence").unwrap()
}

#[test]
fn help_lists_the_profiles() {
    let text = succeeded(&ringfence(&["compare", "--help"]));
    for profile in MachineProfile::builtin() {
        assert!(text.contains(&profile.name), "{}: {text}", profile.name);
    }
}

#[test]
fn the_device_side_is_compared() {
    let text = compare("cascade-lake-2024", &["--json"]);
    let report: Value = serde_json::from_str(&text).unwrap();
    let row = fence(&report);
    let reads = row["reads_per_page"].as_f64().unwrap();
    let ceiling = row["device_ceiling_gbps"].as_f64().unwrap();
    assert!(
        (ceiling - 32768.0 / (65.0 + 197.0 * reads)).abs() < 1e-6,
        "{ceiling}"
    );
    // The cost of an invalidation is unknown, and so is the processor's side.
    assert!(row["relative_throughput"].is_null() && row["limited_by"].is_null());
    let more = [
        "--json",
        "--operation",
        "page",
        "--invalidation-cycles",
        "2150",
    ];
    let report: Value = serde_json::from_str(&compare("cascade-lake-2024", &more)).unwrap();
    let row = fence(&report);
    assert!(row["limited_by"].is_string(), "{row}");
    let of = |side: &str| row[side].as_f64().unwrap();
    let smaller = of("processor_throughput").min(of("device_throughput"));
    assert_eq!(row["relative_throughput"], smaller);
    let text = compare("cascade-lake-2024", &[]);
    assert!(text.contains("Device side: page walks"), "{text}");
    let text = compare("cascade-lake-2024", &["--markdown"]);
    assert!(text.contains("### Device side: page walks"), "{text}");
}

#[test]
fn unknown_numbers_are_null_and_read_unknown() {
    let report: Value = serde_json::from_str(&compare("grace-2025", &["--json"])).unwrap();
    let profile = &report["profile"];
    for field in [
        "invalidation_cycles",
        "kick_cycles",
        "baseline_cycles",
        "iotlb_sets",
    ] {
        assert!(profile.as_object().unwrap().contains_key(field), "{field}");
        assert!(profile[field].is_null(), "{field}");
    }
    assert_eq!(profile["reported"][0]["strict"], 2.8);
    let row = fence(&report);
    assert!(
        row["unmap_cycles"].is_null() && row["modelled_cycles"].is_null(),
        "{row}"
    );
    assert!(row["map_cycles"].is_number(), "{row}");
    let text = compare("grace-2025", &[]);
    for part in [
        "No mode is recommended: profile grace-2025 does not state",
        "unknown number of cycles",
        "none 16.5, lazy 16.4, strict 2.8",
    ] {
        assert!(
            text.split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
                .contains(part),
            "{text}"
        );
    }
    // A condition on an unknown number cannot hold.
    let args: Vec<&str> = ARGS
        .into_iter()
        .chain(["grace-2025", "--fail-if", "fence:relative_throughput<2"])
        .collect();
    failed(&ringfence(&args), 2);
}

#[test]
fn a_profile_file_may_leave_numbers_out() {
    let scratch = Scratch::new("partial-profile");
    for (name, text, expected) in [
        ("empty", "", "missing field"),
        (
            "half",
            "name = 'x'\nsource = 'y'\niotlb_sets = 4\n",
            "give both, or neither",
        ),
        (
            "source",
            "name = 'x'\nsource = 'y'\n[sources]\nspeed = 'z'\n",
            "no such number",
        ),
        (
            "clock",
            "name = 'x'\nsource = 'y'\nclock_ghz = nan\n",
            "must be above 0",
        ),
        (
            "side",
            "name = 'x'\nsource = 'y'\n[device_side]\ntransfer_bytes = 1\ntransfer_ns = 1\n",
            "missing field",
        ),
    ] {
        let path = scratch.file(name, text.as_bytes());
        let mut args = ARGS.to_vec();
        args.push(&path);
        let text = failed(&ringfence(&args), 1);
        assert!(text.contains(expected), "{name}: {text}");
    }
    let path = scratch.file("nothing", b"name = 'x'\nsource = 'y'\n");
    let report: Value = serde_json::from_str(&compare(&path, &["--json"])).unwrap();
    assert!(report["profile"]["invalidation_cycles"].is_null());
}

/// The tables of `docs/PROFILES.md`, from the profiles.
fn tables() -> [String; 3] {
    let number = |value: Option<f64>| value.map_or("unknown".to_owned(), |v| v.to_string());
    let (mut costs, mut reported, mut sources) = (String::new(), String::new(), String::new());
    for profile in MachineProfile::builtin() {
        let cycles = |operation| {
            number(match operation {
                Operation::Packet => profile.baseline_cycles,
                Operation::BlockRequest => profile.block_request_cycles,
                Operation::Page => profile.page_cycles,
            })
        };
        let side = profile.device_side.map_or("unknown".to_owned(), |side| {
            format!(
                "p = {} bytes, l0 = {} ns, lm = {} ns, {} Gb/s",
                side.transfer_bytes, side.transfer_ns, side.read_ns, side.line_rate_gbps
            )
        });
        let [packet, request, page] = Operation::ALL.map(cycles);
        writeln!(
            costs,
            "| `{}` | {} | {} | {} | {packet} | {request} | {page} | {side} |",
            profile.name,
            profile.iommu.map_or("unknown", IommuFamily::name),
            number(profile.clock_ghz),
            number(profile.invalidation_cycles.map(|cycles| cycles as f64)),
        )
        .unwrap();
        for row in &profile.reported {
            writeln!(
                reported,
                "| `{}` | {} | {} | {} | {} | {} | {} |",
                profile.name,
                row.workload,
                row.unit,
                number(row.none),
                number(row.lazy),
                number(row.strict),
                row.source
            )
            .unwrap();
        }
        for (field, source) in &profile.sources {
            writeln!(sources, "| `{}` | `{field}` | {source} |", profile.name).unwrap();
        }
    }
    [costs, reported, sources]
}

#[test]
fn the_page_lists_every_number_and_its_source() {
    let text = std::fs::read_to_string(root().join("docs/PROFILES.md")).unwrap();
    for table in tables() {
        assert!(
            text.contains(&table),
            "docs/PROFILES.md needs the lines:\n{table}"
        );
    }
}
