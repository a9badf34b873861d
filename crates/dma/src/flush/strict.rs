//! Invalidation per unmap: the strict mode of all the papers (OS09).

use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use ringfence_types::{DrainUnmapped, InvalidationError};

use super::batch::submit_and_release;
use super::{FlushContext, FlushPolicy, PendingUnmap, RangeBatch, Released, queue_one_by_one};
use crate::Platform;
use crate::space::{AddressSpace, EndsAtUnmap, SpaceUnmap, TablePages};
use crate::token::{ClearedRange, NotInvalidated};

/// One invalidation per unmap. The layer waits for it before it returns the buffer and frees the
/// addresses (rIOMMU Fig. 6: clear the entry, invalidate the IOTLB, free the IOVA, return the
/// buffer, in this order).
#[derive(Debug, Clone, Copy, Default)]
pub struct Strict;

impl Strict {
    /// Invalidates a cleared mapping. If the invalidation fails, its table pages are leaked.
    #[inline]
    pub(crate) fn invalidate<S: AddressSpace, T: TablePages, B, P: Platform>(
        ctx: &mut FlushContext<'_, S>,
        platform: &mut P,
        mapping: PendingUnmap<ClearedRange<T>, B>,
    ) -> Result<Released<B>, (InvalidationError, NotInvalidated<B>)> {
        let (cleared, pending) = mapping.split();
        match ctx.invalidate_and_release(cleared, platform) {
            Ok(()) => Ok(Released(ManuallyDrop::into_inner(pending.buffer))),
            Err((error, cleared)) => Err((error, NotInvalidated::new(pending.with(cleared)))),
        }
    }
}

impl<S: AddressSpace> FlushContext<'_, S> {
    /// Invalidates a cleared range of the current space and releases it.
    ///
    /// # Errors
    /// Returns the range.
    #[inline]
    pub(crate) fn invalidate_and_release<T: TablePages, P: Platform>(
        &mut self,
        cleared: ClearedRange<T>,
        platform: &mut P,
    ) -> Result<(), (InvalidationError, ClearedRange)> {
        self.sync(platform);
        let request = self.invalidation_of(&cleared);
        cleared
            .invalidate(request, platform)
            .map(|range| self.release(range))
    }

    /// Invalidates and releases what an unmap of the current space cleared.
    ///
    /// # Errors
    /// Returns the cleared range for another attempt. Dropping it leaks its addresses.
    pub(crate) fn iotlb_sync<P: Platform>(
        &mut self,
        unmapped: impl SpaceUnmap,
        platform: &mut P,
    ) -> Result<(), (InvalidationError, ClearedRange)> {
        match unmapped.into_cleared() {
            Some(cleared) => self.invalidate_and_release(cleared, platform),
            None => Ok(()),
        }
    }
}

impl<R: EndsAtUnmap, S: AddressSpace<UnmapResult = R>, B> FlushPolicy<S, B> for Strict {
    type PerCpu = ();
    type PerDomain = ();
    type Outcome = Released<B>;

    const BATCHES_INVALIDATION: bool = !R::Tables::ANY;

    fn per_domain(&self) {}

    fn per_cpu(&self, (): &()) {}

    #[inline]
    fn queue_unmap<P: Platform>(
        &self,
        (): &(),
        (): &mut (),
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
        item: PendingUnmap<R, B>,
    ) -> Result<Released<B>, (InvalidationError, NotInvalidated<B>)> {
        let (result, pending) = item.split();
        match result.into_cleared() {
            Some(cleared) => Self::invalidate(&mut ctx, platform, pending.with(cleared)),
            None => Ok(Released(ManuallyDrop::into_inner(pending.buffer))),
        }
    }

    /// Performs one invalidation for all items, or one per item if an unmap may unlink table pages.
    fn queue_unmap_many<P: Platform>(
        &self,
        (): &(),
        (): &mut (),
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
        items: Vec<PendingUnmap<R, B>>,
        mut each: impl FnMut(B),
    ) -> Result<(), (InvalidationError, Vec<NotInvalidated<B>>)> {
        if R::Tables::ANY {
            return queue_one_by_one(items, each, |item| {
                self.queue_unmap(&(), &mut (), ctx.reborrow(), platform, item)
            });
        }
        let mut batch = RangeBatch::with_capacity(items.len());
        let mut buffers = Vec::with_capacity(items.len());
        for item in items {
            let (result, pending) = item.split();
            let Some(cleared) = result.into_cleared() else {
                each(ManuallyDrop::into_inner(pending.buffer));
                continue;
            };
            batch.push(ClearedRange {
                unmapped: cleared.unmapped,
                levels: cleared.levels,
                tables: (),
            });
            buffers.push(pending);
        }
        if batch.is_empty() {
            return Ok(());
        }
        let levels = batch.levels();
        let request = batch.narrowest(&ctx);
        let (mut left, result) = submit_and_release(request, batch, &mut ctx, platform);
        match result {
            Ok(()) => {
                let buffers = buffers.into_iter().map(|pending| pending.buffer);
                buffers.map(ManuallyDrop::into_inner).for_each(each);
                Ok(())
            }
            Err(error) => {
                let mut not_invalidated = Vec::with_capacity(buffers.len());
                let mut buffers = buffers.into_iter();
                left.drain_unmapped(|unmapped| {
                    let cleared = ClearedRange {
                        unmapped,
                        levels,
                        tables: (),
                    };
                    let pending = buffers.next();
                    not_invalidated.extend(pending.map(|p| NotInvalidated::new(p.with(cleared))));
                });
                Err((error, not_invalidated))
            }
        }
    }
}
