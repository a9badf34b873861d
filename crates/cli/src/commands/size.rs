//! `ringfence size`: computes the sizes of rings and of the IOTLB that a trace needs.

use std::fs;
use std::path::Path;

use ringfence_lab::MachineProfile;
use ringfence_lab::compare::check_devices;
use ringfence_lab::size::{SizeOptions, TraceSizing, advise, measure_demand, readings};
use ringfence_report::{
    Sizing, load_profile, sizing_csv, sizing_markdown, sizing_plots, sizing_terminal,
};
use ringfence_trace::TraceOptions;

use super::json;
use crate::args::SizeArgs;
use crate::failure::Failure;
use crate::inputs::Input;
use crate::out_file::write_into;
use crate::output::{print_status, print_unless_closed, table_style};
use crate::progress::Progress;

/// Counts the ring entries and IOTLB entries that traces need, tries sizes, and prints
/// recommendations.
pub(crate) fn size(args: &SizeArgs) -> Result<(), Failure> {
    let profile = profile(args)?;
    let inputs = Input::all(&args.traces)?;
    if let Some(dir) = &args.plot {
        fs::create_dir_all(dir).map_err(Failure::io(dir))?;
    }
    let mut reading = TraceOptions::default();
    reading.lenient = args.lenient;
    reading.limits = args.limits.limits();
    let limits = args.replay_limits.limits();
    // A trace is read several times: for counting, and for each replay.
    let inputs = inputs
        .into_iter()
        .map(|input| input.reusable(args.replay_limits.spool()));
    let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
    let mut sizing = Sizing::new(profile.clone());
    for (input, name) in inputs.iter().zip(Input::names(&inputs)) {
        let options = SizeOptions {
            profile: profile.for_replay(),
            devices: (!args.devices.is_empty()).then(|| args.devices.clone()),
            entries: args.ring_entries.clone(),
            modes: args.modes.clone(),
            limits,
        };
        let advice = advice(input, &name, &reading, &options)?;
        sizing.traces.push(advice);
    }

    let text = if args.format.json {
        json(&sizing)
    } else if args.format.csv {
        sizing_csv(&sizing)
    } else if args.format.markdown {
        sizing_markdown(&sizing)
    } else {
        sizing_terminal(&sizing, table_style())
    };
    print_unless_closed(&text)?;
    match &args.plot {
        Some(dir) => draw(&sizing, dir),
        None => Ok(()),
    }
}

/// Counts the demand of one trace and tries sizes. The input must be reusable.
pub(super) fn advice(
    input: &Input,
    name: &str,
    reading: &TraceOptions,
    options: &SizeOptions,
) -> Result<TraceSizing, Failure> {
    let devices = options.devices.as_deref();
    if let Some(names) = devices {
        check_devices(name, input.operations(reading.clone())?, names)?;
    }
    let lines = Progress::is_visible().then(|| input.lines()).flatten();
    let bar = Progress::new(&format!("{name}, counted"), lines);
    let operations = input.operations(reading.clone())?;
    let usage = measure_demand(operations, devices, options.limits, |line| bar.update(line))?;
    drop(bar);
    let all = lines.map(|lines| lines * readings(&usage, options));
    let bar = Progress::new(&format!("{name}, replayed"), all);
    let open = || input.operations(reading.clone());
    advise(name, open, &usage, options, |line| bar.update(line))
}

fn profile(args: &SizeArgs) -> Result<MachineProfile, Failure> {
    let profile = load_profile(&args.profile)?;
    profile.validate().map_err(Failure::Platform)?;
    Ok(profile)
}

/// Writes the plots and prints their paths to standard error; standard output is for the report.
fn draw(sizing: &Sizing, dir: &Path) -> Result<(), Failure> {
    for plot in sizing_plots(sizing) {
        let path = write_into(dir, &plot.file, plot.svg.as_bytes())?;
        print_status(&format!("wrote {}", path.display()));
    }
    Ok(())
}
