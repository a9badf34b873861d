//! The page on synthetic results.

use ringfence_attack::{Cell, Evidence, Executed, Matrix, Status};
use ringfence_lab::MachineProfile;
use ringfence_lab::meter::{Components, Cycles};
use ringfence_lab::oracle::StaleBytes;
use ringfence_lab::row::{Row, Violations};
use ringfence_lab::size::{Fit, RingAdvice, SizePoint, Stalls, TraceSizing};
use ringfence_trace::{DeviceInfo, Flow, Info};

use super::table::MAX_ROWS;
use super::{PageContents, report_page};
use crate::{MeasuredOn, Report, Sizing, TraceNotes};

const HOSTILE: &str = "</script></style></title><script>alert(1)</script>\"'><img src=x \
                       onerror=alert(1)>&lt;{{}}\u{202e}\u{1b}]0;x\u{7}";

struct Results {
    report: Report,
    infos: Vec<Info>,
    sizing: Sizing,
    matrix: Matrix,
}

impl Results {
    /// Results for one trace whose devices, trace and CPU have the given name.
    fn named(name: &str, devices: usize) -> Self {
        let measured_on = MeasuredOn {
            cpu: name.into(),
            arch: "test",
            cycle_unit: "tsc",
            build: "release",
            processors: 2,
        };
        let mut report = Report::new(MachineProfile::r210_2015(), measured_on, 3, true, &[], &[]);
        let names: Vec<String> = (0..devices).map(|index| format!("{name}{index}")).collect();
        report.traces.push(TraceNotes {
            trace: name.into(),
            devices: names.clone(),
            devices_skipping_unmaps: names.clone(),
            ..TraceNotes::default()
        });
        report.results = vec![
            row(name, "fence-burst", "strict", 900.0, 0.5),
            row(name, "fence", "strict", 2500.0, 0.27),
            row(name, "linux-lazy", "bounded", 700.0, 0.57),
        ];
        let rings = names.iter().map(|name| ring(name));
        let trace = TraceSizing {
            trace: name.into(),
            status: "ok".into(),
            rings: rings.collect(),
            iotlb: Vec::new(),
            recommendation: format!("Give {name} slots."),
        };
        let mut sizing = Sizing::new(MachineProfile::r210_2015());
        sizing.traces.push(trace);
        let devices = names.iter().map(|name| DeviceInfo {
            name: name.clone(),
            flows: vec![Flow {
                direction: "to-device".into(),
                maps: 10,
                unmaps: 10,
                ..Flow::default()
            }],
            ..DeviceInfo::default()
        });
        let info = Info {
            devices: devices.collect(),
            ..Info::default()
        };
        Self {
            report,
            infos: vec![info],
            sizing,
            matrix: matrix(),
        }
    }

    fn page(&self) -> String {
        report_page(&PageContents {
            report: &self.report,
            infos: &self.infos,
            sizing: &self.sizing,
            matrix: Some(&self.matrix),
        })
    }
}

fn row(trace: &str, mode: &str, safety: &str, cycles: f64, throughput: f64) -> Row {
    let through = if safety == "bounded" { 42 } else { 0 };
    let components = Components {
        cycles: Cycles {
            map_table: cycles,
            ..Cycles::default()
        },
        ..Components::default()
    };
    Row {
        trace: trace.into(),
        mode: mode.into(),
        safety: safety.into(),
        maps: 5000,
        unmaps: 5000,
        invalidations: if mode == "fence" { 5000 } else { 50 },
        map_cycles: Some(cycles),
        components: Some(components),
        relative_throughput: Some(throughput),
        baseline_cycles: Some(908.0),
        attack_accesses: Some(10_000),
        violations: Some(Violations {
            stale: through,
            total: through,
            ..Violations::default()
        }),
        colocated: Some(7),
        stale_window_max_ns: through * 100_000,
        stale_byte_seconds: through as f64,
        stale_bytes: StaleBytes {
            bin_ns: 1000,
            length_ns: 100_000,
            mean_bytes: vec![4096.0; 100],
        },
        release_delay_max_ns: 50_000,
        ..Row::of_run(true, true)
    }
}

