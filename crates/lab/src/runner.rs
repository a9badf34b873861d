//! The replays of one mode: its passes under the oracle, and its meter.

use ringfence_devices::{
    Attacker, DmaPort, DriverEvent, Neighbour, Racer, Replayer, Reuse, Straddler,
};
use ringfence_dma::flush::{Flush, Never};
use ringfence_dma::space::{Identity, Paged, Rings, StaticTable};
use ringfence_dma::{Platform, Space};
use ringfence_hw::RingLogic;
use ringfence_pgtable::{Levels, SecondStage, Table};
use ringfence_trace::{DeviceIndex, Devices, MappingId};
use ringfence_types::{PageSize, PhysAddr, PhysRange};

use crate::compare::CompareOptions;
use crate::dynamic;
use crate::error::LabError;
use crate::guest::{DynRtcSpace, PviommuHost, RtcParams, RtcParts, VirtIommuHardware};
use crate::hardware::{ContextTarget, Hardware, Riommu, Vtd};
use crate::meter::{Ablations, FlushFor, FlushForRings, Meter, ReplayAlloc, ReplayRing};
use crate::mode_dispatch::{
    ModeParts, ModeVisitor, ReplayTable, ThreadCell, dispatch_dyn, dispatch_special,
    dispatch_static, is_special,
};
use crate::modes::{Mode, TableKind};
use crate::oracle::Ownership;
use crate::plan::Plan;
use crate::platform::{DATA_BYTES, ReplayPlatform};
use crate::replay::{AttachInfo, CheckedReplay, MakeSpace, Outcomes};
use crate::ring::RingParts;

/// A replay that the oracle checks, for any mode.
pub trait OracleReplay {
    /// Performs a plan.
    fn run(&mut self, plan: &Plan, devices: &Devices) -> Result<(), LabError>;
    /// Ends the replay and returns its outcomes. `alive` lists the mappings that are still live.
    fn finish(&mut self, alive: &[(MappingId, DeviceIndex)]) -> Outcomes;
}

impl<H, S, F, X> OracleReplay for CheckedReplay<H, S, F, X>
where
    H: Hardware,
    S: Space,
    F: Flush<S, u64>,
    X: Attacker,
{
    fn run(&mut self, plan: &Plan, devices: &Devices) -> Result<(), LabError> {
        CheckedReplay::run(self, plan, devices)
    }

    fn finish(&mut self, alive: &[(MappingId, DeviceIndex)]) -> Outcomes {
        CheckedReplay::finish(self, alive)
    }
}

/// Attackers for rings only: one accesses the bytes beside a buffer, one runs past its end.
type BufferEdgeAttackers = (Neighbour, Straddler);

/// The attackers of a pass. An enum, so that both passes of a mode have the same type.
enum PassAttackers {
    /// No attacker, in the metered pass.
    None,
    /// The attackers of every mode.
    Paged(Box<(Replayer, Neighbour)>),
    /// Adds the straddler and the racer. The racer runs last, because the entry that it keeps warm
    /// replaces the one that the replayer has just tried.
    Rings(Box<((Replayer, BufferEdgeAttackers), Racer)>),
}

impl PassAttackers {
    fn pages(reuse: Reuse) -> Self {
        Self::Paged(Box::new((Replayer::new(reuse), Neighbour)))
    }

    fn rings() -> Self {
        let others = (Replayer::new(Reuse::Page), (Neighbour, Straddler));
        Self::Rings(Box::new((others, Racer::new())))
    }

    #[inline(never)]
    fn attack<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        match self {
            Self::None => {}
            Self::Paged(attackers) => attackers.on(event, port),
            Self::Rings(attackers) => attackers.on(event, port),
        }
    }
}

impl Attacker for PassAttackers {
    #[inline]
    fn on<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        if !matches!(self, Self::None) {
            self.attack(event, port);
        }
    }
}

/// Creates the oracle replays of one mode.
struct BuildReplays<'a> {
    options: &'a CompareOptions,
}

/// The replays of one mode.
pub struct Runner {
    /// The metered pass.
    pub metered: Box<dyn OracleReplay>,
    /// The attack pass; `None` if the options disable it.
    pub attack: Option<Box<dyn OracleReplay>>,
    /// The meter; `None` without repetitions.
    pub meter: Option<Box<dyn Meter>>,
}

impl BuildReplays<'_> {
    /// Creates the passes under the oracle, without a meter.
    fn oracle_replays<H, S, F>(
        &self,
        enabled: bool,
        ownership: Ownership,
        flush: fn() -> F,
        attackers: fn() -> PassAttackers,
        make: impl Fn() -> MakeSpace<S, H>,
        cycling: Option<RtcParams>,
    ) -> Result<Runner, LabError>
    where
        H: Hardware,
        S: Space + 'static,
        F: Flush<S, u64> + 'static,
    {
        let machine = || ReplayPlatform::new(&self.options.profile, enabled);
        let metered =
            CheckedReplay::new(machine()?, flush(), ownership, PassAttackers::None, make())
                .with_early_touches(self.options.early_touches)
                .with_limits(self.options.limits)
                .with_cycling(cycling);
        let hostile: Option<Box<dyn OracleReplay>> = if self.options.attack {
            let judged = CheckedReplay::new(machine()?, flush(), ownership, attackers(), make());
            let judged = judged.with_limits(self.options.limits);
            Some(Box::new(judged.with_cycling(cycling)))
        } else {
            None
        };
        Ok(Runner {
            metered: Box::new(metered),
            attack: hostile,
            meter: None,
        })
    }
}

