//! The function profiler of Linux: number of calls and time of kernel functions, per CPU, below
//! tracefs. `kernel/trace/ftrace.c`: `function_stat_show` prints the lines.

use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::profiler_switch::ProfilerSwitch;
use crate::tracefs::Tracefs;

/// Maximum size of a list of functions in bytes; a kernel with many modules has about 4 MiB.
const MAX_LIST: u64 = 64 << 20;
/// Maximum size of any other file in bytes.
pub(crate) const MAX_FILE: u64 = 1 << 20;
/// Bytes at the start of a file that show whether it is idle.
const IDLE_BYTES: u64 = 64 << 10;
/// Directory of the per-CPU files.
const STATISTICS: &str = "trace_stat";
/// Maximum number of per-CPU files; Linux supports 8192 CPUs.
pub(crate) const MAX_CPUS: usize = 8192;
/// Longest plausible time of a function in microseconds; about 30 years.
const MAX_MICROSECONDS: f64 = 1e15;

/// An error of the function profiler.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProfilerError {
    /// The directory is not tracefs.
    #[error(
        "no tracefs at {path}; mount it with `mount -t tracefs tracefs /sys/kernel/tracing`",
        path = .0.display()
    )]
    NoTracefs(PathBuf),
    /// The user may not use tracefs.
    #[error("no permission to use {path}; calibrate as root", path = .0.display())]
    NotPermitted(PathBuf),
    /// The kernel can time no function.
    #[error(
        "{path} has neither function_profile_enabled nor the tracer function_graph: the kernel \
        needs CONFIG_FUNCTION_PROFILER or CONFIG_FUNCTION_GRAPH_TRACER",
        path = .0.display()
    )]
    NoProfiler(PathBuf),
    /// Somebody else traces, or has left a trace. The measurement would change or remove it.
    #[error(
        "{path}: in use ({found}); end the other trace and clear it first",
        path = path.display()
    )]
    InUse {
        /// File whose content shows it.
        path: PathBuf,
        /// The first line of the content.
        found: String,
    },
    /// The kernel traces none of the wanted functions.
    #[error(
        "{path} lists no function that invalidates an IOMMU: the kernel has no known driver",
        path = .0.display()
    )]
    NoFunction(PathBuf),
    /// No required function ran.
    #[error(
        "no invalidation in {0} s: let the machine perform I/O through its IOMMU meanwhile, \
        without iommu=pt, or give a longer --seconds"
    )]
    NothingRan(u64),
    /// No required function ran, and no driver has registered an IOMMU.
    #[error(
        "no invalidation in {0} s: /sys/class/iommu lists no IOMMU; enable it in the firmware, \
        and boot Intel's with intel_iommu=on"
    )]
    NoIommu(u64),
    /// A signal ended the measurement.
    #[error("interrupted before the end of the measurement; no profile was written")]
    Interrupted,
    /// A file cannot be read or written.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file has another form than the kernel prints.
    #[error("{path}: line {line}: {reason}", path = path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Difference from the kernel's form.
        reason: &'static str,
    },
    /// More per-CPU files than a machine can have.
    #[error("{path}: more than {MAX_CPUS} files", path = .0.display())]
    TooManyCpus(PathBuf),
}

/// Calls of a function on all CPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Calls {
    /// Number of calls.
    pub(crate) hits: u64,
    /// Time in all calls, callees included.
    pub(crate) microseconds: f64,
}

/// A running profiler. Dropping it stops it and removes its filter.
#[derive(Debug)]
pub(crate) struct Profiler {
    tracefs: Arc<Tracefs>,
    /// The functions that it times.
    found: Vec<String>,
    switch: ProfilerSwitch,
}

impl Profiler {
    /// Returns true if the kernel has the profiler.
    pub(crate) fn exists(tracefs: &Path) -> bool {
        Tracefs::open(tracefs).is_ok_and(|dir| dir.has("function_profile_enabled"))
    }

