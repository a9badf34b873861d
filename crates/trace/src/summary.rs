//! Counts over the conversion of a trace's lines to operations, including skipped and corrected
//! lines.

use serde::{Deserialize, Serialize};

use crate::op::DeviceIndex;

/// Counts over a trace, complete once [`Operations`](crate::Operations) has ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Lines read, including comments and blank lines.
    pub lines: u64,
    /// Events of every kind, unknown ones included.
    pub events: u64,
    /// Events that are not about DMA mappings; skipped.
    pub unknown: u64,
    /// Malformed lines skipped; 0 unless the read is lenient.
    pub malformed: u64,
    /// Events that the kernel reports as lost: `LOST` lines, plus the excess of entries written
    /// over entries held in the tracefs header. If not 0, map and unmap pairs are broken, and no
    /// result about safety is valid.
    pub lost: u64,
    /// `dma_sync_*` events: counted, no operation.
    pub syncs: u64,
    /// `*_err` events: the kernel refused the map or allocation; no operation.
    pub failed_maps: u64,
    /// `dma:*` map and alloc events that became an operation.
    pub maps: u64,
    /// `dma:*` unmap and free events that became an operation.
    pub unmaps: u64,
    /// Unmaps (of `dma:*` events) of mappings that the trace does not show: no operation.
    pub unmatched_unmaps: u64,
    /// `dma_free` events of allocations that the trace does not show: no operation.
    pub unmatched_frees: u64,
    /// Mappings created by `iommu:*` lines alone.
    pub iommu_only_maps: u64,
    /// `iommu:map` lines of those mappings.
    pub iommu_only_pieces: u64,
    /// `iommu:unmap` lines that no mapping explains.
    pub unmatched_iommu_unmaps: u64,
    /// Mappings created by `iommu:*` lines alone that an `iommu:unmap` line removed.
    pub iommu_only_unmaps: u64,
    /// Remainders of mappings created by `iommu:*` lines alone, after an unmap of a part; each
    /// remainder is a new mapping.
    pub remainders: u64,
    /// `iommu:map` lines that no driver's map explains: they precede the first event of the first
    /// device, or they are identity maps (of firmware or reserved regions). No operation.
    pub setup_maps: u64,
    /// `iommu:*` lines at the end of the trace whose `dma:*` line may be cut off: no operation.
    pub cut_lines: u64,
    /// Maps whose printed scatterlist the kernel truncated.
    pub truncated_lists: u64,
    /// Maps whose segment lengths are a guess.
    pub guessed_lengths: u64,
    /// Coherent allocations whose physical address the trace does not show.
    pub fresh_frames: u64,
    /// Maps of a live key; the old mapping was unmapped first.
    pub replaced: u64,
    /// Mappings with at least one segment renamed from above 64 GiB.
    pub renamed: u64,
    /// Mappings of any class that are live after the last line.
    pub live_at_end: u64,
    /// Maximum number of mappings, of any class, live at once.
    pub live_max: u64,
    /// Counts per device, by [`DeviceIndex`].
    pub devices: Vec<DeviceSummary>,
}

/// Counts of one device. Coherent buffers are not counted: drivers keep them by design.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSummary {
    /// Streaming mappings created.
    pub maps: u64,
    /// Streaming mappings removed by an unmap of the trace.
    pub unmaps: u64,
    /// Streaming mappings live after the last line.
    pub live_at_end: u64,
}

impl DeviceSummary {
    /// Returns true if the driver skips unmaps (NVMe of Linux 7.2 without an IOMMU does).
    ///
    /// More than 90% of its mappings then were never unmapped, but are not live because their key
    /// was mapped again. The trace does not show when such mappings end, so no result about the
    /// device's safety is valid.
    pub fn skips_unmaps(&self) -> bool {
        let skipped = self
            .maps
            .saturating_sub(self.unmaps)
            .saturating_sub(self.live_at_end);
        self.maps >= 10 && skipped.saturating_mul(10) > self.maps.saturating_mul(9)
    }
}

impl Summary {
    /// Returns the devices whose driver skips unmaps.
    pub fn skipping_devices(&self) -> impl Iterator<Item = DeviceIndex> {
        (0..=u16::MAX)
            .map(DeviceIndex)
            .zip(&self.devices)
            .filter(|(_, device)| device.skips_unmaps())
            .map(|(index, _)| index)
    }
}
