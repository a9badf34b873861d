//! Modes whose devices use copies: the oracle's verdicts, the size of the pool, and the meter.

use ringfence_lab::compare::{compare, meter, runner};
use ringfence_lab::compose::compose;
use ringfence_lab::modes::{Mode, Owner, Safety};
use ringfence_lab::plan::{Plan, Planner};
use ringfence_lab::replay_platform::{MEMORY_BYTES, POOL_BYTES};
use ringfence_trace::Devices;
use ringfence_types::Direction;

use crate::script::*;

const PAGE: u64 = 4096;

/// Buffers at odd offsets in all directions, and lists whose pieces share pages.
fn buffers(rounds: u64) -> Script {
    let mut script = Script::default();
    let mut time = 0;
    for round in 0..rounds {
        for (id, direction) in Direction::ALL.into_iter().enumerate() {
            let at = (16 + round) << 14 | 0x123 << id;
            let pieces = [
                memory(at, 100),
                memory(at + 200, 3000),
                memory(at + PAGE, 5000),
            ];
            let count = 1 + (round as usize + id) % 3;
            time += 1_000;
            let device = (round % 2) as u16;
            script.map(time, (device, 0, direction), id as u32, &pieces[..count]);
        }
        for id in 0..3 {
            time += 1_000;
            script.unmap(time, ((round % 2) as u16, 0), id);
        }
    }
    script
}

/// A pool whose table a host behind the para-virtual IOMMU owns.
const PVIOMMU: &str = "alloc=shadow,table=radix,flush=per-unmap,owner=pviommu";

/// The owners of the table that maps a pool: this kernel, and hosts.
const OWNERS: [&str; 3] = ["copy", "virtio-bounce", PVIOMMU];

fn owned(name: &str) -> Mode {
    if name.contains('=') {
        compose(name).unwrap()
    } else {
        mode(name)
    }
}

#[test]
fn a_device_reaches_its_buffers_and_its_own_pool_only() {
    const ROUNDS: u64 = 300;
    let (plan, planner) = planned(&buffers(ROUNDS).chunk);
    for name in OWNERS {
        reaches_its_buffers_and_its_own_pool_only(&owned(name), ROUNDS, &plan, &planner);
    }
}

fn reaches_its_buffers_and_its_own_pool_only(
    mode: &Mode,
    rounds: u64,
    plan: &Plan,
    planner: &Planner,
) {
    assert_eq!(mode.safety(), Safety::ByteGranular);
    let mut runner = runner(mode, &judged_only(true)).unwrap();
    runner.metered.run(plan, &Devices::new()).unwrap();
    let mut attack = runner.attack.unwrap();
    attack.run(plan, &Devices::new()).unwrap();
    let alive = planner.live_mappings();
    let (metered, hostile) = (runner.metered.finish(&alive), attack.finish(&alive));
    for outcomes in [&metered, &hostile] {
        assert_eq!((outcomes.maps, outcomes.unmaps), (3 * rounds, 3 * rounds));
        assert_eq!(outcomes.refused_maps + outcomes.refused_unmaps, 0);
        assert_eq!((outcomes.invalidations, outcomes.stale_max_ns), (0, 0));
        let tally = &outcomes.tally;
        assert_eq!(
            (tally.violations(), tally.colocated, tally.false_faults),
            (0, 0, 0)
        );
        assert!(outcomes.pool_bytes > 0 && outcomes.pool_bytes <= 2 * POOL_BYTES);
        // Three sizes in three directions of two devices, 16 pages at a time.
        assert!(
            outcomes.pool_bytes <= 2 * 9 * 16 * PAGE,
            "{}",
            outcomes.pool_bytes
        );
    }
    assert_eq!((metered.tally.shadow, metered.tally.faults), (0, 0));
    // A buffer that the device reads is copied at its map, one that it writes at its unmap.
    let (mut mapped, mut copied) = (0, 0);
    for round in 0..rounds as usize {
        for (id, direction) in Direction::ALL.into_iter().enumerate() {
            let bytes: u64 = [100, 3000, 5000][..1 + (round + id) % 3].iter().sum();
            mapped += bytes;
            copied += bytes * (1 + u64::from(direction == Direction::Bidirectional));
        }
    }
    assert_eq!(
        (metered.mapped_bytes, metered.copied_bytes),
        (mapped, copied)
    );
    // A run of 16 pages is one request of the guest, and no later map or unmap is one.
    let runs = if mode.owner == Owner::Kernel {
        0
    } else {
        2 * 9
    };
    for outcomes in [&metered, &hostile] {
        let traffic = outcomes.traffic;
        let kicks = (traffic.kicks_in_maps, traffic.kicks_in_unmaps);
        assert_eq!(
            (traffic.requests, kicks),
            (runs, (runs, 0)),
            "{}",
            mode.name
        );
    }
    // Every access beside a buffer, and every one after an unmap, stays in the pool.
    assert!(hostile.attempts >= 3 * rounds);
    assert_eq!(hostile.tally.shadow, hostile.attempts);
}

