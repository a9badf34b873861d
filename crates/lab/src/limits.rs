//! Limits on the resources of one replay.

/// Limits on one replay. [`ReplayLimits::default`] suits traces of real machines; a caller that
/// trusts a larger trace raises them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReplayLimits {
    /// Devices that map memory. Every mode keeps tables for each device.
    pub devices: usize,
    /// Product of the numbers of devices and CPUs that map memory. A mode may keep free addresses
    /// and a flush queue for each pair: 13 KiB in all.
    pub device_cpus: usize,
    /// Buffers alive on one I/O virtual page, in modes that let buffers share pages. The oracle
    /// checks each access against all of them.
    pub buffers_on_a_page: usize,
    /// Ranges that the allocator searches of a mode visit in total. `None`: 2^28 plus 4096 for each
    /// mapped range. Linux allocators search a list that grows with the live ranges, so a trace can
    /// make the replay time quadratic.
    pub search: Option<u64>,
    /// Unmapped mappings that the caches of a mode keep at once, over all devices.
    pub kept: usize,
    /// Live ranges that a comparison with the kernel's addresses keeps, at 200 bytes each. A trace
    /// can leave any number live: the reader ends a mapping at its `dma_unmap_*` line.
    pub live_ranges: usize,
    /// Cycle ends in the caches of all devices while the trace is quiet. `None`: 2^27 plus 4096 for
    /// each operation. Each long gap between two trace lines has up to 256 ends for each device.
    pub cycle_ends: Option<u64>,
}

impl Default for ReplayLimits {
    fn default() -> Self {
        Self {
            devices: 256,
            device_cpus: 1 << 12,
            buffers_on_a_page: 4096,
            search: None,
            kept: 1 << 18,
            live_ranges: 1 << 19,
            cycle_ends: None,
        }
    }
}

impl ReplayLimits {
    /// Returns the limit on search steps after `ranges` mapped ranges.
    pub(crate) fn search_of(&self, ranges: u64) -> u64 {
        let relative = ranges.saturating_mul(4096).saturating_add(1 << 28);
        self.search.unwrap_or(relative)
    }

    /// Returns the limit on cycle ends after `operations` operations.
    pub(crate) fn cycle_ends_of(&self, operations: u64) -> u64 {
        let relative = operations.saturating_mul(4096).saturating_add(1 << 27);
        self.cycle_ends.unwrap_or(relative)
    }
}
