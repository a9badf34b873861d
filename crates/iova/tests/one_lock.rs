//! The one lock of an allocator as its limit (AL15): Fujita and Moriai section 5, EIOVAR section 9.

#[path = "support/common.rs"]
mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use common::{flushed, pages};
use ringfence_iova::*;
use ringfence_types::{Lock, Pfn, PfnRange};

const LIMIT: Pfn = Pfn::new(0xf_ffff);
const CPUS: u64 = 3;

/// Callers of a [`Gated`] lock.
#[derive(Default)]
struct Callers {
    /// Callers that arrived at the lock.
    arrived: AtomicU64,
    /// Callers that entered it.
    entered: AtomicU64,
    /// CPUs that hold the result of their operation.
    done: AtomicU64,
    /// The lock itself.
    gate: Mutex<()>,
}

/// A lock that counts its callers, and that a test can hold.
struct Gated<S> {
    state: Mutex<S>,
    callers: Arc<Callers>,
}

impl<S> Lock<S> for Gated<S> {
    fn with<R>(&self, critical: impl FnOnce(&mut S) -> R) -> R {
        self.callers.arrived.fetch_add(1, Ordering::SeqCst);
        let _entered = self.callers.gate.lock().unwrap();
        self.callers.entered.fetch_add(1, Ordering::SeqCst);
        critical(&mut self.state.lock().unwrap())
    }
}

fn locked<S: RangeStore>(store: S) -> (Locked<S, Gated<S>>, Arc<Callers>) {
    let callers = Arc::new(Callers::default());
    let lock = |store| Gated {
        state: Mutex::new(store),
        callers: Arc::clone(&callers),
    };
    (Locked::new(store, lock), callers)
}

/// Every operation of every CPU takes the lock once, so the operations of all CPUs run one after
/// another, and none runs while the lock is held.
fn is_limited_by_its_lock<S: RangeStore + Send>(name: &str, store: S) {
    let (allocator, callers) = locked(store);
    let request = AllocRequest::new(1, LIMIT);
    let mut free: Vec<Option<PfnRange>> = (0..CPUS)
        .map(|_| Some(allocator.alloc(&mut (), &request).unwrap().range))
        .collect();
    let load = |count: &AtomicU64| count.load(Ordering::SeqCst);
    // Each round, every CPU does the same operation: alloc, find, free.
    for operation in ["alloc", "find", "free"] {
        let before = [load(&callers.arrived), load(&callers.entered)];
        callers.done.store(0, Ordering::SeqCst);
        thread::scope(|scope| {
            let held = callers.gate.lock().unwrap();
            let mut cpus = Vec::new();
            for range in &mut free {
                let (allocator, callers, request) = (&allocator, &callers, &request);
                cpus.push(scope.spawn(move || {
                    match operation {
                        "alloc" => assert!(allocator.alloc(&mut (), request).is_ok()),
                        "find" => assert!(allocator.find(&mut (), range.unwrap().lo()).is_some()),
                        _ => assert!(allocator.free(&mut (), flushed(range.take().unwrap()))),
                    }
                    callers.done.fetch_add(1, Ordering::SeqCst);
                }));
            }
            // Each CPU arrives at the lock, or ends without it.
            let ended = || cpus.iter().filter(|cpu| cpu.is_finished()).count() as u64;
            while load(&callers.arrived) - before[0] + ended() < CPUS {
                thread::yield_now();
            }
            assert_eq!(
                load(&callers.done),
                0,
                "{name}: {operation} without the lock"
            );
            assert_eq!(load(&callers.entered), before[1], "{name}: {operation}");
            drop(held);
        });
        assert_eq!(load(&callers.done), CPUS, "{name}: {operation}");
        let entered = load(&callers.entered) - before[1];
        assert_eq!(entered, CPUS, "{name}: {operation} takes the lock once");
    }
}

#[test]
fn all_cpus_wait_for_the_one_lock() {
    let space = || pages(1, 0xf_ffff);
    is_limited_by_its_lock("Linux's tree", CachedTree::new(space()));
    let eiovar = Eiovar::new(CachedTree::new(space()), Capacity::Unbounded);
    is_limited_by_its_lock("EIOVAR", eiovar);
    is_limited_by_its_lock("FreeBSD's tree", FreeBsdTree::new(space()));
    is_limited_by_its_lock("vmalloc's tree", VmallocTree::new(space()));
}
