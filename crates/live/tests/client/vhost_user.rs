//! The disk as a vhost-user back-end, by a front-end that keeps the protocol and by one that does not.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use proptest::prelude::*;
use ringfence_live::counters::DeviceCounters;
use ringfence_live::errant::{Errant, Misbehaviour};
use ringfence_live::server::{Event, Report, Stop};
use ringfence_live::vhost_user::{Refusal, Request, RequestError, Session, Settings, serve};
use ringfence_live::virtio::blk::Blk;
use ringfence_live::wire::{Assembly, Message};
use ringfence_softiommu::iotlb::{Header, IotlbLimits, Message as Iotlb};
use ringfence_types::{DeviceId, Iova, IovaRange, Permissions};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::rig::{disk_file, request, sealed};
use crate::sockets::send_with;

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;
const IOTLB: u32 = 22;
const GET_CONFIG: u32 = 24;

/// `VERSION_1` and `ACCESS_PLATFORM`.
const FEATURES: u64 = 3 << 32;
/// `REPLY_ACK`, `BACKEND_REQ` and `CONFIG`.
const PROTOCOL: u64 = 1 << 3 | 1 << 5 | 1 << 9;

const RAM_BYTES: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// Where the front-end has the guest's memory.
const USER: u64 = 0x7f00_0000_0000;

/// Pages of the device's addresses, and where they are in the guest's memory: all in another order.
const DESCRIPTORS: (u64, u64) = (0x1_0000, 0x9000);
const AVAILABLE: (u64, u64) = (0x1_1000, 0x3000);
const USED: (u64, u64) = (0x1_2000, 0x7000);
const HEADER: (u64, u64) = (0x2_0000, 0x5000);
const DATA: (u64, u64) = (0x2_1000, 0xb000);
const STATUS: (u64, u64) = (0x2_2000, 0xd000);

const SETTINGS: Settings = Settings {
    device: DeviceId::new(0x20),
    iotlb: IotlbLimits {
        pages: 64,
        ahead: 4,
        tables: 64,
        misses: 8,
        width: ringfence_softiommu::Width::BITS_48,
        readers: 2,
    },
};

fn frame(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = [request, 1 | flags, payload.len() as u32];
    let header = header.into_iter().flat_map(u32::to_ne_bytes);
    header.chain(payload.iter().copied()).collect()
}

fn halves(halves: &[u32]) -> Vec<u8> {
    halves.iter().flat_map(|half| half.to_ne_bytes()).collect()
}

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// A front-end, and the guest.
struct Front {
    main: UnixStream,
    channel: UnixStream,
    ram: std::fs::File,
    kick: OwnedFd,
    call: OwnedFd,
    grants: BTreeMap<u64, (u64, Permissions)>,
    /// Misses, in order: page and what was wanted.
    asked: Vec<(u64, Permissions)>,
    offered: u16,
    path: PathBuf,
    stop: Stop,
    counters: Arc<DeviceCounters>,
    events: Receiver<String>,
    thread: Option<JoinHandle<()>>,
}

