//! Plans: TOML files, checked and expanded into tasks.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};

use ringfence_lab::MachineProfile;
use ringfence_lab::mapping_cache::Cycles;
use ringfence_lab::modes::Mode;
use serde::Deserialize;
use toml::Spanned;

use crate::error::{PlanError, Problem};
use crate::mode;
use crate::task::{CacheCycles, OUTPUT, Task, TaskContent};
use crate::traces::Trace;

/// Maximum number of tasks of a plan and of a list.
pub const MAX_TASKS: usize = 1 << 20;
/// Maximum number of bytes of a plan or a profile.
const MAX_BYTES: u64 = 1 << 20;
/// Maximum number of timed repetitions, as for `compare --repeat`.
const MAX_REPETITIONS: usize = 10_000;
/// Ring sizes that an address can name.
const RING_ENTRIES: Range<u32> = 1..1 << 18;
/// Lengths of a cycle of a mapping cache, in nanoseconds: a microsecond to a million seconds.
const PERIODS_NS: RangeInclusive<u64> = 1_000..=1_000_000_000_000_000;

/// The keys of a plan.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanFile {
    #[serde(default)]
    traces: Vec<Spanned<PathBuf>>,
    #[serde(default)]
    modes: Vec<Spanned<String>>,
    #[serde(default = "yes")]
    attack: bool,
    #[serde(default)]
    repetitions: Option<Spanned<usize>>,
    #[serde(default)]
    split: Option<Spanned<Split>>,
    #[serde(default)]
    parameters: Parameters,
}

fn yes() -> bool {
    true
}

/// The parts of a trace that have tasks of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Split {
    None,
    Device,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Parameters {
    #[serde(default)]
    profile: Vec<Spanned<String>>,
    #[serde(default)]
    iotlb: Vec<Spanned<String>>,
    #[serde(default)]
    ring_entries: Vec<Spanned<u32>>,
    #[serde(default)]
    rtc_period: Vec<Spanned<f64>>,
    #[serde(default)]
    rtc_periods_kept: Vec<Spanned<u8>>,
}

/// A checked plan. [`tasks`](Self::tasks) reads the traces.
#[derive(Debug, Clone)]
pub struct Plan {
    path: PathBuf,
    /// Traces, with the line of the plan that names each.
    traces: Vec<(Trace, usize)>,
    modes: Vec<Mode>,
    attack: bool,
    repetitions: usize,
    /// Line of `split = "device"`.
    split: Option<usize>,
    profiles: Vec<MachineProfile>,
    iotlbs: Vec<Option<(u32, u32)>>,
    ring_entries: Vec<Option<u32>>,
    cycles: Vec<CacheCycles>,
}

impl Plan {
    /// Reads and checks a plan. Paths in it are relative to its directory.
    ///
    /// # Errors
    /// The file cannot be read, or a line is wrong.
    pub fn load(path: &Path) -> Result<Self, PlanError> {
        let text = read(path).map_err(PlanError::io(path))?;
        Self::parse(path, &text)
    }

