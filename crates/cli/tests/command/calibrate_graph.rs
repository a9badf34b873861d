//! `calibrate --host` with a synthetic tracefs without the function profiler: it uses the function
//! graph tracer. `tests/guest/calibrate.sh` does the same with real ones.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Output;

use crate::{Scratch, failed, ringfence, succeeded};

const TITLES: &str = "# tracer: function_graph\n#\n\
    # CPU  DURATION                  FUNCTION CALLS\n\
    # |     |   |                     |   |   |   |\n";

/// Files of an idle tracefs.
const FILES: [(&str, &str); 14] = [
    ("current_tracer", "nop\n"),
    ("available_tracers", "blk function_graph function nop\n"),
    ("set_ftrace_filter", "#### all functions enabled ####\n"),
    ("set_ftrace_notrace", "#### no functions disabled ####\n"),
    ("set_ftrace_pid", "no pid\n"),
    ("set_graph_function", "#### all functions enabled ####\n"),
    ("set_graph_notrace", "#### no functions disabled ####\n"),
    ("max_graph_depth", "0\n"),
    ("tracing_thresh", "0\n"),
    ("set_event", ""),
    ("trace", "# tracer: nop\n#\n"),
    ("tracing_on", "1\n"),
    ("options/funcgraph-duration", "1\n"),
    ("options/funcgraph-tail", "0\n"),
];

/// A tracefs whose tracer has seen two CPUs in lazy mode.
struct Tracefs(Scratch);

impl Tracefs {
    fn new() -> Self {
        let scratch = Scratch::new("graph");
        for dir in ["options", "per_cpu/cpu0", "per_cpu/cpu1"] {
            fs::create_dir_all(scratch.path(dir)).unwrap();
        }
        let tracefs = Self(scratch);
        for (name, text) in FILES {
            tracefs.write(name, text);
        }
        tracefs.write(
            "available_filter_functions",
            "schedule\niommu_dma_unmap_page\niommu_completion_wait.part.0\niommu_completion_wait\n\
             qi_submit_sync.isra.0\n__viommu_sync_req.isra.0 [virtio_iommu]\n",
        );
        let unmap = " 0)   1.500 us    |  iommu_dma_unmap_page();\n".repeat(9);
        let flush = " 0) + 30.000 us   |  } /* qi_submit_sync.isra.0 */\n";
        tracefs.write("per_cpu/cpu0/trace", &format!("{TITLES}{unmap}{flush}"));
        let flush = " 1) + 50.000 us   |  qi_submit_sync.isra.0();\n";
        tracefs.write("per_cpu/cpu1/trace", &format!("{TITLES}{flush}"));
        tracefs
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path(name).into()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.at(name), text).unwrap();
    }

    /// Contents of the files that a measurement changes, without the ends of lines.
    fn state(&self) -> BTreeMap<&'static str, Option<String>> {
        let read = |name| fs::read_to_string(self.at(name)).ok();
        FILES
            .map(|(name, _)| (name, read(name).map(|text| text.trim().to_owned())))
            .into()
    }

    fn calibrate(&self) -> Output {
        let dir = self.0.path("");
        ringfence(&["calibrate", "--host", "--seconds", "0", "--tracefs", &dir])
    }
}

