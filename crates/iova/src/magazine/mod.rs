//! Per-CPU magazines with a depot, for every size: the product's allocator.
//!
//! ```text
//!   MagazineCpu (no lock, no atomic)            Depot (one lock)              FreeSpace (same lock)
//!   rack[pool][order]: loaded, previous  <-->  full magazines, leases  <-->  free ranges, coalesced
//! ```
//! Magazines and depot are Bonwick and Adams' ("Magazines and Vmem", USENIX 2001, section 3), as in
//! today's Linux. What differs from Linux:
//! - every size is cached up to 2^[`MAX_ORDER`] pages, and what lies behind the caches is
//!   logarithmic, so that large ranges do not meet the linear search of EIOVAR section 4 again;
//! - a handle is `&mut`, so that the local path takes no lock and no atomic;
//! - caches are bounded in pages, not in entries: a magazine is *leased* and counts with all pages
//!   it could hold;
//! - addresses that only narrow devices need (below 2 GiB), the rest of the 32-bit space, and what
//!   lies above are cached apart: a cache never hands out a page above the limit, and does not
//!   spend scarce addresses while others are left.
//!
//! A range of n pages reserves the next power of two, naturally aligned, up to 2^[`MAX_ORDER`]
//! pages, and exactly n pages above.

mod depot;
mod local;

use ringfence_types::{Flushed, Lock, Pfn, PfnRange};

pub use depot::Depot;
pub use local::MagazineCpu;

use crate::allocator::{LAST_32BIT_PAGE, order_of};
use crate::debug_check::DebugCheck;
use crate::{AllocError, AllocRequest, Allocation, IovaAllocator};

/// Largest cached order: 2^10 pages, 4 MiB.
pub const MAX_ORDER: u32 = 10;

const ORDERS: usize = MAX_ORDER as usize + 1;
const POOLS: usize = 3;

/// First page that needs 32 address bits: below it live the ranges that 24- to 31-bit devices can
/// use.
const FIRST_32BIT: u64 = 0x8_0000;
/// Pages from here on are not cached: entries have 32 bits.
const FIRST_UNCACHED: u64 = 1 << 32;

/// Ranges that are interchangeable for all but the oddest limits. No block of a cached order
/// straddles a boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Pool {
    /// Below 2 GiB: what narrow devices depend on.
    Scarce,
    /// The upper half of the 32-bit space: what everyone uses first.
    Common,
    /// Above 4 GiB.
    High,
}

impl Pool {
    #[inline]
    const fn of(lo: u64) -> Self {
        if lo < FIRST_32BIT {
            Self::Scarce
        } else if lo <= LAST_32BIT_PAGE {
            Self::Common
        } else {
            Self::High
        }
    }
}

/// How much the caches may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MagazineLimits {
    /// Ranges in one magazine of small ranges, at least 1.
    pub slots: u16,
    /// Pages in one magazine of large ranges; it holds at least one range.
    pub magazine_pages: u64,
    /// Pages that the magazines of one handle may hold.
    pub cpu_pages: u64,
    /// Pages that all magazines together may hold, those of handles and those in the depot.
    pub total_pages: u64,
}

impl MagazineLimits {
    /// 128 ranges or 32 MiB a magazine, 256 MiB a handle, and a quarter of the 32-bit space in all.
    pub const DEFAULT: Self = Self {
        slots: 128,
        magazine_pages: 1 << 13,
        cpu_pages: 1 << 16,
        total_pages: 1 << 18,
    };

    /// Ranges in a magazine of `order`.
    #[inline]
    fn slots_of(&self, order: usize) -> usize {
        let by_pages = (self.magazine_pages >> order).max(1);
        by_pages.min(u64::from(self.slots).max(1)) as usize
    }

    /// Pages a full magazine of `order` holds.
    #[inline]
    fn cost_of(&self, order: usize) -> u64 {
        (self.slots_of(order) as u64) << order
    }
}

