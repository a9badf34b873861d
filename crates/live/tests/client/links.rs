//! Links over real sockets, with peers that are slow, disconnect, or violate the protocol.

use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::PathBuf;

use ringfence_live::link::{
    DatagramLink, MAX_FRAME_BYTES, NetLink, ReceiveOutcome, SendOutcome, StreamLink,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

struct SocketPath(PathBuf);

impl SocketPath {
    fn new(name: &str) -> Self {
        let made = tempfile::Builder::new().prefix(name).tempdir().unwrap();
        Self(made.keep().join("socket"))
    }
}

impl Drop for SocketPath {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.0.parent().unwrap());
    }
}

fn framed(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes()[..], frame].concat()
}

fn receive(link: &mut impl NetLink) -> Result<Vec<u8>, ReceiveOutcome> {
    let mut buffer = [0; MAX_FRAME_BYTES + 1];
    match link.receive(&mut buffer) {
        ReceiveOutcome::Frame(bytes) => Ok(buffer[..bytes].to_vec()),
        other => Err(other),
    }
}

/// Returns true if the link's descriptor is ready.
fn ready(link: &impl NetLink, input: bool, output: bool) -> bool {
    let awaited = link.waits_for(input, output).unwrap();
    let mut flags = PollFlags::empty();
    flags.set(PollFlags::IN, awaited.input);
    flags.set(PollFlags::OUT, awaited.output);
    let mut fds = [PollFd::from_borrowed_fd(awaited.fd, flags)];
    !flags.is_empty() && poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
}

/// Returns a listening link and its first peer.
fn listening(path: &SocketPath) -> (StreamLink, UnixStream) {
    let mut link = StreamLink::open(&path.0).unwrap();
    assert_eq!(link.send(&[1; 60]), SendOutcome::Lost, "nobody is there");
    assert!(!ready(&link, true, false));
    let peer = UnixStream::connect(&path.0).unwrap();
    assert!(ready(&link, true, false));
    assert_eq!(receive(&mut link), Err(ReceiveOutcome::Nothing), "taken in");
    assert!(link.connected());
    (link, peer)
}

#[test]
fn frames_cross_a_stream() {
    let path = SocketPath::new("cross");
    let (mut link, mut peer) = listening(&path);
    let frame: Vec<u8> = (0..200).collect();
    assert_eq!(link.send(&frame), SendOutcome::Taken);
    let mut got = vec![0; 204];
    peer.read_exact(&mut got).unwrap();
    assert_eq!(got, framed(&frame));
    // Two frames and a half at once; the rest byte by byte.
    let bytes = [framed(&frame), framed(&[2; 14]), framed(&[3; 1518])].concat();
    let (now, later) = bytes.split_at(300);
    peer.write_all(now).unwrap();
    assert_eq!(receive(&mut link), Ok(frame));
    assert_eq!(receive(&mut link), Ok(vec![2; 14]));
    assert_eq!(receive(&mut link), Err(ReceiveOutcome::Nothing));
    for byte in later {
        peer.write_all(&[*byte]).unwrap();
        if std::ptr::eq(byte, later.last().unwrap()) {
            assert_eq!(receive(&mut link), Ok(vec![3; 1518]));
        } else {
            assert_eq!(receive(&mut link), Err(ReceiveOutcome::Nothing));
        }
    }
}

#[test]
fn a_slow_peer_gets_whole_frames_in_order() {
    let path = SocketPath::new("slow");
    let (mut link, mut peer) = listening(&path);
    let frame = |number: u32| {
        let mut frame = vec![number as u8; 14 + number as usize % 1500];
        frame[..4].copy_from_slice(&number.to_be_bytes());
        frame
    };
    let mut sent = 0;
    while link.send(&frame(sent)) == SendOutcome::Taken {
        sent += 1;
        assert!(sent < 100_000, "it never says that there is no room");
    }
    assert!(!ready(&link, false, true));
    let mut bytes: Vec<u8> = Vec::new();
    let mut piece = [0; 4000];
    // Read little and send little, so that frames are cut at all offsets.
    peer.set_nonblocking(true).unwrap();
    let end = sent + 1000;
    loop {
        let got = peer.read(&mut piece).unwrap_or(0);
        bytes.extend(&piece[..got]);
        if ready(&link, false, sent < end) {
            link.on_ready();
        }
        while sent < end && link.send(&frame(sent)) == SendOutcome::Taken {
            sent += 1;
        }
        if got == 0 && sent == end && !ready(&link, false, false) {
            break;
        }
    }
    let expected: Vec<u8> = (0..end).flat_map(|number| framed(&frame(number))).collect();
    assert!(bytes == expected, "{} of {}", bytes.len(), expected.len());
    assert!(
        !link.waits_for(false, false).unwrap().output,
        "nothing is left to wait for"
    );
}

