//! Results of `compare`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ringfence_lab::compare::{CompareOptions, Comparison, compare};
use ringfence_lab::row::Row;
use ringfence_lab::{LabError, MachineProfile, Operation, ReplayStatus};
use ringfence_trace::{Chunk, Interrupt, Operations, TraceError, TraceOptions};

use crate::script::*;

const SMALL: u64 = 100;

fn options(modes: &[&str]) -> CompareOptions {
    CompareOptions {
        modes: modes.iter().map(|name| mode(name)).collect(),
        ..judged_only(true)
    }
}

fn run(lines: &[String], options: &CompareOptions) -> Result<Comparison, LabError> {
    compare("script", trace(lines), options, |_| {})
}

/// Traffic of two devices: `eth` has `pairs` mappings and `disk` half as many. One mapping of
/// `disk` is live at the end.
fn two_devices(pairs: u64) -> Vec<String> {
    let mut lines = Vec::new();
    for pair in 0..pairs {
        let at = (pair + 1) << 12;
        lines.push(map_line("eth", at, SMALL));
        if pair % 2 == 0 {
            lines.push(map_line("disk", at + (1 << 24), SMALL));
            lines.push(unmap_line("disk", at + (1 << 24), SMALL));
        }
        lines.push(unmap_line("eth", at, SMALL));
    }
    lines.push(map_line("disk", 1 << 25, SMALL));
    lines
}

#[test]
fn a_row_a_mode_over_all_devices_or_the_chosen_ones() {
    let lines = two_devices(100);
    let everything = run(&lines, &options(&["none", "fence"])).unwrap();
    let names: Vec<&str> = everything
        .rows
        .iter()
        .map(|row| row.mode.as_str())
        .collect();
    assert_eq!(names, ["none", "fence"]);
    assert_eq!(everything.devices, ["eth", "disk"]);
    assert_eq!(everything.lines, 301);
    let counts = |row: &Row| {
        (
            row.maps,
            row.unmaps,
            row.accesses,
            row.live_mappings_at_end,
            row.live_mappings_max,
        )
    };
    for row in &everything.rows {
        assert_eq!(counts(row), (151, 150, 150, 1, 2), "{}", row.mode);
        assert_eq!(row.status, ReplayStatus::Ok);
    }
    let only = |names: &[&str]| CompareOptions {
        devices: Some(names.iter().map(|&name| name.to_owned()).collect()),
        ..options(&["fence"])
    };
    let disk = run(&lines, &only(&["disk"])).unwrap();
    assert_eq!(counts(&disk.rows[0]), (51, 50, 50, 1, 1));
    assert_eq!(disk.lines, 101);
    assert_eq!(disk.rows[0].invalidations, 50);
    let both = run(&lines, &only(&["disk", "eth"])).unwrap();
    assert_eq!(counts(&both.rows[0]), (151, 150, 150, 1, 2));
    match run(&lines, &only(&["disk", "tape"])) {
        Err(LabError::NoSuchDevice { name, known, .. }) => {
            assert_eq!((name.as_str(), known.len()), ("tape", 2));
        }
        other => panic!("{other:?}"),
    }
}

/// Turns of a sent and a received buffer; lines of the script are 1 us apart.
#[test]
fn rows_of_a_request_response_trace_have_its_round_trips() {
    let sent = |line: String| line.replace("FROM_DEVICE", "TO_DEVICE");
    let turns = |turns: u64| -> Vec<String> {
        let turn = |turn: u64| {
            let (request, reply) = ((turn % 8 + 1) << 12, (turn % 8 + 32) << 12);
            [
                map_line("eth", reply, SMALL),
                sent(map_line("eth", request, SMALL)),
                sent(unmap_line("eth", request, SMALL)),
                unmap_line("eth", reply, SMALL),
            ]
        };
        (0..turns).flat_map(turn).collect()
    };
    let options = CompareOptions {
        repetitions: 1,
        prices: Some(MachineProfile::r210_2015().prices(Operation::Packet, 1)),
        ..options(&["fence", "fs"])
    };
    let comparison = run(&turns(1500), &options).unwrap();
    let trips: Vec<_> = comparison.rows.iter().map(|row| row.round_trip).collect();
    for (row, trip) in comparison.rows.iter().zip(&trips) {
        let trip = trip.unwrap();
        assert_eq!((trip.count, trip.median_ns), (1499, 4000), "{}", row.mode);
        assert!(trip.added_ns.unwrap() > 0.0, "{}: {trip:?}", row.mode);
    }
    // Two invalidations of 2150 cycles at 3.1 GHz, which are modelled; fs withholds the replies.
    let added = |index: usize| trips[index].unwrap().added_ns.unwrap();
    assert!(added(0) > 2.0 * 2150.0 / 3.1, "{}", added(0));
    let delay = comparison.rows[1].receive_delay_p99_ns.unwrap();
    assert!(
        delay > 0 && added(1) > delay as f64 / 10.0,
        "{} {delay}",
        added(1)
    );
    assert!(
        run(&turns(900), &options).unwrap().rows[0]
            .round_trip
            .is_none()
    );
    let other = run(&two_devices(3000), &options).unwrap();
    assert!(other.rows[0].round_trip.is_none());
}

