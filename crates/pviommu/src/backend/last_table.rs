//! The pointer to the last used second-stage table (PVIOMMU paper, section 4.6, "Cache of the
//! pointer to the last referenced page table").

use ringfence_types::PhysAddr;

use crate::wire::Gpa;

/// Finds the entry of a page without a walk if the last walk ended in the same table.
pub trait LastTable {
    /// True if an absent entry that is found here is filled in place, as in the PVIOMMU paper.
    /// False if a map of the table fills it and counts it.
    const FILLS_IN_PLACE: bool;

    /// Returns the address of the entry of `page`; `None` if its table is not the last one.
    fn entry(&self, page: Gpa) -> Option<PhysAddr>;

    /// Records that a walk to `page` ended in the leaf table at `table`.
    fn learn(&mut self, page: Gpa, table: PhysAddr);

    /// Must be called when a table is freed.
    fn freed(&mut self);
}

/// Disables the pointer: every lookup is a walk.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoLastTable;

impl LastTable for NoLastTable {
    const FILLS_IN_PLACE: bool = false;

    #[inline]
    fn entry(&self, _page: Gpa) -> Option<PhysAddr> {
        None
    }

    #[inline]
    fn learn(&mut self, _page: Gpa, _table: PhysAddr) {}

    #[inline]
    fn freed(&mut self) {}
}

/// Enables or disables the pointer at run time.
impl<K: LastTable> LastTable for Option<K> {
    const FILLS_IN_PLACE: bool = K::FILLS_IN_PLACE;

    #[inline]
    fn entry(&self, page: Gpa) -> Option<PhysAddr> {
        self.as_ref()?.entry(page)
    }

    #[inline]
    fn learn(&mut self, page: Gpa, table: PhysAddr) {
        if let Some(last) = self {
            last.learn(page, table);
        }
    }

    #[inline]
    fn freed(&mut self) {
        if let Some(last) = self {
            last.freed();
        }
    }
}

/// Address prefix and table.
#[derive(Debug, Clone, Copy, Default)]
struct Last(Option<(u64, PhysAddr)>);

impl Last {
    /// Returns the address of the entry of `page`. `prefix` is the lowest bit of the prefix.
    #[inline]
    fn entry(&self, page: Gpa, prefix: u32) -> Option<PhysAddr> {
        let (cached, table) = self.0?;
        let index = (page.get() & ((1 << prefix) - 1)) >> 12;
        (page.get() >> prefix == cached).then(|| table.wrapping_add(index * 8))
    }

    #[inline]
    fn learn(&mut self, page: Gpa, prefix: u32, table: PhysAddr) {
        self.0 = Some((page.get() >> prefix, table));
    }
}

/// The fixed pointer: bits 21 to 63 are the prefix, 12 to 20 the index, and freeing a table
/// clears it.
#[derive(Debug, Clone, Copy, Default)]
pub struct FixedLastTable(Last);

impl LastTable for FixedLastTable {
    const FILLS_IN_PLACE: bool = false;

    #[inline]
    fn entry(&self, page: Gpa) -> Option<PhysAddr> {
        self.0.entry(page, 21)
    }

    #[inline]
    fn learn(&mut self, page: Gpa, table: PhysAddr) {
        self.0.learn(page, 21, table);
    }

    #[inline]
    fn freed(&mut self) {
        self.0 = Last(None);
    }
}
