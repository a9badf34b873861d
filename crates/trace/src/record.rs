//! Records a trace on this host through tracefs, and leaves tracefs as it was.
//!
//! A private instance (`instances/NAME`, Documentation/trace/ftrace.rst, "Instances") has its own buffers and
//! its own switches: the host's tracing is not touched, and removing the instance removes all that was set.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often an ending recording looks whether it is to stop.
const TICK: Duration = Duration::from_millis(20);

/// What to record.
#[derive(Debug, Clone)]
pub struct Recording {
    /// Where tracefs is mounted; `/sys/kernel/tracing` on a host.
    pub tracefs: PathBuf,
    /// Name of the private instance.
    pub instance: String,
    /// Buffer per processor, in KiB.
    pub buffer_kib: u32,
}

impl Default for Recording {
    fn default() -> Self {
        Self {
            tracefs: PathBuf::from("/sys/kernel/tracing"),
            instance: format!("ringfence-{}", std::process::id()),
            buffer_kib: 65_536,
        }
    }
}

/// What the recording runs alongside.
#[derive(Debug)]
pub enum Workload<'a> {
    /// Nothing: record for this long.
    Time(Duration),
    /// A command, to its end.
    Command(&'a mut Command),
}

/// How a recording went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// Bytes of text written.
    pub bytes: u64,
    /// Events that did not fit the buffers, of all processors. Not 0: record again with larger buffers.
    pub lost: u64,
    /// How the command ended, if there was one and it was not cut off.
    pub status: Option<ExitStatus>,
    /// Whether `iommu:map` and `iommu:unmap` were recorded. Without, coherent buffers and scatterlists lack
    /// their addresses.
    pub iommu_events: bool,
}

/// Why nothing was recorded.
#[derive(Debug)]
#[non_exhaustive]
pub enum RecordError {
    /// tracefs is not mounted there.
    NoTracefs {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// Not allowed; recording needs root.
    NotPermitted {
        /// What was to be opened.
        path: PathBuf,
    },
    /// The kernel has no `dma:*` events: older than 6.12, or built without event tracing.
    NoDmaEvents {
        /// Where they should be.
        path: PathBuf,
    },
    /// An instance of this name exists: another recording runs, or one was killed.
    InstanceExists {
        /// The instance; remove it with `rmdir` if nobody uses it.
        path: PathBuf,
    },
    /// The command cannot be started.
    Command {
        /// Why not.
        source: io::Error,
    },
    /// A file of tracefs, or the output, cannot be read or written.
    Io {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

impl std::fmt::Display for RecordError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoTracefs { path } => write!(
                f,
                "no tracefs at {}; mount it with `mount -t tracefs tracefs /sys/kernel/tracing`",
                path.display()
            ),
            Self::NotPermitted { path } => {
                write!(f, "not allowed to use {}; record as root", path.display())
            }
            Self::NoDmaEvents { path } => write!(
                f,
                "this kernel has no dma events ({} is missing); they come with Linux 6.12",
                path.display()
            ),
            Self::InstanceExists { path } => write!(
                f,
                "{} exists; if no other recording runs, remove it with rmdir",
                path.display()
            ),
            Self::Command { .. } => f.write_str("the command cannot be started"),
            Self::Io { path, .. } => write!(f, "cannot use {}", path.display()),
        }
    }
}

impl std::error::Error for RecordError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Command { source } | Self::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl RecordError {
    fn at(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::PermissionDenied => Self::NotPermitted { path },
            _ => Self::Io { path, source },
        }
    }
}

/// The private instance; gone when dropped, on every path out.
#[derive(Debug)]
struct Instance {
    path: PathBuf,
}

impl Instance {
    fn create(tracefs: &Path, name: &str) -> Result<Self, RecordError> {
        let path = tracefs.join("instances").join(name);
        match fs::create_dir(&path) {
            Ok(()) => Ok(Self { path }),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(RecordError::InstanceExists { path })
            }
            Err(error) => Err(RecordError::at(&path, error)),
        }
    }

    fn write(&self, file: &str, value: &str) -> Result<(), RecordError> {
        let path = self.path.join(file);
        fs::write(&path, value).map_err(|error| RecordError::at(&path, error))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // Nobody is left to tell; the switches die with the directory, which the kernel refuses to remove
        // while they are on in some versions.
        for switch in ["tracing_on", "events/enable"] {
            let _ = fs::write(self.path.join(switch), "0");
        }
        let _ = fs::remove_dir(&self.path);
    }
}

