//! `ringfence compare`: replays traces through protection modes and reports cost and exposure.

use std::fs;
use std::path::Path;

use ringfence_lab::compare::{self, CompareOptions};
use ringfence_lab::mapping_cache::CycleParams;
use ringfence_lab::modes::Mode;
use ringfence_lab::replay::AttackerKind;
use ringfence_lab::ring::{RingSizes, count_ring_usage};
use ringfence_lab::{IommuFamily, IotlbPrefetch, MachineProfile, Operation, Profile};
use ringfence_report::{
    EntryOptions, FailedCondition, MeasuredOn, NotApplicable, Report, csv, markdown, plots,
    terminal,
};
use ringfence_trace::TraceOptions;
use ringfence_types::PageSize;

use super::json;
use crate::args::CompareArgs;
use crate::failure::Failure;
use crate::inputs::Input;
use crate::out_file::write_into;
use crate::output::{print, print_status, table_style};
use crate::profile_file;
use crate::progress::Progress;

/// Columns of the report in a pipe, and at most at a terminal.
const REPORT_WIDTH: usize = 120;

/// Replays traces in modes and prints the results.
pub(crate) fn compare(args: &CompareArgs) -> Result<(), Failure> {
    let profile = profile(args)?;
    let family = args.iommu.unwrap_or_default();
    let (modes, omitted) = modes(args, family)?;
    let names: Vec<String> = modes.iter().map(|mode| mode.name.clone()).collect();
    let conditions: Vec<_> = args.fail_if.iter().flatten().collect();
    for condition in &conditions {
        condition.check(&names, args.repeat != Some(0), !args.no_attack)?;
    }

    let entries = entries(args, &profile, &modes)?;
    let mut inputs = Input::all(&args.traces);
    check(args, &inputs)?;
    let counted = args.ring_entries.is_none() && modes.iter().any(Mode::has_rings);
    if counted {
        inputs = inputs
            .into_iter()
            .map(|input| input.reusable(args.replay_limits.spool()))
            .collect::<Result<_, _>>()?;
    }
    let repetitions = args.repeat.unwrap_or_else(|| default_repetitions(&inputs));
    let mut report = Report::new(
        profile.clone(),
        measured_on(),
        repetitions,
        !args.no_attack,
        &modes,
        &omitted,
    );
    report.iommu = family;
    report.operation = args.operation;
    report.walkers = args.walkers;
    report.entries = entries;
    report.gbps.clone_from(&args.line_rate);
    for (input, name) in inputs.iter().zip(Input::names(&inputs)) {
        let devices = (!args.devices.is_empty()).then(|| args.devices.clone());
        let rings = if counted {
            let limits = args.replay_limits.limits();
            count_ring_usage(input.operations(reading(args))?, devices.as_deref(), limits)?.sizes()
        } else {
            args.ring_entries
                .map_or_else(RingSizes::default, RingSizes::Every)
        };
        let operations = input.operations(reading(args).with_addresses())?;
        let options = CompareOptions {
            modes: modes.clone(),
            profile: Profile {
                iommu: family,
                ..profile.for_replay()
            },
            prices: Some(profile.prices(args.operation, args.walkers)),
            devices,
            rings,
            repetitions,
            attack: !args.no_attack,
            attackers: AttackerKind::All,
            early_touches: false,
            cache_cycles: CycleParams {
                cycle_ns: args.rtc_period,
                cycles: args.rtc_periods_kept,
            },
            inspected_bytes: args.inspected_bytes,
            contiguous_frames: args.frames == CONTIGUOUS,
            limits: args.replay_limits.limits(),
        };
        let lines = Progress::is_visible().then(|| input.lines()).flatten();
        let progress = Progress::new(&name, lines);
        let comparison =
            compare::compare(&name, operations, &options, |line| progress.update(line))?;
        drop(progress);
        report.push(&name, comparison);
    }

    let text = if args.format.json {
        json(&report)
    } else if args.format.csv {
        csv(&report.results)
    } else if args.format.markdown {
        markdown(&report)
    } else {
        terminal(&report, table_style().within(REPORT_WIDTH))
    };
    print(&text)?;
    if let Some(dir) = &args.plot {
        draw(&report, dir)?;
    }

    let mut held: Vec<FailedCondition> = Vec::new();
    for condition in conditions {
        held.extend(condition.matching_rows(&report.results)?);
    }
    if held.is_empty() {
        Ok(())
    } else {
        Err(Failure::Held(held))
    }
}

/// Checks before the replay for errors that would otherwise occur at its end. These are traces that
/// cannot be opened, devices that a trace does not name, and a plot directory that cannot be
/// created. Standard input is not checked, because it can be read only once.
fn check(args: &CompareArgs, inputs: &[Input]) -> Result<(), Failure> {
    if inputs
        .iter()
        .filter(|&input| *input == Input::Stdin)
        .count()
        > 1
    {
        return Err(Failure::StdinTwice);
    }
    for (input, name) in inputs.iter().zip(Input::names(inputs)) {
        if *input == Input::Stdin {
            continue;
        }
        let operations = input.operations(reading(args))?;
        if !args.devices.is_empty() {
            compare::check_devices(&name, operations, &args.devices)?;
        }
    }
    if let Some(dir) = &args.plot {
        fs::create_dir_all(dir).map_err(Failure::io(dir))?;
    }
    Ok(())
}

