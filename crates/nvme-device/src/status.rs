//! Status of a command (base specification, section 4.6.1). Bits 7:0 are the status code, bits 10:8
//! the status code type.

/// Status of a command, as far as the controller reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum NvmeStatus {
    /// The command completed without error.
    Success = 0x00,
    /// Invalid command opcode.
    InvalidOpcode = 0x01,
    /// Invalid field in command.
    InvalidField = 0x02,
    /// Data transfer error: the IOMMU blocked an access.
    DataTransferError = 0x04,
    /// Command abort requested.
    AbortRequested = 0x07,
    /// Invalid namespace or format.
    InvalidNamespace = 0x0b,
    /// Command sequence error.
    SequenceError = 0x0c,
    /// PRP offset invalid.
    PrpOffsetInvalid = 0x13,
    /// Namespace is write protected.
    WriteProtected = 0x20,
    /// LBA out of range.
    LbaOutOfRange = 0x80,
    /// Completion queue invalid.
    CompletionQueueInvalid = 0x100,
    /// Invalid queue identifier.
    InvalidQueueIdentifier = 0x101,
    /// Invalid queue size.
    InvalidQueueSize = 0x102,
    /// Asynchronous event request limit exceeded.
    EventLimitExceeded = 0x105,
    /// Invalid interrupt vector.
    InvalidInterruptVector = 0x108,
    /// Invalid log page.
    InvalidLogPage = 0x109,
    /// Invalid queue deletion.
    InvalidQueueDeletion = 0x10c,
    /// Feature identifier not saveable.
    FeatureNotSaveable = 0x10d,
    /// Write fault: the medium failed.
    WriteFault = 0x280,
    /// Unrecovered read error: the medium failed.
    UnrecoveredRead = 0x281,
}

/// Do Not Retry, in the status field of a completion.
const DO_NOT_RETRY: u16 = 1 << 14;

impl NvmeStatus {
    /// Returns the status field of a completion. A command that is invalid is invalid again.
    pub const fn field(self) -> u16 {
        match self {
            Self::Success
            | Self::DataTransferError
            | Self::AbortRequested
            | Self::WriteFault
            | Self::UnrecoveredRead => self as u16,
            _ => self as u16 | DO_NOT_RETRY,
        }
    }
}
