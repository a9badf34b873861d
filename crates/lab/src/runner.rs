//! The replays of one mode: its passes under the oracle, and its meter.

use ringfence_devices::Reuse;
use ringfence_dma::flush::{Never, Strict};
use ringfence_dma::space::{Identity, StaticTable};
use ringfence_hw::RingLogic;
use ringfence_pgtable::{Coherency, Levels, SecondStage, Table};
use ringfence_trace::{DeviceIndex, Devices, MappingId};
use ringfence_types::{DomainId, PageSize, Pfn, PhysAddr, PhysRange};

use crate::components::{LAST_PAGE_32_BIT, ModeParts, ReplayTable};
use crate::error::LabError;
use crate::family_dispatch::{dispatch_dyn_on, dispatch_on};
use crate::guest::{HostHardware, XenHost, whole_guest};
use crate::hardware::{Hardware, Riommu, Vtd};
use crate::iommu_family::IommuFamily;
use crate::layer::{
    AttachInfo, ContextTarget, DmaLayer, DmaOps, DynInvalidator, LayerPlatform, PassThrough,
};
use crate::mapping_cache::{CachedParts, CycleParams};
use crate::meter::{Ablations, Meter};
use crate::mode_dispatch::{IdentityKind, ModeVisitor};
use crate::modes::Mode;
use crate::options::CompareOptions;
use crate::oracle::Ownership;
use crate::plan::Plan;
use crate::replay::{AttackerKind, Attackers, CheckedReplay, Outcomes};
use crate::replay_platform::{DATA_BYTES, ReplayPlatform, SharedPlatform};
use crate::ring::RingParts;
use crate::shadow::CopyParts;
use crate::sidecore::{Sidecore, UnmapWait};
use crate::stubs::{FlushFor, FlushForRings, ReplayAlloc, ReplayRing};
use crate::testbed::Testbed;

/// A replay that the oracle checks, for any hardware.
pub trait OracleReplay {
    /// Performs a plan.
    fn run(&mut self, plan: &Plan, devices: &Devices) -> Result<(), LabError>;
    /// Ends the replay and returns its outcomes. `alive` lists the mappings that are still live.
    fn finish(&mut self, alive: &[(MappingId, DeviceIndex)]) -> Outcomes;
}

impl<H: Hardware> OracleReplay for CheckedReplay<H> {
    fn run(&mut self, plan: &Plan, devices: &Devices) -> Result<(), LabError> {
        CheckedReplay::run(self, plan, devices)
    }

    fn finish(&mut self, alive: &[(MappingId, DeviceIndex)]) -> Outcomes {
        CheckedReplay::finish(self, alive)
    }
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

/// The DMA layer of an oracle replay.
type Layer<S, F> = DmaLayer<S, F, DynInvalidator>;

/// The properties of a mode's oracle replays.
struct OracleSetup {
    /// True if the IOMMU translates.
    enabled: bool,
    ownership: Ownership,
    attackers: fn(AttackerKind) -> Attackers,
    cache_cycles: Option<CycleParams>,
    /// True if drivers take their buffers from pools that stay mapped.
    recycles: bool,
}

impl OracleSetup {
    /// The setup of a mode that maps pages.
    const PAGES: Self = Self {
        enabled: true,
        ownership: Ownership::Page,
        attackers: |kind| Attackers::pages(kind, Reuse::Page),
        cache_cycles: None,
        recycles: false,
    };
}

/// The result of a build for one mode: its replays, or its layer and hardware alone.
enum Built {
    Replays(Runner),
    Testbed(Testbed),
}

/// Creates the oracle replays or the testbed of one mode.
struct BuildReplays<'a> {
    options: &'a CompareOptions,
    wanted: Wanted,
}

/// The result that the caller wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Replays,
    Testbed,
    /// A testbed whose IOMMU walks only lines that were written back.
    NonCoherentTestbed,
}

impl BuildReplays<'_> {
    /// Creates the passes under the oracle, without a meter. `layer` creates the DMA layer of a
    /// platform.
    fn passes<H: Hardware>(
        &self,
        setup: &OracleSetup,
        layer: &dyn Fn(
            LayerPlatform<DynInvalidator>,
            Coherency,
            Option<H::Host>,
        ) -> Box<dyn DmaOps>,
    ) -> Result<Built, LabError> {
        let options = self.options;
        if self.wanted != Wanted::Replays {
            let platform = match self.wanted {
                Wanted::NonCoherentTestbed => {
                    ReplayPlatform::<H>::without_snooping(&options.profile, setup.enabled)?
                }
                _ => ReplayPlatform::<H>::new(&options.profile, setup.enabled)?,
            };
            let (coherency, host) = (platform.coherency(), platform.host().cloned());
            let platform = SharedPlatform::new(platform);
            return Ok(Built::Testbed(Testbed {
                layer: layer(platform.for_layer(), coherency, host),
                machine: Box::new(platform),
                ownership: setup.ownership,
            }));
        }
        let pass = |attackers| -> Result<CheckedReplay<H>, LabError> {
            let platform = ReplayPlatform::<H>::new(&options.profile, setup.enabled)?;
            let (coherency, host) = (platform.coherency(), platform.host().cloned());
            let platform = SharedPlatform::new(platform);
            let layer = layer(platform.for_layer(), coherency, host);
            let replay = CheckedReplay::new(platform, layer, setup.ownership, attackers);
            Ok(replay
                .with_limits(options.limits)
                .with_cache_cycles(setup.cache_cycles)
                .with_recycling(setup.recycles))
        };
        let metered = pass(Attackers::None)?.with_early_touches(options.early_touches);
        let attack: Option<Box<dyn OracleReplay>> = if options.attack {
            let mut attackers = (setup.attackers)(options.attackers);
            // The tables of some families have no write-only pages.
            if options.profile.iommu != IommuFamily::Vtd {
                attackers = attackers.against_direction();
            }
            Some(Box::new(pass(attackers)?))
        } else {
            None
        };
        Ok(Built::Replays(Runner {
            metered: Box::new(metered),
            attack,
            meter: None,
        }))
    }
}

