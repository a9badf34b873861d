//! A hostile front-end of the vhost-user server, and the driver of the disk behind it.
//!
//! The input is a sequence of steps, each a byte and its arguments. The byte, modulo 9, selects the
//! step:
//!
//! - 0: stream. A byte about descriptors, then a message as it crosses the socket.
//! - 1: message. Request; byte: bit 0 asks for a reply, bit 1 is one, bit 2 another version; a byte
//!   about descriptors; length; that many bytes.
//! - 2: bring up: the messages of a front-end until the ring runs. Byte: parts that are left out.
//! - 3: poke: the driver writes. Address in the guest's memory, two bytes; length; that many bytes.
//! - 4: offer: a request in the ring. Type, sector, length in sectors, flags: bit 0 a loop, bit 1 a
//!   buffer outside memory, bit 2 no kick.
//! - 5: kick. No arguments.
//! - 6: IOTLB message as a front-end sends it. Byte: bits 0..=2 type, 3..=4 permissions; page,
//!   pages, frame.
//! - 7: reply to a miss. Byte modulo 5: as requested, refused, done without an update, late after
//!   an invalidation, or any 20 bytes that follow.
//! - 8: serve: replies as requested. Number of misses.
//!
//! A byte about descriptors: bits 0..=3 their number, bits 4..=6 their kind ([`Files`]).
//!
//! `front_end.rs` lists the invariants.

mod files;
mod front_end;

use ringfence_live::MemoryError;
use ringfence_live::vhost_user::{Refusal, RequestError, StreamError};
use ringfence_softiommu::iotlb::{FrameError, IotlbError, MessageError, RegionError};

use self::files::with_files;
use self::front_end::FrontEnd;
use crate::OutcomeHook;

/// Outcomes that the corpus reaches: everything except the following. Only the host causes
/// `Refusal::Host` and the IOTLB's `Unit` and `ReadSectionOpen`. Eight regions cannot cause
/// `MemoryError::TooMany` and `RegionError::TooMany`. `TooLong` needs a longer file than any here
/// (`vfio_user` has it), and `HugePages` a file of huge pages, which not every host has. No message
/// of this protocol causes `Split` and `Absent`. The device itself causes `NotAMiss` and
/// `TooManyMisses`, which `vhost_iotlb` has.
pub const OUTCOMES: &[&str] = &[
    "answered",
    "acknowledged",
    "silent",
    "closed",
    "miss",
    "served",
    "failed",
    "malformed",
    "broken",
    "fault",
    "interrupt",
    "crowded",
    "runaway",
    "stream: Version",
    "stream: Long",
    "request: Unknown",
    "request: NotARequest",
    "request: Length",
    "request: Descriptors",
    "request: Regions",
    "request: Polled",
    "memory: Overlap",
    "memory: Unsealed",
    "memory: Unmappable",
    "regions: Wraps",
    "regions: Overlap",
    "region",
    "message: Kind",
    "message: Permissions",
    "message: Range",
    "iotlb: NotForUs",
    "iotlb: NotShared",
    "iotlb: NoPage",
    "iotlb: Map",
    "iotlb: NoMiss",
    "reply: Version",
    "reply: Length",
    "reply: NoReply",
    "features",
    "untranslated",
    "no ring",
    "size",
    "base",
    "misaligned",
    "running",
    "incomplete",
    "not an event",
    "channel",
    "not a stream",
];

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    with_files(|files| {
        let mut front_end = FrontEnd::new(files, reached);
        let mut data = data;
        while let Some(rest) = step(&mut front_end, data) {
            data = rest;
        }
        front_end.end();
    });
}

