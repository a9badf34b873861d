//! The Arm formats: words written out from the Arm Architecture Reference Manual (DDI 0487), and
//! the break-before-make rule of the contiguous hint.

mod common;

use std::sync::atomic::Ordering;

use common::{DOMAIN, MEMORY, flushed, frames, frames_after_root, memory, page, range};
use ringfence_pgtable::{
    Arm, Coherency, Entry, Format, Granule4K, Granule16K, Granule64K, Level, MapError, MapRequest,
    Table, TableError, UnmapError,
};
use ringfence_types::{PageSize, Permissions, PhysAddr, PhysMemory};

const R: Permissions = Permissions::READ;
const W: Permissions = Permissions::WRITE;
const RW: Permissions = Permissions::READ_WRITE;

fn level(raw: u8) -> Level {
    Level::new(raw).expect("1 to 6")
}

fn size(shift: u32) -> PageSize {
    PageSize::from_shift(shift).expect("a size")
}

fn stage1() -> Arm<Granule4K> {
    let format = Arm::stage1(48).expect("exists").with_pages_up_to(size(34));
    format.with_contiguous_hint()
}

fn stage2() -> Arm<Granule4K> {
    let format = Arm::stage2(48).expect("exists").with_pages_up_to(size(34));
    format.with_contiguous_hint()
}

fn leaf(base: u64, shift: u32, permissions: Permissions) -> Entry {
    Entry::Leaf {
        base: PhysAddr::new(base),
        size: size(shift),
        permissions,
    }
}

/// Section D8.3.1: type 0..=1, AttrIndx 2..=4 or MemAttr 2..=5, AP or S2AP 6..=7, SH 8..=9, AF 10,
/// nG 11, Contiguous 52.
#[test]
fn pages_and_blocks() {
    let forced = stage2().with_forced_write_back();
    assert!(forced.is_forced_write_back() && !stage2().is_forced_write_back());
    let cases = [
        (stage1(), 1, 0x1_2345_6000, W, 0x1_2345_6f43, RW),
        (stage1(), 1, 0x1_2345_6000, R, 0x1_2345_6fc3, R),
        (stage1(), 1, 0xffff_ffff_f000, RW, 0xffff_ffff_ff43, RW),
        (stage1(), 2, 0x1_2340_0000, RW, 0x1_2340_0f41, RW),
        (stage1(), 3, 0x1_4000_0000, R, 0x1_4000_0fc1, R),
        (stage2(), 1, 0x1_2345_6000, R, 0x1_2345_677f, R),
        (stage2(), 1, 0x1_2345_6000, W, 0x1_2345_67bf, W),
        (stage2(), 2, 0x1_2340_0000, RW, 0x1_2340_07fd, RW),
        (stage2(), 3, 0x1_4000_0000, RW, 0x1_4000_07fd, RW),
        (forced, 1, 0x1_2345_6000, R, 0x1_2345_675b, R),
        (forced, 2, 0x1_2340_0000, RW, 0x1_2340_07d9, RW),
        // Stage 1 has no such type.
        (
            stage1().with_forced_write_back(),
            1,
            0x1_2345_6000,
            W,
            0x1_2345_6f43,
            RW,
        ),
    ];
    for (format, at, base, permissions, word, seen) in cases {
        assert_eq!(
            format.leaf(level(at), PhysAddr::new(base), permissions),
            word
        );
        let shift = 12 + 9 * (u32::from(at) - 1);
        // Memory type, DBM, execution and software bits change nothing.
        for ignored in [0, 0b11 << 2, 1 << 51, 0b11 << 53, 0xf << 55] {
            let decoded = format.decode(level(at), word | ignored);
            assert_eq!(decoded, leaf(base, shift, seen), "{word:#x}");
        }
        let contiguous = word | 1 << 52;
        assert_eq!(
            format.leaf_of_run(level(at), PhysAddr::new(base), 4, permissions),
            contiguous
        );
        let first = base & !((1 << (shift + 4)) - 1);
        assert_eq!(
            format.decode(level(at), contiguous),
            leaf(first, shift + 4, seen)
        );
        assert_eq!(format.decode(level(at), word & !1), Entry::Absent);
        assert!(format.is_absent(word & !1) && !format.is_absent(word));
    }
}