/// Memory that the static table of a testbed maps. The buffers of scenarios lie below.
const TESTBED_BYTES: u64 = 4 << 30;

/// Maps `bytes` of memory to themselves and returns the target of a device's context entry.
fn static_table(
    domain: DomainId,
    coherency: Coherency,
    platform: &LayerPlatform<DynInvalidator>,
    bytes: u64,
) -> Result<ContextTarget, LabError> {
    // Kernels use 2 MiB pages for such a map.
    let format = SecondStage::new(Levels::Four).with_pages_up_to(PageSize::Size2M);
    let (memory, frames) = (&*platform.arena, &*platform.frames);
    let table = Table::new(format, domain, coherency, memory, frames)?;
    let all = PhysRange::new(PhysAddr::ZERO, bytes);
    let all = all.ok_or(LabError::Internal("all of memory"))?;
    StaticTable::fill(&table, platform, &[all]).map_err(LabError::Static)?;
    Ok(ContextTarget::Table(table.root()))
}

impl ModeVisitor for BuildReplays<'_> {
    type Output = Result<Built, LabError>;

    fn identity(self, kind: IdentityKind) -> Self::Output {
        let setup = OracleSetup {
            enabled: kind != IdentityKind::Off,
            ownership: Ownership::Byte,
            attackers: |kind| Attackers::pages(kind, Reuse::Byte),
            cache_cycles: None,
            recycles: false,
        };
        if kind == IdentityKind::XenWholeGuest {
            type Hosted = HostHardware<XenHost>;
            return self.passes::<Hosted>(&setup, &|platform, _, host| {
                let make = move |of: &AttachInfo, _: &LayerPlatform<_>| {
                    let root = whole_guest(of.domain, host.as_ref())?;
                    // A space of Calgary ends at 4 GiB.
                    let space = Identity::up_to(of.domain, Pfn::new(LAST_PAGE_32_BIT));
                    Ok((space, ContextTarget::Table(root)))
                };
                Box::new(Layer::new(Never, platform, make))
            });
        }
        let bytes = match self.wanted {
            Wanted::Replays => DATA_BYTES,
            _ => TESTBED_BYTES,
        };
        self.passes::<Vtd>(&setup, &|platform, coherency, _| {
            let make = move |of: &AttachInfo, platform: &LayerPlatform<_>| {
                let target = if kind.has_table() {
                    static_table(of.domain, coherency, platform, bytes)?
                } else {
                    ContextTarget::PassThrough
                };
                Ok((Identity::new(of.domain), target))
            };
            let layer = Layer::new(Never, platform, make);
            if kind.has_generic_path() {
                Box::new(PassThrough::new(layer))
            } else {
                Box::new(layer)
            }
        })
    }

    fn paged<A, T, F>(self, parts: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        self.passes::<T::Hardware>(&OracleSetup::PAGES, &|platform, coherency, host| {
            let make = parts.make_space(coherency, host);
            Box::new(Layer::new((parts.flush)(), platform, make))
        })
    }

    fn offloaded<A, T>(self, parts: ModeParts<A, T, Strict>, wait: UnmapWait) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        Strict: FlushFor<A, T>,
    {
        self.passes::<T::Hardware>(&OracleSetup::PAGES, &|platform, coherency, host| {
            let make = parts.make_space(coherency, host);
            let layer = Layer::new((parts.flush)(), platform, make);
            Box::new(Sidecore::late(layer, wait))
        })
    }

    fn cached<T: ReplayTable<Pages = ()>>(self, parts: CachedParts<T>) -> Self::Output {
        let params = self.options.cache_cycles;
        let setup = OracleSetup {
            ownership: Ownership::Shared,
            cache_cycles: parts.cycling(params),
            recycles: parts.recycles(),
            ..OracleSetup::PAGES
        };
        self.passes::<T::Hardware>(&setup, &|platform, coherency, host| {
            let make = move |of: &AttachInfo, platform: &LayerPlatform<_>| {
                let (memory, frames) = (&platform.arena, &platform.frames);
                let (space, root) =
                    parts.space(of.domain, coherency, params, memory, frames, host.as_ref())?;
                Ok((space, ContextTarget::Table(root)))
            };
            Box::new(Layer::new(CachedParts::<T>::flush(), platform, make))
        })
    }

    fn shadow<P: CopyParts>(self, parts: P) -> Self::Output {
        let parts = parts.with_costs(&self.options.profile);
        let inspected = self.options.inspected_bytes;
        self.passes::<<P::Table as ReplayTable>::Hardware>(
            &OracleSetup::PAGES,
            &|platform, coherency, host| {
                let make = parts.make_space(coherency, host);
                let layer = Layer::new(parts.flush(), platform, make);
                parts.judged(layer.withholding(parts.withholds()), inspected)
            },
        )
    }

    fn rings<D, L, F>(self, parts: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        let setup = OracleSetup {
            attackers: Attackers::rings,
            ..OracleSetup::PAGES
        };
        let sizes = &self.options.rings;
        self.passes::<Riommu<L>>(&setup, &|platform, _, _| {
            let flush: F = (parts.flush)();
            let make = parts.make_space(sizes.clone());
            Box::new(Layer::new(flush, platform, make))
        })
    }
}

