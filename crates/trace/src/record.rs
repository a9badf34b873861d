//! Records a trace on this host through tracefs, and restores tracefs afterwards.
//!
//! A private instance (`instances/NAME`, Documentation/trace/ftrace.rst, "Instances") has its own
//! buffers and switches. The recording therefore does not affect the host's tracing, and removing
//! the instance removes all settings.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::atomic::AtomicBool;

mod buffers;
mod domain_types;
mod error;
mod instance;
mod stale_instances;
mod workload;

pub use error::RecordError;
pub use stale_instances::stale_instances;
pub use workload::Workload;

use buffers::{copy, losses};
use domain_types::domain_types;
use instance::Instance;

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

#[cfg(test)]
mod tests;
