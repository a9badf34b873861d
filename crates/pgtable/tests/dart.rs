//! DART's table of 32-bit entries: bits, a brute-force reference, and two CPUs on one word.

use std::collections::BTreeMap;

use proptest::prelude::*;
use ringfence_memory::Arena;
use ringfence_pgtable::{
    Coherency, Dart, DartTable, EmptyEntry, MapError, MapRequest, Table, TableError, UnmapError,
};
use ringfence_types::{DomainId, Iova, Permissions, Pfn, PfnRange, PhysAddr, PhysMemory};

const ROOT: PhysAddr = PhysAddr::new(0x10_0000);
const SPARE: PhysAddr = PhysAddr::new(0x2000);
const DOMAIN: DomainId = DomainId::new(1);

fn small() -> Dart {
    Dart::new(22).unwrap()
}

fn table(mem: &Arena, empty: EmptyEntry) -> DartTable {
    DartTable::at(small(), DOMAIN, Coherency::Coherent, empty, mem, ROOT).unwrap()
}

fn request(page: u64, frame: u64, pages: u64) -> MapRequest {
    MapRequest {
        iova: Iova::new(page << 12),
        pa: PhysAddr::new(frame << 12),
        pages,
        permissions: Permissions::READ_WRITE,
    }
}

/// The bits of `dart.h`: valid is bit 31 and the page number bits 0 to 23, big-endian.
#[test]
#[cfg_attr(
    target_endian = "big",
    ignore = "the port `PhysMemory` requires a little-endian host"
)]
fn entries_are_those_of_the_header() {
    let mem = Arena::new(4 << 20).unwrap();
    let table = table(&mem, EmptyEntry::Spare(SPARE));
    table.map(&mem, request(4, 0x12_3456, 1)).unwrap();
    table.map(&mem, request(7, 0xff_ffff, 1)).unwrap();
    let bytes = |page: u64| {
        let at = PhysAddr::new(ROOT.get() + page / 2 * 8);
        let word = mem
            .word(at)
            .unwrap()
            .load(std::sync::atomic::Ordering::Relaxed);
        let at = (page % 2 * 4) as usize;
        <[u8; 4]>::try_from(&word.to_le_bytes()[at..at + 4]).unwrap()
    };
    assert_eq!(bytes(4), [0x80, 0x12, 0x34, 0x56]);
    assert_eq!(bytes(7), [0x80, 0xff, 0xff, 0xff]);
    // The empty entry is a valid one of the spare page.
    assert_eq!(bytes(5), [0x80, 0, 0, 2]);
}

#[test]
fn what_the_format_cannot_hold_is_refused() {
    let mem = Arena::new(4 << 20).unwrap();
    let table = table(&mem, EmptyEntry::Invalid);
    let read = MapRequest {
        permissions: Permissions::READ,
        ..request(0, 1, 1)
    };
    let iova = |page: u64| Iova::new(page << 12);
    let odd = MapRequest {
        iova: Iova::new(1),
        ..request(0, 1, 1)
    };
    for (request, expected) in [
        (request(0, 1, 0), MapError::Empty),
        (odd, MapError::Misaligned),
        (read, MapError::Restricted),
        (
            request(1023, 1, 2),
            MapError::BeyondWidth { iova: iova(1023) },
        ),
        (
            request(u64::MAX >> 12, 1, 1),
            MapError::BeyondWidth {
                iova: iova(u64::MAX >> 12),
            },
        ),
        (
            request(0, 0xff_ffff, 2),
            MapError::PhysicalBeyondWidth {
                at: PhysAddr::new(0xf_ffff_f000),
            },
        ),
    ] {
        assert_eq!(table.map(&mem, request), Err(expected), "{request:?}");
    }
    let beyond = PfnRange::new(Pfn::new(1023), 2).unwrap();
    assert_eq!(
        table.unmap(&mem, beyond).map(drop),
        Err(UnmapError::BeyondWidth { iova: iova(1023) })
    );
    // The generic table stores whole words, so it refuses the format.
    let generic = Table::at(small(), DOMAIN, Coherency::Coherent, &mem, ROOT);
    assert_eq!(generic.map(drop), Err(TableError::NarrowEntries));
    let misplaced = |root, empty| {
        DartTable::at(small(), DOMAIN, Coherency::Coherent, empty, &mem, root).map(drop)
    };
    let memory = Err(TableError::Memory);
    assert_eq!(misplaced(PhysAddr::new(8), EmptyEntry::Invalid), memory);
    assert_eq!(
        misplaced(PhysAddr::new(4 << 20), EmptyEntry::Invalid),
        memory
    );
    let far = EmptyEntry::Spare(PhysAddr::new(1 << 36));
    assert_eq!(misplaced(ROOT, far), memory);
    assert_eq!((Dart::new(21), Dart::new(32)), (None, None));
}

