//! The files behind the descriptors of a message, and the guest's memory.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};

const RAM_BYTES: u64 = 1 << 20;
/// One page more than one client may map. The file contains only what a run writes.
const LONG_BYTES: u64 = (16 << 40) + 4096;
/// Size of the disk's image.
pub(crate) const DISK_BYTES: u64 = 1 << 16;

/// The files of one thread's runs.
pub(crate) struct Files {
    ram: File,
    /// The disk's image.
    pub(crate) disk: File,
    long: File,
    kinds: [OwnedFd; 5],
}

impl Files {
    fn new() -> Self {
        let ram = memory(RAM_BYTES, SealFlags::SHRINK | SealFlags::GROW);
        let long = memory(LONG_BYTES, SealFlags::SHRINK | SealFlags::GROW);
        Self {
            kinds: [
                ram.as_fd().try_clone_to_owned().expect("a copy"),
                eventfd(0, EventfdFlags::NONBLOCK).expect("an event"),
                memory(RAM_BYTES, SealFlags::GROW).into(),
                File::open("/").expect("a directory").into(),
                long.as_fd().try_clone_to_owned().expect("a copy"),
            ],
            ram,
            long,
            disk: memory(DISK_BYTES, SealFlags::SHRINK | SealFlags::GROW),
        }
    }

    /// Returns the descriptors that the byte before a message describes.
    pub(crate) fn descriptors(&self, about: u8) -> Vec<OwnedFd> {
        let kind = &self.kinds[usize::from(about >> 2 & 7) % self.kinds.len()];
        (0..about & 3)
            .map(|_| kind.as_fd().try_clone_to_owned().expect("a copy"))
            .collect()
    }

    /// Writes to the guest's memory at `at` modulo its size, up to its end.
    pub(crate) fn poke(&self, at: u32, bytes: &[u8]) {
        let at = u64::from(at) % RAM_BYTES;
        let room = usize::try_from(RAM_BYTES - at)
            .expect("small")
            .min(bytes.len());
        self.ram.write_all_at(&bytes[..room], at).expect("inside");
    }
}

fn memory(bytes: u64, seals: SealFlags) -> File {
    let fd = memfd_create("fuzz", MemfdFlags::ALLOW_SEALING).expect("memory");
    ftruncate(&fd, bytes).expect("its size");
    fcntl_add_seals(&fd, seals).expect("its seals");
    File::from(fd)
}

thread_local! {
    // Created once. A run modifies their contents but not their size.
    static FILES: RefCell<Files> = RefCell::new(Files::new());
}

/// Runs `run` with the files. The memory and the disk are empty.
pub(crate) fn with_files<R>(run: impl FnOnce(&Files) -> R) -> R {
    FILES.with_borrow(|files| {
        for (file, bytes) in [
            (&files.ram, RAM_BYTES),
            (&files.disk, DISK_BYTES),
            (&files.long, LONG_BYTES),
        ] {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(file, flags, 0, bytes).expect("empty");
        }
        run(files)
    })
}
