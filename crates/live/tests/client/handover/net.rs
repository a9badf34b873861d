//! Hand-over of a network device and its link, with frames in both directions.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::PathBuf;

use proptest::prelude::*;
use ringfence_live::daemon::Daemon;
use ringfence_live::handover::{LinkState, PeerState, SavedDevices, StateError};
use ringfence_live::link::{
    self, Address, MAX_FRAME_BYTES, NetLink, ReceiveOutcome, SendOutcome, StreamLink,
};
use ringfence_pviommu::wire::crc32c;
use rustix::event::{EventfdFlags, eventfd};

use super::guest::{Dir, end};
use super::net_driver::*;
use super::refused::common;

#[derive(Clone, Debug)]
enum Step {
    Send(u16, usize),
    /// Sends until the link refuses a frame, or a limit is reached.
    Flood(u16),
    Give(u16),
    UsePairs(u16),
    /// The peer starts a frame of this length, and sends this many bytes of it now.
    Coming(usize, usize),
    Write(usize),
    Read(usize),
    HandOver,
}

fn step() -> impl Strategy<Value = Step> {
    let pair = || 0..PAIRS;
    let length = || prop_oneof![18usize..100, 1000usize..=MAX_FRAME_BYTES];
    let coming = prop_oneof![3 => length(), 1 => 0usize..14, 1 => 1519usize..4000];
    prop_oneof![
        4 => (pair(), length()).prop_map(|(pair, bytes)| Step::Send(pair, bytes)),
        1 => pair().prop_map(Step::Flood),
        3 => pair().prop_map(Step::Give),
        1 => (1..=PAIRS).prop_map(Step::UsePairs),
        5 => (coming, 0usize..3000).prop_map(|(bytes, now)| Step::Coming(bytes, now)),
        2 => (1usize..2000).prop_map(Step::Write),
        2 => prop_oneof![1usize..100, 1000usize..100_000].prop_map(Step::Read),
        4 => Just(Step::HandOver),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Each frame arrives once, complete, and in the order of its pair, for any number of
    /// hand-overs at any time.
    #[test]
    fn every_frame_is_there_once(steps in prop::collection::vec(step(), 1..40)) {
        let dir = Dir::new("net");
        let mut daemon = serve(&dir, Address::Stream(dir.0.join("wire")));
        let mut card = Card::boot(&dir);
        let mut peer = Peer::connect(&dir);
        let mut next = 0;
        // A link without a peer drops frames, so wait for the first frame.
        peer.begin(100);
        peer.write(4000);
        card.has_all(1);
        for step in steps {
            match step {
                Step::Send(pair, bytes) => next += u32::from(card.send(pair, next, bytes)),
                Step::Flood(pair) => {
                    for _ in 0..200 {
                        let sent = card.send(pair, next, MAX_FRAME_BYTES);
                        next += u32::from(sent);
                        if !sent {
                            break;
                        }
                    }
                }
                Step::Give(pair) => card.give(pair),
                Step::UsePairs(pairs) => card.use_pairs(pairs),
                Step::Coming(bytes, now) => {
                    peer.begin(bytes);
                    peer.write(now);
                }
                Step::Write(bytes) => peer.write(bytes),
                Step::Read(bytes) => peer.read(bytes),
                Step::HandOver => daemon = hand_over(&dir, daemon),
            }
        }
        let sent: BTreeMap<u32, Vec<u8>> = card
            .sent
            .iter()
            .flatten()
            .map(|f| (number(f), f.clone()))
            .collect();
        for looks in 0.. {
            prop_assert!(looks < LOOKS, "not everything comes");
            peer.write(100_000);
            peer.read(100_000);
            if peer.left.is_empty() && peer.frames_there() == sent.len() {
                break;
            }
            card.give(0);
            card.give(1);
        }
        let fitting = peer.fitting();
        card.has_all(fitting.len());
        let mut got = peer.frames();
        for pair in 0..2 {
            let of_pair: Vec<u32> = card.sent[pair].iter().map(|f| number(f)).collect();
            let there: Vec<u32> = got
                .iter()
                .map(|f| number(f))
                .filter(|n| of_pair.contains(n))
                .collect();
            prop_assert_eq!(there, of_pair, "sent on pair {}", pair);
        }
        got.sort_by_key(|frame| number(frame));
        prop_assert!(got.into_iter().eq(sent.into_values()), "as they were sent");
        let mut came: Vec<&Vec<u8>> = card.came.iter().flatten().collect();
        prop_assert_eq!(came.len(), fitting.len());
        for frame in &fitting {
            let at = came.iter().position(|one| *one == frame);
            prop_assert!(at.is_some(), "a frame of {} bytes is lost", frame.len());
            came.remove(at.unwrap());
        }
        end(daemon);
        prop_assert!(!dir.0.join("wire").exists());
    }
}

#[test]
fn outstanding_frames_are_handed_over() {
    let dir = Dir::new("net-way");
    let (mut daemon, mut card, mut peer) = busy(&dir);
    let mut handed = copy(&dir);
    assert_eq!(net(&mut handed).active, PAIRS);
    assert_eq!(net(&mut handed).waiting, 2, "the second pair's");
    assert!(net(&mut handed).flows.contains(&1), "learned");
    let held = net(&mut handed).pending_frame.clone().unwrap();
    assert_eq!(held.frame.len(), 200);
    assert!(!peer_state(&mut handed).unread.is_empty());
    for _ in 0..3 {
        daemon = hand_over(&dir, daemon);
    }
    peer.write(4000);
    card.has_all(peer.fitting().len());
    for looks in 0..LOOKS {
        peer.read(100_000);
        if peer.frames_there() == card.sent[1].len() {
            break;
        }
        assert!(looks + 1 < LOOKS, "not everything comes");
    }
    assert!(peer.frames() == card.sent[1], "as they were sent");
    // The next peer connects under the same name; the daemon removes the socket at its end.
    drop(peer);
    let mut peer = Peer::connect(&dir);
    peer.begin(77);
    peer.write(4000);
    let before = card.came.iter().map(Vec::len).sum::<usize>();
    card.has_all(before + 1);
    assert!(dir.0.join("wire").exists());
    end(daemon);
    assert!(!dir.0.join("wire").exists());
}

#[test]
fn connections_and_datagrams_are_handed_over() {
    let dir = Dir::new("net-kinds");
    let at = |name: &str| dir.0.join(name);
    let mut far = StreamLink::open(&at("wire")).unwrap();
    let mut daemon = serve(&dir, Address::Stream(at("wire")));
    assert_eq!(
        far.receive(&mut [0; 1600]),
        ReceiveOutcome::Nothing,
        "taken in"
    );
    let mut card = Card::boot(&dir);
    for round in 1..4 {
        daemon = hand_over(&dir, daemon);
        let frame = frame(9, 300);
        assert_eq!(far.send(&frame), SendOutcome::Taken);
        card.has_all(round);
        card.send(0, 5, 80);
        let mut got = [0; 1600];
        assert_eq!(far.receive(&mut got), ReceiveOutcome::Frame(80));
    }
    end(daemon);
    assert!(at("wire").exists(), "it is the other's");
    drop((card, far));

    let address = Address::Datagram {
        local: at("here"),
        remote: at("there"),
    };
    let mut daemon = serve(&dir, address);
    let far = UnixDatagram::bind(at("there")).unwrap();
    let mut card = Card::boot(&dir);
    for round in 1..4 {
        far.send_to(&frame(round as u32, 300), at("here")).unwrap();
        daemon = hand_over(&dir, daemon);
        card.has_all(round);
        card.send(1, 5, 80);
        let mut got = [0; 1600];
        assert_eq!(far.recv(&mut got).unwrap(), 80);
        assert!(at("here").exists());
    }
    end(daemon);
    assert!(!at("here").exists());
}

#[test]
fn impossible_state_is_rejected() {
    let dir = Dir::new("net-lies");
    let (daemon, mut card, peer) = busy(&dir);
    let refused = |change: &dyn Fn(&mut SavedDevices)| {
        let mut handed = copy(&dir);
        change(&mut handed);
        let rehearsed = Daemon::rehearse(here!(&dir.0), handed);
        rehearsed.err().map(|error| match error {
            StateError::Register { what } | StateError::NotA { what } => what.to_owned(),
            error => error.to_string(),
        })
    };
    let event = || eventfd(0, EventfdFlags::empty()).unwrap();
    let pair_of_sockets = || UnixStream::pair().unwrap().0.into();
    assert_eq!(refused(&|_| {}), None);
    type Lie<'a> = (&'a str, &'a dyn Fn(&mut SavedDevices));
    let lies: [Lie<'_>; 23] = [
        ("queue pair count", &|h| net(h).offered = 0),
        ("queue pair count", &|h| net(h).offered = 9),
        ("queue count", &|h| net(h).offered = 3),
        ("active queue pair count", &|h| net(h).active = 0),
        ("active queue pair count", &|h| net(h).active = 3),
        ("queue pair of a flow", &|h| net(h).flows[7] = 2),
        ("queue waiting for the link", &|h| net(h).waiting = 4),
        ("queue waiting for the link", &|h| net(h).waiting = 1 << 15),
        ("held frame", &|h| held(h).pair = 2),
        ("held frame", &|h| held(h).frame.truncate(13)),
        ("held frame", &|h| held(h).frame = vec![0; 1519]),
        ("state of a network device without a driver", &|h| {
            common(h).status &= !4;
            net(h).active = 1;
            held(h).pair = 0;
        }),
        ("active queue pair count", &|h| {
            common(h).status &= !4;
        }),
        ("active queue pair count", &|h| {
            common(h).accepted &= !(1 << 22);
        }),
        ("partial frame", &|h| peer_state(h).missing += 1),
        ("partial frame", &|h| {
            peer_state(h).begun = framed(&[0; 20]);
            peer_state(h).missing = 0;
        }),
        ("partial frame", &|h| {
            peer_state(h).begun = vec![0xff; 4];
            peer_state(h).missing = u32::MAX;
        }),
        // A dropped frame, whose bytes are listed all the same.
        ("partial frame", &|h| {
            peer_state(h).begun = framed(&[0; 2000])[..100].to_vec();
            peer_state(h).missing = 1904;
        }),
        ("unsent frame", &|h| peer_state(h).unsent = vec![0; 1522]),
        ("socket", &|h| peer_state(h).stream = event()),
        ("socket", &|h| {
            net(h).link = LinkState::Stream {
                listener: Some(pair_of_sockets()),
                peer: None,
            };
        }),
        ("tap interface", &|h| {
            net(h).link = LinkState::Tap { file: event() }
        }),
        ("socket", &|h| {
            net(h).link = LinkState::Datagram {
                socket: pair_of_sockets(),
                remote: "/there".into(),
            };
        }),
    ];
    for (what, lie) in lies {
        assert_eq!(refused(lie).as_deref(), Some(what));
    }
    // The daemon takes the name that it removes from the kernel, and the name must be absolute.
    let waits = UnixDatagram::bind(dir.0.join("waits")).unwrap();
    let never = UnixDatagram::bind(dir.0.join("never")).unwrap();
    never.set_nonblocking(true).unwrap();
    let unnamed = UnixDatagram::unbound().unwrap();
    unnamed.set_nonblocking(true).unwrap();
    for (socket, remote, what) in [
        (&waits, "/there", Some("socket")),
        (&unnamed, "/there", Some("socket")),
        (&never, "there", Some("link path")),
        (&never, "", Some("link path")),
        (&never, "/there", None),
    ] {
        let lie = |h: &mut SavedDevices| {
            net(h).link = LinkState::Datagram {
                socket: socket.as_fd().try_clone_to_owned().unwrap(),
                remote: remote.into(),
            };
        };
        assert_eq!(refused(&lie).as_deref(), what, "{remote}");
    }
    // No refused attempt has received or sent a byte.
    assert!(dir.0.join("wire").exists() && dir.0.join("never").exists());
    let mut peer = peer;
    peer.write(4000);
    card.has_all(peer.fitting().len());
    end(daemon);
}

/// Changes each byte of the stream, with a correct checksum. The state is refused, or it is another
/// valid state and restores exactly.
#[test]
fn false_frames_are_rejected_or_reported() {
    let dir = Dir::new("net-bytes");
    let (daemon, mut card, mut peer) = busy(&dir);
    let mut handed = copy(&dir);
    // Short, so that the test can change each byte.
    held(&mut handed).frame.truncate(40);
    let there = peer_state(&mut handed);
    there.begun = framed(&frame(1, 60))[..30].to_vec();
    there.missing = 34;
    there.unread.truncate(20);
    there.unsent = vec![7; 20];
    handed.devices[0].requests = 0;
    let (bytes, fds) = handed.encode();
    let clones = || fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let body = bytes.len() - 4;
    let mut refused = 0;
    for at in 0..body {
        for value in [0, 1, 0x7f, 0xff] {
            let mut lie = bytes[..body].to_vec();
            lie[at] = value;
            lie.extend(crc32c(&lie).to_le_bytes());
            let rehearsed = SavedDevices::decode(&lie, clones())
                .and_then(|handed| Daemon::rehearse(here!(&dir.0), handed));
            let Ok(rebuilt) = rehearsed else {
                refused += 1;
                continue;
            };
            // The number of completed requests is not part of the state.
            let mut said = SavedDevices::decode(&lie, clones()).unwrap();
            said.devices[0].requests = 0;
            assert_eq!(
                rebuilt.save().unwrap().encode().0,
                said.encode().0,
                "byte {at}: {value}"
            );
        }
    }
    assert!(refused > body, "{refused} of {}", 4 * body);
    peer.write(4000);
    card.has_all(peer.fitting().len());
    end(daemon);
}

/// The absolute path of the link does not fit into a socket's name.
#[test]
fn a_link_that_another_process_would_not_find_stays() {
    let dir = Dir::new("net-long");
    let long: PathBuf = (0..3).fold(dir.0.clone(), |path, _| path.join("x".repeat(40)));
    std::fs::create_dir_all(&long).unwrap();
    // Bind through a shorter name of the same directory.
    let fd = File::open(&long).unwrap();
    let short = PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    let link = link::open(&Address::Datagram {
        local: short.join("here"),
        remote: long.strip_prefix("/").unwrap().join("there"),
    });
    let stays = link.unwrap().save().unwrap_err();
    assert!(stays.to_string().contains("too long"), "{stays}");
}

/// Partial frames in both directions, with further data after them.
#[test]
fn link_resumes_in_the_middle_of_a_frame() {
    let (near, far) = UnixStream::pair().unwrap();
    far.set_nonblocking(true).unwrap();
    let mut far = far;
    let whole = framed(&frame(3, 500));
    let long = framed(&[5; 3000]);
    let next = framed(&frame(4, 60));
    for (begun, missing, unread, frames) in [
        (&whole[..0], 0, &whole[..], 1),
        (&whole[..3], 0, &whole[3..], 1),
        (&whole[..4], 500, &whole[4..], 1),
        (&whole[..104], 400, &whole[104..], 1),
        (&long[..4], 1000, &long[2004..], 0),
    ] {
        let state = LinkState::Stream {
            listener: None,
            peer: Some(PeerState {
                stream: near.as_fd().try_clone_to_owned().unwrap(),
                begun: begun.to_vec(),
                missing,
                unread: [unread, &next].concat(),
                unsent: whole[20..].to_vec(),
            }),
        };
        let mut link = link::restore(state).unwrap();
        let again = format!("{:?}", link.save().unwrap());
        assert!(
            again.contains(&format!("begun: {begun:?}, missing: {missing}")),
            "{again}"
        );
        assert!(link.waits_for(false, false).unwrap().output, "the rest");
        let mut buffer = [0; 1600];
        let mut came = Vec::new();
        loop {
            match link.receive(&mut buffer) {
                ReceiveOutcome::Frame(bytes) => came.push(buffer[..bytes].to_vec()),
                ReceiveOutcome::Dropped => {}
                ReceiveOutcome::Nothing => break,
            }
        }
        assert_eq!(came.len(), frames + 1);
        assert_eq!(came.last().unwrap(), &frame(4, 60));
        assert!(frames == 0 || came[0] == frame(3, 500));
        assert_eq!(link.send(&frame(9, 70)), SendOutcome::Taken);
        let mut got = vec![0; 2000];
        let mut bytes = 0;
        while let Ok(more) = far.read(&mut got[bytes..]) {
            bytes += more;
        }
        assert_eq!(
            got[..bytes],
            [&whole[20..], &framed(&frame(9, 70))].concat()
        );
    }
}
