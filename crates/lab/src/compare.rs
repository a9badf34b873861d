//! A trace through modes, side by side.

use std::io::Read;

use ringfence_devices::{Neighbour, Replayer, Reuse};
use ringfence_dma::flush::{Flush, Never};
use ringfence_dma::space::{Identity, Paged, StaticTable};
use ringfence_iova::IovaAllocator;
use ringfence_pgtable::{Coherency, Levels, SecondStage, Table};
use ringfence_trace::{Chunk, DeviceIndex, Devices, MappingId, Operations, Summary};
use ringfence_types::{PageSize, PhysAddr, PhysRange};

use crate::Profile;
use crate::build::{Job, Recipe, TableMaker, dispatch};
use crate::error::LabError;
use crate::machine::{DATA_BYTES, Directed, Machine};
use crate::meter::{FlushFor, Meter, Sets};
use crate::modes::{Mode, TableKind};
use crate::oracle::Ownership;
use crate::plan::{Plan, Planner};
use crate::replay::{Judged, Nobody, Outcomes};
use crate::row::{Parts, Row};

/// What to run, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// The modes, in the order of the rows.
    pub modes: Vec<Mode>,
    /// Costs and geometry.
    pub profile: Profile,
    /// Names of the devices to replay; none means all.
    pub devices: Option<Vec<String>>,
    /// Timed repetitions; 0 leaves the meter out.
    pub repetitions: usize,
    /// Whether the hostile pass is run.
    pub hostile: bool,
}

