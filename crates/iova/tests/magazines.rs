//! Guarantees of the magazines beyond the trait: bounds on cached pages, reclaim, and scarce
//! addresses reserved for narrow devices.

#[path = "support/common.rs"]
mod common;

use std::cell::RefCell;
use std::collections::VecDeque;

use common::{Random, flushed, pages};
use ringfence_iova::*;
use ringfence_types::{Pfn, PfnRange};

const MASK_24: Pfn = Pfn::new(0xfff);
const MASK_30: Pfn = Pfn::new(0x3_ffff);
const MASK_31: Pfn = Pfn::new(0x7_ffff);
const MASK_32: Pfn = Pfn::new(0xf_ffff);

type Subject = Magazines<RefCell<Depot>>;

fn make(space: PfnRange, limits: MagazineLimits) -> Subject {
    Magazines::new(space, limits, RefCell::new).unwrap()
}

fn everything() -> PfnRange {
    pages(1, Pfn::MAX.get())
}

fn take(
    subject: &Subject,
    cpu: &mut MagazineCpu,
    pages: u64,
    limit: Pfn,
) -> Result<PfnRange, AllocError> {
    subject
        .alloc(cpu, &AllocRequest::new(pages, limit))
        .map(|found| found.range)
}

fn give(subject: &Subject, cpu: &mut MagazineCpu, range: PfnRange) {
    assert!(subject.free(cpu, flushed(range)), "{range}");
}

/// Returns the number of pages in magazines: neither free nor part of `live`.
fn held(subject: &Subject, space: PfnRange, live: u64) -> u64 {
    space.pages() - subject.free_pages() - live
}

#[test]
fn never_hold_more_than_their_limits() {
    let space = pages(1, 0xf_ffff);
    let limits = MagazineLimits {
        slots: 16,
        magazine_pages: 256,
        cpu_pages: 1000,
        total_pages: 3000,
    };
    let subject = make(space, limits);
    let mut cpus: Vec<_> = (0..4).map(|_| subject.per_cpu()).collect();
    let mut random = Random::new(7);
    for _ in 0..40 {
        // Allocate everything on one CPU and free it on another.
        let mut ranges = Vec::new();
        for _ in 0..400 {
            let order = random.below(11);
            let size = 1 + random.below(1 << order);
            let cpu = &mut cpus[random.below(4) as usize];
            ranges.push(take(&subject, cpu, size, MASK_32).unwrap());
        }
        for range in ranges {
            give(&subject, &mut cpus[random.below(4) as usize], range);
        }
        let holding = held(&subject, space, 0);
        assert!(holding > 0, "the caches are in use");
        assert!(holding <= limits.total_pages, "{holding} pages held");
        assert!(subject.leased_pages() <= limits.total_pages);
        assert!(holding <= subject.leased_pages());
    }
    let before = held(&subject, space, 0);
    subject.drain(&mut cpus[0]);
    assert!(
        held(&subject, space, 0) + limits.cpu_pages >= before,
        "one handle held more than its share"
    );
    for cpu in &mut cpus {
        subject.drain(cpu);
    }
    // A new handle requests the whole space: the depot releases its magazines.
    let mut cpu = subject.per_cpu();
    let whole = take(&subject, &mut cpu, space.pages(), MASK_32).unwrap();
    assert_eq!(subject.leased_pages(), 0);
    give(&subject, &mut cpu, whole);
    assert_eq!(
        (subject.free_pages(), subject.fragments()),
        (space.pages(), 1)
    );
}

#[test]
fn one_handle_holds_no_more_than_its_share() {
    let space = pages(1, 0xf_ffff);
    let limits = MagazineLimits {
        cpu_pages: 5000,
        ..MagazineLimits::DEFAULT
    };
    let subject = make(space, limits);
    let mut cpu = subject.per_cpu();
    // Allocate for one magazine of single pages, one of pairs, and so on, until the limit is
    // reached.
    let mut ranges = Vec::new();
    for order in 0..=magazine::MAX_ORDER {
        for _ in 0..300 {
            ranges.push(take(&subject, &mut cpu, 1 << order, MASK_32).unwrap());
        }
    }
    for range in ranges {
        give(&subject, &mut cpu, range);
    }
    let all = held(&subject, space, 0);
    subject.drain(&mut cpu);
    let of_handle = all - held(&subject, space, 0);
    assert!(
        of_handle > 1000 && of_handle <= limits.cpu_pages,
        "{of_handle}"
    );
}

