//! Commands (specification section 2.4 "Commands"), under the names of the specification.

use ringfence_types::{DomainId, PfnBlock, PhysAddr, RequesterId};

const OPCODE_SHIFT: u32 = 60;
const COMPLETION_WAIT: u64 = 0x1 << OPCODE_SHIFT;
const INVALIDATE_DEVTAB_ENTRY: u64 = 0x2 << OPCODE_SHIFT;
const INVALIDATE_IOMMU_PAGES: u64 = 0x3 << OPCODE_SHIFT;
const INVALIDATE_IOMMU_ALL: u64 = 0x8 << OPCODE_SHIFT;

/// s of COMPLETION_WAIT: store the data to the address.
const STORE: u64 = 1;
/// f of COMPLETION_WAIT: later commands wait too.
const FLUSH: u64 = 1 << 2;
/// Address bits 51:3 of COMPLETION_WAIT.
const STORE_ADDRESS: u64 = 0x000f_ffff_ffff_fff8;

const DOMAIN_SHIFT: u32 = 32;
/// S of INVALIDATE_IOMMU_PAGES: the address gives the size, by its lowest zero from bit 12 up.
const S: u64 = 1;
/// PDE: removes cached directory entries too.
const PDE: u64 = 1 << 1;
/// GN: the address is one of the guest table that the PASID selects.
const GN: u64 = 1 << 2;
/// The address that covers all pages.
const ALL_PAGES: u64 = 0x7fff_ffff_ffff_f000;

/// A command: two words, the opcode in the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Command(pub(crate) [u64; 2]);

/// The tables whose translations a command invalidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Translations {
    /// Those of the host table.
    Host,
    /// Those of the guest table of PASID 0, which requests without a PASID use (DTE\[GIOV\]).
    Guest,
}

/// The kinds of cached entries that a command removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entries {
    Pages,
    PagesAndDirectories,
}

impl Command {
    /// Stores `data` at `at` when all earlier commands have completed. The command holds bits 51:3
    /// of `at`. The others are zero: `at` is in a frame of the unit, below 2^52, and a multiple of
    /// 8.
    pub(crate) const fn completion_wait(at: PhysAddr, data: u64) -> Self {
        Self([COMPLETION_WAIT | STORE | at.get() & STORE_ADDRESS, data])
    }

    /// Delays all later commands until the earlier ones have completed.
    pub(crate) const fn barrier() -> Self {
        Self([COMPLETION_WAIT | FLUSH, 0])
    }

    pub(crate) const fn invalidate_devtab_entry(device: RequesterId) -> Self {
        Self([INVALIDATE_DEVTAB_ENTRY | device.get() as u64, 0])
    }

    pub(crate) const fn invalidate_iommu_all() -> Self {
        Self([INVALIDATE_IOMMU_ALL, 0])
    }

    /// Invalidates the translations of `block` in `domain`.
    pub(crate) const fn invalidate_iommu_pages(
        domain: DomainId,
        translations: Translations,
        block: PfnBlock,
        entries: Entries,
    ) -> Self {
        let guest = match translations {
            Translations::Host => 0,
            Translations::Guest => GN,
        };
        let directories = match entries {
            Entries::Pages => 0,
            Entries::PagesAndDirectories => PDE,
        };
        Self([
            INVALIDATE_IOMMU_PAGES | (domain.get() as u64) << DOMAIN_SHIFT,
            pages(block) | guest | directories,
        ])
    }
}

/// Returns the address field and S of INVALIDATE_IOMMU_PAGES. A block of 2^52 bytes or more widens
/// to all pages.
const fn pages(block: PfnBlock) -> u64 {
    let Some(below) = block.order().checked_sub(1) else {
        return block.first().get() << 12;
    };
    if block.order() >= 40 {
        return ALL_PAGES | S;
    }
    // All bits below the highest of the block are ones, and that one is zero.
    let size = (1_u64 << below).wrapping_sub(1);
    (block.first().get() | size) << 12 | S
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_types::{Pfn, PfnRange};

    fn range(lo: u64, hi: u64) -> PfnRange {
        PfnRange::inclusive(Pfn::new(lo), Pfn::new(hi)).unwrap()
    }

    #[test]
    fn golden_words() {
        let at = PhysAddr::new(0xf_1234_5678_9ab8);
        let highest = PhysAddr::new(0xf_ffff_ffff_fff8);
        let device = RequesterId::new(0xabcd);
        for (command, words) in [
            (
                Command::completion_wait(at, 0x1122_3344_5566_7788),
                [0x100f_1234_5678_9ab9, 0x1122_3344_5566_7788],
            ),
            (
                Command::completion_wait(highest, 0),
                [0x100f_ffff_ffff_fff9, 0],
            ),
            (Command::barrier(), [0x1000_0000_0000_0004, 0]),
            (
                Command::invalidate_devtab_entry(device),
                [0x2000_0000_0000_abcd, 0],
            ),
            (Command::invalidate_iommu_all(), [0x8000_0000_0000_0000, 0]),
        ] {
            assert_eq!(command.0, words, "{command:x?}");
        }
    }

    /// Table 14 of the specification, "Example Page Size Encodings", has the encoding of sizes.
    #[test]
    fn golden_words_of_page_invalidations() {
        use Entries::{Pages, PagesAndDirectories};
        use Translations::{Guest, Host};
        for (lo, hi, translations, entries, second) in [
            (0x12345, 0x12345, Host, Pages, 0x1234_5000),
            (0x12345, 0x12345, Host, PagesAndDirectories, 0x1234_5002),
            (0x12345, 0x12345, Guest, Pages, 0x1234_5004),
            // 8 KiB: bit 12 is zero. 16 KiB: bit 12 is one, bit 13 is zero.
            (0x12344, 0x12345, Host, Pages, 0x1234_4001),
            (0x12344, 0x12347, Host, Pages, 0x1234_5001),
            // 2 MiB: bits 12 to 19 are ones, bit 20 is zero.
            (0x40000, 0x401ff, Host, PagesAndDirectories, 0x400f_f003),
            (0x40000, 0x401ff, Guest, PagesAndDirectories, 0x400f_f007),
            // 1 GiB.
            (0x40000, 0x7ffff, Host, Pages, 0x5fff_f001),
            // The largest size that `pages` does not widen, and the next one.
            (0, (1 << 39) - 1, Host, Pages, 0x3_ffff_ffff_f001),
            (0, (1 << 40) - 1, Host, Pages, 0x7fff_ffff_ffff_f001),
            (0, (1 << 52) - 1, Guest, Pages, 0x7fff_ffff_ffff_f005),
        ] {
            let (block, None) = range(lo, hi).cover() else {
                panic!("{lo:#x} to {hi:#x} is one block");
            };
            let domain = DomainId::new(0x8765);
            let command = Command::invalidate_iommu_pages(domain, translations, block, entries);
            let words = [0x3000_8765_0000_0000, second];
            assert_eq!(command.0, words, "{lo:#x} to {hi:#x}");
        }
    }
}
