//! Faults of nested translation.

use ringfence_types::{Fault, FaultReason, GuestPhysAddr, Iova};

/// The stage that stopped an access. The guest handles faults of the first stage, and the host
/// those of the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The device has no usable context.
    Context,
    /// The first stage does not translate the IOVA, or not for this access.
    First,
    /// The second stage does not translate the guest-physical address of a first-stage table.
    SecondForTable {
        /// The guest-physical address.
        guest: GuestPhysAddr,
    },
    /// The second stage does not translate the guest-physical address of the page, or not for this
    /// access.
    SecondForPage {
        /// The guest-physical address.
        guest: GuestPhysAddr,
    },
}

/// A fault and the stage that stopped the access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NestedFault {
    /// The fault, as recorded.
    pub fault: Fault,
    /// The stage that has no translation.
    pub stage: Stage,
}

/// A failed translation of one page. It does not name the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StageFault {
    pub(super) at: Iova,
    pub(super) reason: FaultReason,
    pub(super) stage: Stage,
}
