//! Descriptors that a front-end sends. They are created once; a run modifies them, and the next run
//! empties them first.

use std::cell::RefCell;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};

/// Size of the guest's memory in bytes.
pub(super) const RAM_BYTES: u64 = 1 << 16;
const DISK_BYTES: u64 = 1 << 15;

/// The kinds, by number.
pub(super) const RAM: u8 = 0;
pub(super) const KICK: u8 = 1;
pub(super) const CALL: u8 = 2;
pub(super) const CHANNEL: u8 = 3;

pub(super) struct Files {
    pub(super) ram: File,
    pub(super) disk: File,
    pub(super) kick: OwnedFd,
    call: OwnedFd,
    /// The front-end's end of the back-end's channel.
    pub(super) channel: UnixStream,
    /// Memory, two eventfds, the channel, memory that could shrink, a directory, a datagram socket,
    /// and a stream without a peer.
    kinds: [OwnedFd; 8],
}

thread_local! {
    static FILES: RefCell<Files> = RefCell::new(Files::new());
}

pub(super) fn with_files(run: impl FnOnce(&Files)) {
    FILES.with_borrow(|files| {
        files.empty();
        run(files);
    });
}

fn memory(bytes: u64, seals: SealFlags) -> File {
    let fd = memfd_create("fuzz", MemfdFlags::ALLOW_SEALING).expect("memory");
    ftruncate(&fd, bytes).expect("its size");
    fcntl_add_seals(&fd, seals).expect("its seals");
    File::from(fd)
}

fn copy(fd: impl AsFd) -> OwnedFd {
    fd.as_fd().try_clone_to_owned().expect("a copy")
}

impl Files {
    fn new() -> Self {
        let ram = memory(RAM_BYTES, SealFlags::SHRINK | SealFlags::GROW);
        let event = || eventfd(0, EventfdFlags::NONBLOCK).expect("an event");
        let (kick, call) = (event(), event());
        let (channel, given) = UnixStream::pair().expect("sockets");
        channel.set_nonblocking(true).expect("to be looked at");
        let unconnected = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            None,
        );
        Self {
            kinds: [
                copy(&ram),
                copy(&kick),
                copy(&call),
                given.into(),
                memory(RAM_BYTES, SealFlags::GROW).into(),
                File::open("/").expect("a directory").into(),
                UnixDatagram::unbound().expect("a socket").into(),
                unconnected.expect("a socket"),
            ],
            ram,
            disk: memory(DISK_BYTES, SealFlags::SHRINK | SealFlags::GROW),
            kick,
            call,
            channel,
        }
    }

    fn empty(&self) {
        for (file, bytes) in [(&self.ram, RAM_BYTES), (&self.disk, DISK_BYTES)] {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(file, flags, 0, bytes).expect("empty");
        }
        for event in [&self.kick, &self.call] {
            let _ = rustix::io::read(event, &mut [0; 8]);
        }
        while matches!((&self.channel).read(&mut [0; 4096]), Ok(1..)) {}
    }

    /// Returns the descriptors that a byte about descriptors describes.
    pub(super) fn take(&self, about: u8) -> Vec<OwnedFd> {
        let kind = &self.kinds[usize::from(about >> 4 & 7)];
        (0..about & 15).map(|_| copy(kind)).collect()
    }
}

/// Returns the byte that describes one descriptor of a kind.
pub(super) const fn one(kind: u8) -> u8 {
    kind << 4 | 1
}
