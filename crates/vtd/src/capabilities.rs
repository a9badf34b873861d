//! The capability registers, decoded (VT-d specification, sections 11.4.2 and 11.4.3).

use ringfence_pgtable::{Coherency, Levels};
use ringfence_types::{DomainId, PageSize};

/// Facts about a unit from CAP_REG and ECAP_REG.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// ND: domain-ids are below this number.
    pub domains: u32,
    /// RWBF: the CPU's stores to tables need a write buffer flush before the unit sees them.
    pub write_buffer_flush: bool,
    /// CM: the unit may cache entries that are not present.
    pub caching_mode: bool,
    /// SAGAW: second-stage tables of three, four and five levels are supported.
    pub second_stage_levels: [bool; 3],
    /// MGAW: width of the addresses that the unit accepts.
    pub address_width: u32,
    /// FRO: offset of the first fault recording register.
    pub fault_records_at: u64,
    /// NFR: number of fault recording registers.
    pub fault_records: u32,
    /// SSLPS: largest page of the second stage.
    pub second_stage_pages: PageSize,
    /// FS1GP: largest page of the first stage.
    pub first_stage_pages: PageSize,
    /// PSI: page-selective invalidation; the largest address mask (MAMV).
    pub page_selective: Option<u32>,
    /// FS5LP: first-stage tables of five levels are supported.
    pub first_stage_five_levels: bool,
    /// ESRTPS: taking over the root table pointer invalidates all caches.
    pub root_pointer_invalidates: bool,
    /// C: coherency of root, context and legacy page tables.
    pub coherency: Coherency,
    /// QI: queued invalidation.
    pub queue: bool,
    /// DT: device TLBs.
    pub device_tlb: bool,
    /// PT: requests may pass untranslated.
    pub pass_through: bool,
    /// SC: snooping can be forced, by PASID-table entries of the first stage and by
    /// [`Snoop::Forced`](ringfence_pgtable::Snoop::Forced) in leaves of the second.
    pub snoop_control: bool,
    /// IRO: offset of the IOTLB registers.
    pub iotlb_registers_at: u64,
    /// PASID: requests may carry a PASID; its number of bits (PSS).
    pub pasid_bits: Option<u32>,
    /// SMTS: scalable mode.
    pub scalable_mode: bool,
    /// SSTS: second stage in scalable mode.
    pub scalable_second_stage: bool,
    /// FSTS: first stage in scalable mode.
    pub scalable_first_stage: bool,
    /// SMPWCS: coherency of page tables in scalable mode.
    pub scalable_coherency: Coherency,
}

const fn bit(word: u64, position: u32) -> bool {
    word >> position & 1 != 0
}

/// Returns the field of `width` bits, less than 32, from bit `position`.
const fn field(word: u64, position: u32, width: u32) -> u32 {
    (word >> position) as u32 & ((1 << width) - 1)
}

const fn coherency(is_coherent: bool) -> Coherency {
    if is_coherent {
        Coherency::Coherent
    } else {
        Coherency::NonCoherent
    }
}

impl Capabilities {
    /// Decodes CAP_REG and ECAP_REG.
    pub const fn decode(cap: u64, ecap: u64) -> Self {
        Self {
            // 2^(4 + 2 ND); the value 7 is reserved.
            domains: match field(cap, 0, 3) {
                nd @ 0..=5 => 1 << (4 + 2 * nd),
                _ => 1 << 16,
            },
            write_buffer_flush: bit(cap, 4),
            caching_mode: bit(cap, 7),
            second_stage_levels: [bit(cap, 9), bit(cap, 10), bit(cap, 11)],
            address_width: field(cap, 16, 6) + 1,
            fault_records_at: field(cap, 24, 10) as u64 * 16,
            fault_records: field(cap, 40, 8) + 1,
            second_stage_pages: match field(cap, 34, 2) {
                0b00 | 0b10 => PageSize::Size4K,
                0b01 => PageSize::Size2M,
                _ => PageSize::Size1G,
            },
            first_stage_pages: if bit(cap, 56) {
                PageSize::Size1G
            } else {
                PageSize::Size2M
            },
            page_selective: if bit(cap, 39) {
                Some(field(cap, 48, 6))
            } else {
                None
            },
            first_stage_five_levels: bit(cap, 60),
            root_pointer_invalidates: bit(cap, 63),
            coherency: coherency(bit(ecap, 0)),
            queue: bit(ecap, 1),
            device_tlb: bit(ecap, 2),
            pass_through: bit(ecap, 6),
            snoop_control: bit(ecap, 7),
            iotlb_registers_at: field(ecap, 8, 10) as u64 * 16,
            pasid_bits: if bit(ecap, 40) {
                Some(field(ecap, 35, 5) + 1)
            } else {
                None
            },
            scalable_mode: bit(ecap, 43),
            scalable_second_stage: bit(ecap, 46),
            scalable_first_stage: bit(ecap, 47),
            scalable_coherency: coherency(bit(ecap, 48)),
        }
    }

    /// Returns the fewest levels of a second-stage table that translate addresses of `width` bits;
    /// `None` if the unit walks no such table (SAGAW).
    pub fn second_stage_for(&self, width: u32) -> Option<Levels> {
        let mut supported = ALL_LEVELS
            .into_iter()
            .filter(|levels| self.walks_second_stage(*levels));
        supported.find(|levels| levels.width() >= width)
    }

