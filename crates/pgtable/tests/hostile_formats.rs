//! Walks, maps and unmaps over tables of every format whose words an attacker wrote: no panic, no
//! endless walk, and no leaf outside the address range of the format.

mod common;

use std::sync::atomic::Ordering;

use common::DOMAIN;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use ringfence_memory::Arena;
use ringfence_pgtable::{
    AmdV1, Arm, Coherency, Cursor, FirstStage, Format, Granule4K, Level, Levels, MapRequest,
    MemoryType, ReclaimingTable, RiscV, SecondStage, Table, walk,
};
use ringfence_types::{
    FrameSource, Iova, OutOfFrames, PageSize, Permissions, Pfn, PfnRange, PhysAddr, PhysMemory,
};

struct NoFrames;

impl FrameSource for NoFrames {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        Err(OutOfFrames)
    }
    fn free(&self, _frame: PhysAddr) {}
}

/// Page of the root. The tables lie in the pages after it.
const ROOT: u64 = 16;
const PAGES: u64 = 12;

/// A word: the page that it points to, and bits of all formats.
fn word() -> impl Strategy<Value = (u64, u64)> {
    let bits = prop_oneof![
        4 => Just(0x3_u64),
        2 => (any::<u64>(), any::<u64>()).prop_map(|(a, b)| 3 | a & b & 0xfff),
        1 => (0_u32..64).prop_map(|bit| 3 ^ 1 << bit),
        1 => any::<u64>(),
        // AMD-Vi: Next Level, IR and IW. RISC-V: U, A, D and N. Arm: AF and the contiguous hint.
        3 => (0_u64..8).prop_map(|next| 3 << 61 | next << 9 | 1),
        2 => any::<bool>().prop_map(|napot| u64::from(napot) << 63 | 0xd7),
        2 => any::<bool>().prop_map(|hint| u64::from(hint) << 52 | 0x7c3),
    ];
    (ROOT..ROOT + PAGES, bits)
}

type Words = Vec<((u64, u64), (u64, u64))>;

fn attack<F: Format>(format: F, shift: u32, words: &Words, iova: u64, pages: u64) {
    let root = PhysAddr::new(ROOT << 12);
    // The root of some formats has several pages.
    let mem = Arena::new((ROOT + 16) << 12).expect("arena");
    let table = Table::at(format, DOMAIN, Coherency::Coherent, &mem, root);
    let reclaiming = ReclaimingTable::at(format, DOMAIN, Coherency::Coherent, &mem, root);
    for ((page, index), (to, bits)) in words {
        let at = PhysAddr::new((ROOT + page) << 12 | index << 3);
        let word = mem.word(at).expect("inside");
        word.store((to << shift) | bits, Ordering::Relaxed);
    }
    let mut last = format.root_level();
    let start = Cursor::root(&format, root);
    let end = walk(&format, &mem, start, Iova::new(iova), |cursor| {
        assert!(cursor.level() < last, "each step descends");
        last = cursor.level();
    });
    if let Ok(leaf) = end {
        assert!(leaf.base.is_aligned(leaf.page.bytes()));
        assert!(format.translates(Iova::new(iova)));
        assert_eq!(leaf.base.get() >> format.physical_bits(), 0);
    }
    let Some(range) = PfnRange::new(Pfn::new(iova >> 12), pages) else {
        return;
    };
    let request = MapRequest {
        iova: range.lo().iova(),
        pa: PhysAddr::new(0x4000_0000),
        pages,
        permissions: Permissions::READ,
    };
    let (table, mut reclaiming) = (table.expect("zeroes"), reclaiming.expect("zeroes"));
    // The results depend on the words. They must be results.
    let _ = table.unmap(&mem, range);
    let _ = table.map(&mem, &NoFrames, request);
    let _ = reclaiming.unmap(&mem, range);
    let _ = reclaiming.map(&mem, &NoFrames, request);
    reclaiming.unlink(&mem, range);
    let _ = table.is_empty(&mem);
}

fn largest<F>(with: impl Fn(PageSize) -> F) -> F {
    with(PageSize::from_shift(38).expect("a size"))
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(0xbad2),
        ..ProptestConfig::with_cases(500)
    })]

    #[test]
    fn any_words_in_any_format(
        words in prop::collection::vec(((0..PAGES, 0_u64..4), word()), 0..24),
        iova in prop_oneof![
            6 => prop::collection::vec(0_u64..4, 6)
                .prop_map(|index| (0..6).map(|l| index[l] << (12 + 9 * l)).fold(0, |a, b| a | b)),
            1 => any::<u64>(),
        ],
        pages in prop_oneof![Just(1_u64), Just(16), Just(513), 1_u64..3000],
    ) {
        for levels in Levels::ALL {
            let iova = iova & ((1 << levels.width()) - 1);
            let second = SecondStage::new(levels).with_pages_up_to(PageSize::Size1G);
            attack(second, 12, &words, iova, pages);
            if let Some(first) = FirstStage::new(levels) {
                attack(first.with_pages_up_to(PageSize::Size1G), 12, &words, iova, pages);
            }
            for format in [RiscV::first_stage(levels), RiscV::second_stage(levels)] {
                let format = format.with_napot().with_memory_type(MemoryType::Io);
                attack(largest(|size| format.with_pages_up_to(size)), 10, &words, iova, pages);
            }
        }
        for levels in 1..=6 {
            let format = AmdV1::new(Level::new(levels).expect("1 to 6"));
            let iova = iova & u64::MAX.checked_shr(64 - format.width()).unwrap_or(0);
            attack(largest(|size| format.with_pages_up_to(size)), 12, &words, iova, pages);
        }
        for width in [32, 39, 43, 48] {
            let iova = iova & ((1 << width) - 1);
            for format in [Arm::<Granule4K>::stage1(width), Arm::stage2(width)] {
                let format = format.expect("exists").with_contiguous_hint();
                attack(largest(|size| format.with_pages_up_to(size)), 12, &words, iova, pages);
            }
        }
    }
}
