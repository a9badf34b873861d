//! Whether a row may be taken at its word.

use std::fmt;

use ringfence_dma::MapError;
use serde::{Serialize, Serializer};

use crate::modes::Safety;

/// `Ok`, or what keeps a row from being taken at its word. Serialised as the sentence that it
/// prints as; [`code`](Self::code) is for programs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReplayStatus {
    /// Nothing.
    #[default]
    Ok,
    /// The kernel lost events: pairs are broken.
    LostEvents(u64),
    /// The driver of a replayed device skips unmaps.
    SkipsUnmaps,
    /// The layer refused maps: the row stands for less than the trace.
    RefusedMaps {
        /// How many.
        count: u64,
        /// The first.
        first: MapError,
    },
    /// The layer refused unmaps: their mappings stay.
    RefusedUnmaps(u64),
    /// Buffers never came back, because their invalidation failed.
    NotFlushed(u64),
    /// More than one map in a hundred never got a slot of its ring: the driver unmaps in another
    /// order than a tail can follow, and the row stands for the rest of the trace only.
    RingDoesNotFit {
        /// Maps that waited in vain.
        stalled_out: u64,
        /// Maps that the trace asks for.
        wanted: u64,
    },
    /// Maps were refused in a timed replay, and in no other: the cycles stand for less than the
    /// trace.
    RefusedInMeter {
        /// How many, in the replay that refused most.
        count: u64,
        /// The first.
        first: MapError,
    },
    /// So much is mapped at once that the tables of all timed replays would not fit into memory: no
    /// cycles.
    NotTimed {
        /// Most bytes mapped at once, in whole pages.
        bytes: u64,
    },
    /// The oracle saw the mode's promise broken.
    Broken {
        /// Violations.
        violations: u64,
        /// What was promised.
        promise: Safety,
    },
}

impl ReplayStatus {
    /// Whether the row may be taken at its word.
    pub fn is_ok(&self) -> bool {
        *self == Self::Ok
    }

    /// A name that does not change.
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
                f.write_str("the driver skips unmaps: the trace does not say when mappings end")
            }
            Self::RefusedMaps { count, first } => write!(f, "{count} maps refused: {first}"),
            Self::RefusedUnmaps(count) => write!(f, "{count} unmaps refused"),
            Self::NotFlushed(count) => {
                write!(
                    f,
                    "{count} buffers never came back: their invalidation failed"
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
                "no cycles: {} GiB are mapped at once, too much for the tables of all timed replays",
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