impl Default for MagazineLimits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// The allocator. Handles come from [`per_cpu`](IovaAllocator::per_cpu);
/// [`drain`](IovaAllocator::drain) one before dropping it, or the ranges in its magazines are lost.
///
/// ```
/// use std::sync::Mutex;
/// use ringfence_iova::{IovaAllocator, MagazineLimits, Magazines, AllocRequest};
/// use ringfence_types::{Pfn, PfnRange};
///
/// let space = PfnRange::inclusive(Pfn::new(1), Pfn::MAX).unwrap();
/// let allocator = Magazines::new(space, MagazineLimits::DEFAULT, Mutex::new)?;
/// let mut cpu = allocator.per_cpu();
/// let found = allocator.alloc(&mut cpu, &AllocRequest::new(33, Pfn::new(0xf_ffff)))?;
/// assert_eq!(found.range.pages(), 33);
/// # Ok::<(), ringfence_iova::AllocError>(())
/// ```
#[derive(Debug)]
pub struct Magazines<L> {
    depot: L,
    /// Pool that a new handle tries first for requests that reach the whole 32-bit space.
    first: Pool,
}

impl<L: Lock<Depot>> Magazines<L> {
    /// All pages of `space` free, behind the lock that `lock` makes, such as `Mutex::new`.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`].
    pub fn new(
        space: PfnRange,
        limits: MagazineLimits,
        lock: impl FnOnce(Depot) -> L,
    ) -> Result<Self, AllocError> {
        Ok(Self {
            depot: lock(Depot::new(space, limits)?),
            first: if space.hi().get() < FIRST_32BIT {
                Pool::Scarce
            } else {
                Pool::Common
            },
        })
    }

    /// Pages that no one holds: neither a mapping nor a magazine.
    pub fn free_pages(&self) -> u64 {
        self.depot.with(|depot| depot.space.free_pages())
    }

    /// Pages that all magazines could hold at most, as charged against
    /// [`MagazineLimits::total_pages`].
    pub fn leased_pages(&self) -> u64 {
        self.depot.with(|depot| depot.leased())
    }

    /// Number of separate free ranges.
    pub fn fragments(&self) -> usize {
        self.depot.with(|depot| depot.space.fragments())
    }

    /// The local path has nothing: everything else, cheapest first.
    #[cold]
    #[inline(never)]
    fn alloc_slow(
        &self,
        cpu: &mut MagazineCpu,
        request: &AllocRequest,
    ) -> Result<Allocation, AllocError> {
        request.validate()?;
        let order = request.order();
        if order > MAX_ORDER || u32::from(request.align_order) > order {
            return self.alloc_uncached(cpu, request);
        }
        let order = order as usize;
        let reserve = reservation(request);
        let cached = if request.limit.get() >= LAST_32BIT_PAGE {
            self.alloc_wide(cpu, order, request, &reserve)
        } else {
            self.alloc_narrow(cpu, order, request, &reserve)
        };
        match cached {
            Some((lo, steps)) => allocation(lo, request, steps),
            None => self.alloc_uncached(cpu, request),
        }
    }