impl ModeVisitor for BuildReplays<'_> {
    type Output = Result<Runner, LabError>;

    fn identity(self, kind: TableKind) -> Self::Output {
        let make = move || -> MakeSpace<Identity, Vtd> {
            Box::new(move |of: &AttachInfo, machine: &ReplayPlatform| {
                let domain = of.domain;
                let directed = match kind {
                    TableKind::StaticRadix => {
                        // Kernels use 2 MiB pages for such a map.
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
                        ContextTarget::Table(table.root())
                    }
                    _ => ContextTarget::PassThrough,
                };
                Ok((Identity::new(domain), directed))
            })
        };
        let enabled = kind != TableKind::None;
        let attackers = || PassAttackers::pages(Reuse::Byte);
        self.oracle_replays(enabled, Ownership::Byte, || Never, attackers, make, None)
    }

    fn paged<A, T, F>(self, recipe: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let make = move || -> MakeSpace<Paged<A, T>, T::Hardware> {
            Box::new(
                move |of: &AttachInfo, machine: &ReplayPlatform<T::Hardware>| {
                    let (memory, frames) = (machine.arena(), machine.frames());
                    let (coherency, host) = (machine.coherency(), machine.host());
                    let table = (recipe.table)(of.domain, coherency, memory, frames, host)?;
                    let directed = ContextTarget::Table(table.root());
                    let alloc = recipe.allocator(memory, frames, Some(&table))?;
                    Ok((Paged::new(alloc, table, recipe.rounding), directed))
                },
            )
        };
        let attackers = || PassAttackers::pages(Reuse::Page);
        self.oracle_replays(true, Ownership::Page, recipe.flush, attackers, make, None)
    }

    fn rtc(self, recipe: RtcParts) -> Self::Output {
        let cycling = self.options.rtc;
        let make = move || -> MakeSpace<DynRtcSpace, VirtIommuHardware<PviommuHost>> {
            Box::new(move |of: &AttachInfo, machine: &ReplayPlatform<_>| {
                let (memory, frames, host) = (machine.arena(), machine.frames(), machine.host());
                let (space, root) = recipe.space(of.domain, cycling, memory, frames, host)?;
                Ok((space, ContextTarget::Table(root)))
            })
        };
        let attackers = || PassAttackers::pages(Reuse::Page);
        let (flush, cycles) = (RtcParts::flush, recipe.cycling(cycling));
        self.oracle_replays(true, Ownership::Shared, flush, attackers, make, cycles)
    }

    /// Uses the attackers of the other modes and two more. The cache entry of a ring is overwritten
    /// by that of the next slot, so only a device that keeps a stale entry warm (the racer) can use
    /// it. A unit that looks up buffers by the byte may check only the first byte of an access (the
    /// straddler).
    fn rings<D, L, F>(self, recipe: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        let sizes = &self.options.rings;
        let make = move || -> MakeSpace<Rings<D, ThreadCell<D>>, Riommu<L>> {
            let sizes = sizes.clone();
            Box::new(
                move |of: &AttachInfo, machine: &ReplayPlatform<Riommu<L>>| {
                    let (memory, frames) = (machine.arena(), machine.frames());
                    let (space, rings) = recipe.space(of, &sizes, memory, frames)?;
                    Ok((space, ContextTarget::Table(rings)))
                },
            )
        };
        self.oracle_replays(
            true,
            Ownership::Page,
            recipe.flush,
            PassAttackers::rings,
            make,
            None,
        )
    }
}

/// Creates the replays of `mode`.
///
/// # Errors
/// The mode is not built in, or memory is short.
pub fn runner(mode: &Mode, options: &CompareOptions) -> Result<Runner, LabError> {
    let mut runner = dispatch_dyn(mode, BuildReplays { options })??;
    if options.repetitions > 0 {
        runner.meter = Some(meter(mode, options)?);
    }
    Ok(runner)
}

/// Creates the meter alone.
struct BuildMeter<'a> {
    options: &'a CompareOptions,
}

impl ModeVisitor for BuildMeter<'_> {
    type Output = Result<Box<dyn Meter>, LabError>;

    fn identity(self, _kind: TableKind) -> Self::Output {
        Ok(Box::new(Ablations::identity(
            || Never,
            self.options.repetitions,
        )?))
    }

    fn paged<A, T, F>(self, recipe: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let repetitions = self.options.repetitions;
        let coherency = self.options.profile.coherency();
        Ok(Box::new(Ablations::paged(recipe, coherency, repetitions)?))
    }

    fn rtc(self, recipe: RtcParts) -> Self::Output {
        let CompareOptions {
            rtc: cycling,
            repetitions,
            profile,
            ..
        } = self.options;
        let coherency = profile.coherency();
        Ok(Box::new(Ablations::cached(
            recipe,
            *cycling,
            coherency,
            *repetitions,
        )?))
    }

    fn rings<D, L, F>(self, recipe: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        let CompareOptions {
            rings, repetitions, ..
        } = self.options;
        Ok(Box::new(Ablations::rings(recipe, rings, *repetitions)?))
    }
}

/// Creates the meter of `mode`, without a platform and an oracle.
///
/// # Errors
/// The mode is not built in, or memory is short.
pub fn meter(mode: &Mode, options: &CompareOptions) -> Result<Box<dyn Meter>, LabError> {
    let alone = BuildMeter { options };
    if is_special(mode) {
        return dispatch_special(mode, alone)?;
    }
    let repetitions = options.repetitions;
    dispatch_static(mode, alone)
        .unwrap_or_else(|_| dynamic::meter(mode, options.profile.coherency(), repetitions))
}
