//! Requests and exposure of modes that cache mappings, counted by hand.

use ringfence_lab::compare::runner;
use ringfence_trace::Devices;

use crate::replays::{BYTES, PAIRS, US, buffer, pairs};
use crate::script::*;

/// One buffer, mapped repeatedly, takes one request in all. The stale window closes with each
/// reuse. The last window closes with the batch that evicts the mapping: 40 ms in cycles of 10 ms,
/// after an unmap in the first cycle. The outcome reports the mappings kept at the end.
#[test]
fn cache_requests_once_and_expires_in_time() {
    const MS: u64 = 1_000 * US;
    let mut script = Script::default();
    for turn in 0..100 {
        script.map(2 * turn * US, (0, 0, RX), 0, &buffer(0));
        script.unmap((2 * turn + 1) * US, (0, 0), 0);
    }
    // Time passes; another device is active.
    let late = 60 * MS;
    script.map(late, (1, 0, TX), 1, &buffer(1));
    script.unmap(late + US, (1, 0), 1);
    let mut options = judged_only(true);
    options.cache_cycles.cycle_ns = 10 * MS;
    let mode = mode("pviommu+rtc");
    let mut runner = runner(&mode, &options).unwrap();
    let (plan, planner) = planned_with(&script.chunk, &[options.cache_cycles]);
    runner.metered.run(&plan, &Devices::new()).unwrap();
    let metered = runner.metered.finish(&planner.live_mappings());
    // Two maps, and one unmap batch.
    assert_eq!(metered.traffic.requests, 3);
    assert_eq!(metered.invalidations, 1);
    assert_eq!(metered.stale_max_ns, 40 * MS - 199 * US);
    assert_eq!(metered.kept_at_end, 1);
    // The last tick is within 12 ms of the last operation.
    let kept = metered.kept_byte_seconds * 1e9 / BYTES as f64;
    assert!((11e6..=12e6).contains(&kept), "{kept}");
    let all = metered.stale_byte_seconds * 1e9 / BYTES as f64;
    let closed = (99 * US + 40 * MS - 199 * US) as f64;
    assert!((all - kept - closed).abs() < 1e-3, "{all} {kept} {closed}");
    // The cache evicts it in the fourth cycle after its own, 39,999 us after its release, and is
    // empty then.
    let exposure = metered.exposure;
    assert_eq!(exposure.max_ns, 40 * MS - US);
    let exposed = exposure.byte_seconds * 1e9 / BYTES as f64;
    let in_full = closed + (40 * MS - US) as f64;
    assert!((exposed - in_full).abs() < 1e-3, "{exposed} {in_full}");
    assert_eq!(exposure.after_end_ns + kept as u64, 40 * MS - US);
    assert_eq!(exposure.overdue, 0);
    assert_eq!(metered.tally.violations() + metered.tally.false_faults, 0);
}

/// Exposure by caches after a trace, which is most of it. 600 buffers never recur and one always
/// does. Attackers reach the dead ones until the cache evicts them. The adaptive cache evicts them
/// as soon as it knows the rhythm of the recurring one. The tree keeps each for less than T x (C +
/// 1). Modes without a cache expose nothing after the trace.
#[test]
fn the_oracle_measures_what_caches_expose_after_the_trace() {
    const MS: u64 = 1_000 * US;
    let mut script = pairs();
    for turn in 0..100 {
        let at = (2 * PAIRS + 2 * turn) * US;
        script.map(at, (0, 0, RX), 0, &buffer(PAIRS));
        script.unmap(at + US, (0, 0), 0);
    }
    let mut options = judged_only(true);
    options.cache_cycles.cycle_ns = 10 * MS;
    let exposed = |name: &str| {
        let mode = mode(name);
        let mut runner = runner(&mode, &options).unwrap();
        let cycles = options.cache_cycles.for_mode(&mode);
        let (plan, planner) = planned_with(&script.chunk, &Vec::from_iter(cycles));
        let mut both = [runner.metered, runner.attack.take().unwrap()].map(|mut judge| {
            judge.run(&plan, &Devices::new()).unwrap();
            judge.finish(&planner.live_mappings())
        });
        both[0].exposure.reached_after_end = both[1].exposure.reached_after_end;
        both[0].clone()
    };
    let fixed = exposed("pviommu+rtc");
    // All in the first cycle, and the trace's end in the second at the latest: 40 ms minus the
    // elapsed part of the cycle.
    assert!(fixed.exposure.max_ns < 40 * MS && fixed.exposure.max_ns > 38 * MS);
    assert!(fixed.exposure.byte_seconds > 2.5 * fixed.stale_byte_seconds);
    assert!(fixed.exposure.reached_after_end > 0);
    assert_eq!((fixed.kept_at_end, fixed.exposure.overdue), (PAIRS + 1, 0));
    let adaptive = exposed("pviommu+rtc-adaptive");
    assert!(adaptive.exposure.byte_seconds < fixed.exposure.byte_seconds / 4.0);
    assert!(adaptive.exposure.max_ns < fixed.exposure.max_ns);
    assert_eq!(adaptive.exposure.overdue, 0);
    for name in ["pviommu", "strict", "linux-lazy"] {
        let outcomes = exposed(name);
        let exposure = outcomes.exposure;
        assert_eq!(exposure.byte_seconds, outcomes.stale_byte_seconds, "{name}");
        assert_eq!(exposure.max_ns, outcomes.stale_max_ns, "{name}");
        assert_eq!((exposure.after_end_ns, exposure.reached_after_end), (0, 0));
    }
    // The cache as published also evicts sections of its queue with their cycle, as long as its
    // tree loses no mapping.
    let as_published = exposed("rtc-paper");
    assert_eq!(as_published.exposure.max_ns, fixed.exposure.max_ns);
}
