//! A layer with hybrid copying.

use std::cell::RefCell;

use ringfence_dma::flush::FlushPolicy;
use ringfence_dma::space::{
    FromDevice, HybridPolicy, HybridSpace, ShadowDepot, SharedPages, SplitTable, Thresholds,
};

use crate::machine::{self, Pool, PoolSpace, Table};
pub(super) use crate::machine::{POOL, pages_of, pattern};
use crate::rig::*;

pub(super) type Hybrid =
    HybridSpace<Accounts<Tree>, Plain, RefCell<ShadowDepot>, RefCell<SplitTable>>;

/// Splits every buffer with a whole page.
pub(super) const POLICY: HybridPolicy = HybridPolicy {
    from_device: FromDevice::Kept,
    thresholds: Thresholds::both(0),
    shared_pages: SharedPages::Copied,
};

pub(super) type Machine<F> = machine::Machine<Hybrid, F>;

impl PoolSpace for Hybrid {
    fn paged_part(&self) -> &Table {
        self.shadow_space().paged()
    }

    fn pool_part(&self) -> &Pool {
        self.shadow_space().pool()
    }
}

impl<F: FlushPolicy<Hybrid, u64>> Machine<F> {
    /// Creates a layer with a pool of `pages` pages, full of earlier data.
    pub(super) fn new(pages: u64, policy: HybridPolicy, flush: F) -> Self {
        Self::with(pages, flush, |paged, pool| {
            HybridSpace::new(paged, pool, policy, RefCell::new)
        })
    }
}
