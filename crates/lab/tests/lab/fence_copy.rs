//! `fence-copy`: the way of each buffer, the oracle's verdicts, the delays, and the thresholds.

use ringfence_dma::space::SharedPages;
use ringfence_lab::compare::{compare, runner};
use ringfence_lab::compose::compose;
use ringfence_lab::hybrid::withholds;
use ringfence_lab::modes::{Mode, Safety};
use ringfence_lab::plan::{
    DESCRIPTOR_PAGES, Plan, Planner, Step, TRANSMIT_DESCRIPTOR_NS, Withholds,
};
use ringfence_lab::replay::{BufferCounts, Buffers, Outcomes};
use ringfence_lab::{MachineProfile, Profile, copy_threshold, transmit_threshold};
use ringfence_trace::Devices;
use ringfence_types::Direction;

use crate::script::*;

const PAGE: u64 = 4096;
const US: u64 = 1_000;

fn profile() -> Profile {
    judged_only(false).profile
}

/// Returns the threshold of transmit buffers in `fence-copy`.
fn transmit() -> u64 {
    transmit_threshold(&profile(), SharedPages::Mapped)
}

/// Returns the threshold of other buffers in `fence-copy`.
fn receive() -> u64 {
    copy_threshold(&profile(), SharedPages::Mapped)
}

/// Returns the threshold of all buffers in `copy-hybrid`.
fn split() -> u64 {
    copy_threshold(&profile(), SharedPages::Copied)
}

/// Sizes around all thresholds, and small ones.
fn sizes() -> [u64; 10] {
    let (transmit, receive) = (transmit(), receive());
    [
        64,
        1500,
        PAGE,
        transmit - 1,
        transmit,
        transmit + 1,
        receive - 1,
        receive,
        split() - 1,
        split(),
    ]
}

/// Buffers of every size and direction at every offset, `pause` apart, from two devices. The last
/// transmit buffers wait for a time limit.
fn buffers(rounds: u64, pause: u64) -> (Script, Vec<(Direction, u64)>) {
    let mut script = Script::default();
    let (mut time, mut made) = (0, Vec::new());
    for round in 0..rounds {
        let device = (round % 2) as u16;
        let mut id = 0;
        for direction in Direction::ALL {
            for bytes in sizes() {
                time += pause;
                let at =
                    (1 + round % 16) << 24 | u64::from(id) << 18 | [0, 0x723][round as usize % 2];
                script.map(time, (device, 0, direction), id, &[memory(at, bytes)]);
                made.push((direction, bytes));
                id += 1;
            }
        }
        for id in 0..id {
            time += pause;
            script.unmap(time, (device, 0), id);
        }
    }
    (script, made)
}

/// Plans the steps of a script for `mode`.
fn planned_for(mode: &Mode, script: &Script) -> (Plan, Planner) {
    let of = withholds(mode, &profile()).into_iter();
    let mut planner = of.fold(Planner::new(), Planner::with_descriptors_of);
    let mut plan = Plan::default();
    planner.plan(&script.chunk, &mut plan).unwrap();
    planner.finish(&mut plan);
    (plan, planner)
}

/// Returns the outcomes of the metered pass and of the pass under attack.
fn outcomes(mode: &Mode, script: &Script) -> [Outcomes; 2] {
    let (plan, planner) = planned_for(mode, script);
    let mut runner = runner(mode, &judged_only(true)).unwrap();
    runner.metered.run(&plan, &Devices::new()).unwrap();
    let mut attack = runner.attack.unwrap();
    attack.run(&plan, &Devices::new()).unwrap();
    let alive = planner.live_mappings();
    [runner.metered.finish(&alive), attack.finish(&alive)]
}

fn is_large(direction: Direction, bytes: u64) -> bool {
    match direction {
        Direction::ToDevice => bytes >= transmit(),
        _ => bytes >= receive(),
    }
}

/// Returns the ways of `made` in `fence-copy`.
fn expected_ways(made: &[(Direction, u64)]) -> BufferCounts {
    let sum = |wanted: &dyn Fn(Direction, u64) -> bool| {
        let mut found = Buffers::default();
        for (_, bytes) in made
            .iter()
            .filter(|(direction, bytes)| wanted(*direction, *bytes))
        {
            found.buffers += 1;
            found.bytes += bytes;
        }
        found
    };
    BufferCounts {
        pooled: sum(&|direction, bytes| !is_large(direction, bytes)),
        mapped: sum(&|d, bytes| is_large(d, bytes) && d != Direction::ToDevice),
        withheld: sum(&|d, bytes| is_large(d, bytes) && d == Direction::ToDevice),
    }
}

