//! Debian's names of the guests' architectures.

use std::fmt;

/// The architecture of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// AMD64, also called x86-64.
    Amd64,
    /// Arm with AArch64 state.
    Arm64,
    /// RISC-V with RV64.
    Riscv64,
}

impl Architecture {
    /// The architectures of guests, in order of their names.
    pub const ALL: [Self; 3] = [Self::Amd64, Self::Arm64, Self::Riscv64];

    /// Returns Debian's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
            Self::Riscv64 => "riscv64",
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
