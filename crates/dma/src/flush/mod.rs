//! When a stale translation dies (question 3 of a mode). One policy a file.

mod as_published;
mod batch;
mod burst;
mod deferred;
mod never;
mod per_cpu_queue;
mod per_cycle;
mod per_wrap;
mod strict;

pub use as_published::BurstAsPublished;
pub use batch::RangeBatch;
pub use burst::{Burst, BurstCpu};
pub use deferred::{Deferred, DeferredQueue};
pub use never::Never;
pub use per_cpu_queue::{FlushQueue, PerCpuQueue, QueueConfig};
pub use per_cycle::{PerCycle, PerCycleOutcome};
pub use per_wrap::PerWrap;
pub use strict::Strict;

use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use ringfence_types::{
    CachedLevels, Direction, DomainId, Flushed, Invalidation, InvalidationError, PfnRange, RingId,
};

use crate::domain_table::{DomainHandle, DomainSlot};
use crate::mapping::HeldBuffer;
use crate::space::{ClearedRange, Expire, IotlbSync, Space, UnmapRefusal};
use crate::{NotInvalidated, Platform};

/// A mapping that has left the table, on its way through the flush policy.
#[derive(Debug)]
pub struct ClearedMapping<B, T = ()> {
    pub(crate) range: ClearedRange<T>,
    pub(crate) direction: Direction,
    pub(crate) domain_handle: DomainHandle,
    pub(crate) buffer: HeldBuffer<B>,
}

/// The buffer is back and no device can reach it.
#[must_use = "the buffer is lost unless it is taken out"]
#[derive(Debug, PartialEq, Eq)]
pub struct Released<B>(pub B);

/// The buffer is back while the device may still reach it through a stale translation: deferred
/// modes.
#[must_use = "the buffer is lost unless it is taken out"]
#[derive(Debug, PartialEq, Eq)]
pub struct ReleasedStale<B>(pub B);

/// The buffer stays with the layer until its burst ends.
#[must_use = "end the burst, or the buffer never comes back"]
#[derive(Debug, PartialEq, Eq)]
pub struct Withheld;

/// Mappings whose unmaps gather in one burst: those of one ring and direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BurstKey {
    /// The device's ring; 0 where there are none.
    pub ring: RingId,
    /// The direction.
    pub direction: Direction,
}

impl BurstKey {
    /// Its place among all lanes of a device.
    #[inline]
    pub(crate) fn index(self) -> usize {
        let direction = match self.direction {
            Direction::ToDevice => 0,
            Direction::FromDevice => 1,
            Direction::Bidirectional => 2,
        };
        usize::from(self.ring.get()) * 3 + direction
    }
}

/// What unmap gives back, for code that is generic over policies.
pub trait Outcome<B> {
    /// Whether the buffer is back while a device may still reach it.
    fn is_stale(&self) -> bool;
    /// The buffer, if it is back.
    fn into_buffer(self) -> Option<B>;
}

impl<B> Outcome<B> for Released<B> {
    #[inline]
    fn is_stale(&self) -> bool {
        false
    }
    #[inline]
    fn into_buffer(self) -> Option<B> {
        Some(self.0)
    }
}

impl<B> Outcome<B> for ReleasedStale<B> {
    #[inline]
    fn is_stale(&self) -> bool {
        true
    }
    #[inline]
    fn into_buffer(self) -> Option<B> {
        Some(self.0)
    }
}

impl<B> Outcome<B> for Withheld {
    #[inline]
    fn is_stale(&self) -> bool {
        false
    }
    #[inline]
    fn into_buffer(self) -> Option<B> {
        None
    }
}

/// Where flushed ranges go: back to the space of their domain, through this processor's handles.
pub struct FlushContext<'a, S: Space> {
    pub(crate) domain_slots: &'a [DomainSlot<S>],
    pub(crate) cpus: &'a mut [Option<S::PerCpu>],
    /// Index of the domain at hand.
    pub(crate) domain_index: usize,
}