#[test]
fn charges_follow_the_invalidations() {
    let lines = two_devices(100);
    let mut options = options(&["none", "strict", "fence", "virtio-strict"]);
    options.profile.invalidation_cycles = 1000;
    options.profile.kick_cycles = 300;
    options.profile.baseline_cycles = 500.0;
    let comparison = run(&lines, &options).unwrap();
    let [none, strict, fence, hosted] = &comparison.rows[..] else {
        panic!("{comparison:?}");
    };
    // Without the meter, measured cycles are unknown rather than 0. Modelled cycles are known.
    for row in &comparison.rows {
        assert_eq!((row.map_cycles, row.unmap_cycles), (None, None));
        assert_eq!((row.modelled_share, row.relative_throughput), (None, None));
        assert!(row.components.is_none());
    }
    let modelled = |row: &Row| row.modelled_cycles.unwrap();
    assert_eq!(modelled(none), 0.0);
    for row in [strict, fence] {
        assert_eq!(row.invalidations, row.unmaps);
        assert!((modelled(row) - 1000.0).abs() < 1e-9, "{row:?}");
        assert_eq!((row.requests, row.kicks), (0, 0));
    }
    // A kick for each map and for each unmap.
    assert_eq!(hosted.requests, hosted.maps + hosted.unmaps);
    assert_eq!(hosted.kicks, hosted.requests);
    assert!((modelled(hosted) - 1600.0).abs() < 1e-9);
    // With the meter, the same modelled cycles are part of the cycles.
    options.repetitions = 1;
    for row in run(&lines, &options).unwrap().rows {
        let parts = row.components.unwrap().cycles;
        let sum =
            parts.unmap_invalidation_modelled + parts.map_kick_modelled + parts.unmap_kick_modelled;
        assert_eq!(row.modelled_cycles, Some(sum), "{}", row.mode);
        let both = row.cycles().unwrap();
        assert!(
            (both - parts.map() - parts.unmap()).abs() < 1e-9,
            "{}",
            row.mode
        );
        let share = 500.0 / (500.0 + both);
        assert!(
            (row.relative_throughput.unwrap() - share).abs() < 1e-12,
            "{}",
            row.mode
        );
    }
}

#[test]
fn the_meter_reports_components_that_add_up() {
    let lines = two_devices(400);
    let mut options = options(&[
        "none",
        "strict",
        "bitmap",
        "fence-burst",
        "riommu",
        "riommu-",
        "riommu-paper",
        "emulated-strict",
        "emulated-lazy",
        "nested-strict",
        "virtio-strict",
        "virtio-lazy",
        "pviommu",
        "pviommu+rtc",
        "pviommu+rtc+hopt",
        "rtc-paper",
    ]);
    options.attack = false;
    options.repetitions = 1;
    options.profile.invalidation_cycles = 0;
    options.profile.kick_cycles = 0;
    for row in run(&lines, &options).unwrap().rows {
        assert_eq!(
            (row.attack_accesses, row.violations),
            (None, None),
            "{}",
            row.mode
        );
        assert!(row.maps > 0 && row.unmaps > 0, "{}", row.mode);
        // The whole is per pair. In this trace all mappings but one are unmapped, so there are
        // nearly as many unmaps as maps.
        let (maps, unmaps) = (row.maps as f64, row.unmaps as f64);
        let sum = row.map_cycles.unwrap() + row.unmap_cycles.unwrap() * unmaps / maps;
        let components = row.components.unwrap();
        let whole = components.measured;
        assert!(
            (sum - whole).abs() <= 1e-6 * whole.abs(),
            "{}: {sum} {whole}",
            row.mode
        );
    }
}

