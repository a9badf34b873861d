//! The front-end, and the invariants for all its messages:
//!
//! - A request for data is answered, or the conversation ends. Any other request is acknowledged
//!   with its result if the front-end asked for that and negotiated it.
//! - No byte of the guest's memory changes without the front-end's permission for the device to
//!   write, or after its revocation. A comparison with a copy before each such message and at the
//!   end checks this.
//! - The number of outstanding misses is within its limit.
//! - At the end, the device is idle, or it serves one request after another and can be stopped.
//! - At the end of an open conversation, the device understands the next request and is returned.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread;

use ringfence_live::counters::DeviceCounters;
use ringfence_live::limits::GuestLimits;
use ringfence_live::server::{EventHandler, ServeEvent};
use ringfence_live::vhost_user::{MAX_PAYLOAD_BYTES, Refusal, Session, Settings, VhostUser};
use ringfence_live::virtio::blk::Blk;
use ringfence_softiommu::iotlb::{Header, IotlbLimits, Message as Iotlb, reply_status};
use ringfence_types::{Iova, IovaRange, Permissions, RequesterId};
use ringfence_vfio_user::{Message, MessageAssembler, ReceivedFds};

use super::files::{CALL, CHANNEL, Files, KICK, RAM, RAM_BYTES, one};
use super::{refused, stream};
use crate::OutcomeHook;

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const RESET_OWNER: u32 = 4;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const GET_QUEUE_NUM: u32 = 17;
const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;
const IOTLB_MSG: u32 = 22;
const GET_CONFIG: u32 = 24;

const NEED_REPLY: u8 = 1;
const REPLY_ACK: u64 = 1 << 3;
const PAGE: u64 = 1 << 12;
const USER: u64 = 0x7f00_0000_0000;

/// Pages of the device's addresses. A well-behaved front-end maps them to the frames of the same
/// number.
const DESCRIPTORS: u64 = PAGE;
const AVAILABLE: u64 = 2 * PAGE;
const USED: u64 = 3 * PAGE;
const HEADER: u64 = 4 * PAGE;
const STATUS: u64 = 5 * PAGE;
const DATA: u64 = 6 * PAGE;
const QUEUE: u16 = 8;

const SETTINGS: Settings = Settings {
    device: RequesterId::new(0x20),
    iotlb: IotlbLimits {
        pages: 12,
        extra_pages: 4,
        tables: 8,
        misses: 3,
        width: ringfence_softiommu::Width::BITS_39,
        readers: 1,
    },
};

/// Number of requests after which a ring counts as endless.
const RUNAWAY: u64 = 256;

/// A region of the current table: its start in the front-end, its size in bytes, its start in the
/// file.
type Shared = (u64, u64, u64);

pub(super) struct FrontEnd<'f, 'r> {
    files: &'f Files,
    session: Session<Blk>,
    counters: Arc<DeviceCounters>,
    inbox: MessageAssembler<VhostUser>,
    reached: OutcomeHook<'r>,
    open: bool,
    protocol: u64,
    shared: Vec<Shared>,
    /// By page: the frames that the device may write through it, one bit each.
    writable: BTreeMap<u64, u16>,
    /// The guest's memory at the last check.
    before: Vec<u8>,
    /// True if the device may have written since the last check.
    touched: bool,
    offered: u16,
    /// Number of misses without a reply.
    unanswered: usize,
}

