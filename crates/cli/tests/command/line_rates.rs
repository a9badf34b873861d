//! `compare --line-rate`: the numbers follow the model, and `docs/LINE-RATES.md` has the tables.

use serde_json::Value;

use crate::{ringfence, root, stderr, succeeded};

const MODES: &str = "none,linux-strict,linux-lazy,fence,fence-burst,copy,riommu,virtio-strict,\
    pviommu+rtc";

fn compare(profile: &str, rates: &str, more: &[&str]) -> String {
    let args = ["compare", "--modes", MODES, "--repeat", "0", "--no-attack"];
    let given = ["--profile", profile, "--line-rate", rates];
    let args: Vec<&str> = args
        .into_iter()
        .chain(given)
        .chain(more.iter().copied())
        .collect();
    succeeded(&ringfence(&args))
}

/// The smallest number from 1 that suffices. 1024 is the most that is reported.
fn fewest(suffices: impl Fn(f64) -> bool) -> Option<u64> {
    (1..=1024_u32)
        .find(|number| suffices(f64::from(*number)))
        .map(u64::from)
}

#[test]
fn numbers_follow_from_the_counts_of_the_replay() {
    let more = ["--json", "--invalidation-cycles", "2310"];
    let text = compare("cascade-lake-2024", "100,200,400,800", &more);
    let report: Value = serde_json::from_str(&text).unwrap();
    let rates = report["line_rates"].as_array().unwrap();
    let rows = report["results"].as_array().unwrap();
    assert_eq!(rates.len(), 4 * rows.len());
    for rate in rates {
        let row = rows.iter().find(|row| row["mode"] == rate["mode"]).unwrap();
        let of = |field: &str| row[field].as_f64().unwrap();
        let gbps = rate["gbps"].as_f64().unwrap();
        let walking = 197.0 * of("reads_per_page");
        let walkers = fewest(|k| 32_768.0 / (65.0 + walking / k) >= gbps);
        assert_eq!(rate["walkers"].as_u64(), walkers, "{rate} {row}");
        let streams = fewest(|n| n * 32_768.0 / (65.0 + walking) >= gbps);
        assert_eq!(rate["streams"].as_u64(), streams, "{rate} {row}");
        let pages = gbps * 1e9 / 32_768.0;
        let each = of("invalidations") / of("accesses") * pages;
        let near = |field: &str, wanted: f64| {
            let found = rate[field].as_f64().unwrap();
            assert!(
                (found - wanted).abs() <= 1e-9 * wanted.abs(),
                "{field}: {rate} {row}"
            );
        };
        near("invalidations_per_second", each);
        // 0.7 us at 3.3 GHz.
        near("invalidation_cores", each * 0.7e-6);
        near(
            "copy_gigabytes_per_second",
            of("copied_per_byte") * gbps / 4.0,
        );
    }
    // A strict mode has the walkers and the copies that the published model gives.
    let at = |mode: &str, gbps: f64| {
        let mut rates = rates.iter();
        rates
            .find(|rate| rate["mode"] == mode && rate["gbps"] == gbps)
            .unwrap()
    };
    assert_eq!(at("linux-strict", 400.0)["walkers"], 12);
    assert!(at("none", 800.0)["walkers"].is_null());
    assert_eq!(at("none", 400.0)["copy_gigabytes_per_second"], 0.0);
    assert!(
        at("copy", 400.0)["copy_gigabytes_per_second"]
            .as_f64()
            .unwrap()
            > 90.0
    );
    assert_eq!(at("copy", 400.0)["invalidation_cores"], 0.0);
}

/// Returns the tables of line rates in a report as Markdown.
fn tables(report: &str) -> Vec<&str> {
    let sections = report.split("### ");
    let sections = sections.filter(|part| part.starts_with("Line rate "));
    sections
        .filter_map(|part| {
            let (_, rest) = part.split_once("\n\n")?;
            let (table, _) = rest.split_once("\n\n")?;
            Some(table)
        })
        .collect()
}

#[test]
fn the_page_has_the_tables_of_the_command() {
    let page = std::fs::read_to_string(root().join("docs/LINE-RATES.md")).unwrap();
    for (profile, rates, count) in [
        ("cascade-lake-2024", "100,200,400,800", 4),
        ("r210-2015", "100,400", 2),
    ] {
        let report = compare(profile, rates, &["--markdown"]);
        let tables = tables(&report);
        assert_eq!(tables.len(), count, "{report}");
        for table in tables {
            assert!(page.contains(table), "docs/LINE-RATES.md needs:\n{table}");
        }
    }
    assert!(
        page.contains(&MODES.replace(char::is_whitespace, "")),
        "{MODES}"
    );
}

#[test]
fn the_terminal_says_what_is_modelled_and_what_is_unknown() {
    let text = compare("cascade-lake-2024", "400", &[]);
    assert!(
        text.contains("Line rate 400 Gb/s: what each mode needs (modelled)"),
        "{text}"
    );
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.contains("does not state the cost of an invalidation"),
        "{text}"
    );
    for line in text.lines() {
        assert!(line.chars().count() <= 120, "{line}");
    }
    let quiet = succeeded(&ringfence(&["compare", "--modes", "none", "--repeat", "0"]));
    assert!(!quiet.contains("Line rate"), "{quiet}");
}

#[test]
fn impossible_rates_are_refused() {
    for rate in ["0", "-1", "nan", "inf", "1e7", "x", "100,,400"] {
        let output = ringfence(&["compare", "--line-rate", rate]);
        assert_eq!(output.status.code(), Some(2), "{rate}");
        let text = stderr(&output);
        assert!(text.contains("--line-rate"), "{rate}: {text}");
    }
}
