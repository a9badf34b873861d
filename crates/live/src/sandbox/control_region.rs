//! The memory that the daemon writes and the process reads: the calls that the mapping thread is to
//! make, whether the device may work, and the I/O page table.
//!
//! The process has it for reading only, and without its descriptor.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{FrameSource, MemoryError, OutOfFrames, PhysAddr, PhysMemory, TABLE_WORDS};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use vm_memory::{FileOffset, MmapRegion};

use super::call::Call;

/// Most calls at a time.
pub const BATCH: usize = 128;
const CALL_WORDS: usize = 7;
const PAGE: u64 = 4096;
/// Where the tables begin, the root first: behind the calls.
pub(super) const ROOT: PhysAddr = PhysAddr::new(8192);
/// Most tables, 4 KiB each; one of the last level maps 2 MiB.
const TABLES: u64 = 4096;
const BYTES: u64 = ROOT.get() + TABLES * PAGE;

/// The word before the tables: the device's terms as master of the bus, each of which has an odd
/// number.
const TERM: usize = (ROOT.get() / 8) as usize - 1;

const _: () = assert!(BATCH * CALL_WORDS <= TERM);

/// The memory, in one process or the other.
#[derive(Debug)]
pub struct ControlRegion {
    region: MmapRegion,
    file: Option<File>,
    /// Offset of the next table.
    next: AtomicU64,
}

impl ControlRegion {
    /// A new one, all zero.
    pub(super) fn create() -> io::Result<Self> {
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("ringfence-board", flags)?);
        file.set_len(BYTES)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let region = map(file.try_clone()?, rights)?;
        Ok(Self {
            region,
            file: Some(file),
            next: AtomicU64::new(ROOT.get()),
        })
    }

    /// The process's view.
    pub(super) fn open(file: File) -> io::Result<Self> {
        Ok(Self {
            region: map(file, libc::PROT_READ)?,
            file: None,
            next: AtomicU64::new(BYTES),
        })
    }

    /// The file, in the daemon.
    pub(super) fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// Writes down what is to be done; at most [`BATCH`] calls.
    pub(super) fn write_calls(&self, calls: &[Call]) {
        for (at, call) in calls.iter().enumerate().take(BATCH) {
            let number = [call.number.cast_unsigned()];
            let words = number.iter().chain(&call.arguments);
            let first = at * CALL_WORDS;
            for (to, word) in self.all().iter().skip(first).zip(words) {
                to.store(*word, Ordering::Release);
            }
        }
    }

    /// What the process finds written at `at`.
    pub fn call(&self, at: usize) -> Option<Call> {
        let first = at.checked_mul(CALL_WORDS)?;
        let words = self.all().get(first..first.checked_add(CALL_WORDS)?)?;
        let (number, rest) = words.split_first()?;
        let mut arguments = [0; 6];
        for (to, word) in arguments.iter_mut().zip(rest) {
            *to = word.load(Ordering::Acquire);
        }
        Some(Call {
            number: number.load(Ordering::Acquire).cast_signed(),
            arguments,
        })
    }

    /// The device may work, or is to leave what it has in hand as if it had not begun.
    pub(super) fn set_master(&self, master: bool) {
        if let Some(term) = self.all().get(TERM) {
            let number = term.load(Ordering::Relaxed);
            let change = u64::from((number % 2 == 1) != master);
            term.store(number.wrapping_add(change), Ordering::Release);
        }
    }

    /// The number of the device's term, if it has one.
    pub(super) fn term(&self) -> Option<u64> {
        let number = self.all().get(TERM)?.load(Ordering::Acquire);
        (number % 2 == 1).then_some(number)
    }

    /// Forgets all tables; their memory is zero and not there.
    pub(super) fn clear_tables(&self) -> io::Result<()> {
        self.next.store(ROOT.get(), Ordering::Relaxed);
        let Some(file) = &self.file else {
            return Ok(());
        };
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let bytes = BYTES.saturating_sub(ROOT.get());
        Ok(rustix::fs::fallocate(file, flags, ROOT.get(), bytes)?)
    }

    fn all(&self) -> &[AtomicU64] {
        // SAFETY: the region is `BYTES` bytes of a sealed file, mapped for as long as `self` lives
        // and aligned to a page. Both processes reach it by atomics only; where it is mapped for
        // reading, nothing is stored.
        unsafe {
            std::slice::from_raw_parts(self.region.as_ptr().cast::<AtomicU64>(), BYTES as usize / 8)
        }
    }
}

fn map(file: File, rights: i32) -> io::Result<MmapRegion> {
    let at = Some(FileOffset::new(file, 0));
    let bytes = usize::try_from(BYTES).map_err(io::Error::other)?;
    MmapRegion::build(at, bytes, rights, libc::MAP_SHARED).map_err(io::Error::other)
}

impl PhysMemory for ControlRegion {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        let words = self.words(at, 1)?;
        words.first().ok_or(MemoryError::Outside { at, words: 1 })
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        if !at.is_aligned(PAGE) {
            return Err(MemoryError::Misaligned { at });
        }
        let outside = MemoryError::Outside {
            at,
            words: TABLE_WORDS as u64,
        };
        let words = self.words(at, TABLE_WORDS)?;
        words.first_chunk().ok_or(outside)
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        if !at.is_aligned(8) {
            return Err(MemoryError::Misaligned { at });
        }
        let outside = MemoryError::Outside {
            at,
            words: count as u64,
        };
        let first = usize::try_from(at.get() / 8).map_err(|_| outside)?;
        let end = first.checked_add(count).ok_or(outside)?;
        self.all().get(first..end).ok_or(outside)
    }

    /// Walkers here are processors: they see what is stored.
    fn write_back(&self, _at: PhysAddr, _bytes: u64) {}

    fn drain(&self) {}
}

impl FrameSource for ControlRegion {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        let at = self.next.load(Ordering::Relaxed);
        let end = at.checked_add(PAGE).filter(|end| *end <= BYTES);
        self.next.store(end.ok_or(OutOfFrames)?, Ordering::Relaxed);
        Ok(PhysAddr::new(at))
    }

    /// Only what was given out last, when a map fails half-way; everything else comes back when all
    /// tables go.
    fn free(&self, frame: PhysAddr) {
        if let Ok(words) = self.table(frame) {
            words
                .iter()
                .for_each(|word| word.store(0, Ordering::Relaxed));
        }
        if frame.get().checked_add(PAGE) == Some(self.next.load(Ordering::Relaxed)) {
            self.next.store(frame.get(), Ordering::Relaxed);
        }
    }
}
