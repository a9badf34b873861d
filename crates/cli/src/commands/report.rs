//! `ringfence report`: writes one page on traces.

use std::io::Write;

use ringfence_attack::{CLASSES, Class, Options, run};
use ringfence_lab::modes::Mode;
use ringfence_lab::size::SizeOptions;
use ringfence_report::{PageContents, Sizing, report_page};
use ringfence_trace::Info;

use super::compare::{check, reading, replay, reusable, setup};
use super::size;
use crate::args::ReportArgs;
use crate::failure::Failure;
use crate::inputs::Input;
use crate::out_file::{FileAccess, OutFile};
use crate::output::print;
use crate::progress::Progress;

/// Modes for which IOTLBs are tried, as in `size`.
const IOTLB_MODES: [&str; 2] = ["linux-strict", "linux-lazy"];

/// Runs the computations of `compare`, `trace info`, `size` and `attack`, and writes their results
/// as one page.
pub(crate) fn report(args: &ReportArgs) -> Result<(), Failure> {
    let replayed = &args.replay;
    let setup = setup(replayed)?;
    let inputs = Input::all(&replayed.traces)?;
    check(&setup, &inputs)?;
    // A trace is read several times.
    let inputs = reusable(replayed, inputs)?;
    // A file that cannot be written is an error before the replay.
    let file = match &args.out {
        Some(path) => Some((path, OutFile::create(path, FileAccess::Umask)?)),
        None => None,
    };
    let report = replay(&setup, &inputs)?;
    let mut infos = Vec::with_capacity(inputs.len());
    let mut sizing = Sizing::new(report.profile.clone());
    for (input, name) in inputs.iter().zip(Input::names(&inputs)) {
        let mut info = Info::read(&mut input.operations(reading(replayed))?)?;
        if !replayed.devices.is_empty() {
            info.devices
                .retain(|device| replayed.devices.contains(&device.name));
        }
        infos.push(info);
        let options = SizeOptions {
            profile: report.profile.for_replay(),
            devices: (!replayed.devices.is_empty()).then(|| replayed.devices.clone()),
            entries: replayed.ring_entries.into_iter().collect(),
            modes: IOTLB_MODES.into_iter().filter_map(Mode::find).collect(),
            limits: replayed.replay_limits.limits(),
        };
        let advice = size::advice(input, &name, &reading(replayed), &options)?;
        sizing.traces.push(advice);
    }
    let matrix = match replayed.no_attack {
        true => None,
        false => {
            let classes: Vec<&Class> = CLASSES.iter().collect();
            let cells = (setup.modes().len() * classes.len()) as u64;
            let bar = Progress::of_units("attack", Some(cells), "cells");
            let options = Options::default();
            Some(run(setup.modes(), &classes, &options, |done| {
                bar.update(done);
                Ok(())
            })?)
        }
    };
    let page = report_page(&PageContents {
        report: &report,
        infos: &infos,
        sizing: &sizing,
        matrix: matrix.as_ref(),
    });
    match file {
        None => print(&page),
        Some((path, mut out)) => {
            out.write_all(page.as_bytes()).map_err(Failure::io(path))?;
            out.finish()
        }
    }
}