fn ring(device: &str) -> RingAdvice {
    RingAdvice {
        device: device.into(),
        direction: "to-device".into(),
        maps: 10,
        unmaps: 10,
        live_slots_max: 4,
        live_mappings_max: 4,
        mapping_slots_max: 1,
        burst_slots_max: 2,
        withheld_slots_max: 2,
        rule_slots: 6,
        descriptor_rule_slots: 6,
        any_order_slots: 6,
        in_order_slots: 6,
        out_of_order_unmaps: 0,
        overtaken_mappings_max: 0,
        overtaken_mappings_mean: None,
        next_slot_share: None,
        live_mappings_at_end: 0,
        fit: Fit::InOrder,
        reason: String::new(),
        entries: 8,
        table_bytes: 128,
        sweep: [4, 8]
            .map(|entries| SizePoint {
                entries,
                in_order: Stalls {
                    stalls: 5,
                    ..Stalls::default()
                },
                ..SizePoint::default()
            })
            .to_vec(),
    }
}

fn matrix() -> Matrix {
    let cell = |mode: &str, status| Cell {
        class: "A02",
        mode: mode.into(),
        status,
        reason: None,
        expected: None,
        departure: None,
        exceeds_bound: false,
        unexpected: false,
        total: Evidence::default(),
        executed: Executed::default(),
    };
    Matrix {
        modes: vec![
            ("fence-burst".into(), "strict".into()),
            ("linux-lazy".into(), "bounded".into()),
        ],
        classes: vec![("A02", "stale IOTLB entry after unmap")],
        cells: vec![
            cell("fence-burst", Status::Stopped),
            cell("linux-lazy", Status::Succeeded),
        ],
    }
}

/// The names of all elements that a page opens, in order.
fn elements(page: &str) -> Vec<&str> {
    let (before, rest) = page.split_once("<script>").unwrap();
    let after = rest.split_once("</script>").unwrap().1;
    let tags = before.split('<').chain(after.split('<')).skip(1);
    let tags = tags.filter(|tag| !tag.starts_with(['/', '!']));
    tags.map(|tag| tag.split([' ', '>', '/', '\n']).next().unwrap())
        .collect()
}

/// The number of quotes within tags: two for each attribute. A quote in a text is no markup.
fn quotes(page: &str) -> usize {
    let (before, rest) = page.split_once("<script>").unwrap();
    let after = rest.split_once("</script>").unwrap().1;
    let tags = before.split('<').chain(after.split('<')).skip(1);
    tags.map(|tag| tag.split('>').next().unwrap().matches('"').count())
        .sum()
}

#[test]
fn the_verdict_comes_first_and_says_what_to_do_why_and_what_remains() {
    let page = Results::named("sample", 2).page();
    let body = page.split_once("<main>").unwrap().1;
    let headings: Vec<&str> = body.split("<h3>").skip(1).collect();
    assert!(headings[0].starts_with("Use fence-burst</h3>"), "{body}");
    for text in [
        "<dt>What to do</dt>",
        "Mainline Linux does not have fence-burst",
        "<dt>What it costs</dt>",
        "900 cycles for a map and an unmap",
        "Relative throughput is 0.50",
        "back up to 50.0 us after the unmap",
        "<dt>What remains exposed</dt>",
        "0 of 10,000 attack accesses",
        "is not protected: 7 accesses",
        "It stops all 1 attack classes",
    ] {
        assert!(headings[0].contains(text), "{text}: {}", headings[0]);
    }
    let order: Vec<&str> = headings
        .iter()
        .map(|part| part.split_once("</h3>").unwrap().0)
        .collect();
    assert_eq!(
        order,
        [
            "Use fence-burst",
            "Cost against exposure",
            "Components of the cost",
            "Stale windows",
            "Reuse and bursts",
            "Sizes of rings and of the IOTLB",
            "Hardware and method",
        ]
    );
}

/// A reader chooses protection by this plot, so the page says which modes it leaves out.
#[test]
fn the_page_names_the_modes_without_a_line_of_released_bytes() {
    const EXPOSE_NOTHING: &str = "All other modes without a line expose no released byte.";
    let mut results = Results::named("sample", 1);
    let page = results.page();
    assert!(page.contains(EXPOSE_NOTHING), "{page}");
    assert!(page.contains("Modes of safety none are not drawn."));
    // The results have one mode with windows, and the plot has seven lines.
    for (more, left_out) in [(6, 0), (7, 1), (9, 3)] {
        results.report.results.truncate(3);
        for index in 0..more {
            let mode = format!("lazy-{index}");
            let row = row("sample", &mode, "bounded", 700.0, 0.57);
            results.report.results.push(row);
        }
        let page = results.page();
        assert_eq!(page.contains(EXPOSE_NOTHING), left_out == 0, "{more}");
        let counted = format!("The tables have {left_out} more that expose released bytes.");
        assert_eq!(page.contains(&counted), left_out > 0, "{more}: {page}");
    }
}

