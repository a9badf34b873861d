//! Bit patterns written out from the specifications.

use ringfence_pgtable::{
    CalgaryTce, Context, ContextError, Entry, Format, Level, Levels, PageRequests, SecondStage,
    Snoop, TranslationType,
};
use ringfence_types::{DomainId, PageSize, Permissions, PhysAddr};

const R: Permissions = Permissions::READ;
const W: Permissions = Permissions::WRITE;
const RW: Permissions = Permissions::READ_WRITE;

fn level(raw: u8) -> Level {
    Level::new(raw).expect("1 to 6")
}

fn pa(raw: u64) -> PhysAddr {
    PhysAddr::new(raw)
}

#[test]
fn second_stage_entries() {
    let plain = SecondStage::new(Levels::Five).with_pages_up_to(PageSize::Size1G);
    let snooping = plain.with_snoop(Snoop::Forced);
    // VT-d specification, section 9.8.
    let leaves = [
        (
            1,
            0x0000_0012_3456_7000,
            R,
            0x0000_0012_3456_7001,
            0x0000_0012_3456_7801,
        ),
        (
            1,
            0x000f_ffff_ffff_f000,
            W,
            0x000f_ffff_ffff_f002,
            0x000f_ffff_ffff_f802,
        ),
        (
            2,
            0x0000_0012_3460_0000,
            RW,
            0x0000_0012_3460_0083,
            0x0000_0012_3460_0883,
        ),
        (
            3,
            0x0000_0012_4000_0000,
            R,
            0x0000_0012_4000_0081,
            0x0000_0012_4000_0881,
        ),
    ];
    for (at, base, permissions, word, snooped) in leaves {
        let base = pa(base);
        assert_eq!(plain.leaf(level(at), base, permissions), word);
        assert_eq!(snooping.leaf(level(at), base, permissions), snooped);
        for word in [word, snooped, word | 0x3ff << 52 | 1 << 63, word | 0x77c] {
            // Bits 2 to 6 and 8 to 10 are ignored. Bit 7 is SP and is already set where it matters.
            assert_eq!(
                plain.decode(level(at), word),
                Entry::Leaf {
                    base,
                    size: plain.leaf_size(level(at)).expect("a leaf"),
                    permissions
                },
                "{word:#x}"
            );
        }
    }
    assert_eq!(plain.table(level(2), pa(0xabc_d000)), 0xabc_d003);
    for at in 2..=5 {
        let table = Entry::Table {
            at: pa(0xabc_d000),
            next: level(at - 1),
            permissions: RW,
        };
        assert_eq!(plain.decode(level(at), 0xabc_d003), table);
        assert_eq!(
            plain.decode(level(at), plain.with_live(0xabc_d003, 512)),
            table
        );
        assert_eq!(
            plain.decode(level(at), 0xabc_d003 | SecondStage::WRITTEN_BACK),
            table
        );
    }
    assert_eq!(plain.with_live(0xabc_d003, 512), 0x2000_0000_0abc_d003);
    for live in [0, 1, 511, 512] {
        assert_eq!(plain.live(plain.with_live(u64::MAX, live)), live);
    }
    assert_eq!(SecondStage::WRITTEN_BACK, 1 << 63);
}

#[test]
fn second_stage_refuses() {
    let small = SecondStage::new(Levels::Five);
    let large = small.with_pages_up_to(PageSize::Size1G);
    let cases = [
        // TM at every level.
        (large, 1, 1 << 62 | 3),
        (large, 2, 1 << 62 | 3),
        (large, 4, 1 << 62 | 3),
        (large, 3, 1 << 62 | 0x83),
        // SNP in an entry that points to a table.
        (large, 2, 0x803),
        (large, 5, 0x803),
        // Address bits below the page size.
        (large, 2, 0x1083),
        (large, 2, 0x10_0083),
        (large, 3, 0x20_0083),
        (large, 3, 0x2000_0083),
        // SP at a level that allows no leaf.
        (large, 4, 0x83),
        (large, 5, 0x83),
        (small, 2, 0x83),
        (small.with_pages_up_to(PageSize::Size2M), 3, 0x83),
    ];
    for (format, at, word) in cases {
        assert_eq!(
            format.decode(level(at), word),
            Entry::Reserved,
            "{at} {word:#x}"
        );
        // Without R and W, all other bits are ignored.
        assert_eq!(format.decode(level(at), word & !3), Entry::Absent);
        assert!(format.is_absent(word & !3) && !format.is_absent(word));
    }
    assert_eq!(
        small.decode(Level::LEAF, 0x83),
        Entry::Leaf {
            base: pa(0),
            size: PageSize::Size4K,
            permissions: RW
        }
    );
}

#[test]
fn geometry() {
    for (levels, width, root) in [
        (Levels::Three, 39, 3),
        (Levels::Four, 48, 4),
        (Levels::Five, 57, 5),
    ] {
        let format = SecondStage::new(levels);
        assert_eq!((format.width(), format.root_level().get()), (width, root));
        assert_eq!(format.shift(format.root_level()) + 9, width);
        assert_eq!(
            [1, 2, 3, 4, 5].map(|l| format.shift(level(l))),
            [12, 21, 30, 39, 48]
        );
    }
    let iova = ringfence_types::Iova::new(0x1234_5678_9abc_d000);
    let index = |l| SecondStage::new(Levels::Five).index(level(l), iova);
    assert_eq!(
        [5, 4, 3, 2, 1].map(index),
        [0x34, 0x0ac, 0x1e2, 0x0d5, 0x1cd]
    );
}

