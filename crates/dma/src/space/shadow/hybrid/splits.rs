//! The split mappings of a [`HybridSpace`](super::HybridSpace), by address.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use ringfence_types::{Iova, IovaRange, Pfn, PfnRange};

use crate::error::UnmapRefusal;
use crate::space::GRANULE;
use crate::space::shadow::page::SlotKind;

/// A part of a page that the device reaches as a copy. The slot's page has the record of the copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// First page of the slot.
    pub(super) slot: u32,
    pub(super) kind: SlotKind,
    /// Pages of the mapping before this one.
    pub(super) page: u64,
    /// Bytes of the buffer before this part.
    pub(super) before: u64,
}

impl Part {
    /// Returns the address of byte `offset` of the part's page, in a mapping that begins on the
    /// page of `start`.
    #[inline]
    pub(super) fn iova(&self, start: Iova, offset: u64) -> Iova {
        start
            .align_down(GRANULE.bytes())
            .wrapping_add(self.page << GRANULE.shift())
            .wrapping_add(offset)
    }
}

/// The parts of a mapping. A single buffer has at most two.
#[derive(Debug, Clone, Default)]
pub(super) struct Parts {
    few: [Option<Part>; 2],
    more: Vec<Part>,
}

impl Parts {
    #[inline]
    pub(super) fn push(&mut self, part: Part) {
        match self.few.iter_mut().find(|entry| entry.is_none()) {
            Some(entry) => *entry = Some(part),
            None => self.more.push(part),
        }
    }

    #[inline]
    pub(super) fn iter(&self) -> impl Iterator<Item = &Part> {
        self.few.iter().flatten().chain(&self.more)
    }
}

#[derive(Debug)]
struct Split {
    range: IovaRange,
    parts: Parts,
    /// False from the unmap to the end of its invalidation.
    is_live: bool,
}

/// The split mappings of a space: live ones, and those whose invalidation is outstanding.
///
/// # Bounds
/// One entry for each mapping, and 24 bytes for each copied part above two.
#[derive(Debug, Default)]
pub struct SplitTable {
    /// Mappings by their first page. Their pages do not overlap.
    by_page: BTreeMap<Pfn, Split>,
    /// Number of live mappings.
    live: usize,
}

impl SplitTable {
    /// Adds a live mapping.
    pub(super) fn insert(&mut self, range: IovaRange, parts: Parts) {
        let split = Split {
            range,
            parts,
            is_live: true,
        };
        self.by_page.insert(Pfn::containing(range.start()), split);
        self.live = self.live.saturating_add(1);
    }

    /// Returns the number of live mappings.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    /// Returns the parts of the live mapping with exactly this range.
    pub(super) fn parts(&self, range: IovaRange) -> Option<Parts> {
        let split = self.by_page.get(&Pfn::containing(range.start()))?;
        (split.is_live && split.range == range).then(|| split.parts.clone())
    }

    /// Begins the unmap of a mapping and returns its parts. `None` if no split mapping has a page
    /// of `range`.
    ///
    /// # Errors
    /// The range has pages of a split mapping, and is not that of a live one.
    pub(super) fn begin_unmap(&mut self, range: IovaRange) -> Result<Option<Parts>, UnmapRefusal> {
        let pages = PfnRange::covering(&range);
        // Mappings do not overlap: of those that begin before the end of the range, only the last
        // can reach into it.
        let Some((_, split)) = self.by_page.range_mut(..=pages.hi()).next_back() else {
            return Ok(None);
        };
        if !PfnRange::covering(&split.range).overlaps(&pages) {
            return Ok(None);
        }
        if !split.is_live || split.range != range {
            return Err(UnmapRefusal::NotAllocated);
        }
        split.is_live = false;
        self.live = self.live.saturating_sub(1);
        Ok(Some(split.parts.clone()))
    }

    /// Makes a split live again, after [`begin_unmap`](Self::begin_unmap).
    #[cold]
    pub(super) fn undo_unmap(&mut self, range: IovaRange) {
        if let Some(split) = self.by_page.get_mut(&Pfn::containing(range.start())) {
            split.is_live = true;
            self.live = self.live.saturating_add(1);
        }
    }

    /// Removes the unmapped mapping that began at `page`, and returns its parts.
    pub(super) fn remove(&mut self, page: Pfn) -> Option<Parts> {
        if self.by_page.get(&page)?.is_live {
            return None;
        }
        Some(self.by_page.remove(&page)?.parts)
    }
}
