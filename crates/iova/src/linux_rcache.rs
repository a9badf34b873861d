//! The allocator of current Linux: per-CPU magazines and a depot for small ranges, in front of a
//! tree.
//!
//! Behaviour of Linux 6.12 (drivers/iommu/iova.c, functions named below), for the modes
//! linux-strict and linux-lazy:
//!
//! - Six size classes of 1 to 32 pages. A smaller request is rounded up to its class; a larger one
//!   goes to the tree (`alloc_iova_fast`).
//! - Each CPU has, per class, a loaded and a previous magazine of 127 ranges. It exchanges whole
//!   magazines with the depot (`__iova_rcache_insert`, `__iova_rcache_get`).
//! - A cached range above the limit is skipped, and the magazine is searched downwards for one
//!   below (`iova_magazine_pop`).
//! - A timer trims the depot: every 100 ms it frees one magazine of each class that has more
//!   magazines than there are CPUs (`iova_depot_work_func`). Here the embedder calls
//!   [`trim`](LinuxRcache::trim).
//! - Tree requests are rounded up to a power of two and aligned to it. If the tree is exhausted,
//!   the caches are flushed and the request is retried. Linux flushes the caches of all CPUs. Here
//!   a handle cannot reach another one, so the owners of the others must
//!   [`drain`](IovaAllocator::drain) them.

use alloc::vec::Vec;
use core::marker::PhantomData;
use core::mem;

use ringfence_types::{Flushed, Lock, Pfn, PfnRange};

use crate::allocator::order_of;
use crate::debug_check::DebugCheck;
use crate::{AllocError, AllocRequest, Allocation, IovaAllocator, RangeStore, ReusableRange};

/// Number of size classes ("IOVA_RANGE_CACHE_MAX_SIZE").
const CLASSES: usize = 6;
/// Ranges in a magazine ("IOVA_MAG_SIZE").
const SLOTS: usize = 127;

/// First pages of free ranges of one class. An empty magazine has capacity 0 or [`SLOTS`].
type Magazine = Vec<u64>;

/// One CPU's magazines of one class.
#[derive(Debug, Default)]
struct Class {
    loaded: Magazine,
    previous: Magazine,
}

/// The handle of one CPU. [`drain`](IovaAllocator::drain) it before dropping it, or its ranges are
/// lost.
#[derive(Debug, Default)]
pub struct RcacheCpu {
    classes: [Class; CLASSES],
}

/// The state that all CPUs share: the depot and the store.
#[derive(Debug)]
pub struct RcacheShared<S> {
    store: S,
    depot: [Vec<Magazine>; CLASSES],
    debug_check: DebugCheck,
}

/// Linux's allocator. In Linux, `S` is a [`CachedTree`](crate::CachedTree).
#[derive(Debug)]
pub struct LinuxRcache<S, L> {
    shared: L,
    store: PhantomData<fn() -> S>,
}

/// Returns the class that serves `pages`. `None` if they are too many.
#[inline]
fn class_of(pages: u64) -> Option<usize> {
    let order = order_of(pages) as usize;
    (order < CLASSES).then_some(order)
}

/// Returns the range reserved for `range`.
#[inline]
fn reserved(range: PfnRange) -> Option<PfnRange> {
    match class_of(range.pages()) {
        Some(class) => PfnRange::new(range.lo(), 1 << class),
        None => Some(range),
    }
}

/// Takes the most recent range at or below `highest` ("iova_magazine_pop").
#[inline]
fn pop(magazine: &mut Magazine, highest: u64) -> Option<u64> {
    if *magazine.last()? <= highest {
        return magazine.pop();
    }
    let at = magazine.iter().rposition(|lo| *lo <= highest)?;
    Some(magazine.swap_remove(at))
}

#[inline]
fn push(magazine: &mut Magazine, lo: u64) -> bool {
    let room = magazine.len() < SLOTS && magazine.len() < magazine.capacity();
    if room {
        magazine.push(lo);
    }
    room
}