    /// Checks the `text` of the plan at `path`.
    ///
    /// # Errors
    /// A line is wrong.
    pub fn parse(path: &Path, text: &str) -> Result<Self, PlanError> {
        let line = |span: Range<usize>| line_of(text, span.start);
        let at = |span: Range<usize>, problem| PlanError::at(path, line(span), problem);
        let file: PlanFile = toml::from_str(text).map_err(|error| {
            let message = error.message().to_owned();
            at(error.span().unwrap_or_default(), Problem::Toml(message))
        })?;
        let directory = path.parent().unwrap_or(Path::new(""));

        let mut traces = Vec::new();
        for name in &file.traces {
            let found = Trace::at(&directory.join(name.get_ref()));
            for trace in found.map_err(|problem| at(name.span(), problem))? {
                traces.push((trace, line(name.span())));
            }
        }
        if file.traces.is_empty() {
            traces.push((Trace { path: None }, 1));
        }

        let mut modes: Vec<Mode> = Vec::new();
        let mut add = |mode: Mode| {
            if modes.iter().all(|other| other.name != mode.name) {
                modes.push(mode);
            }
        };
        for name in &file.modes {
            match name.get_ref().as_str() {
                "all" => Mode::named().into_iter().for_each(&mut add),
                "default" => Mode::default_selection().into_iter().for_each(&mut add),
                text => add(mode::find(text).map_err(|problem| at(name.span(), problem))?),
            }
        }
        if file.modes.is_empty() {
            Mode::default_selection().into_iter().for_each(&mut add);
        }

        let repetitions = match &file.repetitions {
            Some(number) => check_repetitions(*number.get_ref())
                .map_err(|problem| at(number.span(), problem))?,
            None => 0,
        };
        let split = file.split.filter(|split| *split.get_ref() == Split::Device);
        if let Some(split) = &split
            && repetitions > 0
        {
            return Err(at(split.span(), Problem::TimedSplit));
        }

        let parameters = &file.parameters;
        let iotlbs = each(&parameters.iotlb, at, |text| iotlb(text))?;
        let ring_entries = each(&parameters.ring_entries, at, |slots| {
            check_ring_entries(*slots)
        })?;
        let periods = each(&parameters.rtc_period, at, |seconds| {
            match (1e-6..=1e6).contains(seconds) {
                true => Ok((seconds * 1e9) as u64),
                false => Err(out_of_range(
                    "rtc_period",
                    seconds,
                    "0.000001 to 1000000 seconds",
                )),
            }
        })?;
        let kept = each(&parameters.rtc_periods_kept, at, |kept| {
            Cycles::new(*kept)
                .map(Cycles::get)
                .ok_or_else(|| out_of_range("rtc_periods_kept", kept, "1 to 254 cycles"))
        })?;
        let paper = ringfence_lab::mapping_cache::CycleParams::PAPER;
        let periods = or_default(periods, paper.cycle_ns);
        let kept = or_default(kept, paper.cycles.get());
        let cycles = periods.iter().flat_map(|&period_ns| {
            let kept = kept.iter();
            kept.map(move |&kept| CacheCycles { period_ns, kept })
        });
        let profiles = each(&parameters.profile, at, |name| profile(directory, name))?;
        let profiles = or_default(profiles, MachineProfile::r210_2015());
        // Each geometry must fit each profile, before the first task runs.
        for (index, geometry) in iotlbs.iter().enumerate() {
            for profile in &profiles {
                let checked = with_iotlb(profile, Some(*geometry)).validate();
                if let (Err(source), Some(text)) = (checked, parameters.iotlb.get(index)) {
                    let name = profile.name.clone();
                    return Err(at(text.span(), Problem::Profile { name, source }));
                }
            }
        }

        Ok(Self {
            path: path.to_owned(),
            traces,
            modes,
            attack: file.attack,
            repetitions,
            split: split.map(|split| line(split.span())),
            profiles,
            iotlbs: optional(iotlbs),
            ring_entries: optional(ring_entries),
            cycles: cycles.collect(),
        })
    }

    /// Expands the plan: traces in the order of the plan; for each its devices, then modes, then
    /// parameters. Parameters that do not apply to a mode do not multiply its tasks. Two tasks with
    /// the same content are one. Reads every trace once for its digest, and once more for its
    /// devices if the plan splits by device.
    ///
    /// # Errors
    /// A trace cannot be read, or the plan has more than [`MAX_TASKS`] tasks.
    pub fn tasks(&self) -> Result<Vec<Task>, PlanError> {
        let names = names(&self.traces);
        let mut known = HashSet::new();
        let mut tasks = Vec::new();
        for ((trace, line), name) in self.traces.iter().zip(names) {
            let wrong = |problem| PlanError::at(&self.path, *line, problem);
            let digest = trace.digest().map_err(|source| {
                let path = trace.path.clone().unwrap_or_default();
                wrong(Problem::Trace { path, source })
            })?;
            let devices: Vec<Option<String>> = match self.split {
                None => vec![None],
                Some(_) => {
                    let devices = trace.devices().map_err(Problem::Devices).map_err(wrong)?;
                    devices.into_iter().map(Some).collect()
                }
            };
            for device in devices {
                for mode in &self.modes {
                    for content in self.cells(&digest, device.as_ref(), mode) {
                        let task = Task::new(name.clone(), trace.path.clone(), content);
                        if !known.insert(task.name.clone()) {
                            continue;
                        }
                        if tasks.len() == MAX_TASKS {
                            return Err(wrong(Problem::TooManyTasks { limit: MAX_TASKS }));
                        }
                        tasks.push(task);
                    }
                }
            }
        }
        Ok(tasks)
    }

    /// Returns the combinations of the parameters that apply to `mode`.
    fn cells(&self, digest: &str, device: Option<&String>, mode: &Mode) -> Vec<TaskContent> {
        let iotlbs = match mode::has_iotlb(mode) {
            true => self.iotlbs.as_slice(),
            false => &[None],
        };
        let rings = match mode.has_rings() {
            true => self.ring_entries.as_slice(),
            false => &[None],
        };
        let cycles: Vec<Option<CacheCycles>> = match mode::has_cycles(mode) {
            true => self.cycles.iter().copied().map(Some).collect(),
            false => vec![None],
        };
        let mut cells = Vec::new();
        for profile in &self.profiles {
            for &iotlb in iotlbs {
                for &ring_entries in rings {
                    for &cache_cycles in &cycles {
                        cells.push(TaskContent {
                            output: OUTPUT,
                            engine: env!("CARGO_PKG_VERSION").into(),
                            digest: digest.to_owned(),
                            device: device.cloned(),
                            mode: mode.name.clone(),
                            profile: with_iotlb(profile, iotlb),
                            ring_entries,
                            cache_cycles,
                            attack: self.attack,
                            repetitions: self.repetitions,
                        });
                    }
                }
            }
        }
        cells
    }
}

