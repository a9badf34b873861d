//! The hypercalls for I/O spaces, and their errors.

use std::fmt;

use ringfence_types::{Permissions, Pfn, RequesterId};

/// The number of a Xen domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Domid(u16);

impl Domid {
    /// The control domain, the first one.
    pub const DOM0: Self = Self(0);

    /// Creates a domain number.
    pub const fn new(raw: u16) -> Self {
        Self(raw)
    }

    /// Returns the number.
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl fmt::Display for Domid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dom{}", self.0)
    }
}

/// The time at which the hypervisor flushes the TCE cache for an unmapped entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TceFlush {
    /// Before the hypercall returns.
    Now,
    /// At the next flush of the space. Until then a device may still reach the frame, and the frame
    /// keeps its owner.
    Deferred,
}

/// A hypercall for I/O spaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IommuOp {
    /// dom0 has found an IOMMU for these buses.
    IommuDetected {
        /// First bus that the IOMMU translates.
        first_bus: u8,
        /// Last bus, inclusive.
        last_bus: u8,
    },
    /// Creates the empty I/O space of the host bridge above `bdf`, for a domain. dom0 only.
    CreateIoSpace {
        /// A device below the bridge. Calgary uses only the bus.
        bdf: RequesterId,
        /// The domain that drives the device.
        domid: Domid,
    },
    /// Removes an I/O space and all its entries. dom0 only.
    DestroyIoSpace {
        /// A device of the space.
        bdf: RequesterId,
    },
    /// Maps one page of the caller.
    MapEntry {
        /// A device of the space.
        bdf: RequesterId,
        /// The page of the DMA address.
        page: Pfn,
        /// The guest pseudo-physical page.
        gpfn: u64,
        /// The rights of the device.
        permissions: Permissions,
    },
    /// Clears one entry.
    UnmapEntry {
        /// A device of the space.
        bdf: RequesterId,
        /// The page of the DMA address.
        page: Pfn,
        /// The time of the flush.
        flush: TceFlush,
    },
    /// Flushes the TCE cache for the entries unmapped with [`TceFlush::Deferred`].
    FlushIoSpace {
        /// A device of the space.
        bdf: RequesterId,
    },
    /// Maps the caller's whole memory at DMA addresses that equal guest pseudo-physical ones, up to
    /// the end of the space (CG07).
    MapWholeGuest {
        /// A device of the space, which must be empty.
        bdf: RequesterId,
    },
}

/// The reason why the hypervisor refused a hypercall. Nothing changed, except after
/// [`XenError::FlushFailed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum XenError {
    /// dom0 has not reported an IOMMU.
    #[error("no IOMMU is detected")]
    NotDetected,
    /// dom0 reports a second IOMMU.
    #[error("an IOMMU is already detected")]
    AlreadyDetected,
    /// Only dom0 may do this.
    #[error("the caller is not dom0")]
    NotPrivileged,
    /// No domain has this number, or the hypervisor has too many.
    #[error("no such domain")]
    NoSuchDomain,
    /// The IOMMU does not translate the bus.
    #[error("the IOMMU has no such bus")]
    NoSuchBus,
    /// The caller has no I/O space for the device, also if another domain has one.
    #[error("the caller has no I/O space for the device")]
    NoSpace,
    /// The host bridge above the device has a space already.
    #[error("the host bridge has an I/O space already")]
    SpaceExists,
    /// The address lies beyond the 4 GiB of a space.
    #[error("the DMA address is beyond the I/O space")]
    BeyondSpace,
    /// The caller has no memory at this page.
    #[error("the caller has no frame at this page")]
    NoFrame,
    /// The entry is in use.
    #[error("the entry is in use")]
    Occupied,
    /// The entry is not mapped.
    #[error("the entry is not mapped")]
    NotMapped,
    /// A device may still reach the frame, or a grant uses the entry.
    #[error("the frame or the entry is in use")]
    Busy,
    /// Memory is short, or a counter is at its limit.
    #[error("the hypervisor is out of memory")]
    NoMemory,
    /// A batch has more than [`MAX_MULTICALL`](super::MAX_MULTICALL) calls.
    #[error("the batch has too many calls")]
    TooManyCalls,
    /// The grant does not exist, names another domain, or does not allow the access.
    #[error("the grant does not allow this")]
    BadGrant,
    /// The grant handle is not one of the caller's.
    #[error("no such grant handle")]
    NoSuchHandle,
    /// The TCE cache could not be flushed. The frames stay referenced.
    #[error("the flush of the TCE cache failed")]
    FlushFailed,
}
