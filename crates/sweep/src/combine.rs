//! Columns that combine over the devices of a trace.
//!
//! Devices share the IOTLB, the invalidation queue and the clock of timers. Counts of these change
//! if one device is replayed alone: its entries stay cached longer, and timers fire at other times.
//! The columns here count mappings or searches of one device's domain, and no other column is in
//! the row of one device. A test compares the sums and maxima with the whole in every named mode.

/// Columns whose sum over the devices of a trace is the value of the whole trace.
pub const ADDITIVE: &[&str] = &[
    "maps",
    "unmaps",
    "accesses",
    "requests",
    "live_mappings_at_end",
    "ways.pooled.buffers",
    "ways.pooled.bytes",
    "ways.mapped.buffers",
    "ways.mapped.bytes",
    "ways.withheld.buffers",
    "ways.withheld.bytes",
];

/// Columns whose maximum over the devices of a trace is the value of the whole trace.
pub const MAXIMA: &[&str] = &["search_steps_max"];
