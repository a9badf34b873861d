//! The device table entry (specification section 2.2.2.1 "Device Table Entry Format"), under the
//! names of the specification.

use ringfence_pgtable::{Level, Levels};
use ringfence_types::{DomainId, PhysAddr};

/// Words of an entry.
pub(crate) const WORDS: usize = 4;

/// V: the entry is valid. Without it, the unit forwards accesses untranslated.
const V: u64 = 1;
/// TV: the fields of translation are valid.
const TV: u64 = 1 << 1;
/// Mode, bits 11:9: levels of the host table, 0 for none.
const MODE_SHIFT: u32 = 9;
/// Host page table root pointer, bits 51:12.
pub(crate) const POINTER: u64 = 0x000f_ffff_ffff_f000;
/// GIOV: requests without a PASID use the guest table of PASID 0.
const GIOV: u64 = 1 << 54;
/// GV: the guest fields are valid.
const GV: u64 = 1 << 55;
/// GCR3 table root pointer: bits 14:12 in word 0; bits 30:15 and 51:31 in word 1. GLX, bits 57:56
/// of word 0, is 0 for a GCR3 table of one level.
const GCR3_LOW: u64 = 0x7 << 12;
const GCR3_LOW_SHIFT: u32 = 58 - 12;
const GCR3_MIDDLE: u64 = 0xffff << 15;
const GCR3_MIDDLE_SHIFT: u32 = 16 - 15;
const GCR3_HIGH: u64 = 0x1f_ffff << 31;
const GCR3_HIGH_SHIFT: u32 = 43 - 31;
/// IR and IW: reads and writes are allowed.
const IR_IW: u64 = 0b11 << 61;
/// DomainID, bits 15:0 of word 1.
const DOMAIN: u64 = 0xffff;
/// GuestPagingMode, bits 55:54 of word 2: 1 for five levels.
const FIVE_GUEST_LEVELS: u64 = 1 << 54;
/// IV: the fields of interrupts are valid. With IntCtl = 00b, fixed and arbitrated interrupts are
/// aborted; the bits that pass other interrupts are zero.
const IV: u64 = 1;

/// The unit passes all accesses through: Mode is 0, IR and IW are set.
const PASS_THROUGH: u64 = V | TV | IR_IW;

/// Interrupts that a device sends (DTE\[IV, IntCtl\]). The driver has no interrupt remapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Interrupts {
    /// The unit forwards the interrupts of all devices.
    Pass,
    /// The unit aborts the interrupts of all devices, also those of I/O APICs.
    Abort,
}

/// The table that translates a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// A host table ("v1").
    Host {
        /// Physical address of the root.
        root: PhysAddr,
        /// Depth of the table (Mode).
        levels: Level,
    },
    /// A guest table ("v2") for requests without a PASID. Its addresses are physical: no host table
    /// follows.
    Guest {
        /// Physical address of the root.
        root: PhysAddr,
        /// Depth of the table: four or five levels.
        levels: Levels,
    },
}

impl Stage {
    /// Returns the physical address of the root.
    pub const fn root(&self) -> PhysAddr {
        match self {
            Self::Host { root, .. } | Self::Guest { root, .. } => *root,
        }
    }
}

/// The four words of an entry, the word with V first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceEntry(pub(crate) [u64; WORDS]);

impl DeviceEntry {
    /// An entry that stops all accesses: IR and IW are zero, and `empty` is a table of one level
    /// without entries.
    ///
    /// Mode = 0 with IR = IW = 0 would do without a table, but QEMU passes the accesses of an entry
    /// with Mode = 0 through, whatever IR and IW are.
    pub(crate) const fn blocked(empty: PhysAddr, interrupts: Interrupts) -> Self {
        let first = V | TV | 1 << MODE_SHIFT | empty.get() & POINTER;
        Self([first, 0, interrupt_word(interrupts), 0])
    }

    pub(crate) const fn pass_through(interrupts: Interrupts) -> Self {
        Self([PASS_THROUGH, 0, interrupt_word(interrupts), 0])
    }

    pub(crate) const fn host(
        domain: DomainId,
        root: PhysAddr,
        levels: Level,
        interrupts: Interrupts,
    ) -> Self {
        let mode = (levels.get() as u64) << MODE_SHIFT;
        Self([
            V | TV | mode | root.get() & POINTER | IR_IW,
            domain.get() as u64,
            interrupt_word(interrupts),
            0,
        ])
    }

    /// An entry whose requests use PASID 0 of the GCR3 table of one level at `gcr3`.
    pub(crate) const fn guest(
        domain: DomainId,
        gcr3: PhysAddr,
        levels: Levels,
        interrupts: Interrupts,
    ) -> Self {
        let at = gcr3.get();
        let depth = match levels {
            // `walks_guest` refuses three levels.
            Levels::Three | Levels::Four => 0,
            Levels::Five => FIVE_GUEST_LEVELS,
        };
        Self([
            V | TV | GIOV | GV | (at & GCR3_LOW) << GCR3_LOW_SHIFT | IR_IW,
            domain.get() as u64
                | (at & GCR3_MIDDLE) << GCR3_MIDDLE_SHIFT
                | (at & GCR3_HIGH) << GCR3_HIGH_SHIFT,
            interrupt_word(interrupts) | depth,
            0,
        ])
    }

