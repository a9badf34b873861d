//! The translation of a device's requests, and the context entry or PASID-table entry that selects
//! it.

use ringfence_pgtable::Levels;
use ringfence_types::{DomainId, Pasid, PhysAddr, RequesterId};

/// Translation of a device's requests, with or without a PASID.
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
    /// No table: addresses are physical.
    PassThrough,
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

/// An entry that the unit's caches may hold.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attachment {
    pub(crate) device: RequesterId,
    /// [`Pasid::NO_PASID`] for requests without a PASID.
    pub(crate) pasid: Pasid,
    pub(crate) domain: DomainId,
    pub(crate) translation: Translation,
    /// The entry is cleared; its invalidation has not completed.
    pub(crate) is_cleared: bool,
}
