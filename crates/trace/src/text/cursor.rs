//! A cursor over the bytes of a line.

/// Value of a hexadecimal digit; 0xff for any other byte.
const HEX: [u8; 256] = {
    let mut table = [0xff; 256];
    let mut digit = 0;
    while digit < 10 {
        table[b'0' as usize + digit] = digit as u8;
        digit += 1;
    }
    while digit < 16 {
        table[b'a' as usize + digit - 10] = digit as u8;
        table[b'A' as usize + digit - 10] = digit as u8;
        digit += 1;
    }
    table
};

/// The unread rest of a line.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cursor<'a> {
    pub(super) rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    #[inline]
    pub(super) fn new(line: &'a [u8]) -> Self {
        Self { rest: line }
    }

    /// Skips `text`. Returns false and does not move if the next bytes differ.
    #[inline]
    pub(super) fn literal(&mut self, text: &[u8]) -> bool {
        match self.rest.strip_prefix(text) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    #[inline]
    pub(super) fn skip_spaces(&mut self) {
        while let [b' ' | b'\t', rest @ ..] = self.rest {
            self.rest = rest;
        }
    }

    /// Returns the bytes before the next space or the end, and moves there.
    #[inline]
    pub(super) fn word(&mut self) -> &'a [u8] {
        let length = self
            .rest
            .iter()
            .position(|&byte| byte == b' ')
            .unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(length);
        self.rest = rest;
        word
    }

    /// Parses a hexadecimal number without a prefix, of at most 64 bits. `None` if the next byte is
    /// not a digit or the number is longer.
    #[inline]
    pub(super) fn hex(&mut self) -> Option<u64> {
        let mut value = 0u64;
        let mut digits = 0usize;
        for &byte in self.rest {
            let digit = HEX[byte as usize];
            if digit == 0xff {
                break;
            }
            if value >> 60 != 0 {
                return None;
            }
            value = value << 4 | u64::from(digit);
            digits += 1;
        }
        if digits == 0 {
            return None;
        }
        self.rest = self.rest.get(digits..)?;
        Some(value)
    }

    /// Parses a hexadecimal number with the prefix `0x`.
    #[inline]
    pub(super) fn prefixed_hex(&mut self) -> Option<u64> {
        if !self.literal(b"0x") {
            return None;
        }
        self.hex()
    }

    /// Parses a hexadecimal number of any length with the prefix `0x`; fast if it has 16 digits.
    #[inline]
    pub(super) fn padded_hex(&mut self) -> Option<u64> {
        if let [b'0', b'x', digits @ ..] = self.rest
            && let Some((digits, rest)) = digits.split_first_chunk::<16>()
        {
            // Looks up all 16 digits before the check, which saves a branch per digit.
            let mut value = 0u64;
            let mut seen = 0;
            for &byte in digits {
                let digit = HEX[byte as usize];
                seen |= digit;
                value = value << 4 | u64::from(digit & 15);
            }
            if seen < 16 && !matches!(rest, [byte, ..] if HEX[*byte as usize] < 16) {
                self.rest = rest;
                return Some(value);
            }
        }
        self.prefixed_hex()
    }

    /// Parses a decimal number of at most 64 bits. `None` if the next byte is not a digit or the
    /// number is larger.
    #[inline]
    pub(super) fn decimal(&mut self) -> Option<u64> {
        let mut value = 0u64;
        let mut digits = 0usize;
        for &byte in self.rest {
            let digit = byte.wrapping_sub(b'0');
            if digit > 9 {
                break;
            }
            value = if digits < 18 {
                value.wrapping_mul(10).wrapping_add(u64::from(digit))
            } else {
                value.checked_mul(10)?.checked_add(u64::from(digit))?
            };
            digits += 1;
        }
        if digits == 0 {
            return None;
        }
        self.rest = self.rest.get(digits..)?;
        Some(value)
    }

    /// Returns true at the end of a field: at a space or at the end of the line.
    #[inline]
    pub(super) fn at_end_of_field(&self) -> bool {
        matches!(self.rest.first(), None | Some(b' '))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_end_at_64_bits() {
        let hex = |text: &str| Cursor::new(text.as_bytes()).hex();
        assert_eq!(hex("ffffffffffffffff "), Some(u64::MAX));
        assert_eq!(hex("0000000000000000ffd5c3be"), Some(0xffd5_c3be));
        assert_eq!(hex("10000000000000000"), None);
        assert_eq!(hex("g"), None);
        let padded = |text: &str| Cursor::new(text.as_bytes()).padded_hex();
        assert_eq!(padded("0xfEdcba9876543210 "), Some(0xfedc_ba98_7654_3210));
        assert_eq!(padded("0x0fedcba9876543210"), Some(0xfedc_ba98_7654_3210));
        assert_eq!(padded("0x1fedcba9876543210"), None);
        assert_eq!(padded("0x00000000ffff - 0x1"), Some(0xffff));
        assert_eq!(padded("0x12"), Some(0x12));
        assert_eq!(padded("0x"), None);
        assert_eq!(padded("x0"), None);
        let decimal = |text: &str| Cursor::new(text.as_bytes()).decimal();
        assert_eq!(decimal("18446744073709551615"), Some(u64::MAX));
        assert_eq!(decimal("18446744073709551616"), None);
        assert_eq!(decimal("99999999999999999999999"), None);
        assert_eq!(decimal("0000000000000000000000000000017"), Some(17));
        assert_eq!(decimal("-1"), None);
        assert_eq!(decimal(""), None);
    }
}
