//! Helpers that several test binaries share.
#![allow(dead_code)]

use std::sync::atomic::AtomicU64;

use ringfence_types::{
    Batch, DomainId, Flushed, Invalidation, InvalidationError, Invalidator, MemoryError, Pending,
    Pfn, PfnRange, PhysAddr, PhysMemory, TABLE_WORDS, Ticket, Unmapped, WholeDomain,
};

/// The domain of all tests.
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

/// Returns `range` after unmap and invalidation.
pub(crate) fn flushed(range: PfnRange) -> Flushed {
    flush(Unmapped::attest_cleared(DOMAIN, range))
}

/// Returns the proof of a domain flush.
pub(crate) fn domain_flushed() -> Flushed<WholeDomain> {
    flush(WholeDomain(DOMAIN))
}

/// Returns the pages `lo..=hi`.
pub(crate) fn pages(lo: u64, hi: u64) -> PfnRange {
    PfnRange::inclusive(Pfn::new(lo), Pfn::new(hi)).unwrap()
}

/// A random generator for tests (xorshift64). The same seed gives the same run everywhere.
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

    /// Returns a number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Memory for a flat table over a few pages.
#[derive(Debug)]
pub(crate) struct Words {
    first: u64,
    words: Vec<AtomicU64>,
}

impl Words {
    /// Creates memory with one word per page of `space`, at 8 times its page number.
    pub(crate) fn holding(space: PfnRange) -> Self {
        Self {
            first: space.lo().get(),
            words: (0..space.pages()).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

impl PhysMemory for Words {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        Ok(&self.words(at, 1)?[0])
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        Err(MemoryError::Misaligned { at })
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        let outside = MemoryError::Outside {
            at,
            words: count as u64,
        };
        let from = (at.get() / 8).checked_sub(self.first).ok_or(outside)? as usize;
        self.words.get(from..from + count).ok_or(outside)
    }

    fn write_back(&self, _: PhysAddr, _: u64) {}

    fn drain(&self) {}
}