    /// Returns the most levels of a second-stage table; `None` if the unit walks none.
    pub(crate) fn most_levels(&self) -> Option<Levels> {
        let mut supported = ALL_LEVELS.into_iter().rev();
        supported.find(|levels| self.walks_second_stage(*levels))
    }

    /// Returns true if the unit walks second-stage tables of this depth (SAGAW).
    pub const fn walks_second_stage(&self, levels: Levels) -> bool {
        let [three, four, five] = self.second_stage_levels;
        match levels {
            Levels::Three => three,
            Levels::Four => four,
            Levels::Five => five,
        }
    }

    /// Returns true if the unit walks first-stage tables of this depth (FSTS, FS5LP).
    pub const fn walks_first_stage(&self, levels: Levels) -> bool {
        self.scalable_first_stage
            && match levels {
                Levels::Three => false,
                Levels::Four => true,
                Levels::Five => self.first_stage_five_levels,
            }
    }

    /// Returns true if the unit accepts `domain`. In caching mode, entries that are not present are
    /// cached with domain-id 0, which software therefore must not use.
    pub const fn accepts(&self, domain: DomainId) -> bool {
        (domain.get() as u32) < self.domains && !(self.caching_mode && domain.get() == 0)
    }
}

const ALL_LEVELS: [Levels; 3] = [Levels::Three, Levels::Four, Levels::Five];

#[cfg(test)]
mod tests {
    use super::*;

    /// The registers of QEMU's unit in its three modes.
    #[test]
    fn golden_registers() {
        let legacy = Capabilities::decode(0x80d2_008c_222f_0606, 0xf0_0f4a);
        assert_eq!(
            legacy,
            Capabilities {
                domains: 1 << 16,
                write_buffer_flush: false,
                caching_mode: false,
                second_stage_levels: [true, true, false],
                address_width: 48,
                fault_records_at: 0x220,
                fault_records: 1,
                second_stage_pages: PageSize::Size1G,
                first_stage_pages: PageSize::Size2M,
                page_selective: Some(18),
                first_stage_five_levels: false,
                root_pointer_invalidates: true,
                coherency: Coherency::NonCoherent,
                queue: true,
                device_tlb: false,
                pass_through: true,
                snoop_control: false,
                iotlb_registers_at: 0xf0,
                pasid_bits: None,
                scalable_mode: false,
                scalable_second_stage: false,
                scalable_first_stage: false,
                scalable_coherency: Coherency::NonCoherent,
            }
        );
        let second = Capabilities::decode(0x80d2_008c_222f_0606, 0x4800_80f0_0f4a);
        assert!(second.scalable_mode && second.scalable_second_stage);
        assert!(!second.scalable_first_stage);
        let first = Capabilities::decode(0x81d2_008c_222f_0686, 0x8938_00f0_0f4a);
        assert!(first.scalable_first_stage && first.caching_mode);
        assert_eq!(first.first_stage_pages, PageSize::Size1G);
        assert_eq!(first.pasid_bits, Some(8));
        assert!(!first.accepts(DomainId::new(0)) && first.accepts(DomainId::new(0xffff)));
    }

    #[test]
    fn each_bit_is_its_own() {
        let none = Capabilities::decode(0, 0);
        assert_eq!(none.domains, 16);
        assert_eq!(none.second_stage_for(30), None);
        let cap = |bits: u64| Capabilities::decode(bits, 0);
        let ecap = |bits: u64| Capabilities::decode(0, bits);
        assert!(cap(1 << 4).write_buffer_flush);
        assert!(cap(1 << 60).first_stage_five_levels);
        assert_eq!(cap(0x2a << 40).fault_records, 43);
        assert_eq!(cap(0x9 << 48 | 1 << 39).page_selective, Some(9));
        assert_eq!(cap(1 << 34).second_stage_pages, PageSize::Size2M);
        assert_eq!(cap(0b010).domains, 256);
        assert_eq!(ecap(1).coherency, Coherency::Coherent);
        assert!(ecap(1 << 2).device_tlb);
        assert_eq!(ecap(1 << 40 | 0x13 << 35).pasid_bits, Some(20));
        assert_eq!(ecap(1 << 48).scalable_coherency, Coherency::Coherent);
        for (bit, levels) in [(9, Levels::Three), (10, Levels::Four), (11, Levels::Five)] {
            let unit = cap(1 << bit);
            for each in [Levels::Three, Levels::Four, Levels::Five] {
                assert_eq!(unit.walks_second_stage(each), each == levels, "{bit}");
            }
            assert_eq!(unit.most_levels(), Some(levels));
        }
        assert_eq!(cap(1 << 56).first_stage_pages, PageSize::Size1G);
        assert!(cap(1 << 63).root_pointer_invalidates);
        assert!(ecap(1 << 1).queue);
        assert!(ecap(1 << 6).pass_through);
        assert!(ecap(1 << 7).snoop_control && !ecap(!(1 << 7)).snoop_control);
        assert!(ecap(1 << 43).scalable_mode);
        assert!(ecap(1 << 46).scalable_second_stage);
        assert!(ecap(1 << 47).scalable_first_stage);
        let widths = Capabilities::decode(0b10100 << 8, 0);
        assert_eq!(widths.second_stage_for(39), Some(Levels::Four));
        assert_eq!(widths.second_stage_for(49), None);
    }
}
