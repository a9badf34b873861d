//! The sums of a meter, on counted clocks.

use std::cell::Cell;
use std::collections::HashSet;

use ringfence_dma::space::{
    AddressLimits, AddressSpace, CachingSpace, CopyingSpace, MapResult, NothingMapped, RingSpace,
    SgSpace, UnmapRefusal,
};
use ringfence_dma::{MapReason, Platform};
use ringfence_trace::{DeviceIndex, MappingId};
use ringfence_types::{
    Direction, DomainId, Flushed, Iova, IovaRange, Nanos, Permissions, PhysAddr, PhysRange,
    WholeDomain,
};

use super::*;
use crate::modes::Mode;
use crate::options::CompareOptions;
use crate::plan::{Step, TimedStep};
use crate::replay::counted::{advance, with_ticks, with_ticks_of_reads};
use crate::runner::ablations;

/// The identity space, whose maps take 1 tick and whose unmaps take 3.
struct Ticking(Identity);

impl AddressSpace for Ticking {
    type PerCpu = ();
    type FreeProof = Flushed;
    type UnmapResult = NothingMapped;

    fn per_cpu(&self) {}

    fn domain(&self) -> DomainId {
        self.0.domain()
    }

    fn map<P: Platform>(
        &self,
        cpu: &mut (),
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        advance(1);
        self.0.map(cpu, platform, pieces, permissions, limits)
    }

    fn unmap<P: Platform>(
        &self,
        cpu: &mut (),
        platform: &mut P,
        range: IovaRange,
    ) -> Result<NothingMapped, UnmapRefusal> {
        advance(3);
        self.0.unmap(cpu, platform, range)
    }

    fn sync<P: Platform>(&self, _: &mut (), _: &mut P) {}

    fn is_empty<P: Platform>(&self, _: &P) -> bool {
        true
    }

    fn release(&self, _: &mut (), _: Flushed) {}

    fn flushed(&self, _: &mut (), _: Flushed<WholeDomain>) {}

    fn drain(&self, _: &mut ()) {}
}

impl SgSpace for Ticking {
    fn pieces<'a>(
        &'a self,
        start: Iova,
        pieces: &'a [PhysRange],
    ) -> impl Iterator<Item = IovaRange> + 'a {
        self.0.pieces(start, pieces)
    }
}

impl RingSpace for Ticking {}

impl CachingSpace for Ticking {}

impl CopyingSpace for Ticking {}

const DEVICE: DeviceIndex = DeviceIndex(0);
const FROM: Direction = Direction::FromDevice;

/// A plan of `maps` maps, the first `unmaps` of which are unmapped, each right after its map.
fn plan(maps: u32, unmaps: u32) -> Plan {
    let mut plan = Plan {
        maps: maps.into(),
        unmaps: unmaps.into(),
        ..Plan::default()
    };
    let at = |step| TimedStep {
        time: Nanos(0),
        step,
    };
    for number in 0..maps {
        let (id, device, cpu, direction) = (MappingId(number), DEVICE, 0, FROM);
        let start = PhysAddr::new(u64::from(number + 16) << 12);
        plan.segments.push(PhysRange::new(start, 64).unwrap());
        plan.steps.push(at(Step::Map {
            id,
            device,
            cpu,
            direction,
            first: number,
            count: 1,
        }));
        if number < unmaps {
            plan.steps.push(at(Step::Unmap {
                id,
                device,
                cpu,
                direction,
            }));
        }
    }
    plan
}

/// A replay of a layer over [`Ticking`].
fn ticking() -> Result<Box<dyn DynTimedReplay>, LabError> {
    let layer = DmaLayer::new(
        Never,
        LayerPlatform::timed()?,
        |of: &AttachInfo, _: &LayerPlatform<FreeInvalidator>| {
            let space = Ticking(Identity::new(of.domain));
            Ok((space, ContextTarget::PassThrough))
        },
    );
    Ok(Box::new(TimedReplay::of(Box::new(layer))))
}

