//! Counts and predictions of `size`, compared with the driver's own replay and with counts made by
//! hand.

use proptest::prelude::*;
use ringfence_dma::ring::SlotChoice;
use ringfence_lab::compare::{CompareOptions, runner};
use ringfence_lab::modes::Mode;
use ringfence_lab::plan::{Plan, Planner};
use ringfence_lab::replay::Outcomes;
use ringfence_lab::ring::{RingSizes, ring_index};
use ringfence_lab::size::{
    Fit, RingDemand, RingSlots, SizeOptions, Stalls, TraceDemand, advise, geometries,
    measure_demand, readings,
};
use ringfence_lab::{LabError, Profile, ReplayLimits};
use ringfence_trace::{Devices, Operations, SAMPLE, TraceOptions, TraceSource};
use ringfence_types::PhysRange;

use crate::script::*;

const US: u64 = 1_000;

fn buffer(number: u64) -> PhysRange {
    memory((16 << 12) + number * 128 + 0x40, 100)
}

fn usage(plan: &Plan) -> TraceDemand {
    let mut usage = TraceDemand::default();
    usage.add(plan);
    usage.finish(&Devices::new());
    usage
}

/// Returns the demand on the only ring of a plan.
fn only(plan: &Plan) -> RingDemand {
    let usage = usage(plan);
    let mut rings = usage.rings();
    let ring = rings.next().unwrap().3.clone();
    assert!(rings.next().is_none());
    ring
}

fn replayed(mode: &str, plan: &Plan, planner: &Planner, slots: u32) -> Outcomes {
    let options = CompareOptions {
        rings: RingSizes::Every(slots),
        ..judged_only(false)
    };
    let mut runner = runner(&Mode::find(mode).unwrap(), &options).unwrap();
    runner.metered.run(plan, &Devices::new()).unwrap();
    runner.metered.finish(&planner.live_mappings())
}

/// For each direction: the stalls of the driver, and those of the model of slots.
fn both(choice: SlotChoice, plan: &Plan, planner: &Planner, slots: u32) -> Vec<(Stalls, Stalls)> {
    let mode = match choice {
        SlotChoice::Tail => "riommu",
        SlotChoice::NextFree => "riommu-ooo",
    };
    let outcomes = replayed(mode, plan, planner, slots);
    assert_eq!(outcomes.tally.violations() + outcomes.tally.false_faults, 0);
    let rings = &outcomes.rings;
    let sums = rings.iter().fold((0, 0, 0), |sum, ring| {
        (
            sum.0 + ring.stalls,
            sum.1 + ring.stalled_out,
            sum.2 + ring.refused,
        )
    });
    let whole = (outcomes.stalls, outcomes.stalled_out, outcomes.refused_maps);
    assert_eq!(sums, whole, "rings add up");
    [RX, TX]
        .into_iter()
        .map(|direction| {
            let mut model = RingSlots::new(choice, slots);
            for timed in &plan.steps {
                let of = match timed.step {
                    ringfence_lab::plan::Step::Map { direction, .. }
                    | ringfence_lab::plan::Step::Unmap { direction, .. }
                    | ringfence_lab::plan::Step::EndBurst { direction, .. } => Some(direction),
                    _ => None,
                };
                if of == Some(direction) {
                    model.step(&timed.step);
                }
            }
            let found = rings
                .get(ring_index(direction))
                .copied()
                .unwrap_or_default();
            let found = Stalls {
                stalls: found.stalls,
                stalled_out: found.stalled_out,
                refused: found.refused,
            };
            (found, model.finish())
        })
        .collect()
}

/// One operation of a random trace: delay since the previous one in microseconds, CPU, direction
/// (true for to-device), number of segments, true for an unmap, and the mapping to unmap.
type Drawn = (u64, u16, bool, u64, bool, prop::sample::Index);

