//! Records of the event queue (IHI 0070, section 7.3).

use ringfence_types::{Access, GuestPhysAddr, Iova, PhysAddr};

const SSV: u64 = 1 << 11;
const STALL: u64 = 1 << 31;
const PNU: u64 = 1 << 33;
const IND: u64 = 1 << 34;
const RNW: u64 = 1 << 35;
const S2: u64 = 1 << 39;
/// Field FetchAddr: address of a failed fetch.
const FETCH: u64 = 0x00ff_ffff_ffff_fff8;
/// Field IPA: intermediate physical address of a fault of stage 2.
const IPA: u64 = 0x00ff_ffff_ffff_f000;

/// Type of an event. Each variant cites its name in IHI 0070, section 7.3.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum EventType {
    /// `F_UUT`: unsupported transaction.
    UnsupportedTransaction = 0x01,
    /// `C_BAD_STREAMID`: the stream table does not reach the stream.
    BadStreamId = 0x02,
    /// `F_STE_FETCH`: the unit could not read the stream table.
    StreamEntryFetch = 0x03,
    /// `C_BAD_STE`: the stream table entry is not valid.
    BadStreamEntry = 0x04,
    /// `F_BAD_ATS_TREQ`: a translation request that is not permitted.
    BadTranslationRequest = 0x05,
    /// `F_STREAM_DISABLED`: the default substream is disabled.
    StreamDisabled = 0x06,
    /// `F_TRANSL_FORBIDDEN`: a translated transaction that is not permitted.
    TranslatedForbidden = 0x07,
    /// `C_BAD_SUBSTREAMID`: the transaction has a substream that is not configured.
    BadSubstreamId = 0x08,
    /// `F_CD_FETCH`: the unit could not read a context descriptor.
    ContextFetch = 0x09,
    /// `C_BAD_CD`: the context descriptor is not valid.
    BadContext = 0x0a,
    /// `F_WALK_EABT`: the unit could not read a translation table.
    WalkAbort = 0x0b,
    /// `F_TRANSLATION`: no translation.
    Translation = 0x10,
    /// `F_ADDR_SIZE`: an address of a table is too wide.
    AddressSize = 0x11,
    /// `F_ACCESS`: the leaf is not marked accessed.
    AccessFlag = 0x12,
    /// `F_PERMISSION`: the leaf does not permit the access.
    Permission = 0x13,
    /// `F_TLB_CONFLICT`: two entries of a TLB match.
    TlbConflict = 0x20,
    /// `F_CFG_CONFLICT`: two cached entries of a configuration match.
    ConfigurationConflict = 0x21,
    /// `E_PAGE_REQUEST`: a hint that pages will be accessed.
    PageRequest = 0x24,
    /// `F_VMS_FETCH`: the unit could not read the structure of a virtual machine.
    VirtualMachineFetch = 0x25,
}

const EVENT_TYPES: [EventType; 19] = [
    EventType::UnsupportedTransaction,
    EventType::BadStreamId,
    EventType::StreamEntryFetch,
    EventType::BadStreamEntry,
    EventType::BadTranslationRequest,
    EventType::StreamDisabled,
    EventType::TranslatedForbidden,
    EventType::BadSubstreamId,
    EventType::ContextFetch,
    EventType::BadContext,
    EventType::WalkAbort,
    EventType::Translation,
    EventType::AddressSize,
    EventType::AccessFlag,
    EventType::Permission,
    EventType::TlbConflict,
    EventType::ConfigurationConflict,
    EventType::PageRequest,
    EventType::VirtualMachineFetch,
];

impl EventType {
    fn decode(number: u8) -> Option<Self> {
        EVENT_TYPES
            .iter()
            .find(|kind| **kind as u8 == number)
            .copied()
    }

    /// Returns true if the record describes a transaction: its address and kind.
    const fn has_transaction(self) -> bool {
        matches!(
            self,
            Self::UnsupportedTransaction
                | Self::TranslatedForbidden
                | Self::WalkAbort
                | Self::Translation
                | Self::AddressSize
                | Self::AccessFlag
                | Self::Permission
                | Self::TlbConflict
        )
    }