/// A map takes 1 tick and an unmap 3, whatever their numbers.
#[test]
fn maps_and_unmaps_have_their_own_ticks() {
    for repetitions in [1, 2] {
        with_ticks(|| {
            let mut meter = Ablations::undivided(repetitions, &ticking).unwrap();
            meter.chunk(&plan(5, 3)).unwrap();
            let found = meter.finish();
            assert_eq!((found.cycles.map(), found.cycles.unmap()), (1.0, 3.0));
            assert_eq!(
                (found.cycles.map_other, found.cycles.unmap_other),
                (1.0, 3.0)
            );
            assert_eq!((found.measured, found.pairs), (14.0 / 5.0, 5));
            assert_eq!(found.repetition_spread, 0.0);
        });
    }
}

/// A replay whose blocks have the ticks of its configuration.
struct ByHand {
    whole: u64,
    maps: u64,
    unmaps: u64,
    /// Maps that never got a slot, and skipped unmaps.
    stalled_out: (u64, u64),
}

impl DynTimedReplay for ByHand {
    fn prepare_for(&mut self, _: &PlanResources) -> Result<(), LabError> {
        Ok(())
    }

    fn run_plan(&mut self, _: &Plan, clock: &mut Clock, _: Option<&AllocTrace>) {
        // Two blocks.
        clock.blocks.extend([self.whole, 10_000]);
        clock.in_maps.extend([self.maps, 3_000]);
        clock.in_unmaps.extend([self.unmaps, 5_000]);
    }

    fn stalled_out(&self) -> (u64, u64) {
        self.stalled_out
    }

    fn layer_type(&self) -> &'static str {
        "by hand"
    }
}

/// Costs of the configurations: the whole, its maps and its unmaps.
const COSTS: [[u64; 3]; CONFIGS] = [
    [1000, 400, 350],
    [950, 390, 340],
    [600, 100, 250],
    [300, 60, 190],
    [150, 50, 100],
    [870, 350, 260],
    [560, 80, 150],
    [50, 20, 30],
];

/// Each configuration has its own sums of blocks: of medians over the repetitions, of all chunks.
#[test]
fn each_configuration_has_its_own_sums() {
    // The median of three repetitions is the second one.
    let repetitions = Cell::new(0);
    let mut set = || {
        let factor = [1, 2, 7][repetitions.get() % 3];
        repetitions.set(repetitions.get() + 1);
        let replicas = COSTS.map(|[whole, maps, unmaps]| {
            let replay = ByHand {
                whole: factor * whole,
                maps: factor * maps,
                unmaps: factor * unmaps,
                stalled_out: (0, 0),
            };
            Some(Box::new(replay) as Box<dyn DynTimedReplay>)
        });
        Ok(AblationSet { replicas })
    };
    let recorder = ByHand {
        whole: 0,
        maps: 0,
        unmaps: 0,
        stalled_out: (20, 40),
    };
    let trace = Rc::new(AllocTrace::default());
    let mut meter = Ablations::new(3, trace, Box::new(recorder), &mut set).unwrap();
    for _ in 0..2 {
        meter.chunk(&plan(25, 30)).unwrap();
        meter.chunk(&Plan::default()).unwrap();
    }
    assert_eq!(repetitions.get(), 6);
    let sums = |column: usize, block: u64| {
        COSTS.map(|costs| 2.0 * (2.0 * costs[column] as f64 + block as f64))
    };
    assert_eq!(meter.whole, sums(0, 10_000));
    assert_eq!(meter.maps, sums(1, 3_000));
    assert_eq!(meter.unmaps, sums(2, 5_000));
    // 20 of 50 maps and 40 of 60 unmaps did not take place.
    let found = meter.finish();
    let wanted = components(
        &meter.whole,
        &meter.maps,
        &meter.unmaps,
        SecondAblation::Table,
        30,
        20,
    );
    // The slowest repetition has factor 7, and the fastest 1.
    let measured = meter.whole[0] - meter.whole[CONFIGS - 1];
    let spread = 2.0 * (7.0 - 1.0) * 1000.0 / measured;
    assert_eq!(
        found,
        Components {
            repetition_spread: spread,
            ..wanted
        }
    );
}

/// A replay whose block of each chunk has the next of these ticks.
struct Ticks(std::vec::IntoIter<u64>);

