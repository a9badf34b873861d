//! Traces whose answers are known.

use ringfence_trace::{
    DomainType, ExposureEnd, JudgeOptions, Judgement, PageExposure, StaleWindow,
};
use ringfence_types::Nanos;

use crate::lines::{map, page, unmap};
use crate::{file, judge, judge_with};

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
    let PageExposure {
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
