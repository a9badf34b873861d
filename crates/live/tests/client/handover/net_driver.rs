//! A scripted driver of a network device, and the peer of its link.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::num::NonZeroU16;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use ringfence_live::daemon::{
    Daemon, DeviceOptions, EndReason, Iommu, NetOptions, VfioUserDevices,
};
use ringfence_live::handover::{
    DeviceState, HandOverTimeouts, LinkState, NetState, PeerState, PendingFrameState, SavedDevices,
};
use ringfence_live::link::{Address, MAX_FRAME_BYTES};

use super::guest::{Dir, Remote, log};
use super::refused::Second;
use crate::rig::*;

pub(super) const PAIRS: u16 = 2;
/// Descriptors of a queue.
pub(super) const SIZE: u16 = 16;
pub(super) const HEADER: usize = 12;
pub(super) const MQ: u64 = 1 << 22 | 1 << 17;
/// Number of polls for an event that must come.
pub(super) const LOOKS: usize = 100_000;

/// Address of queue `index`; `buffer` returns the address of its buffers.
pub(super) fn rings(index: u16) -> u64 {
    0x3000 * u64::from(index)
}
pub(super) fn buffer(index: u16, slot: u16) -> u64 {
    0x1_0000 + 0x800 * u64::from(index * SIZE + slot)
}

pub(super) fn devices(link: Address) -> DeviceOptions {
    let devices = VfioUserDevices {
        iommu: Iommu::None,
        net: Some(NetOptions {
            link,
            pairs: NonZeroU16::new(PAIRS).unwrap(),
            mac: None,
        }),
        ..VfioUserDevices::default()
    };
    devices.into()
}

pub(super) fn serve(dir: &Dir, link: Address) -> Daemon {
    let mut daemon = Daemon::start(&dir.0, &devices(link), &log()).unwrap();
    daemon
        .offer_hand_over(HandOverTimeouts::default(), &log())
        .unwrap();
    daemon
}

pub(super) fn hand_over(dir: &Dir, first: Daemon) -> Daemon {
    let (second, _) = Daemon::take_over(here!(&dir.0), 0).unwrap();
    assert_eq!(first.join().unwrap(), EndReason::HandedOver);
    second
}

/// Returns frame `number` with this length. The frames belong to a few flows.
pub(super) fn frame(number: u32, bytes: usize) -> Vec<u8> {
    let mut frame = vec![number as u8; bytes];
    let head = [
        0,
        0,
        0,
        0,
        0,
        number as u8 % 5,
        2,
        2,
        2,
        2,
        2,
        2,
        0x88,
        0xb5,
    ];
    let destinations = frame.iter_mut().zip(head);
    destinations.for_each(|(destination, byte)| *destination = byte);
    if bytes >= 18 {
        frame[14..18].copy_from_slice(&number.to_be_bytes());
    }
    frame
}

pub(super) fn number(frame: &[u8]) -> u32 {
    u32::from_be_bytes(frame[14..18].try_into().unwrap())
}

pub(super) fn framed(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes()[..], frame].concat()
}

/// A started driver with a control queue.
pub(super) struct Card {
    pub(super) ram: File,
    pub(super) remote: Remote,
    pub(super) given: [u16; 5],
    pub(super) taken: [u16; 5],
    /// Frames sent on each pair, and frames received on each pair.
    pub(super) sent: [Vec<Vec<u8>>; 2],
    pub(super) came: [Vec<Vec<u8>>; 2],
}

impl Card {
    pub(super) fn boot(dir: &Dir) -> Self {
        let ram = sealed(RAM_BYTES);
        let mut remote = Remote::connect(&dir.0.join("net.sock"), &ram);
        remote.negotiate(MQ);
        for index in 0..2 * PAIRS + 1 {
            remote.enable(index, rings(index));
        }
        remote.set(0x14, &[15]);
        let mut card = Self {
            ram,
            remote,
            given: [0; 5],
            taken: [0; 5],
            sent: Default::default(),
            came: Default::default(),
        };
        card.use_pairs(PAIRS);
        card
    }

