//! Traces that demand more resources from a replay than their size warrants.

use std::fmt::Write;
use std::io::Cursor;

use ringfence_lab::compare::{CompareOptions, compare};
use ringfence_lab::compose::compose;
use ringfence_lab::hardware::{Calgary, Hardware};
use ringfence_lab::mapping_cache::CycleParams;
use ringfence_lab::modes::Mode;
use ringfence_lab::plan::{Planner, Step, each_plan};
use ringfence_lab::size::{RingSlots, SizeOptions, advise, measure_demand};
use ringfence_lab::{LabError, Profile, ReplayLimits};
use ringfence_pviommu::rtc::Cycles;
use ringfence_trace::{Operations, TraceOptions, TraceSource};
use ringfence_types::RequesterId;

const HOUR_NS: u64 = 3_600_000_000_000;

fn operations(text: &str) -> Operations<TraceSource> {
    let source = TraceSource::from_reader("t", Cursor::new(text.as_bytes().to_vec())).unwrap();
    Operations::new("t", source, TraceOptions::default())
}

fn map(seconds: u64, device: &str, at: u64) -> String {
    format!(
        "t-1 [0] ..... {seconds}.0: dma_map_phys: {device} dir=TO_DEVICE dma_addr={at:x} size=64 \
         phys_addr=1000 attrs=\n"
    )
}

fn unmap(seconds: u64, device: &str, at: u64) -> String {
    format!(
        "t-1 [0] ..... {seconds}.0: dma_unmap_phys: {device} dir=TO_DEVICE dma_addr={at:x} size=64 \
         attrs=\n"
    )
}

fn options(mode: &str, limits: ReplayLimits) -> CompareOptions {
    CompareOptions {
        modes: vec![Mode::find(mode).unwrap()],
        repetitions: 0,
        limits,
        ..CompareOptions::new()
    }
}

/// Cycles of these lengths, with the largest countable number of cycles.
fn counted(lengths: &[u64]) -> Vec<CycleParams> {
    let cycles = Cycles::new(Cycles::MAX).unwrap();
    let counted = |&cycle_ns: &u64| CycleParams { cycle_ns, cycles };
    lengths.iter().map(counted).collect()
}

/// Returns the number of steps in the plans of a text, and the maximum of one plan.
fn steps(text: &str, cycles: &[CycleParams]) -> (u64, usize) {
    let mut planner = Planner::new().with_cycles(cycles.iter().copied());
    let (mut all, mut most) = (0, 0);
    each_plan(&mut operations(text), &mut planner, None, |_, plan, _| {
        all += plan.steps.len() as u64;
        most = most.max(plan.steps.len()).max(plan.quiet.len());
        let ticks = plan.steps.iter().filter(|timed| timed.step == Step::Tick);
        assert!(plan.quiet.len() <= ticks.count());
        Ok(())
    })
    .unwrap();
    (all, most)
}

/// The planner does not step through a gap of 584 years between two lines.
#[test]
fn a_gap_of_the_clock_costs_a_bounded_number_of_steps() {
    let text = map(0, "d", 4096) + &unmap(18_446_744_073, "d", 4096);
    for cycles in [
        &[][..],
        &[10_000_000_000],
        &[1, 10_000_000_000],
        &[156_862_745, HOUR_NS],
    ] {
        let (all, _) = steps(&text, &counted(cycles));
        assert!(all <= 40 + 510 * cycles.len() as u64, "{all} {cycles:?}");
    }
    // The gap has as many ends of cycles as a cache can count, for each length: the last end of the
    // longest one is present, although the shortest one has many.
    let mut planner = Planner::new().with_cycles(counted(&[1_000_000_000, HOUR_NS]));
    let mut last = 0;
    each_plan(&mut operations(&text), &mut planner, None, |_, plan, _| {
        last = plan.quiet.last().map_or(last, |end| end.0);
        Ok(())
    })
    .unwrap();
    assert!(last >= 255 * HOUR_NS, "{last}");
    // The paper's cache is empty after eight ends.
    let (none, _) = steps(&text, &[]);
    let (all, _) = steps(&text, &[CycleParams::PAPER]);
    assert_eq!(all, none + 8);
}

