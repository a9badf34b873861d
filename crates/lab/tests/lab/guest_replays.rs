//! Requests and lookups of modes in which a host owns the table, counted by hand.

use ringfence_lab::compare::runner;
use ringfence_lab::guest::LookupStats;
use ringfence_trace::Devices;

use crate::replays::{BYTES, PAIRS, US, buffer, pairs, replay};
use crate::script::*;

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
        // Each flush is a request more, with the same notifications.
        ("virtio-lazy-domain", 2 * PAIRS + 3, PAIRS, 3),
        // The guest maps a run of bounce buffers once, and all pairs use its first one.
        ("virtio-bounce", 1, 1, 0),
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

/// In lazy mode the host invalidates the domain at the guest's flushes, in place of the pages of
/// each unmap at the next notification. So the device reaches unmapped pages for longer.
#[test]
fn a_domain_in_lazy_mode_is_invalidated_at_flushes() {
    let (plan, planner) = planned(&pairs().chunk);
    let run = |name| replay(name, &plan, &planner.live_mappings());
    let ((stock, at_stock), (lazy, at_lazy)) = (run("virtio-lazy"), run("virtio-lazy-domain"));
    assert_eq!((stock.invalidations, lazy.invalidations), (PAIRS, 3));
    // The next map sends an unmap, and the timer the last one.
    assert!(stock.stale_byte_seconds < lazy.stale_byte_seconds / 10.0);
    for outcomes in [&at_stock, &at_lazy] {
        let tally = &outcomes.tally;
        assert_eq!((tally.violations(), tally.false_faults), (tally.stale, 0));
    }
    assert!(at_lazy.tally.stale >= PAIRS, "{:?}", at_lazy.tally);
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

/// The quota of a map cache is 2^14 pages. It keeps as many pages for any time, and the next page
/// makes it unmap.
#[test]
fn a_map_cache_has_a_quota() {
    let run = |name, pages: u64| {
        let mut script = Script::default();
        for turn in 0..pages {
            let piece = [memory((16 + turn) << 12, BYTES)];
            script.map(2 * turn * US, (0, 0, TX), 0, &piece);
            script.unmap((2 * turn + 1) * US, (0, 0), 0);
        }
        let (plan, planner) = planned(&script.chunk);
        let mut runner = runner(&mode(name), &judged_only(false)).unwrap();
        runner.metered.run(&plan, &Devices::new()).unwrap();
        let outcomes = runner.metered.finish(&planner.live_mappings());
        assert_eq!((outcomes.maps, outcomes.unmaps), (pages, pages), "{name}");
        outcomes.invalidations
    };
    for name in ["map-cache", "pviommu+map-cache"] {
        assert_eq!(run(name, 1 << 14), 0, "{name}");
        assert!(run(name, (1 << 14) + 1) > 0, "{name}");
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
    for outcomes in [&metered, &hostile] {
        let t = outcomes.traffic;
        let crossings = (t.requests, t.kicks_in_maps, t.kicks_in_unmaps);
        assert_eq!(crossings, (0, 0, 0), "the guest calls nothing");
        assert_eq!(outcomes.tally.false_faults, 0);
    }
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
