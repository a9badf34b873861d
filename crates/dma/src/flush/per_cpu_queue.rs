//! Invalidation per batch, with one queue per domain and CPU: the deferred mode of current Linux.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use ringfence_types::{DomainId, DrainUnmapped, Invalidation, InvalidationError, Lock, Nanos};

use super::batch::submit_and_release;
use super::{
    FlushContext, FlushPolicy, OpenBursts, PendingUnmap, RangeBatch, Released, ReleasedStale,
    Strict,
};
use crate::Platform;
use crate::error::UnmapFailure;
use crate::space::AddressSpace;
use crate::token::{ClearedRange, NotInvalidated};

/// Parameters of the queues. The defaults are Linux's (`IOVA_DEFAULT_FQ_SIZE`,
/// `IOVA_DEFAULT_FQ_TIMEOUT`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConfig {
    /// Number of entries that triggers a flush of the queue. At least 1.
    pub entries: usize,
    /// Age of the oldest entry that triggers a flush of all queues of a domain.
    pub timeout_ns: u64,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            entries: 256,
            timeout_ns: 10_000_000,
        }
    }
}

/// The queue of one CPU for one domain. Aligned so that two CPUs' queues share no cache line.
#[derive(Debug)]
#[repr(align(128))]
pub struct FlushQueue {
    batch: RangeBatch,
    armed: Nanos,
    /// Number of this queue's ranges that a flush of all queues has taken. They count as queued,
    /// because they return to the queue if the flush fails.
    flushing: usize,
}

impl FlushQueue {
    fn is_full(&self, config: &QueueConfig) -> bool {
        self.batch.len().saturating_add(self.flushing) >= config.entries
    }

    /// Flushes the ranges with one invalidation of their domain. Ranges that a flush of all queues
    /// has taken do not count.
    fn flush<S: AddressSpace, P: Platform>(
        &mut self,
        ctx: &mut FlushContext<'_, S>,
        platform: &mut P,
        domain: DomainId,
    ) -> Result<(), InvalidationError> {
        self.batch
            .flush(Invalidation::Domain(domain), ctx, platform)
    }

    /// Moves the ranges to `all` for a flush of all queues. Returns their number.
    fn take_into(&mut self, all: &mut RangeBatch) -> usize {
        let count = self.batch.len();
        self.flushing = self.flushing.saturating_add(count);
        all.append(&mut self.batch);
        count
    }

    /// Queues a range again whose flush failed. The range keeps its age, even if the CPU has queued
    /// newer ranges.
    fn restore(&mut self, cleared: ClearedRange, armed: Nanos) {
        self.flushing = self.flushing.saturating_sub(1);
        self.armed = self.armed.min(armed);
        self.batch.push(cleared);
    }
}

/// The part of one queue in a flush of all queues.
struct Taken<L> {
    queue: Arc<L>,
    count: usize,
    armed: Nanos,
}

