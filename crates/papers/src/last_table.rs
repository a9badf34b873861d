//! The pointer to the last used second-stage table as published (PVIOMMU paper, section 4.6, "Cache
//! of the pointer to the last referenced page table").

use ringfence_pviommu::backend::LastTable;
use ringfence_pviommu::wire::Gpa;
use ringfence_types::PhysAddr;

/// Lowest bit of the address prefix.
const PREFIX: u32 = 20;

/// Bits 20 to 63 are the prefix, 12 to 19 the index, and the pointer outlives its table (errata 13
/// and 17).
///
/// A leaf table has 512 entries, which bits 12 to 20 select. For a page in the upper half of a
/// table, this finds the entry of the page 1 MiB below. After a table is freed, this finds whatever
/// its frame holds now.
#[derive(Debug, Clone, Copy, Default)]
pub struct LastTableAsPublished(
    /// Address prefix and table.
    Option<(u64, PhysAddr)>,
);

impl LastTable for LastTableAsPublished {
    const FILLS_IN_PLACE: bool = true;

    #[inline]
    fn entry(&self, page: Gpa) -> Option<PhysAddr> {
        let (known, table) = self.0?;
        let index = (page.get() & ((1 << PREFIX) - 1)) >> 12;
        (page.get() >> PREFIX == known).then(|| table.wrapping_add(index * 8))
    }

    #[inline]
    fn learn(&mut self, page: Gpa, table: PhysAddr) {
        self.0 = Some((page.get() >> PREFIX, table));
    }

    #[inline]
    fn freed(&mut self) {}
}