#[test]
fn malformed_peer_is_dropped_for_the_next_one() {
    let path = SocketPath::new("lies");
    let (mut link, mut peer) = listening(&path);
    for (bytes, dropped) in [
        (framed(&[]), 1),
        (framed(&[1; 13]), 1),
        (framed(&[1; 1519]), 1),
        (framed(&[1; 65_550]), 1),
        ([framed(&[1; 3]), framed(&[1; 2000])].concat(), 2),
    ] {
        peer.write_all(&bytes).unwrap();
        for _ in 0..dropped {
            assert_eq!(receive(&mut link), Err(ReceiveOutcome::Dropped));
        }
        assert_eq!(receive(&mut link), Err(ReceiveOutcome::Nothing));
    }
    peer.write_all(&framed(&[7; 60])).unwrap();
    assert_eq!(receive(&mut link), Ok(vec![7; 60]));
    // An invalid length: the stream is corrupt.
    peer.write_all(&[0xff; 4]).unwrap();
    assert_eq!(receive(&mut link), Err(ReceiveOutcome::Nothing));
    assert!(!link.connected());
    let mut end = [0];
    assert!(matches!(peer.read(&mut end), Ok(0) | Err(_)));
    // The next peer disconnects inside a frame; the peer after it starts with a new frame.
    let mut peer = UnixStream::connect(&path.0).unwrap();
    assert_eq!(receive(&mut link), Err(ReceiveOutcome::Nothing));
    peer.write_all(&framed(&[8; 60])[..30]).unwrap();
    drop(peer);
    assert!(ready(&link, true, false));
    assert_eq!(receive(&mut link), Err(ReceiveOutcome::Nothing));
    assert_eq!(link.send(&[1; 60]), SendOutcome::Lost);
    let mut peer = UnixStream::connect(&path.0).unwrap();
    assert_eq!(receive(&mut link), Err(ReceiveOutcome::Nothing));
    peer.write_all(&framed(&[9; 60])).unwrap();
    assert_eq!(receive(&mut link), Ok(vec![9; 60]));
    // A peer that disconnects before it has received everything.
    while link.send(&[1; 1518]) == SendOutcome::Taken {}
    drop(peer);
    link.on_ready();
    assert_eq!(link.send(&[1; 60]), SendOutcome::Lost);
}

#[test]
fn first_process_listens() {
    let path = SocketPath::new("first");
    // A stale socket of a process that has ended.
    drop(UnixListener::bind(&path.0).unwrap());
    let mut first = StreamLink::open(&path.0).unwrap();
    let mut second = StreamLink::open(&path.0).unwrap();
    assert!(second.connected());
    assert_eq!(receive(&mut first), Err(ReceiveOutcome::Nothing));
    assert_eq!(second.send(&[4; 60]), SendOutcome::Taken);
    assert_eq!(receive(&mut first), Ok(vec![4; 60]));
    // Only the listener has a name. The file remains, since another process may have the link.
    assert_eq!(first.name(), Some(path.0.clone()));
    assert_eq!(second.name(), None);
    drop(first);
    assert_eq!(receive(&mut second), Err(ReceiveOutcome::Nothing));
    assert!(second.waits_for(true, true).is_none());
    assert!(path.0.exists());
}

#[test]
fn datagrams_are_frames() {
    let (here, there) = (SocketPath::new("here"), SocketPath::new("there"));
    drop(UnixDatagram::bind(&here.0).unwrap());
    let mut link = DatagramLink::open(&here.0, &there.0).unwrap();
    assert!(
        DatagramLink::open(&here.0, &there.0).is_err(),
        "it is in use"
    );
    assert_eq!(link.send(&[1; 60]), SendOutcome::Lost, "nobody is there");
    let peer = UnixDatagram::bind(&there.0).unwrap();
    assert_eq!(link.send(&[1; 60]), SendOutcome::Taken);
    let mut got = [0; 100];
    assert_eq!(peer.recv(&mut got).unwrap(), 60);
    for (bytes, frame) in [
        (0, false),
        (13, false),
        (14, true),
        (1518, true),
        (1519, false),
        (60_000, false),
    ] {
        peer.send_to(&vec![5; bytes], &here.0).unwrap();
        let expected = if frame {
            Ok(vec![5; bytes])
        } else {
            Err(ReceiveOutcome::Dropped)
        };
        assert_eq!(receive(&mut link), expected, "{bytes}");
        assert_eq!(receive(&mut link), Err(ReceiveOutcome::Nothing));
    }
    // Frames without room are dropped, and the sender does not wait.
    while link.send(&[1; 60]) == SendOutcome::Taken {}
    assert!(!ready(&link, false, true));
    assert_eq!(link.name(), Some(here.0.clone()));
    drop(link);
    assert!(here.0.exists(), "another process may have it");
}
