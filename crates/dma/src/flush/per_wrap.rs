//! Invalidation per wrap of the allocator: the bitmap's policy (AL10).

use core::mem::ManuallyDrop;

use ringfence_types::{InvalidationError, Unmapped};

use super::{FlushContext, FlushPolicy, PendingUnmap, ReleasedStale};
use crate::Platform;
use crate::space::FlushesBeforeReuse;
use crate::token::{ClearedRange, NotInvalidated};

/// Invalidates nothing until the allocator has allocated every address once and requests a flush
/// (Fujita and Moriai, sections 2.3 and 3.3: 2^20 maps, about 8 s). Compiles only with spaces whose
/// allocator accepts unflushed ranges and requests a flush before it reuses them.
///
/// ```compile_fail,E0277
/// # use std::cell::RefCell;
/// # use ringfence_dma::{FlushPolicy, flush::PerWrap, ring::Ring, space::Rings};
/// fn goes_with<F: FlushPolicy<Rings<Ring, RefCell<Ring>>, ()>>() {}
/// // A ring never asks.
/// goes_with::<PerWrap>();
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct PerWrap;

impl<S: FlushesBeforeReuse<UnmapResult = ClearedRange, FreeProof = Unmapped>, B> FlushPolicy<S, B>
    for PerWrap
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
        ctx.release_current(item.result.unmapped);
        Ok(ReleasedStale(ManuallyDrop::into_inner(item.buffer)))
    }
}
