//! The IOTLB: leaf translations tagged with the domain.

use core::num::NonZeroU64;

use ringfence_pgtable::Leaf;
use ringfence_types::{Access, DomainId, Iova, PageSize, Permissions, PfnRange, PhysAddr};

use crate::cache::SetAssociative;
use crate::tag;
use crate::{Geometry, Replacement};

/// Returns the largest of the four sizes of an IOTLB entry that is at most `size`, as a number.
#[inline]
const fn kind_of(size: PageSize) -> u64 {
    // A larger page is cached in parts of 1 GiB.
    match size.shift() {
        0..16 => 0,
        16..21 => 3,
        21..30 => 1,
        _ => 2,
    }
}

const PERMISSIONS: u64 = 0b11;
const KIND_SHIFT: u32 = 2;
const BASE: u64 = !0xfff;

/// A leaf packed into one word, so that it stays in a register: permissions (bits 0..=1, never
/// zero), size (2..=3), base (12..=63).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Page(NonZeroU64);

/// Sizes of an entry.
const SIZES: [PageSize; 4] = [
    PageSize::Size4K,
    PageSize::Size64K,
    PageSize::Size2M,
    PageSize::Size1G,
];

/// Returns the size of the entries of `kind`.
#[inline]
const fn size_of_kind(kind: u64) -> PageSize {
    match kind & 3 {
        0 => PageSize::Size4K,
        1 => PageSize::Size2M,
        2 => PageSize::Size1G,
        _ => PageSize::Size64K,
    }
}

/// Returns the part of `leaf` around `iova` that one IOTLB entry holds: all of a leaf of 4 KiB,
/// 64 KiB, 2 MiB or 1 GiB.
#[inline]
pub(crate) fn part_of(leaf: Leaf, iova: Iova) -> Leaf {
    let page = size_of_kind(kind_of(leaf.page));
    let base = leaf.translate(iova).align_down(page.bytes());
    Leaf { page, base, ..leaf }
}

impl Page {
    #[inline]
    pub(crate) const fn new(leaf: &Leaf) -> Self {
        let base = leaf.base.align_down(leaf.page.bytes()).get();
        let word = base | kind_of(leaf.page) << KIND_SHIFT | leaf.permissions.bits();
        match NonZeroU64::new(word) {
            Some(word) => Self(word),
            // Permissions are never empty.
            None => Self(NonZeroU64::MIN),
        }
    }

    #[inline]
    pub(crate) const fn allows(self, access: Access) -> bool {
        match Permissions::from_bits(self.0.get() & PERMISSIONS) {
            Some(permissions) => permissions.allows(access),
            None => false,
        }
    }

    /// Returns the permissions; `None` for the placeholder of an empty entry.
    #[inline]
    pub(crate) const fn permissions(self) -> Option<Permissions> {
        Permissions::from_bits(self.0.get() & PERMISSIONS)
    }

    /// Returns the size of the page.
    #[inline]
    pub(crate) const fn size(self) -> PageSize {
        size_of_kind(self.0.get() >> KIND_SHIFT)
    }

    /// Returns the mask of the address bits within the page.
    #[inline]
    pub(crate) const fn mask(self) -> u64 {
        self.size().bytes().wrapping_sub(1)
    }

    /// [`translate`](Self::translate) for a 4 KiB page.
    #[inline]
    pub(crate) const fn translate_small(self, iova: Iova) -> PhysAddr {
        PhysAddr::new(self.0.get() & BASE | iova.get() & !BASE)
    }

    /// Translates `iova`, which must lie on this page.
    #[inline]
    pub(crate) const fn translate(self, iova: Iova) -> PhysAddr {
        PhysAddr::new(self.0.get() & BASE | iova.get() & self.mask())
    }
}

/// Leaf translations of all domains and page sizes.
///
/// The caller must pass only addresses below 2^57. An entry stays until it is invalidated or
/// evicted, even after its page table entry changed. That is how translations become stale.
#[derive(Debug, Clone)]
pub(crate) struct Iotlb {
    entries: SetAssociative<Page>,
    /// Number of entries per page size. Lookups skip sizes without entries.
    live: [u32; 4],
}

impl Iotlb {
    /// Creates an empty IOTLB.
    pub(crate) fn new(geometry: Geometry, replacement: Replacement) -> Self {
        Self {
            entries: SetAssociative::new(geometry, replacement, Page(NonZeroU64::MIN)),
            live: [0; 4],
        }
    }

    /// Returns the number of entries in use.
    #[inline]
    pub(crate) fn live(&self) -> u32 {
        self.entries.live()
    }

    /// Returns the 4 KiB entry that translates `iova` in `domain`, if it is the newest of its set.
    #[inline]
    pub(crate) fn newest(&self, domain: DomainId, iova: Iova) -> Option<Page> {
        let page = iova.get() >> PageSize::Size4K.shift();
        self.entries
            .newest(
                tag::selector(domain, page),
                tag::key(domain, kind_of(PageSize::Size4K), page),
            )
            .copied()
    }

