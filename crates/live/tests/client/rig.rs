//! A scripted client: hand-made messages, guest memory in a sealed memfd, and the driver's side of
//! a queue.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma::{Direct, Dma};
use ringfence_live::virtio::blk::Blk;
use ringfence_live::virtio::{Device, DmaAddresses, VirtioPci};
use ringfence_live::{CONFIG_REGION, Outcome, Session};
use ringfence_vfio_user::{HEADER_BYTES, Inbox, Message, ReceivedFds};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

pub(crate) const VERSION: u16 = 1;
pub(crate) const DMA_MAP: u16 = 2;
pub(crate) const DMA_UNMAP: u16 = 3;
pub(crate) const GET_INFO: u16 = 4;
pub(crate) const GET_REGION_INFO: u16 = 5;
pub(crate) const GET_IRQ_INFO: u16 = 7;
pub(crate) const SET_IRQS: u16 = 8;
pub(crate) const REGION_READ: u16 = 9;
pub(crate) const REGION_WRITE: u16 = 10;
pub(crate) const RESET: u16 = 13;

pub(crate) const RAM_BYTES: u64 = 1 << 20;
pub(crate) const DISK_SECTORS: u64 = 256;

pub(crate) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

pub(crate) fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// Encodes a message.
pub(crate) fn encode(id: u16, command: u16, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = [id.to_le_bytes(), command.to_le_bytes()].concat();
    bytes.extend(((HEADER_BYTES + body.len()) as u32).to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(body);
    bytes
}

pub(crate) fn message(command: u16, body: &[u8], fds: Vec<OwnedFd>) -> Message {
    let bytes = encode(7, command, 0, body);
    let mut inbox = Inbox::default();
    let taken = inbox.feed(&bytes, fds, ReceivedFds::All);
    taken.expect("framing").expect("whole")
}

/// Creates memory that cannot shrink.
pub(crate) fn sealed(bytes: u64) -> File {
    let fd = memfd_create("guest", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    File::from(fd)
}

pub(crate) struct Reply {
    pub(crate) errno: u32,
    pub(crate) body: Vec<u8>,
}

/// Decodes a reply, and checks the fields that all replies have in common.
pub(crate) fn reply(outcome: Outcome) -> Reply {
    let bytes = outcome.reply.expect("a reply");
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!(word(4) as usize, bytes.len(), "the size is the reply's");
    assert_eq!(word(0) & 0xffff, 7, "the identifier comes back");
    assert_eq!(word(8) & 0xf, 1, "it is a reply");
    let failed = word(8) & 0x20 != 0;
    assert_eq!(failed, word(12) != 0, "an error has a number");
    assert_eq!(failed, outcome.refusal.is_some(), "a refusal is an error");
    Reply {
        errno: word(12),
        body: bytes[HEADER_BYTES..].to_vec(),
    }
}

pub(crate) struct Client<D: Device, A: Dma> {
    pub(crate) session: Session<VirtioPci<D, A>>,
    pub(crate) ram: File,
    pub(crate) counters: Arc<DeviceCounters>,
}

pub(crate) fn disk_file() -> File {
    let file = sealed(DISK_SECTORS * 512);
    let bytes: Vec<u8> = (0..DISK_SECTORS * 512).map(|i| (i / 7) as u8).collect();
    file.write_all_at(&bytes, 0).unwrap();
    file
}

/// Like [`disk_file`], in an unlinked file of the host that no seal keeps from growing.
#[allow(dead_code)]
pub(crate) fn image_on_disk() -> File {
    let file = tempfile::tempfile().unwrap();
    let bytes = vec![0x55; (DISK_SECTORS * 512) as usize];
    file.write_all_at(&bytes, 0).unwrap();
    file
}

/// Returns a disk with access to all of memory, before version negotiation.
pub(crate) fn fresh() -> Client<Blk, Direct> {
    let counters = Arc::new(DeviceCounters::default());
    let disk = Blk::new(disk_file(), false, Arc::clone(&counters)).unwrap();
    Client::new(disk, Direct::default(), false, counters)
}

/// Returns a disk after version negotiation, with memory shared.
pub(crate) fn ready() -> Client<Blk, Direct> {
    let mut client = fresh();
    client.agree();
    client.share_memory();
    client
}

impl<D: Device, A: Dma> Client<D, A> {
    pub(crate) fn new(device: D, dma: A, translated: bool, counters: Arc<DeviceCounters>) -> Self {
        let addresses = match translated {
            true => DmaAddresses::Translated,
            false => DmaAddresses::GuestPhysical,
        };
        let function = VirtioPci::new(device, dma, addresses, Arc::clone(&counters));
        Self {
            session: Session::new(function),
            ram: sealed(RAM_BYTES),
            counters,
        }
    }

    pub(crate) fn send(&mut self, command: u16, body: &[u8]) -> Reply {
        self.send_with(command, body, Vec::new())
    }

    pub(crate) fn send_with(&mut self, command: u16, body: &[u8], fds: Vec<OwnedFd>) -> Reply {
        reply(self.session.handle(message(command, body, fds)))
    }

    pub(crate) fn agree(&mut self) {
        let reply = self.send(VERSION, b"\0\0\0\0{}\0");
        assert_eq!(reply.errno, 0);
        assert_eq!(reply.body.last(), Some(&0), "a string of C");
    }

    pub(crate) fn share_memory(&mut self) {
        assert_eq!(self.map(0, RAM_BYTES, 0, 3).errno, 0);
    }

    pub(crate) fn map(&mut self, start: u64, bytes: u64, offset: u64, flags: u32) -> Reply {
        let fd = self.ram.as_fd().try_clone_to_owned().unwrap();
        let body = [words(&[32, flags]), longs(&[offset, start, bytes])].concat();
        self.send_with(DMA_MAP, &body, vec![fd])
    }

    pub(crate) fn unmap(&mut self, start: u64, bytes: u64, flags: u32) -> Reply {
        let body = [words(&[24, flags]), longs(&[start, bytes])].concat();
        self.send(DMA_UNMAP, &body)
    }

    pub(crate) fn read(&mut self, region: u32, offset: u64, count: u32) -> Reply {
        let body = [longs(&[offset]), words(&[region, count])].concat();
        self.send(REGION_READ, &body)
    }

    pub(crate) fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Reply {
        let fixed = [longs(&[offset]), words(&[region, data.len() as u32])].concat();
        self.send(REGION_WRITE, &[fixed, data.to_vec()].concat())
    }

    /// Reads a register of the BAR.
    pub(crate) fn register(&mut self, offset: u64, bytes: u32) -> u64 {
        let reply = self.read(0, offset, bytes);
        assert_eq!(reply.errno, 0);
        let mut value = [0; 8];
        value[..bytes as usize].copy_from_slice(&reply.body[16..]);
        u64::from_le_bytes(value)
    }

    pub(crate) fn set(&mut self, offset: u64, data: &[u8]) {
        assert_eq!(self.write(0, offset, data).errno, 0);
    }

    pub(crate) fn config(&mut self, offset: u64, bytes: u32) -> Vec<u8> {
        self.read(CONFIG_REGION, offset, bytes).body[16..].to_vec()
    }

    /// Sets or clears Bus Master Enable.
    pub(crate) fn master(&mut self, on: bool) {
        let command = [u8::from(on) << 2, 0];
        assert_eq!(self.write(CONFIG_REGION, 4, &command).errno, 0);
    }

    /// Initialises the device up to `FEATURES_OK`, with these features and `VERSION_1`. Enables bus
    /// mastering.
    pub(crate) fn negotiate(&mut self, features: u64) {
        self.master(true);
        self.agree_on(features);
    }

    /// Like [`negotiate`](Self::negotiate), without enabling bus mastering.
    pub(crate) fn agree_on(&mut self, features: u64) {
        let features = features | 1 << 32;
        for status in [0, 1, 3] {
            self.set(0x14, &[status]);
        }
        for half in 0..2u32 {
            self.set(0x08, &half.to_le_bytes());
            self.set(0x0c, &((features >> (32 * half)) as u32).to_le_bytes());
        }
        self.set(0x14, &[11]);
        assert_eq!(self.register(0x14, 1), 11, "the features are accepted");
    }

    /// Enables queue `index` of `size` descriptors, with its parts at `at`, `at + 0x1000` and `at +
    /// 0x2000`.
    pub(crate) fn enable(&mut self, index: u16, size: u16, at: u64) {
        self.set(0x16, &index.to_le_bytes());
        self.set(0x18, &size.to_le_bytes());
        for (register, address) in [(0x20, at), (0x28, at + 0x1000), (0x30, at + 0x2000)] {
            self.set(register, &(address as u32).to_le_bytes());
            self.set(register + 4, &((address >> 32) as u32).to_le_bytes());
        }
        self.set(0x1c, &1u16.to_le_bytes());
    }

    /// Negotiates features, enables queue 0 with 16 descriptors at 0x1000, and starts the device.
    pub(crate) fn begin(&mut self, features: u64) {
        self.negotiate(features);
        self.enable(0, 16, QUEUE);
        self.set(0x14, &[15]);
    }

    pub(crate) fn ring(&mut self, queue: u64) {
        self.set(0x3000 + 4 * queue, &(queue as u16).to_le_bytes());
    }

    pub(crate) fn poke(&self, at: u64, bytes: &[u8]) {
        self.ram.write_all_at(bytes, at).unwrap();
    }

    pub(crate) fn peek(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut buffer = vec![0; bytes];
        self.ram.read_exact_at(&mut buffer, at).unwrap();
        buffer
    }

    /// Writes a descriptor of queue 0.
    pub(crate) fn descriptor(&self, index: u16, at: u64, bytes: u32, flags: u16, next: u16) {
        self.poke(
            QUEUE + 16 * u64::from(index),
            &descriptor(at, bytes, flags, next),
        );
    }

    /// Makes the chain at `head` available as the `count`th of queue 0, and rings the doorbell.
    pub(crate) fn offer(&mut self, head: u16, count: u16) {
        let slot = u64::from((count - 1) % 16);
        self.poke(QUEUE + 0x1000 + 4 + 2 * slot, &head.to_le_bytes());
        self.poke(QUEUE + 0x1002, &count.to_le_bytes());
        self.ring(0);
    }

    /// Returns the number of buffers that queue 0 has returned, and the length of the last one.
    pub(crate) fn used(&self) -> (u16, u32) {
        let bytes = self.peek(QUEUE + 0x2002, 2);
        let count = u16::from_le_bytes([bytes[0], bytes[1]]);
        let slot = u64::from(count.wrapping_sub(1) % 16);
        let length = self.peek(QUEUE + 0x2000 + 4 + 8 * slot + 4, 4);
        (count, u32::from_le_bytes(length.try_into().unwrap()))
    }
}

/// Address of queue 0.
pub(crate) const QUEUE: u64 = 0x1000;
pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

pub(crate) fn descriptor(at: u64, bytes: u32, flags: u16, next: u16) -> Vec<u8> {
    let mut raw = at.to_le_bytes().to_vec();
    raw.extend(bytes.to_le_bytes());
    raw.extend(flags.to_le_bytes());
    raw.extend(next.to_le_bytes());
    raw
}

/// Encodes the header of a disk request.
pub(crate) fn request(kind: u32, sector: u64) -> Vec<u8> {
    [words(&[kind, 0]), longs(&[sector])].concat()
}
