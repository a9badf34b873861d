//! `calibrate --host` with a synthetic tracefs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

use crate::{Scratch, failed, ringfence, succeeded};

const TITLES: &str = "  Function                               Hit    Time            Avg         \
    s^2\n  --------                               ---    ----            ---             ---\n";

const FUNCTIONS: &str = "schedule\niommu_dma_map_page\niommu_dma_unmap_page\nqi_submit_sync\n\
    viommu_sync_req [virtio_iommu]\n";

/// A tracefs whose profiler has seen two CPUs.
struct Tracefs(Scratch);

impl Tracefs {
    fn new() -> Self {
        let scratch = Scratch::new("tracefs");
        fs::create_dir(scratch.path("trace_stat")).unwrap();
        let tracefs = Self(scratch);
        for (name, text) in [
            ("current_tracer", "nop\n"),
            ("function_profile_enabled", "0\n"),
            ("set_ftrace_filter", "#### all functions enabled ####\n"),
            ("available_filter_functions", FUNCTIONS),
        ] {
            tracefs.write(name, text);
        }
        tracefs.write(
            "trace_stat/function0",
            &format!(
                "{TITLES}  iommu_dma_unmap_page    300    450.000 us    1.500 us    0.1 us\n  \
                qi_submit_sync    300    240.000 us    0.800 us    0.1 us\n"
            ),
        );
        tracefs.write(
            "trace_stat/function1",
            &format!(
                "{TITLES}  qi_submit_sync    100    160.000 us    1.600 us    0.1 us\n  \
                viommu_sync_req    1    900.000 us    900.0 us    0.1 us\n"
            ),
        );
        tracefs.write("trace_stat/README", "no statistics\n");
        tracefs
    }

    fn at(&self, name: &str) -> PathBuf {
        Path::new(&self.0.path(name)).to_owned()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.at(name), text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.at(name)).unwrap()
    }

    fn calibrate(&self) -> Output {
        let dir = self.0.path("");
        ringfence(&["calibrate", "--host", "--seconds", "0", "--tracefs", &dir])
    }
}