    /// Starts to profile those of `functions` that the kernel has. `switch` stops it at any time.
    ///
    /// # Errors
    /// The directory is not tracefs, the kernel has none of `required`, or somebody else traces
    /// functions.
    pub(crate) fn start(
        tracefs: &Path,
        functions: &[&str],
        required: &[&str],
        switch: &ProfilerSwitch,
    ) -> Result<Self, ProfilerError> {
        let dir = open(tracefs)?;
        idle(&dir, "current_tracer", |line| line == "nop")?;
        idle(&dir, "function_profile_enabled", |line| line == "0")?;
        idle(&dir, "set_ftrace_filter", |line| line.starts_with('#'))?;
        let Filter { text, found } = Filter::new(&dir, functions, required)?;
        let profiler = Self {
            tracefs: Arc::clone(&dir),
            found,
            switch: switch.clone(),
        };
        change(switch, &dir, "set_ftrace_filter", &text, "")?;
        // Enabling it also clears the statistics.
        change(switch, &dir, "function_profile_enabled", "1", "0")?;
        Ok(profiler)
    }

    /// Stops the profiler and returns the calls of each function that ran.
    ///
    /// # Errors
    /// A file cannot be read, is too long, or has another form than the kernel prints.
    pub(crate) fn finish(self) -> Result<BTreeMap<String, Calls>, ProfilerError> {
        self.stop()?;
        let path = |name: &str| self.tracefs.path(name);
        let io = |source| ProfilerError::Io {
            path: path(STATISTICS),
            source,
        };
        let mut files = Vec::new();
        for name in self.tracefs.list(STATISTICS).map_err(io)? {
            let name = name.map_err(io)?;
            if files.len() == MAX_CPUS {
                return Err(ProfilerError::TooManyCpus(path(STATISTICS)));
            }
            let cpu = name.strip_prefix("function");
            if cpu.is_some_and(|cpu| !cpu.is_empty() && cpu.bytes().all(|b| b.is_ascii_digit())) {
                files.push(format!("{STATISTICS}/{name}"));
            }
        }
        let mut calls = BTreeMap::new();
        for name in files {
            let text = read(&self.tracefs, &name, MAX_FILE)?;
            let added = add(&text, &self.found, &mut calls);
            added.map_err(|(line, reason)| ProfilerError::Malformed {
                path: path(&name),
                line,
                reason,
            })?;
        }
        Ok(calls)
    }

    fn stop(&self) -> Result<(), ProfilerError> {
        write(&self.tracefs, "function_profile_enabled", "0")
    }
}

impl Drop for Profiler {
    fn drop(&mut self) {
        self.switch.end();
    }
}

/// Adds the lines of one CPU to `calls`, which gets no other names than `wanted`. The error gives
/// the line and the deviation.
fn add(
    text: &str,
    wanted: &[String],
    calls: &mut BTreeMap<String, Calls>,
) -> Result<(), (usize, &'static str)> {
    for (index, line) in text.lines().enumerate() {
        let malformed = |reason| (index + 1, reason);
        let mut words = line.split_whitespace();
        let (Some(name), Some(hits)) = (words.next(), words.next()) else {
            return Err(malformed("expected a function and its number of calls"));
        };
        // Two lines of titles.
        if index == 0 && name == "Function" || index == 1 && name.starts_with("--") {
            continue;
        }
        let hits: u64 = hits
            .parse()
            .map_err(|_| malformed("not a number of calls"))?;
        let (Some(time), Some("us")) = (words.next(), words.next()) else {
            return Err(malformed(
                "no time: the kernel needs CONFIG_FUNCTION_GRAPH_TRACER",
            ));
        };
        let microseconds = microseconds(time).map_err(malformed)?;
        let name = source_name(name);
        if !wanted.iter().any(|wanted| wanted == name) {
            continue;
        }
        let sum = calls.entry(name.to_owned()).or_default();
        sum.hits = sum
            .hits
            .checked_add(hits)
            .ok_or(malformed("too many calls"))?;
        sum.microseconds += microseconds;
    }
    Ok(())
}

/// Returns a time in microseconds as the kernel prints it.
pub(crate) fn microseconds(text: &str) -> Result<f64, &'static str> {
    let time: f64 = text.parse().map_err(|_| "not a time")?;
    match (0.0..=MAX_MICROSECONDS).contains(&time) {
        true => Ok(time),
        false => Err("not a plausible time"),
    }
}

