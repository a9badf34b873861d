//! Magazines that move between CPUs: the shipped code under shuttle's schedules, random ones and
//! all of a small case.
//!
//! A ledger outside the allocator records the owner of every page. A page with two owners, or a
//! lost page, fails the test.
// The coroutines of shuttle do not exist for s390x.
#![cfg(not(target_arch = "s390x"))]

#[path = "support/common.rs"]
mod common;

use std::sync::Mutex as Ledger;

use common::{flushed, pages};
use ringfence_iova::*;
use ringfence_types::{Lock, Pfn, PfnRange};
use shuttle::sync::{Arc, Mutex, mpsc};
use shuttle::thread;

/// The embedder's lock. At each `with`, shuttle may switch to another task.
struct Shuttled<T>(Mutex<T>);

impl<T> Lock<T> for Shuttled<T> {
    fn with<R>(&self, critical: impl FnOnce(&mut T) -> R) -> R {
        critical(&mut self.0.lock().unwrap())
    }
}

fn shuttled<T>(value: T) -> Shuttled<T> {
    Shuttled(Mutex::new(value))
}

/// The owner of every page, hidden from shuttle.
#[derive(Default)]
struct Owned(Ledger<Vec<PfnRange>>);

impl Owned {
    fn add(&self, range: PfnRange) {
        let mut owned = self.0.lock().unwrap();
        if let Some(other) = owned.iter().find(|other| other.overlaps(&range)) {
            panic!("{range} handed out while {other} is");
        }
        owned.push(range);
    }

    fn remove(&self, range: PfnRange) {
        let mut owned = self.0.lock().unwrap();
        let at = owned.iter().position(|other| *other == range).unwrap();
        owned.swap_remove(at);
    }
}

struct Setup<A> {
    allocator: A,
    owned: Owned,
}

impl<A: IovaAllocator<FreeProof = ringfence_types::Flushed>> Setup<A> {
    fn alloc(&self, cpu: &mut A::PerCpu, pages: u64) -> Option<PfnRange> {
        let request = AllocRequest::new(pages, Pfn::MAX);
        let range = self.allocator.alloc(cpu, &request).ok()?.range;
        self.owned.add(range);
        Some(range)
    }

    fn free(&self, cpu: &mut A::PerCpu, range: PfnRange) {
        self.owned.remove(range);
        assert!(self.allocator.free(cpu, flushed(range)));
    }
}

const TINY: MagazineLimits = MagazineLimits {
    slots: 2,
    magazine_pages: 4,
    cpu_pages: 64,
    total_pages: 256,
};

/// One task maps and passes ranges on, another unmaps them, and a third works alone. At the end
/// every page is free again.
fn hand_over<A>(make: impl Fn(PfnRange) -> A, space: PfnRange, rounds: usize)
where
    A: IovaAllocator<FreeProof = ringfence_types::Flushed> + Send + Sync + 'static,
    A::PerCpu: Send,
{
    let env = Arc::new(Setup {
        allocator: make(space),
        owned: Owned::default(),
    });
    let (give, take) = mpsc::channel();
    let mapper = thread::spawn({
        let env = env.clone();
        move || {
            let mut cpu = env.allocator.per_cpu();
            for round in 0..rounds {
                if let Some(range) = env.alloc(&mut cpu, 1 + round as u64 % 2) {
                    give.send(range).unwrap();
                }
            }
            drop(give);
            env.allocator.drain(&mut cpu);
        }
    });
    let unmapper = thread::spawn({
        let env = env.clone();
        move || {
            let mut cpu = env.allocator.per_cpu();
            while let Ok(range) = take.recv() {
                env.free(&mut cpu, range);
            }
            env.allocator.drain(&mut cpu);
        }
    });
    let mut cpu = env.allocator.per_cpu();
    let mut held = Vec::new();
    for round in 0..rounds {
        if round % 3 == 2 {
            for range in held.drain(..) {
                env.free(&mut cpu, range);
            }
        }
        held.extend(env.alloc(&mut cpu, 1));
    }
    for range in held {
        env.free(&mut cpu, range);
    }
    mapper.join().unwrap();
    unmapper.join().unwrap();
    // The first drain leaves the depot's magazines full until memory is short: allocate everything.
    env.allocator.drain(&mut cpu);
    let mut all = Vec::new();
    while let Some(range) = env.alloc(&mut cpu, 1) {
        all.push(range);
    }
    assert_eq!(all.len() as u64, space.pages(), "pages were lost");
    for range in all {
        env.free(&mut cpu, range);
    }
    env.allocator.drain(&mut cpu);
}

#[test]
fn magazines_under_random_schedules() {
    for limits in [
        TINY,
        MagazineLimits {
            total_pages: 12,
            ..TINY
        },
    ] {
        shuttle::check_random(
            move || {
                hand_over(
                    |space| Magazines::new(space, limits, shuttled).unwrap(),
                    pages(1, 24),
                    12,
                )
            },
            1500,
        );
    }
}

#[test]
fn magazines_under_preemption_bounded_schedules() {
    shuttle::check_pct(
        || {
            hand_over(
                |space| Magazines::new(space, TINY, shuttled).unwrap(),
                pages(1, 9),
                10,
            )
        },
        1000,
        3,
    );
}

/// Every schedule of two tasks that allocate, free and drain.
#[test]
fn magazines_under_all_schedules_of_a_small_case() {
    let limits = MagazineLimits { slots: 1, ..TINY };
    shuttle::check_dfs(
        move || {
            let space = pages(1, 3);
            let env = Arc::new(Setup {
                allocator: Magazines::new(space, limits, shuttled).unwrap(),
                owned: Owned::default(),
            });
            let other = thread::spawn({
                let env = env.clone();
                move || {
                    let mut cpu = env.allocator.per_cpu();
                    if let Some(range) = env.alloc(&mut cpu, 1) {
                        env.free(&mut cpu, range);
                    }
                    env.allocator.drain(&mut cpu);
                }
            });
            let mut cpu = env.allocator.per_cpu();
            if let Some(range) = env.alloc(&mut cpu, 1) {
                env.free(&mut cpu, range);
            }
            other.join().unwrap();
            let all: Vec<_> = std::iter::from_fn(|| env.alloc(&mut cpu, 1)).collect();
            assert_eq!(all.len() as u64, space.pages(), "pages were lost");
        },
        None,
    );
}

#[test]
fn linux_rcache_under_random_schedules() {
    shuttle::check_random(
        || {
            hand_over(
                |space| LinuxRcache::new(CachedTree::new(space), shuttled),
                pages(1, 300),
                300,
            )
        },
        20,
    );
}
