//! `ringfence compare`: replays traces through protection modes and reports cost and exposure.

use std::fs;
use std::path::Path;

use ringfence_lab::mapping_cache::CycleParams;
use ringfence_lab::{MachineProfile, Operation};
use ringfence_report::{
    ComparisonOptions, ComparisonSetup, FailedCondition, Report, csv, load_profile, markdown,
    plots, terminal,
};
use ringfence_trace::TraceOptions;

use super::json;
use crate::args::{CompareArgs, Frames, ReplayArgs};
use crate::failure::Failure;
use crate::inputs::Input;
use crate::out_file::write_into;
use crate::output::{print_status, print_unless_closed, table_style};
use crate::progress::Progress;

/// Columns of the report in a pipe, and at most at a terminal.
const REPORT_WIDTH: usize = 120;

/// Replays traces in modes and prints the results.
pub(crate) fn compare(args: &CompareArgs) -> Result<(), Failure> {
    let setup = setup(&args.replay)?;
    let names: Vec<String> = setup.modes().iter().map(|mode| mode.name.clone()).collect();
    let conditions: Vec<_> = args.fail_if.iter().flatten().collect();
    let timed = args.replay.repeat != Some(0);
    for condition in &conditions {
        condition.check(&names, timed, !args.replay.no_attack)?;
    }

    let inputs = Input::all(&args.replay.traces)?;
    check(&setup, &inputs)?;
    if let Some(dir) = &args.plot {
        fs::create_dir_all(dir).map_err(Failure::io(dir))?;
    }
    let inputs = match setup.counts_rings() {
        true => reusable(&args.replay, inputs)?,
        false => inputs,
    };
    let report = replay(&setup, &inputs)?;

    let text = if args.format.json {
        json(&report)
    } else if args.format.csv {
        csv(&report.results)
    } else if args.format.markdown {
        markdown(&report)
    } else {
        terminal(&report, table_style().within(REPORT_WIDTH))
    };
    print_unless_closed(&text)?;
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

/// Returns the comparison that the command line selects.
pub(super) fn setup(args: &ReplayArgs) -> Result<ComparisonSetup, Failure> {
    Ok(ComparisonSetup::new(options(args)?)?)
}

/// Makes the inputs readable more than once.
pub(super) fn reusable(args: &ReplayArgs, inputs: Vec<Input>) -> Result<Vec<Input>, Failure> {
    let limit = args.replay_limits.spool();
    let inputs = inputs.into_iter().map(|input| input.reusable(limit));
    inputs.collect()
}

/// Replays traces in modes. Inputs must be [`reusable`] if modes have rings whose size is counted.
pub(super) fn replay(setup: &ComparisonSetup, inputs: &[Input]) -> Result<Report, Failure> {
    let bytes: Option<Vec<u64>> = inputs.iter().map(Input::bytes).collect();
    let mut report = setup.report(bytes.and_then(|bytes| bytes.into_iter().max()));
    for (input, name) in inputs.iter().zip(Input::names(inputs)) {
        let lines = Progress::is_visible().then(|| input.lines()).flatten();
        let progress = Progress::new(&name, lines);
        let open = |options| input.operations(options);
        setup.add(&mut report, &name, open, |line| progress.update(line))?;
    }
    Ok(report)
}

/// Checks before the replay for errors that would otherwise occur at its end. These are traces that
/// cannot be opened, and devices that a trace does not name. An input that can be read only once is
/// not checked.
pub(super) fn check(setup: &ComparisonSetup, inputs: &[Input]) -> Result<(), Failure> {
    for (input, name) in inputs.iter().zip(Input::names(inputs)) {
        if input.is_reusable() {
            setup.check(&name, |options| input.operations(options))?;
        }
    }
    Ok(())
}

/// Writes the plots and prints their paths to standard error; standard output is for the report.
fn draw(report: &Report, dir: &Path) -> Result<(), Failure> {
    for plot in plots(report) {
        let path = write_into(dir, &plot.file, plot.svg.as_bytes())?;
        print_status(&format!("wrote {}", path.display()));
    }
    Ok(())
}

/// Returns the options of the comparison that the command line selects.
fn options(args: &ReplayArgs) -> Result<ComparisonOptions, Failure> {
    let profile = args.profile.as_deref().map(load_profile).transpose()?;
    let mut options = ComparisonOptions::new(args.iommu, profile)?;
    change(&mut options.profile, args);
    options.named.clone_from(&args.modes);
    options.all_modes = args.all_modes;
    options.composed.clone_from(&args.composed);
    options.devices.clone_from(&args.devices);
    options.repetitions = args.repeat;
    options.attack = !args.no_attack;
    options.operation = args.operation;
    options.walkers = args.walkers;
    options.line_rates.clone_from(&args.line_rate);
    options.page_size = args.page_size;
    options.contiguous_frames = args.frames == Frames::Contiguous;
    options.prefetch = args.prefetch;
    options.ring_entries = args.ring_entries;
    options.cache_cycles = CycleParams {
        cycle_ns: args.rtc_period_ns,
        cycles: args.rtc_periods_kept,
    };
    options.inspected_bytes = args.inspected_bytes;
    options.trace = reading(args);
    options.limits = args.replay_limits.limits();
    Ok(options)
}

pub(super) fn reading(args: &ReplayArgs) -> TraceOptions {
    let mut options = TraceOptions::default();
    options.lenient = args.lenient;
    options.limits = args.limits.limits();
    options
}

/// Changes the profile as the command line selects.
fn change(profile: &mut MachineProfile, args: &ReplayArgs) {
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
}