impl Front {
    fn new(name: &str, errant: &[Errant]) -> Self {
        let path = std::env::temp_dir().join(format!("rf-vu-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let stop = Stop::new().unwrap();
        let counters = Arc::new(DeviceCounters::default());
        let (sender, events) = channel();
        let sender = Mutex::new(sender);
        let report: Report = Arc::new(move |event: &Event<'_>| {
            let text = match event {
                Event::Refused(refusal) => format!("refused: {refusal}"),
                Event::Closed(error) => format!("closed: {error}"),
                Event::Broken(broken) => format!("broken: {broken}"),
                Event::Errant(tried) => format!("{tried}"),
                other => format!("{other:?}"),
            };
            let _ = sender.lock().unwrap().send(text);
        });
        let mut disk = Blk::new(disk_file(), false, Arc::clone(&counters)).unwrap();
        let told = Arc::clone(&report);
        let tell = move |tried: &_| told(&Event::Errant(tried));
        disk.misbehave(Misbehaviour::new(errant, None, tell, Arc::clone(&counters)));
        let (theirs, counted) = (stop.clone(), Arc::clone(&counters));
        let thread = thread::spawn(move || {
            serve(&listener, disk, &SETTINGS, &counted, &theirs, &report).unwrap();
        });
        let main = UnixStream::connect(&path).unwrap();
        let (channel, given) = UnixStream::pair().unwrap();
        for socket in [&main, &channel] {
            socket
                .set_read_timeout(Some(Duration::from_secs(20)))
                .unwrap();
        }
        let mut front = Self {
            main,
            channel,
            ram: sealed(RAM_BYTES),
            kick: event(),
            call: event(),
            grants: BTreeMap::new(),
            asked: Vec::new(),
            offered: 0,
            path,
            stop,
            counters,
            events,
            thread: Some(thread),
        };
        assert_eq!(front.ask(GET_FEATURES, &[]).len(), 8);
        front.send(SET_PROTOCOL_FEATURES, &longs(&[PROTOCOL]), &[]);
        assert!(front.done(SET_BACKEND_REQ_FD, &[], &[given.as_fd()]));
        front
    }

    fn send(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        send_with(&self.main, &frame(request, 0, payload), fds);
    }

    fn reply(&mut self, request: u32) -> Vec<u8> {
        let mut header = [0; 12];
        self.main.read_exact(&mut header).unwrap();
        let header = Header::decode(&header).unwrap();
        assert_eq!((header.request, header.reply), (request, true));
        let mut payload = vec![0; header.bytes as usize];
        self.main.read_exact(&mut payload).unwrap();
        payload
    }

    fn ask(&mut self, request: u32, payload: &[u8]) -> Vec<u8> {
        self.send(request, payload, &[]);
        self.reply(request)
    }

    /// Whether it was done.
    fn done(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        send_with(&self.main, &frame(request, 8, payload), fds);
        self.reply(request) == [0; 8]
    }

    fn share(&mut self, file: &std::fs::File) -> bool {
        let mut table = halves(&[1, 0]);
        table.extend(longs(&[0, RAM_BYTES, USER, 0]));
        self.done(SET_MEM_TABLE, &table, &[file.as_fd()])
    }

    fn grant(&mut self, (iova, memory): (u64, u64), permissions: Permissions) {
        self.grants.insert(iova / PAGE, (memory, permissions));
    }

    /// As a driver that has everything mapped, and a front-end that starts the device.
    fn start(&mut self, base: u32) {
        for page in [DESCRIPTORS, AVAILABLE, HEADER] {
            self.grant(page, Permissions::READ);
        }
        for page in [USED, STATUS, DATA] {
            self.grant(page, Permissions::READ_WRITE);
        }
        assert!(self.done(SET_FEATURES, &longs(&[FEATURES]), &[]));
        let ram = self.ram.try_clone().unwrap();
        assert!(self.share(&ram));
        self.set_ring(base);
        assert!(self.done(SET_VRING_ENABLE, &halves(&[0, 1]), &[]));
    }

    fn set_ring(&mut self, base: u32) {
        assert!(self.done(SET_VRING_NUM, &halves(&[0, 8]), &[]));
        let mut address = halves(&[0, 0]);
        address.extend(longs(&[DESCRIPTORS.0, USED.0, AVAILABLE.0, 0]));
        assert!(self.done(SET_VRING_ADDR, &address, &[]));
        assert!(self.done(SET_VRING_BASE, &halves(&[0, base]), &[]));
        let (call, kick) = (
            self.call.try_clone().unwrap(),
            self.kick.try_clone().unwrap(),
        );
        assert!(self.done(SET_VRING_CALL, &longs(&[0]), &[call.as_fd()]));
        assert!(self.done(SET_VRING_KICK, &longs(&[0]), &[kick.as_fd()]));
    }

    fn poke(&self, (_, memory): (u64, u64), offset: u64, bytes: &[u8]) {
        self.ram.write_all_at(bytes, memory + offset).unwrap();
    }

    fn peek(&self, (_, memory): (u64, u64), offset: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        self.ram.read_exact_at(&mut read, memory + offset).unwrap();
        read
    }

    /// The driver asks for `bytes` bytes at `sector`, and kicks.
    fn offer(&mut self, sector: u64, bytes: u32) {
        self.poke(HEADER, 0, &request(0, sector));
        self.poke(STATUS, 0, &[0xee]);
        for (at, (place, bytes, flags, next)) in [
            (HEADER, 16, 1_u16, 1_u16),
            (DATA, bytes, 3, 2),
            (STATUS, 1, 2, 0),
        ]
        .into_iter()
        .enumerate()
        {
            let mut descriptor = longs(&[place.0]);
            descriptor.extend(halves(&[bytes]));
            descriptor.extend([flags, next].into_iter().flat_map(u16::to_le_bytes));
            self.poke(DESCRIPTORS, at as u64 * 16, &descriptor);
        }
        self.offered += 1;
        self.poke(
            AVAILABLE,
            4 + u64::from((self.offered - 1) % 8) * 2,
            &[0, 0],
        );
        self.poke(AVAILABLE, 2, &self.offered.to_le_bytes());
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Waits for what comes first: a miss (true), or the device's call.
    fn wait(&self) -> bool {
        let mut fds = [
            PollFd::new(&self.channel, PollFlags::IN),
            PollFd::new(&self.call, PollFlags::IN),
        ];
        let patience = Timespec {
            tv_sec: 20,
            tv_nsec: 0,
        };
        assert_ne!(poll(&mut fds, Some(&patience)).unwrap(), 0, "nothing came");
        !fds[0].revents().is_empty()
    }

    fn next_miss(&mut self) -> (Iova, Permissions) {
        let mut bytes = [0; 44];
        self.channel.read_exact(&mut bytes).unwrap();
        let message = Iotlb::decode(bytes[12..].try_into().unwrap()).unwrap();
        let Iotlb::Miss { iova, wanted } = message else {
            panic!("{message:?}");
        };
        self.asked.push((iova.get() / PAGE, wanted));
        (iova, wanted)
    }

    /// Answers as QEMU does: looks up what is wanted, and says that both may be.
    fn answer(&mut self, (iova, wanted): (Iova, Permissions)) {
        let page = iova.get() / PAGE;
        let grant = self.grants.get(&page).copied();
        let granted = grant.filter(|(_, may)| may.union(wanted) == *may);
        if let Some((memory, _)) = granted {
            let update = Iotlb::Update {
                range: IovaRange::new(Iova::new(page * PAGE), PAGE).unwrap(),
                user: USER + memory,
                permissions: Permissions::READ_WRITE,
            };
            assert!(self.done(IOTLB, &update.encode(), &[]));
        }
        let status = longs(&[u64::from(granted.is_none())]);
        self.channel.write_all(&frame(1, 4, &status)).unwrap();
    }

    /// Answers until the driver is called.
    fn serve(&mut self) {
        while self.wait() {
            let miss = self.next_miss();
            self.answer(miss);
        }
        let _ = rustix::io::read(&self.call, &mut [0; 8]);
    }

    fn used(&self) -> u16 {
        u16::from_le_bytes(self.peek(USED, 2, 2).try_into().unwrap())
    }

    fn invalidate(&mut self, (iova, _): (u64, u64)) {
        self.grants.remove(&(iova / PAGE));
        let range = IovaRange::new(Iova::new(iova), PAGE);
        let message = Iotlb::Invalidate(range).encode();
        assert!(self.done(IOTLB, &message, &[]));
    }

    fn log(&self) -> Vec<String> {
        self.events.try_iter().collect()
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.stop.stop();
        let _ = std::fs::remove_file(&self.path);
        // A back-end that waits for ever fails a test, and does not hold it up.
        if !thread::panicking() {
            self.thread.take().unwrap().join().unwrap();
        }
    }
}

/// Bytes of the disk, which `disk_file` makes.
fn content(sector: u64, bytes: u64) -> Vec<u8> {
    (sector * 512..sector * 512 + bytes)
        .map(|i| (i / 7) as u8)
        .collect()
}

#[test]
fn every_address_is_asked_for_once_and_again_after_an_invalidation() {
    let mut front = Front::new("asked", &[]);
    front.start(0);
    front.offer(3, 4096);
    front.serve();
    assert_eq!(front.used(), 1);
    assert_eq!(front.peek(STATUS, 0, 1), [0]);
    assert_eq!(front.peek(DATA, 0, 4096), content(3, 4096));
    let mut pages: Vec<u64> = front.asked.iter().map(|(page, _)| *page).collect();
    // The ring that it writes it reads first: where it was left.
    assert_eq!(
        pages.iter().filter(|page| **page == USED.0 / PAGE).count(),
        2
    );
    pages.sort_unstable();
    pages.dedup();
    assert_eq!(pages.len(), 6, "{pages:x?}");

    // All is known now.
    front.asked.clear();
    front.offer(5, 4096);
    front.serve();
    assert_eq!((front.used(), front.asked.len()), (2, 0));
    assert_eq!(front.peek(DATA, 0, 4096), content(5, 4096));

    // What was taken back is asked for again, and only that; it is elsewhere now.
    let elsewhere = (DATA.0, 0x2_0000);
    front.invalidate(DATA);
    front.poke(DATA, 0, &[0xaa; 4096]);
    front.grant(elsewhere, Permissions::READ_WRITE);
    front.offer(7, 4096);
    front.serve();
    // More than once if the replies to older misses were not read before: then an answer may be late, and is not believed.
    front.asked.dedup();
    assert_eq!(front.asked, [(DATA.0 / PAGE, Permissions::WRITE)]);
    assert_eq!(front.peek(elsewhere, 0, 4096), content(7, 4096));
    assert_eq!(
        front.peek(DATA, 0, 4096),
        [0xaa; 4096],
        "nothing is left of it"
    );

    // And if it is nowhere, the request fails, and the next one does not.
    front.invalidate(DATA);
    front.offer(7, 4096);
    front.serve();
    assert_eq!(front.peek(STATUS, 0, 1), [1]);
    front.grant(DATA, Permissions::READ_WRITE);
    front.offer(9, 4096);
    front.serve();
    assert_eq!(front.peek(STATUS, 0, 1), [0]);
    assert_eq!(front.peek(DATA, 0, 4096), content(9, 4096));
    assert_eq!(front.counters.faults.get(), 1);
    assert!(front.log().iter().all(|line| line == "Connected"));
}

#[test]
fn what_the_device_does_on_its_own_is_refused_and_it_goes_on() {
    let stray = Errant::Stray(Iova::new(0xdead_0000));
    let mut front = Front::new("errant", &[stray, Errant::WriteReadOnly]);
    front.start(0);
    for n in 1..=3 {
        front.offer(n, 4096);
        front.serve();
        assert_eq!(front.peek(STATUS, 0, 1), [0]);
        assert_eq!(front.peek(DATA, 0, 4096), content(n, 4096));
    }
    let log = front.log();
    assert!(
        log.contains(&"errant write (stray) at 0xdead0000: stopped".to_owned()),
        "{log:?}"
    );
    // The header was read before, and the front-end has said then that it may be written, too.
    assert!(
        log.contains(&"errant write (write-read-only) at 0x20000: stopped".to_owned()),
        "{log:?}"
    );
    assert_eq!(front.counters.strays_through.get(), 0);
    assert_eq!(front.counters.faults.get(), 2);
}

/// The front-end stops the ring while the device waits for it: neither waits for the other, and the request is served when it goes on.
#[test]
fn a_ring_stops_while_it_waits_for_a_translation() {
    for after in 0..7 {
        let mut front = Front::new(&format!("stop{after}"), &[]);
        front.start(0);
        front.offer(3, 4096);
        for _ in 0..after {
            assert!(front.wait());
            let miss = front.next_miss();
            front.answer(miss);
        }
        assert!(front.wait(), "{after}");
        let unanswered = front.next_miss();
        let base = front.ask(GET_VRING_BASE, &halves(&[0, 0]));
        assert_eq!(base, halves(&[0, 0]), "the request is left, {after}");
        assert_eq!(front.used(), 0);
        // The answer comes late, and is not believed: nobody tells a device that was stopped what no longer holds.
        front.answer(unanswered);
        front.asked.clear();
        front.set_ring(0);
        front.serve();
        assert_eq!(
            (front.used(), front.peek(STATUS, 0, 1)),
            (1, vec![0]),
            "{after}"
        );
        assert_eq!(front.peek(DATA, 0, 4096), content(3, 4096));
        let asked: Vec<u64> = front.asked.iter().map(|(page, _)| *page).collect();
        assert!(asked.contains(&(DESCRIPTORS.0 / PAGE)), "{asked:x?}");
        let base = front.ask(GET_VRING_BASE, &halves(&[0, 0]));
        assert_eq!(base, halves(&[0, 1]));
    }
}

#[test]
fn what_it_takes_to_start() {
    let mut front = Front::new("start", &[]);
    let ram = front.ram.try_clone().unwrap();
    assert!(front.share(&ram));
    // Nothing of the IOMMU.
    assert!(front.done(SET_FEATURES, &longs(&[1 << 32]), &[]));
    front.set_ring(0);
    assert!(!front.done(SET_VRING_ENABLE, &halves(&[0, 1]), &[]));
    assert!(front.done(SET_FEATURES, &longs(&[FEATURES]), &[]));
    assert!(front.done(SET_VRING_ENABLE, &halves(&[0, 1]), &[]));
    // While it runs.
    assert!(!front.done(SET_VRING_NUM, &halves(&[0, 4]), &[]));
    assert!(!front.done(SET_FEATURES, &longs(&[1 << 32]), &[]));
    assert!(front.done(SET_FEATURES, &longs(&[FEATURES]), &[]));
    let base = front.ask(GET_VRING_BASE, &halves(&[0, 0]));
    assert_eq!(base, halves(&[0, 0]));
    assert!(front.done(SET_VRING_NUM, &halves(&[0, 4]), &[]));
    let log = front.log();
    let refused = [
        "refused: not behind an IOMMU: features 0x100000000, of the protocol 0x228",
        "refused: not while the ring is running",
        "refused: not while the ring is running",
    ];
    assert_eq!(
        log.get(1..),
        Some(&refused.map(str::to_owned)[..]),
        "{log:?}"
    );
}

/// A session without sockets, and what it makes of a message.
struct Alone(Session<Blk>);

impl Alone {
    fn new() -> Self {
        let counters = Arc::new(DeviceCounters::default());
        let disk = Blk::new(disk_file(), false, Arc::clone(&counters)).unwrap();
        let report: Report = Arc::new(|_: &Event<'_>| ());
        let session = Session::new(disk, &SETTINGS, counters, report);
        Self(session.unwrap())
    }

    fn tell(&mut self, request: u32, payload: &[u8], fds: Vec<OwnedFd>) -> Option<Refusal> {
        let outcome = self.0.handle(message(request, payload, fds)?);
        // Whoever waits for more than whether it was done gets it, or the end.
        assert!(!outcome.close || outcome.reply.is_none());
        outcome.refusal
    }
}

fn message(request: u32, payload: &[u8], fds: Vec<OwnedFd>) -> Option<Message<Header>> {
    let mut inbox = Assembly::<Header>::default();
    inbox.take(&frame(request, 0, payload), fds, false).ok()?
}

#[test]
fn what_is_refused() {
    let mut alone = Alone::new();
    let file = |file: std::fs::File| vec![OwnedFd::from(file)];
    let table = |count: u32, regions: &[u64]| [halves(&[count, 0]), longs(regions)].concat();
    let length = |request, bytes| Refusal::Request(RequestError::Length { request, bytes });
    let ram = || sealed(RAM_BYTES);
    let unsealed = || {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let fd = rustix::fs::memfd_create("open", flags).unwrap();
        rustix::fs::ftruncate(&fd, RAM_BYTES).unwrap();
        vec![fd]
    };
    for (request, payload, fds, why) in [
        (0, vec![], vec![], "request 0 was not offered"),
        (37, vec![], vec![], "request 37 was not offered"),
        (
            SET_FEATURES,
            longs(&[1 << 63]),
            vec![],
            "features 0x8000000000000000 are not offered",
        ),
        (
            SET_PROTOCOL_FEATURES,
            longs(&[1]),
            vec![],
            "features 0x1 are not offered",
        ),
        (SET_VRING_NUM, halves(&[1, 8]), vec![], "there is no ring 1"),
        (
            SET_VRING_NUM,
            halves(&[0, 7]),
            vec![],
            "no ring has 7 descriptors",
        ),
        (
            SET_VRING_NUM,
            halves(&[0, 0]),
            vec![],
            "no ring has 0 descriptors",
        ),
        (
            SET_VRING_NUM,
            halves(&[0, 512]),
            vec![],
            "no ring has 512 descriptors",
        ),
        (
            SET_VRING_BASE,
            halves(&[0, 0x1_0000]),
            vec![],
            "no ring has an entry 65536",
        ),
        (
            SET_VRING_KICK,
            longs(&[0x100]),
            vec![],
            "ring 0 without a kick",
        ),
        (
            SET_VRING_KICK,
            longs(&[0]),
            vec![],
            "request 12 with 0 descriptors",
        ),
        (
            SET_VRING_KICK,
            longs(&[0]),
            file(ram()),
            "the descriptor is no eventfd",
        ),
        (
            SET_VRING_CALL,
            longs(&[0]),
            file(ram()),
            "the descriptor is no eventfd",
        ),
        (
            SET_VRING_CALL,
            longs(&[0]),
            vec![event(), event()],
            "request 13 with 2 descriptors",
        ),
        (
            SET_VRING_NUM,
            halves(&[0, 8]),
            vec![event()],
            "request 8 with 1 descriptors",
        ),
        (
            SET_MEM_TABLE,
            table(0, &[]),
            vec![],
            "a memory table of 0 regions",
        ),
        (
            SET_MEM_TABLE,
            table(9, &[0; 36]),
            vec![],
            "a memory table of 9 regions",
        ),
        (
            SET_MEM_TABLE,
            table(1, &[0, 4096, USER, 0]),
            vec![],
            "request 5 with 0 descriptors",
        ),
        (
            SET_MEM_TABLE,
            table(1, &[0, 0, USER, 0]),
            file(ram()),
            "the region at 0x7f0000000000 is none",
        ),
        (
            SET_MEM_TABLE,
            table(1, &[0, 4096, u64::MAX, 0]),
            file(ram()),
            "the region at 0xffffffffffffffff wraps",
        ),
        (
            SET_MEM_TABLE,
            table(1, &[0, RAM_BYTES, USER, 4096]),
            file(ram()),
            "guest memory of 0x100000 bytes at 0x0 cannot be mapped from its file",
        ),
        (
            SET_MEM_TABLE,
            table(1, &[0, RAM_BYTES, USER, 0]),
            unsealed(),
            "guest memory of 0x100000 bytes at 0x0 lies in a file that could be cut off",
        ),
        (IOTLB, vec![0; 32], vec![], "no IOTLB message has type 0"),
        (
            GET_CONFIG,
            halves(&[0, 256, 0]),
            vec![],
            "request 24 with a payload of 12 bytes",
        ),
        (
            GET_CONFIG,
            halves(&[0, u32::MAX, 0]),
            vec![],
            "request 24 with a payload of 12 bytes",
        ),
    ] {
        let refusal = alone.tell(request, &payload, fds);
        assert_eq!(
            refusal.map(|refusal| refusal.to_string()).as_deref(),
            Some(why)
        );
    }
    for request in [
        SET_FEATURES,
        SET_VRING_ADDR,
        SET_VRING_ENABLE,
        GET_VRING_BASE,
        IOTLB,
    ] {
        assert_eq!(
            alone.tell(request, &[0; 7], vec![]),
            Some(length(request, 7))
        );
    }
    // An update of memory that was not shared.
    let update = Iotlb::Update {
        range: IovaRange::new(Iova::new(PAGE), PAGE).unwrap(),
        user: USER,
        permissions: Permissions::READ,
    };
    let refusal = alone.tell(IOTLB, &update.encode(), vec![]);
    assert!(matches!(refusal, Some(Refusal::Iotlb(_))), "{refusal:?}");
    // A reply where nobody has asked, and one that nobody asked for.
    let reply = message_with(GET_FEATURES, 4);
    assert_eq!(
        Request::parse(reply).unwrap_err(),
        RequestError::NotARequest {
            request: GET_FEATURES
        }
    );
    assert!(matches!(alone.0.replied(true), Err(Refusal::Iotlb(_))));
    // Two channels.
    let pair = || vec![OwnedFd::from(UnixStream::pair().unwrap().0)];
    assert_eq!(alone.tell(SET_BACKEND_REQ_FD, &[], pair()), None);
    assert_eq!(
        alone.tell(SET_BACKEND_REQ_FD, &[], pair()),
        Some(Refusal::Channel)
    );
    // The stream itself.
    let mut inbox = Assembly::<Header>::default();
    assert!(inbox.take(&halves(&[1, 1, 513]), [], false).is_err());
    let mut inbox = Assembly::<Header>::default();
    assert!(inbox.take(&halves(&[1, 2, 0]), [], false).is_err());
}

fn message_with(request: u32, flags: u32) -> Message<Header> {
    let mut inbox = Assembly::<Header>::default();
    inbox
        .take(&frame(request, flags, &[]), [], false)
        .unwrap()
        .unwrap()
}

/// A descriptor of a kind.
fn descriptor(kind: u8) -> OwnedFd {
    match kind {
        0 => event(),
        1 => sealed(RAM_BYTES).into(),
        _ => UnixStream::pair().unwrap().0.into(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever comes, in whatever order: an answer or a reason, and at the end the device is given back.
    #[test]
    fn no_message_harms(messages in prop::collection::vec(
        (0..44_u32, prop_oneof![Just(0_usize), Just(8), Just(12), Just(32), Just(40), 0..300_usize],
         prop::collection::vec(prop_oneof![Just(0_u8), Just(1), any::<u8>()], 300),
         prop::collection::vec(0..3_u8, 0..3)), 1..60)) {
        let mut alone = Alone::new();
        for (request, bytes, payload, fds) in messages {
            let fds = fds.into_iter().map(descriptor).collect();
            alone.tell(request, payload.get(..bytes).unwrap_or_default(), fds);
        }
        prop_assert!(alone.0.end().is_some());
    }
}