/// The clock has no cycle left in which the cache as published could evict the second mapping,
/// which it has lost. The replay does not wait for it.
#[test]
fn a_replay_ends_at_the_end_of_the_clock() {
    let line = |what: &str| format!("t-1 [0] ..... 18446744073.709551615: {what} attrs=\n");
    let text = [
        "dma_map_phys: d dir=BIDIRECTIONAL dma_addr=10000 size=64 phys_addr=1000",
        "dma_unmap_phys: d dir=BIDIRECTIONAL dma_addr=10000 size=64",
        "dma_map_phys: d dir=TO_DEVICE dma_addr=30000 size=8192 phys_addr=1000",
        "dma_unmap_phys: d dir=TO_DEVICE dma_addr=30000 size=8192",
    ]
    .map(line)
    .concat();
    for mode in ["pviommu+rtc", "rtc-paper", "pviommu+rtc-adaptive"] {
        let options = options(mode, ReplayLimits::default());
        let row = &compare("t", operations(&text), &options, |_| {})
            .unwrap()
            .rows[0];
        assert_eq!(row.maps, 2, "{mode}");
    }
}

#[test]
fn plans_of_long_gaps_are_cut() {
    let mut text = String::new();
    for n in 0..600 {
        text += &map(n * 100_000, "d", 4096);
        text += &unmap(n * 100_000 + 50_000, "d", 4096);
    }
    let (all, most) = steps(&text, &counted(&[10_000_000]));
    assert!(all > 250_000, "{all}");
    assert!(most < 66_000, "{most}");
}

/// Hours between the lines of a thousand devices: 256 ends of cycles for each.
#[test]
fn ends_of_cycles_are_bounded() {
    let mut text: String = (0..1000_u64)
        .map(|n| map(0, &format!("dev{n}"), 4096))
        .collect();
    for gap in 1..20 {
        text += &unmap(gap * 3600, "dev0", 4096);
        text += &map(gap * 3600, "dev0", 4096);
    }
    let run = |cycle_ends| {
        let mut limits = ReplayLimits::default();
        limits.cycle_ends = cycle_ends;
        limits.devices = 1000;
        let options = options("pviommu+rtc-adaptive", limits);
        compare("t", operations(&text), &options, |_| {})
    };
    run(None).unwrap();
    let error = run(Some(1_000_000)).unwrap_err();
    assert!(error.to_string().contains("`--max-cycle-ends`"), "{error}");
}

#[test]
fn devices_times_processors_are_bounded() {
    let text: String = (0..400_u64)
        .map(|n| map(0, &format!("dev{}", n % 20), 4096 * (n + 1)))
        .enumerate()
        .map(|(n, line)| line.replace("[0]", &format!("[{}]", n / 20)))
        .collect();
    let run = |most| {
        let mut limits = ReplayLimits::default();
        limits.device_cpus = most;
        compare("t", operations(&text), &options("strict", limits), |_| {})
    };
    run(400).unwrap();
    let error = run(399).unwrap_err();
    assert!(error.to_string().contains("`--max-device-cpus`"), "{error}");
}

#[test]
fn devices_are_bounded_and_named() {
    let text: String = (0..1100_u64)
        .map(|n| map(1, &format!("dev{n}"), 4096))
        .collect();
    let run = |limits, only: Option<Vec<String>>| {
        let options = CompareOptions {
            devices: only,
            ..options("none", limits)
        };
        compare("t", operations(&text), &options, |_| {})
    };
    let error = run(ReplayLimits::default(), None).unwrap_err();
    assert!(matches!(error, LabError::DeviceLimit { limit: 256 }));
    let message = error.to_string();
    assert!(
        message.contains("`--device`") && message.contains("`--max-devices`"),
        "{message}"
    );
    assert!(run(ReplayLimits::default(), Some(vec!["dev1099".to_owned()])).is_ok());
    let mut limits = ReplayLimits::default();
    limits.devices = 1100;
    assert!(run(limits, None).is_ok());
    // `size` counts in one pass and replays in another; both apply the limit.
    let refused = measure_demand(operations(&text), None, ReplayLimits::default(), |_| {});
    assert!(matches!(refused, Err(LabError::DeviceLimit { .. })));
    let usage = measure_demand(operations(&text), None, limits, |_| {}).unwrap();
    let options = SizeOptions {
        profile: Profile::r210_2015(),
        devices: None,
        entries: vec![1],
        modes: Vec::new(),
        limits: ReplayLimits::default(),
    };
    let refused = advise(
        "t",
        || Ok::<_, LabError>(operations(&text)),
        &usage,
        &options,
        |_| {},
    );
    assert!(matches!(refused, Err(LabError::DeviceLimit { .. })));
}