#[test]
fn calgary_entries() {
    let format = CalgaryTce::FULL;
    // Linux 2.6.18 to 5.3, tce.h: read is bit 0, write is bit 1, the page number starts at bit 12;
    // big-endian.
    let cases = [
        (
            0x0000_1234_5678_9000,
            R,
            [0x00, 0x00, 0x12, 0x34, 0x56, 0x78, 0x90, 0x01],
        ),
        (
            0x0000_ffff_ffff_f000,
            W,
            [0x00, 0x00, 0xff, 0xff, 0xff, 0xff, 0xf0, 0x02],
        ),
        (
            0x0000_0000_0001_0000,
            RW,
            [0x00, 0x00, 0x00, 0x00, 0x00, 0x01, 0x00, 0x03],
        ),
    ];
    for (base, permissions, bytes) in cases {
        let word = format.leaf(Level::LEAF, pa(base), permissions);
        assert_eq!(word.to_ne_bytes(), bytes);
        assert_eq!(
            format.decode(Level::LEAF, word),
            Entry::Leaf {
                base: pa(base),
                size: PageSize::Size4K,
                permissions
            }
        );
        assert!(!format.is_absent(word));
    }
    assert_eq!(
        format.decode(Level::LEAF, u64::from_be(0xffff_ffff_ffff_fffc)),
        Entry::Absent
    );
    assert!(format.is_absent(u64::from_be(0xffff_ffff_ffff_fffc)));
    assert_eq!(
        format.decode(Level::LEAF, u64::from_be(0x0001_0000_0000_0001)),
        Entry::Reserved
    );
    assert_eq!((format.entries(Level::LEAF), format.width()), (1 << 20, 32));
    assert_eq!((CalgaryTce::new(24), CalgaryTce::new(33)), (None, None));
    assert_eq!(
        CalgaryTce::new(25).map(|f| f.entries(Level::LEAF)),
        Some(1 << 13)
    );
}

#[test]
fn contexts_with_rings() {
    let context = Context {
        domain: DomainId::new(0xbeef),
        translation: TranslationType::Rings {
            device: pa(0x1_2345_6000),
        },
    };
    // P, TT = 11b, SLPTPTR; AW = 0, DID.
    let words = [0x1_2345_600d, 0xbe_ef00];
    assert_eq!(context.encode(), words);
    assert_eq!(Context::decode(words), Ok(context));
    for aw in 1..8 {
        assert_eq!(
            Context::decode([words[0], words[1] | aw]),
            Err(ContextError::Unsupported)
        );
    }
}

#[test]
fn context_entries() {
    let table = |levels| TranslationType::Table {
        root: pa(0x1_2345_6000),
        levels,
    };
    let device_tlb = |levels, page_requests| TranslationType::DeviceTlb {
        root: pa(0x1_2345_6000),
        levels,
        page_requests,
    };
    let pass = |levels| TranslationType::PassThrough { levels };
    // VT-d specification, section 9.3: P, TT in 2..=3, SLPTPTR; AW in 0..=2 and DID in 8..=23 of
    // the high word.
    let cases = [
        (table(Levels::Three), 0x0001, [0x1_2345_6001, 0x101]),
        (table(Levels::Four), 0xbeef, [0x1_2345_6001, 0xbe_ef02]),
        (table(Levels::Five), 0xffff, [0x1_2345_6001, 0xff_ff03]),
        (
            device_tlb(Levels::Four, PageRequests::Blocked),
            0xbeef,
            [0x1_2345_6005, 0xbe_ef02],
        ),
        (
            device_tlb(Levels::Four, PageRequests::Allowed),
            0xbeef,
            [0x1_2345_6015, 0xbe_ef02],
        ),
        (pass(Levels::Four), 0x0002, [0x9, 0x202]),
        (pass(Levels::Five), 0x0000, [0x9, 0x003]),
    ];
    for (translation, domain, words) in cases {
        let context = Context {
            domain: DomainId::new(domain),
            translation,
        };
        assert_eq!(context.encode(), words);
        assert_eq!(Context::decode(words), Ok(context));
        // FPD and the available bits 3..=6 of the high word change nothing.
        assert_eq!(
            Context::decode([words[0] | 2, words[1] | 0x78]),
            Ok(context)
        );
        assert_eq!(
            Context::decode([words[0] & !1, words[1]]),
            Err(ContextError::ContextNotPresent)
        );
        // Bit 4, PRE, is reserved except with TT = 01b.
        let first = if words[0] & 0xc == 0x4 { 5 } else { 4 };
        for bit in first..12 {
            let low = words[0] | 1 << bit;
            assert_eq!(
                Context::decode([low, words[1]]),
                Err(ContextError::ReservedBit)
            );
        }
        for bit in (24..64).chain([7]) {
            let high = words[1] | 1 << bit;
            assert_eq!(
                Context::decode([words[0], high]),
                Err(ContextError::ReservedBit)
            );
        }
        let reserved = words[0] & !0x1c | 3 << 2;
        assert_eq!(
            Context::decode([reserved, words[1]]),
            Err(ContextError::Unsupported)
        );
        for aw in [0, 4, 5, 6, 7] {
            let high = words[1] & !7 | aw;
            assert_eq!(
                Context::decode([words[0], high]),
                Err(ContextError::Unsupported)
            );
        }
    }
}
