//! Invalidation per batch, with one queue per domain and CPU: the deferred mode of current Linux.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use ringfence_types::{DrainUnmapped, Invalidation, InvalidationError, Lock, Nanos};

use super::batch::submit_and_release;
use super::{Flush, FlushContext, PendingUnmap, RangeBatch, ReleasedStale};
use crate::space::{ClearedRange, Space};
use crate::{NotInvalidated, Platform};

/// Parameters of the queues. The defaults are Linux's (`IOVA_DEFAULT_FQ_SIZE`,
/// `IOVA_DEFAULT_FQ_TIMEOUT`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConfig {
    /// Number of entries that triggers a flush of the queue.
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
    /// Number of this queue's ranges that a timer is flushing now. They count as queued, because
    /// they return to the queue if the flush fails.
    flushing: usize,
}

impl FlushQueue {
    fn is_full(&self, config: &QueueConfig) -> bool {
        self.batch.len().saturating_add(self.flushing) >= config.entries
    }
}

/// Each CPU queues its unmapped ranges in its own queue. A full queue flushes the domain and frees
/// its ranges. A timer flushes the domain and frees the ranges of all queues. Only the timer
/// contends for a queue's lock. A queue never holds more than its configured entries plus one, even
/// if the timer's flush fails repeatedly.
#[derive(Debug)]
pub struct PerCpuQueue<L, M> {
    config: QueueConfig,
    queue_lock: fn(FlushQueue) -> L,
    list_lock: fn(Vec<Arc<L>>) -> M,
}

impl<L: Lock<FlushQueue>, M: Lock<Vec<Arc<L>>>> PerCpuQueue<L, M> {
    /// Creates the policy. The two functions create the embedder's locks, for a queue and for a
    /// domain's list of queues.
    pub fn new(
        config: QueueConfig,
        queue_lock: fn(FlushQueue) -> L,
        list_lock: fn(Vec<Arc<L>>) -> M,
    ) -> Self {
        Self {
            config,
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

    /// Flushes the ranges of one queue with one invalidation of their domain.
    fn flush_queue<S: Space, P: Platform>(
        ring: &mut FlushQueue,
        home: &mut FlushContext<'_, S>,
        platform: &mut P,
        domain: ringfence_types::DomainId,
    ) -> Result<(), InvalidationError> {
        if ring.batch.is_empty() {
            return Ok(());
        }
        let batch = core::mem::replace(&mut ring.batch, RangeBatch::with_capacity(0));
        let (batch, result) =
            submit_and_release(Invalidation::Domain(domain), batch, home, platform);
        ring.batch = batch;
        result
    }

    /// Collects the ranges of all queues and flushes them with one invalidation.
    fn flush_all<S: Space, P: Platform>(
        &self,
        rings: &M,
        home: &mut FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        let domain = home.domain();
        let mut all = RangeBatch::with_capacity(0);
        let mut lenders: Vec<(Arc<L>, usize, Nanos)> = Vec::new();
        rings.with(|rings| {
            for ring in rings.iter() {
                let (count, armed) = ring.with(|ring| {
                    let count = ring.batch.len();
                    ring.flushing = ring.flushing.saturating_add(count);
                    all.append(&mut ring.batch);
                    (count, ring.armed)
                });
                if count > 0 {
                    lenders.push((Arc::clone(ring), count, armed));
                }
            }
        });
        if lenders.is_empty() {
            return Ok(());
        }
        let (mut left, result) =
            submit_and_release(Invalidation::Domain(domain), all, home, platform);
        // After a failure each queue gets its own ranges back, so no queue exceeds its bound. The
        // ranges stay unusable until a later flush succeeds. They keep their age, even if the CPU
        // has queued newer ranges meanwhile.
        let levels = left.levels();
        let mut lenders = lenders.into_iter();
        let mut current = lenders.next();
        left.drain_unmapped(|unmapped| {
            while let Some((ring, count, armed)) = &mut current {
                if *count > 0 {
                    *count -= 1;
                    let gone = ClearedRange {
                        unmapped,
                        levels,
                        tables: (),
                    };
                    ring.with(|ring| {
                        ring.flushing = ring.flushing.saturating_sub(1);
                        ring.armed = ring.armed.min(*armed);
                        ring.batch.push(gone);
                    });
                    return;
                }
                current = lenders.next();
            }
        });
        for (ring, count, _) in current.into_iter().chain(lenders) {
            ring.with(|ring| ring.flushing = ring.flushing.saturating_sub(count));
        }
        result
    }
}

impl<S: Space<UnmapResult = ClearedRange>, B, L: Lock<FlushQueue>, M: Lock<Vec<Arc<L>>>> Flush<S, B>
    for PerCpuQueue<L, M>
{
    type PerCpu = Arc<L>;
    type PerDomain = M;
    type Outcome = ReleasedStale<B>;

    fn per_domain(&self) -> M {
        (self.list_lock)(Vec::new())
    }

    fn per_cpu(&self, rings: &M) -> Arc<L> {
        let ring = Arc::new((self.queue_lock)(self.empty_queue()));
        rings.with(|rings| {
            // Drop queues whose handles were dropped, once they are empty.
            rings.retain(|ring| {
                Arc::strong_count(ring) > 1 || ring.with(|ring| !ring.batch.is_empty())
            });
            rings.push(Arc::clone(&ring));
        });
        ring
    }

    #[inline]
    fn queue_unmap<P: Platform>(
        &self,
        _rings: &M,
        own: &mut Arc<L>,
        mut home: FlushContext<'_, S>,
        platform: &mut P,
        item: PendingUnmap<S, B>,
    ) -> Result<ReleasedStale<B>, (InvalidationError, NotInvalidated<B>)> {
        home.sync(platform);
        let now = platform.now();
        let domain = item.result.unmapped.domain();
        own.with(|ring| {
            if ring.is_full(&self.config) {
                // If the flush fails, the ranges stay queued and the caller keeps this mapping: the
                // queue stays bounded.
                if let Err(error) = Self::flush_queue(ring, &mut home, platform, domain) {
                    return Err((error, item.into_not_invalidated()));
                }
            }
            if ring.batch.is_empty() {
                ring.armed = now;
            }
            ring.batch.push(item.result);
            Ok(ReleasedStale(ManuallyDrop::into_inner(item.buffer)))
        })
    }

    /// Flushes the CPU's queue. The next [`per_cpu`](Flush::per_cpu) drops the queue itself.
    fn drain_cpu<P: Platform>(
        &self,
        own: &mut Arc<L>,
        mut home: FlushContext<'_, S>,
        platform: &mut P,
        _each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        let domain = home.domain();
        own.with(|ring| Self::flush_queue(ring, &mut home, platform, domain))
    }

    fn tick<P: Platform>(
        &self,
        rings: &M,
        mut home: FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        let now = platform.now();
        let due = rings.with(|rings| {
            rings.iter().any(|ring| {
                ring.with(|ring| {
                    !ring.batch.is_empty() && now.since(ring.armed) >= self.config.timeout_ns
                })
            })
        });
        if due {
            self.flush_all(rings, &mut home, platform)
        } else {
            Ok(())
        }
    }

    fn flush<P: Platform>(
        &self,
        rings: &M,
        mut home: FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        self.flush_all(rings, &mut home, platform)
    }
}