/// Returns the line of a byte, from 1 on.
fn line_of(text: &str, byte: usize) -> usize {
    let before = text.as_bytes().get(..byte).unwrap_or_default();
    before.iter().filter(|byte| **byte == b'\n').count() + 1
}

fn read(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Checks that a task of a list is no larger than one of a plan.
///
/// # Errors
/// A number is outside its range.
pub(crate) fn check_ranges(content: &TaskContent) -> Result<(), Problem> {
    check_repetitions(content.repetitions)?;
    if let Some(slots) = content.ring_entries {
        check_ring_entries(slots)?;
    }
    if let Some(CacheCycles { period_ns, .. }) = content.cache_cycles
        && !PERIODS_NS.contains(&period_ns)
    {
        return Err(out_of_range(
            "period_ns",
            &period_ns,
            "1000 to 1000000000000000 nanoseconds",
        ));
    }
    Ok(())
}

fn check_repetitions(number: usize) -> Result<usize, Problem> {
    match number <= MAX_REPETITIONS {
        true => Ok(number),
        false => Err(out_of_range("repetitions", &number, "0 to 10000")),
    }
}

fn check_ring_entries(slots: u32) -> Result<u32, Problem> {
    match RING_ENTRIES.contains(&slots) {
        true => Ok(slots),
        false => Err(out_of_range("ring_entries", &slots, "1 to 262143 slots")),
    }
}

fn out_of_range(parameter: &'static str, value: &impl ToString, expected: &'static str) -> Problem {
    Problem::OutOfRange {
        parameter,
        value: value.to_string(),
        expected,
    }
}

/// Converts each value of a list. An error has the line of its value.
fn each<T, U>(
    values: &[Spanned<T>],
    at: impl Fn(Range<usize>, Problem) -> PlanError,
    convert: impl Fn(&T) -> Result<U, Problem>,
) -> Result<Vec<U>, PlanError> {
    let values = values.iter();
    values
        .map(|value| convert(value.get_ref()).map_err(|problem| at(value.span(), problem)))
        .collect()
}

fn or_default<T>(values: Vec<T>, default: T) -> Vec<T> {
    if values.is_empty() {
        vec![default]
    } else {
        values
    }
}

/// Returns the values of a parameter, or one `None` if the plan does not name it.
fn optional<T>(values: Vec<T>) -> Vec<Option<T>> {
    if values.is_empty() {
        vec![None]
    } else {
        values.into_iter().map(Some).collect()
    }
}

/// Parses a geometry, SETSxWAYS.
fn iotlb(text: &str) -> Result<(u32, u32), Problem> {
    let parsed = text
        .split_once('x')
        .and_then(|(sets, ways)| Some((sets.parse().ok()?, ways.parse().ok()?)));
    parsed.ok_or_else(|| out_of_range("iotlb", &text, "SETSxWAYS, as in 16x4"))
}

/// Returns the profile of that name, or that in the file of that name.
fn profile(directory: &Path, name: &str) -> Result<MachineProfile, Problem> {
    let mut builtin = MachineProfile::builtin().into_iter();
    if let Some(profile) = builtin.find(|profile| profile.name == name) {
        return Ok(without_sources(profile));
    }
    let text = read(&directory.join(name)).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => Problem::NoSuchProfile(name.to_owned()),
        _ => Problem::ProfileIo {
            name: name.to_owned(),
            source,
        },
    })?;
    let profile: MachineProfile = toml::from_str(&text).map_err(|error| Problem::ProfileToml {
        name: name.to_owned(),
        line: line_of(&text, error.span().unwrap_or_default().start),
        message: error.message().to_owned(),
    })?;
    profile.validate().map_err(|source| Problem::Profile {
        name: name.to_owned(),
        source,
    })?;
    Ok(without_sources(profile))
}

/// Removes the texts of a profile on which no result depends.
fn without_sources(profile: MachineProfile) -> MachineProfile {
    MachineProfile {
        source: String::new(),
        sources: Default::default(),
        reported: Vec::new(),
        ..profile
    }
}

fn with_iotlb(profile: &MachineProfile, iotlb: Option<(u32, u32)>) -> MachineProfile {
    let mut profile = without_sources(profile.clone());
    if let Some((sets, ways)) = iotlb {
        (profile.iotlb_sets, profile.iotlb_ways) = (Some(sets), Some(ways));
    }
    profile
}

/// Returns names for the rows of the traces: file names without their endings, or the paths where
/// two file names are equal.
fn names(traces: &[(Trace, usize)]) -> Vec<String> {
    let short: Vec<String> = traces.iter().map(|(trace, _)| trace.name()).collect();
    let unique = |name: &String| short.iter().filter(|other| *other == name).count() == 1;
    let names = traces.iter().zip(&short);
    names
        .map(|((trace, _), name)| match &trace.path {
            Some(path) if !unique(name) => path.display().to_string(),
            _ => name.clone(),
        })
        .collect()
}
