//! Per-CPU magazines with a depot, for every size: the default allocator.
//!
//! ```text
//! MagazineCpu (no lock, no atomic)          Depot (one lock)           FreeSpace (same lock)
//! rack[pool][order]: loaded, previous <-->  full magazines, leases <-->  free ranges, coalesced
//! ```
//! Magazines and depot are Bonwick and Adams' ("Magazines and Vmem", USENIX 2001, section 3), as in
//! current Linux. It differs from Linux in these points:
//!
//! - Every size up to 2^[`MAX_ORDER`] pages is cached, and the store below the caches is
//!   logarithmic. Large ranges therefore avoid the linear search of EIOVAR section 4.
//! - A handle is `&mut`, so the local path takes no lock and uses no atomic.
//! - Caches are bounded in pages, not in entries: a magazine is *leased* and counts with its full
//!   capacity in pages.
//! - Three pools have separate caches: addresses that only narrow devices need (below 2 GiB), the
//!   rest of the 32-bit space, and everything above. A cache never returns a page above the limit,
//!   and uses scarce addresses only when the others are exhausted.
//!
//! A range of n pages reserves the next power of two, naturally aligned, up to 2^[`MAX_ORDER`]
//! pages, and exactly n pages above.

mod depot;
mod local;

use ringfence_types::{Flushed, Lock, Permissions, Pfn, PfnRange};

pub use depot::Depot;
pub use local::MagazineCpu;

use crate::allocator::{LAST_32BIT_PAGE, order_of};
use crate::debug_check::DebugCheck;
use crate::{AllocError, AllocRequest, Allocation, IovaAllocator};

/// Largest cached order: 2^10 pages, 4 MiB.
pub const MAX_ORDER: u32 = 10;

const ORDERS: usize = MAX_ORDER as usize + 1;
const POOLS: usize = 3;

/// First page that needs 32 address bits. Ranges below it are usable by 24- to 31-bit devices.
const FIRST_32BIT: u64 = 0x8_0000;
/// First page that is not cached: magazine entries have 32 bits.
const FIRST_UNCACHED: u64 = 1 << 32;

/// The pool of a range. Ranges of a pool are interchangeable for all common limits. No block of a
/// cached order crosses a pool boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Pool {
    /// Below 2 GiB: reserved for narrow devices as far as possible.
    Scarce,
    /// From 2 GiB to 4 GiB: used first.
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

/// Limits on the number of pages that the caches may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MagazineLimits {
    /// Maximum number of ranges per magazine, at least 1.
    pub slots: u16,
    /// Maximum number of pages per magazine; a magazine holds at least one range.
    pub magazine_pages: u64,
    /// Maximum number of pages in the magazines of one handle.
    pub cpu_pages: u64,
    /// Maximum number of pages in all magazines, those of handles and those in the depot.
    pub total_pages: u64,
}

impl MagazineLimits {
    /// 128 ranges or 32 MiB per magazine, 256 MiB per handle, and a quarter of the 32-bit space in
    /// total.
    pub const DEFAULT: Self = Self {
        slots: 128,
        magazine_pages: 1 << 13,
        cpu_pages: 1 << 16,
        total_pages: 1 << 18,
    };

    /// Returns the capacity of a magazine of `order`, in ranges.
    #[inline]
    fn slots_of(&self, order: usize) -> usize {
        let by_pages = (self.magazine_pages >> order).max(1);
        by_pages.min(u64::from(self.slots).max(1)) as usize
    }

    /// Returns the capacity of a magazine of `order`, in pages.
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

/// The magazine allocator. [`per_cpu`](IovaAllocator::per_cpu) creates handles.
/// [`drain`](IovaAllocator::drain) a handle before dropping it, or the ranges in its magazines are
/// lost.
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
    /// The pool that a new handle tries first for requests with a limit of at least 32 bits.
    first: Pool,
}

impl<L: Lock<Depot>> Magazines<L> {
    /// Creates the allocator with all pages of `space` free. `lock` wraps the shared state, for
    /// example `Mutex::new`.
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

    /// Returns the number of free pages that are neither mapped nor in a magazine.
    pub fn free_pages(&self) -> u64 {
        self.depot.with(|depot| depot.space.free_pages())
    }

    /// Returns the capacity of all leased magazines in pages, as charged against
    /// [`MagazineLimits::total_pages`].
    pub fn leased_pages(&self) -> u64 {
        self.depot.with(|depot| depot.leased())
    }

    /// Returns the number of separate free ranges.
    pub fn fragments(&self) -> usize {
        self.depot.with(|depot| depot.space.fragments())
    }

    /// Allocates when the local path has no range: tries all other sources, cheapest first. Takes
    /// the fields of a request: a reference would make every caller store the request before it
    /// looks into the magazine.
    #[cold]
    #[inline(never)]
    fn alloc_slow(
        &self,
        cpu: &mut MagazineCpu,
        pages: u64,
        align_order: u8,
        limit: Pfn,
        permissions: Permissions,
    ) -> Result<Allocation, AllocError> {
        let request = &AllocRequest {
            pages,
            align_order,
            limit,
            permissions,
        };
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

    /// Allocates for limits of at least 32 bits, from the least scarce pools first: magazines, then
    /// free space.
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
        // The block may exceed the limit; the requested pages may not.
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
            // Free space is searched from the top down: a page below 2 GiB means that the common
            // pool is exhausted.
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

    /// Allocates for limits below 32 bits: cached ranges below the limit, then free space below it.
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

    /// Allocates from free space. If that fails, empties the magazines of this handle and of the
    /// depot, and retries.
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

    /// Frees a range when the loaded magazine is full or absent.
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
            // The allocator never returned such a range.
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

/// Returns the range to reserve for a request, as the module documentation describes. The
/// reservation may exceed the limit; the allocated range does not.
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
        permissions: request.permissions,
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
        let AllocRequest {
            pages,
            align_order,
            limit,
            permissions,
        } = *request;
        let local = if limit.get() < LAST_32BIT_PAGE {
            None
        } else if pages == 1 && align_order == 0 {
            // Common pages are used first, so this path need not know which pool is next.
            cpu.pop_page().or_else(|| cpu.pop(cpu.first, 0))
        } else {
            let order = order_of(pages);
            if order <= MAX_ORDER && u32::from(align_order) <= order {
                cpu.pop(cpu.first, order as usize)
            } else {
                None
            }
        };
        let found = match local {
            Some(lo) => allocation(lo, request, 0),
            None => self.alloc_slow(cpu, pages, align_order, limit, permissions),
        };
        if DebugCheck::CHECKED
            && let Ok(found) = &found
        {
            self.depot
                .with(|depot| depot.debug_check.insert(found.range));
        }
        found
    }

    /// Returns `None`: the allocator keeps no index of allocated ranges.
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
