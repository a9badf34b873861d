//! What runs for one mode: its passes under the oracle, and its meter.

use ringfence_devices::{Attacker, Event, Neighbour, Port, Racer, Replayer, Reuse, Straddler};
use ringfence_dma::flush::{Flush, Never};
use ringfence_dma::space::{Identity, Paged, Rings, StaticTable};
use ringfence_dma::{Platform, Space};
use ringfence_hw::RingLogic;
use ringfence_pgtable::{Levels, SecondStage, Table};
use ringfence_trace::{DeviceIndex, Devices, MappingId};
use ringfence_types::{PageSize, PhysAddr, PhysRange};

use crate::any;
use crate::build::{Job, Recipe, ReplayTable, Single, dispatch_by_parts, is_whole, named, whole};
use crate::compare::Options;
use crate::error::LabError;
use crate::hardware::{Directed, Hardware, Riommu, Vtd};
use crate::hosted::{CachedRecipe, CachedSpace, Cycling, Hosted, PviommuHost};
use crate::machine::{DATA_BYTES, Machine};
use crate::meter::{FlushFor, FlushForRings, Meter, ReplayAlloc, ReplayRing, Sets};
use crate::modes::{Mode, TableKind};
use crate::oracle::Ownership;
use crate::plan::Plan;
use crate::replay::{Judged, MakeSpace, Newcomer, Outcomes};
use crate::ring::RingRecipe;

/// A replay under the oracle, whatever its mode.
pub trait Judge {
    /// Performs a plan.
    fn run(&mut self, plan: &Plan, devices: &Devices) -> Result<(), LabError>;
    /// Ends the replay.
    fn finish(&mut self, alive: &[(MappingId, DeviceIndex)]) -> Outcomes;
}

impl<H, S, F, X> Judge for Judged<H, S, F, X>
where
    H: Hardware,
    S: Space,
    F: Flush<S, u64>,
    X: Attacker,
{
    fn run(&mut self, plan: &Plan, devices: &Devices) -> Result<(), LabError> {
        Judged::run(self, plan, devices)
    }

    fn finish(&mut self, alive: &[(MappingId, DeviceIndex)]) -> Outcomes {
        Judged::finish(self, alive)
    }
}

/// Whom rings meet as well: who looks beside a buffer, and who does not stop at its end.
type Beside = (Neighbour, Straddler);

/// Who attacks in a pass. A value and no type, so that both passes of a mode are one type.
enum Party {
    /// Nobody, in the metered pass.
    Nobody,
    /// Whom every mode meets.
    Pages(Box<(Replayer, Neighbour)>),
    /// Rings meet the straddler too, and the racer last: what it keeps warm next takes the place of what the replayer has just tried.
    Rings(Box<((Replayer, Beside), Racer)>),
}

impl Party {
    fn pages(reuse: Reuse) -> Self {
        Self::Pages(Box::new((Replayer::new(reuse), Neighbour)))
    }

    fn rings() -> Self {
        let others = (Replayer::new(Reuse::Page), (Neighbour, Straddler));
        Self::Rings(Box::new((others, Racer::new())))
    }

    #[inline(never)]
    fn attack<P: Port>(&mut self, event: &Event, port: &mut P) {
        match self {
            Self::Nobody => {}
            Self::Pages(attackers) => attackers.on(event, port),
            Self::Rings(attackers) => attackers.on(event, port),
        }
    }
}

impl Attacker for Party {
    #[inline]
    fn on<P: Port>(&mut self, event: &Event, port: &mut P) {
        if !matches!(self, Self::Nobody) {
            self.attack(event, port);
        }
    }
}

/// Makes the replays of one mode.
struct Assemble<'a> {
    options: &'a Options,
}

/// What runs for one mode.
pub struct Runner {
    /// The metered pass.
    pub metered: Box<dyn Judge>,
    /// The hostile pass.
    pub hostile: Option<Box<dyn Judge>>,
    /// The meter.
    pub meter: Option<Box<dyn Meter>>,
}

impl Assemble<'_> {
    /// The passes under the oracle, without a meter.
    fn judges<H, S, F>(
        &self,
        enabled: bool,
        ownership: Ownership,
        flush: fn() -> F,
        attackers: fn() -> Party,
        make: impl Fn() -> MakeSpace<S, H>,
        cycling: Option<Cycling>,
    ) -> Result<Runner, LabError>
    where
        H: Hardware,
        S: Space + 'static,
        F: Flush<S, u64> + 'static,
    {
        let machine = || Machine::new(&self.options.profile, enabled);
        let metered = Judged::new(machine()?, flush(), ownership, Party::Nobody, make())
            .with_early_touches(self.options.early_touches)
            .with_limits(self.options.limits)
            .with_cycling(cycling);
        let hostile: Option<Box<dyn Judge>> = if self.options.hostile {
            let judged = Judged::new(machine()?, flush(), ownership, attackers(), make());
            let judged = judged.with_limits(self.options.limits);
            Some(Box::new(judged.with_cycling(cycling)))
        } else {
            None
        };
        Ok(Runner {
            metered: Box::new(metered),
            hostile,
            meter: None,
        })
    }
}

