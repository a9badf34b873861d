//! The IOTLB over two sockets: a front-end that answers, refuses, invalidates during a miss, stays
//! silent, or sends malformed frames.
#![cfg(feature = "vhost-user")]

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use ringfence_softiommu::iotlb::{
    FRONTEND_IOTLB, Header, Iotlb, IotlbClient, IotlbClientError, IotlbLimits, Message, Region,
    Regions,
};
use ringfence_types::{Access, Fault, Iova, IovaRange, Permissions, PhysAddr, RequesterId};

const DISK: RequesterId = RequesterId::new(0x20);
const PAGE: u64 = 1 << 12;
const USER: u64 = 0x7f00_0000_0000;
/// Long enough for a loaded machine; only the test of silence waits this long.
const PATIENCE: Duration = Duration::from_secs(20);

fn range(page: u64) -> IovaRange {
    IovaRange::new(Iova::new(page * PAGE), PAGE).unwrap()
}

/// Returns a back-end and the front-end's ends of its sockets: the main socket, then the one for
/// back-end requests.
fn connected(timeout: Duration) -> (IotlbClient<()>, UnixStream, UnixStream) {
    connected_with(IotlbLimits::default(), timeout)
}

fn connected_with(
    limits: IotlbLimits,
    timeout: Duration,
) -> (IotlbClient<()>, UnixStream, UnixStream) {
    let region = Region {
        user: USER,
        bytes: 64 * PAGE,
        memory: PhysAddr::ZERO,
    };
    let regions = Regions::new(&[region]).unwrap();
    let iotlb = Iotlb::new(limits, DISK, (), regions).unwrap();
    let (main, front) = UnixStream::pair().unwrap();
    let (requests, from_back) = UnixStream::pair().unwrap();
    let exchange = IotlbClient::new(iotlb, main, requests, timeout).unwrap();
    (exchange, front, from_back)
}

fn header(request: u32, flags: u32, bytes: u32) -> Vec<u8> {
    [request, flags, bytes].map(u32::to_ne_bytes).concat()
}

/// Sends a message on the main socket and waits for its acknowledgement. Returns true on success.
fn send(main: &mut UnixStream, message: &Message) -> bool {
    let mut frame = header(FRONTEND_IOTLB, 1 | 8, 32);
    frame.extend(message.encode());
    main.write_all(&frame).unwrap();
    let mut ack = [0; 20];
    main.read_exact(&mut ack).unwrap();
    assert_eq!(ack[..12], header(FRONTEND_IOTLB, 1 | 4, 8));
    ack[12..].iter().all(|byte| *byte == 0)
}

fn next_miss(requests: &mut UnixStream) -> (u64, Permissions) {
    let mut frame = [0; 44];
    requests.read_exact(&mut frame).unwrap();
    let header = Header::decode(frame.first_chunk().unwrap()).unwrap();
    assert!(header.need_reply && !header.reply && header.request == 1 && header.bytes == 32);
    match Message::decode(frame[12..].try_into().unwrap()) {
        Ok(Message::Miss { iova, required }) => (iova.get() / PAGE, required),
        other => panic!("{other:?}"),
    }
}

fn reply(requests: &mut UnixStream, status: u64) {
    let mut frame = header(1, 1 | 4, 8);
    frame.extend(status.to_ne_bytes());
    requests.write_all(&frame).unwrap();
}

fn page_is(page: u64, frame: u64) -> Message {
    Message::Update {
        range: range(page),
        user: USER + frame * PAGE,
        permissions: Permissions::READ,
    }
}

fn fault(exchange: &mut IotlbClient<()>, page: u64, access: Access) -> Fault {
    let mut reader = exchange.iotlb().reader().unwrap();
    let mut burst = reader.online();
    burst.guard().translate(range(page), access).unwrap_err()
}

fn frame_of(exchange: &mut IotlbClient<()>, page: u64) -> Option<u64> {
    let mut reader = exchange.iotlb().reader().unwrap();
    let mut burst = reader.online();
    let pieces = burst.guard().translate(range(page), Access::Read).ok()?;
    Some(pieces.first().start().get() / PAGE)
}

