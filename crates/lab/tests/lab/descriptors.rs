//! Descriptors of F&S: their ends, their invalidations, and the walks of contiguous addresses.

use std::collections::BTreeSet;

use proptest::prelude::*;
use ringfence_lab::MachineProfile;
use ringfence_lab::plan::{Plan, Planner, RECEIVE_DESCRIPTOR_NS, Step, TRANSMIT_DESCRIPTOR_NS};
use ringfence_lab::replay::Delays;
use ringfence_trace::{Chunk, DeviceIndex, MappingId, OpKind};
use ringfence_types::{PageSize, PhysRange};

use super::replays::replay;
use super::script::*;

const US: u64 = 1_000;

fn planned_descriptors(chunk: &Chunk) -> (Plan, Planner) {
    let mut planner = Planner::new().with_descriptors();
    let mut plan = Plan::default();
    planner.plan(chunk, &mut plan).unwrap();
    planner.finish(&mut plan);
    (plan, planner)
}

/// The end of a descriptor: the number of operations before it, its time, and its device and
/// direction.
type End = (usize, u64, (u16, bool));

fn ends(plan: &Plan) -> Vec<End> {
    let mut done = 0;
    let mut found = Vec::new();
    for timed in &plan.steps {
        match timed.step {
            Step::Map { .. } | Step::Unmap { .. } => done += 1,
            Step::EndDescriptor {
                device: DeviceIndex(device),
                direction,
                ..
            } => found.push((done, timed.time.0, (device, direction == RX))),
            _ => {}
        }
    }
    found
}

fn pages(piece: &PhysRange) -> impl Iterator<Item = u64> + use<> {
    let all = piece.to_pages(PageSize::Size4K);
    (all.start().get() >> 12)..=(all.last().get() >> 12)
}

/// Scans the whole trace from the first unmap of each descriptor. Traces have one CPU.
fn reference(chunk: &Chunk) -> Vec<End> {
    let mapped = |unmap: usize, id: MappingId| {
        let earlier = chunk.ops[..unmap].iter().rev();
        let mut maps = earlier.filter_map(|op| match op.kind {
            OpKind::Map {
                id: of,
                direction,
                segments,
                ..
            } if of == id => Some((direction == RX, chunk.segments_of(segments))),
            _ => None,
        });
        maps.next().unwrap()
    };
    let mut members = vec![false; chunk.ops.len()];
    let mut found = Vec::new();
    for first in 0..chunk.ops.len() {
        let OpKind::Unmap { id } = chunk.ops[first].kind else {
            continue;
        };
        if members[first] {
            continue;
        }
        let key = (chunk.ops[first].device.0, mapped(first, id).0);
        let longest = if key.1 {
            RECEIVE_DESCRIPTOR_NS
        } else {
            TRANSMIT_DESCRIPTOR_NS
        };
        let due = chunk.ops[first].time.0 + longest;
        let (mut withheld, mut count) = (BTreeSet::new(), 0);
        let mut end = (chunk.ops.len(), due, key);
        for (next, op) in chunk.ops.iter().enumerate().skip(first) {
            if op.time.0 >= due {
                end = (next, due, key);
                break;
            }
            match op.kind {
                OpKind::Unmap { id } => {
                    let (receives, pieces) = mapped(next, id);
                    if (op.device.0, receives) != key {
                        continue;
                    }
                    members[next] = true;
                    count += pieces.iter().flat_map(pages).count();
                    withheld.extend(pieces.iter().flat_map(pages));
                    if count >= 64 {
                        end = (next + 1, op.time.0, key);
                        break;
                    }
                }
                OpKind::Map { segments, .. } => {
                    let mut mapped = chunk.segments_of(segments).iter().flat_map(pages);
                    if mapped.any(|page| withheld.contains(&page)) {
                        end = (next, op.time.0, key);
                        break;
                    }
                }
            }
        }
        found.push(end);
    }
    found.sort_unstable();
    found
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        rng_seed: prop::test_runner::RngSeed::Fixed(37),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn descriptors_end_as_the_reference_says(
        drafts in prop::collection::vec(
            (
                prop_oneof![6 => 0..3 * US, 2 => 30 * US..120 * US, 1 => 900 * US..1100 * US],
                0..2_u16,
                any::<bool>(),
                1..400_u64,
                prop_oneof![3 => 1..4_u64, 1 => 10..70_u64],
                prop::option::weighted(0.5, any::<prop::sample::Index>()),
            ),
            1..120,
        ),
    ) {
        let mut script = Script::default();
        let (mut live, mut time): (Vec<(u32, u16)>, u64) = (Vec::new(), 0);
        for (id, (pause, device, receives, page, count, unmap)) in drafts.iter().enumerate() {
            time += pause;
            match unmap {
                Some(index) if !live.is_empty() => {
                    let (id, device) = live.swap_remove(index.index(live.len()));
                    script.unmap(time, (device, 0), id);
                }
                _ => {
                    live.push((id as u32, *device));
                    let piece = memory(page << 12, count << 12);
                    let direction = if *receives { RX } else { TX };
                    script.map(time, (*device, 0, direction), id as u32, &[piece]);
                }
            }
        }
        let (plan, planner) = planned_descriptors(&script.chunk);
        let mut found = ends(&plan);
        found.sort_unstable();
        prop_assert_eq!(&found, &reference(&script.chunk));
        prop_assert_eq!(planner.descriptors().0, found.len() as u64);
        prop_assert!(plan.steps.is_sorted_by_key(|timed| timed.time));
        // The ends of bursts do not depend on descriptors.
        let (without, bursts) = planned(&script.chunk);
        let rest: Vec<_> = plan
            .steps
            .iter()
            .filter(|timed| !matches!(timed.step, Step::EndDescriptor { .. }))
            .map(|timed| (timed.time, timed.step))
            .collect();
        let expected: Vec<_> = without.steps.iter().map(|timed| (timed.time, timed.step)).collect();
        prop_assert_eq!(rest, expected);
        prop_assert_eq!(planner.bursts(), bursts.bursts());
    }
}

