//! Ring modes on traces whose counts can be derived by hand.

use ringfence_lab::ReplayStatus;
use ringfence_lab::compare::{CompareOptions, of_replay, runner};
use ringfence_lab::plan::{Plan, Planner, Step};
use ringfence_lab::replay::Outcomes;
use ringfence_lab::ring::{RingSizes, RingUsage};
use ringfence_trace::{DeviceIndex, Devices};
use ringfence_types::PhysRange;

use crate::script::*;

const US: u64 = 1_000;
const BYTES: u64 = 100;

/// A buffer that shares its page with others.
fn buffer(number: u64) -> [PhysRange; 1] {
    [memory((16 << 12) + number * 128 + 0x40, BYTES)]
}

/// Runs the metered and the hostile pass with rings of `slots` slots.
fn replay(name: &str, plan: &Plan, planner: &Planner, slots: u32) -> (Outcomes, Outcomes) {
    let options = CompareOptions {
        rings: RingSizes::Every(slots),
        ..judged_only(true)
    };
    let mut runner = runner(&mode(name), &options).unwrap();
    let devices = Devices::new();
    let mut hostile = runner.attack.unwrap();
    runner.metered.run(plan, &devices).unwrap();
    hostile.run(plan, &devices).unwrap();
    let alive = planner.live_mappings();
    (runner.metered.finish(&alive), hostile.finish(&alive))
}

/// `count` maps, then as many unmaps within one burst, in the order of `order`.
fn one_burst(count: u64, order: impl Iterator<Item = u64>) -> Script {
    let mut script = Script::default();
    for id in 0..count {
        script.map(id * US, (0, 0, RX), id as u32, &buffer(id));
    }
    for (turn, id) in order.enumerate() {
        script.unmap(count * US + turn as u64 * 100, (0, 0), id as u32);
    }
    script
}

#[test]
fn burst_as_published_leaves_buffers_reachable() {
    let (plan, planner) = planned(&one_burst(200, 0..200).chunk);
    for name in ["riommu-paper", "riommu--paper"] {
        let (_, hostile) = replay(name, &plan, &planner, 512);
        assert_eq!((hostile.unmaps, hostile.invalidations), (200, 1), "{name}");
        // The attacker touches the first and the last byte of each buffer at once after its unmap,
        // while its entry is still valid. With the driver of Fig. 11, which knows the last unmap of
        // a burst, 199 buffers would be stale. A trace shows a burst's end later, so 200 are.
        assert_eq!(hostile.tally.stale, 2 * 200, "{name}: {:?}", hostile.tally);
        assert_eq!(hostile.tally.violations(), 2 * 200, "{name}");
        // Erratum 6: an access of two bytes that begins at a buffer's last byte reaches the byte
        // after the buffer.
        assert_eq!(hostile.tally.colocated, 200, "{name}: {:?}", hostile.tally);
        assert_eq!(hostile.stale_max_ns, 50 * US, "{name}");
    }
    for name in ["riommu", "riommu-", "riommu-ooo"] {
        let (_, hostile) = replay(name, &plan, &planner, 512);
        assert_eq!((hostile.unmaps, hostile.invalidations), (200, 1), "{name}");
        assert_eq!(hostile.tally.violations(), 0, "{name}: {:?}", hostile.tally);
        assert_eq!(hostile.tally.colocated, 0, "{name}");
        assert_eq!(hostile.tally.false_faults, 0, "{name}");
        assert_eq!(hostile.stale_max_ns, 0, "{name}");
        assert_eq!(hostile.release_delay_max_ns, 50 * US, "{name}");
    }
}

/// Four buffers in a ring of four. The driver unmaps the second and maps a fifth, for which the
/// tail selects the first buffer's slot.
fn out_of_order() -> Script {
    let mut script = Script::default();
    for id in 0..4 {
        script.map(id * US, (0, 0, RX), id as u32, &buffer(id));
    }
    script.unmap(10 * US, (0, 0), 1);
    script.map(100 * US, (0, 0, RX), 4, &buffer(4));
    for (turn, id) in [0, 2, 3, 4].into_iter().enumerate() {
        script.unmap((200 + 100 * turn as u64) * US, (0, 0), id);
    }
    script
}

