//! The part of a unit's driver that the random driver needs, one file per family of units.

pub mod amd_vi;
pub mod riscv_iommu;
pub mod smmu_v3;
pub mod virtio;
pub mod vtd;

use ringfence_pgtable::{Coherency, Format, MapRequest, Table};
use ringfence_types::{
    Access, DomainId, Invalidation, InvalidationError, Invalidator, Iova, PfnRange, RequesterId,
    Ticket,
};

use crate::qtest::{Commands, RegisterRead};

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

    /// Returns an empty table of the domain `id`; `None` if its root is one frame.
    ///
    /// # Errors
    /// No frames are left.
    fn table(&self, _id: DomainId) -> anyhow::Result<Option<Table<Self::Format>>> {
        Ok(None)
    }

    /// Called after a map in the table of `domain`, for units that do not walk the table.
    ///
    /// # Errors
    /// The unit refuses or fails.
    fn mapped(&mut self, _domain: DomainId, _request: &MapRequest) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after an unmap in the table of `domain` and before its invalidation, for units that
    /// do not walk the table.
    ///
    /// # Errors
    /// The unit refuses or fails.
    fn unmapped(&mut self, _domain: DomainId, _range: PfnRange) -> anyhow::Result<()> {
        Ok(())
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

    /// Returns true if QEMU's model records every access that a page does not permit.
    fn records_permission_faults(&self) -> bool {
        true
    }

    /// Returns true if QEMU's model records stopped accesses to `iova`, if the page permits none.
    fn records_faults_at(&self, _iova: Iova) -> bool {
        true
    }

    /// Returns the number of low address bits that the tags of QEMU's IOTLB keep. Addresses that
    /// differ only above are not told apart, and are not tried.
    fn tag_bits(&self) -> u32 {
        64
    }

    /// Returns the reads that [`next_fault`](Self::next_fault) makes until it returns no record.
    /// They share a round trip with the access. The default: none, which is slower.
    fn fault_registers(&self) -> Vec<RegisterRead> {
        Vec::new()
    }

    /// Returns true if one message may contain several accesses that are stopped: the [registers of
    /// faults](Self::fault_registers), read after each, tell which records belong to it. The
    /// driver's writes until it has seen these records do not change them.
    fn queues_faults(&self) -> bool {
        false
    }

    /// Adds commands that remove the record of one access before another access follows in the same
    /// message, for units without a queue of records. Returns reads that the driver makes when it
    /// has removed the record itself. The driver alone removes the last record of each message.
    fn remove_fault(&self, _commands: &mut Commands) -> Vec<RegisterRead> {
        Vec::new()
    }

    /// Returns true if QEMU translates the byte directly below a mapping too, which is a recorded
    /// finding. Accesses that depend on it are counted instead of judged.
    fn translates_byte_below(&self) -> bool {
        false
    }

    /// Returns true if one stopped access may leave several records for the same page.
    fn repeats_faults(&self) -> bool {
        false
    }

    /// Returns the oldest fault record and removes it.
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
    /// A stopped access, in a record that holds neither its address nor its kind.
    Stopped {
        /// The requester id in the record.
        device: RequesterId,
        /// The driver knows of no further record.
        is_last: bool,
    },
    /// The unit had no room for further records.
    Lost,
}
