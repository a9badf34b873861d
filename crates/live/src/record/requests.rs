//! Text record of the guest IOMMU driver's requests: one request per line, in the order in which
//! the device took them.
//!
//! The guest controls the number of requests, so the file has a size limit. At the limit the
//! recorder writes the line `full`. The last line then counts the missing requests, as in `lost
//! 17`.

use std::io;
use std::path::Path;

use ringfence_vfio_user::fields::{u32_at, u64_at};
use ringfence_virtio_iommu::spec;

use super::file::{RecordFile, RecordMarks, RecordState};
use crate::saved_state::StateError;

const MARKS: RecordMarks = RecordMarks {
    full: "full",
    end: "end",
    lost: |count| format!("lost {count}"),
};

/// A record file. Its last line is `end` if it contains all requests.
#[derive(Debug)]
pub struct Recorder(RecordFile);

impl Recorder {
    /// Creates a file at `path` for at most `most` bytes of requests.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(path: &Path, most: u64) -> io::Result<Self> {
        RecordFile::create(path, most, MARKS).map(Self)
    }

    /// Adds `request`; `done` is false if the request was refused.
    pub fn add(&mut self, request: &[u8], done: bool) {
        self.0.add(|| line(request, done));
    }

    /// Ends the record: no request follows, in this process or in another. A file without an end
    /// line is incomplete.
    pub fn end(&mut self) {
        self.0.end();
    }

    /// Returns the state that another process needs to continue the record. Writes nothing.
    pub(crate) fn save(&self) -> io::Result<RecordState> {
        self.0.save()
    }

    /// Continues another process's record, up to `most` bytes. Writes nothing.
    ///
    /// # Errors
    /// The file is not writable, or the pending lines are invalid.
    pub(crate) fn restore(state: RecordState, most: u64) -> Result<Self, StateError> {
        RecordFile::restore(state, most, MARKS).map(Self)
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
