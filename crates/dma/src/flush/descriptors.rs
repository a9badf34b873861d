//! Invalidation per descriptor: the layer withholds the buffers of a descriptor until one
//! invalidation for all of its pages.

use ringfence_types::InvalidationError;

use super::{Burst, BurstCpu, FlushContext, FlushPolicy, PendingUnmap, Withheld};
use crate::Platform;
use crate::space::RingSpace;
use crate::token::{ClearedRange, NotInvalidated};

/// F&S (SOSP 2024) with withheld buffers. A descriptor is a run of unmaps of one device, ring,
/// direction and CPU, which the driver ends with [`Dma::end_burst`](crate::Dma::end_burst): after
/// 64 pages, or after the longest delay that it accepts. The driver may map other buffers while a
/// descriptor is open, but never a withheld one.
///
/// In F&S the driver unmaps the 64 pages in one call, after it has released the first 63. Here no
/// buffer is returned before its invalidation, so the policy is as safe as
/// [`Strict`](super::Strict).
///
/// The invalidations remove leaf translations only, by address. With addresses from
/// [`Contiguous`](ringfence_iova::Contiguous) a descriptor takes one or two of them, and the walk
/// caches of the domain stay valid.
#[derive(Debug, Clone, Copy)]
pub struct Descriptors(Burst);

impl Descriptors {
    /// Limits the open descriptors of each CPU, ring and direction to `most` withheld buffers (at
    /// least one). Unmaps reject a mapping above the limit
    /// ([`UnmapReason::BurstFull`](crate::UnmapReason::BurstFull)).
    pub const fn with_most(self, most: usize) -> Self {
        Self(self.0.with_most(most))
    }
}

impl Default for Descriptors {
    fn default() -> Self {
        Self(Burst::new(256).by_block())
    }
}

impl<S: RingSpace<UnmapResult = ClearedRange>, B> FlushPolicy<S, B> for Descriptors {
    type PerCpu = BurstCpu<B>;
    type PerDomain = ();
    type Outcome = Withheld;

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
        item: PendingUnmap<ClearedRange, B>,
    ) -> Result<Withheld, (InvalidationError, NotInvalidated<B>)> {
        self.0.queue_unmap(shared, own, ctx, platform, item)
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
