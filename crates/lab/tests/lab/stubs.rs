//! The meter's stubs answer like the real components: no replica refuses a map that the full one
//! performs, or performs one that it refuses.

use std::rc::Rc;

use ringfence_dma::flush::FlushPolicy;
use ringfence_dma::space::{Paged, Space};
use ringfence_hw::RingLogic;
use ringfence_lab::components::{HostOf, ModeParts, ReplayTable};
use ringfence_lab::hardware::Host;
use ringfence_lab::layer::{
    AttachInfo, ContextTarget, FreeInvalidator, LayerPlatform, SpaceResult, TimedInvalidationQueue,
};
use ringfence_lab::mapping_cache::CachedParts;
use ringfence_lab::meter::{
    AllocTrace, Clock, FlushFor, FlushForRings, NullTable, ReplayAlloc, ReplayRing, ReplayedRings,
    TimedReplay,
};
use ringfence_lab::mode_dispatch::{IdentityKind, ModeVisitor, dispatch};
use ringfence_lab::modes::{Mode, Owner};
use ringfence_lab::plan::Plan;
use ringfence_lab::ring::{RingParts, RingSizes};
use ringfence_lab::shadow::CopyParts;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{Invalidator, Nanos, PhysAddr};

use crate::script::*;

const ARENA: u64 = 64 << 20;

fn bench<I>(invalidator: impl FnOnce(&Rc<Arena>) -> I) -> LayerPlatform<I> {
    let arena = Rc::new(Arena::new(ARENA).unwrap());
    let frames = Rc::new(Frames::new(
        Rc::clone(&arena),
        memory(0x2000, ARENA - 0x2000),
    ));
    let invalidator = invalidator(&arena);
    LayerPlatform {
        arena,
        frames,
        invalidator,
        now: Nanos(0),
    }
}

fn queued(arena: &Rc<Arena>) -> TimedInvalidationQueue {
    TimedInvalidationQueue::new(Rc::clone(arena), PhysAddr::new(0), PhysAddr::new(0x1000))
}

/// Replays the plan and returns the result of every map, as text and as a trace.
fn answers<S: Space, F: FlushPolicy<S, u64>, I: Invalidator>(
    flush: F,
    bench: LayerPlatform<I>,
    plan: &Plan,
    play: Option<&AllocTrace>,
    make: impl FnMut(&AttachInfo, &LayerPlatform<I>) -> SpaceResult<S> + 'static,
) -> (String, Rc<AllocTrace>) {
    let mut replica = TimedReplay::new(flush, bench, make);
    replica.prepare(plan).unwrap();
    if let Some(tape) = play {
        tape.rewind();
    }
    let tape = Rc::new(AllocTrace::default());
    replica.run(plan, &mut Clock::blocks(), Some(&tape));
    (format!("{tape:?}"), tape)
}

/// Runs all replicas of a mode on a plan, with rings of this many slots.
struct AllReplicas<'a>(&'a Plan, u32);