    pub(super) fn use_pairs(&mut self, pairs: u16) {
        let (command, ack) = (buffer(4, 0), buffer(4, 1));
        let [low, high] = pairs.to_le_bytes();
        self.poke(command, &[4, 0, low, high]);
        self.poke(rings(4), &descriptor(command, 4, NEXT, 1));
        self.poke(rings(4) + 16, &descriptor(ack, 1, WRITE, 0));
        self.poke(ack, &[0xee]);
        self.offer(4, 0);
        assert_eq!(self.peek(ack, 1), [0]);
    }

    pub(super) fn poke(&self, at: u64, bytes: &[u8]) {
        self.ram.write_all_at(bytes, at).unwrap();
    }

    pub(super) fn peek(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut buffer = vec![0; bytes];
        self.ram.read_exact_at(&mut buffer, at).unwrap();
        buffer
    }

    pub(super) fn offer(&mut self, queue: u16, head: u16) {
        let given = &mut self.given[usize::from(queue)];
        let slot = u64::from(*given % SIZE);
        *given += 1;
        let now = *given;
        self.poke(rings(queue) + 0x1004 + 2 * slot, &head.to_le_bytes());
        self.poke(rings(queue) + 0x1002, &now.to_le_bytes());
        self.remote.ring(queue.into());
        // The register read completes after the doorbell's work.
        self.remote.register(0x14, 1);
    }

    pub(super) fn used(&self, queue: u16) -> u16 {
        let used = self.peek(rings(queue) + 0x2002, 2);
        u16::from_le_bytes(used.try_into().unwrap())
    }

    /// Returns the number of descriptors that the device has.
    pub(super) fn outstanding(&self, queue: u16) -> u16 {
        self.given[usize::from(queue)] - self.used(queue)
    }

    /// Sends a frame if the ring has room. The device completes transmissions in order, so slots
    /// are reused in order.
    pub(super) fn send(&mut self, pair: u16, number: u32, bytes: usize) -> bool {
        let queue = 2 * pair + 1;
        if self.outstanding(queue) == SIZE {
            return false;
        }
        let slot = self.given[usize::from(queue)] % SIZE;
        let frame = frame(number, bytes);
        let at = buffer(queue, slot);
        self.poke(at, &[&[0; HEADER][..], &frame].concat());
        let raw = descriptor(at, (HEADER + bytes) as u32, 0, 0);
        self.poke(rings(queue) + 16 * u64::from(slot), &raw);
        self.offer(queue, slot);
        self.sent[usize::from(pair)].push(frame);
        true
    }

    /// Gives the device a receive buffer.
    pub(super) fn give(&mut self, pair: u16) {
        let queue = 2 * pair;
        if self.outstanding(queue) < SIZE {
            let slot = self.given[usize::from(queue)] % SIZE;
            let raw = descriptor(buffer(queue, slot), 1530, WRITE, 0);
            self.poke(rings(queue) + 16 * u64::from(slot), &raw);
            self.offer(queue, slot);
        }
        self.collect(pair);
    }

    /// Collects received frames.
    pub(super) fn collect(&mut self, pair: u16) {
        let queue = 2 * pair;
        while self.taken[usize::from(queue)] != self.used(queue) {
            let slot = self.taken[usize::from(queue)] % SIZE;
            self.taken[usize::from(queue)] += 1;
            let entry = self.peek(rings(queue) + 0x2004 + 8 * u64::from(slot), 8);
            let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().unwrap());
            assert_eq!(word(0), u32::from(slot), "buffers come back in order");
            let packet = self.peek(buffer(queue, slot), word(4) as usize);
            assert_eq!(packet[10..HEADER], [1, 0]);
            self.came[usize::from(pair)].push(packet[HEADER..].to_vec());
        }
    }

    /// Waits until this many frames have arrived in all.
    pub(super) fn has_all(&mut self, frames: usize) {
        for _ in 0..LOOKS {
            self.give(0);
            self.give(1);
            if self.came.iter().map(Vec::len).sum::<usize>() >= frames {
                return;
            }
        }
        panic!(
            "{} and {} came of {frames}",
            self.came[0].len(),
            self.came[1].len()
        );
    }
}

/// The peer of a stream link, with the frames that it has sent and received.
pub(super) struct Peer {
    pub(super) stream: UnixStream,
    pub(super) sent: Vec<Vec<u8>>,
    /// Unsent rest of the frame in progress.
    pub(super) left: Vec<u8>,
    pub(super) got: Vec<u8>,
}