/// Returns the name of a function in the source. The compiler appends `.isra.0` and the like to the
/// copy that it changes.
pub(crate) fn source_name(symbol: &str) -> &str {
    symbol.split('.').next().unwrap_or(symbol)
}

/// Opens a tracefs that this user can use.
pub(crate) fn open(tracefs: &Path) -> Result<Arc<Tracefs>, ProfilerError> {
    let missing = || ProfilerError::NoTracefs(tracefs.to_owned());
    let dir = Tracefs::open(tracefs).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => ProfilerError::NotPermitted(tracefs.to_owned()),
        _ => missing(),
    })?;
    match dir.has("current_tracer") {
        true => Ok(Arc::new(dir)),
        false => Err(missing()),
    }
}

/// The functions of a measurement.
#[derive(Debug)]
pub(crate) struct Filter {
    /// Text of the kernel's filter: their symbols.
    pub(crate) text: String,
    /// Their names in the source.
    pub(crate) found: Vec<String>,
}

impl Filter {
    /// Selects those of `functions` that the kernel can trace.
    ///
    /// # Errors
    /// The kernel can trace none of `required`, or its list cannot be read.
    pub(crate) fn new(
        tracefs: &Tracefs,
        functions: &[&str],
        required: &[&str],
    ) -> Result<Self, ProfilerError> {
        let list = "available_filter_functions";
        let known = read(tracefs, list, MAX_LIST)?;
        let mut found = BTreeMap::new();
        // A function of a module is followed by the module's name.
        for symbol in known.lines().filter_map(|line| line.split(' ').next()) {
            let name = source_name(symbol);
            if functions.contains(&name) {
                // The whole function counts, if it exists, and not a part of it as well.
                let kept = found.entry(name).or_insert(symbol);
                if symbol == name {
                    *kept = symbol;
                }
            }
        }
        if !required.iter().any(|name| found.contains_key(name)) {
            return Err(ProfilerError::NoFunction(tracefs.path(list)));
        }
        let lines = found.values().map(|symbol| format!("{symbol}\n"));
        Ok(Self {
            text: lines.collect(),
            found: found.keys().map(|name| (*name).to_owned()).collect(),
        })
    }
}

/// Checks that every line at the start of a file shows an idle state.
pub(crate) fn idle(
    tracefs: &Tracefs,
    name: &str,
    is_idle: fn(&str) -> bool,
) -> Result<(), ProfilerError> {
    let mut bytes = Vec::new();
    let file = tracefs.reader(name);
    let start = file.and_then(|file| file.take(IDLE_BYTES).read_to_end(&mut bytes));
    start.map_err(|source| io_error(tracefs, name, source))?;
    let text = String::from_utf8_lossy(&bytes);
    match text.lines().map(str::trim).find(|line| !is_idle(line)) {
        None => Ok(()),
        Some(found) => Err(ProfilerError::InUse {
            path: tracefs.path(name),
            found: found.chars().take(80).collect(),
        }),
    }
}

/// Changes a file of tracefs until the end of the measurement.
pub(crate) fn change(
    switch: &ProfilerSwitch,
    tracefs: &Arc<Tracefs>,
    name: &'static str,
    value: &str,
    undo: &str,
) -> Result<(), ProfilerError> {
    let changed = switch.change(tracefs, name, value, undo);
    changed.map_err(|source| io_error(tracefs, name, source))
}

pub(crate) fn read(tracefs: &Tracefs, name: &str, limit: u64) -> Result<String, ProfilerError> {
    tracefs
        .read(name, limit)
        .map_err(|source| io_error(tracefs, name, source))
}

fn write(tracefs: &Tracefs, name: &str, text: &str) -> Result<(), ProfilerError> {
    tracefs
        .write(name, text)
        .map_err(|source| io_error(tracefs, name, source))
}

