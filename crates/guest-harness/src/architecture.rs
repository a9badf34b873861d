//! Debian's names of architectures.

use std::fmt;

/// The architecture of a guest, or of a Rust standard library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// AMD64, also called x86-64.
    Amd64,
    /// Arm with AArch64 state.
    Arm64,
    /// x86 with 32-bit addresses.
    I386,
    /// RISC-V with RV64.
    Riscv64,
    /// IBM Z, which is big-endian.
    S390x,
}

impl Architecture {
    /// The architectures of guests, in order of their names.
    pub const ALL: [Self; 3] = [Self::Amd64, Self::Arm64, Self::Riscv64];

    /// Returns Debian's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
            Self::I386 => "i386",
            Self::Riscv64 => "riscv64",
            Self::S390x => "s390x",
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
