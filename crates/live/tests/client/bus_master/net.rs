//! Network devices, which receive frames whether or not the bit is set.

use std::collections::VecDeque;
use std::num::NonZeroU16;
use std::sync::Arc;

use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma::Direct;
use ringfence_live::link::{NetLink, ReceiveOutcome, SendOutcome};
use ringfence_live::server::PolledFunction;
use ringfence_live::virtio::PollSource;
use ringfence_live::virtio::net::Net;

use super::{in_vain, then, turns};
use crate::rig::*;

/// Frames that the peer sends and accepts.
#[derive(Default)]
struct Wire {
    coming: VecDeque<Vec<u8>>,
    sent: usize,
    room: usize,
}

impl NetLink for Wire {
    fn send(&mut self, _frame: &[u8]) -> SendOutcome {
        match self.room.checked_sub(1) {
            None => SendOutcome::Full,
            Some(room) => {
                self.room = room;
                self.sent += 1;
                SendOutcome::Taken
            }
        }
    }

    fn receive(&mut self, buffer: &mut [u8]) -> ReceiveOutcome {
        let Some(frame) = self.coming.pop_front() else {
            return ReceiveOutcome::Nothing;
        };
        if frame.len() < 14 {
            return ReceiveOutcome::Dropped;
        }
        buffer[..frame.len()].copy_from_slice(&frame);
        ReceiveOutcome::Frame(frame.len())
    }

    fn waits_for(&self, _input: bool, _output: bool) -> Option<PollSource<'_>> {
        None
    }
}

const PAIRS: u16 = 2;
const MQ: u64 = 1 << 22 | 1 << 17;

const fn rings(queue: u16) -> u64 {
    0x1_0000 + 0x3000 * queue as u64
}

const fn buffer(queue: u16) -> u64 {
    0x8_0000 + 0x1000 * queue as u64
}

type Card = Client<Net<Wire>, Direct>;

fn card(room: usize) -> Card {
    let counters = Arc::new(DeviceCounters::default());
    let wire = Wire {
        room,
        ..Wire::default()
    };
    let pairs = NonZeroU16::new(PAIRS).unwrap();
    let net = Net::new(wire, [2; 6], pairs, Arc::clone(&counters));
    let mut card = Client::new(net, Direct::default(), false, counters);
    card.agree();
    card.share_memory();
    card.negotiate(MQ);
    for queue in 0..=2 * PAIRS {
        card.enable(queue, 16, rings(queue));
    }
    card.set(0x14, &[15]);
    turns(&mut card);
    card
}

fn wire(card: &mut Card) -> &mut Wire {
    card.session.function().device().link()
}

/// Makes a chain of one descriptor available as the first of a queue, without a doorbell.
fn offer(card: &Card, queue: u16, bytes: u32, flags: u16) {
    let raw = descriptor(buffer(queue), bytes, flags, 0);
    card.poke(rings(queue), &raw);
    card.poke(rings(queue) + 0x1002, &[1, 0]);
}

fn used(card: &Card, queue: u16) -> u16 {
    let bytes = card.peek(rings(queue) + 0x2002, 2);
    u16::from_le_bytes([bytes[0], bytes[1]])
}

fn frame() -> Vec<u8> {
    let mut frame = vec![7; 60];
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame
}

fn comes(card: &mut Card) {
    wire(card).coming.push_back(frame());
    card.session.function().on_ready();
}

#[test]
fn a_network_device_that_receives() {
    let mut card = card(0);
    offer(&card, 0, 2048, WRITE);
    in_vain(&mut card, (0, rings(0)), comes);
    assert_eq!(wire(&mut card).coming.len(), 1, "it stays with the link");
    then(&mut card, 0);
    assert_eq!(used(&card, 0), 1);
    assert_eq!(card.peek(buffer(0) + 12, 60), frame());
}

/// More invalid frames than one turn drops, so the device has work without waiting.
#[test]
fn a_network_device_that_is_busy() {
    let mut card = card(0);
    // Enough invalid frames for the first turn, for the turn after the bit is cleared, and for
    // later ones.
    wire(&mut card).coming.extend(vec![vec![0; 4]; 3 * 64]);
    wire(&mut card).coming.push_back(frame());
    card.session.function().on_ready();
    assert!(card.session.function().unfinished());
    offer(&card, 0, 2048, WRITE);
    in_vain(&mut card, (0, rings(0)), |card| card.ring(0));
    let left = wire(&mut card).coming.len();
    assert_eq!(left, 64 + 1, "they stay with the link");
    then(&mut card, 0);
    assert_eq!(card.peek(buffer(0) + 12, 60), frame());
}

/// The frame arrives before the buffer, and the buffer before the bit is set.
#[test]
fn a_network_device_that_holds_a_frame() {
    let mut card = card(0);
    comes(&mut card);
    assert_eq!(wire(&mut card).coming.len(), 0, "it is with the device");
    offer(&card, 0, 2048, WRITE);
    in_vain(&mut card, (0, rings(0)), comes);
    then(&mut card, 0);
    assert_eq!(card.peek(buffer(0) + 12, 60), frame());
}

#[test]
fn a_network_device_that_sends_on_every_pair() {
    for pair in 0..PAIRS {
        let queue = 2 * pair + 1;
        let mut card = card(usize::MAX);
        card.poke(buffer(queue) + 12, &frame());
        offer(&card, queue, 72, 0);
        in_vain(&mut card, (queue, rings(queue)), |_| ());
        assert_eq!(wire(&mut card).sent, 0);
        then(&mut card, queue);
        assert_eq!((wire(&mut card).sent, used(&card, queue)), (1, 1));
    }
}

/// The link has room again while the bit is clear.
#[test]
fn a_network_device_whose_link_was_full() {
    let mut card = card(0);
    card.poke(buffer(1) + 12, &frame());
    offer(&card, 1, 72, 0);
    card.ring(1);
    assert_eq!(used(&card, 1), 0, "it waits for the link");
    in_vain(&mut card, (1, rings(1)), |card| {
        wire(card).room = 1;
        card.session.function().on_ready();
    });
    assert_eq!(wire(&mut card).sent, 0);
    then(&mut card, 1);
    assert_eq!((wire(&mut card).sent, used(&card, 1)), (1, 1));
}

#[test]
fn a_network_device_that_is_commanded() {
    let queue = 2 * PAIRS;
    let mut card = card(0);
    card.poke(buffer(queue), &[4, 0, 2, 0]);
    let ack = buffer(queue) + 8;
    card.poke(ack, &[0xee]);
    offer(&card, queue, 4, NEXT);
    card.poke(rings(queue), &descriptor(buffer(queue), 4, NEXT, 1));
    card.poke(rings(queue) + 16, &descriptor(ack, 1, WRITE, 0));
    in_vain(&mut card, (queue, rings(queue)), |_| ());
    then(&mut card, queue);
    assert_eq!(card.peek(ack, 1), [0]);
}
