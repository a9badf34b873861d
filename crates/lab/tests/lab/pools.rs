//! Modes whose drivers take their buffers from a pool: the oracle's verdicts, the bounds, the bytes
//! that the driver inspects, and the meter.

use std::sync::atomic::Ordering;

use ringfence_lab::compare::{CompareOptions, compare, runner, testbed};
use ringfence_lab::layer::{LARGEST_BUFFER, OpKey, UnmapOutcome};
use ringfence_lab::modes::{Mode, Safety};
use ringfence_lab::replay_platform::POOL_BYTES;
use ringfence_trace::{DeviceIndex, Devices};
use ringfence_types::{Direction, PhysAddr, PhysMemory, PhysRange, RequesterId};

use crate::script::*;

const PAGE: u64 = 4096;

/// A generator of numbers (xorshift).
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// Maps and unmaps of two devices on two CPUs in any order: single buffers and lists.
fn disorder(seed: u64, steps: u64) -> Script {
    let mut dice = Dice(seed);
    let mut script = Script::default();
    let mut live: Vec<(u32, u16)> = Vec::new();
    for step in 0..steps {
        let (time, cpu) = (step * 1_000, dice.below(2) as u16);
        if live.len() < 40 && (live.is_empty() || dice.below(2) == 0) {
            let device = dice.below(2) as u16;
            let direction = Direction::ALL[dice.below(3) as usize];
            let at = (0x100 + step * 32) << 12 | dice.below(PAGE);
            let pieces: Vec<PhysRange> = (0..=dice.below(3))
                .map(|n| memory(at + n * 0x8000, 1 + dice.below(0x4000)))
                .collect();
            script.map(time, (device, cpu, direction), step as u32, &pieces);
            live.push((step as u32, device));
        } else {
            let index = dice.below(live.len() as u64) as usize;
            let (id, device) = live.swap_remove(index);
            script.unmap(time, (device, cpu), id);
        }
    }
    script
}

#[test]
fn a_device_reaches_its_own_pool_and_changes_released_buffers_only_there() {
    for seed in [3, 77, 1_000_003] {
        let (plan, planner) = planned(&disorder(seed, 3_000).chunk);
        let mode = mode("pool");
        assert_eq!(mode.safety(), Safety::OwnPool);
        let mut runner = runner(&mode, &judged_only(true)).unwrap();
        runner.metered.run(&plan, &Devices::new()).unwrap();
        let mut attack = runner.attack.unwrap();
        attack.run(&plan, &Devices::new()).unwrap();
        let alive = planner.live_mappings();
        let (metered, hostile) = (runner.metered.finish(&alive), attack.finish(&alive));
        for outcomes in [&metered, &hostile] {
            assert_eq!((outcomes.maps, outcomes.unmaps), (plan.maps, plan.unmaps));
            assert_eq!(outcomes.refused_maps + outcomes.refused_unmaps, 0, "{seed}");
            assert_eq!((outcomes.invalidations, outcomes.stale_max_ns), (0, 0));
            let tally = &outcomes.tally;
            assert_eq!(
                (tally.violations(), tally.colocated, tally.false_faults),
                (0, 0, 0),
                "{seed}: {tally:?}"
            );
            assert!(outcomes.pool_bytes > 0 && outcomes.pool_bytes <= 2 * POOL_BYTES);
        }
        let tally = &metered.tally;
        assert_eq!((tally.shadow, tally.mutable, tally.faults), (0, 0, 0));
        // The attackers reach every released buffer: they read it, or write it if it was writable.
        let tally = &hostile.tally;
        assert!(hostile.attempts >= plan.unmaps);
        assert!(tally.mutable > plan.unmaps / 4, "{seed}: {tally:?}");
        let reached = tally.shadow + tally.mutable + tally.faults;
        assert!(
            reached <= hostile.attempts && tally.shadow > 0,
            "{seed}: {tally:?}"
        );
    }
}

#[test]
fn a_pool_has_bounds_and_says_which_buffer_exceeds_them() {
    let refusal = |sizes: &[u64]| {
        let mut script = Script::default();
        for (id, bytes) in sizes.iter().enumerate() {
            let at = (1 + id as u64) << 20;
            script.map(
                id as u64 * 1_000,
                (0, 0, TX),
                id as u32,
                &[memory(at, *bytes)],
            );
        }
        let (plan, planner) = planned(&script.chunk);
        let mut runner = runner(&mode("pool"), &judged_only(false)).unwrap();
        runner.metered.run(&plan, &Devices::new()).unwrap();
        let outcomes = runner.metered.finish(&planner.live_mappings());
        assert_eq!(outcomes.tally.violations(), 0);
        assert!(outcomes.pool_bytes <= POOL_BYTES);
        let error = outcomes.first_refusal.map(|error| error.to_string());
        (outcomes.refused_maps, error.unwrap_or_default())
    };
    assert_eq!(refusal(&[LARGEST_BUFFER, 1]), (0, String::new()));
    let (refused, error) = refusal(&[LARGEST_BUFFER + 1]);
    assert!(
        refused == 1 && error.contains("17 pages exceed the largest slot of the pool, 16"),
        "{error}"
    );
    let buffers = (POOL_BYTES / LARGEST_BUFFER) as usize;
    let (refused, error) = refusal(&vec![LARGEST_BUFFER; buffers + 2]);
    assert!(
        refused == 2 && error.contains("no free slot of 16 pages"),
        "{error}"
    );
}

