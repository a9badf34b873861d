//! `compare` with large entries and prefetch: its report, and the options that do not apply.

use serde_json::Value;

use crate::{ringfence, stderr, succeeded};

const PLAIN: [&str; 6] = [
    "compare",
    "--repeat",
    "0",
    "--no-attack",
    "--profile",
    "cascade-lake-2024",
];

fn with(more: &[&'static str]) -> Vec<&'static str> {
    [&PLAIN, more].concat()
}

fn json(more: &[&'static str]) -> Value {
    let text = succeeded(&ringfence(&[&with(more)[..], &["--json"]].concat()));
    serde_json::from_str(&text).unwrap()
}

#[test]
fn an_option_that_applies_to_no_mode_is_refused() {
    for (modes, option, value, reason) in [
        ("riommu", "--page-size", "64k", "a ring has no pages"),
        ("none,riommu", "--page-size", "2m", "no table translates"),
        ("riommu", "--prefetch", "3", "a ring has its own prefetch"),
        (
            "virtio-strict",
            "--prefetch",
            "hint-at-map",
            "a guest cannot reach",
        ),
    ] {
        let run = ringfence(&with(&["--modes", modes, option, value]));
        assert_eq!(run.status.code(), Some(2), "{modes} {option}");
        let text = stderr(&run);
        let named = format!("{option} is not applicable to");
        assert!(text.contains(&named) && text.contains(reason), "{text}");
    }
    for (option, value) in [
        ("--page-size", "8k"),
        ("--prefetch", "0"),
        ("--frames", "few"),
    ] {
        let run = ringfence(&with(&[option, value]));
        assert_eq!(run.status.code(), Some(2), "{option} {value}");
    }
}

#[test]
fn the_report_names_the_options_and_the_modes_without_them() {
    let modes = ["--modes", "linux-strict,riommu"];
    let plain = json(&modes);
    assert_eq!(plain.get("entries"), None);
    assert!(plain["results"][0]["prefetch_reads_per_page"].is_null());
    let options = [
        "--page-size",
        "64k",
        "--frames",
        "contiguous",
        "--prefetch",
        "1",
    ];
    let report = json(&[&modes[..], &options].concat());
    let entries = &report["entries"];
    assert_eq!(entries["page_size"], "64k");
    assert_eq!(entries["frames"], "contiguous");
    assert_eq!(entries["prefetch"], "next-page");
    let without = entries["not_applicable"].as_array().unwrap();
    assert_eq!(without.len(), 2);
    assert!(without.iter().all(|it| it["mode"] == "riommu"), "{entries}");
    let row = |report: &Value, name: &str| report["results"][0][name].as_f64();
    assert!(row(&report, "misses_per_page") < row(&plain, "misses_per_page"));
    assert!(row(&report, "prefetch_reads_per_page") > Some(0.0));
    // The ring has its own prefetch: its row does not change.
    let ring = |report: &Value| report["results"][1]["misses_per_page"].clone();
    assert_eq!(ring(&report), ring(&plain));
    let next = json(&["--modes", "fence", "--prefetch", "3"]);
    assert_eq!(next["entries"]["prefetch"]["next-pages"], 3);
}

#[test]
fn the_tables_have_a_column_of_prefetches_and_a_sentence() {
    let more = [
        "--modes",
        "linux-strict,riommu",
        "--prefetch",
        "3",
        "--markdown",
    ];
    let text = succeeded(&ringfence(&with(&more)));
    assert!(text.contains("| per page: prefetch |"), "{text}");
    assert!(text.contains("prefetch: next 3 pages"), "{text}");
    let without = "--prefetch is not applicable to riommu (a ring has its own prefetch).";
    assert!(text.contains(without), "{text}");
    let plain = succeeded(&ringfence(&with(&[
        "--modes",
        "linux-strict",
        "--markdown",
    ])));
    assert!(!plain.contains("prefetch"), "{plain}");
}