proptest! {
    /// Maps and unmaps against a map of pages. Every entry is compared after every step, so a store
    /// that changes its neighbour is found.
    #[test]
    fn runs_match_a_map_of_pages(
        spare in any::<bool>(),
        script in proptest::collection::vec((any::<bool>(), 0_u64..40, 1_u64..6, 1_u64..99), 1..60)
    ) {
        let mem = Arena::new(4 << 20).unwrap();
        let empty = if spare { EmptyEntry::Spare(SPARE) } else { EmptyEntry::Invalid };
        let table = table(&mem, empty);
        let mut pages: BTreeMap<u64, u64> = BTreeMap::new();
        for (map, first, count, frame) in script {
            if map {
                // Frames of mappings differ from the spare page.
                let done = table.map(&mem, request(first, 8 + frame, count));
                let taken = (first..first + count).find(|page| pages.contains_key(page));
                let expected = match taken {
                    None => Ok(()),
                    Some(page) => Err(MapError::AlreadyMapped { iova: Iova::new(page << 12) }),
                };
                prop_assert_eq!(done, expected);
                if taken.is_none() {
                    pages.extend((0..count).map(|page| (first + page, 8 + frame + page)));
                }
            } else {
                let range = PfnRange::new(Pfn::new(first), count).unwrap();
                let done = table.unmap(&mem, range).map(drop);
                let absent = (first..first + count).find(|page| !pages.contains_key(page));
                let expected = match absent {
                    None => Ok(()),
                    Some(page) => Err(UnmapError::NotMapped { iova: Iova::new(page << 12) }),
                };
                prop_assert_eq!(done, expected);
                if absent.is_none() {
                    pages.retain(|page, _| !(first..first + count).contains(page));
                }
            }
            for page in 0..48 {
                let found = table.walk(&mem, Iova::new(page << 12)).ok();
                let found = found.map(|leaf| leaf.base.get() >> 12);
                let unmapped = spare.then_some(SPARE.get() >> 12);
                prop_assert_eq!(found, pages.get(&page).copied().or(unmapped), "page {}", page);
            }
        }
    }
}

/// Two CPUs own the even and the odd entries. No store loses the other CPU's.
#[test]
fn neighbours_of_a_word_are_changed_concurrently() {
    let mem = Arena::new(4 << 20).unwrap();
    let table = table(&mem, EmptyEntry::Invalid);
    std::thread::scope(|scope| {
        for parity in 0..2_u64 {
            let (mem, table) = (&mem, &table);
            scope.spawn(move || {
                for round in 0..200 {
                    for page in (parity..64).step_by(2) {
                        table.map(mem, request(page, 100 + page, 1)).unwrap();
                    }
                    for page in (parity..64).step_by(2) {
                        let leaf = table.walk(mem, Iova::new(page << 12)).unwrap();
                        assert_eq!(leaf.base.get() >> 12, 100 + page, "round {round}");
                        let range = PfnRange::new(Pfn::new(page), 1).unwrap();
                        let (_unmapped, _levels) = table.unmap(mem, range).unwrap();
                    }
                }
            });
        }
    });
}
