//! Flush policies: when stale translations are invalidated (axis 3 of a mode). One policy per
//! file.

mod batch;
mod burst;
mod deferred;
mod descriptors;
mod never;
mod per_cpu_queue;
mod per_cycle;
mod per_wrap;
mod strict;
mod transmit_batch;

pub use batch::RangeBatch;
pub use burst::{Burst, BurstCpu, BurstUnmap};
pub use deferred::{Deferred, DeferredQueue};
pub use descriptors::Descriptors;
pub use never::Never;
pub use per_cpu_queue::{FlushQueue, PerCpuQueue, QueueConfig};
pub use per_cycle::{PerCycle, PerCycleOutcome};
pub use per_wrap::PerWrap;
pub use strict::Strict;
pub use transmit_batch::TransmitBatch;

pub use crate::token::{
    BurstKey, Outcome, PendingUnmap, Released, ReleasedOrWithheld, ReleasedStale, Withheld,
};

use alloc::vec::Vec;

use ringfence_types::{CachedLevels, DomainId, Flushed, Invalidation, InvalidationError, PfnRange};

use crate::Platform;
use crate::domain_table::{DomainSlot, DomainTable, domain_index};
use crate::error::{UnmapFailure, UnmapRefusal};
use crate::space::{AddressSpace, CachingSpace, Expire};
use crate::token::{ClearedRange, NotInvalidated};

/// The path of flushed ranges back to the spaces of their domains, through this CPU's handles.
pub struct FlushContext<'a, S: AddressSpace> {
    pub(crate) domains: &'a DomainTable<S>,
    /// This CPU's state of each space.
    pub(crate) spaces: &'a mut [Option<S::PerCpu>],
    /// The current domain.
    pub(crate) domain: DomainId,
}

impl<S: AddressSpace> FlushContext<'_, S> {
    /// Returns the same context with a shorter lifetime.
    #[inline]
    pub fn reborrow(&mut self) -> FlushContext<'_, S> {
        FlushContext {
            domains: self.domains,
            spaces: self.spaces,
            domain: self.domain,
        }
    }

    /// Frees a flushed range into the space of its domain.
    #[inline]
    pub fn release(&mut self, range: Flushed) {
        self.free(range.domain(), range.into());
    }

    /// Frees a range into the current space, which may require less than a completed flush.
    #[inline]
    pub fn release_current(&mut self, range: S::FreeProof) {
        self.free(self.domain, range);
    }

    #[inline]
    fn space_and_cpu(&mut self, domain: DomainId) -> Option<(&S, &mut S::PerCpu)> {
        let space = self.domains.get(domain)?.space()?;
        Some((space, self.spaces.get_mut(domain_index(domain))?.as_mut()?))
    }

    #[inline]
    fn free(&mut self, domain: DomainId, range: S::FreeProof) {
        if let Some((space, cpu)) = self.space_and_cpu(domain) {
            space.release(cpu, range);
        }
    }

    /// Returns the current domain.
    #[inline]
    pub fn domain(&self) -> DomainId {
        self.domain
    }

    /// Returns the narrowest invalidation that covers `cleared`.
    #[inline]
    pub fn invalidation_of<T>(&self, cleared: &ClearedRange<T>) -> Invalidation {
        self.invalidation(
            cleared.unmapped.domain(),
            cleared.unmapped.range(),
            cleared.levels,
        )
    }

    /// Returns the narrowest invalidation of `range` in `domain`.
    #[inline]
    pub(crate) fn invalidation(
        &self,
        domain: DomainId,
        range: PfnRange,
        levels: CachedLevels,
    ) -> Invalidation {
        match self.domains.get(domain).and_then(DomainSlot::space) {
            Some(space) => space.invalidation(range, levels),
            None => Invalidation::Domain(domain),
        }
    }

    /// Frees the addresses that this CPU caches into the current space.
    pub(crate) fn drain(&mut self) {
        if let Some((space, cpu)) = self.space_and_cpu(self.domain) {
            space.drain(cpu);
        }
    }

    /// Makes the cleared entries of the current space visible to the hardware.
    #[inline]
    pub fn sync<P: Platform>(&mut self, platform: &mut P) {
        if let Some((space, cpu)) = self.space_and_cpu(self.domain) {
            space.sync(cpu, platform);
        }
    }
}

impl<S: CachingSpace> FlushContext<'_, S> {
    /// Clears the unmapped translations that the current space keeps, as selected by `which`.
    pub(crate) fn expire<P: Platform>(
        &mut self,
        platform: &mut P,
        which: Expire,
        cleared: impl FnMut(ClearedRange),
    ) -> Result<(), UnmapRefusal> {
        match self.space_and_cpu(self.domain) {
            Some((space, cpu)) => space.expire(cpu, platform, which, cleared),
            None => Ok(()),
        }
    }
}

/// A flush policy: it decides when stale translations are invalidated.
///
/// The type of a policy determines the spaces that it supports. A space that installs no
/// translations works only with [`Never`]:
/// ```
/// # use ringfence_dma::{FlushPolicy, flush::Never, space::Identity};
/// fn goes_with<F: FlushPolicy<Identity, ()>>() {}
/// goes_with::<Never>();
/// ```
/// ```compile_fail,E0271
/// # use ringfence_dma::{FlushPolicy, flush::Burst, space::Identity};
/// fn goes_with<F: FlushPolicy<Identity, ()>>() {}
/// goes_with::<Burst>();
/// ```
pub trait FlushPolicy<S: AddressSpace, B> {
    /// The state of one CPU for one domain.
    type PerCpu: OpenBursts<S, B>;
    /// The state of one domain that all CPUs share.
    type PerDomain;
    /// The type that unmap returns for the buffer.
    type Outcome: Outcome<B>;