#[test]
fn a_device_reaches_nothing_outside_live_mappings() {
    const ROUNDS: u64 = 40;
    let composed = [
        "alloc=shadow-or-map,table=cached-radix,flush=burst",
        "alloc=shadow-or-map,table=cached-radix,flush=per-unmap",
        "alloc=shadow-hybrid,table=cached-radix,flush=transmit-batch",
        "alloc=magazine,table=cached-radix,flush=transmit-batch",
    ];
    let composed = composed.map(|row| compose(row).unwrap());
    for mode in std::iter::once(mode("fence-copy")).chain(composed) {
        for pause in [US / 2, 40 * US] {
            let (script, made) = buffers(ROUNDS, pause);
            for outcomes in outcomes(&mode, &script) {
                let (name, tally) = (&mode.name, &outcomes.tally);
                let count = made.len() as u64;
                assert_eq!((outcomes.maps, outcomes.unmaps), (count, count), "{name}");
                assert_eq!(outcomes.refused_maps + outcomes.refused_unmaps, 0, "{name}");
                assert_eq!(
                    (tally.violations(), tally.false_faults),
                    (0, 0),
                    "{name}: {tally:?}"
                );
                assert_eq!(outcomes.stale_max_ns, 0, "{name}");
                if mode.safety() == Safety::ByteGranular {
                    assert_eq!(tally.colocated, 0, "{name}");
                } else {
                    assert_eq!(mode.safety(), Safety::Strict, "{name}");
                }
            }
        }
    }
}

#[test]
fn size_and_direction_decide_the_way() {
    let (script, made) = buffers(30, US);
    let wanted = expected_ways(&made);
    for way in [wanted.pooled, wanted.mapped, wanted.withheld] {
        assert!(way.buffers > 0 && way.bytes > 0, "{wanted:?}");
    }
    for found in outcomes(&mode("fence-copy"), &script) {
        assert_eq!(found.ways, wanted);
        // A receive buffer takes one invalidation, a full batch takes one for many.
        assert!(found.invalidations > wanted.mapped.buffers);
        let batches = found.invalidations - wanted.mapped.buffers;
        assert!(
            batches * 2 < wanted.withheld.buffers,
            "{batches}: {wanted:?}"
        );
    }
    // The same buffers where only the size decides: parts of pages are copied.
    let [hybrid, _] = outcomes(&mode("copy-hybrid"), &script);
    let large = made.iter().filter(|(_, bytes)| *bytes >= split() + PAGE);
    assert_eq!(large.count(), 0);
    let aligned = made.chunks(3 * sizes().len()).step_by(2).flatten();
    let split = aligned.filter(|(_, bytes)| *bytes >= split());
    assert_eq!(hybrid.ways.mapped, Buffers::default());
    assert_eq!(hybrid.ways.withheld.buffers, split.count() as u64);
    let all: u64 = made.iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(hybrid.ways.pooled.bytes + hybrid.ways.withheld.bytes, all);
    let [fence, _] = outcomes(&mode("fence"), &script);
    assert_eq!(fence.ways.mapped.buffers, made.len() as u64);
    let [copy, _] = outcomes(&mode("copy"), &script);
    assert_eq!(
        (copy.ways.pooled.buffers, copy.ways.pooled.bytes),
        (made.len() as u64, all)
    );
}

/// Parts of pages are copied: their bytes count as pooled, and twice if both sides copy them.
#[test]
fn copied_parts_count_as_copied() {
    let large = split() + PAGE;
    for (direction, copies) in [(TX, 1), (Direction::Bidirectional, 2)] {
        let mut script = Script::default();
        script.map(US, (0, 0, direction), 0, &[memory(0x100_0800, large)]);
        script.unmap(2 * US, (0, 0), 0);
        let [found, _] = outcomes(&mode("copy-hybrid"), &script);
        assert_eq!(
            found.ways.pooled,
            Buffers {
                buffers: 0,
                bytes: PAGE
            }
        );
        let withheld = Buffers {
            buffers: 1,
            bytes: large - PAGE,
        };
        assert_eq!(found.ways.withheld, withheld);
        assert_eq!(found.copied_bytes, copies * PAGE);
    }
}

