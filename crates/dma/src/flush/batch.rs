//! Ranges that one invalidation releases together.

use alloc::vec::Vec;

use ringfence_types::{
    Batch, CachedLevels, DomainId, DrainUnmapped, Invalidation, InvalidationError, Pending,
    PfnRange, Unmapped,
};

use super::FlushContext;
use crate::Platform;
use crate::space::AddressSpace;
use crate::token::ClearedRange;

/// Unmapped ranges, with the state needed to choose an invalidation that covers them.
#[derive(Debug)]
pub struct RangeBatch {
    ranges: Vec<Unmapped>,
    /// The domain of all ranges. `None` if they belong to several domains.
    domain: Option<DomainId>,
    levels: CachedLevels,
}

/// Largest hull, in pages, that is invalidated by address; a larger one is invalidated by domain. 2
/// MiB keeps the address mask (VT-d section 6.5.2.3, MAMV) within the limits of every unit, and the
/// unneeded invalidations within one leaf table.
const HULL_PAGES: u64 = 512;

/// Binary logarithm of the pages of a block, the length of a descriptor of F&S.
const BLOCK_ORDER: u32 = 6;

/// Largest number of blocks that are invalidated one by one. A descriptor of 64 pages lies in two
/// if its pages are unmapped in order; more belong to drivers that unmap out of order.
const MOST_BLOCKS: usize = 8;

/// Returns the number of the block in which a range begins.
#[inline]
fn block_of(unmapped: &Unmapped) -> u64 {
    unmapped.range().lo().get() >> BLOCK_ORDER
}

/// Largest number of elements that are allocated in advance: larger than any paper's batch. Larger
/// and unbounded batches grow as they fill.
pub(super) const ROOM: usize = 1024;

impl RangeBatch {
    /// Creates an empty batch for `capacity` ranges. Allocates space for at most 1024 ranges in
    /// advance.
    pub fn with_capacity(capacity: usize) -> Self {
        Self {
            ranges: Vec::with_capacity(capacity.min(ROOM)),
            domain: None,
            levels: CachedLevels::Leaves,
        }
    }

    /// Adds a range.
    #[inline]
    pub fn push(&mut self, cleared: ClearedRange) {
        if self.ranges.is_empty() {
            self.domain = Some(cleared.unmapped.domain());
        } else if self.domain != Some(cleared.unmapped.domain()) {
            self.domain = None;
        }
        self.levels = self.levels.max(cleared.levels);
        self.ranges.push(cleared.unmapped);
    }

    /// Adds a range. Merges it with the last one if the two are adjacent. For spaces that [free
    /// merged ranges](crate::space::RingSpace::COALESCES_FREE).
    #[inline]
    pub fn push_run(&mut self, cleared: ClearedRange) {
        let joined = match self.ranges.last_mut() {
            Some(last) => last.append(cleared.unmapped),
            None => Err(cleared.unmapped),
        };
        match joined {
            Ok(()) => self.levels = self.levels.max(cleared.levels),
            Err(unmapped) => self.push(ClearedRange {
                unmapped,
                ..cleared
            }),
        }
    }

    /// Moves all ranges of `other` into this batch.
    pub fn append(&mut self, other: &mut Self) {
        let levels = other.levels;
        for unmapped in other.ranges.drain(..) {
            self.push(ClearedRange {
                unmapped,
                levels,
                tables: (),
            });
        }
        other.reset();
    }

    /// Returns the number of ranges.
    #[inline]
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Returns true if the batch holds no range.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns the narrowest single invalidation that covers the batch.
    pub fn narrowest<S: AddressSpace>(&self, ctx: &FlushContext<'_, S>) -> Invalidation {
        match (self.domain, self.hull()) {
            (Some(domain), Some(range)) => match ctx.invalidation(domain, range, self.levels) {
                Invalidation::Pages { range, .. } if range.pages() > HULL_PAGES => {
                    Invalidation::Domain(domain)
                }
                exact => exact,
            },
            (Some(domain), None) => Invalidation::Domain(domain),
            (None, _) => Invalidation::Global,
        }
    }

    /// Returns the range from the lowest to the highest page. Computed once per batch; `push` does
    /// not maintain it.
    fn hull(&self) -> Option<PfnRange> {
        let mut ranges = self.ranges.iter().map(Unmapped::range);
        let first = ranges.next()?;
        ranges.try_fold(first, |hull, range| {
            PfnRange::inclusive(hull.lo().min(range.lo()), hull.hi().max(range.hi()))
        })
    }