#[test]
fn tail_as_published_overwrites_live_entries() {
    let (plan, planner) = planned(&out_of_order().chunk);
    let (as_published, _) = replay("riommu-paper", &plan, &planner, 4);
    // The device of the first buffer writes through the fifth buffer's entry: granted memory at the
    // wrong address. The unmap of the first buffer clears the fifth one's entry, so the fifth one's
    // device faults.
    assert_eq!(
        (as_published.maps, as_published.unmaps, as_published.stalls),
        (5, 5, 0)
    );
    assert_eq!(
        as_published.tally.false_faults, 1,
        "{:?}",
        as_published.tally
    );

    // In the fixed driver, the map waits until the first buffer is unmapped.
    let (tail, _) = replay("riommu", &plan, &planner, 4);
    assert_eq!((tail.maps, tail.unmaps), (5, 5));
    assert_eq!((tail.stalls, tail.stalled_out), (1, 0));
    assert_eq!(tail.tally.violations() + tail.tally.false_faults, 0);
    // The out-of-order driver takes the second buffer's slot.
    let (free, _) = replay("riommu-ooo", &plan, &planner, 4);
    assert_eq!((free.maps, free.unmaps, free.stalls), (5, 5, 0));
    assert_eq!(free.tally.violations() + free.tally.false_faults, 0);
}

#[test]
fn stalled_maps_wait_in_order_and_may_never_succeed() {
    let mut script = Script::default();
    // One buffer that stays mapped, at the head of a ring of two.
    script.map(0, (0, 0, RX), 0, &buffer(0));
    script.map(US, (0, 0, RX), 1, &buffer(1));
    script.unmap(2 * US, (0, 0), 1);
    // The tail is at the first slot again. These maps wait, although a slot is free from 52 us on.
    for id in 2..5 {
        script.map(
            (100 + u64::from(id)) * US,
            (0, 0, RX),
            id,
            &buffer(u64::from(id)),
        );
    }
    // Another ring does not wait.
    script.map(110 * US, (0, 0, TX), 5, &buffer(5));
    script.unmap(111 * US, (0, 0), 5);
    // The second waiting map gives up.
    script.unmap(120 * US, (0, 0), 3);
    // The first slot is free at the end of its burst. Two maps then succeed, in order.
    script.unmap(200 * US, (0, 0), 0);
    script.unmap(300 * US, (0, 0), 2);
    let (plan, planner) = planned(&script.chunk);
    for name in ["riommu", "riommu-"] {
        let (metered, hostile) = replay(name, &plan, &planner, 2);
        for outcomes in [&metered, &hostile] {
            assert_eq!((outcomes.maps, outcomes.unmaps), (5, 4), "{name}");
            assert_eq!((outcomes.stalls, outcomes.stalled_out), (3, 1), "{name}");
            assert_eq!(outcomes.alive_at_end, 1, "{name}");
            assert_eq!(outcomes.tally.violations(), 0, "{name}");
            assert_eq!(outcomes.tally.colocated, 0, "{name}");
            assert_eq!(outcomes.tally.false_faults, 0, "{name}");
        }
    }
    // At most four buffers are live or withheld at once, so no map waits for one of eight slots.
    let (free, _) = replay("riommu-ooo", &plan, &planner, 8);
    assert_eq!((free.maps, free.unmaps, free.stalls), (6, 5, 0));
}

#[test]
fn maps_waiting_at_the_end_never_got_a_slot() {
    let mut script = Script::default();
    for id in 0..3 {
        script.map(u64::from(id) * US, (0, 0, RX), id, &buffer(u64::from(id)));
    }
    let (plan, planner) = planned(&script.chunk);
    let (metered, _) = replay("riommu", &plan, &planner, 1);
    assert_eq!(
        (metered.maps, metered.stalls, metered.stalled_out),
        (1, 2, 2)
    );
    assert_eq!(metered.alive_at_end, 1);
}

