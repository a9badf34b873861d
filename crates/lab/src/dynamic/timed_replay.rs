//! Timed replays of user-composed modes: one type for all ablations of a mode, and for all modes
//! with similar allocators.
//!
//! A branch at each operation selects the ablated components. The timed replays of named modes have
//! static types and no such branches.

use std::rc::Rc;

use ringfence_dma::flush::{Flush, PerWrap, Strict};
use ringfence_dma::space::{IoPageTable, Paged, Rounding};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{DomainId, Invalidation, InvalidationError, Invalidator, PhysAddr, Ticket};

use super::alloc::{self, DynAlloc, DynBitmap};
use super::optional_table::{DynReclaimingTable, DynTable};
use super::{Composition, composition, flush_of, rounding};
use crate::error::LabError;
use crate::guest::{PviommuHost, SharedHost, VirtioHost};
use crate::hardware::Host;
use crate::meter::{
    AblationSet, Ablations, AllocTrace, DynTimedReplay, EmptyLoop, FreeInvalidator,
    InvalidationQueue, Meter, ReplayAlloc, TimedPlatform, TimedReplay, free_invalidator,
    invalidation_queue, timed_platform,
};
use crate::mode_dispatch::{AllocEnv, MakeAlloc};
use crate::modes::{Alloc, Mode};
use crate::replay::AttachInfo;

/// A table that an ablation can replace by a stub.
pub(super) trait OptionalTable: IoPageTable + Sized + 'static {
    /// The kind of table.
    type Kind: Copy + 'static;

    /// Returns the host that owns the table; `None` if the layer owns it.
    fn host(kind: Self::Kind) -> Option<TableHost>;

    /// Returns the highest page that the table translates.
    fn last_page(kind: Self::Kind) -> u64;

    /// Creates an empty table and returns it with its root. Fails if memory is short.
    fn make(
        kind: Self::Kind,
        domain: DomainId,
        coherency: Coherency,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
        hosts: &Hosts,
    ) -> Result<(Self, PhysAddr), LabError>;

    /// Creates the stub.
    fn none(domain: DomainId) -> Self;
}

/// The kind of host that owns tables for a guest.
#[derive(Debug, Clone, Copy)]
pub(super) enum TableHost {
    Virtio,
    Pviommu,
}

/// The host of a timed replay; both `None` without one.
#[derive(Default)]
pub(super) struct Hosts {
    pub(super) virtio: Option<SharedHost<VirtioHost>>,
    pub(super) pviommu: Option<SharedHost<PviommuHost>>,
}

/// The invalidator of a timed replay.
enum DynInvalidator {
    Immediate(FreeInvalidator),
    Queue(InvalidationQueue),
    Virtio(SharedHost<VirtioHost>),
    Pviommu(SharedHost<PviommuHost>),
}

impl DynInvalidator {
    /// Creates the invalidator of the mode itself, and the host that completes its requests.
    fn of(
        keeper: Option<TableHost>,
        memory: &Rc<Arena>,
        coherency: Coherency,
    ) -> Result<(Hosts, Self), LabError> {
        let mut hosts = Hosts::default();
        let answers;
        match keeper {
            None => answers = Self::Queue(invalidation_queue(memory)),
            Some(TableHost::Virtio) => {
                let (host, own) = Host::for_meter(memory, coherency)?;
                hosts.virtio = host;
                answers = Self::Virtio(own);
            }
            Some(TableHost::Pviommu) => {
                let (host, own) = Host::for_meter(memory, coherency)?;
                hosts.pviommu = host;
                answers = Self::Pviommu(own);
            }
        }
        Ok((hosts, answers))
    }
}

impl Invalidator for DynInvalidator {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        match self {
            Self::Immediate(to) => to.submit(request),
            Self::Queue(to) => to.submit(request),
            Self::Virtio(to) => to.submit(request),
            Self::Pviommu(to) => to.submit(request),
        }
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        match self {
            Self::Immediate(to) => to.poll(ticket),
            Self::Queue(to) => to.poll(ticket),
            Self::Virtio(to) => to.poll(ticket),
            Self::Pviommu(to) => to.poll(ticket),
        }
    }
}

/// The state of the allocator in an ablation.
#[derive(Clone, Copy)]
enum AllocAblation {
    Full,
    NoFind,
    Replayed,
}

/// The components of a timed replay.
#[derive(Clone, Copy)]
struct EnabledParts {
    alloc: AllocAblation,
    table: bool,
    invalidation: bool,
}

/// The constructors of a composed mode's components.
struct ReplicaParts<A, T: OptionalTable, F> {
    alloc: MakeAlloc<A>,
    kind: Alloc,
    table: T::Kind,
    flush: fn() -> F,
    rounding: Rounding,
    coherency: Coherency,
    trace: Rc<AllocTrace>,
}