    /// Returns true if no access is allowed.
    pub(crate) const fn is_blocked(&self) -> bool {
        self.0[0] & IR_IW == 0
    }

    pub(crate) const fn domain(&self) -> DomainId {
        DomainId::new((self.0[1] & DOMAIN) as u16)
    }

    /// Returns the address of the GCR3 table; `None` if the entry has none.
    pub(crate) const fn gcr3(&self) -> Option<PhysAddr> {
        let [first, second, ..] = self.0;
        if first & GV == 0 {
            return None;
        }
        let at = first >> GCR3_LOW_SHIFT & GCR3_LOW
            | second >> GCR3_MIDDLE_SHIFT & GCR3_MIDDLE
            | second >> GCR3_HIGH_SHIFT & GCR3_HIGH;
        Some(PhysAddr::new(at))
    }

    /// Returns true if both entries have the same translation, given that they have the same domain
    /// and that their GCR3 tables point to the same guest table. Does not compare the interrupt
    /// fields.
    pub(crate) const fn translates_as(&self, other: &Self) -> bool {
        let [first, _, third, _] = self.0;
        let [other_first, _, other_third, _] = other.0;
        // The GCR3 tables of two devices lie at different addresses.
        let gcr3 = if first & GV == 0 {
            0
        } else {
            GCR3_LOW << GCR3_LOW_SHIFT
        };
        (first ^ other_first) & !gcr3 == 0 && (third ^ other_third) & FIVE_GUEST_LEVELS == 0
    }
}

const fn interrupt_word(interrupts: Interrupts) -> u64 {
    match interrupts {
        Interrupts::Pass => 0,
        Interrupts::Abort => IV,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_words() {
        let (domain, root) = (DomainId::new(0xbeef), PhysAddr::new(0xf_1234_5678_9000));
        let level = |raw| Level::new(raw).unwrap();
        use Interrupts::{Abort, Pass};
        for (entry, words) in [
            (
                DeviceEntry::blocked(root, Pass),
                [0xf_1234_5678_9203, 0, 0, 0],
            ),
            (
                DeviceEntry::blocked(root, Abort),
                [0xf_1234_5678_9203, 0, 1, 0],
            ),
            (
                DeviceEntry::pass_through(Pass),
                [0x6000_0000_0000_0003, 0, 0, 0],
            ),
            (
                DeviceEntry::host(domain, root, level(1), Abort),
                [0x600f_1234_5678_9203, 0xbeef, 1, 0],
            ),
            (
                DeviceEntry::host(domain, root, level(4), Pass),
                [0x600f_1234_5678_9803, 0xbeef, 0, 0],
            ),
            (
                DeviceEntry::host(domain, root, level(6), Pass),
                [0x600f_1234_5678_9c03, 0xbeef, 0, 0],
            ),
            // Bits 14:12 of the pointer, alone; then 30:15; then 51:31.
            (
                DeviceEntry::guest(domain, PhysAddr::new(0x5000), Levels::Four, Pass),
                [0x74c0_0000_0000_0003, 0xbeef, 0, 0],
            ),
            (
                DeviceEntry::guest(domain, PhysAddr::new(0x2aaa_8000), Levels::Five, Pass),
                [0x60c0_0000_0000_0003, 0x5555_beef, 1 << 54, 0],
            ),
            (
                DeviceEntry::guest(
                    domain,
                    PhysAddr::new(0xa_aaaa_8000_0000),
                    Levels::Four,
                    Abort,
                ),
                [0x60c0_0000_0000_0003, 0xaaaa_a800_0000_beef, 1, 0],
            ),
        ] {
            assert_eq!(entry.0, words, "{words:x?}");
            assert_eq!(entry.is_blocked(), words[0] == 0xf_1234_5678_9203);
        }
    }

    #[test]
    fn the_gcr3_pointer_of_an_entry_is_found_again() {
        let domain = DomainId::new(0xffff);
        for at in [0x1000, 0x5000, 0x2aaa_8000, 0xa_aaaa_8000_0000, POINTER] {
            let at = PhysAddr::new(at);
            let entry = DeviceEntry::guest(domain, at, Levels::Four, Interrupts::Abort);
            assert_eq!(entry.gcr3(), Some(at));
            assert_eq!(entry.domain(), domain);
        }
        let root = PhysAddr::new(POINTER);
        let host = DeviceEntry::host(domain, root, Level::LEAF, Interrupts::Pass);
        assert_eq!((host.gcr3(), host.domain()), (None, domain));
    }
}