#[test]
fn buffers_on_one_page_are_bounded() {
    assert_eq!(ReplayLimits::default().buffers_on_a_page, 4096);
    let mut low = ReplayLimits::default();
    low.buffers_on_a_page = 256;
    let mut text = String::new();
    for n in 1..=300 {
        text += &map(1, "d", n << 12);
    }
    for mode in ["none", "rtc-paper"] {
        let error = compare("t", operations(&text), &options(mode, low), |_| {});
        let error = error.unwrap_err();
        assert!(
            matches!(error, LabError::CrowdedPage { limit: 256, .. }),
            "{error}"
        );
        assert!(error.to_string().contains("--max-page-buffers"), "{error}");
        let mut limits = ReplayLimits::default();
        limits.buffers_on_a_page = 300;
        assert!(compare("t", operations(&text), &options(mode, limits), |_| {}).is_ok());
    }
    // The page of the limit is the device's: this mode gives each mapping a separate one.
    let alone = compare("t", operations(&text), &options("strict", low), |_| {});
    assert!(alone.is_ok(), "{alone:?}");
    // Mappings that follow each other pass, also in a mode that gives each its own page.
    let mut text = String::new();
    for n in 1..=300 {
        text += &map(1, "d", n << 12);
        text += &unmap(1, "d", n << 12);
    }
    for mode in ["none", "rtc-paper", "strict"] {
        let options = options(mode, low);
        assert!(
            compare("t", operations(&text), &options, |_| {}).is_ok(),
            "{mode}"
        );
    }
}

/// While the clock does not advance, only other bursts end a burst.
#[test]
fn open_bursts_are_bounded() {
    let mut text = String::new();
    for n in 0..3000_u64 {
        let (device, cpu) = (n % 100, n / 100);
        for event in ["map", "unmap"] {
            let phys = if event == "map" {
                " phys_addr=1000"
            } else {
                ""
            };
            let at = n << 12;
            writeln!(
                text,
                "t-1 [{cpu}] ..... 1.0: dma_{event}_phys: d{device} dir=TO_DEVICE dma_addr={at:x} \
                 size=64{phys} attrs="
            )
            .unwrap();
        }
    }
    // A map of the page would end bursts; here no two maps share a page.
    let mut page = 0;
    let text: String = text
        .lines()
        .map(|line| {
            page += u64::from(line.contains("phys_addr="));
            line.replace("phys_addr=1000", &format!("phys_addr={:x}", page << 12)) + "\n"
        })
        .collect();
    let mut planner = Planner::new();
    let (mut open, mut most) = (0_i64, 0);
    each_plan(&mut operations(&text), &mut planner, None, |_, plan, _| {
        for timed in &plan.steps {
            open += match timed.step {
                Step::Unmap { .. } => 1,
                Step::EndBurst { .. } => -1,
                _ => 0,
            };
            most = most.max(open);
        }
        Ok(())
    })
    .unwrap();
    // The oldest burst ends right after the unmap that exceeds the limit.
    assert_eq!((most, open), (1025, 0));
    assert_eq!(planner.bursts(), 3000);
}

/// A ring of one slot, and many maps that wait. The youngest gives up first.
#[test]
fn to_give_up_waiting_does_not_walk_the_queue() {
    use ringfence_dma::ring::SlotChoice;
    use ringfence_trace::{DeviceIndex, MappingId};
    use ringfence_types::Direction;

    let (device, cpu, direction) = (DeviceIndex(0), 0, Direction::ToDevice);
    let count = 300_000;
    let mut slots = RingSlots::new(SlotChoice::Tail, 1);
    for id in (0..count).map(MappingId) {
        slots.step(&Step::Map {
            id,
            device,
            cpu,
            direction,
            first: 0,
            count: 1,
        });
    }
    for id in (0..count).rev().map(MappingId) {
        slots.step(&Step::Unmap {
            id,
            device,
            cpu,
            direction,
        });
    }
    let stalls = slots.finish();
    assert_eq!(stalls.stalls, u64::from(count) - 1);
    assert_eq!(stalls.stalled_out, u64::from(count) - 1);
}

/// Maps pages one by one. Then unmaps every second one and maps two pages after each unmap. Each
/// hole is too small for two pages, so each search walks through all mappings below.
fn holes(pages: u64) -> String {
    let two_pages = |at| map(1, "d", at).replace("size=64", "size=8192");
    let first: String = (1..=pages).map(|n| map(1, "d", n << 12)).collect();
    let then = (1..=pages)
        .step_by(2)
        .map(|n| unmap(1, "d", n << 12) + &two_pages((pages + 2 * n) << 12));
    first + &then.collect::<String>()
}

