//! What the guest's IOMMU driver asked for, written down as text: one request a line, in the order in which the device took them.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use ringfence_virtio_iommu::spec;

use crate::wire::fields::{u32_at, u64_at};

/// A file that fills with requests. Its last line is `end` if all of them are in it.
#[derive(Debug)]
pub struct Recorder {
    out: BufWriter<File>,
    whole: bool,
}

impl Recorder {
    /// Begins a file at `path`.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn create(path: &Path) -> io::Result<Self> {
        let out = BufWriter::new(File::create(path)?);
        Ok(Self { out, whole: true })
    }

    /// Adds `request`, which was carried out or refused.
    pub fn add(&mut self, request: &[u8], done: bool) {
        if self.whole {
            let line = line(request, done);
            self.whole = writeln!(self.out, "{line}").is_ok();
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if self.whole {
            // A file without its end says that it has none.
            let _ = writeln!(self.out, "end").and_then(|()| self.out.flush());
        }
    }
}

/// The request's name, its numbers (virtio 1.3, section 5.13.6) and whether it was carried out.
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
