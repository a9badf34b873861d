//! Types that order unmap, invalidation and reuse of I/O virtual addresses.
//!
//! ```text
//! Unmapped --Pending::submit--> Pending<B> --wait--> Flushed<B> --> allocator.free
//! ```
//! Only this sequence creates a [`Flushed`], which an allocator's `free` takes. Code that frees an
//! IOVA before its invalidation has completed does not compile, provided that the [`Invalidator`]
//! keeps its contract and only code that has cleared entries calls [`Unmapped::attest_cleared`].

use crate::{
    CachedLevels, DomainId, Invalidation, InvalidationError, Invalidator, PfnRange, Ticket,
};

/// A range whose table entries are cleared while the IOTLB may still cache them.
///
/// The token owns the range: its I/O virtual addresses are neither mapped nor free. Dropping the
/// token leaks them, which is safe but wasteful; hence `must_use`.
#[must_use = "the range is neither mapped nor free until it is invalidated and given back to its \
    allocator"]
#[derive(Debug, PartialEq, Eq)]
pub struct Unmapped {
    domain: DomainId,
    range: PfnRange,
}

impl Unmapped {
    /// Attests that every entry of `range` in the table of `domain` is cleared. Only code that
    /// cleared them may call it: a table's unmap, or an address space without entries.
    #[inline]
    pub const fn attest_cleared(domain: DomainId, range: PfnRange) -> Self {
        Self { domain, range }
    }

    /// Extends the obligation to the `enclosing` range that the allocator reserved around the
    /// cleared one (power-of-two rounding reserves more pages than are mapped).
    ///
    /// # Errors
    /// Returns the token unchanged if `enclosing` does not contain its range.
    #[inline]
    pub fn widen(self, enclosing: PfnRange) -> Result<Self, Self> {
        if enclosing.contains(&self.range) {
            Ok(Self {
                domain: self.domain,
                range: enclosing,
            })
        } else {
            Err(self)
        }
    }

    /// Takes over the obligation of `next`, which must begin directly after this range in the same
    /// domain.
    ///
    /// # Errors
    /// Returns `next` if its domain differs or its range is not adjacent.
    #[inline]
    pub fn append(&mut self, next: Self) -> Result<(), Self> {
        let (own, more) = (self.range, next.range);
        if self.domain != next.domain || own.hi().get().wrapping_add(1) != more.lo().get() {
            return Err(next);
        }
        self.range = PfnRange::spanning(own.lo(), more.hi());
        Ok(())
    }

    /// Returns the domain whose table was changed.
    #[inline]
    pub const fn domain(&self) -> DomainId {
        self.domain
    }

    /// Returns the cleared pages.
    #[inline]
    pub const fn range(&self) -> PfnRange {
        self.range
    }
}

impl<A, B> Flushed<(A, B)> {
    /// Splits a pair into two flushed batches.
    #[inline]
    pub fn split(self) -> (Flushed<A>, Flushed<B>) {
        let (a, b) = self.0;
        (Flushed(a), Flushed(b))
    }
}

/// A set of [`Unmapped`] ranges that one invalidation can release.
pub trait Batch {
    /// Returns true if `request` invalidates every range of the batch.
    fn covered_by(&self, request: &Invalidation) -> bool;
}

/// Requires invalidation of the leaf translations. Table pages freed with the range form a batch of
/// their own.
impl Batch for Unmapped {
    #[inline]
    fn covered_by(&self, request: &Invalidation) -> bool {
        request.covers(self.domain, &self.range, CachedLevels::Leaves)
    }
}

/// Requires invalidation of these kinds of entries; used in a pair with the range.
impl Batch for CachedLevels {
    #[inline]
    fn covered_by(&self, request: &Invalidation) -> bool {
        request.levels() >= *self
    }
}

/// An empty batch, which any invalidation covers.
impl Batch for () {
    #[inline]
    fn covered_by(&self, _request: &Invalidation) -> bool {
        true
    }
}

/// Two batches that one invalidation releases together.
impl<A: Batch, B: Batch> Batch for (A, B) {
    #[inline]
    fn covered_by(&self, request: &Invalidation) -> bool {
        self.0.covered_by(request) && self.1.covered_by(request)
    }
}

/// A batch whose invalidation was submitted and has not completed.
#[must_use = "the invalidation must be waited for, or the ranges of the batch are lost"]
#[derive(Debug)]
pub struct Pending<B> {
    batch: B,
    ticket: Ticket,
}

