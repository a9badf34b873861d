//! Tests of the layers that replicas drive, and of their errors.

use std::any::TypeId;

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::RequestResponse;
use ringfence_dma::MapReason;
use ringfence_dma::flush::{Burst, Deferred, DeferredQueue, Strict};
use ringfence_dma::ring::Ring;
use ringfence_dma::space::Paged;
use ringfence_iova::{CachedTree, Eiovar, Locked};
use ringfence_lab::Profile;
use ringfence_lab::components::ThreadCell;
use ringfence_lab::mode_dispatch::dispatch_static;
use ringfence_lab::modes::Mode;

use super::*;
use crate::capture::Capture;
use crate::timed::{TimedReplays, TimedSubject};

type Tree = Locked<CachedTree, ThreadCell<CachedTree>>;
type EiovarTree = Locked<Eiovar<CachedTree>, ThreadCell<Eiovar<CachedTree>>>;
type DeferredFlush = Deferred<ThreadCell<DeferredQueue>>;
type IdentityLayer = DmaLayer<Identity, Never, TimedInvalidationQueue>;

/// Type of the timed replay of a layer.
fn replay_of<L: DmaOps + 'static>() -> TypeId {
    TypeId::of::<TimedReplay<L>>()
}

/// Types that a mode must have in a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ModeTypes {
    Paged {
        allocator: TypeId,
        flush: TypeId,
        replay: TypeId,
    },
    /// A mode with a pool. A layer that lends buffers to the driver has another type.
    Pool {
        copying: TypeId,
    },
    Other,
}

/// Visitor that returns the types of a mode.
struct TypesOf;

impl ModeVisitor for TypesOf {
    type Output = ModeTypes;

    fn identity(self, _: IdentityKind) -> ModeTypes {
        ModeTypes::Other
    }

    fn paged<A, T, F>(self, _: ModeParts<A, T, F>) -> ModeTypes
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        ModeTypes::Paged {
            allocator: TypeId::of::<A>(),
            flush: TypeId::of::<F>(),
            replay: replay_of::<DmaLayer<Paged<A, T>, F, TimedInvalidationQueue>>(),
        }
    }

    fn cached<T: ReplayTable<Pages = ()>>(self, _: CachedParts<T>) -> ModeTypes {
        ModeTypes::Other
    }

    fn shadow<P: CopyParts>(self, _: P) -> ModeTypes {
        ModeTypes::Pool {
            copying: replay_of::<DmaLayer<P::Space, P::Flush, TimedInvalidationQueue>>(),
        }
    }

    fn rings<D, L, F>(self, _: RingParts<D, L, F>) -> ModeTypes
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        ModeTypes::Other
    }
}

fn types_of(name: &str) -> ModeTypes {
    dispatch_static(&Mode::find(name).unwrap(), TypesOf).unwrap()
}

/// Returns the type of a paged mode's timed replay.
pub(in crate::timed) fn replay_of_paged(name: &str) -> TypeId {
    match types_of(name) {
        ModeTypes::Paged { replay, .. } => replay,
        other => panic!("{name}: {other:?}"),
    }
}

/// Returns the type of a replica's timed replay.
pub(in crate::timed) fn type_of(replica: &Replica) -> TypeId {
    let replay: &dyn Any = &*replica.replay;
    replay.type_id()
}

fn replica(name: &str, coherency: Coherency) -> Replica {
    let make = MakeReplica {
        coherency,
        arena: &Arena::new,
    };
    dispatch_static(&Mode::find(name).unwrap(), make)
        .unwrap()
        .unwrap()
}

#[test]
fn pass_through_is_timed_with_the_generic_path_and_none_without() {
    let without = replay_of::<IdentityLayer>();
    let with = replay_of::<PassThrough<IdentityLayer>>();
    for (name, wanted) in [("none", without), ("hwpt", with), ("swpt", with)] {
        let replica = replica(name, Coherency::Coherent);
        assert_eq!(type_of(&replica), wanted, "{name}");
    }
}

#[test]
fn each_mode_is_timed_with_its_allocator_and_its_flush_policy() {
    let (tree, eiovar) = (TypeId::of::<Tree>(), TypeId::of::<EiovarTree>());
    let (strict, deferred) = (TypeId::of::<Strict>(), TypeId::of::<DeferredFlush>());
    for (name, allocator, flush) in [
        ("strict", tree, strict),
        ("strict+", eiovar, strict),
        ("defer", tree, deferred),
        ("defer+", eiovar, deferred),
    ] {
        let replay = type_of(&replica(name, Coherency::NonCoherent));
        let wanted = ModeTypes::Paged {
            allocator,
            flush,
            replay,
        };
        assert_eq!(types_of(name), wanted, "{name}");
    }
}

#[test]
fn pool_is_timed_with_the_buffers_of_the_driver_and_copy_with_copies() {
    for (name, copies) in [("copy", true), ("pool", false), ("copy-hybrid", true)] {
        let ModeTypes::Pool { copying } = types_of(name) else {
            panic!("{name} has no pool");
        };
        let replica = replica(name, Coherency::Coherent);
        assert_eq!(type_of(&replica) == copying, copies, "{name}");
    }
}

#[test]
fn rings_are_timed_with_their_driver_and_their_flush_policy() {
    type Layer<D, F> = DmaLayer<Rings<D, RefCell<D>>, F, TimedInvalidationQueue>;
    let arena: MakeArena<'_> = &Arena::new;
    let burst = rings::<Ring, _>(Coherency::Coherent, arena, Burst::new(16)).unwrap();
    assert_eq!(type_of(&burst), replay_of::<Layer<Ring, Burst>>());
    let strict = rings::<Ring, _>(Coherency::NonCoherent, arena, Strict).unwrap();
    assert_eq!(type_of(&strict), replay_of::<Layer<Ring, Strict>>());
}

/// An arena of four pages: the queue has two, the table's root one and its next level one.
#[test]
fn the_error_of_a_refused_map_is_reported() {
    let arena = |_: u64| Arena::new(4 * PAGE);
    let subject = TimedSubject::from_name("strict").unwrap();
    let mut timed = TimedReplays::with_arenas(subject, &Profile::r210_2015(), 1, &arena).unwrap();
    let mut capture = Capture::with(NicProfile::BRCM, RequestResponse::default(), 1, 64).unwrap();
    let run = capture.run().unwrap();
    let Err(LabError::RefusedMaps { count, first }) = timed.run(&run) else {
        panic!("a run with four pages of memory");
    };
    assert_eq!(count, run.plan.maps);
    assert!(matches!(first.reason, MapReason::Table(_)), "{first}");
}
