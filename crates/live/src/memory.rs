//! Guest memory that the client shares: the ranges of `DMA_MAP`, mapped from the client's files.
//!
//! A client could truncate a file after it was mapped; the next access would then kill this
//! process. Only files sealed against shrinking are therefore mapped (`F_SEAL_SHRINK`, which QEMU's
//! `memory-backend-memfd` sets by default).
//!
//! Files of huge pages are refused. Their pages are a fixed pool, and the client can release any of
//! them. An access to a page that cannot be allocated then kills the process. Ranges without a
//! file, such as ROMs, and ranges that a device may not write are recorded but inaccessible.
//!
//! [`MemoryRules`] may exempt one file, so that a host without swap can reclaim a guest's pages.

mod error;
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

pub use error::MemoryError;
pub use rules::{Locked, MemoryRules};

/// Most ranges that one client may map. Announced as `max_dma_maps`.
pub const MAX_RANGES: usize = 1024;
/// Most bytes that one client may map, 16 TiB. A process has 128 TiB of address space, and the
/// other devices need part of it.
const MAX_MAPPED_BYTES: u64 = 1 << 44;
/// Magic number of hugetlbfs (`HUGETLBFS_MAGIC`, Linux, include/uapi/linux/magic.h).
const HUGE_PAGES: u64 = 0x9584_58f6;

/// A range of guest memory.
#[derive(Debug)]
pub struct RangeState {
    /// Range in the device's view: guest-physical if QEMU emulates no IOMMU.
    pub range: IovaRange,
    /// Offset in the file.
    pub offset: u64,
    /// Backing file; `None` if the range is inaccessible.
    pub file: Option<OwnedFd>,
}

/// Backing of a range and its permission.
#[derive(Debug)]
pub struct RangeSource {
    /// The file; `None` if the client shares none.
    pub file: Option<OwnedFd>,
    /// Offset of the range in the file.
    pub offset: u64,
    /// True if a device may read and write the range. Other ranges are not mapped in this process.
    pub accessible: bool,
}

/// The guest memory that one client shares.
#[derive(Debug, Default)]
pub struct GuestRam {
    rules: MemoryRules,
    ranges: Vec<(IovaRange, RangeMapping)>,
    memory: GuestMemoryMmap,
}

/// State of the mapping of a range in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RangeMapping {
    Mapped,
    Inaccessible,
    /// The client asked for the unmap, but a device process may still have pages.
    Unmapping,
    /// The unmap of a refused request has completed. Only a repeated request finds the range.
    Unmapped,
}

impl GuestRam {
    /// Creates an empty set of ranges under `rules`.
    pub fn new(rules: MemoryRules) -> Self {
        Self {
            rules,
            ..Self::default()
        }
    }

    /// Returns a snapshot of the mapped memory; later changes do not affect it.
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Returns the number of ranges, including inaccessible ones.
    pub fn len(&self) -> usize {
        self.live().count()
    }

    /// Returns true if the client has mapped no range.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the ranges that the client has mapped.
    fn live(&self) -> impl Iterator<Item = &(IovaRange, RangeMapping)> {
        let ranges = self.ranges.iter();
        ranges.filter(|(_, mapping)| *mapping != RangeMapping::Unmapped)
    }

    /// Maps `range`.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing has changed.
    pub fn map(&mut self, range: IovaRange, source: RangeSource) -> Result<(), MemoryError> {
        self.map_with(range, source, |_| Ok(()))
    }

    /// Like [`map`](Self::map), but fails if `lock` fails for the new snapshot.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing has changed.
    pub(crate) fn map_with(
        &mut self,
        range: IovaRange,
        source: RangeSource,
        lock: impl FnOnce(&GuestMemoryMmap) -> io::Result<()>,
    ) -> Result<(), MemoryError> {
        if self.len() >= MAX_RANGES {
            return Err(MemoryError::TooMany { range });
        }
        if self.live().any(|(other, _)| other.overlaps(&range)) {
            return Err(MemoryError::Overlap { range });
        }
        let mapping = match source.file {
            Some(file) if source.accessible => {
                let memory = self.with_mapped(range, file, source.offset)?;
                lock(&memory).map_err(|_| MemoryError::Unlockable { range })?;
                self.memory = memory;
                RangeMapping::Mapped
            }
            _ => RangeMapping::Inaccessible,
        };
        // This map supersedes the completed unmaps of ranges that it overlaps.
        let full = self.ranges.len() >= MAX_RANGES;
        self.ranges.retain(|(other, mapping)| {
            *mapping != RangeMapping::Unmapped || !(full || other.overlaps(&range))
        });
        self.ranges.push((range, mapping));
        Ok(())
    }