impl DynTimedReplay for Ticks {
    fn prepare_for(&mut self, _: &PlanResources) -> Result<(), LabError> {
        Ok(())
    }

    fn run_plan(&mut self, _: &Plan, clock: &mut Clock, _: Option<&AllocTrace>) {
        clock.blocks.extend(self.0.next());
    }

    fn layer_type(&self) -> &'static str {
        "by hand"
    }
}

/// A repetition that is slow in one chunk and fast in another is as fast as the one between them.
#[test]
fn the_spread_is_that_of_whole_repetitions() {
    for (second, wanted) in [([20, 10], 0.0), ([20, 25], 15.0 / 37.5)] {
        let mut ticks = [vec![10, 20], second.to_vec()].into_iter().cycle();
        let mut set = || {
            let mut replicas: [Option<Box<dyn DynTimedReplay>>; CONFIGS] = Default::default();
            replicas[0] = Some(Box::new(Ticks(ticks.next().unwrap().into_iter())));
            Ok(AblationSet { replicas })
        };
        let recorder = Box::new(Ticks(Vec::new().into_iter()));
        let mut meter = Ablations::new(2, Rc::default(), recorder, &mut set).unwrap();
        for _ in 0..2 {
            meter.chunk(&plan(1, 1)).unwrap();
        }
        assert_eq!(meter.finish().repetition_spread, wanted);
    }
}

/// The cycles of the replay's own loop do not change the spread in cycles.
#[test]
fn the_spread_is_a_share_of_the_measured_cycles() {
    for (idle, cycles) in [(0, 4.0), (30, 4.0), (50, 4.0), (40, 0.0)] {
        let mut ticks = [38, 42].into_iter().cycle();
        let mut set = || {
            let mut replicas: [Option<Box<dyn DynTimedReplay>>; CONFIGS] = Default::default();
            replicas[0] = Some(Box::new(Ticks(vec![ticks.next().unwrap()].into_iter())));
            replicas[CONFIGS - 1] = Some(Box::new(Ticks(vec![idle].into_iter())));
            Ok(AblationSet { replicas })
        };
        let recorder = Box::new(Ticks(Vec::new().into_iter()));
        let mut meter = Ablations::new(2, Rc::default(), recorder, &mut set).unwrap();
        meter.chunk(&plan(1, 1)).unwrap();
        let found = meter.finish();
        assert_eq!(found.measured, 40.0 - idle as f64);
        let spread = found.repetition_spread * found.measured.abs();
        assert_eq!(spread, cycles, "a loop of {idle} cycles");
    }
}

/// In any eight sweeps in a row, each configuration has each other one before it once.
#[test]
fn every_configuration_runs_after_every_other_one() {
    for first in 0..20 {
        let sweeps: Vec<_> = (first..first + CONFIGS).map(order).collect();
        let pairs = sweeps.iter().flat_map(|order| order.windows(2));
        let pairs: HashSet<_> = pairs.map(<[usize]>::to_vec).collect();
        assert_eq!(pairs.len(), CONFIGS * (CONFIGS - 1));
    }
}

/// Parts of the type of each timed replay, and whether the type has it: the allocator's lookup, a
/// replayed allocator, the null table, and the queue of invalidations.
const PARTS: [(&str, [bool; CONFIGS - 1]); 4] = [
    (
        "::NoFind<",
        [false, true, false, false, false, false, false],
    ),
    (
        "::ReplayedAlloc<",
        [false, false, true, true, true, false, false],
    ),
    (
        "::NullTable>",
        [false, false, false, true, true, false, true],
    ),
    (
        "::TimedInvalidationQueue>",
        [true, true, true, true, false, false, false],
    ),
];

/// The same for rings: replayed slots, with entries and without.
const RING_PARTS: [(&str, [bool; CONFIGS - 1]); 3] = [
    (
        "::Ring, true>",
        [false, false, true, false, false, false, true],
    ),
    (
        "::Ring, false>",
        [false, false, false, true, true, false, false],
    ),
    (
        "::TimedInvalidationQueue>",
        [true, false, true, true, false, false, false],
    ),
];

