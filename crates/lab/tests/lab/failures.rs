//! Replays whose hardware or memory fails.

use std::cell::Cell;
use std::rc::Rc;

use ringfence_devices::{DmaRequest, Observer};
use ringfence_hw::{IommuStats, RingLogic};
use ringfence_lab::compare::{CompareOptions, compare};
use ringfence_lab::components::{ModeParts, ReplayTable};
use ringfence_lab::hardware::{FaultCounts, Hardware, Vtd};
use ringfence_lab::layer::{ContextTarget, DmaLayer, FreeInvalidator, LayerPlatform};
use ringfence_lab::mapping_cache::CachedParts;
use ringfence_lab::meter::{Clock, FlushFor, FlushForRings, ReplayAlloc, ReplayRing, TimedReplay};
use ringfence_lab::mode_dispatch::{IdentityKind, ModeVisitor, dispatch};
use ringfence_lab::oracle::Ownership;
use ringfence_lab::plan::Plan;
use ringfence_lab::replay::{Attackers, CheckedReplay, Outcomes};
use ringfence_lab::replay_platform::{ReplayPlatform, SharedPlatform};
use ringfence_lab::ring::RingParts;
use ringfence_lab::shadow::CopyParts;
use ringfence_lab::{LabError, Profile, ReplayStatus};
use ringfence_memory::{Arena, Frames};
use ringfence_trace::Devices;
use ringfence_types::{
    DomainId, Fault, Invalidation, InvalidationError, Invalidator, Nanos, PhysAddr, PhysRange,
    RequesterId, Ticket,
};

use crate::script::*;

thread_local! {
    /// Number of invalidations that succeed, and of those after them that fail.
    static FORTUNE: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
}

/// A VT-d unit that fails invalidations as [`FORTUNE`] says.
#[derive(Debug)]
struct Fickle(Vtd);

impl Invalidator for Fickle {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        match FORTUNE.get() {
            (0, 0) => self.0.unit.submit(request),
            (0, failing) => {
                FORTUNE.set((0, failing - 1));
                Err(InvalidationError::Failed)
            }
            (good, failing) => {
                FORTUNE.set((good - 1, failing));
                self.0.unit.submit(request)
            }
        }
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.0.unit.poll(ticket)
    }
}

impl Hardware for Fickle {
    type Host = ();
    type Invalidator = Self;

    fn new(
        profile: &Profile,
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
    ) -> Result<Self, LabError> {
        Vtd::new(profile, memory, frames).map(Self)
    }

    fn disable(&mut self) {
        self.0.disable();
    }

    fn invalidator(&mut self) -> &mut Self {
        self
    }

    fn requester(attached: usize, recorded: RequesterId) -> Result<RequesterId, LabError> {
        Vtd::requester(attached, recorded)
    }

    fn attach(
        &mut self,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
        device: RequesterId,
        domain: DomainId,
        to: ContextTarget,
    ) -> Result<(), LabError> {
        self.0.attach(memory, frames, device, domain, to)
    }

    fn detach(&mut self, memory: &Arena, device: RequesterId) -> Result<(), LabError> {
        self.0.detach(memory, device)
    }

    fn probe<O: Observer>(
        &mut self,
        memory: &Arena,
        request: &DmaRequest,
        observer: O,
    ) -> Result<(), Fault> {
        self.0.probe(memory, request, observer)
    }

    fn stats(&self) -> IommuStats {
        self.0.stats()
    }

    fn fault_counts(&mut self) -> FaultCounts {
        self.0.fault_counts()
    }
}

struct OnFickle<'a>(&'a Plan);

impl ModeVisitor for OnFickle<'_> {
    type Output = Outcomes;

    fn identity(self, _: IdentityKind) -> Outcomes {
        unreachable!("no mode here")
    }

    fn paged<A, T, F>(self, parts: ModeParts<A, T, F>) -> Outcomes
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let platform = ReplayPlatform::<Fickle>::new(&Profile::r210_2015(), true).unwrap();
        let make = parts.make_space(platform.coherency(), None);
        let platform = SharedPlatform::new(platform);
        let layer = DmaLayer::new((parts.flush)(), platform.for_layer(), make);
        let mut judged =
            CheckedReplay::new(platform, Box::new(layer), Ownership::Page, Attackers::None);
        judged.run(self.0, &Devices::new()).unwrap();
        judged.finish(&[])
    }

    fn cached<T: ReplayTable<Pages = ()>>(self, _: CachedParts<T>) -> Self::Output {
        unreachable!("no mode here")
    }

    fn shadow<P: CopyParts>(self, _: P) -> Self::Output {
        unreachable!("no mode here")
    }

    fn rings<D, L, F>(self, _: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        unreachable!("no mode here")
    }
}