    /// For devices that reach the whole 32-bit space: magazines and free space from the pools that
    /// nobody misses.
    fn alloc_wide(
        &self,
        cpu: &mut MagazineCpu,
        order: usize,
        request: &AllocRequest,
        reserve: &AllocRequest,
    ) -> Option<(u64, u32)> {
        let (pages, limit) = (request.pages, request.limit.get());
        let above_4g = limit > LAST_32BIT_PAGE;
        if let Some(lo) = cpu.pop_either(Pool::Common, order) {
            cpu.first = Pool::Common;
            return Some((lo, 0));
        }
        if cpu.first == Pool::Scarce
            && let Some(lo) = cpu.pop_either(Pool::Scarce, order)
        {
            return Some((lo, 0));
        }
        // The block may pass the limit, the pages asked for may not.
        let highest = limit.checked_sub(pages - 1)?;
        if above_4g && let Some(lo) = cpu.pop_at_most(Pool::High, order, highest) {
            return Some((lo, 0));
        }
        self.depot.with(|depot| {
            if let Some(lo) = depot.refill(cpu, Pool::Common, order) {
                cpu.first = Pool::Common;
                return Some((lo, 0));
            }
            if cpu.first == Pool::Scarce
                && let Some(lo) = depot.refill(cpu, Pool::Scarce, order)
            {
                return Some((lo, 0));
            }
            // From the top down: a page below 2 GiB means that the common pool has run dry.
            if let Some((lo, steps)) = depot.alloc(reserve, LAST_32BIT_PAGE) {
                cpu.first = if lo < FIRST_32BIT {
                    Pool::Scarce
                } else {
                    Pool::Common
                };
                return Some((lo, steps));
            }
            cpu.first = Pool::Scarce;
            if let Some(lo) = cpu.pop_either(Pool::Scarce, order) {
                return Some((lo, 0));
            }
            if let Some(lo) = depot.refill(cpu, Pool::Scarce, order) {
                return Some((lo, 0));
            }
            if !above_4g {
                return None;
            }
            if limit >= FIRST_UNCACHED - 1
                && let Some(lo) = depot.refill(cpu, Pool::High, order)
            {
                return Some((lo, 0));
            }
            depot
                .alloc(reserve, reserve.limit.get().min(FIRST_UNCACHED - 1))
                .or_else(|| depot.alloc(reserve, reserve.limit.get()))
        })
    }

    /// For devices that do not: ranges that happen to be cached below the limit, then free space
    /// below it.
    fn alloc_narrow(
        &self,
        cpu: &mut MagazineCpu,
        order: usize,
        request: &AllocRequest,
        reserve: &AllocRequest,
    ) -> Option<(u64, u32)> {
        let highest = request.limit.get().checked_sub(request.pages - 1)?;
        if let Some(lo) = cpu.pop_at_most(Pool::Scarce, order, highest) {
            return Some((lo, 0));
        }
        if highest >= FIRST_32BIT
            && let Some(lo) = cpu.pop_at_most(Pool::Common, order, highest)
        {
            return Some((lo, 0));
        }
        self.depot.with(|depot| {
            if request.limit.get() >= FIRST_32BIT - 1
                && let Some(lo) = depot.refill(cpu, Pool::Scarce, order)
            {
                return Some((lo, 0));
            }
            depot.alloc(reserve, reserve.limit.get())
        })
    }

    /// From free space only; if there is none, from all that this handle and the depot hold back.
    fn alloc_uncached(
        &self,
        cpu: &mut MagazineCpu,
        request: &AllocRequest,
    ) -> Result<Allocation, AllocError> {
        let reserve = reservation(request);
        let limit = reserve.limit.get();
        let found = self.depot.with(|depot| {
            match depot.try_alloc(&reserve, limit.min(LAST_32BIT_PAGE)) {
                Err(AllocError::Exhausted { .. }) if limit > LAST_32BIT_PAGE => {
                    depot.try_alloc(&reserve, limit)
                }
                other => other,
            }
            .or_else(|error| {
                if !matches!(error, AllocError::Exhausted { .. }) || !depot.reclaim(cpu, limit) {
                    return Err(error);
                }
                depot.try_alloc(&reserve, limit)
            })
        });
        match found {
            Ok((lo, steps)) => allocation(lo, request, steps),
            Err(AllocError::Exhausted { .. }) => Err(request.exhausted()),
            Err(other) => Err(other),
        }
    }

