//! All other subcommands on the sample.

use ringfence_trace::SAMPLE;
use serde_json::Value;

use crate::{Scratch, failed, ringfence, stderr, succeeded};

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&succeeded(&ringfence(args))).unwrap()
}

#[test]
fn modes_are_printed_for_people_and_programs() {
    let text = succeeded(&ringfence(&["modes"]));
    for choice in [
        "table-bitmap",
        "eiovar-K",
        "flat",
        "per-cpu-queue",
        "kernel",
    ] {
        assert!(text.contains(choice), "{choice}: {text}");
    }
    let rows = json(&["modes", "--json"]);
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), ringfence_lab::modes::Mode::named().len());
    for row in rows {
        let line = text
            .lines()
            .find(|line| line.split(' ').next() == row["mode"].as_str());
        let line = line.unwrap_or_else(|| panic!("{row}"));
        for axis in ["alloc", "table", "flush", "owner", "safety"] {
            assert!(line.contains(row[axis].as_str().unwrap()), "{row}: {line}");
        }
        assert_eq!(
            row.get("bound").is_some(),
            row["safety"] == "bounded",
            "{row}"
        );
    }
}

#[test]
fn diff_finds_exactly_the_changes() {
    let scratch = Scratch::new("diff");
    let report = succeeded(&ringfence(&[
        "compare",
        "--json",
        "--repeat",
        "1",
        "--modes",
        "defer,fence",
    ]));
    // The cost of one repetition is a difference of timings, which can be negative.
    let mut report: Value = serde_json::from_str(&report).unwrap();
    for row in report["results"].as_array_mut().unwrap() {
        row["map_cycles"] = 100.into();
        row["unmap_cycles"] = 300.into();
    }
    let before = scratch.file("a.json", report.to_string().as_bytes());
    let same = json(&["diff", &before, &before, "--json", "--max-regression", "0"]);
    assert!(
        same["rows"]
            .as_array()
            .unwrap()
            .iter()
            .all(|row| row["cycles_ratio"] == 1.0)
    );

    report["results"][1]["violations"]["stale"] = 7.into();
    report["results"][1]["violations"]["total"] = 7.into();
    let after = scratch.file("b.json", report.to_string().as_bytes());
    let output = ringfence(&["diff", &before, &after, "--max-regression", "20"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(
        stderr(&output).contains("sample, fence"),
        "{}",
        stderr(&output)
    );
    assert!(!stderr(&output).contains("defer"), "{}", stderr(&output));
    succeeded(&ringfence(&["diff", &before, &after]));

    let other = scratch.file("c.json", b"{}");
    let text = failed(&ringfence(&["diff", &before, &other]), 1);
    assert!(text.contains("c.json: not a report"), "{text}");
}

#[test]
fn a_calibrated_profile_can_be_used() {
    let scratch = Scratch::new("calibrate");
    let path = scratch.path("here.toml");
    assert_eq!(succeeded(&ringfence(&["calibrate", "--out", &path])), "");
    assert_eq!(scratch.names(), ["here.toml"]);
    let text = std::fs::read_to_string(&path).unwrap();
    for part in [
        "cycles per nanosecond",
        "waiting for each line",
        "taken from r210-2015",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let report = json(&[
        "compare",
        "--json",
        "--repeat",
        "0",
        "--modes",
        "fence",
        "--profile",
        &path,
    ]);
    assert_eq!(report["profile"]["name"], "calibrated");
}

#[test]
fn info_describes_the_sample() {
    let text = succeeded(&ringfence(&["trace", "info"]));
    assert!(
        text.contains("0000:00:03.0") && text.contains("from-device"),
        "{text}"
    );
    let info = &json(&["trace", "info", "--json"])[0];
    assert_eq!(info["trace"], "sample");
    let row = &json(&["compare", "--json", "--repeat", "0", "--modes", "none"])["results"][0];
    assert!(info["map_events"].as_u64().unwrap() <= row["maps"].as_u64().unwrap());
    assert_eq!(info["lost"], 0);
}

#[test]
fn an_anonymised_trace_costs_and_exposes_the_same() {
    let scratch = Scratch::new("anonymise");
    let original = scratch.file("original.trace.zst", SAMPLE);
    let renamed = scratch.path("renamed.trace.zst");
    succeeded(&ringfence(&[
        "trace",
        "anonymise",
        &original,
        "-o",
        &renamed,
        "--seed",
        "1",
    ]));
    let rows = |path: &str| {
        let report = json(&[
            "compare",
            "--json",
            "--repeat",
            "0",
            "--modes",
            "strict,defer",
            path,
        ]);
        let rows = report["results"].as_array().unwrap().clone();
        let fields = [
            "maps",
            "unmaps",
            "search_steps_max",
            "invalidations",
            "violations",
            "accesses",
        ];
        rows.iter()
            .map(|row| fields.map(|field| row[field].clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(rows(&original), rows(&renamed));
    let text = succeeded(&ringfence(&[
        "trace",
        "anonymise",
        &original,
        "--seed",
        "1",
    ]));
    assert!(
        text.contains("dma_map_phys") || text.contains("dma_map_page"),
        "text to a pipe"
    );
    assert!(!text.contains("0000:00:03.0"));
}

#[test]
fn a_failed_recording_leaves_no_file() {
    let scratch = Scratch::new("record");
    let output = scratch.path("trace.zst");
    failed(
        &ringfence(&[
            "trace",
            "record",
            "--seconds",
            "1",
            "-o",
            &output,
            "--tracefs",
            &scratch.path(""),
        ]),
        1,
    );
    assert!(scratch.names().is_empty(), "{:?}", scratch.names());
}

#[test]
fn shells_and_man_know_the_subcommands() {
    let scratch = Scratch::new("man");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        assert!(
            succeeded(&ringfence(&["completions", shell])).contains("anonymise"),
            "{shell}"
        );
    }
    assert!(succeeded(&ringfence(&["man"])).contains(".TH ringfence 1"));
    succeeded(&ringfence(&["man", &scratch.path("")]));
    let pages = scratch.names();
    for page in [
        "ringfence.1",
        "ringfence-compare.1",
        "ringfence-trace-info.1",
    ] {
        assert!(pages.iter().any(|name| name == page), "{page} of {pages:?}");
    }
}

#[test]
fn help_explains_measured_cycles() {
    let text = succeeded(&ringfence(&["compare", "--help"]));
    // Lines are as long as the terminal allows.
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "c / (c + map + unmap)",
        "fence-burst",
        "Examples:",
        "Exit codes:",
    ] {
        assert!(text.contains(part), "{part}");
    }
}

#[test]
fn experiments_are_listed_run_and_written_down() {
    let list = succeeded(&ringfence(&["reproduce", "--list"]));
    assert!(
        list.contains("X10") && list.contains("EIOVAR Table 1"),
        "{list}"
    );
    let found = json(&["reproduce", "x10", "--json"]);
    assert_eq!(found["schema"], 4);
    assert_eq!(found["findings"][0]["verdict"], "reproduced");
    let score = &found["findings"][0]["score"];
    assert_eq!((&score["held"], &score["judged"]), (&26.into(), &26.into()));
    assert_eq!(score["orders"]["asked"], 0);
    for cause in ["fitted", "unmeasured", "shown"] {
        assert_eq!(score["unjudged"][cause], 0, "{score}");
    }
    // Steps of a search have no value without protection.
    assert!(score["null_model"].is_null(), "{score}");
    let row = &found["findings"][0]["rows"][0];
    for field in [
        "quantity",
        "published",
        "measured",
        "ratio",
        "requirement",
        "holds",
        "null_model",
        "group",
        "fitted",
    ] {
        assert!(row.get(field).is_some(), "{field}: {row}");
    }
    let scratch = Scratch::new("reproduce");
    let dir = scratch.path("findings");
    let text = succeeded(&ringfence(&["reproduce", "X10", "--out", &dir]));
    assert!(text.contains("[reproduced]"), "{text}");
    let page = std::fs::read_to_string(format!("{dir}/reproduction.html")).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
    let page = std::fs::read_to_string(format!("{dir}/X10.md")).unwrap();
    assert!(page.starts_with("# X10: "), "{page}");
    let written = std::fs::read_to_string(format!("{dir}/reproduction.json")).unwrap();
    let written: Value = serde_json::from_str(&written).unwrap();
    assert_eq!(written["findings"][0]["id"], "X10");
    for wrong in [
        &["reproduce"][..],
        &["reproduce", "X99"],
        &["reproduce", "X10", "--all"],
        &["reproduce", "X10", "--trace", "-"],
    ] {
        assert_eq!(ringfence(wrong).status.code(), Some(2), "{wrong:?}");
    }
    let unknown = ringfence(&["reproduce", "X99"]);
    let error = String::from_utf8_lossy(&unknown.stderr);
    assert!(
        error.contains("X01, X02") && error.contains("X29"),
        "{error}"
    );
}
