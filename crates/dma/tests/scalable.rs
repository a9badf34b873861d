//! Scalable assignment of addresses and management of the IOTLB (Peleg, Morrison, Schuster and
//! Tsafrir, "Utilizing the IOMMU Scalably", USENIX ATC 2015; W12): processors that map and unmap
//! share almost no lock.
//!
//! The locks count, for each processor, how often they were taken. Wall-clock time plays no role.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use ringfence_dma::flush::{Deferred, DeferredQueue, FlushQueue, PerCpuQueue, QueueConfig, Strict};
use ringfence_dma::space::{Paged, PlainTable, Rounding};
use ringfence_dma::{Dma, FlushPolicy, Platform};
use ringfence_iova::magazine::{Depot, MagazineLimits, Magazines};
use ringfence_iova::{CachedTree, IovaAllocator, LinuxRcache, Locked, RcacheShared};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, Levels, SecondStage, Table};
use ringfence_types::{
    Direction, DomainId, Invalidation, InvalidationError, Invalidator, Iova, Lock, Nanos, Pfn,
    PfnRange, PhysAddr, PhysRange, RequesterId, Ticket,
};

const CPUS: usize = 4;
/// Maps of each processor, and as many unmaps.
const PAIRS: u64 = 4096;
/// Buffers that a processor keeps mapped.
const IN_FLIGHT: usize = 32;

thread_local! {
    /// The processor that runs.
    static CPU: Cell<usize> = const { Cell::new(0) };
    /// Number of times that each processor took each lock, by kind and number of the lock.
    static TAKEN: RefCell<BTreeMap<(&'static str, usize), [u64; CPUS]>> =
        const { RefCell::new(BTreeMap::new()) };
}

/// A lock that counts.
struct Counted<T> {
    kind: &'static str,
    number: usize,
    value: RefCell<T>,
}

impl<T> Counted<T> {
    fn new(kind: &'static str, value: T) -> Self {
        let number = TAKEN.with_borrow_mut(|taken| {
            let number = taken.keys().filter(|(other, _)| *other == kind).count();
            taken.insert((kind, number), [0; CPUS]);
            number
        });
        Self {
            kind,
            number,
            value: RefCell::new(value),
        }
    }
}

impl<T> Lock<T> for Counted<T> {
    fn with<R>(&self, critical: impl FnOnce(&mut T) -> R) -> R {
        TAKEN.with_borrow_mut(|taken| {
            taken.get_mut(&(self.kind, self.number)).unwrap()[CPU.get()] += 1;
        });
        critical(&mut self.value.borrow_mut())
    }
}

fn addresses<T>(value: T) -> Counted<T> {
    Counted::new("addresses", value)
}

fn queue<T>(value: T) -> Counted<T> {
    Counted::new("queue", value)
}

fn list<T>(value: T) -> Counted<T> {
    Counted::new("list", value)
}

/// An interface that completes at once.
struct Instant;

impl Invalidator for Instant {
    fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
        Ok(Ticket::new(0))
    }

    fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
        Ok(true)
    }
}

struct Processor<'m> {
    memory: &'m Arena,
    frames: &'m Frames<&'m Arena>,
    port: Instant,
}

impl<'m> Platform for Processor<'m> {
    type Memory = Arena;
    type Frames = Frames<&'m Arena>;
    type Invalidator = Instant;

    fn memory(&self) -> &Arena {
        self.memory
    }
    fn frames(&self) -> &Frames<&'m Arena> {
        self.frames
    }
    fn invalidator(&mut self) -> &mut Instant {
        &mut self.port
    }
    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

/// Locks taken by all processors.
#[derive(Debug)]
struct LockCounts {
    /// The allocator's shared lock, without the checks of debug builds, which take it once for each
    /// map and each unmap.
    addresses: u64,
    /// Flush queues, each by its own processor.
    own_queue: u64,
    /// Flush queues, by another processor.
    foreign_queue: u64,
}

type Space<A> = Paged<A, PlainTable<SecondStage>>;

