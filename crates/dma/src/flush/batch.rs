//! Ranges that one invalidation releases together.

use alloc::vec::Vec;

use ringfence_types::{
    Batch, CachedLevels, DomainId, DrainUnmapped, Invalidation, InvalidationError, Pending,
    PfnRange, Unmapped,
};

use super::FlushContext;
use crate::Platform;
use crate::space::{ClearedRange, Space};

/// Unmapped ranges, with what is needed to choose the invalidation that covers them.
#[derive(Debug)]
pub struct RangeBatch {
    ranges: Vec<Unmapped>,
    /// The one domain of all ranges, or none if there are several.
    domain: Option<DomainId>,
    levels: CachedLevels,
}

/// A hull of up to this many pages is invalidated by address, a larger one by domain: 2 MiB keeps
/// the address mask (VT-d section 6.5.2.3, MAMV) within what every unit supports, and the
/// collateral to one leaf table.
const HULL_PAGES: u64 = 512;

/// Most elements that room is made for in advance: more than any document's batch. Who asks for
/// longer ones, or for batches without end, gets them, grown as they fill.
pub(super) const ROOM: usize = 1024;

impl RangeBatch {
    /// An empty batch for `capacity` ranges, with room for them unless they are very many.
    pub fn with_capacity(capacity: usize) -> Self {
        Self {
            ranges: Vec::with_capacity(capacity.min(ROOM)),
            domain: None,
            levels: CachedLevels::Leaves,
        }
    }

    /// Adds a range.
    #[inline]
    pub fn push(&mut self, gone: ClearedRange) {
        if self.ranges.is_empty() {
            self.domain = Some(gone.unmapped.domain());
        } else if self.domain != Some(gone.unmapped.domain()) {
            self.domain = None;
        }
        self.levels = self.levels.max(gone.levels);
        self.ranges.push(gone.unmapped);
    }

    /// Adds a range; one that follows the last one becomes one with it, for spaces that [release
    /// runs](Space::COALESCES_FREE).
    #[inline]
    pub fn push_run(&mut self, gone: ClearedRange) {
        let joined = match self.ranges.last_mut() {
            Some(last) => last.append(gone.unmapped),
            None => Err(gone.unmapped),
        };
        match joined {
            Ok(()) => self.levels = self.levels.max(gone.levels),
            Err(unmapped) => self.push(ClearedRange { unmapped, ..gone }),
        }
    }

    /// Takes all ranges of `other`.
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

    /// Number of ranges.
    #[inline]
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The narrowest single invalidation that covers the batch.
    pub fn narrowest<S: Space>(&self, home: &FlushContext<'_, S>) -> Invalidation {
        match (self.domain, self.hull()) {
            (Some(domain), Some(range)) => match home.invalidation(domain, range, self.levels) {
                Invalidation::Pages { range, .. } if range.pages() > HULL_PAGES => {
                    Invalidation::Domain(domain)
                }
                exact => exact,
            },
            (Some(domain), None) => Invalidation::Domain(domain),
            (None, _) => Invalidation::Global,
        }
    }

    /// Lowest and highest page of all ranges. Looked for when it is asked for, once a batch, and
    /// not kept up range by range.
    fn hull(&self) -> Option<PfnRange> {
        let mut ranges = self.ranges.iter().map(Unmapped::range);
        let first = ranges.next()?;
        ranges.try_fold(first, |hull, range| {
            PfnRange::inclusive(hull.lo().min(range.lo()), hull.hi().max(range.hi()))
        })
    }

    /// Which cached entries the invalidation must remove.
    pub fn levels(&self) -> CachedLevels {
        self.levels
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

/// Invalidates a batch and gives its ranges home. The batch comes back: empty, or as it was on an
/// error.
pub(super) fn submit_and_release<S: Space, P: Platform>(
    request: Invalidation,
    batch: RangeBatch,
    home: &mut FlushContext<'_, S>,
    platform: &mut P,
) -> (RangeBatch, Result<(), InvalidationError>) {
    home.sync(platform);
    let pending = match Pending::submit(platform.invalidator(), request, batch) {
        Ok(pending) => pending,
        Err((batch, error)) => return (batch, Err(error)),
    };
    match pending.wait(platform.invalidator()) {
        Ok(flushed) => (flushed.drain_with(|range| home.release(range)), Ok(())),
        Err((pending, error)) => (pending.abandon(), Err(error)),
    }
}