    /// Returns the kinds of cached entries that the invalidation must remove.
    pub fn levels(&self) -> CachedLevels {
        self.levels
    }

    /// Invalidates the batch by `request` and releases its ranges. After an error the batch keeps
    /// them. Submits nothing for an empty batch.
    pub(super) fn flush<S: AddressSpace, P: Platform>(
        &mut self,
        request: Invalidation,
        ctx: &mut FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        if self.is_empty() {
            return Ok(());
        }
        let batch = core::mem::replace(self, Self::with_capacity(0));
        let (batch, result) = submit_and_release(request, batch, ctx, platform);
        *self = batch;
        result
    }

    /// Invalidates the batch and releases its ranges. Up to [`MOST_BLOCKS`] blocks of 64 pages that
    /// are far apart are invalidated by address, one by one, with one wait for all: other
    /// translations and the walk caches of the domain stay valid. After an error the batch keeps
    /// the ranges that were not invalidated.
    pub(super) fn flush_by_block<S: AddressSpace, P: Platform>(
        &mut self,
        ctx: &mut FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        let whole = self.narrowest(ctx);
        if self.domain.is_none() || matches!(whole, Invalidation::Pages { .. }) {
            return self.flush(whole, ctx, platform);
        }
        self.ranges
            .sort_unstable_by_key(|unmapped| unmapped.range().lo());
        let starts_block = |pair: &[Unmapped]| match pair {
            [before, after] => block_of(before) != block_of(after),
            _ => false,
        };
        let blocks = 1 + self
            .ranges
            .windows(2)
            .filter(|pair| starts_block(pair))
            .count();
        if blocks > MOST_BLOCKS {
            return self.flush(whole, ctx, platform);
        }
        ctx.sync(platform);
        let mut left = Self::with_capacity(0);
        let mut result = Ok(());
        let mut submitted = Vec::with_capacity(blocks);
        while let Some(last) = self.ranges.last() {
            let block = block_of(last);
            let first = self.ranges.partition_point(|range| block_of(range) < block);
            let part = Self {
                ranges: self.ranges.split_off(first),
                domain: self.domain,
                levels: self.levels,
            };
            let request = part.narrowest(ctx);
            match Pending::submit(platform.invalidator(), request, part) {
                Ok(pending) => submitted.push(pending),
                Err((mut part, error)) => {
                    result = Err(error);
                    left.append(&mut part);
                }
            }
        }
        for pending in submitted {
            match pending.wait(platform.invalidator()) {
                Ok(flushed) => drop(flushed.drain_with(|range| ctx.release(range))),
                Err((pending, error)) => {
                    result = Err(error);
                    left.append(&mut pending.abandon());
                }
            }
        }
        self.reset();
        self.append(&mut left);
        result
    }

    fn reset(&mut self) {
        self.domain = None;
        self.levels = CachedLevels::Leaves;
    }
}

impl Batch for RangeBatch {
    #[inline]
    fn covered_by(&self, request: &Invalidation) -> bool {
        match (self.domain, self.hull()) {
            (Some(domain), Some(hull)) => request.covers(domain, &hull, self.levels),
            (None, Some(_)) => matches!(request, Invalidation::Global),
            _ => true,
        }
    }
}

impl DrainUnmapped for RangeBatch {
    #[inline]
    fn drain_unmapped(&mut self, each: impl FnMut(Unmapped)) {
        self.ranges.drain(..).for_each(each);
        self.reset();
    }
}

/// Invalidates a batch and releases its ranges. Returns the batch: empty, or unchanged after an
/// error.
pub(super) fn submit_and_release<S: AddressSpace, P: Platform>(
    request: Invalidation,
    batch: RangeBatch,
    ctx: &mut FlushContext<'_, S>,
    platform: &mut P,
) -> (RangeBatch, Result<(), InvalidationError>) {
    ctx.sync(platform);
    let pending = match Pending::submit(platform.invalidator(), request, batch) {
        Ok(pending) => pending,
        Err((batch, error)) => return (batch, Err(error)),
    };
    match pending.wait(platform.invalidator()) {
        Ok(flushed) => (flushed.drain_with(|range| ctx.release(range)), Ok(())),
        Err((pending, error)) => (pending.abandon(), Err(error)),
    }
}
