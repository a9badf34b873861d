//! Offsets and bits of the registers, with the names of the VT-d specification, section 11.4
//! "Register Descriptions", and waits for status bits.

use ringfence_types::{Registers, poll_until};

use crate::error::{Register, UnitError};

pub(crate) const CAP: u64 = 0x08;
pub(crate) const ECAP: u64 = 0x10;
pub(crate) const GCMD: u64 = 0x18;
pub(crate) const GSTS: u64 = 0x1c;
pub(crate) const RTADDR: u64 = 0x20;
pub(crate) const CCMD: u64 = 0x28;
pub(crate) const FSTS: u64 = 0x34;
pub(crate) const IQH: u64 = 0x80;
pub(crate) const IQT: u64 = 0x88;
pub(crate) const IQA: u64 = 0x90;
/// IVA: the first register of the IOTLB registers, at ECAP.IRO.
pub(crate) const IVA: u64 = 0x0;
/// IOTLB_REG: the second one.
pub(crate) const IOTLB: u64 = 0x8;

/// GCMD.TE and GSTS.TES: translation.
pub(crate) const TE: u32 = 1 << 31;
/// GCMD.SRTP and GSTS.RTPS: the unit took the root table pointer over.
pub(crate) const SRTP: u32 = 1 << 30;
/// GCMD.WBF and GSTS.WBFS: write buffer flush.
pub(crate) const WBF: u32 = 1 << 27;
/// GCMD.QIE and GSTS.QIES: queued invalidation.
pub(crate) const QIE: u32 = 1 << 26;
/// Bits of GSTS that a write of GCMD repeats: all but those of one-shot commands (section
/// 11.4.4.1).
const PERSISTENT: u32 = 0x96ff_ffff;

/// RTADDR.TTM = 01b: scalable mode.
pub(crate) const TTM_SCALABLE: u64 = 0b01 << 10;

/// CCMD.ICC: the invalidation of the context cache is under way.
pub(crate) const ICC: u64 = 1 << 63;
/// IOTLB_REG.IVT: the invalidation of the IOTLB is under way.
pub(crate) const IVT: u64 = 1 << 63;

/// FSTS.PFO: a fault was not recorded.
pub(crate) const PFO: u32 = 1 << 0;
/// FSTS.PPF: a fault record is pending.
pub(crate) const PPF: u32 = 1 << 1;
/// FSTS.IQE: the unit stopped at a descriptor of the invalidation queue.
pub(crate) const IQE: u32 = 1 << 4;
/// FSTS.ICE: a device answered an invalidation wrongly.
pub(crate) const ICE: u32 = 1 << 5;
/// FSTS.ITE: a device did not answer an invalidation.
pub(crate) const ITE: u32 = 1 << 6;
/// All errors of the invalidation queue.
pub(crate) const QUEUE_ERRORS: u32 = IQE | ICE | ITE;

/// The value of a register where no unit answers.
pub(crate) const ABSENT: u32 = u32::MAX;

/// GSTS did not show the end of a command.
const LATE: UnitError = UnitError::TimedOut {
    register: Register::GlobalStatus,
};

/// Sets `bit` of GCMD and waits until GSTS shows it: TE, SRTP or QIE.
pub(crate) fn set(registers: &impl Registers, bit: u32, limit: u32) -> Result<(), UnitError> {
    registers.write32(GCMD, registers.read32(GSTS) & PERSISTENT | bit);
    poll_until(limit, LATE, || registers.read32(GSTS) & bit != 0)
}

/// Clears `bit` of GCMD and waits until GSTS shows it: TE or QIE.
pub(crate) fn clear(registers: &impl Registers, bit: u32, limit: u32) -> Result<(), UnitError> {
    registers.write32(GCMD, registers.read32(GSTS) & PERSISTENT & !bit);
    poll_until(limit, LATE, || registers.read32(GSTS) & bit == 0)
}

/// Flushes the write buffer (GCMD.WBF) and waits.
pub(crate) fn flush_write_buffer(registers: &impl Registers, limit: u32) -> Result<(), UnitError> {
    registers.write32(GCMD, registers.read32(GSTS) & PERSISTENT | WBF);
    poll_until(limit, LATE, || registers.read32(GSTS) & WBF == 0)
}
