//! Modes that a user composes from an allocator, a table and a flush policy.

use std::collections::HashSet;

use ringfence_lab::compare::{CompareOptions, Comparison, compare, runner};
use ringfence_lab::compose::{Axis, ComposeError, compose};
use ringfence_lab::modes::{Alloc, FlushKind, Mode, Owner, Safety, TableKind};
use ringfence_trace::{Operations, SAMPLE, TraceOptions, TraceSource};

use crate::script::*;

/// Returns every supported combination of the axes' values.
fn taken() -> Vec<Mode> {
    let mut modes = Vec::new();
    for alloc in Alloc::names() {
        let alloc = alloc.replace('K', "8");
        for table in TableKind::names() {
            for flush in FlushKind::names() {
                for owner in Owner::names() {
                    let row = format!("alloc={alloc},table={table},flush={flush},owner={owner}");
                    match compose(&row) {
                        Ok(mode) => modes.push(mode),
                        Err(ComposeError::Unsupported { .. }) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
            }
        }
    }
    modes
}

/// Every mode that `compose` accepts is built, and replayed under attack.
#[test]
fn whatever_makes_sense_is_built() {
    let modes = taken();
    assert!(modes.len() > 300, "{}", modes.len());
    let lines = traffic(20);
    for mode in modes {
        let row = mode.name.clone();
        let built = runner(&mode, &judged_only(false));
        assert!(built.is_ok(), "{row}: {:?}", built.err());
        let options = CompareOptions {
            modes: vec![mode],
            ..judged_only(true)
        };
        let judged = compare("script", trace(&lines), &options, |_| {}).unwrap();
        let judged = &judged.rows[0];
        assert_eq!(judged.status.to_string(), "ok", "{row}");
        assert_eq!((judged.maps, judged.unmaps), (20, 18), "{row}");
    }
}

/// Traffic of two devices on one bus.
fn traffic(pairs: u64) -> Vec<String> {
    let mut lines = Vec::new();
    let at = |pair: u64| (pair % 64 + 1) << 12 | 0x80;
    for pair in 0..pairs {
        let device = ["0000:00:03.0", "0000:00:04.0"][pair as usize % 2];
        lines.push(map_line(device, at(pair), 100));
        if let Some(older) = pair.checked_sub(2) {
            lines.push(unmap_line(device, at(older), 100));
        }
    }
    lines
}

fn run(row: &str, options: CompareOptions) -> Comparison {
    let options = CompareOptions {
        modes: vec![compose(row).unwrap()],
        ..options
    };
    compare("script", trace(&traffic(3_000)), &options, |_| {}).unwrap()
}

#[test]
fn a_flat_table_is_replayed_judged_and_timed() {
    for alloc in ["table-bitmap", "bitmap", "cached-rbtree", "magazine"] {
        for (flush, safety) in [
            ("per-unmap", Safety::Strict),
            ("burst", Safety::Strict),
            ("deferred", Safety::Bounded),
            ("per-cpu-queue", Safety::Bounded),
        ] {
            let row = format!("alloc={alloc},table=flat,flush={flush}");
            let comparison = run(&row, judged_only(true));
            let found = &comparison.rows[0];
            assert_eq!((found.maps, found.unmaps), (3_000, 2_998), "{row}");
            assert_eq!(found.status.to_string(), "ok", "{row}");
            assert_eq!(found.safety, safety.to_string(), "{row}");
            assert!(found.attack_accesses.unwrap() >= found.unmaps, "{row}");
            assert!(found.colocated.unwrap() > 0, "{row}");
            assert_eq!(found.false_faults, 0, "{row}");
            let violations = found.violations.unwrap();
            assert_eq!(violations.total > 0, safety == Safety::Bounded, "{row}");
            assert_eq!(violations.foreign, 0, "{row}: each has a separate table");
            // Each device has a table of 2^20 entries of 8 bytes. No walk reads more than one
            // entry.
            assert_eq!(found.table_bytes, 2 * (8 << 20), "{row}");
            assert!((found.words_per_walk.unwrap() - 1.0).abs() < 1e-12, "{row}");
        }
    }
}

#[test]
fn the_flat_table_as_its_own_bitmap_searches_like_the_bitmap() {
    let [table, bitmap] = ["table-bitmap", "bitmap"].map(|alloc| {
        let row = format!("alloc={alloc},table=flat,flush=per-wrap");
        run(&row, judged_only(true)).rows.remove(0)
    });
    let searches = |row: &ringfence_lab::row::Row| (row.search_steps_mean, row.search_steps_max);
    assert_eq!(searches(&table), searches(&bitmap));
    assert_eq!(table.violations, bitmap.violations);
    assert_eq!(table.invalidations, bitmap.invalidations);
    assert!(table.violations.unwrap().stale > 0 && table.stale_window_max_ns > 0);
}

/// No replica of a mode refuses a step that the full mode performs, whatever component it lacks.
/// Owners other than the kernel are timed with one allocator each, because their replicas do not
/// depend on it.
#[test]
fn whatever_makes_sense_is_timed() {
    let lines = traffic(200);
    let mut timed = HashSet::new();
    let mut modes = taken();
    modes.retain(|mode| {
        let parts = format!("{:?} {:?} {:?}", mode.table, mode.flush, mode.owner);
        timed.insert(parts) || mode.owner == Owner::Kernel
    });
    for mode in modes {
        let row = mode.name.clone();
        let options = CompareOptions {
            modes: vec![mode],
            repetitions: 1,
            ..judged_only(false)
        };
        let timed = compare("script", trace(&lines), &options, |_| {}).unwrap();
        let timed = &timed.rows[0];
        assert_eq!(timed.status.to_string(), "ok", "{row}");
        assert_ne!(timed.components.unwrap().measured.to_bits(), 0, "{row}");
    }
}

/// Caches of mappings in front of Xen's table, on the sample: less traffic than without a cache,
/// and no exposure by the cache that unmaps with the last user.
#[test]
fn caches_in_front_of_xen_save_hypercalls() {
    for owner in ["xen", "xen-multicall"] {
        let replayed = |flush: &str| {
            let row = format!("alloc=linux-rcache,table=flat,flush={flush},owner={owner}");
            let options = CompareOptions {
                modes: vec![compose(&row).unwrap()],
                ..judged_only(true)
            };
            let source = TraceSource::from_reader("sample", SAMPLE).unwrap();
            let operations = Operations::new("sample", source, TraceOptions::default());
            let found = compare("sample", operations, &options, |_| {}).unwrap();
            let found = found.rows.into_iter().next().unwrap();
            assert_eq!(found.status.to_string(), "ok", "{row}");
            assert_eq!(found.false_faults, 0, "{row}");
            let violations = found.violations.unwrap().total;
            println!("{row}: {} {} {violations}", found.requests, found.kicks);
            assert_eq!(violations > 0, found.safety != "strict", "{row}");
            found
        };
        let without = replayed("per-unmap");
        for flush in [
            "last-user",
            "map-cache",
            "never-free",
            "optimistic",
            "per-cycle",
        ] {
            let found = replayed(flush);
            assert_eq!((found.maps, found.unmaps), (without.maps, without.unmaps));
            assert!(found.kicks < without.kicks, "{flush}, {owner}");
            assert!(found.requests < without.requests, "{flush}, {owner}");
            assert_eq!(found.safety == "strict", flush == "last-user", "{flush}");
        }
    }
}

#[test]
fn meter_ablates_the_table_of_a_table_allocator() {
    let options = CompareOptions {
        repetitions: 1,
        ..judged_only(false)
    };
    let row = run("alloc=table-bitmap,table=flat,flush=per-unmap", options)
        .rows
        .remove(0);
    assert_eq!(row.status.to_string(), "ok");
    // Cycles of one repetition can have any value on a busy machine. The status shows that no
    // replica refused a step.
    assert!(row.unmap_cycles.unwrap().is_finite());
    assert!(row.components.unwrap().measured != 0.0);
}