impl<S: RangeStore> RcacheShared<S> {
    /// Frees the ranges of `magazine` into the store. Returns false if it was empty.
    fn empty_magazine(store: &mut S, magazine: &mut Magazine, class: usize) -> bool {
        let any = !magazine.is_empty();
        for lo in magazine.drain(..) {
            if let Some(range) = PfnRange::new(Pfn::new(lo), 1 << class) {
                store.free(ReusableRange::cached(range));
            }
        }
        any
    }

    fn drain(&mut self, cpu: &mut RcacheCpu) -> bool {
        let mut any = false;
        for (class, racks) in cpu.classes.iter_mut().enumerate() {
            any |= Self::empty_magazine(&mut self.store, &mut racks.loaded, class);
            any |= Self::empty_magazine(&mut self.store, &mut racks.previous, class);
        }
        any
    }

    /// Frees magazines of the depot, the most recent first. `magazines` maps a class's magazine
    /// count to the number to free.
    fn drain_depot(&mut self, magazines: impl Fn(usize) -> usize) -> bool {
        let mut any = false;
        for (class, list) in self.depot.iter_mut().enumerate() {
            for _ in 0..magazines(list.len()) {
                if let Some(mut magazine) = list.pop() {
                    any |= Self::empty_magazine(&mut self.store, &mut magazine, class);
                }
            }
        }
        any
    }
}

impl<S: RangeStore, L: Lock<RcacheShared<S>>> LinuxRcache<S, L> {
    /// Creates the allocator in front of `store` with empty caches; `lock` wraps the shared state.
    pub fn new(store: S, lock: impl FnOnce(RcacheShared<S>) -> L) -> Self {
        Self {
            shared: lock(RcacheShared {
                store,
                depot: Default::default(),
                debug_check: DebugCheck::default(),
            }),
            store: PhantomData,
        }
    }

    /// Frees one magazine of each class that has more magazines in the depot than `processors`, the
    /// number of CPUs. Linux does this every 100 ms.
    pub fn trim(&self, processors: usize) {
        self.shared.with(|shared| {
            shared.drain_depot(|held| usize::from(held > processors));
        });
    }

    /// Returns the number of magazines in the depot.
    pub fn depot_magazines(&self) -> usize {
        self.shared
            .with(|shared| shared.depot.iter().map(Vec::len).sum())
    }

    /// Returns the number of magazines in the depot of the class that has most of them. Linux trims
    /// the depot of a class above the number of CPUs.
    pub fn fullest_depot(&self) -> usize {
        self.shared
            .with(|shared| shared.depot.iter().map(Vec::len).max().unwrap_or(0))
    }

    /// `__iova_rcache_get` after the loaded magazine had no suitable range.
    #[cold]
    fn refill(&self, class: &mut Class, number: usize, highest: u64) -> Option<u64> {
        if class.loaded.is_empty() {
            if !class.previous.is_empty() {
                mem::swap(&mut class.loaded, &mut class.previous);
            } else if let Some(full) = self
                .shared
                .with(|shared| shared.depot.get_mut(number).and_then(Vec::pop))
            {
                class.loaded = full;
            }
        }
        pop(&mut class.loaded, highest)
    }

    /// `__iova_rcache_insert` after the loaded magazine was full.
    #[cold]
    fn make_room(&self, class: &mut Class, number: usize, lo: u64) -> bool {
        for magazine in [&mut class.loaded, &mut class.previous] {
            // Linux allocates both when it creates the domain; this code allocates them at the
            // first free.
            if magazine.capacity() == 0 && magazine.try_reserve_exact(SLOTS).is_err() {
                return false;
            }
        }
        if class.previous.len() < SLOTS {
            if class.loaded.len() >= SLOTS {
                mem::swap(&mut class.loaded, &mut class.previous);
            }
            return push(&mut class.loaded, lo);
        }
        let mut fresh = Magazine::new();
        if fresh.try_reserve_exact(SLOTS).is_err() {
            return false;
        }
        let handed_over = self.shared.with(|shared| {
            let Some(list) = shared.depot.get_mut(number) else {
                return false;
            };
            let room = list.try_reserve(1).is_ok();
            if room {
                list.push(mem::replace(&mut class.loaded, fresh));
            }
            room
        });
        handed_over && push(&mut class.loaded, lo)
    }

