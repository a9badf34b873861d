//! The entry of a device or PASID.

use ringfence_pgtable::Levels;
use ringfence_types::{DomainId, Pasid, PhysAddr, RequesterId};

/// The translation of a device's requests with one PASID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Translation {
    /// Through a table of format [`FirstStage`](ringfence_pgtable::FirstStage).
    FirstStage {
        /// Root of the table.
        root: PhysAddr,
        /// Depth of the table.
        levels: Levels,
    },
    /// Through a table of format [`SecondStage`](ringfence_pgtable::SecondStage).
    SecondStage {
        /// Root of the table.
        root: PhysAddr,
        /// Depth of the table.
        levels: Levels,
    },
    /// None: addresses are physical.
    PassThrough,
}

/// A present entry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attachment {
    pub(crate) device: RequesterId,
    pub(crate) pasid: Pasid,
    pub(crate) domain: DomainId,
    pub(crate) translation: Translation,
    /// The entry was cleared, but caches may still hold it.
    pub(crate) is_blocked: bool,
}

impl Translation {
    /// Returns the root of the table; `None` without one.
    pub(crate) const fn root(&self) -> Option<PhysAddr> {
        match *self {
            Self::FirstStage { root, .. } | Self::SecondStage { root, .. } => Some(root),
            Self::PassThrough => None,
        }
    }
}
