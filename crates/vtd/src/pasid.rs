//! Process address space identifiers.

/// A process address space identifier of 20 bits (PCI Express Base Specification, section 6.20).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pasid(u32);

impl Pasid {
    /// The PASID that this driver gives to requests without one (RID_PASID).
    pub const WITHOUT: Self = Self(0);

    /// Creates a PASID; `None` above 20 bits.
    pub const fn new(raw: u32) -> Option<Self> {
        if raw >> 20 != 0 {
            return None;
        }
        Some(Self(raw))
    }

    /// Returns the raw value.
    pub const fn get(self) -> u32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pasid_has_20_bits() {
        assert_eq!(Pasid::new((1 << 20) - 1).map(Pasid::get), Some(0xf_ffff));
        assert_eq!(Pasid::new(1 << 20), None);
    }
}
