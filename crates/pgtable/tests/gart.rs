//! GART's table of 32-bit entries: bits, aperture, limits, and a brute-force reference.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use ringfence_memory::Arena;
use ringfence_pgtable::{
    Coherency, EmptyEntry, Gart, GartTable, MapError, MapRequest, TableError, WalkErrorKind,
};
use ringfence_types::{DomainId, Iova, Permissions, Pfn, PfnRange, PhysAddr, PhysMemory};

const ROOT: PhysAddr = PhysAddr::new(0x10_0000);
const SCRATCH: PhysAddr = PhysAddr::new(0x2000);
const DOMAIN: DomainId = DomainId::new(1);
/// An aperture of 32 MiB.
const PAGES: u64 = 1 << 13;

fn small() -> Gart {
    Gart::new(25).unwrap()
}

fn table(mem: &Arena, empty: EmptyEntry) -> GartTable {
    GartTable::at(small(), DOMAIN, Coherency::Coherent, empty, mem, ROOT).unwrap()
}

fn request(page: u64, frame: u64, pages: u64) -> MapRequest {
    MapRequest {
        iova: Iova::new(page << 12),
        pa: PhysAddr::new(frame << 12),
        pages,
        permissions: Permissions::READ_WRITE,
    }
}

/// Returns the little-endian entry of a page.
fn entry(mem: &Arena, page: u64) -> u32 {
    let at = PhysAddr::new(ROOT.get() + page / 2 * 8);
    let word = mem.word(at).unwrap().load(Ordering::Relaxed);
    (word >> (page % 2 * 32)) as u32
}

/// GPTE_ENCODE: `(x & 0xfffff000) | ((x >> 32) << 4) | GPTE_VALID | GPTE_COHERENT`.
#[test]
fn entries_are_those_of_linux() {
    let mem = Arena::new(4 << 20).unwrap();
    let table = table(&mem, EmptyEntry::Spare(SCRATCH));
    for (page, address, expected) in [
        (4, 0x1234_5000_u64, 0x1234_5003_u32),
        (7, 0xab_1234_5000, 0x1234_5ab3),
        (9, 0xff_ffff_f000, 0xffff_fff3),
    ] {
        table.map(&mem, request(page, address >> 12, 1)).unwrap();
        assert_eq!(entry(&mem, page), expected);
        let leaf = table.walk(&mem, Iova::new(page << 12 | 0x123)).unwrap();
        assert_eq!(leaf.base.get(), address);
    }
    // `gart_unmapped_entry` points to a scratch page.
    assert_eq!(entry(&mem, 5), 0x2003);
    assert_eq!(entry(&mem, PAGES - 1), 0x2003);
}

#[test]
fn limits_of_the_format() {
    let mem = Arena::new(4 << 20).unwrap();
    let table = table(&mem, EmptyEntry::Invalid);
    let iova = |page: u64| Iova::new(page << 12);
    let read = MapRequest {
        permissions: Permissions::READ,
        ..request(0, 1, 1)
    };
    for (request, expected) in [
        (read, MapError::Restricted),
        (
            request(PAGES - 1, 1, 2),
            MapError::BeyondWidth {
                iova: iova(PAGES - 1),
            },
        ),
        (
            request(0, (1 << 28) - 1, 2),
            MapError::PhysicalBeyondWidth {
                at: PhysAddr::new(((1 << 28) - 1) << 12),
            },
        ),
    ] {
        assert_eq!(table.map(&mem, request), Err(expected), "{request:?}");
    }
    let far = EmptyEntry::Spare(PhysAddr::new(1 << 40));
    let made = GartTable::at(small(), DOMAIN, Coherency::Coherent, far, &mem, ROOT);
    assert_eq!(made.map(drop), Err(TableError::Memory));
    assert_eq!((Gart::new(24), Gart::new(32)), (None, None));
    // Bits 2 and 3 of an entry are not used.
    let word = mem.word(ROOT).unwrap();
    for (raw, kind) in [
        (0x1007_u64, WalkErrorKind::ReservedBit),
        (0x1002, WalkErrorKind::NotPresent),
    ] {
        word.store(raw, Ordering::Relaxed);
        assert_eq!(table.walk(&mem, Iova::ZERO).unwrap_err().kind, kind);
    }
}

/// Only addresses in the aperture are translated. A device reaches all others directly.
#[test]
fn the_aperture_ends_at_its_size() {
    let base = PhysAddr::new(0xf000_0000);
    for (at, expected) in [
        (0xf000_0000, Some(0)),
        (0xf1ff_ffff, Some(0x1ff_ffff)),
        (0xf200_0000, None),
        (0xefff_ffff, None),
        (0, None),
        (u64::MAX, None),
        (0x1_f000_0000, None),
    ] {
        let found = small().in_aperture(base, Iova::new(at));
        assert_eq!(found, expected.map(Iova::new), "{at:#x}");
    }
}

proptest! {
    /// Maps and unmaps against a map of pages, with frames below and above 4 GiB.
    #[test]
    fn runs_match_a_map_of_pages(
        scratch in any::<bool>(),
        script in proptest::collection::vec(
            (any::<bool>(), 0_u64..40, 1_u64..6, (1_u64 << 20) - 50..(1 << 20) + 50), 1..60)
    ) {
        let mem = Arena::new(4 << 20).unwrap();
        let empty = if scratch { EmptyEntry::Spare(SCRATCH) } else { EmptyEntry::Invalid };
        let table = table(&mem, empty);
        let mut pages: BTreeMap<u64, u64> = BTreeMap::new();
        for (map, first, count, frame) in script {
            let mut run = first..first + count;
            if map {
                let fits = !run.clone().any(|page| pages.contains_key(&page));
                prop_assert_eq!(table.map(&mem, request(first, frame, count)).is_ok(), fits);
                if fits {
                    pages.extend(run.map(|page| (page, frame + page - first)));
                }
            } else {
                let range = PfnRange::new(Pfn::new(first), count).unwrap();
                let mapped = run.all(|page| pages.contains_key(&page));
                prop_assert_eq!(table.unmap(&mem, range).is_ok(), mapped);
                if mapped {
                    pages.retain(|page, _| !(first..first + count).contains(page));
                }
            }
            for page in 0..48 {
                let found = table.walk(&mem, Iova::new(page << 12)).ok();
                let found = found.map(|leaf| leaf.base.get() >> 12);
                let unmapped = scratch.then_some(SCRATCH.get() >> 12);
                prop_assert_eq!(found, pages.get(&page).copied().or(unmapped), "page {}", page);
            }
        }
    }
}