#[test]
fn durations_of_all_processors_become_a_profile() {
    let tracefs = Tracefs::new();
    let before = tracefs.state();
    let text = succeeded(&tracefs.calibrate());
    for part in [
        "unmap (iommu_dma_unmap_page): 1500 ns, 9 calls",
        "invalidation (qi_submit_sync): 40000 ns, 2 calls",
        "with the kernel's function graph tracer",
        // Nine unmaps share two flushes.
        "40000 ns in the mean of 2 calls for 9 unmaps; lazy mode: each invalidates a whole domain",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let profile: toml::Table = text.parse().unwrap();
    let (clock, cycles) = (&profile["clock_ghz"], &profile["invalidation_cycles"]);
    let expected = clock.as_float().unwrap() * 40_000.0;
    assert!((cycles.as_integer().unwrap() as f64 - expected).abs() <= 0.5);
    // The kernel prints an empty filter as a comment.
    let mut after = tracefs.state();
    assert_eq!(after["set_ftrace_filter"].as_deref(), Some(""));
    after.insert("set_ftrace_filter", before["set_ftrace_filter"].clone());
    assert_eq!(after, before);
}

#[test]
fn strict_kernels_have_no_note() {
    let tracefs = Tracefs::new();
    let pair = " 1)   9.000 us    |  qi_submit_sync();\n".repeat(8);
    tracefs.write("per_cpu/cpu1/trace", &pair);
    let text = succeeded(&tracefs.calibrate());
    assert!(!text.contains("lazy mode"), "{text}");
}

#[test]
fn a_tracer_in_use_is_left_alone() {
    let cases = [
        (
            "current_tracer",
            "function\n",
            "current_tracer: in use (function)",
        ),
        (
            "set_ftrace_filter",
            "schedule\n",
            "set_ftrace_filter: in use (schedule)",
        ),
        ("set_ftrace_notrace", "a\n", "set_ftrace_notrace: in use"),
        ("set_ftrace_pid", "1\n", "set_ftrace_pid: in use"),
        ("set_graph_function", "a\n", "set_graph_function: in use"),
        ("set_graph_notrace", "a\n", "set_graph_notrace: in use"),
        ("max_graph_depth", "1\n", "max_graph_depth: in use"),
        ("tracing_thresh", "100\n", "tracing_thresh: in use"),
        ("set_event", "dma:dma_map_phys\n", "set_event: in use"),
        (
            "trace",
            "#\n dd-1 [000] 1.0: x\n",
            "end the other trace and clear it",
        ),
        (
            "available_tracers",
            "function nop\n",
            "CONFIG_FUNCTION_GRAPH_TRACER",
        ),
        (
            "available_filter_functions",
            "schedule\n",
            "no function that invalidates",
        ),
    ];
    for (name, content, expected) in cases {
        let tracefs = Tracefs::new();
        tracefs.write(name, content);
        let before = tracefs.state();
        let text = failed(&tracefs.calibrate(), 1);
        assert!(text.contains(expected), "{name}: {text}");
        assert_eq!(tracefs.state(), before, "{name}");
    }
}

#[test]
fn hostile_buffers_are_refused_and_the_tracer_stops() {
    let cases = [
        (
            "x".repeat(1 << 20),
            "cpu1/trace: line 1: longer than 4096 bytes",
        ),
        (
            " 0) nan us |  qi_submit_sync();\n".to_owned(),
            "line 1: not a plausible time",
        ),
        (
            TITLES.to_owned() + " 0) 9..9 us |  qi_submit_sync();\n",
            "line 5: not a time",
        ),
    ];
    for (text, expected) in cases {
        let tracefs = Tracefs::new();
        tracefs.write("per_cpu/cpu1/trace", &text);
        let text = failed(&tracefs.calibrate(), 1);
        assert!(text.contains(expected), "{expected}: {text}");
        let state = tracefs.state();
        for (name, expected) in [
            ("current_tracer", "nop"),
            ("set_ftrace_filter", ""),
            ("tracing_on", "1"),
            ("options/funcgraph-tail", "0"),
        ] {
            assert_eq!(state[name].as_deref(), Some(expected), "{name}");
        }
    }
    let tracefs = Tracefs::new();
    fs::remove_file(tracefs.at("per_cpu/cpu0/trace")).unwrap();
    fs::create_dir(tracefs.at("per_cpu/cpu0/trace")).unwrap();
    let text = failed(&tracefs.calibrate(), 1);
    assert!(text.contains("not a regular file"), "{text}");
}

#[test]
fn a_start_that_fails_is_undone() {
    let tracefs = Tracefs::new();
    fs::remove_file(tracefs.at("options/funcgraph-tail")).unwrap();
    let text = failed(&tracefs.calibrate(), 1);
    assert!(text.contains("options/funcgraph-tail"), "{text}");
    let state = tracefs.state();
    for (name, expected) in [("set_ftrace_filter", ""), ("current_tracer", "nop")] {
        assert_eq!(state[name].as_deref(), Some(expected), "{name}");
    }
    assert_eq!(state["tracing_on"].as_deref(), Some("1"));
}