/// A receive ring of `slots` pages: the driver unmaps `loop_pages` pages and maps as many others,
/// 1 us apart. No page is mapped twice.
fn receive_ring(slots: u64, loop_pages: u64, total: u64) -> Script {
    let mut script = Script::default();
    let (mut time, mut mapped) = (0, 0);
    let map = |script: &mut Script, time: u64, number: u64| {
        let id = (number % slots) as u32;
        script.map(time, (0, 0, RX), id, &[memory((1 + number) << 12, 4096)]);
    };
    while mapped < slots {
        map(&mut script, 0, mapped);
        mapped += 1;
    }
    let mut unmapped = 0;
    while unmapped < total {
        for _ in 0..loop_pages {
            time += US;
            script.unmap(time, (0, 0), (unmapped % slots) as u32);
            unmapped += 1;
        }
        for _ in 0..loop_pages {
            map(&mut script, time, mapped);
            mapped += 1;
        }
    }
    script
}

/// A loop of a driver unmaps 8 pages. `fence-burst` invalidates at its end, `fs` after 64 pages.
#[test]
fn one_invalidation_ends_a_descriptor_of_64_pages() {
    let script = receive_ring(512, 8, 4096);
    let (plan, planner) = planned_descriptors(&script.chunk);
    assert_eq!(planner.descriptors(), (64, 0));
    let alive = planner.live_mappings();
    let (burst, _) = replay("fence-burst", &plan, &alive);
    assert_eq!(burst.invalidations, 512);
    let (metered, hostile) = replay("fs", &plan, &alive);
    for outcomes in [&metered, &hostile] {
        assert_eq!(outcomes.invalidations, 64);
        assert_eq!(outcomes.hardware.invalidations.domain, 0);
        assert_eq!(outcomes.release_delay_max_ns, 63 * US);
        assert_eq!((outcomes.stale_max_ns, outcomes.tally.violations()), (0, 0));
        assert_eq!(outcomes.tally.false_faults, 0);
    }
    // As published, the pages of a descriptor are back for up to 63 us before the invalidation.
    let (metered, hostile) = replay("fs-paper", &plan, &alive);
    assert_eq!(
        (metered.invalidations, metered.release_delay_max_ns),
        (64, 0)
    );
    assert_eq!(metered.stale_max_ns, 63 * US);
    assert!(hostile.tally.violations() >= 63 * 64, "{:?}", hostile.tally);
}