#[test]
fn misses_get_replies() {
    let (mut exchange, mut main, mut requests) = connected(PATIENCE);
    let (tell_front, resolved) = mpsc::channel();
    let front = thread::spawn(move || {
        for round in 0..100 {
            let (page, required) = next_miss(&mut requests);
            assert_eq!((page, required), (round, Permissions::READ));
            assert!(send(&mut main, &page_is(page, 63 - page % 64)));
            reply(&mut requests, 0);
        }
        let (page, required) = next_miss(&mut requests);
        assert_eq!((page, required), (7, Permissions::WRITE));
        reply(&mut requests, 1);
        // While no miss is pending.
        resolved.recv().unwrap();
        assert!(send(&mut main, &Message::Invalidate(Some(range(3)))));
        assert!(!send(&mut main, &page_is(3, 64)));
    });
    for page in 0..100 {
        let fault = fault(&mut exchange, page, Access::Read);
        exchange.resolve(&fault).unwrap();
        assert_eq!(frame_of(&mut exchange, page), Some(63 - page % 64));
    }
    let fault = fault(&mut exchange, 7, Access::Write);
    let refused = exchange.resolve(&fault);
    assert!(
        matches!(refused, Err(IotlbClientError::Refused(_))),
        "{refused:?}"
    );
    tell_front.send(()).unwrap();
    assert!(exchange.serve().unwrap() && exchange.serve().unwrap());
    assert_eq!(frame_of(&mut exchange, 3), None);
    front.join().unwrap();
}

/// Both the update and the reply are available. The client must handle the main socket first.
#[test]
fn the_update_is_followed_before_its_reply() {
    let (mut exchange, mut main, mut requests) = connected(PATIENCE);
    let mut frame = header(FRONTEND_IOTLB, 1, 32);
    frame.extend(page_is(5, 3).encode());
    main.write_all(&frame).unwrap();
    reply(&mut requests, 0);
    let fault = fault(&mut exchange, 5, Access::Read);
    exchange.resolve(&fault).unwrap();
    assert_eq!(next_miss(&mut requests), (5, Permissions::READ));
    assert_eq!(frame_of(&mut exchange, 5), Some(3));
}

/// The front-end always grants both permissions, and the back-end leaves replies unread. Each
/// access must still cause its own miss and is granted only by its answer.
#[test]
fn replies_left_unread_do_not_answer_for_others() {
    let (mut exchange, mut main, mut requests) = connected(PATIENCE);
    let front = thread::spawn(move || {
        for page in 0..40 {
            for required in [Permissions::READ, Permissions::WRITE] {
                assert_eq!(next_miss(&mut requests), (page, required));
                assert!(send(
                    &mut main,
                    &Message::Update {
                        range: range(page),
                        user: USER + page * PAGE,
                        permissions: Permissions::READ_WRITE,
                    }
                ));
                reply(&mut requests, 0);
            }
        }
    });
    let mut most = 0;
    for page in 0..40 {
        for access in [Access::Read, Access::Write] {
            // Still denied, although an earlier update granted both.
            let fault = fault(&mut exchange, page, access);
            exchange.resolve(&fault).unwrap();
            most = most.max(exchange.iotlb().misses());
        }
    }
    // The test is vacuous if no reply was left unread.
    assert!(most > 1, "{most}");
    front.join().unwrap();
}

/// A miss completes before its reply arrives. At the limit of pending misses, the next one waits
/// for that reply.
#[test]
fn one_miss_at_a_time() {
    let limits = IotlbLimits {
        misses: 1,
        ..IotlbLimits::default()
    };
    let (mut exchange, mut main, mut requests) = connected_with(limits, PATIENCE);
    let front = thread::spawn(move || {
        for _ in 0..20 {
            let (page, _) = next_miss(&mut requests);
            assert!(send(&mut main, &page_is(page, page)));
            // A message between an answer and its reply is executed while the back-end waits for
            // the reply.
            assert!(send(&mut main, &Message::Invalidate(Some(range(63)))));
            reply(&mut requests, 0);
        }
    });
    for page in 0..20 {
        let fault = fault(&mut exchange, page, Access::Read);
        exchange.resolve(&fault).unwrap();
        assert_eq!(frame_of(&mut exchange, page), Some(page));
        assert!(exchange.iotlb().misses() <= 1);
    }
    drop(exchange);
    let _ = front.join();
}

/// The front-end looks up, then sends an invalidation, and only then the old translation. The
/// back-end must miss again and use the second answer.
#[test]
fn overtaken_replies_are_requested_again() {
    let (mut exchange, mut main, mut requests) = connected(PATIENCE);
    let front = thread::spawn(move || {
        next_miss(&mut requests);
        assert!(send(&mut main, &Message::Invalidate(Some(range(5)))));
        assert!(send(&mut main, &page_is(5, 1)));
        reply(&mut requests, 0);
        next_miss(&mut requests);
        assert!(send(&mut main, &page_is(5, 2)));
        reply(&mut requests, 0);
    });
    let fault = fault(&mut exchange, 5, Access::Read);
    exchange.resolve(&fault).unwrap();
    assert_eq!(frame_of(&mut exchange, 5), Some(2));
    front.join().unwrap();
}

