//! One suite over all allocators: random operations, checked against a brute-force reference.

#[path = "support/common.rs"]
mod common;
#[path = "support/reference.rs"]
mod reference;

use std::cell::RefCell;

use common::{Words, domain_flushed, flushed, pages};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use reference::{Reference, Rules};
use ringfence_iova::*;
use ringfence_papers::BitmapAsPublished;
use ringfence_types::{Pfn, PfnRange, PhysAddr};

#[derive(Debug, Clone)]
enum Step {
    Alloc {
        pages: u64,
        order: u8,
        limit: u16,
        cpu: bool,
    },
    Free {
        which: u16,
        cpu: bool,
    },
    FreeUnallocated {
        at: u16,
        pages: u64,
    },
    Find {
        at: u16,
    },
    Drain {
        cpu: bool,
    },
    /// The mapping layer may flush at any time.
    Flush {
        cpu: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let size = prop_oneof![6 => Just(1_u64), 3 => 1..9_u64, 1 => 1..70_u64];
    prop_oneof![
        8 => (size, prop_oneof![3 => Just(0_u8), 1 => 0..6_u8], any::<u16>(), any::<bool>())
            .prop_map(|(pages, order, limit, cpu)| Step::Alloc { pages, order, limit, cpu }),
        7 => (any::<u16>(), any::<bool>()).prop_map(|(which, cpu)| Step::Free { which, cpu }),
        1 => (any::<u16>(), 1..5_u64).prop_map(|(at, pages)| Step::FreeUnallocated { at, pages }),
        2 => any::<u16>().prop_map(|at| Step::Find { at }),
        1 => any::<bool>().prop_map(|cpu| Step::Drain { cpu }),
        1 => any::<bool>().prop_map(|cpu| Step::Flush { cpu }),
    ]
}

/// Returns the address spaces under test. Small ones fill up. The others lie across the boundaries
/// at which some allocator changes its behaviour: 2 GiB, 4 GiB, 2^32 pages, and the end of the
/// address width.
fn spaces() -> Vec<PfnRange> {
    vec![
        pages(1, 63),
        pages(0, 255),
        pages(7, 500),
        pages(0x7_ffc0, 0x8_003f),
        pages(0xf_ff80, 0x10_007f),
        pages(0xffff_ffc0, 0x1_0000_003f),
        pages(Pfn::MAX.get() - 99, Pfn::MAX.get()),
    ]
}

struct Run<'a, A: IovaAllocator> {
    allocator: &'a A,
    cpus: [A::PerCpu; 2],
    reference: Reference,
    rules: Rules,
    space: PfnRange,
}