#[test]
fn transmit_buffers_wait_at_most_a_millisecond_and_receive_buffers_not_at_all() {
    for pause in [1, US, 10 * US, 100 * US, 3_000 * US] {
        let (script, _) = buffers(12, pause);
        for found in outcomes(&mode("fence-copy"), &script) {
            assert!(
                found.release_delay_max_ns <= TRANSMIT_DESCRIPTOR_NS,
                "{pause}"
            );
            assert_eq!(
                found.release_delays.receive.percentile(100),
                Some(0),
                "{pause}"
            );
            assert!(found.release_delays.transmit.percentile(99).is_some());
            assert_eq!(found.not_flushed, 0);
        }
    }
    // A driver that falls silent has its buffer back after exactly that time.
    let mut script = Script::default();
    let bytes = transmit();
    script.map(0, (0, 0, TX), 0, &[memory(0x100_0000, bytes)]);
    script.unmap(US, (0, 0), 0);
    for found in outcomes(&mode("fence-copy"), &script) {
        assert_eq!(found.release_delay_max_ns, TRANSMIT_DESCRIPTOR_NS);
        assert_eq!((found.invalidations, found.tally.violations()), (1, 0));
    }
}

#[test]
fn a_row_reports_the_ways_of_its_buffers() {
    let bytes = transmit();
    let pairs = (0..50).map(|n| (0x4000_0000 + (n << 20), [1500, bytes][n as usize % 2]));
    let lines = pairs.flat_map(|(at, n)| [map_line("nic", at, n), unmap_line("nic", at, n)]);
    let lines = lines.map(|line| line.replace("FROM_DEVICE", "TO_DEVICE"));
    let mut options = judged_only(true);
    options.modes = vec![mode("fence-copy")];
    options.repetitions = 1;
    let lines = trace(&lines.collect::<Vec<_>>());
    let rows = compare("pairs", lines, &options, |_| {}).unwrap().rows;
    let row = &rows[0];
    assert!(row.status.is_ok(), "{:?}", row.status);
    assert_eq!(row.safety, "strict");
    let of = |bytes| Buffers {
        buffers: 25,
        bytes: 25 * bytes,
    };
    let wanted = BufferCounts {
        pooled: of(1500),
        mapped: Buffers::default(),
        withheld: of(bytes),
    };
    assert_eq!((row.unmaps, row.ways), (50, wanted));
    assert_eq!(row.violations.unwrap().total, 0);
    // The steps of the trace end its batches.
    assert!((1..=TRANSMIT_DESCRIPTOR_NS).contains(&row.release_delay_max_ns));
    assert!(row.components.unwrap().measured > 0.0);
}

/// Returns the times of the batches' ends since the first unmap, and the number of batches that a
/// map has ended.
fn batches(script: &Script) -> (Vec<u64>, u64) {
    let (plan, planner) = planned_for(&mode("fence-copy"), script);
    let mut steps = plan.steps.iter();
    let first = steps.find(|timed| matches!(timed.step, Step::Unmap { .. }));
    let first = first.unwrap().time.0;
    let ends = steps.filter_map(|timed| match timed.step {
        Step::EndDescriptor { of, .. } => {
            assert_eq!(of, Withholds::TransmitFrom(transmit()));
            Some(timed.time.0 - first)
        }
        _ => None,
    });
    (ends.collect(), planner.descriptors().1)
}

/// The driver has copied buffers back at their unmap, so only mapped transmit buffers fill a batch.
#[test]
fn copied_and_receive_buffers_fill_no_batch() {
    let mut script = Script::default();
    let (mut time, mut id) = (0, 0);
    let mut send = |script: &mut Script, direction, bytes: u64| {
        time += 10;
        let at = (1 + u64::from(id)) << 20;
        script.map(time, (0, 0, direction), id, &[memory(at, bytes)]);
        script.unmap(time + 5, (0, 0), id);
        id += 1;
        time + 5
    };
    let first = send(&mut script, TX, 63 * PAGE);
    for _ in 0..100 {
        send(&mut script, TX, transmit() - 1);
        send(&mut script, RX, receive());
        send(&mut script, Direction::Bidirectional, receive());
    }
    assert_eq!(batches(&script).0, [TRANSMIT_DESCRIPTOR_NS]);
    // One more mapped buffer fills it.
    let full = send(&mut script, TX, transmit());
    assert_eq!(batches(&script).0, [full - first]);
    let [found, attacked] = outcomes(&mode("fence-copy"), &script);
    // Each receive buffer has an invalidation of its own.
    assert_eq!(found.invalidations, 200 + 1);
    // The descriptors of another mode in the same comparison end no batch.
    let planner = Planner::new().with_descriptors();
    let mut planner = planner.with_descriptors_of(Withholds::TransmitFrom(transmit()));
    let (mut plan, options) = (Plan::default(), judged_only(false));
    planner.plan(&script.chunk, &mut plan).unwrap();
    planner.finish(&mut plan);
    let mut both = runner(&mode("fence-copy"), &options).unwrap().metered;
    both.run(&plan, &Devices::new()).unwrap();
    assert_eq!(both.finish(&planner.live_mappings()).invalidations, 200 + 1);
    for found in [found, attacked] {
        assert_eq!(
            (found.ways.withheld.buffers, found.tally.violations()),
            (2, 0)
        );
    }
}

