//! EIOVAR: freelists of power-of-two ranges in front of another allocator.
//!
//! Source: EIOVAR section 6. Free pushes a range of 2^j pages on list `f[j]`; alloc pops the head.
//! `k` bounds the freed ranges that all lists may hold. Above the bound, free passes a range to the
//! underlying allocator.
//!
//! The EIOVAR paper is silent or wrong on three points:
//!
//! - The largest list of M = 28 is f\[27\], 2^27 pages or 2^39 bytes, not 2^40.
//! - If the head of a list lies above the limit or is not aligned as requested, it stays in the
//!   list.
//! - If the underlying allocator is exhausted, the lists are freed into it and the request is
//!   retried.

use alloc::vec::Vec;

use ringfence_types::{Pfn, PfnRange};

use crate::debug_check::DebugCheck;
use crate::{AllocError, AllocRequest, Allocation, Locked, RangeStore, ReusableRange};

/// Number of lists.
const M: usize = 28;

/// EIOVAR in front of `S`, behind the lock that Linux holds around both.
pub type LockedEiovar<S, L> = Locked<Eiovar<S>, L>;

/// `k`: the number of freed ranges that all lists together may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capacity {
    /// At most this many ranges.
    AtMost(usize),
    /// No bound (EIOVAR with k = infinity).
    Unbounded,
}

/// Freelists in front of a store.
///
/// Requests are rounded up to a power of two of pages, as the layer above does in the EIOVAR paper.
/// The allocated range has exactly the requested pages; [`find`](RangeStore::find) returns the
/// reservation.
#[derive(Debug)]
pub struct Eiovar<S> {
    store: S,
    /// First pages of the freed ranges, the most recently freed last.
    lists: [Vec<u64>; M],
    cached: usize,
    capacity: Capacity,
    debug_check: DebugCheck,
}

impl<S: RangeStore> Eiovar<S> {
    /// Creates empty lists in front of `store`.
    pub fn new(store: S, capacity: Capacity) -> Self {
        Self {
            store,
            lists: [const { Vec::new() }; M],
            cached: 0,
            capacity,
            debug_check: DebugCheck::default(),
        }
    }

    /// Returns the number of freed ranges in the lists.
    pub fn cached_ranges(&self) -> usize {
        self.cached
    }

    /// Pops the head of list `order`. `None` if the list is empty or the head does not fit
    /// `request`.
    #[inline]
    fn pop(&mut self, order: u32, request: &AllocRequest) -> Option<PfnRange> {
        let list = self.lists.get_mut(order as usize)?;
        let head = *list.last()?;
        let range = PfnRange::new(Pfn::new(head), request.pages)?;
        if range.hi() > request.limit
            || request.lowest_in(head, head.saturating_add(request.pages)) != Some(head)
        {
            return None;
        }
        list.pop();
        self.cached = self.cached.saturating_sub(1);
        Some(range)
    }

    /// Frees all ranges of the lists into the underlying allocator.
    #[cold]
    fn drain(&mut self) {
        for (order, list) in self.lists.iter_mut().enumerate() {
            for lo in list.drain(..) {
                if let Some(range) = PfnRange::new(Pfn::new(lo), 1 << order) {
                    self.store.free(ReusableRange::cached(range));
                }
            }
        }
        self.cached = 0;
    }

    fn has_room(&self) -> bool {
        match self.capacity {
            Capacity::AtMost(k) => self.cached < k,
            Capacity::Unbounded => true,
        }
    }
}

impl<S: RangeStore> RangeStore for Eiovar<S> {
    const HAS_LOOKUP: bool = S::HAS_LOOKUP;

    fn alloc(&mut self, request: &AllocRequest) -> Result<Allocation, AllocError> {
        request.validate()?;
        let order = request.order();
        if let Some(range) = self.pop(order, request) {
            self.debug_check.insert(range);
            return Ok(Allocation { range, steps: 0 });
        }
        let rounded = AllocRequest {
            pages: 1_u64
                .checked_shl(order)
                .ok_or_else(|| request.exhausted())?,
            ..*request
        };
        let mut found = self.store.alloc(&rounded);
        if self.cached > 0 && matches!(found, Err(AllocError::Exhausted { .. })) {
            self.drain();
            found = self.store.alloc(&rounded);
        }
        let found = match found {
            Ok(found) => found,
            Err(AllocError::Exhausted { .. }) => return Err(request.exhausted()),
            Err(other) => return Err(other),
        };
        let range = PfnRange::new(found.range.lo(), request.pages).unwrap_or(found.range);
        self.debug_check.insert(range);
        Ok(Allocation {
            range,
            steps: found.steps,
        })
    }

    fn free(&mut self, range: ReusableRange) -> bool {
        let range = range.range();
        if !self.debug_check.remove(range) {
            return false;
        }
        let order = crate::allocator::order_of(range.pages());
        if self.has_room()
            && let Some(list) = self.lists.get_mut(order as usize)
            && list.try_reserve(1).is_ok()
        {
            list.push(range.lo().get());
            self.cached = self.cached.saturating_add(1);
            return true;
        }
        match 1_u64
            .checked_shl(order)
            .and_then(|pages| PfnRange::new(range.lo(), pages))
        {
            Some(reserved) => self.store.free(ReusableRange::cached(reserved)),
            None => false,
        }
    }

    fn find(&self, page: Pfn) -> Option<PfnRange> {
        self.store.find(page)
    }

    fn footprint(&self) -> usize {
        let lists: usize = self.lists.iter().map(Vec::capacity).sum();
        self.store
            .footprint()
            .saturating_add(lists.saturating_mul(size_of::<u64>()))
    }
}
