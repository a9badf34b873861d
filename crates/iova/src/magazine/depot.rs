//! The state that CPUs share: full magazines, the counts of leases, and the free space.

use alloc::vec::Vec;
use core::mem;

use ringfence_types::{Pfn, PfnRange};

use super::local::{Magazine, MagazineCpu, is_full};
use super::{FIRST_32BIT, MagazineLimits, ORDERS, POOLS, Pool};
use crate::allocator::LAST_32BIT_PAGE;
use crate::debug_check::DebugCheck;
use crate::free_space::FreeSpace;
use crate::{AllocError, AllocRequest, RangeStore, ReusableRange};

/// Number of empty magazines per order that are kept for the next lease. Others are freed.
const EMPTIES_KEPT: usize = 8;

/// The shared state of [`Magazines`](super::Magazines); the embedder wraps it in a lock.
#[derive(Debug)]
pub struct Depot {
    pub(super) space: FreeSpace,
    pub(super) debug_check: DebugCheck,
    /// Magazines that hold at least one range.
    full: [[Vec<Magazine>; ORDERS]; POOLS],
    empties: [Vec<Magazine>; ORDERS],
    /// Capacity of all magazines except `empties`, in pages.
    leased: u64,
    limits: MagazineLimits,
}

/// Frees the ranges of `magazine` into free space. Returns false if it was empty.
fn empty_magazine(space: &mut FreeSpace, magazine: &mut Magazine, order: usize) -> bool {
    let any = !magazine.is_empty();
    for lo in magazine.drain(..) {
        if let Some(range) = PfnRange::new(Pfn::new(u64::from(lo)), 1 << order) {
            space.free(ReusableRange::cached(range));
        }
    }
    any
}

impl Depot {
    pub(super) fn new(space: PfnRange, limits: MagazineLimits) -> Result<Self, AllocError> {
        Ok(Self {
            space: FreeSpace::new(space)?,
            debug_check: DebugCheck::default(),
            full: Default::default(),
            empties: Default::default(),
            leased: 0,
            limits,
        })
    }

    pub(super) fn leased(&self) -> u64 {
        self.leased
    }

    /// Allocates a range from free space.
    pub(super) fn try_alloc(
        &mut self,
        reserve: &AllocRequest,
        limit: u64,
    ) -> Result<(u64, u32), AllocError> {
        let request = AllocRequest {
            limit: Pfn::new(limit),
            ..*reserve
        };
        self.space
            .alloc(&request)
            .map(|found| (found.range.lo().get(), found.steps))
    }

    pub(super) fn alloc(&mut self, reserve: &AllocRequest, limit: u64) -> Option<(u64, u32)> {
        self.try_alloc(reserve, limit).ok()
    }

    /// Frees a range into free space.
    pub(super) fn free(&mut self, range: PfnRange) -> bool {
        self.space.free(ReusableRange::cached(range))
    }

    /// Exchanges the handle's empty loaded magazine for one of the depot, and pops a range from it.
    pub(super) fn refill(
        &mut self,
        cpu: &mut MagazineCpu,
        pool: Pool,
        order: usize,
    ) -> Option<u64> {
        let list = self.full.get_mut(pool as usize)?.get_mut(order)?;
        let cost = self.limits.cost_of(order);
        let rack = cpu.rack(pool, order)?;
        let has_one = rack.loaded.capacity() > 0;
        if has_one || cpu.leased.saturating_add(cost) <= self.limits.cpu_pages {
            let magazine = list.pop()?;
            let rack = cpu.rack(pool, order)?;
            let empty = mem::replace(&mut rack.loaded, magazine);
            let found = rack.loaded.pop().map(u64::from);
            if has_one {
                self.end_lease(empty, order);
            } else {
                cpu.leased = cpu.leased.saturating_add(cost);
            }
            return found;
        }
        // The handle's limit is reached: take one range and leave the magazine in the depot.
        let magazine = list.last_mut()?;
        let found = magazine.pop().map(u64::from);
        if magazine.is_empty()
            && let Some(empty) = list.pop()
        {
            self.end_lease(empty, order);
        }
        found
    }