/// Each timed replay leaves out what the table of the module's introduction says.
#[test]
fn each_configuration_leaves_out_its_own_components() {
    let options = CompareOptions::default();
    let rings = &RING_PARTS[..];
    for (name, parts) in [
        ("strict", &PARTS[..]),
        ("strict+", &PARTS),
        ("defer", &PARTS),
        ("defer+", &PARTS),
        ("riommu", rings),
        ("riommu-", rings),
    ] {
        let meter = ablations(&Mode::find(name).unwrap(), &options).unwrap();
        let sets = meter.timed.iter().chain(&meter.split_timed);
        for AblationSet { replicas } in sets {
            let types = replicas.each_ref();
            let types = types.map(|of| of.as_ref().map(|of| of.layer_type()));
            assert_eq!(types[CONFIGS - 1], Some("no layer"), "{name}");
            // A ring has no lookups.
            assert_eq!(types[1].is_none(), parts.len() == rings.len(), "{name}");
            for (part, wanted) in parts {
                let has = |of: &Option<&str>| of.is_some_and(|of| of.contains(part));
                let found: Vec<_> = types[..CONFIGS - 1].iter().map(has).collect();
                assert_eq!(found, wanted, "{name}: {part} in {types:#?}");
            }
        }
    }
}

/// The loop without a layer divides its cycles between maps and unmaps as a replay does.
#[test]
fn the_empty_loop_has_the_runs_of_its_steps() {
    let [all, maps] = [plan(4, 4), plan(4, 0)];
    let unmaps = Plan {
        steps: all.steps.iter().skip(1).step_by(2).cloned().collect(),
        ..Plan::default()
    };
    let runs = |plan: &Plan| {
        let mut clock = Clock::runs(0);
        with_ticks_of_reads(|| EmptyLoop::default().run(plan, &mut clock));
        (clock.in_maps[0], clock.in_unmaps[0])
    };
    // A read at the first map ends the time before it, which counts as unmaps.
    assert_eq!(runs(&maps), (2, 1));
    assert_eq!(runs(&unmaps), (0, 2));
    // Seven more changes follow, and the end of the block is read twice.
    assert_eq!(runs(&all), (4, 6));
}

/// A step after a map continues the run of maps, or begins a run of unmaps, in a replay and in the
/// loop without a layer: a doorbell belongs to maps, and ends of bursts and timers to unmaps.
#[test]
fn each_step_belongs_to_maps_or_to_unmaps() {
    let (device, cpu, direction) = (DEVICE, 0, FROM);
    let unmap = plan(1, 1).steps.remove(1).step;
    let burst = Step::EndBurst {
        device,
        cpu,
        direction,
    };
    let doorbell = Step::Doorbell {
        device,
        cpu,
        direction,
    };
    let in_runs = |replay: &mut dyn DynTimedReplay, plan: &Plan| {
        replay.prepare_for(&PlanResources::of(plan)).unwrap();
        let mut clock = Clock::runs(0);
        with_ticks_of_reads(|| replay.run_plan(plan, &mut clock, None));
        (clock.in_maps[0], clock.in_unmaps[0])
    };
    // Reads of the counter: one ends the time before the map, and two end the block. A run of
    // unmaps adds one to each kind. In the layer a map takes 1 tick more, and an unmap 3.
    for (step, of_unmaps, ticks) in [
        (None, false, 0),
        (Some(unmap), true, 3),
        (Some(burst), true, 0),
        (Some(Step::Tick), true, 0),
        (Some(doorbell), false, 0),
    ] {
        let mut plan = plan(1, 0);
        plan.steps.extend(step.map(|step| TimedStep {
            time: Nanos(0),
            step,
        }));
        let (maps, unmaps) = if of_unmaps { (1, 3) } else { (2, 1) };
        let empty = in_runs(&mut EmptyLoop::default(), &plan);
        assert_eq!(empty, (maps, unmaps), "the loop alone, {step:?}");
        let replay = in_runs(&mut *ticking().unwrap(), &plan);
        assert_eq!(replay, (maps + 1, unmaps + ticks), "{step:?}");
    }
}