    /// Returns the entry that translates `iova` in `domain`.
    #[inline]
    pub(crate) fn lookup(&mut self, domain: DomainId, iova: Iova) -> Option<Page> {
        let small = self.lookup_size(domain, iova, PageSize::Size4K);
        let [_, two_mib, one_gib, group] = self.live;
        if small.is_none() && two_mib | one_gib | group != 0 {
            return self.lookup_large(domain, iova);
        }
        small
    }

    #[inline]
    fn lookup_size(&mut self, domain: DomainId, iova: Iova, size: PageSize) -> Option<Page> {
        let page = iova.get() >> size.shift();
        self.entries
            .lookup(
                tag::selector(domain, page),
                tag::key(domain, kind_of(size), page),
            )
            .copied()
    }

    fn lookup_large(&mut self, domain: DomainId, iova: Iova) -> Option<Page> {
        let live = self.live;
        [PageSize::Size64K, PageSize::Size2M, PageSize::Size1G]
            .into_iter()
            .filter(|size| live.get(kind_of(*size) as usize) != Some(&0))
            .find_map(|size| self.lookup_size(domain, iova, size))
    }

    /// Caches `translation` of a page of `size` bytes that contains `iova` and that
    /// [`lookup`](Self::lookup) did not find. Returns true if it evicted another entry.
    #[inline]
    pub(crate) fn fill(
        &mut self,
        domain: DomainId,
        iova: Iova,
        size: PageSize,
        translation: Page,
    ) -> bool {
        let before = self.entries.live();
        let page = iova.get() >> size.shift();
        let kind = kind_of(size);
        let evicted = self.entries.insert(
            tag::selector(domain, page),
            tag::key(domain, kind, page),
            translation,
        );
        if let Some(old) = evicted {
            self.count_removed(tag::kind(old), 1);
        }
        if (evicted.is_some() || self.entries.live() != before)
            && let Some(live) = self.live.get_mut(kind as usize)
        {
            *live = live.wrapping_add(1);
        }
        evicted.is_some()
    }

    #[inline]
    fn count_removed(&mut self, kind: u64, entries: u32) {
        if let Some(live) = self.live.get_mut(kind as usize) {
            *live = live.wrapping_sub(entries);
        }
    }

    /// Drops every entry of `domain` that translates any byte of `range`. Visits each entry at most
    /// once per page size, even for a long range.
    pub(crate) fn invalidate_pages(&mut self, domain: DomainId, range: &PfnRange) {
        for size in SIZES {
            let kind = kind_of(size);
            if self.live.get(kind as usize) == Some(&0) {
                continue;
            }
            let dropped = tag::remove_range(
                &mut self.entries,
                domain,
                kind,
                size.shift(),
                range.lo(),
                range.hi(),
            );
            self.count_removed(kind, dropped);
        }
    }

    /// Drops every entry of `domain`.
    pub(crate) fn invalidate_domain(&mut self, domain: DomainId) {
        let live = &mut self.live;
        self.entries.remove_if(|key, _| {
            let matches = tag::is_of(key, domain);
            if matches && let Some(live) = live.get_mut(tag::kind(key) as usize) {
                *live = live.wrapping_sub(1);
            }
            matches
        });
    }

    /// Drops all entries.
    pub(crate) fn invalidate_all(&mut self) {
        self.entries.clear();
        self.live = [0; 4];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_types::Pfn;
    use std::vec::Vec;

    fn iotlb(sets: u32, ways: u32) -> Iotlb {
        Iotlb::new(Geometry::new(sets, ways).unwrap(), Replacement::Lru)
    }

    fn page(size: PageSize, base: u64) -> Page {
        Page::new(&Leaf {
            page: size,
            base: PhysAddr::new(base),
            permissions: Permissions::READ_WRITE,
        })
    }

    const A: DomainId = DomainId::new(1);
    const B: DomainId = DomainId::new(2);
    const HIGHEST: u64 = (1 << tag::MAX_WIDTH) - 1;

    /// The seven entries of the scope matrix: name, domain, address, page size.
    const ENTRIES: [(&str, DomainId, u64, PageSize); 7] = [
        ("a4k", A, 0x1000, PageSize::Size4K),
        ("a4k-next", A, 0x2000, PageSize::Size4K),
        ("a2m", A, 0x20_0000, PageSize::Size2M),
        ("a1g", A, 0x4000_0000, PageSize::Size1G),
        ("b4k", B, 0x1000, PageSize::Size4K),
        ("a-top", A, HIGHEST & !0xfff, PageSize::Size4K),
        ("a64k", A, 0x7_0000, PageSize::Size64K),
    ];

    fn filled(sets: u32) -> Iotlb {
        let mut iotlb = iotlb(sets, 8);
        for (i, (_, domain, iova, size)) in ENTRIES.into_iter().enumerate() {
            assert!(!iotlb.fill(
                domain,
                Iova::new(iova),
                size,
                page(size, (i as u64 + 1) << 30)
            ));
        }
        iotlb
    }

    fn survivors(iotlb: &mut Iotlb) -> Vec<&'static str> {
        ENTRIES
            .into_iter()
            .filter(|(_, domain, iova, size)| {
                let found = iotlb.lookup(*domain, Iova::new(*iova));
                assert!(found.is_none_or(|page| page.mask() == size.bytes() - 1));
                found.is_some()
            })
            .map(|(name, ..)| name)
            .collect()
    }