impl<'f, 'r> FrontEnd<'f, 'r> {
    pub(super) fn new(files: &'f Files, reached: OutcomeHook<'r>) -> Self {
        let counters = Arc::new(DeviceCounters::default());
        let file = files.disk.try_clone().expect("a copy");
        let mut disk = Blk::new(file, false, Arc::clone(&counters)).expect("a disk");
        let caps = GuestLimits {
            queue_size: 16,
            request_bytes: 1 << 15,
            ..GuestLimits::default()
        };
        disk.set_limits(&caps, ringfence_live::limits::BoundedLog::default());
        let report: EventHandler = Arc::new(|event: &ServeEvent<'_>| {
            if let ServeEvent::Broken(broken) = event {
                assert!(!broken.to_string().is_empty());
            }
        });
        let session = Session::new(disk, &SETTINGS, Arc::clone(&counters), report);
        Self {
            files,
            session: session.expect("sound limits"),
            counters,
            inbox: MessageAssembler::default(),
            reached,
            open: true,
            protocol: 0,
            shared: Vec::new(),
            writable: BTreeMap::new(),
            before: vec![0; RAM_BYTES as usize],
            touched: false,
            offered: 0,
            unanswered: 0,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open
    }

    /// Waits until the device is idle, or until it has served so many requests that it may never
    /// end: a driver can let the device overwrite the index that it reads.
    fn settle(&mut self) {
        let begun = self.counters.requests.get();
        while !self.session.is_idle() {
            if self.counters.requests.get() - begun > RUNAWAY {
                (self.reached)("runaway");
                return;
            }
            thread::yield_now();
        }
    }

    fn allowed(&self) -> u16 {
        self.writable.values().fold(0, |all, frames| all | frames)
    }

    /// Checks that only permitted frames have changed.
    fn check(&mut self) {
        if !self.touched {
            return;
        }
        let mut now = vec![0; RAM_BYTES as usize];
        self.files.ram.read_exact_at(&mut now, 0).expect("whole");
        let allowed = self.allowed();
        let frames = now
            .chunks(PAGE as usize)
            .zip(self.before.chunks(PAGE as usize));
        for (frame, (now, before)) in frames.enumerate() {
            assert!(
                allowed >> frame & 1 == 1 || now == before,
                "frame {frame} was written"
            );
        }
        self.before = now;
    }

    /// Copies the frames that the device may no longer write: from now on they must not change.
    fn revoked(&mut self, before: u16) {
        let gone = before & !self.allowed();
        for frame in (0..16_u64).filter(|frame| self.touched && gone >> frame & 1 == 1) {
            let start = (frame * PAGE) as usize;
            let bytes = &mut self.before[start..start + PAGE as usize];
            let at = frame * PAGE;
            self.files.ram.read_exact_at(bytes, at).expect("whole");
        }
    }

