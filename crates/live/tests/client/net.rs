//! The network device between a scripted driver and a scripted peer, both of which may be hostile.

use std::collections::VecDeque;
use std::num::NonZeroU16;
use std::sync::Arc;

use proptest::prelude::*;
use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma::Direct;
use ringfence_live::link::{NetLink, ReceiveOutcome, SendOutcome};
use ringfence_live::server::PolledFunction;
use ringfence_live::virtio::PollSource;
use ringfence_live::virtio::net::Net;

use crate::rig::*;

/// Frames that the peer sends and receives.
#[derive(Default)]
struct Script {
    coming: VecDeque<Vec<u8>>,
    sent: Vec<Vec<u8>>,
    /// Frames that the peer still accepts.
    room: usize,
    gone: bool,
}

impl NetLink for Script {
    fn send(&mut self, frame: &[u8]) -> SendOutcome {
        if self.gone {
            return SendOutcome::Lost;
        }
        if self.room == 0 {
            return SendOutcome::Full;
        }
        self.room -= 1;
        self.sent.push(frame.to_vec());
        SendOutcome::Taken
    }

    fn receive(&mut self, buffer: &mut [u8]) -> ReceiveOutcome {
        let Some(frame) = self.coming.pop_front() else {
            return ReceiveOutcome::Nothing;
        };
        if frame.len() < 14 || frame.len() > 1518 {
            return ReceiveOutcome::Dropped;
        }
        buffer[..frame.len()].copy_from_slice(&frame);
        ReceiveOutcome::Frame(frame.len())
    }

    fn waits_for(&self, _input: bool, _output: bool) -> Option<PollSource<'_>> {
        None
    }
}

type Card = Client<Net<Script>, Direct>;

const MQ: u64 = 1 << 22 | 1 << 17;
const HEADER: usize = 12;
/// Returns the address of queue `index`.
const fn rings(index: u16) -> u64 {
    0x1_0000 + 0x3000 * index as u64
}
/// Address of the buffers.
const BUFFERS: u64 = 0x8_0000;

fn card(pairs: u16, features: u64) -> Card {
    let counters = Arc::new(DeviceCounters::default());
    let script = Script {
        room: usize::MAX,
        ..Script::default()
    };
    let mac = [2, 0, 0, 0, 0, 1];
    let pairs_ = NonZeroU16::new(pairs).unwrap();
    let net = Net::new(script, mac, pairs_, Arc::clone(&counters));
    let mut client = Client::new(net, Direct::default(), false, counters);
    client.agree();
    client.share_memory();
    client.negotiate(features);
    for index in 0..2 * pairs + u16::from(features & MQ != 0) {
        client.enable(index, 16, rings(index));
    }
    client.set(0x14, &[15]);
    client.session.function().on_ready();
    client
}

fn link(card: &mut Card) -> &mut Script {
    card.session.function().device().link()
}

/// Makes a chain available as the `count`th of a queue. The chain's descriptors (address, bytes,
/// flags without NEXT) begin at `head`.
fn offer(card: &mut Card, queue: u16, count: u16, head: u16, chain: &[(u64, u32, u16)]) {
    let at = rings(queue);
    for (index, (address, bytes, flags)) in (0u16..).zip(chain) {
        let next = if usize::from(index) + 1 < chain.len() {
            NEXT
        } else {
            0
        };
        let raw = descriptor(*address, *bytes, flags | next, (head + index + 1) % 16);
        card.poke(at + 16 * u64::from((head + index) % 16), &raw);
    }
    let slot = u64::from((count - 1) % 16);
    card.poke(at + 0x1004 + 2 * slot, &head.to_le_bytes());
    card.poke(at + 0x1002, &count.to_le_bytes());
    card.ring(queue.into());
}

/// Returns the number of buffers that a queue has returned, and the length of the last one.
fn used(card: &Card, queue: u16) -> (u16, u32) {
    let at = rings(queue) + 0x2000;
    let count = u16::from_le_bytes(card.peek(at + 2, 2).try_into().unwrap());
    let slot = u64::from(count.wrapping_sub(1) % 16);
    let length = card.peek(at + 4 + 8 * slot + 4, 4);
    (count, u32::from_le_bytes(length.try_into().unwrap()))
}

/// Writes header and frame into memory and sends them with one descriptor.
fn send(card: &mut Card, queue: u16, count: u16, header: &[u8; HEADER], frame: &[u8]) {
    let at = BUFFERS + 0x1000 * u64::from(count % 16);
    card.poke(at, &[&header[..], frame].concat());
    let bytes = (HEADER + frame.len()) as u32;
    offer(card, queue, count, count % 16, &[(at, bytes, 0)]);
}