    /// Makes room in the loaded magazine when neither magazine has any: by a new lease if the
    /// limits permit it, else by emptying the older magazine.
    pub(super) fn make_room(&mut self, cpu: &mut MagazineCpu, pool: Pool, order: usize) {
        let cost = self.limits.cost_of(order);
        let leased = cpu.leased;
        let Some(rack) = cpu.rack(pool, order) else {
            return;
        };
        let both = rack.loaded.capacity() > 0 && rack.previous.capacity() > 0;
        let list = self
            .full
            .get_mut(pool as usize)
            .and_then(|orders| orders.get_mut(order));
        let can_hand_on = both && list.is_some_and(|list| list.try_reserve(1).is_ok());
        let fits_cpu = both || leased.saturating_add(cost) <= self.limits.cpu_pages;
        let fresh = if fits_cpu && (can_hand_on || !both) {
            self.lease(order, cost)
        } else {
            None
        };
        let granted = fresh.is_some();
        match fresh {
            Some(fresh) => {
                let loaded = mem::replace(&mut rack.loaded, fresh);
                if loaded.capacity() > 0 {
                    let oldest = mem::replace(&mut rack.previous, loaded);
                    if oldest.capacity() > 0
                        && let Some(list) = self
                            .full
                            .get_mut(pool as usize)
                            .and_then(|orders| orders.get_mut(order))
                    {
                        list.push(oldest);
                    }
                }
            }
            None => {
                let older = if both {
                    &mut rack.previous
                } else {
                    &mut rack.loaded
                };
                empty_magazine(&mut self.space, older, order);
                if both {
                    mem::swap(&mut rack.loaded, &mut rack.previous);
                }
            }
        }
        debug_assert!(!is_full(&rack.loaded) || rack.loaded.capacity() == 0);
        if granted && !both {
            cpu.leased = leased.saturating_add(cost);
        }
    }

    /// Returns an empty magazine. `None` if the limit on all magazines is reached.
    fn lease(&mut self, order: usize, cost: u64) -> Option<Magazine> {
        let leased = self.leased.checked_add(cost)?;
        if leased > self.limits.total_pages {
            return None;
        }
        let magazine = match self.empties.get_mut(order)?.pop() {
            Some(kept) => kept,
            None => {
                let mut fresh = Magazine::new();
                fresh.try_reserve_exact(self.limits.slots_of(order)).ok()?;
                fresh
            }
        };
        self.leased = leased;
        Some(magazine)
    }

    /// Ends the lease of an empty magazine.
    fn end_lease(&mut self, magazine: Magazine, order: usize) {
        if magazine.capacity() == 0 {
            return;
        }
        self.leased = self.leased.saturating_sub(self.limits.cost_of(order));
        if let Some(empties) = self.empties.get_mut(order)
            && empties.len() < EMPTIES_KEPT
            && empties.try_reserve(1).is_ok()
        {
            empties.push(magazine);
        }
    }

    /// Flushes all magazines of the handle and ends their leases.
    pub(super) fn drain(&mut self, cpu: &mut MagazineCpu) {
        for (_, order, rack) in cpu.racks() {
            for magazine in [&mut rack.loaded, &mut rack.previous] {
                empty_magazine(&mut self.space, magazine, order);
                self.end_lease(mem::take(magazine), order);
            }
        }
        cpu.leased = 0;
    }

    /// Frees cached ranges that may lie at or below `limit` into free space, from the handle and
    /// the depot. Returns true if there were any.
    #[cold]
    pub(super) fn reclaim(&mut self, cpu: &mut MagazineCpu, limit: u64) -> bool {
        let pools = if limit < FIRST_32BIT {
            1
        } else if limit <= LAST_32BIT_PAGE {
            2
        } else {
            POOLS
        };
        let mut any = false;
        for (pool, order, rack) in cpu.racks() {
            if pool < pools {
                any |= empty_magazine(&mut self.space, &mut rack.loaded, order);
                any |= empty_magazine(&mut self.space, &mut rack.previous, order);
            }
        }
        for pool in 0..pools {
            for order in 0..ORDERS {
                while let Some(mut magazine) = self
                    .full
                    .get_mut(pool)
                    .and_then(|orders| orders.get_mut(order))
                    .and_then(Vec::pop)
                {
                    any |= empty_magazine(&mut self.space, &mut magazine, order);
                    self.end_lease(magazine, order);
                }
            }
        }
        any
    }

    pub(super) fn footprint(&self) -> usize {
        let in_depot = self.full.iter().flatten().chain(&self.empties).flatten();
        let slots: usize = in_depot.map(Vec::capacity).sum();
        self.space
            .footprint()
            .saturating_add(slots.saturating_mul(size_of::<u32>()))
            .saturating_add(size_of::<Self>())
    }
}
