//! Records of the fault queue (specification 1.0, section "Fault/Event-Queue").

use ringfence_types::RequesterId;

use crate::queue::Loss;

const PV: u64 = 1 << 32;
const PRIV: u64 = 1 << 33;
/// The upper half of the second doubleword is reserved.
const RESERVED: u64 = 0xffff_ffff_0000_0000;

/// Cause of a fault (CAUSE).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Cause {
    /// Instruction access fault.
    InstructionAccess = 1,
    /// Read address misaligned.
    ReadMisaligned = 4,
    /// Read access fault.
    ReadAccess = 5,
    /// Write or atomic address misaligned.
    WriteMisaligned = 6,
    /// Write or atomic access fault.
    WriteAccess = 7,
    /// Instruction page fault.
    InstructionPage = 12,
    /// Read page fault of the first stage.
    ReadPage = 13,
    /// Write or atomic page fault of the first stage.
    WritePage = 15,
    /// Instruction guest-page fault.
    InstructionGuestPage = 20,
    /// Read page fault of the second stage.
    ReadGuestPage = 21,
    /// Write or atomic page fault of the second stage.
    WriteGuestPage = 23,
    /// All inbound transactions disallowed.
    AllDisallowed = 256,
    /// The unit could not read a device-directory entry.
    DdtAccess = 257,
    /// A device-directory entry is not valid.
    DdtInvalid = 258,
    /// A device-directory entry is misconfigured.
    DdtMisconfigured = 259,
    /// Transaction type disallowed.
    TypeDisallowed = 260,
    /// The unit could not read an MSI page-table entry.
    MsiAccess = 261,
    /// An MSI page-table entry is not valid.
    MsiInvalid = 262,
    /// An MSI page-table entry is misconfigured.
    MsiMisconfigured = 263,
    /// Access fault on a memory-resident interrupt file.
    MrifAccess = 264,
    /// The unit could not read a process-directory entry.
    PdtAccess = 265,
    /// A process-directory entry is not valid.
    PdtInvalid = 266,
    /// A process-directory entry is misconfigured.
    PdtMisconfigured = 267,
    /// Corrupt data in the device directory.
    DdtCorrupt = 268,
    /// Corrupt data in a process directory.
    PdtCorrupt = 269,
    /// Corrupt data in an MSI page table.
    MsiCorrupt = 270,
    /// Corrupt data in a memory-resident interrupt file.
    MrifCorrupt = 271,
    /// Error of an internal data path.
    InternalDataPath = 272,
    /// The unit could not write its own message-signalled interrupt.
    MsiWrite = 273,
    /// Corrupt data in a page table.
    PageTableCorrupt = 274,
}

const CAUSES: [Cause; 30] = [
    Cause::InstructionAccess,
    Cause::ReadMisaligned,
    Cause::ReadAccess,
    Cause::WriteMisaligned,
    Cause::WriteAccess,
    Cause::InstructionPage,
    Cause::ReadPage,
    Cause::WritePage,
    Cause::InstructionGuestPage,
    Cause::ReadGuestPage,
    Cause::WriteGuestPage,
    Cause::AllDisallowed,
    Cause::DdtAccess,
    Cause::DdtInvalid,
    Cause::DdtMisconfigured,
    Cause::TypeDisallowed,
    Cause::MsiAccess,
    Cause::MsiInvalid,
    Cause::MsiMisconfigured,
    Cause::MrifAccess,
    Cause::PdtAccess,
    Cause::PdtInvalid,
    Cause::PdtMisconfigured,
    Cause::DdtCorrupt,
    Cause::PdtCorrupt,
    Cause::MsiCorrupt,
    Cause::MrifCorrupt,
    Cause::InternalDataPath,
    Cause::MsiWrite,
    Cause::PageTableCorrupt,
];

impl Cause {
    fn decode(code: u16) -> Option<Self> {
        CAUSES.iter().find(|cause| **cause as u16 == code).copied()
    }
}

/// Type of the transaction that faulted (TTYP).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transaction {
    /// The fault was not caused by a transaction.
    None,
    /// Untranslated read to execute.
    UntranslatedExecute,
    /// Untranslated read, not to execute.
    UntranslatedRead,
    /// Untranslated write or atomic operation.
    UntranslatedWrite,
    /// Translated read to execute.
    TranslatedExecute,
    /// Translated read, not to execute.
    TranslatedRead,
    /// Translated write or atomic operation.
    TranslatedWrite,
    /// Translation request of PCI Express.
    TranslationRequest,
    /// Message of PCI Express.
    Message,
}

impl Transaction {
    const fn decode(code: u64) -> Option<Self> {
        Some(match code {
            0 => Self::None,
            1 => Self::UntranslatedExecute,
            2 => Self::UntranslatedRead,
            3 => Self::UntranslatedWrite,
            5 => Self::TranslatedExecute,
            6 => Self::TranslatedRead,
            7 => Self::TranslatedWrite,
            8 => Self::TranslationRequest,
            9 => Self::Message,
            _ => return None,
        })
    }
}

/// A decoded fault record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FaultRecord {
    /// Cause of the fault.
    pub cause: Cause,
    /// Type of the transaction.
    pub transaction: Transaction,
    /// Device id: the requester ID in bits 0 to 15, the segment above.
    pub device_id: u32,
    /// Process id of the transaction, if it had one (PID, PV).
    pub process: Option<u32>,
    /// The transaction had supervisor privilege (PRIV).
    pub privileged: bool,
    /// The address of the transaction, or a value that the cause defines.
    pub iotval: u64,
    /// The guest-physical address of a guest-page fault, without its two lowest bits.
    pub iotval2: u64,
    /// The four doublewords.
    pub raw: [u64; 4],
}

impl FaultRecord {
    /// Decodes a record. `None` if the cause, the transaction type or a reserved field has a value
    /// that the specification does not define.
    pub fn decode(raw: [u64; 4]) -> Option<Self> {
        let [header, second, iotval, iotval2] = raw;
        let cause = Cause::decode((header & 0xfff) as u16)?;
        let transaction = Transaction::decode(header >> 34 & 0x3f)?;
        if second & RESERVED != 0 {
            return None;
        }
        Some(Self {
            cause,
            transaction,
            device_id: (header >> 40) as u32,
            process: (header & PV != 0).then_some((header >> 12 & 0xf_ffff) as u32),
            privileged: header & PRIV != 0,
            iotval,
            iotval2,
            raw,
        })
    }

    /// Returns the requester ID of the device.
    pub const fn requester(&self) -> RequesterId {
        RequesterId::new(self.device_id as u16)
    }

    /// Returns true if the second stage faulted at an access of the first-stage walk or of the
    /// process directory (bit 0 of `iotval2`).
    pub const fn is_implicit(&self) -> bool {
        let guest_page = matches!(
            self.cause,
            Cause::InstructionGuestPage | Cause::ReadGuestPage | Cause::WriteGuestPage
        );
        guest_page && self.iotval2 & 1 != 0
    }
}

/// An entry of the fault queue, or the loss of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultEvent {
    /// A fault with its decoded record.
    Record(FaultRecord),
    /// A record with undefined values.
    Malformed([u64; 4]),
    /// The unit discarded records.
    Lost(Loss),
}
