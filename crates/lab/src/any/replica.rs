//! What is timed of rows that nobody has named: one type for all of a row's replicas, and for all rows with like allocators.
//!
//! A branch decides at each operation what is taken away. The replicas of named modes are types of their own, and have no such branches.

use std::rc::Rc;

use ringfence_dma::flush::{Flush, PerWrap, Strict};
use ringfence_dma::space::{Paged, Rounding, Translations};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{DomainId, Invalidation, InvalidationError, Invalidator, PhysAddr, Ticket};

use super::alloc::{self, AnyAlloc, AnyBitmap};
use super::removable::{AnyReclaimer, AnyTable};
use super::{Composed, composed, flush_of, rounding};
use crate::build::{MakeAlloc, Site};
use crate::error::LabError;
use crate::hardware::Host;
use crate::hosted::{PviommuHost, Shared, VirtioHost};
use crate::meter::{
    Bench, Driven, Idle, Immediate, InvalidationQueue, Meter, ReplayAlloc, Replica, Set, Sets,
    Tape, bench, immediate, queued,
};
use crate::modes::{Alloc, Mode};
use crate::replay::Newcomer;

/// A table that may have been taken away.
pub(super) trait Removable: Translations + Sized + 'static {
    /// Which table it is.
    type Kind: Copy + 'static;

    /// Who keeps it, if the layer does not.
    fn keeper(kind: Self::Kind) -> Option<Keeper>;

    /// The highest page that it translates.
    fn last_page(kind: Self::Kind) -> u64;

    /// An empty one and its root; fails for want of room.
    fn make(
        kind: Self::Kind,
        domain: DomainId,
        coherency: Coherency,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
        hosts: &Hosts,
    ) -> Result<(Self, PhysAddr), LabError>;

    /// None.
    fn none(domain: DomainId) -> Self;
}

/// Who keeps tables for a guest.
#[derive(Debug, Clone, Copy)]
pub(super) enum Keeper {
    Virtio,
    Pviommu,
}

/// The host of a replica, if it has one.
#[derive(Default)]
pub(super) struct Hosts {
    pub(super) virtio: Option<Shared<VirtioHost>>,
    pub(super) pviommu: Option<Shared<PviommuHost>>,
}

/// How a replica waits for invalidations.
enum AnyInvalidator {
    Immediate(Immediate),
    Queue(InvalidationQueue),
    Virtio(Shared<VirtioHost>),
    Pviommu(Shared<PviommuHost>),
}

impl AnyInvalidator {
    /// As in the mode, and the host that answers.
    fn of(
        keeper: Option<Keeper>,
        memory: &Rc<Arena>,
        coherency: Coherency,
    ) -> Result<(Hosts, Self), LabError> {
        let mut hosts = Hosts::default();
        let answers;
        match keeper {
            None => answers = Self::Queue(queued(memory)),
            Some(Keeper::Virtio) => {
                let (host, own) = Host::metered(memory, coherency)?;
                hosts.virtio = host;
                answers = Self::Virtio(own);
            }
            Some(Keeper::Pviommu) => {
                let (host, own) = Host::metered(memory, coherency)?;
                hosts.pviommu = host;
                answers = Self::Pviommu(own);
            }
        }
        Ok((hosts, answers))
    }
}

