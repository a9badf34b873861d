//! The meter of a mode with a sidecore runs a thread of its own. The test has its own process,
//! because it counts the process's threads.

#![cfg(target_os = "linux")]

use ringfence_lab::compare::{CompareOptions, runner};
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
    for (name, offloaded) in [
        ("linux-strict", false),
        ("sidecore", true),
        ("sidecore-strict", true),
    ] {
        let options = CompareOptions {
            repetitions: 1,
            attack: false,
            ..CompareOptions::new()
        };
        let runner = runner(&Mode::find(name).unwrap(), &options).unwrap();
        assert_eq!(sidecores() > 0, offloaded, "{name}");
        drop(runner);
        assert!(all_ended(), "{name}");
    }
}
