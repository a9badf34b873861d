//! Counts of the replay and the oracle on traces that are small enough to count by hand.

use ringfence_devices::DmaRequest;
use ringfence_lab::compare::{runner, testbed};
use ringfence_lab::layer::ContextTarget;
use ringfence_lab::modes::Mode;
use ringfence_lab::plan::Plan;
use ringfence_lab::replay::Outcomes;
use ringfence_trace::{ARENA_BYTES, DeviceIndex, Devices, MappingId};
use ringfence_types::{Access, Iova, RequesterId};

use crate::script::*;

pub(crate) const US: u64 = 1_000;

/// 600 buffers of 100 bytes, each on a separate page, each unmapped before the next map. One
/// operation per microsecond.
pub(crate) const PAIRS: u64 = 600;
pub(crate) const BYTES: u64 = 100;

pub(crate) fn buffer(number: u64) -> [ringfence_types::PhysRange; 1] {
    [memory((number + 16) << 12 | 0x80, BYTES)]
}

pub(crate) fn pairs() -> Script {
    let mut script = Script::default();
    for pair in 0..PAIRS {
        script.map(2 * pair * US, (0, 0, RX), 0, &buffer(pair));
        script.unmap((2 * pair + 1) * US, (0, 0), 0);
    }
    script
}

/// `bursts` times 32 maps followed by 32 unmaps, one operation per microsecond.
pub(crate) fn bursts(bursts: u64) -> Script {
    let mut script = Script::default();
    let mut time = 0;
    for burst in 0..bursts {
        for id in 0..32_u64 {
            script.map(time * US, (0, 0, TX), id as u32, &buffer(burst * 32 + id));
            time += 1;
        }
        for id in 0..32 {
            script.unmap(time * US, (0, 0), id);
            time += 1;
        }
    }
    script
}

/// Runs the metered and the hostile pass.
pub(crate) fn replay(
    name: &str,
    plan: &Plan,
    alive: &[(MappingId, DeviceIndex)],
) -> (Outcomes, Outcomes) {
    let mut runner = runner(&mode(name), &judged_only(true)).unwrap();
    let devices = Devices::new();
    runner.metered.run(plan, &devices).unwrap();
    let mut hostile = runner.attack.unwrap();
    hostile.run(plan, &devices).unwrap();
    (runner.metered.finish(alive), hostile.finish(alive))
}

