//! Pages of drivers' pools that stay mapped after the release of a buffer (page_pool, registered
//! buffers).
//!
//! A trace does not show who uses a page after its buffer is released. A replay of such a mode
//! assumes that the pool keeps the page: it is in no other hands until another device, or this
//! device in another direction, maps it. From then on the page belongs to that pool.

use std::collections::HashMap;

use ringfence_types::{Access, Direction, PhysAddr, PhysRange};

/// The pool that owns a page: its device and its direction.
type Pool = (usize, Direction);

/// The pages of all pools, by page number.
#[derive(Debug, Default)]
pub(super) struct RecycledPages(HashMap<u64, Pool>);

fn pages(piece: &PhysRange) -> impl Iterator<Item = u64> {
    piece.start().get() >> 12..=piece.last().get() >> 12
}

impl RecycledPages {
    /// Adds the pages of a released buffer, whose mapping stays, to the pool.
    pub(super) fn keep(&mut self, pool: Pool, piece: &PhysRange) {
        for page in pages(piece) {
            self.0.insert(page, pool);
        }
    }

    /// Removes the pages of a new buffer from all pools but its own.
    pub(super) fn map(&mut self, pool: Pool, piece: &PhysRange) {
        for page in pages(piece) {
            if self.0.get(&page).is_some_and(|owner| *owner != pool) {
                self.0.remove(&page);
            }
        }
    }

    /// Returns true if the page at `reached` belongs to a pool of `device`, for a direction that
    /// allows `access`.
    pub(super) fn is_own(&self, device: usize, access: Access, reached: PhysAddr) -> bool {
        let pool = self.0.get(&(reached.get() >> 12));
        pool.is_some_and(|(owner, direction)| {
            *owner == device && direction.permissions().allows(access)
        })
    }
}
