//! Sets up and runs a comparison, for the command and for the Python module.

use std::fs;
use std::io::Read;

use ringfence_lab::compare::{self, CompareOptions, Comparison};
use ringfence_lab::layer::INSPECTED_BYTES;
use ringfence_lab::mapping_cache::CycleParams;
use ringfence_lab::modes::Mode;
use ringfence_lab::ring::{RingSizes, count_ring_usage};
use ringfence_lab::{
    IommuFamily, IotlbPrefetch, LabError, MachineProfile, Operation, Profile, ProfileError,
    ReplayLimits,
};
use ringfence_trace::{Operations, TraceOptions};
use ringfence_types::PageSize;

use super::data::{MeasuredOn, Report};
use super::entries::{EntryOptions, NotApplicable};

/// Traces of fewer bytes are so short that only many repetitions give stable cycles.
const SHORT_BYTES: u64 = 128 << 10;

/// An inconsistent set of options.
#[derive(Debug, thiserror::Error)]
pub enum ComparisonError {
    /// An option that applies to no selected mode.
    #[error("{option} is not applicable to {mode}: {reason}; select other modes")]
    NotApplicable {
        /// Name of the option, as on the command line without dashes.
        option: &'static str,
        /// The first selected mode.
        mode: String,
        /// The reason for this mode.
        reason: &'static str,
    },
    /// The profile's costs are those of another family of IOMMUs.
    #[error(
        "profile {profile} is of a machine with {has}, and its costs are not those of {wanted}; \
        give a profile of {wanted}, or none"
    )]
    OtherFamily {
        /// Name of the profile.
        profile: String,
        /// The profile's family.
        has: &'static str,
        /// The family of the options.
        wanted: &'static str,
    },
    /// The profile is invalid.
    #[error(transparent)]
    Profile(#[from] ProfileError),
}

/// The options of a comparison.
#[derive(Debug, Clone)]
pub struct ComparisonOptions {
    /// Named modes, in the order of the rows; if empty, the default selection.
    pub named: Vec<Mode>,
    /// True to replay all named modes if `named` is empty.
    pub all_modes: bool,
    /// Composed modes, after the named ones.
    pub composed: Vec<Mode>,
    /// Names of the devices to replay; if empty, all.
    pub devices: Vec<String>,
    /// Timed repetitions; 0 measures no cycles. `None` for a number that suits the traces.
    pub repetitions: Option<usize>,
    /// True to run the attack pass.
    pub attack: bool,
    /// Costs and geometry.
    pub profile: MachineProfile,
    /// The family of IOMMUs.
    pub family: IommuFamily,
    /// The operation whose cost without protection is c.
    pub operation: Operation,
    /// Number of parallel page walkers of the second ceiling.
    pub walkers: u32,
    /// Line rates to report, in Gb/s.
    pub line_rates: Vec<f64>,
    /// Largest page of tables that the kernel fills.
    pub page_size: PageSize,
    /// True if the plan moves large buffers to contiguous frames.
    pub contiguous_frames: bool,
    /// The prefetch into the IOTLB if it is not that of the profile.
    pub prefetch: Option<IotlbPrefetch>,
    /// Slots of every ring; `None` for twice the slots mapped at once.
    pub ring_entries: Option<u32>,
    /// T and C of modes with a reverse translation cache.
    pub cache_cycles: CycleParams,
    /// Bytes of a received buffer that the driver copies to inspect them.
    pub inspected_bytes: u32,
    /// Options for reading the traces.
    pub trace: TraceOptions,
    /// Bounds on the replays.
    pub limits: ReplayLimits,
}

