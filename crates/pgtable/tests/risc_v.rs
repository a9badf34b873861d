//! The RISC-V formats: words written out from "The RISC-V Instruction Set Manual, Volume II:
//! Privileged Architecture" (sections "Sv39", "Svnapot", "Svpbmt", "Guest Physical Address
//! Translation").

use ringfence_memory::fake::SparseMemory;
use ringfence_pgtable::{
    Cursor, Entry, Format, Level, Levels, MemoryType, RiscV, Table, WalkErrorKind, walk,
};
use ringfence_types::{Iova, PageSize, Permissions, PhysAddr};

const R: Permissions = Permissions::READ;
const W: Permissions = Permissions::WRITE;
const RW: Permissions = Permissions::READ_WRITE;
const SV39: RiscV = RiscV::first_stage(Levels::Three).with_pages_up_to(PageSize::Size1G);
const NAPOT: RiscV = SV39.with_napot().with_memory_type(MemoryType::Platform);

fn level(raw: u8) -> Level {
    Level::new(raw).expect("1 to 6")
}

fn leaf(base: u64, shift: u32, permissions: Permissions) -> Entry {
    Entry::Leaf {
        base: PhysAddr::new(base),
        size: PageSize::from_shift(shift).expect("a size"),
        permissions,
    }
}

/// Section "Sv39": V 0, R 1, W 2, U 4, A 6, D 7, PPN 10..=53.
#[test]
fn pages() {
    let cases = [
        (1, 0x1_2345_6000, R, 0x48d1_5853, R),
        (1, 0x1_2345_6000, W, 0x48d1_58d7, RW),
        (1, 0xff_ffff_ffff_f000, RW, 0x003f_ffff_ffff_fcd7, RW),
        (2, 0x1_2340_0000, RW, 0x48d0_00d7, RW),
        (3, 0x1_4000_0000, R, 0x5000_0053, R),
    ];
    let second = RiscV::second_stage(Levels::Three).with_pages_up_to(PageSize::Size1G);
    for (at, base, permissions, word, seen) in cases {
        for format in [SV39, second, NAPOT] {
            assert_eq!(
                format.leaf(level(at), PhysAddr::new(base), permissions),
                word
            );
            let expected = leaf(base, 12 + 9 * (u32::from(at) - 1), seen);
            // X, G and RSW change nothing.
            for ignored in [0, 1 << 3, 1 << 5, 3 << 8] {
                assert_eq!(
                    format.decode(level(at), word | ignored),
                    expected,
                    "{word:#x}"
                );
            }
            assert_eq!(format.decode(level(at), word & !1), Entry::Absent);
            assert!(format.is_absent(word & !1) && !format.is_absent(word));
        }
    }
    // A page that is not dirty: a write would fault.
    assert_eq!(
        SV39.decode(level(1), 0x48d1_5857),
        leaf(0x1_2345_6000, 12, R)
    );
}

/// Sections "Svnapot" (N 63, PPN bits 0 to 3 = 1000) and "Svpbmt" (PBMT 61..=62).
#[test]
fn extensions() {
    for entry in 0..16 {
        let own = PhysAddr::new(0x1_2345_0000 + (entry << 12));
        assert_eq!(
            NAPOT.leaf_of_run(level(1), own, 4, RW),
            0x8000_0000_48d1_60d7
        );
    }
    assert_eq!(
        NAPOT.decode(level(1), 0x8000_0000_48d1_60d7),
        leaf(0x1_2345_0000, 16, RW)
    );
    for (kind, word) in [
        (MemoryType::Platform, 0x48d1_58d7),
        (MemoryType::NonCacheable, 0x2000_0000_48d1_58d7),
        (MemoryType::Io, 0x4000_0000_48d1_58d7),
    ] {
        let format = SV39.with_memory_type(kind);
        assert_eq!(
            format.leaf(level(1), PhysAddr::new(0x1_2345_6000), RW),
            word
        );
        assert_eq!(format.decode(level(1), word), leaf(0x1_2345_6000, 12, RW));
    }
}

#[test]
fn tables() {
    let at = PhysAddr::new(0x1_2345_6000);
    for own in [2, 3] {
        let word = SV39.table(level(own), at);
        assert_eq!(word, 0x48d1_5801);
        let next = level(own - 1);
        let table = Entry::Table {
            at,
            next,
            permissions: RW,
        };
        for ignored in [0, 1 << 5, 3 << 8] {
            assert_eq!(SV39.decode(level(own), word | ignored), table);
        }
        assert_eq!(
            SV39.descend(level(own), word | RiscV::WRITTEN_BACK),
            Some(at)
        );
        assert_eq!(SV39.descend(level(own), word | 2), None);
    }
}

