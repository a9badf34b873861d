//! Hybrid copying: the oracle's verdicts, the invalidations, and the threshold.

use ringfence_dma::space::SharedPages;
use ringfence_lab::compare::{compare, runner};
use ringfence_lab::compose::compose;
use ringfence_lab::modes::{Mode, Safety};
use ringfence_lab::replay::Outcomes;
use ringfence_lab::replay_platform::POOL_BYTES;
use ringfence_lab::{MachineProfile, TransferCosts, copy_threshold};
use ringfence_trace::Devices;
use ringfence_types::Direction;

use crate::script::*;

const PAGE: u64 = 4096;

/// Bytes on whole pages from which the replays of these tests split a buffer.
fn threshold() -> u64 {
    copy_threshold(&judged_only(false).profile, SharedPages::Copied)
}

/// In each round and direction, a small buffer, a large one with parts of pages at both ends, and
/// a list that is large only as a whole.
fn buffers(rounds: u64) -> Script {
    let mut script = Script::default();
    let mut time = 0;
    let large = threshold() + PAGE;
    for round in 0..rounds {
        for (nth, direction) in Direction::ALL.into_iter().enumerate() {
            let (at, id) = ((1 + round % 8) << 24 | 0x723 << nth, 3 * nth as u32);
            let device = (round % 2) as u16;
            let lists = [
                vec![memory(at, 1500)],
                vec![memory(at + 0x10_0000, large)],
                vec![
                    memory(at + 0x20_0000, 100),
                    memory(at + 0x30_0000, threshold() / 2 + 3 * PAGE),
                    memory(at + 0x40_0000, threshold() / 2 + 3 * PAGE),
                ],
            ];
            for (more, pieces) in lists.iter().enumerate() {
                time += 1_000;
                script.map(time, (device, 0, direction), id + more as u32, pieces);
            }
        }
        for id in 0..9 {
            time += 1_000;
            script.unmap(time, ((round % 2) as u16, 0), id);
        }
    }
    script
}

/// Returns the outcomes of the metered pass and of the pass under attack.
fn outcomes(mode: &Mode, script: &Script) -> [Outcomes; 2] {
    let (plan, planner) = planned(&script.chunk);
    let mut runner = runner(mode, &judged_only(true)).unwrap();
    runner.metered.run(&plan, &Devices::new()).unwrap();
    let mut attack = runner.attack.unwrap();
    attack.run(&plan, &Devices::new()).unwrap();
    let alive = planner.live_mappings();
    [runner.metered.finish(&alive), attack.finish(&alive)]
}

#[test]
fn a_device_reaches_no_byte_beside_its_buffers() {
    const ROUNDS: u64 = 60;
    let per_unmap = compose("alloc=shadow-hybrid,table=cached-radix,flush=per-unmap").unwrap();
    for mode in [mode("copy-hybrid"), per_unmap] {
        assert_eq!(mode.safety(), Safety::ByteGranular);
        let [metered, hostile] = outcomes(&mode, &buffers(ROUNDS));
        for outcomes in [&metered, &hostile] {
            assert_eq!((outcomes.maps, outcomes.unmaps), (9 * ROUNDS, 9 * ROUNDS));
            assert_eq!(outcomes.refused_maps + outcomes.refused_unmaps, 0);
            let tally = &outcomes.tally;
            assert_eq!(
                (tally.violations(), tally.colocated, tally.false_faults),
                (0, 0, 0),
                "{}: {tally:?}",
                mode.name
            );
            assert_eq!(outcomes.stale_max_ns, 0);
            assert!(outcomes.pool_bytes > 0 && outcomes.pool_bytes <= 2 * POOL_BYTES);
            // Two of three buffers are split; a burst has those of one direction.
            let most = 6 * ROUNDS;
            let wanted = if mode.name == "copy-hybrid" {
                3 * ROUNDS
            } else {
                most
            };
            assert_eq!(outcomes.invalidations, wanted, "{}", mode.name);
        }
        assert_eq!((metered.tally.shadow, metered.tally.faults), (0, 0));
        // Attackers reach copies of small buffers after the unmap. An unmap that invalidates at
        // once leaves split buffers out of reach; a burst keeps a buffer until it is.
        let tally = &hostile.tally;
        assert!(tally.shadow > 0, "{}: {tally:?}", mode.name);
        let stops = tally.faults > 0 || mode.name == "copy-hybrid";
        assert!(stops, "{}: {tally:?}", mode.name);
        assert!(hostile.attempts >= 9 * ROUNDS);
    }
}