impl Options {
    /// All named modes under the profile of the documents' machine.
    pub fn new() -> Self {
        Self {
            modes: Mode::named(),
            profile: Profile::r210_2015(),
            devices: None,
            repetitions: 3,
            hostile: true,
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

/// A replay under the oracle, whatever its mode.
pub trait Judge {
    /// Performs a plan.
    fn run(&mut self, plan: &Plan, devices: &Devices) -> Result<(), LabError>;
    /// Ends the replay.
    fn finish(&mut self, alive: &[(MappingId, DeviceIndex)]) -> Outcomes;
}

impl<S, F, X> Judge for Judged<S, F, X>
where
    S: ringfence_dma::Space,
    F: Flush<S, u64>,
    X: ringfence_devices::Attacker,
{
    fn run(&mut self, plan: &Plan, devices: &Devices) -> Result<(), LabError> {
        Judged::run(self, plan, devices)
    }

    fn finish(&mut self, alive: &[(MappingId, DeviceIndex)]) -> Outcomes {
        Judged::finish(self, alive)
    }
}

/// Makes the replays and the meter of one mode.
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
    fn judges<S, F>(
        &self,
        enabled: bool,
        ownership: Ownership,
        flush: fn() -> F,
        make: impl Fn() -> crate::replay::MakeSpace<S>,
    ) -> Result<(Box<dyn Judge>, Option<Box<dyn Judge>>), LabError>
    where
        S: ringfence_dma::Space + 'static,
        F: Flush<S, u64> + 'static,
    {
        let machine = || Machine::new(&self.options.profile, enabled);
        let metered = Judged::new(machine()?, flush(), ownership, Nobody, make());
        let hostile: Option<Box<dyn Judge>> = if self.options.hostile {
            let reuse = match ownership {
                Ownership::Page => Reuse::Page,
                Ownership::Byte => Reuse::Byte,
            };
            let attackers = (Replayer::new(reuse), Neighbour);
            Some(Box::new(Judged::new(
                machine()?,
                flush(),
                ownership,
                attackers,
                make(),
            )))
        } else {
            None
        };
        Ok((Box::new(metered), hostile))
    }
}

impl Job for Assemble<'_> {
    type Output = Result<Runner, LabError>;

    fn identity(self, kind: TableKind) -> Self::Output {
        let make = move || -> crate::replay::MakeSpace<Identity> {
            Box::new(move |domain, machine: &Machine| {
                let directed = match kind {
                    TableKind::StaticRadix => {
                        // Pages of 2 MiB: what a kernel uses for such a map.
                        let format =
                            SecondStage::new(Levels::Four).with_pages_up_to(PageSize::Size2M);
                        let table = Table::new(
                            format,
                            domain,
                            machine.coherency(),
                            machine.arena(),
                            ringfence_dma::Platform::frames(machine),
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
        let (metered, hostile) = self.judges(enabled, Ownership::Byte, || Never, make)?;
        let meter = match self.options.repetitions {
            0 => None,
            _ => Some(
                MeterAlone {
                    options: self.options,
                }
                .identity(kind)?,
            ),
        };
        Ok(Runner {
            metered,
            hostile,
            meter,
        })
    }

    fn paged<A, T, F>(self, recipe: Recipe<A, T, F>) -> Self::Output
    where
        A: IovaAllocator + 'static,
        T: TableMaker,
        F: FlushFor<A, T> + 'static,
    {
        let make = move || -> crate::replay::MakeSpace<Paged<A, T>> {
            Box::new(move |domain, machine: &Machine| {
                let table = T::make(
                    domain,
                    machine.coherency(),
                    machine.arena(),
                    ringfence_dma::Platform::frames(machine),
                )?;
                let directed = Directed::Table(table.root());
                let alloc = (recipe.alloc)(recipe.answer)?;
                Ok((Paged::new(alloc, table, recipe.rounding), directed))
            })
        };
        let (metered, hostile) = self.judges(true, Ownership::Page, recipe.flush, make)?;
        let meter = match self.options.repetitions {
            0 => None,
            _ => Some(
                MeterAlone {
                    options: self.options,
                }
                .paged(recipe)?,
            ),
        };
        Ok(Runner {
            metered,
            hostile,
            meter,
        })
    }
}

/// What runs for `mode`.
///
/// # Errors
/// The mode is not built in, or no memory could be had.
pub fn runner(mode: &Mode, options: &Options) -> Result<Runner, LabError> {
    dispatch(mode, Assemble { options })?
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
        A: IovaAllocator + 'static,
        T: TableMaker,
        F: FlushFor<A, T> + 'static,
    {
        let repetitions = self.options.repetitions;
        let coherency = coherency(&self.options.profile);
        Ok(Box::new(Sets::paged(recipe, coherency, repetitions)?))
    }
}

/// The meter of `mode`, without machine and oracle.
///
/// # Errors
/// The mode is not built in, or no memory could be had.
pub fn meter(mode: &Mode, options: &Options) -> Result<Box<dyn Meter>, LabError> {
    dispatch(mode, MeterAlone { options })?
}

fn coherency(profile: &Profile) -> Coherency {
    if profile.coherent {
        Coherency::Coherent
    } else {
        Coherency::NonCoherent
    }
}

/// A comparison, complete.
#[derive(Debug)]
pub struct Comparison {
    /// One row a mode.
    pub rows: Vec<Row>,
    /// What was left out of the trace or bent.
    pub summary: Summary,
    /// Names of the devices.
    pub devices: Vec<String>,
    /// Lines of the trace that the replay stands for.
    pub lines: u64,
    /// Bursts of unmaps.
    pub bursts: u64,
    /// Bursts ended because a withheld page was mapped again.
    pub bursts_cut_by_map: u64,
}

/// Replays a trace in every mode of `options`, chunk by chunk and mode by mode, so that neither a long trace nor a noisy machine favours
/// one of them. `progress` is told the lines replayed so far.
///
/// # Errors
/// The trace is malformed, or a mode cannot be built.
pub fn compare<R: Read>(
    name: &str,
    mut operations: Operations<R>,
    options: &Options,
    mut progress: impl FnMut(u64),
) -> Result<Comparison, LabError> {
    let mut runners = Vec::with_capacity(options.modes.len());
    for mode in &options.modes {
        runners.push(runner(mode, options)?);
    }
    let mut planner = Planner::new();
    let mut chunk = Chunk::default();
    let mut plan = Plan::default();
    let mut lines = 0;
    let mut more = true;
    while more {
        more = operations.next_chunk(&mut chunk)?;
        if let Some(names) = &options.devices {
            planner.keep_only(operations.devices(), names);
        }
        planner.plan(&chunk, &mut plan);
        if !more {
            planner.finish(&mut plan);
        }
        lines += plan.lines;
        for runner in &mut runners {
            runner.metered.run(&plan, operations.devices())?;
            if let Some(hostile) = &mut runner.hostile {
                hostile.run(&plan, operations.devices())?;
            }
            if let Some(meter) = &mut runner.meter {
                meter.chunk(&plan)?;
            }
        }
        progress(lines);
    }
    if let Some(names) = &options.devices {
        for name in names {
            if operations.devices().find(name).is_none() {
                return Err(LabError::NoSuchDevice(name.clone()));
            }
        }
    }
    let alive = planner.alive();
    let summary = operations.summary().clone();
    let status = status(&summary);
    let mut rows = Vec::with_capacity(runners.len());
    for (mode, runner) in options.modes.iter().zip(&mut runners) {
        let metered = runner.metered.finish(&alive);
        let hostile = runner.hostile.as_mut().map(|judge| judge.finish(&alive));
        let components = runner
            .meter
            .as_ref()
            .map(|meter| meter.finish())
            .unwrap_or_default();
        let status = match (&metered.first_refusal, metered.refused_maps) {
            (Some(first), count) if count > 0 => format!("{count} maps refused: {first}"),
            _ => status.clone(),
        };
        rows.push(Row::new(&Parts {
            trace: name,
            mode,
            metered: &metered,
            hostile: hostile.as_ref(),
            components,
            c_none: options.profile.c_none,
            invalidation_cycles: options.profile.invalidation_cycles,
            status,
        }));
    }
    Ok(Comparison {
        rows,
        devices: operations
            .devices()
            .iter()
            .map(|(_, device)| device.name.clone())
            .collect(),
        summary,
        lines,
        bursts: planner.bursts,
        bursts_cut_by_map: planner.bursts_cut_by_map,
    })
}

/// `ok`, or why a trace's rows cannot be taken at their word.
fn status(summary: &Summary) -> String {
    if summary.lost > 0 {
        return format!("the kernel lost {} events", summary.lost);
    }
    let skipping = summary
        .devices
        .iter()
        .filter(|device| device.skips_unmaps())
        .count();
    if skipping > 0 {
        return "the driver skips unmaps: the trace does not say when mappings end".into();
    }
    "ok".into()
}