#[test]
fn a_front_end_that_makes_no_sense_is_given_up() {
    let mut bad_kind = header(FRONTEND_IOTLB, 1 | 8, 32);
    bad_kind.extend([9; 32]);
    let cases: [(Vec<u8>, Vec<u8>, &str); 8] = [
        (
            header(FRONTEND_IOTLB, 2, 32),
            vec![],
            "vhost-user version 2",
        ),
        (
            header(FRONTEND_IOTLB, 1, 33),
            vec![],
            "a payload of 33 bytes",
        ),
        (
            header(FRONTEND_IOTLB, 1, u32::MAX),
            vec![],
            "a payload of 4294967295 bytes",
        ),
        (header(2, 1, 0), vec![], "request 2 instead"),
        (
            header(FRONTEND_IOTLB, 1 | 4, 32),
            vec![],
            "request 22 instead",
        ),
        (
            vec![],
            [header(2, 1 | 4, 8), vec![0; 8]].concat(),
            "not a reply",
        ),
        (
            vec![],
            [header(1, 1 | 4, 9), vec![0; 8]].concat(),
            "a payload of 9 bytes",
        ),
        // Acknowledged as failed, followed by silence.
        (bad_kind, vec![], "the socket of the front-end failed: "),
    ];
    for (on_main, on_requests, expected) in cases {
        // Only the case of silence waits for the limit.
        let is_silent = expected.starts_with("the socket");
        let timeout = if is_silent {
            Duration::from_millis(50)
        } else {
            PATIENCE
        };
        let (mut exchange, mut main, mut requests) = connected(timeout);
        main.write_all(&on_main).unwrap();
        requests.write_all(&on_requests).unwrap();
        let fault = fault(&mut exchange, 0, Access::Read);
        let error = exchange.resolve(&fault).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}, not {expected}");
    }
}

/// Returns an IOTLB message that requests no acknowledgement.
fn frame(message: &Message) -> Vec<u8> {
    [&header(FRONTEND_IOTLB, 1, 32)[..], &message.encode()].concat()
}

fn is_timeout<T>(result: &Result<T, IotlbClientError>) -> bool {
    matches!(result, Err(IotlbClientError::Socket(error)) if error.kind() == ErrorKind::TimedOut)
}

/// The front-end never answers the miss, but always has another valid message. The time limit is
/// over before the first of them.
#[test]
fn other_messages_do_not_extend_a_miss() {
    let (mut exchange, mut main, _requests) = connected(Duration::from_nanos(1));
    for page in 1..=16 {
        main.write_all(&frame(&page_is(page, page))).unwrap();
    }
    let fault = fault(&mut exchange, 0, Access::Read);
    let result = exchange.resolve(&fault);
    assert!(is_timeout(&result), "{result:?}");
    let executed = exchange.iotlb().pages();
    assert!(executed < 16, "{executed} messages after the limit");
}

/// The front-end stops within a reply, within a message, or does not read acknowledgements.
#[test]
fn a_front_end_that_stops_is_given_up() {
    let timeout = Duration::from_millis(50);
    let (mut exchange, _main, mut requests) = connected(timeout);
    requests.write_all(&header(1, 1 | 4, 8)).unwrap();
    let missing = fault(&mut exchange, 0, Access::Read);
    let result = exchange.resolve(&missing);
    assert!(is_timeout(&result), "within a reply: {result:?}");

    let (mut exchange, mut main, _requests) = connected(timeout);
    main.write_all(&frame(&page_is(0, 0))[..43]).unwrap();
    let missing = fault(&mut exchange, 0, Access::Read);
    let result = exchange.resolve(&missing);
    assert!(is_timeout(&result), "within a message: {result:?}");

    let (mut exchange, mut main, _requests) = connected(timeout);
    let front = thread::spawn(move || {
        let mut other = header(FRONTEND_IOTLB, 1 | 8, 32);
        other.extend(page_is(1, 1).encode());
        while main.write_all(&other).is_ok() {}
    });
    let missing = fault(&mut exchange, 0, Access::Read);
    let result = exchange.resolve(&missing);
    assert!(is_timeout(&result), "without acknowledgements: {result:?}");
    drop(exchange);
    front.join().unwrap();
}

#[test]
fn an_idle_front_end_is_no_error() {
    let (mut exchange, mut main, _requests) = connected(Duration::from_nanos(1));
    assert!(!exchange.serve().unwrap());
    main.write_all(&frame(&page_is(5, 3))).unwrap();
    assert!(exchange.serve().unwrap());
    assert_eq!(frame_of(&mut exchange, 5), Some(3));
    assert!(!exchange.serve().unwrap());
    // Within a frame, the streams are out of sync.
    main.write_all(&header(FRONTEND_IOTLB, 1, 32)).unwrap();
    let result = exchange.serve();
    assert!(is_timeout(&result), "{result:?}");
}