#[test]
fn only_buffers_below_the_threshold_are_copied() {
    let large = 16 * threshold();
    let mut script = Script::default();
    // The largest slot has 16 MiB, and a pool 256 MiB.
    for id in 0..40 {
        let buffer = memory(
            0x4000_0000 + (u64::from(id) << 25) + 0x800,
            large.max(17 << 20),
        );
        script.map(u64::from(id) * 1_000, (0, 0, TX), id, &[buffer]);
    }
    let [metered, _] = outcomes(&mode("copy-hybrid"), &script);
    assert_eq!((metered.maps, metered.refused_maps), (40, 0));
    // Two parts for each.
    assert_eq!(metered.pool_bytes, 80 * PAGE);
    let (plan, planner) = planned(&script.chunk);
    let mut runner = runner(&mode("copy"), &judged_only(false)).unwrap();
    runner.metered.run(&plan, &Devices::new()).unwrap();
    let copied = runner.metered.finish(&planner.live_mappings());
    assert_eq!((copied.maps, copied.refused_maps), (0, 40));
}

#[test]
fn a_row_reports_invalidations_of_split_buffers_only() {
    let lines = |bytes: u64| {
        let pairs = (0..50).map(|n| 0x4000_0000 + (n << 20) + 0x80);
        let lines = pairs.flat_map(|at| [map_line("nic", at, bytes), unmap_line("nic", at, bytes)]);
        trace(&lines.collect::<Vec<_>>())
    };
    let mut options = judged_only(true);
    options.modes = vec![mode("copy-hybrid"), mode("copy")];
    options.repetitions = 1;
    for (bytes, split) in [(1500, 0), (threshold() + PAGE, 50)] {
        let rows = compare("pairs", lines(bytes), &options, |_| {})
            .unwrap()
            .rows;
        let [hybrid, copy] = &rows[..] else {
            panic!("{rows:?}")
        };
        assert!(hybrid.status.is_ok() && copy.status.is_ok());
        assert_eq!(hybrid.safety, "byte-granular");
        assert_eq!((hybrid.invalidations, copy.invalidations), (split, 0));
        let price = options.profile.invalidation_cycles as f64;
        let modelled = if split > 0 { price } else { 0.0 };
        assert_eq!(hybrid.modelled_cycles, Some(modelled));
        assert!(hybrid.components.unwrap().measured > 0.0);
        assert_eq!(
            (hybrid.violations.unwrap().total, hybrid.colocated),
            (0, Some(0))
        );
    }
}

#[test]
fn the_threshold_is_where_a_copy_costs_as_much_as_a_mapping() {
    let costs = TransferCosts {
        copy_cycles_per_byte: 0.5,
        mapping_cycles: 100.0,
        page_cycles: 48.0,
        invalidation_cycles: 2000.0,
        mappings_per_invalidation: 1.0,
    };
    // A page costs 2048 cycles to copy, and 48 to map: 2100 cycles take 2 pages to save.
    assert_eq!(costs.threshold(), 2 * PAGE);
    type Change = fn(&mut TransferCosts);
    let cases: [(Change, u64); 9] = [
        (|c| c.mapping_cycles = 0.0, PAGE),
        (|c| c.invalidation_cycles = 1901.0, 2 * PAGE),
        (|c| c.mappings_per_invalidation = 4.0, PAGE),
        (|c| c.invalidation_cycles = 0.0, PAGE),
        (|c| c.invalidation_cycles = 7900.0, 4 * PAGE),
        (|c| c.page_cycles = 2048.0, u64::MAX),
        (|c| c.copy_cycles_per_byte = 0.0, u64::MAX),
        (|c| c.mappings_per_invalidation = 0.0, u64::MAX),
        (|c| c.invalidation_cycles = f64::NAN, u64::MAX),
    ];
    for (index, (change, wanted)) in cases.into_iter().enumerate() {
        let mut costs = costs;
        change(&mut costs);
        assert_eq!(costs.threshold(), wanted, "case {index}");
        // A buffer of that size costs at least as much to copy; one page less, less.
        let copy = |bytes: u64| bytes as f64 * costs.copy_cycles_per_byte;
        let map = |bytes: u64| {
            costs.mapping_cycles
                + costs.invalidation_cycles / costs.mappings_per_invalidation
                + (bytes / PAGE) as f64 * costs.page_cycles
        };
        if wanted < u64::MAX {
            assert!(copy(wanted) >= map(wanted), "case {index}");
            assert!(
                wanted == PAGE || copy(wanted - PAGE) < map(wanted - PAGE),
                "case {index}"
            );
        }
    }
}

#[test]
fn a_dearer_invalidation_raises_the_threshold() {
    let profile = |invalidation_cycles| {
        let mut profile = MachineProfile::r210_2015().for_replay();
        profile.invalidation_cycles = invalidation_cycles;
        copy_threshold(&profile, SharedPages::Copied)
    };
    assert!(profile(0) < profile(2150) && profile(2150) < profile(20_000));
    assert_eq!(profile(2150) % PAGE, 0);
}