fn give_buffer(card: &mut Card, queue: u16, count: u16, bytes: u32) -> u64 {
    let at = BUFFERS + 0x1000 * u64::from(count % 16);
    offer(card, queue, count, count % 16, &[(at, bytes, WRITE)]);
    at
}

/// Sends a command on the control queue; returns the used length and the reply.
fn use_pairs(card: &mut Card, queue: u16, count: u16, command: &[u8]) -> (u32, u8) {
    let (at, ack) = (0xf_0000, 0xf_1000);
    card.poke(at, command);
    card.poke(ack, &[0xee]);
    let chain = [(at, command.len() as u32, 0), (ack, 1, WRITE)];
    offer(card, queue, count, 0, &chain);
    (used(card, queue).1, card.peek(ack, 1)[0])
}

fn come(card: &mut Card, frames: &[Vec<u8>]) {
    link(card).coming.extend(frames.iter().cloned());
    card.session.function().on_ready();
}

#[test]
fn configuration_has_address_pairs_and_mtu() {
    let mut card = card(4, 0);
    let config: Vec<u8> = (0..12)
        .map(|at| card.register(0x2000 + at, 1) as u8)
        .collect();
    assert_eq!(config, [2, 0, 0, 0, 0, 1, 0, 0, 4, 0, 0xdc, 5]);
    card.set(0x00, &[0; 4]);
    assert_eq!(
        card.register(0x04, 4),
        1 << 3 | 1 << 5 | 1 << 17 | 1 << 22 | 3 << 28
    );
    assert_eq!(card.register(0x12, 2), 9, "queues");
    assert_eq!(self::card(1, 0).register(0x12, 2), 2);
}

#[test]
fn frames_go_both_ways() {
    let mut card = card(1, 0);
    let frame: Vec<u8> = (0..100).collect();
    send(&mut card, 1, 1, &[0; HEADER], &frame);
    assert_eq!(used(&card, 1), (1, 0));
    assert_eq!(link(&mut card).sent, std::slice::from_ref(&frame));
    // In pieces that cut the header and the frame.
    card.poke(0xa_0000, &[0; 7]);
    card.poke(0xb_0000, &[&[0; 5], &frame[..3]].concat());
    card.poke(0xc_0000, &frame[3..]);
    let pieces = [(0xa_0000, 7, 0), (0xb_0000, 8, 0), (0xc_0000, 97, 0)];
    offer(&mut card, 1, 2, 4, &pieces);
    assert_eq!(link(&mut card).sent, [frame.clone(), frame.clone()]);
    let at = give_buffer(&mut card, 0, 1, 1530);
    come(&mut card, std::slice::from_ref(&frame));
    assert_eq!(used(&card, 0), (1, 112));
    let header = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    assert_eq!(card.peek(at, 112), [&header[..], &frame].concat());
    let counters = &card.counters;
    assert_eq!(
        (counters.frames_sent.get(), counters.frames_received.get()),
        (2, 1)
    );
    assert_eq!(
        (counters.bytes_written.get(), counters.bytes_read.get()),
        (200, 100)
    );
}