#[test]
fn a_driver_gets_the_bytes_that_it_inspects_and_no_others() {
    for (inspected, bytes, direction) in [
        (128, 2048, RX),
        (13, 2048, RX),
        (128, 20, RX),
        (0, 64, RX),
        (65_536, 9_000, Direction::Bidirectional),
        (128, 2048, TX),
    ] {
        let options = CompareOptions {
            inspected_bytes: inspected,
            ..judged_only(false)
        };
        let mut bed = testbed(&Mode::find("pool").unwrap(), &options).unwrap();
        bed.layer.reserve(1, 1).unwrap();
        let index = DeviceIndex(0);
        bed.layer.attach(index, RequesterId::new(8)).unwrap();
        let key = OpKey::new(index, 0, direction);
        let driver = memory(0x10_0000, bytes);
        let words =
            |start: PhysAddr| (0..bytes.div_ceil(8)).map(move |n| start.wrapping_add(n * 8));
        let arena = bed.machine.memory();
        for at in words(driver.start()) {
            arena.word(at).unwrap().store(u64::MAX, Ordering::Relaxed);
        }
        let mapped = bed.layer.map(key, 7, &[driver]).unwrap();
        let range = mapped.token.range().unwrap();
        assert_eq!(range.bytes(), bytes);
        let pool = bed.layer.shadow(key, range).unwrap();
        for at in words(pool.start()) {
            arena
                .word(at)
                .unwrap()
                .store(0x0102_0304_0506_0708, Ordering::Relaxed);
        }
        let outcome = bed.layer.unmap(key, mapped.token);
        assert!(matches!(
            outcome,
            UnmapOutcome::Returned {
                buffer: 7,
                stale: false
            }
        ));
        let copied = if direction == TX {
            0
        } else {
            bytes.min(u64::from(inspected))
        };
        for (number, at) in words(driver.start()).enumerate() {
            let found = arena
                .word(at)
                .unwrap()
                .load(Ordering::Relaxed)
                .to_le_bytes();
            let frame = 0x0102_0304_0506_0708_u64.to_le_bytes();
            for (byte, (found, frame)) in found.into_iter().zip(frame).enumerate() {
                let is_copied = (number * 8 + byte) < copied as usize;
                assert_eq!(
                    found,
                    if is_copied { frame } else { 0xff },
                    "{inspected} {at}"
                );
            }
        }
    }
}

#[test]
fn a_row_reports_what_stays_mutable() {
    let lines = || {
        let pairs = (0..200).map(|n| (16 + n) << 12 | 0x80);
        let lines = pairs.flat_map(|at| [map_line("nic", at, 1500), unmap_line("nic", at, 1500)]);
        trace(&lines.collect::<Vec<_>>())
    };
    let mut options = judged_only(true);
    options.modes = vec![mode("pool"), mode("copy"), mode("none")];
    options.repetitions = 1;
    let rows = compare("pairs", lines(), &options, |_| {}).unwrap().rows;
    let [pool, copy, none] = &rows[..] else {
        panic!("{rows:?}")
    };
    assert!(rows.iter().all(|row| row.status.is_ok()));
    assert_eq!(pool.safety, "own-pool");
    assert!(pool.mutable_after_release >= Some(200), "{pool:?}");
    assert_eq!(
        (
            pool.violations.unwrap().total,
            pool.colocated,
            pool.false_faults
        ),
        (0, Some(0), 0)
    );
    assert!(pool.pool_bytes > 0);
    assert_eq!(copy.mutable_after_release, Some(0));
    assert_eq!(none.mutable_after_release, Some(0));
    // The copies of headers and the pool are measured: nothing is modelled.
    assert_eq!(pool.modelled_cycles, Some(0.0));
    assert!(pool.components.unwrap().measured > 0.0);
}

#[test]
fn a_large_buffer_makes_the_mode_unfit_and_not_silent() {
    let lines = [
        map_line("disk", 0x20_0000, 0x2_0000),
        unmap_line("disk", 0x20_0000, 0x2_0000),
    ];
    let mut options = judged_only(true);
    options.modes = vec![mode("pool")];
    let rows = compare("large", trace(&lines), &options, |_| {})
        .unwrap()
        .rows;
    assert!(!rows[0].status.is_ok(), "{:?}", rows[0]);
    let status = rows[0].status.to_string();
    assert!(status.contains("32 pages exceed the largest"), "{status}");
    assert_eq!(rows[0].safety, "none");
}