/// Section D8.3.1, table descriptors: bits 0..=1 are 11; APTable 61..=62 in stage 1.
#[test]
fn tables() {
    let at = PhysAddr::new(0x1_2345_6000);
    for format in [stage1(), stage2()] {
        for own in 2..=4 {
            let word = format.table(level(own), at);
            assert_eq!(word, 0x1_2345_6003);
            let table = |permissions| Entry::Table {
                at,
                next: level(own - 1),
                permissions,
            };
            for ignored in [0, 0x3ff << 2, 0xff << 51] {
                assert_eq!(format.decode(level(own), word | ignored), table(RW));
            }
            let of_stage_1 = format == stage1();
            let read_only = format.decode(level(own), word | 1 << 62);
            assert_eq!(read_only, table(if of_stage_1 { R } else { RW }));
            let barred = format.decode(level(own), word | 1 << 61);
            assert_eq!(barred == Entry::Reserved, of_stage_1);
            let counted = format.with_live(word | Arm::<Granule4K>::WRITTEN_BACK, 512);
            assert_eq!(counted, 0x0080_0001_2345_6803);
            assert_eq!(format.live(counted), 512);
            assert_eq!(format.descend(level(own), counted), Some(at));
            assert_eq!(format.descend(level(own), word & !2), None);
        }
    }
}

#[test]
fn refused() {
    let small = Arm::<Granule4K>::stage1(33).expect("exists");
    let cases = [
        // Type 01 at level 1, a block at level 4.
        (stage1(), 1, 0x1_2345_6f41),
        (stage1(), 4, 0x0f41),
        // Not accessed, only privileged, S2AP = 00.
        (stage1(), 1, 0x1_2345_6b43),
        (stage1(), 1, 0x1_2345_6f03),
        (stage2(), 1, 0x1_2345_673f),
        // An address of more than 48 bits, and a block that is not aligned.
        (stage1(), 1, 0x0001_0001_2345_6f43),
        (stage1(), 2, 0x0004_0000_0000_1003),
        (stage1(), 2, 0x1_2340_1f41),
        (stage2(), 3, 0x1_2340_07fd),
    ];
    for (format, at, word) in cases {
        assert_eq!(
            format.decode(level(at), word),
            Entry::Reserved,
            "{at} {word:#x}"
        );
    }
    // A root of 8 entries has no contiguous leaf of 16: the hint is ignored there.
    assert_eq!(
        small.decode(level(3), 0x0010_0001_4000_0f41),
        leaf(0x1_4000_0000, 30, RW)
    );
}

/// Section D8.2.2: the root follows from the width; stage 2 concatenates up to 16 tables.
#[test]
fn geometry() {
    let geometry = |format: Option<Arm<Granule4K>>| {
        let format = format.expect("exists");
        let root = format.root_level();
        (root.get(), format.entries(root), format.root_alignment())
    };
    for (width, first, second) in [
        (25, (2, 16, 4096), (2, 16, 4096)),
        (32, (3, 4, 4096), (2, 2048, 1 << 14)),
        (39, (3, 512, 4096), (3, 512, 4096)),
        (40, (4, 2, 4096), (3, 1024, 1 << 13)),
        (43, (4, 16, 4096), (3, 8192, 1 << 16)),
        (44, (4, 32, 4096), (4, 32, 4096)),
        (48, (4, 512, 4096), (4, 512, 4096)),
    ] {
        assert_eq!(geometry(Arm::stage1(width)), first, "{width}");
        assert_eq!(geometry(Arm::stage2(width)), second, "{width}");
    }
    for width in [0, 24, 49] {
        assert_eq!(Arm::<Granule4K>::stage1(width), None);
    }
}