impl Job for Assemble<'_> {
    type Output = Result<Runner, LabError>;

    fn identity(self, kind: TableKind) -> Self::Output {
        let make = move || -> MakeSpace<Identity, Vtd> {
            Box::new(move |of: &Newcomer, machine: &Machine| {
                let domain = of.domain;
                let directed = match kind {
                    TableKind::StaticRadix => {
                        // Pages of 2 MiB: what a kernel uses for such a map.
                        let format =
                            SecondStage::new(Levels::Four).with_pages_up_to(PageSize::Size2M);
                        let table = Table::new(
                            format,
                            domain,
                            machine.coherency(),
                            &**machine.arena(),
                            machine.frames(),
                        )?;
                        let all = PhysRange::new(PhysAddr::ZERO, DATA_BYTES)
                            .ok_or(LabError::Internal("all of memory"))?;
                        StaticTable::fill(&table, machine, &[all])?;
                        Directed::Table(table.root())
                    }
                    _ => Directed::PassThrough,
                };
                Ok((Identity::new(domain), directed))
            })
        };
        let enabled = kind != TableKind::None;
        let attackers = || Party::pages(Reuse::Byte);
        self.judges(enabled, Ownership::Byte, || Never, attackers, make, None)
    }

    fn paged<A, T, F>(self, recipe: Recipe<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let make = move || -> MakeSpace<Paged<A, T>, T::Hardware> {
            Box::new(move |of: &Newcomer, machine: &Machine<T::Hardware>| {
                let (memory, frames) = (machine.arena(), machine.frames());
                let (coherency, host) = (machine.coherency(), machine.host());
                let table = (recipe.table)(of.domain, coherency, memory, frames, host)?;
                let directed = Directed::Table(table.root());
                let alloc = recipe.allocator(memory, frames, Some(&table))?;
                Ok((Paged::new(alloc, table, recipe.rounding), directed))
            })
        };
        let attackers = || Party::pages(Reuse::Page);
        self.judges(true, Ownership::Page, recipe.flush, attackers, make, None)
    }

    fn cached(self, recipe: CachedRecipe) -> Self::Output {
        let cycling = self.options.cycling;
        let make = move || -> MakeSpace<CachedSpace, Hosted<PviommuHost>> {
            Box::new(move |of: &Newcomer, machine: &Machine<_>| {
                let (memory, frames, host) = (machine.arena(), machine.frames(), machine.host());
                let (space, root) = recipe.space(of.domain, cycling, memory, frames, host)?;
                Ok((space, Directed::Table(root)))
            })
        };
        let attackers = || Party::pages(Reuse::Page);
        let (flush, cycles) = (CachedRecipe::flush, recipe.cycling(cycling));
        self.judges(true, Ownership::Shared, flush, attackers, make, cycles)
    }

    /// The attackers of the other modes and two more. An entry of a ring's cache is overwritten by its successor's, so that a stale one is
    /// only met by a device that keeps it warm; and a unit that looks buffers up by the byte may stop an access at its first byte only.
    fn rings<D, L, F>(self, recipe: RingRecipe<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        let sizes = &self.options.rings;
        let make = move || -> MakeSpace<Rings<D, Single<D>>, Riommu<L>> {
            let sizes = sizes.clone();
            Box::new(move |of: &Newcomer, machine: &Machine<Riommu<L>>| {
                let (memory, frames) = (machine.arena(), machine.frames());
                let (space, rings) = recipe.space(of, &sizes, memory, frames)?;
                Ok((space, Directed::Table(rings)))
            })
        };
        self.judges(
            true,
            Ownership::Page,
            recipe.flush,
            Party::rings,
            make,
            None,
        )
    }
}

/// What runs for `mode`.
///
/// # Errors
/// The mode is not built in, or no memory could be had.
pub fn runner(mode: &Mode, options: &Options) -> Result<Runner, LabError> {
    let mut runner = dispatch_by_parts(mode, Assemble { options })??;
    if options.repetitions > 0 {
        runner.meter = Some(meter(mode, options)?);
    }
    Ok(runner)
}

/// Makes the meter alone.
struct MeterAlone<'a> {
    options: &'a Options,
}

impl Job for MeterAlone<'_> {
    type Output = Result<Box<dyn Meter>, LabError>;

    fn identity(self, _kind: TableKind) -> Self::Output {
        Ok(Box::new(Sets::identity(
            || Never,
            self.options.repetitions,
        )?))
    }

    fn paged<A, T, F>(self, recipe: Recipe<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let repetitions = self.options.repetitions;
        let coherency = self.options.profile.coherency();
        Ok(Box::new(Sets::paged(recipe, coherency, repetitions)?))
    }

    fn cached(self, recipe: CachedRecipe) -> Self::Output {
        let Options {
            cycling,
            repetitions,
            profile,
            ..
        } = self.options;
        let coherency = profile.coherency();
        Ok(Box::new(Sets::cached(
            recipe,
            *cycling,
            coherency,
            *repetitions,
        )?))
    }

    fn rings<D, L, F>(self, recipe: RingRecipe<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        let Options {
            rings, repetitions, ..
        } = self.options;
        Ok(Box::new(Sets::rings(recipe, rings, *repetitions)?))
    }
}

/// The meter of `mode`, without machine and oracle.
///
/// # Errors
/// The mode is not built in, or no memory could be had.
pub fn meter(mode: &Mode, options: &Options) -> Result<Box<dyn Meter>, LabError> {
    let alone = MeterAlone { options };
    if is_whole(mode) {
        return whole(mode, alone)?;
    }
    let repetitions = options.repetitions;
    named(mode, alone)
        .unwrap_or_else(|_| any::meter(mode, options.profile.coherency(), repetitions))
}
