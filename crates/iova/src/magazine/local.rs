//! The magazines of one CPU.

use alloc::vec::Vec;
use core::mem;

use super::{ORDERS, POOLS, Pool};

/// A stack of first pages. Its capacity is set by its lease and never grows. Capacity 0 means that
/// there is no magazine.
pub(super) type Magazine = Vec<u32>;

/// Two magazines, so that a handle that alternates between alloc and free at a full or an empty
/// magazine does not access the depot each time. The size of a cache line, so that its address
/// needs only shifts.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Rack {
    pub(super) loaded: Magazine,
    pub(super) previous: Magazine,
}

#[inline]
pub(super) fn is_full(magazine: &Magazine) -> bool {
    magazine.len() >= magazine.capacity()
}

/// Number of racks of one pool: all orders, rounded up to a power of two.
const ROW: usize = ORDERS.next_power_of_two();

/// The handle of one CPU: its magazines.
#[derive(Debug)]
pub struct MagazineCpu {
    racks: [[Rack; ROW]; POOLS],
    /// The pool that requests with a limit of at least 32 bits try first: the common pool, unless
    /// it is exhausted.
    pub(super) first: Pool,
    /// Capacity of all leased magazines, in pages.
    pub(super) leased: u64,
}

impl MagazineCpu {
    pub(super) fn new(first: Pool) -> Self {
        Self {
            racks: Default::default(),
            first,
            leased: 0,
        }
    }

    #[inline]
    pub(super) fn rack(&mut self, pool: Pool, order: usize) -> Option<&mut Rack> {
        self.racks.get_mut(pool as usize)?.get_mut(order)
    }

    /// Pops the most recently freed page of the common pool. Its rack is at a constant offset, so
    /// the CPU forwards the stack's length from one operation to the next without waiting for an
    /// address. This saves a quarter of the cost of an alloc and free pair.
    #[inline]
    pub(super) fn pop_page(&mut self) -> Option<u64> {
        let [_, [page, ..], _] = &mut self.racks;
        page.loaded.pop().map(u64::from)
    }

    /// Pushes a page of the common pool. Returns false if the loaded magazine is full.
    #[inline]
    pub(super) fn push_page(&mut self, lo: u64) -> bool {
        let [_, [page, ..], _] = &mut self.racks;
        let room = !is_full(&page.loaded);
        if room {
            page.loaded.push(lo as u32);
        }
        room
    }

    /// Pops the most recently freed range.
    #[inline]
    pub(super) fn pop(&mut self, pool: Pool, order: usize) -> Option<u64> {
        self.rack(pool, order)?.loaded.pop().map(u64::from)
    }

    /// Pushes a range. Returns false if the loaded magazine is full.
    #[inline]
    pub(super) fn push(&mut self, pool: Pool, order: usize, lo: u64) -> bool {
        match self.rack(pool, order) {
            Some(rack) if !is_full(&rack.loaded) => {
                rack.loaded.push(lo as u32);
                true
            }
            _ => false,
        }
    }

    /// Pops a range from either magazine.
    pub(super) fn pop_either(&mut self, pool: Pool, order: usize) -> Option<u64> {
        let rack = self.rack(pool, order)?;
        if rack.loaded.is_empty() && !rack.previous.is_empty() {
            mem::swap(&mut rack.loaded, &mut rack.previous);
        }
        rack.loaded.pop().map(u64::from)
    }

    /// Pushes a range on the previous magazine, which becomes the loaded one. Returns false if it
    /// is full.
    pub(super) fn push_previous(&mut self, pool: Pool, order: usize, lo: u64) -> bool {
        match self.rack(pool, order) {
            Some(rack) if !is_full(&rack.previous) => {
                mem::swap(&mut rack.loaded, &mut rack.previous);
                rack.loaded.push(lo as u32);
                true
            }
            _ => false,
        }
    }

    /// Takes a range that begins at or below `highest`. Searches each magazine from its most recent
    /// range.
    pub(super) fn pop_at_most(&mut self, pool: Pool, order: usize, highest: u64) -> Option<u64> {
        let rack = self.rack(pool, order)?;
        for magazine in [&mut rack.loaded, &mut rack.previous] {
            if let Some(at) = magazine.iter().rposition(|lo| u64::from(*lo) <= highest) {
                return Some(u64::from(magazine.swap_remove(at)));
            }
        }
        None
    }

    /// Returns all racks with their pool and order.
    pub(super) fn racks(&mut self) -> impl Iterator<Item = (usize, usize, &mut Rack)> {
        self.racks
            .iter_mut()
            .enumerate()
            .flat_map(|(pool, orders)| {
                orders
                    .iter_mut()
                    .enumerate()
                    .map(move |(order, rack)| (pool, order, rack))
            })
    }
}
