//! Offsets and bits of the registers (IHI 0070, chapter 6 "Memory map and registers"), under the
//! names of the specification without the prefix `SMMU_`.

use core::fmt;

use ringfence_types::{Registers, poll_until};

use crate::error::UnitError;

pub(crate) const IDR0: u64 = 0x0;
pub(crate) const IDR1: u64 = 0x4;
pub(crate) const IDR3: u64 = 0xc;
pub(crate) const IDR5: u64 = 0x14;
pub(crate) const CR0: u64 = 0x20;
pub(crate) const CR0ACK: u64 = 0x24;
pub(crate) const CR1: u64 = 0x28;
pub(crate) const CR2: u64 = 0x2c;
pub(crate) const GBPA: u64 = 0x44;
pub(crate) const IRQ_CTRL: u64 = 0x50;
pub(crate) const IRQ_CTRLACK: u64 = 0x54;
pub(crate) const GERROR: u64 = 0x60;
pub(crate) const GERRORN: u64 = 0x64;
pub(crate) const GERROR_IRQ_CFG0: u64 = 0x68;
pub(crate) const STRTAB_BASE: u64 = 0x80;
pub(crate) const STRTAB_BASE_CFG: u64 = 0x88;
pub(crate) const CMDQ_BASE: u64 = 0x90;
pub(crate) const CMDQ_PROD: u64 = 0x98;
pub(crate) const CMDQ_CONS: u64 = 0x9c;
pub(crate) const EVENTQ_BASE: u64 = 0xa0;
pub(crate) const EVENTQ_IRQ_CFG0: u64 = 0xb0;
/// In page 1 of the registers.
pub(crate) const EVENTQ_PROD: u64 = 0x1_00a8;
/// In page 1 of the registers.
pub(crate) const EVENTQ_CONS: u64 = 0x1_00ac;

pub(crate) const CR0_SMMUEN: u32 = 1;
pub(crate) const CR0_EVENTQEN: u32 = 1 << 2;
pub(crate) const CR0_CMDQEN: u32 = 1 << 3;
/// Translated transactions of ATS are checked against the stream table.
pub(crate) const CR0_ATSCHK: u32 = 1 << 4;
/// The fields of `CR0` that `CR0ACK` confirms: SMMUEN, PRIQEN, EVENTQEN, CMDQEN, ATSCHK.
const CR0_FIELDS: u32 = 0x1f;

/// Tables and queues: write-back cacheable, inner shareable.
pub(crate) const CR1_CACHED: u32 = 0xd75;
/// Stream ids beyond the stream table are recorded.
pub(crate) const CR2_RECINVSID: u32 = 1 << 1;
/// The unit ignores broadcast TLB invalidations of the CPUs.
pub(crate) const CR2_PTM: u32 = 1 << 2;

pub(crate) const GBPA_ABORT: u32 = 1 << 20;
pub(crate) const GBPA_UPDATE: u32 = 1 << 31;

pub(crate) const IRQ_GERROR: u32 = 1;
pub(crate) const IRQ_EVENTQ: u32 = 1 << 2;
const IRQ_FIELDS: u32 = 0b111;

pub(crate) const GERROR_CMDQ: u32 = 1;
pub(crate) const GERROR_EVENTQ_ABT: u32 = 1 << 2;
/// Service failure mode: the unit stopped.
pub(crate) const GERROR_SFM: u32 = 1 << 8;

/// `STRTAB_BASE_CFG.FMT`: a table of two levels.
pub(crate) const FMT_TWO_LEVELS: u32 = 1 << 16;
pub(crate) const SPLIT_SHIFT: u32 = 6;

/// Position of the error code in `CMDQ_CONS`.
pub(crate) const CONS_ERR_SHIFT: u32 = 24;
pub(crate) const CONS_ERR: u32 = 0x7f;
/// `EVENTQ_PROD.OVFLG` and `EVENTQ_CONS.OVACKFLG`.
pub(crate) const OVERFLOW: u32 = 1 << 31;

/// The value of a register of an absent unit.
pub(crate) const ABSENT: u32 = u32::MAX;

/// A register that an error names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Register {
    /// Enables translation and the queues.
    Cr0,
    /// Attributes of transactions while translation is off.
    Gbpa,
    /// Enables the interrupts of queues and errors.
    IrqCtrl,
}

impl fmt::Display for Register {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cr0 => "SMMU_CR0",
            Self::Gbpa => "SMMU_GBPA",
            Self::IrqCtrl => "SMMU_IRQ_CTRL",
        })
    }
}

/// Writes `CR0` and waits until the unit confirms all fields.
pub(crate) fn write_cr0<R: Registers>(unit: &R, value: u32, polls: u32) -> Result<(), UnitError> {
    unit.write32(CR0, value);
    let done = || unit.read32(CR0ACK) & CR0_FIELDS == value;
    poll_until(polls, late(Register::Cr0), done)
}

/// Writes `IRQ_CTRL` and waits until the unit confirms all fields.
pub(crate) fn write_irq_ctrl<R: Registers>(
    unit: &R,
    value: u32,
    polls: u32,
) -> Result<(), UnitError> {
    unit.write32(IRQ_CTRL, value);
    let done = || unit.read32(IRQ_CTRLACK) & IRQ_FIELDS == value;
    poll_until(polls, late(Register::IrqCtrl), done)
}

/// Makes the unit abort all transactions while translation is off (section 6.3.14 `SMMU_GBPA`).
pub(crate) fn abort_when_off<R: Registers>(unit: &R, polls: u32) -> Result<(), UnitError> {
    let idle = || unit.read32(GBPA) & GBPA_UPDATE == 0;
    poll_until(polls, late(Register::Gbpa), idle)?;
    let old = unit.read32(GBPA) & !GBPA_UPDATE;
    unit.write32(GBPA, old | GBPA_ABORT | GBPA_UPDATE);
    let done = || unit.read32(GBPA) & (GBPA_UPDATE | GBPA_ABORT) == GBPA_ABORT;
    poll_until(polls, late(Register::Gbpa), done)
}

const fn late(register: Register) -> UnitError {
    UnitError::TimedOut { register }
}
