//! Vectors: setting, signalling and removing them.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_setfl};

use crate::rig::*;

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK).unwrap()
}

fn copy(fd: &OwnedFd) -> OwnedFd {
    fd.as_fd().try_clone_to_owned().unwrap()
}

fn signals(fd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(fd, &mut count) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(_) => 0,
    }
}

fn set(
    client: &mut Client<impl ringfence_live::virtio::Device, impl ringfence_live::dma::Dma>,
    start: u32,
    count: u32,
    fds: Vec<OwnedFd>,
) -> u32 {
    let body = words(&[20, 4 | 32, 2, start, count]);
    client.send_with(SET_IRQS, &body, fds).errno
}

#[test]
fn a_request_signals_its_queue_s_vector_only() {
    let mut client = ready();
    let events = [event(), event()];
    assert_eq!(set(&mut client, 0, 2, events.iter().map(copy).collect()), 0);
    client.negotiate(0);
    client.set(0x16, &[0, 0]);
    client.set(0x1a, &1u16.to_le_bytes());
    assert_eq!(client.register(0x1a, 2), 1);
    client.set(0x1a, &2u16.to_le_bytes());
    assert_eq!(client.register(0x1a, 2), 0xffff, "there is no vector 2");
    client.set(0x1a, &1u16.to_le_bytes());
    client.enable(0, 16, QUEUE);
    client.set(0x14, &[15]);
    client.poke(0x8000, &request(4, 0));
    client.descriptor(0, 0x8000, 16, NEXT, 1);
    client.descriptor(1, 0x9000, 1, WRITE, 0);
    client.offer(0, 1);
    assert_eq!(client.used(), (1, 1));
    assert_eq!(events.each_ref().map(signals), [0, 1]);
    assert_eq!(client.register(0x1000, 1), 1, "the status says a queue");
    assert_eq!(client.register(0x1000, 1), 0, "and reading clears it");

    // Removed vectors are not signalled; the device serves the request all the same.
    assert_eq!(set(&mut client, 1, 1, vec![]), 0);
    client.offer(0, 2);
    assert_eq!(client.used().0, 2);
    assert_eq!(events.each_ref().map(signals), [0, 0]);
}

#[test]
fn vectors_can_be_signalled_by_the_client_and_taken_down() {
    let mut client = ready();
    let event = event();
    assert_eq!(set(&mut client, 1, 1, vec![copy(&event)]), 0);
    assert_eq!(
        client.send(SET_IRQS, &words(&[20, 1 | 32, 2, 0, 2])).errno,
        0
    );
    assert_eq!(signals(&event), 1);
    let bools = [words(&[20, 2 | 32, 2, 0, 2]), vec![0, 1]].concat();
    assert_eq!(client.send(SET_IRQS, &bools).errno, 0);
    assert_eq!(signals(&event), 1);
    assert_eq!(
        client.send(SET_IRQS, &words(&[20, 1 | 32, 2, 0, 0])).errno,
        0
    );
    assert_eq!(
        client.send(SET_IRQS, &words(&[20, 1 | 32, 2, 0, 2])).errno,
        0
    );
    assert_eq!(signals(&event), 0);
}

/// A full counter would block a writer.
#[test]
fn a_full_event_does_not_hold_the_device_up() {
    let mut client = ready();
    let event = eventfd(0, EventfdFlags::empty()).unwrap();
    rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    assert_eq!(set(&mut client, 0, 1, vec![copy(&event)]), 0);
    assert_eq!(
        client.send(SET_IRQS, &words(&[20, 1 | 32, 2, 0, 1])).errno,
        0
    );
    assert!(signals(&event) >= u64::MAX - 1);
}

/// The client fills the counter between any two instructions of the device, so a check for room is
/// worthless. A writer without room would sleep.
#[test]
fn full_eventfd_does_not_block_the_device() {
    const ROUNDS: u32 = 20_000;
    const FULL: u64 = u64::MAX - 1;
    let event = eventfd(0, EventfdFlags::empty()).unwrap();
    let theirs = copy(&event);
    let (tell, told) = std::sync::mpsc::channel();
    let done = Arc::new(AtomicBool::new(false));
    let heard = Arc::clone(&done);
    let device = std::thread::spawn(move || {
        let mut client = ready();
        assert_eq!(set(&mut client, 0, 1, vec![theirs]), 0);
        tell.send(rustix::thread::gettid()).unwrap();
        let trigger = words(&[20, 1 | 32, 2, 0, 1]);
        while !heard.load(Ordering::Relaxed) {
            assert_eq!(client.send(SET_IRQS, &trigger).errno, 0);
        }
    });
    let thread = told.recv().unwrap().as_raw_nonzero();
    let mut asleep = 0;
    for _ in 0..ROUNDS {
        let room = PollFlags::IN;
        let mut full = [PollFd::new(&event, room)];
        if poll(&mut full, Some(&Timespec::default())).unwrap() == 1 {
            rustix::io::read(&event, &mut [0; 8]).unwrap();
        }
        // The other thread may have been faster.
        let mut empty = [PollFd::new(&event, PollFlags::OUT)];
        if poll(&mut empty, Some(&Timespec::default())).unwrap() == 1 {
            let nonblocking = OFlags::NONBLOCK;
            fcntl_setfl(&event, nonblocking).unwrap();
            let _ = rustix::io::write(&event, &FULL.to_ne_bytes());
            fcntl_setfl(&event, OFlags::empty()).unwrap();
        }
        let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
        let state = status.rsplit(") ").next().unwrap().chars().next();
        asleep += u32::from(state == Some('S'));
    }
    done.store(true, Ordering::Relaxed);
    let _ = rustix::io::read(&event, &mut [0; 8]);
    device.join().unwrap();
    assert_eq!(asleep, 0, "times that the device slept");
}
