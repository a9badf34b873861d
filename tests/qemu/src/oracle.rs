//! The pages that each domain maps, kept apart from any page table.

use std::collections::BTreeMap;

use ringfence_types::{Access, Iova, PageSize, Permissions, Pfn, PfnRange, PhysAddr};

const PAGE: u64 = PageSize::Size4K.bytes();

/// Pages that one map granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) range: PfnRange,
    pub(crate) pa: PhysAddr,
    pub(crate) permissions: Permissions,
}

impl Mapping {
    pub(crate) fn first_byte(&self) -> u64 {
        self.range.lo().iova().get()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.range.pages() * PAGE
    }
}

/// The mappings of one domain.
#[derive(Debug, Default)]
pub(crate) struct GrantedPages(BTreeMap<Pfn, Mapping>);

impl GrantedPages {
    pub(crate) fn insert(&mut self, mapping: Mapping) {
        assert!(self.is_free(&mapping.range), "mapped twice: {mapping:x?}");
        self.0.insert(mapping.range.lo(), mapping);
    }

    pub(crate) fn remove(&mut self, mapping: &Mapping) {
        let removed = self.0.remove(&mapping.range.lo());
        assert_eq!(removed, Some(*mapping), "not mapped");
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn nth(&self, index: usize) -> Option<Mapping> {
        self.0.values().nth(index).copied()
    }

    /// Returns true if no page of `range` is granted.
    pub(crate) fn is_free(&self, range: &PfnRange) -> bool {
        let below = self.0.range(..=range.hi()).next_back();
        below.is_none_or(|(_, mapping)| !mapping.range.overlaps(range))
    }

    /// Returns the mapping that holds the page of `iova`.
    pub(crate) fn find(&self, iova: Iova) -> Option<Mapping> {
        let page = Pfn::containing(iova);
        let (_, mapping) = self.0.range(..=page).next_back()?;
        (page <= mapping.range.hi()).then_some(*mapping)
    }

    /// Returns the physical address of the byte at `iova`; `None` if `access` is not granted.
    pub(crate) fn translate(&self, iova: Iova, access: Access) -> Option<PhysAddr> {
        let mapping = self.find(iova)?;
        if !mapping.permissions.allows(access) {
            return None;
        }
        let offset = iova.offset_from(&mapping.range.lo().iova())?;
        Some(mapping.pa.wrapping_add(offset))
    }
}

/// The parts of an access, one per page: first address and number of bytes.
pub(crate) fn pages_of(iova: Iova, bytes: u64) -> impl Iterator<Item = (Iova, u64)> {
    let mut at = iova;
    let mut left = bytes;
    std::iter::from_fn(move || {
        let part = left.min(PAGE - at.offset_in(PAGE));
        let found = (part != 0).then_some((at, part));
        at = at.wrapping_add(part);
        left -= part;
        found
    })
}
