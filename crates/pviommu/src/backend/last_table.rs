//! The pointer to the second-stage table that was used last (section 4.6, "Cache of the pointer to
//! the last referenced page table").

use ringfence_types::PhysAddr;

use crate::wire::Gpa;

/// Finds the entry of a page without a walk, if its table is the one of the last walk.
pub trait LastTable {
    /// Whether an absent entry that is found here is filled where it stands, as the document does,
    /// or by a map of the table, which counts it.
    const FILLS_IN_PLACE: bool;

    /// Where the entry of `page` is, if this knows.
    fn entry(&self, page: Gpa) -> Option<PhysAddr>;

    /// A walk to `page` ended in the last-level table at `table`.
    fn learn(&mut self, page: Gpa, table: PhysAddr);

    /// A table was freed.
    fn freed(&mut self);
}

/// No pointer: every page is a walk.
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

/// A pointer, or none, by a choice made at run time.
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

/// Prefix and pointer.
#[derive(Debug, Clone, Copy, Default)]
struct Last(Option<(u64, PhysAddr)>);

impl Last {
    /// The entry for `page`, whose table is known by its address bits from `prefix` on.
    #[inline]
    fn entry(&self, page: Gpa, prefix: u32) -> Option<PhysAddr> {
        let (known, table) = self.0?;
        let index = (page.get() & ((1 << prefix) - 1)) >> 12;
        (page.get() >> prefix == known).then(|| table.wrapping_add(index * 8))
    }

    #[inline]
    fn learn(&mut self, page: Gpa, prefix: u32, table: PhysAddr) {
        self.0 = Some((page.get() >> prefix, table));
    }
}

/// As the document has it: bits 20 to 63 are the prefix, 12 to 19 the index, and the pointer
/// outlives its table (errata 13 and 17).
///
/// A last-level table has 512 entries, selected by bits 12 to 20. Of a page in the upper half of a
/// table this finds the entry of the page 1 MiB below. What it finds in a table that was freed is
/// whatever the frame holds now.
#[derive(Debug, Clone, Copy, Default)]
pub struct LastTableAsPublished(Last);

impl LastTable for LastTableAsPublished {
    const FILLS_IN_PLACE: bool = true;

    #[inline]
    fn entry(&self, page: Gpa) -> Option<PhysAddr> {
        self.0.entry(page, 20)
    }

    #[inline]
    fn learn(&mut self, page: Gpa, table: PhysAddr) {
        self.0.learn(page, 20, table);
    }

    #[inline]
    fn freed(&mut self) {}
}

/// The repaired one: bits 21 to 63 and 12 to 20, and the pointer is forgotten when a table is
/// freed.
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