#[test]
fn without_cycles_the_page_recommends_nothing_and_names_the_safe_modes() {
    let mut results = Results::named("sample", 1);
    results.report.repetitions = 0;
    let page = results.page();
    assert!(page.contains("<h3>No mode is recommended</h3>"), "{page}");
    assert!(page.contains("No attack passed in these modes: fence-burst, fence."));
    assert!(!page.contains("Components of the cost"));
}

/// A hostile name adds no element and no attribute, in tables, plots, attributes or the title.
#[test]
fn names_from_a_trace_never_become_markup() {
    let plain = Results::named("sample", 3).page();
    let hostile = Results::named(HOSTILE, 3).page();
    assert_eq!(elements(&plain), elements(&hostile));
    assert_eq!(quotes(&plain), quotes(&hostile));
    assert_eq!(hostile.matches("<script").count(), 1);
    assert_eq!(hostile.matches("</script").count(), 1);
    assert_eq!(hostile.matches("<style").count(), 1);
    assert!(!hostile.contains(['\u{202e}', '\u{1b}', '\u{7}']));
    assert!(hostile.contains("&lt;/script&gt;"));
}

/// A short name is not cut before the characters that reverse the reading direction.
#[test]
fn a_name_reverses_no_text() {
    let page = Results::named("a\u{202e}b\u{2066}", 3).page();
    assert!(!page.contains(['\u{202e}', '\u{2066}']));
    assert!(page.contains("</svg>"));
}

#[test]
fn the_page_asks_for_nothing_from_elsewhere() {
    let page = Results::named("sample", 3).page();
    for foreign in [
        "http:", "https:", "url(", "@import", "src=", "href=", "<link", "<img",
    ] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    let policy = page
        .split_once("Content-Security-Policy\" content=\"")
        .unwrap()
        .1;
    let policy = policy.split_once('"').unwrap().0.replace("&#39;", "'");
    let (before, digest) = policy.split_once("'sha256-").unwrap();
    let only_own_script = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; \
        form-action 'none'; script-src ";
    assert_eq!(before, only_own_script);
    assert_eq!(digest.find('\''), Some(digest.len() - 1), "{digest}");
}

#[test]
fn every_element_is_closed() {
    let page = Results::named("sample", 3).page();
    let opened = elements(&page);
    for tag in [
        "html",
        "head",
        "body",
        "main",
        "section",
        "header",
        "footer",
        "div",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "caption",
        "p",
        "ul",
        "li",
        "dl",
        "dt",
        "dd",
        "figure",
        "figcaption",
        "svg",
        "details",
        "summary",
        "select",
        "option",
        "label",
        "button",
    ] {
        let count = opened.iter().filter(|name| **name == tag).count();
        assert_eq!(count, page.matches(&format!("</{tag}>")).count(), "{tag}");
    }
}

#[test]
fn the_size_is_bounded_whatever_the_trace() {
    let long = "n".repeat(10_000);
    let mut results = Results::named(&long, 3000);
    let page = results.page();
    assert!(page.len() < 400_000, "{}", page.len());
    let left_out = format!("{} more rows are left out.", 3000 - MAX_ROWS);
    assert_eq!(page.matches(&left_out).count(), 2, "traffic and rings");
    // The traces are bounded too.
    let notes = results.report.traces[0].clone();
    results.report.traces = vec![notes; 40];
    let page = results.page();
    assert!(page.contains("24 more traces are left out."));
}

#[test]
fn equal_results_give_an_equal_page() {
    assert_eq!(
        Results::named("sample", 3).page(),
        Results::named("sample", 3).page()
    );
}

/// The script sorts by these values: the texts have separators and units.
#[test]
fn cells_with_numbers_carry_their_values() {
    let page = Results::named("sample", 1).page();
    for cell in [
        "data-value=\"2500\">2500<",
        "data-value=\"4200000\">4.20 ms<",
        "data-value=\"0.5\">0.50<",
    ] {
        assert!(page.contains(cell), "{cell}");
    }
}
