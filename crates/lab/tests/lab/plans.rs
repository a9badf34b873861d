//! Ends of bursts, and ticks.

use std::collections::BTreeSet;

use proptest::prelude::*;
use ringfence_lab::plan::{BURST_NS, Plan, Step};
use ringfence_trace::{Chunk, DeviceIndex, MappingId, OpKind, Operations, TraceSource};
use ringfence_types::{Direction, PageSize, PhysRange};

use crate::script::*;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

/// Formats the steps without ticks: `12 map 0`, `14 unmap 0`, `64 end 0:0:to-device`. Times are in
/// microseconds.
fn shown(plan: &Plan) -> Vec<String> {
    let at = |time: u64| (time - START) as f64 / US as f64;
    plan.steps
        .iter()
        .filter_map(|timed| {
            let time = at(timed.time.0);
            Some(match timed.step {
                Step::Map { id, .. } => format!("{time} map {}", id.0),
                Step::Unmap { id, .. } => format!("{time} unmap {}", id.0),
                Step::EndBurst {
                    device,
                    cpu,
                    direction,
                } => format!("{time} end {}:{cpu}:{direction}", device.0),
                Step::Doorbell { .. } => return Some(format!("{time} doorbell")),
                Step::EndDescriptor { .. } | Step::Tick => return None,
            })
        })
        .collect()
}

#[test]
fn bursts_end_as_decided() {
    let page = |number: u64| [memory(number << 12, 100)];
    // A burst's key is device, CPU and direction.
    let (rx, tx) = ((0, 0, RX), (0, 0, TX));
    let mut script = Script::default();
    for (id, key) in [rx, rx, rx, tx, (1, 0, RX), (0, 1, RX)].iter().enumerate() {
        script.map(0, *key, id as u32, &page(id as u64 + 1));
    }
    // A burst of two. Unmaps of another direction, device or CPU do not end it.
    script.unmap(10 * US, (0, 0), 0);
    script.unmap(11 * US, (0, 0), 3);
    script.unmap(12 * US, (1, 0), 4);
    script.unmap(13 * US, (0, 1), 5);
    script.map(14 * US, (0, 2, RX), 6, &page(20));
    script.unmap(15 * US, (0, 0), 1);
    // A map of the same key ends it.
    script.map(16 * US, rx, 7, &page(21));
    // The other bursts end 50 us after their first unmap, in the order in which they began, and
    // before any operation of that time.
    script.unmap(61 * US, (0, 0), 2);
    let (plan, planner) = planned(&script.chunk);
    assert_eq!(
        shown(&plan),
        [
            "0 map 0",
            "0 map 1",
            "0 map 2",
            "0 map 3",
            "0 map 4",
            "0 map 5",
            "10 unmap 0",
            "11 unmap 3",
            "12 unmap 4",
            "13 unmap 5",
            "14 map 6",
            "15 unmap 1",
            "16 end 0:0:from-device",
            "16 map 7",
            "61 end 0:0:to-device",
            "61 unmap 2",
            "62 end 1:0:from-device",
            "63 end 0:1:from-device",
            "111 end 0:0:from-device",
        ]
    );
    assert_eq!((planner.bursts(), planner.bursts_cut_by_map()), (5, 0));
    assert_eq!((plan.maps, plan.unmaps, plan.lines), (8, 6, 14));
    let alive: Vec<u32> = planner.live_mappings().iter().map(|(id, _)| id.0).collect();
    assert_eq!(alive, [6, 7]);
}

#[test]
fn the_50_us_count_from_the_first_unmap() {
    let mut script = Script::default();
    for id in 0..4 {
        script.map(0, (0, 0, RX), id, &[memory(u64::from(id + 1) << 12, 64)]);
    }
    for (id, at) in [
        (0, 100 * US),
        (1, 149 * US),
        (2, 150 * US - 1),
        (3, 150 * US),
    ] {
        script.unmap(at, (0, 0), id);
    }
    let (plan, planner) = planned(&script.chunk);
    assert_eq!(
        shown(&plan)[4..],
        [
            "100 unmap 0",
            "149 unmap 1",
            "149.999 unmap 2",
            "150 end 0:0:from-device",
            "150 unmap 3",
            "200 end 0:0:from-device",
        ]
    );
    assert_eq!(planner.bursts(), 2);
}