    /// Returns the state with which another process can map the same ranges.
    ///
    /// # Errors
    /// The host has no free descriptors.
    pub(crate) fn save(&self) -> io::Result<Vec<RangeState>> {
        let ranges = self.live().map(|(range, mapping)| {
            let start = GuestAddress(range.start().get());
            let file = self.memory.find_region(start);
            let file = file.and_then(|region| region.file_offset());
            // No file backs an inaccessible range.
            let file = file.filter(|_| *mapping == RangeMapping::Mapped);
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

    /// Maps the ranges of another process under the rules of this one. Ranges that the rules lock
    /// are locked on return.
    ///
    /// # Errors
    /// [`MemoryError`] of the first range that fails.
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
        // Mapping beyond the end of a file succeeds, but an access there kills the process. The
        // seal, or the exemption by the rules, keeps the file from shrinking below this size.
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
            .filter(|(_, mapping)| *mapping == RangeMapping::Mapped);
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

    /// Unmaps all ranges within `range`; `None` unmaps all ranges.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing has changed.
    pub fn unmap(&mut self, range: Option<IovaRange>) -> Result<(), MemoryError> {
        self.begin_unmap(range)?;
        self.end_unmap(range);
        Ok(())
    }

    /// Removes the ranges within `range` from the snapshot. They stay reserved until
    /// [`end_unmap`](Self::end_unmap) or [`complete_unmaps`](Self::complete_unmaps), so that the
    /// client can repeat a refused request and can map nothing else there.
    ///
    /// # Errors
    /// As for [`unmap`](Self::unmap).
    pub(crate) fn begin_unmap(&mut self, range: Option<IovaRange>) -> Result<(), MemoryError> {
        self.memory = match range {
            None => GuestMemoryMmap::default(),
            Some(range) => self.without(range)?,
        };
        let unmapped = self
            .ranges
            .iter_mut()
            .filter(|(other, mapping)| is_in(other, range) && *mapping != RangeMapping::Unmapped);
        unmapped.for_each(|(_, mapping)| *mapping = RangeMapping::Unmapping);
        Ok(())
    }

    /// Returns the first range whose unmap has begun and not ended.
    pub(crate) fn unmapping(&self) -> Option<IovaRange> {
        let mut ranges = self.ranges.iter();
        ranges
            .find(|(_, mapping)| *mapping == RangeMapping::Unmapping)
            .map(|(range, _)| *range)
    }

    /// Completes all unmaps that have begun, when no device can access these ranges. The client can
    /// map them again. A repeated unmap still succeeds.
    pub(crate) fn complete_unmaps(&mut self) {
        for (_, mapping) in &mut self.ranges {
            if *mapping == RangeMapping::Unmapping {
                *mapping = RangeMapping::Unmapped;
            }
        }
    }

    /// Forgets the ranges within `range` when no device can access them.
    pub(crate) fn end_unmap(&mut self, range: Option<IovaRange>) {
        self.ranges.retain(|(other, _)| !is_in(other, range));
    }

    /// Returns the snapshot without the ranges in `range`.
    fn without(&self, range: IovaRange) -> Result<GuestMemoryMmap, MemoryError> {
        let touched = |other: &IovaRange| range.overlaps(other);
        if self
            .live()
            .any(|(other, _)| touched(other) && !range.contains(other))
        {
            return Err(MemoryError::Split { range });
        }
        let mut memory = self.memory.clone();
        let mut found = false;
        for (other, mapping) in &self.ranges {
            if !range.contains(other) {
                continue;
            }
            found = true;
            if *mapping == RangeMapping::Mapped {
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
        Ok(memory)
    }
}

/// Returns true if `other` lies within `range`; `None` stands for all memory.
fn is_in(other: &IovaRange, range: Option<IovaRange>) -> bool {
    range.is_none_or(|range| range.contains(other))
}