impl Peer {
    pub(super) fn connect(dir: &Dir) -> Self {
        let stream = UnixStream::connect(dir.0.join("wire")).unwrap();
        stream.set_nonblocking(true).unwrap();
        Self {
            stream,
            sent: Vec::new(),
            left: Vec::new(),
            got: Vec::new(),
        }
    }

    pub(super) fn begin(&mut self, bytes: usize) {
        let frame = frame(self.sent.len() as u32, bytes);
        self.left.extend(framed(&frame));
        self.sent.push(frame);
    }

    /// Sends at most `bytes` of the frame in progress.
    pub(super) fn write(&mut self, bytes: usize) {
        let part = &self.left[..bytes.min(self.left.len())];
        match self.stream.write(part) {
            Ok(sent) => drop(self.left.drain(..sent)),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }

    pub(super) fn read(&mut self, bytes: usize) {
        let mut piece = vec![0; bytes];
        match self.stream.read(&mut piece) {
            Ok(got) => self.got.extend(&piece[..got]),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }

    pub(super) fn frames(&self) -> Vec<Vec<u8>> {
        let (mut frames, mut rest) = (Vec::new(), &self.got[..]);
        while let Some((length, behind)) = rest.split_first_chunk() {
            let (frame, behind) = behind.split_at(u32::from_be_bytes(*length) as usize);
            frames.push(frame.to_vec());
            rest = behind;
        }
        frames
    }

    /// Returns the sent frames that a device passes on.
    pub(super) fn fitting(&self) -> Vec<Vec<u8>> {
        let fits = |frame: &&Vec<u8>| (14..=MAX_FRAME_BYTES).contains(&frame.len());
        self.sent.iter().filter(fits).cloned().collect()
    }
}

impl Peer {
    /// Returns the number of complete frames received.
    pub(super) fn frames_there(&self) -> usize {
        let (mut frames, mut rest) = (0, &self.got[..]);
        while let Some((length, behind)) = rest.split_first_chunk() {
            let Some((_, behind)) = behind.split_at_checked(u32::from_be_bytes(*length) as usize)
            else {
                break;
            };
            frames += 1;
            rest = behind;
        }
        frames
    }
}

/// Creates a device in a busy state: it holds a frame without a buffer, with more frames queued
/// after it. Another frame has arrived in part, and the link has refused frames to send.
pub(super) fn busy(dir: &Dir) -> (Daemon, Card, Peer) {
    let daemon = serve(dir, Address::Stream(dir.0.join("wire")));
    let mut card = Card::boot(dir);
    let mut peer = Peer::connect(dir);
    peer.begin(60);
    peer.write(4000);
    card.has_all(1);
    // The device learns from these frames which pair receives the answers.
    let mut number = 0;
    while card.send(1, number, MAX_FRAME_BYTES) {
        number += 1;
        assert!(number < 1000, "the link takes everything");
    }
    // The device uses up its existing buffers first.
    for _ in 0..2 * SIZE {
        peer.begin(200);
    }
    peer.begin(1000);
    peer.write(peer.left.len() - 500);
    for _ in 0..LOOKS {
        if card.outstanding(0) == 0 && card.outstanding(2) == 0 {
            break;
        }
        card.remote.register(0x14, 1);
        card.collect(0);
        card.collect(1);
    }
    (daemon, card, peer)
}

pub(super) fn copy(dir: &Dir) -> SavedDevices {
    let (bytes, fds) = Second::connect(dir).copy();
    SavedDevices::decode(&bytes, fds).unwrap()
}

pub(super) fn net(handed: &mut SavedDevices) -> &mut NetState {
    match &mut handed.devices[0].state {
        DeviceState::Net(state) => state,
        other => panic!("{other:?}"),
    }
}

pub(super) fn peer_state(handed: &mut SavedDevices) -> &mut PeerState {
    match &mut net(handed).link {
        LinkState::Stream { peer, .. } => peer.as_mut().unwrap(),
        other => panic!("{other:?}"),
    }
}

pub(super) fn held(handed: &mut SavedDevices) -> &mut PendingFrameState {
    net(handed).pending_frame.as_mut().unwrap()
}
