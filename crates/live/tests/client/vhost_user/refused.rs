//! Single requests, without sockets: refusals and their reasons.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use proptest::prelude::*;
use ringfence_live::counters::DeviceCounters;
use ringfence_live::server::{EventHandler, ServeEvent};
use ringfence_live::vhost_user::{Refusal, RequestError, Session, VhostUser, VhostUserRequest};
use ringfence_live::virtio::blk::Blk;
use ringfence_softiommu::iotlb::{Header, Message as Iotlb};
use ringfence_types::{Iova, IovaRange, Permissions};
use ringfence_vfio_user::{Message, MessageAssembler, ReceivedFds};

use super::front_end::*;
use crate::rig::{disk_file, sealed};

/// A session without sockets.
struct Alone(Session<Blk>);

impl Alone {
    fn new() -> Self {
        let counters = Arc::new(DeviceCounters::default());
        let disk = Blk::new(disk_file(), false, Arc::clone(&counters)).unwrap();
        let report: EventHandler = Arc::new(|_: &ServeEvent<'_>| ());
        let session = Session::new(disk, &SETTINGS, counters, report);
        Self(session.unwrap())
    }

    fn tell(&mut self, request: u32, payload: &[u8], fds: Vec<OwnedFd>) -> Option<Refusal> {
        let outcome = self.0.handle(message(request, payload, fds)?);
        // A request for data gets the data, or the connection closes.
        let asks = matches!(request, 1 | 11 | 15 | 17 | 24);
        assert_eq!(outcome.close, asks && outcome.refusal.is_some());
        assert!(!outcome.close || outcome.reply.is_none());
        outcome.refusal
    }
}

fn message(request: u32, payload: &[u8], fds: Vec<OwnedFd>) -> Option<Message<Header>> {
    let mut inbox = MessageAssembler::<VhostUser>::default();
    inbox
        .feed(&frame(request, 0, payload), fds, ReceivedFds::All)
        .ok()?
}

#[test]
fn refused_messages() {
    let mut alone = Alone::new();
    let file = |file: std::fs::File| vec![OwnedFd::from(file)];
    let table = |count: u32, regions: &[u64]| [halves(&[count, 0]), longs(regions)].concat();
    let length = |request, bytes| Refusal::Request(RequestError::Length { request, bytes });
    let ram = || sealed(RAM_BYTES);
    let unsealed = || {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let fd = rustix::fs::memfd_create("open", flags).unwrap();
        rustix::fs::ftruncate(&fd, RAM_BYTES).unwrap();
        vec![fd]
    };
    for (request, payload, fds, why) in [
        (0, vec![], vec![], "request 0 was not offered"),
        (37, vec![], vec![], "request 37 was not offered"),
        (
            SET_FEATURES,
            longs(&[1 << 63]),
            vec![],
            "features 0x8000000000000000 were not offered",
        ),
        (
            SET_PROTOCOL_FEATURES,
            longs(&[1]),
            vec![],
            "features 0x1 were not offered",
        ),
        (
            SET_VRING_NUM,
            halves(&[1, 8]),
            vec![],
            "ring 1 does not exist",
        ),
        (
            SET_VRING_NUM,
            halves(&[0, 7]),
            vec![],
            "invalid ring size 7",
        ),
        (
            SET_VRING_NUM,
            halves(&[0, 0]),
            vec![],
            "invalid ring size 0",
        ),
        (
            SET_VRING_NUM,
            halves(&[0, 512]),
            vec![],
            "invalid ring size 512",
        ),
        (
            SET_VRING_BASE,
            halves(&[0, 0x1_0000]),
            vec![],
            "invalid ring index 65536",
        ),
        (
            SET_VRING_KICK,
            longs(&[0x100]),
            vec![],
            "ring 0 has no kick eventfd",
        ),
        (
            SET_VRING_KICK,
            longs(&[0]),
            vec![],
            "request 12 has 0 descriptors",
        ),
        (
            SET_VRING_KICK,
            longs(&[0]),
            file(ram()),
            "the descriptor is not an eventfd",
        ),
        (
            SET_VRING_CALL,
            longs(&[0]),
            file(ram()),
            "the descriptor is not an eventfd",
        ),
        (
            SET_VRING_CALL,
            longs(&[0]),
            vec![event(), event()],
            "request 13 has 2 descriptors",
        ),
        (
            SET_VRING_NUM,
            halves(&[0, 8]),
            vec![event()],
            "request 8 has 1 descriptors",
        ),
        (
            SET_MEM_TABLE,
            table(0, &[]),
            vec![],
            "the memory table has 0 regions, not 1 to 8",
        ),
        (
            SET_MEM_TABLE,
            table(9, &[0; 36]),
            vec![],
            "the memory table has 9 regions, not 1 to 8",
        ),
        (
            SET_MEM_TABLE,
            table(1, &[0, 4096, USER, 0]),
            vec![],
            "request 5 has 0 descriptors",
        ),
        (
            SET_MEM_TABLE,
            table(1, &[0, 0, USER, 0]),
            file(ram()),
            "the region at 0x7f0000000000 is empty or exceeds the address space",
        ),
        (
            SET_MEM_TABLE,
            table(1, &[0, 4096, u64::MAX, 0]),
            file(ram()),
            "the region at 0xffffffffffffffff wraps",
        ),
        (
            SET_MEM_TABLE,
            table(1, &[0, RAM_BYTES, USER, 4096]),
            file(ram()),
            "cannot map 0x100000 bytes of guest memory at 0x0: the file is too short, misaligned \
            or unmappable",
        ),
        (
            SET_MEM_TABLE,
            table(1, &[0, RAM_BYTES, USER, 0]),
            unsealed(),
            "cannot map 0x100000 bytes of guest memory at 0x0: its file is not sealed against \
            shrinking",
        ),
        (IOTLB, vec![0; 32], vec![], "no IOTLB message has type 0"),
        (
            GET_CONFIG,
            halves(&[0, 256, 0]),
            vec![],
            "request 24 has a payload of 12 bytes",
        ),
        (
            GET_CONFIG,
            halves(&[0, u32::MAX, 0]),
            vec![],
            "request 24 has a payload of 12 bytes",
        ),
    ] {
        let refusal = alone.tell(request, &payload, fds);
        assert_eq!(
            refusal.map(|refusal| refusal.to_string()).as_deref(),
            Some(why)
        );
    }
    for request in [
        SET_FEATURES,
        SET_VRING_ADDR,
        SET_VRING_ENABLE,
        GET_VRING_BASE,
        IOTLB,
    ] {
        assert_eq!(
            alone.tell(request, &[0; 7], vec![]),
            Some(length(request, 7))
        );
    }
    // An update for memory that was not shared.
    let update = Iotlb::Update {
        range: IovaRange::new(Iova::new(PAGE), PAGE).unwrap(),
        user: USER,
        permissions: Permissions::READ,
    };
    let refusal = alone.tell(IOTLB, &update.encode(), vec![]);
    assert!(matches!(refusal, Some(Refusal::Iotlb(_))), "{refusal:?}");
    // A reply on the request socket, and a reply to no request.
    let reply = message_with(GET_FEATURES, 4);
    assert_eq!(
        VhostUserRequest::parse(reply).unwrap_err(),
        RequestError::NotARequest {
            request: GET_FEATURES
        }
    );
    assert!(matches!(alone.0.replied(true), Err(Refusal::Iotlb(_))));
    // A channel that cannot be read, or that does not preserve a byte stream.
    let datagram = std::os::unix::net::UnixDatagram::pair().unwrap().0;
    for channel in [event(), sealed(RAM_BYTES).into(), datagram.into()] {
        assert_eq!(
            alone.tell(SET_BACKEND_REQ_FD, &[], vec![channel]),
            Some(Refusal::NotAStream)
        );
    }
    // Two channels.
    let pair = || vec![OwnedFd::from(UnixStream::pair().unwrap().0)];
    assert_eq!(alone.tell(SET_BACKEND_REQ_FD, &[], pair()), None);
    assert_eq!(
        alone.tell(SET_BACKEND_REQ_FD, &[], pair()),
        Some(Refusal::Channel)
    );
    // Errors of the stream.
    let mut inbox = MessageAssembler::<VhostUser>::default();
    assert!(
        inbox
            .feed(&halves(&[1, 1, 513]), [], ReceivedFds::All)
            .is_err()
    );
    let mut inbox = MessageAssembler::<VhostUser>::default();
    assert!(
        inbox
            .feed(&halves(&[1, 2, 0]), [], ReceivedFds::All)
            .is_err()
    );
}

/// The front-end would misread an acknowledgement as the data that it requested.
#[test]
fn malformed_request_for_a_reply_closes_the_connection() {
    let mut alone = Alone::new();
    assert_eq!(
        alone.tell(SET_PROTOCOL_FEATURES, &longs(&[PROTOCOL]), vec![]),
        None
    );
    let mut inbox = MessageAssembler::<VhostUser>::default();
    let wrong = frame(GET_FEATURES, 8, &[0; 8]);
    let wrong = inbox.feed(&wrong, [], ReceivedFds::All).unwrap().unwrap();
    let outcome = alone.0.handle(wrong);
    assert!(outcome.close && outcome.reply.is_none());
}

fn message_with(request: u32, flags: u32) -> Message<Header> {
    let mut inbox = MessageAssembler::<VhostUser>::default();
    inbox
        .feed(&frame(request, flags, &[]), [], ReceivedFds::All)
        .unwrap()
        .unwrap()
}

/// Returns a descriptor of one kind.
fn descriptor(kind: u8) -> OwnedFd {
    match kind {
        0 => event(),
        1 => sealed(RAM_BYTES).into(),
        _ => UnixStream::pair().unwrap().0.into(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any messages in any order: each gets a reply or a reason, and the session returns the device
    /// at its end.
    #[test]
    fn no_message_harms(messages in prop::collection::vec(
        (0..44_u32, prop_oneof![Just(0_usize), Just(8), Just(12), Just(32), Just(40), 0..300_usize],
         prop::collection::vec(prop_oneof![Just(0_u8), Just(1), any::<u8>()], 300),
         prop::collection::vec(0..3_u8, 0..3)), 1..60)) {
        let mut alone = Alone::new();
        for (request, bytes, payload, fds) in messages {
            let fds = fds.into_iter().map(descriptor).collect();
            alone.tell(request, payload.get(..bytes).unwrap_or_default(), fds);
        }
        prop_assert!(alone.0.end().is_some());
    }
}
