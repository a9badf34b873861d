//! The host CPU's cache-line write-back.
//!
//! A walker that does not snoop needs the bytes in memory. The VT-d specification (section 3.10
//! "Memory Type Considerations", and the Coherency field of the extended capability register)
//! requires software to flush structures out of the CPU caches, and names CLFLUSH as an example.
//! CLWB and CLFLUSHOPT do that as well. According to the Intel SDM (volume 2, "CLWB"), a modified
//! line is written to memory from any level of the cache hierarchy of the coherence domain. CLWB
//! may keep the line; a kept line is unmodified, so it hides nothing from a reader of memory. It
//! would matter only if the *device* wrote the line, which a walker without accessed and dirty bits
//! does not.
//!
//! All three are ordered after earlier stores to the same line. SFENCE orders CLWB and CLFLUSHOPT
//! with later stores (SDM, same pages). Only a later store (a doorbell, an invalidation register)
//! makes the device read the structures.

#![allow(unsafe_code)]

/// The instruction that writes a line back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WriteBack {
    /// Writes back; may keep the line.
    Clwb,
    /// Writes back and drops the line; weakly ordered.
    ClflushOpt,
    /// Writes back and drops the line; ordered with every other CLFLUSH and store, one at a time.
    Clflush,
    /// A full fence only: programs on this host cannot execute a write-back instruction. Correct
    /// for devices modelled in software; useless for real hardware.
    FenceOnly,
}

/// Bytes of a cache line.
pub(crate) const LINE: u64 = 64;

impl core::fmt::Display for WriteBack {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Clwb => "CLWB",
            Self::ClflushOpt => "CLFLUSHOPT",
            Self::Clflush => "CLFLUSH",
            Self::FenceOnly => "a full fence",
        })
    }
}

impl WriteBack {
    /// Returns all kinds that this host can execute, cheapest first.
    pub fn available() -> Vec<Self> {
        let mut found = host::available();
        found.push(Self::FenceOnly);
        found
    }

    /// Returns the cheapest kind that this host can execute.
    pub fn best() -> Self {
        Self::available()
            .first()
            .copied()
            .unwrap_or(Self::FenceOnly)
    }

    /// Returns true if this host can execute this kind.
    pub fn is_available(self) -> bool {
        Self::available().contains(&self)
    }

    /// Writes back the line that holds `byte`.
    ///
    /// `self` must be [available](Self::is_available).
    #[inline]
    pub(crate) fn line(self, byte: *const u8) {
        host::line(self, byte);
    }

    /// Prefetches the line that holds `byte` for writing.
    #[inline]
    pub(crate) fn prefetch(byte: *const u8) {
        host::prefetch(byte);
    }

    /// Orders all earlier write-backs before every later store.
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
            // program can see. It faults on an unmapped address, but the only caller passes
            // addresses inside its live mapping. The instruction exists on this host: `Arena`
            // refuses kinds that `available` does not return. The block clobbers memory, so the
            // compiler does not move it across the stores that it writes back.
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
        // SAFETY: the instruction is a hint that changes no value and faults on no address. CPUs
        // without it execute it as a no-op (SDM volume 2, "PREFETCHW").
        unsafe {
            asm!(
                "prefetchw byte ptr [{}]",
                in(reg) byte,
                options(nostack, preserves_flags, readonly)
            );
        }
    }

    #[inline]
    pub(super) fn drain(kind: WriteBack) {
        match kind {
            // SAFETY: the instruction is a fence, and SSE is part of x86-64. The block clobbers
            // memory, so it also orders the compiler.
            WriteBack::Clwb | WriteBack::ClflushOpt => unsafe {
                asm!("sfence", options(nostack, preserves_flags));
            },
            // SAFETY: as above. MFENCE orders CLFLUSH on every CPU that has it; SFENCE does so only
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
