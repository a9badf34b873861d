//! A layer with shadow buffers.

use std::cell::RefCell;

use ringfence_dma::flush::Strict;
use ringfence_dma::space::{FromDevice, ShadowDepot, ShadowPolicy, ShadowSpace, WhenExhausted};

use crate::machine::{self, Pool, PoolSpace, Table};
pub(super) use crate::machine::{POOL, pages_of, pattern};
use crate::rig::*;

pub(super) type Shadowed = ShadowSpace<Accounts<Tree>, Plain, RefCell<ShadowDepot>>;

pub(super) const POLICY: ShadowPolicy = ShadowPolicy {
    from_device: FromDevice::Kept,
    when_exhausted: WhenExhausted::Refuse,
};

pub(super) type Machine = machine::Machine<Shadowed, Strict>;

impl PoolSpace for Shadowed {
    fn paged_part(&self) -> &Table {
        self.paged()
    }

    fn pool_part(&self) -> &Pool {
        self.pool()
    }
}

impl Machine {
    /// Creates a layer with a pool of `pages` pages, full of earlier data.
    pub(super) fn new(pages: u64, policy: ShadowPolicy) -> Self {
        Self::with(pages, Strict, |paged, pool| {
            ShadowSpace::new(paged, pool, policy)
        })
    }
}
