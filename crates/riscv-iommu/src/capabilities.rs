//! The features that a unit reports in `capabilities` (specification 1.0, section "IOMMU
//! capabilities").

use ringfence_pgtable::Levels;

/// Methods of interrupt generation (`IGS`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InterruptSupport {
    /// The unit sends messages only.
    Messages,
    /// The unit drives wires only.
    Wires,
    /// Messages or wires; `fctl.WSI` selects.
    Both,
    /// The reserved encoding.
    Reserved,
}

/// Decoded fields of the register `capabilities`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Capabilities {
    /// Version of the specification: the major version in the upper nibble.
    pub version: u8,
    /// First stage with three levels.
    pub sv39: bool,
    /// First stage with four levels.
    pub sv48: bool,
    /// First stage with five levels.
    pub sv57: bool,
    /// Page-based memory types in leaf entries.
    pub svpbmt: bool,
    /// Second stage with three levels.
    pub sv39x4: bool,
    /// Second stage with four levels.
    pub sv48x4: bool,
    /// Second stage with five levels.
    pub sv57x4: bool,
    /// MSI page tables, and with them device contexts of 64 bytes.
    pub msi_flat: bool,
    /// Memory-resident interrupt files.
    pub msi_mrif: bool,
    /// The unit can update accessed and dirty bits.
    pub amo_hwad: bool,
    /// Address translation services and page requests of PCI Express.
    pub ats: bool,
    /// Translation completions may carry guest-physical addresses.
    pub t2gpa: bool,
    /// Both byte orders.
    pub end: bool,
    /// Methods of interrupt generation.
    pub igs: InterruptSupport,
    /// Bits of a physical address.
    pub pas: u32,
    /// Process directories of one level.
    pub pd8: bool,
    /// Process directories of two levels.
    pub pd17: bool,
    /// Process directories of three levels.
    pub pd20: bool,
    /// Invalidation of non-leaf entries by address (extension "Non-leaf PTE Invalidation").
    pub nl: bool,
    /// Invalidation of address ranges (extension "Address Range Invalidation").
    pub s: bool,
}

impl Capabilities {
    /// Decodes the value of the register.
    pub const fn decode(raw: u64) -> Self {
        Self {
            version: raw as u8,
            sv39: bit(raw, 9),
            sv48: bit(raw, 10),
            sv57: bit(raw, 11),
            svpbmt: bit(raw, 15),
            sv39x4: bit(raw, 17),
            sv48x4: bit(raw, 18),
            sv57x4: bit(raw, 19),
            msi_flat: bit(raw, 22),
            msi_mrif: bit(raw, 23),
            amo_hwad: bit(raw, 24),
            ats: bit(raw, 25),
            t2gpa: bit(raw, 26),
            end: bit(raw, 27),
            igs: match raw >> 28 & 0b11 {
                0 => InterruptSupport::Messages,
                1 => InterruptSupport::Wires,
                2 => InterruptSupport::Both,
                _ => InterruptSupport::Reserved,
            },
            pas: (raw >> 32 & 0x3f) as u32,
            pd8: bit(raw, 38),
            pd17: bit(raw, 39),
            pd20: bit(raw, 40),
            nl: bit(raw, 42),
            s: bit(raw, 43),
        }
    }

    /// Returns true if the unit walks first-stage tables of this depth.
    pub const fn walks_first_stage(&self, levels: Levels) -> bool {
        match levels {
            Levels::Three => self.sv39,
            Levels::Four => self.sv48,
            Levels::Five => self.sv57,
        }
    }

    /// Returns true if the unit walks second-stage tables of this depth.
    pub const fn walks_second_stage(&self, levels: Levels) -> bool {
        match levels {
            Levels::Three => self.sv39x4,
            Levels::Four => self.sv48x4,
            Levels::Five => self.sv57x4,
        }
    }

    /// Returns the bits of a guest-physical address (MGPAW of section "MSI address mask and
    /// pattern").
    pub const fn guest_address_bits(&self) -> u32 {
        if self.sv57x4 {
            59
        } else if self.sv48x4 {
            50
        } else if self.sv39x4 {
            41
        } else {
            self.pas
        }
    }

    /// Returns the bits of a process id in the deepest process directory.
    pub const fn process_id_bits(&self) -> u32 {
        if self.pd20 {
            20
        } else if self.pd17 {
            17
        } else if self.pd8 {
            8
        } else {
            0
        }
    }
}

const fn bit(raw: u64, index: u32) -> bool {
    raw >> index & 1 != 0
}