#[test]
fn map_of_a_withheld_page_ends_its_bursts() {
    let mut script = Script::default();
    // Two buffers on one page, in two bursts, and a third burst elsewhere.
    script.map(0, (0, 0, RX), 0, &[memory(0x5000, 0x100)]);
    script.map(0, (0, 1, RX), 1, &[memory(0x5800, 0x100)]);
    script.map(0, (0, 2, RX), 2, &[memory(0x9000, 0x100)]);
    script.unmap(US, (0, 0), 0);
    script.unmap(2 * US, (0, 1), 1);
    script.unmap(3 * US, (0, 2), 2);
    // A map of another device and direction, whose second segment overlaps the page.
    let pieces = [memory(0x20000, 0x1000), memory(0x4ff0, 0x20)];
    script.map(4 * US, (1, 3, TX), 3, &pieces);
    let (plan, planner) = planned(&script.chunk);
    assert_eq!(
        shown(&plan)[6..],
        [
            "4 end 0:0:from-device",
            "4 end 0:1:from-device",
            "4 map 3",
            "53 end 0:2:from-device",
        ]
    );
    assert_eq!((planner.bursts(), planner.bursts_cut_by_map()), (3, 2));
}

#[test]
fn too_many_open_bursts_end_the_oldest() {
    // The 1024 that may be open. The end of one by its own map leaves the others in their order.
    const OPEN: u32 = 1024;
    let mut script = Script::default();
    let at = |id: u32| ((id % 4) as u16, (id / 4) as u16);
    let key = |id: u32| (at(id).0, at(id).1, RX);
    for id in 0..=OPEN + 1 {
        script.map(0, key(id), id, &[memory(u64::from(id + 1) << 12, 64)]);
    }
    for id in 0..OPEN {
        script.unmap(US, at(id), id);
    }
    script.map(2 * US, key(0), OPEN + 2, &[memory(1 << 30, 64)]);
    for id in [OPEN, OPEN + 1] {
        script.unmap(3 * US, at(id), id);
    }
    let (plan, _) = planned(&script.chunk);
    let ends: Vec<String> = shown(&plan)
        .into_iter()
        .filter(|line| line.contains("end"))
        .collect();
    assert_eq!(
        ends[..2],
        ["2 end 0:0:from-device", "3 end 1:0:from-device"]
    );
    assert_eq!(ends.len() as u32, OPEN + 2);
}

#[test]
fn a_burst_of_all_of_memory_is_one_run() {
    // Page by page, the first two would take too long.
    let all = memory(0, u64::MAX);
    let top = memory(u64::MAX - 9, 10);
    let large = memory(7 << 12, 64 << 30);
    let mut script = Script::default();
    for (id, piece) in [all, large, top].iter().enumerate() {
        script.map(0, (0, 0, RX), id as u32, &[*piece]);
    }
    for id in 0..3 {
        script.unmap((id + 1) * US, (0, id as u16), id as u32);
    }
    script.map(4 * US, (0, 7, TX), 0, &[memory(1 << 40, 1)]);
    script.map(5 * US, (0, 7, TX), 1, &[large, top]);
    let (plan, planner) = planned(&script.chunk);
    assert_eq!(
        shown(&plan)[6..],
        [
            "4 end 0:0:from-device",
            "4 map 0",
            "5 end 0:1:from-device",
            "5 end 0:2:from-device",
            "5 map 1",
        ]
    );
    assert_eq!((planner.bursts(), planner.bursts_cut_by_map()), (3, 3));
}

#[test]
fn timers_run_in_gaps_and_the_clock_skips_the_rest() {
    let mut script = Script::default();
    script.map(0, (0, 0, RX), 0, &[memory(0x1000, 64)]);
    script.unmap(500 * US, (0, 0), 0);
    script.map(10_000 * MS, (0, 0, RX), 0, &[memory(0x1000, 64)]);
    let (plan, _) = planned(&script.chunk);
    let ticks: Vec<u64> = plan
        .steps
        .iter()
        .filter(|timed| timed.step == Step::Tick)
        .map(|timed| (timed.time.0 - START) / MS)
        .collect();
    // Every millisecond, for 12 ms after the last operation before the quiet time, and for 12 ms
    // after the last operation.
    let expected: Vec<u64> = (1..=12).chain(10_001..=10_012).collect();
    assert_eq!(ticks, expected);
}