impl Invalidator for AnyInvalidator {
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

/// What is left of the allocator.
#[derive(Clone, Copy)]
enum Asked {
    Whole,
    NoFind,
    Recorded,
}

/// What a replica is made of.
#[derive(Clone, Copy)]
struct Present {
    alloc: Asked,
    table: bool,
    invalidation: bool,
}

/// How the parts of a row are made.
struct Rig<A, T: Removable, F> {
    alloc: MakeAlloc<A>,
    answer: Alloc,
    table: T::Kind,
    flush: fn() -> F,
    rounding: Rounding,
    coherency: Coherency,
    tape: Rc<Tape>,
}

impl<A, T, F> Rig<A, T, F>
where
    A: ReplayAlloc<NoFind = A, Recorded = A>,
    T: Removable,
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
            answer: mode.alloc,
            table,
            flush,
            rounding: rounding(mode),
            coherency,
            tape: Rc::default(),
        }
    }

    fn replica(&self, present: Present) -> Result<Box<dyn Driven>, LabError> {
        let Bench {
            arena, frames, now, ..
        } = bench(immediate)?;
        let keeper = T::keeper(self.table).filter(|_| present.table);
        let (hosts, invalidator) = if present.invalidation {
            AnyInvalidator::of(keeper, &arena, self.coherency)?
        } else {
            (Hosts::default(), AnyInvalidator::Immediate(Immediate))
        };
        let bench = Bench {
            arena,
            frames,
            invalidator,
            now,
        };
        let &Self {
            alloc,
            answer,
            table: kind,
            rounding,
            coherency,
            ..
        } = self;
        let tape = Rc::clone(&self.tape);
        let make = move |of: &Newcomer, bench: &Bench<AnyInvalidator>| {
            let (memory, frames) = (&bench.arena, &bench.frames);
            let (table, root) = if present.table {
                let made = T::make(kind, of.domain, coherency, memory, frames, &hosts)?;
                (made.0, Some(made.1))
            } else {
                (T::none(of.domain), None)
            };
            let real = || {
                alloc(&Site {
                    answer,
                    memory,
                    frames,
                    table: root,
                    last_page: T::last_page(kind),
                })
            };
            let alloc = match present.alloc {
                Asked::Whole => real()?,
                Asked::NoFind => real()?.without_find(),
                Asked::Recorded => A::recorded(Rc::clone(&tape)),
            };
            Ok(Paged::new(alloc, table, rounding))
        };
        Ok(Box::new(Replica::new((self.flush)(), bench, make)))
    }

    /// The replicas that a mode with types of its own has, in their order.
    fn sets(self, repetitions: usize) -> Result<Box<dyn Meter>, LabError> {
        let remote = T::keeper(self.table).is_some();
        let make = |alloc, table, invalidation| {
            self.replica(Present {
                alloc,
                table,
                invalidation,
            })
        };
        let scout = make(Asked::Whole, true, true)?;
        let tape = Rc::clone(&self.tape);
        let sets = Sets::new(repetitions, tape, scout, &mut || {
            Ok(Set {
                replicas: [
                    Some(make(Asked::Whole, true, true)?),
                    A::FINDS
                        .then(|| make(Asked::NoFind, true, true))
                        .transpose()?,
                    Some(make(Asked::Recorded, true, true)?),
                    (!remote)
                        .then(|| make(Asked::Recorded, false, true))
                        .transpose()?,
                    Some(make(Asked::Recorded, false, false)?),
                    (!remote)
                        .then(|| make(Asked::Whole, true, false))
                        .transpose()?,
                    Some(make(Asked::Whole, false, false)?),
                    Some(Box::new(Idle::default())),
                ],
            })
        })?;
        Ok(Box::new(sets))
    }
}

/// The meter of a row that is put together from parts.
///
/// # Errors
/// The row makes no sense, or there is no room.
pub(crate) fn meter(
    mode: &Mode,
    coherency: Coherency,
    repetitions: usize,
) -> Result<Box<dyn Meter>, LabError> {
    match composed(mode)? {
        Composed::Kept(kept) => {
            let flush = flush_of(mode);
            Rig::<AnyAlloc, AnyTable, _>::new(mode, alloc::alloc, kept, flush, coherency)
                .sets(repetitions)
        }
        Composed::Bitmap(kept) => {
            let flush = || PerWrap;
            Rig::<AnyBitmap, AnyTable, _>::new(mode, alloc::bitmap_of, kept, flush, coherency)
                .sets(repetitions)
        }
        Composed::Reclaiming(table) => {
            let flush = || Strict;
            Rig::<AnyAlloc, AnyReclaimer, _>::new(mode, alloc::alloc, table, flush, coherency)
                .sets(repetitions)
        }
    }
}
