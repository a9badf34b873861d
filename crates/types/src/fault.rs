//! I/O page faults: DMAs that the IOMMU blocked.

use core::fmt;

use crate::{Access, Iova, RequesterId};

/// A DMA that the IOMMU did not translate. DMA is not restartable (rIOMMU section 2.2): no part of
/// the access took place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fault {
    /// The requester ID of the device that issued the access.
    pub device: RequesterId,
    /// The first address that could not be translated.
    pub iova: Iova,
    /// The kind of access that the device attempted.
    pub access: Access,
    /// The reason why the IOMMU blocked it.
    pub reason: FaultReason,
}

/// The reason why the IOMMU blocked a DMA. The codes are those of the VT-d specification, section
/// 7.1.3, "Fault Reasons", where one exists. Reasons specific to a ring IOMMU have codes from 0xf0
/// up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum FaultReason {
    /// The root entry of the device's bus is not present.
    RootNotPresent,
    /// The context entry of the device is not present.
    ContextNotPresent,
    /// The context entry is present but holds values that this unit does not support.
    ContextInvalid,
    /// The address lies beyond the width that the context entry or the table supports.
    AddressBeyondWidth,
    /// The path or the leaf does not allow a write.
    WriteDenied,
    /// The path or the leaf does not allow a read.
    ReadDenied,
    /// The next-level table or the page lies outside memory.
    TableAccess,
    /// A reserved bit is set in an entry that is present.
    ReservedBit,
    /// No translation: an entry on the path is not present.
    NotPresent,
    /// The access is empty or its last byte is past 2^64 - 1.
    BadLength,
    /// All DMA of the device is blocked because no domain is attached.
    Blocked,
    /// The context entry does not allow the device to make translation requests, translated
    /// requests or page requests.
    RequestTypeBlocked,
    /// A translated request to a host address that the device's domain may not access.
    HostAddressDenied,
    /// The address selects a ring that the device does not have (rIOMMU Fig. 10, `rtable_walk`).
    RingBeyondDevice,
    /// The address selects a slot that the ring does not have (rIOMMU Fig. 10, `rtable_walk`).
    SlotBeyondRing,
    /// The access begins or ends past the last byte of the buffer (rIOMMU Fig. 10, `rtranslate`).
    BeyondBuffer,
}

impl FaultReason {
    /// Returns the fault reason code of the VT-d specification (section 7.1.3), or the nearest one.
    /// Reasons that VT-d does not have return their own codes.
    ///
    /// [`NotPresent`](Self::NotPresent) returns the code of a denied read. A unit that reports a
    /// write to a page that is not present uses the code of [`WriteDenied`](Self::WriteDenied).
    pub const fn code(self) -> u8 {
        match self {
            Self::RootNotPresent => 0x1,
            Self::ContextNotPresent | Self::Blocked => 0x2,
            Self::ContextInvalid => 0x3,
            Self::AddressBeyondWidth | Self::BadLength => 0x4,
            Self::WriteDenied => 0x5,
            Self::ReadDenied | Self::NotPresent => 0x6,
            Self::TableAccess => 0x7,
            Self::ReservedBit => 0xc,
            Self::RequestTypeBlocked => 0xd,
            Self::HostAddressDenied => 0xf3,
            Self::RingBeyondDevice => 0xf0,
            Self::SlotBeyondRing => 0xf1,
            Self::BeyondBuffer => 0xf2,
        }
    }
}

impl fmt::Display for FaultReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RootNotPresent => "root entry not present",
            Self::ContextNotPresent => "context entry not present",
            Self::ContextInvalid => "context entry invalid",
            Self::AddressBeyondWidth => "address beyond the table's width",
            Self::WriteDenied => "write not permitted",
            Self::ReadDenied => "read not permitted",
            Self::TableAccess => "table outside memory",
            Self::ReservedBit => "reserved bit set",
            Self::NotPresent => "no translation",
            Self::BadLength => "empty or wrapping access",
            Self::Blocked => "device is blocked",
            Self::RequestTypeBlocked => "request type not enabled for the device",
            Self::HostAddressDenied => "host address not permitted",
            Self::RingBeyondDevice => "the device has no such ring",
            Self::SlotBeyondRing => "the ring has no such slot",
            Self::BeyondBuffer => "beyond the end of the buffer",
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "DMA {} of {} by {} stopped: {}",
            self.access, self.iova, self.device, self.reason
        )
    }
}

impl core::error::Error for Fault {}
