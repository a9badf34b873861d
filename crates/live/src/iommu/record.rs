//! Text record of the guest IOMMU driver's requests: one request per line, in the order in which
//! the device took them.
//!
//! The guest controls the number of requests, so the file has a size limit. At the limit the
//! recorder writes the line `full`. The last line then counts the missing requests, as in `lost
//! 17`.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use ringfence_vfio_user::fields::{u32_at, u64_at};
use ringfence_virtio_iommu::spec;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};

use crate::saved_state::{Reader, SaveState, StateError, Writer};

/// Pending bytes at which the recorder writes them to the file.
pub const PENDING_BYTES: usize = 8192;

/// A record file. Its last line is `end` if it contains all requests.
#[derive(Debug)]
pub struct Recorder {
    file: File,
    pending: Vec<u8>,
    whole: bool,
    /// Limit for the bytes of requests in the file.
    max_bytes: u64,
    /// Bytes of requests written or pending.
    bytes: u64,
    /// Number of requests that the file lacks.
    lost: u64,
}

impl Recorder {
    /// Creates a file at `path` for at most `most` bytes of requests.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(path: &Path, most: u64) -> io::Result<Self> {
        Ok(Self {
            file: File::create(path)?,
            pending: Vec::new(),
            whole: true,
            max_bytes: most,
            bytes: 0,
            lost: 0,
        })
    }

    /// Adds `request`; `done` is false if the request was refused.
    pub fn add(&mut self, request: &[u8], done: bool) {
        if !self.whole {
            self.lost = self.lost.saturating_add(1);
            return;
        }
        let line = line(request, done);
        let bytes = self.bytes.saturating_add(line.len() as u64 + 1);
        if bytes > self.max_bytes {
            self.put("full");
            self.write();
            self.whole = false;
            self.lost = 1;
            return;
        }
        self.bytes = bytes;
        self.put(&line);
        if self.pending.len() >= PENDING_BYTES {
            self.write();
        }
    }

    /// Ends the record: no request follows, in this process or in another. A file without an end
    /// line is incomplete.
    pub fn end(&mut self) {
        if self.whole {
            self.put("end");
            self.write();
            self.whole = false;
        } else if self.lost > 0 {
            self.put(&format!("lost {}", self.lost));
            self.write();
            self.whole = false;
            self.lost = 0;
        }
    }

    fn put(&mut self, line: &str) {
        self.pending.extend(line.as_bytes());
        self.pending.push(b'\n');
    }

    fn write(&mut self) {
        self.whole = self.file.write_all(&self.pending).is_ok();
        self.pending.clear();
    }

    /// Returns the state that another process needs to continue the record. Writes nothing.
    pub(crate) fn save(&self) -> io::Result<RecordState> {
        Ok(RecordState {
            file: self.file.try_clone()?.into(),
            whole: self.whole,
            pending: self.pending.clone(),
            lost: self.lost,
        })
    }

    /// Continues another process's record, up to `most` bytes. Writes nothing.
    ///
    /// # Errors
    /// The file is not writable, or the pending lines are invalid.
    pub(crate) fn restore(state: RecordState, most: u64) -> Result<Self, StateError> {
        let RecordState {
            file,
            whole,
            pending,
            lost,
        } = state;
        let about = fstat(&file).map_err(io::Error::from)?;
        let kind = FileType::from_raw_mode(about.st_mode);
        let flags = fcntl_getfl(&file).map_err(io::Error::from)?;
        let writable = flags.intersects(OFlags::WRONLY | OFlags::RDWR);
        let is_file = matches!(
            kind,
            FileType::RegularFile | FileType::Fifo | FileType::CharacterDevice
        );
        if !is_file || !writable {
            return Err(StateError::NotA { what: "record" });
        }
        let whole_lines = pending.last().is_none_or(|last| *last == b'\n');
        let possible = whole || pending.is_empty();
        if pending.len() >= PENDING_BYTES || !whole_lines || !pending.is_ascii() || !possible {
            return Err(StateError::Register {
                what: "record line count",
            });
        }
        // Files other than regular ones have no size.
        let written = u64::try_from(about.st_size).unwrap_or(0);
        let bytes = written.saturating_add(pending.len() as u64);
        Ok(Self {
            file: file.into(),
            pending,
            whole,
            max_bytes: most,
            bytes,
            lost,
        })
    }
}

