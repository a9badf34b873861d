//! Records a trace on this host through tracefs, and restores tracefs afterwards.
//!
//! A private instance (`instances/NAME`, Documentation/trace/ftrace.rst, "Instances") has its own
//! buffers and switches. The recording therefore does not affect the host's tracing, and removing
//! the instance removes all settings.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::domain_type::DomainTypes;

mod error;
mod stale_instances;

pub use error::RecordError;
pub use stale_instances::stale_instances;

/// Interval at which an ending recording checks for a stop.
const TICK: Duration = Duration::from_millis(20);

/// Time that a command has to exit after a stop. Ctrl-C in a terminal reaches the command too.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// Time that a signal may take to reach this process after it ended the command.
const SIGNAL_DELAY: Duration = Duration::from_millis(100);

/// Clocks of tracefs that print seconds and agree between CPUs ("trace_clock" of ftrace.rst).
const AGREEING_CLOCKS: [&str; 5] = ["global", "mono", "mono_raw", "boot", "tai"];

/// Events of the page allocator.
const PAGE_EVENTS: [&str; 3] = ["mm_page_alloc", "mm_page_free", "mm_page_free_batched"];

/// Settings of a recording.
#[derive(Debug, Clone)]
pub struct Recording {
    /// Mount point of tracefs; `/sys/kernel/tracing` on a host.
    pub tracefs: PathBuf,
    /// Name of the private instance.
    pub instance: String,
    /// Buffer size per CPU, in KiB.
    pub buffer_kib: u32,
    /// Records the events of the page allocator too, for a [`Judgement`](crate::Judgement), and
    /// writes the types of the IOMMU domains as comments.
    pub pages: Option<PageRecording>,
}

/// Settings for the events of the page allocator.
#[derive(Debug, Clone)]
pub struct PageRecording {
    /// Directory of the IOMMU groups; `/sys/kernel/iommu_groups` on a host.
    pub iommu_groups: PathBuf,
}

impl Default for PageRecording {
    fn default() -> Self {
        Self {
            iommu_groups: PathBuf::from("/sys/kernel/iommu_groups"),
        }
    }
}

impl Default for Recording {
    fn default() -> Self {
        Self {
            tracefs: PathBuf::from("/sys/kernel/tracing"),
            instance: stale_instances::name(std::process::id()),
            buffer_kib: 65_536,
            pages: None,
        }
    }
}

/// End of the recording.
#[derive(Debug)]
pub enum Workload<'a> {
    /// Records for this long, without a command.
    Time(Duration),
    /// Records until this command exits.
    Command(&'a mut Command),
}

/// Result of a recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordingSummary {
    /// Bytes of text written.
    pub bytes: u64,
    /// Events that did not fit into the buffers, summed over all CPUs. If not 0, record again with
    /// larger buffers.
    pub lost: u64,
    /// Exit status of the command; `None` without a command or if the recording was stopped.
    pub status: Option<ExitStatus>,
    /// True if `iommu:map` and `iommu:unmap` were recorded. Without them, coherent buffers and
    /// scatterlists lack their addresses.
    pub iommu_events: bool,
}

/// The private instance. Dropping it removes it, on every path out.
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
        // Errors cannot be reported here. The switches disappear with the directory, but some
        // kernel versions refuse to remove the directory while they are on.
        for switch in ["tracing_on", "events/enable"] {
            let _ = fs::write(self.path.join(switch), "0");
        }
        let _ = fs::remove_dir(&self.path);
    }
}

