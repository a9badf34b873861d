//! A hostile client of the vfio-user server, and the driver of its devices: a disk, a network
//! device, an IOMMU with a disk behind it, the para-virtual IOMMU with a disk behind it.
//!
//! The input is a sequence of messages as they cross the socket. A byte before each describes its
//! descriptors. Bits 0..=1 give their number, bits 2..=4 their kind (sealed memory, an eventfd,
//! memory that could shrink, a directory, more sealed memory than one client may map).
//!
//! Three commands are not messages:
//!
//! - 200 writes its body to the guest's memory, at the offset in its first four bytes.
//! - 201 selects the device for the next messages with its first byte (the disk at first).
//! - 202 makes the network's other end send its body except the first byte, and accept as many
//!   frames as the first byte states.

mod devices;
mod files;

use ringfence_live::{FunctionError, MemoryError, Refusal};
use ringfence_vfio_user::{
    FramingError, HEADER_BYTES, Inbox, MAX_MESSAGE_BYTES, ReceivedFds, RequestError,
};

use self::devices::Devices;
pub(crate) use self::files::{DISK_BYTES, Files, with_files};
use crate::OutcomeHook;

/// Outcomes that the corpus reaches: every refusal except three, and all that each device can do
/// with requests. `TooMany` takes a thousand ranges; `HugePages` needs a host with such pages, and
/// `Unlockable` one that locks shared memory. The tests of `ringfence-live` cover all three.
pub const OUTCOMES: &[&str] = &[
    "answered",
    "served",
    "rung in vain",
    "made up for",
    "net: rung in vain",
    "net: sent",
    "net: received",
    "net: dropped",
    "net: no such command",
    "iommu: served",
    "iommu: rung in vain",
    "iommu: refused",
    "iommu: fault",
    "iommu: stale",
    "translated: served",
    "para: mapped",
    "para: unmapped",
    "para: refused",
    "para: fault",
    "para: broken",
    "para: served",
    "refused: version",
    "refused: index",
    "request: UnknownCommand",
    "request: Unsupported",
    "request: Length",
    "request: Descriptors",
    "request: Flags",
    "request: Range",
    "request: TooMuchData",
    "memory: Overlap",
    "memory: TooLong",
    "memory: Unsealed",
    "memory: Unmappable",
    "memory: Split",
    "memory: Absent",
    "function: OutsideRegion",
    "function: NoSuchVector",
    "function: IrqUnsupported",
    "function: NotAnEvent",
    "framing: Short",
    "framing: Long",
    "framing: NotACommand",
];

const POKE: u16 = 200;
const TALK_TO: u16 = 201;
const PEER: u16 = 202;

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    with_files(|files| session(data, files, reached));
}

fn session(data: &[u8], files: &Files, reached: OutcomeHook<'_>) {
    let mut devices = Devices::new(&files.disk);
    let mut inbox = Inbox::default();
    let mut rest = data;
    while let Some((about, after)) = rest.split_first() {
        rest = after;
        let mut fds = files.descriptors(*about);
        let message = loop {
            let wants = inbox.bytes_wanted();
            assert!((1..=MAX_MESSAGE_BYTES).contains(&wants), "bounded");
            let (piece, after) = rest.split_at(wants.min(rest.len()));
            rest = after;
            if piece.is_empty() {
                return;
            }
            match inbox.feed(piece, fds.drain(..), ReceivedFds::All) {
                Ok(Some(message)) => break message,
                Ok(None) => {}
                Err(error) => {
                    reached(framing(error));
                    return;
                }
            }
        };
        match (
            message.header.command,
            message.body.split_first_chunk::<4>(),
        ) {
            (POKE, Some((at, bytes))) => {
                files.poke(u32::from_le_bytes(*at), bytes);
                continue;
            }
            (TALK_TO, Some(([device, ..], _))) => {
                devices.talk_to(*device);
                continue;
            }
            (PEER, _) => {
                if let Some((room, bytes)) = message.body.split_first() {
                    devices.peer(*room, bytes);
                }
                devices.tell(reached);
                continue;
            }
            _ => {}
        }
        let header = message.header;
        let outcome = devices.handle(message);
        assert_eq!(outcome.reply.is_none(), header.no_reply);
        if let Some(reply) = outcome.reply {
            let size = u32::from_le_bytes(reply[4..8].try_into().expect("4 bytes"));
            assert_eq!(usize::try_from(size), Ok(reply.len()));
            assert!(reply.len() >= HEADER_BYTES && reply[..2] == header.id.to_le_bytes());
            assert_eq!(reply[8] & 0x20 != 0, outcome.refusal.is_some());
        }
        match outcome.refusal {
            None => reached("answered"),
            Some(refusal) => {
                let _ = refusal.to_string();
                reached(refused(&refusal));
            }
        }
        devices.tell(reached);
    }
}

const fn framing(error: FramingError) -> &'static str {
    match error {
        FramingError::Short { .. } => "framing: Short",
        FramingError::Long { .. } => "framing: Long",
        FramingError::NotACommand { .. } => "framing: NotACommand",
        _ => panic!("an error without a label"),
    }
}

const fn refused(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::NotNegotiated { .. }
        | Refusal::NegotiatedAlready
        | Refusal::UnsupportedMajor { .. } => "refused: version",
        Refusal::Index { .. } => "refused: index",
        Refusal::Request(error) => match error {
            RequestError::UnknownCommand { .. } => "request: UnknownCommand",
            RequestError::Unsupported { .. } => "request: Unsupported",
            RequestError::Length { .. } => "request: Length",
            RequestError::Descriptors { .. } => "request: Descriptors",
            RequestError::Flags { .. } => "request: Flags",
            RequestError::Range { .. } => "request: Range",
            RequestError::TooMuchData { .. } => "request: TooMuchData",
            _ => panic!("an error without a label"),
        },
        Refusal::Memory(error) => match error {
            MemoryError::Overlap { .. } => "memory: Overlap",
            MemoryError::TooMany { .. } => "memory: TooMany",
            MemoryError::TooLong { .. } => "memory: TooLong",
            MemoryError::Unsealed { .. } => "memory: Unsealed",
            MemoryError::Unmappable { .. } => "memory: Unmappable",
            MemoryError::HugePages { .. } | MemoryError::Unlockable { .. } => {
                panic!("there are no huge pages here, and nothing is locked")
            }
            MemoryError::Split { .. } => "memory: Split",
            MemoryError::Absent { .. } => "memory: Absent",
        },
        Refusal::Function(error) => match error {
            FunctionError::OutsideRegion { .. } => "function: OutsideRegion",
            FunctionError::NoSuchVector { .. } => "function: NoSuchVector",
            FunctionError::IrqUnsupported { .. } => "function: IrqUnsupported",
            FunctionError::NotAnEvent { .. } => "function: NotAnEvent",
            FunctionError::StillMaster
            | FunctionError::MemoryInUse
            | FunctionError::ResetPending => {
                panic!("nobody works for these devices")
            }
        },
    }
}
