//! The ACS control register (PCI Express Base Specification, section 7.7.11.3).

use std::fmt;
use std::ops::BitOr;

/// Enabled access controls of a port.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Acs(u16);

impl Acs {
    /// No access control: plain PCI.
    pub const NONE: Self = Self(0);
    /// V: the port blocks a request whose requester ID has a bus number outside its own range.
    pub const SOURCE_VALIDATION: Self = Self(1 << 0);
    /// B: the port blocks requests whose AT field is not 00b.
    pub const TRANSLATION_BLOCKING: Self = Self(1 << 1);
    /// R: the port sends peer-to-peer requests upstream, so that the IOMMU sees them.
    pub const REQUEST_REDIRECT: Self = Self(1 << 2);
    /// The three controls together, as Linux enables them for an untrusted device.
    pub const ISOLATED: Self = Self(0b111);

    /// Decodes the register; `None` if it enables a control that this model lacks.
    pub const fn decode(bits: u16) -> Option<Self> {
        if bits & !Self::ISOLATED.0 != 0 {
            return None;
        }
        Some(Self(bits))
    }

    /// Returns the register.
    pub const fn encode(self) -> u16 {
        self.0
    }

    /// Returns true if all controls of `other` are enabled.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Acs {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for Acs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letters = [
            (Self::SOURCE_VALIDATION, 'V'),
            (Self::TRANSLATION_BLOCKING, 'B'),
            (Self::REQUEST_REDIRECT, 'R'),
        ];
        let set = letters.iter().filter(|(bit, _)| self.contains(*bit));
        f.write_str("Acs(")?;
        for (_, letter) in set {
            write!(f, "{letter}")?;
        }
        f.write_str(")")
    }
}