/// Section D8.2: the granules of 16 and 64 KiB have 11 and 13 bits a level.
#[test]
fn larger_granules() {
    let sixteen = Arm::<Granule16K>::stage1(48)
        .expect("exists")
        .with_pages_up_to(size(34));
    let sixteen = sixteen.with_contiguous_hint();
    let sixty_four = Arm::<Granule64K>::stage2(48)
        .expect("exists")
        .with_pages_up_to(size(34));
    let sixty_four = sixty_four.with_contiguous_hint();
    assert_eq!(
        (sixteen.root_level().get(), sixteen.entries(level(4))),
        (4, 2)
    );
    assert_eq!(
        (sixty_four.root_level().get(), sixty_four.entries(level(3))),
        (3, 64)
    );
    let concatenated = Arm::<Granule16K>::stage2(48).expect("exists");
    assert_eq!(concatenated.root_level().get(), 3);
    assert_eq!(concatenated.entries(level(3)), 4096);
    assert_eq!([1, 2, 3].map(|at| sixteen.shift(level(at))), [14, 25, 36]);
    assert_eq!(
        [1, 2, 3].map(|at| sixty_four.shift(level(at))),
        [16, 29, 42]
    );
    assert_eq!(
        (sixteen.entries(level(1)), sixty_four.entries(level(1))),
        (2048, 8192)
    );
    // Page, contiguous page, block, contiguous block.
    let words = [
        (
            sixteen.leaf(level(1), PhysAddr::new(0x1_2345_4000), RW),
            0x1_2345_4f43,
        ),
        (
            sixteen.leaf(level(2), PhysAddr::new(0x1_2200_0000), RW),
            0x1_2200_0f41,
        ),
        (
            sixty_four.leaf(level(1), PhysAddr::new(0x1_2345_0000), RW),
            0x1_2345_07ff,
        ),
        (
            sixty_four.leaf(level(2), PhysAddr::new(0x1_2000_0000), RW),
            0x1_2000_07fd,
        ),
    ];
    for (word, expected) in words {
        assert_eq!(word, expected);
    }
    let hint = 1 << 52;
    assert_eq!(
        sixteen.decode(level(1), 0x1_2345_4f43 | hint),
        leaf(0x1_2340_0000, 21, RW)
    );
    assert_eq!(
        sixteen.decode(level(2), 0x1_2200_0f41 | hint),
        leaf(0x1_0000_0000, 30, RW)
    );
    assert_eq!(
        sixty_four.decode(level(1), 0x1_2345_07ff | hint),
        leaf(0x1_2340_0000, 21, RW)
    );
    assert_eq!(
        sixty_four.decode(level(2), 0x5_2000_07fd | hint),
        leaf(0x4_0000_0000, 34, RW)
    );
    // Address bits below the granule, and a block of level 3.
    for (format, at, word) in [
        (sixteen, 1, 0x1_2345_5f43),
        (sixteen, 2, 0x1003),
        (sixteen, 3, 0xf41),
    ] {
        assert_eq!(format.decode(level(at), word), Entry::Reserved);
    }
    assert_eq!(sixty_four.decode(level(1), 0x1_2345_17ff), Entry::Reserved);
}

/// A range that is not a whole number of granules is refused, and so are frames of another size.
#[test]
fn parts_of_a_granule() {
    // Two levels: a map needs one frame.
    let format = Arm::<Granule64K>::stage2(40).expect("exists");
    let mem = memory();
    // The first of these frames has the alignment of a granule, but not its size.
    let small = frames_after_root(&mem, MEMORY, PageSize::Size4K);
    let made = Table::new(format, DOMAIN, Coherency::Coherent, &mem, &small);
    assert_eq!(made.err(), Some(TableError::FrameSize));
    let frames = frames_after_root(&mem, MEMORY, PageSize::Size64K);
    let table = Table::new(format, DOMAIN, Coherency::Coherent, &mem, &frames).expect("frames");
    let good = MapRequest {
        iova: page(64),
        pa: PhysAddr::new(0x4000_0000),
        pages: 32,
        permissions: RW,
    };
    let mut cache = table.leaf_cache();
    for (iova, pa, pages) in [(1, 0, 0), (0, 1, 0), (0, 0, 1)] {
        let request = MapRequest {
            iova: page(64 + iova),
            pa: PhysAddr::new(0x4000_0000 + (pa << 12)),
            pages: 32 + pages,
            ..good
        };
        let refused = Err(MapError::Misaligned);
        assert_eq!(table.map(&mem, &frames, request), refused);
        assert_eq!(cache.map(&table, &mem, &frames, request), refused);
    }
    assert_eq!(table.map(&mem, &small, good), Err(MapError::OutOfFrames));
    assert_eq!(cache.map(&table, &mem, &frames, good), Ok(()));
    // The granule that is split: that of the start, or else that of the end.
    for (first, pages, granule) in [(64, 1, 64), (65, 16, 64), (64, 31, 80), (72, 24, 64)] {
        let split = Some(UnmapError::WouldSplit {
            iova: page(granule),
        });
        assert_eq!(table.unmap(&mem, range(first, pages)).err(), split);
        assert_eq!(cache.unmap(&table, &mem, range(first, pages)).err(), split);
    }
    assert!(cache.unmap(&table, &mem, range(64, 32)).is_ok());
    drop(cache);
    assert!(table.destroy(&mem, &frames, &flushed()).is_ok());
    assert_eq!(frames.outstanding(), 0);
}

