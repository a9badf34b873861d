//! EIOVAR (AL04, AL05): freelists of power-of-two ranges in front of another allocator.
//!
//! Source: EIOVAR section 6. A freed range of 2^j pages goes to the head of list `f[j]`, an allocation takes the head. `k` bounds the
//! freed ranges that the whole array may hold; beyond it, a range is freed into the allocator behind.
//!
//! Three points on which the document is silent or wrong: the largest list of M = 28 is f\[27\], 2^27 pages or 2^39 bytes,
//! not 2^40; the head of a list that lies above the limit or is not aligned as asked for stays where it is; and when the
//! allocator behind is exhausted the lists are emptied into it before the request is refused.

use alloc::vec::Vec;

use ringfence_types::{Pfn, PfnRange};

use crate::live::Live;
use crate::{AllocError, Allocation, Locked, RangeStore, Request, Reusable};

/// Number of lists.
const M: usize = 28;

/// EIOVAR in front of `S`, behind the lock that Linux has around both.
pub type LockedEiovar<S, L> = Locked<Eiovar<S>, L>;

/// `k`: how many freed ranges the lists may hold together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capacity {
    /// At most so many.
    AtMost(usize),
    /// No bound (EIOVAR with k = infinity).
    Unbounded,
}

/// Freelists in front of a store.
///
/// Requests are rounded up to a power of two of pages, as the layer above does in the document; the range handed out has exactly the
/// pages asked for, [`find`](RangeStore::find) shows the reservation.
#[derive(Debug)]
pub struct Eiovar<S> {
    behind: S,
    /// First pages, the most recently freed last.
    lists: [Vec<u64>; M],
    held: usize,
    capacity: Capacity,
    live: Live,
}

impl<S: RangeStore> Eiovar<S> {
    /// Empty lists in front of `behind`.
    pub fn new(behind: S, capacity: Capacity) -> Self {
        Self {
            behind,
            lists: [const { Vec::new() }; M],
            held: 0,
            capacity,
            live: Live::default(),
        }
    }

    /// Freed ranges in the lists.
    pub fn held(&self) -> usize {
        self.held
    }

    /// The head of list `order`, if it suits `request`.
    #[inline]
    fn pop(&mut self, order: u32, request: &Request) -> Option<PfnRange> {
        let list = self.lists.get_mut(order as usize)?;
        let head = *list.last()?;
        let range = PfnRange::new(Pfn::new(head), request.pages)?;
        if range.hi() > request.limit
            || request.lowest_in(head, head.saturating_add(request.pages)) != Some(head)
        {
            return None;
        }
        list.pop();
        self.held = self.held.saturating_sub(1);
        Some(range)
    }

    /// Empties the lists into the allocator behind.
    #[cold]
    fn drain(&mut self) {
        for (order, list) in self.lists.iter_mut().enumerate() {
            for lo in list.drain(..) {
                if let Some(range) = PfnRange::new(Pfn::new(lo), 1 << order) {
                    self.behind.free(Reusable::cached(range));
                }
            }
        }
        self.held = 0;
    }

    fn has_room(&self) -> bool {
        match self.capacity {
            Capacity::AtMost(k) => self.held < k,
            Capacity::Unbounded => true,
        }
    }
}

impl<S: RangeStore> RangeStore for Eiovar<S> {
    const FINDS: bool = S::FINDS;

    fn alloc(&mut self, request: &Request) -> Result<Allocation, AllocError> {
        request.validate()?;
        let order = request.order();
        if let Some(range) = self.pop(order, request) {
            self.live.insert(range);
            return Ok(Allocation { range, steps: 0 });
        }
        let rounded = Request {
            pages: 1_u64
                .checked_shl(order)
                .ok_or_else(|| request.exhausted())?,
            ..*request
        };
        let mut found = self.behind.alloc(&rounded);
        if self.held > 0 && matches!(found, Err(AllocError::Exhausted { .. })) {
            self.drain();
            found = self.behind.alloc(&rounded);
        }
        let found = match found {
            Ok(found) => found,
            Err(AllocError::Exhausted { .. }) => return Err(request.exhausted()),
            Err(other) => return Err(other),
        };
        let range = PfnRange::new(found.range.lo(), request.pages).unwrap_or(found.range);
        self.live.insert(range);
        Ok(Allocation {
            range,
            steps: found.steps,
        })
    }

    fn free(&mut self, range: Reusable) -> bool {
        let range = range.range();
        if !self.live.remove(range) {
            return false;
        }
        let order = crate::role::order_of(range.pages());
        if self.has_room()
            && let Some(list) = self.lists.get_mut(order as usize)
            && list.try_reserve(1).is_ok()
        {
            list.push(range.lo().get());
            self.held = self.held.saturating_add(1);
            return true;
        }
        match 1_u64
            .checked_shl(order)
            .and_then(|pages| PfnRange::new(range.lo(), pages))
        {
            Some(reserved) => self.behind.free(Reusable::cached(reserved)),
            None => false,
        }
    }

    fn find(&self, page: Pfn) -> Option<PfnRange> {
        self.behind.find(page)
    }

    fn footprint(&self) -> usize {
        let lists: usize = self.lists.iter().map(Vec::capacity).sum();
        self.behind
            .footprint()
            .saturating_add(lists.saturating_mul(size_of::<u64>()))
    }
}
