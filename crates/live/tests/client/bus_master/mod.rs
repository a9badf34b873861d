//! Bus mastering. A function whose Bus Master Enable bit is clear neither accesses guest memory nor
//! signals a vector. Doorbells, timers, frames and faults do not change that. Pending work
//! continues when the bit is set.

mod disks;
mod iommus;
mod net;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ringfence_live::CONFIG_REGION;
use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma::{Direct, Dma};
use ringfence_live::server::PolledFunction;
use ringfence_live::virtio::blk::Blk;
use ringfence_live::virtio::rng::Rng;
use ringfence_live::virtio::{BusMasterStuck, Device, QUANTUM_BYTES, QuantumResult, QueueBroken};
use ringfence_vfio_user::errno;
use rustix::event::{EventfdFlags, eventfd};
use virtio_queue::Queue;

use crate::rig::*;

const HEADER: u64 = 0x8000;
const STATUS: u64 = 0x9000;
const DATA: u64 = 0xb000;
/// Address of an IOMMU's event buffer.
const EVENT: u64 = 0x7_0000;

/// Sets one eventfd for all vectors, and assigns a vector to queue `index`.
fn interrupts<D: Device, A: Dma>(client: &mut Client<D, A>, index: u16) -> OwnedFd {
    let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let fds = vec![event.as_fd().try_clone_to_owned().unwrap()];
    let body = words(&[20, 4 | 32, 2, 0, 1]);
    assert_eq!(client.send_with(SET_IRQS, &body, fds).errno, 0);
    client.set(0x10, &[0, 0]);
    client.set(0x16, &index.to_le_bytes());
    client.set(0x1a, &[0, 0]);
    // Discard earlier interrupts.
    client.register(0x1000, 1);
    event
}

fn signals(event: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(event, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}

/// Does the server's work between two messages, until none remains.
fn turns<D: Device, A: Dma>(client: &mut Client<D, A>) {
    let function = client.session.function();
    function.on_ready();
    for _ in 0..1000 {
        if !function.unfinished() {
            return;
        }
        function.continue_work();
    }
    panic!("it never comes to an end");
}

/// Runs with the bit clear. The available ring of `queue`, at `rings`, then has an index that
/// breaks the device if it reads it. Rings the doorbell and calls `tempt`.
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

/// Sets the bit, and checks that the offered work is done and signalled once.
fn then<D: Device, A: Dma>(client: &mut Client<D, A>, queue: u16) {
    let event = interrupts(client, queue);
    client.master(true);
    assert_eq!(signals(&event), 0, "before its next turn");
    turns(client);
    assert_eq!(signals(&event), 1);
}

/// Makes a read of sector 0 available as the `count`th request, without a doorbell.
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
    // With event indices: request an interrupt for this one.
    disk.poke(QUEUE + 0x1004 + 2 * 16, &(count - 1).to_le_bytes());
}

fn has_read<A: Dma>(disk: &Client<impl Device, A>, count: u16) {
    assert_eq!(disk.used(), (count, 513));
    assert_eq!(disk.peek(STATUS, 1), [0]);
    let sector: Vec<u8> = (0..512u64).map(|at| (at / 7) as u8).collect();
    assert_eq!(disk.peek(DATA, 512), sector);
}

/// Tests reads of a running disk whose IOVAs differ by `away` from the guest-physical addresses.
fn assert_reads_fail<D: Device, A: Dma>(disk: &mut Client<D, A>, away: u64) {
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

/// The bit is cleared between two turns of a device with more work than one turn allows.
#[test]
fn work_stops_and_resumes_at_the_same_request() {
    const BYTES: u32 = 128 << 10;
    let mut client = ready();
    client.begin(1 << 9);
    client.poke(HEADER, &request(0, 0));
    client.descriptor(0, HEADER, 16, NEXT, 1);
    client.descriptor(1, 0x1_0000, BYTES, NEXT | WRITE, 2);
    client.descriptor(2, STATUS, 1, WRITE, 0);
    client.offer(0, 15);
    let first = QUANTUM_BYTES.div_ceil(u64::from(BYTES)) as u16;
    assert_eq!(client.used().0, first);
    assert!(client.session.function().unfinished());
    in_vain(&mut client, (0, QUEUE), |_| ());
    assert_eq!(client.used().0, first);
    then(&mut client, 0);
    assert_eq!(client.used(), (15, BYTES + 1));
    assert_eq!(client.counters.requests.get(), 15, "none of them twice");
}

/// A driver that never sets the bit.
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
        // The driver's device reset leaves the bit unchanged.
        client.set(0x14, &[0]);
        assert_eq!(client.config(4, 2), [4, 0]);
    }
}

/// The bit has the same effect for every way to write it.
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
            // Undo the count for the next case.
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

/// A device whose worker does not stop.
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

    fn clear_bus_master(&mut self) -> Result<(), BusMasterStuck> {
        Err(BusMasterStuck)
    }

    fn process<A: Dma>(
        &mut self,
        _index: usize,
        _queue: &mut Queue,
        _dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        Ok(QuantumResult::default())
    }
}

/// The client receives no success reply, and still reads the bit as set.
#[test]
fn a_device_that_cannot_be_stopped() {
    let counters = Arc::new(DeviceCounters::default());
    let mut client = Client::new(Stubborn, Direct::default(), false, counters);
    client.agree();
    client.master(true);
    assert_eq!(client.write(CONFIG_REGION, 4, &[3, 1]).errno, errno::EBUSY);
    assert_eq!(client.config(4, 2), [4, 0], "nothing has changed");
    assert_eq!(client.send(RESET, &[]).errno, errno::EBUSY);
}
