//! `compare`: its forms of output and what selects rows.

use ringfence_lab::modes::Mode;
use ringfence_trace::SAMPLE;
use serde_json::Value;

use crate::{Scratch, ringfence, ringfence_with, stderr, succeeded};

/// A quick comparison: no clock is read.
const QUICK: [&str; 3] = ["compare", "--repeat", "0"];

fn quick(more: &[&str]) -> Vec<&'static str> {
    let more = more
        .iter()
        .map(|arg| -> &'static str { Box::leak((*arg).to_owned().into_boxed_str()) });
    QUICK.into_iter().chain(more).collect()
}

fn rows(args: &[&str]) -> Vec<Value> {
    let text = succeeded(&ringfence(args));
    let report: Value = serde_json::from_str(&text).unwrap();
    report["results"].as_array().unwrap().clone()
}

fn modes(rows: &[Value]) -> Vec<&str> {
    rows.iter()
        .map(|row| row["mode"].as_str().unwrap())
        .collect()
}

#[test]
fn without_arguments_the_sample_runs_through_all_modes() {
    let text = succeeded(&ringfence(&["compare", "--repeat", "1", "--all-modes"]));
    assert!(text.starts_with("sample: device "), "{text}");
    for mode in Mode::named() {
        let tables = lines_of(&text, &mode.name);
        assert!(tables >= 3, "{}: cost, exposure, hardware", mode.name);
    }
    for part in [
        "Cost: cycles",
        "Exposure under attack",
        "Measured: ",
        "Modelled by profile r210-2015: 2150",
        "Hardware model: IOTLB 16 sets x 4 ways",
    ] {
        assert!(text.contains(part), "{part}");
    }
    assert!(!text.contains("--all-modes"), "{text}");
}

fn lines_of(text: &str, mode: &str) -> usize {
    let lines = text.lines();
    lines
        .filter(|line| line.split(' ').next() == Some(mode))
        .count()
}

#[test]
fn the_default_is_a_selection_that_fits_and_recommends_first() {
    let text = succeeded(&ringfence(&["compare", "--repeat", "1"]));
    for line in text.lines() {
        assert!(line.chars().count() <= 120, "{line}");
    }
    let selected = Mode::default_selection();
    for mode in Mode::named() {
        let shown = lines_of(&text, &mode.name) > 0;
        assert_eq!(shown, selected.contains(&mode), "{}", mode.name);
    }
    let rings: Vec<_> = selected.iter().filter(|mode| mode.has_rings()).collect();
    assert_eq!(rings.len(), 1, "only riommu lacks hardware");
    assert!(selected.len() - rings.len() <= 12);
    let (before, rest) = text.split_once("Recommendation\n").unwrap();
    assert_eq!(before.lines().count(), 2, "a headline: {before}");
    let (recommendation, rest) = rest.split_once("\n\n").unwrap();
    let recommendation = recommendation.replace('\n', " ");
    assert_eq!(
        recommendation.matches(". ").count(),
        2,
        "two sentences, and one on rings: {recommendation}"
    );
    let counted = format!("12 of {} modes replayed; --all-modes ", Mode::named().len());
    assert!(rest.starts_with(&counted), "{rest}");
}

#[test]
fn report_lists_replayed_modes() {
    let named = |value: &Value| -> Vec<String> { serde_json::from_value(value.clone()).unwrap() };
    let report = |args: &[&str]| -> Value {
        serde_json::from_str(&succeeded(&ringfence(&quick(args)))).unwrap()
    };
    let default = report(&["--json"]);
    assert_eq!(
        named(&default["modes"]),
        modes(default["results"].as_array().unwrap())
    );
    assert_eq!(named(&default["modes"]).len(), 12);
    let omitted = Mode::named().len() - 12;
    assert_eq!(named(&default["modes_omitted"]).len(), omitted);
    let chosen = report(&["--json", "--modes", "fence,none"]);
    assert_eq!(named(&chosen["modes"]), ["fence", "none"]);
    assert!(named(&chosen["modes_omitted"]).is_empty());
}

#[test]
fn pipes_get_neither_colours_nor_a_progress_bar() {
    let output = ringfence(&quick(&[]));
    assert!(!succeeded(&output).contains('\x1b'));
    assert_eq!(stderr(&output), "");
}

#[test]
fn strict_modes_let_nothing_through_and_deferred_ones_do() {
    let rows = rows(&quick(&["--json", "--all-modes"]));
    assert_eq!(rows.len(), Mode::named().len());
    for row in &rows {
        let violations = row["violations"]["total"].as_u64().unwrap();
        match row["safety"].as_str().unwrap() {
            promise @ ("strict" | "byte-granular") => {
                assert_eq!(violations, 0, "{row}");
                let beside = row["colocated"].as_u64().unwrap() > 0;
                // Nothing is beside a copy. This trace has few buffers that `fence-copy` maps.
                let ways = &row["ways"];
                let itself = [&ways["mapped"], &ways["withheld"]];
                let maps = itself.iter().any(|way| way["buffers"].as_u64() > Some(0));
                assert_eq!(beside, promise == "strict" && maps, "{row}");
                assert!(
                    row["attack_accesses"].as_u64() >= row["unmaps"].as_u64(),
                    "{row}"
                );
            }
            "own-pool" => {
                assert_eq!(violations, 0, "{row}");
                assert!(row["mutable_after_release"].as_u64() > Some(0), "{row}");
            }
            // The pages of this trace seldom leave their pool.
            "none" if row["mode"] == "premap" => {
                assert!(row["mutable_after_release"].as_u64() > Some(0), "{row}");
            }
            _ => assert!(violations > 0, "{row}"),
        }
        // The as-published cache evicts mappings in use.
        let as_published = row["mode"] == "rtc-paper";
        assert_eq!(row["false_faults"] != 0, as_published, "{row}");
        assert_eq!(row["status"], "ok");
    }
}