impl Recording {
    /// Records alongside `workload` and writes the text to `out`, as tracefs prints it.
    ///
    /// `stop` ends the recording early, for instance from a Ctrl-C handler: what was recorded is written, a
    /// command still running is killed. tracefs is restored on every path out, errors included.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn run(
        &self,
        workload: Workload<'_>,
        stop: &AtomicBool,
        out: &mut impl Write,
    ) -> Result<Recorded, RecordError> {
        let instances = self.tracefs.join("instances");
        match fs::metadata(&instances) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(RecordError::NoTracefs {
                    path: self.tracefs.clone(),
                });
            }
            Err(error) => return Err(RecordError::at(&instances, error)),
        }
        let dma = self.tracefs.join("events/dma");
        if !dma.is_dir() {
            // An unreadable directory looks the same as a missing one: root reads all.
            return match fs::read_dir(self.tracefs.join("events")) {
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    Err(RecordError::at(&dma, error))
                }
                _ => Err(RecordError::NoDmaEvents { path: dma }),
            };
        }
        let iommu_events = self.tracefs.join("events/iommu/map").is_dir();
        let instance = Instance::create(&self.tracefs, &self.instance)?;
        self.record(&instance, iommu_events, workload, stop, out)
    }

    /// Records in an instance whose files are there.
    fn record(
        &self,
        instance: &Instance,
        iommu_events: bool,
        workload: Workload<'_>,
        stop: &AtomicBool,
        out: &mut impl Write,
    ) -> Result<Recorded, RecordError> {
        instance.write("tracing_on", "0")?;
        instance.write("buffer_size_kb", &self.buffer_kib.to_string())?;
        // Keep the head when the buffer is full: a tail without its maps is worth nothing.
        instance.write("options/overwrite", "0")?;
        instance.write("events/dma/enable", "1")?;
        if iommu_events {
            instance.write("events/iommu/map/enable", "1")?;
            instance.write("events/iommu/unmap/enable", "1")?;
        }
        instance.write("tracing_on", "1")?;
        let status = workload.wait(stop)?;
        instance.write("tracing_on", "0")?;
        let bytes = copy(&instance.path.join("trace"), out)?;
        Ok(Recorded {
            bytes,
            lost: lost(&instance.path)?,
            status,
            iommu_events,
        })
    }
}

impl Workload<'_> {
    fn wait(self, stop: &AtomicBool) -> Result<Option<ExitStatus>, RecordError> {
        let failed = |source| RecordError::Command { source };
        match self {
            Self::Time(time) => {
                let end = Instant::now() + time;
                while Instant::now() < end && !stop.load(Ordering::Relaxed) {
                    std::thread::sleep(TICK.min(end.saturating_duration_since(Instant::now())));
                }
                Ok(None)
            }
            Self::Command(command) => {
                let mut child = command.spawn().map_err(failed)?;
                loop {
                    match child.try_wait() {
                        Ok(Some(status)) => return Ok(Some(status)),
                        Ok(None) if !stop.load(Ordering::Relaxed) => std::thread::sleep(TICK),
                        Ok(None) => {
                            let _ = child.kill();
                            let _ = child.wait();
                            return Ok(None);
                        }
                        Err(error) => {
                            let _ = child.kill();
                            let _ = child.wait();
                            return Err(failed(error));
                        }
                    }
                }
            }
        }
    }
}

fn copy(from: &Path, out: &mut impl Write) -> Result<u64, RecordError> {
    let fail = |error| RecordError::at(from, error);
    let mut file = fs::File::open(from).map_err(fail)?;
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        let count = match file.read(&mut buffer) {
            Ok(0) => return Ok(bytes),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => other.map_err(fail)?,
        };
        let part = buffer.get(..count).unwrap_or(&[]);
        out.write_all(part).map_err(|source| RecordError::Io {
            path: PathBuf::from("the output"),
            source,
        })?;
        bytes += count as u64;
    }
}

