//! Invalidation per burst: the layer withholds buffers until one invalidation for the whole burst.

use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use ringfence_types::InvalidationError;

use super::batch::ROOM;
use super::{
    BurstKey, FlushContext, FlushPolicy, OpenBursts, Outcome, PendingUnmap, RangeBatch,
    ReleasedOrWithheld, Withheld,
};
use crate::Platform;
use crate::space::{AddressSpace, CopiedOrCleared, RingSpace, SpaceUnmap};
use crate::token::{ClearedRange, HeldBuffer, NotInvalidated};

/// Collects the unmaps of one device, ring, direction and CPU until the caller ends the burst. Then
/// one invalidation covers them, and the buffers are returned. This is as safe as strict, because
/// no buffer is returned before its invalidation, and it needs one invalidation per burst. The cost
/// is the delay until a buffer is returned.
///
/// A buffer that the device used as a copy is returned at once
/// ([`ReleasedOrWithheld`](crate::ReleasedOrWithheld)), and belongs to no burst.
#[derive(Debug, Clone, Copy)]
pub struct Burst {
    longest: usize,
    most: usize,
    by_block: bool,
}

impl Burst {
    /// Creates a policy whose invalidations cover at most `longest` unmaps. A longer burst is
    /// invalidated in parts. This bounds the addresses that a burst holds and the work at its end.
    /// The buffers of all parts are returned at the end; a burst withholds at most 2^16 of them.
    pub const fn new(longest: usize) -> Self {
        Self {
            longest,
            most: 1 << 16,
            by_block: false,
        }
    }

    /// Invalidates blocks of 64 pages that are far apart one by one, in place of the domain.
    pub(super) const fn by_block(self) -> Self {
        Self {
            by_block: true,
            ..self
        }
    }

    /// Limits a burst to `most` withheld buffers (at least one) for each CPU, ring and direction.
    /// Every kind of unmap rejects a mapping above the limit
    /// ([`UnmapReason::BurstFull`](crate::UnmapReason::BurstFull)) and leaves it mapped. The driver
    /// then ends the burst and tries again.
    pub const fn with_most(self, most: usize) -> Self {
        Self {
            most: if most == 0 { 1 } else { most },
            ..self
        }
    }
}

impl Default for Burst {
    fn default() -> Self {
        Self::new(256)
    }
}

/// One CPU's open bursts of one domain, by ring and direction. Bursts of ring 0 exist from the
/// start, those of other rings from their first unmap.
#[derive(Debug)]
pub struct BurstCpu<B> {
    open: Vec<BurstState<B>>,
    /// Limit on the buffers that one burst withholds.
    most: usize,
    by_block: bool,
}

#[derive(Debug)]
struct BurstState<B> {
    ranges: RangeBatch,
    /// Buffers of `ranges`, which a device may still reach.
    withheld: Vec<HeldBuffer<B>>,
    /// Buffers whose part of the burst has been invalidated.
    safe: Vec<B>,
}

impl<B> BurstCpu<B> {
    /// Adds bursts up to `index`, each with space for `room` unmaps.
    #[cold]
    fn grow(&mut self, index: usize, room: usize) {
        self.open.resize_with(index + 1, || BurstState {
            ranges: RangeBatch::with_capacity(room),
            withheld: Vec::with_capacity(room.min(ROOM)),
            safe: Vec::new(),
        });
    }
}

impl<B> BurstState<B> {
    /// Invalidates the ranges of the burst. Their buffers are safe then.
    fn invalidate<S: AddressSpace, P: Platform>(
        &mut self,
        by_block: bool,
        ctx: &mut FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        if self.ranges.is_empty() {
            return Ok(());
        }
        let result = if by_block {
            self.ranges.flush_by_block(ctx, platform)
        } else {
            let request = self.ranges.narrowest(ctx);
            self.ranges.flush(request, ctx, platform)
        };
        if result.is_ok() {
            let safe = self.withheld.drain(..).map(ManuallyDrop::into_inner);
            self.safe.extend(safe);
        }
        result
    }

    /// Returns the number of buffers that the burst withholds.
    #[inline]
    fn len(&self) -> usize {
        self.withheld.len().saturating_add(self.safe.len())
    }
}

/// The result of an unmap that a burst collects.
pub trait BurstUnmap: SpaceUnmap<Tables = ()> {
    /// The type that unmap returns for the buffer.
    type Outcome<B>: Outcome<B>;

    /// Returns the mapping for the burst to withhold. If nothing was cleared, returns the outcome
    /// of the unmap.
    fn to_withhold<B>(
        item: PendingUnmap<Self, B>,
    ) -> Result<PendingUnmap<ClearedRange, B>, Self::Outcome<B>>;

