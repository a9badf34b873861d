//! `premap`: buffers of pools that keep their pages mapped, counted by hand.

use crate::replays::{PAIRS, US, buffer, pairs, replay};
use crate::script::*;

/// Most released buffers in a pool, as in `crates/lab/src/mapping_cache.rs`.
const POOL: u64 = 1 << 14;

/// 600 pairs on 8 pages.
fn recycled(device: u16, at: u64) -> Script {
    let mut script = Script::default();
    for pair in 0..PAIRS {
        let time = at + 2 * pair * US;
        script.map(time, (device, 0, RX), device.into(), &buffer(pair % 8));
        script.unmap(time + US, (device, 0), device.into());
    }
    script
}

/// A pool maps each page once. The device may change released buffers of its own pool, and this is
/// no violation, in contrast to `persistent`, which gives the page away. A host is asked once for
/// each page.
#[test]
fn recycled_buffers_are_mapped_once_and_stay_mutable() {
    let (plan, planner) = planned(&recycled(0, 0).chunk);
    let alive = planner.live_mappings();
    let (metered, hostile) = replay("premap", &plan, &alive);
    for outcomes in [&metered, &hostile] {
        assert_eq!((outcomes.maps, outcomes.unmaps), (PAIRS, PAIRS));
        assert_eq!(
            (outcomes.invalidations, outcomes.tally.false_faults),
            (0, 0)
        );
        assert_eq!(outcomes.tally.violations(), 0, "{:?}", outcomes.tally);
        assert_eq!(outcomes.kept_at_end, 8);
    }
    assert_eq!((metered.tally.mutable, metered.tally.faults), (0, 0));
    // Every buffer is written after its unmap.
    assert!(hostile.tally.mutable >= PAIRS, "{:?}", hostile.tally);
    let (_, given_away) = replay("persistent", &plan, &alive);
    assert_eq!(given_away.tally.mutable, 0);
    assert!(given_away.tally.stale >= PAIRS, "{:?}", given_away.tally);
    let behind = "alloc=linux-rcache,table=radix,flush=page-pool,owner=virtio-iommu";
    let (metered, _) = replay(behind, &plan, &alive);
    let traffic = metered.traffic;
    assert_eq!(
        (
            traffic.requests,
            traffic.kicks_in_maps,
            traffic.kicks_in_unmaps
        ),
        (8, 8, 0)
    );
}

/// The trace shows that another device maps the pages. So they are no longer in the first device's
/// pool, although its mappings stay: what it reaches then is stale.
#[test]
fn pages_in_other_hands_are_not_of_the_pool() {
    let mut script = recycled(0, 0);
    let second = recycled(1, 2 * PAIRS * US);
    let segments = script.chunk.segments.len() as u32;
    script.chunk.segments.extend(second.chunk.segments);
    script
        .chunk
        .ops
        .extend(second.chunk.ops.into_iter().map(|mut op| {
            if let ringfence_trace::OpKind::Map { segments: span, .. } = &mut op.kind {
                span.first += segments;
            }
            op
        }));
    // The first device's attackers wake at its next unmap.
    let late = 4 * PAIRS * US;
    script.map(late, (0, 0, RX), 0, &buffer(PAIRS));
    script.unmap(late + US, (0, 0), 0);
    let (plan, planner) = planned(&script.chunk);
    let (_, hostile) = replay("premap", &plan, &planner.live_mappings());
    let tally = &hostile.tally;
    assert_eq!(tally.violations(), tally.stale, "{tally:?}");
    assert!(tally.stale > 0 && tally.mutable > 0, "{tally:?}");
}

/// A full pool takes no more buffers: an unmap then invalidates, and the device reaches nothing.
#[test]
fn a_full_pool_unmaps_strictly() {
    const MORE: u64 = 100;
    let mut script = Script::default();
    for id in 0..POOL + MORE {
        script.map(id, (0, 0, RX), id as u32, &buffer(id));
    }
    for id in 0..POOL + MORE {
        script.unmap(POOL + MORE + id, (0, 0), id as u32);
    }
    let (plan, planner) = planned(&script.chunk);
    let (metered, _) = replay("premap", &plan, &planner.live_mappings());
    assert_eq!((metered.invalidations, metered.kept_at_end), (MORE, POOL));
    assert_eq!(metered.tally.violations() + metered.tally.false_faults, 0);
    // No buffer recurs here, so a pool that is large enough invalidates nothing.
    let (plan, planner) = planned(&pairs().chunk);
    let (metered, _) = replay("premap", &plan, &planner.live_mappings());
    assert_eq!((metered.invalidations, metered.kept_at_end), (0, PAIRS));
}