#[test]
fn a_pool_that_is_too_small_refuses_maps_and_claims_nothing() {
    let mut script = Script::default();
    let pages = POOL_BYTES / PAGE;
    // Large buffers: the free memory ends before all are mapped.
    for id in 0..pages / 1024 + 1 {
        script.map(
            id * 1_000,
            (0, 0, TX),
            id as u32,
            &[memory(id << 23, 1024 * PAGE)],
        );
    }
    let (plan, planner) = planned(&script.chunk);
    for name in ["copy", "virtio-bounce"] {
        let mut runner = runner(&mode(name), &judged_only(false)).unwrap();
        runner.metered.run(&plan, &Devices::new()).unwrap();
        let outcomes = runner.metered.finish(&planner.live_mappings());
        assert_eq!(
            (outcomes.refused_maps, outcomes.pool_bytes),
            (1, POOL_BYTES),
            "{name}"
        );
        let error = outcomes.first_refusal.unwrap().to_string();
        assert!(
            error.contains("no free slot of 1024 pages"),
            "{name}: {error}"
        );
        assert_eq!(outcomes.tally.violations(), 0, "{name}");
    }
}

#[test]
fn a_row_reports_the_pool_and_the_accesses_to_it() {
    let lines = || {
        let pairs = (0..200).map(|n| (16 + n) << 12 | 0x80);
        let lines = pairs.flat_map(|at| [map_line("nic", at, 1500), unmap_line("nic", at, 1500)]);
        trace(&lines.collect::<Vec<_>>())
    };
    let mut options = judged_only(true);
    options.modes = vec![mode("copy"), mode("fence")];
    options.repetitions = 1;
    let rows = compare("pairs", lines(), &options, |_| {}).unwrap().rows;
    let [copy, fence] = &rows[..] else {
        panic!("{rows:?}")
    };
    assert!(copy.status.is_ok() && fence.status.is_ok());
    assert_eq!(copy.safety, "byte-granular");
    assert!(
        copy.pool_bytes > 0 && copy.shadow_accesses > Some(200),
        "{copy:?}"
    );
    assert_eq!(
        (copy.violations.unwrap().total, copy.colocated),
        (0, Some(0))
    );
    assert_eq!((fence.pool_bytes, fence.shadow_accesses), (0, Some(0)));
    assert_eq!(
        (copy.copied_per_byte, fence.copied_per_byte),
        (Some(1.0), Some(0.0))
    );
    assert!(fence.colocated > Some(0));
    // The copies are measured: nothing is modelled.
    assert_eq!(copy.modelled_cycles, Some(0.0));
    assert!(copy.components.unwrap().measured > 0.0);
}

/// The timed replay copies from the buffer: a map of a buffer beyond the memory is refused.
#[test]
fn timed_replays_read_the_buffers_of_the_trace() {
    let refusals = |name: &str, at: u64| {
        let mut script = Script::default();
        script.map(0, (0, 0, TX), 0, &[memory(at, 64)]);
        script.unmap(1_000, (0, 0), 0);
        let (plan, _) = planned(&script.chunk);
        let options = ringfence_lab::compare::CompareOptions {
            repetitions: 1,
            ..judged_only(false)
        };
        let mut meter = meter(&Mode::find(name).unwrap(), &options).unwrap();
        meter.chunk(&plan).unwrap();
        meter.refusals()
    };
    for name in ["copy", "virtio-bounce"] {
        assert_eq!(refusals(name, 0x10_0000), None, "{name}");
        assert!(refusals(name, MEMORY_BYTES).is_some(), "{name}");
    }
}