#[test]
fn no_safety_claim_without_evidence_in_the_trace() {
    // A driver that skips unmaps maps the same address repeatedly.
    let skipping: Vec<String> = (0..40)
        .map(|_| map_line("disk", 0x5000, SMALL))
        .chain((0..40).flat_map(|_| {
            [
                map_line("eth", 0x9000, SMALL),
                unmap_line("eth", 0x9000, SMALL),
            ]
        }))
        .collect();
    let row = |options: &CompareOptions| run(&skipping, options).unwrap().rows[0].clone();
    let mut options = options(&["strict"]);
    let all = row(&options);
    assert_eq!(all.status, ReplayStatus::SkipsUnmaps);
    assert_eq!(all.safety, "none");
    // The replay ends each mapping when its address is mapped again.
    assert_eq!((all.maps, all.unmaps), (80, 79));
    options.devices = Some(vec!["disk".into()]);
    assert_eq!(row(&options).status, ReplayStatus::SkipsUnmaps);
    // Another driver's skipped unmaps do not affect this one.
    options.devices = Some(vec!["eth".into()]);
    let eth = row(&options);
    assert_eq!(
        (eth.status, eth.safety.as_str()),
        (ReplayStatus::Ok, "strict")
    );
}

#[test]
fn lost_events_and_refused_maps_are_reported() {
    let mut lines = two_devices(10);
    lines.push(map_line("eth", 1 << 30, 5 << 30));
    let rows = run(&lines, &options(&["strict-bitmap", "strict"]))
        .unwrap()
        .rows;
    assert!(
        matches!(rows[0].status, ReplayStatus::RefusedMaps { count: 1, .. }),
        "{}",
        rows[0].status
    );
    assert_eq!(rows[0].safety, "none");
    assert_eq!(
        (&rows[1].status, rows[1].safety.as_str()),
        (&ReplayStatus::Ok, "strict")
    );
    assert_eq!(rows[0].maps + 1, rows[1].maps);

    let text = format!(
        "CPU:0 [LOST 3 EVENTS]\n    task-1 [000] ..1.. 1.000001: {}\n",
        map_line("eth", 0x1000, SMALL)
    );
    let source =
        ringfence_trace::TraceSource::from_reader("lost", std::io::Cursor::new(text.into_bytes()));
    let operations = ringfence_trace::Operations::new("lost", source.unwrap(), Default::default());
    let rows = compare("lost", operations, &options(&["fence"]), |_| {})
        .unwrap()
        .rows;
    assert_eq!(rows[0].status, ReplayStatus::LostEvents(3));
    assert_eq!(rows[0].safety, "none");
}

#[test]
fn an_interrupt_ends_the_replay_between_modes() {
    let mut text = String::new();
    for (number, line) in two_devices(10).iter().enumerate() {
        text += &format!("    task-1 [000] ..1.. 1.{number:06}: {line}\n");
    }
    // Returns the number of questions, of which `last` ends the read.
    let asked = |last: usize, read: &dyn Fn(Operations<&[u8]>)| {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let mut options = TraceOptions::default();
        options.interrupt = Interrupt::new(move || count.fetch_add(1, Ordering::Relaxed) == last);
        read(Operations::new("script", text.as_bytes(), options));
        asked.load(Ordering::Relaxed)
    };
    let whole = asked(usize::MAX, &|mut operations| {
        while operations.next_chunk(&mut Chunk::default()).unwrap() {}
    });
    // The read asks `whole` times, so the last question is that before the second mode.
    let questions = asked(whole + 1, &|operations| {
        let modes = options(&["none", "linux-strict", "fence"]);
        let error = compare("script", operations, &modes, |_| {}).unwrap_err();
        let LabError::Trace(TraceError::Interrupted { file }) = error else {
            panic!("{error}");
        };
        assert_eq!(file, "script");
    });
    assert_eq!(questions, whole + 2);
}
