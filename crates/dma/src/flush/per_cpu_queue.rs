//! Per batch, per domain and processor: the deferred mode of today's Linux.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use ringfence_types::{DrainUnmapped, Invalidation, InvalidationError, Lock, Nanos};

use super::batch::submit_and_release;
use super::{Flush, FlushContext, PendingUnmap, RangeBatch, ReleasedStale};
use crate::space::{ClearedRange, Space};
use crate::{NotInvalidated, Platform};

/// Parameters of the queues; the default is Linux's (`IOVA_DEFAULT_FQ_SIZE`,
/// `IOVA_DEFAULT_FQ_TIMEOUT`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConfig {
    /// Entries a ring holds before it is flushed.
    pub entries: usize,
    /// Time after which all rings of a domain are flushed.
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

/// One processor's queue of one domain. Aligned so that two processors' queues never share a line.
#[derive(Debug)]
#[repr(align(128))]
pub struct FlushQueue {
    batch: RangeBatch,
    armed: Nanos,
    /// Ranges of this ring that a timer is flushing at the moment. They count as queued, because
    /// they come back if it fails.
    flushing: usize,
}

impl FlushQueue {
    fn is_full(&self, config: &QueueConfig) -> bool {
        self.batch.len().saturating_add(self.flushing) >= config.entries
    }
}

/// Each processor queues its unmapped ranges in a ring of its own; a full ring flushes the domain
/// and frees that ring, a timer flushes the domain and frees all of its rings. The rings' locks are
/// uncontended but for the timer. A ring never holds more than its entries and one, even if the
/// timer's flush fails again and again.
#[derive(Debug)]
pub struct PerCpuQueue<L, M> {
    config: QueueConfig,
    queue_lock: fn(FlushQueue) -> L,
    list_lock: fn(Vec<Arc<L>>) -> M,
}

impl<L: Lock<FlushQueue>, M: Lock<Vec<Arc<L>>>> PerCpuQueue<L, M> {
    /// The policy; the two functions put the embedder's locks around a ring and around a domain's
    /// list of rings.
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

    /// Flushes one ring's ranges by one invalidation of their domain.
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

    /// Collects what all rings hold, then flushes it by one invalidation.
    fn flush_all<S: Space, P: Platform>(
        &self,
        rings: &M,
        home: &mut FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        let domain = home.domain();
        let mut all = RangeBatch::with_capacity(0);
        let mut lenders: Vec<(Arc<L>, usize)> = Vec::new();
        rings.with(|rings| {
            for ring in rings.iter() {
                let count = ring.with(|ring| {
                    let count = ring.batch.len();
                    ring.flushing = ring.flushing.saturating_add(count);
                    all.append(&mut ring.batch);
                    count
                });
                if count > 0 {
                    lenders.push((Arc::clone(ring), count));
                }
            }
        });
        if lenders.is_empty() {
            return Ok(());
        }
        let (mut left, result) =
            submit_and_release(Invalidation::Domain(domain), all, home, platform);
        // After a failure each ring has its own ranges back, unusable until another flush, so that
        // no ring outgrows its bound.
        let levels = left.levels();
        let mut lenders = lenders.into_iter();
        let mut current = lenders.next();
        left.drain_unmapped(|unmapped| {
            while let Some((ring, count)) = &mut current {
                if *count > 0 {
                    *count -= 1;
                    let gone = ClearedRange {
                        unmapped,
                        levels,
                        tables: (),
                    };
                    ring.with(|ring| {
                        ring.flushing = ring.flushing.saturating_sub(1);
                        ring.batch.push(gone);
                    });
                    return;
                }
                current = lenders.next();
            }
        });
        for (ring, count) in current.into_iter().chain(lenders) {
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
            // Rings of handles that are gone are forgotten once they are empty.
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
                // A failed flush keeps the ranges queued, and this mapping is still owed: memory
                // stays bounded.
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

    /// The ring itself is forgotten when the next handle is made.
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