impl<A, T, F> ReplicaParts<A, T, F>
where
    A: ReplayAlloc<NoFind = A, Replayed = A>,
    T: OptionalTable,
    F: Flush<Paged<A, T>, u64> + 'static,
{
    fn new(
        mode: &Mode,
        alloc: MakeAlloc<A>,
        table: T::Kind,
        flush: fn() -> F,
        coherency: Coherency,
    ) -> Self {
        Self {
            alloc,
            kind: mode.alloc,
            table,
            flush,
            rounding: rounding(mode),
            coherency,
            trace: Rc::default(),
        }
    }

    fn replica(&self, present: EnabledParts) -> Result<Box<dyn DynTimedReplay>, LabError> {
        let TimedPlatform {
            arena, frames, now, ..
        } = timed_platform(free_invalidator)?;
        let keeper = T::host(self.table).filter(|_| present.table);
        let (hosts, invalidator) = if present.invalidation {
            DynInvalidator::of(keeper, &arena, self.coherency)?
        } else {
            (Hosts::default(), DynInvalidator::Immediate(FreeInvalidator))
        };
        let bench = TimedPlatform {
            arena,
            frames,
            invalidator,
            now,
        };
        let &Self {
            alloc,
            kind: answer,
            table: kind,
            rounding,
            coherency,
            ..
        } = self;
        let tape = Rc::clone(&self.trace);
        let make = move |of: &AttachInfo, bench: &TimedPlatform<DynInvalidator>| {
            let (memory, frames) = (&bench.arena, &bench.frames);
            let (table, root) = if present.table {
                let made = T::make(kind, of.domain, coherency, memory, frames, &hosts)?;
                (made.0, Some(made.1))
            } else {
                (T::none(of.domain), None)
            };
            let real = || {
                alloc(&AllocEnv {
                    kind: answer,
                    memory,
                    frames,
                    table: root,
                    last_page: T::last_page(kind),
                })
            };
            let alloc = match present.alloc {
                AllocAblation::Full => real()?,
                AllocAblation::NoFind => real()?.without_find(),
                AllocAblation::Replayed => A::replayed(Rc::clone(&tape)),
            };
            Ok(Paged::new(alloc, table, rounding))
        };
        Ok(Box::new(TimedReplay::new((self.flush)(), bench, make)))
    }

    /// Creates the same ablations, in the same order, as for a mode with static types.
    fn ablations(self, repetitions: usize) -> Result<Box<dyn Meter>, LabError> {
        let remote = T::host(self.table).is_some();
        let make = |alloc, table, invalidation| {
            self.replica(EnabledParts {
                alloc,
                table,
                invalidation,
            })
        };
        let scout = make(AllocAblation::Full, true, true)?;
        let tape = Rc::clone(&self.trace);
        let sets = Ablations::new(repetitions, tape, scout, &mut || {
            Ok(AblationSet {
                replicas: [
                    Some(make(AllocAblation::Full, true, true)?),
                    A::HAS_LOOKUP
                        .then(|| make(AllocAblation::NoFind, true, true))
                        .transpose()?,
                    Some(make(AllocAblation::Replayed, true, true)?),
                    (!remote)
                        .then(|| make(AllocAblation::Replayed, false, true))
                        .transpose()?,
                    Some(make(AllocAblation::Replayed, false, false)?),
                    (!remote)
                        .then(|| make(AllocAblation::Full, true, false))
                        .transpose()?,
                    Some(make(AllocAblation::Full, false, false)?),
                    Some(Box::new(EmptyLoop::default())),
                ],
            })
        })?;
        Ok(Box::new(sets))
    }
}

/// Creates the meter of a user-composed mode.
///
/// # Errors
/// The mode is invalid, or memory is short.
pub(crate) fn meter(
    mode: &Mode,
    coherency: Coherency,
    repetitions: usize,
) -> Result<Box<dyn Meter>, LabError> {
    match composition(mode)? {
        Composition::Kept(kept) => {
            let flush = flush_of(mode);
            ReplicaParts::<DynAlloc, DynTable, _>::new(mode, alloc::alloc, kept, flush, coherency)
                .ablations(repetitions)
        }
        Composition::Bitmap(kept) => {
            let flush = || PerWrap;
            ReplicaParts::<DynBitmap, DynTable, _>::new(
                mode,
                alloc::bitmap_of,
                kept,
                flush,
                coherency,
            )
            .ablations(repetitions)
        }
        Composition::Reclaiming(table) => {
            let flush = || Strict;
            ReplicaParts::<DynAlloc, DynReclaimingTable, _>::new(
                mode,
                alloc::alloc,
                table,
                flush,
                coherency,
            )
            .ablations(repetitions)
        }
    }
}
