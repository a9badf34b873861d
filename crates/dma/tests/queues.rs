//! The deferred queues of several CPUs under shuttle's schedules. Every range is freed exactly
//! once, and only after its invalidation has completed.
// The coroutines of shuttle do not exist for s390x.
#![cfg(not(target_arch = "s390x"))]

#[path = "support/machine.rs"]
mod machine;

use std::collections::BTreeSet;
use std::sync::Mutex as Plain;

use machine::{Port, Processor, Shuttled, shuttled};
use ringfence_dma::Dma;
use ringfence_dma::flush::{Deferred, FlushPolicy, PerCpuQueue, QueueConfig};
use ringfence_dma::space::{Paged, PlainTable, Rounding};
use ringfence_iova::{
    AllocError, AllocRequest, Allocation, CachedTree, FreeProof, IovaAllocator, Locked,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, Levels, SecondStage, Table};
use ringfence_types::{
    Direction, DomainId, Flushed, Iova, Nanos, Pfn, PfnRange, PhysAddr, PhysRange, RequesterId,
};
use shuttle::sync::Arc;
use shuttle::thread;

const PAGE: u64 = 4096;
const DOMAINS: u16 = 2;

/// Rejects the free of a range that a device may still reach, or that is not allocated.
struct Judge {
    inner: Locked<CachedTree, Shuttled<CachedTree>>,
    hardware: Port,
    domain: DomainId,
    out: Plain<BTreeSet<PfnRange>>,
}

impl IovaAllocator for Judge {
    type PerCpu = ();
    type FreeProof = Flushed;

    fn per_cpu(&self) {}

    fn alloc(&self, cpu: &mut (), request: &AllocRequest) -> Result<Allocation, AllocError> {
        let found = self.inner.alloc(cpu, request)?;
        assert!(self.out.lock().unwrap().insert(found.range));
        Ok(found)
    }

    fn find(&self, cpu: &mut (), page: Pfn) -> Option<PfnRange> {
        self.inner.find(cpu, page)
    }

    fn free(&self, cpu: &mut (), range: Flushed) -> bool {
        let pages = FreeProof::range(&range);
        assert_eq!(range.domain(), self.domain, "freed into another domain");
        assert!(
            self.out.lock().unwrap().remove(&pages),
            "{pages} is freed twice"
        );
        let hardware = self.hardware.0.lock().unwrap();
        for page in pages.lo().get()..=pages.hi().get() {
            assert!(
                !hardware.cached.contains(&(self.domain, page)),
                "{page:#x} is freed while it is cached"
            );
        }
        drop(hardware);
        self.inner.free(cpu, range)
    }

    fn footprint(&self) -> usize {
        0
    }
}

type Space = Paged<Judge, PlainTable<SecondStage>>;

