//! Statistics from the lines.

use super::Info;
use super::pages::PageSet;
use crate::summary::Summary;
use crate::text::{RawChunk, RawEvent, RawKind};

/// Statistics from the lines, each line on its own.
#[derive(Debug, Default)]
pub(super) struct LineCounts {
    info: Info,
    dma: PageSet,
    iommu: PageSet,
    first: Option<u64>,
    last: u64,
}

impl LineCounts {
    pub(super) fn add(&mut self, event: &RawEvent, raw: &RawChunk) {
        self.first.get_or_insert(event.time.0);
        self.last = self.last.max(event.time.0);
        let info = &mut self.info;
        match event.kind {
            RawKind::Map { phys, size, .. } => {
                info.map_events += 1;
                self.dma.extend_by(phys.get(), size);
            }
            RawKind::MapSg {
                sizes, phys_addrs, ..
            } => {
                info.map_events += 1;
                let known = sizes.count == phys_addrs.count;
                for (index, &start) in raw.list(phys_addrs).iter().enumerate() {
                    let size = raw.list(sizes).get(index).filter(|_| known);
                    self.dma.extend_by(start, size.copied().unwrap_or(1));
                }
            }
            RawKind::Unmap { .. } | RawKind::UnmapSg { .. } => info.unmap_events += 1,
            RawKind::Alloc { .. } => info.allocs += 1,
            RawKind::Free { .. } => info.frees += 1,
            RawKind::Sync { .. } => info.syncs += 1,
            RawKind::Access { .. } => info.accesses += 1,
            RawKind::IommuMap { phys, size, .. } => {
                info.iommu_map += 1;
                // Identity maps of firmware can be as large as memory; they do not count as page
                // use.
                if size <= crate::text::MAX_BYTES {
                    self.iommu.extend_by(phys.get(), size);
                }
            }
            RawKind::IommuUnmap { .. } => info.iommu_unmap += 1,
            RawKind::Void { .. } | RawKind::Page(_) | RawKind::Mark(_) => {}
        }
    }

    pub(super) fn into_info(mut self, summary: &Summary) -> Info {
        let info = &mut self.info;
        info.duration_ns = self
            .first
            .map_or(0, |first| self.last.saturating_sub(first));
        info.dma_pages = self.dma.counts();
        info.iommu_pages = self.iommu.counts();
        info.lines = summary.lines;
        info.events = summary.events;
        info.unknown = summary.unknown;
        info.malformed = summary.malformed;
        info.lost = summary.lost;
        info.iommu_only_maps = summary.iommu_only_maps;
        info.unmatched_unmaps = summary.unmatched_unmaps;
        info.replaced = summary.replaced;
        info.truncated_lists = summary.truncated_lists;
        info.guessed_lengths = summary.guessed_lengths;
        self.info
    }
}