#[test]
fn segments_have_their_own_slots_and_attacks() {
    let mut script = Script::default();
    let pieces = [
        memory(0x20_0010, 30),
        memory(0x20_0030, 5000),
        memory(0x30_0000, 1),
    ];
    script.map(0, (0, 0, TX), 0, &pieces);
    script.unmap(US, (0, 0), 0);
    let (plan, planner) = planned(&script.chunk);
    for name in ["riommu", "riommu-", "riommu-ooo"] {
        let (metered, hostile) = replay(name, &plan, &planner, 4);
        // One access per page of each segment: 1 + 2 + 1.
        assert_eq!(metered.tally.accesses, 4, "{name}");
        assert_eq!(metered.tally.faults, 0, "{name}");
        assert_eq!(hostile.tally.violations(), 0, "{name}");
        assert_eq!(hostile.tally.colocated, 0, "{name}");
        // The attacker reaches no neighbour after any segment, though two segments share a page.
        assert!(hostile.tally.faults >= 3, "{name}: {:?}", hostile.tally);
    }
    let mut usage = RingUsage::default();
    usage.add(&plan);
    assert_eq!(usage.live_max(DeviceIndex(0), TX), 3);
    assert_eq!(usage.sizes().of(DeviceIndex(0)), [8, 1, 1]);
    // A map with more segments than slots is refused at once and does not wait.
    let (small, _) = replay("riommu", &plan, &planner, 2);
    assert_eq!((small.maps, small.refused_maps, small.stalls), (0, 1, 0));
}

#[test]
fn doorbells_follow_runs_of_maps() {
    let mut script = Script::default();
    for id in 0..3 {
        script.map(u64::from(id) * US, (0, 0, TX), id, &buffer(u64::from(id)));
    }
    script.map(3 * US, (0, 0, RX), 3, &buffer(3));
    script.unmap(4 * US, (0, 0), 0);
    script.map(5 * US, (0, 1, RX), 4, &buffer(4));
    let mut planner = Planner::new().with_doorbells();
    let mut plan = Plan::default();
    planner.plan(&script.chunk, &mut plan).unwrap();
    planner.finish(&mut plan);
    let mut maps = 0;
    let mut found = Vec::new();
    for timed in &plan.steps {
        match timed.step {
            Step::Map { .. } => maps += 1,
            Step::Doorbell { cpu, direction, .. } => {
                found.push((maps, timed.time.0 - START, cpu, direction))
            }
            _ => {}
        }
    }
    let expected = [(3, 2 * US, 0, TX), (4, 3 * US, 0, RX), (5, 5 * US, 1, RX)];
    assert_eq!(found, expected);
    assert!(
        !planned(&script.chunk)
            .0
            .steps
            .iter()
            .any(|timed| matches!(timed.step, Step::Doorbell { .. }))
    );
}

#[test]
fn rings_that_stall_too_often_have_no_result() {
    // One buffer stays at the head of a ring of four; the driver maps and unmaps `more` others
    // behind it. Three get a slot, and the other maps wait in vain.
    let row = |more: u32, name: &str| {
        let mut script = Script::default();
        script.map(0, (0, 0, RX), 0, &buffer(0));
        for id in 1..=more {
            let at = u64::from(id) * 200 * US;
            script.map(at, (0, 0, RX), id, &buffer(u64::from(id)));
            script.unmap(at + US, (0, 0), id);
        }
        let (plan, planner) = planned(&script.chunk);
        let (metered, hostile) = replay(name, &plan, &planner, 4);
        assert_eq!(hostile.tally.violations(), 0, "{name}");
        of_replay(&metered)
    };
    for name in ["riommu", "riommu-"] {
        let stalled = ReplayStatus::RingDoesNotFit {
            stalled_out: 7,
            wanted: 11,
        };
        assert_eq!(row(10, name), Some(stalled), "{name}");
        assert_eq!(row(3, name), None, "{name}");
    }
    assert_eq!(row(10, "riommu-ooo"), None);
    let told = ReplayStatus::RingDoesNotFit {
        stalled_out: 41_273,
        wanted: 51_529,
    };
    assert!(!told.is_ok());
    assert_eq!(told.code(), "ring-does-not-fit");
    assert_eq!(
        told.to_string(),
        "the ring does not fit this driver: 41273 of 51529 maps never got a slot"
    );
}
