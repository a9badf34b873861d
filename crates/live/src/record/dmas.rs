//! Trace of the devices' DMAs, and of the maps and unmaps that the guest's IOMMU applied.
//!
//! The lines have the format of tracefs (`docs/TRACES.md`). A map or unmap has the line of
//! `dma_map_phys` or `dma_unmap_phys`, one for each endpoint. A DMA has the line `dma_access`,
//! which the kernel does not print.
//!
//! Order: the IOMMU records a map before devices can use it, and an unmap after the last access
//! that used the mapping. A device records an access while the IOMMU waits for it. Threads share
//! the file under one lock, which they hold for no other wait than that of the file.

use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use ringfence_types::{Iova, Permissions, RequesterId};
use ringfence_virtio_iommu::Mapping;
use rustix::time::{ClockId, clock_gettime};

use super::file::{RecordFile, RecordMarks, RecordState};
use crate::saved_state::StateError;

const MARKS: RecordMarks = RecordMarks {
    full: "# full",
    end: "# end",
    // The kernel's line for events that a full buffer rejected.
    lost: |count| format!("CPU:0 [LOST {count} EVENTS]"),
};

/// First line of the file.
const HEADER: &str = "# tracer: ringfence";

/// Largest mapping of a trace. A larger one, which the default `--max-tables` refuses, has no line.
const MAX_BYTES: u64 = 1 << 36;

/// The record of all threads, which is off until [`start`](Self::start).
#[derive(Debug, Default)]
pub(crate) struct DmaRecord(OnceLock<Mutex<RecordFile>>);

impl DmaRecord {
    /// Creates a file at `path` for at most `most` bytes.
    ///
    /// # Errors
    /// The file cannot be created.
    pub(crate) fn create(path: &Path, most: u64) -> io::Result<RecordFile> {
        let mut file = RecordFile::create(path, most, MARKS)?;
        file.add(|| HEADER.to_owned());
        Ok(file)
    }

    /// Continues another process's record, up to `most` bytes. Writes nothing.
    ///
    /// # Errors
    /// The file is not writable, or the pending lines are invalid.
    pub(crate) fn restore(state: RecordState, most: u64) -> Result<RecordFile, StateError> {
        RecordFile::restore(state, most, MARKS)
    }

    /// Starts to record. A second call has no effect.
    pub(crate) fn start(&self, file: RecordFile) {
        let _ = self.0.set(Mutex::new(file));
    }

    /// Returns the record if it has started.
    fn file(&self) -> Option<MutexGuard<'_, RecordFile>> {
        let file = self.0.get()?.lock();
        Some(file.unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds a line. The time is taken under the lock, so times do not decrease.
    fn add(&self, line: impl FnOnce() -> String) {
        if let Some(mut file) = self.file() {
            file.add(|| format!("{}{}", prefix(), line()));
        }
    }

    /// Returns true if DMAs are recorded.
    pub(crate) fn is_on(&self) -> bool {
        self.0.get().is_some()
    }

    /// Records an access of `bytes` bytes from `iova`.
    pub(crate) fn access(&self, device: RequesterId, kind: Permissions, iova: Iova, bytes: u64) {
        let (direction, iova) = (direction(kind), iova.get());
        self.add(|| {
            format!("dma_access: 0000:{device} dir={direction} dma_addr={iova:x} size={bytes}")
        });
    }

    /// Records that `mapping` is about to begin for an endpoint.
    pub(crate) fn map(&self, device: RequesterId, mapping: &Mapping) {
        if let Some((direction, bytes)) = printable(mapping) {
            self.add(|| {
                format!(
                    "dma_map_phys: 0000:{device} dir={direction} dma_addr={:x} size={bytes} \
                    phys_addr={:x} attrs=",
                    mapping.iova.start().get(),
                    mapping.physical.get()
                )
            });
        }
    }

    /// Records that `mapping` has ended for an endpoint.
    pub(crate) fn unmap(&self, device: RequesterId, mapping: &Mapping) {
        if let Some((direction, bytes)) = printable(mapping) {
            self.add(|| {
                format!(
                    "dma_unmap_phys: 0000:{device} dir={direction} dma_addr={:x} size={bytes} \
                    attrs=",
                    mapping.iova.start().get()
                )
            });
        }
    }

    /// Ends the record: nothing follows, in this process or in another.
    pub(crate) fn end(&self) {
        if let Some(mut file) = self.file() {
            file.end();
        }
    }

    /// Returns the state that another process needs to continue the record. Writes nothing.
    pub(crate) fn save(&self) -> io::Result<Option<RecordState>> {
        self.file().map(|file| file.save()).transpose()
    }
}

/// Formats task, CPU, flags and time. The host does not know the guest's task or CPU.
fn prefix() -> String {
    let now = clock_gettime(ClockId::Monotonic);
    let micros = now.tv_nsec / 1000;
    format!("ringfence-0 [000] ..... {}.{micros:06}: ", now.tv_sec)
}

/// Returns the direction and the size of a mapping. `None` if no trace can have it.
fn printable(mapping: &Mapping) -> Option<(&'static str, u64)> {
    let bytes = mapping.iova.bytes();
    (bytes <= MAX_BYTES).then(|| (direction(mapping.permissions), bytes))
}

/// Returns the direction of a mapping or an access, as the kernel prints it.
fn direction(permissions: Permissions) -> &'static str {
    let read = permissions.contains(Permissions::READ);
    match (read, permissions.contains(Permissions::WRITE)) {
        (true, true) => "BIDIRECTIONAL",
        (true, false) => "TO_DEVICE",
        (false, _) => "FROM_DEVICE",
    }
}
