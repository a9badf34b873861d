//! Bus mastering. A function whose Bus Master Enable is clear reads and writes nothing of the guest's and signals no vector, whatever its driver, its
//! clock, the network or the IOMMU has for it. What came meanwhile is done when the bit is set.

use std::collections::VecDeque;
use std::num::NonZeroU16;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ringfence_live::CONFIG_REGION;
use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma::{Direct, Dma};
use ringfence_live::host::HostOptimisations;
use ringfence_live::link::{Link, Receiving, Sending};
use ringfence_live::server::Served;
use ringfence_live::virtio::blk::Blk;
use ringfence_live::virtio::late::Late;
use ringfence_live::virtio::net::Net;
use ringfence_live::virtio::rng::Rng;
use ringfence_live::virtio::{Awaited, Device, QueueBroken, StillMaster, TURN_BYTES, Turn};
use ringfence_types::Direction;
use rustix::event::{EventfdFlags, eventfd};
use virtio_queue::Queue;

use crate::guest::{AWAY, DOMAIN, ENDPOINT, EVENT_QUEUE, Guest, IOMMU_QUEUE, READ_WRITE, read};
use crate::para::{self, DISK, PAGE, Para};
use crate::rig::*;

const HEADER: u64 = 0x8000;
const STATUS: u64 = 0x9000;
const DATA: u64 = 0xb000;
/// Where an event of an IOMMU lands.
const EVENT: u64 = 0x7_0000;

/// Has all vectors signal one event, which queue `index` uses.
fn interrupts<D: Device, A: Dma>(client: &mut Client<D, A>, index: u16) -> OwnedFd {
    let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let fds = vec![event.as_fd().try_clone_to_owned().unwrap()];
    let body = words(&[20, 4 | 32, 2, 0, 1]);
    assert_eq!(client.send_with(SET_IRQS, &body, fds).errno, 0);
    client.set(0x10, &[0, 0]);
    client.set(0x16, &index.to_le_bytes());
    client.set(0x1a, &[0, 0]);
    // Of what was before.
    client.register(0x1000, 1);
    event
}

