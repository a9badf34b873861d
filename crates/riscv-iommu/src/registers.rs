//! Offsets and bits of the registers (specification 1.0, chapter "Memory-mapped register
//! interface"), under the names of the specification.

use core::fmt;

pub(crate) const CAPABILITIES: u64 = 0;
pub(crate) const FCTL: u64 = 8;
pub(crate) const DDTP: u64 = 16;
pub(crate) const CQB: u64 = 24;
pub(crate) const CQH: u64 = 32;
pub(crate) const CQT: u64 = 36;
pub(crate) const FQB: u64 = 40;
pub(crate) const FQH: u64 = 48;
pub(crate) const FQT: u64 = 52;
pub(crate) const PQB: u64 = 56;
pub(crate) const PQH: u64 = 64;
pub(crate) const PQT: u64 = 68;
pub(crate) const CQCSR: u64 = 72;
pub(crate) const FQCSR: u64 = 76;
pub(crate) const PQCSR: u64 = 80;
pub(crate) const IPSR: u64 = 84;

/// `fctl.BE`: memory accesses of the unit are big-endian.
pub(crate) const FCTL_BE: u32 = 1;
/// `fctl.WSI`: interrupts use wires.
pub(crate) const FCTL_WSI: u32 = 1 << 1;
/// `fctl.GXL`: the second stage has the schemes of RV32.
pub(crate) const FCTL_GXL: u32 = 1 << 2;

/// `ddtp.iommu_mode`: Off, Bare, or the levels of the directory.
pub(crate) const DDTP_MODE: u64 = 0b1111;
pub(crate) const DDTP_OFF: u64 = 0;
/// `1LVL`; `2LVL` and `3LVL` follow.
pub(crate) const DDTP_1LVL: u64 = 2;
pub(crate) const DDTP_BUSY: u64 = 1 << 4;
/// `ddtp.PPN`, and the field at the same bits of `cqb`, `fqb`, `pqb` and directory entries.
pub(crate) const PPN: u64 = 0x003f_ffff_ffff_fc00;
/// Right shift from an address to the PPN field.
pub(crate) const PPN_FROM_ADDRESS: u32 = 2;

/// `cqen`, `fqen`, `pqen`.
pub(crate) const CSR_ENABLE: u32 = 1;
/// `cie`, `fie`, `pie`.
pub(crate) const CSR_INTERRUPT: u32 = 1 << 1;
/// `cqmf`, `fqmf`, `pqmf`: the unit could not access the queue.
pub(crate) const CSR_MEMORY_FAULT: u32 = 1 << 8;
/// `fqof`, `pqof`: a record was lost because the queue was full.
pub(crate) const CSR_OVERFLOW: u32 = 1 << 9;
/// `cqon`, `fqon`, `pqon`.
pub(crate) const CSR_ON: u32 = 1 << 16;
pub(crate) const CSR_BUSY: u32 = 1 << 17;
pub(crate) const CQCSR_CMD_TO: u32 = 1 << 9;
pub(crate) const CQCSR_CMD_ILL: u32 = 1 << 10;
pub(crate) const CQCSR_FENCE_W_IP: u32 = 1 << 11;
/// The bits of `cqcsr` that stop the command queue.
pub(crate) const CQCSR_ERRORS: u32 = CSR_MEMORY_FAULT | CQCSR_CMD_TO | CQCSR_CMD_ILL;

pub(crate) const IPSR_CIP: u32 = 1;
pub(crate) const IPSR_FIP: u32 = 1 << 1;
pub(crate) const IPSR_PIP: u32 = 1 << 3;

/// The value of a register of an absent unit.
pub(crate) const ABSENT: u32 = u32::MAX;

/// A register that an error names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Register {
    /// The register that controls features.
    Fctl,
    /// The pointer to the device directory.
    Ddtp,
    /// The base of the command queue.
    Cqb,
    /// The base of the fault queue.
    Fqb,
    /// The base of the page-request queue.
    Pqb,
    /// Control and status of the command queue.
    Cqcsr,
    /// Control and status of the fault queue.
    Fqcsr,
    /// Control and status of the page-request queue.
    Pqcsr,
}

impl fmt::Display for Register {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fctl => "fctl",
            Self::Ddtp => "ddtp",
            Self::Cqb => "cqb",
            Self::Fqb => "fqb",
            Self::Pqb => "pqb",
            Self::Cqcsr => "cqcsr",
            Self::Fqcsr => "fqcsr",
            Self::Pqcsr => "pqcsr",
        })
    }
}