#[test]
fn every_mode_matches_hand_counts() {
    let (plan, planner) = planned(&pairs().chunk);
    // The last step is the last tick within 12 ms of the last operation.
    let end = 13_000 * US;
    // Mode, invalidations, longest stale window.
    let cases = [
        ("none", 0, end - US),
        ("hwpt", 0, end - US),
        ("swpt", 0, end - US),
        ("strict", 600, 0),
        ("strict+", 600, 0),
        // Flushes at the 250th and the 500th entry. The timer flushes the rest, at the first tick
        // 10 ms after the 501st.
        ("defer", 3, 12_000 * US - 1001 * US),
        ("defer+", 3, 12_000 * US - 1001 * US),
        // 600 allocations do not wrap 2^20 pages.
        ("bitmap", 0, end - US),
        ("strict-bitmap", 600, 0),
        ("freebsd-paper", 600, 0),
        ("freebsd", 600, 0),
        ("linux-strict", 600, 0),
        // Flushes with the 257th and the 513th unmap, whose entries are cleared by then. The timer
        // flushes the rest, 10 ms after the 513th.
        ("linux-lazy", 3, 12_000 * US - 1027 * US),
        ("fence", 600, 0),
        // A map of the same key follows each unmap.
        ("fence-burst", 600, 0),
        ("kvm-baseline", 0, end - US),
        // Invalidations by the host.
        ("emulated-strict", 600, 0),
        ("nested-strict", 600, 0),
        // As in `linux-lazy`: the host passes each flush on.
        ("emulated-lazy", 3, 12_000 * US - 1027 * US),
        ("virtio-strict", 600, 0),
        ("pviommu", 600, 0),
        // No cache cycle ends.
        ("pviommu+rtc", 0, end - US),
        ("pviommu+rtc+hopt", 0, end - US),
        // Each unmap request is sent with the following map, a microsecond later. The timer sends
        // the last one, 10 ms after the 513th.
        ("virtio-lazy", 600, 12_000 * US - 1199 * US),
    ];
    for (name, invalidations, window) in cases {
        let (metered, hostile) = replay(name, &plan, &planner.live_mappings());
        for outcomes in [&metered, &hostile] {
            assert_eq!((outcomes.maps, outcomes.unmaps), (PAIRS, PAIRS), "{name}");
            assert_eq!(outcomes.live_max, 1, "{name}");
            assert_eq!(outcomes.alive_at_end, 0, "{name}");
            assert_eq!(outcomes.invalidations, invalidations, "{name}");
            assert_eq!(outcomes.stale_max_ns, window, "{name}");
            assert_eq!(outcomes.tally.false_faults, 0, "{name}");
            assert_eq!(outcomes.refused_maps + outcomes.refused_unmaps, 0, "{name}");
        }
        // A correct device makes one access per page, and every one is granted.
        assert_eq!(metered.tally.accesses, PAIRS, "{name}");
        assert_eq!(metered.attempts, 0, "{name}");
        assert_eq!(
            metered.tally.violations() + metered.tally.colocated,
            0,
            "{name}"
        );
        // The attacker accesses both ends of each dead range, and bytes beside each buffer.
        assert!(
            hostile.attempts >= 2 * PAIRS,
            "{name}: {}",
            hostile.attempts
        );
        assert_eq!(hostile.tally.accesses, PAIRS + hostile.attempts, "{name}");
        let mode = mode(name);
        assert_eq!(window > 0, hostile.tally.stale > 0, "{name}");
        assert_eq!(
            window > 0,
            mode.safety() < ringfence_lab::modes::Safety::Strict,
            "{name}"
        );
        // Both neighbours of each buffer lie on its page.
        assert_eq!(hostile.tally.colocated, 2 * PAIRS, "{name}");
    }
}

/// A receive ring whose buffers are replaced in order. In the second lap a transmit buffer is
/// unmapped between: the long-lasting ring interference of EIOVAR section 4. Buffers have `pages`
/// pages.
fn interference(pages: u64) -> Script {
    let buffer = |number: u64| {
        [memory(
            (16 + number * pages) << 12,
            (pages - 1) << 12 | BYTES,
        )]
    };
    let mut script = Script::default();
    let mut time = 0;
    let mut at = || {
        time += 1;
        time * US
    };
    for id in 0..64 {
        script.map(at(), (0, 0, TX), 1000 + id, &buffer(u64::from(id)));
    }
    for id in 0..512 {
        script.map(at(), (0, 0, RX), id, &buffer(100 + u64::from(id)));
    }
    for lap in 0..4 {
        for id in 0..512 {
            script.unmap(at(), (0, 0), id);
            if (lap, id) == (1, 300) {
                script.unmap(at(), (0, 0), 1007);
            }
            script.map(at(), (0, 0, RX), id, &buffer(100 + u64::from(id)));
        }
    }
    script
}

/// Each mode searches as its allocator does: the trees of `strict` and `defer` under interference,
/// those with free lists never, and a bitmap the same with either flush policy.
#[test]
fn modes_search_as_their_allocators_do() {
    let (plan, planner) = planned(&interference(1).chunk);
    let [strict, plus, defer, defer_plus, bitmap, strict_bitmap] = [
        "strict",
        "strict+",
        "defer",
        "defer+",
        "bitmap",
        "strict-bitmap",
    ]
    .map(|name| replay(name, &plan, &planner.live_mappings()).0);
    assert!(strict.search_max > 200, "{}", strict.search_max);
    assert!(defer.search_max > 200, "{}", defer.search_max);
    assert_eq!([plus.search_steps, defer_plus.search_steps], [0; 2]);
    let of = |of: &Outcomes| (of.search_steps, of.search_max, of.table_bytes);
    assert_eq!(of(&strict_bitmap), of(&bitmap));
    for tree in [&strict, &plus] {
        assert_ne!(of(&strict_bitmap), of(tree));
    }
    assert_eq!(strict_bitmap.invalidations, strict.invalidations);
    assert_eq!(bitmap.invalidations, 0);
}