impl ModeVisitor for AllReplicas<'_> {
    /// Results of the maps in the full replica, and in every other replica by name.
    type Output = Option<(String, Vec<(&'static str, String)>)>;

    fn identity(self, _: IdentityKind) -> Self::Output {
        None
    }

    fn paged<A, T, F>(self, parts: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let plan = self.0;
        let flush = parts.flush;
        let rounding = parts.rounding;
        // A table that the host maintains requires the host.
        if HostOf::<T>::REMOTE {
            return None;
        }
        let coherency = Coherency::Coherent;
        let real = parts.make_space(coherency, None);
        let (full, trace) = answers(flush(), bench(queued), plan, None, real);
        let replayed = {
            let trace = Rc::clone(&trace);
            move || A::replayed(Rc::clone(&trace))
        };
        let table = move |of: &AttachInfo, at: &LayerPlatform<_>| {
            (parts.table)(of.domain, coherency, &at.arena, &at.frames, None)
        };
        let target = ContextTarget::PassThrough;
        let no_find = move |of: &AttachInfo, at: &LayerPlatform<_>| {
            let table = table(of, at)?;
            let alloc = parts.allocator(&at.arena, &at.frames, Some(&table))?;
            Ok((Paged::new(alloc.without_find(), table, rounding), target))
        };
        let of_recorded = replayed.clone();
        let a = move |of: &AttachInfo, at: &LayerPlatform<_>| {
            Ok((Paged::new(of_recorded(), table(of, at)?, rounding), target))
        };
        let at = move |of: &AttachInfo, _: &LayerPlatform<_>| {
            let table = NullTable(of.domain);
            Ok((Paged::new(replayed(), table, rounding), target))
        };
        let it = move |of: &AttachInfo, at: &LayerPlatform<_>| {
            let alloc = parts.allocator(&at.arena, &at.frames, None)?;
            Ok((Paged::new(alloc, NullTable(of.domain), rounding), target))
        };
        let free = || bench(|_| FreeInvalidator);
        let others = vec![
            (
                "no_find",
                answers(flush(), bench(queued), plan, None, no_find).0,
            ),
            (
                "a",
                answers(flush(), bench(queued), plan, Some(&trace), a).0,
            ),
            (
                "at",
                answers(flush(), bench(queued), plan, Some(&trace), at).0,
            ),
            ("it", answers(flush(), free(), plan, None, it).0),
        ];
        Some((full, others))
    }

    fn cached<T: ReplayTable<Pages = ()>>(self, _: CachedParts<T>) -> Self::Output {
        None
    }

    fn shadow<P: CopyParts>(self, _: P) -> Self::Output {
        None
    }

    fn rings<D, L, F>(self, recipe: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        let plan = self.0;
        let sizes = || RingSizes::Every(self.1);
        let flush = || -> F { (recipe.flush)() };
        let real = recipe.make_space(sizes());
        let (full, tape) = answers(flush(), bench(queued), plan, None, real);
        let real = recipe.make_space(sizes());
        let immediate = answers(flush(), bench(|_| FreeInvalidator), plan, None, real);
        let others = vec![
            ("i", immediate.0),
            ("a", taped::<_, _, _, true>(recipe, sizes(), plan, &tape)),
            ("at", taped::<_, _, _, false>(recipe, sizes(), plan, &tape)),
        ];
        Some((full, others))
    }
}

/// Results of the maps in a ring whose slots come from `tape`.
fn taped<D, L, F, const ENTRIES: bool>(
    recipe: RingParts<D, L, F>,
    sizes: RingSizes,
    plan: &Plan,
    tape: &Rc<AllocTrace>,
) -> String
where
    D: ReplayRing,
    L: 'static,
    F: FlushPolicy<ReplayedRings<D, ENTRIES>, u64> + 'static,
{
    let flush: F = (recipe.flush)();
    let played = Rc::clone(tape);
    let make = move |of: &AttachInfo, bench: &LayerPlatform<TimedInvalidationQueue>| {
        let (memory, frames) = (&bench.arena, &bench.frames);
        let (_, rings) = recipe.space(of, &sizes, memory, frames)?;
        let coherency = recipe.setup.coherency;
        let space =
            ReplayedRings::<D, ENTRIES>::new(of, coherency, rings, memory, Rc::clone(&played))?;
        Ok((space, ContextTarget::Table(rings)))
    };
    answers(flush, bench(queued), plan, Some(tape), make).0
}

/// A fixed pseudo-random mix of sizes, devices, CPUs and lifetimes, and one map that no 32-bit
/// space can hold.
fn disorder() -> Plan {
    let mut script = Script::default();
    let mut seed = 11_u64;
    let mut roll = |sides: u64| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % sides
    };
    let mut live: Vec<(u32, u16)> = Vec::new();
    let mut free: Vec<u32> = (0..400).rev().collect();
    for step in 0..3_000_u64 {
        let (time, cpu) = (step * 7_000, roll(2) as u16);
        if live.len() < 200 && roll(5) < 3 || live.is_empty() {
            let (id, device) = (free.pop().unwrap(), roll(2) as u16);
            live.push((id, device));
            let direction = if roll(2) == 0 { RX } else { TX };
            let pieces = [
                memory(roll(1 << 12) << 12 | 0x40, 1 + roll(70_000)),
                memory(roll(1 << 12) << 12, 4096 * (1 + roll(3))),
            ];
            let pieces = &pieces[..1 + roll(2) as usize];
            script.map(time, (device, cpu, direction), id, pieces);
        } else {
            let (id, device) = live.swap_remove(roll(live.len() as u64) as usize);
            free.push(id);
            script.unmap(time, (device, cpu), id);
        }
    }
    planned(&script.chunk).0
}

#[test]
fn stubs_replay_the_recorded_results() {
    let plan = disorder();
    for mode in Mode::named() {
        let Some((full, others)) = dispatch(&mode, AllReplicas(&plan, 1024)).unwrap() else {
            let asks = mode.owner != Owner::Kernel;
            let undivided = mode.flush.has_cache() || mode.has_pool() || !mode.translates();
            assert!(asks || undivided, "{}", mode.name);
            continue;
        };
        let answers = full.matches("Some(").count() as u64;
        if mode.has_rings() {
            // One answer per segment.
            assert_eq!(answers, plan.segments.len() as u64, "{}", mode.name);
        } else {
            assert_eq!(answers, plan.maps, "{}", mode.name);
        }
        for (replica, answers) in others {
            assert!(
                answers == full,
                "{}: {replica} answers otherwise",
                mode.name
            );
        }
    }
}

#[test]
fn maps_wait_for_a_slot_of_a_stub_as_for_a_real_one() {
    let plan = disorder();
    for name in ["riommu", "riommu-", "riommu-ooo", "riommu-paper"] {
        let job = AllReplicas(&plan, 64);
        let (full, others) = dispatch(&mode(name), job).unwrap().unwrap();
        assert!(full.contains("None"), "{name}: nothing had to wait");
        for (replica, answers) in others {
            assert!(answers == full, "{name}: {replica} answers otherwise");
        }
    }
}

#[test]
fn stub_repeats_recorded_failures() {
    let mut script = Script::default();
    for (id, (at, bytes)) in [(1 << 20, 100), (1 << 32, 5 << 30), (1 << 21, 100)]
        .into_iter()
        .enumerate()
    {
        script.map(id as u64, (0, 0, RX), id as u32, &[memory(at, bytes)]);
    }
    let plan = planned(&script.chunk).0;
    let job = AllReplicas(&plan, 1024);
    let (full, others) = dispatch(&mode("bitmap"), job).unwrap().unwrap();
    assert_eq!(full.matches("Some(").count(), 2, "{full}");
    for (replica, answers) in others {
        assert_eq!(answers, full, "{replica}");
    }
}
