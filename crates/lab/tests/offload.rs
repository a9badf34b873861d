//! The meter of a mode with a sidecore runs a thread of its own. The test has its own process,
//! because it counts the process's threads.

#![cfg(target_os = "linux")]

use ringfence_lab::compare::{CompareOptions, runner};
use ringfence_lab::compose::compose;
use ringfence_lab::modes::Mode;

/// Returns the number of the process's threads named "sidecore".
fn sidecores() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    // A thread that ends meanwhile has no name.
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim_end() == "sidecore").count()
}

/// Returns true once no sidecore is listed. The kernel lists a joined thread for a moment.
fn all_ended() -> bool {
    (0..100_000).any(|_| {
        std::thread::yield_now();
        sidecores() == 0
    })
}

#[test]
fn a_meter_of_a_sidecore_runs_a_thread() {
    assert_eq!(sidecores(), 0);
    for (name, offloaded, later) in [
        ("linux-strict", false, false),
        ("sidecore", true, true),
        ("sidecore-strict", true, false),
        (
            "alloc=magazine,table=cached-radix,flush=async,owner=sidecore",
            true,
            true,
        ),
        (
            "alloc=magazine,table=flat,flush=per-unmap,owner=sidecore",
            true,
            false,
        ),
    ] {
        let options = CompareOptions {
            repetitions: 1,
            attack: false,
            ..CompareOptions::new()
        };
        let mode = Mode::find(name).unwrap_or_else(|| compose(name).unwrap());
        let runner = runner(&mode, &options).unwrap();
        assert_eq!(sidecores() > 0, offloaded, "{name}");
        // Unmaps of `sidecore` return at once. Those of `sidecore-strict` are timed until their
        // invalidation has completed.
        let meter = runner.meter.as_ref().unwrap();
        assert_eq!(meter.unmaps_later(), later, "{name}");
        drop(runner);
        assert!(all_ended(), "{name}");
    }
}