impl ComparisonOptions {
    /// Returns the default options for a machine, as `ringfence compare` has them. Without a
    /// family, it is VT-d. Without a profile, it is that of the papers' machine for VT-d, and for
    /// another family one that states nothing.
    ///
    /// # Errors
    /// The profile is of a machine with another family.
    pub fn new(
        family: Option<IommuFamily>,
        profile: Option<MachineProfile>,
    ) -> Result<Self, ComparisonError> {
        let profile = match (profile, family.unwrap_or_default()) {
            (Some(profile), _) => profile,
            (None, IommuFamily::Vtd) => MachineProfile::r210_2015(),
            (None, other) => MachineProfile {
                iommu: Some(other),
                ..MachineProfile::unknown(other.name(), "no machine: --profile selects one")
            },
        };
        if let (Some(wanted), Some(has)) = (family, profile.iommu)
            && wanted != has
        {
            return Err(ComparisonError::OtherFamily {
                profile: profile.name,
                has: has.name(),
                wanted: wanted.name(),
            });
        }
        Ok(Self {
            named: Vec::new(),
            all_modes: false,
            composed: Vec::new(),
            devices: Vec::new(),
            repetitions: None,
            attack: true,
            profile,
            family: family.unwrap_or_default(),
            operation: Operation::Packet,
            walkers: 4,
            line_rates: Vec::new(),
            page_size: PageSize::Size4K,
            contiguous_frames: false,
            prefetch: None,
            ring_entries: None,
            cache_cycles: CycleParams::PAPER,
            inspected_bytes: INSPECTED_BYTES,
            trace: TraceOptions::default(),
            limits: ReplayLimits::default(),
        })
    }
}

/// A comparison whose options are consistent.
#[derive(Debug)]
pub struct ComparisonSetup {
    options: ComparisonOptions,
    modes: Vec<Mode>,
    /// Named modes that the default selection leaves out.
    omitted: Vec<Mode>,
    entries: EntryOptions,
}

impl ComparisonSetup {
    /// Selects the modes and checks the options.
    ///
    /// # Errors
    /// [`ComparisonError`].
    pub fn new(options: ComparisonOptions) -> Result<Self, ComparisonError> {
        options.profile.validate()?;
        let (modes, omitted) = modes(&options)?;
        let entries = entries(&options, &modes)?;
        Ok(Self {
            options,
            modes,
            omitted,
            entries,
        })
    }

    /// Returns the modes, in the order of the rows.
    pub fn modes(&self) -> &[Mode] {
        &self.modes
    }

    /// Returns true if a trace is read twice, once to count the slots of its rings.
    pub fn counts_rings(&self) -> bool {
        self.options.ring_entries.is_none() && self.modes.iter().any(Mode::has_rings)
    }

    /// Checks that a trace names the devices of the options, and that it can be opened. This is
    /// quicker than failing after a replay.
    ///
    /// # Errors
    /// Those of `open`; the trace is malformed, or it does not name a device.
    pub fn check<R: Read, E: From<LabError>>(
        &self,
        name: &str,
        open: impl FnOnce(TraceOptions) -> Result<Operations<R>, E>,
    ) -> Result<(), E> {
        let operations = open(self.options.trace.clone())?;
        if !self.options.devices.is_empty() {
            compare::check_devices(name, operations, &self.options.devices)?;
        }
        Ok(())
    }

    /// Creates a report without traces. `bytes` is the size of the largest trace as stored, `None`
    /// if it is unknown; it sets the default number of repetitions. A short trace needs many: a
    /// single replay of it is shorter than the resolution of a clock.
    pub fn report(&self, bytes: Option<u64>) -> Report {
        let options = &self.options;
        let is_short = bytes.is_some_and(|bytes| bytes < SHORT_BYTES);
        let repetitions = options.repetitions.unwrap_or(if is_short { 21 } else { 3 });
        let mut report = Report::new(
            options.profile.clone(),
            MeasuredOn::this_machine(),
            repetitions,
            options.attack,
            &self.modes,
            &self.omitted,
        );
        report.iommu = options.family;
        report.operation = options.operation;
        report.walkers = options.walkers;
        report.entries = self.entries.clone();
        report.gbps.clone_from(&options.line_rates);
        report
    }