/// A record that another process continues.
#[derive(Debug)]
pub struct RecordState {
    /// The record file. Its duplicated descriptors share the file offset.
    pub file: OwnedFd,
    /// True if every request so far is in the file or pending. Otherwise no further request is
    /// recorded.
    pub whole: bool,
    /// Lines that are not written yet.
    pub pending: Vec<u8>,
    /// Number of requests that are not recorded; 0 if `whole` is set.
    pub lost: u64,
}

impl SaveState for RecordState {
    fn encode(self, out: &mut Writer) {
        out.fd(self.file);
        out.flag(self.whole);
        out.blob(&self.pending);
        if !self.whole {
            out.u64(self.lost);
        }
    }

    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        let (file, whole) = (input.fd()?, input.flag()?);
        Ok(Self {
            file,
            whole,
            pending: input.blob("record length", PENDING_BYTES)?,
            lost: if whole { 0 } else { input.u64()? },
        })
    }
}

/// Formats the request's name, its fields (virtio 1.3, section 5.13.6), and its result.
fn line(request: &[u8], done: bool) -> String {
    let end = if done { "ok" } else { "refused" };
    let word = |at| u32_at(request, at).unwrap_or(0);
    let long = |at| u64_at(request, at).unwrap_or(0);
    let (domain, start, last) = (word(4), long(8), long(16));
    match request.first() {
        Some(&spec::VIRTIO_IOMMU_T_ATTACH) => {
            format!("attach domain={domain} endpoint={} {end}", word(8))
        }
        Some(&spec::VIRTIO_IOMMU_T_DETACH) => {
            format!("detach domain={domain} endpoint={} {end}", word(8))
        }
        Some(&spec::VIRTIO_IOMMU_T_MAP) => format!(
            "map domain={domain} start={start:#x} last={last:#x} physical={:#x} flags={} {end}",
            long(24),
            word(32)
        ),
        Some(&spec::VIRTIO_IOMMU_T_UNMAP) => {
            format!("unmap domain={domain} start={start:#x} last={last:#x} {end}")
        }
        Some(&spec::VIRTIO_IOMMU_T_PROBE) => format!("probe endpoint={domain} {end}"),
        _ => format!("other bytes={} {end}", request.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_record_counts_the_dropped_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("requests");
        let detach = [
            spec::VIRTIO_IOMMU_T_DETACH,
            0,
            0,
            0,
            1,
            0,
            0,
            0,
            32,
            0,
            0,
            0,
        ];
        let one = format!("{}\n", line(&detach, true));
        let of = |count: u64, most: u64| {
            let mut recorder = Recorder::create(&path, most).unwrap();
            (0..count).for_each(|_| recorder.add(&detach, true));
            recorder.end();
            let text = std::fs::read_to_string(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            text
        };
        let bytes = one.len() as u64;
        assert_eq!(of(3, 3 * bytes), format!("{}end\n", one.repeat(3)));
        assert_eq!(of(4, 3 * bytes), format!("{}full\nlost 1\n", one.repeat(3)));
        assert_eq!(
            of(5000, 2 * bytes),
            format!("{}full\nlost 4998\n", one.repeat(2))
        );
        assert_eq!(of(2, 0), "full\nlost 2\n");
    }

    #[test]
    fn requests_read_as_the_driver_meant_them() {
        let mut map = vec![spec::VIRTIO_IOMMU_T_MAP, 0, 0, 0];
        map.extend(7u32.to_le_bytes());
        for long in [0xffff_f000u64, 0xffff_ffff, 0x1234_5000] {
            map.extend(long.to_le_bytes());
        }
        map.extend(3u32.to_le_bytes());
        assert_eq!(
            line(&map, true),
            "map domain=7 start=0xfffff000 last=0xffffffff physical=0x12345000 flags=3 ok"
        );
        let mut unmap = map.clone();
        unmap[0] = spec::VIRTIO_IOMMU_T_UNMAP;
        assert_eq!(
            line(&unmap, false),
            "unmap domain=7 start=0xfffff000 last=0xffffffff refused"
        );
        assert_eq!(line(&[], false), "other bytes=0 refused");
    }
}
