//! The commands `modes`, `compare`, `size` and `attack`.

use pyo3::prelude::*;
use ringfence_attack::{CLASSES, Class, Options};
use ringfence_lab::compare::check_devices;
use ringfence_lab::compose::compose;
use ringfence_lab::modes::Mode;
use ringfence_lab::ring::RingSizes;
use ringfence_lab::size::{SizeOptions, advise, measure_demand};
use ringfence_lab::{IommuFamily, LabError, ReplayLimits};
use ringfence_report::{
    Column, ComparisonOptions, ComparisonSetup, Sizing, attack_table, json, load_profile,
    mode_rows, report_table, sizing_table,
};
use ringfence_trace::{TraceError, TraceOptions};

use crate::columns::batch;
use crate::error::{Error, Failure};
use crate::signals::detached;
use crate::stream::Stream;
use crate::trace::{TraceArgument, loads};

/// Largest number of timed repetitions, as for `--repeat`.
const MAX_REPETITIONS: usize = 10_000;

/// A result: rows for tables, and the JSON of the command.
#[pyclass(frozen, module = "ringfence")]
pub(crate) struct Report {
    /// The output of the command with `--json`.
    #[pyo3(get)]
    json: String,
    columns: Vec<Column>,
}

#[pymethods]
impl Report {
    /// The rows of the command with `--csv`, with typed columns.
    #[getter]
    fn rows(&self) -> PyResult<Stream> {
        let rows = batch(&self.columns).map_err(|error| Error::new_err(error.to_string()))?;
        Ok(Stream::of_batch(rows))
    }

    fn __repr__(&self) -> String {
        let rows = self.columns.first().map_or(0, |column| column.cells.len());
        format!("<ringfence.Report of {rows} rows>")
    }
}

/// Returns the named modes, as `ringfence modes --json` prints them.
#[pyfunction]
pub(crate) fn modes(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    loads(py, &json(&mode_rows(&Mode::named())))
}

/// Replays a trace through protection modes and reports cost and exposure, as `ringfence compare`
/// does.
#[pyfunction]
#[pyo3(signature = (
    trace, modes=None, *, all_modes=false, profile=None, iommu=None, devices=None, repeat=None,
    attack=true
))]
#[expect(clippy::too_many_arguments, reason = "keywords of a Python function")]
pub(crate) fn compare(
    py: Python<'_>,
    trace: TraceArgument,
    modes: Option<Vec<String>>,
    all_modes: bool,
    profile: Option<String>,
    iommu: Option<String>,
    devices: Option<Vec<String>>,
    repeat: Option<usize>,
    attack: bool,
) -> PyResult<Report> {
    let source = trace.source();
    detached(py, |signals| {
        let family = iommu.map(|name| family(&name)).transpose()?;
        let profile = profile.map(|name| load_profile(&name)).transpose()?;
        let mut options = ComparisonOptions::new(family, profile)?;
        options.named = selected(modes, all_modes)?;
        options.all_modes = all_modes;
        options.devices = devices.unwrap_or_default();
        options.attack = attack;
        options.repetitions = repeat;
        if repeat.is_some_and(|repetitions| repetitions > MAX_REPETITIONS) {
            return Err(value(format!("repeat is at most {MAX_REPETITIONS}")));
        }
        options.trace.interrupt = signals.interrupt();
        let setup = ComparisonSetup::new(options)?;
        let name = source.name();
        let open = |options: TraceOptions| source.operations(options);
        setup.check(&name, open)?;
        let mut report = setup.report(source.bytes());
        setup.add(&mut report, &name, open, |_| ())?;
        Ok(Report {
            json: json(&report),
            columns: report_table(&report),
        })
    })
}

