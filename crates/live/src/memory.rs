//! The guest's memory as the client shares it: the ranges of `DMA_MAP`, mapped from its files.
//!
//! A client could cut a file off after it was mapped, and the next access would kill the process.
//! So only files that are sealed against shrinking are mapped (`F_SEAL_SHRINK`, which QEMU's
//! `memory-backend-memfd` sets by itself), and none of huge pages: there are so many of these and
//! no more, the client can give any of them back, and who touches one that is not to be had is
//! killed. Ranges without a file, such as ROMs, and ranges that a device may not write are known
//! and not reachable.
//!
//! One file may be excepted ([`MemoryRules`]), so that a host without swap can take pages of a
//! guest back.

pub(crate) mod lock;
mod rules;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ringfence_types::IovaRange;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MmapRegion,
};

use crate::handover::RangeState;
use crate::wire::errno;

pub use rules::{Locked, MemoryRules};

/// Most ranges that one client may map. Announced as `max_dma_maps`.
pub const MAX_RANGES: usize = 1024;
/// Most bytes that one client may map, 16 TiB: of the address space, of which a process has 128
/// TiB, the other devices need some.
const MAX_MAPPED_BYTES: u64 = 1 << 44;
/// The file system of huge pages (`HUGETLBFS_MAGIC`, Linux, include/uapi/linux/magic.h).
const HUGE_PAGES: u64 = 0x9584_58f6;

/// Why a range was not mapped or unmapped. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryError {
    /// It overlaps a range that is mapped.
    Overlap {
        /// The range that was asked for.
        range: IovaRange,
    },
    /// There are [`MAX_RANGES`] already.
    TooMany {
        /// The range that was asked for.
        range: IovaRange,
    },
    /// With it there would be more bytes than one client may map: 16 TiB.
    TooLong {
        /// The range that was asked for.
        range: IovaRange,
    },
    /// Its file is one of huge pages.
    HugePages {
        /// The range that was asked for.
        range: IovaRange,
    },
    /// Its file could be cut off: it is not sealed against shrinking.
    Unsealed {
        /// The range that was asked for.
        range: IovaRange,
    },
    /// The file cannot be mapped there: it is too short, the offset lies on no page, or the host
    /// refuses.
    Unmappable {
        /// The range that was asked for.
        range: IovaRange,
    },
    /// The host cannot keep all of it in memory.
    Unlockable {
        /// The range that was asked for.
        range: IovaRange,
    },
    /// What is to be unmapped would cut a range into pieces.
    Split {
        /// The range that was asked for.
        range: IovaRange,
    },
    /// Nothing is mapped there.
    Absent {
        /// The range that was asked for.
        range: IovaRange,
    },
}

impl MemoryError {
    /// The error number of the reply.
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

impl std::fmt::Display for MemoryError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (range, why) = match self {
            Self::Overlap { range } => (range, "overlaps one that is mapped"),
            Self::TooMany { range } => (range, "is one too many"),
            Self::TooLong { range } => (range, "makes more than one client may map"),
            Self::HugePages { range } => (range, "lies in a file of huge pages, which may run out"),
            Self::Unsealed { range } => (range, "lies in a file that could be cut off"),
            Self::Unmappable { range } => (range, "cannot be mapped from its file"),
            Self::Unlockable { range } => (range, "is more than the host can keep in memory"),
            Self::Split { range } => (range, "covers a part of a mapped range"),
            Self::Absent { range } => (range, "is not mapped"),
        };
        write!(
            f,
            "guest memory of {:#x} bytes at {} {why}",
            range.bytes(),
            range.start()
        )
    }
}

impl std::error::Error for MemoryError {}

/// Where a range's bytes are, and what a device may do there.
#[derive(Debug)]
pub struct RangeSource {
    /// The file, if the client shares one.
    pub file: Option<OwnedFd>,
    /// Offset of the range in it.
    pub offset: u64,
    /// Whether the range may be read and written; otherwise it is not mapped here.
    pub accessible: bool,
}

/// The ranges of one client.
#[derive(Debug, Default)]
pub struct GuestRam {
    rules: MemoryRules,
    ranges: Vec<(IovaRange, Reachability)>,
    memory: GuestMemoryMmap,
}

/// Whether bytes of a range can be reached from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reachability {
    Mapped,
    Unreachable,
}

impl GuestRam {
    /// No range yet, and each as `rules` say.
    pub fn new(rules: MemoryRules) -> Self {
        Self {
            rules,
            ..Self::default()
        }
    }

