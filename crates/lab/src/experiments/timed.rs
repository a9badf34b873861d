//! What a mode executes and is charged for under a workload: the layer alone, driven by plans, its invalidations counted.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::{Burst, Flush, Never};
use ringfence_dma::ring::{Ring, RingSetup, SlotChoice, Tables, lay_out};
use ringfence_dma::space::{Identity, Paged, Rings, Space};
use ringfence_hw::RingLogic;
use ringfence_iova::IovaAllocator;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{
    Invalidation, InvalidationError, Invalidator, Nanos, PhysAddr, PhysMemory, PhysRange, Ticket,
};

use super::capture::Run;
use super::finding::median;
use crate::Profile;
use crate::build::{Job, Recipe, TableMaker, dispatch};
use crate::error::LabError;
use crate::meter::{
    Bench, Clock, FlushFor, FlushForRings, Idle, InvalidationQueue, ReplayRing, Replica,
};
use crate::modes::{Mode, TableKind};
use crate::plan::Plan;
use crate::replay::Newcomer;
use crate::ring::RingRecipe;

/// Memory of one replica: tables only, no buffers.
const ARENA: u64 = 256 << 20;
/// Frames touched beforehand, so that no page fault of this process is taken for work of the layer.
const WARM_FRAMES: u64 = 256;

/// Writes descriptors as a driver does, and counts.
#[derive(Debug)]
struct Counting {
    queue: InvalidationQueue,
    count: u64,
}

impl Invalidator for Counting {
    #[inline]
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.count += 1;
        self.queue.submit(request)
    }

    #[inline]
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.queue.poll(ticket)
    }
}

/// A platform on which write-backs are executed.
fn bench() -> Result<Bench<Counting>, LabError> {
    let arena = Rc::new(Arena::new(ARENA)?);
    let region = PhysRange::new(PhysAddr::new(0x2000), ARENA - 0x2000)
        .ok_or(LabError::Internal("replica region"))?;
    for page in 0..WARM_FRAMES {
        if let Ok(word) = arena.word(PhysAddr::new(page << 12)) {
            word.store(0, std::sync::atomic::Ordering::Relaxed);
        }
    }
    let queue = InvalidationQueue::new(Rc::clone(&arena), PhysAddr::new(0), PhysAddr::new(0x1000));
    Ok(Bench {
        frames: Frames::new(Rc::clone(&arena), region),
        arena,
        invalidator: Counting { queue, count: 0 },
        now: Nanos(0),
    })
}

/// A replica of any mode.
trait Driven {
    fn drive(&mut self, plan: &Plan, clock: &mut Clock) -> Result<u64, LabError>;
}

impl<S: Space, F: Flush<S, u64>> Driven for Replica<S, F, Counting> {
    fn drive(&mut self, plan: &Plan, clock: &mut Clock) -> Result<u64, LabError> {
        self.prepare(plan)?;
        let before = self.platform.invalidator.count;
        self.run(plan, clock, None);
        match self.refusals() {
            None => Ok(self.platform.invalidator.count - before),
            Some(_) => Err(LabError::Internal("a map that was refused")),
        }
    }
}

/// Makes a replica of a mode.
struct MakeReplica {
    coherency: Coherency,
}

impl Job for MakeReplica {
    type Output = Result<Box<dyn Driven>, LabError>;

    fn identity(self, _: TableKind) -> Self::Output {
        let make = |of: &Newcomer, _: &Bench<Counting>| Ok(Identity::new(of.domain));
        let bench = bench()?;
        Ok(Box::new(Replica::new(Never, bench, make)))
    }