#[test]
fn only_the_chosen_devices_are_planned() {
    let lines: Vec<String> = (0..40_u64)
        .flat_map(|turn| {
            let (device, at) = (["eth", "disk"][turn as usize % 2], (turn + 1) << 12);
            [map_line(device, at, 64), unmap_line(device, at, 64)]
        })
        .collect();
    let maps = |names: Option<&[&str]>| {
        let mut operations: Operations<TraceSource> = trace(&lines);
        let mut chunk = Chunk::default();
        // The whole trace fits into one chunk.
        operations.next_chunk(&mut chunk).unwrap();
        let (mut planner, mut plan) = (ringfence_lab::plan::Planner::new(), Plan::default());
        if let Some(names) = names {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            planner.only_devices(operations.devices(), &names);
        }
        planner.plan(&chunk, &mut plan).unwrap();
        planner.finish(&mut plan);
        let devices: BTreeSet<u16> = plan
            .steps
            .iter()
            .filter_map(|timed| match timed.step {
                Step::Map { device, .. }
                | Step::Unmap { device, .. }
                | Step::EndBurst { device, .. }
                | Step::Doorbell { device, .. } => Some(device.0),
                Step::EndDescriptor { .. } | Step::Tick => None,
            })
            .collect();
        (plan.maps, plan.unmaps, plan.lines, devices)
    };
    assert_eq!(maps(None), (40, 40, 80, [0, 1].into()));
    assert_eq!(maps(Some(&["disk"])), (20, 20, 40, [1].into()));
    assert_eq!(maps(Some(&["eth", "disk"])), (40, 40, 80, [0, 1].into()));
    assert_eq!(maps(Some(&["none such"])), (0, 0, 0, BTreeSet::new()));
}

/// One operation of a generated trace. The mapping to unmap is chosen when the operation is placed.
#[derive(Debug, Clone)]
struct Draft {
    pause: u64,
    device: u16,
    cpu: u16,
    direction: Direction,
    page: u64,
    pages: u64,
    unmap: Option<usize>,
}

fn draft() -> impl Strategy<Value = Draft> {
    let pause = prop_oneof![
        4 => 0..3_000_u64,
        3 => 10 * US..60 * US,
        1 => MS..30 * MS,
    ];
    let direction = prop_oneof![Just(RX), Just(TX)];
    (
        pause,
        0..2_u16,
        0..2_u16,
        direction,
        1..24_u64,
        1..3_u64,
        prop::option::weighted(0.55, any::<prop::sample::Index>()),
    )
        .prop_map(
            |(pause, device, cpu, direction, page, pages, unmap)| Draft {
                pause,
                device,
                cpu,
                direction,
                page,
                pages,
                unmap: unmap.map(|index| index.index(1 << 20)),
            },
        )
}

/// A trace in which every unmap has a map.
fn written(drafts: &[Draft]) -> Script {
    let mut script = Script::default();
    let mut live: Vec<(u32, u16)> = Vec::new();
    let mut free: Vec<u32> = Vec::new();
    let mut time = 0;
    for draft in drafts {
        time += draft.pause;
        match draft.unmap {
            Some(index) if !live.is_empty() => {
                let (id, device) = live.swap_remove(index % live.len());
                free.push(id);
                script.unmap(time, (device, draft.cpu), id);
            }
            _ => {
                let id = free.pop().unwrap_or(live.len() as u32);
                live.push((id, draft.device));
                let piece = memory((draft.page << 12) + 0x80, (draft.pages << 12) - 0x100);
                script.map(
                    time,
                    (draft.device, draft.cpu, draft.direction),
                    id,
                    &[piece],
                );
            }
        }
    }
    script
}

fn pages(piece: &PhysRange) -> impl Iterator<Item = u64> + use<> {
    let all = piece.to_pages(PageSize::Size4K);
    (all.start().get() >> 12)..=(all.last().get() >> 12)
}

