//! The host processor's own cache-line write-back.
//!
//! What a walker that does not snoop needs is that the bytes are in memory. The VT-d specification
//! (section 3.10 "Memory Type Considerations", and the Coherency field of the extended capability
//! register) leaves it to software to flush structures out of the processor's caches and names
//! CLFLUSH as an example. CLWB and CLFLUSHOPT do that as well: the Intel SDM (volume 2, "CLWB")
//! says that the line, if modified, is written to memory from any level of the cache hierarchy of
//! the coherence domain. CLWB may keep the line; a kept line is unmodified, so it hides nothing
//! from a reader of memory. It would only matter if the *device* wrote the line behind the
//! processor's back, which a walker without accessed and dirty bits does not.
//!
//! All three are ordered after earlier stores to the same line. CLWB and CLFLUSHOPT are ordered
//! with later stores by SFENCE (same pages), and it is a later store (a doorbell, an invalidation
//! register) that makes the device look.

/// Which instruction writes a line back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WriteBack {
    /// Writes back, may keep the line.
    Clwb,
    /// Writes back and drops the line, weakly ordered.
    ClflushOpt,
    /// Writes back and drops the line, ordered with every other CLFLUSH and store: one at a time.
    Clflush,
    /// A full fence only: this host has no instruction for it that a program may execute. Correct
    /// wherever devices are modelled in software; of no use against real hardware.
    FenceOnly,
}

/// Bytes of a cache line.
pub(crate) const LINE: u64 = 64;

impl WriteBack {
    /// Everything that this host can execute, cheapest first.
    pub fn available() -> Vec<Self> {
        let mut found = host::available();
        found.push(Self::FenceOnly);
        found
    }

    /// The cheapest that this host can execute.
    pub fn best() -> Self {
        Self::available()
            .first()
            .copied()
            .unwrap_or(Self::FenceOnly)
    }

    /// Whether this host can execute it.
    pub fn is_available(self) -> bool {
        Self::available().contains(&self)
    }

    /// Writes the line that holds `byte` back.
    ///
    /// `self` must be [available](Self::is_available).
    #[inline]
    pub(crate) fn line(self, byte: *const u8) {
        host::line(self, byte);
    }

    /// Asks for the line that holds `byte`, to be changed.
    #[inline]
    pub(crate) fn prefetch(byte: *const u8) {
        host::prefetch(byte);
    }

    /// Orders write-backs so far before every later store.
    #[inline]
    pub(crate) fn drain(self) {
        host::drain(self);
    }
}

#[cfg(target_arch = "x86_64")]
mod host {
    use core::arch::asm;
    use core::arch::x86_64::{__cpuid, __cpuid_count};
    use core::sync::atomic::{Ordering, fence};

    use super::WriteBack;

    pub(super) fn available() -> Vec<WriteBack> {
        let mut found = Vec::new();
        // SDM volume 2, "CPUID": leaf 7 EBX bit 24 CLWB, bit 23 CLFLUSHOPT; leaf 1 EDX bit 19
        // CLFLUSH.
        let highest = __cpuid(0).eax;
        if highest >= 7 {
            let ebx = __cpuid_count(7, 0).ebx;
            if ebx & 1 << 24 != 0 {
                found.push(WriteBack::Clwb);
            }
            if ebx & 1 << 23 != 0 {
                found.push(WriteBack::ClflushOpt);
            }
        }
        if highest >= 1 && __cpuid(1).edx & 1 << 19 != 0 {
            found.push(WriteBack::Clflush);
        }
        found
    }

    #[inline]
    pub(super) fn line(kind: WriteBack, byte: *const u8) {
        match kind {
            // SAFETY: the instruction writes a cache line to memory and changes no value that a
            // program can see; on an address that is not mapped it faults, and the only caller
            // passes addresses inside its live mapping. It exists on this host: `Arena` refuses
            // kinds that `available` does not name. As a memory clobber the block is not moved
            // across the stores it is to write back.
            WriteBack::Clwb => unsafe {
                asm!("clwb byte ptr [{}]", in(reg) byte, options(nostack, preserves_flags));
            },
            // SAFETY: as above.
            WriteBack::ClflushOpt => unsafe {
                asm!("clflushopt byte ptr [{}]", in(reg) byte, options(nostack, preserves_flags));
            },
            // SAFETY: as above.
            WriteBack::Clflush => unsafe {
                asm!("clflush byte ptr [{}]", in(reg) byte, options(nostack, preserves_flags));
            },
            WriteBack::FenceOnly => {}
        }
    }

    #[inline]
    pub(super) fn prefetch(byte: *const u8) {
        // SAFETY: a hint, which changes no value and faults on no address; processors without it
        // take it for one without effect (SDM volume 2, "PREFETCHW").
        unsafe {
            asm!("prefetchw byte ptr [{}]", in(reg) byte, options(nostack, preserves_flags, readonly));
        }
    }

    #[inline]
    pub(super) fn drain(kind: WriteBack) {
        match kind {
            // SAFETY: a fence; SSE is part of x86-64. As a memory clobber the block also holds back
            // the compiler.
            WriteBack::Clwb | WriteBack::ClflushOpt => unsafe {
                asm!("sfence", options(nostack, preserves_flags));
            },
            // SAFETY: as above. MFENCE orders CLFLUSH on every processor that has it; SFENCE only
            // on newer ones.
            WriteBack::Clflush => unsafe {
                asm!("mfence", options(nostack, preserves_flags));
            },
            WriteBack::FenceOnly => fence(Ordering::SeqCst),
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod host {
    use core::sync::atomic::{Ordering, fence};

    use super::WriteBack;

    pub(super) fn available() -> Vec<WriteBack> {
        Vec::new()
    }

    #[inline]
    pub(super) fn line(_kind: WriteBack, _byte: *const u8) {}

    #[inline]
    pub(super) fn prefetch(_byte: *const u8) {}

    #[inline]
    pub(super) fn drain(_kind: WriteBack) {
        fence(Ordering::SeqCst);
    }
}
