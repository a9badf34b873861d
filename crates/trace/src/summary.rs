//! What was left out, bent or noticed on the way from a trace's lines to its operations.

use serde::{Deserialize, Serialize};

use crate::op::DeviceIndex;

/// Counts over a trace, complete once [`Operations`](crate::Operations) has ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Lines read, comments and blank ones included.
    pub lines: u64,
    /// Events of every kind, unknown ones included.
    pub events: u64,
    /// Events that say nothing about DMA mappings: skipped.
    pub unknown: u64,
    /// Lines skipped because they are malformed; 0 unless reading leniently.
    pub malformed: u64,
    /// Events that the kernel says it lost: `LOST` lines, plus the excess of entries written over
    /// entries held in the tracefs header. Not 0: pairs are broken and no safety should be claimed.
    pub lost: u64,
    /// `dma_sync_*` events: counted, no operation.
    pub syncs: u64,
    /// `*_err` events: an attempt that the kernel refused; no operation.
    pub failed_maps: u64,
    /// `dma:*` map, alloc events that became an operation.
    pub maps: u64,
    /// `dma:*` unmap, free events that became an operation.
    pub unmaps: u64,
    /// Unmaps (of `dma:*` events) whose mapping the trace does not show: no operation.
    pub unmatched_unmaps: u64,
    /// `dma_free` events whose allocation the trace does not show: no operation.
    pub unmatched_frees: u64,
    /// Mappings made by `iommu:*` lines alone.
    pub iommu_only_maps: u64,
    /// `iommu:map` lines those mappings stand for.
    pub iommu_only_pieces: u64,
    /// `iommu:unmap` lines that no mapping explains.
    pub unmatched_iommu_unmaps: u64,
    /// Of those, how many an unmap ended.
    pub iommu_only_unmaps: u64,
    /// Parts of such mappings that an unmap of another part left over, each a new mapping.
    pub remainders: u64,
    /// `iommu:map` lines that no driver's map explains: from before the first device's first event,
    /// or leading to themselves (identity maps of firmware, reserved regions). No operation.
    pub setup_maps: u64,
    /// `iommu:*` lines at the end of the trace whose `dma:*` line may be cut off: no operation.
    pub cut_lines: u64,
    /// Maps whose printed scatterlist was cut.
    pub truncated_lists: u64,
    /// Maps whose segment lengths are a guess.
    pub guessed_lengths: u64,
    /// Coherent allocations whose physical address the trace does not show.
    pub fresh_frames: u64,
    /// Maps of a live key: the old mapping was unmapped first.
    pub replaced: u64,
    /// Mappings that took part in a renaming above 64 GiB.
    pub renamed: u64,
    /// Mappings, of any class, alive after the last line.
    pub live_at_end: u64,
    /// Most mappings, of any class, alive at once.
    pub live_max: u64,
    /// The same counts per device, by [`DeviceIndex`].
    pub devices: Vec<DeviceSummary>,
}

/// Counts of one device. Coherent buffers are left out of them: drivers keep those by design.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSummary {
    /// Streaming mappings made.
    pub maps: u64,
    /// Streaming mappings ended by an unmap of the trace.
    pub unmaps: u64,
    /// Streaming mappings alive after the last line.
    pub live_at_end: u64,
}

impl DeviceSummary {
    /// Whether the driver skips unmaps (7.2 NVMe without an IOMMU does): over 90% of its mappings
    /// were never unmapped though they are not alive, their key having been mapped again. Then the
    /// trace does not say when mappings end and no safety can be claimed for the device.
    pub fn skips_unmaps(&self) -> bool {
        let skipped = self
            .maps
            .saturating_sub(self.unmaps)
            .saturating_sub(self.live_at_end);
        self.maps >= 10 && skipped.saturating_mul(10) > self.maps.saturating_mul(9)
    }
}

impl Summary {
    /// Devices whose driver skips unmaps.
    pub fn skipping_devices(&self) -> impl Iterator<Item = DeviceIndex> {
        (0..=u16::MAX)
            .map(DeviceIndex)
            .zip(&self.devices)
            .filter(|(_, device)| device.skips_unmaps())
            .map(|(index, _)| index)
    }
}
