//! The header that all ACPI tables share (ACPI 6.5, section 5.2.6).

use crate::bytes::Bytes;
use crate::error::{FirmwareError, FirmwareErrorKind};

/// Length of the header in bytes.
pub(crate) const HEADER_BYTES: usize = 36;

/// Fields of the header that name the firmware. Its checksum is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct AcpiHeader {
    pub revision: u8,
    pub oem_id: [u8; 6],
    pub oem_table_id: [u8; 8],
    pub oem_revision: u32,
}

/// Checks the header of `table`. Returns it with the bytes of the table, without what follows them.
pub(crate) fn check<'a>(
    table: &'a [u8],
    signature: &[u8; 4],
    oldest: u8,
) -> Result<(AcpiHeader, Bytes<'a>), FirmwareError> {
    let bytes = Bytes::table(table);
    bytes.part(0, HEADER_BYTES)?;
    if bytes.array::<4>(0)? != *signature {
        return Err(bytes.error(0, FirmwareErrorKind::Signature));
    }
    let length = usize::try_from(bytes.u32(4)?).unwrap_or(usize::MAX);
    if length < HEADER_BYTES {
        return Err(bytes.error(4, FirmwareErrorKind::TableLength));
    }
    let bytes = bytes
        .part(0, length)
        .map_err(|_| bytes.error(4, FirmwareErrorKind::Truncated))?;
    let sum = bytes
        .data()
        .iter()
        .fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    if sum != 0 {
        return Err(bytes.error(9, FirmwareErrorKind::Checksum));
    }
    let header = AcpiHeader {
        revision: bytes.u8(8)?,
        oem_id: bytes.array(10)?,
        oem_table_id: bytes.array(16)?,
        oem_revision: bytes.u32(24)?,
    };
    if header.revision < oldest {
        return Err(bytes.error(8, FirmwareErrorKind::Revision));
    }
    Ok((header, bytes))
}
