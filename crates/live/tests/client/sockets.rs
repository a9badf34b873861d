//! The socket layer: real sockets, passed descriptors, and clients that disconnect or corrupt the
//! stream.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma::{Direct, Dma};
use ringfence_live::server::{ServeEvent, StopSignal, serve};
use ringfence_live::virtio::blk::Blk;
use ringfence_live::virtio::{DmaAddresses, VirtioPci};
use ringfence_vfio_user::errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::memory::StuckMemory;
use crate::rig::*;

struct Server {
    path: PathBuf,
    stop: StopSignal,
    thread: Option<JoinHandle<()>>,
    events: Receiver<String>,
}

impl Server {
    fn new(name: &str) -> Self {
        Self::with_memory(name, Direct::default())
    }

    fn with_memory(name: &str, memory: impl Dma + 'static) -> Self {
        let made = tempfile::Builder::new().prefix(name).tempdir().unwrap();
        let path = made.keep().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let stop = StopSignal::new().unwrap();
        let (sender, events) = channel();
        let counters = Arc::new(DeviceCounters::default());
        let disk = Blk::new(disk_file(), false, Arc::clone(&counters)).unwrap();
        let function = VirtioPci::new(
            disk,
            memory,
            DmaAddresses::GuestPhysical,
            Arc::clone(&counters),
        );
        let theirs = stop.clone();
        let thread = thread::spawn(move || {
            serve(&listener, function, &counters, &theirs, |event| {
                let _ = sender.send(match event {
                    ServeEvent::Refused(refusal) => format!("refused: {refusal}"),
                    ServeEvent::Closed(error) => format!("closed: {error}"),
                    other => format!("{other:?}"),
                });
            })
            .unwrap();
        });
        Self {
            path,
            stop,
            thread: Some(thread),
            events,
        }
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.path).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.stop();
        let ended = self.thread.take().unwrap().join();
        let _ = std::fs::remove_dir_all(self.path.parent().unwrap());
        if !thread::panicking() {
            ended.unwrap();
        }
    }
}

pub(crate) fn send_with(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let sent = sendmsg(
        stream,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::empty(),
    );
    assert_eq!(sent.unwrap(), bytes.len());
}

/// Returns the error number and the body of the next reply.
fn receive(stream: &mut UnixStream) -> (u32, Vec<u8>) {
    let mut header = [0; 16];
    stream.read_exact(&mut header).unwrap();
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
    let mut body = vec![0; word(4) as usize - 16];
    stream.read_exact(&mut body).unwrap();
    (word(12), body)
}

fn agree(stream: &mut UnixStream) {
    stream.write_all(&encode(7, VERSION, 0, &[0; 4])).unwrap();
    assert_eq!(receive(stream).0, 0);
}

fn map_body(start: u64) -> Vec<u8> {
    [words(&[32, 3]), longs(&[0, start, 4096])].concat()
}

#[test]
fn descriptors_stay_with_their_messages() {
    let server = Server::new("fds");
    let mut stream = server.connect();
    agree(&mut stream);
    let ram = sealed(4096);
    let fd = ram.as_fd();
    // Two messages sent together, the second with a descriptor: only the second may receive it.
    stream.write_all(&encode(7, GET_INFO, 0, &[0; 16])).unwrap();
    send_with(&stream, &encode(7, DMA_MAP, 0, &map_body(0)), &[fd]);
    stream.write_all(&encode(7, GET_INFO, 0, &[0; 16])).unwrap();
    for _ in 0..3 {
        assert_eq!(receive(&mut stream).0, 0);
    }
    // A descriptor with each of two messages, and one message sent byte by byte.
    for at in 1..3 {
        send_with(&stream, &encode(7, DMA_MAP, 0, &map_body(at << 12)), &[fd]);
    }
    let bytes = encode(7, DMA_MAP, 0, &map_body(0x3000));
    send_with(&stream, &bytes[..1], &[fd]);
    for byte in &bytes[1..] {
        stream.write_all(&[*byte]).unwrap();
    }
    for _ in 0..3 {
        assert_eq!(receive(&mut stream).0, 0);
    }
    // More descriptors than a message may have, and descriptors on a message that takes none.
    send_with(
        &stream,
        &encode(7, DMA_MAP, 0, &map_body(0x4000)),
        &[fd; 40],
    );
    assert_eq!(receive(&mut stream).0, 22);
    send_with(&stream, &encode(7, GET_INFO, 0, &[0; 16]), &[fd]);
    assert_eq!(receive(&mut stream).0, 22);
    stream.write_all(&encode(7, GET_INFO, 0, &[0; 16])).unwrap();
    assert_eq!(receive(&mut stream).0, 0);
}

#[test]
fn a_lost_stream_is_closed_and_the_next_client_served() {
    let server = Server::new("lost");
    let mut stream = server.connect();
    agree(&mut stream);
    let mut bytes = encode(7, GET_INFO, 0, &[]);
    bytes[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    stream.write_all(&bytes).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "closed");
    // A client that disconnects inside a message.
    let mut half = server.connect();
    half.write_all(&bytes[..5]).unwrap();
    drop(half);
    let mut stream = server.connect();
    stream.write_all(&encode(7, GET_INFO, 0, &[0; 16])).unwrap();
    assert_eq!(receive(&mut stream).0, 22, "a new client agrees anew");
    agree(&mut stream);
    drop(stream);
    let events: Vec<String> = server.events.try_iter().collect();
    assert!(
        events.contains(&"closed: a message of 4294967295 bytes exceeds 8192".to_owned()),
        "{events:?}"
    );
}