#[test]
fn the_kernels_times_become_a_profile() {
    let tracefs = Tracefs::new();
    let text = succeeded(&tracefs.calibrate());
    // 400 us in 400 calls; the guest's request is rarer and does not count.
    for part in [
        "unmap (iommu_dma_unmap_page): 1500 ns, 300 calls",
        "invalidation (qi_submit_sync): 1000 ns, 400 calls",
        "copying a page",
        "measured: qi_submit_sync, 1000 ns in the mean of 400 calls",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let profile: toml::Table = text.parse().unwrap();
    let number = |key: &str| match &profile[key] {
        toml::Value::Float(value) => *value,
        toml::Value::Integer(value) => *value as f64,
        other => panic!("{key}: {other}"),
    };
    let cycles = number("invalidation_cycles");
    assert!(
        (cycles - 1000.0 * number("clock_ghz")).abs() <= 0.5,
        "{cycles}"
    );
    // Nothing else is measured, so nothing else is stated.
    for key in [
        "baseline_cycles",
        "kick_cycles",
        "iotlb_sets",
        "miss_cycles",
        "device_side",
    ] {
        assert!(!profile.contains_key(key), "{key}");
    }
    // The kernel's state is as before.
    assert_eq!(tracefs.read("function_profile_enabled"), "0");
    assert_eq!(tracefs.read("set_ftrace_filter"), "");

    let file = tracefs.0.file("host.toml", text.as_bytes());
    let args = [
        "compare",
        "--json",
        "--repeat",
        "1",
        "--modes",
        "fence",
        "--profile",
        &file,
    ];
    let report: Value = serde_json::from_str(&succeeded(&ringfence(&args))).unwrap();
    assert_eq!(report["profile"]["name"], "host");
    assert_eq!(report["results"][0]["modelled_cycles"], cycles);
    assert!(report["results"][0]["relative_throughput"].is_null());
}

#[test]
fn a_kernel_that_cannot_be_profiled_is_left_alone() {
    type Case = (&'static str, Option<&'static str>, &'static str);
    let cases: [Case; 8] = [
        ("current_tracer", None, "no tracefs at"),
        ("function_profile_enabled", None, "CONFIG_FUNCTION_PROFILER"),
        (
            "current_tracer",
            Some("function_graph\n"),
            "in use (function_graph)",
        ),
        ("function_profile_enabled", Some("1\n"), "in use (1)"),
        ("set_ftrace_filter", Some("schedule\n"), "in use (schedule)"),
        (
            "available_filter_functions",
            Some("schedule\n"),
            "no function that invalidates",
        ),
        (
            "available_filter_functions",
            None,
            "available_filter_functions: ",
        ),
        ("set_ftrace_filter", None, "set_ftrace_filter: "),
    ];
    for (name, content, expected) in cases {
        let tracefs = Tracefs::new();
        match content {
            Some(text) => tracefs.write(name, text),
            None => fs::remove_file(tracefs.at(name)).unwrap(),
        }
        let before: Vec<Option<Vec<u8>>> = STATE.map(|name| fs::read(tracefs.at(name)).ok()).into();
        let text = failed(&tracefs.calibrate(), 1);
        assert!(text.contains(expected), "{name}: {text}");
        let after: Vec<Option<Vec<u8>>> = STATE.map(|name| fs::read(tracefs.at(name)).ok()).into();
        assert_eq!(before, after, "{name}");
    }
}

const STATE: [&str; 3] = [
    "current_tracer",
    "function_profile_enabled",
    "set_ftrace_filter",
];

#[test]
fn hostile_statistics_are_refused_and_the_profiler_stops() {
    let huge = "x".repeat((1 << 20) + 1);
    let cases = [
        (huge, "longer than the limit of 1048576 bytes"),
        ("\u{0}".to_owned(), "line 1: expected a function"),
        (format!("{TITLES}qi_submit_sync 5\n"), "line 3: no time"),
        (
            format!("{TITLES}qi_submit_sync 5 nan us\n"),
            "line 3: not a plausible time",
        ),
        (
            format!("{TITLES}qi_submit_sync -5 1.0 us\n"),
            "line 3: not a number of calls",
        ),
        (
            format!("{TITLES}qi_submit_sync 18446744073709551615 1.0 us\n"),
            "line 3: too many calls",
        ),
        // A time that no profile may have.
        (
            format!("{TITLES}qi_submit_sync 900 9e14 us\n"),
            "invalidation_cycles",
        ),
        (TITLES.to_owned(), ""),
    ];
    for (text, expected) in cases {
        let tracefs = Tracefs::new();
        tracefs.write("trace_stat/function1", &text);
        let output = tracefs.calibrate();
        if expected.is_empty() {
            succeeded(&output);
        } else {
            let code = if expected == "invalidation_cycles" {
                2
            } else {
                1
            };
            let text = failed(&output, code);
            assert!(text.contains(expected), "{expected}: {text}");
        }
        assert_eq!(tracefs.read("function_profile_enabled"), "0", "{expected}");
        assert_eq!(tracefs.read("set_ftrace_filter"), "", "{expected}");
    }
}

#[test]
fn without_an_invalidation_there_is_no_profile() {
    let tracefs = Tracefs::new();
    for cpu in ["trace_stat/function0", "trace_stat/function1"] {
        tracefs.write(
            cpu,
            &format!("{TITLES}  iommu_dma_map_page    3    4.5 us  1.5 us  0.1 us\n"),
        );
    }
    let text = failed(&tracefs.calibrate(), 1);
    assert!(text.contains("no invalidation in 0 s"), "{text}");
    let tracefs = Tracefs::new();
    fs::remove_file(tracefs.at("trace_stat/function0")).unwrap();
    fs::create_dir(tracefs.at("trace_stat/function0")).unwrap();
    let text = failed(&tracefs.calibrate(), 1);
    assert!(text.contains("not a regular file"), "{text}");
    let text = failed_usage(&["calibrate", "--seconds", "1"]);
    assert!(text.contains("--host"), "{text}");
}

fn failed_usage(args: &[&str]) -> String {
    let output = ringfence(args);
    assert_eq!(output.status.code(), Some(2));
    String::from_utf8(output.stderr).unwrap()
}