impl<A: IovaAllocator> Run<'_, A> {
    fn flush(&mut self, cpu: usize) {
        self.allocator
            .flushed(&mut self.cpus[cpu], domain_flushed());
        self.reference.flushed();
    }

    /// Allocates. Flushes on request, and drains the other handle before it checks an exhaustion.
    fn alloc(&mut self, cpu: usize, request: &AllocRequest) -> Option<PfnRange> {
        let mut answer = self.allocator.alloc(&mut self.cpus[cpu], request);
        if answer == Err(AllocError::NeedsFlush) {
            assert!(self.rules.flushes);
            self.flush(cpu);
            answer = self.allocator.alloc(&mut self.cpus[cpu], request);
        }
        if matches!(answer, Err(AllocError::Exhausted { .. })) {
            self.allocator.drain(&mut self.cpus[1 - cpu]);
            answer = self.allocator.alloc(&mut self.cpus[cpu], request);
        }
        match answer {
            Ok(found) => {
                self.reference.allocated(request, &found);
                Some(found.range)
            }
            Err(error) => {
                self.reference.exhausted(request, error);
                None
            }
        }
    }

    fn free(&mut self, cpu: usize, range: PfnRange) {
        assert!(
            self.allocator
                .free(&mut self.cpus[cpu], flushed(range).into()),
            "free {range}"
        );
        self.reference.freed(range);
        self.refused(cpu, range, "freed twice");
    }

    fn refused(&mut self, cpu: usize, range: PfnRange, why: &str) {
        if self.rules.always_refuses || cfg!(debug_assertions) {
            assert!(
                !self
                    .allocator
                    .free(&mut self.cpus[cpu], flushed(range).into()),
                "{range} {why}"
            );
        }
    }

    fn page(&self, at: u16) -> u64 {
        self.space.lo().get() + u64::from(at) % self.space.pages()
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Alloc {
                pages,
                order,
                limit,
                cpu,
            } => {
                // Half of the limits are common masks, most of them outside the space.
                let limit = match limit % 8 {
                    0..4 => self.page(limit / 8),
                    4..6 => 0xf_ffff,
                    6 => 0x7_ffff,
                    _ => Pfn::MAX.get(),
                };
                let request = AllocRequest {
                    align_order: order,
                    ..AllocRequest::new(pages, Pfn::new(limit))
                };
                self.alloc(usize::from(cpu), &request);
            }
            Step::Free { which, cpu } => {
                let live = self.reference.live();
                if let Some(range) = live.get(usize::from(which) % live.len().max(1)) {
                    self.free(usize::from(cpu), *range);
                }
            }
            Step::FreeUnallocated { at, pages } => {
                let Some(range) = PfnRange::new(Pfn::new(self.page(at)), pages) else {
                    return;
                };
                // The mapping layer must reject a part of an allocated range: bitmaps do not record
                // where ranges end.
                if self
                    .reference
                    .live()
                    .iter()
                    .all(|live| !live.overlaps(&range))
                {
                    self.refused(0, range, "never allocated");
                }
            }
            Step::Find { at } => {
                let page = self.page(at);
                let answer = self.allocator.find(&mut self.cpus[0], Pfn::new(page));
                self.reference.found(page, answer);
            }
            Step::Drain { cpu } => self.allocator.drain(&mut self.cpus[usize::from(cpu)]),
            Step::Flush { cpu } => self.flush(usize::from(cpu)),
        }
    }

    /// Frees everything. Then exactly the whole space can be allocated again, page by page.
    fn finish(mut self) {
        for range in self.reference.live() {
            self.free(0, range);
        }
        let one = AllocRequest::new(1, Pfn::MAX);
        let mut all = Vec::new();
        while let Some(range) = self.alloc(1, &one) {
            all.push(range);
        }
        // Neighbours share the unused page between them.
        let guard = self.rules.guard;
        let usable = self.space.pages() - guard;
        assert_eq!(all.len() as u64, usable / (1 + guard));
        for range in all {
            self.free(1, range);
        }
        self.allocator.drain(&mut self.cpus[0]);
        self.allocator.drain(&mut self.cpus[1]);
        self.flush(0);
        if self.rules.rounds_up_to.is_none() {
            let whole = AllocRequest::new(self.space.pages() - 2 * guard, Pfn::MAX);
            assert!(
                self.alloc(0, &whole).is_some(),
                "fragmented after everything was freed"
            );
        }
    }
}

fn bad_requests<A: IovaAllocator>(allocator: &A) {
    let mut cpu = allocator.per_cpu();
    for (pages, align_order) in [(0, 0), (0, 60), (1, 52), (1, 255), (u64::MAX, 64)] {
        let request = AllocRequest {
            align_order,
            ..AllocRequest::new(pages, Pfn::MAX)
        };
        assert_eq!(
            allocator.alloc(&mut cpu, &request),
            Err(AllocError::BadRequest { pages, align_order })
        );
    }
    for pages in [1 << 51, 1 << 52, (1 << 52) + 1, u64::MAX] {
        let request = AllocRequest::new(pages, Pfn::MAX);
        let error = allocator.alloc(&mut cpu, &request).unwrap_err();
        assert_eq!(
            error,
            AllocError::Exhausted {
                pages,
                limit: Pfn::MAX
            }
        );
    }
}

fn conforms<A: IovaAllocator>(rules: Rules, make: impl Fn(PfnRange) -> A) {
    assert_eq!(A::HAS_LOOKUP, rules.finds);
    bad_requests(&make(pages(1, 99)));
    const SEED: [u8; 32] = *b"the same operations on every run";
    for space in spaces() {
        let config = Config {
            cases: 60,
            failure_persistence: None,
            max_shrink_iters: 5_000,
            ..Config::default()
        };
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &SEED);
        let result = TestRunner::new_with_rng(config, rng).run(
            &prop::collection::vec(step(), 1..150),
            |steps| {
                let allocator = make(space);
                let mut run = Run {
                    cpus: [allocator.per_cpu(), allocator.per_cpu()],
                    allocator: &allocator,
                    reference: Reference::new(space, rules),
                    rules,
                    space,
                };
                for step in &steps {
                    run.step(step);
                }
                run.finish();
                Ok(())
            },
        );
        if let Err(error) = result {
            panic!("space {space}, seed {SEED:?}: {error}");
        }
    }
}