/// Unbounded free lists have any length of range, those of Linux none of 64 pages, and a bounded
/// list loses what it cannot hold.
#[test]
fn free_lists_hold_what_their_modes_say() {
    let searched = |pages, name: &str| {
        let (plan, planner) = planned(&interference(pages).chunk);
        replay(name, &plan, &planner.live_mappings()).0.search_steps > 0
    };
    for (pages, name, searches) in [
        (64, "strict+", false),
        (64, "defer+", false),
        (64, "linux-strict", true),
        (1, "linux-strict", false),
        (1, "alloc=eiovar-1,table=radix,flush=deferred", true),
        (1, "alloc=eiovar-512,table=radix,flush=deferred", false),
    ] {
        assert_eq!(searched(pages, name), searches, "{pages} {name}");
    }
}

#[test]
fn stale_byte_seconds_are_the_sum_over_all_windows() {
    let (plan, planner) = planned(&pairs().chunk);
    let unmap = |pair: u64| 2 * pair + 1;
    let sum = |windows: &dyn Fn(u64) -> u64| {
        let us: u64 = (0..PAIRS).map(|pair| windows(pair) - unmap(pair)).sum();
        (us * BYTES) as f64 / 1e6
    };
    let cases: [(&str, f64); 5] = [
        ("none", sum(&|_| 13_000)),
        ("bitmap", sum(&|_| 13_000)),
        (
            "defer",
            sum(&|pair| match pair / 250 {
                0 => unmap(249),
                1 => unmap(499),
                _ => 12_000,
            }),
        ),
        (
            "linux-lazy",
            sum(&|pair| match pair {
                0..=256 => unmap(256),
                257..=512 => unmap(512),
                _ => 12_000,
            }),
        ),
        ("strict", 0.0),
    ];
    for (name, expected) in cases {
        let (metered, _) = replay(name, &plan, &planner.live_mappings());
        let got = metered.stale_byte_seconds;
        assert!((got - expected).abs() < 1e-9, "{name}: {got} {expected}");
    }
}

#[test]
fn one_invalidation_ends_a_burst_and_gives_its_buffers_back() {
    let (plan, planner) = planned(&bursts(10).chunk);
    assert_eq!((planner.bursts(), planner.bursts_cut_by_map()), (10, 0));
    let (metered, hostile) = replay("fence-burst", &plan, &planner.live_mappings());
    for outcomes in [&metered, &hostile] {
        assert_eq!(outcomes.invalidations, 10);
        assert_eq!(outcomes.live_max, 32);
        // Nine bursts last until the next map, 32 us after their first unmap. The last one lasts
        // its full 50 us.
        assert_eq!(outcomes.release_delay_max_ns, 50 * US);
        assert_eq!(outcomes.stale_max_ns, 0);
        assert_eq!(outcomes.tally.violations(), 0);
        assert_eq!(outcomes.tally.false_faults, 0);
    }
    let (strict, _) = replay("fence", &plan, &planner.live_mappings());
    assert_eq!(
        (strict.invalidations, strict.release_delay_max_ns),
        (320, 0)
    );
}

/// The nine bursts above withhold their buffers for 32 to 1 us, and the last one for 50 to 19 us.
#[test]
fn release_delays_are_those_of_every_buffer() {
    let (plan, planner) = planned(&bursts(10).chunk);
    let (metered, _) = replay("fence-burst", &plan, &planner.live_mappings());
    let mut delays: Vec<u64> = (0..32).map(|unmap| (50 - unmap) * US).collect();
    delays.extend((0..9).flat_map(|_| (0..32).map(|unmap| (32 - unmap) * US)));
    delays.sort_unstable();
    let transmit = &metered.release_delays.transmit;
    for (percent, exact) in [(50, 18 * US), (99, 47 * US), (100, 50 * US)] {
        let rank = (delays.len() * percent).div_ceil(100);
        assert_eq!(delays[rank - 1], exact, "{percent}");
        let found = transmit.percentile(percent as u64).unwrap();
        assert!(
            found >= exact && found - exact <= exact / 64,
            "{percent}: {found}"
        );
    }
    assert_eq!(metered.release_delays.receive.percentile(99), None);
    // A mode that returns each buffer at its unmap has as many delays, all of them 0.
    let (strict, _) = replay("fence", &plan, &planner.live_mappings());
    assert_eq!(strict.release_delays.all().percentile(100), Some(0));
    let (plan, planner) = planned(&pairs().chunk);
    let (strict, _) = replay("fence", &plan, &planner.live_mappings());
    assert_eq!(strict.release_delays.receive.percentile(50), Some(0));
    assert_eq!(strict.release_delays.transmit.percentile(50), None);
}

