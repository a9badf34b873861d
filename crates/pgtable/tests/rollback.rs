//! Frames that run out at every possible point, and rejected ranges: every word stays unchanged.

mod common;

use common::{DOMAIN, Memory, Source, flushed, frames, memory, page, range, snapshot};
use ringfence_pgtable::{
    Coherency, DirtyLines, Levels, MapError, MapRequest, ReclaimingTable, SecondStage, Table,
    UnmapError,
};
use ringfence_types::{PageSize, Permissions, PhysAddr};

fn request(first: u64, pages: u64) -> MapRequest {
    MapRequest {
        iova: page(first),
        pa: PhysAddr::new(first << 12),
        pages,
        permissions: Permissions::READ_WRITE,
    }
}

/// Ranges that lack one to many tables: (first page, number of pages).
const RANGES: [(u64, u64); 8] = [
    (0, 1),
    (511, 2),
    ((1 << 18) - 1, 2),
    ((1 << 27) - 1, 2),
    (100, 2000),
    (5, (1 << 18) + 1024),
    ((1 << 27) - 512 - 7, 1024 + 14),
    ((1 << 36) - (1 << 18) - 1, (1 << 18) + 1),
];

fn frames_that_run_out(coherency: Coherency, largest: PageSize, before: &[(u64, u64)]) {
    let format = SecondStage::new(Levels::Four).with_pages_up_to(largest);
    for (first, pages) in RANGES {
        if pages > 4096 && largest == PageSize::Size4K {
            continue;
        }
        let mem = memory();
        let frames = frames(&mem);
        let table = Table::new(format, DOMAIN, coherency, &mem, &frames).expect("frames");
        for (first, pages) in before {
            table
                .map(&mem, &frames, request(*first, *pages))
                .expect("frames");
        }
        let state = snapshot(&mem);
        let outstanding = frames.outstanding();
        let bytes = table.table_bytes();
        let mut needed = 0;
        loop {
            frames.fail_after(needed);
            let done = table.map(&mem, &frames, request(first, pages));
            if done.is_ok() {
                break;
            }
            assert_eq!(done, Err(MapError::OutOfFrames));
            assert_eq!(
                frames.outstanding(),
                outstanding,
                "nothing leaks after {needed} frames"
            );
            assert_eq!(table.table_bytes(), bytes);
            // Frames that were allocated and returned hold only what the source left in them.
            assert!(
                snapshot(&mem) == state,
                "a word changed; {needed} frames were granted"
            );
            needed += 1;
        }
        assert_eq!(
            frames.outstanding() as u64,
            outstanding as u64 + needed,
            "exactly the frames that were missing"
        );
        assert_eq!(table.table_bytes(), bytes + needed * 4096);
        frames.recover();
        assert!(table.unmap(&mem, range(first, pages)).is_ok());
        assert!(table.destroy(&mem, &frames, &flushed()).is_ok());
        assert_eq!((frames.outstanding(), frames.wrong_frees()), (0, 0));
    }
}

#[test]
fn every_allocation_fails_once() {
    for coherency in [Coherency::Coherent, Coherency::NonCoherent] {
        for largest in PageSize::ALL {
            frames_that_run_out(coherency, largest, &[]);
            frames_that_run_out(coherency, largest, &[((1 << 18) + 5000, 1), (1 << 28, 3)]);
        }
    }
}

#[test]
fn refused_ranges_change_nothing() {
    for coherency in [Coherency::Coherent, Coherency::NonCoherent] {
        let format = SecondStage::new(Levels::Four).with_pages_up_to(PageSize::Size2M);
        let mem = memory();
        let frames = frames(&mem);
        let table = Table::new(format, DOMAIN, coherency, &mem, &frames).expect("frames");
        let mut cache = table.leaf_cache();
        let mut dirty = DirtyLines::new();
        for (first, pages) in [(10, 4), (1000, 1), (2048, 512), (4000, 1)] {
            table
                .map(&mem, &frames, request(first, pages))
                .expect("frames");
        }
        let state = snapshot(&mem);
        let outstanding = frames.outstanding();
        let maps = [
            (13, 1, 13),
            (8, 4, 10),
            (8, 3, 10),
            (0, 1001, 10),
            (14, 1000, 1000),
            (2047, 2, 2048),
            (2048, 512, 2048),
            (2049, 1, 2049),
            (1500, 2501, 2048),
            (2560, 2000, 4000),
        ];
        for (first, pages, taken) in maps {
            let refused = Err(MapError::AlreadyMapped { iova: page(taken) });
            let wanted = request(first, pages);
            assert_eq!(table.map(&mem, &frames, wanted), refused);
            assert_eq!(cache.map(&table, &mem, &frames, wanted), refused);
            assert_eq!(table.map_nosync(&mem, &frames, wanted, &mut dirty), refused);
        }
        let not_mapped = |first| UnmapError::NotMapped { iova: page(first) };
        let split = UnmapError::WouldSplit { iova: page(2048) };
        let unmaps = [
            (9, 1, not_mapped(9)),
            (9, 2, not_mapped(9)),
            (10, 5, not_mapped(14)),
            (13, 2, not_mapped(14)),
            (10, 1000, not_mapped(14)),
            (2048, 1, split),
            (2049, 1, split),
            (2048, 511, split),
            (2048, 513, not_mapped(2560)),
            (2304, 512, split),
            (1 << 30, 1, not_mapped(1 << 30)),
            (1 << 30, 5000, not_mapped(1 << 30)),
        ];
        for (first, pages, error) in unmaps {
            let cleared = range(first, pages);
            assert_eq!(table.unmap(&mem, cleared).err(), Some(error));
            assert_eq!(cache.unmap(&table, &mem, cleared).err(), Some(error));
            assert_eq!(
                table.unmap_nosync(&mem, cleared, &mut dirty).err(),
                Some(error)
            );
        }
        assert!(snapshot(&mem) == state);
        assert_eq!(frames.outstanding(), outstanding);
        assert!(dirty.is_clean(), "what was refused touched no line");
    }
}

#[test]
fn a_reclaiming_table_rolls_back_and_returns_to_nothing() {
    for coherency in [Coherency::Coherent, Coherency::NonCoherent] {
        for (first, pages) in RANGES.into_iter().filter(|(_, pages)| *pages < 4096) {
            let mem = memory();
            let frames = frames(&mem);
            let (mem, frames): (&Memory, &Source<'_>) = (&mem, &frames);
            let format = SecondStage::new(Levels::Four);
            let mut table =
                ReclaimingTable::new(format, DOMAIN, coherency, mem, frames).expect("frames");
            let empty = snapshot(mem);
            let mut granted = 0;
            loop {
                frames.fail_after(granted);
                match table.map(mem, frames, request(first, pages)) {
                    Ok(()) => break,
                    Err(error) => assert_eq!(error, MapError::OutOfFrames),
                }
                assert!(snapshot(mem) == empty);
                assert_eq!(frames.outstanding(), 1);
                granted += 1;
            }
            let taken = table.map(mem, frames, request(first + pages - 1, 1));
            assert!(matches!(taken, Err(MapError::AlreadyMapped { .. })));
            assert!(table.unmap(mem, range(first + pages, 1)).is_err());
            assert!(table.unmap(mem, range(first, pages)).is_ok());
            assert_eq!(
                table.take_unlinked().len() as u64,
                granted,
                "every table below the root is empty"
            );
            assert_eq!(table.table_bytes(), 4096);
            let root = table.root().get() as usize / 8;
            assert!(
                snapshot(mem)[root..root + 512]
                    .iter()
                    .all(|word| *word == 0)
            );
        }
    }
}
