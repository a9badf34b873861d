//! The ACPI tables that firmware left in memory.

use crate::boot::MAPPED_END;

/// Length of the RSDP since ACPI 2.0.
pub(crate) const RSDP_BYTES: usize = 36;
/// Length of the header of a table.
const HEADER_BYTES: usize = 36;

/// Returns the `len` bytes from the physical address `at`; `None` if they are not mapped.
///
/// # Safety
/// The bytes are memory, and nothing writes them.
pub(crate) unsafe fn bytes(at: u64, len: usize) -> Option<&'static [u8]> {
    if at == 0 || at.checked_add(len as u64)? > MAPPED_END {
        return None;
    }
    // SAFETY: the bytes are mapped, and the caller promises the rest.
    Some(unsafe { core::slice::from_raw_parts(at as *const u8, len) })
}

/// Returns the ACPI table with this signature (ACPI 6.5, sections 5.2.5 to 5.2.8).
pub(crate) fn acpi_table(rsdp: &[u8], signature: &[u8; 4]) -> Option<&'static [u8]> {
    let is_v1 = rsdp.get(15)? < &2;
    // The RSDT has addresses of 32 bits, the XSDT of 64.
    let (root, width) = if is_v1 { (16..20, 4) } else { (24..32, 8) };
    let root = table(number(rsdp.get(root)?))?;
    let entries = root.get(HEADER_BYTES..)?.chunks_exact(width);
    let mut tables = entries.filter_map(|entry| table(number(entry)));
    tables.find(|table| table.starts_with(signature))
}

fn table(at: u64) -> Option<&'static [u8]> {
    // SAFETY: firmware guarantees that a table lies there, and nothing writes it.
    let header = unsafe { bytes(at, HEADER_BYTES) }?;
    let len = number(header.get(4..8)?) as usize;
    // SAFETY: as above; the header contains the table's length.
    unsafe { bytes(at, len) }
}

/// Returns a little-endian number.
fn number(bytes: &[u8]) -> u64 {
    let bytes = bytes.iter().rev();
    bytes.fold(0, |number, byte| number << 8 | u64::from(*byte))
}