pub(crate) fn io_error(tracefs: &Tracefs, name: &str, source: io::Error) -> ProfilerError {
    ProfilerError::Io {
        path: tracefs.path(name),
        source,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const TITLES: &str = "  Function    Hit    Time    Avg    s^2\n  \
        --------    ---    ----    ---    ---\n";

    fn of(text: &str) -> Result<BTreeMap<String, Calls>, (usize, &'static str)> {
        let mut calls = BTreeMap::new();
        let wanted = ["qi_submit_sync", "a"].map(str::to_owned);
        add(text, &wanted, &mut calls)?;
        Ok(calls)
    }

    #[test]
    fn lines_of_the_kernel_are_read() {
        let line = "  qi_submit_sync                       12    19.500 us       1.625 us        \
            0.012 us    \n";
        let calls = of(&format!("{TITLES}{line}{line}")).unwrap();
        let expected = Calls {
            hits: 24,
            microseconds: 39.0,
        };
        assert_eq!(calls["qi_submit_sync"], expected);
        // Names that nobody asked for take no memory.
        let other = format!("{TITLES}{line}  other  1  1.0 us\n");
        assert!(of(&other).unwrap().keys().eq(["qi_submit_sync"]));
        assert_eq!(of(TITLES), Ok(BTreeMap::new()));
        assert_eq!(of(""), Ok(BTreeMap::new()));
    }

    #[test]
    fn a_switch_that_ended_starts_nothing() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("current_tracer", "nop\n"),
            ("function_profile_enabled", "0\n"),
            ("set_ftrace_filter", "#\n"),
            ("available_filter_functions", "a\n"),
        ] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let enabled = || fs::read_to_string(dir.path().join("function_profile_enabled")).unwrap();
        let switch = ProfilerSwitch::default();
        let running = Profiler::start(dir.path(), &["a"], &["a"], &switch).unwrap();
        assert_eq!(enabled(), "1");
        switch.end();
        assert_eq!(enabled(), "0");
        drop(running);
        let _running = Profiler::start(dir.path(), &["a"], &["a"], &switch).unwrap();
        assert_eq!(enabled(), "0");
    }

    #[test]
    fn other_lines_are_refused() {
        for (line, reason) in [
            ("qi_submit_sync", "expected a function"),
            ("qi_submit_sync 1", "no time"),
            ("qi_submit_sync 1 2.0 ms", "no time"),
            ("qi_submit_sync -1 2.0 us", "number of calls"),
            (
                "qi_submit_sync 18446744073709551616 2.0 us",
                "number of calls",
            ),
            ("qi_submit_sync 1 two us", "not a time"),
            ("qi_submit_sync 1 -2.0 us", "plausible"),
            ("qi_submit_sync 1 nan us", "plausible"),
            ("qi_submit_sync 1 inf us", "plausible"),
            ("qi_submit_sync 1 1e300 us", "plausible"),
        ] {
            let (at, found) = of(&format!("{TITLES}{line}\n")).unwrap_err();
            assert_eq!(at, 3, "{line}");
            assert!(found.contains(reason), "{line}: {found}");
        }
        let most = "a 18446744073709551615 1.0 us\n";
        assert_eq!(of(&format!("{most}{most}")), Err((2, "too many calls")));
        // A title is no data, and a second one is none.
        assert!(of(&format!("{TITLES}{TITLES}")).is_err());
    }

    #[test]
    fn each_function_is_traced_once_by_its_symbol() {
        let dir = tempfile::tempdir().unwrap();
        let list = "a.part.0\na\nb.isra.0.cold\nb2\nc.constprop.0 [module]\nd [module]\n";
        fs::write(dir.path().join("available_filter_functions"), list).unwrap();
        let filter = |functions: &[&str], required: &[&str]| {
            let tracefs = Tracefs::open(dir.path()).unwrap();
            let filter = Filter::new(&tracefs, functions, required);
            filter
                .map(|filter| filter.text)
                .map_err(|error| error.to_string())
        };
        let all = filter(&["a", "b", "c", "d", "e"], &["c", "e"]);
        assert_eq!(all.as_deref(), Ok("a\nb.isra.0.cold\nc.constprop.0\nd\n"));
        let error = filter(&["a", "e"], &["e"]).unwrap_err();
        assert!(error.contains("no function that invalidates"), "{error}");
    }
}