/// Maps and unmaps on all processors in turn, and returns the counts of the second half.
fn run<A, F>(allocator: A, flush: F, checked: bool) -> LockCounts
where
    A: IovaAllocator,
    F: FlushPolicy<Space<A>, u64>,
    Space<A>: ringfence_dma::Space,
{
    let memory = Arena::new(64 << 20).unwrap();
    let region = PhysRange::new(PhysAddr::new(32 << 20), 32 << 20).unwrap();
    let frames = Frames::new(&memory, region);
    let mut dma = Dma::new(flush);
    let mask = Iova::new((1 << 48) - 1);
    let mut allocator = Some(allocator);
    let at = dma
        .attach(RequesterId::new(0x100), mask, |domain| {
            let format = SecondStage::new(Levels::Four);
            let table = Table::new(format, domain, Coherency::Coherent, &memory, &frames).unwrap();
            let allocator = allocator.take().unwrap();
            Ok::<_, DomainId>(Paged::new(allocator, PlainTable(table), Rounding::Exact))
        })
        .unwrap();
    let mut platform = Processor {
        memory: &memory,
        frames: &frames,
        port: Instant,
    };
    let mut cpus: Vec<_> = (0..CPUS)
        .map(|cpu| {
            CPU.set(cpu);
            (dma.cpu(), std::collections::VecDeque::new())
        })
        .collect();
    for pair in 0..2 * PAIRS {
        if pair == PAIRS {
            TAKEN.with_borrow_mut(|taken| taken.values_mut().for_each(|by| *by = [0; CPUS]));
        }
        for (number, (cpu, mapped)) in cpus.iter_mut().enumerate() {
            CPU.set(number);
            let buffer = PhysAddr::new((pair % 64) << 12 | (number as u64) << 20);
            let range = PhysRange::new(buffer, 1500).unwrap();
            let made = dma.map_single(
                cpu,
                &mut platform,
                &at,
                buffer.get(),
                range,
                Direction::FromDevice,
            );
            mapped.push_back(made.unwrap().0);
            if mapped.len() > IN_FLIGHT {
                let oldest = mapped.pop_front().unwrap();
                drop(dma.unmap_single(cpu, &mut platform, &at, oldest).unwrap());
            }
        }
    }
    let checks = if checked && cfg!(debug_assertions) {
        2 * PAIRS * CPUS as u64
    } else {
        0
    };
    let counts = TAKEN.with_borrow(|taken| {
        let sum = |kind| {
            let of_kind = taken.iter().filter(|((found, _), _)| *found == kind);
            of_kind.map(|(_, by)| by.iter().sum::<u64>()).sum::<u64>()
        };
        // Queue n belongs to processor n, which created it.
        let own: u64 = taken
            .iter()
            .filter(|((kind, _), _)| *kind == "queue")
            .map(|((_, number), by)| by.get(*number).copied().unwrap_or(0))
            .sum();
        LockCounts {
            addresses: sum("addresses") - checks,
            own_queue: own,
            foreign_queue: sum("queue") - own,
        }
    });
    // The mappings stay: the test ends with them.
    std::mem::forget(cpus);
    TAKEN.with_borrow_mut(BTreeMap::clear);
    counts
}

fn space() -> PfnRange {
    PfnRange::inclusive(Pfn::new(1), Pfn::new((1 << 36) - 1)).unwrap()
}

/// Linux 3.4: one tree and one queue for all processors. Each map and each unmap takes a lock that
/// all share.
#[test]
fn one_tree_and_one_queue_are_taken_for_each_operation() {
    let tree: Locked<CachedTree, Counted<CachedTree>> =
        Locked::new(CachedTree::new(space()), addresses);
    let flush: Deferred<Counted<DeferredQueue>> = Deferred::new(queue);
    let counts = run(tree, flush, false);
    let operations = PAIRS * CPUS as u64;
    assert!(counts.addresses >= 2 * operations, "{counts:?}");
    assert!(
        counts.own_queue + counts.foreign_queue >= operations,
        "{counts:?}"
    );
}

/// Peleg et al.: magazines and a flush queue for each processor. A processor takes its own queue,
/// and the shared depot only to exchange whole magazines.
#[test]
fn magazines_and_queues_of_each_processor_share_almost_nothing() {
    let cached: LinuxRcache<CachedTree, Counted<RcacheShared<CachedTree>>> =
        LinuxRcache::new(CachedTree::new(space()), addresses);
    type Lists = Counted<Vec<Arc<Counted<FlushQueue>>>>;
    let flush: PerCpuQueue<Counted<FlushQueue>, Lists> =
        PerCpuQueue::new(QueueConfig::default(), queue, list);
    let counts = run(cached, flush, true);
    let operations = PAIRS * CPUS as u64;
    assert_eq!(counts.foreign_queue, 0, "{counts:?}");
    assert!(counts.own_queue >= operations, "{counts:?}");
    // A flush frees 256 addresses, two magazines of 127 and two addresses. Each surplus magazine
    // goes to the depot and comes back: at most four exchanges for 256 pairs.
    let exchanges = operations / 256 * 4;
    assert!(
        counts.addresses <= exchanges,
        "{counts:?}, at most {exchanges}"
    );
}

/// `fence`: with a strict flush, the addresses return at once, and the processors share nothing.
#[test]
fn strict_magazines_share_nothing() {
    let cached: Magazines<Counted<Depot>> =
        Magazines::new(space(), MagazineLimits::default(), addresses).unwrap();
    let counts = run(cached, Strict, true);
    assert_eq!(counts.addresses, 0, "{counts:?}");
    assert_eq!(counts.own_queue + counts.foreign_queue, 0);
}
