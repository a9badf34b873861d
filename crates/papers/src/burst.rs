//! Invalidation per burst as published in Fig. 11 of the rIOMMU paper: one invalidation at the end
//! of the burst. Buffers and addresses are released without waiting for it (erratum 8).

use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use ringfence_dma::flush::{
    BurstKey, FlushContext, FlushPolicy, OpenBursts, PendingUnmap, ReleasedStale,
};
use ringfence_dma::space::{ClearedRange, ReusesUnflushed};
use ringfence_dma::{NotInvalidated, Platform};
use ringfence_types::{Invalidation, InvalidationError, Pending, Unmapped};

/// Unmap returns the buffer and frees its addresses at once, while the device may still reach both
/// until the burst ends. It exists to measure the cost of that.
/// [`Burst`](ringfence_dma::flush::Burst) is the same policy with withheld buffers. Compiles only
/// with the figure's own ring.
///
/// ```
/// # use std::cell::RefCell;
/// # use ringfence_dma::{FlushPolicy, space::Rings};
/// # use ringfence_papers::{BurstAsPublished, RingAsPublished};
/// # type AsPublished = Rings<RingAsPublished, RefCell<RingAsPublished>>;
/// fn goes_with<F: FlushPolicy<AsPublished, ()>>() {}
/// goes_with::<BurstAsPublished>();
/// ```
/// ```compile_fail,E0277
/// # use std::cell::RefCell;
/// # use ringfence_dma::{FlushPolicy, flush::PerWrap, space::Rings};
/// # use ringfence_papers::RingAsPublished;
/// # type AsPublished = Rings<RingAsPublished, RefCell<RingAsPublished>>;
/// fn goes_with<F: FlushPolicy<AsPublished, ()>>() {}
/// // A ring never asks.
/// goes_with::<PerWrap>();
/// ```
/// ```compile_fail,E0277
/// # use std::cell::RefCell;
/// # use ringfence_dma::{FlushPolicy, space::{Paged, PlainTable}};
/// # use ringfence_papers::BurstAsPublished;
/// # use ringfence_iova::{Bitmap, BitmapState};
/// # use ringfence_pgtable::SecondStage;
/// # type Pages = Paged<Bitmap<RefCell<BitmapState>>, PlainTable<SecondStage>>;
/// fn goes_with<F: FlushPolicy<Pages, ()>>() {}
/// // A bitmap waits for the flush that it asks for, and here nobody says that it was made.
/// goes_with::<BurstAsPublished>();
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct BurstAsPublished;

/// The invalidation that ends each open burst, indexed by [`BurstKey`]. `None` if the burst is
/// empty.
#[derive(Debug, Default)]
pub struct EndInvalidations(Vec<Option<Invalidation>>);

impl<S: ReusesUnflushed<UnmapResult = ClearedRange, FreeProof = Unmapped>, B> FlushPolicy<S, B>
    for BurstAsPublished
{
    type PerCpu = EndInvalidations;
    type PerDomain = ();
    type Outcome = ReleasedStale<B>;

    fn per_domain(&self) {}

    fn per_cpu(&self, (): &()) -> Self::PerCpu {
        EndInvalidations::default()
    }

    #[inline]
    fn queue_unmap<P: Platform>(
        &self,
        (): &(),
        own: &mut Self::PerCpu,
        mut home: FlushContext<'_, S>,
        platform: &mut P,
        item: PendingUnmap<ClearedRange, B>,
    ) -> Result<ReleasedStale<B>, (InvalidationError, NotInvalidated<B>)> {
        home.sync(platform);
        let index = item.burst_key.index();
        if index >= own.0.len() {
            own.0.resize(index + 1, None);
        }
        if let Some(open) = own.0.get_mut(index) {
            *open = Some(home.invalidation_of(&item.result));
        }
        home.release_current(item.result.unmapped);
        Ok(ReleasedStale(ManuallyDrop::into_inner(item.buffer)))
    }

    fn drain_cpu<P: Platform>(
        &self,
        own: &mut Self::PerCpu,
        _home: FlushContext<'_, S>,
        platform: &mut P,
        _each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        own.0
            .iter_mut()
            .filter_map(Option::take)
            .map(|request| invalidate(request, platform))
            .fold(Ok(()), Result::and)
    }
}

impl<S: ReusesUnflushed, B> OpenBursts<S, B> for EndInvalidations {
    /// "if( end_of_burst ) riotlb_invalidate( ... );"
    fn end_burst<P: Platform>(
        &mut self,
        _ctx: FlushContext<'_, S>,
        platform: &mut P,
        key: BurstKey,
        _each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        match self.0.get_mut(key.index()).and_then(Option::take) {
            Some(request) => invalidate(request, platform),
            None => Ok(()),
        }
    }
}

/// Performs `request` and waits for it. No range depends on it, so nothing is released.
fn invalidate<P: Platform>(
    request: Invalidation,
    platform: &mut P,
) -> Result<(), InvalidationError> {
    Pending::submit(platform.invalidator(), request, ())
        .map_err(|((), error)| error)?
        .wait(platform.invalidator())
        .map(|flushed| flushed.into_batch())
        .map_err(|(_, error)| error)
}
