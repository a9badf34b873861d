//! Errors of map and unmap requests.

use ringfence_types::IovaRange;
use ringfence_vfio_user::errno;

use super::MAX_RANGES;

/// Error of a map or unmap request, which has changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The range overlaps a mapped range.
    #[error("cannot map {}: it overlaps a mapped range", shown(.range))]
    Overlap {
        /// The requested range.
        range: IovaRange,
    },
    /// The client has mapped [`MAX_RANGES`] ranges already.
    #[error("cannot map {}: the client has mapped {MAX_RANGES} ranges", shown(.range))]
    TooMany {
        /// The requested range.
        range: IovaRange,
    },
    /// The client would have mapped more than 16 TiB.
    #[error("cannot map {}: the client would map more than 16 TiB", shown(.range))]
    TooLong {
        /// The requested range.
        range: IovaRange,
    },
    /// The file is on hugetlbfs.
    #[error("cannot map {}: its file is on hugetlbfs", shown(.range))]
    HugePages {
        /// The requested range.
        range: IovaRange,
    },
    /// The file is not sealed against shrinking and could be truncated.
    #[error("cannot map {}: its file is not sealed against shrinking", shown(.range))]
    Unsealed {
        /// The requested range.
        range: IovaRange,
    },
    /// The file cannot be mapped: it is too short, the offset is not page-aligned, or the host
    /// refuses.
    #[error("cannot map {}: the file is too short, misaligned or unmappable", shown(.range))]
    Unmappable {
        /// The requested range.
        range: IovaRange,
    },
    /// The host cannot lock the range, or the pages in it that devices can access.
    #[error("cannot lock {}: raise the limit of locked memory", shown(.range))]
    Unlockable {
        /// The requested range.
        range: IovaRange,
    },
    /// The unmap request covers only part of a mapped range.
    #[error("cannot unmap {}: it covers only part of a mapped range", shown(.range))]
    Split {
        /// The requested range.
        range: IovaRange,
    },
    /// No mapped range lies within the requested one.
    #[error("cannot unmap {}: it contains no mapped range", shown(.range))]
    Absent {
        /// The requested range.
        range: IovaRange,
    },
}

fn shown(range: &IovaRange) -> String {
    let (start, bytes) = (range.start(), range.bytes());
    format!("{bytes:#x} bytes of guest memory at {start}")
}

impl MemoryError {
    /// Returns the error number of the reply.
    pub fn errno(&self) -> u32 {
        match self {
            Self::Overlap { .. } => errno::EEXIST,
            Self::TooMany { .. } | Self::TooLong { .. } => errno::ENOSPC,
            Self::Unsealed { .. } | Self::HugePages { .. } => errno::EACCES,
            Self::Absent { .. } => errno::ENOENT,
            Self::Unlockable { .. } => errno::ENOMEM,
            Self::Unmappable { .. } | Self::Split { .. } => errno::EINVAL,
        }
    }
}
