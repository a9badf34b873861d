//! The meter of modes with an allocator and a table.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::FlushPolicy;
use ringfence_dma::space::{Paged, Space};
use ringfence_iova::IovaAllocator;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::Invalidator;

use super::ablations::AblationSet;
use super::{Ablations, AllocTrace, EmptyLoop, FlushFor, FreeInvalidator, NullTable, ReplayAlloc};
use crate::components::{HostOf, ModeParts, ReplayTable};
use crate::error::LabError;
use crate::hardware::Host;
use crate::layer::{
    AttachInfo, ContextTarget, Dispatch, DmaLayer, LayerPlatform, MakeSpace, SpaceResult,
};
use crate::replay::{DynTimedReplay, TimedReplay};

type Memory = Rc<Arena>;
type TableFrames = Frames<Rc<Arena>>;
type Made = Result<Box<dyn DynTimedReplay>, LabError>;

/// Creates the allocator `B` of a domain of a mode. A type that all constructors of `B` share.
type MakeAblated<A, T, F, B> =
    Rc<dyn Fn(&ModeParts<A, T, F>, &Memory, &TableFrames, Option<&T>) -> Result<B, LabError>>;

/// Creates a timed replay whose calls have the binding time `X`.
fn replay<X, S, F, I>(
    flush: fn() -> F,
    platform: LayerPlatform<I>,
    make: MakeSpace<S, X::Invalidator<I>>,
) -> Box<dyn DynTimedReplay>
where
    X: Dispatch,
    S: Space + 'static,
    F: FlushPolicy<S, u64> + 'static,
    I: Invalidator + 'static,
{
    let platform = platform.map_invalidator(X::invalidator);
    let layer = X::layer(DmaLayer::new(flush(), platform, make));
    Box::new(TimedReplay::of(layer))
}

/// The inputs for the timed replays of a mode.
struct PagedReplays<A, T: ReplayTable, F> {
    parts: ModeParts<A, T, F>,
    coherency: Coherency,
    /// Coherency of the tables that were created, each value once.
    created: Rc<RefCell<Vec<Coherency>>>,
}

impl<A: ReplayAlloc, T: ReplayTable, F: 'static> PagedReplays<A, T, F> {
    /// Returns a constructor of spaces that calls `make` and stores the coherency of the table.
    fn storing_coherency<B: IovaAllocator + 'static, I: 'static>(
        &self,
        make: impl Fn(&AttachInfo, &LayerPlatform<I>) -> SpaceResult<Paged<B, T>> + 'static,
    ) -> MakeSpace<Paged<B, T>, I> {
        let created = Rc::clone(&self.created);
        Box::new(move |of, platform| {
            let (space, target) = make(of, platform)?;
            let mut known = created.borrow_mut();
            let new = space.table().coherency();
            let new = new.filter(|new| !known.contains(new));
            known.extend(new);
            Ok((space, target))
        })
    }

    /// Creates a timed replay with table and invalidations.
    fn with_table<B>(&self, alloc: &MakeAblated<A, T, F, B>) -> Made
    where
        B: IovaAllocator + 'static,
        F: FlushPolicy<Paged<B, T>, u64>,
    {
        let alloc = Rc::clone(alloc);
        let alloc = move |parts: &_, memory: &_, frames: &_, table: Option<&_>| {
            alloc(parts, memory, frames, table)
        };
        let platform = LayerPlatform::timed()?;
        let (host, invalidator) = HostOf::<T>::for_meter(&platform.arena, self.coherency)?;
        let platform = platform.map_invalidator(|_| invalidator);
        let make = self.parts.make_space_with(self.coherency, host, alloc);
        Ok(replay::<A::Dispatch, _, _, _>(
            self.parts.flush,
            platform,
            self.storing_coherency(make),
        ))
    }

    /// Creates a timed replay with the mode's allocator and table, and without invalidations. Not
    /// for tables that a host owns: the stub does not reach the host.
    fn without_invalidations(&self) -> Made
    where
        F: FlushPolicy<Paged<A, T>, u64>,
    {
        let make = self.parts.make_space(self.coherency, None);
        let platform = LayerPlatform::timed()?;
        Ok(replay::<A::Dispatch, _, _, _>(
            self.parts.flush,
            platform,
            self.storing_coherency(make),
        ))
    }

    /// Creates a timed replay without a table. The allocator is that of a space with a table.
    fn without_table<B, I>(
        &self,
        alloc: &MakeAblated<A, T, F, B>,
        platform: LayerPlatform<I>,
    ) -> Box<dyn DynTimedReplay>
    where
        B: IovaAllocator + 'static,
        F: FlushPolicy<Paged<B, NullTable>, u64>,
        I: Invalidator + 'static,
    {
        let (parts, alloc) = (self.parts, Rc::clone(alloc));
        let make = move |of: &AttachInfo, platform: &LayerPlatform<_>| {
            let alloc = alloc(&parts, &platform.arena, &platform.frames, None)?;
            let space = Paged::new(alloc, NullTable(of.domain), parts.rounding);
            Ok((space, ContextTarget::PassThrough))
        };
        replay::<A::Dispatch, _, _, _>(parts.flush, platform, Box::new(make))
    }
}

impl Ablations {
    /// Creates the meter of a mode with an allocator and a table.
    ///
    /// # Errors
    /// Memory is short.
    pub fn paged<A, T, F>(
        parts: ModeParts<A, T, F>,
        coherency: Coherency,
        repetitions: usize,
    ) -> Result<Self, LabError>
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let trace = Rc::new(AllocTrace::default());
        let own: MakeAblated<A, T, F, A> = Rc::new(ModeParts::allocator);
        let replayed: MakeAblated<A, T, F, A::Replayed> = {
            let trace = Rc::clone(&trace);
            Rc::new(move |_, _, _, _| Ok(A::replayed(Rc::clone(&trace))))
        };
        let no_find: MakeAblated<A, T, F, A::NoFind> = Rc::new(|parts, memory, frames, table| {
            parts.allocator(memory, frames, table).map(A::without_find)
        });
        let created = Rc::default();
        let of = PagedReplays {
            parts,
            coherency,
            created: Rc::clone(&created),
        };
        // With a remote table there is no local invalidation to ablate. The tests are on constants,
        // so unused replays are not compiled.
        let remote = HostOf::<T>::REMOTE;
        let free = LayerPlatform::<FreeInvalidator>::without_tables;
        let recorder = of.with_table(&own)?;
        let mut ablations = Self::new(repetitions, trace, recorder, &mut || {
            Ok(AblationSet {
                replicas: [
                    Some(of.with_table(&own)?),
                    if A::HAS_LOOKUP && parts.kind.has_lookup() {
                        Some(of.with_table(&no_find)?)
                    } else {
                        None
                    },
                    Some(of.with_table(&replayed)?),
                    if remote {
                        None
                    } else {
                        let platform = free()?.with_queue();
                        Some(of.without_table(&replayed, platform))
                    },
                    Some(of.without_table(&replayed, free()?)),
                    if remote {
                        None
                    } else {
                        Some(of.without_invalidations()?)
                    },
                    Some(of.without_table(&own, free()?)),
                    Some(Box::new(EmptyLoop::default())),
                ],
            })
        })?;
        ablations.coherencies = created;
        Ok(ablations)
    }
}