/// Writes a register of the BAR.
fn set(stream: &mut UnixStream, offset: u64, data: &[u8]) {
    write(stream, 0, offset, data);
}

/// Writes a register of a region.
fn write(stream: &mut UnixStream, region: u32, offset: u64, data: &[u8]) {
    let fixed = [longs(&[offset]), words(&[region, data.len() as u32])].concat();
    let body = [fixed, data.to_vec()].concat();
    stream
        .write_all(&encode(7, REGION_WRITE, 0, &body))
        .unwrap();
    assert_eq!(receive(stream).0, 0);
}

/// A guest can break its queue any number of times; the log records a limited number.
#[test]
fn reports_of_broken_queues_are_bounded() {
    const TIMES: usize = 300;
    let server = Server::new("broken");
    let mut stream = server.connect();
    agree(&mut stream);
    // Bus Master Enable.
    write(&mut stream, ringfence_live::CONFIG_REGION, 4, &[4, 0]);
    for _ in 0..TIMES {
        for status in [0, 1, 3] {
            set(&mut stream, 0x14, &[status]);
        }
        set(&mut stream, 0x08, &[1, 0, 0, 0]);
        set(&mut stream, 0x0c, &[1, 0, 0, 0]);
        set(&mut stream, 0x14, &[11]);
        // The client has shared no memory.
        set(&mut stream, 0x1c, &[1, 0]);
        set(&mut stream, 0x14, &[15]);
        set(&mut stream, 0x3000, &[0, 0]);
    }
    drop(stream);
    let said: Vec<String> = server.events.try_iter().collect();
    let broken = said.iter().filter(|said| said.starts_with("Broken"));
    let broken = broken.count();
    assert!((1..TIMES / 2).contains(&broken), "{broken} times");
}

/// Reconnecting does not reset the log limit.
#[test]
fn clients_one_after_the_other_do_not_fill_the_log() {
    const CLIENTS: usize = 300;
    let server = Server::new("flood");
    for _ in 0..CLIENTS {
        let mut stream = server.connect();
        for _ in 0..20 {
            // Before version negotiation.
            stream.write_all(&encode(7, GET_INFO, 0, &[0; 16])).unwrap();
            assert_eq!(receive(&mut stream).0, 22);
        }
    }
    let said = server.events.try_iter();
    let said = said.filter(|said| said.starts_with("refused"));
    let said = said.count();
    assert!((1..CLIENTS * 10).contains(&said), "{said} times");
}

/// The client sends no further message.
#[test]
fn server_completes_a_refused_unmap_by_itself() {
    let memory = StuckMemory::default();
    let (stuck, completed) = (Arc::clone(&memory.stuck), Arc::clone(&memory.completed));
    let server = Server::with_memory("stuck", memory);
    let mut stream = server.connect();
    agree(&mut stream);
    let ram = sealed(4096);
    send_with(
        &stream,
        &encode(7, DMA_MAP, 0, &map_body(0)),
        &[ram.as_fd()],
    );
    assert_eq!(receive(&mut stream).0, 0);
    stuck.store(true, Ordering::Relaxed);
    let body = [words(&[24, 0]), longs(&[0, 4096])].concat();
    stream.write_all(&encode(7, DMA_UNMAP, 0, &body)).unwrap();
    assert_eq!(receive(&mut stream).0, errno::EBUSY);
    stuck.store(false, Ordering::Relaxed);
    let begun = Instant::now();
    while !completed.load(Ordering::Relaxed) {
        assert!(begun.elapsed() < Duration::from_secs(10), "nothing happens");
        thread::sleep(Duration::from_millis(10));
    }
    stream.write_all(&encode(7, DMA_UNMAP, 0, &body)).unwrap();
    assert_eq!(receive(&mut stream).0, 0, "the repeated request");
}

#[test]
fn server_stops_despite_a_silent_client() {
    let server = Server::new("stop");
    let mut stream = server.connect();
    agree(&mut stream);
    stream.write_all(&[1, 2, 3]).unwrap();
    drop(server);
    assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)));
}

/// Runs in its own process, because it lowers the process's limit.
#[test]
#[ignore = "started by another test"]
fn without_a_descriptor_left() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    if !crate::is_alone() {
        return;
    }
    let server = Server::new("no-descriptors");
    let (first, mut second) = (server.connect(), server.connect());
    let limit = getrlimit(Resource::Nofile);
    // Open descriptors stay open; no further one can be opened.
    let none = Rlimit {
        current: Some(3),
        ..limit
    };
    assert_eq!(server.events.recv().unwrap(), "Connected");
    setrlimit(Resource::Nofile, none).unwrap();
    first.shutdown(std::net::Shutdown::Both).unwrap();
    assert_eq!(server.events.recv().unwrap(), "Disconnected");
    let said = server.events.recv().unwrap();
    assert!(said.starts_with("closed: Too many open files"), "{said}");
    setrlimit(Resource::Nofile, limit).unwrap();
    agree(&mut second);
}

/// Another client has used all descriptors; the device survives.
#[test]
fn a_client_that_there_is_no_descriptor_for_waits() {
    crate::alone("sockets::without_a_descriptor_left");
}
