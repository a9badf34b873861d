//! How a unit finds the table of a device.

use core::fmt;

use ringfence_pgtable::Format;
use ringfence_types::{DeviceId, DomainId, FaultReason, PhysAddr, PhysMemory};

/// Where the accesses of one device go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attachment<F> {
    /// Tags what is cached for the device.
    pub domain: DomainId,
    /// How its addresses are translated.
    pub route: Route<F>,
}

/// How addresses are translated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route<F> {
    /// By a table.
    Table {
        /// Its format.
        format: F,
        /// Its root.
        root: PhysAddr,
    },
    /// Not at all: the address is physical (HW10).
    PassThrough {
        /// Address bits that the unit accepts.
        width: u32,
    },
}

/// The part of a unit that goes from a requester to its domain: root and context tables in memory ([`RootTable`](crate::RootTable)),
/// or one register per host bridge ([`HostBridges`](crate::HostBridges)).
pub trait Directory: fmt::Debug {
    /// The format of its tables. The address bits that a level translates do not depend on the depth of the table.
    type Format: Format;

    /// Finds where the accesses of `device` go. The unit caches what is found, never that nothing was.
    ///
    /// # Errors
    /// Why the device's accesses are stopped.
    fn find<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        device: DeviceId,
    ) -> Result<Attachment<Self::Format>, FaultReason>;
}
