//! The part of a unit's driver that the random driver needs, one file per family of units.

pub mod vtd;

use ringfence_pgtable::{Coherency, Format, Table};
use ringfence_types::{
    Access, Invalidation, InvalidationError, Invalidator, Iova, RequesterId, Ticket,
};

use crate::qtest::RegisterRead;

/// A unit under test.
pub trait Family: Invalidator {
    /// The format of the tables that [`attach`](Self::attach) accepts.
    type Format: Format;

    /// Returns the format of the tables.
    fn format(&self) -> Self::Format;

    /// Returns the coherency of the unit's table walk.
    fn coherency(&self) -> Coherency;

    /// Returns true if a map owes an invalidation too, because the unit may cache entries that are
    /// not present.
    fn invalidates_after_map(&self) -> bool {
        false
    }

    /// Confines `device` to `table`. The device is blocked.
    ///
    /// # Errors
    /// The unit refuses or fails.
    fn attach(&mut self, device: RequesterId, table: &Table<Self::Format>) -> anyhow::Result<()>;

    /// Blocks `device`.
    ///
    /// # Errors
    /// The unit refuses or fails.
    fn detach(&mut self, device: RequesterId) -> anyhow::Result<()>;

    /// Submits several invalidations with one completion. The default submits one after the other.
    ///
    /// # Errors
    /// As for [`Invalidator::submit`].
    fn submit_all(&mut self, requests: &[Invalidation]) -> Result<Ticket, InvalidationError> {
        let mut last = Err(InvalidationError::Unsupported);
        for request in requests {
            last = Ok(self.submit(*request)?);
        }
        last
    }

    /// Returns the reads that [`next_fault`](Self::next_fault) will make if there is one record.
    /// They share a round trip with the access. The default: none, which is slower.
    fn fault_registers(&self) -> Vec<RegisterRead> {
        Vec::new()
    }

    /// Returns the oldest fault record and removes it; `None` if there is none.
    ///
    /// # Errors
    /// The record is malformed.
    fn next_fault(&mut self) -> anyhow::Result<Option<Reported>>;
}

/// A fault that a unit reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reported {
    /// A stopped access.
    Fault {
        /// The requester id in the record.
        device: RequesterId,
        /// The address in the record. The driver compares its page.
        iova: Iova,
        /// The kind of access; `None` if the record does not tell.
        access: Option<Access>,
    },
    /// The unit had no room for further records.
    Lost,
}
