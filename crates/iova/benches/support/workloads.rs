//! The measured workloads: the rows of the baselines, on any allocator.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use ringfence_iova::{AllocRequest, IovaAllocator};
use ringfence_types::{
    DomainId, Flushed, Invalidation, InvalidationError, Invalidator, Pending, Pfn, PfnRange,
    Ticket, Unmapped,
};

use crate::clock::now;

pub(crate) const LIMIT: Pfn = Pfn::new(0xf_ffff);

/// An invalidation without cost, so that only allocation is measured.
struct Free;

impl Invalidator for Free {
    #[inline]
    fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
        Ok(Ticket::new(0))
    }

    #[inline]
    fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
        Ok(true)
    }
}

#[inline]
fn flushed(range: PfnRange) -> Flushed {
    let unmapped = Unmapped::attest_cleared(DomainId::new(0), range);
    match Pending::submit(&mut Free, Invalidation::Global, unmapped) {
        Ok(pending) => match pending.wait(&mut Free) {
            Ok(flushed) => flushed,
            Err(_) => unreachable!(),
        },
        Err(_) => unreachable!(),
    }
}

/// An allocator with a handle. It provides the two operations of every workload.
pub(crate) struct Port<'a, A: IovaAllocator> {
    allocator: &'a A,
    cpu: A::PerCpu,
}

impl<'a, A: IovaAllocator> Port<'a, A> {
    pub(crate) fn new(allocator: &'a A) -> Self {
        Self {
            allocator,
            cpu: allocator.per_cpu(),
        }
    }

    #[inline]
    fn alloc(&mut self, pages: u64) -> PfnRange {
        match self
            .allocator
            .alloc(&mut self.cpu, &AllocRequest::new(pages, LIMIT))
        {
            Ok(found) => found.range,
            Err(error) => panic!("{error}"),
        }
    }

    #[inline]
    fn free(&mut self, range: PfnRange) {
        self.allocator.free(&mut self.cpu, flushed(range).into());
    }
}

pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    #[inline]
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 32) * bound) >> 32
    }
}

/// A workload on one thread: the number of live ranges, their sizes, and the order of the pairs.
#[derive(Clone, Copy)]
pub(crate) struct Single {
    pub(crate) name: &'static str,
    pub(crate) live: usize,
    /// The size of all ranges, or the maximum of mixed sizes.
    pub(crate) pages: u64,
    pub(crate) order: Order,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Order {
    /// One ring; each slot is freed and allocated again.
    Ring,
    /// Two rings with two thirds and one third of the ranges. Their operations interleave at
    /// random.
    TwoRings,
    /// One ring, freed in batches of 250.
    Batches,
    /// Slots in random order.
    Random,
    /// Slots in random order, with random sizes up to the maximum.
    RandomSizes,
}

pub(crate) const SINGLE: [Single; 6] = [
    Single {
        name: "a1 one ring of 512",
        live: 512,
        pages: 1,
        order: Order::Ring,
    },
    Single {
        name: "b0 Rx 1024 + Tx 512, interleaved",
        live: 1536,
        pages: 1,
        order: Order::TwoRings,
    },
    Single {
        name: "c1 one ring, batches of 250",
        live: 512,
        pages: 1,
        order: Order::Batches,
    },
    Single {
        name: "d2 12288 live, random order",
        live: 12288,
        pages: 1,
        order: Order::Random,
    },
    Single {
        name: "f1 1024 live x 64 pages, random order",
        live: 1024,
        pages: 64,
        order: Order::Random,
    },
    Single {
        name: "f2 2048 live, 1-128 pages mixed",
        live: 2048,
        pages: 128,
        order: Order::RandomSizes,
    },
];

/// State of a running workload.
pub(crate) struct Runner<'a, A: IovaAllocator> {
    port: Port<'a, A>,
    work: Single,
    live: Vec<PfnRange>,
    /// Slots and sizes, drawn before the clock starts.
    plan: Vec<(u32, u32)>,
    random: Random,
    at: usize,
    /// The slot of the other ring that is currently free.
    open: Option<usize>,
}

impl<'a, A: IovaAllocator> Runner<'a, A> {
    pub(crate) fn new(allocator: &'a A, work: Single) -> Self {
        let mut this = Self {
            port: Port::new(allocator),
            work,
            live: Vec::new(),
            plan: Vec::new(),
            random: Random::new(0x5eed),
            at: 0,
            open: None,
        };
        for _ in 0..work.live {
            let pages = this.size();
            let range = this.port.alloc(pages);
            this.live.push(range);
        }
        this
    }

    fn size(&mut self) -> u64 {
        match self.work.order {
            Order::RandomSizes => 1 + self.random.below(self.work.pages),
            _ => self.work.pages,
        }
    }

