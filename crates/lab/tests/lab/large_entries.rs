//! Large entries, contiguous frames and prefetch in a replay: miss counts derived by hand, and the
//! oracle's verdict on every strict mode.

use std::num::NonZeroU8;

use ringfence_lab::IotlbPrefetch;
use ringfence_lab::compare::runner;
use ringfence_lab::modes::{Mode, Safety};
use ringfence_lab::plan::{Plan, Planner};
use ringfence_lab::replay::Outcomes;
use ringfence_trace::Devices;
use ringfence_types::{PageSize, PhysRange};

use crate::script::*;

const PAGE: u64 = 4096;
const US: u64 = 1_000;

/// The scattered pages of buffer `number`: no two are adjacent.
fn scattered(number: u64, pages: u64) -> Vec<PhysRange> {
    let page = |index| 0x1000 + 2 * (number * pages + pages - index);
    (0..pages)
        .map(|index| memory(page(index) * PAGE, PAGE))
        .collect()
}

/// Maps and unmaps 8 buffers of `pages` pages ten times, four at once.
fn script(pages: u64) -> Script {
    let mut script = Script::default();
    let mut time = 0;
    for round in 0..20_u64 {
        for id in 0..4 {
            let buffer = scattered((round % 2) * 4 + id, pages);
            script.map(time * US, (0, 0, TX), id as u32, &buffer);
            time += 1;
        }
        for id in 0..4 {
            script.unmap(time * US, (0, 0), id);
            time += 1;
        }
    }
    script
}

fn plan(script: &Script, contiguous: bool) -> Plan {
    let mut planner = Planner::new().with_doorbells().with_descriptors();
    if contiguous {
        planner = planner.with_contiguous_frames();
    }
    let mut plan = Plan::default();
    planner.plan(&script.chunk, &mut plan).unwrap();
    planner.finish(&mut plan);
    plan
}

/// Runs the metered and the attack pass.
fn replay(mode: &Mode, prefetch: IotlbPrefetch, plan: &Plan) -> (Outcomes, Outcomes) {
    let mut options = judged_only(true);
    options.profile.iotlb_prefetch = prefetch;
    let mut runner = runner(mode, &options).unwrap();
    let devices = Devices::new();
    runner.metered.run(plan, &devices).unwrap();
    let mut hostile = runner.attack.unwrap();
    hostile.run(plan, &devices).unwrap();
    (runner.metered.finish(&[]), hostile.finish(&[]))
}

fn next(pages: u8) -> IotlbPrefetch {
    IotlbPrefetch::NextPages(NonZeroU8::new(pages).unwrap())
}

/// 80 mappings of `pages` pages. A mapping of 64 KiB with contiguous frames is one miss, not 16.
#[test]
fn misses_by_page_size_frames_and_prefetch() {
    let (small, group, large) = (PageSize::Size4K, PageSize::Size64K, PageSize::Size2M);
    let none = IotlbPrefetch::None;
    for (pages, size, contiguous, prefetch, misses) in [
        (16, small, false, none, 16),
        (16, small, true, none, 16),
        (16, group, false, none, 16),
        (16, group, true, none, 1),
        (16, large, true, none, 1),
        (15, group, true, none, 15),
        (17, group, true, none, 2),
        (32, group, true, none, 2),
        (512, large, true, none, 1),
        (512, group, true, none, 32),
        (16, small, false, IotlbPrefetch::NextPage, 8),
        (16, small, false, next(3), 4),
        (16, small, false, next(15), 1),
        (32, group, true, IotlbPrefetch::NextPage, 1),
    ] {
        let plan = plan(&script(pages), contiguous);
        let mode = mode("linux-strict").with_page_size(size);
        let (metered, hostile) = replay(&mode, prefetch, &plan);
        let name = format!("{pages} pages, {size}, contiguous {contiguous}, {prefetch:?}");
        assert_eq!(metered.tally.accesses, 80 * pages, "{name}");
        assert_eq!(metered.hardware.iotlb_misses, 80 * misses, "{name}");
        assert_eq!(hostile.tally.violations(), 0, "{name}");
        assert_eq!(metered.first_refusal, None, "{name}");
    }
    // The device uses the pages of a mapping in ascending order, so only the page before a mapping
    // may be of use.
    let plan = plan(&script(16), false);
    let (metered, _) = replay(&mode("linux-strict"), IotlbPrefetch::PreviousPage, &plan);
    assert!(metered.hardware.iotlb_misses > 80 * 15);
}

/// With every option on, no strict mode lets an attacker through. An attacker reaches as many bytes
/// beside a buffer as with entries of 4 KiB.
#[test]
fn page_size_and_prefetch_change_no_verdict() {
    let plan = plan(&script(32), true);
    let mut strict = 0;
    for mode in Mode::named() {
        let (_, before) = replay(&mode, IotlbPrefetch::None, &plan);
        for (size, prefetch) in [
            (PageSize::Size64K, IotlbPrefetch::None),
            (PageSize::Size2M, next(4)),
            (PageSize::Size64K, IotlbPrefetch::HintAtMap),
        ] {
            let large = mode.clone().with_page_size(size);
            let (metered, hostile) = replay(&large, prefetch, &plan);
            let name = format!("{} {size} {prefetch:?}", mode.name);
            if matches!(mode.safety(), Safety::Strict | Safety::ByteGranular) {
                assert_eq!(hostile.tally.violations(), 0, "{name}");
                assert_eq!(metered.tally.false_faults, 0, "{name}");
                assert_eq!(hostile.tally.colocated, before.tally.colocated, "{name}");
                strict += 1;
            }
        }
    }
    assert!(strict > 30, "{strict}");
}