fn drawn(operations: &[Drawn]) -> Script {
    let mut script = Script::default();
    let mut alive: Vec<(u32, bool)> = Vec::new();
    let (mut time, mut next, mut bytes) = (0, 0, 0);
    for (wait, cpu, towards, pieces, unmap, which) in operations {
        time += wait * US;
        if *unmap && !alive.is_empty() {
            let (id, _) = alive.remove(which.index(alive.len()));
            script.unmap(time, (0, *cpu), id);
        } else {
            let direction = if *towards { TX } else { RX };
            let list: Vec<PhysRange> = (0..*pieces).map(|piece| buffer(bytes + piece)).collect();
            bytes += pieces;
            script.map(time, (0, *cpu, direction), next, &list);
            alive.push((next, *towards));
            next += 1;
        }
    }
    script
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48,
        rng_seed: prop::test_runner::RngSeed::Fixed(9),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// The model of slots shares no code with the driver. It predicts how many maps wait, and how
    /// many of them in vain. The computed need is tight: with one slot less, maps wait.
    #[test]
    fn the_driver_stalls_as_predicted(
        operations in prop::collection::vec(
            (
                0..40_u64,
                0..3_u16,
                any::<bool>(),
                prop_oneof![3 => Just(1_u64), 1 => 1..5_u64],
                any::<bool>(),
                any::<prop::sample::Index>(),
            ),
            1..160,
        ),
        slots in 1..40_u32,
    ) {
        let (plan, planner) = planned(&drawn(&operations).chunk);
        for choice in [SlotChoice::Tail, SlotChoice::NextFree] {
            for (found, model) in both(choice, &plan, &planner, slots) {
                prop_assert_eq!(found, model, "{:?} of {}", choice, slots);
            }
        }
        let usage = usage(&plan);
        for (_, _, direction, ring) in usage.rings() {
            let index = usize::from(direction == TX);
            for (choice, need) in [
                (SlotChoice::Tail, ring.in_order_need),
                (SlotChoice::NextFree, ring.any_order_need),
            ] {
                prop_assert!(need <= ring.in_order_need && ring.any_order_need <= ring.rule());
                let at = |slots: u64| both(choice, &plan, &planner, slots as u32)[index].0;
                prop_assert_eq!(at(need), Stalls::default(), "{:?} of {}", choice, need);
                if need > 1 {
                    prop_assert_ne!(at(need - 1), Stalls::default(), "{:?} of one less", choice);
                }
            }
        }
    }
}

/// Eight maps, then unmaps in the order of `order` within one burst.
fn burst(order: impl IntoIterator<Item = u32>) -> Script {
    let mut script = Script::default();
    for id in 0..8 {
        script.map(u64::from(id) * US, (0, 0, RX), id, &[buffer(u64::from(id))]);
    }
    for (turn, id) in order.into_iter().enumerate() {
        script.unmap((20 + turn as u64) * US, (0, 0), id);
    }
    script
}

#[test]
fn order_is_counted() {
    let (plan, _) = planned(&burst(0..8).chunk);
    let ring = only(&plan);
    assert_eq!(
        (ring.live_max, ring.burst_max, ring.withheld_max),
        (8, 8, 8)
    );
    assert_eq!((ring.rule(), ring.descriptor_rule()), (16, 16));
    assert_eq!((ring.out_of_order, ring.overtaken_max), (0, 0));
    assert_eq!((ring.any_order_need, ring.in_order_need), (8, 8));
    assert_eq!(ring.next_in_turn, 8);
    assert_eq!(ring.live_at_end, 0);

    let (plan, _) = planned(&burst((0..8).rev()).chunk);
    let ring = only(&plan);
    // Buffer 7 overtakes seven others, 6 overtakes six, ..., and 0 overtakes none.
    assert_eq!(
        (ring.out_of_order, ring.overtaken_max, ring.overtaken_sum),
        (7, 7, 28)
    );
    assert_eq!(ring.next_in_turn, 0);
}

/// N by descriptors counts each of the D mappings with the K slots of the largest; N by slots
/// counts the slots that are mapped.
#[test]
fn a_descriptor_counts_with_the_slots_of_the_largest() {
    let mut script = Script::default();
    for (id, pieces) in [(0_u32, 4_u64), (1, 1), (2, 4)] {
        let first = u64::from(id) * 4;
        let list: Vec<PhysRange> = (first..first + pieces).map(buffer).collect();
        script.map(u64::from(id), (0, 0, RX), id, &list);
    }
    script.unmap(10 * US, (0, 0), 0);
    script.unmap(11 * US, (0, 0), 1);
    let (plan, _) = planned(&script.chunk);
    let ring = only(&plan);
    assert_eq!(
        (ring.mappings_max, ring.pieces_max, ring.live_max),
        (3, 4, 9)
    );
    assert_eq!(ring.withheld_max, 5);
    assert_eq!((ring.descriptor_rule(), ring.rule()), (3 * 4 + 5, 9 + 5));
}

/// One buffer stays mapped while the driver maps and unmaps others. An in-order tail must not pass
/// it, so the ring needs a slot for each of them.
#[test]
fn a_buffer_that_stays_makes_a_ring_in_order_long() {
    let mut script = Script::default();
    script.map(0, (0, 0, RX), 0, &[buffer(0)]);
    for turn in 0..50 {
        let id = 1 + turn as u32;
        script.map((1 + turn) * 200 * US, (0, 0, RX), id, &[buffer(1 + turn)]);
        script.unmap(((1 + turn) * 200 + 1) * US, (0, 0), id);
    }
    let (plan, planner) = planned(&script.chunk);
    let ring = only(&plan);
    assert_eq!((ring.live_max, ring.withheld_max), (2, 1));
    assert_eq!((ring.mappings_max, ring.descriptor_rule()), (2, 2 + 1));
    assert_eq!((ring.any_order_need, ring.in_order_need), (2, 51));
    assert_eq!(replayed("riommu", &plan, &planner, 51).stalls, 0);
    assert!(replayed("riommu", &plan, &planner, 50).stalls > 0);
    assert_eq!(replayed("riommu-ooo", &plan, &planner, 2).stalls, 0);
}