impl<S: Space> FlushContext<'_, S> {
    /// The same place for a shorter time.
    #[inline]
    pub fn reborrow(&mut self) -> FlushContext<'_, S> {
        FlushContext {
            domain_slots: self.domain_slots,
            cpus: self.cpus,
            domain_index: self.domain_index,
        }
    }

    /// Gives a flushed range back.
    #[inline]
    pub fn release(&mut self, range: Flushed) {
        self.free(
            usize::from(range.domain().get()).wrapping_sub(1),
            range.into(),
        );
    }

    /// Gives a range back to the space at hand, which asks for less than a flush.
    #[inline]
    pub fn release_current(&mut self, range: S::FreeProof) {
        self.free(self.domain_index, range);
    }

    #[inline]
    fn space(&self, index: usize) -> Option<&S> {
        self.domain_slots.get(index)?.space()
    }

    #[inline]
    fn space_and_cpu(&mut self, index: usize) -> Option<(&S, &mut S::PerCpu)> {
        let space = self.domain_slots.get(index)?.space()?;
        Some((space, self.cpus.get_mut(index)?.as_mut()?))
    }

    #[inline]
    fn free(&mut self, index: usize, range: S::FreeProof) {
        if let Some((space, cpu)) = self.space_and_cpu(index) {
            space.release(cpu, range);
        }
    }

    /// The domain at hand. Domains are numbered from 1 in the order of their attachment.
    #[inline]
    pub fn domain(&self) -> DomainId {
        match self.space(self.domain_index) {
            Some(space) => space.domain(),
            None => DomainId::new(0),
        }
    }

    /// The narrowest invalidation of exactly what is gone.
    #[inline]
    pub(crate) fn invalidation_of<T>(&self, gone: &ClearedRange<T>) -> Invalidation {
        self.invalidation(gone.unmapped.domain(), gone.unmapped.range(), gone.levels)
    }

    /// The narrowest invalidation of `range` in `domain`.
    #[inline]
    pub(crate) fn invalidation(
        &self,
        domain: DomainId,
        range: PfnRange,
        levels: CachedLevels,
    ) -> Invalidation {
        match self.space(usize::from(domain.get()).wrapping_sub(1)) {
            Some(space) => space.invalidation(range, levels),
            None => Invalidation::Domain(domain),
        }
    }

    /// Clears what the space at hand has kept, as far as `which` says.
    pub(crate) fn expire<P: Platform>(
        &mut self,
        platform: &mut P,
        which: Expire,
        gone: impl FnMut(ClearedRange),
    ) -> Result<(), UnmapRefusal> {
        match self.space_and_cpu(self.domain_index) {
            Some((space, cpu)) => space.expire(cpu, platform, which, gone),
            None => Ok(()),
        }
    }

    /// Gives what this processor caches of the space at hand back to it.
    pub(crate) fn drain(&mut self) {
        if let Some((space, cpu)) = self.space_and_cpu(self.domain_index) {
            space.drain(cpu);
        }
    }

    /// Makes what was cleared in the space at hand visible to the hardware.
    #[inline]
    pub fn sync<P: Platform>(&mut self, platform: &mut P) {
        if let Some((space, cpu)) = self.space_and_cpu(self.domain_index) {
            space.sync(cpu, platform);
        }
    }
}

/// When a stale translation dies.
///
/// Which spaces a policy can deal with is part of its type. A space in which nothing is installed
/// goes with [`Never`] alone:
/// ```
/// # use ringfence_dma::{Flush, flush::Never, space::Identity};
/// fn goes_with<F: Flush<Identity, ()>>() {}
/// goes_with::<Never>();
/// ```
/// ```compile_fail,E0271
/// # use ringfence_dma::{Flush, flush::Burst, space::Identity};
/// fn goes_with<F: Flush<Identity, ()>>() {}
/// goes_with::<Burst>();
/// ```
pub trait Flush<S: Space, B> {
    /// One processor's part, per domain.
    type PerCpu;
    /// What all processors share, per domain.
    type PerDomain;
    /// How the buffer comes back from unmap.
    type Outcome: Outcome<B>;

    /// [`queue_unmap_many`](Self::queue_unmap_many) takes any number of mappings over by one
    /// invalidation. Otherwise [`Dma::unmap_multi`](crate::Dma::unmap_multi) retires each mapping
    /// before it clears the next one, so that [`has_room`](Self::has_room) has counted it. A policy
    /// that gathers withholds nothing and admits everything.
    const BATCHES_INVALIDATION: bool = false;

    /// The shared part of one more domain.
    fn per_domain(&self) -> Self::PerDomain;

    /// A handle for one more processor.
    fn per_cpu(&self, domain: &Self::PerDomain) -> Self::PerCpu;

    /// Whether one processor's part has room for one more mapping of `lane`. Asked before the
    /// mapping is cleared.
    #[inline]
    fn has_room(&self, own: &Self::PerCpu, lane: BurstKey) -> bool {
        let _ = (own, lane);
        true
    }

