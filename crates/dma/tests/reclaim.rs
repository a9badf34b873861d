//! Table pages that are freed while other maps need new ones in their place, under shuttle's
//! schedules. No device faults inside a live grant, and no page is freed while a walk cache refers
//! to it.
// The coroutines of shuttle do not exist for s390x.
#![cfg(not(target_arch = "s390x"))]

#[path = "support/machine.rs"]
mod machine;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex as Plain;

use machine::{Shuttled, shuttled};
use ringfence_dma::flush::Strict;
use ringfence_dma::space::{Paged, Reclaiming, Rounding};
use ringfence_dma::{Dma, Platform, Released};
use ringfence_iova::{CachedTree, Locked};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, Cursor, Levels, ReclaimingTable, SecondStage, walk};
use ringfence_types::{
    CachedLevels, Direction, FrameSource, Invalidation, InvalidationError, Invalidator, Iova,
    Nanos, OutOfFrames, Pfn, PfnRange, PhysAddr, PhysRange, RequesterId, Ticket,
};
use shuttle::sync::Arc;
use shuttle::thread;

const PAGE: u64 = 4096;
const FORMAT: SecondStage = SecondStage::new(Levels::Three);

/// Number of pages that a leaf table translates.
const LEAVES: u64 = 512;

/// The walk cache: leaf tables by the range that they translate.
#[derive(Default)]
struct Walker {
    cached: BTreeMap<u64, Cursor>,
    requests: Vec<(Invalidation, BTreeSet<u64>)>,
}

impl Walker {
    /// Returns the physical address that a device's access to `page` reaches.
    fn access(&mut self, arena: &Arena, root: PhysAddr, page: Pfn) -> Option<PhysAddr> {
        let region = page.get() / LEAVES;
        let start = match self.cached.get(&region) {
            Some(cursor) => *cursor,
            None => Cursor::root(&FORMAT, root),
        };
        let mut lowest = None;
        let leaf = walk(&FORMAT, arena, start, page.iova(), |cursor| {
            lowest = Some(cursor);
        });
        // An access that faults caches nothing.
        if leaf.is_ok()
            && let Some(cursor) = lowest
        {
            self.cached.insert(region, cursor);
        }
        leaf.ok().map(|leaf| leaf.base)
    }
}

type World = std::sync::Arc<Plain<Walker>>;

struct Port(World);

impl Invalidator for Port {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        thread::yield_now();
        let mut walker = self.0.lock().unwrap();
        let named = |region: &u64| match request {
            Invalidation::Pages {
                levels: CachedLevels::Leaves,
                ..
            } => false,
            Invalidation::Pages { range, .. } => {
                (range.lo().get() / LEAVES..=range.hi().get() / LEAVES).contains(region)
            }
            _ => true,
        };
        let gone = walker.cached.keys().copied().filter(named).collect();
        walker.requests.push((request, gone));
        Ok(Ticket::new(walker.requests.len() as u64 - 1))
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        // Let other tasks run between the request and its completion.
        thread::yield_now();
        let mut walker = self.0.lock().unwrap();
        let gone = std::mem::take(&mut walker.requests[ticket.get() as usize].1);
        for region in gone {
            walker.cached.remove(&region);
        }
        Ok(true)
    }
}

/// Rejects the free of frames that the walk cache refers to.
struct Judge {
    inner: Frames<std::sync::Arc<Arena>>,
    walker: World,
}

impl FrameSource for Judge {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        self.inner.alloc_zeroed()
    }

    fn free(&self, frame: PhysAddr) {
        let walker = self.walker.lock().unwrap();
        let reached = walker.cached.values().any(|cursor| cursor.table() == frame);
        assert!(!reached, "{frame} is freed while a walk cache leads to it");
        drop(walker);
        self.inner.free(frame);
    }
}

struct Processor {
    arena: std::sync::Arc<Arena>,
    frames: std::sync::Arc<Judge>,
    port: Port,
}

impl Platform for Processor {
    type Memory = Arena;
    type Frames = Judge;
    type Invalidator = Port;

    fn memory(&self) -> &Arena {
        &self.arena
    }

    fn frames(&self) -> &Judge {
        &self.frames
    }

    fn invalidator(&mut self) -> &mut Port {
        &mut self.port
    }

    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

type Table = ReclaimingTable<SecondStage>;

/// Two CPUs map, use and unmap pages that share a leaf table, which is repeatedly freed and
/// allocated.
fn run() {
    let walker = World::default();
    let arena = std::sync::Arc::new(Arena::new(64 * PAGE).unwrap());
    let region = PhysRange::new(PhysAddr::ZERO, 64 * PAGE).unwrap();
    let frames = std::sync::Arc::new(Judge {
        inner: Frames::new(std::sync::Arc::clone(&arena), region),
        walker: walker.clone(),
    });
    let mut dma = Dma::<_, _, u64>::new(Strict);
    let mut root = PhysAddr::ZERO;
    let at = dma
        .attach(RequesterId::new(1), Iova::new(u64::MAX), |domain| {
            let space = PfnRange::inclusive(Pfn::new(1), Pfn::new(LEAVES - 1)).unwrap();
            let tree = Locked::new(CachedTree::new(space), shuttled);
            let table = Table::new(FORMAT, domain, Coherency::Coherent, &*arena, &*frames).unwrap();
            root = table.root();
            let table = Reclaiming::<_, Shuttled<Table>>::new(table, shuttled);
            Ok::<_, ()>(Paged::new(tree, table, Rounding::Exact))
        })
        .unwrap();
    let dma = Arc::new(dma);
    let workers: Vec<_> = (0..2_u64)
        .map(|worker| {
            let dma = Arc::clone(&dma);
            let mut board = Processor {
                arena: arena.clone(),
                frames: frames.clone(),
                port: Port(walker.clone()),
            };
            let mut cpu = dma.cpu();
            thread::spawn(move || {
                for turn in 0..3 {
                    let memory = PhysRange::new(PhysAddr::new(worker * PAGE), PAGE).unwrap();
                    let both = Direction::Bidirectional;
                    let (mapping, _) = dma
                        .map_single(&mut cpu, &mut board, &at, turn, memory, both)
                        .unwrap();
                    let page = Pfn::containing(mapping.iova());
                    for _ in 0..2 {
                        let mut caches = board.port.0.lock().unwrap();
                        let reached = caches.access(&board.arena, root, page);
                        assert_eq!(reached, Some(memory.start()), "a fault inside a live grant");
                        drop(caches);
                        thread::yield_now();
                    }
                    let Released(back) = dma
                        .unmap_single(&mut cpu, &mut board, &at, mapping)
                        .unwrap();
                    assert_eq!(back, turn);
                }
            })
        })
        .collect();
    for worker in workers {
        worker.join().unwrap();
    }
}

#[test]
fn mapping_is_visible_despite_concurrent_reclaim() {
    shuttle::check_random(run, 400);
    shuttle::check_pct(run, 300, 3);
}
