//! The obligations between clearing a translation and using its I/O virtual addresses again, as
//! types.
//!
//! ```text
//! Unmapped --Pending::submit--> Pending<B> --wait--> Flushed<B> --> allocator.free
//! ```
//! There is no other way to a [`Flushed`]: an IOVA that is freed before its invalidation has
//! completed does not compile.

use crate::{
    CachedLevels, DomainId, Invalidation, InvalidationError, Invalidator, PfnRange, Ticket,
};

/// A range whose entries are cleared in the table while the IOTLB may still hold them.
///
/// Owns the range: the I/O virtual addresses are neither mapped nor free. Dropping it leaks them,
/// which is safe but wasteful, hence `must_use`.
#[must_use = "the range is neither mapped nor free until it is invalidated and given back to its allocator"]
#[derive(Debug, PartialEq, Eq)]
pub struct Unmapped {
    domain: DomainId,
    range: PfnRange,
}

impl Unmapped {
    /// Attests that every entry of `range` in the table of `domain` has been cleared. To be called
    /// by what cleared them: the table's own unmap, or an address space without entries.
    #[inline]
    pub const fn attest_cleared(domain: DomainId, range: PfnRange) -> Self {
        Self { domain, range }
    }

    /// The same obligation for the `enclosing` range that was reserved around the cleared one
    /// (power-of-two rounding reserves more pages than it maps); gives the token back if
    /// `enclosing` does not contain it.
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

    /// Takes over the obligation for the pages right behind these, in the same domain; gives the
    /// token of any others back.
    #[inline]
    pub fn append(&mut self, next: Self) -> Result<(), Self> {
        let (own, more) = (self.range, next.range);
        if self.domain != next.domain || own.hi().get().wrapping_add(1) != more.lo().get() {
            return Err(next);
        }
        self.range = PfnRange::spanning(own.lo(), more.hi());
        Ok(())
    }

    /// The domain whose table was changed.
    #[inline]
    pub const fn domain(&self) -> DomainId {
        self.domain
    }

    /// The pages.
    #[inline]
    pub const fn range(&self) -> PfnRange {
        self.range
    }
}

impl<A, B> Flushed<(A, B)> {
    /// The two batches, each flushed.
    #[inline]
    pub fn split(self) -> (Flushed<A>, Flushed<B>) {
        let (a, b) = self.0;
        (Flushed(a), Flushed(b))
    }
}

/// Something made of [`Unmapped`] ranges that one invalidation can release.
pub trait Batch {
    /// Whether `request` purges every range of the batch.
    fn covered_by(&self, request: &Invalidation) -> bool;
}

/// Its leaf translations. Table pages that left with the range are a batch of their own.
impl Batch for Unmapped {
    #[inline]
    fn covered_by(&self, request: &Invalidation) -> bool {
        request.covers(self.domain, &self.range, CachedLevels::Leaves)
    }
}

/// The cached entries that must go with a range, in a pair with that range.
impl Batch for CachedLevels {
    #[inline]
    fn covered_by(&self, request: &Invalidation) -> bool {
        request.levels() >= *self
    }
}

/// Nothing is released by any invalidation.
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

/// A batch whose invalidation has been submitted and not yet completed.
#[must_use = "the invalidation must be waited for, or the ranges of the batch are lost"]
#[derive(Debug)]
pub struct Pending<B> {
    batch: B,
    ticket: Ticket,
}

impl<B: Batch> Pending<B> {
    /// Submits `request` for `batch`. If the request does not cover the batch, or is not accepted,
    /// the batch comes back.
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
    /// Waits for the completion.
    ///
    /// # Errors
    /// The batch stays pending, for another attempt, if the invalidator reports an error.
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

    /// Asks once whether the invalidation has completed.
    #[inline]
    pub fn poll<I: Invalidator + ?Sized>(self, invalidator: &mut I) -> Result<Flushed<B>, Self> {
        match invalidator.poll(self.ticket) {
            Ok(true) => Ok(Flushed(self.batch)),
            _ => Err(self),
        }
    }

    /// Gives up waiting: the batch is merely unmapped again, and another invalidation must be
    /// submitted for it.
    #[inline]
    pub fn abandon(self) -> B {
        self.batch
    }

    /// The ticket of the invalidation.
    #[inline]
    pub const fn ticket(&self) -> Ticket {
        self.ticket
    }
}

/// Ranges that no translation cache holds any more: free to be reused.
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
    /// The domain.
    #[inline]
    pub const fn domain(&self) -> DomainId {
        self.0.domain
    }

    /// The pages.
    #[inline]
    pub const fn range(&self) -> PfnRange {
        self.0.range
    }
}

impl<B> Flushed<B> {
    /// The batch itself. Whoever takes a `Flushed<B>` and needs what is in it calls this; what
    /// comes out proves nothing any more.
    #[inline]
    pub fn into_batch(self) -> B {
        self.0
    }

    /// Hands each range of the batch on as flushed.
    #[inline]
    pub fn drain_with(mut self, mut each: impl FnMut(Flushed<Unmapped>)) -> B
    where
        B: DrainUnmapped,
    {
        self.0.drain_unmapped(|range| each(Flushed(range)));
        self.0
    }
}

/// A batch that can be emptied range by range; its storage is kept for the next one.
pub trait DrainUnmapped: Batch {
    /// Removes every range and hands it to `each`.
    fn drain_unmapped(&mut self, each: impl FnMut(Unmapped));
}

/// A flushed range is also merely unmapped: allocators that ask for less accept it.
impl From<Flushed> for Unmapped {
    #[inline]
    fn from(flushed: Flushed) -> Self {
        flushed.0
    }
}

/// Stands for every range of one domain that was unmapped before the invalidation was submitted.
/// Allocators that hand no address out twice before a flush ask for this proof when they wrap.
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
    /// The domain that was flushed.
    #[inline]
    pub const fn whole_domain(&self) -> DomainId {
        self.0.0
    }
}
