//! The bundled sample through every mode: all counted values (not times) equal `sample.txt`.
//!
//! After an intended change, rewrite the table and review the difference before the commit:
//! `RINGFENCE_BLESS=1 cargo test -p ringfence-tests --test across golden`

use std::fmt::Write as _;
use std::path::Path;

use ringfence_lab::compare::{CompareOptions, compare};
use ringfence_lab::row::Row;
use ringfence_trace::{Operations, SAMPLE, TraceOptions, TraceSource};

const TABLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/sample.txt");

const HEAD: [&str; 23] = [
    "mode",
    "safety",
    "maps",
    "unmaps",
    "search",
    "longest",
    "invals",
    "accesses",
    "attempts",
    "stale",
    "never",
    "dir",
    "foreign",
    "coloc",
    "false",
    "window_ns",
    "delay_ns",
    "live",
    "tables",
    "walks",
    "reads",
    "awaited",
    "status",
];

fn cells(row: &Row) -> [String; 23] {
    let violations = row.violations.unwrap();
    [
        row.mode.clone(),
        row.safety.clone(),
        row.maps.to_string(),
        row.unmaps.to_string(),
        format!("{:.3}", row.search_steps_mean.unwrap()),
        row.search_steps_max.to_string(),
        row.invalidations.to_string(),
        row.accesses.to_string(),
        row.attack_accesses.unwrap().to_string(),
        violations.stale.to_string(),
        violations.never.to_string(),
        violations.direction.to_string(),
        violations.foreign.to_string(),
        row.colocated.unwrap().to_string(),
        row.false_faults.to_string(),
        row.stale_window_max_ns.to_string(),
        row.release_delay_max_ns.to_string(),
        row.live_mappings_max.to_string(),
        row.table_bytes.to_string(),
        row.host_walks.to_string(),
        row.host_words_read.to_string(),
        row.host_frames_awaited.to_string(),
        row.status.to_string(),
    ]
}

fn table(rows: &[Row]) -> String {
    let mut lines = vec![HEAD.map(str::to_owned)];
    lines.extend(rows.iter().map(cells));
    let widths: Vec<_> = (0..HEAD.len())
        .map(|column| {
            lines
                .iter()
                .map(|line| line[column].len())
                .max()
                .unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for line in lines {
        let mut shown = String::new();
        for (cell, width) in line.iter().zip(&widths) {
            let _ = write!(shown, "{cell:width$}  ");
        }
        text.push_str(shown.trim_end());
        text.push('\n');
    }
    text
}

#[test]
fn sample_matches_its_golden_file() {
    let options = CompareOptions {
        repetitions: 0,
        ..CompareOptions::new()
    };
    let source = TraceSource::from_reader("sample", SAMPLE).unwrap();
    let operations = Operations::new("sample", source, TraceOptions::default());
    let found = compare("sample", operations, &options, |_| {}).unwrap();
    let text = table(&found.rows);
    let path = Path::new(TABLE);
    if std::env::var_os("RINGFENCE_BLESS").is_some() {
        std::fs::write(path, &text).unwrap();
        return;
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    for (line, (found, expected)) in text.lines().zip(committed.lines()).enumerate() {
        assert_eq!(found, expected, "line {} of {TABLE}", line + 1);
    }
    assert_eq!(
        text, committed,
        "see the head of this file for how to write it anew"
    );
}

/// Checks the properties that every version of the table must have.
#[test]
fn the_table_keeps_the_promises() {
    let committed = std::fs::read_to_string(TABLE).unwrap();
    let mut lines = committed.lines();
    let head: Vec<_> = lines.next().unwrap().split_whitespace().collect();
    let column = |line: &str, name: &str| -> u64 {
        let index = head.iter().position(|h| *h == name).unwrap();
        line.split_whitespace().nth(index).unwrap().parse().unwrap()
    };
    for line in lines {
        let safety = line.split_whitespace().nth(1).unwrap();
        let violations: u64 = ["stale", "never", "dir", "foreign"]
            .iter()
            .map(|name| column(line, name))
            .sum();
        // The as-published cache evicts mappings in use and reuses them with other directions.
        let as_published = line.starts_with("rtc-paper");
        assert_eq!(column(line, "false") > 0, as_published, "{line}");
        assert!(column(line, "attempts") >= column(line, "unmaps"), "{line}");
        let looks_up = line.starts_with("pviommu") || line.starts_with("rtc-");
        assert_eq!(column(line, "walks") > 0, looks_up, "{line}");
        let pool = line.starts_with("pviommu+rtc+hopt");
        assert_eq!(column(line, "awaited") > 0, looks_up && !pool, "{line}");
        match safety {
            "strict" | "byte-granular" | "own-pool" => assert_eq!(violations, 0, "{line}"),
            // The pages of this trace seldom leave their pool.
            "none" if line.starts_with("premap") => {}
            _ => assert!(violations > 0, "{line}"),
        }
    }
}