#[test]
fn buffer_is_withheld_until_its_invalidation_succeeds() {
    const MS: u64 = 1_000_000;
    let mut script = Script::default();
    for id in 0..3 {
        let at = u64::from(id) * 1_000;
        script.map(at, (0, 0, RX), id, &[memory(u64::from(id + 1) << 12, 100)]);
    }
    for id in 0..3 {
        script.unmap(10_000, (0, 0), id);
    }
    // The replay continues for 12 ms and polls timers every millisecond.
    let (plan, _) = planned(&script.chunk);
    let run = |fortune| {
        FORTUNE.set(fortune);
        dispatch(&mode("strict"), OnFickle(&plan)).unwrap()
    };
    let fine = run((0, 0));
    assert_eq!((fine.not_flushed, fine.release_delay_max_ns), (0, 0));

    // Two invalidations fail at their unmaps. At the first tick one of them fails again; it
    // succeeds at the second.
    let settled = run((1, 3));
    assert_eq!((settled.unmaps, settled.refused_unmaps), (3, 0));
    assert_eq!(settled.not_flushed, 0);
    assert_eq!(settled.release_delay_max_ns, 2 * MS - 10_000);
    assert_eq!(settled.tally.violations() + settled.tally.false_faults, 0);
    assert_eq!(settled.stale_max_ns, 0, "it was not handed back");

    let never = run((1, u32::MAX));
    assert_eq!((never.unmaps, never.not_flushed), (3, 2));
}

/// Counts the refused maps of a replica with this many frames for tables.
struct Cramped<'a>(&'a Plan, u64);

impl ModeVisitor for Cramped<'_> {
    type Output = Option<u64>;

    fn identity(self, _: IdentityKind) -> Self::Output {
        None
    }

    fn paged<A, T, F>(self, parts: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let arena = Rc::new(Arena::new(self.1 << 12).unwrap());
        let region = PhysRange::new(PhysAddr::new(0), self.1 << 12).unwrap();
        let platform = LayerPlatform {
            frames: Rc::new(Frames::new(Rc::clone(&arena), region)),
            arena,
            invalidator: FreeInvalidator,
            now: Nanos(0),
        };
        let make = parts.make_space(Profile::r210_2015().coherency(), None);
        let mut replica = TimedReplay::new((parts.flush)(), platform, make);
        replica.prepare(self.0).unwrap();
        replica.run(self.0, &mut Clock::blocks(), None);
        replica.refusals().map(|(count, _)| count)
    }

    fn cached<T: ReplayTable<Pages = ()>>(self, _: CachedParts<T>) -> Self::Output {
        unreachable!("no mode here")
    }

    fn shadow<P: CopyParts>(self, _: P) -> Self::Output {
        unreachable!("no mode here")
    }

    fn rings<D, L, F>(self, _: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        unreachable!("no mode here")
    }
}

#[test]
fn maps_that_a_timed_replay_refuses_are_counted() {
    let mut script = Script::default();
    // Two maps that need a leaf table each: they are 2 MiB apart in a tree that allocates
    // downwards.
    for id in 0..2 {
        script.map(u64::from(id), (0, 0, RX), id, &[memory(0, 2 << 20)]);
    }
    let (plan, _) = planned(&script.chunk);
    let refused = |frames| dispatch(&mode("strict"), Cramped(&plan, frames)).unwrap();
    assert_eq!(refused(64), None);
    // The root and a table of each of three levels leave no frame for the second leaf table.
    assert_eq!(refused(4), Some(1));
}

#[test]
fn replays_too_large_to_time_are_still_judged() {
    let lines = [map_line("eth", 1 << 30, 13 << 30)];
    let options = CompareOptions {
        modes: vec![mode("none")],
        repetitions: 21,
        ..judged_only(false)
    };
    let row = compare("script", trace(&lines), &options, |_| {})
        .unwrap()
        .rows
        .remove(0);
    assert_eq!(row.status, ReplayStatus::NotTimed { bytes: 13 << 30 });
    assert_eq!((row.maps, row.status_code), (1, "not-timed"));
    assert!(row.components.is_none() && row.map_cycles.is_none());
}