/// A burst as the reference finds it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Clone)]
struct Found {
    /// Index of the operation before which it ends; the number of operations if it ends last.
    before: usize,
    time: u64,
    key: (u16, u16, &'static str),
}

/// Scans the whole trace from the first unmap of each burst. The only state is the set of unmaps
/// that belong to a burst already.
fn reference(chunk: &Chunk) -> (Vec<Found>, u64) {
    // CPUs are numbered in the order of their appearance.
    let mut rows: Vec<u16> = Vec::new();
    for op in &chunk.ops {
        if !rows.contains(&op.cpu) {
            rows.push(op.cpu);
        }
    }
    let row = |cpu: u16| rows.iter().position(|known| *known == cpu).unwrap() as u16;
    let made = |unmap: usize, id: MappingId| {
        chunk.ops[..unmap]
            .iter()
            .rev()
            .find_map(|op| match op.kind {
                OpKind::Map {
                    id: mapped,
                    direction,
                    segments,
                    ..
                } if mapped == id => Some((direction, chunk.segments_of(segments))),
                _ => None,
            })
            .unwrap()
    };
    let key = |index: usize| {
        let op = &chunk.ops[index];
        let direction = match op.kind {
            OpKind::Map { direction, .. } => direction,
            OpKind::Unmap { id } => made(index, id).0,
        };
        let direction = if direction == RX { "rx" } else { "tx" };
        (op.device.0, row(op.cpu), direction)
    };
    let mut members = vec![false; chunk.ops.len()];
    let (mut found, mut cut) = (Vec::new(), 0);
    for first in 0..chunk.ops.len() {
        let OpKind::Unmap { .. } = chunk.ops[first].kind else {
            continue;
        };
        if members[first] {
            continue;
        }
        let due = chunk.ops[first].time.0 + BURST_NS;
        let mut withheld = BTreeSet::new();
        let mut end = None;
        for (next, op) in chunk.ops.iter().enumerate().skip(first) {
            if op.time.0 >= due {
                end = Some((next, due));
                break;
            }
            match op.kind {
                OpKind::Unmap { id } if key(next) == key(first) => {
                    members[next] = true;
                    withheld.extend(made(next, id).1.iter().flat_map(pages));
                }
                OpKind::Unmap { .. } => {}
                OpKind::Map { segments, .. } => {
                    let own = key(next) == key(first);
                    let mut mapped = chunk.segments_of(segments).iter().flat_map(pages);
                    if own || mapped.any(|page| withheld.contains(&page)) {
                        cut += u64::from(!own);
                        end = Some((next, op.time.0));
                        break;
                    }
                }
            }
        }
        let (before, time) = end.unwrap_or((chunk.ops.len(), due));
        found.push(Found {
            before,
            time,
            key: key(first),
        });
    }
    found.sort();
    (found, cut)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        rng_seed: prop::test_runner::RngSeed::Fixed(50),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn bursts_agree_with_the_reference_however_the_trace_is_cut(
        drafts in prop::collection::vec(draft(), 1..80),
        size in 1..40_usize,
    ) {
        let chunk = written(&drafts).chunk;
        let (plan, planner) = planned_in_chunks(&chunk, size);
        let (expected, cut) = reference(&chunk);
        let mut found = Vec::new();
        let mut done = 0;
        for timed in &plan.steps {
            match timed.step {
                Step::Doorbell { .. } => {}
                Step::Map { .. } | Step::Unmap { .. } => done += 1,
                Step::EndBurst { device: DeviceIndex(device), cpu, direction } => found.push(Found {
                    before: done,
                    time: timed.time.0,
                    key: (device, cpu, if direction == RX { "rx" } else { "tx" }),
                }),
                Step::EndDescriptor { .. } | Step::Tick => {}
            }
        }
        prop_assert!(found.is_sorted_by_key(|end| (end.before, end.time)), "{:?}", shown(&plan));
        found.sort();
        prop_assert_eq!(&found, &expected);
        prop_assert_eq!(planner.bursts(), expected.len() as u64);
        prop_assert_eq!(planner.bursts_cut_by_map(), cut);
        prop_assert_eq!(done, chunk.ops.len());
        // Time is monotonic.
        prop_assert!(plan.steps.is_sorted_by_key(|timed| timed.time), "{:?}", shown(&plan));
        // A timer of 10 ms set at any operation expires at most one tick late.
        let ticks: Vec<u64> = plan
            .steps
            .iter()
            .filter(|timed| timed.step == Step::Tick)
            .map(|timed| timed.time.0)
            .collect();
        for op in &chunk.ops {
            let due = op.time.0 + 10 * MS;
            prop_assert!(
                ticks.iter().any(|tick| (due..due + MS).contains(tick)),
                "{due} {ticks:?}"
            );
        }
    }
}