#[test]
fn cached_pages_come_back_when_space_runs_out() {
    let space = pages(1, 4096);
    let subject = make(space, MagazineLimits::DEFAULT);
    let (mut cpu0, mut cpu1) = (subject.per_cpu(), subject.per_cpu());
    let singles: Vec<_> = (0..4096)
        .map(|_| take(&subject, &mut cpu0, 1, MASK_32).unwrap())
        .collect();
    assert!(matches!(
        take(&subject, &mut cpu0, 1, MASK_32),
        Err(AllocError::Exhausted { .. })
    ));
    for (number, range) in singles.into_iter().enumerate() {
        let cpu = if number < 2000 { &mut cpu0 } else { &mut cpu1 };
        give(&subject, cpu, range);
    }
    // A large request flushes the handle's own magazines and the depot. Another CPU's magazines are
    // out of reach until that CPU drains them.
    assert!(matches!(
        take(&subject, &mut cpu0, 4096, MASK_32),
        Err(AllocError::Exhausted { .. })
    ));
    subject.drain(&mut cpu1);
    assert_eq!(take(&subject, &mut cpu0, 4096, MASK_32), Ok(space));
}

#[test]
fn the_limit_holds_whatever_is_cached() {
    let subject = make(everything(), MagazineLimits::DEFAULT);
    let mut cpu = subject.per_cpu();
    let limits = [
        MASK_24,
        MASK_30,
        MASK_31,
        MASK_32,
        Pfn::new(0xff_ffff),
        Pfn::new(1 << 33),
        Pfn::MAX,
    ];
    let mut random = Random::new(3);
    let mut live = VecDeque::new();
    for _ in 0..20_000 {
        let limit = limits[random.below(limits.len() as u64) as usize];
        let size = 1 + random.below(40);
        if let Ok(range) = take(&subject, &mut cpu, size, limit) {
            assert!(range.hi() <= limit, "{range} for {limit}");
            live.push_back(range);
        }
        while live.len() > 60 {
            give(&subject, &mut cpu, live.pop_front().unwrap());
        }
    }
}

#[test]
fn wide_devices_leave_narrow_addresses_alone() {
    let subject = make(everything(), MagazineLimits::DEFAULT);
    let mut cpu = subject.per_cpu();
    let mut narrow = VecDeque::new();
    let mut wide = VecDeque::new();
    let mut random = Random::new(11);
    // A 24-bit device keeps half of its pages live and reallocates them, while a 32-bit device
    // allocates more and more.
    for _ in 0..2000 {
        narrow.push_back(take(&subject, &mut cpu, 1, MASK_24).unwrap());
    }
    for _ in 0..50_000 {
        match random.below(3) {
            0 => {
                give(&subject, &mut cpu, narrow.pop_front().unwrap());
                narrow.push_back(take(&subject, &mut cpu, 1, MASK_24).unwrap());
            }
            1 => {
                give(&subject, &mut cpu, narrow.pop_front().unwrap());
                let range = take(&subject, &mut cpu, 1, MASK_32).unwrap();
                assert!(range.lo() > MASK_31, "{range} is scarce");
                wide.push_back(range);
                narrow.push_back(take(&subject, &mut cpu, 1, MASK_24).unwrap());
            }
            _ => {
                let range = take(&subject, &mut cpu, 1, Pfn::MAX).unwrap();
                assert!(range.lo() > MASK_31, "{range} is scarce");
                wide.push_back(range);
            }
        }
    }
}

