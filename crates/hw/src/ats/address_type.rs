//! The Address Type (AT) field of a memory request (PCI Express Base Specification, section 10.2.1).

/// Type of the address in a memory request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum AddressType {
    /// AT = 00b: an address that the IOMMU must translate.
    #[default]
    Untranslated,
    /// AT = 01b: the device asks for the translation of an address.
    TranslationRequest,
    /// AT = 10b: a host address that the device obtained from a translation completion.
    Translated,
}

impl AddressType {
    /// Decodes the two bits of the field; `None` for the reserved value 11b.
    #[inline]
    pub const fn decode(bits: u8) -> Option<Self> {
        match bits {
            0b00 => Some(Self::Untranslated),
            0b01 => Some(Self::TranslationRequest),
            0b10 => Some(Self::Translated),
            _ => None,
        }
    }

    /// Returns the two bits of the field.
    #[inline]
    pub const fn encode(self) -> u8 {
        match self {
            Self::Untranslated => 0b00,
            Self::TranslationRequest => 0b01,
            Self::Translated => 0b10,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_of_the_specification() {
        for (bits, expected) in [
            (0, Some(AddressType::Untranslated)),
            (1, Some(AddressType::TranslationRequest)),
            (2, Some(AddressType::Translated)),
            (3, None),
            (4, None),
        ] {
            assert_eq!(AddressType::decode(bits), expected);
            if let Some(kind) = expected {
                assert_eq!(kind.encode(), bits);
            }
        }
    }
}