#[test]
fn cached_rbtree() {
    conforms(Rules::EXACT, |space| {
        Locked::new(CachedTree::new(space), RefCell::new)
    });
}

#[test]
fn free_space() {
    let rules = Rules {
        finds: false,
        ..Rules::EXACT
    };
    conforms(rules, |space| {
        Locked::new(FreeSpace::new(space).unwrap(), RefCell::new)
    });
}

#[test]
fn eiovar_over_every_store() {
    let rules = Rules {
        rounds_up_to: Some(27),
        reservation_within_limit: true,
        always_refuses: false,
        ..Rules::EXACT
    };
    for capacity in [1, 8, 64, 512]
        .map(Capacity::AtMost)
        .into_iter()
        .chain([Capacity::Unbounded])
    {
        conforms(rules, |space| {
            Locked::new(Eiovar::new(CachedTree::new(space), capacity), RefCell::new)
        });
    }
    let rules = Rules {
        finds: false,
        ..rules
    };
    conforms(rules, |space| {
        let behind = FreeSpace::new(space).unwrap();
        Locked::new(Eiovar::new(behind, Capacity::AtMost(8)), RefCell::new)
    });
}

#[test]
fn magazines() {
    let rules = Rules {
        rounds_up_to: Some(magazine::MAX_ORDER),
        natural: true,
        finds: false,
        always_refuses: false,
        ..Rules::EXACT
    };
    let tiny = MagazineLimits {
        slots: 2,
        magazine_pages: 16,
        cpu_pages: 64,
        total_pages: 256,
    };
    let starved = MagazineLimits {
        cpu_pages: 7,
        total_pages: 9,
        ..tiny
    };
    let none = MagazineLimits {
        total_pages: 0,
        ..tiny
    };
    for limits in [MagazineLimits::DEFAULT, tiny, starved, none] {
        conforms(rules, |space| {
            Magazines::new(space, limits, RefCell::new).unwrap()
        });
    }
}

#[test]
fn linux_rcache() {
    let rules = Rules {
        rounds_up_to: Some(5),
        natural: true,
        reservation_within_limit: true,
        natural_when_exact: true,
        finds: false,
        always_refuses: false,
        ..Rules::EXACT
    };
    conforms(rules, |space| {
        LinuxRcache::new(CachedTree::new(space), RefCell::new)
    });
    conforms(rules, |space| {
        LinuxRcache::new(FreeSpace::new(space).unwrap(), RefCell::new)
    });
    let rules = Rules {
        needs_room_to_align: true,
        ..rules
    };
    conforms(rules, |space| {
        LinuxRcache::new(LinuxMaple::new(space), RefCell::new)
    });
}

#[test]
fn linux_maple() {
    let rules = Rules {
        needs_room_to_align: true,
        ..Rules::EXACT
    };
    conforms(rules, |space| {
        Locked::new(LinuxMaple::new(space), RefCell::new)
    });
}

#[test]
fn freebsd() {
    conforms(Rules::EXACT, |space| {
        Locked::new(FreeBsdTree::new(space), RefCell::new)
    });
    let rules = Rules {
        guard: 1,
        ..Rules::EXACT
    };
    conforms(rules, |space| {
        Locked::new(FreeBsdTree::freebsd_14(space), RefCell::new)
    });
}

#[test]
fn vmalloc() {
    conforms(Rules::EXACT, |space| {
        Locked::new(VmallocTree::new(space), RefCell::new)
    });
}

const BITMAP: Rules = Rules {
    finds: false,
    quarantines: true,
    flushes: true,
    ..Rules::EXACT
};

#[test]
fn bitmap() {
    conforms(BITMAP, |space| Bitmap::new(space, RefCell::new).unwrap());
}

#[test]
fn bitmap_as_published() {
    let rules = Rules {
        quarantines: false,
        ..BITMAP
    };
    conforms(rules, |space| {
        BitmapAsPublished::new(space, RefCell::new).unwrap()
    });
}

#[test]
fn table_bitmap() {
    conforms(BITMAP, |space| {
        let memory = Words::holding(space);
        TableBitmap::new(memory, PhysAddr::ZERO, space, RefCell::new).unwrap()
    });
}
