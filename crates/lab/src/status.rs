//! The validity of a row.

use std::fmt;

use ringfence_dma::MapError;
use serde::{Serialize, Serializer};

use crate::modes::Safety;

/// `Ok`, or the reason why a row does not represent its trace and mode. Serialised as the sentence
/// that it displays; programs use [`code`](Self::code).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReplayStatus {
    /// The row is valid.
    #[default]
    Ok,
    /// The kernel lost this many events, so maps and unmaps do not pair.
    LostEvents(u64),
    /// The driver of a replayed device skips unmaps.
    SkipsUnmaps,
    /// The DMA layer refused maps: the row covers less than the trace.
    RefusedMaps {
        /// Number of refused maps.
        count: u64,
        /// Error of the first refused map.
        first: MapError,
    },
    /// The DMA layer refused this many unmaps; their mappings stay.
    RefusedUnmaps(u64),
    /// The driver never got this many buffers back, because their invalidation failed.
    NotFlushed(u64),
    /// More than one map in a hundred never got a slot of its ring. The driver unmaps in an order
    /// that a ring tail cannot follow; the row covers only the other maps.
    RingDoesNotFit {
        /// Maps that never got a slot.
        stalled_out: u64,
        /// Maps that the trace requests.
        wanted: u64,
    },
    /// Only the timed replay refused maps: the cycles cover less than the trace.
    RefusedInMeter {
        /// Number of refused maps, in the replay that refused most.
        count: u64,
        /// Error of the first refused map.
        first: MapError,
    },
    /// No cycles: the trace maps so much at once that the tables of all timed replays would not fit
    /// into memory.
    NotTimed {
        /// Peak of mapped bytes, in whole pages.
        bytes: u64,
    },
    /// The oracle saw accesses that the mode promises to prevent.
    Broken {
        /// Number of violations.
        violations: u64,
        /// The broken promise.
        promise: Safety,
    },
}

impl ReplayStatus {
    /// Returns true if the row is valid.
    pub fn is_ok(&self) -> bool {
        *self == Self::Ok
    }

    /// Returns a stable name for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::LostEvents(_) => "lost-events",
            Self::SkipsUnmaps => "skips-unmaps",
            Self::RefusedMaps { .. } => "refused-maps",
            Self::RefusedUnmaps(_) => "refused-unmaps",
            Self::NotFlushed(_) => "not-flushed",
            Self::RingDoesNotFit { .. } => "ring-does-not-fit",
            Self::RefusedInMeter { .. } => "refused-in-meter",
            Self::NotTimed { .. } => "not-timed",
            Self::Broken { .. } => "broken-promise",
        }
    }
}

impl fmt::Display for ReplayStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok => f.write_str("ok"),
            Self::LostEvents(count) => write!(f, "the kernel lost {count} events"),
            Self::SkipsUnmaps => {
                f.write_str("the driver skips unmaps, so the trace does not show when mappings end")
            }
            Self::RefusedMaps { count, first } => write!(f, "{count} maps refused: {first}"),
            Self::RefusedUnmaps(count) => write!(f, "{count} unmaps refused"),
            Self::NotFlushed(count) => {
                write!(
                    f,
                    "the layer did not release {count} buffers, because their invalidation failed"
                )
            }
            Self::RingDoesNotFit {
                stalled_out,
                wanted,
            } => write!(
                f,
                "the ring does not fit this driver: {stalled_out} of {wanted} maps never got a slot"
            ),
            Self::RefusedInMeter { count, first } => {
                write!(
                    f,
                    "{count} maps refused while cycles were measured: {first}"
                )
            }
            Self::NotTimed { bytes } => write!(
                f,
                "no cycles: {} GiB are mapped at once, too much for the tables of all timed \
                replays",
                bytes.div_ceil(1 << 30)
            ),
            Self::Broken {
                violations,
                promise,
            } => write!(f, "{violations} violations in a {promise} mode"),
        }
    }
}

impl Serialize for ReplayStatus {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
