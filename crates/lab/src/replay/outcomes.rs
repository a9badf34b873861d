//! What one replay has shown.

use ringfence_dma::MapError;
use ringfence_hw::Stats;

use crate::oracle::Tally;

/// What one replay has shown.
#[derive(Debug, Clone, Default)]
pub struct Outcomes {
    /// Mappings made.
    pub maps: u64,
    /// Mappings ended by the trace.
    pub unmaps: u64,
    /// Maps that had to wait for a slot of their ring.
    pub stalls: u64,
    /// Maps that never got one: their mapping ended, or the trace, while they waited.
    pub stalled_out: u64,
    /// Maps that the layer refused.
    pub refused_maps: u64,
    /// The first refusal.
    pub first_refusal: Option<MapError>,
    /// Unmaps that the layer refused: nothing changed.
    pub refused_unmaps: u64,
    /// Buffers that never came back because their invalidation failed, to the end.
    pub not_flushed: u64,
    /// Verdicts.
    pub tally: Tally,
    /// Accesses of the attackers.
    pub attempts: u64,
    /// Steps of the allocator's searches, summed up.
    pub search_steps: u64,
    /// Longest search.
    pub search_max: u32,
    /// Invalidations the layer submitted.
    pub invalidations: u64,
    /// What the hardware counted.
    pub hardware: Stats,
    /// Most mappings alive at once.
    pub live_max: u64,
    /// Bytes of tables, at most.
    pub table_bytes: u64,
    /// Longest stale window.
    pub stale_max_ns: u64,
    /// Bytes times seconds of all stale windows.
    pub stale_byte_seconds: f64,
    /// Longest time a buffer was withheld.
    pub release_delay_max_ns: u64,
    /// Mappings that the trace does not end.
    pub alive_at_end: u64,
}