/// Each CPU queues its unmapped ranges in its own queue. A full queue flushes the domain and frees
/// its ranges. A flush of all queues frees the ranges of all CPUs; timers start it, and so do CPUs
/// that run out of addresses. A queue's lock is contended only by such a flush and by the creation
/// of another CPU's handle.
///
/// A queue never holds more than its configured entries, even if flushes fail repeatedly. If a
/// flush of all queues has taken the entries of a full queue, unmap invalidates its range alone.
///
/// ```
/// use std::sync::Mutex;
///
/// use ringfence_dma::flush::{PerCpuQueue, QueueConfig};
/// use ringfence_dma::space::{Paged, PlainTable, Rounding};
/// use ringfence_dma::{Dma, ReleasedStale};
/// use ringfence_iova::{MagazineLimits, Magazines};
/// # use ringfence_dma::Platform;
/// # use ringfence_memory::{Arena, Frames};
/// # use ringfence_pgtable::{Coherency, Levels, SecondStage, Table};
/// # use ringfence_types::{
/// #     Direction, Invalidation, InvalidationError, Invalidator, Iova, Nanos, Pfn, PfnRange,
/// #     PhysAddr, PhysRange, RequesterId, Ticket,
/// # };
/// #
/// # /// The ports of one CPU. The invalidator counts.
/// # struct Ports<'a> {
/// #     memory: &'a Arena,
/// #     frames: &'a Frames<&'a Arena>,
/// #     invalidations: u64,
/// #     now: Nanos,
/// # }
/// # impl Invalidator for Ports<'_> {
/// #     fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
/// #         self.invalidations += 1;
/// #         Ok(Ticket::new(self.invalidations))
/// #     }
/// #     fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
/// #         Ok(true)
/// #     }
/// # }
/// # impl<'a> Platform for Ports<'a> {
/// #     type Memory = Arena;
/// #     type Frames = Frames<&'a Arena>;
/// #     type Invalidator = Self;
/// #     fn memory(&self) -> &Arena {
/// #         self.memory
/// #     }
/// #     fn frames(&self) -> &Self::Frames {
/// #         self.frames
/// #     }
/// #     fn invalidator(&mut self) -> &mut Self {
/// #         self
/// #     }
/// #     fn now(&self) -> Nanos {
/// #         self.now
/// #     }
/// # }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let memory = Arena::new(16 << 20)?;
/// # let tables = PhysRange::new(PhysAddr::new(8 << 20), 8 << 20).ok_or("no room for tables")?;
/// # let frames = Frames::new(&memory, tables);
/// # let mut ports = Ports { memory: &memory, frames: &frames, invalidations: 0, now: Nanos(0) };
/// # let nic = RequesterId::from_parts(0, 3, 0).ok_or("no such function")?;
/// # let mask = Iova::new(u64::from(u32::MAX));
/// # let pages = PfnRange::inclusive(Pfn::new(1), Pfn::new(0xf_ffff)).ok_or("no space")?;
/// # let bytes = PhysRange::new(PhysAddr::new(0x5040), 1500).ok_or("no buffer")?;
/// // Your spin lock in place of `Mutex`.
/// let mut dma = Dma::new(PerCpuQueue::new(QueueConfig::default(), Mutex::new, Mutex::new));
/// let at = dma.attach(nic, mask, |domain| {
///     let addresses = Magazines::new(pages, MagazineLimits::DEFAULT, Mutex::new)?;
///     let format = SecondStage::new(Levels::Four);
///     let table = Table::new(format, domain, Coherency::Coherent, &memory, &frames)?;
///     let space = Paged::new(addresses, PlainTable(table), Rounding::Exact);
///     Ok::<_, Box<dyn std::error::Error>>(space)
/// })?;
/// let mut cpu = dma.cpu();
///
/// let (mapping, _) = dma
///     .map_single(&mut cpu, &mut ports, &at, "rx buffer", bytes, Direction::FromDevice)
///     .map_err(|(_, error)| error)?;
/// // The type says that the device may still reach the buffer.
/// let ReleasedStale(buffer) = dma.unmap_single(&mut cpu, &mut ports, &at, mapping)?;
/// assert_eq!((buffer, ports.invalidations), ("rx buffer", 0));
///
/// // Your timer calls `tick`. After 10 ms it invalidates the domain and frees the addresses.
/// ports.now = Nanos(10_000_000);
/// dma.tick(&mut cpu, &mut ports)?;
/// assert_eq!(ports.invalidations, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PerCpuQueue<L, M> {
    config: QueueConfig,
    queue_lock: fn(FlushQueue) -> L,
    list_lock: fn(Vec<Arc<L>>) -> M,
}

impl<L: Lock<FlushQueue>, M: Lock<Vec<Arc<L>>>> PerCpuQueue<L, M> {
    /// Creates the policy. `config.entries` is at least 1. The two functions create the embedder's
    /// locks, for a queue and for a domain's list of queues.
    pub fn new(
        config: QueueConfig,
        queue_lock: fn(FlushQueue) -> L,
        list_lock: fn(Vec<Arc<L>>) -> M,
    ) -> Self {
        Self {
            config: QueueConfig {
                entries: config.entries.max(1),
                ..config
            },
            queue_lock,
            list_lock,
        }
    }

    fn empty_queue(&self) -> FlushQueue {
        FlushQueue {
            batch: RangeBatch::with_capacity(self.config.entries),
            armed: Nanos(0),
            flushing: 0,
        }
    }

    /// Collects the ranges of all queues and flushes them with one invalidation. After a failure
    /// each queue gets its own ranges back, so no queue exceeds its bound. The ranges stay unusable
    /// until a later flush succeeds.
    fn flush_all<S: AddressSpace, P: Platform>(
        queues: &M,
        ctx: &mut FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        let mut all = RangeBatch::with_capacity(0);
        let taken = Self::collect(queues, &mut all);
        if taken.is_empty() {
            return Ok(());
        }
        let request = Invalidation::Domain(ctx.domain());
        let (left, result) = submit_and_release(request, all, ctx, platform);
        Self::restore_all(taken, left);
        result
    }

