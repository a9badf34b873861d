//! The AMD-Vi host format: words written out from the specification, and walks of its tables.
//! Sections are those of the AMD I/O Virtualization Technology (IOMMU) Specification, 48882.

use std::sync::atomic::Ordering;

use ringfence_memory::Arena;
use ringfence_memory::fake::SparseMemory;
use ringfence_pgtable::{
    AmdV1, Coherency, Cursor, Entry, Format, Leaf, Level, ReclaimingTable, Snoop, WalkError,
    WalkErrorKind, walk,
};
use ringfence_types::{
    CachedLevels, DomainId, Iova, PageSize, Permissions, Pfn, PfnRange, PhysAddr, PhysMemory,
};

const R: Permissions = Permissions::READ;
const W: Permissions = Permissions::WRITE;
const RW: Permissions = Permissions::READ_WRITE;

fn level(raw: u8) -> Level {
    Level::new(raw).expect("1 to 6")
}

fn size(shift: u32) -> PageSize {
    PageSize::from_shift(shift).expect("a size")
}

fn any_page() -> AmdV1 {
    AmdV1::new(Level::MAX).with_pages_up_to(size(51))
}

/// Section 2.2.3, "PTE": PR 0, Next Level 9..=11, address 12..=51, FC 60, IR 61, IW 62. The table
/// "Example Page Size Encodings" gives the address bits of a page with Next Level = 7.
#[test]
fn pages() {
    let format = any_page();
    let snooping = format.with_snoop(Snoop::Forced);
    // Level, size, base, permissions, word.
    let cases = [
        (1, 12, 0x12_3456_7000, R, 0x2000_0012_3456_7001),
        (1, 12, 0xf_ffff_ffff_f000, W, 0x400f_ffff_ffff_f001),
        (1, 13, 0x12_3456_6000, RW, 0x6000_0012_3456_6e01),
        (1, 14, 0x12_3456_4000, RW, 0x6000_0012_3456_5e01),
        (1, 15, 0x12_3456_8000, RW, 0x6000_0012_3456_be01),
        (1, 20, 0x12_3450_0000, R, 0x2000_0012_3457_fe01),
        (2, 21, 0x12_3460_0000, RW, 0x6000_0012_3460_0001),
        (2, 22, 0x12_3440_0000, RW, 0x6000_0012_345f_fe01),
        (3, 30, 0x12_4000_0000, W, 0x4000_0012_4000_0001),
        (3, 32, 0x13_0000_0000, RW, 0x6000_0013_7fff_fe01),
        (3, 38, 0x40_0000_0000, RW, 0x6000_005f_ffff_fe01),
    ];
    for (at, shift, base, permissions, word) in cases {
        let run = shift - (12 + 9 * (u32::from(at) - 1));
        let leaf = Entry::Leaf {
            base: PhysAddr::new(base),
            size: size(shift),
            permissions,
        };
        // Every entry of the page holds the same word.
        for entry in [0, 1, (1 << run) - 1] {
            let offset = (entry % (1 << run)) << (shift - run);
            let own = PhysAddr::new(base + offset);
            assert_eq!(
                format.leaf_of_run(level(at), own, run, permissions),
                word,
                "{shift} {entry}"
            );
        }
        let first = PhysAddr::new(base);
        assert_eq!(
            snooping.leaf_of_run(level(at), first, run, permissions),
            word | 1 << 60
        );
        // A, D, U, FC and the ignored bits change nothing.
        for ignored in [0, 0x1fe, 1 << 59 | 1 << 60, 1 << 63] {
            assert_eq!(format.decode(level(at), word | ignored), leaf, "{word:#x}");
        }
        assert_eq!(format.decode(level(at), word & !1), Entry::Absent);
        assert!(format.is_absent(word & !1) && !format.is_absent(word));
    }
}

/// Section 2.2.3, "PDE": the Next Level field names the level of the table.
#[test]
fn tables() {
    let format = any_page();
    for (at, word) in [
        (2, 0x6000_0000_0abc_d201),
        (3, 0x6000_0000_0abc_d401),
        (4, 0x6000_0000_0abc_d601),
        (5, 0x6000_0000_0abc_d801),
        (6, 0x6000_0000_0abc_da01_u64),
    ] {
        let table = PhysAddr::new(0xabc_d000);
        assert_eq!(format.table(level(at), table), word);
        for ignored in [0, 0x1fe, 1 << 63] {
            assert_eq!(
                format.decode(level(at), word | ignored),
                Entry::Table {
                    at: table,
                    next: level(at - 1),
                    permissions: RW,
                }
            );
        }
        assert_eq!(
            format.descend(level(at), word | AmdV1::WRITTEN_BACK),
            Some(table)
        );
        // A page, another level, no permission.
        for other in [word & !0xe00, word ^ 0x200, word & !(3 << 61)] {
            assert_eq!(format.descend(level(at), other), None, "{other:#x}");
        }
    }
}

