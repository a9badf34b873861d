//! Frees of ranges that were never allocated, of partial ranges, of another allocator's ranges, and
//! through another CPU's handle, between requests at every edge. No allocator panics, and none
//! allocates a page that is in use.

#[path = "support/common.rs"]
mod common;

use std::cell::RefCell;
use std::collections::BTreeSet;

use common::{Random, Words, domain_flushed, flushed, pages};
use ringfence_iova::*;
use ringfence_papers::BitmapAsPublished;
use ringfence_types::{Pfn, PfnRange, PhysAddr};

/// The builds in which an allocator detects ranges that are not allocated.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Detection {
    Always,
    /// In debug builds; in release builds it trusts the mapping layer.
    InDebugBuilds,
}

fn spaces() -> [PfnRange; 5] {
    [
        pages(0, 255),
        pages(0x7_ffc0, 0x8_003f),
        pages(0xf_ff80, 0x10_007f),
        pages(0xffff_ffc0, 0x1_0000_003f),
        pages(Pfn::MAX.get() - 99, Pfn::MAX.get()),
    ]
}

/// Returns a range that usually overlaps the space.
fn anything(random: &mut Random, space: PfnRange) -> Option<PfnRange> {
    let edges = [0, 1 << 19, 1 << 20, 1 << 32, Pfn::MAX.get()];
    let lo = match random.below(8) {
        0 => edges[random.below(5) as usize],
        1 => random.next() >> 12,
        _ => space
            .lo()
            .get()
            .wrapping_sub(2)
            .wrapping_add(random.below(space.pages() + 4)),
    };
    let pages = match random.below(8) {
        0 => 1 << random.below(53),
        1 => space.pages(),
        _ => 1 + random.below(9),
    };
    PfnRange::new(Pfn::new(lo & Pfn::MAX.get()), pages)
}

fn attack<A: IovaAllocator>(knows: Detection, make: impl Fn(PfnRange) -> A) {
    let judged = knows == Detection::Always || cfg!(debug_assertions);
    for space in spaces() {
        for seed in 0..40 {
            let mut random = Random::new(seed);
            let allocator = make(space);
            let mut cpus = [allocator.per_cpu(), allocator.per_cpu()];
            let mut live = BTreeSet::new();
            let mut handed_out: Vec<PfnRange> = Vec::new();
            for step in 0..300 {
                let cpu = &mut cpus[random.below(2) as usize];
                match random.below(10) {
                    0..5 => {
                        let pages = anything(&mut random, space).map_or(0, |range| range.pages());
                        let limit = anything(&mut random, space).map_or(Pfn::MAX, |r| r.hi());
                        let request = AllocRequest {
                            align_order: [0, 0, 1, 5, 20, 51, 64][random.below(7) as usize],
                            ..AllocRequest::new(pages, limit)
                        };
                        let Ok(found) = allocator.alloc(cpu, &request) else {
                            continue;
                        };
                        for page in found.range.lo().get()..=found.range.hi().get() {
                            let new = live.insert(page);
                            assert!(new || !judged, "{page:#x} twice, seed {seed}, step {step}");
                        }
                        handed_out.push(found.range);
                    }
                    5..9 => {
                        let range = match random.below(3) {
                            0 if !handed_out.is_empty() => {
                                let which = random.below(handed_out.len() as u64);
                                Some(handed_out[which as usize])
                            }
                            _ => anything(&mut random, space),
                        };
                        let Some(range) = range else { continue };
                        if allocator.free(cpu, flushed(range).into()) {
                            let within = space.contains(&range);
                            assert!(within || !judged, "{range} is of no space");
                            live.retain(|page| {
                                !(range.lo().get()..=range.hi().get()).contains(page)
                            });
                        }
                    }
                    _ => match random.below(3) {
                        0 => allocator.drain(cpu),
                        1 => allocator.flushed(cpu, domain_flushed()),
                        _ => {
                            let page = Pfn::new(random.next() & Pfn::MAX.get());
                            let _ = allocator.find(cpu, page);
                        }
                    },
                }
            }
        }
    }
}

#[test]
fn trees() {
    let knows = Detection::Always;
    attack(knows, |space| {
        Locked::new(CachedTree::new(space), RefCell::new)
    });
    attack(knows, |space| {
        Locked::new(FreeBsdTree::new(space), RefCell::new)
    });
    attack(knows, |space| {
        Locked::new(VmallocTree::new(space), RefCell::new)
    });
    attack(knows, |space| {
        Locked::new(FreeSpace::new(space).unwrap(), RefCell::new)
    });
}

#[test]
fn bitmaps() {
    attack(Detection::Always, |space| {
        Bitmap::new(space, RefCell::new).unwrap()
    });
    attack(Detection::Always, |space| {
        BitmapAsPublished::new(space, RefCell::new).unwrap()
    });
    attack(Detection::Always, |space| {
        TableBitmap::new(Words::holding(space), PhysAddr::ZERO, space, RefCell::new).unwrap()
    });
}

#[test]
fn caches() {
    let limits = MagazineLimits {
        slots: 2,
        magazine_pages: 16,
        cpu_pages: 64,
        total_pages: 256,
    };
    attack(Detection::InDebugBuilds, |space| {
        Magazines::new(space, limits, RefCell::new).unwrap()
    });
    attack(Detection::InDebugBuilds, |space| {
        LinuxRcache::new(CachedTree::new(space), RefCell::new)
    });
    attack(Detection::InDebugBuilds, |space| {
        let capacity = Capacity::AtMost(8);
        Locked::new(Eiovar::new(CachedTree::new(space), capacity), RefCell::new)
    });
}

#[test]
fn contiguous() {
    for most in [0, 1, FreeBlocks::HALF_OF_32_BITS] {
        attack(Detection::InDebugBuilds, |space| {
            let limits = MagazineLimits::DEFAULT;
            let below = Magazines::new(space, limits, RefCell::new).unwrap();
            Contiguous::new(below, most, RefCell::new).unwrap()
        });
    }
}