    /// Sends a message as it crosses the socket; returns the rest of the input.
    pub(super) fn stream<'d>(&mut self, about: u8, data: &'d [u8]) -> Option<&'d [u8]> {
        let mut fds = self.files.take(about);
        let mut rest = data;
        loop {
            let wants = self.inbox.bytes_wanted();
            let most = Header::BYTES + MAX_PAYLOAD_BYTES as usize;
            assert!((1..=most).contains(&wants), "bounded");
            let (piece, after) = rest.split_at(wants.min(rest.len()));
            rest = after;
            if piece.is_empty() {
                return None;
            }
            match self.inbox.feed(piece, fds.drain(..), ReceivedFds::All) {
                Ok(Some(message)) => {
                    self.hear(message);
                    return Some(rest);
                }
                Ok(None) => {}
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    (self.reached)(stream(error));
                    self.open = false;
                    return None;
                }
            }
        }
    }

    pub(super) fn send(&mut self, request: u32, flags: u8, about: u8, payload: &[u8]) {
        let bits = u32::from(flags & 1) << 3 | u32::from(flags & 2) << 1;
        let version = 1 + u32::from(flags >> 2 & 1);
        let header = [request, version | bits, payload.len() as u32];
        let header = header.into_iter().flat_map(u32::to_ne_bytes);
        let bytes: Vec<u8> = header.chain(payload.iter().copied()).collect();
        self.stream(about, &bytes);
    }

    fn hear(&mut self, message: Message<Header>) {
        let header = message.header;
        let body = message.body.clone();
        let asks = !header.reply
            && [
                GET_FEATURES,
                GET_PROTOCOL_FEATURES,
                GET_QUEUE_NUM,
                GET_VRING_BASE,
                GET_CONFIG,
            ]
            .contains(&header.request);
        if [
            SET_MEM_TABLE,
            IOTLB_MSG,
            GET_VRING_BASE,
            SET_VRING_ENABLE,
            RESET_OWNER,
        ]
        .contains(&header.request)
        {
            self.check();
        }
        let outcome = self.session.handle(message);
        let ok = outcome.refusal.is_none();
        assert_eq!(outcome.close, asks && !ok, "{header:?}");
        if let Some(refusal) = &outcome.refusal {
            assert!(!refusal.to_string().is_empty());
            (self.reached)(refused(refusal));
        } else {
            let allowed = self.allowed();
            self.follow(header.request, &body);
            self.revoked(allowed);
        }
        // According to the protocol features that are negotiated now.
        let acknowledged = !asks && header.need_reply && self.protocol & REPLY_ACK != 0;
        match outcome.reply {
            None => {
                assert!(!acknowledged && (!asks || !ok), "{header:?}");
                (self.reached)("silent");
            }
            Some(reply) => {
                let (head, payload) = reply.split_first_chunk().expect("a header");
                let head = Header::decode(head).expect("a header");
                assert_eq!(
                    (head.request, head.reply, head.bytes as usize),
                    (header.request, true, payload.len())
                );
                if asks {
                    (self.reached)("answered");
                    assert!(ok && payload.len() >= 8, "{header:?}");
                } else {
                    assert!(acknowledged);
                    assert_eq!(payload, u64::from(!ok).to_ne_bytes());
                    (self.reached)("acknowledged");
                }
            }
        }
        if outcome.close {
            (self.reached)("closed");
            self.open = false;
        }
        self.settle();
    }

    /// Applies a successful message to the device's permissions.
    fn follow(&mut self, request: u32, body: &[u8]) {
        let half = |at: usize| u32::from_ne_bytes(body[at..at + 4].try_into().expect("4 bytes"));
        let long = |at: usize| u64::from_ne_bytes(body[at..at + 8].try_into().expect("8 bytes"));
        match request {
            SET_PROTOCOL_FEATURES => self.protocol = long(0),
            SET_MEM_TABLE => {
                let regions = (0..half(0) as usize).map(|n| 8 + n * 32);
                self.shared = regions
                    .map(|at| (long(at + 16), long(at + 8), long(at + 24)))
                    .collect();
                self.writable.clear();
            }
            RESET_OWNER | GET_VRING_BASE => self.writable.clear(),
            SET_VRING_ENABLE if half(4) == 0 => self.writable.clear(),
            SET_VRING_ENABLE | SET_VRING_KICK => self.touched = true,
            IOTLB_MSG => match Iotlb::decode(body.try_into().expect("32 bytes")) {
                Ok(Iotlb::Update {
                    range,
                    user,
                    permissions,
                }) => {
                    if permissions.union(Permissions::WRITE) == permissions {
                        self.granted(range, user);
                    }
                }
                Ok(Iotlb::Invalidate(None)) => self.writable.clear(),
                Ok(Iotlb::Invalidate(Some(range))) => {
                    let (first, last) = (range.start().get() / PAGE, range.last().get() / PAGE);
                    self.writable
                        .retain(|page, _| !(first..=last).contains(page));
                }
                other => panic!("{other:?} was done"),
            },
            _ => {}
        }
    }

    fn granted(&mut self, range: IovaRange, user: u64) {
        let region = self.shared.iter().find(|(from, bytes, _)| {
            user >= *from && user - from < *bytes && bytes - (user - from) >= range.bytes()
        });
        let (from, _, offset) = *region.expect("an update of shared memory");
        let file = offset + (user - from);
        let (start, last) = (range.start().get(), range.last().get());
        for page in start / PAGE..=last / PAGE {
            // The part of the page that the update covers.
            let (low, high) = (start.max(page * PAGE), last.min(page * PAGE + PAGE - 1));
            for at in [low, high] {
                let frame = (file + (at - start)) / PAGE;
                *self.writable.entry(page).or_default() |= 1 << frame;
            }
        }
    }

    /// Sends the messages that start the ring, except the parts whose bits are set.
    pub(super) fn bring_up(&mut self, without: u8) {
        let longs = |longs: &[u64]| -> Vec<u8> {
            longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
        };
        let low = |value: u64| value << 32;
        let messages = [
            (SET_PROTOCOL_FEATURES, 0, longs(&[1 << 3 | 1 << 5 | 1 << 9])),
            (SET_BACKEND_REQ_FD, one(CHANNEL), vec![]),
            (SET_FEATURES, 0, longs(&[3 << 32])),
            (SET_MEM_TABLE, one(RAM), longs(&[1, 0, RAM_BYTES, USER, 0])),
            (SET_VRING_NUM, 0, longs(&[low(QUEUE.into())])),
            (
                SET_VRING_ADDR,
                0,
                longs(&[0, DESCRIPTORS, USED, AVAILABLE, 0]),
            ),
            (SET_VRING_CALL, one(CALL), longs(&[0])),
            (SET_VRING_KICK, one(KICK), longs(&[0])),
        ];
        for (at, (request, about, payload)) in messages.iter().enumerate() {
            if self.open && without >> at & 1 == 0 {
                self.send(*request, NEED_REPLY, *about, payload);
            }
        }
        if self.open {
            self.send(SET_VRING_ENABLE, NEED_REPLY, 0, &longs(&[low(1)]));
        }
    }

    /// The driver writes to the guest's memory.
    pub(super) fn poke(&mut self, at: u64, bytes: &[u8]) {
        let room = (RAM_BYTES - at).min(bytes.len() as u64) as usize;
        let (bytes, start) = (&bytes[..room], at as usize);
        self.files.ram.write_all_at(bytes, at).expect("inside");
        self.before[start..start + room].copy_from_slice(bytes);
    }

    /// The driver adds a request to the ring, and kicks.
    pub(super) fn offer(&mut self, kind: u32, sector: u64, sectors: u32, flags: u8) {
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        self.poke(HEADER, &header);
        let data = if flags & 2 == 0 { DATA } else { 1 << 40 };
        let towards_us = if kind == 1 { 1_u16 } else { 3 };
        let end = flags & 1;
        for (at, (address, bytes, flags, next)) in [
            (HEADER, 16, 1, 1_u16),
            (data, sectors << 9, towards_us, 2),
            (STATUS, 1, 2 | u16::from(end), 0),
        ]
        .into_iter()
        .enumerate()
        {
            let mut descriptor = address.to_le_bytes().to_vec();
            descriptor.extend(u32::to_le_bytes(bytes));
            descriptor.extend(u16::to_le_bytes(flags));
            descriptor.extend(next.to_le_bytes());
            self.poke(DESCRIPTORS + at as u64 * 16, &descriptor);
        }
        self.poke(AVAILABLE + 4 + u64::from(self.offered % QUEUE) * 2, &[0, 0]);
        self.offered = self.offered.wrapping_add(1);
        self.poke(AVAILABLE + 2, &self.offered.to_le_bytes());
        if flags & 4 == 0 {
            self.kick();
        }
    }

    pub(super) fn kick(&mut self) {
        let _ = rustix::io::write(&self.files.kick, &1_u64.to_ne_bytes());
        self.settle();
    }

    pub(super) fn iotlb(&mut self, kind: u8, page: u8, pages: u8, frame: u8) {
        let [page, pages, frame] = [page, pages, frame].map(u64::from);
        let mut bytes: Vec<u8> = [page * PAGE, pages * PAGE, USER + frame * PAGE, 0]
            .into_iter()
            .flat_map(u64::to_ne_bytes)
            .collect();
        (bytes[24], bytes[25]) = (kind >> 3 & 3, kind & 7);
        self.send(IOTLB_MSG, NEED_REPLY, 0, &bytes);
    }

    /// Returns the next miss, if there is one.
    fn miss(&mut self) -> Option<(Iova, Permissions)> {
        let mut bytes = [0; 44];
        match (&self.files.channel).read(&mut bytes) {
            Ok(44) => {}
            Ok(0) | Err(_) => return None,
            Ok(other) => panic!("{other} bytes of a miss"),
        }
        let (header, message) = bytes.split_first_chunk().expect("a header");
        let header = Header::decode(header).expect("a header");
        assert_eq!(
            (header.request, header.need_reply, header.bytes),
            (1, true, 32)
        );
        let message = Iotlb::decode(message.try_into().expect("32 bytes"));
        let Ok(Iotlb::Miss { iova, required }) = message else {
            panic!("{message:?}");
        };
        (self.reached)("miss");
        self.unanswered += 1;
        let most = SETTINGS.iotlb.misses;
        assert!(self.unanswered <= most, "{} under way", self.unanswered);
        if self.unanswered == most {
            (self.reached)("crowded");
        }
        Some((iova, required))
    }

    /// Replies to the next miss, even if older misses have no reply yet; false if there is no miss.
    pub(super) fn reply(&mut self, how: u8) -> bool {
        let Some((iova, _)) = self.miss() else {
            return false;
        };
        let page = iova.get() / PAGE;
        let update = |front_end: &mut Self| {
            if page < 16 && front_end.open {
                front_end.iotlb(3 << 3 | 2, page as u8, 1, page as u8);
            }
        };
        match how {
            0 => update(self),
            3 => {
                self.iotlb(3, page as u8, 1, 0);
                update(self);
            }
            _ => {}
        }
        if self.open {
            self.hear_reply(Ok(how != 1));
        }
        true
    }

    /// Sends arbitrary bytes instead of a reply.
    pub(super) fn reply_bytes(&mut self, bytes: &[u8; 20]) {
        self.miss();
        self.hear_reply(reply_status(bytes).map_err(Refusal::Reply));
    }

    /// Handles a reply as the server does; an unexpected reply closes the conversation.
    fn hear_reply(&mut self, status: Result<bool, Refusal>) {
        match status.and_then(|done| self.session.replied(done)) {
            Ok(()) => {
                assert!(self.session.channel().is_some());
                self.unanswered = self.unanswered.saturating_sub(1);
            }
            Err(refusal) => {
                assert!(!refusal.to_string().is_empty());
                (self.reached)(refused(&refusal));
                self.open = false;
            }
        }
        self.settle();
    }

    /// The front-end disconnects.
    pub(super) fn end(mut self) {
        if self.open {
            self.inbox = MessageAssembler::default();
            self.send(GET_FEATURES, 0, 0, &[]);
            assert!(self.open, "understood");
        }
        while self.miss().is_some() {}
        self.check();
        let Self {
            session,
            counters,
            files,
            reached,
            ..
        } = self;
        assert!(session.end().is_some(), "the device's thread panicked");
        let disk = files.disk.metadata().expect("a file");
        assert_eq!(disk.len(), 1 << 15);
        let ended_well = counters.requests.get() > counters.failed.get() + counters.malformed.get();
        for (outcome, holds) in [
            ("served", ended_well),
            ("failed", counters.failed.get() > 0),
            ("malformed", counters.malformed.get() > 0),
            ("broken", counters.broken_queues.get() > 0),
            ("fault", counters.faults.get() > 0),
            ("interrupt", counters.interrupts.get() > 0),
        ] {
            if holds {
                reached(outcome);
            }
        }
    }
}
