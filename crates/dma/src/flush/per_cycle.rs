//! Invalidation per timer cycle: a space expires cached mappings in batches (Tang et al., section
//! 4.5).

use core::mem::ManuallyDrop;

use ringfence_types::{InvalidationError, Lock};

use super::{FlushContext, FlushPolicy, Outcome, PendingUnmap, RangeBatch, Released, Strict};
use crate::Platform;
use crate::error::UnmapFailure;
use crate::space::{CachedOrCleared, CachingSpace, Expire};
use crate::token::NotInvalidated;

/// Unmap leaves a mapping in the space, which [caches](CachedOrCleared::Cached) it for the next map
/// of the same memory. The driver gets the buffer back while the device may still reach it. At the
/// end of a cycle, one invalidation covers all mappings that the space expires, and their addresses
/// are freed. Mappings that the space does not cache are invalidated at their unmap, as under
/// [`Strict`].
///
/// The space decides how long it caches a mapping, by the platform's clock.
#[derive(Debug, Clone, Copy)]
pub struct PerCycle<L> {
    lock: fn(RangeBatch) -> L,
}

impl<L: Lock<RangeBatch>> PerCycle<L> {
    /// Creates the policy. `lock` wraps the batch of a domain whose invalidation failed in the
    /// embedder's lock.
    pub fn new(lock: fn(RangeBatch) -> L) -> Self {
        Self { lock }
    }

    /// Expires cached mappings and invalidates them. If the invalidation fails, their ranges stay
    /// in `not_invalidated`, unusable, until a later one succeeds. A mapping that the table refuses
    /// to clear stays in the space, which tries again at its next expiry: the device may reach it
    /// until then.
    fn expire<S: CachingSpace, P: Platform>(
        not_invalidated: &L,
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
        which: Expire,
    ) -> Result<(), UnmapFailure> {
        not_invalidated.with(|batch| {
            let expired = ctx.expire(platform, which, |cleared| batch.push(cleared));
            batch.flush(batch.narrowest(&ctx), &mut ctx, platform)?;
            expired.map_err(UnmapFailure::Refused)
        })
    }
}

/// The result of an unmap under [`PerCycle`].
#[must_use = "the buffer is lost unless it is taken out"]
#[derive(Debug, PartialEq, Eq)]
pub enum PerCycleOutcome<B> {
    /// No device can reach the buffer.
    Released(B),
    /// The space keeps the mapping; the device still reaches the buffer.
    Cached(B),
}

impl<B> Outcome<B> for PerCycleOutcome<B> {
    #[inline]
    fn is_stale(&self) -> bool {
        matches!(self, Self::Cached(_))
    }

    #[inline]
    fn into_buffer(self) -> Option<B> {
        let (Self::Released(buffer) | Self::Cached(buffer)) = self;
        Some(buffer)
    }
}

impl<S: CachingSpace<UnmapResult = CachedOrCleared>, B, L: Lock<RangeBatch>> FlushPolicy<S, B>
    for PerCycle<L>
{
    type PerCpu = ();
    type PerDomain = L;
    type Outcome = PerCycleOutcome<B>;

    fn per_domain(&self) -> L {
        (self.lock)(RangeBatch::with_capacity(0))
    }

    fn per_cpu(&self, _: &L) {}

    #[inline]
    fn queue_unmap<P: Platform>(
        &self,
        _: &L,
        (): &mut (),
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
        item: PendingUnmap<CachedOrCleared, B>,
    ) -> Result<PerCycleOutcome<B>, (InvalidationError, NotInvalidated<B>)> {
        let (result, pending) = item.split();
        let cleared = match result {
            CachedOrCleared::Cached => {
                let buffer = ManuallyDrop::into_inner(pending.buffer);
                return Ok(PerCycleOutcome::Cached(buffer));
            }
            CachedOrCleared::Cleared(cleared) => cleared,
        };
        Strict::invalidate(&mut ctx, platform, pending.with(cleared))
            .map(|Released(buffer)| PerCycleOutcome::Released(buffer))
    }

    fn tick<P: Platform>(
        &self,
        not_invalidated: &L,
        ctx: FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), UnmapFailure> {
        Self::expire(not_invalidated, ctx, platform, Expire::Due)
    }

    fn flush<P: Platform>(
        &self,
        not_invalidated: &L,
        ctx: FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), UnmapFailure> {
        Self::expire(not_invalidated, ctx, platform, Expire::All)
    }
}