    /// Moves the ranges of all queues to `all`.
    fn collect(queues: &M, all: &mut RangeBatch) -> Vec<Taken<L>> {
        let mut taken = Vec::new();
        queues.with(|queues| {
            for queue in queues.iter() {
                let (count, armed) = queue.with(|queue| (queue.take_into(all), queue.armed));
                if count > 0 {
                    taken.push(Taken {
                        queue: Arc::clone(queue),
                        count,
                        armed,
                    });
                }
            }
        });
        taken
    }

    /// Returns the ranges in `left` to their queues. The queues forget the other taken ranges.
    fn restore_all(taken: Vec<Taken<L>>, mut left: RangeBatch) {
        let levels = left.levels();
        let mut taken = taken.into_iter();
        let mut current = taken.next();
        left.drain_unmapped(|unmapped| {
            while let Some(part) = &mut current {
                if part.count > 0 {
                    part.count -= 1;
                    let cleared = ClearedRange {
                        unmapped,
                        levels,
                        tables: (),
                    };
                    part.queue.with(|queue| queue.restore(cleared, part.armed));
                    return;
                }
                current = taken.next();
            }
        });
        for part in current.into_iter().chain(taken) {
            part.queue
                .with(|queue| queue.flushing = queue.flushing.saturating_sub(part.count));
        }
    }
}

impl<S: AddressSpace<UnmapResult = ClearedRange>, B, L: Lock<FlushQueue>, M: Lock<Vec<Arc<L>>>>
    FlushPolicy<S, B> for PerCpuQueue<L, M>
{
    type PerCpu = Arc<L>;
    type PerDomain = M;
    type Outcome = ReleasedStale<B>;

    fn per_domain(&self) -> M {
        (self.list_lock)(Vec::new())
    }

    fn per_cpu(&self, queues: &M) -> Arc<L> {
        let own = Arc::new((self.queue_lock)(self.empty_queue()));
        queues.with(|queues| {
            // Drop queues whose handles were dropped, once they are empty.
            queues.retain(|queue| {
                Arc::strong_count(queue) > 1 || queue.with(|queue| !queue.batch.is_empty())
            });
            queues.push(Arc::clone(&own));
        });
        own
    }

    #[inline]
    fn queue_unmap<P: Platform>(
        &self,
        _queues: &M,
        own: &mut Arc<L>,
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
        item: PendingUnmap<ClearedRange, B>,
    ) -> Result<ReleasedStale<B>, (InvalidationError, NotInvalidated<B>)> {
        ctx.sync(platform);
        let now = platform.now();
        let domain = item.result.unmapped.domain();
        own.with(|queue| {
            if queue.is_full(&self.config) {
                // If the flush fails, the ranges stay queued and the caller keeps this mapping: the
                // queue stays bounded.
                if let Err(error) = queue.flush(&mut ctx, platform, domain) {
                    return Err((error, NotInvalidated::new(item)));
                }
                if queue.is_full(&self.config) {
                    // A flush of all queues holds the entries, and returns them if it fails.
                    return Strict::invalidate(&mut ctx, platform, item)
                        .map(|Released(buffer)| ReleasedStale(buffer));
                }
            }
            if queue.batch.is_empty() {
                queue.armed = now;
            }
            queue.batch.push(item.result);
            Ok(ReleasedStale(ManuallyDrop::into_inner(item.buffer)))
        })
    }

    /// Flushes the CPU's queue. The next [`per_cpu`](FlushPolicy::per_cpu) drops the queue itself.
    fn drain_cpu<P: Platform>(
        &self,
        own: &mut Arc<L>,
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
        _each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        let domain = ctx.domain();
        own.with(|queue| queue.flush(&mut ctx, platform, domain))
    }

    fn tick<P: Platform>(
        &self,
        queues: &M,
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), UnmapFailure> {
        let now = platform.now();
        let is_due = |queue: &mut FlushQueue| {
            !queue.batch.is_empty() && now.since(queue.armed) >= self.config.timeout_ns
        };
        if queues.with(|queues| queues.iter().any(|queue| queue.with(is_due))) {
            Self::flush_all(queues, &mut ctx, platform).map_err(UnmapFailure::NotFlushed)
        } else {
            Ok(())
        }
    }

    fn flush<P: Platform>(
        &self,
        queues: &M,
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), UnmapFailure> {
        Self::flush_all(queues, &mut ctx, platform).map_err(UnmapFailure::NotFlushed)
    }
}

impl<S: AddressSpace, B, L> OpenBursts<S, B> for Arc<L> {}