    #[test]
    fn scope_of_page_invalidations_is_exact() {
        let pages = |lo, count| PfnRange::new(Pfn::new(lo), count).unwrap();
        let cases: [(&str, DomainId, PfnRange, &[&str]); 12] = [
            ("first page", A, pages(1, 1), &["a4k"]),
            ("page before", A, pages(0, 1), &[]),
            ("two pages", A, pages(1, 2), &["a4k", "a4k-next"]),
            ("other domain", B, pages(1, 2), &["b4k"]),
            ("first granule of a 64K page", A, pages(0x70, 1), &["a64k"]),
            ("last granule of a 64K page", A, pages(0x7f, 1), &["a64k"]),
            ("just behind the 64K page", A, pages(0x80, 1), &[]),
            ("one granule in a 2M page", A, pages(0x3ff, 1), &["a2m"]),
            ("just behind the 2M page", A, pages(0x400, 1), &[]),
            ("last granule of a 1G page", A, pages(0x7_ffff, 1), &["a1g"]),
            (
                "all of a domain by range",
                A,
                PfnRange::inclusive(Pfn::new(0), Pfn::MAX).unwrap(),
                &["a4k", "a4k-next", "a2m", "a1g", "a-top", "a64k"],
            ),
            // Pages beyond the widest address space do not alias pages with the same low bits.
            (
                "beyond the width",
                A,
                pages((1 << (tag::MAX_WIDTH - 12)) + 1, 2),
                &[],
            ),
        ];
        // One set forces a scan for every range; with 64 sets, short ranges are looked up. The
        // result must be the same.
        for sets in [1, 64] {
            for (name, domain, range, dropped) in cases {
                let mut iotlb = filled(sets);
                iotlb.invalidate_pages(domain, &range);
                let expected: Vec<_> = ENTRIES
                    .iter()
                    .map(|entry| entry.0)
                    .filter(|entry| !dropped.contains(entry))
                    .collect();
                assert_eq!(survivors(&mut iotlb), expected, "{name}, {sets} sets");
                assert_eq!(iotlb.live() as usize, expected.len(), "{name}");
                assert_eq!(iotlb.live.iter().sum::<u32>(), iotlb.live(), "{name}");
            }
        }
    }

    #[test]
    fn scope_of_wide_invalidations_is_exact() {
        let mut iotlb = filled(64);
        iotlb.invalidate_domain(A);
        assert_eq!(survivors(&mut iotlb), ["b4k"]);
        assert_eq!(iotlb.live, [1, 0, 0, 0]);
        let mut iotlb = filled(64);
        iotlb.invalidate_domain(B);
        assert_eq!(iotlb.live, [3, 1, 1, 1]);
        iotlb.invalidate_all();
        assert!(survivors(&mut iotlb).is_empty());
    }

    #[test]
    fn page_entry_equals_its_leaf() {
        for (size, base) in [
            (PageSize::Size4K, 0x000f_ffff_ffff_f000),
            (PageSize::Size64K, 0x000f_ffff_ffff_0000),
            (PageSize::Size2M, 0x000f_ffff_ffe0_0000),
            (PageSize::Size1G, 0x000f_ffff_c000_0000),
        ] {
            for permissions in [
                Permissions::READ,
                Permissions::WRITE,
                Permissions::READ_WRITE,
            ] {
                let leaf = Leaf {
                    page: size,
                    base: PhysAddr::new(base),
                    permissions,
                };
                let page = Page::new(&leaf);
                for access in [Access::Read, Access::Write] {
                    assert_eq!(page.allows(access), permissions.allows(access));
                }
                for offset in [0, 0x123, size.bytes() - 1] {
                    let iova = Iova::new(0x7f00_0000_0000_0000 & !(size.bytes() - 1) | offset);
                    assert_eq!(page.translate(iova), leaf.translate(iova));
                }
            }
        }
    }

    #[test]
    fn counts_per_size_survive_eviction() {
        let mut iotlb = iotlb(1, 1);
        iotlb.fill(A, Iova::new(0), PageSize::Size2M, page(PageSize::Size2M, 0));
        assert!(iotlb.fill(A, Iova::new(0), PageSize::Size4K, page(PageSize::Size4K, 0)));
        assert_eq!(iotlb.live, [1, 0, 0, 0]);
        assert!(iotlb.fill(B, Iova::new(0), PageSize::Size1G, page(PageSize::Size1G, 0)));
        assert_eq!(iotlb.live, [0, 0, 1, 0]);
        assert!(iotlb.lookup(B, Iova::new(0x3fff_ffff)).is_some());
        let mut none = Iotlb::new(Geometry::ABSENT, Replacement::Lru);
        assert!(!none.fill(A, Iova::new(0), PageSize::Size2M, page(PageSize::Size2M, 0)));
        assert_eq!(none.live, [0; 4]);
    }
}