fn signals(event: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(event, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}

/// What the server does between two messages, as often as there is something to do.
fn turns<D: Device, A: Dma>(client: &mut Client<D, A>) {
    let function = client.session.function();
    function.came();
    for _ in 0..1000 {
        if !function.unfinished() {
            return;
        }
        function.go_on();
    }
    panic!("it never comes to an end");
}

/// While the bit is clear, the available ring of `queue`, which lies at `rings`, says what breaks it if it is looked at. The doorbell rings, and
/// `tempt` adds to it.
fn in_vain<D: Device, A: Dma>(
    client: &mut Client<D, A>,
    (queue, rings): (u16, u64),
    tempt: impl FnOnce(&mut Client<D, A>),
) {
    let event = interrupts(client, queue);
    client.master(false);
    let index = rings + 0x1002;
    let offered = client.peek(index, 2);
    client.poke(index, &[0, 0x80]);
    let before = client.peek(0, RAM_BYTES as usize);
    client.ring(queue.into());
    tempt(client);
    turns(client);
    client.ring(queue.into());
    assert!(client.session.function().waits_for().is_none());
    assert!(client.peek(0, RAM_BYTES as usize) == before, "written to");
    assert_eq!(client.register(0x14, 1), 15, "the ring was looked at");
    assert_eq!(client.register(0x1000, 1), 0, "interrupt status");
    assert_eq!(signals(&event), 0);
    client.poke(index, &offered);
}

/// The bit is set: what was offered is done, and told once.
fn then<D: Device, A: Dma>(client: &mut Client<D, A>, queue: u16) {
    let event = interrupts(client, queue);
    client.master(true);
    assert_eq!(signals(&event), 0, "before its next turn");
    turns(client);
    assert_eq!(signals(&event), 1);
}

/// Makes a read of sector 0 available as the `count`th, and does not ring.
fn offer_read<A: Dma>(disk: &mut Client<impl Device, A>, count: u16, away: u64) {
    disk.poke(HEADER, &request(0, 0));
    disk.poke(STATUS, &[0xee]);
    disk.poke(DATA, &[0xee; 512]);
    disk.descriptor(0, HEADER + away, 16, NEXT, 1);
    disk.descriptor(1, DATA + away, 512, NEXT | WRITE, 2);
    disk.descriptor(2, STATUS + away, 1, WRITE, 0);
    let slot = u64::from((count - 1) % 16);
    disk.poke(QUEUE + 0x1004 + 2 * slot, &[0, 0]);
    disk.poke(QUEUE + 0x1002, &count.to_le_bytes());
    // With an event index: to be told of this one.
    disk.poke(QUEUE + 0x1004 + 2 * 16, &(count - 1).to_le_bytes());
}

fn has_read<A: Dma>(disk: &Client<impl Device, A>, count: u16) {
    assert_eq!(disk.used(), (count, 513));
    assert_eq!(disk.peek(STATUS, 1), [0]);
    let sector: Vec<u8> = (0..512u64).map(|at| (at / 7) as u8).collect();
    assert_eq!(disk.peek(DATA, 512), sector);
}

/// A disk that runs, whose addresses are `away` from where they lead.
fn reads_in_vain<D: Device, A: Dma>(disk: &mut Client<D, A>, away: u64) {
    for count in 1..=3 {
        offer_read(disk, count, away);
        in_vain(disk, (0, QUEUE), |_| ());
        then(disk, 0);
        has_read(disk, count);
    }
}

fn blk(counters: Arc<DeviceCounters>) -> Blk {
    Blk::new(disk_file(), false, counters).unwrap()
}

#[test]
fn a_disk() {
    let mut client = ready();
    client.begin(1 << 9);
    reads_in_vain(&mut client, 0);
    // With an event index the device asks for doorbells elsewhere.
    let mut client = ready();
    client.begin(1 << 9 | 1 << 29);
    reads_in_vain(&mut client, 0);
}

#[test]
fn a_disk_behind_each_iommu() {
    let mut guest = Guest::with(|_, counters| blk(counters)).mapped();
    reads_in_vain(&mut guest.disk, AWAY);
    let mut guest = Guest::behind_para(|_, counters| blk(counters)).mapped();
    reads_in_vain(&mut guest.disk, AWAY);
}

#[test]
fn an_assigned_disk() {
    let mut guest = Guest::assigned(blk);
    assert_eq!(guest.attach(), 0);
    assert_eq!(guest.map(AWAY, 0x2_0000, 0, READ_WRITE), 0);
    guest.begin();
    reads_in_vain(&mut guest.disk, AWAY);
    for host in [HostOptimisations::Off, HostOptimisations::On] {
        let mut guest = Guest::assigned_para(host, blk);
        guest.attach();
        assert_eq!(guest.map(AWAY, 0x2_0000, 0, READ_WRITE), 0);
        guest.begin();
        reads_in_vain(&mut guest.disk, AWAY);
    }
}

/// Its time comes while the bit is clear.
#[test]
fn a_late_disk() {
    let counters = Arc::new(DeviceCounters::default());
    let late = Late::new(blk(Arc::clone(&counters)), Duration::from_secs(3600)).unwrap();
    let mut client = Client::new(late, Direct::default(), false, counters);
    client.agree();
    client.share_memory();
    client.begin(1 << 9);
    offer_read(&mut client, 1, 0);
    client.ring(0);
    assert_eq!(client.used().0, 0, "it waits");
    in_vain(&mut client, (0, QUEUE), |client| {
        client.session.function().came();
    });
    then(&mut client, 0);
    has_read(&client, 1);
}

#[test]
fn an_entropy_device() {
    let counters = Arc::new(DeviceCounters::default());
    let rng = Rng::new(Arc::clone(&counters));
    let mut client = Client::new(rng, Direct::default(), false, counters);
    client.agree();
    client.share_memory();
    client.begin(0);
    client.descriptor(0, DATA, 64, WRITE, 0);
    client.poke(QUEUE + 0x1002, &[1, 0]);
    in_vain(&mut client, (0, QUEUE), |_| ());
    then(&mut client, 0);
    assert_eq!(client.used(), (1, 64));
    assert_ne!(client.peek(DATA, 64), [0; 64]);
}

/// Frames that the far side sends and takes.
#[derive(Default)]
struct Wire {
    coming: VecDeque<Vec<u8>>,
    sent: usize,
    room: usize,
}

impl Link for Wire {
    fn send(&mut self, _frame: &[u8]) -> Sending {
        match self.room.checked_sub(1) {
            None => Sending::Full,
            Some(room) => {
                self.room = room;
                self.sent += 1;
                Sending::Taken
            }
        }
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Receiving {
        let Some(frame) = self.coming.pop_front() else {
            return Receiving::Nothing;
        };
        if frame.len() < 14 {
            return Receiving::Dropped;
        }
        buffer[..frame.len()].copy_from_slice(&frame);
        Receiving::Frame(frame.len())
    }

    fn waits_for(&self, _input: bool, _output: bool) -> Option<Awaited<'_>> {
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

/// Makes a chain of one descriptor available as the first of a queue, and does not ring.
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
    card.session.function().came();
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

/// More was dropped than is at once, so there is something to do without waiting.
#[test]
fn a_network_device_that_is_busy() {
    let mut card = card(0);
    // So many when it is told of them, as many when the bit is cleared, and more.
    wire(&mut card).coming.extend(vec![vec![0; 4]; 3 * 64]);
    wire(&mut card).coming.push_back(frame());
    card.session.function().came();
    assert!(card.session.function().unfinished());
    offer(&card, 0, 2048, WRITE);
    in_vain(&mut card, (0, rings(0)), |card| card.ring(0));
    let left = wire(&mut card).coming.len();
    assert_eq!(left, 64 + 1, "they stay with the link");
    then(&mut card, 0);
    assert_eq!(card.peek(buffer(0) + 12, 60), frame());
}

/// The frame came before there was a buffer, and the buffer before the bit is set.
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
        card.session.function().came();
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

/// The queues are the IOMMU's own accesses; translating is none. So its endpoints go on, and its driver is told later.
#[test]
fn a_virtio_iommu() {
    let mut guest = Guest::with(|_, counters| blk(counters)).mapped();
    // An unmap of the page for data.
    let at = 0x6_0000;
    let range = longs(&[DATA + AWAY, DATA + AWAY + 0xfff]);
    let unmap = [vec![4, 0, 0, 0], words(&[DOMAIN]), range, vec![0; 4]].concat();
    guest.iommu.poke(at, &unmap);
    guest.iommu.poke(0x6_1000, &[0xee; 4]);
    let request = descriptor(at, unmap.len() as u32, NEXT, 1);
    guest.iommu.poke(IOMMU_QUEUE, &request);
    let count = guest.requests + 1;
    let slot = u64::from(guest.requests % 16);
    guest.iommu.poke(IOMMU_QUEUE + 0x1004 + 2 * slot, &[0, 0]);
    guest.iommu.poke(IOMMU_QUEUE + 0x1002, &count.to_le_bytes());
    in_vain(&mut guest.iommu, (0, IOMMU_QUEUE), |_| ());
    assert_eq!(read(&mut guest, 1, DATA + AWAY), Some(0), "still mapped");
    then(&mut guest.iommu, 0);
    assert_eq!(guest.iommu.peek(0x6_1000, 1), [0]);
    assert_eq!(read(&mut guest, 2, DATA + AWAY), Some(1), "unmapped");
}

#[test]
fn a_virtio_iommu_with_a_fault_to_tell() {
    let mut guest = Guest::with(|_, counters| blk(counters)).mapped();
    guest.wait_for_a_fault();
    guest.iommu.master(false);
    assert_eq!(read(&mut guest, 1, 0xdead_0000), Some(1));
    in_vain(&mut guest.iommu, (1, EVENT_QUEUE), |_| ());
    then(&mut guest.iommu, 1);
    assert_eq!(guest.fault(), Some((ENDPOINT, 0xdead_0000)));
}

#[test]
fn a_para_virtual_iommu() {
    let mut guest = Guest::behind_para(|_, counters| blk(counters)).mapped();
    let request = para::unmap(&[DATA + AWAY]);
    let (at, status) = (para::REQUEST, 0x7_1000);
    guest.iommu.poke(at, &request);
    guest.iommu.poke(status, &[0xee]);
    let chain = [
        descriptor(at, request.len() as u32, NEXT, 1),
        descriptor(status, 1, WRITE, 0),
    ];
    guest.iommu.poke(para::REQUESTS, &chain.concat());
    let slot = u64::from(guest.requests % 16);
    let count = guest.requests + 1;
    guest
        .iommu
        .poke(para::REQUESTS + 0x1004 + 2 * slot, &[0, 0]);
    guest
        .iommu
        .poke(para::REQUESTS + 0x1002, &count.to_le_bytes());
    in_vain(&mut guest.iommu, (0, para::REQUESTS), |_| ());
    assert_eq!(read(&mut guest, 1, DATA + AWAY), Some(0), "still mapped");
    then(&mut guest.iommu, 0);
    assert_eq!(guest.iommu.peek(status, 1), [0]);
    assert_eq!(read(&mut guest, 2, DATA + AWAY), Some(1), "unmapped");
}

#[test]
fn a_para_virtual_iommu_with_an_event_to_tell() {
    let mut guest: Guest<Blk, Para> = Guest::behind_para(|_, counters| blk(counters)).mapped();
    guest.wait_for_a_fault();
    guest.iommu.master(false);
    assert_eq!(read(&mut guest, 1, 0xdead_0000), Some(1));
    in_vain(&mut guest.iommu, (1, EVENT_QUEUE), |_| ());
    then(&mut guest.iommu, 1);
    assert_eq!(guest.fault(), Some((ENDPOINT, 0xdead_0000)));
    assert_eq!(guest.iommu.peek(EVENT, 1), [DISK as u8]);
    // What was mapped and unmapped meanwhile is as it was asked for.
    let more = [(0x10_0000 + AWAY, PAGE)];
    let requests = [para::map(DISK, Direction::ToDevice, &more)];
    assert_eq!(guest.ask(&requests), [0]);
}

/// A device that has more to do than one turn bears has its bit cleared between two turns.
#[test]
fn work_stops_where_it_is_and_goes_on_there() {
    const BYTES: u32 = 128 << 10;
    let mut client = ready();
    client.begin(1 << 9);
    client.poke(HEADER, &request(0, 0));
    client.descriptor(0, HEADER, 16, NEXT, 1);
    client.descriptor(1, 0x1_0000, BYTES, NEXT | WRITE, 2);
    client.descriptor(2, STATUS, 1, WRITE, 0);
    client.offer(0, 15);
    let first = TURN_BYTES.div_ceil(u64::from(BYTES)) as u16;
    assert_eq!(client.used().0, first);
    assert!(client.session.function().unfinished());
    in_vain(&mut client, (0, QUEUE), |_| ());
    assert_eq!(client.used().0, first);
    then(&mut client, 0);
    assert_eq!(client.used(), (15, BYTES + 1));
    assert_eq!(client.counters.requests.get(), 15, "none of them twice");
}

/// A driver that never enables it, as one of a device that does without would.
#[test]
fn without_the_bit_from_the_beginning_and_after_a_reset() {
    let mut client = ready();
    for reset in [false, true] {
        if reset {
            assert_eq!(client.send(RESET, &[]).errno, 0);
            assert_eq!(client.config(4, 2), [0, 0], "the bit is clear");
        }
        client.agree_on(0);
        client.enable(0, 16, QUEUE);
        client.set(0x14, &[15]);
        client.poke(QUEUE + 0x1000, &[0; 0x1010]);
        offer_read(&mut client, 1, 0);
        in_vain(&mut client, (0, QUEUE), |_| ());
        then(&mut client, 0);
        has_read(&client, 1);
        // The driver's own reset leaves it alone.
        client.set(0x14, &[0]);
        assert_eq!(client.config(4, 2), [4, 0]);
    }
}

/// It is one bit, however it is written.
#[test]
fn each_way_to_write_it() {
    let mut client = ready();
    client.begin(0);
    let mut count = 0;
    let mut is_master = |client: &mut Client<Blk, Direct>| {
        count += 1;
        offer_read(client, count, 0);
        client.ring(0);
        turns(client);
        let done = client.used().0 == count;
        if !done {
            // So that the next one is another.
            count -= 1;
        }
        done
    };
    let cases: [(u64, &[u8], bool); 10] = [
        (4, &[0xff, 0xff], true),
        (4, &[0xfb, 0xff], false),
        (4, &[4], true),
        (5, &[0], true),
        (4, &[3], false),
        (5, &[4], false),
        (4, &[7, 0, 0, 0], true),
        (4, &[0, 0, 0, 0], false),
        (2, &[0, 0, 4, 0], true),
        (0, &[4; 4], true),
    ];
    for (offset, bytes, expected) in cases {
        assert_eq!(client.write(CONFIG_REGION, offset, bytes).errno, 0);
        let read = client.config(4, 1)[0] & 4 != 0;
        let case = format!("{offset} {bytes:?}");
        assert_eq!(read, expected, "{case}: as it reads");
        assert_eq!(is_master(&mut client), expected, "{case}");
    }
}

/// A device somebody else works for, who does not let go.
struct Stubborn;

impl Device for Stubborn {
    const TYPE: u16 = Rng::TYPE;
    const CLASS: [u8; 3] = Rng::CLASS;

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[]
    }

    fn read_config(&self, _offset: usize, _data: &mut [u8]) {}

    fn leave_bus(&mut self) -> Result<(), StillMaster> {
        Err(StillMaster)
    }

    fn process<A: Dma>(
        &mut self,
        _index: usize,
        _queue: &mut Queue,
        _dma: &mut A,
    ) -> Result<Turn, QueueBroken> {
        Ok(Turn::default())
    }
}

/// The client is not told that it does not reach memory any more, and reads that it may.
#[test]
fn a_device_that_cannot_be_stopped() {
    let counters = Arc::new(DeviceCounters::default());
    let mut client = Client::new(Stubborn, Direct::default(), false, counters);
    client.agree();
    client.master(true);
    assert_ne!(client.write(CONFIG_REGION, 4, &[3, 1]).errno, 0);
    assert_eq!(client.config(4, 2), [4, 0], "nothing has changed");
    assert_ne!(client.send(RESET, &[]).errno, 0);
}