    /// Returns the outcome of a mapping that the burst withholds.
    fn withheld<B>() -> Self::Outcome<B>;
}

impl BurstUnmap for ClearedRange {
    type Outcome<B> = Withheld;

    #[inline]
    fn to_withhold<B>(
        item: PendingUnmap<Self, B>,
    ) -> Result<PendingUnmap<ClearedRange, B>, Withheld> {
        Ok(item)
    }

    #[inline]
    fn withheld<B>() -> Withheld {
        Withheld
    }
}

impl BurstUnmap for CopiedOrCleared {
    type Outcome<B> = ReleasedOrWithheld<B>;

    #[inline]
    fn to_withhold<B>(
        item: PendingUnmap<Self, B>,
    ) -> Result<PendingUnmap<ClearedRange, B>, ReleasedOrWithheld<B>> {
        let (result, pending) = item.split();
        match result.into_cleared() {
            Some(cleared) => Ok(pending.with(cleared)),
            None => {
                let buffer = ManuallyDrop::into_inner(pending.buffer);
                Err(ReleasedOrWithheld::Released(buffer))
            }
        }
    }

    #[inline]
    fn withheld<B>() -> ReleasedOrWithheld<B> {
        ReleasedOrWithheld::Withheld
    }
}

impl<R: BurstUnmap, S: RingSpace<UnmapResult = R>, B> FlushPolicy<S, B> for Burst {
    type PerCpu = BurstCpu<B>;
    type PerDomain = ();
    type Outcome = R::Outcome<B>;

    fn per_domain(&self) {}

    fn per_cpu(&self, (): &()) -> BurstCpu<B> {
        let mut own = BurstCpu {
            open: Vec::new(),
            most: self.most,
            by_block: self.by_block,
        };
        own.grow(2, self.longest);
        own
    }

    #[inline]
    fn queue_unmap<P: Platform>(
        &self,
        (): &(),
        own: &mut BurstCpu<B>,
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
        item: PendingUnmap<R, B>,
    ) -> Result<R::Outcome<B>, (InvalidationError, NotInvalidated<B>)> {
        let item = match R::to_withhold(item) {
            Ok(item) => item,
            Err(outcome) => return Ok(outcome),
        };
        let index = item.burst_key.index();
        if index >= own.open.len() {
            // The new bursts of lower-numbered rings may stay unused: allocate when they fill.
            own.grow(index, 0);
        }
        let Some(open) = own.open.get_mut(index) else {
            return Err((InvalidationError::Failed, NotInvalidated::new(item)));
        };
        if open.withheld.len() >= self.longest {
            // On a failure the part stays withheld until the burst's end, and the caller keeps this
            // mapping: the burst stays bounded. Reborrow `ctx` here, so that only this rare path
            // builds the copy.
            if let Err(error) = open.invalidate(self.by_block, &mut ctx.reborrow(), platform) {
                return Err((error, NotInvalidated::new(item)));
            }
        }
        if S::COALESCES_FREE {
            open.ranges.push_run(item.result);
        } else {
            open.ranges.push(item.result);
        }
        open.withheld.push(item.buffer);
        Ok(R::withheld())
    }

    fn drain_cpu<P: Platform>(
        &self,
        own: &mut BurstCpu<B>,
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
        mut each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        let mut result = Ok(());
        for open in &mut own.open {
            result = result.and(open.invalidate(self.by_block, &mut ctx, platform));
            open.safe.drain(..).for_each(&mut each);
        }
        result
    }
}

impl<S: RingSpace, B> OpenBursts<S, B> for BurstCpu<B> {
    #[inline]
    fn has_room(&self, key: BurstKey) -> bool {
        self.open
            .get(key.index())
            .is_none_or(|open| open.len() < self.most)
    }

    fn withholds(&self) -> bool {
        self.open.iter().any(|open| open.len() > 0)
    }

    fn release_withheld(self, mut each: impl FnMut(B)) {
        for open in self.open {
            let withheld = open.withheld.into_iter().map(ManuallyDrop::into_inner);
            open.safe.into_iter().chain(withheld).for_each(&mut each);
        }
    }

    fn end_burst<P: Platform>(
        &mut self,
        mut ctx: FlushContext<'_, S>,
        platform: &mut P,
        key: BurstKey,
        each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        let Some(open) = self.open.get_mut(key.index()) else {
            return Ok(());
        };
        let result = open.invalidate(self.by_block, &mut ctx, platform);
        open.safe.drain(..).for_each(each);
        result
    }
}