#[test]
fn invalid_frames_are_dropped() {
    let mut card = card(1, 0);
    let mut count = 0;
    for (header, bytes) in [
        ([0; HEADER], 13),
        ([0; HEADER], 1519),
        ([0; HEADER], 0),
        // A checksum offload; a segmentation offload.
        ([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 100),
        ([0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 100),
    ] {
        count += 1;
        send(&mut card, 1, count, &header, &vec![5; bytes]);
        assert_eq!(used(&card, 1), (count, 0), "{header:?} {bytes}");
    }
    for chain in [
        // Shorter than a header; too long; 4 GiB in one piece and in many; outside memory;
        // writable; readable after writable.
        &[(BUFFERS, 11, 0)][..],
        &[(BUFFERS, 0x1_0000, 0)],
        &[(BUFFERS, u32::MAX, 0)],
        &[
            (BUFFERS, u32::MAX, 0),
            (BUFFERS, u32::MAX, 0),
            (BUFFERS, 200, 0),
        ],
        &[(RAM_BYTES, 112, 0)],
        &[(u64::MAX - 50, 112, 0)],
        &[(BUFFERS, 112, WRITE)],
        &[(BUFFERS, 12, WRITE), (BUFFERS, 112, 0)],
        &[(BUFFERS, 0, 0)],
    ] {
        count += 1;
        offer(&mut card, 1, count, 0, chain);
        assert_eq!(used(&card, 1), (count, 0), "{chain:?}");
    }
    let counters = Arc::clone(&card.counters);
    assert_eq!(counters.frames_dropped.get(), u64::from(count));
    assert_eq!(counters.malformed.get(), u64::from(count));
    assert!(link(&mut card).sent.is_empty());
    send(&mut card, 1, count + 1, &[0; HEADER], &[9; 14]);
    send(&mut card, 1, count + 2, &[0; HEADER], &[9; 1518]);
    assert_eq!(link(&mut card).sent.len(), 2, "the limits themselves");
}

#[test]
fn frames_without_a_sender_are_skipped() {
    let mut card = card(1, 0);
    give_buffer(&mut card, 0, 1, 1530);
    // More frames than the device examines in one turn.
    let mut frames = vec![vec![0; 13]; 5000];
    frames.push(vec![0; 1519]);
    frames.push(vec![7; 14]);
    come(&mut card, &frames);
    let mut turns = 0;
    while card.session.function().unfinished() {
        card.session.function().continue_work();
        turns += 1;
        assert!(turns < 100);
    }
    assert_eq!(used(&card, 0), (1, 26));
    assert_eq!(card.counters.frames_dropped.get(), 5001);
}

/// Without a buffer the device holds one frame and receives no other; the doorbell continues it.
#[test]
fn driver_controls_the_receive_rate() {
    let mut card = card(1, 0);
    let frames: Vec<Vec<u8>> = (0..5u8).map(|fill| vec![fill; 60]).collect();
    come(&mut card, &frames);
    come(&mut card, &[]);
    assert_eq!(link(&mut card).coming.len(), 4);
    assert!(!card.session.function().unfinished());
    for count in 1..=5u16 {
        let at = give_buffer(&mut card, 0, count, 1530);
        assert_eq!(used(&card, 0), (count, 72));
        assert_eq!(card.peek(at + 12, 60), frames[usize::from(count) - 1]);
    }
    // A reset also drops the frame that waited for a buffer.
    come(&mut card, &[vec![1; 60]]);
    card.set(0x14, &[0]);
    assert_eq!(card.counters.frames_dropped.get(), 1);
}

/// Frames that the link does not accept stay in their rings, in order.
#[test]
fn link_controls_the_send_rate() {
    let mut card = card(2, MQ);
    assert_eq!(use_pairs(&mut card, 4, 1, &[4, 0, 2, 0]), (1, 0));
    link(&mut card).room = 1;
    for count in 1..=4u16 {
        send(&mut card, 1, count, &[0; HEADER], &[count as u8; 60]);
    }
    send(&mut card, 3, 5, &[0; HEADER], &[5; 60]);
    // Earlier slots have head 0 without a valid chain: the scripted driver's error.
    assert_eq!(used(&card, 1).0, 1);
    assert_eq!(used(&card, 3).0, 0);
    assert_eq!(card.counters.frames_dropped.get(), 0);
    link(&mut card).room = 2;
    card.session.function().on_ready();
    assert_eq!(used(&card, 1).0, 3);
    link(&mut card).room = 100;
    card.session.function().on_ready();
    assert_eq!((used(&card, 1).0, used(&card, 3).0), (4, 5));
    let sent: Vec<u8> = link(&mut card).sent.iter().map(|frame| frame[0]).collect();
    assert_eq!(sent[..4], [1, 2, 3, 4]);
    // A link without a peer accepts every frame and drops it.
    link(&mut card).gone = true;
    let before = card.counters.frames_dropped.get();
    send(&mut card, 1, 5, &[0; HEADER], &[6; 60]);
    assert_eq!(card.counters.frames_dropped.get(), before + 1);
}

#[test]
fn a_buffer_too_small_costs_its_frame() {
    let mut card = card(1, 0);
    for (count, (chain, ok)) in (1u16..).zip([
        (&[(BUFFERS, 111, WRITE)][..], false),
        (&[(BUFFERS, 112, 0)], false),
        (&[(BUFFERS, 12, 0), (BUFFERS, 112, WRITE)], true),
        (&[(BUFFERS, 112, WRITE), (BUFFERS, 12, 0)], false),
        (&[(RAM_BYTES - 100, 112, WRITE)], false),
        (&[(BUFFERS, 1, WRITE), (BUFFERS + 16, 111, WRITE)], true),
    ]) {
        offer(&mut card, 0, count, 0, chain);
        come(&mut card, &[vec![3; 100]]);
        assert_eq!(
            used(&card, 0),
            (count, if ok { 112 } else { 0 }),
            "{chain:?}"
        );
    }
    assert_eq!(card.counters.frames_dropped.get(), 4);
}

#[test]
fn the_control_queue_sets_the_pairs_and_nothing_else() {
    let mut card = card(4, MQ);
    for (count, (command, acked)) in (1u16..).zip([
        (&[4, 0, 4, 0][..], true),
        (&[4, 0, 0, 0], false),
        (&[4, 0, 5, 0], false),
        (&[4, 1, 1, 0], false),
        (&[0, 0, 1], false),
        (&[1, 1, 2, 0, 0, 0, 0, 9], false),
        (&[4], false),
        (&[4, 0, 1, 0, 0], false),
        (&[4, 0, 1, 0], true),
    ]) {
        let answer = use_pairs(&mut card, 8, count, command);
        assert_eq!(answer, (1, u8::from(!acked)), "{command:?}");
    }
    // A chain without a byte for the reply, and one whose byte is not writable: returned with
    // length 0.
    offer(&mut card, 8, 10, 0, &[(0xf_0000, 4, 0)]);
    assert_eq!(used(&card, 8), (10, 0));
    offer(
        &mut card,
        8,
        11,
        0,
        &[(0xf_0000, 4, 0), (RAM_BYTES, 1, WRITE)],
    );
    assert_eq!(used(&card, 8), (11, 0));
    // Without the multiqueue feature the control queue has the number of the second pair, and sets
    // nothing.
    let mut card = self::card(4, 1 << 17);
    assert_eq!(use_pairs(&mut card, 2, 1, &[4, 0, 2, 0]), (1, 1));
}

fn tcp(from: u8, to: u8, ports: (u8, u8)) -> Vec<u8> {
    let mut frame = vec![0; 60];
    frame[12] = 8;
    frame[14] = 0x45;
    frame[23] = 6;
    (frame[29], frame[33]) = (from, to);
    (frame[35], frame[37]) = ports;
    frame
}

#[test]
fn replies_arrive_at_the_sending_pair() {
    let mut card = card(4, MQ);
    use_pairs(&mut card, 8, 1, &[4, 0, 4, 0]);
    for pair in 0..4u16 {
        for count in 1..=8 {
            give_buffer(&mut card, 2 * pair, count, 1530);
        }
        let port = 10 + pair as u8;
        send(
            &mut card,
            2 * pair + 1,
            1,
            &[0; HEADER],
            &tcp(1, 2, (port, 80)),
        );
    }
    for pair in 0..4u16 {
        let before = used(&card, 2 * pair).0;
        come(&mut card, &[tcp(2, 1, (80, 10 + pair as u8))]);
        assert_eq!(used(&card, 2 * pair).0, before + 1, "pair {pair}");
    }
    // With one pair in use, it receives all frames, including one that waited for a buffer of
    // another pair.
    give_buffer(&mut card, 6, 9, 1530);
    while used(&card, 6).0 < 9 {
        come(&mut card, &[tcp(2, 1, (80, 13))]);
    }
    let before = used(&card, 0).0;
    come(&mut card, &[tcp(2, 1, (80, 13))]);
    assert_eq!(used(&card, 0).0, before);
    assert_eq!(use_pairs(&mut card, 8, 2, &[4, 0, 1, 0]), (1, 0));
    assert_eq!(used(&card, 0).0, before + 1);
}

proptest! {
    /// Any chains on any queue, and any frames: the process survives, its memory stays bounded, and
    /// a reset restores the device.
    #[test]
    fn anything(
        steps in prop::collection::vec(
            (
                0u16..5,
                prop_oneof![0u64..RAM_BYTES, any::<u64>()],
                prop_oneof![0u32..2000, any::<u32>()],
                0u16..8,
                0u16..20,
                any::<u16>(),
                prop::collection::vec(any::<u8>(), 0..80),
                0usize..3,
            ),
            1..60,
        ),
        features in prop_oneof![Just(0u64), Just(MQ), Just(MQ | 1 << 28), Just(1 << 29)],
    ) {
        let mut card = card(2, features);
        for (queue, at, bytes, flags, next, count, frame, room) in steps {
            link(&mut card).room = room;
            card.poke(
                rings(queue) + 16 * u64::from(next % 16),
                &descriptor(at, bytes, flags, next),
            );
            card.poke(rings(queue) + 0x1004 + 2 * u64::from(count % 16), &next.to_le_bytes());
            card.poke(rings(queue) + 0x1002, &(count % 40).to_le_bytes());
            card.ring(queue.into());
            come(&mut card, &[frame]);
        }
        let mut card = {
            card.set(0x14, &[0]);
            card.ram = sealed(RAM_BYTES);
            prop_assert_eq!(card.unmap(0, RAM_BYTES, 0).errno, 0);
            card.share_memory();
            card.negotiate(0);
            card.enable(0, 16, rings(0));
            card.enable(1, 16, rings(1));
            card.set(0x14, &[15]);
            card
        };
        link(&mut card).room = 1;
        link(&mut card).sent.clear();
        link(&mut card).coming.clear();
        send(&mut card, 1, 1, &[0; HEADER], &[1; 60]);
        prop_assert_eq!(link(&mut card).sent.len(), 1);
        give_buffer(&mut card, 0, 1, 1530);
        come(&mut card, &[vec![1; 60]]);
        prop_assert_eq!(used(&card, 0), (1, 72));
    }
}