/// `overrun` and `dropped events` of `per_cpu/cpu*/stats`.
fn lost(instance: &Path) -> Result<u64, RecordError> {
    let per_cpu = instance.join("per_cpu");
    let mut lost = 0u64;
    let entries = fs::read_dir(&per_cpu).map_err(|error| RecordError::at(&per_cpu, error))?;
    for entry in entries {
        let path = entry
            .map_err(|error| RecordError::at(&per_cpu, error))?
            .path()
            .join("stats");
        let text = fs::read_to_string(&path).map_err(|error| RecordError::at(&path, error))?;
        for line in text.lines() {
            if let Some((key, value)) = line.split_once(':')
                && matches!(key.trim(), "overrun" | "dropped events")
            {
                lost = lost.saturating_add(value.trim().parse().unwrap_or(0));
            }
        }
    }
    Ok(lost)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files of an instance, as the kernel makes them, and what it would trace.
    fn instance(name: &str) -> Instance {
        let path = std::env::temp_dir().join(format!("ringfence-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        for folder in [
            "options",
            "events/dma",
            "events/iommu/map",
            "events/iommu/unmap",
            "per_cpu/cpu0",
            "per_cpu/cpu1",
        ] {
            fs::create_dir_all(path.join(folder)).unwrap();
        }
        fs::write(path.join("trace"), "# tracer: nop\n").unwrap();
        let stats = "entries: 5\noverrun: 3\ncommit overrun: 100\ndropped events: 4\n";
        fs::write(path.join("per_cpu/cpu0/stats"), stats).unwrap();
        fs::write(path.join("per_cpu/cpu1/stats"), stats).unwrap();
        Instance { path }
    }

    fn read(path: &Path, file: &str) -> String {
        fs::read_to_string(path.join(file)).unwrap_or_else(|_| "-".to_owned())
    }

    #[test]
    fn a_command_is_recorded_with_the_switches_on_and_everything_is_off_after() {
        let instance = instance("command");
        let path = instance.path.clone();
        let mut command = Command::new("sh");
        // What the workload sees is what the kernel would have traced with.
        let script = "cat tracing_on buffer_size_kb options/overwrite events/dma/enable \
                      events/iommu/map/enable events/iommu/unmap/enable >> trace; exit 3";
        command.current_dir(&path).args(["-c", script]);
        let mut out = Vec::new();
        let recording = Recording {
            buffer_kib: 77,
            ..Recording::default()
        };
        let stop = AtomicBool::new(false);
        let recorded = recording
            .record(
                &instance,
                true,
                Workload::Command(&mut command),
                &stop,
                &mut out,
            )
            .unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "# tracer: nop\n1770111");
        assert_eq!((recorded.lost, recorded.iommu_events), (14, true));
        assert_eq!(recorded.status.and_then(|status| status.code()), Some(3));
        drop(instance);
        assert_eq!(read(&path, "tracing_on"), "0");
        assert_eq!(read(&path, "events/enable"), "0");
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn every_error_and_a_stop_leave_the_switches_off() {
        let stop = AtomicBool::new(true);
        let go = AtomicBool::new(false);
        let long = || Workload::Time(Duration::from_secs(3600));
        let recording = Recording::default();
        // Stopped at once, though an hour was asked for.
        let stopped = instance("stopped");
        let path = stopped.path.clone();
        assert!(
            recording
                .record(&stopped, true, long(), &stop, &mut Vec::new())
                .is_ok()
        );
        drop(stopped);
        assert_eq!(read(&path, "tracing_on"), "0");
        fs::remove_dir_all(path).unwrap();
        // A switch that is missing, a command that is missing, statistics that are missing.
        for (name, missing) in [("switch", "options"), ("command", ""), ("stats", "per_cpu")] {
            let broken = instance(name);
            let path = broken.path.clone();
            if !missing.is_empty() {
                fs::remove_dir_all(path.join(missing)).unwrap();
            }
            let mut command = Command::new("no-such-command");
            let workload = match name {
                "command" => Workload::Command(&mut command),
                _ => Workload::Time(Duration::ZERO),
            };
            let result = recording.record(&broken, true, workload, &go, &mut Vec::new());
            match name {
                "command" => assert!(matches!(result, Err(RecordError::Command { .. }))),
                _ => assert!(matches!(result, Err(RecordError::Io { .. })), "{result:?}"),
            }
            drop(broken);
            assert_eq!(read(&path, "tracing_on"), "0", "{name}");
            assert_eq!(read(&path, "events/enable"), "0", "{name}");
            fs::remove_dir_all(path).unwrap();
        }
    }
}
