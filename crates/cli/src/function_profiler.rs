//! The function profiler of Linux: number of calls and time of kernel functions, per CPU, below
//! tracefs. `kernel/trace/ftrace.c`: `function_stat_show` prints the lines.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use crate::input_file;

/// Maximum size of a list of functions in bytes; a kernel with many modules has about 4 MiB.
const MAX_LIST: u64 = 64 << 20;
/// Maximum size of any other file in bytes.
const MAX_FILE: u64 = 1 << 20;
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

/// A running profiler. Dropping it stops it and removes its filter.
#[derive(Debug)]
pub(crate) struct Profiler {
    tracefs: PathBuf,
}

impl Profiler {
    /// Starts to profile those of `functions` that the kernel has.
    ///
    /// # Errors
    /// The directory is not tracefs, the kernel has no profiler or none of `required`, or somebody
    /// else traces functions.
    pub(crate) fn start(
        tracefs: &Path,
        functions: &[&str],
        required: &[&str],
    ) -> Result<Self, ProfilerError> {
        let of = |name| tracefs.join(name);
        if !of("current_tracer").is_file() {
            return Err(ProfilerError::NoTracefs(tracefs.to_owned()));
        }
        if !of("function_profile_enabled").is_file() {
            return Err(ProfilerError::NoProfiler(tracefs.to_owned()));
        }
        idle(&of("current_tracer"), |line| line == "nop")?;
        idle(&of("function_profile_enabled"), |line| line == "0")?;
        idle(&of("set_ftrace_filter"), |line| line.starts_with('#'))?;
        let list = of("available_filter_functions");
        let known = read(&list, MAX_LIST)?;
        // A function of a module is followed by the module's name.
        let known = known.lines().filter_map(|line| line.split(' ').next());
        let mut found: Vec<&str> = known.filter(|name| functions.contains(name)).collect();
        found.sort_unstable();
        found.dedup();
        if !found.iter().any(|name| required.contains(name)) {
            return Err(ProfilerError::NoFunction(list));
        }
        let profiler = Self {
            tracefs: tracefs.to_owned(),
        };
        write(&of("set_ftrace_filter"), &(found.join("\n") + "\n"))?;
        // Enabling it also clears the statistics.
        write(&of("function_profile_enabled"), "1")?;
        Ok(profiler)
    }

    /// Stops the profiler and returns the calls of each function that ran.
    ///
    /// # Errors
    /// A file cannot be read, is too long, or has another form than the kernel prints.
    pub(crate) fn finish(self) -> Result<BTreeMap<String, Calls>, ProfilerError> {
        self.stop()?;
        let dir = self.tracefs.join("trace_stat");
        let io = |source| ProfilerError::Io {
            path: dir.clone(),
            source,
        };
        let mut files = Vec::new();
        for entry in fs::read_dir(&dir).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if files.len() == MAX_CPUS {
                return Err(ProfilerError::TooManyCpus(dir));
            }
            let name = path.file_name().and_then(|name| name.to_str());
            let cpu = name.and_then(|name| name.strip_prefix("function"));
            if cpu.is_some_and(|cpu| !cpu.is_empty() && cpu.bytes().all(|b| b.is_ascii_digit())) {
                files.push(path);
            }
        }
        let mut calls = BTreeMap::new();
        for path in files {
            let text = read(&path, MAX_FILE)?;
            add(&text, &mut calls).map_err(|(line, reason)| ProfilerError::Malformed {
                path,
                line,
                reason,
            })?;
        }
        Ok(calls)
    }

    fn stop(&self) -> Result<(), ProfilerError> {
        write(&self.tracefs.join("function_profile_enabled"), "0")
    }
}

impl Drop for Profiler {
    fn drop(&mut self) {
        // Errors cannot be reported here.
        let _ = self.stop();
        let _ = write(&self.tracefs.join("set_ftrace_filter"), "");
    }
}

/// Adds the lines of one CPU to `calls`. The error gives the line and the deviation.
fn add(text: &str, calls: &mut BTreeMap<String, Calls>) -> Result<(), (usize, &'static str)> {
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
fn idle(path: &Path, is_idle: fn(&str) -> bool) -> Result<(), ProfilerError> {
    let text = read(path, MAX_FILE)?;
    match text.lines().map(str::trim).find(|line| !is_idle(line)) {
        None => Ok(()),
        Some(found) => Err(ProfilerError::InUse {
            path: path.to_owned(),
            found: found.chars().take(80).collect(),
        }),
    }
}

/// Reads a regular file. Opening a FIFO would block.
fn read(path: &Path, limit: u64) -> Result<String, ProfilerError> {
    regular(path)
        .and_then(|()| input_file::read(path, limit))
        .map_err(|source| ProfilerError::Io {
            path: path.to_owned(),
            source,
        })
}

/// Writes to an existing regular file. tracefs treats truncation as a reset.
fn write(path: &Path, text: &str) -> Result<(), ProfilerError> {
    let open = || {
        regular(path)?;
        let mut file = OpenOptions::new().write(true).truncate(true).open(path)?;
        file.write_all(text.as_bytes())
    };
    open().map_err(|source| ProfilerError::Io {
        path: path.to_owned(),
        source,
    })
}

fn regular(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path)?.is_file() {
        true => Ok(()),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TITLES: &str = "  Function    Hit    Time    Avg    s^2\n  \
        --------    ---    ----    ---    ---\n";

    fn of(text: &str) -> Result<BTreeMap<String, Calls>, (usize, &'static str)> {
        let mut calls = BTreeMap::new();
        add(text, &mut calls)?;
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
        assert_eq!(of(TITLES), Ok(BTreeMap::new()));
        assert_eq!(of(""), Ok(BTreeMap::new()));
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