    /// The loaded magazine is full, or there is none.
    #[cold]
    #[inline(never)]
    fn free_slow(&self, cpu: &mut MagazineCpu, range: PfnRange) -> bool {
        let lo = range.lo().get();
        let order = order_of(range.pages());
        if order > MAX_ORDER {
            return self.depot.with(|depot| depot.free(range));
        }
        let Some(reserved) = PfnRange::new(range.lo(), 1 << order) else {
            return false;
        };
        if lo & (reserved.pages() - 1) != 0 {
            // Never handed out like this.
            return false;
        }
        if lo >= FIRST_UNCACHED {
            return self.depot.with(|depot| depot.free(reserved));
        }
        let (pool, order) = (Pool::of(lo), order as usize);
        if cpu.push_previous(pool, order, lo) {
            return true;
        }
        self.depot.with(|depot| {
            depot.make_room(cpu, pool, order);
            cpu.push(pool, order, lo) || depot.free(reserved)
        })
    }
}

/// What is reserved for a request: see the head of this file. The reservation may pass the limit,
/// the range does not.
#[inline]
fn reservation(request: &AllocRequest) -> AllocRequest {
    let order = request.order();
    if order > MAX_ORDER {
        return *request;
    }
    let pages = 1_u64 << order;
    let slack = pages.saturating_sub(request.pages);
    AllocRequest {
        pages,
        align_order: request.align_order.max(order as u8),
        limit: Pfn::new(
            request
                .limit
                .get()
                .saturating_add(slack)
                .min(Pfn::MAX.get()),
        ),
    }
}

#[inline]
fn allocation(lo: u64, request: &AllocRequest, steps: u32) -> Result<Allocation, AllocError> {
    match PfnRange::new(Pfn::new(lo), request.pages) {
        Some(range) => Ok(Allocation { range, steps }),
        None => Err(request.exhausted()),
    }
}

impl<L: Lock<Depot>> IovaAllocator for Magazines<L> {
    type PerCpu = MagazineCpu;
    type FreeProof = Flushed;

    const HAS_LOOKUP: bool = false;

    fn per_cpu(&self) -> MagazineCpu {
        MagazineCpu::new(self.first)
    }

    #[inline]
    fn alloc(
        &self,
        cpu: &mut MagazineCpu,
        request: &AllocRequest,
    ) -> Result<Allocation, AllocError> {
        let local = if request.limit.get() < LAST_32BIT_PAGE {
            None
        } else if request.pages == 1 && request.align_order == 0 && cpu.first == Pool::Common {
            cpu.pop_page()
        } else {
            let order = order_of(request.pages);
            if order <= MAX_ORDER && u32::from(request.align_order) <= order {
                cpu.pop(cpu.first, order as usize)
            } else {
                None
            }
        };
        let found = match local {
            Some(lo) => allocation(lo, request, 0),
            None => self.alloc_slow(cpu, request),
        };
        if DebugCheck::CHECKED
            && let Ok(found) = &found
        {
            self.depot
                .with(|depot| depot.debug_check.insert(found.range));
        }
        found
    }

    /// Free ranges have no index of what is allocated.
    #[inline]
    fn find(&self, _: &mut MagazineCpu, _: Pfn) -> Option<PfnRange> {
        None
    }

    #[inline]
    fn free(&self, cpu: &mut MagazineCpu, range: Flushed) -> bool {
        let range = range.range();
        if DebugCheck::CHECKED && !self.depot.with(|depot| depot.debug_check.remove(range)) {
            return false;
        }
        let lo = range.lo().get();
        let kept = if range.pages() == 1 && Pool::of(lo) == Pool::Common {
            cpu.push_page(lo)
        } else {
            let order = order_of(range.pages());
            order <= MAX_ORDER
                && lo < FIRST_UNCACHED
                && lo & ((1 << order) - 1) == 0
                && cpu.push(Pool::of(lo), order as usize, lo)
        };
        kept || self.free_slow(cpu, range)
    }

    fn drain(&self, cpu: &mut MagazineCpu) {
        self.depot.with(|depot| depot.drain(cpu));
    }

    fn footprint(&self) -> usize {
        self.depot.with(|depot| depot.footprint())
    }
}
