//! One processor's magazines.

use alloc::vec::Vec;
use core::mem;

use super::{ORDERS, POOLS, Pool};

/// A stack of first pages. Its capacity is set when it is leased and never grows; capacity 0 is no
/// magazine.
pub(super) type Magazine = Vec<u32>;

/// Two magazines, so that a handle that alternates around a full or an empty one does not go to the
/// depot each time. As large as a cache line, so that its place is found by shifts.
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

/// Racks in a row of one pool: all orders, rounded up to a power of two.
const ROW: usize = ORDERS.next_power_of_two();

/// Handle of one processor: its magazines.
#[derive(Debug)]
pub struct MagazineCpu {
    racks: [[Rack; ROW]; POOLS],
    /// Where requests that reach the whole 32-bit space look first: the common pool, unless it has
    /// run dry.
    pub(super) first: Pool,
    /// Pages of all magazines held, as if full.
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

    /// The most recently freed page of the common pool. Its rack stands at a constant offset, which
    /// lets the processor pass the length of the stack from one operation to the next without
    /// waiting for an address: a quarter of the cost of a pair.
    #[inline]
    pub(super) fn pop_page(&mut self) -> Option<u64> {
        let [_, [page, ..], _] = &mut self.racks;
        page.loaded.pop().map(u64::from)
    }

    /// Keeps a page of the common pool if the loaded magazine has room.
    #[inline]
    pub(super) fn push_page(&mut self, lo: u64) -> bool {
        let [_, [page, ..], _] = &mut self.racks;
        let room = !is_full(&page.loaded);
        if room {
            page.loaded.push(lo as u32);
        }
        room
    }

    /// The most recently freed range.
    #[inline]
    pub(super) fn pop(&mut self, pool: Pool, order: usize) -> Option<u64> {
        self.rack(pool, order)?.loaded.pop().map(u64::from)
    }

    /// Keeps a range if the loaded magazine has room.
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

    /// A range from either magazine.
    pub(super) fn pop_either(&mut self, pool: Pool, order: usize) -> Option<u64> {
        let rack = self.rack(pool, order)?;
        if rack.loaded.is_empty() && !rack.previous.is_empty() {
            mem::swap(&mut rack.loaded, &mut rack.previous);
        }
        rack.loaded.pop().map(u64::from)
    }

    /// Keeps a range in the previous magazine if that has room.
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

    /// A range that begins at or below `highest`, the most recent of each magazine first.
    pub(super) fn pop_at_most(&mut self, pool: Pool, order: usize, highest: u64) -> Option<u64> {
        let rack = self.rack(pool, order)?;
        for magazine in [&mut rack.loaded, &mut rack.previous] {
            if let Some(at) = magazine.iter().rposition(|lo| u64::from(*lo) <= highest) {
                return Some(u64::from(magazine.swap_remove(at)));
            }
        }
        None
    }

    /// All racks with their pool and order.
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
