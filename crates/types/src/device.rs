//! Requester IDs, PASIDs and domain IDs.

use core::fmt;

/// PCI requester ID: the 16 bits of bus, device and function that accompany every DMA (PCI Express
/// Base Specification, "Transaction Descriptor").
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct RequesterId(u16);

impl RequesterId {
    /// Wraps a raw requester ID.
    #[inline]
    pub const fn new(requester_id: u16) -> Self {
        Self(requester_id)
    }

    /// Combines bus (8 bits), device (5 bits) and function (3 bits). `None` if `device` or
    /// `function` is out of range.
    #[inline]
    pub const fn from_parts(bus: u8, device: u8, function: u8) -> Option<Self> {
        if device > 31 || function > 7 {
            return None;
        }
        Some(Self(
            (bus as u16) << 8 | (device as u16) << 3 | function as u16,
        ))
    }

    /// Returns the raw requester ID.
    #[inline]
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Returns the bus number, which indexes the root table in VT-d.
    #[inline]
    pub const fn bus(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Returns the device and function number, which indexes the context table in VT-d.
    #[inline]
    pub const fn devfn(self) -> u8 {
        self.0 as u8
    }
}

impl fmt::Display for RequesterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:02x}:{:02x}.{}",
            self.bus(),
            self.devfn() >> 3,
            self.devfn() & 7
        )
    }
}

/// Process address space identifier of 20 bits, which selects an address space of a device (PCI
/// Express Base Specification, section 6.20).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Pasid(u32);

impl Pasid {
    /// The number that Linux gives to requests without a PASID (`IOMMU_NO_PASID`).
    pub const NO_PASID: Self = Self(0);

    /// Creates a PASID; `None` above 20 bits.
    #[inline]
    pub const fn new(raw: u32) -> Option<Self> {
        if raw >> 20 != 0 {
            return None;
        }
        Some(Self(raw))
    }

    /// Returns the number.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Pasid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Identifier of a domain: one I/O virtual address space and its table. The IOMMU tags IOTLB
/// entries with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DomainId(u16);

impl DomainId {
    /// Wraps a raw domain identifier.
    #[inline]
    pub const fn new(raw: u16) -> Self {
        Self(raw)
    }

    /// Returns the raw identifier.
    #[inline]
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl fmt::Display for DomainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    #[test]
    fn a_requester_id_has_a_bus_a_device_and_a_function() {
        for (bus, device, function, wanted) in [
            (0x12, 0x1f, 7, Some(0x12ff)),
            (0xff, 3, 5, Some(0xff1d)),
            (0, 32, 0, None),
            (0, 0, 8, None),
        ] {
            let id = RequesterId::from_parts(bus, device, function);
            assert_eq!(id.map(RequesterId::get), wanted);
            if let Some(id) = id {
                assert_eq!((id.bus(), id.devfn()), (bus, device << 3 | function));
            }
        }
    }

    #[test]
    fn a_requester_id_reads_as_in_lspci() {
        let id = RequesterId::from_parts(0x0a, 0x1f, 7).unwrap();
        assert_eq!(std::format!("{id}"), "0a:1f.7");
    }

    #[test]
    fn a_pasid_has_20_bits() {
        assert_eq!(Pasid::new((1 << 20) - 1).map(Pasid::get), Some(0xf_ffff));
        assert_eq!(Pasid::new(1 << 20), None);
    }

    #[test]
    fn a_pasid_and_a_domain_read_as_numbers() {
        let pasid = Pasid::new(0x1234).unwrap();
        let domain = DomainId::new(0x4321);
        assert_eq!(std::format!("{pasid}, {domain}"), "4660, 17185");
    }
}
