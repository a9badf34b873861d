//! Judgements of traces with known answers, and of random traces against a brute-force reference.

use std::fmt::Write;

use proptest::prelude::*;
use ringfence_trace::{
    DomainType, Exposure, ExposureEnd, JudgeOptions, Judgement, LimitExceeded, Malformed,
    Operations, StaleWindow, TraceError, TraceOptions,
};
use ringfence_types::Nanos;

fn judge_with(text: &str, options: &JudgeOptions) -> Result<Judgement, TraceError> {
    let reading = TraceOptions::default().with_page_events();
    Judgement::read(&mut Operations::new("t", text.as_bytes(), reading), options)
}

fn judge(text: &str) -> Judgement {
    judge_with(text, &JudgeOptions::default()).unwrap()
}

fn file(name: &str) -> String {
    let path = format!("{}/tests/data/judge/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap()
}

/// Returns the counts, and duration and end of the longest exposure.
fn facts(judgement: &Judgement) -> (u64, u64, u64, Option<(u64, ExposureEnd)>) {
    let longest = judgement.longest.first();
    (
        judgement.stale.count,
        judgement.mapped.count,
        judgement.mapped_again,
        longest.map(|exposure| (exposure.reachable_ns, exposure.end)),
    )
}

#[test]
fn traces_have_known_answers() {
    let cases = [
        ("lazy", (1, 0, 0, Some((3_000_000, ExposureEnd::Freed)))),
        ("strict", (0, 0, 0, None)),
        (
            "until-flush",
            (1, 0, 0, Some((6_000_000, ExposureEnd::Flush))),
        ),
        ("after-flush", (0, 0, 0, None)),
        // The page of a live mapping and of a stale one.
        (
            "while-mapped",
            (1, 1, 0, Some((12_000_000, ExposureEnd::Flush))),
        ),
        ("mapped-again", (0, 0, 1, None)),
        (
            "out-of-order",
            (1, 0, 0, Some((3_000_000, ExposureEnd::Freed))),
        ),
        ("physical", (0, 0, 0, None)),
        ("lost", (1, 0, 0, Some((3_000_000, ExposureEnd::Freed)))),
    ];
    for (name, expected) in cases {
        assert_eq!(facts(&judge(&file(name))), expected, "{name}");
    }
}

#[test]
fn an_exposure_has_all_facts() {
    let judgement = judge(&file("lazy"));
    let Exposure {
        device,
        access,
        mapping,
        address,
        map_line,
        unmap_line,
        unmap_to_alloc_ns,
        freed,
        allocated,
        ..
    } = &judgement.longest[0];
    assert_eq!(device, "0000:00:04.0");
    assert_eq!(
        (*access, *mapping, *address),
        ("write", "single", 0x1234_5000)
    );
    assert_eq!((*map_line, *unmap_line), (4, Some(5)));
    assert_eq!(*unmap_to_alloc_ns, Some(300_000));
    let freed = freed.as_ref().unwrap();
    assert_eq!(
        (freed.task.as_str(), freed.pid, freed.line),
        ("fio", 100, 6)
    );
    let by = &allocated.by;
    assert_eq!((by.task.as_str(), by.pid, by.line), ("bash", 200, 8));
    assert_eq!((by.time_ns, allocated.order), (1_000_400_000, 0));
    assert_eq!(judgement.devices[0].domain, Some(DomainType::Lazy));
    assert_eq!(
        (judgement.devices[0].maps, judgement.devices[0].unmaps),
        (1, 1)
    );
    assert_eq!((judgement.page_allocs, judgement.page_frees), (2, 3));
    assert_eq!(
        (judgement.freed_while_stale, judgement.freed_while_mapped),
        (2, 0)
    );
    assert!((judgement.stale.byte_seconds - 4096.0 * 0.003).abs() < 1e-9);
    assert!(judgement.is_complete());
    // The part of a page that the device only reads, within a larger block.
    let judgement = judge(&file("until-flush"));
    let exposure = &judgement.longest[0];
    assert_eq!((exposure.access, exposure.allocated.order), ("read", 2));
    // The live mapping lasts longer than the stale one.
    let judgement = judge(&file("while-mapped"));
    let exposure = &judgement.longest[0];
    assert_eq!(
        (exposure.unmap_line, exposure.unmap_to_alloc_ns),
        (Some(9), None)
    );
    assert_eq!(judgement.freed_while_mapped, 1);
    assert!(judge(&file("physical")).devices[0].physical);
    assert!(!judge(&file("lost")).is_complete());
}

fn map(out: &mut String, cpu: u16, us: u64, iova: u64, phys: u64, size: u64, dir: &str) {
    writeln!(
        out,
        "t-1 [{cpu:03}] ..... 1.{us:06}: dma_map_phys: d{} dir={dir} dma_addr={iova:x} \
        size={size} phys_addr={phys:x} attrs=",
        iova >> 40
    )
    .unwrap();
}

fn unmap(out: &mut String, cpu: u16, us: u64, iova: u64, size: u64, dir: &str) {
    writeln!(
        out,
        "t-1 [{cpu:03}] ..... 1.{us:06}: dma_unmap_phys: d{} dir={dir} dma_addr={iova:x} \
        size={size} attrs=",
        iova >> 40
    )
    .unwrap();
}

fn page(out: &mut String, cpu: u16, us: u64, event: &str, pfn: u64, order: u8) {
    writeln!(
        out,
        "p-2 [{cpu:03}] ..... 1.{us:06}: mm_page_{event}: page=0 pfn=0x{pfn:x} order={order}"
    )
    .unwrap();
}

#[test]
fn a_full_queue_ends_the_window() {
    // A CPU's queue has room for 255 entries, so the 255th unmap after the first flushes it.
    for (later, other_cpu, found) in [(254, 0, true), (255, 0, false), (255, 1, true)] {
        let mut text = String::new();
        let iova = |number: u64| (1 << 40) + (number << 12);
        map(&mut text, 0, 0, iova(0), 0x5000_0000, 4096, "TO_DEVICE");
        unmap(&mut text, 0, 0, iova(0), 4096, "TO_DEVICE");
        for number in 1..=later {
            let phys = 0x6000_0000 + (number << 12);
            map(
                &mut text,
                other_cpu,
                number,
                iova(number),
                phys,
                4096,
                "TO_DEVICE",
            );
            unmap(
                &mut text,
                other_cpu,
                number,
                iova(number),
                4096,
                "TO_DEVICE",
            );
        }
        page(&mut text, 0, 300, "alloc", 0x50000, 0);
        assert_eq!(judge(&text).found(), found, "{later} on CPU {other_cpu}");
        // The bound of a user does not depend on the queue.
        let mut options = JudgeOptions::default();
        options.window = StaleWindow {
            longest: Nanos(1_000_000),
            queue: None,
        };
        assert!(judge_with(&text, &options).unwrap().found());
    }
}

#[test]
fn pages_of_64_kib_are_16_of_the_iommu() {
    let mut text = String::new();
    map(&mut text, 0, 0, 1 << 40, 0x5000_f000, 4096, "TO_DEVICE");
    unmap(&mut text, 0, 0, 1 << 40, 4096, "TO_DEVICE");
    page(&mut text, 0, 300, "alloc", 0x5000, 0);
    let mut options = JudgeOptions::default();
    assert!(!judge_with(&text, &options).unwrap().found());
    options.page_shift = 16;
    assert!(judge_with(&text, &options).unwrap().found());
}

#[test]
fn errors_name_file_and_line() {
    let options = JudgeOptions::default();
    let error = judge_with(&file("no-pages"), &options).unwrap_err();
    assert!(matches!(error, TraceError::NoPageEvents { .. }), "{error}");
    let mut two = String::new();
    map(&mut two, 0, 0, 1 << 40, 0x5000_0000, 8192, "TO_DEVICE");
    page(&mut two, 0, 300, "alloc", 0x5000, 0);
    let mut one_page = JudgeOptions::default();
    one_page.pages = 1;
    let error = judge_with(&two, &one_page).unwrap_err();
    assert!(
        matches!(
            error,
            TraceError::Limit {
                line: 1,
                excess: LimitExceeded::Pages { limit: 1 },
                ..
            }
        ),
        "{error}"
    );
    let prefix = "t-1 [000] ..... 1.000000: ";
    let cases = [
        (
            "mm_page_alloc: page=0 pfn=0x1 order=21",
            Malformed::OrderTooLarge,
        ),
        (
            "mm_page_free: page=0 pfn=0x1000000000000 order=0",
            Malformed::RangeWraps(ringfence_trace::Field::Pfn),
        ),
        (
            "mm_page_free_batched: page=0 pfn=0xg order=0",
            Malformed::BadNumber(ringfence_trace::Field::Pfn),
        ),
        (
            "mm_page_alloc: page=0 pfn=0x1 migratetype=0",
            Malformed::MissingField(ringfence_trace::Field::Order),
        ),
    ];
    for (line, expected) in cases {
        let error = judge_with(&format!("\n{prefix}{line}\n"), &options).unwrap_err();
        match error {
            TraceError::Malformed {
                line: 2, reason, ..
            } => assert_eq!(reason, expected, "{line}"),
            other => panic!("{line}: {other}"),
        }
    }
    // Kernels before 5.12 print the number in decimal; a failed allocation has the number 0.
    let text = format!(
        "{prefix}mm_page_alloc: page=0 pfn=77 order=0\n{prefix}mm_page_alloc: page=0 pfn=0 \
        order=3\n"
    );
    assert_eq!(judge(&text).page_allocs, 1);
    // A reader that does not ask for page events skips even malformed ones.
    let skipped = format!("{prefix}mm_page_alloc: page=0 pfn=? order=99\n");
    let mut operations = Operations::new("t", skipped.as_bytes(), TraceOptions::default());
    assert!(!operations.next_chunk(&mut Default::default()).unwrap());
    assert_eq!(operations.summary().unknown, 1);
}

/// A map allocates pages of tables between its `iommu:map` line and its `dma:*` line.
#[test]
fn page_events_do_not_separate_the_lines_of_a_call() {
    let prefix = "t-1 [000] ..... 1.000000: ";
    let iommu = "iova=0x00000000fffff000 - 0x0000000100000000";
    let text = format!(
        "{prefix}map: IOMMU: {iommu} paddr=0x0000000050000000 size=4096\n\
        {prefix}mm_page_alloc: page=0 pfn=0x777 order=0\n\
        {prefix}dma_alloc: d1 dir=BIDIRECTIONAL dma_addr=fffff000 size=4096 virt_addr=00000000ab \
        flags=GFP_KERNEL attrs=\n\
        {prefix}dma_free: d1 dir=BIDIRECTIONAL dma_addr=fffff000 size=4096 virt_addr=00000000ab \
        attrs=\n\
        {prefix}mm_page_free: page=0 pfn=0x888 order=0\n\
        {prefix}unmap: IOMMU: {iommu} size=4096 unmapped_size=4096\n\
        {prefix}mm_page_free: page=0 pfn=0x50000 order=0\n\
        {prefix}mm_page_alloc: page=0 pfn=0x50000 order=0\n"
    );
    let judgement = judge(&text);
    assert_eq!((judgement.stale.count, judgement.mapped.count), (1, 0));
    assert_eq!(judgement.longest[0].mapping, "coherent");
    assert_eq!(
        (judgement.unmatched_unmaps, judgement.unknown_buffers),
        (0, 0)
    );
    assert_eq!(
        (judgement.devices.len(), judgement.devices[0].unmaps),
        (1, 1)
    );
}

#[test]
fn work_is_bounded() {
    // Many mappings of one page.
    let mut text = String::new();
    for number in 0..4100u64 {
        let dir = "TO_DEVICE";
        map(
            &mut text,
            0,
            0,
            (1 << 40) + (number << 12),
            0x5000_0000,
            1,
            dir,
        );
    }
    page(&mut text, 0, 300, "alloc", 1, 0);
    let error = judge_with(&text, &JudgeOptions::default()).unwrap_err();
    let TraceError::Limit { excess, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(excess, LimitExceeded::Sharing { limit: 4096 });
    // Blocks that cover many reachable pages, time and again.
    let mut text = String::new();
    map(&mut text, 0, 0, 1 << 40, 0x4000_0000, 1 << 30, "TO_DEVICE");
    for _ in 0..300 {
        page(&mut text, 0, 300, "free", 0x40000, 18);
    }
    let error = judge_with(&text, &JudgeOptions::default()).unwrap_err();
    assert!(error.to_string().starts_with("t:"), "{error}");
    let TraceError::Limit { excess, .. } = error else {
        panic!("{error}");
    };
    assert!(matches!(excess, LimitExceeded::Visits { .. }), "{excess}");
}

/// One step of a random trace, at a time in us.
#[derive(Debug, Clone, Copy)]
enum Event {
    Map {
        device: u64,
        slot: u64,
        first: u64,
        bytes: (u64, u64),
        write: bool,
    },
    Unmap {
        device: u64,
        slot: u64,
        cpu: u16,
    },
    Alloc {
        first: u64,
        order: u8,
    },
    Free {
        first: u64,
        order: u8,
    },
}

fn event() -> impl Strategy<Value = Event> {
    let mapping = (0..2u64, 0..4u64);
    prop_oneof![
        (
            mapping.clone(),
            1..8u64,
            (0..4096u64, 1..9000u64),
            any::<bool>()
        )
            .prop_map(|((device, slot), first, bytes, write)| Event::Map {
                device,
                slot,
                first,
                bytes,
                write
            }),
        (mapping, 0..2u16).prop_map(|((device, slot), cpu)| Event::Unmap { device, slot, cpu }),
        (1..8u64, 0..3u8).prop_map(|(first, order)| Event::Alloc { first, order }),
        (1..8u64, 0..3u8).prop_map(|(first, order)| Event::Free { first, order }),
    ]
}

/// A mapping of the reference: index of its map and its unmap, with the unmap's CPU.
struct Known {
    device: u64,
    write: bool,
    frames: std::ops::RangeInclusive<u64>,
    map: usize,
    unmap: Option<(usize, u16)>,
}

/// Counts exposures by a search over all events for every page: of stale and of mapped pages, of
/// pages mapped again, and the sum of the durations in us.
fn reference(events: &[(u64, Event)], window: u64, entries: usize) -> (u64, u64, u64, u64) {
    let mut known: Vec<Known> = Vec::new();
    for (index, &(_, event)) in events.iter().enumerate() {
        match event {
            Event::Map {
                device,
                first,
                bytes,
                write,
                ..
            } => {
                let last = first + (bytes.0 + bytes.1 - 1) / 4096;
                known.push(Known {
                    device,
                    write,
                    frames: first..=last,
                    map: index,
                    unmap: None,
                });
            }
            Event::Unmap { device, slot, cpu } => {
                let of = |known: &&mut Known| {
                    let Event::Map { slot: mapped, .. } = events[known.map].1 else {
                        return false;
                    };
                    known.device == device && mapped == slot && known.unmap.is_none()
                };
                known.iter_mut().find(of).unwrap().unmap = Some((index, cpu));
            }
            Event::Alloc { .. } | Event::Free { .. } => {}
        }
    }
    // The window of a mapping ends at this event and this time.
    let end = |mapping: &Known| -> Option<(usize, u64)> {
        let (unmap, cpu) = mapping.unmap?;
        let full = known
            .iter()
            .filter(|other| other.device == mapping.device)
            .filter_map(|other| other.unmap.filter(|&(at, on)| at > unmap && on == cpu))
            .map(|(at, _)| at);
        let mut full: Vec<usize> = full.collect();
        full.sort_unstable();
        let by_time = events[unmap].0 + window;
        let index = events.partition_point(|&(time, _)| time < by_time);
        let by_time = (index.max(unmap), by_time);
        // A queue of n entries has room for n - 1.
        let by_queue = full.get(entries - 2).map(|&at| (at, events[at].0));
        Some(by_queue.map_or(by_time, |by_queue| by_queue.min(by_time)))
    };
    let covers = |first: u64, order: u8, frame: u64| (first..first + (1 << order)).contains(&frame);
    let (mut stale, mut mapped, mut again, mut total) = (0, 0, 0, 0);
    for (at, &(time, event)) in events.iter().enumerate() {
        let Event::Alloc { first, order } = event else {
            continue;
        };
        for mapping in known.iter().filter(|mapping| mapping.map < at) {
            let end = end(mapping);
            if end.is_some_and(|(ended, _)| ended <= at) {
                continue;
            }
            for frame in mapping
                .frames
                .clone()
                .filter(|&frame| covers(first, order, frame))
            {
                let maps_again =
                    |other: &Known| other.device == mapping.device && other.frames.contains(&frame);
                // A stale mapping that a later one replaces does not count.
                let replaced = known.iter().any(|other| {
                    mapping.unmap.is_some_and(|(unmap, _)| unmap < other.map)
                        && other.map < at
                        && maps_again(other)
                        && other.write == mapping.write
                });
                if replaced {
                    continue;
                }
                let is_live = mapping.unmap.is_none_or(|(unmap, _)| unmap > at);
                let later = events.iter().enumerate().skip(at + 1);
                let owner_ends = later.clone().find(|(_, (_, event))| match *event {
                    Event::Free { first, order } | Event::Alloc { first, order } => {
                        covers(first, order, frame)
                    }
                    _ => false,
                });
                let remap = known.iter().map(|other| other.map).filter(|&map| map > at);
                let remap = remap
                    .filter(|&map| maps_again(known.iter().find(|one| one.map == map).unwrap()))
                    .min();
                let owner_ends = owner_ends.map(|(index, &(time, _))| (index, time));
                let last = events.last().map_or(0, |&(time, _)| time);
                let end = end.unwrap_or((usize::MAX, last));
                let closed = owner_ends.map_or(end, |ends| if ends.0 < end.0 { ends } else { end });
                if remap.is_some_and(|map| map < closed.0) {
                    again += 1;
                    continue;
                }
                match is_live {
                    true => mapped += 1,
                    false => stale += 1,
                }
                total += closed.1 - time;
            }
        }
    }
    (stale, mapped, again, total)
}

/// Keeps the events that a kernel could emit: a slot is mapped and unmapped in turn.
fn possible(events: Vec<(u64, Event)>) -> Vec<(u64, Event)> {
    let mut live = std::collections::HashSet::new();
    let mut time = 0;
    let mut kept = Vec::new();
    for (wait, event) in events {
        time += wait;
        let keep = match event {
            Event::Map { device, slot, .. } => live.insert((device, slot)),
            Event::Unmap { device, slot, .. } => live.remove(&(device, slot)),
            Event::Alloc { .. } | Event::Free { .. } => true,
        };
        if keep {
            kept.push((time, event));
        }
    }
    kept
}

fn text_of(events: &[(u64, Event)]) -> String {
    let mut text = String::new();
    let iova = |device: u64, slot: u64| ((device + 1) << 40) | (slot << 20);
    let mut live = std::collections::HashMap::new();
    for &(us, event) in events {
        match event {
            Event::Map {
                device,
                slot,
                first,
                bytes: (offset, size),
                write,
            } => {
                let dir = if write { "FROM_DEVICE" } else { "TO_DEVICE" };
                let phys = (first << 12) + offset;
                live.insert((device, slot), (size, dir));
                map(
                    &mut text,
                    0,
                    us,
                    iova(device, slot) + offset,
                    phys,
                    size,
                    dir,
                );
                // The unmap names the same address.
                live.insert((device, slot + 100), (offset, dir));
            }
            Event::Unmap { device, slot, cpu } => {
                let (size, dir) = live[&(device, slot)];
                let (offset, _) = live[&(device, slot + 100)];
                unmap(&mut text, cpu, us, iova(device, slot) + offset, size, dir);
            }
            Event::Alloc { first, order } => page(&mut text, 1, us, "alloc", first, order),
            Event::Free { first, order } => page(&mut text, 1, us, "free", first, order),
        }
    }
    text
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 512,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_traces_agree_with_the_reference(
        events in prop::collection::vec((0..4u64, event()), 1..60),
        window in 0..40u64,
        entries in 2..6u32,
    ) {
        let mut events = possible(events);
        let time = events.last().map_or(0, |&(time, _)| time);
        events.push((time, Event::Alloc { first: 99, order: 0 }));
        let mut options = JudgeOptions::default();
        options.window = StaleWindow { longest: Nanos(window * 1000), queue: Some(entries) };
        let text = text_of(&events);
        let judgement = judge_with(&text, &options).unwrap();
        let (stale, mapped, again, total) = reference(&events, window, entries as usize);
        let got = (judgement.stale.count, judgement.mapped.count, judgement.mapped_again);
        prop_assert_eq!(got, (stale, mapped, again), "{}", text);
        let sum: u64 = judgement.longest.iter().map(|exposure| exposure.reachable_ns).sum();
        prop_assert_eq!(sum, total * 1000, "{}", text);
    }

    #[test]
    fn lines_of_two_cpus_can_be_out_of_order(
        events in prop::collection::vec((1..4u64, event()), 1..60),
    ) {
        // CPU 0 maps, CPU 1 handles pages, and a reader prints one after the other.
        let mut events = possible(events);
        for (_, event) in &mut events {
            if let Event::Unmap { cpu, .. } = event {
                *cpu = 0;
            }
        }
        events.push((1000, Event::Alloc { first: 99, order: 0 }));
        let sorted = text_of(&events);
        let of = |cpu: &str| -> String {
            let lines = sorted.lines().filter(|line| line.contains(cpu));
            lines.map(|line| format!("{line}\n")).collect()
        };
        let unsorted = format!("{}{}", of("[001]"), of("[000]"));
        let (mut one, mut other) = (judge(&sorted), judge(&unsorted));
        prop_assert_eq!(other.late, 0);
        // The lines have other numbers.
        one.longest.clear();
        other.longest.clear();
        prop_assert_eq!(one, other);
    }
}