/// A driver may map other bytes on the pages of a withheld buffer: it never gave them away.
#[test]
fn only_a_map_of_withheld_bytes_ends_a_batch() {
    let (start, bytes) = (0x10_0800, 4 * PAGE);
    let beside = [(start - 0x800, 0x800), (start + bytes, 0x800)];
    let within = [(start - 8, 9), (start, bytes), (start + bytes - 1, 1)];
    let all = beside.map(|at| (at, 0)).into_iter();
    for ((at, length), cut) in all.chain(within.map(|at| (at, 1))) {
        for direction in Direction::ALL {
            let mut script = Script::default();
            script.map(0, (0, 0, TX), 0, &[memory(start, bytes)]);
            script.unmap(US, (0, 0), 0);
            script.map(2 * US, (0, 0, direction), 1, &[memory(at, length)]);
            let (ends, by_map) = batches(&script);
            script.unmap(3 * US, (0, 0), 1);
            let end = [TRANSMIT_DESCRIPTOR_NS, US][cut as usize];
            assert_eq!(
                (ends.as_slice(), by_map),
                ([end].as_slice(), cut),
                "{at:#x}"
            );
            for found in outcomes(&mode("fence-copy"), &script) {
                let tally = &found.tally;
                assert_eq!((tally.violations(), tally.false_faults), (0, 0), "{at:#x}");
            }
        }
    }
}

#[test]
fn a_batch_shares_its_invalidation_by_page() {
    use SharedPages::{Copied, Mapped};
    let profile = |invalidation_cycles, coherent| {
        let mut profile = MachineProfile::r210_2015().for_replay();
        profile.invalidation_cycles = invalidation_cycles;
        profile.coherent = coherent;
        profile
    };
    // 0.063 x 4096 = 258 cycles to copy a page, and 6 + 2150 / 64 to map it in a batch. A buffer
    // takes 650 cycles to split. To map it as a whole takes 50, or 550 with write-backs.
    for (shared_pages, coherent, mapping, transmit, receive) in [
        (Copied, false, 650.0, 3, 12),
        (Copied, true, 650.0, 3, 12),
        (Mapped, false, 550.0, 3, 11),
        (Mapped, true, 50.0, 1, 9),
    ] {
        let profile = |cycles| profile(cycles, coherent);
        let threshold = |cycles| transmit_threshold(&profile(cycles), shared_pages);
        assert_eq!(threshold(2150), transmit * PAGE);
        let alone = copy_threshold(&profile(2150), shared_pages);
        assert_eq!(alone, receive * PAGE);
        // Without a cost of invalidations, both directions have the same threshold.
        assert_eq!(threshold(0), copy_threshold(&profile(0), shared_pages));
        let mut before = 0;
        for cycles in (0..20).map(|step| step * 1000) {
            let threshold = threshold(cycles);
            assert!(before <= threshold, "{cycles}");
            before = threshold;
            // One page less costs less to copy, and the threshold does not.
            let page = 6.0 + cycles as f64 / DESCRIPTOR_PAGES as f64;
            let copy_is_dearer =
                |pages: u64| 0.063 * PAGE as f64 * pages as f64 >= mapping + page * pages as f64;
            match threshold {
                u64::MAX => assert!(page >= 0.063 * PAGE as f64, "{cycles}"),
                bytes => {
                    let pages = bytes / PAGE;
                    assert!(copy_is_dearer(pages), "{cycles}");
                    assert!(pages == 1 || !copy_is_dearer(pages - 1), "{cycles}");
                }
            }
        }
    }
}