/// Computes the sizes of rings and of the IOTLB that a trace needs, as `ringfence size` does.
#[pyfunction]
#[pyo3(signature = (
    trace, modes=None, *, profile="r210-2015", devices=None, ring_entries=None
))]
pub(crate) fn size(
    py: Python<'_>,
    trace: TraceArgument,
    modes: Option<Vec<String>>,
    profile: &str,
    devices: Option<Vec<String>>,
    ring_entries: Option<Vec<u32>>,
) -> PyResult<Report> {
    let source = trace.source();
    detached(py, |signals| {
        let profile = load_profile(profile)?;
        let defaults = || ["linux-strict", "linux-lazy"].map(str::to_owned).to_vec();
        let modes = selected(Some(modes.unwrap_or_else(defaults)), false)?;
        if let Some(mode) = modes
            .iter()
            .find(|mode| mode.has_rings() || !mode.translates())
        {
            return Err(value(format!("mode {} does not map pages", mode.name)));
        }
        let entries = ring_entries.unwrap_or_default();
        let valid = 1..=RingSizes::MAX_SLOTS;
        if entries.iter().any(|entries| !valid.contains(entries)) {
            return Err(value(format!("a ring has 1 to {} slots", valid.end())));
        }
        let options = SizeOptions {
            profile: profile.for_replay(),
            devices,
            entries,
            modes,
            limits: ReplayLimits::default(),
        };
        let name = source.name();
        let open = || {
            let mut options = TraceOptions::default();
            options.interrupt = signals.interrupt();
            source.operations(options)
        };
        if let Some(names) = &options.devices {
            check_devices(&name, open()?, names)?;
        }
        let usage = measure_demand(open()?, options.devices.as_deref(), options.limits, |_| ())?;
        let mut sizing = Sizing::new(profile);
        let advice = advise(&name, open, &usage, &options, |_| ())?;
        sizing.traces.push(advice);
        Ok(Report {
            json: json(&sizing),
            columns: sizing_table(&sizing),
        })
    })
}

/// Executes attack classes on modes, as `ringfence attack` does.
#[pyfunction]
#[pyo3(signature = (modes=None, classes=None, *, all_modes=false))]
pub(crate) fn attack(
    py: Python<'_>,
    modes: Option<Vec<String>>,
    classes: Option<Vec<String>>,
    all_modes: bool,
) -> PyResult<Report> {
    detached(py, |signals| {
        let modes = match selected(modes, all_modes)? {
            none if none.is_empty() && all_modes => Mode::named(),
            none if none.is_empty() => Mode::default_selection(),
            modes => modes,
        };
        let classes = match classes {
            None => CLASSES.iter().collect(),
            Some(ids) => ids
                .iter()
                .map(|id| {
                    let known = || value(format!("no attack class {id}: they are A01 to A38"));
                    Class::find(id).ok_or_else(known)
                })
                .collect::<Result<Vec<_>, _>>()?,
        };
        let matrix =
            ringfence_attack::run(&modes, &classes, &Options::default(), |_| {
                match signals.check() {
                    false => Ok(()),
                    true => Err(LabError::Trace(TraceError::Interrupted {
                        file: "attack".to_owned(),
                    })),
                }
            })?;
        Ok(Report {
            json: json(&matrix),
            columns: attack_table(&matrix),
        })
    })
}

fn value(message: String) -> Failure {
    Failure::Value(message)
}

/// Returns the modes of these names or compositions; none for the default selection.
fn selected(modes: Option<Vec<String>>, all_modes: bool) -> Result<Vec<Mode>, Failure> {
    let Some(names) = modes else {
        return Ok(Vec::new());
    };
    if names.is_empty() || all_modes {
        return Err(value("give modes or all_modes=True, or neither".to_owned()));
    }
    let mode = |name: String| match name.contains('=') {
        true => compose(&name).map_err(|error| value(error.to_string())),
        false => Mode::find(&name).ok_or_else(|| LabError::NoSuchMode(name).into()),
    };
    names.into_iter().map(mode).collect()
}

fn family(name: &str) -> Result<IommuFamily, Failure> {
    let mut families = IommuFamily::ALL.into_iter();
    families
        .find(|family| family.name() == name)
        .ok_or_else(|| {
            let known = IommuFamily::ALL.map(IommuFamily::name).join(", ");
            value(format!("no IOMMU family {name:?}: they are {known}"))
        })
}
