//! Little-endian fields at fixed offsets, for reading and writing messages and registers.

/// Returns the `N` bytes at `at`. `None` if `bytes` is too short.
pub fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk::<N>().copied()
}

/// Returns the 16-bit field at `at`. `None` if `bytes` is too short.
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    array_at(bytes, at).map(u16::from_le_bytes)
}

/// Returns the 32-bit field at `at`. `None` if `bytes` is too short.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    array_at(bytes, at).map(u32::from_le_bytes)
}

/// Returns the 64-bit field at `at`. `None` if `bytes` is too short.
pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    array_at(bytes, at).map(u64::from_le_bytes)
}

/// Fills `to` with the bytes of `from` at `offset`, and with zeros after the end of `from`.
pub fn copy_part(from: &[u8], offset: usize, to: &mut [u8]) {
    to.fill(0);
    if let Some(from) = from.get(offset..) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = *from;
        }
    }
}
