//! The function profiler of Linux: number of calls and time of kernel functions, per CPU, below
//! tracefs. `kernel/trace/ftrace.c`: `function_stat_show` prints the lines.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::tracefs::Tracefs;

/// Maximum size of a list of functions in bytes; a kernel with many modules has about 4 MiB.
const MAX_LIST: u64 = 64 << 20;
/// Maximum size of any other file in bytes.
const MAX_FILE: u64 = 1 << 20;
/// Directory of the per-CPU files.
const STATISTICS: &str = "trace_stat";
/// Maximum number of per-CPU files; Linux supports 8192 CPUs.
const MAX_CPUS: usize = 8192;
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
    /// The kernel has no function profiler.
    #[error(
        "{path} has no function_profile_enabled: the kernel needs CONFIG_FUNCTION_PROFILER",
        path = .0.display()
    )]
    NoProfiler(PathBuf),
    /// Somebody else traces functions. The profiler would change what they trace.
    #[error("{path}: in use ({found}); end the other trace first", path = path.display())]
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
        "no invalidation in {0} s: let the machine perform I/O through its IOMMU meanwhile, or \
        give a longer --seconds"
    )]
    NothingRan(u64),
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

/// A profiler that does not run yet. Clones share its state, so a signal handler can stop it.
#[derive(Debug, Clone, Default)]
pub(crate) struct ProfilerSwitch(Arc<Mutex<State>>);

/// The state of the kernel's profiler.
#[derive(Debug, Default)]
struct State {
    /// The directory, while this process has the profiler or its filter on.
    on: Option<Arc<Tracefs>>,
    /// True if the profiler must not start any more.
    ended: bool,
}

impl ProfilerSwitch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops the profiler and removes its filter, if they are on. It does not start again.
    pub(crate) fn end(&self) {
        let mut state = self.state();
        state.ended = true;
        if let Some(tracefs) = state.on.take() {
            // Errors cannot be reported here.
            let _ = tracefs.write("function_profile_enabled", "0");
            let _ = tracefs.write("set_ftrace_filter", "");
        }
    }
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
    /// Starts to profile those of `functions` that the kernel has. `switch` stops it at any time.
    ///
    /// # Errors
    /// The directory is not tracefs, the kernel has no profiler or none of `required`, or somebody
    /// else traces functions.
    pub(crate) fn start(
        tracefs: &Path,
        functions: &[&str],
        required: &[&str],
        switch: &ProfilerSwitch,
    ) -> Result<Self, ProfilerError> {
        let missing = || ProfilerError::NoTracefs(tracefs.to_owned());
        let dir = Arc::new(Tracefs::open(tracefs).map_err(|_| missing())?);
        if !dir.has("current_tracer") {
            return Err(missing());
        }
        if !dir.has("function_profile_enabled") {
            return Err(ProfilerError::NoProfiler(tracefs.to_owned()));
        }
        idle(&dir, "current_tracer", |line| line == "nop")?;
        idle(&dir, "function_profile_enabled", |line| line == "0")?;
        idle(&dir, "set_ftrace_filter", |line| line.starts_with('#'))?;
        let list = "available_filter_functions";
        let known = read(&dir, list, MAX_LIST)?;
        // A function of a module is followed by the module's name.
        let known = known.lines().filter_map(|line| line.split(' ').next());
        let mut found: Vec<&str> = known.filter(|name| functions.contains(name)).collect();
        found.sort_unstable();
        found.dedup();
        if !found.iter().any(|name| required.contains(name)) {
            return Err(ProfilerError::NoFunction(dir.path(list)));
        }
        let profiler = Self {
            tracefs: Arc::clone(&dir),
            found: found.iter().map(|name| (*name).to_owned()).collect(),
            switch: switch.clone(),
        };
        let mut state = switch.state();
        if !state.ended {
            state.on = Some(Arc::clone(&dir));
            let filter = write(&dir, "set_ftrace_filter", &(found.join("\n") + "\n"));
            // Enabling it also clears the statistics.
            let started = filter.and_then(|()| write(&dir, "function_profile_enabled", "1"));
            // The drop of `profiler` takes the lock.
            drop(state);
            started?;
        }
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
        let microseconds: f64 = time.parse().map_err(|_| malformed("not a time"))?;
        if !(0.0..=MAX_MICROSECONDS).contains(&microseconds) {
            return Err(malformed("not a plausible time"));
        }
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

/// Checks that every line of a file shows an idle state.
fn idle(tracefs: &Tracefs, name: &str, is_idle: fn(&str) -> bool) -> Result<(), ProfilerError> {
    let text = read(tracefs, name, MAX_FILE)?;
    match text.lines().map(str::trim).find(|line| !is_idle(line)) {
        None => Ok(()),
        Some(found) => Err(ProfilerError::InUse {
            path: tracefs.path(name),
            found: found.chars().take(80).collect(),
        }),
    }
}

fn read(tracefs: &Tracefs, name: &str, limit: u64) -> Result<String, ProfilerError> {
    tracefs
        .read(name, limit)
        .map_err(|source| io_error(tracefs, name, source))
}

fn write(tracefs: &Tracefs, name: &str, text: &str) -> Result<(), ProfilerError> {
    tracefs
        .write(name, text)
        .map_err(|source| io_error(tracefs, name, source))
}

fn io_error(tracefs: &Tracefs, name: &str, source: io::Error) -> ProfilerError {
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
}
