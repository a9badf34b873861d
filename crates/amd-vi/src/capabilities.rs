//! The features of a unit: the capability header in its configuration space and its Extended
//! Feature Register (specification section "MMIO Registers").

use ringfence_pgtable::{Level, Levels};

/// Decoded fields of the capability header and of the Extended Feature Register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Capabilities {
    /// IotlbSup: the unit answers translation requests of devices (ATS). This driver blocks them.
    pub iotlb_sup: bool,
    /// NpCache: the unit may cache entries that are not present.
    pub np_cache: bool,
    /// EFRSup: the Extended Feature Register exists.
    pub efr_sup: bool,
    /// HATS: most levels of a host table, 0 if the unit walks none.
    pub host_levels: u8,
    /// GTSup: the unit walks guest tables.
    pub gt_sup: bool,
    /// GATS: most levels of a guest table, 0 without GTSup.
    pub guest_levels: u8,
    /// GLXSup: most levels of a GCR3 table, 0 without GTSup.
    pub gcr3_levels: u8,
    /// GIoSup: requests without a PASID can use the guest table of PASID 0 (GIOV).
    pub gio_sup: bool,
    /// IASup: the unit has the command INVALIDATE_IOMMU_ALL.
    pub ia_sup: bool,
    /// PASmax: bits of a PASID, 0 without GTSup.
    pub pasid_bits: u8,
}

impl Capabilities {
    /// Decodes dword 0 of the capability block and the value of the Extended Feature Register. A
    /// unit without EFRSup has the features of a register that is zero.
    pub const fn decode(header: u32, feature: u64) -> Self {
        let efr_sup = header >> 27 & 1 != 0;
        let feature = if efr_sup { feature } else { 0 };
        let gt_sup = bit(feature, 4);
        Self {
            iotlb_sup: header >> 24 & 1 != 0,
            np_cache: header >> 26 & 1 != 0,
            efr_sup,
            host_levels: levels(feature >> 10),
            gt_sup,
            guest_levels: if gt_sup { levels(feature >> 12) } else { 0 },
            gcr3_levels: match (gt_sup, feature >> 14 & 0b11) {
                (false, _) | (_, 0b11) => 0,
                (true, levels) => levels as u8 + 1,
            },
            gio_sup: gt_sup && bit(feature, 48),
            ia_sup: bit(feature, 6),
            pasid_bits: if gt_sup {
                (feature >> 32 & 0x1f) as u8 + 1
            } else {
                0
            },
        }
    }

    /// Returns true if the unit walks host tables of that depth.
    pub const fn walks_host(&self, levels: Level) -> bool {
        levels.get() <= self.host_levels
    }

    /// Returns true if the unit walks guest tables of that depth for requests without a PASID.
    pub const fn walks_guest(&self, levels: Levels) -> bool {
        let depth = match levels {
            // The processor's format has no table of three levels.
            Levels::Three => return false,
            Levels::Four => 4,
            Levels::Five => 5,
        };
        self.gio_sup && self.gcr3_levels != 0 && depth <= self.guest_levels
    }
}

/// HATS and GATS: 00b for four levels, 01b for five, 10b for six.
const fn levels(field: u64) -> u8 {
    match field & 0b11 {
        0b00 => 4,
        0b01 => 5,
        0b10 => 6,
        _ => 0,
    }
}

const fn bit(raw: u64, index: u32) -> bool {
    raw >> index & 1 != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Capabilities = Capabilities {
        iotlb_sup: false,
        np_cache: false,
        efr_sup: false,
        host_levels: 4,
        gt_sup: false,
        guest_levels: 0,
        gcr3_levels: 0,
        gio_sup: false,
        ia_sup: false,
        pasid_bits: 0,
    };

    #[test]
    fn golden_words() {
        let decode = Capabilities::decode;
        let present = Capabilities {
            efr_sup: true,
            ..NONE
        };
        // Capability id 0Fh, type 011b; then each bit of the header.
        assert_eq!(decode(0x0003_000f, u64::MAX), NONE);
        assert_eq!(decode(0x0803_000f, 0), present);
        let np_cache = Capabilities {
            np_cache: true,
            ..NONE
        };
        assert_eq!(decode(0x0403_000f, 0), np_cache);
        let iotlb_sup = Capabilities {
            iotlb_sup: true,
            ..NONE
        };
        assert_eq!(decode(0x0103_000f, 0), iotlb_sup);
        // HATS, bits 11:10.
        for (feature, host_levels) in [(0x0, 4), (0x400, 5), (0x800, 6), (0xc00, 0)] {
            let expected = Capabilities {
                host_levels,
                ..present
            };
            assert_eq!(decode(0x0803_000f, feature), expected, "{feature:#x}");
        }
        // IASup, bit 6.
        let ia_sup = Capabilities {
            ia_sup: true,
            ..present
        };
        assert_eq!(decode(0x0803_000f, 0x40), ia_sup);
    }

    #[test]
    fn golden_words_of_guest_translation() {
        let decode = |feature| Capabilities::decode(0x0803_000f, feature);
        // The fields mean nothing without GTSup, bit 4.
        assert_eq!(decode(0x0001_001f_0000_f000).guest_levels, 0);
        // GTSup, GATS = 01b, GLXSup = 10b, PASmax = 0Fh, GIoSup.
        let guest = decode(0x0001_000f_0000_9010);
        let expected = Capabilities {
            efr_sup: true,
            gt_sup: true,
            guest_levels: 5,
            gcr3_levels: 3,
            gio_sup: true,
            pasid_bits: 16,
            ..NONE
        };
        assert_eq!(guest, expected);
        assert!(!guest.walks_guest(Levels::Three));
        assert!(guest.walks_guest(Levels::Four) && guest.walks_guest(Levels::Five));
        // GATS = 00b; then without GIoSup.
        assert!(!decode(0x0001_000f_0000_8010).walks_guest(Levels::Five));
        assert!(!decode(0x0000_000f_0000_9010).walks_guest(Levels::Four));
    }
}
