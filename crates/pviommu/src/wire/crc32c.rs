//! CRC-32C (Castagnoli; RFC 3720, appendix B.4): polynomial 0x1edc6f41, reflected. A lookup table
//! of 1 KiB costs less than a dependency.

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// Returns the checksum of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (crc >> 8) ^ TABLE[usize::from(crc as u8 ^ byte)]
    })
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    /// Test vectors of RFC 3720, appendix B.4, and the standard check value.
    #[test]
    fn published_values() {
        let rising: [u8; 32] = core::array::from_fn(|i| i as u8);
        let falling: [u8; 32] = core::array::from_fn(|i| 31 - i as u8);
        for (bytes, sum) in [
            (&b""[..], 0),
            (&b"123456789"[..], 0xe306_9283),
            (&[0; 32][..], 0x8a91_36aa),
            (&[0xff; 32][..], 0x62a8_ab43),
            (&rising[..], 0x46dd_794e),
            (&falling[..], 0x113f_db5c),
        ] {
            assert_eq!(crc32c(bytes), sum);
        }
    }
}