    fn paged<A, T, F>(self, recipe: Recipe<A, T, F>) -> Self::Output
    where
        A: IovaAllocator + 'static,
        T: TableMaker,
        F: FlushFor<A, T> + 'static,
    {
        let coherency = self.coherency;
        let make = move |of: &Newcomer, bench: &Bench<Counting>| {
            let (memory, frames) = (&bench.arena, &bench.frames);
            let table = T::make(of.domain, coherency, memory, frames)?;
            let alloc = recipe.allocator(memory, frames, Some(&table))?;
            Ok(Paged::new(alloc, table, recipe.rounding))
        };
        let flush = (recipe.flush)();
        Ok(Box::new(Replica::new(flush, bench()?, make)))
    }

    /// An experiment's rings are a port's, not a trace's: [`rings`] makes them.
    fn rings<D, L, F>(self, _: RingRecipe<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        Err(LabError::Internal("an experiment on a trace's rings"))
    }
}

/// Slots of the table of a ring's buffers: two buffers for each of 1024 descriptors are live at most, and a burst of 200 packets waits.
const SLOTS: u32 = 4096;

/// The rings of a port, each a device with one table. Lines of a table that the hardware does not snoop are written back at the end of a
/// burst; a receive loop rings its doorbell after that, when nothing is left to write.
fn rings(coherency: Coherency) -> Result<Box<dyn Driven>, LabError> {
    let make = move |of: &Newcomer, bench: &Bench<Counting>| {
        let bytes = u64::from(SLOTS) * 16 + 4096;
        let base = bench.frames.alloc_contiguous(bytes.div_ceil(4096) + 1);
        let base = base.map_err(|_| LabError::Internal("room for a ring"))?;
        let failed = || LabError::Internal("a ring that cannot be laid out");
        let tables = Tables::new(base, &[SLOTS]).map_err(|_| failed())?;
        let choice = SlotChoice::Tail;
        let setup = RingSetup { choice, coherency };
        let rings = lay_out(&*bench.arena, &tables, setup).map_err(|_| failed())?;
        let space = Rings::<Ring, RefCell<Ring>>::new(of.domain, of.device, rings, RefCell::new);
        Ok(space)
    };
    let bench = bench()?;
    Ok(Box::new(Replica::new(Burst::new(4096), bench, make)))
}

/// What is timed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// A mode that pages.
    Mode(Mode),
    /// Rings that the hardware snoops (`riommu`).
    Rings,
    /// Rings that it does not (`riommu-`).
    RingsNonCoherent,
}

impl Subject {
    /// A mode by its name, `riommu` and `riommu-` included.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn named(name: &str) -> Result<Self, LabError> {
        Ok(match name {
            "riommu" => Self::Rings,
            "riommu-" => Self::RingsNonCoherent,
            _ => Self::Mode(Mode::find(name).ok_or_else(|| LabError::NoSuchMode(name.into()))?),
        })
    }
}

/// What a run cost.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// Cycles that were executed, without the replay's own loop.
    pub executed: f64,
    /// Largest less smallest repetition, as a share.
    pub spread: f64,
    /// Invalidation commands.
    pub invalidations: u64,
    /// Pairs of a map and an unmap: the larger number of either.
    pub pairs: u64,
}

impl Cost {
    /// Executed cycles of a map and an unmap.
    pub fn executed_per_pair(&self) -> f64 {
        self.executed / self.pairs.max(1) as f64
    }

    /// Cycles of a map and an unmap that `profile` charges.
    pub fn charged_per_pair(&self, profile: &Profile) -> f64 {
        let cycles = self.invalidations as f64 * profile.invalidation_cycles as f64;
        cycles / self.pairs.max(1) as f64
    }

    /// Both.
    pub fn per_pair(&self, profile: &Profile) -> f64 {
        self.executed_per_pair() + self.charged_per_pair(profile)
    }
}

/// Replicas of one subject, which go through the same runs.
pub struct Timed {
    subject: Subject,
    replicas: Vec<Box<dyn Driven>>,
}