impl Recording {
    /// Records until the end of `workload` and writes the text to `out`, as tracefs prints it.
    ///
    /// `stop` ends the recording early, for instance from a Ctrl-C handler. The recorded text is
    /// then written, and the command is killed if it still runs after one second (the command
    /// alone, not its child processes). If events were lost, the text ends with the kernel's line
    /// for lost events, one per CPU. tracefs is restored on every path out, errors included.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn run(
        &self,
        workload: Workload<'_>,
        stop: &AtomicBool,
        out: &mut impl Write,
    ) -> Result<RecordingSummary, RecordError> {
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
            // An unreadable directory looks like a missing one; root can read all.
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

    /// Records in an existing instance.
    fn record(
        &self,
        instance: &Instance,
        iommu_events: bool,
        workload: Workload<'_>,
        stop: &AtomicBool,
        out: &mut impl Write,
    ) -> Result<RecordingSummary, RecordError> {
        instance.write("tracing_on", "0")?;
        instance
            .write("buffer_size_kb", &self.buffer_kib.to_string())
            .map_err(|error| self.without_memory(error))?;
        if let Some(clock) = self.clock() {
            instance.write("trace_clock", clock)?;
        }
        // Keep the oldest events when the buffer is full: a tail without its maps is worthless.
        instance.write("options/overwrite", "0")?;
        instance.write("events/dma/enable", "1")?;
        if iommu_events {
            instance.write("events/iommu/map/enable", "1")?;
            instance.write("events/iommu/unmap/enable", "1")?;
        }
        let mut bytes = 0;
        if let Some(pages) = &self.pages {
            for event in PAGE_EVENTS {
                instance.write(&format!("events/kmem/{event}/enable"), "1")?;
            }
            let types = domain_types(&pages.iommu_groups);
            out.write_all(types.as_bytes())
                .map_err(|source| RecordError::Output { source })?;
            bytes += types.len() as u64;
        }
        instance.write("tracing_on", "1")?;
        let status = workload.wait(stop)?;
        instance.write("tracing_on", "0")?;
        bytes += copy(&instance.path.join("trace"), out)?;
        let losses = losses(&instance.path)?;
        for loss in losses.iter().filter(|loss| loss.dropped > 0) {
            // The header counts overwritten events, but not events dropped at a full buffer. The
            // trace must report them: without its missing unmaps it looks complete.
            let line = format!("CPU:{} [LOST {} EVENTS]\n", loss.processor, loss.dropped);
            out.write_all(line.as_bytes())
                .map_err(|source| RecordError::Output { source })?;
            bytes += line.len() as u64;
        }
        let lost = losses
            .iter()
            .fold(0u64, |sum, loss| sum.saturating_add(loss.total()));
        Ok(RecordingSummary {
            bytes,
            lost,
            status,
            iommu_events,
        })
    }

    /// Returns the clock of the host's tracing if it is better than the default of an instance.
    /// Instances begin with `local`, even if the kernel found that the CPUs' clocks disagree and
    /// selected `global`.
    fn clock(&self) -> Option<&'static str> {
        let clocks = fs::read_to_string(self.tracefs.join("trace_clock")).ok()?;
        let (_, chosen) = clocks.split_once('[')?;
        let (chosen, _) = chosen.split_once(']')?;
        AGREEING_CLOCKS.into_iter().find(|&clock| clock == chosen)
    }

    fn without_memory(&self, error: RecordError) -> RecordError {
        match error {
            RecordError::Io { source, .. } if source.kind() == io::ErrorKind::OutOfMemory => {
                RecordError::NoMemory {
                    buffer_kib: self.buffer_kib,
                }
            }
            other => other,
        }
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
                let mut timer = WaitTimer::default();
                loop {
                    match child.try_wait() {
                        Ok(Some(status)) if status.success() => return Ok(Some(status)),
                        Ok(Some(status)) => {
                            // Ctrl-C ends both processes. Which of them sees it first is random and
                            // must not affect the result.
                            let mut timer = WaitTimer::default();
                            while !stop.load(Ordering::Relaxed) {
                                if timer.is_over(SIGNAL_DELAY) {
                                    return Ok(Some(status));
                                }
                            }
                            return Ok(None);
                        }
                        Ok(None) if !stop.load(Ordering::Relaxed) => std::thread::sleep(TICK),
                        Ok(None) if !timer.is_over(STOP_TIMEOUT) => {}
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

/// Total time spent waiting.
#[derive(Debug, Default)]
struct WaitTimer(Duration);

impl WaitTimer {
    /// Returns true if the total wait has reached `limit`; otherwise waits for one [`TICK`].
    fn is_over(&mut self, limit: Duration) -> bool {
        if self.0 >= limit {
            return true;
        }
        std::thread::sleep(TICK);
        self.0 += TICK;
        false
    }
}

/// Returns a comment with the type of the domain of each device; the devices and groups that cannot
/// be read are left out.
fn domain_types(groups: &Path) -> String {
    let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
    let mut lines = Vec::new();
    for group in entries(groups) {
        let Ok(kind) = fs::read_to_string(group.path().join("type")) else {
            continue;
        };
        for device in entries(&group.path().join("devices")) {
            let device = device.file_name();
            let key = DomainTypes::KEY;
            lines.push(format!("#{key}{} {}\n", device.display(), kind.trim()));
        }
    }
    lines.sort_unstable();
    lines.concat()
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
        out.write_all(part)
            .map_err(|source| RecordError::Output { source })?;
        bytes += count as u64;
    }
}

/// Events that the buffer of one CPU lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BufferLoss {
    processor: u32,
    /// Events that later events overwrote; the text's header counts them.
    overwritten: u64,
    /// Events that never entered the buffer: it was full, or interrupts nested too deep.
    dropped: u64,
}

impl BufferLoss {
    fn total(&self) -> u64 {
        self.overwritten.saturating_add(self.dropped)
    }
}

/// Reads `per_cpu/cpu*/stats` (ftrace.rst, "per_cpu/cpu0/stats") of all CPUs.
fn losses(instance: &Path) -> Result<Vec<BufferLoss>, RecordError> {
    let per_cpu = instance.join("per_cpu");
    let mut losses = Vec::new();
    let entries = fs::read_dir(&per_cpu).map_err(|error| RecordError::at(&per_cpu, error))?;
    for entry in entries {
        let entry = entry.map_err(|error| RecordError::at(&per_cpu, error))?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("cpu"));
        let Some(Ok(processor)) = number.map(str::parse) else {
            continue;
        };
        let path = entry.path().join("stats");
        let text = fs::read_to_string(&path).map_err(|error| RecordError::at(&path, error))?;
        let mut loss = BufferLoss {
            processor,
            overwritten: 0,
            dropped: 0,
        };
        for (key, value) in text.lines().filter_map(|line| line.split_once(':')) {
            let value = value.trim().parse().unwrap_or(0);
            match key.trim() {
                "overrun" => loss.overwritten = value,
                "commit overrun" | "dropped events" => {
                    loss.dropped = loss.dropped.saturating_add(value);
                }
                _ => {}
            }
        }
        losses.push(loss);
    }
    losses.sort_unstable_by_key(|loss| loss.processor);
    Ok(losses)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates the files of an instance as the kernel does, with an empty trace.
    fn instance(name: &str) -> Instance {
        let made = tempfile::Builder::new().prefix(name).tempdir().unwrap();
        let path = made.keep();
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
        let stats = "entries: 5\noverrun: 3\ncommit overrun: 1000\ndropped events: 4\n";
        fs::write(path.join("per_cpu/cpu0/stats"), stats).unwrap();
        fs::write(path.join("per_cpu/cpu1/stats"), stats).unwrap();
        Instance { path }
    }

    fn read(path: &Path, file: &str) -> String {
        fs::read_to_string(path.join(file)).unwrap_or_else(|_| "-".to_owned())
    }

    #[test]
    fn recording_enables_and_restores_tracing() {
        let instance = instance("command");
        let path = instance.path.clone();
        let mut command = Command::new("sh");
        // The workload reads the settings that the kernel would trace with.
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
        let text = "# tracer: nop\n1770111CPU:0 [LOST 1004 EVENTS]\nCPU:1 [LOST 1004 EVENTS]\n";
        assert_eq!(recorded.bytes, text.len() as u64);
        assert_eq!(String::from_utf8(out).unwrap(), text);
        assert_eq!((recorded.lost, recorded.iommu_events), (2014, true));
        assert_eq!(recorded.status.and_then(|status| status.code()), Some(3));
        drop(instance);
        assert_eq!(read(&path, "tracing_on"), "0");
        assert_eq!(read(&path, "events/enable"), "0");
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn page_events_are_enabled_and_domains_are_named() {
        let instance = instance("pages");
        let path = instance.path.clone();
        for event in PAGE_EVENTS {
            fs::create_dir_all(path.join("events/kmem").join(event)).unwrap();
        }
        let groups = tempfile::tempdir().unwrap();
        for (group, device, kind) in [("0", "0000:00:04.0", "DMA\n"), ("1", "usb", "DMA-FQ\n")] {
            fs::create_dir_all(groups.path().join(group).join("devices").join(device)).unwrap();
            fs::write(groups.path().join(group).join("type"), kind).unwrap();
        }
        fs::create_dir(groups.path().join("2")).unwrap();
        let recording = Recording {
            pages: Some(PageRecording {
                iommu_groups: groups.path().to_owned(),
            }),
            ..Recording::default()
        };
        let (stop, mut out) = (AtomicBool::new(true), Vec::new());
        let workload = Workload::Time(Duration::ZERO);
        let recorded = recording
            .record(&instance, true, workload, &stop, &mut out)
            .unwrap();
        let text = String::from_utf8(out).unwrap();
        let types = "# iommu_group 0000:00:04.0 DMA\n# iommu_group usb DMA-FQ\n";
        assert!(
            text.starts_with(&format!("{types}# tracer: nop\n")),
            "{text}"
        );
        assert_eq!(recorded.bytes, text.len() as u64);
        for event in PAGE_EVENTS {
            assert_eq!(read(&path, &format!("events/kmem/{event}/enable")), "1");
        }
        drop(instance);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn every_error_and_a_stop_leave_the_switches_off() {
        let stop = AtomicBool::new(true);
        let go = AtomicBool::new(false);
        let long = || Workload::Time(Duration::from_secs(3600));
        let recording = Recording::default();
        // The stop takes effect at once, although the workload lasts an hour.
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
        // A missing switch, a missing command, missing statistics.
        for (name, missing) in [("switch", "options"), ("command", ""), ("stats", "per_cpu")] {
            let broken = instance(&format!("no-{name}"));
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

    #[test]
    fn the_clock_is_the_hosts_where_processors_agree_on_it() {
        let root = tempfile::tempdir().unwrap().keep();
        let recording = Recording {
            tracefs: root.clone(),
            ..Recording::default()
        };
        assert_eq!(recording.clock(), None, "a kernel without the file");
        for (clocks, clock) in [
            ("[local] global counter mono x86-tsc\n", None),
            ("local [global] counter mono x86-tsc\n", Some("global")),
            ("local global counter [mono] x86-tsc\n", Some("mono")),
            // This clock does not count seconds, so the reader could not parse the text.
            ("local global [counter] mono x86-tsc\n", None),
            ("local global counter mono [x86-tsc]\n", None),
            ("[", None),
        ] {
            fs::write(root.join("trace_clock"), clocks).unwrap();
            assert_eq!(recording.clock(), clock, "{clocks}");
        }
        // The recording sets the clock.
        fs::write(root.join("trace_clock"), "local [boot]").unwrap();
        let instance = instance("with-clock");
        let path = instance.path.clone();
        let stop = AtomicBool::new(true);
        let workload = Workload::Time(Duration::ZERO);
        recording
            .record(&instance, true, workload, &stop, &mut Vec::new())
            .unwrap();
        assert_eq!(read(&path, "trace_clock"), "boot");
        drop(instance);
        fs::remove_dir_all(path).unwrap();
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn killed_command_is_not_a_failure() {
        let stopped = AtomicBool::new(true);
        let running = AtomicBool::new(false);
        let end = |script: &str, stop: &AtomicBool| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            let status = Workload::Command(&mut command).wait(stop).unwrap();
            status.map(|status| status.code())
        };
        for (script, alone) in [
            ("exit 0", Some(Some(0))),
            ("exit 3", Some(Some(3))),
            ("kill -TERM $$", Some(None)),
        ] {
            assert_eq!(end(script, &running), alone, "{script}");
        }
        for script in ["exit 3", "kill -TERM $$", "exec sleep 3600"] {
            assert_eq!(end(script, &stopped), None, "{script}");
        }
    }

    #[test]
    fn a_full_output_and_short_memory_are_errors_of_their_own() {
        struct Full(usize);
        impl Write for Full {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0 = self
                    .0
                    .checked_sub(bytes.len())
                    .ok_or(io::ErrorKind::StorageFull)?;
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let stop = AtomicBool::new(true);
        let recording = Recording::default();
        // No room for the header; room for the header, but not for the lost events.
        for room in [0, 20] {
            let instance = instance("full");
            let path = instance.path.clone();
            let workload = Workload::Time(Duration::ZERO);
            let result = recording.record(&instance, true, workload, &stop, &mut Full(room));
            assert!(
                matches!(result, Err(RecordError::Output { .. })),
                "{result:?}"
            );
            drop(instance);
            fs::remove_dir_all(path).unwrap();
        }
        let at = |kind: io::ErrorKind| RecordError::at("buffer_size_kb".as_ref(), kind.into());
        let short = recording.without_memory(at(io::ErrorKind::OutOfMemory));
        assert!(
            matches!(short, RecordError::NoMemory { buffer_kib: 65_536 }),
            "{short:?}"
        );
        let other = recording.without_memory(at(io::ErrorKind::InvalidInput));
        assert!(matches!(other, RecordError::Io { .. }), "{other:?}");
    }
}