    /// True if [`queue_unmap_many`](Self::queue_unmap_many) covers any number of mappings with one
    /// invalidation. If false, [`Dma::unmap_multi`](crate::Dma::unmap_multi) queues each mapping
    /// before it clears the next one, so that [`OpenBursts::has_room`] counts it. A policy that
    /// sets this withholds no buffers and always has room.
    const BATCHES_INVALIDATION: bool = false;

    /// True if a driver keeps a burst open while it maps other buffers, and ends it with its
    /// descriptor. If false, the driver ends a burst with its loop of unmaps.
    const BURST_IS_DESCRIPTOR: bool = false;

    /// Creates the shared state of a new domain.
    fn per_domain(&self) -> Self::PerDomain;

    /// Creates the state of another CPU.
    fn per_cpu(&self, domain: &Self::PerDomain) -> Self::PerCpu;

    /// Takes over a mapping whose entries are cleared. [`Strict`] queues nothing: it invalidates
    /// the range before it returns.
    ///
    /// # Errors
    /// Returns the mapping if an invalidation fails.
    fn queue_unmap<P: Platform>(
        &self,
        shared: &Self::PerDomain,
        own: &mut Self::PerCpu,
        ctx: FlushContext<'_, S>,
        platform: &mut P,
        item: PendingUnmap<S::UnmapResult, B>,
    ) -> Result<Self::Outcome, (InvalidationError, NotInvalidated<B>)>;

    /// Takes over many mappings at once. `each` receives the buffers that the policy returns.
    ///
    /// # Errors
    /// Returns the first error, and the mappings whose invalidation failed. The policy has taken
    /// over the others.
    #[allow(clippy::type_complexity)]
    fn queue_unmap_many<P: Platform>(
        &self,
        shared: &Self::PerDomain,
        own: &mut Self::PerCpu,
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
        items: Vec<PendingUnmap<S::UnmapResult, B>>,
        each: impl FnMut(B),
    ) -> Result<(), (InvalidationError, Vec<NotInvalidated<B>>)> {
        queue_one_by_one(items, each, |item| {
            self.queue_unmap(shared, own, ctx.reborrow(), platform, item)
        })
    }

    /// Runs the timers. The layer calls it from [`Dma::tick`](crate::Dma::tick).
    ///
    /// # Errors
    /// An invalidation failed, or the space refused to clear translations that it keeps. The policy
    /// or the space keeps the ranges, and tries again at the next call.
    fn tick<P: Platform>(
        &self,
        shared: &Self::PerDomain,
        ctx: FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), UnmapFailure> {
        let _ = (shared, ctx, platform);
        Ok(())
    }

    /// Flushes all deferred unmaps of the domain, because addresses are exhausted or the device is
    /// being detached.
    ///
    /// # Errors
    /// As for [`tick`](Self::tick).
    fn flush<P: Platform>(
        &self,
        shared: &Self::PerDomain,
        ctx: FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), UnmapFailure> {
        let _ = (shared, ctx, platform);
        Ok(())
    }

    /// Flushes one CPU's state, because the CPU or the domain is being removed.
    ///
    /// # Errors
    /// An invalidation failed. The policy keeps the ranges of that invalidation.
    fn drain_cpu<P: Platform>(
        &self,
        own: &mut Self::PerCpu,
        ctx: FlushContext<'_, S>,
        platform: &mut P,
        each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        let _ = (own, ctx, platform, each);
        Ok(())
    }
}

/// Passes each item to `queue`, and the buffers that it returns to `each`.
///
/// # Errors
/// Returns the first error, and the mappings whose invalidation failed.
fn queue_one_by_one<T, O: Outcome<B>, B>(
    items: Vec<PendingUnmap<T, B>>,
    mut each: impl FnMut(B),
    mut queue: impl FnMut(PendingUnmap<T, B>) -> Result<O, (InvalidationError, NotInvalidated<B>)>,
) -> Result<(), (InvalidationError, Vec<NotInvalidated<B>>)> {
    let mut not_invalidated = Vec::new();
    let mut failure = None;
    for item in items {
        match queue(item) {
            Ok(outcome) => outcome.into_buffer().into_iter().for_each(&mut each),
            Err((error, left)) => {
                failure.get_or_insert(error);
                not_invalidated.push(left);
            }
        }
    }
    failure.map_or(Ok(()), |error| Err((error, not_invalidated)))
}

/// The bursts that a policy holds open in the state of one CPU. A policy without bursts keeps the
/// default: its state withholds no buffer and always has room.
pub trait OpenBursts<S: AddressSpace, B>: Sized {
    /// Returns true if the burst `key` has room for another mapping. The layer asks before it
    /// clears the mapping.
    #[inline]
    fn has_room(&self, key: BurstKey) -> bool {
        let _ = key;
        true
    }

    /// Returns true if a burst withholds buffers.
    fn withholds(&self) -> bool {
        false
    }

    /// Passes the withheld buffers to `each`, without an invalidation. The detach of their domain
    /// has already invalidated it.
    fn release_withheld(self, each: impl FnMut(B)) {
        let _ = each;
    }

    /// Ends the burst `key`, and passes each of its buffers to `each` exactly once.
    ///
    /// # Errors
    /// The invalidation failed. Buffers that the device may still reach stay withheld.
    fn end_burst<P: Platform>(
        &mut self,
        ctx: FlushContext<'_, S>,
        platform: &mut P,
        key: BurstKey,
        each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        let _ = (ctx, platform, key, each);
        Ok(())
    }
}

impl<S: AddressSpace, B> OpenBursts<S, B> for () {}