impl Timed {
    /// Fresh replicas of `subject`, as many as there are repetitions.
    ///
    /// # Errors
    /// No memory, or the mode is not built in.
    pub fn new(subject: Subject, profile: &Profile, repetitions: usize) -> Result<Self, LabError> {
        let make = || match &subject {
            Subject::Mode(mode) => {
                let coherency = profile.coherency();
                dispatch(mode, MakeReplica { coherency })?
            }
            Subject::Rings => rings(Coherency::Coherent),
            Subject::RingsNonCoherent => rings(Coherency::NonCoherent),
        };
        let replicas = (0..repetitions.max(1)).map(|_| make());
        Ok(Self {
            replicas: replicas.collect::<Result<_, _>>()?,
            subject,
        })
    }

    /// Goes through a run. Each block of steps counts with its median over the repetitions, so that what else happens on the
    /// processor hardly counts.
    ///
    /// # Errors
    /// A map was refused.
    pub fn run(&mut self, run: &Run) -> Result<Cost, LabError> {
        let by_ring;
        let plan = match self.subject {
            Subject::Mode(_) => &run.plan,
            Subject::Rings | Subject::RingsNonCoherent => {
                by_ring = run.by_ring();
                &by_ring
            }
        };
        let mut invalidations = 0;
        let mut blocks: Vec<Vec<u64>> = Vec::new();
        for replica in &mut self.replicas {
            let mut clock = Clock::blocks();
            invalidations = replica.drive(plan, &mut clock)?;
            blocks.push(clock.blocks);
        }
        let own = own_loop(plan);
        let wholes: Vec<f64> = blocks
            .iter()
            .map(|blocks| blocks.iter().sum::<u64>() as f64)
            .collect();
        let count = blocks.iter().map(Vec::len).min().unwrap_or(0);
        let executed: f64 = (0..count)
            .map(|block| {
                let times = blocks.iter().map(|blocks| blocks[block] as f64);
                median(&times.collect::<Vec<_>>()).0
            })
            .sum();
        Ok(Cost {
            executed: (executed - own).max(0.0),
            spread: median(&wholes).1,
            invalidations,
            pairs: plan.maps.max(plan.unmaps),
        })
    }
}

/// Cycles of the replay's own loop: of each block the least of a few tries, since nothing but disturbance makes it longer.
pub(super) fn own_loop(plan: &Plan) -> f64 {
    const TRIES: usize = 3;
    let tries: Vec<Vec<u64>> = (0..TRIES)
        .map(|_| {
            let mut clock = Clock::blocks();
            Idle::default().run(plan, &mut clock);
            clock.blocks
        })
        .collect();
    let blocks = tries.iter().map(Vec::len).min().unwrap_or(0);
    let least = (0..blocks).filter_map(|block| tries.iter().map(|blocks| blocks[block]).min());
    least.sum::<u64>() as f64
}

#[cfg(test)]
mod tests {
    use ringfence_devices::nic::Profile as Adapter;
    use ringfence_devices::workload::Stream;

    use super::*;
    use crate::experiments::capture::Capture;

    #[test]
    fn invalidations_are_those_of_the_policy() {
        let profile = Profile::r210_2015();
        let mut capture = Capture::with(Adapter::BRCM, Stream::default(), 200, 2000).unwrap();
        let runs = [capture.run().unwrap(), capture.run().unwrap()];
        let unmaps: u64 = runs.iter().map(|run| run.plan.unmaps).sum();
        let bursts: u64 = runs.iter().map(Run::bursts).sum();
        for (name, wanted) in [
            ("none", 0),
            ("strict", unmaps),
            ("defer", unmaps / 250),
            ("riommu", bursts),
            ("riommu-", bursts),
        ] {
            let mut timed = Timed::new(Subject::named(name).unwrap(), &profile, 1).unwrap();
            let count: u64 = runs
                .iter()
                .map(|run| timed.run(run).unwrap().invalidations)
                .sum();
            assert_eq!(count, wanted, "{name}");
        }
        assert!(Subject::named("nothing").is_err());
    }
}
