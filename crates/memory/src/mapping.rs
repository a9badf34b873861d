//! An anonymous mapping seen as 64-bit atomic words.

use core::ptr::{NonNull, null_mut};
use core::sync::atomic::AtomicU64;

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Zeroed words at a fixed place, backed by memory only where they have been written. Private to this process.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the mapping belongs to this value alone and is reached through shared references to atomics only.
unsafe impl Send for Mapping {}
// SAFETY: as above; atomics may be shared.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `bytes` bytes, a multiple of the page size and not zero.
    pub(crate) fn new(bytes: usize) -> rustix::io::Result<Self> {
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice; nothing that exists is replaced.
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
        let mapping = Self {
            base,
            words: bytes / 8,
        };
        // Devices touch single bytes all over the arena: a huge page for each would fill the host's memory. Advice only.
        // SAFETY: the range is the mapping made above; this advice changes no contents.
        let _ =
            unsafe { rustix::mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxNoHugepage) };
        Ok(mapping)
    }

    /// All words.
    #[inline]
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: `base` points to `words` words of mapped, initialised (zeroed) memory, aligned to a page, that live as long as
        // `self` and are never accessed but through these atomics.
        unsafe { core::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `new`, and no reference into it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.words * 8) };
    }
}
