//! Synchronous invalidation of the translations of unmapped pages.

use ringfence_types::{Batch, Flushed, Invalidation, Invalidator, Pending};

/// Submits the request and waits. Returns the batch on failure; it still needs an invalidation.
#[inline]
pub(super) fn invalidate<I: Invalidator, B: Batch>(
    invalidator: &mut I,
    request: Invalidation,
    batch: B,
) -> Result<Flushed<B>, B> {
    let pending = Pending::submit(invalidator, request, batch).map_err(|(batch, _)| batch)?;
    let waited = pending.wait(invalidator);
    waited.map_err(|(pending, _)| pending.abandon())
}