#[test]
fn searches_of_allocators_are_bounded() {
    let searched = |pages, limits| {
        let options = options("strict", limits);
        compare("t", operations(&holes(pages)), &options, |_| {})
            .map(|done| done.rows[0].search_steps_mean.unwrap() * done.rows[0].maps as f64)
    };
    // The steps grow with the square of the trace, which is the allocator's own behaviour.
    for pages in [100, 200] {
        let steps = searched(pages, ReplayLimits::default()).unwrap();
        let square = (pages * pages) as f64;
        assert!((0.3 * square..0.5 * square).contains(&steps), "{steps}");
    }
    let mut low = ReplayLimits::default();
    assert_eq!(low.search, None);
    low.search = Some(10_000);
    let error = searched(200, low).unwrap_err();
    assert!(
        matches!(error, LabError::LongSearch { limit: 10_000 }),
        "{error}"
    );
    assert!(error.to_string().contains("`--max-search`"), "{error}");
    low.search = Some(20_000);
    assert!(searched(200, low).is_ok());
}

#[test]
fn mappings_that_a_cache_keeps_are_bounded() {
    assert_eq!(ReplayLimits::default().kept, 1 << 18);
    let mut text = String::new();
    for n in 1..=150_u64 {
        let own = format!("phys_addr={:x} ", n << 12);
        text += &map(1, "d", n << 12).replace("phys_addr=1000 ", &own);
        text += &unmap(1, "d", n << 12);
    }
    let run = |mode, kept| {
        let mut limits = ReplayLimits::default();
        limits.kept = kept;
        compare("t", operations(&text), &options(mode, limits), |_| {})
    };
    for mode in ["rtc-paper", "pviommu+rtc", "pviommu+rtc-adaptive"] {
        let error = run(mode, 149).unwrap_err();
        assert!(matches!(error, LabError::Kept { limit: 149 }), "{error}");
        assert!(error.to_string().contains("`--max-kept`"), "{error}");
        assert!(run(mode, 150).is_ok(), "{mode}");
    }
    assert!(run("pviommu", 0).is_ok());
}

/// Modes with a flat table give each device that maps memory a bus. The limit is the number of
/// those devices, not of all devices in the trace, and the error names it.
#[test]
fn the_buses_of_flat_tables_are_counted_by_device_that_maps() {
    let text: String = (0..300).map(|n| map(1, &format!("dev{n}"), 4096)).collect();
    let options = CompareOptions {
        devices: Some(vec!["dev257".to_owned()]),
        modes: vec![compose("alloc=bitmap,table=flat,flush=per-unmap").unwrap()],
        ..options("none", ReplayLimits::default())
    };
    let alone = compare("t", operations(&text), &options, |_| {}).map(|found| found.rows[0].maps);
    assert!(matches!(alone, Ok(1)), "{alone:?}");

    let recorded = RequesterId::new(7);
    let last = Calgary::requester(255, recorded).unwrap();
    assert_eq!(last.bus(), 255);
    let message = Calgary::requester(256, recorded).unwrap_err().to_string();
    for part in [
        "256 devices",
        "buses",
        "`table=flat`",
        "`--device`",
        "`--modes`",
    ] {
        assert!(message.contains(part), "{message}");
    }
}

/// The paravirtual IOMMU supports fewer devices than a replay. The error names its limit.
#[test]
fn the_para_virtual_iommus_limit_of_devices_is_named() {
    let text = |devices: u64| -> String {
        (0..devices)
            .map(|n| map(1, &format!("dev{n}"), 4096))
            .collect()
    };
    let run = |mode, devices| {
        let mut limits = ReplayLimits::default();
        limits.devices = 2000;
        let options = options(mode, limits);
        compare("t", operations(&text(devices)), &options, |_| {})
    };
    for mode in ["pviommu", "pviommu+rtc", "pviommu+rtc+hopt"] {
        let message = run(mode, 1017).unwrap_err().to_string();
        for part in ["1016", "`pviommu*`", "`--device`", "`--modes`"] {
            assert!(message.contains(part), "{mode}: {message}");
        }
    }
    assert!(run("pviommu", 1016).is_ok());
    assert!(run("none", 1017).is_ok());
}