fn reading(args: &CompareArgs) -> TraceOptions {
    let mut options = TraceOptions::default();
    options.lenient = args.lenient;
    options.limits = args.limits.limits();
    options
}

/// Writes the plots and prints their paths to standard error; standard output is for the report.
fn draw(report: &Report, dir: &Path) -> Result<(), Failure> {
    for plot in plots(report) {
        let path = write_into(dir, &plot.file, plot.svg.as_bytes())?;
        print_status(&format!("wrote {}", path.display()));
    }
    Ok(())
}

/// Returns the default number of repetitions. Short traces need many, because a single replay is
/// shorter than the resolution of a clock.
fn default_repetitions(inputs: &[Input]) -> usize {
    if inputs.iter().all(Input::is_short) {
        21
    } else {
        3
    }
}

/// Returns the profile that the command line names, or the default of the family.
///
/// # Errors
/// The profile is of a machine with another family than `--iommu` names: its costs are not those of
/// the model.
fn profile_of(args: &CompareArgs) -> Result<MachineProfile, Failure> {
    let family = args.iommu.unwrap_or_default();
    let Some(name) = &args.profile else {
        return Ok(match family {
            IommuFamily::Vtd => MachineProfile::r210_2015(),
            other => MachineProfile {
                iommu: Some(other),
                ..MachineProfile::unknown(other.name(), "no machine: --profile selects one")
            },
        });
    };
    let profile = profile_file::load(name)?;
    match (args.iommu, profile.iommu) {
        (Some(wanted), Some(has)) if wanted != has => Err(Failure::OtherFamily {
            profile: profile.name,
            has: has.name(),
            wanted: wanted.name(),
        }),
        _ => Ok(profile),
    }
}

/// Returns the profile with the changes of the command line.
fn profile(args: &CompareArgs) -> Result<MachineProfile, Failure> {
    let mut profile = profile_of(args)?;
    if args.baseline_cycles.is_some() {
        *match args.operation {
            Operation::Packet => &mut profile.baseline_cycles,
            Operation::BlockRequest => &mut profile.block_request_cycles,
            Operation::Page => &mut profile.page_cycles,
        } = args.baseline_cycles;
    }
    if args.invalidation_cycles.is_some() {
        profile.invalidation_cycles = args.invalidation_cycles;
    }
    if let Some((sets, ways)) = args.iotlb {
        (profile.iotlb_sets, profile.iotlb_ways) = (Some(sets), Some(ways));
    }
    if args.walk_cache.is_some() {
        profile.walk_cache_entries = args.walk_cache;
    }
    if args.coherent || args.non_coherent {
        profile.coherent = Some(args.coherent);
    }
    if let Some(prefetch) = args.prefetch {
        profile.iotlb_prefetch = prefetch;
    }
    profile.validate().map_err(Failure::Platform)?;
    Ok(profile)
}

/// Returns the named modes and the composed ones, each once, and the named modes that the default
/// selection leaves out.
///
/// # Errors
/// A chosen mode is not modelled on `family`.
fn modes(args: &CompareArgs, family: IommuFamily) -> Result<(Vec<Mode>, Vec<Mode>), Failure> {
    let chosen = args.modes.iter().chain(&args.composed);
    for mode in chosen {
        if let Some(reason) = mode.not_on(family) {
            return Err(Failure::NotApplicable {
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
    let named = match args.modes.as_slice() {
        [] if args.all_modes => on_family(Mode::named()),
        [] => {
            let selected = on_family(Mode::default_selection());
            omitted = on_family(Mode::named());
            omitted.retain(|mode| !selected.contains(mode) && !args.composed.contains(mode));
            selected
        }
        chosen => chosen.to_vec(),
    };
    let mut modes: Vec<Mode> = Vec::new();
    let named = named.into_iter().chain(args.composed.iter().cloned());
    for mode in named.map(|mode| mode.with_page_size(args.page_size)) {
        if !modes.iter().any(|other| other.name == mode.name) {
            modes.push(mode);
        }
    }
    Ok((modes, omitted))
}

/// The value of `--frames` that moves buffers.
const CONTIGUOUS: &str = "contiguous";

/// Returns the options for entries of the IOTLB.
///
/// # Errors
/// An option applies to none of the modes.
fn entries(
    args: &CompareArgs,
    profile: &MachineProfile,
    modes: &[Mode],
) -> Result<EntryOptions, Failure> {
    let options = EntryOptions {
        page_size: match args.page_size {
            PageSize::Size4K => "4k",
            PageSize::Size64K => "64k",
            _ => "2m",
        },
        frames: if args.frames == CONTIGUOUS {
            CONTIGUOUS
        } else {
            "recorded"
        },
        // A prefetch of the profile is part of the profile.
        prefetch: args
            .prefetch
            .map_or(IotlbPrefetch::None, |_| profile.iotlb_prefetch),
        ..EntryOptions::default()
    };
    let options = options.for_modes(modes);
    match options.without_use(modes) {
        Some(NotApplicable {
            option,
            mode,
            reason,
        }) => Err(Failure::NotApplicable {
            option,
            mode: mode.clone(),
            reason,
        }),
        None => Ok(options),
    }
}

/// Returns the CPU and the build of the measured part.
pub(super) fn measured_on() -> MeasuredOn {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == "model name").then(|| value.trim().to_owned())
    });
    MeasuredOn {
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
