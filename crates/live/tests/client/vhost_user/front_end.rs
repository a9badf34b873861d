//! A scripted front-end of the disk, and the guest behind it.

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

use ringfence_live::access::SocketAccess;
use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma_fault_injection::InjectedDma;
use ringfence_live::server::{EventHandler, ServeEvent, StopSignal};
use ringfence_live::vhost_user::{Clients, Settings, serve};
use ringfence_live::virtio::DmaInjector;
use ringfence_live::virtio::blk::Blk;
use ringfence_softiommu::iotlb::{Header, IotlbLimits, Message as Iotlb};
use ringfence_types::{Iova, IovaRange, Permissions, RequesterId};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::rig::{disk_file, request, sealed};
use crate::sockets::send_with;

pub(super) const GET_FEATURES: u32 = 1;
pub(super) const SET_FEATURES: u32 = 2;
pub(super) const SET_MEM_TABLE: u32 = 5;
pub(super) const SET_VRING_NUM: u32 = 8;
pub(super) const SET_VRING_ADDR: u32 = 9;
pub(super) const SET_VRING_BASE: u32 = 10;
pub(super) const GET_VRING_BASE: u32 = 11;
pub(super) const SET_VRING_KICK: u32 = 12;
pub(super) const SET_VRING_CALL: u32 = 13;
pub(super) const SET_PROTOCOL_FEATURES: u32 = 16;
pub(super) const SET_VRING_ENABLE: u32 = 18;
pub(super) const SET_BACKEND_REQ_FD: u32 = 21;
pub(super) const IOTLB: u32 = 22;
pub(super) const GET_CONFIG: u32 = 24;

/// `VERSION_1` and `ACCESS_PLATFORM`.
pub(super) const FEATURES: u64 = 3 << 32;
/// `REPLY_ACK`, `BACKEND_REQ` and `CONFIG`.
pub(super) const PROTOCOL: u64 = 1 << 3 | 1 << 5 | 1 << 9;

pub(super) const RAM_BYTES: u64 = 1 << 20;
pub(super) const PAGE: u64 = 4096;
/// Address of the guest's memory in the front-end.
pub(super) const USER: u64 = 0x7f00_0000_0000;

/// Pages by IOVA and guest-physical address, in different orders.
pub(super) const DESCRIPTORS: (u64, u64) = (0x1_0000, 0x9000);
pub(super) const AVAILABLE: (u64, u64) = (0x1_1000, 0x3000);
pub(super) const USED: (u64, u64) = (0x1_2000, 0x7000);
pub(super) const HEADER: (u64, u64) = (0x2_0000, 0x5000);
pub(super) const DATA: (u64, u64) = (0x2_1000, 0xb000);
pub(super) const STATUS: (u64, u64) = (0x2_2000, 0xd000);

pub(super) const SETTINGS: Settings = Settings {
    device: RequesterId::new(0x20),
    iotlb: IotlbLimits {
        pages: 64,
        extra_pages: 4,
        tables: 64,
        misses: 8,
        width: ringfence_softiommu::Width::BITS_48,
        readers: 2,
    },
};

pub(super) fn frame(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = [request, 1 | flags, payload.len() as u32];
    let header = header.into_iter().flat_map(u32::to_ne_bytes);
    header.chain(payload.iter().copied()).collect()
}

pub(super) fn halves(halves: &[u32]) -> Vec<u8> {
    halves.iter().flat_map(|half| half.to_ne_bytes()).collect()
}

pub(super) fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}

pub(super) fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// A front-end and its guest.
pub(super) struct FrontEnd {
    pub(super) main: UnixStream,
    pub(super) channel: UnixStream,
    pub(super) ram: std::fs::File,
    pub(super) kick: OwnedFd,
    pub(super) call: OwnedFd,
    pub(super) grants: BTreeMap<u64, (u64, Permissions)>,
    /// Misses in order: page and requested permissions.
    pub(super) asked: Vec<(u64, Permissions)>,
    pub(super) offered: u16,
    pub(super) path: PathBuf,
    pub(super) stop: StopSignal,
    pub(super) counters: Arc<DeviceCounters>,
    pub(super) events: Receiver<String>,
    pub(super) thread: Option<JoinHandle<()>>,
}

impl FrontEnd {
    pub(super) fn new(name: &str, injected: &[InjectedDma]) -> Self {
        let made = tempfile::Builder::new().prefix(name).tempdir().unwrap();
        let path = made.keep().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let stop = StopSignal::new().unwrap();
        let counters = Arc::new(DeviceCounters::default());
        let (sender, events) = channel();
        let sender = Mutex::new(sender);
        let report: EventHandler = Arc::new(move |event: &ServeEvent<'_>| {
            let text = match event {
                ServeEvent::Refused(refusal) => format!("refused: {refusal}"),
                ServeEvent::Closed(error) => format!("closed: {error}"),
                ServeEvent::Broken(broken) => format!("broken: {broken}"),
                ServeEvent::InjectedDma(tried) => format!("{tried}"),
                other => format!("{other:?}"),
            };
            let _ = sender.lock().unwrap().send(text);
        });
        let mut disk = Blk::new(disk_file(), false, Arc::clone(&counters)).unwrap();
        let told = Arc::clone(&report);
        let tell = move |tried: &_| told(&ServeEvent::InjectedDma(tried));
        disk.inject_dma(DmaInjector::new(
            injected,
            None,
            tell,
            Arc::clone(&counters),
        ));
        let (theirs, counted) = (stop.clone(), Arc::clone(&counters));
        let thread = thread::spawn(move || {
            let clients = Clients {
                listener: &listener,
                access: SocketAccess::OwnUser,
            };
            serve(&clients, disk, &SETTINGS, &counted, &theirs, &report).unwrap();
        });
        let main = UnixStream::connect(&path).unwrap();
        let (channel, given) = UnixStream::pair().unwrap();
        for socket in [&main, &channel] {
            socket
                .set_read_timeout(Some(Duration::from_secs(20)))
                .unwrap();
        }
        let mut front_end = Self {
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
        assert_eq!(front_end.ask(GET_FEATURES, &[]).len(), 8);
        front_end.send(SET_PROTOCOL_FEATURES, &longs(&[PROTOCOL]), &[]);
        assert!(front_end.done(SET_BACKEND_REQ_FD, &[], &[given.as_fd()]));
        front_end
    }

