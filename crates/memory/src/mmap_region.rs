//! An anonymous mapping seen as 64-bit atomic words.

use core::ptr::{NonNull, null_mut};
use core::sync::atomic::AtomicU64;

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Zeroed words at a fixed place, backed by memory only where they have been written. Private to
/// this process.
#[derive(Debug)]
pub(crate) struct MmapRegion {
    base: NonNull<AtomicU64>,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value alone and is reached through shared references to
// atomics only.
unsafe impl Send for MmapRegion {}
// SAFETY: as above; atomics may be shared.
unsafe impl Sync for MmapRegion {}

impl MmapRegion {
    /// `bytes` bytes, a multiple of the page size and not zero.
    pub(crate) fn new(bytes: usize) -> rustix::io::Result<Self> {
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice; nothing that
        // exists is replaced.
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
        // Devices touch single bytes all over the arena: a huge page for each would fill the host's
        // memory. Advice only.
        // SAFETY: the range is the mapping made above; this advice changes no contents.
        let _ =
            unsafe { rustix::mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxNoHugepage) };
        Ok(mapping)
    }

    /// The word at byte `offset`; `None` if it is no multiple of 8 or lies outside. Every step of
    /// every walk comes by here: compared in bytes, because an index of words costs a shift more.
    #[inline]
    pub(crate) fn word(&self, offset: u64) -> Option<&AtomicU64> {
        if !offset.is_multiple_of(8) || offset >= self.bytes as u64 {
            return None;
        }
        // SAFETY: `offset` is that of a whole word of `words()`: a multiple of 8 below a size that
        // is one, too. The reference lives as long as `self`, and the word is never accessed but as
        // an atomic.
        Some(unsafe { &*self.base.as_ptr().byte_add(offset as usize) })
    }

    /// All words.
    #[inline]
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: `base` points to `words` words of mapped, initialised (zeroed) memory, aligned to
        // a page, that live as long as `self` and are never accessed but through these atomics.
        unsafe { core::slice::from_raw_parts(self.base.as_ptr(), self.bytes / 8) }
    }
}

impl Drop for MmapRegion {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `new`, and no reference into it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