    /// Returns true if the record names the stage that faulted.
    const fn has_stage(self) -> bool {
        matches!(
            self,
            Self::WalkAbort
                | Self::Translation
                | Self::AddressSize
                | Self::AccessFlag
                | Self::Permission
                | Self::TlbConflict
        )
    }

    const fn has_fetch_address(self) -> bool {
        matches!(
            self,
            Self::StreamEntryFetch
                | Self::ContextFetch
                | Self::WalkAbort
                | Self::VirtualMachineFetch
        )
    }
}

/// The access that a stopped transaction wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Transaction {
    /// The address of the transaction (InputAddr).
    pub address: Iova,
    /// Reads or writes (RnW).
    pub access: Access,
    /// The transaction fetched instructions (InD).
    pub is_instruction: bool,
    /// The transaction had privilege (PnU).
    pub is_privileged: bool,
}

/// The operation of the unit that faulted (CLASS).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// The fetch of a context descriptor.
    Context,
    /// The fetch of an entry of stage 1.
    Table,
    /// The translation of the transaction's address.
    Input,
    /// The reserved value.
    Reserved,
}

/// A fault of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StageFault {
    /// Stage 2 faulted (S2), otherwise stage 1.
    pub is_stage2: bool,
    /// The operation that faulted.
    pub class: Class,
    /// The transaction waits for `CMD_RESUME` (Stall). The driver disables stalls, so only a faulty
    /// unit sets it; [`EventRecord::raw`] has the tag (STAG).
    pub is_stalled: bool,
    /// Page of the intermediate physical address, for faults of stage 2 (IPA).
    pub ipa: Option<GuestPhysAddr>,
}

/// A decoded record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EventRecord {
    /// Type of the event.
    pub event_type: EventType,
    /// Stream id of the device.
    pub stream_id: u32,
    /// Substream id of the transaction, if it had one.
    pub substream: Option<u32>,
    /// The transaction, if the record describes one.
    pub transaction: Option<Transaction>,
    /// The stage, if the record names one.
    pub stage: Option<StageFault>,
    /// Address of the structure that the unit could not read (FetchAddr).
    pub fetch_address: Option<PhysAddr>,
    /// The four doublewords.
    pub raw: [u64; 4],
}

impl EventRecord {
    /// Decodes a record. `None` if the specification does not define its number.
    pub fn decode(raw: [u64; 4]) -> Option<Self> {
        let [head, flags, address, last] = raw;
        let event_type = EventType::decode((head & 0xff) as u8)?;
        let transaction = Transaction {
            address: Iova::new(address),
            access: match flags & RNW {
                0 => Access::Write,
                _ => Access::Read,
            },
            is_instruction: flags & IND != 0,
            is_privileged: flags & PNU != 0,
        };
        let is_stage2 = flags & S2 != 0;
        let has_ipa = is_stage2 && !event_type.has_fetch_address();
        let stage = StageFault {
            is_stage2,
            class: match flags >> 40 & 0b11 {
                0 => Class::Context,
                1 => Class::Table,
                2 => Class::Input,
                _ => Class::Reserved,
            },
            is_stalled: flags & STALL != 0,
            ipa: has_ipa.then_some(GuestPhysAddr::new(last & IPA)),
        };
        let fetch_address = PhysAddr::new(last & FETCH);
        Some(Self {
            event_type,
            stream_id: (head >> 32) as u32,
            substream: (head & SSV != 0).then_some((head >> 12 & 0xf_ffff) as u32),
            transaction: event_type.has_transaction().then_some(transaction),
            stage: event_type.has_stage().then_some(stage),
            fetch_address: event_type.has_fetch_address().then_some(fetch_address),
            raw,
        })
    }
}

/// The reason why records were lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Loss {
    /// The queue was full (`EVENTQ_PROD.OVFLG`).
    Overflow,
    /// The unit could not write to the queue (`GERROR.EVENTQ_ABT_ERR`). Records before this event
    /// may be wrong.
    Abort,
    /// The unit's index was outside the queue.
    Index,
}

/// An entry of the event queue, or the loss of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultEvent {
    /// A decoded record.
    Record(EventRecord),
    /// A record with a number that the specification does not define.
    Malformed([u64; 4]),
    /// The unit lost records.
    Lost(Loss),
}
