//! An anonymous mapping, accessed as 64-bit atomic words.

#![allow(unsafe_code)]

use core::ptr::{NonNull, null_mut};
use core::sync::atomic::AtomicU64;

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Zeroed words at a fixed address, backed by memory only where they were written. Private to this
/// process.
#[derive(Debug)]
pub(crate) struct MmapRegion {
    base: NonNull<AtomicU64>,
    bytes: usize,
}

// SAFETY: this value alone owns the mapping, and all access goes through shared references to
// atomics.
unsafe impl Send for MmapRegion {}
// SAFETY: as above; atomics may be shared.
unsafe impl Sync for MmapRegion {}

impl MmapRegion {
    /// Maps `bytes` bytes, which must be a multiple of the page size and not zero.
    pub(crate) fn new(bytes: usize) -> rustix::io::Result<Self> {
        // SAFETY: the kernel chooses the address of this new anonymous mapping, so it replaces no
        // existing one.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let Some(base) = NonNull::new(base.cast::<AtomicU64>()) else {
            return Err(rustix::io::Errno::NOMEM);
        };
        let mapping = Self { base, bytes };
        // Devices access single bytes all over the arena: a huge page for each would fill the
        // host's memory. Advice only.
        // SAFETY: the range is the mapping made above; this advice changes no contents.
        let _ =
            unsafe { rustix::mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxNoHugepage) };
        Ok(mapping)
    }

    /// Returns the word at byte `offset`; `None` if `offset` is not a multiple of 8 or lies
    /// outside. Every step of every walk calls this function. It compares bytes, because a word
    /// index costs one more shift.
    #[inline]
    pub(crate) fn word(&self, offset: u64) -> Option<&AtomicU64> {
        if !offset.is_multiple_of(8) || offset >= self.bytes as u64 {
            return None;
        }
        // SAFETY: `offset` is that of a whole word of `words()`: a multiple of 8 below a size that
        // is also a multiple of 8. The reference lives as long as `self`, and all accesses to the
        // word are atomic.
        Some(unsafe { &*self.base.as_ptr().byte_add(offset as usize) })
    }

    /// Returns all words.
    #[inline]
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: `base` points to `bytes / 8` words of mapped, initialised (zeroed) memory,
        // aligned to a page. They live as long as `self`, and all accesses go through these
        // atomics.
        unsafe { core::slice::from_raw_parts(self.base.as_ptr(), self.bytes / 8) }
    }
}

/// Copies the words of `source` to the equally many words of `target`. Reads each word once.
#[inline]
pub(crate) fn copy(source: &[AtomicU64], target: &[AtomicU64]) {
    let count = source.len().min(target.len());
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: both slices have `count` words of mapped memory that may be written, because
        // atomics are. The instruction accesses exactly those bytes, in ascending order, as the
        // direction flag is clear. It is no access of the Rust program, so other threads' atomic
        // accesses to the words are no data race; the processor performs it like other stores,
        // and may divide a word only at the bytes that a device may also write one by one.
        unsafe {
            core::arch::asm!(
                "rep movsb",
                inout("rcx") count * 8 => _,
                inout("rsi") source.as_ptr() => _,
                inout("rdi") target.as_ptr() => _,
                options(nostack, preserves_flags)
            );
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    for (source, target) in source.iter().zip(target).take(count) {
        let order = core::sync::atomic::Ordering::Relaxed;
        target.store(source.load(order), order);
    }
}

impl Drop for MmapRegion {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `new`, and no reference into it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