    pub(super) fn send(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        send_with(&self.main, &frame(request, 0, payload), fds);
    }

    pub(super) fn reply(&mut self, request: u32) -> Vec<u8> {
        let mut header = [0; 12];
        self.main.read_exact(&mut header).unwrap();
        let header = Header::decode(&header).unwrap();
        assert_eq!((header.request, header.reply), (request, true));
        let mut payload = vec![0; header.bytes as usize];
        self.main.read_exact(&mut payload).unwrap();
        payload
    }

    pub(super) fn ask(&mut self, request: u32, payload: &[u8]) -> Vec<u8> {
        self.send(request, payload, &[]);
        self.reply(request)
    }

    /// Makes a request with an acknowledgement; returns true if it succeeded.
    pub(super) fn done(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        send_with(&self.main, &frame(request, 8, payload), fds);
        self.reply(request) == [0; 8]
    }

    pub(super) fn share(&mut self, file: &std::fs::File) -> bool {
        let mut table = halves(&[1, 0]);
        table.extend(longs(&[0, RAM_BYTES, USER, 0]));
        self.done(SET_MEM_TABLE, &table, &[file.as_fd()])
    }

    pub(super) fn grant(&mut self, (iova, memory): (u64, u64), permissions: Permissions) {
        self.grants.insert(iova / PAGE, (memory, permissions));
    }

    /// Maps all pages like a driver, and starts the device like a front-end.
    pub(super) fn start(&mut self, base: u32) {
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

    pub(super) fn set_ring(&mut self, base: u32) {
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

    pub(super) fn poke(&self, (_, memory): (u64, u64), offset: u64, bytes: &[u8]) {
        self.ram.write_all_at(bytes, memory + offset).unwrap();
    }

    pub(super) fn peek(&self, (_, memory): (u64, u64), offset: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        self.ram.read_exact_at(&mut read, memory + offset).unwrap();
        read
    }

    /// Makes a read of `bytes` bytes at `sector` available, and kicks.
    pub(super) fn offer(&mut self, sector: u64, bytes: u32) {
        self.poke(HEADER, 0, &request(0, sector));
        self.poke(STATUS, 0, &[0xee]);
        for (at, (address, bytes, flags, next)) in [
            (HEADER, 16, 1_u16, 1_u16),
            (DATA, bytes, 3, 2),
            (STATUS, 1, 2, 0),
        ]
        .into_iter()
        .enumerate()
        {
            let mut descriptor = longs(&[address.0]);
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

    /// Waits for the first event. Returns true for a miss, and false for the device's call.
    pub(super) fn wait(&self) -> bool {
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

    pub(super) fn next_miss(&mut self) -> (Iova, Permissions) {
        let mut bytes = [0; 44];
        self.channel.read_exact(&mut bytes).unwrap();
        let message = Iotlb::decode(bytes[12..].try_into().unwrap()).unwrap();
        let Iotlb::Miss { iova, required } = message else {
            panic!("{message:?}");
        };
        self.asked.push((iova.get() / PAGE, required));
        (iova, required)
    }

    /// Answers like QEMU: looks up the requested access, and grants all permissions of the page.
    pub(super) fn answer(&mut self, (iova, required): (Iova, Permissions)) {
        let page = iova.get() / PAGE;
        let grant = self.grants.get(&page).copied();
        let granted = grant.filter(|(_, may)| may.union(required) == *may);
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

    /// Answers misses until the device signals the driver.
    pub(super) fn serve(&mut self) {
        while self.wait() {
            let miss = self.next_miss();
            self.answer(miss);
        }
        let _ = rustix::io::read(&self.call, &mut [0; 8]);
    }

    pub(super) fn used(&self) -> u16 {
        u16::from_le_bytes(self.peek(USED, 2, 2).try_into().unwrap())
    }

    pub(super) fn invalidate(&mut self, (iova, _): (u64, u64)) {
        self.grants.remove(&(iova / PAGE));
        let range = IovaRange::new(Iova::new(iova), PAGE);
        let message = Iotlb::Invalidate(range).encode();
        assert!(self.done(IOTLB, &message, &[]));
    }

    pub(super) fn log(&self) -> Vec<String> {
        self.events.try_iter().collect()
    }
}

impl Drop for FrontEnd {
    fn drop(&mut self) {
        self.stop.stop();
        let _ = std::fs::remove_dir_all(self.path.parent().unwrap());
        // A back-end that waits forever fails the test without blocking it.
        if !thread::panicking() {
            self.thread.take().unwrap().join().unwrap();
        }
    }
}

/// Returns the contents of the disk that `disk_file` creates.
pub(super) fn content(sector: u64, bytes: u64) -> Vec<u8> {
    (sector * 512..sector * 512 + bytes)
        .map(|i| (i / 7) as u8)
        .collect()
}