    /// Runs `pairs` pairs and returns the cycles per pair.
    pub(crate) fn run(&mut self, pairs: usize) -> f64 {
        self.plan.clear();
        for _ in 0..pairs {
            let slot = match self.work.order {
                Order::Ring | Order::Batches => {
                    self.at = (self.at + 1) % self.work.live;
                    self.at as u32
                }
                // The first two thirds are Rx. The next ring is random; the slot within it is not.
                Order::TwoRings => {
                    self.at += 1;
                    if self.random.below(3) < 2 {
                        (self.at % 1024) as u32
                    } else {
                        1024 + (self.at % 512) as u32
                    }
                }
                Order::Random | Order::RandomSizes => {
                    self.random.below(self.work.live as u64) as u32
                }
            };
            let pages = self.size() as u32;
            self.plan.push((slot, pages));
        }
        let plan = std::mem::take(&mut self.plan);
        let start = now();
        match self.work.order {
            Order::Batches => {
                for batch in plan.chunks(250) {
                    for (slot, _) in batch {
                        self.port.free(self.live[*slot as usize]);
                    }
                    for (slot, pages) in batch {
                        self.live[*slot as usize] = self.port.alloc(u64::from(*pages));
                    }
                }
            }
            // Frees a slot; the other ring's free follows before the slot is filled again.
            Order::TwoRings => {
                for (slot, _) in &plan {
                    let slot = *slot as usize;
                    if self.open == Some(slot) {
                        self.live[slot] = self.port.alloc(1);
                        self.open = None;
                        continue;
                    }
                    self.port.free(self.live[slot]);
                    if let Some(open) = self.open.replace(slot) {
                        self.live[open] = self.port.alloc(1);
                    }
                }
            }
            _ => {
                for (slot, pages) in &plan {
                    let slot = *slot as usize;
                    self.port.free(self.live[slot]);
                    self.live[slot] = self.port.alloc(u64::from(*pages));
                }
            }
        }
        let cycles = now() - start;
        self.plan = plan;
        cycles as f64 / pairs as f64
    }
}

/// Runs two threads on one allocator, each with its own ring of 512 pages. Returns the cycles per
/// pair of the slower one.
pub(crate) fn two_rings_two_threads<A>(allocator: &A, pairs: usize) -> f64
where
    A: IovaAllocator + Sync,
{
    let barrier = Barrier::new(2);
    let slower = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut port = Port::new(allocator);
                let mut ring: Vec<_> = (0..512).map(|_| port.alloc(1)).collect();
                barrier.wait();
                let start = now();
                for at in 0..pairs {
                    let slot = &mut ring[at % 512];
                    port.free(*slot);
                    *slot = port.alloc(1);
                }
                slower.fetch_max(now() - start, Ordering::Relaxed);
                barrier.wait();
                for range in ring {
                    port.free(range);
                }
                allocator.drain(&mut port.cpu);
            });
        }
    });
    slower.into_inner() as f64 / pairs as f64
}

#[repr(align(128))]
struct Padded(AtomicUsize);

/// A bounded queue between two threads, published in batches of 64.
struct Queue {
    slots: Vec<AtomicU64>,
    head: Padded,
    tail: Padded,
}

const QUEUE: usize = 1024;
const BATCH: usize = 64;

/// Waits for the other thread, which may need this CPU.
fn pause(spins: &mut u32) {
    *spins += 1;
    if spins.is_multiple_of(256) {
        thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

/// One thread produces page numbers, the other consumes them. Returns the cycles per page from the
/// first to the last.
fn across(
    pairs: usize,
    make: impl FnOnce(&mut dyn FnMut(&mut dyn FnMut() -> u64)) + Send,
    consume: impl FnOnce(&mut dyn FnMut(&mut dyn FnMut(u64))) + Send,
) -> f64 {
    let queue = Queue {
        slots: (0..QUEUE).map(|_| AtomicU64::new(0)).collect(),
        head: Padded(AtomicUsize::new(0)),
        tail: Padded(AtomicUsize::new(0)),
    };
    let pairs = pairs / BATCH * BATCH;
    let start = now();
    thread::scope(|scope| {
        scope.spawn(|| {
            make(&mut |next| {
                let mut spins = 0;
                for batch in (0..pairs).step_by(BATCH) {
                    while batch + BATCH > queue.head.0.load(Ordering::Acquire) + QUEUE {
                        pause(&mut spins);
                    }
                    for at in batch..batch + BATCH {
                        queue.slots[at % QUEUE].store(next(), Ordering::Relaxed);
                    }
                    queue.tail.0.store(batch + BATCH, Ordering::Release);
                }
            });
        });
        scope.spawn(|| {
            consume(&mut |each| {
                let mut spins = 0;
                for batch in (0..pairs).step_by(BATCH) {
                    while queue.tail.0.load(Ordering::Acquire) < batch + BATCH {
                        pause(&mut spins);
                    }
                    for at in batch..batch + BATCH {
                        each(queue.slots[at % QUEUE].load(Ordering::Relaxed));
                    }
                    queue.head.0.store(batch + BATCH, Ordering::Release);
                }
            });
        });
    });
    (now() - start) as f64 / pairs as f64
}

/// Maps on one thread and unmaps on the other.
pub(crate) fn map_here_unmap_there<A: IovaAllocator + Sync>(allocator: &A, pairs: usize) -> f64 {
    across(
        pairs,
        |run| {
            let mut port = Port::new(allocator);
            run(&mut || port.alloc(1).lo().get());
            allocator.drain(&mut port.cpu);
        },
        |run| {
            let mut port = Port::new(allocator);
            run(&mut |page| {
                if let Some(range) = PfnRange::new(Pfn::new(page), 1) {
                    port.free(range);
                }
            });
            allocator.drain(&mut port.cpu);
        },
    )
}

/// The queue of the workload above, without any work at its ends.
pub(crate) fn queue_alone(pairs: usize) -> f64 {
    across(
        pairs,
        |run| {
            let mut page = 0;
            run(&mut || {
                page += 1;
                page
            });
        },
        |run| {
            let mut sum = 0_u64;
            run(&mut |page| sum = sum.wrapping_add(page));
            std::hint::black_box(sum);
        },
    )
}
