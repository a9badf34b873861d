//! The RAM of a machine, mapped into this process too.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use anyhow::Context;
use ringfence_types::{MemoryError, PhysAddr, PhysMemory, PhysRange, TABLE_WORDS};
use rustix::fs::{FallocateFlags, MemfdFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::qtest::Qtest;

/// RAM that QEMU and this process share.
#[derive(Debug)]
pub struct GuestRam {
    memory: OwnedFd,
    base: NonNull<AtomicU64>,
    range: PhysRange,
    qtest: Option<Rc<Qtest>>,
}

impl GuestRam {
    /// Allocates the RAM that a machine has at `range`, a whole number of 4 KiB pages. All bytes
    /// are zero. Each look-up waits for the posted commands of `qtest`, if there is one.
    ///
    /// # Errors
    /// The host has no memory, or `range` is empty.
    pub(crate) fn new(range: PhysRange, qtest: Option<Rc<Qtest>>) -> anyhow::Result<Self> {
        let bytes = usize::try_from(range.bytes())?;
        let memory = rustix::fs::memfd_create("ringfence-judge", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&memory, range.bytes())?;
        // SAFETY: the kernel chooses the address of this new mapping, so it replaces no existing
        // one.
        let base = unsafe {
            rustix::mm::mmap(
                null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &memory,
                0,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or_else(|| anyhow::anyhow!("no mapping"))?;
        Ok(Self {
            memory,
            base,
            range,
            qtest,
        })
    }

    /// Returns the addresses of the RAM.
    pub const fn range(&self) -> PhysRange {
        self.range
    }

    /// Returns a path through which a child process opens this memory.
    pub(crate) fn path(&self) -> String {
        format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            self.memory.as_raw_fd()
        )
    }

    /// Returns the byte at `at`, without waiting for posted commands; `None` outside RAM.
    pub fn byte(&self, at: PhysAddr) -> Option<u8> {
        let word = self.settled(at.align_down(8), 1).ok()?.first()?;
        let word = word.load(Ordering::SeqCst);
        Some((word >> (at.offset_in(8) * 8)) as u8)
    }

    /// Sets all bytes of `range`, whole pages, to zero.
    pub(crate) fn clear(&self, range: PhysRange) -> anyhow::Result<()> {
        let offset = self.offset(range.start()).context("outside RAM")?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.memory, flags, offset, range.bytes())?;
        Ok(())
    }

    /// Returns the address of a word of `range` that is not zero. Skips pages that were never
    /// written.
    pub(crate) fn find_non_zero(&self, range: PhysRange) -> anyhow::Result<Option<PhysAddr>> {
        let first = self.offset(range.start()).context("outside RAM")?;
        let end = first + range.bytes();
        let mut at = first;
        while at < end {
            let data = match rustix::fs::seek(&self.memory, SeekFrom::Data(at)) {
                Ok(data) if data < end => data,
                Ok(_) | Err(Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
            at = rustix::fs::seek(&self.memory, SeekFrom::Hole(data))?;
            let start = range.start().wrapping_add(data - first);
            let words = self.words(start, ((at.min(end) - data) / 8) as usize)?;
            let mut words = words.iter();
            if let Some(index) = words.position(|word| word.load(Ordering::Relaxed) != 0) {
                return Ok(Some(start.wrapping_add(index as u64 * 8)));
            }
        }
        Ok(None)
    }

    /// Returns the offset of `at` from the first byte of RAM; `None` below it.
    fn offset(&self, at: PhysAddr) -> Option<u64> {
        at.offset_from(&self.range.start())
    }

    /// Stores `value` in each of the `bytes` bytes from `at`, without waiting for posted commands.
    ///
    /// # Errors
    /// A byte lies outside RAM.
    pub fn fill(&self, at: PhysAddr, bytes: u64, value: u8) -> Result<(), MemoryError> {
        for offset in 0..bytes {
            let at = at.wrapping_add(offset);
            let shift = at.offset_in(8) * 8;
            let merge = |word: u64| Some(word & !(0xff << shift) | u64::from(value) << shift);
            let outside = MemoryError::Outside { at, words: 1 };
            let word = self.settled(at.align_down(8), 1)?.first().ok_or(outside)?;
            let _ = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, merge);
        }
        Ok(())
    }
}

impl PhysMemory for GuestRam {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        let words = self.words(at, 1)?;
        words.first().ok_or(MemoryError::Outside { at, words: 1 })
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        if !at.is_aligned(4096) {
            return Err(MemoryError::Misaligned { at });
        }
        let words = self.words(at, TABLE_WORDS)?;
        words.try_into().map_err(|_| MemoryError::Outside {
            at,
            words: TABLE_WORDS as u64,
        })
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        if let Some(qtest) = &self.qtest {
            qtest.settle();
        }
        self.settled(at, count)
    }

    fn write_back(&self, _at: PhysAddr, _bytes: u64) {}

    fn drain(&self) {
        fence(Ordering::SeqCst);
    }
}

impl GuestRam {
    /// Returns words that no posted command changes.
    fn settled(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        if !at.is_aligned(8) {
            return Err(MemoryError::Misaligned { at });
        }
        let outside = MemoryError::Outside {
            at,
            words: count as u64,
        };
        let offset = self.offset(at).ok_or(outside)?;
        let bytes = (count as u64).checked_mul(8).ok_or(outside)?;
        if bytes > self.range.bytes() || offset > self.range.bytes() - bytes {
            return Err(outside);
        }
        // SAFETY: the words lie in the mapping, which `base` begins, by the comparison above. They
        // are aligned, initialised, live as long as `self`, and are only accessed as atomics here.
        // QEMU accesses them from its own process, as a device would.
        Ok(unsafe {
            std::slice::from_raw_parts(self.base.as_ptr().byte_add(offset as usize), count)
        })
    }
}

impl Drop for GuestRam {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `new`, and no reference into it outlives `self`.
        let _ =
            unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.range.bytes() as usize) };
    }
}
