//! A multi-unmap whose invalidations fail for different reasons returns the first error.

use ringfence_dma::flush::{FlushContext, FlushPolicy, PendingUnmap, Strict};
use ringfence_dma::space::AddressSpace;
use ringfence_dma::{NotInvalidated, Platform, Released};
use ringfence_types::InvalidationError;

use super::map;
use crate::rig::*;

/// [`Strict`], except that a multi-unmap clears all mappings before it queues any.
struct ClearsFirst;

impl<S: AddressSpace> FlushPolicy<S, u64> for ClearsFirst
where
    Strict: FlushPolicy<S, u64, PerCpu = (), PerDomain = (), Outcome = Released<u64>>,
{
    type PerCpu = ();
    type PerDomain = ();
    type Outcome = Released<u64>;

    const BATCHES_INVALIDATION: bool = true;

    fn per_domain(&self) {}

    fn per_cpu(&self, (): &()) {}

    fn queue_unmap<P: Platform>(
        &self,
        (): &(),
        (): &mut (),
        ctx: FlushContext<'_, S>,
        platform: &mut P,
        item: PendingUnmap<S::UnmapResult, u64>,
    ) -> Result<Released<u64>, (InvalidationError, NotInvalidated<u64>)> {
        Strict.queue_unmap(&(), &mut (), ctx, platform, item)
    }

    fn queue_unmap_many<P: Platform>(
        &self,
        (): &(),
        (): &mut (),
        ctx: FlushContext<'_, S>,
        platform: &mut P,
        items: Vec<PendingUnmap<S::UnmapResult, u64>>,
        each: impl FnMut(u64),
    ) -> Result<(), (InvalidationError, Vec<NotInvalidated<u64>>)> {
        Strict.queue_unmap_many(&(), &mut (), ctx, platform, items, each)
    }
}

/// As [`ClearsFirst`], with the default method for many mappings.
struct DefaultMany;

impl<S: AddressSpace> FlushPolicy<S, u64> for DefaultMany
where
    Strict: FlushPolicy<S, u64, PerCpu = (), PerDomain = (), Outcome = Released<u64>>,
{
    type PerCpu = ();
    type PerDomain = ();
    type Outcome = Released<u64>;

    const BATCHES_INVALIDATION: bool = true;

    fn per_domain(&self) {}

    fn per_cpu(&self, (): &()) {}

    fn queue_unmap<P: Platform>(
        &self,
        (): &(),
        (): &mut (),
        ctx: FlushContext<'_, S>,
        platform: &mut P,
        item: PendingUnmap<S::UnmapResult, u64>,
    ) -> Result<Released<u64>, (InvalidationError, NotInvalidated<u64>)> {
        Strict.queue_unmap(&(), &mut (), ctx, platform, item)
    }
}

/// Three mappings are unmapped together, and each takes a separate invalidation. The last two
/// fail for different reasons.
fn first_error<T: MakeTable, F: FlushPolicy<Space<Tree, T>, u64>>(policy: F) -> InvalidationError {
    let mut rig = Rig::<Tree, T, _, u64>::new(policy);
    let mappings = (0..3).map(|id| map(&mut rig, id).0).collect();
    rig.board
        .port
        .fail(1, 2, InvalidationFailure::FullThenFailed);
    let (board, dma, cpu, at) = rig.parts();
    let mut back = Vec::new();
    let error = dma
        .unmap_multi(cpu, board, at, mappings, |buffer| back.push(buffer))
        .unwrap_err();
    assert_eq!((back, error.not_invalidated.len()), (vec![0], 2));
    error.invalidation.unwrap()
}

#[test]
fn a_multi_unmap_returns_its_first_error() {
    let first = InvalidationError::QueueFull;
    assert_eq!(first_error::<Gas, _>(Strict), first, "queued one by one");
    assert_eq!(
        first_error::<Plain, _>(DefaultMany),
        first,
        "the trait's method"
    );
    assert_eq!(first_error::<Gas, _>(ClearsFirst), first, "tables unlinked");
}
