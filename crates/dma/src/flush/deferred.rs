//! Invalidation per batch, with one queue for the whole unit: the deferred mode of Linux 3.4
//! (OS11).

use core::mem::ManuallyDrop;

use ringfence_types::{Invalidation, InvalidationError, Lock, Nanos};

use super::{FlushContext, FlushPolicy, PendingUnmap, RangeBatch, ReleasedStale};
use crate::Platform;
use crate::error::UnmapFailure;
use crate::space::AddressSpace;
use crate::token::{ClearedRange, NotInvalidated};

/// The queue that all domains of a unit share.
#[derive(Debug)]
pub struct DeferredQueue {
    batch: RangeBatch,
    /// The time at which the oldest entry was queued.
    armed: Nanos,
}

impl DeferredQueue {
    /// Creates an empty queue for `high_water` ranges.
    pub fn new(high_water: usize) -> Self {
        Self {
            batch: RangeBatch::with_capacity(high_water),
            armed: Nanos(0),
        }
    }
}

/// Collects unmapped ranges in one queue. At `high_water` entries or after `timeout_ns`, one global
/// invalidation releases them all (rIOMMU section 3.2; EIOVAR sections 3 and 6.2; Fujita and Moriai
/// section 2.3: 250 entries, 10 ms). Unmap returns the buffer at once.
#[derive(Debug)]
pub struct Deferred<L> {
    queue: L,
    high_water: usize,
    timeout_ns: u64,
}

impl<L: Lock<DeferredQueue>> Deferred<L> {
    /// Number of entries that triggers a flush (Linux's `HIGH_WATER_MARK`).
    pub const HIGH_WATER: usize = 250;
    /// Age of the oldest entry that triggers a flush, in nanoseconds.
    pub const TIMEOUT_NS: u64 = 10_000_000;

    /// Creates the policy with the papers' parameters. `lock` wraps the queue in the embedder's
    /// lock.
    pub fn new(lock: impl FnOnce(DeferredQueue) -> L) -> Self {
        Self::with(Self::HIGH_WATER, Self::TIMEOUT_NS, lock)
    }

    /// Creates the policy with the given parameters. `high_water` is at least 1.
    pub fn with(high_water: usize, timeout_ns: u64, lock: impl FnOnce(DeferredQueue) -> L) -> Self {
        let high_water = high_water.max(1);
        Self {
            queue: lock(DeferredQueue::new(high_water)),
            high_water,
            timeout_ns,
        }
    }
}

impl<S: AddressSpace<UnmapResult = ClearedRange>, B, L: Lock<DeferredQueue>> FlushPolicy<S, B>
    for Deferred<L>
{
    type PerCpu = ();
    type PerDomain = ();
    type Outcome = ReleasedStale<B>;

    fn per_domain(&self) {}

    fn per_cpu(&self, (): &()) {}

    #[inline]
    fn queue_unmap<P: Platform>(
        &self,
        (): &(),
        (): &mut (),
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
        item: PendingUnmap<ClearedRange, B>,
    ) -> Result<ReleasedStale<B>, (InvalidationError, NotInvalidated<B>)> {
        ctx.sync(platform);
        let now = platform.now();
        self.queue.with(|queue| {
            if queue.batch.len() >= self.high_water {
                // An earlier flush failed. While flushes fail, the caller keeps its mapping: the
                // queue stays bounded.
                if let Err(error) = queue.batch.flush(Invalidation::Global, &mut ctx, platform) {
                    return Err((error, NotInvalidated::new(item)));
                }
            }
            if queue.batch.is_empty() {
                queue.armed = now;
            }
            queue.batch.push(item.result);
            if queue.batch.len() >= self.high_water {
                // If the flush fails, the ranges stay queued and unusable; the next unmap retries.
                let _ = queue.batch.flush(Invalidation::Global, &mut ctx, platform);
            }
            Ok(ReleasedStale(ManuallyDrop::into_inner(item.buffer)))
        })
    }

    fn tick<P: Platform>(
        &self,
        (): &(),
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), UnmapFailure> {
        let now = platform.now();
        self.queue.with(|queue| {
            if !queue.batch.is_empty() && now.since(queue.armed) >= self.timeout_ns {
                queue
                    .batch
                    .flush(Invalidation::Global, &mut ctx, platform)?;
            }
            Ok(())
        })
    }

    fn flush<P: Platform>(
        &self,
        (): &(),
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), UnmapFailure> {
        self.queue
            .with(|queue| queue.batch.flush(Invalidation::Global, &mut ctx, platform))
            .map_err(UnmapFailure::NotFlushed)
    }
}