#[test]
fn a_common_page_is_reused_before_a_scarce_one() {
    let space = pages(MASK_31.get() - 63, MASK_31.get() + 64);
    let limits = MagazineLimits {
        slots: 4,
        ..MagazineLimits::DEFAULT
    };
    let subject = make(space, limits);
    let mut cpu = subject.per_cpu();
    let mut live = Vec::new();
    while live.len() < 100 {
        live.push(take(&subject, &mut cpu, 1, MASK_32).unwrap());
    }
    let (scarce, common) = (live[99], live[0]);
    assert!(scarce.lo() <= MASK_31 && common.lo() > MASK_31);
    give(&subject, &mut cpu, common);
    give(&subject, &mut cpu, scarce);
    assert_eq!(take(&subject, &mut cpu, 1, MASK_32), Ok(common));
    assert_eq!(take(&subject, &mut cpu, 1, MASK_32), Ok(scarce));
}

#[test]
fn the_32_bit_space_first_then_above() {
    let subject = make(everything(), MagazineLimits::DEFAULT);
    let mut cpu = subject.per_cpu();
    let block = 1 << magazine::MAX_ORDER;
    let mut low = 0;
    let mut ranges = Vec::new();
    loop {
        let range = take(&subject, &mut cpu, block, Pfn::MAX).unwrap();
        ranges.push(range);
        if range.lo() > MASK_32 {
            break;
        }
        low += 1;
    }
    // Page 0 is not in the space, so the lowest block is incomplete.
    assert_eq!(low, (1 << 20) / block - 1);
    assert!(take(&subject, &mut cpu, block, MASK_32).is_err());
    // A freed block below 4 GiB serves the next request of a 32-bit device.
    let scarce = ranges.swap_remove(500);
    give(&subject, &mut cpu, scarce);
    assert_eq!(take(&subject, &mut cpu, block, MASK_32), Ok(scarce));
    for _ in 0..100 {
        let high = take(&subject, &mut cpu, block, Pfn::MAX).unwrap();
        assert!(
            high.lo() > MASK_32 && high.hi().get() < 1 << 32,
            "{high} could be cached"
        );
        ranges.push(high);
    }
    for range in ranges {
        give(&subject, &mut cpu, range);
    }
}

#[test]
fn sizes_above_the_largest_order_are_exact() {
    let subject = make(pages(0, 9999), MagazineLimits::DEFAULT);
    let mut cpu = subject.per_cpu();
    let three: Vec<_> = [3333, 3333, 3334]
        .into_iter()
        .map(|size| take(&subject, &mut cpu, size, MASK_32).unwrap())
        .collect();
    assert_eq!(subject.free_pages(), 0);
    for range in three {
        give(&subject, &mut cpu, range);
    }
    assert_eq!((subject.free_pages(), subject.fragments()), (10_000, 1));
}

/// The pathology of EIOVAR section 5, and the sizes that Linux does not cache: no request inspects
/// more than a path of the tree.
#[test]
fn no_search_is_long() {
    let subject = make(pages(1, 0xf_ffff), MagazineLimits::DEFAULT);
    let mut cpu = subject.per_cpu();
    let mut random = Random::new(5);
    let mut live = Vec::new();
    let mut longest = 0;
    for _ in 0..60_000 {
        if live.len() > 3000 {
            let range = live.swap_remove(random.below(live.len() as u64) as usize);
            give(&subject, &mut cpu, range);
        } else {
            let found = subject
                .alloc(&mut cpu, &AllocRequest::new(1 + random.below(200), MASK_32))
                .unwrap();
            longest = longest.max(found.steps);
            live.push(found.range);
        }
    }
    assert!(longest <= 64, "{longest} nodes");
}

#[test]
fn rounding_changes_no_range() {
    let subject = make(pages(0, 1023), MagazineLimits::DEFAULT);
    let mut cpu = subject.per_cpu();
    let mut live = Vec::new();
    while let Ok(range) = take(&subject, &mut cpu, 5, MASK_32) {
        assert_eq!((range.pages(), range.lo().get() % 8), (5, 0));
        live.push(range);
    }
    assert_eq!(live.len(), 128);
    for range in live {
        give(&subject, &mut cpu, range);
    }
    subject.drain(&mut cpu);
    assert_eq!(take(&subject, &mut cpu, 1024, MASK_32), Ok(pages(0, 1023)));
}