#[test]
fn refused() {
    let cases = [
        // W without R, X alone, no U, no A.
        (NAPOT, 1, 0x48d1_58d5),
        (NAPOT, 1, 0x48d1_58d9),
        (NAPOT, 1, 0x48d1_58c7),
        (NAPOT, 1, 0x48d1_5897),
        // Reserved bits.
        (NAPOT, 1, 0x0040_0000_48d1_58d7),
        (NAPOT, 1, 0x1000_0000_48d1_58d7),
        (NAPOT, 2, 0x0040_0000_48d1_5801),
        // A table entry at level 1, and U, A, D, PBMT or N in one above.
        (NAPOT, 1, 0x48d1_5801),
        (NAPOT, 2, 0x48d1_5811),
        (NAPOT, 2, 0x48d1_5841),
        (NAPOT, 2, 0x48d1_5881),
        (NAPOT, 2, 0x2000_0000_48d1_5801),
        (NAPOT, 2, 0x8000_0000_48d1_5801),
        // A large page that is not aligned.
        (NAPOT, 2, 0x48d0_04d7),
        (NAPOT, 3, 0x4008_00d7),
        // N above level 1, with another size, and without Svnapot.
        (NAPOT, 2, 0x8000_0000_48d0_00d7),
        (NAPOT, 1, 0x8000_0000_48d1_40d7),
        (NAPOT, 1, 0x8000_0000_48d1_50d7),
        (SV39, 1, 0x8000_0000_48d1_60d7),
        // PBMT = 3, and any without Svpbmt.
        (NAPOT, 1, 0x6000_0000_48d1_58d7),
        (SV39, 1, 0x2000_0000_48d1_58d7),
    ];
    for (format, at, word) in cases {
        assert_eq!(
            format.decode(level(at), word),
            Entry::Reserved,
            "{at} {word:#x}"
        );
    }
}

/// Section "Sv39": bits 63 to 39 equal bit 38. Section "Guest Physical Address Translation": two
/// more bits, zero above, and a root of 16 KiB.
#[test]
fn geometry() {
    for (levels, width) in [(Levels::Three, 39), (Levels::Four, 48), (Levels::Five, 57)] {
        let (first, second) = (RiscV::first_stage(levels), RiscV::second_stage(levels));
        assert_eq!((first.width(), second.width()), (width, width + 2));
        let half = 1_u64 << (width - 1);
        for (iova, translated) in [
            (half - 1, true),
            (half, false),
            (!half, false),
            (half.wrapping_neg() - 1, false),
            (half.wrapping_neg(), true),
            (u64::MAX, true),
        ] {
            assert_eq!(first.translates(Iova::new(iova)), translated, "{iova:#x}");
        }
        assert!(second.translates(Iova::new((1 << (width + 2)) - 1)));
        assert!(!second.translates(Iova::new(1 << (width + 2))));
        assert_eq!(Table::root_bytes_of(&second), 0x4000);
        assert_eq!(
            (second.root_alignment(), first.root_alignment()),
            (0x4000, 0x1000)
        );
        let last = Iova::new((1 << (width + 2)) - 1);
        assert_eq!(second.index(second.root_level(), last), 2047);
        assert_eq!(first.index(first.root_level(), Iova::new(u64::MAX)), 511);
    }
}

/// A walk of the upper half of the address space, and of an address between the halves.
#[test]
fn sign_extension() {
    let mut mem = SparseMemory::new();
    for (at, word) in [(0x1ff8, 0x801), (0x2ff8, 0xc01), (0x3ff8, 0x48d1_58d7)] {
        mem.set(PhysAddr::new(at), word);
    }
    let start = Cursor::root(&SV39, PhysAddr::new(0x1000));
    let go = |iova| walk(&SV39, &mem, start, Iova::new(iova), |_| {});
    let page = go(u64::MAX).expect("mapped");
    assert_eq!(page.translate(Iova::new(u64::MAX)).get(), 0x1_2345_6fff);
    let error = go((1 << 39) - 1).expect_err("not canonical");
    assert_eq!(error.kind, WalkErrorKind::BeyondWidth);
}