/// A burst longer than the layer's burst limit: its first part is free before its end.
#[test]
fn long_bursts_are_released_in_parts() {
    let mut script = Script::default();
    for id in 0..600 {
        script.map(0, (0, 0, RX), id, &[buffer(u64::from(id))]);
    }
    for id in 0..600 {
        script.unmap(10 * US + u64::from(id), (0, 0), id);
    }
    // Another CPU maps while the first CPU's burst is open.
    for id in 600..900 {
        script.map(11 * US, (0, 1, RX), id, &[buffer(u64::from(id))]);
    }
    let (plan, planner) = planned(&script.chunk);
    let ring = only(&plan);
    assert_eq!((ring.burst_max, ring.withheld_max), (600, 256));
    for slots in [299, 300, 599, 600] {
        for choice in [SlotChoice::Tail, SlotChoice::NextFree] {
            let (found, model) = both(choice, &plan, &planner, slots)[0];
            assert_eq!(found, model, "{choice:?} of {slots}");
        }
    }
}

fn opened() -> Result<Operations<TraceSource>, LabError> {
    Ok(sample())
}

fn sample() -> Operations<TraceSource> {
    let source = TraceSource::from_reader("sample", SAMPLE).unwrap();
    Operations::new("sample", source, TraceOptions::default())
}

/// Many devices on many CPUs take memory in each replay: one runs at a time, and the trace is read
/// again for each of the others, with the same results.
#[test]
fn a_trace_that_takes_much_memory_is_read_more_often() {
    let mut text = String::new();
    for n in 0..4000 {
        let (device, cpu, page) = (n % 80, n / 80, 4096 * (n + 1));
        text += &format!(
            "t-1 [{cpu}] ..... 0.{n:06}: dma_map_phys: dev{device} dir=TO_DEVICE dma_addr={page:x} \
             size=64 phys_addr={page:x} attrs=\n"
        );
    }
    let open = || {
        let source = TraceSource::from_reader("t", std::io::Cursor::new(text.clone().into_bytes()));
        Operations::new("t", source.unwrap(), TraceOptions::default())
    };
    let usage = measure_demand(open(), None, ReplayLimits::default(), |_| {}).unwrap();
    let options = SizeOptions {
        limits: ReplayLimits::default(),
        profile: Profile::r210_2015(),
        devices: None,
        entries: Vec::new(),
        modes: vec![mode("linux-lazy")],
    };
    let (mut opened, mut lines) = (0, 0);
    let open = || {
        opened += 1;
        Ok::<_, LabError>(open())
    };
    let advice = advise("t", open, &usage, &options, |line| lines = line).unwrap();
    assert_eq!(readings(&usage, &options), opened);
    assert_eq!(lines, 4000 * opened);
    // Eight sizes of rings with two choices of slots, fifteen shapes of the IOTLB and four
    // prefetches.
    assert_eq!(opened, 16 + 15 + 4);
    assert_eq!(advice.rings.len(), 80);
    for point in advice.rings.iter().flat_map(|ring| &ring.sweep) {
        assert_eq!(point.in_order, point.in_order_predicted, "{point:?}");
        assert_eq!(point.any_order, point.any_order_predicted, "{point:?}");
    }
    assert_eq!(advice.iotlb[0].points.len(), geometries().count());
}

#[test]
fn named_sizes_are_reported_once_and_in_order() {
    let usage = measure_demand(sample(), None, ReplayLimits::default(), |_| {}).unwrap();
    let options = SizeOptions {
        limits: ReplayLimits::default(),
        profile: Profile::r210_2015(),
        devices: None,
        entries: vec![64, 8, 64],
        modes: Vec::new(),
    };
    let advice = advise("sample", opened, &usage, &options, |_| {}).unwrap();
    for ring in &advice.rings {
        let sizes: Vec<u32> = ring.sweep.iter().map(|point| point.entries).collect();
        assert_eq!(sizes, [8, 64]);
        for point in &ring.sweep {
            assert_eq!(point.in_order, point.in_order_predicted, "{point:?}");
            assert_eq!(point.any_order, point.any_order_predicted, "{point:?}");
        }
    }
}