/// A device that falls silent: `fs` returns its buffers within the longest duration, `fs-paper`
/// leaves the pages of the incomplete descriptor exposed.
#[test]
fn an_incomplete_descriptor_ends_in_time_or_never() {
    for (direction, longest) in [(RX, RECEIVE_DESCRIPTOR_NS), (TX, TRANSMIT_DESCRIPTOR_NS)] {
        let mut script = Script::default();
        for id in 0..10_u64 {
            script.map(
                0,
                (0, 0, direction),
                id as u32,
                &[memory((1 + id) << 12, 4096)],
            );
        }
        for id in 0..10 {
            script.unmap(US, (0, 0), id);
        }
        let (plan, planner) = planned_descriptors(&script.chunk);
        let alive = planner.live_mappings();
        let (_, hostile) = replay("fs", &plan, &alive);
        assert_eq!(hostile.release_delay_max_ns, longest);
        assert_eq!((hostile.invalidations, hostile.tally.violations()), (1, 0));
        let (_, published) = replay("fs-paper", &plan, &alive);
        assert_eq!(published.invalidations, 0);
        assert!(published.stale_max_ns > 10_000 * US && published.tally.violations() > 0);
    }
}

/// The limits hold for all buffers of `fs`, at every pace of a driver, also under attack.
#[test]
fn fs_returns_buffers_in_time_at_every_pace() {
    for pause in [
        1,
        700,
        3 * US,
        40 * US,
        99 * US,
        101 * US,
        999 * US,
        5_000 * US,
    ] {
        let (mut script, mut time) = (Script::default(), 0);
        for id in 0..400_u32 {
            time += pause;
            let at = u64::from(1 + id) << 14;
            let direction = [RX, TX][id as usize % 2];
            script.map(time, (0, 0, direction), id, &[memory(at, 4096)]);
            if id >= 8 {
                script.unmap(time, (0, 0), id - 8);
            }
        }
        let (plan, planner) = planned_descriptors(&script.chunk);
        let (metered, hostile) = replay("fs", &plan, &planner.live_mappings());
        for outcomes in [metered, hostile] {
            let longest = |delays: &Delays| delays.percentile(100).unwrap();
            let delays = &outcomes.release_delays;
            assert!(longest(&delays.receive) <= RECEIVE_DESCRIPTOR_NS, "{pause}");
            assert!(
                longest(&delays.transmit) <= TRANSMIT_DESCRIPTOR_NS,
                "{pause}"
            );
            assert!(longest(&delays.all()) > 0, "{pause}");
            assert_eq!((outcomes.not_flushed, outcomes.tally.violations()), (0, 0));
        }
    }
}

/// F&S, Fig. 12: no misses of the caches of the two upper levels and at most 0.054 of the lowest
/// per page, so at most 1.054 reads per page. The model then gives the line rate of 100 Gb/s.
#[test]
fn contiguous_addresses_keep_the_walk_caches() {
    let script = receive_ring(512, 64, 16_384);
    let (plan, planner) = planned_descriptors(&script.chunk);
    let (metered, _) = replay("fs", &plan, &planner.live_mappings());
    let hardware = &metered.hardware;
    let pages = metered.tally.accesses as f64;
    assert!(pages >= 16_384.0);
    // The first walk misses all three.
    let [lowest, middle, top] = hardware.walk_cache_misses;
    assert!(middle <= 1 && top <= 1, "{hardware:?}");
    assert!(lowest as f64 / pages <= 0.054, "{hardware:?}");
    let reads = hardware.walk_references as f64 / pages;
    assert!((1.0..=1.054).contains(&reads), "{reads}");
    let side = MachineProfile::cascade_lake_2024().device_side.unwrap();
    let ceiling = side.ceiling_gbps(reads, 1);
    assert!(ceiling >= 100.0, "{ceiling}");
    assert!((ceiling / 120.2 - 1.0).abs() <= 0.1, "{ceiling}");
}