#[test]
fn addresses_are_flushed_once_a_wrap() {
    // Each map takes half of a space of 2^20 pages minus the first. The third finds no free range.
    let pages = 1 << 19;
    let mut script = Script::default();
    for turn in 0..3 {
        script.map(
            2 * turn * US,
            (0, 0, RX),
            0,
            &[memory(0, (pages - 1) << 12)],
        );
        script.unmap((2 * turn + 1) * US, (0, 0), 0);
    }
    let (plan, planner) = planned(&script.chunk);
    let mut runner = runner(&mode("bitmap"), &judged_only(false)).unwrap();
    runner.metered.run(&plan, &Devices::new()).unwrap();
    let outcomes = runner.metered.finish(&planner.live_mappings());
    assert_eq!((outcomes.maps, outcomes.invalidations), (3, 1));
    // The first window lasts from its unmap to the third map. The last one is open at the end, 12
    // ms later.
    assert_eq!(outcomes.stale_max_ns, 12_000 * US - 5 * US);
}

/// CG11: the third map finds no free range. One request then flushes the space, and every other
/// request stores or clears one entry.
#[test]
fn xens_deferred_flush_is_one_request_a_wrap() {
    let half = (1 << 19) - 1;
    let mut script = Script::default();
    for (turn, pages) in [(0, half), (1, half), (2, 2)] {
        let piece = [memory(0, pages << 12)];
        script.map(2 * turn * US, (0, 0, RX), 0, &piece);
        script.unmap((2 * turn + 1) * US, (0, 0), 0);
    }
    let (plan, planner) = planned(&script.chunk);
    let mut runner = runner(&mode("xen-lazy"), &judged_only(false)).unwrap();
    runner.metered.run(&plan, &Devices::new()).unwrap();
    let outcomes = runner.metered.finish(&planner.live_mappings());
    assert_eq!((outcomes.maps, outcomes.invalidations), (3, 1));
    let entries = half + half + 2;
    assert_eq!(outcomes.traffic.requests, 2 * entries + 1);
}

#[test]
fn refused_calls_are_counted_without_effect() {
    let mut script = Script::default();
    // The bitmap covers 4 GiB.
    script.map(0, (0, 0, RX), 0, &[memory(1 << 32, 5 << 30)]);
    script.map(US, (0, 0, RX), 1, &buffer(1));
    script.unmap(2 * US, (0, 0), 0);
    script.unmap(3 * US, (0, 0), 1);
    let (plan, planner) = planned(&script.chunk);
    let (metered, hostile) = replay("strict-bitmap", &plan, &planner.live_mappings());
    for outcomes in [&metered, &hostile] {
        assert_eq!((outcomes.maps, outcomes.unmaps), (1, 1));
        assert_eq!(outcomes.refused_maps, 1);
        assert!(outcomes.first_refusal.is_some());
        assert_eq!(outcomes.invalidations, 1);
        assert_eq!(outcomes.tally.violations() + outcomes.tally.false_faults, 0);
    }
}

#[test]
fn mappings_live_at_the_end_are_unmapped_uncounted() {
    let mut script = Script::default();
    script.map(0, (0, 0, RX), 0, &buffer(0));
    script.map(US, (1, 1, TX), 1, &buffer(1));
    script.unmap(2 * US, (0, 0), 0);
    let (plan, planner) = planned(&script.chunk);
    for mode in Mode::named() {
        let (metered, _) = replay(&mode.name, &plan, &planner.live_mappings());
        assert_eq!((metered.maps, metered.unmaps), (2, 1), "{}", mode.name);
        assert_eq!(metered.alive_at_end, 1, "{}", mode.name);
        assert_eq!(metered.tally.accesses, 1, "{}", mode.name);
    }
}