/// The frames of the first page of each piece of a map, by map.
fn frames(plan: &Plan) -> Vec<u64> {
    plan.segments
        .iter()
        .map(|piece| piece.start().get() / PAGE)
        .collect()
}

/// A large buffer is one aligned piece. A small buffer stays where it was, unless it uses a moved
/// page; then both buffers still share that page.
#[test]
fn frames_move_once_and_sharing_stays() {
    let mut script = Script::default();
    let large = scattered(0, 32);
    let shared = large[3];
    let inside = memory(shared.start().get() + 100, 200);
    script.map(0, (0, 0, TX), 0, &[memory(0x5000 + 8, 100)]);
    script.map(US, (0, 0, TX), 1, &large);
    script.map(2 * US, (0, 0, RX), 2, &[inside]);
    script.map(3 * US, (0, 0, TX), 3, &large);
    script.map(4 * US, (0, 0, TX), 4, &scattered(9, 15));
    let placed = plan(&script, true);
    let found = frames(&placed);
    assert_eq!(found[0], 5);
    let base = found[1];
    assert_eq!(base % 32, 0);
    assert_eq!(placed.segments[1].bytes(), 32 * PAGE);
    assert_eq!(placed.segments[2], memory((base + 3) * PAGE + 100, 200));
    assert_eq!(placed.segments[3], placed.segments[1]);
    assert_eq!(placed.segments[4..], scattered(9, 15));
}

/// The move is injective: whatever buffers use, two pages of a plan are equal exactly if they are
/// equal in the recording, also across the frames that buffers were moved to.
#[test]
fn distinct_pages_keep_distinct_frames() {
    let mut script = Script::default();
    let mut seed = 0x43_u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) % below
    };
    let top = (512 << 30) / PAGE;
    for id in 0..400 {
        // Buffers near the top collide with the frames that the planner hands out first.
        let base = if random(2) == 0 { 0 } else { top - 4096 };
        let pieces: Vec<_> = (0..1 + random(40))
            .map(|_| memory((base + random(4000)) * PAGE, (1 + random(3)) * PAGE))
            .collect();
        script.map(id * US, (0, 0, TX), id as u32, &pieces);
    }
    let pages = |plan: &Plan| -> Vec<u64> {
        let each = |piece: &PhysRange| piece.start().get() / PAGE..=piece.last().get() / PAGE;
        plan.segments.iter().flat_map(each).collect()
    };
    let (recorded, placed) = (pages(&plan(&script, false)), pages(&plan(&script, true)));
    assert_eq!(recorded.len(), placed.len());
    let mut to = std::collections::BTreeMap::new();
    let mut from = std::collections::BTreeMap::new();
    for (page, frame) in recorded.into_iter().zip(placed) {
        assert_eq!(
            *to.entry(page).or_insert(frame),
            frame,
            "page {page:#x} moved"
        );
        assert_eq!(
            *from.entry(frame).or_insert(page),
            page,
            "frame {frame:#x} is shared"
        );
        assert!(frame < top);
    }
    assert!(to.iter().any(|(page, frame)| page != frame));
}

/// Named modes without pages of their own say why.
#[test]
fn options_that_do_not_apply_have_a_reason() {
    let hint = IotlbPrefetch::HintAtMap;
    for (name, large, prefetch, hinted) in [
        ("none", true, true, true),
        ("hwpt", true, true, true),
        ("swpt", true, false, false),
        ("linux-strict", false, false, false),
        ("fence", false, false, false),
        ("copy", false, false, false),
        ("freebsd", true, false, false),
        ("riommu", true, true, true),
        ("nested-strict", true, true, true),
        ("virtio-strict", true, false, true),
        ("alloc=bitmap,table=flat,flush=per-unmap", true, true, true),
    ] {
        let mode = mode(name);
        let found = (
            mode.without_large_entries().is_some(),
            mode.without_prefetch(next(2)).is_some(),
            mode.without_prefetch(hint).is_some(),
        );
        assert_eq!(found, (large, prefetch, hinted), "{name}");
        // An option that does not apply changes no count.
        let plan = plan(&script(32), true);
        let (before, _) = replay(&mode, IotlbPrefetch::None, &plan);
        let used = [
            (large, IotlbPrefetch::None, PageSize::Size2M),
            (prefetch, next(2), PageSize::Size4K),
            (hinted, hint, PageSize::Size4K),
        ];
        for (applies_not, prefetch, size) in used {
            let (after, _) = replay(&mode.clone().with_page_size(size), prefetch, &plan);
            let same = after.hardware == before.hardware;
            if applies_not || name == "linux-strict" {
                assert_eq!(same, applies_not, "{name} {size} {prefetch:?}");
            }
        }
    }
}