/// Creates the meter of one mode.
struct BuildMeter<'a> {
    options: &'a CompareOptions,
}

impl ModeVisitor for BuildMeter<'_> {
    type Output = Result<Ablations, LabError>;

    fn identity(self, kind: IdentityKind) -> Self::Output {
        Ablations::identity(kind, self.options.repetitions)
    }

    fn paged<A, T, F>(self, parts: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let (coherency, repetitions) = (self.options.profile.coherency(), self.options.repetitions);
        Ablations::paged(parts, coherency, repetitions)
    }

    fn offloaded<A, T>(self, parts: ModeParts<A, T, Strict>, wait: UnmapWait) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        Strict: FlushFor<A, T>,
    {
        let (coherency, repetitions) = (self.options.profile.coherency(), self.options.repetitions);
        Ablations::offloaded(parts, wait, coherency, repetitions)
    }

    fn cached<T: ReplayTable<Pages = ()>>(self, parts: CachedParts<T>) -> Self::Output {
        let options = self.options;
        let coherency = options.profile.coherency();
        Ablations::cached(parts, options.cache_cycles, coherency, options.repetitions)
    }

    fn shadow<P: CopyParts>(self, parts: P) -> Self::Output {
        let parts = parts.with_costs(&self.options.profile);
        let coherency = self.options.profile.coherency();
        let options = self.options;
        Ablations::shadow(
            parts,
            coherency,
            options.inspected_bytes,
            options.repetitions,
        )
    }

    fn rings<D, L, F>(self, parts: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        Ablations::rings(parts, &self.options.rings, self.options.repetitions)
    }
}

/// Creates the replays of `mode`.
///
/// # Errors
/// The mode is not built in, or memory is short.
pub fn runner(mode: &Mode, options: &CompareOptions) -> Result<Runner, LabError> {
    let replays = BuildReplays {
        options,
        wanted: Wanted::Replays,
    };
    let Built::Replays(mut runner) = dispatch_dyn_on(options.profile.iommu, mode, replays)?? else {
        return Err(LabError::Internal("a testbed instead of replays"));
    };
    if options.repetitions > 0 {
        runner.meter = Some(meter(mode, options)?);
    }
    Ok(runner)
}

/// Creates the layer and the hardware of `mode`, with the profile, the rings and the cycles of
/// `options`.
///
/// # Errors
/// The mode is not built in, or memory is short.
pub fn testbed(mode: &Mode, options: &CompareOptions) -> Result<Testbed, LabError> {
    built_testbed(mode, options, Wanted::Testbed)
}

/// Creates the [`testbed`] of `mode` with an IOMMU that walks the memory's device view: it sees
/// only lines that were written back, also if the table's walks always snoop. The profile must be
/// one whose walks do not snoop.
///
/// # Errors
/// The mode is not built in, or memory is short.
pub fn non_coherent_testbed(mode: &Mode, options: &CompareOptions) -> Result<Testbed, LabError> {
    built_testbed(mode, options, Wanted::NonCoherentTestbed)
}

fn built_testbed(
    mode: &Mode,
    options: &CompareOptions,
    wanted: Wanted,
) -> Result<Testbed, LabError> {
    let family = options.profile.iommu;
    match dispatch_dyn_on(family, mode, BuildReplays { options, wanted })?? {
        Built::Testbed(testbed) => Ok(testbed),
        Built::Replays(_) => Err(LabError::Internal("replays instead of a testbed")),
    }
}

/// Creates the meter of `mode`, without devices and an oracle.
///
/// # Errors
/// The mode is not built in, or memory is short.
pub fn meter(mode: &Mode, options: &CompareOptions) -> Result<Box<dyn Meter>, LabError> {
    Ok(Box::new(ablations(mode, options)?))
}

/// Creates the [`meter`] of `mode` with its type.
pub(crate) fn ablations(mode: &Mode, options: &CompareOptions) -> Result<Ablations, LabError> {
    dispatch_on(options.profile.iommu, mode, BuildMeter { options })?
}
