//! What one replay has shown.

use ringfence_dma::MapError;
use ringfence_hw::IommuStats;

use crate::guest::QueueStats;
use crate::oracle::Tally;

/// Maps of one ring that did not get a slot at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingOutcomes {
    /// Maps that had to wait.
    pub stalls: u64,
    /// Maps that never got a slot.
    pub stalled_out: u64,
    /// Maps that were refused.
    pub refused: u64,
}

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
    /// The same by ring, with the maps refused: by device, then by place of the direction. Rings
    /// without any may be missing at the end.
    pub rings: Vec<RingOutcomes>,
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
    /// What went through the queue to a host.
    pub traffic: QueueStats,
    /// What the hardware counted.
    pub hardware: IommuStats,
    /// Most mappings alive at once.
    pub live_max: u64,
    /// Bytes of tables, at most.
    pub table_bytes: u64,
    /// Longest stale window.
    pub stale_max_ns: u64,
    /// Bytes times seconds of all stale windows.
    pub stale_byte_seconds: f64,
    /// Mappings that nobody used and the space still kept when the trace ended.
    pub kept_at_end: u64,
    /// Their part of [`stale_byte_seconds`](Self::stale_byte_seconds): until the end of the trace.
    pub kept_byte_seconds: f64,
    /// The same windows to their end, which may come after the trace's.
    pub exposure: Exposure,
    /// Longest time a buffer was withheld.
    pub release_delay_max_ns: u64,
    /// Mappings that the trace does not end.
    pub alive_at_end: u64,
}

/// What buffers that came back were exposed to until the last mapping that a space kept was gone: a
/// caching mode's replay runs on after its trace.
#[derive(Debug, Clone, Copy, Default)]
pub struct Exposure {
    /// Longest stale window, in nanoseconds.
    pub max_ns: u64,
    /// Bytes times seconds of all stale windows.
    pub byte_seconds: f64,
    /// From the end of the trace to the invalidation of the last mapping kept; 0 without any.
    pub after_end_ns: u64,
    /// Accesses of the attackers that were let through outside live grants after the trace's end.
    pub reached_after_end: u64,
    /// Kept mappings that were still there when the time that the mode promises was over.
    pub overdue: u64,
}

impl Outcomes {
    /// What is counted of the ring at `place`.
    #[cold]
    pub(super) fn ring(&mut self, place: usize) -> &mut RingOutcomes {
        if self.rings.len() <= place {
            self.rings.resize(place + 1, RingOutcomes::default());
        }
        &mut self.rings[place]
    }
}