#[test]
fn rows_are_chosen_by_name_and_composed() {
    let rows = rows(&quick(&[
        "--json",
        "--modes",
        "fence,none",
        "--mode",
        "alloc=eiovar-8,table=radix,flush=burst",
        "--mode",
        "alloc=identity,table=none,flush=never",
    ]));
    assert_eq!(modes(&rows), ["fence", "none", "eiovar-8/radix/burst"]);
    assert_eq!(rows[2]["violations"]["total"], 0);
}

#[test]
fn the_platform_can_be_set() {
    let args = [
        "--json",
        "--modes",
        "fence",
        "--iotlb",
        "64x8",
        "--walk-cache",
        "8,4,2",
        "--coherent",
        "--baseline-cycles",
        "1000",
    ];
    let text = succeeded(&ringfence(&quick(&args)));
    let report: Value = serde_json::from_str(&text).unwrap();
    let profile = &report["profile"];
    assert_eq!(profile["iotlb_sets"], 64);
    assert_eq!(profile["iotlb_ways"], 8);
    assert_eq!(profile["walk_cache_entries"], serde_json::json!([8, 4, 2]));
    assert_eq!(profile["coherent"], true);
    assert_eq!(profile["baseline_cycles"], 1000.0);
    let args = ["--json", "--modes", "fence", "--operation", "page"];
    let more = [
        "--baseline-cycles",
        "70",
        "--invalidation-cycles",
        "9",
        "--walkers",
        "8",
    ];
    let args: Vec<&str> = args.into_iter().chain(more).collect();
    let text = succeeded(&ringfence(&quick(&args)));
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["profile"]["page_cycles"], 70.0);
    assert_eq!(report["profile"]["baseline_cycles"], 908.0);
    assert_eq!(report["profile"]["invalidation_cycles"], 9);
    assert_eq!(report["operation"], "page");
    assert_eq!(report["walkers"], 8);
    // The default's walks do not snoop.
    let text = succeeded(&ringfence(&quick(&["--json", "--modes", "fence"])));
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["profile"]["coherent"], false);
}

#[test]
fn several_traces_give_one_report() {
    let scratch = Scratch::new("several");
    let file = scratch.file("copy.trace.zst", SAMPLE);
    let output = ringfence_with(&quick(&["--json", "--modes", "fence", &file, "-"]), SAMPLE);
    let report: Value = serde_json::from_str(&succeeded(&output)).unwrap();
    let rows = report["results"].as_array().unwrap();
    let traces: Vec<&str> = rows
        .iter()
        .map(|row| row["trace"].as_str().unwrap())
        .collect();
    assert_eq!(traces, ["copy", "stdin"]);
    assert_eq!(rows[0]["violations"], rows[1]["violations"]);
    assert_eq!(rows[0]["accesses"], rows[1]["accesses"]);
}

#[test]
fn one_device_can_be_chosen() {
    let all = rows(&quick(&["--json", "--modes", "fence"]));
    let one = rows(&quick(&[
        "--json",
        "--modes",
        "fence",
        "--device",
        "0000:00:03.0",
    ]));
    assert_eq!(one[0]["maps"], all[0]["maps"], "the sample has one device");
}

#[test]
fn csv_and_markdown_hold_the_same_rows() {
    let csv = succeeded(&ringfence(&quick(&["--csv"])));
    let markdown = succeeded(&ringfence(&quick(&["--markdown"])));
    let header: Vec<&str> = csv.lines().next().unwrap().split(',').collect();
    let attempts = header
        .iter()
        .position(|name| *name == "attack_accesses")
        .unwrap();
    for line in csv.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        assert!(
            markdown.contains(&format!("| {} |", cells[1])),
            "{}",
            cells[1]
        );
        assert!(cells[attempts].parse::<u64>().unwrap() > 0);
    }
}

#[test]
fn plots_are_written_where_they_are_wanted() {
    let scratch = Scratch::new("plots");
    let dir = scratch.path("new/dir");
    let args = [
        "compare",
        "--repeat",
        "1",
        "--modes",
        "none,fence",
        "--plot",
        &dir,
    ];
    let output = ringfence(&args);
    succeeded(&output);
    assert_eq!(stderr(&output).lines().count(), 3);
    for question in ["cost", "safety", "search"] {
        let svg = std::fs::read_to_string(format!("{dir}/sample-{question}.svg")).unwrap();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(svg.contains(">fence<"), "{question}");
    }
}
