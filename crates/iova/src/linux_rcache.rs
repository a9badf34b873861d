//! The allocator of today's Linux: per-CPU magazines and a depot for small ranges, in front of a
//! tree.
//!
//! Behaviour of Linux 6.12 (drivers/iommu/iova.c, functions named below), for the modes
//! linux-strict and linux-lazy:
//! - six size classes of 1 to 32 pages; a smaller request is rounded up to its class, a larger one
//!   goes to the tree (`alloc_iova_fast`);
//! - per CPU and class a loaded and a previous magazine of 127 ranges, exchanged with the depot as
//!   a whole (`__iova_rcache_insert`, `__iova_rcache_get`);
//! - a cached range above the limit is passed over, and the magazine searched downwards for one
//!   below (`iova_magazine_pop`);
//! - the depot is trimmed by a timer, a magazine of each class every 100 ms while it has more than
//!   there are processors (`iova_depot_work_func`): the embedder calls [`trim`](LinuxRcache::trim);
//! - tree requests are aligned to their size, rounded up; when the tree is exhausted the caches are
//!   emptied and it is asked once more. Linux empties those of all processors; a handle here cannot
//!   reach another, so that their owners must [`drain`](IovaAllocator::drain).

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

/// First pages of free ranges of one class. Empty magazines have no memory yet, or [`SLOTS`] slots.
type Magazine = Vec<u64>;

/// One processor's magazines of one class.
#[derive(Debug, Default)]
struct Class {
    loaded: Magazine,
    previous: Magazine,
}

/// Handle of one processor. [`drain`](IovaAllocator::drain) it before dropping it, or its ranges
/// are lost.
#[derive(Debug, Default)]
pub struct RcacheCpu {
    classes: [Class; CLASSES],
}

/// What all processors share: the depot and the store behind it.
#[derive(Debug)]
pub struct RcacheShared<S> {
    store: S,
    depot: [Vec<Magazine>; CLASSES],
    debug_check: DebugCheck,
}

/// The allocator; in Linux, `S` is a [`CachedTree`](crate::CachedTree).
#[derive(Debug)]
pub struct LinuxRcache<S, L> {
    shared: L,
    store: PhantomData<fn() -> S>,
}

/// The class that serves `pages`, if one does.
#[inline]
fn class_of(pages: u64) -> Option<usize> {
    let order = order_of(pages) as usize;
    (order < CLASSES).then_some(order)
}

/// The range reserved for `range`.
#[inline]
fn reserved(range: PfnRange) -> Option<PfnRange> {
    match class_of(range.pages()) {
        Some(class) => PfnRange::new(range.lo(), 1 << class),
        None => Some(range),
    }
}

/// The most recent range at or below `highest` ("iova_magazine_pop").
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
    /// Empties `magazine` into the store.
    fn flush_magazine(behind: &mut S, magazine: &mut Magazine, class: usize) -> bool {
        let any = !magazine.is_empty();
        for lo in magazine.drain(..) {
            if let Some(range) = PfnRange::new(Pfn::new(lo), 1 << class) {
                behind.free(ReusableRange::cached(range));
            }
        }
        any
    }

    fn drain(&mut self, cpu: &mut RcacheCpu) -> bool {
        let mut any = false;
        for (class, racks) in cpu.classes.iter_mut().enumerate() {
            any |= Self::flush_magazine(&mut self.store, &mut racks.loaded, class);
            any |= Self::flush_magazine(&mut self.store, &mut racks.previous, class);
        }
        any
    }

    /// Empties `magazines` of the depot, of each class the most recent first.
    fn drain_depot(&mut self, magazines: impl Fn(usize) -> usize) -> bool {
        let mut any = false;
        for (class, list) in self.depot.iter_mut().enumerate() {
            for _ in 0..magazines(list.len()) {
                if let Some(mut magazine) = list.pop() {
                    any |= Self::flush_magazine(&mut self.store, &mut magazine, class);
                }
            }
        }
        any
    }
}

impl<S: RangeStore, L: Lock<RcacheShared<S>>> LinuxRcache<S, L> {
    /// Empty caches in front of `behind`, behind the lock that `lock` makes.
    pub fn new(behind: S, lock: impl FnOnce(RcacheShared<S>) -> L) -> Self {
        Self {
            shared: lock(RcacheShared {
                store: behind,
                depot: Default::default(),
                debug_check: DebugCheck::default(),
            }),
            store: PhantomData,
        }
    }

    /// What Linux does every 100 ms: of each class with more magazines in the depot than
    /// `processors`, one is freed.
    pub fn trim(&self, processors: usize) {
        self.shared.with(|shared| {
            shared.drain_depot(|held| usize::from(held > processors));
        });
    }

    /// Magazines in the depot.
    pub fn depot_magazines(&self) -> usize {
        self.shared
            .with(|shared| shared.depot.iter().map(Vec::len).sum())
    }

    /// `__iova_rcache_get`, once the loaded magazine has nothing.
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

    /// `__iova_rcache_insert`, once the loaded magazine is full.
    #[cold]
    fn make_room(&self, class: &mut Class, number: usize, lo: u64) -> bool {
        for magazine in [&mut class.loaded, &mut class.previous] {
            // Linux allocates both when the domain is made; here the first free does.
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

    /// `alloc_iova`, and a second time with the caches emptied.
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
            limit: request.limit,
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
            // The reservation as a whole lies at or below the limit, as in Linux.
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

    /// Linux no longer looks ranges up: the size comes from the unmap call.
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
            // A drained handle may be the last one: what the depot holds would never come back.
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
