//! Counts of the replay and the oracle on traces that are small enough to count by hand.

use ringfence_lab::compare::runner;
use ringfence_lab::guest::LookupStats;
use ringfence_lab::modes::Mode;
use ringfence_lab::plan::Plan;
use ringfence_lab::replay::Outcomes;
use ringfence_trace::{DeviceIndex, Devices, MappingId};

use crate::script::*;

const US: u64 = 1_000;

/// 600 buffers of 100 bytes, each on a separate page, each unmapped before the next map. One
/// operation per microsecond.
const PAIRS: u64 = 600;
const BYTES: u64 = 100;

fn buffer(number: u64) -> [ringfence_types::PhysRange; 1] {
    [memory((number + 16) << 12 | 0x80, BYTES)]
}

fn pairs() -> Script {
    let mut script = Script::default();
    for pair in 0..PAIRS {
        script.map(2 * pair * US, (0, 0, RX), 0, &buffer(pair));
        script.unmap((2 * pair + 1) * US, (0, 0), 0);
    }
    script
}

/// `bursts` times 32 maps followed by 32 unmaps, one operation per microsecond.
fn bursts(bursts: u64) -> Script {
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
fn replay(name: &str, plan: &Plan, alive: &[(MappingId, DeviceIndex)]) -> (Outcomes, Outcomes) {
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
    assert_eq!((planner.bursts, planner.bursts_cut_by_map), (10, 0));
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
    let (plan, planner) = planned(&pairs().chunk);
    for (name, lookups, walks) in [
        ("none", 0, false),
        ("hwpt", 0, false),
        ("swpt", PAIRS, true),
    ] {
        let (metered, _) = replay(name, &plan, &planner.live_mappings());
        assert_eq!(metered.hardware.lookups(), lookups, "{name}");
        assert_eq!(metered.hardware.walk_references > 0, walks, "{name}");
        // The table exists before the first map, and no map adds to it.
        let tables = metered.table_bytes > 3 * 4096;
        assert_eq!(tables, walks, "{name}: {}", metered.table_bytes);
    }
}

/// Matches observations of real guests (Linux 6.12 and 7.2): about one notification per request in
/// strict mode, and one per two requests in lazy mode.
#[test]
fn a_guest_asks_its_host_as_often_as_linux_does() {
    let (plan, planner) = planned(&pairs().chunk);
    // Mode; requests; notifications in maps and in unmaps.
    let cases = [
        ("linux-strict", 0, 0, 0),
        ("kvm-baseline", 0, 0, 0),
        // With caching mode, each map and each unmap is an invalidation of its own.
        ("emulated-strict", 2 * PAIRS, PAIRS, PAIRS),
        ("emulated-lazy", PAIRS + 3, PAIRS, 3),
        // The hardware walks the guest's table, so a map is no exit.
        ("nested-strict", PAIRS, 0, PAIRS),
        ("virtio-strict", 2 * PAIRS, PAIRS, PAIRS),
        ("pviommu", 2 * PAIRS, PAIRS, PAIRS),
        // No page recurs, and no mapping expires.
        ("pviommu+rtc", PAIRS, PAIRS, 0),
        ("pviommu+rtc+hopt", PAIRS, PAIRS, 0),
        ("pviommu+map-cache", PAIRS, PAIRS, 0),
        // Every unmap but the last is sent with the next map. The queue fills at the 257th and
        // 513th unmap, whose request it sends as well. The timer sends the last.
        ("virtio-lazy", 2 * PAIRS, PAIRS, 3),
        // One hypercall maps an entry, and one unmaps it and flushes. A multicall saves nothing.
        ("xen", 2 * PAIRS, PAIRS, PAIRS),
        ("xen-multicall", 2 * PAIRS, PAIRS, PAIRS),
        ("xen-grant", 2 * PAIRS, PAIRS, PAIRS),
        // The trace is too short for a wrap and its flush.
        ("xen-lazy", 2 * PAIRS, PAIRS, PAIRS),
        (WHOLE_GUEST, 0, 0, 0),
    ];
    for (name, requests, in_maps, in_unmaps) in cases {
        let (metered, hostile) = replay(name, &plan, &planner.live_mappings());
        for outcomes in [&metered, &hostile] {
            let traffic = outcomes.traffic;
            assert_eq!(traffic.requests, requests, "{name}");
            let kicks = (traffic.kicks_in_maps, traffic.kicks_in_unmaps);
            assert_eq!(kicks, (in_maps, in_unmaps), "{name}");
        }
    }
}

/// A guest's map cache (Yassour et al.) requests each page once from its host, for any number of
/// DMAs, and all pages of a list at once. Its quota is never exceeded here.
#[test]
fn a_map_cache_saves_the_requests_of_recurring_pages() {
    let mut script = Script::default();
    for turn in 0..600 {
        let pieces: Vec<_> = (0..4)
            .map(|piece| memory((16 + turn % 30 * 4 + piece) << 12, BYTES))
            .collect();
        script.map(2 * turn * US, (0, 0, TX), 0, &pieces);
        script.unmap((2 * turn + 1) * US, (0, 0), 0);
    }
    let (plan, planner) = planned(&script.chunk);
    // Mode; maps' requests and notifications; those of unmaps.
    for (name, requests, in_maps, in_unmaps) in [
        ("pviommu", 600 * 4 + 600, 600, 600),
        ("pviommu+map-cache", 30 * 4, 30, 0),
    ] {
        let (metered, hostile) = replay(name, &plan, &planner.live_mappings());
        for outcomes in [&metered, &hostile] {
            let traffic = outcomes.traffic;
            let found = (
                traffic.requests,
                traffic.kicks_in_maps,
                traffic.kicks_in_unmaps,
            );
            println!("{name} {found:?}");
            assert_eq!(found, (requests, in_maps, in_unmaps), "{name}");
        }
    }
}

/// The host finds each page by a walk, or through its pointer if that has the table. A page gets a
/// frame once, from the pool if the mode has one.
#[test]
fn a_host_looks_its_guests_pages_up() {
    // Recurring pages, alternating between two tables: 600 buffers on 150 pages of each.
    let mut script = Script::default();
    for turn in 0..600 {
        let page = 1024 + turn % 2 * 512 + turn / 2 % 150;
        let at = 2 * turn * US;
        let piece = [memory(page * 4096, BYTES)];
        script.map(at, (0, 0, RX), turn as u32, &piece);
        script.unmap(at + US, (0, 0), turn as u32);
    }
    let (plan, planner) = planned(&script.chunk);
    let lookups = |mode: &str| {
        let (metered, hostile) = replay(mode, &plan, &planner.live_mappings());
        assert_eq!(metered.traffic.lookups, hostile.traffic.lookups, "{mode}");
        assert_eq!(hostile.tally.false_faults, 0, "{mode}");
        metered.traffic.lookups
    };
    assert_eq!(lookups("linux-strict"), LookupStats::default());
    assert_eq!(lookups("virtio-strict"), LookupStats::default());
    // Each of the two tables is missing once, and walked to again after it was added. No table is
    // used twice in a row.
    let plain = LookupStats {
        walks: 600 + 2,
        through_pointer: 0,
        reads: 4 * 600 + 1 + 3,
        frames: 300,
        frames_awaited: 300,
    };
    assert_eq!(lookups("pviommu"), plain);
    let hopt = LookupStats {
        frames_awaited: 0,
        ..plain
    };
    let strict = "alloc=linux-rcache,table=radix,flush=per-unmap,owner=pviommu-hopt";
    assert_eq!(lookups(strict), hopt);
    // Behind the cache, the guest requests each page once.
    let once = LookupStats {
        walks: 300 + 2,
        reads: 4 * 300 + 1 + 3,
        ..plain
    };
    assert_eq!(lookups("pviommu+rtc"), once);
    assert_eq!(
        lookups("pviommu+rtc+hopt"),
        LookupStats {
            frames_awaited: 0,
            ..once
        }
    );
}

/// A list of three segments takes three map requests with one notification, and one unmap request.
#[test]
fn a_list_is_mapped_with_one_notification() {
    let mut script = Script::default();
    let pieces = [
        memory(0x10_0000, 4096),
        memory(0x20_0000, 8192),
        memory(0x30_0800, 100),
    ];
    script.map(0, (0, 0, TX), 0, &pieces);
    script.unmap(US, (0, 0), 0);
    let (plan, planner) = planned(&script.chunk);
    let (emulated, _) = replay("emulated-strict", &plan, &planner.live_mappings());
    // An emulated unit needs one invalidation for the list.
    let traffic = emulated.traffic;
    assert_eq!((traffic.requests, traffic.kicks_in_maps), (2, 1));
    assert_eq!((emulated.invalidations, emulated.tally.accesses), (1, 4));
    let (nested, _) = replay("nested-strict", &plan, &planner.live_mappings());
    let traffic = nested.traffic;
    assert_eq!((traffic.requests, traffic.kicks_in_maps), (1, 0));
    assert_eq!((nested.invalidations, nested.tally.accesses), (1, 4));
    for (name, in_unmaps) in [("virtio-strict", 1), ("virtio-lazy", 1), ("pviommu", 1)] {
        let (metered, hostile) = replay(name, &plan, &planner.live_mappings());
        let traffic = metered.traffic;
        assert_eq!(traffic.requests, 4, "{name}");
        assert_eq!(traffic.kicks_in_maps, 1, "{name}");
        assert_eq!(traffic.kicks_in_unmaps, in_unmaps, "{name}");
        // One invalidated range, though it was mapped in three requests.
        assert_eq!(metered.invalidations, 1, "{name}");
        assert_eq!(metered.tally.accesses, 4, "{name}");
        assert_eq!(hostile.tally.false_faults, 0, "{name}");
    }
}

/// The same list has four pages. Xen maps and unmaps single entries (CG06): four crossings each
/// way. A multicall crosses once, and so does an array of grants (CG12, CG14). A lazy list is
/// unmapped without a flush (CG11).
#[test]
fn entries_of_a_list_cross_to_xen_one_by_one_or_together() {
    let mut script = Script::default();
    let pieces = [
        memory(0x10_0000, 4096),
        memory(0x20_0000, 8192),
        memory(0x30_0800, 100),
    ];
    script.map(0, (0, 0, TX), 0, &pieces);
    script.unmap(US, (0, 0), 0);
    let (plan, planner) = planned(&script.chunk);
    for (name, in_maps, in_unmaps, flushes) in [
        ("xen", 4, 4, 1),
        ("xen-multicall", 1, 1, 1),
        // A list maps its three pieces one after the other.
        ("xen-grant", 3, 1, 1),
        ("xen-lazy", 4, 4, 0),
    ] {
        let (metered, hostile) = replay(name, &plan, &planner.live_mappings());
        let traffic = metered.traffic;
        assert_eq!(traffic.requests, 8, "{name}");
        assert_eq!(traffic.kicks_in_maps, in_maps, "{name}");
        assert_eq!(traffic.kicks_in_unmaps, in_unmaps, "{name}");
        assert_eq!(metered.invalidations, flushes, "{name}");
        assert_eq!(metered.tally.accesses, 4, "{name}");
        assert_eq!(hostile.tally.false_faults, 0, "{name}");
        assert_eq!(hostile.tally.violations() > 0, flushes == 0, "{name}");
    }
}

/// All of a guest mapped in advance by Xen, in Calgary's table (CG07).
const WHOLE_GUEST: &str = "alloc=identity,table=static-flat,flush=never,owner=xen";

/// CG07: the space ends at 4 GiB. A buffer beyond is refused, and never mapped wrongly.
#[test]
fn a_whole_guest_map_ends_at_4_gib() {
    let mut script = Script::default();
    for (id, at) in [(0, (1 << 32) - 4096), (1, 1 << 32), (2, (1 << 32) - 2048)] {
        script.map(u64::from(id) * US, (0, 0, RX), id, &[memory(at, 4096)]);
    }
    let (plan, planner) = planned(&script.chunk);
    let (metered, hostile) = replay(WHOLE_GUEST, &plan, &planner.live_mappings());
    assert_eq!((metered.maps, metered.refused_maps), (1, 2));
    assert_eq!(hostile.tally.false_faults, 0);
}

/// Batches of a burst are longer than a multicall. Every space is flushed before the buffers come
/// back, also if its last unmap left in an earlier batch.
#[test]
fn bursts_longer_than_a_multicall_are_flushed() {
    for owner in ["xen", "xen-multicall", "xen-grant"] {
        let row = format!("alloc=bitmap,table=flat,flush=burst,owner={owner}");
        let mut script = Script::default();
        // All unmaps of the first device cross before its burst ends, with some of the second's.
        let device = |number: u16| u16::from(number >= 40);
        for number in 0..100_u16 {
            let key = (device(number), 0, RX);
            script.map(0, key, number.into(), &buffer(number.into()));
        }
        for number in 0..100 {
            script.unmap(US, (device(number), 0), number.into());
        }
        let (plan, planner) = planned(&script.chunk);
        let (metered, hostile) = replay(&row, &plan, &planner.live_mappings());
        assert_eq!(hostile.tally.violations(), 0, "{owner}");
        assert_eq!(hostile.tally.false_faults, 0, "{owner}");
        // A device's flush is complete before its buffers are back.
        assert_eq!(metered.stale_max_ns, 0, "{owner}");
        assert_eq!((metered.maps, metered.unmaps), (100, 100), "{owner}");
        assert!(
            metered.invalidations < 100,
            "{owner}: {}",
            metered.invalidations
        );
        let crossings = metered.traffic.kicks_in_unmaps;
        assert_eq!(crossings >= 100, owner == "xen", "{owner}: {crossings}");
        let most = if owner == "xen" { 102 } else { 10 };
        assert!(crossings <= most, "{owner}: {crossings}");
    }
}

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
    options.rtc.cycle_ns = 10 * MS;
    let mode = mode("pviommu+rtc");
    let mut runner = runner(&mode, &options).unwrap();
    let (plan, planner) = planned_with(&script.chunk, &[options.rtc]);
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
    options.rtc.cycle_ns = 10 * MS;
    let exposed = |name: &str| {
        let mode = mode(name);
        let mut runner = runner(&mode, &options).unwrap();
        let cycles = options.rtc.for_mode(&mode);
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
