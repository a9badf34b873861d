//! The JSON form: stable, and documented field by field.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::{Scratch, ringfence, root, succeeded};

fn report(more: &[&str]) -> Value {
    let args = [
        "compare",
        "--json",
        "--repeat",
        "1",
        "--modes",
        "linux-lazy,fence",
    ];
    let args: Vec<&str> = args.iter().chain(more).copied().collect();
    serde_json::from_str(&succeeded(&ringfence(&args))).unwrap()
}

fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

/// Names of all fields, at any depth.
fn names(value: &Value, out: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                out.insert(name.clone());
                names(value, out);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| names(item, out)),
        _ => {}
    }
}

#[test]
fn the_form_is_stable() {
    let report = report(&[]);
    assert_eq!(report["schema"], 3);
    assert_eq!(
        keys(&report),
        [
            "schema",
            "version",
            "profile",
            "iommu",
            "operation",
            "walkers",
            "measured_on",
            "repetitions",
            "attack",
            "modes",
            "modes_omitted",
            "traces",
            "results",
            "line_rates"
        ]
    );
    let row = keys(&report["results"][0]);
    // Fields that version 3 promises; others may follow.
    for field in [
        "trace",
        "mode",
        "safety",
        "bound",
        "status",
        "maps",
        "unmaps",
        "map_cycles",
        "unmap_cycles",
        "components",
        "modelled_share",
        "relative_throughput",
        "search_steps_mean",
        "search_steps_max",
        "invalidations",
        "iotlb_hit_rate",
        "walk_cache_hit_rate",
        "words_per_walk",
        "live_mappings_max",
        "table_bytes",
        "accesses",
        "attack_accesses",
        "violations",
        "colocated",
        "false_faults",
        "stale_window_max_ns",
        "stale_byte_seconds",
        "release_delay_max_ns",
        "live_mappings_at_end",
    ] {
        assert!(row.contains(&field), "{field}");
    }
    assert_eq!(
        keys(&report["results"][0]["violations"]),
        ["stale", "never", "direction", "foreign", "total"]
    );
}

/// A trace in which a device sends a message and receives one, `count` times.
fn round_trips(count: u64) -> String {
    round_trips_of(count, 100)
}

/// The same with `us` microseconds between two messages.
fn round_trips_of(count: u64, us: u64) -> String {
    let call = |name: &str, time: u64, direction: &str, at: u64, more: &str| {
        format!(
            "t-1 [000] ..... {}.{:06}: {name}: d dir={direction} dma_addr={at:x} size=64{more} \
             attrs=\n",
            1 + time / 1_000_000,
            time % 1_000_000
        )
    };
    (0..count)
        .map(|round| {
            let time = round * us;
            [
                call("dma_map_phys", time, "TO_DEVICE", 4096, " phys_addr=1000"),
                call("dma_unmap_phys", time + 1, "TO_DEVICE", 4096, ""),
                call(
                    "dma_map_phys",
                    time + 2,
                    "FROM_DEVICE",
                    8192,
                    " phys_addr=2000",
                ),
                call("dma_unmap_phys", time + 90, "FROM_DEVICE", 8192, ""),
            ]
            .concat()
        })
        .collect()
}

const HYBRID: &str = "alloc=shadow-or-map,table=cached-radix,flush=transmit-batch";

#[test]
fn the_sizes_of_copied_buffers_are_printed() {
    let printed = |more: &[&str]| report(more)["thresholds"].clone();
    assert_eq!(printed(&[]), Value::Null);
    let known = printed(&["--mode", HYBRID]);
    assert_eq!(known[0]["transmit_bytes"], 12 << 10);
    assert_eq!(known[0]["receive_bytes"], 44 << 10);
    assert_eq!(known[0]["assumed"], serde_json::json!([]));
    let grace = ["--mode", HYBRID, "--profile", "grace-2025"];
    assert_eq!(
        printed(&grace)[0]["assumed"],
        serde_json::json!(["invalidation_cycles", "coherent"])
    );
    let given = ["--invalidation-cycles", "100", "--coherent"];
    let given = printed(&[&grace[..], &given[..]].concat());
    assert_eq!(given[0]["transmit_bytes"], 4 << 10);
    assert_eq!(given[0]["assumed"], serde_json::json!([]));
}

/// `fs` withholds a received buffer for up to 100 us, so it is not recommended where that is more
/// than 2% of a round trip. Its cycles only add to that.
#[test]
fn fs_is_recommended_only_if_it_keeps_the_limits() {
    let scratch = Scratch::new("limits-of-fs");
    let trace = scratch.path("trace");
    let mut refused = Vec::new();
    for us in [100, 2_000, 4_000] {
        std::fs::write(&trace, round_trips_of(1100, us)).unwrap();
        let args = [
            "compare", &trace, "--modes", "fs", "--repeat", "1", "--json",
        ];
        let report: Value = serde_json::from_str(&succeeded(&ringfence(&args))).unwrap();
        let row = &report["results"][0];
        assert_eq!(row["violations"]["total"], 0);
        let delay = |key: &str| row[key].as_u64().unwrap();
        assert!(
            (1..=100_000).contains(&delay("receive_delay_p99_ns")),
            "{us}"
        );
        assert!(
            (1..=1_000_000).contains(&delay("transmit_delay_p99_ns")),
            "{us}"
        );
        let loss = row["round_trip"]["loss"].as_f64().unwrap();
        assert!(loss > 0.02, "{us}: {loss}");
        assert_eq!(report["traces"][0]["recommendation"], Value::Null, "{us}");
        let text = succeeded(&ringfence(&args[..6]));
        refused.push(text.split_whitespace().collect::<Vec<_>>().join(" "));
    }
    for text in refused {
        assert!(text.contains("No mode is recommended: fs adds"), "{text}");
        assert!(text.contains("beyond the limit of 2%"), "{text}");
    }
}

#[test]
fn json_page_lists_exactly_the_fields() {
    let text = std::fs::read_to_string(root().join("docs/JSON.md")).unwrap();
    let (text, _) = text
        .split_once("# The JSON form of advice on sizes")
        .unwrap();
    let documented: BTreeSet<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .filter_map(|line| line.split(" |").next())
        .flat_map(|cell| cell.split('`').map(str::to_owned).collect::<Vec<_>>())
        .filter(|name| !name.trim().is_empty() && name.trim() != ",")
        .collect();
    let mut printed = BTreeSet::new();
    names(&report(&[]), &mut printed);
    // A profile with a device's side and reported numbers.
    names(
        &report(&["--profile", "cascade-lake-2024", "--line-rate", "400"]),
        &mut printed,
    );
    // Large entries, which rings do not have.
    names(&report(&["--page-size", "2m"]), &mut printed);
    // A mode that maps large buffers only.
    names(&report(&["--mode", HYBRID]), &mut printed);
    // A trace of round trips.
    let scratch = Scratch::new("round-trips");
    let trace = scratch.path("trace");
    std::fs::write(&trace, round_trips(1100)).unwrap();
    names(&report(&[&trace]), &mut printed);
    let missing: Vec<_> = printed.difference(&documented).collect();
    let gone: Vec<_> = documented.difference(&printed).collect();
    assert!(missing.is_empty(), "not documented: {missing:?}");
    assert!(gone.is_empty(), "documented and not printed: {gone:?}");
}
