//! No invalidation: for spaces that install nothing per mapping.

use core::mem::ManuallyDrop;

use ringfence_types::InvalidationError;

use super::{FlushContext, FlushPolicy, PendingUnmap, ReleasedStale};
use crate::Platform;
use crate::space::{AddressSpace, NothingMapped};
use crate::token::NotInvalidated;

/// Never invalidates: no IOMMU, pass-through, or a static table. Unmap returns the buffer at once,
/// and the device can still reach it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Never;

impl<S: AddressSpace<UnmapResult = NothingMapped>, B> FlushPolicy<S, B> for Never {
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
        _ctx: FlushContext<'_, S>,
        _platform: &mut P,
        item: PendingUnmap<NothingMapped, B>,
    ) -> Result<ReleasedStale<B>, (InvalidationError, NotInvalidated<B>)> {
        Ok(ReleasedStale(ManuallyDrop::into_inner(item.buffer)))
    }
}