impl<B: Batch> Pending<B> {
    /// Submits `request` for `batch`.
    ///
    /// # Errors
    /// Returns the batch if the request does not cover it or the invalidator rejects the request.
    #[inline]
    pub fn submit<I: Invalidator + ?Sized>(
        invalidator: &mut I,
        request: Invalidation,
        batch: B,
    ) -> Result<Self, (B, InvalidationError)> {
        if !batch.covered_by(&request) {
            return Err((batch, InvalidationError::ScopeTooNarrow));
        }
        match invalidator.submit(request) {
            Ok(ticket) => Ok(Self { batch, ticket }),
            Err(error) => Err((batch, error)),
        }
    }
}

impl<B> Pending<B> {
    /// Waits for completion by polling.
    ///
    /// # Errors
    /// Returns the batch, still pending, if the invalidator reports an error. The caller may retry.
    #[inline]
    pub fn wait<I: Invalidator + ?Sized>(
        self,
        invalidator: &mut I,
    ) -> Result<Flushed<B>, (Self, InvalidationError)> {
        loop {
            match invalidator.poll(self.ticket) {
                Ok(true) => return Ok(Flushed(self.batch)),
                Ok(false) => core::hint::spin_loop(),
                Err(error) => return Err((self, error)),
            }
        }
    }

    /// Polls once for completion. If the invalidation has not completed or the poll fails, returns
    /// the pending batch.
    #[inline]
    pub fn poll<I: Invalidator + ?Sized>(self, invalidator: &mut I) -> Result<Flushed<B>, Self> {
        match invalidator.poll(self.ticket) {
            Ok(true) => Ok(Flushed(self.batch)),
            _ => Err(self),
        }
    }

    /// Stops waiting and returns the batch as merely unmapped. The caller must submit another
    /// invalidation for it.
    #[inline]
    pub fn abandon(self) -> B {
        self.batch
    }

    /// Returns the ticket of the invalidation.
    #[inline]
    pub const fn ticket(&self) -> Ticket {
        self.ticket
    }
}

/// Ranges that no translation cache holds any more. The allocator may reuse them.
///
/// ```compile_fail
/// // An unmapped range cannot be passed off as a flushed one.
/// fn free(_: ringfence_types::Flushed) {}
/// fn early(range: ringfence_types::Unmapped) { free(range) }
/// ```
#[must_use = "the ranges are lost unless they are given back to their allocator"]
#[derive(Debug, PartialEq, Eq)]
pub struct Flushed<B = Unmapped>(B);

impl Flushed<Unmapped> {
    /// Returns the domain whose table was changed.
    #[inline]
    pub const fn domain(&self) -> DomainId {
        self.0.domain
    }

    /// Returns the flushed pages.
    #[inline]
    pub const fn range(&self) -> PfnRange {
        self.0.range
    }
}

impl<B> Flushed<B> {
    /// Returns the batch without its proof. A consumer of `Flushed<B>` calls it to reach the
    /// contents.
    #[inline]
    pub fn into_batch(self) -> B {
        self.0
    }

    /// Passes each range of the batch to `each` as flushed, and returns the emptied batch.
    #[inline]
    pub fn drain_with(mut self, mut each: impl FnMut(Flushed<Unmapped>)) -> B
    where
        B: DrainUnmapped,
    {
        self.0.drain_unmapped(|range| each(Flushed(range)));
        self.0
    }
}

/// A batch that can be emptied range by range. Its storage can be reused for the next batch.
pub trait DrainUnmapped: Batch {
    /// Removes every range and passes it to `each`.
    fn drain_unmapped(&mut self, each: impl FnMut(Unmapped));
}

/// A flushed range is also unmapped: allocators that require only `Unmapped` accept it.
impl From<Flushed> for Unmapped {
    #[inline]
    fn from(flushed: Flushed) -> Self {
        flushed.0
    }
}

/// Represents every range of one domain that was unmapped before the invalidation was submitted. An
/// allocator that never reuses an address before a flush requires this proof to start over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WholeDomain(pub DomainId);

impl Batch for WholeDomain {
    #[inline]
    fn covered_by(&self, request: &Invalidation) -> bool {
        match request {
            Invalidation::Domain(domain) => *domain == self.0,
            Invalidation::Global => true,
            _ => false,
        }
    }
}

impl Flushed<WholeDomain> {
    /// Returns the flushed domain.
    #[inline]
    pub const fn whole_domain(&self) -> DomainId {
        self.0.0
    }
}