    /// Replays the trace that `open` opens, and adds its rows to `report`, a report of this setup.
    /// Calls `progress` with the number of lines replayed so far.
    ///
    /// # Errors
    /// Those of `open` and of [`compare::compare`].
    pub fn add<R: Read, E: From<LabError>>(
        &self,
        report: &mut Report,
        name: &str,
        mut open: impl FnMut(TraceOptions) -> Result<Operations<R>, E>,
        progress: impl FnMut(u64),
    ) -> Result<(), E> {
        let options = &self.options;
        let devices = (!options.devices.is_empty()).then(|| options.devices.clone());
        let rings = if self.counts_rings() {
            let operations = open(options.trace.clone())?;
            count_ring_usage(operations, devices.as_deref(), options.limits)?.sizes()
        } else {
            let entries = options.ring_entries;
            entries.map_or_else(RingSizes::default, RingSizes::Every)
        };
        let operations = open(options.trace.clone().with_addresses())?;
        let replay = CompareOptions {
            modes: self.modes.clone(),
            profile: Profile {
                iommu: options.family,
                ..options.profile.for_replay()
            },
            prices: Some(options.profile.prices(options.operation, options.walkers)),
            devices,
            rings,
            repetitions: report.repetitions,
            attack: options.attack,
            cache_cycles: options.cache_cycles,
            inspected_bytes: options.inspected_bytes,
            contiguous_frames: options.contiguous_frames,
            limits: options.limits,
            ..CompareOptions::new()
        };
        let comparison: Comparison = compare::compare(name, operations, &replay, progress)?;
        report.push(name, comparison);
        Ok(())
    }
}

impl MeasuredOn {
    /// Returns the CPU of this machine and the build of this program.
    pub fn this_machine() -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == "model name").then(|| value.trim().to_owned())
        });
        Self {
            cpu: model.unwrap_or_else(|| "unknown".into()),
            arch: std::env::consts::ARCH,
            cycle_unit: if cfg!(target_arch = "x86_64") {
                "tsc"
            } else {
                "ns"
            },
            build: if cfg!(debug_assertions) {
                "debug"
            } else {
                "release"
            },
            processors: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// Returns the named modes and the composed ones, each once, and the named modes that the default
/// selection leaves out.
fn modes(options: &ComparisonOptions) -> Result<(Vec<Mode>, Vec<Mode>), ComparisonError> {
    let family = options.family;
    for mode in options.named.iter().chain(&options.composed) {
        if let Some(reason) = mode.not_on(family) {
            return Err(ComparisonError::NotApplicable {
                option: "iommu",
                mode: mode.name.clone(),
                reason,
            });
        }
    }
    let on_family = |mut modes: Vec<Mode>| {
        modes.retain(|mode| mode.not_on(family).is_none());
        modes
    };
    let mut omitted = Vec::new();
    let named = match options.named.as_slice() {
        [] if options.all_modes => on_family(Mode::named()),
        [] => {
            let selected = on_family(Mode::default_selection());
            omitted = on_family(Mode::named());
            omitted.retain(|mode| !selected.contains(mode) && !options.composed.contains(mode));
            selected
        }
        chosen => chosen.to_vec(),
    };
    let mut modes: Vec<Mode> = Vec::new();
    let named = named.into_iter().chain(options.composed.iter().cloned());
    for mode in named.map(|mode| mode.with_page_size(options.page_size)) {
        if !modes.iter().any(|other| other.name == mode.name) {
            modes.push(mode);
        }
    }
    Ok((modes, omitted))
}

/// Returns the options for entries of the IOTLB.
fn entries(options: &ComparisonOptions, modes: &[Mode]) -> Result<EntryOptions, ComparisonError> {
    let entries = EntryOptions {
        page_size: match options.page_size {
            PageSize::Size4K => "4k",
            PageSize::Size64K => "64k",
            _ => "2m",
        },
        frames: if options.contiguous_frames {
            "contiguous"
        } else {
            "recorded"
        },
        // A prefetch of the profile is part of the profile.
        prefetch: options.prefetch.unwrap_or(IotlbPrefetch::None),
        ..EntryOptions::default()
    };
    let entries = entries.for_modes(modes);
    match entries.without_use(modes) {
        Some(NotApplicable {
            option,
            mode,
            reason,
        }) => Err(ComparisonError::NotApplicable {
            option,
            mode: mode.clone(),
            reason,
        }),
        None => Ok(entries),
    }
}