#[test]
fn a_trace_is_advised_on_and_the_advice_holds() {
    let usage = measure_demand(sample(), None, ReplayLimits::default(), |_| {}).unwrap();
    let options = SizeOptions {
        limits: ReplayLimits::default(),
        profile: Profile::r210_2015(),
        devices: None,
        entries: Vec::new(),
        modes: ["linux-lazy", "calgary"].map(mode).to_vec(),
    };
    let advice = advise("sample", opened, &usage, &options, |_| {}).unwrap();
    assert_eq!(advice.status, "ok");
    assert!(!advice.rings.is_empty());
    for ring in &advice.rings {
        assert!(ring.entries.is_power_of_two() && u64::from(ring.entries) >= ring.rule_slots);
        assert_eq!(ring.table_bytes, 16 * u64::from(ring.entries));
        for point in &ring.sweep {
            assert_eq!(point.in_order, point.in_order_predicted, "{point:?}");
            assert_eq!(point.any_order, point.any_order_predicted, "{point:?}");
            let enough = u64::from(point.entries) >= ring.any_order_slots;
            assert_eq!(point.any_order == Stalls::default(), enough, "{point:?}");
            let enough = u64::from(point.entries) >= ring.in_order_slots;
            assert_eq!(point.in_order == Stalls::default(), enough, "{point:?}");
        }
        let advised = ring
            .sweep
            .iter()
            .find(|point| point.entries == ring.entries);
        if let (Some(point), Fit::InOrder) = (advised, ring.fit) {
            assert_eq!(point.in_order, Stalls::default());
        }
    }
    let [iotlb, flat] = &advice.iotlb[..] else {
        panic!("two modes");
    };
    let names = [iotlb, flat].map(|advice| advice.mode.as_str());
    assert_eq!(names, ["linux-lazy", "calgary"]);
    assert_eq!(iotlb.points.len(), geometries().count());
    let of = |sets, ways| {
        let point = iotlb
            .points
            .iter()
            .find(|p| (p.sets, p.ways) == (sets, ways));
        point.unwrap().hit_rate.unwrap()
    };
    // Half of the accesses are the first of a page. An IOTLB of 4096 entries hits as often as one
    // that holds all live pages.
    assert!((0.3..=0.5).contains(&of(256, 16)), "{iotlb:?}");
    // LRU: a larger set holds everything that a smaller one holds.
    assert!(of(16, 1) <= of(16, 4) && of(16, 4) <= of(16, 16));
    assert!(of(64, 1) <= of(64, 4) && of(64, 4) <= of(64, 16));
    // Prefetches, with the geometry of one point. A hint turns the first access after each map into
    // a hit, and reads as many words as the miss would have.
    let names: Vec<_> = iotlb.strategies.iter().map(|by| by.prefetch).collect();
    let expected = ["none", "next-page", "previous-page", "hint-at-map"];
    assert_eq!(names, expected);
    let [none, next, previous, hint] = &iotlb.strategies[..] else {
        panic!("four strategies");
    };
    let rate = 1.0 - none.misses as f64 / iotlb.lookups as f64;
    assert!((of(16, 4) - rate).abs() < 1e-9);
    assert_eq!(none.prefetched, 0);
    // Each mode has its own table: a walk reads one word of a flat one, and more of a radix one.
    let [plain, ..] = &flat.strategies[..] else {
        panic!("no strategy");
    };
    assert!(plain.misses > 0);
    assert_eq!(plain.words_read, plain.misses, "{flat:?}");
    assert!(none.words_read > none.misses, "{iotlb:?}");
    assert!(next.prefetched > 0 && previous.prefetched > 0 && hint.prefetched > 0);
    assert!(hint.misses <= none.misses - iotlb.lookups / 4, "{iotlb:?}");
    assert!(hint.words_read >= none.words_read / 2);
    let best = iotlb
        .points
        .iter()
        .filter_map(|point| point.hit_rate)
        .fold(0.0, f64::max);
    assert_eq!(iotlb.best_hit_rate, Some(best));
    assert!(iotlb.entries_for_90_percent <= iotlb.entries_for_99_percent);
    assert_eq!(
        advice.recommendation.matches(". ").count(),
        1,
        "two sentences"
    );
}

#[test]
fn requested_sizes_are_tried() {
    let usage = measure_demand(sample(), None, ReplayLimits::default(), |_| {}).unwrap();
    let options = SizeOptions {
        limits: ReplayLimits::default(),
        profile: Profile::r210_2015(),
        devices: None,
        entries: vec![1, 7],
        modes: Vec::new(),
    };
    let advice = advise("sample", opened, &usage, &options, |_| {}).unwrap();
    assert!(advice.iotlb.is_empty());
    for ring in &advice.rings {
        let tried: Vec<u32> = ring.sweep.iter().map(|point| point.entries).collect();
        assert_eq!(tried, [1, 7]);
    }
}