/// Two CPUs map and unmap in two domains while a third runs the timer. `fails` of the first
/// invalidations fail.
fn run<F>(flush: F, fails: u64)
where
    F: FlushPolicy<Space, u64> + Send + Sync + 'static,
    F::PerCpu: Send,
    F::PerDomain: Send + Sync,
{
    let hardware = Port(std::sync::Arc::default());
    hardware.0.lock().unwrap().failing.extend(1..=fails);
    let arena = std::sync::Arc::new(Arena::new(64 * PAGE).unwrap());
    let region = PhysRange::new(PhysAddr::ZERO, 64 * PAGE).unwrap();
    let frames = std::sync::Arc::new(Frames::new(std::sync::Arc::clone(&arena), region));
    let processor = {
        let (arena, frames, port) = (arena.clone(), frames.clone(), hardware.clone());
        move || Processor {
            arena: arena.clone(),
            frames: frames.clone(),
            port: port.clone(),
            now: Nanos(0),
        }
    };
    let mut dma = Dma::new(flush);
    let mut attached = Vec::new();
    for device in 0..DOMAINS {
        let at = dma
            .attach(RequesterId::new(device), Iova::new(u64::MAX), |domain| {
                let space = PfnRange::inclusive(Pfn::new(1), Pfn::new(64)).unwrap();
                let judge = Judge {
                    inner: Locked::new(CachedTree::new(space), shuttled),
                    hardware: hardware.clone(),
                    domain,
                    out: Plain::default(),
                };
                let format = SecondStage::new(Levels::Three);
                let table = Table::new(format, domain, Coherency::Coherent, &*arena, &*frames);
                let table = PlainTable(table.unwrap());
                Ok::<_, ()>(Paged::new(judge, table, Rounding::Exact))
            })
            .unwrap();
        attached.push(at);
    }
    let dma = Arc::new(dma);
    let workers: Vec<_> = (0..2_u64)
        .map(|worker| {
            let (dma, mut board) = (Arc::clone(&dma), processor());
            let (attached, hardware) = (attached.clone(), hardware.clone());
            let mut cpu = dma.cpu();
            thread::spawn(move || {
                for step in 0..5 {
                    let at = &attached[((worker + step) % u64::from(DOMAINS)) as usize];
                    let memory = PhysRange::new(PhysAddr::new(step * PAGE), PAGE).unwrap();
                    board.now = Nanos(step);
                    let (mapping, _) = dma
                        .map_single(&mut cpu, &mut board, at, step, memory, Direction::ToDevice)
                        .unwrap();
                    let page = Pfn::containing(mapping.iova()).get();
                    let mut caches = hardware.0.lock().unwrap();
                    caches.cached.insert((at.domain(), page));
                    drop(caches);
                    if let Err(error) = dma.unmap_single(&mut cpu, &mut board, at, mapping) {
                        let ringfence_dma::UnmapReason::NotFlushed(_, mut not_invalidated) =
                            error.reason
                        else {
                            panic!("{:?}", error.reason);
                        };
                        while let Err((_, left)) =
                            dma.retry_invalidation(&mut cpu, &mut board, not_invalidated)
                        {
                            not_invalidated = left;
                        }
                    }
                }
            })
        })
        .collect();
    let timer = {
        let (dma, mut board) = (Arc::clone(&dma), processor());
        let mut cpu = dma.cpu();
        thread::spawn(move || {
            for step in 0..4 {
                board.now = Nanos(step * 3);
                let _ = dma.tick(&mut cpu, &mut board);
            }
        })
    };
    for thread in workers.into_iter().chain([timer]) {
        thread.join().unwrap();
    }
    let (mut cpu, mut board) = (dma.cpu(), processor());
    for at in &attached {
        while dma.flush(&mut cpu, &mut board, at).is_err() {}
        let space = dma.space(at).unwrap();
        let out = space.allocator().out.lock().unwrap().clone();
        assert!(out.is_empty(), "{out:?} of {} never came back", at.domain());
    }
}

fn deferred() -> Deferred<Shuttled<ringfence_dma::flush::DeferredQueue>> {
    Deferred::with(3, 2, shuttled)
}

type Ring = Shuttled<ringfence_dma::flush::FlushQueue>;
type Rings = Shuttled<Vec<std::sync::Arc<Ring>>>;

fn queues() -> PerCpuQueue<Ring, Rings> {
    let config = QueueConfig {
        entries: 2,
        timeout_ns: 2,
    };
    PerCpuQueue::new(config, shuttled, shuttled)
}

const SCHEDULES: usize = 1500;

#[test]
fn the_shared_queue_under_random_schedules() {
    shuttle::check_random(|| run(deferred(), 0), SCHEDULES);
    shuttle::check_random(|| run(deferred(), 3), SCHEDULES);
}

#[test]
fn per_processor_queues_under_random_schedules() {
    shuttle::check_random(|| run(queues(), 0), SCHEDULES);
    shuttle::check_random(|| run(queues(), 3), SCHEDULES);
}

#[test]
fn per_processor_queues_under_few_preemptions() {
    shuttle::check_pct(|| run(queues(), 1), SCHEDULES, 3);
}