    /// Takes over a mapping that has been cleared.
    ///
    /// # Errors
    /// What is owed comes back when an invalidation fails.
    fn queue_unmap<P: Platform>(
        &self,
        shared: &Self::PerDomain,
        own: &mut Self::PerCpu,
        home: FlushContext<'_, S>,
        platform: &mut P,
        item: PendingUnmap<S, B>,
    ) -> Result<Self::Outcome, (InvalidationError, NotInvalidated<B>)>;

    /// Takes over many mappings at once; `each` receives the buffers that are back.
    ///
    /// # Errors
    /// What is owed comes back; the other mappings are taken over.
    #[allow(clippy::type_complexity)]
    fn queue_unmap_many<P: Platform>(
        &self,
        shared: &Self::PerDomain,
        own: &mut Self::PerCpu,
        mut home: FlushContext<'_, S>,
        platform: &mut P,
        items: Vec<PendingUnmap<S, B>>,
        mut each: impl FnMut(B),
    ) -> Result<(), (InvalidationError, Vec<NotInvalidated<B>>)> {
        let mut owed = Vec::new();
        let mut failure = None;
        for item in items {
            match self.queue_unmap(shared, own, home.reborrow(), platform, item) {
                Ok(outcome) => outcome.into_buffer().into_iter().for_each(&mut each),
                Err((error, left)) => {
                    failure = Some(error);
                    owed.push(left);
                }
            }
        }
        failure.map_or(Ok(()), |error| Err((error, owed)))
    }

    /// Runs the timers: called whenever time has passed.
    fn tick<P: Platform>(
        &self,
        shared: &Self::PerDomain,
        home: FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        let _ = (shared, home, platform);
        Ok(())
    }

    /// Flushes everything this policy holds back for the domain (addresses ran out, or the device
    /// is going away).
    fn flush<P: Platform>(
        &self,
        shared: &Self::PerDomain,
        home: FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        let _ = (shared, home, platform);
        Ok(())
    }

    /// Gives up what one processor's part holds back: the processor leaves the domain, or the
    /// domain is going away.
    ///
    /// # Errors
    /// An invalidation failed: what it was to release is held back still.
    fn drain_cpu<P: Platform>(
        &self,
        own: &mut Self::PerCpu,
        home: FlushContext<'_, S>,
        platform: &mut P,
        each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        let _ = (own, home, platform, each);
        Ok(())
    }

    /// Whether one processor's part withholds buffers.
    fn withholds(&self, own: &Self::PerCpu) -> bool {
        let _ = own;
        false
    }

    /// Hands up what one processor's part withholds, with no invalidation: the domain is gone, and
    /// was invalidated when it went.
    fn release_withheld(&self, own: Self::PerCpu, each: impl FnMut(B)) {
        let _ = (own, each);
    }

    /// Ends the burst of one `lane` of one processor and hands its buffers up, each exactly once.
    fn end_burst<P: Platform>(
        &self,
        own: &mut Self::PerCpu,
        home: FlushContext<'_, S>,
        platform: &mut P,
        lane: BurstKey,
        each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        let _ = (own, home, platform, lane, each);
        Ok(())
    }
}

/// What unmap hands to the policy.
pub struct PendingUnmap<S: Space, B> {
    /// What left the space.
    pub result: S::UnmapResult,
    /// The mapping's ring and direction.
    pub burst_key: BurstKey,
    pub(crate) domain_handle: DomainHandle,
    /// The buffer; it may only be let go of once no device reaches it, or the policy's outcome says
    /// that one still may.
    pub buffer: ManuallyDrop<B>,
}

impl<T, S: Space<UnmapResult = ClearedRange<T>>, B> PendingUnmap<S, B>
where
    S::UnmapResult: IotlbSync,
{
    /// What stays with whoever waits for the invalidation.
    #[inline]
    fn into_cleared_mapping(self) -> ClearedMapping<B, T> {
        ClearedMapping {
            range: self.result,
            direction: self.burst_key.direction,
            domain_handle: self.domain_handle,
            buffer: self.buffer,
        }
    }
}

impl<S: Space<UnmapResult = ClearedRange>, B> PendingUnmap<S, B> {
    /// What is owed if the policy cannot take the mapping over.
    #[cold]
    fn into_not_invalidated(self) -> NotInvalidated<B> {
        NotInvalidated {
            mapping: self.into_cleared_mapping(),
        }
    }
}
