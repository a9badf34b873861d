//! What several test binaries share.
#![allow(dead_code)]

use ringfence_types::{
    Batch, DomainId, Flushed, Invalidation, InvalidationError, Invalidator, Pending, Pfn, PfnRange,
    Ticket, Unmapped, WholeDomain,
};

/// The domain all tests use.
pub(crate) const DOMAIN: DomainId = DomainId::new(1);

/// An invalidation interface that completes at once.
pub(crate) struct Prompt;

impl Invalidator for Prompt {
    fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
        Ok(Ticket::new(0))
    }

    fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
        Ok(true)
    }
}

fn flush<B: Batch + std::fmt::Debug>(batch: B) -> Flushed<B> {
    Pending::submit(&mut Prompt, Invalidation::Global, batch)
        .unwrap()
        .wait(&mut Prompt)
        .unwrap()
}

/// `range` after unmap and invalidation.
pub(crate) fn flushed(range: PfnRange) -> Flushed {
    flush(Unmapped::attest_cleared(DOMAIN, range))
}

/// The proof of a domain flush.
pub(crate) fn domain_flushed() -> Flushed<WholeDomain> {
    flush(WholeDomain(DOMAIN))
}

/// The pages `lo..=hi`.
pub(crate) fn pages(lo: u64, hi: u64) -> PfnRange {
    PfnRange::inclusive(Pfn::new(lo), Pfn::new(hi)).unwrap()
}

/// A generator for tests (xorshift64): the same seed gives the same run everywhere.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        let mut this = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        for _ in 0..4 {
            this.next();
        }
        this
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}