#[test]
fn devices_have_domains_of_their_own_and_share_the_old_queue() {
    // 250 unmaps alternate between two devices. They fill the unit's queue once, but not the
    // domains' queues.
    let mut script = Script::default();
    for pair in 0..250_u64 {
        let device = (pair % 2) as u16;
        script.map(2 * pair * US, (device, device, RX), 0, &buffer(pair));
        script.unmap((2 * pair + 1) * US, (device, device), 0);
    }
    let (plan, planner) = planned(&script.chunk);
    // The timer flushes both domains of linux-lazy.
    for (name, invalidations, window) in [
        ("defer", 1, 2 * 249 * US),
        ("linux-lazy", 2, 11_000 * US - US),
    ] {
        let (metered, hostile) = replay(name, &plan, &planner.live_mappings());
        assert_eq!(metered.invalidations, invalidations, "{name}");
        assert_eq!(metered.stale_max_ns, window, "{name}");
        assert_eq!(hostile.tally.foreign, 0, "{name}");
    }
}

#[test]
fn swpt_is_looked_up_in_a_table_and_hwpt_is_not() {
    let mut script = pairs();
    // The last page of memory.
    let last = [memory(ARENA_BYTES - BYTES, BYTES)];
    script.map(2 * PAIRS * US, (0, 0, RX), 0, &last);
    script.unmap((2 * PAIRS + 1) * US, (0, 0), 0);
    let (plan, planner) = planned(&script.chunk);
    let [none, hwpt, swpt] = [
        ("none", 0, false),
        ("hwpt", 0, false),
        ("swpt", PAIRS + 1, true),
    ]
    .map(|(name, lookups, walks)| {
        let (metered, _) = replay(name, &plan, &planner.live_mappings());
        assert_eq!(metered.hardware.lookups(), lookups, "{name}");
        assert_eq!(metered.hardware.walk_references > 0, walks, "{name}");
        assert_eq!(metered.tally.false_faults, 0, "{name}");
        metered.table_bytes
    });
    // One table of levels 4 and 3 each, and one of level 2 for each GiB. It exists before the first
    // map, and no map adds to it.
    let tables = 1 + 1 + (ARENA_BYTES >> 30);
    assert_eq!((none, swpt - hwpt), (hwpt, tables * 4096));
}

/// The timer of a deferred flush runs from the oldest unmap that waits.
#[test]
fn the_timer_runs_from_the_oldest_unmap() {
    let mut script = Script::default();
    script.map(0, (0, 0, RX), 0, &buffer(0));
    script.unmap(2 * US, (0, 0), 0);
    script.map(9_000 * US, (0, 0, RX), 1, &buffer(1));
    script.unmap(9_001 * US, (0, 0), 1);
    let (plan, planner) = planned(&script.chunk);
    for name in ["defer", "defer+"] {
        let (metered, _) = replay(name, &plan, &planner.live_mappings());
        // The first tick, one per millisecond, that is 10 ms after the first unmap.
        assert_eq!(
            (metered.invalidations, metered.stale_max_ns),
            (1, (11_000 - 2) * US),
            "{name}"
        );
    }
}

/// With pass-through in hardware, an attached device reaches memory by its context entry, and
/// another requester is stopped. Without an IOMMU, none is.
#[test]
fn hwpt_looks_the_context_up_and_none_does_not() {
    for (name, stops) in [("none", false), ("hwpt", true), ("swpt", true)] {
        let mut bed = testbed(&mode(name), &judged_only(false)).unwrap();
        bed.layer.reserve(1, 1).unwrap();
        let id = bed.machine.requester(0, RequesterId::new(0x1000)).unwrap();
        let (domain, to) = bed.layer.attach(DeviceIndex(0), id).unwrap();
        let has_table = matches!(to, ContextTarget::Table(_));
        assert_eq!(has_table, name == "swpt", "{name}");
        bed.machine.attach(id, domain, to).unwrap();
        let mut probe = |device| {
            let request = DmaRequest {
                device,
                iova: Iova::new(0x5000),
                bytes: 8,
                access: Access::Read,
            };
            bed.machine.probe(&request, &mut ())
        };
        assert!(probe(id).is_ok(), "{name}");
        let other = RequesterId::new(id.get() | 1);
        assert_eq!(probe(other).is_err(), stops, "{name}");
    }
}