    /// `alloc_iova`, retried once after flushing the caches.
    #[cold]
    fn alloc_from_store(
        &self,
        cpu: &mut RcacheCpu,
        request: &AllocRequest,
    ) -> Result<Allocation, AllocError> {
        request.validate()?;
        let pages = class_of(request.pages).map_or(request.pages, |class| 1 << class);
        let order = order_of(pages).min(51) as u8;
        let rounded = AllocRequest {
            pages,
            align_order: request.align_order.max(order),
            ..*request
        };
        let found = self
            .shared
            .with(|shared| match shared.store.alloc(&rounded) {
                Err(AllocError::Exhausted { .. }) => {
                    let own = shared.drain(cpu);
                    let depot = shared.drain_depot(|held| held);
                    if own || depot {
                        shared.store.alloc(&rounded)
                    } else {
                        Err(request.exhausted())
                    }
                }
                other => other,
            });
        match found {
            Ok(found) => Ok(Allocation {
                range: PfnRange::new(found.range.lo(), request.pages).unwrap_or(found.range),
                steps: found.steps,
            }),
            Err(AllocError::Exhausted { .. }) => Err(request.exhausted()),
            Err(other) => Err(other),
        }
    }
}

impl<S: RangeStore, L: Lock<RcacheShared<S>>> IovaAllocator for LinuxRcache<S, L> {
    type PerCpu = RcacheCpu;
    type FreeProof = Flushed;

    const HAS_LOOKUP: bool = false;

    fn per_cpu(&self) -> RcacheCpu {
        RcacheCpu::default()
    }

    #[inline]
    fn alloc(&self, cpu: &mut RcacheCpu, request: &AllocRequest) -> Result<Allocation, AllocError> {
        let mut cached = None;
        if let Some(number) = class_of(request.pages)
            && usize::from(request.align_order) <= number
            && let Some(class) = cpu.classes.get_mut(number)
            // The whole reservation must lie at or below the limit, as in Linux.
            && let Some(highest) = request.limit.get().checked_sub((1 << number) - 1)
        {
            let lo = if class.loaded.is_empty() {
                self.refill(class, number, highest)
            } else {
                pop(&mut class.loaded, highest)
            };
            cached = lo.and_then(|lo| PfnRange::new(Pfn::new(lo), request.pages));
        }
        let found = match cached {
            Some(range) => Allocation { range, steps: 0 },
            None => self.alloc_from_store(cpu, request)?,
        };
        if DebugCheck::CHECKED {
            self.shared
                .with(|shared| shared.debug_check.insert(found.range));
        }
        Ok(found)
    }

    /// Returns `None`: current Linux does not look ranges up; the unmap call passes the size.
    #[inline]
    fn find(&self, _: &mut RcacheCpu, _: Pfn) -> Option<PfnRange> {
        None
    }

    #[inline]
    fn free(&self, cpu: &mut RcacheCpu, range: Flushed) -> bool {
        let range = range.range();
        if DebugCheck::CHECKED && !self.shared.with(|shared| shared.debug_check.remove(range)) {
            return false;
        }
        if let Some(number) = class_of(range.pages())
            && let Some(class) = cpu.classes.get_mut(number)
        {
            let lo = range.lo().get();
            if push(&mut class.loaded, lo) || self.make_room(class, number, lo) {
                return true;
            }
        }
        match reserved(range) {
            Some(range) => self
                .shared
                .with(|shared| shared.store.free(ReusableRange::cached(range))),
            None => false,
        }
    }

    fn drain(&self, cpu: &mut RcacheCpu) {
        self.shared.with(|shared| {
            shared.drain(cpu);
            // This may be the last handle: ranges left in the depot would then be lost.
            shared.drain_depot(|held| held);
        });
    }

    fn footprint(&self) -> usize {
        self.shared.with(|shared| {
            let slots: usize = shared.depot.iter().flatten().map(Vec::capacity).sum();
            shared
                .store
                .footprint()
                .saturating_add(slots.saturating_mul(size_of::<u64>()))
        })
    }
}