/// Section D8.16.1: no entry changes from valid to valid, and a contiguous leaf changes as a whole.
#[test]
fn break_before_make() {
    let (mem, format) = (memory(), stage2());
    let frames = frames(&mem);
    let table = Table::new(format, DOMAIN, Coherency::Coherent, &mem, &frames).expect("frames");
    let map = |first: u64, pages: u64| {
        let request = MapRequest {
            iova: page(first),
            pa: PhysAddr::new(0x4000_0000 + (first << 12)),
            pages,
            permissions: RW,
        };
        table.map(&mem, &frames, request)
    };
    assert_eq!(map(100, 1), Ok(()));
    let mut leaf_table = table.root();
    for own in [4, 3, 2] {
        let entry = mem
            .word(leaf_table)
            .expect("inside")
            .load(Ordering::Relaxed);
        leaf_table = format.descend(level(own), entry).expect("linked");
    }
    let words = || -> Vec<u64> {
        let words = mem.table(leaf_table).expect("inside");
        words
            .iter()
            .map(|word| word.load(Ordering::Relaxed))
            .collect()
    };
    let mut before = words();
    let mut changed = |what: &str| {
        let after = words();
        for (index, (old, new)) in before.iter().zip(&after).enumerate() {
            assert!(
                old == new || old & 1 == 0 || new & 1 == 0,
                "{what}: entry {index}"
            );
        }
        let changes = before
            .iter()
            .zip(&after)
            .filter(|(old, new)| old != new)
            .count();
        before = after;
        changes
    };
    // Pages 16 to 47 are two contiguous leaves, 8 to 15 and 48 single pages.
    assert_eq!(map(8, 41), Ok(()));
    assert_eq!(changed("map"), 41);
    let hinted = |word: &&u64| **word >> 52 & 1 == 1;
    assert_eq!(words()[16..48].iter().filter(hinted).count(), 32);
    assert_eq!(words().iter().filter(hinted).count(), 32);
    // A map over a part of a leaf, and an unmap of a part: refused, and nothing changes.
    assert!(map(20, 1).is_err() && map(0, 17).is_err());
    for (first, pages) in [(16, 1), (20, 4), (31, 2), (8, 9), (40, 9), (16, 31)] {
        let split = table.unmap(&mem, range(first, pages)).err();
        let of = if (first..first + pages).contains(&16) || first < 32 {
            16
        } else {
            32
        };
        let expected = match (first, pages) {
            (16, 31) => 32,
            _ => of,
        };
        assert_eq!(
            split,
            Some(UnmapError::WouldSplit {
                iova: page(expected)
            }),
            "{first}"
        );
        assert_eq!(changed("refused"), 0);
    }
    // The whole leaf goes, then its pages come back one by one, without the hint.
    assert!(table.unmap(&mem, range(16, 16)).is_ok());
    assert_eq!(changed("unmap"), 16);
    for first in 16..32 {
        assert_eq!(map(first, 1), Ok(()));
        assert_eq!(changed("map of one"), 1);
    }
    assert_eq!(words().iter().filter(hinted).count(), 16);
    assert!(table.destroy(&mem, &frames, &flushed()).is_ok());
}
