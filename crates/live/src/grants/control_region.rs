//! Control region: shared memory that the daemon writes and the process reads. It holds the calls
//! for the mapping thread, the bus-master term and the I/O page table.
//!
//! The process maps it read-only and has no descriptor for it.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_pgtable::{Levels, SecondStage};
use ringfence_types::{
    FrameSource, MemoryError, OutOfFrames, PageSize, PhysAddr, PhysMemory, TABLE_WORDS,
};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use vm_memory::{FileOffset, MmapRegion};

use super::call::Call;

/// Most calls in one batch.
pub const BATCH: usize = 128;
const CALL_WORDS: usize = 7;
const PAGE: u64 = 4096;
/// Format of the I/O page table.
pub(crate) const FORMAT: SecondStage =
    SecondStage::new(Levels::Four).with_pages_up_to(PageSize::Size4K);
/// Offset of the root table. Tables follow the calls.
pub(crate) const ROOT: PhysAddr = PhysAddr::new(8192);
/// Most tables, 4 KiB each. One last-level table maps 2 MiB.
const TABLES: u64 = 4096;
const BYTES: u64 = ROOT.get() + TABLES * PAGE;

/// Index of the word before the tables. It holds the bus-master term: odd while the device is bus
/// master, and incremented at each change.
const TERM: usize = (ROOT.get() / 8) as usize - 1;

const _: () = assert!(BATCH * CALL_WORDS <= TERM);

/// The control region as one of the two processes maps it.
#[derive(Debug)]
pub struct ControlRegion {
    region: MmapRegion,
    file: Option<File>,
    /// Offset of the next free table.
    next: AtomicU64,
}

impl ControlRegion {
    /// Creates a zeroed region, mapped for writing.
    pub(crate) fn create() -> io::Result<Self> {
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("ringfence-control", flags)?);
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

    /// Maps the region read-only, for the process.
    pub(crate) fn open(file: File) -> io::Result<Self> {
        Ok(Self {
            region: map(file, libc::PROT_READ)?,
            file: None,
            next: AtomicU64::new(BYTES),
        })
    }

    /// Returns the backing file; `None` in the process.
    pub(crate) fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// Writes at most [`BATCH`] calls to the region; ignores the others.
    pub(crate) fn write_calls(&self, calls: &[Call]) {
        for (at, call) in calls.iter().enumerate().take(BATCH) {
            let number = [call.number.cast_unsigned()];
            let words = number.iter().chain(&call.arguments);
            let first = at * CALL_WORDS;
            for (to, word) in self.all().iter().skip(first).zip(words) {
                to.store(*word, Ordering::Release);
            }
        }
    }

    /// Reads call number `at` of the batch. `None` if `at` is outside the region.
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

    /// Sets whether the device is bus master. If it is not, it must abandon its current request
    /// without side effects.
    pub(crate) fn set_master(&self, master: bool) {
        if let Some(term) = self.all().get(TERM) {
            let number = term.load(Ordering::Relaxed);
            let change = u64::from((number % 2 == 1) != master);
            term.store(number.wrapping_add(change), Ordering::Release);
        }
    }

    /// Returns the number of the current bus-master term; `None` if the device is not bus master.
    pub(crate) fn term(&self) -> Option<u64> {
        let number = self.all().get(TERM)?.load(Ordering::Acquire);
        (number % 2 == 1).then_some(number)
    }

    /// Frees all tables. Their pages are punched out of the file and read as zero afterwards.
    pub(crate) fn clear_tables(&self) -> io::Result<()> {
        self.next.store(ROOT.get(), Ordering::Relaxed);
        let Some(file) = &self.file else {
            return Ok(());
        };
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let bytes = BYTES.saturating_sub(ROOT.get());
        Ok(rustix::fs::fallocate(file, flags, ROOT.get(), bytes)?)
    }

    fn all(&self) -> &[AtomicU64] {
        // SAFETY: the region is `BYTES` bytes of a sealed file, page-aligned and mapped for as long
        // as `self` lives. Both processes access it only through atomics. The process has a
        // read-only mapping and stores nothing.
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

    /// No write-back is needed: only CPUs walk these tables, and they are cache-coherent.
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

    /// Frees `frame` only if it was allocated last, which happens when a map fails half-way.
    /// `clear_tables` frees all other frames together.
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
