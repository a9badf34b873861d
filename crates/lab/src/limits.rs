//! Bounds on what one replay may ask for.

/// Bounds on one replay. [`ReplayLimits::default`] suits machines; a caller that trusts a larger
/// trace raises them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReplayLimits {
    /// Devices that map memory. Every mode keeps tables for each.
    pub devices: usize,
    /// Product of the devices and the processors that map memory. A mode may keep free addresses
    /// for each pair, and a flush queue: 13 KiB in all.
    pub device_cpus: usize,
    /// Buffers alive on one I/O virtual page, where a mode lets buffers share pages. Each access
    /// is judged against all of them.
    pub buffers_on_a_page: usize,
    /// Ranges that the searches of a mode's allocator step over in all. `None`: 2^28 plus 4096
    /// for each mapped range. Allocators of Linux search a list that grows with the live ranges,
    /// so a trace can make the time of a replay grow with its square.
    pub search: Option<u64>,
    /// Mappings that a mode with a cache keeps at once behind their unmaps, of all devices.
    pub kept: usize,
    /// Ends of cycles in the caches of all devices while the trace is quiet. `None`: 2^27 plus
    /// 4096 for each operation. Each long gap between two lines has up to 256 ends for each device.
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
            cycle_ends: None,
        }
    }
}

impl ReplayLimits {
    /// The bound on searches behind `ranges` mapped ranges.
    pub(crate) fn search_of(&self, ranges: u64) -> u64 {
        let relative = ranges.saturating_mul(4096).saturating_add(1 << 28);
        self.search.unwrap_or(relative)
    }

    /// The bound on ends of cycles behind `operations` operations.
    pub(crate) fn cycle_ends_of(&self, operations: u64) -> u64 {
        let relative = operations.saturating_mul(4096).saturating_add(1 << 27);
        self.cycle_ends.unwrap_or(relative)
    }
}
