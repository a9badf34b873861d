//! Invalidation per batch for buffers that the device only reads, and per unmap for all others.

use ringfence_types::{Direction, InvalidationError};

use super::{
    Burst, BurstCpu, BurstUnmap, FlushContext, FlushPolicy, Outcome, PendingUnmap,
    ReleasedOrWithheld, Strict,
};
use crate::Platform;
use crate::space::{EndsAtUnmap, RingSpace};
use crate::token::NotInvalidated;

/// Withholds transmit buffers until one invalidation covers a batch of them. Their contents are
/// sent, so a driver can wait for their memory. A buffer that the device may write is invalidated
/// within its unmap, because the driver waits for its contents.
///
/// A batch has the unmaps of one device, ring and CPU. The driver ends it with
/// [`Dma::end_burst`](crate::Dma::end_burst): after 64 pages, or after the longest delay that it
/// accepts. It may map other buffers meanwhile, but never a withheld one. No buffer is returned
/// before its invalidation, so the policy is as safe as [`Strict`].
///
/// A buffer that the device used as a copy is returned at once, in both directions. A full batch
/// rejects it first: the layer asks for room before the space tells how the buffer was mapped.
#[derive(Debug, Clone, Copy, Default)]
pub struct TransmitBatch(Burst);

impl TransmitBatch {
    /// Limits the open batches of each CPU and ring to `most` withheld buffers (at least one).
    /// Unmaps reject a mapping above the limit
    /// ([`UnmapReason::BurstFull`](crate::UnmapReason::BurstFull)).
    pub const fn with_most(self, most: usize) -> Self {
        Self(self.0.with_most(most))
    }
}

impl<R, S, B> FlushPolicy<S, B> for TransmitBatch
where
    R: BurstUnmap + EndsAtUnmap,
    S: RingSpace<UnmapResult = R>,
{
    type PerCpu = BurstCpu<B>;
    type PerDomain = ();
    type Outcome = ReleasedOrWithheld<B>;

    const BURST_IS_DESCRIPTOR: bool = true;

    fn per_domain(&self) {}

    fn per_cpu(&self, (): &()) -> BurstCpu<B> {
        FlushPolicy::<S, B>::per_cpu(&self.0, &())
    }

    #[inline]
    fn queue_unmap<P: Platform>(
        &self,
        shared: &(),
        own: &mut BurstCpu<B>,
        ctx: FlushContext<'_, S>,
        platform: &mut P,
        item: PendingUnmap<R, B>,
    ) -> Result<ReleasedOrWithheld<B>, (InvalidationError, NotInvalidated<B>)> {
        let buffer = match item.burst_key.direction {
            Direction::ToDevice => {
                let outcome = self.0.queue_unmap(shared, own, ctx, platform, item)?;
                outcome.into_buffer()
            }
            Direction::FromDevice | Direction::Bidirectional => {
                let outcome = Strict.queue_unmap(&(), &mut (), ctx, platform, item)?;
                outcome.into_buffer()
            }
        };
        Ok(buffer.map_or(ReleasedOrWithheld::Withheld, ReleasedOrWithheld::Released))
    }

    fn drain_cpu<P: Platform>(
        &self,
        own: &mut BurstCpu<B>,
        ctx: FlushContext<'_, S>,
        platform: &mut P,
        each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        self.0.drain_cpu(own, ctx, platform, each)
    }
}