#[test]
fn refused() {
    let format = any_page();
    let cases = [
        // Next Level not below the level of the entry.
        (1, 0x6000_0000_0000_0201),
        (2, 0x6000_0000_0000_0401),
        (3, 0x6000_0000_0000_0c01),
        // Reserved bits of a table and of a page.
        (2, 0x6010_0000_0000_0201),
        (2, 0x7000_0000_0000_0201),
        (1, 0x6010_0000_0000_0001),
        (1, 0x6400_0000_0000_0001),
        // Neither IR nor IW.
        (1, 0x0000_0000_0000_1001),
        (2, 0x0000_0000_0000_1201),
        // An address that is not aligned to the page.
        (2, 0x6000_0000_0000_1001),
        (3, 0x6000_0000_0020_0001),
        // A size below the entry, and one of more than half a table.
        (2, 0x6000_0000_0000_0e01),
        (2, 0x6000_0000_0007_fe01),
        (1, 0x6000_0000_000f_fe01),
        (3, 0x6000_003f_ffff_fe01),
        // A page of 2^52 bytes or more.
        (5, 0x6007_ffff_ffff_fe01),
        (6, 0x600f_ffff_ffff_fe01),
    ];
    for (at, word) in cases {
        assert_eq!(
            format.decode(level(at), word),
            Entry::Reserved,
            "{at} {word:#x}"
        );
    }
}

/// Section 2.2.3, table "Page Table Level Parameters": 9 bits a level, and 7 at level 6.
#[test]
fn geometry() {
    for (levels, width) in [(1, 21), (2, 30), (3, 39), (4, 48), (5, 57), (6, 64)] {
        let format = AmdV1::new(level(levels));
        assert_eq!((format.root_level().get(), format.width()), (levels, width));
        let last = u64::MAX.checked_shr(64 - width).expect("not zero");
        assert!(format.translates(Iova::new(last)));
        assert_eq!(
            format.translates(Iova::new(last.wrapping_add(1))),
            width == 64
        );
    }
    let format = AmdV1::new(Level::MAX);
    let index = |at| format.index(level(at), Iova::new(0x1234_5678_9abc_d000));
    assert_eq!(
        [6, 5, 4, 3, 2, 1].map(index),
        [0x09, 0x34, 0x0ac, 0x1e2, 0x0d5, 0x1cd]
    );
    assert_eq!(format.index(Level::MAX, Iova::new(u64::MAX)), 127);
}

fn go(tables: &[(u64, u64)], root: u8, iova: u64) -> Result<Leaf, WalkError> {
    let mut mem = SparseMemory::new();
    for (at, word) in tables {
        mem.set(PhysAddr::new(*at), *word);
    }
    let format = AmdV1::new(level(root));
    let start = Cursor::root(&format, PhysAddr::new(0x1000));
    walk(&format, &mem, start, Iova::new(iova), |_| {})
}

/// Section 2.2.3: an entry may skip levels; the address bits of the skipped levels must be zero.
#[test]
fn skipped_levels() {
    let error = |level_of, kind| {
        Err(WalkError {
            level: level(level_of),
            kind,
        })
    };
    let leaf = |page, base, permissions| {
        Ok(Leaf {
            page: size(page),
            base: PhysAddr::new(base),
            permissions,
        })
    };
    // Level 4 to level 1, entry 3 of the root.
    let tables = [
        (0x1018, 0x6000_0000_0000_2201),
        (0x2010, 0x2000_0000_0000_7001),
    ];
    let at = 3 << 39 | 2 << 12;
    assert_eq!(go(&tables, 4, at), leaf(12, 0x7000, R));
    for bit in 21..39 {
        assert_eq!(
            go(&tables, 4, at | 1 << bit),
            error(4, WalkErrorKind::BeyondWidth),
            "bit {bit}"
        );
    }
    assert_eq!(
        go(&tables, 4, at | 1 << 12),
        error(1, WalkErrorKind::NotPresent)
    );
    // Level 6 to level 2, to a page of 8 MiB in the middle of its entries.
    let tables = [
        (0x13f8, 0x6000_0000_0000_2401),
        (0x2038, 0x6000_0000_00bf_fe01),
    ];
    let at = 127 << 57 | 7 << 21 | 0x1234;
    assert_eq!(go(&tables, 6, at), leaf(23, 0x80_0000, RW));
    assert_eq!(
        go(&tables, 6, at).map(|leaf| leaf.translate(Iova::new(at)).get()),
        Ok(0x80_0000 + (3 << 21) + 0x1234)
    );
    for bit in 30..57 {
        assert_eq!(
            go(&tables, 6, at | 1 << bit),
            error(6, WalkErrorKind::BeyondWidth),
            "bit {bit}"
        );
    }
}

/// A table that points to itself: the walk ends at an entry that names no lower level.
#[test]
fn a_table_that_points_at_itself_ends() {
    let tables = [(0x1000, 0x6000_0000_0000_1601)];
    assert_eq!(
        go(&tables, 4, 0),
        Err(WalkError {
            level: level(3),
            kind: WalkErrorKind::ReservedBit,
        })
    );
}

/// A root of six levels translates 2^64 bytes. With no table below it, unlink has nothing to do,
/// and it ends. It leaves an entry that skips levels, which map and unmap do not follow either.
#[test]
fn unlink_of_six_levels() {
    let mem = Arena::new(4 << 12).expect("arena");
    let root = PhysAddr::new(0x1000);
    let table = ReclaimingTable::at(
        any_page(),
        DomainId::new(1),
        Coherency::Coherent,
        &mem,
        root,
    );
    let mut table = table.expect("inside");
    for pages in [1, 512, 1 << 20] {
        let range = PfnRange::new(Pfn::new(5), pages).expect("a range");
        assert_eq!(table.unlink(&mem, range), CachedLevels::Leaves);
    }
    // Level 6 to an empty table of level 1.
    let word = mem.word(root).expect("inside");
    word.store(0x6000_0000_0000_2201, Ordering::Relaxed);
    let range = PfnRange::new(Pfn::new(5), 1).expect("a range");
    assert_eq!(table.unlink(&mem, range), CachedLevels::Leaves);
    assert_ne!(word.load(Ordering::Relaxed), 0);
}
