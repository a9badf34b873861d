//! The meter's components in instructions, which are exact: in either order of ablation they sum to
//! the whole. The two orders agree to a tenth of the whole, because the compiler inlines
//! differently in each replica.
//!
//! The test runs itself under callgrind, once for each replica.

use std::collections::BTreeMap;
use std::process::Command;

use ringfence_lab::compare::{CompareOptions, meter};
use ringfence_lab::meter::{AblationOrders, CONFIG_NAMES, SecondAblation};
use ringfence_lab::modes::Mode;
use ringfence_lab::plan::{Plan, Planner};
use ringfence_trace::{Chunk, Operations, SAMPLE, TraceOptions, TraceSource};

const WORKER: &str = "RINGFENCE_COUNT";

/// Function that callgrind counts. Its name appears on callgrind's command line.
#[inline(never)]
fn counted_by_callgrind(work: &mut dyn FnMut()) {
    work();
    std::hint::black_box(());
}

/// Replays the sample in the replica that the environment variable names. Does nothing without it.
#[test]
fn worker() {
    let Ok(job) = std::env::var(WORKER) else {
        return;
    };
    let (mode, config) = job.split_once(':').unwrap();
    let config: usize = config.parse().unwrap();
    let source = TraceSource::from_reader("sample", SAMPLE).unwrap();
    let mut operations = Operations::new("sample", source, TraceOptions::default());
    let mut planner = Planner::new();
    let (mut chunk, mut plan) = (Chunk::default(), Plan::default());
    let options = CompareOptions {
        repetitions: 1,
        attack: false,
        ..CompareOptions::default()
    };
    let mode = Mode::find(mode).unwrap();
    let mut meter = meter(&mode, &options).unwrap();
    let mut more = true;
    while more {
        more = operations.next_chunk(&mut chunk).unwrap();
        planner.plan(&chunk, &mut plan).unwrap();
        let found = meter
            .replay_one(config, &plan, &mut |work| counted_by_callgrind(work))
            .unwrap();
        assert!(found, "no such replica");
    }
}

fn instructions(mode: &str, config: usize) -> u64 {
    let out = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg("--toggle-collect=*counted_by_callgrind*")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "worker", "--test-threads=1"])
        .env(WORKER, format!("{mode}:{config}"))
        .output()
        .expect("valgrind is installed");
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{text}");
    let collected = text
        .lines()
        .find_map(|line| line.split("Collected :").nth(1));
    let count = collected.unwrap_or_else(|| panic!("callgrind counted nothing: {text}"));
    count.trim().parse().unwrap()
}

#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "counts are of the release build; run by cargo xtask test"
)]
fn components_add_up_exactly_in_instructions() {
    for (mode, has_index) in [("strict+", true), ("fence", false)] {
        let counts: BTreeMap<&str, u64> = CONFIG_NAMES
            .iter()
            .enumerate()
            // An allocator without an index has no `no_find` replica.
            .filter(|(_, name)| has_index || **name != "no_find")
            .map(|(config, name)| (*name, instructions(mode, config)))
            .collect();
        println!("{mode}: {counts:?}");
        let counted = |name| *counts.get(name).unwrap_or(&counts["full"]) as f64;
        let orders = AblationOrders::new(CONFIG_NAMES.map(counted), SecondAblation::Table);
        for order in [orders.forward, orders.backward] {
            let sum = order.iter().sum::<f64>() + orders.other;
            assert!(
                (sum - orders.whole).abs() < f64::EPSILON,
                "{mode}: {sum} {orders:?}"
            );
            assert!(order.iter().all(|part| *part > 0.0), "{mode}: {orders:?}");
        }
        assert!(orders.other > 0.0, "{mode}: {orders:?}");
        assert!(
            orders.spread() < 0.10,
            "{mode}: the orders disagree: {orders:?}"
        );
        // Counts may differ slightly: the heap's location decides how a reallocation copies.
        let (first, again) = (counts["full"], instructions(mode, 0));
        let difference = first.abs_diff(again);
        assert!(
            difference * 1000 < first,
            "{mode}: {first} and {again} instructions"
        );
    }
}