    /// What is mapped, as of now: later changes are not seen through it.
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Ranges, reachable or not.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Whether there is no range.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Maps `range`.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing has changed.
    pub fn map(&mut self, range: IovaRange, source: RangeSource) -> Result<(), MemoryError> {
        if self.ranges.len() >= MAX_RANGES {
            return Err(MemoryError::TooMany { range });
        }
        if self.ranges.iter().any(|(other, _)| other.overlaps(&range)) {
            return Err(MemoryError::Overlap { range });
        }
        let reach = match source.file {
            Some(file) if source.accessible => {
                self.memory = self.with_mapped(range, file, source.offset)?;
                Reachability::Mapped
            }
            _ => Reachability::Unreachable,
        };
        self.ranges.push((range, reach));
        Ok(())
    }

    /// What another process needs to map the same.
    ///
    /// # Errors
    /// If the host has no descriptors left.
    pub(crate) fn save(&self) -> io::Result<Vec<RangeState>> {
        let ranges = self.ranges.iter().map(|(range, reach)| {
            let start = GuestAddress(range.start().get());
            let file = self.memory.find_region(start);
            let file = file.and_then(|region| region.file_offset());
            // Known and out of reach: there is no file, or none of its own.
            let file = file.filter(|_| *reach == Reachability::Mapped);
            Ok(RangeState {
                range: *range,
                offset: file.map_or(0, FileOffset::start),
                file: file
                    .map(|file| file.file().as_fd().try_clone_to_owned())
                    .transpose()?,
            })
        });
        ranges.collect()
    }

    /// Maps what another process had mapped, under the conditions of this one: what it locks is
    /// locked when this returns.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub(crate) fn restore(
        rules: MemoryRules,
        ranges: Vec<RangeState>,
    ) -> Result<Self, MemoryError> {
        let mut ram = Self::new(rules);
        for RangeState {
            range,
            offset,
            file,
        } in ranges
        {
            let source = RangeSource {
                file,
                offset,
                accessible: true,
            };
            ram.map(range, source)?;
        }
        Ok(ram)
    }

    fn with_mapped(
        &self,
        range: IovaRange,
        file: OwnedFd,
        offset: u64,
    ) -> Result<GuestMemoryMmap, MemoryError> {
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if !sealed && !self.rules.takes(&file) {
            return Err(MemoryError::Unsealed { range });
        }
        let unmappable = MemoryError::Unmappable { range };
        let kind = fstatfs(&file).map_err(|_| unmappable)?.f_type;
        if u64::try_from(kind) == Ok(HUGE_PAGES) {
            return Err(MemoryError::HugePages { range });
        }
        // Mapping past the end of a file succeeds; touching it there kills the process. The seal,
        // or whoever vouched for the file, keeps the size from shrinking below.
        let size = fstat(&file).map_err(|_| unmappable)?.st_size;
        let size = u64::try_from(size).unwrap_or(0);
        if offset
            .checked_add(range.bytes())
            .is_none_or(|end| end > size)
        {
            return Err(unmappable);
        }
        let mapped = self
            .ranges
            .iter()
            .filter(|(_, reach)| *reach == Reachability::Mapped);
        let mapped = mapped.map(|(other, _)| other.bytes());
        if mapped.fold(range.bytes(), u64::saturating_add) > MAX_MAPPED_BYTES {
            return Err(MemoryError::TooLong { range });
        }
        let bytes = usize::try_from(range.bytes()).map_err(|_| unmappable)?;
        let file = FileOffset::new(File::from(file), offset);
        let mapping = MmapRegion::from_file(file, bytes).map_err(|_| unmappable)?;
        let start = GuestAddress(range.start().get());
        let region = GuestRegionMmap::new(mapping, start).ok_or(unmappable)?;
        let memory = self.memory.insert_region(Arc::new(region));
        let memory = memory.map_err(|_| unmappable)?;
        if self.rules.locked == Locked::All {
            let locked = lock::lock(&memory, start.0, range.bytes());
            locked.map_err(|_| MemoryError::Unlockable { range })?;
        }
        Ok(memory)
    }

    /// Unmaps all ranges within `range`; without one, all.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing has changed.
    pub fn unmap(&mut self, range: Option<IovaRange>) -> Result<(), MemoryError> {
        let Some(range) = range else {
            *self = Self::new(std::mem::take(&mut self.rules));
            return Ok(());
        };
        let touched = |other: &IovaRange| range.overlaps(other);
        if self
            .ranges
            .iter()
            .any(|(other, _)| touched(other) && !range.contains(other))
        {
            return Err(MemoryError::Split { range });
        }
        let mut memory = self.memory.clone();
        let mut found = false;
        for (other, reach) in &self.ranges {
            if !touched(other) {
                continue;
            }
            found = true;
            if *reach == Reachability::Mapped {
                let start = GuestAddress(other.start().get());
                memory = memory
                    .remove_region(start, other.bytes())
                    .map_err(|_| MemoryError::Absent { range: *other })?
                    .0;
            }
        }
        if !found {
            return Err(MemoryError::Absent { range });
        }
        self.memory = memory;
        self.ranges.retain(|(other, _)| !touched(other));
        Ok(())
    }
}
