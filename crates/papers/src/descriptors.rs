//! Invalidation per descriptor as F&S publishes it (SOSP 2024): one invalidation for 64 pages. The
//! receive path of its driver (`en_rx.c` of the patch) releases the pages of a descriptor one by
//! one, and unmaps all 64 when it releases the last one.

use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use ringfence_dma::flush::{
    BurstKey, FlushContext, FlushPolicy, OpenBursts, PendingUnmap, RangeBatch, ReleasedStale,
};
use ringfence_dma::space::{AddressSpace, ClearedRange, RingSpace};
use ringfence_dma::{NotInvalidated, Platform};
use ringfence_types::{InvalidationError, Pending};

/// Pages of a descriptor.
const DESCRIPTOR_PAGES: u64 = 64;

/// Unmap returns the buffer at once. The 64th page since the last invalidation invalidates all of
/// them and frees their addresses. Until then the device reaches pages that the driver has back,
/// without a time limit: a device that falls silent leaves its descriptor incomplete.
/// [`Descriptors`](ringfence_dma::flush::Descriptors) is the same policy with withheld buffers.
///
/// It differs from the patch in one point: each unmap clears its table entries, where the patch
/// clears all 64 at once. A device without a cached translation then faults, so the exposure here
/// is a lower bound.
///
/// ```
/// # use ringfence_dma::{FlushPolicy, space::{Paged, PlainTable}};
/// # use ringfence_papers::DescriptorsAsPublished;
/// # use ringfence_iova::{CachedTree, Locked};
/// # use ringfence_pgtable::SecondStage;
/// # type Tree = Locked<CachedTree, std::cell::RefCell<CachedTree>>;
/// fn goes_with<F: FlushPolicy<Paged<Tree, PlainTable<SecondStage>>, ()>>() {}
/// goes_with::<DescriptorsAsPublished>();
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct DescriptorsAsPublished;

/// One CPU's incomplete descriptors of one domain, indexed by [`BurstKey`].
#[derive(Debug, Default)]
pub struct IncompleteDescriptors(Vec<Incomplete>);

#[derive(Debug)]
struct Incomplete {
    ranges: RangeBatch,
    pages: u64,
}

impl Incomplete {
    /// Invalidates the ranges and frees their addresses. After an error they stay queued.
    fn invalidate<S: AddressSpace, P: Platform>(
        &mut self,
        ctx: &mut FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        if self.ranges.is_empty() {
            return Ok(());
        }
        ctx.sync(platform);
        let request = self.ranges.narrowest(ctx);
        let batch = core::mem::replace(&mut self.ranges, RangeBatch::with_capacity(0));
        let pending = match Pending::submit(platform.invalidator(), request, batch) {
            Ok(pending) => pending,
            Err((batch, error)) => {
                self.ranges = batch;
                return Err(error);
            }
        };
        match pending.wait(platform.invalidator()) {
            Ok(flushed) => {
                self.ranges = flushed.drain_with(|range| ctx.release(range));
                self.pages = 0;
                Ok(())
            }
            Err((pending, error)) => {
                self.ranges = pending.abandon();
                Err(error)
            }
        }
    }
}

impl<S: RingSpace<UnmapResult = ClearedRange>, B> FlushPolicy<S, B> for DescriptorsAsPublished {
    type PerCpu = IncompleteDescriptors;
    type PerDomain = ();
    type Outcome = ReleasedStale<B>;

    fn per_domain(&self) {}

    fn per_cpu(&self, (): &()) -> IncompleteDescriptors {
        IncompleteDescriptors::default()
    }

    #[inline]
    fn queue_unmap<P: Platform>(
        &self,
        (): &(),
        own: &mut IncompleteDescriptors,
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
        item: PendingUnmap<ClearedRange, B>,
    ) -> Result<ReleasedStale<B>, (InvalidationError, NotInvalidated<B>)> {
        let index = item.burst_key.index();
        if index >= own.0.len() {
            own.0.resize_with(index + 1, || Incomplete {
                ranges: RangeBatch::with_capacity(DESCRIPTOR_PAGES as usize),
                pages: 0,
            });
        }
        if let Some(open) = own.0.get_mut(index) {
            let pages = item.result.unmapped.range().pages();
            open.pages = open.pages.saturating_add(pages);
            open.ranges.push(item.result);
            if open.pages >= DESCRIPTOR_PAGES {
                // A failed invalidation is repeated at the next unmap.
                let _ = open.invalidate(&mut ctx, platform);
            }
        }
        Ok(ReleasedStale(ManuallyDrop::into_inner(item.buffer)))
    }

    fn drain_cpu<P: Platform>(
        &self,
        own: &mut IncompleteDescriptors,
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
        _each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        let mut result = Ok(());
        for open in &mut own.0 {
            result = result.and(open.invalidate(&mut ctx, platform));
        }
        result
    }
}

/// The device's driver ends no burst: only the last page of a descriptor invalidates.
impl<S: AddressSpace, B> OpenBursts<S, B> for IncompleteDescriptors {
    fn end_burst<P: Platform>(
        &mut self,
        _ctx: FlushContext<'_, S>,
        _platform: &mut P,
        _key: BurstKey,
        _each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        Ok(())
    }
}
