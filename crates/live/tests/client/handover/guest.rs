//! A scripted guest over real sockets: the drivers of an IOMMU and a disk.

use std::fs::{self, File};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringfence_live::CONFIG_REGION;
use ringfence_live::daemon::{Daemon, DeviceOptions, Disk, Iommu, Log, VfioUserDevices};
use ringfence_live::handover::HandOverTimeouts;
use ringfence_live::server::ServeEvent;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::rig::*;

/// Endpoint ID of the disk.
pub(super) const ENDPOINT: u32 = 0x20;
const DOMAIN: u32 = 1;
/// Difference between an IOVA and its guest-physical address.
pub(super) const AWAY: u64 = 1 << 44;
const IOMMU_QUEUE: u64 = 0x4_0000;
const EVENT_QUEUE: u64 = 0x5_0000;
const FAULT: u64 = 0x7_0000;
pub(super) const DATA: u64 = 0x1_0000;
/// Most polls of a process that must answer. Each poll is a message and its reply, and far fewer
/// suffice.
const MOST_LOOKS: u32 = 1 << 20;

/// A temporary directory, removed on drop.
pub(super) struct Dir(pub(super) PathBuf);

impl Dir {
    pub(super) fn new(name: &str) -> Self {
        let made = tempfile::Builder::new().prefix(name).tempdir().unwrap();
        let path = made.keep();
        fs::write(path.join("disk.img"), image()).unwrap();
        Self(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn image() -> Vec<u8> {
    (0..DISK_SECTORS * 512).map(|at| (at / 512) as u8).collect()
}

pub(super) fn log() -> Log {
    Arc::new(|device, event| {
        if let ServeEvent::Refused(why) = event {
            panic!("{device}: {why}");
        }
    })
}

pub(super) fn daemon(dir: &Dir, limits: HandOverTimeouts) -> Daemon {
    daemon_of(dir, limits, false)
}

/// Returns the para-virtual IOMMU, or the virtio-iommu.
pub(super) fn iommu(paravirtual: bool) -> Iommu {
    if paravirtual {
        Iommu::PVIOMMU
    } else {
        Iommu::default()
    }
}

pub(super) fn daemon_of(dir: &Dir, limits: HandOverTimeouts, paravirtual: bool) -> Daemon {
    let devices = VfioUserDevices {
        iommu: iommu(paravirtual),
        disk: Some(Disk::new(dir.0.join("disk.img"))),
        entropy: true,
        ..VfioUserDevices::default()
    };
    serving(dir, &devices.into(), limits)
}

pub(super) fn serving(dir: &Dir, devices: &DeviceOptions, limits: HandOverTimeouts) -> Daemon {
    let mut daemon = Daemon::start(&dir.0, devices, &log()).unwrap();
    daemon.offer_hand_over(limits, &log()).unwrap();
    daemon
}

/// Returns the value of a device's counter.
pub(super) fn counted(daemon: &Daemon, device: &str, name: &str) -> u64 {
    let metrics = daemon.metrics();
    let head = format!("ringfence_{name}_total{{device=\"{device}\"}} ");
    let value = metrics.lines().find_map(|line| line.strip_prefix(&head));
    value.unwrap_or_else(|| panic!("{head}")).parse().unwrap()
}

/// Stops the daemon and waits for its end.
pub(super) fn end(daemon: Daemon) {
    daemon.stopper().stop();
    daemon.join().unwrap();
}

fn pages(start: u64, bytes: u64) -> Vec<u8> {
    let pages = (start..start + bytes).step_by(4096);
    longs(&pages.collect::<Vec<u64>>())
}

/// A client of one device.
pub(super) struct Remote {
    pub(super) stream: UnixStream,
    ram: File,
}

impl Remote {
    pub(super) fn connect(path: &Path, ram: &File) -> Self {
        let mut remote = Self {
            stream: UnixStream::connect(path).unwrap(),
            ram: ram.try_clone().unwrap(),
        };
        assert_eq!(remote.ask(VERSION, b"\0\0\0\0{}\0", &[]).0, 0);
        let map = [words(&[32, 3]), longs(&[0, 0, RAM_BYTES])].concat();
        let ram = remote.ram.try_clone().unwrap();
        assert_eq!(remote.ask(DMA_MAP, &map, &[ram.as_fd()]).0, 0);
        remote
    }

    pub(super) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let part = IoSlice::new(bytes);
        let sent = sendmsg(&self.stream, &[part], &mut control, SendFlags::empty());
        assert_eq!(sent.unwrap(), bytes.len());
    }

    /// Returns the error number and the body of the next reply.
    pub(super) fn receive(&mut self) -> (u32, Vec<u8>) {
        let mut header = [0; 16];
        self.stream.read_exact(&mut header).unwrap();
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        let mut body = vec![0; word(4) as usize - 16];
        self.stream.read_exact(&mut body).unwrap();
        (word(12), body)
    }

    pub(super) fn ask(
        &mut self,
        command: u16,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> (u32, Vec<u8>) {
        self.send(&encode(7, command, 0, body), fds);
        self.receive()
    }

    pub(super) fn set(&mut self, offset: u64, data: &[u8]) {
        let fixed = [longs(&[offset]), words(&[0, data.len() as u32])].concat();
        let body = [fixed, data.to_vec()].concat();
        assert_eq!(self.ask(REGION_WRITE, &body, &[]).0, 0);
    }

    pub(super) fn register(&mut self, offset: u64, bytes: u32) -> Vec<u8> {
        let body = [longs(&[offset]), words(&[0, bytes])].concat();
        self.ask(REGION_READ, &body, &[]).1[16..].to_vec()
    }

    /// Sets or clears Bus Master Enable.
    pub(super) fn master(&mut self, on: bool) {
        let command = [u8::from(on) << 2, 0];
        let body = [longs(&[4]), words(&[CONFIG_REGION, 2]), command.to_vec()];
        assert_eq!(self.ask(REGION_WRITE, &body.concat(), &[]).0, 0);
    }

    pub(super) fn negotiate(&mut self, features: u64) {
        self.master(true);
        let features = features | 1 << 32;
        for status in [0, 1, 3] {
            self.set(0x14, &[status]);
        }
        for half in 0..2u32 {
            self.set(0x08, &half.to_le_bytes());
            self.set(0x0c, &((features >> (32 * half)) as u32).to_le_bytes());
        }
        self.set(0x14, &[11]);
    }

    pub(super) fn enable(&mut self, index: u16, at: u64) {
        self.set(0x16, &index.to_le_bytes());
        self.set(0x18, &16u16.to_le_bytes());
        self.set(0x1a, &index.to_le_bytes());
        for (register, address) in [(0x20, at), (0x28, at + 0x1000), (0x30, at + 0x2000)] {
            self.set(register, &(address as u32).to_le_bytes());
            self.set(register + 4, &((address >> 32) as u32).to_le_bytes());
        }
        self.set(0x1c, &1u16.to_le_bytes());
    }

    pub(super) fn ring(&mut self, queue: u64) {
        self.set(0x3000 + 4 * queue, &(queue as u16).to_le_bytes());
    }
}

/// A guest with the clients of its IOMMU and its disk.
pub(super) struct Guest {
    pub(super) ram: File,
    pub(super) iommu: Remote,
    pub(super) disk: Remote,
    pub(super) interrupt: OwnedFd,
    /// True for the para-virtual IOMMU.
    para: bool,
    /// Difference between the disk's addresses and guest-physical addresses.
    away: u64,
    /// True for a sandboxed disk, which completes a request after its doorbell returns.
    pub(super) sandboxed: bool,
    asked: u16,
    pub(super) requests: u16,
}

impl Guest {
    /// Starts both drivers and maps all of memory for the disk, at `AWAY`.
    pub(super) fn boot(dir: &Dir) -> Self {
        Self::boot_with(dir, false)
    }

    /// Like [`boot`](Self::boot), with a choice of the IOMMU.
    pub(super) fn boot_with(dir: &Dir, para: bool) -> Self {
        Self::boot_on(dir, para, sealed(RAM_BYTES))
    }

    /// Like [`boot_with`](Self::boot_with), with this memory file.
    pub(super) fn boot_on(dir: &Dir, para: bool, ram: File) -> Self {
        let front = if para { "pviommu.sock" } else { "iommu.sock" };
        let iommu = Remote::connect(&dir.0.join(front), &ram);
        let disk = Remote::connect(&dir.0.join("blk.sock"), &ram);
        let interrupt = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let mut guest = Self {
            ram,
            iommu,
            disk,
            interrupt,
            para,
            away: AWAY,
            sandboxed: false,
            asked: 0,
            requests: 0,
        };
        guest.iommu.negotiate(if para { 1 } else { 0b10111 });
        guest.iommu.enable(0, IOMMU_QUEUE);
        guest.iommu.enable(1, EVENT_QUEUE);
        guest.iommu.set(0x14, &[15]);
        if !para {
            let attach = [words(&[1, DOMAIN, ENDPOINT, 0, 0])].concat();
            assert_eq!(guest.ask_iommu(&attach, 4), 0);
        }
        assert_eq!(guest.map(AWAY, RAM_BYTES, 0), 0);
        guest.begin(1 << 33);
        guest
    }

    /// Starts a guest without an IOMMU: the disk's addresses are guest-physical.
    pub(super) fn boot_untranslated(dir: &Dir) -> Self {
        let ram = sealed(RAM_BYTES);
        let disk = Remote::connect(&dir.0.join("blk.sock"), &ram);
        let (iommu, _nobody) = UnixStream::pair().unwrap();
        let iommu = Remote {
            stream: iommu,
            ram: ram.try_clone().unwrap(),
        };
        let mut guest = Self {
            ram,
            iommu,
            disk,
            interrupt: eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
            para: false,
            away: 0,
            sandboxed: false,
            asked: 0,
            requests: 0,
        };
        guest.begin(0);
        guest
    }

    /// Starts the disk's driver, with these further features.
    pub(super) fn begin(&mut self, features: u64) {
        self.disk.negotiate(features);
        self.disk.enable(0, QUEUE + self.away);
        let vector = [words(&[24, 0x24, 2, 0, 1])].concat();
        let events = self.interrupt.as_fd();
        self.disk.send(&encode(7, SET_IRQS, 0, &vector), &[events]);
        assert_eq!(self.disk.receive().0, 0);
        self.disk.set(0x14, &[15]);
    }

    pub(super) fn poke(&self, at: u64, bytes: &[u8]) {
        self.ram.write_all_at(bytes, at).unwrap();
    }

    pub(super) fn peek(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut buffer = vec![0; bytes];
        self.ram.read_exact_at(&mut buffer, at).unwrap();
        buffer
    }

    /// Makes a request to the IOMMU, with `answer` bytes for its reply; returns its status.
    fn ask_iommu(&mut self, request: &[u8], answer: u32) -> u8 {
        let (at, reply) = (0x6_0000u64, 0x6_2000u64);
        self.poke(at, request);
        self.poke(reply, &[0xee; 4]);
        let read = descriptor(at, request.len() as u32, NEXT, 1);
        self.poke(IOMMU_QUEUE, &read);
        self.poke(IOMMU_QUEUE + 16, &descriptor(reply, answer, WRITE, 0));
        let slot = u64::from(self.asked % 16);
        self.asked += 1;
        self.poke(IOMMU_QUEUE + 0x1004 + 2 * slot, &[0, 0]);
        self.poke(IOMMU_QUEUE + 0x1002, &self.asked.to_le_bytes());
        self.iommu.ring(0);
        // The register read completes after the doorbell's work.
        self.iommu.register(0x14, 1);
        self.peek(reply, 1)[0]
    }

    pub(super) fn map(&mut self, start: u64, bytes: u64, to: u64) -> u8 {
        if self.para {
            let header = [
                longs(&[ENDPOINT.into()]),
                words(&[0, (bytes / 4096) as u32, 0, 0]),
            ];
            let lists = [pages(start, bytes), pages(to, bytes)];
            return self.ask_iommu(&[header.concat(), lists.concat()].concat(), 1);
        }
        let range = longs(&[start, start + bytes - 1, to]);
        self.ask_iommu(&[words(&[3, DOMAIN]), range, words(&[3])].concat(), 4)
    }

    pub(super) fn unmap(&mut self, start: u64, bytes: u64) -> u8 {
        if self.para {
            let header = [
                longs(&[ENDPOINT.into()]),
                words(&[1, (bytes / 4096) as u32]),
            ];
            return self.ask_iommu(&[header.concat(), pages(start, bytes)].concat(), 1);
        }
        let range = longs(&[start, start + bytes - 1]);
        self.ask_iommu(&[words(&[4, DOMAIN]), range, vec![0; 4]].concat(), 4)
    }

    /// Makes a read of `sector` available, without a doorbell.
    pub(super) fn offer(&mut self, sector: u64) {
        self.poke(0x8000, &request(0, sector));
        self.poke(0x9000, &[0xee]);
        self.poke(DATA, &[0xee; 512]);
        let descriptors = [
            descriptor(0x8000 + self.away, 16, NEXT, 1),
            descriptor(DATA + self.away, 512, NEXT | WRITE, 2),
            descriptor(0x9000 + self.away, 1, WRITE, 0),
        ];
        self.poke(QUEUE, &descriptors.concat());
        let slot = u64::from(self.requests % 16);
        self.requests += 1;
        self.poke(QUEUE + 0x1004 + 2 * slot, &[0, 0]);
        self.poke(QUEUE + 0x1002, &self.requests.to_le_bytes());
    }

    /// Checks that the last read was done once, with one interrupt.
    pub(super) fn has_read(&mut self, sector: u64) {
        self.disk.register(0x14, 1);
        self.wait_for_the_process();
        assert_eq!(self.peek(QUEUE + 0x2002, 2), self.requests.to_le_bytes());
        assert_eq!(self.peek(0x9000, 1), [0]);
        assert_eq!(self.peek(DATA, 512), [sector as u8; 512]);
        let mut events = [0; 8];
        rustix::io::read(&self.interrupt, &mut events).unwrap();
        assert_eq!(u64::from_ne_bytes(events), 1, "interrupts");
    }

    /// Waits until all requests are complete.
    pub(super) fn has_all(&mut self) {
        for _ in 0..100_000 {
            if self.peek(QUEUE + 0x2002, 2) == self.requests.to_le_bytes() {
                return;
            }
            self.disk.register(0x14, 1);
        }
        panic!("not done: {:?}", self.peek(QUEUE + 0x2002, 2));
    }

    pub(super) fn forget_interrupts(&self) {
        let _ = rustix::io::read(&self.interrupt, &mut [0; 8]);
    }

    /// Restarts the disk's driver.
    pub(super) fn begin_again(&mut self) {
        self.disk.set(0x14, &[0]);
        self.requests = 0;
        self.poke(QUEUE, &[0; 0x3000]);
        self.forget_interrupts();
        self.begin(1 << 33);
    }

    /// Waits until a sandboxed disk has completed the last request.
    fn wait_for_the_process(&mut self) {
        let mut looks = 0;
        while self.sandboxed && self.peek(QUEUE + 0x2002, 2) != self.requests.to_le_bytes() {
            assert_eq!(self.disk.register(0x14, 1)[0] & 64, 0, "it needs a reset");
            looks += 1;
            assert!(looks < MOST_LOOKS, "the process never says that it is done");
        }
        if self.sandboxed {
            let mut events = [PollFd::new(&self.interrupt, PollFlags::IN)];
            assert_eq!(poll(&mut events, None), Ok(1));
        }
    }

    pub(super) fn read(&mut self, sector: u64) {
        self.offer(sector);
        self.disk.ring(0);
        self.has_read(sector);
    }

    /// Checks that the disk cannot access an unmapped page, and that the IOMMU's driver receives
    /// the address.
    pub(super) fn is_stopped_at(&mut self, at: u64) {
        assert_eq!(self.unmap(AWAY, RAM_BYTES), 0);
        assert_eq!(self.map(AWAY, DATA, 0), 0);
        let used = self.peek(EVENT_QUEUE + 0x2002, 1)[0];
        let given = u16::from(used) + 1;
        self.poke(EVENT_QUEUE, &descriptor(FAULT, 24, WRITE, 0));
        let slot = u64::from(used % 16);
        self.poke(EVENT_QUEUE + 0x1004 + 2 * slot, &[0, 0]);
        self.poke(EVENT_QUEUE + 0x1002, &given.to_le_bytes());
        self.iommu.ring(1);
        self.offer(1);
        self.disk.ring(0);
        self.disk.register(0x14, 1);
        self.wait_for_the_process();
        assert_eq!(self.peek(0x9000, 1), [1], "an error");
        while self.peek(EVENT_QUEUE + 0x2002, 2) != given.to_le_bytes() {
            // The IOMMU's thread may not have delivered the event yet.
            self.iommu.register(0x14, 1);
        }
        let report = self.peek(FAULT, 24);
        let offset = if self.para { 0 } else { 8 };
        assert_eq!(report[offset..offset + 4], ENDPOINT.to_le_bytes());
        assert_eq!(report[16..24], at.to_le_bytes());
        let _ = rustix::io::read(&self.interrupt, &mut [0; 8]);
        assert_eq!(self.unmap(AWAY, DATA), 0);
        assert_eq!(self.map(AWAY, RAM_BYTES, 0), 0);
    }

    pub(super) fn stopped_at() -> u64 {
        DATA + AWAY
    }

    /// Returns the address ranges at which a process has mapped this guest's memory.
    pub(super) fn mapped_in(&self, process: &str) -> Vec<String> {
        let inode = self.device_and_inode();
        let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
        let ours = maps.lines().filter(|line| line.contains(&inode));
        let range = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
        ours.map(range).collect()
    }

    /// Returns the KiB of guest memory that this process has locked, over all its mappings.
    pub(super) fn locked(&self) -> u64 {
        let inode = self.device_and_inode();
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut ours, mut bytes, mut locked) = (false, 0, 0);
        for line in maps.lines() {
            match line.split_once(':') {
                Some(("VmFlags", flags)) if ours && flags.split(' ').any(|flag| flag == "lo") => {
                    locked += bytes;
                }
                Some(("Size", size)) => {
                    let size = size.trim().trim_end_matches(" kB");
                    bytes = size.parse::<u64>().unwrap();
                }
                // The first line of a mapping has the file's device number.
                _ if line.contains(" 0") && line.contains('-') => ours = line.contains(&inode),
                _ => {}
            }
        }
        locked
    }

    /// Returns the memory file's device and inode as /proc shows them.
    fn device_and_inode(&self) -> String {
        use std::os::unix::fs::MetadataExt;
        let about = self.ram.metadata().unwrap();
        let (major, minor) = (
            rustix::fs::major(about.dev()),
            rustix::fs::minor(about.dev()),
        );
        format!(" {major:02x}:{minor:02x} {} ", about.ino())
    }
}
