//! Offsets and bits of the registers (specification section "MMIO Registers"), under the names
//! of the specification.

use core::fmt;

use ringfence_types::{Registers, poll_until};

use crate::UnitError;

pub(crate) const DEVICE_TABLE_BASE: u64 = 0x0000;
pub(crate) const COMMAND_BUFFER_BASE: u64 = 0x0008;
pub(crate) const EVENT_LOG_BASE: u64 = 0x0010;
pub(crate) const CONTROL: u64 = 0x0018;
pub(crate) const EXCLUSION_BASE: u64 = 0x0020;
pub(crate) const EXCLUSION_LIMIT: u64 = 0x0028;
pub(crate) const EXTENDED_FEATURE: u64 = 0x0030;
pub(crate) const COMMAND_HEAD: u64 = 0x2000;
pub(crate) const COMMAND_TAIL: u64 = 0x2008;
pub(crate) const EVENT_HEAD: u64 = 0x2010;
pub(crate) const EVENT_TAIL: u64 = 0x2018;
pub(crate) const STATUS: u64 = 0x2020;

/// IommuEn: devices are translated.
pub(crate) const IOMMU_EN: u64 = 1;
pub(crate) const EVENT_LOG_EN: u64 = 1 << 2;
/// EventIntEn: without it, QEMU does not record an overflow of the event log. No interrupt is sent
/// unless the embedder enables MSI in the unit's configuration space.
pub(crate) const EVENT_INT_EN: u64 = 1 << 3;
/// CohEn: the unit's reads of the device table snoop CPU caches.
pub(crate) const COHERENT: u64 = 1 << 10;
pub(crate) const COMMAND_BUFFER_EN: u64 = 1 << 12;
/// GTEn: the unit uses the guest fields of device table entries.
pub(crate) const GT_EN: u64 = 1 << 16;

/// Bits of the flags of an IVHD block, and of the control register that must repeat them.
const IVHD_FLAGS: [(u8, u64); 4] = [
    (1, 1 << 1),       // HtTunEn
    (1 << 1, 1 << 8),  // PassPW
    (1 << 2, 1 << 9),  // ResPassPW
    (1 << 3, 1 << 11), // Isoc
];

/// EventOverflow: the event log lost records. Cleared by writing one.
pub(crate) const EVENT_OVERFLOW: u32 = 1;
/// EventLogInt. Cleared by writing one.
pub(crate) const EVENT_LOG_INT: u32 = 1 << 1;
pub(crate) const EVENT_LOG_RUN: u32 = 1 << 3;
pub(crate) const COMMAND_BUFFER_RUN: u32 = 1 << 4;

/// Position of the length, the binary logarithm of the number of entries, in the base registers of
/// the command buffer and of the event log.
pub(crate) const LENGTH_SHIFT: u32 = 56;

/// Value of a register where no unit answers.
pub(crate) const ABSENT: u64 = u64::MAX;

/// Returns the bits of the control register that the flags of the unit's IVHD block demand
/// (specification, "IVHD flags").
pub(crate) fn control_of_ivhd(flags: u8) -> u64 {
    let set = |(flag, bit): &(u8, u64)| if flags & flag == 0 { 0 } else { *bit };
    IVHD_FLAGS.iter().map(set).fold(0, |bits, bit| bits | bit)
}

/// Reads the status register until its bits of `mask` are those of `value`, at most `limit` times.
pub(crate) fn wait_status<R: Registers>(
    registers: &R,
    mask: u32,
    value: u32,
    limit: u32,
) -> Result<(), UnitError> {
    let late = UnitError::TimedOut {
        register: Register::Status,
    };
    poll_until(limit, late, || registers.read32(STATUS) & mask == value)
}

/// A register that an error names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Register {
    /// IOMMU Status Register, MMIO offset 2020h.
    Status,
}

impl fmt::Display for Register {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Status => "the IOMMU Status Register",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_an_ivhd_block_select_control_bits() {
        for (flags, bits) in [
            (0x00, 0x000),
            (0x01, 0x002),
            (0x02, 0x100),
            (0x04, 0x200),
            (0x08, 0x800),
            // IotlbSup, Coherent, PreFSup and PPRSup have no bit here.
            (0xf0, 0x000),
            (0xff, 0xb02),
        ] {
            assert_eq!(control_of_ivhd(flags), bits, "{flags:#x}");
        }
    }
}
