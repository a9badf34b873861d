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

#[cfg(target_arch = "x86_64")]
impl MmapRegion {
    /// Copies `bytes` bytes from byte `from` to byte `to`. Reads each byte once. Returns false,
    /// without a change, if a byte lies outside.
    #[inline]
    pub(crate) fn copy(&self, from: u64, to: u64, bytes: u64) -> bool {
        let size = self.bytes as u64;
        if bytes > size || from > size - bytes || to > size - bytes {
            return false;
        }
        let base = self.base.as_ptr().cast::<u8>();
        // SAFETY: both ranges of `bytes` bytes lie in the mapping, which may be written: all
        // references to it are to atomics. The copy is no access of the Rust program, so other
        // threads' atomic accesses are no data race. The processor performs it like their loads and
        // stores, and may divide a word only at the bytes that a device may also write one by one.
        unsafe {
            let (from, to) = (base.add(from as usize), base.add(to as usize));
            copy_x86_64(from, to, bytes as usize);
        }
        true
    }
}

/// Most bytes that vectors copy. `rep movsb` takes about 30 cycles to start, and copies more bytes
/// as fast.
#[cfg(target_arch = "x86_64")]
const VECTORS_AT_MOST: usize = 4096;

/// Copies bytes, each with one load and one store.
///
/// # Safety
/// Both ranges are mapped, and the target may be written.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy_x86_64(from: *const u8, to: *mut u8, bytes: usize) {
    use core::arch::asm;
    if bytes > VECTORS_AT_MOST || !std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the instruction accesses exactly the ranges, in ascending order, as the direction
        // flag is clear.
        unsafe {
            asm!(
                "rep movsb",
                inout("rcx") bytes => _,
                inout("rsi") from => _,
                inout("rdi") to => _,
                options(nostack, preserves_flags)
            );
        }
        return;
    }
    // SAFETY: the host has AVX. The loop copies 128 bytes at a time, and each further step one bit
    // of the rest of the length, so that all steps together access exactly the ranges.
    unsafe {
        asm!(
            "mov rdx, rcx",
            "shr rdx, 7",
            "jz 3f",
            "2:",
            "vmovdqu ymm0, [rsi]",
            "vmovdqu ymm1, [rsi + 32]",
            "vmovdqu ymm2, [rsi + 64]",
            "vmovdqu ymm3, [rsi + 96]",
            "vmovdqu [rdi], ymm0",
            "vmovdqu [rdi + 32], ymm1",
            "vmovdqu [rdi + 64], ymm2",
            "vmovdqu [rdi + 96], ymm3",
            "sub rsi, -128",
            "sub rdi, -128",
            "dec rdx",
            "jnz 2b",
            "3: test cl, 64",
            "jz 4f",
            "vmovdqu ymm0, [rsi]",
            "vmovdqu ymm1, [rsi + 32]",
            "vmovdqu [rdi], ymm0",
            "vmovdqu [rdi + 32], ymm1",
            "add rsi, 64",
            "add rdi, 64",
            "4: test cl, 32",
            "jz 5f",
            "vmovdqu ymm0, [rsi]",
            "vmovdqu [rdi], ymm0",
            "add rsi, 32",
            "add rdi, 32",
            "5: vzeroupper",
            "test cl, 16",
            "jz 6f",
            "movdqu xmm0, [rsi]",
            "movdqu [rdi], xmm0",
            "add rsi, 16",
            "add rdi, 16",
            "6: test cl, 8",
            "jz 7f",
            "mov rdx, [rsi]",
            "mov [rdi], rdx",
            "add rsi, 8",
            "add rdi, 8",
            "7: test cl, 4",
            "jz 8f",
            "mov edx, [rsi]",
            "mov [rdi], edx",
            "add rsi, 4",
            "add rdi, 4",
            "8: test cl, 2",
            "jz 9f",
            "movzx edx, word ptr [rsi]",
            "mov [rdi], dx",
            "add rsi, 2",
            "add rdi, 2",
            "9: test cl, 1",
            "jz 20f",
            "mov dl, [rsi]",
            "mov [rdi], dl",
            "20:",
            inout("rcx") bytes => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            out("rdx") _,
            clobber_abi("sysv64"),
            options(nostack),
        );
    }
}

impl Drop for MmapRegion {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `new`, and no reference into it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use core::sync::atomic::Ordering;

    use super::*;

    fn bytes_of(region: &MmapRegion) -> Vec<u8> {
        let words = region.words().iter();
        words
            .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes())
            .collect()
    }

    /// Copies every number of bytes up to two steps of the loop, and some around the longest copy
    /// with vectors, and compares all bytes of the region.
    #[test]
    fn copies_change_exactly_their_bytes() {
        let region = MmapRegion::new(16 << 10).unwrap();
        for count in (0..260).chain(4000..4120).chain([8000]) {
            for (from, to) in [(0, 8192), (3, 8195), (8190 - count.min(8190), 8192)] {
                for (number, word) in region.words().iter().enumerate() {
                    let value = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    word.store(value, Ordering::Relaxed);
                }
                let mut wanted = bytes_of(&region);
                wanted.copy_within(from..from + count, to);
                assert!(region.copy(from as u64, to as u64, count as u64));
                assert!(wanted == bytes_of(&region), "{count} bytes from {from}");
            }
        }
        let size = 16 << 10;
        for (from, to, bytes) in [
            (size - 7, 0, 8),
            (0, size - 7, 8),
            (0, 8, size - 7),
            (u64::MAX, 0, 1),
            (1, 0, u64::MAX),
        ] {
            assert!(!region.copy(from, to, bytes), "{bytes} bytes from {from}");
        }
    }
}
