//! The outcomes of a replay.

use ringfence_dma::MapError;
use ringfence_hw::IommuStats;

use crate::oracle::{StaleBytes, VerdictCounts};
use crate::queue_stats::QueueStats;
use crate::replay::{BufferCounts, ReleaseDelays};

/// Maps of one ring that did not get a slot at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingOutcomes {
    /// Maps that waited.
    pub stalls: u64,
    /// Maps that never got a slot.
    pub stalled_out: u64,
    /// Maps that the layer refused.
    pub refused: u64,
}

/// The outcomes of one replay.
#[derive(Debug, Clone, Default)]
pub struct Outcomes {
    /// Number of successful maps.
    pub maps: u64,
    /// Number of unmaps in the trace that found their mapping, including refused ones.
    pub unmaps: u64,
    /// Maps that waited for a slot of their ring.
    pub stalls: u64,
    /// Maps that never got a slot: their mapping or the trace ended while they waited.
    pub stalled_out: u64,
    /// The same by ring, with refused maps, at index device times `RINGS` plus ring. Trailing rings
    /// without such maps are absent.
    pub rings: Vec<RingOutcomes>,
    /// Maps that the layer refused.
    pub refused_maps: u64,
    /// Error of the first refused map.
    pub first_refusal: Option<MapError>,
    /// Unmaps that the layer refused without any change.
    pub refused_unmaps: u64,
    /// Buffers that the layer never returned, because their invalidation failed until the end.
    pub not_flushed: u64,
    /// Counts of verdicts.
    pub tally: VerdictCounts,
    /// Number of attacker accesses.
    pub attempts: u64,
    /// Sum of the steps of the allocator's searches.
    pub search_steps: u64,
    /// Number of steps of the longest search.
    pub search_max: u32,
    /// Number of invalidations, from the layer or from a host.
    pub invalidations: u64,
    /// Counters of the queue to a host.
    pub traffic: QueueStats,
    /// Counters of the hardware.
    pub hardware: IommuStats,
    /// Peak number of live mappings.
    pub live_max: u64,
    /// Peak size of the tables in bytes.
    pub table_bytes: u64,
    /// Bytes of the pools that devices reach at the end.
    pub pool_bytes: u64,
    /// Bytes of the buffers of all successful maps.
    pub mapped_bytes: u64,
    /// Bytes that maps and unmaps copied between buffers and memory that stays mapped.
    pub copied_bytes: u64,
    /// Longest stale window, in nanoseconds.
    pub stale_max_ns: u64,
    /// Sum over all stale windows of bytes times seconds.
    pub stale_byte_seconds: f64,
    /// Bytes in open stale windows, over time.
    pub stale_bytes: StaleBytes,
    /// Unused mappings that the space still kept at the end of the trace.
    pub kept_at_end: u64,
    /// Share of these mappings in [`stale_byte_seconds`](Self::stale_byte_seconds), up to the end
    /// of the trace.
    pub kept_byte_seconds: f64,
    /// Exposure up to the end of the last window, which may come after the end of the trace.
    pub exposure: BufferExposure,
    /// Longest time for which the layer withheld a buffer.
    pub release_delay_max_ns: u64,
    /// Times from the unmaps of the trace to the returns of their buffers.
    pub release_delays: ReleaseDelays,
    /// Unmapped buffers by the memory that the device used and by their return.
    pub ways: BufferCounts,
    /// Mappings that the trace does not end.
    pub alive_at_end: u64,
}

/// Exposure of returned buffers until the space has dropped the last kept mapping. A replay of a
/// mode with a cache runs on after the trace.
#[derive(Debug, Clone, Copy, Default)]
pub struct BufferExposure {
    /// Longest stale window, in nanoseconds.
    pub max_ns: u64,
    /// Sum over all stale windows of bytes times seconds.
    pub byte_seconds: f64,
    /// Time from the end of the trace to the invalidation of the last kept mapping; 0 without any.
    pub after_end_ns: u64,
    /// Accesses of the attackers outside live grants that the IOMMU let through after the end of
    /// the trace.
    pub reached_after_end: u64,
    /// Kept mappings that remained when the mode's bound had passed.
    pub overdue: u64,
}

impl Outcomes {
    /// Returns the counts of the ring at `index`.
    #[cold]
    pub(super) fn ring(&mut self, index: usize) -> &mut RingOutcomes {
        if self.rings.len() <= index {
            self.rings.resize(index + 1, RingOutcomes::default());
        }
        &mut self.rings[index]
    }
}