/// Runs one step; `None` at the end of the input or of the conversation.
fn step<'d>(front_end: &mut FrontEnd<'_, '_>, data: &'d [u8]) -> Option<&'d [u8]> {
    let (step, data) = data.split_first()?;
    let rest = match step % 9 {
        0 => {
            let (about, data) = data.split_first()?;
            front_end.stream(*about, data)?
        }
        1 => {
            let (&[request, flags, about, bytes], data) = data.split_first_chunk()?;
            let (payload, data) = data.split_at(data.len().min(bytes.into()));
            front_end.send(request.into(), flags, about, payload);
            data
        }
        2 => {
            let (&without, data) = data.split_first()?;
            front_end.bring_up(without);
            data
        }
        3 => {
            let (&[low, high, bytes], data) = data.split_first_chunk()?;
            let (bytes, data) = data.split_at(data.len().min(bytes.into()));
            front_end.poke(u16::from_le_bytes([low, high]).into(), bytes);
            data
        }
        4 => {
            let (&[kind, sector, sectors, flags], data) = data.split_first_chunk()?;
            front_end.offer(kind.into(), sector.into(), sectors.into(), flags);
            data
        }
        5 => {
            front_end.kick();
            data
        }
        6 => {
            let (&[kind, page, pages, frame], data) = data.split_first_chunk()?;
            front_end.iotlb(kind, page, pages, frame);
            data
        }
        7 => {
            let (&how, data) = data.split_first()?;
            if how % 5 == 4 {
                let (bytes, data) = data.split_first_chunk()?;
                front_end.reply_bytes(bytes);
                data
            } else {
                front_end.reply(how % 5);
                data
            }
        }
        _ => {
            let (&misses, data) = data.split_first()?;
            for _ in 0..misses {
                if !front_end.reply(0) {
                    break;
                }
            }
            data
        }
    };
    front_end.is_open().then_some(rest)
}

const fn stream(error: StreamError) -> &'static str {
    match error {
        StreamError::Frame(_) => "stream: Version",
        StreamError::Long { .. } => "stream: Long",
    }
}

fn refused(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::Request(error) => match error {
            RequestError::Unknown { .. } => "request: Unknown",
            RequestError::NotARequest { .. } => "request: NotARequest",
            RequestError::Length { .. } => "request: Length",
            RequestError::Descriptors { .. } => "request: Descriptors",
            RequestError::Regions { .. } => "request: Regions",
            RequestError::Polled { .. } => "request: Polled",
        },
        Refusal::Memory(error) => match error {
            MemoryError::Overlap { .. } => "memory: Overlap",
            MemoryError::TooLong { .. } => "memory: TooLong",
            MemoryError::Unsealed { .. } => "memory: Unsealed",
            MemoryError::Unmappable { .. } => "memory: Unmappable",
            other => panic!("{other}"),
        },
        Refusal::Regions(error) => match error {
            RegionError::Wraps { .. } => "regions: Wraps",
            RegionError::Overlap { .. } => "regions: Overlap",
            other => panic!("{other}"),
        },
        Refusal::Region { .. } => "region",
        Refusal::Message(error) => match error {
            MessageError::Kind(_) => "message: Kind",
            MessageError::Permissions(_) => "message: Permissions",
            MessageError::Range { .. } => "message: Range",
        },
        Refusal::Iotlb(error) => match error {
            IotlbError::NotForUs => "iotlb: NotForUs",
            IotlbError::NotShared { .. } => "iotlb: NotShared",
            IotlbError::NoPage { .. } => "iotlb: NoPage",
            IotlbError::Map(_) => "iotlb: Map",
            IotlbError::NoMiss => "iotlb: NoMiss",
            other => panic!("{other}"),
        },
        Refusal::Reply(error) => match error {
            FrameError::Version(_) => "reply: Version",
            FrameError::Length(_) => "reply: Length",
            FrameError::NoReply => "reply: NoReply",
        },
        Refusal::Features { .. } => "features",
        Refusal::Untranslated { .. } => "untranslated",
        Refusal::NoRing { .. } => "no ring",
        Refusal::Size { .. } => "size",
        Refusal::Base { .. } => "base",
        Refusal::Misaligned { .. } => "misaligned",
        Refusal::Running => "running",
        Refusal::Incomplete => "incomplete",
        Refusal::NotAnEvent => "not an event",
        Refusal::Channel => "channel",
        Refusal::NotAStream => "not a stream",
        other => panic!("{other}"),
    }
}
