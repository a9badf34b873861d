//! Maps and unmaps of runs: one walk per table, and the fewest entries, in every format.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};

use common::DOMAIN;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    AmdV1, Arm, Coherency, Entry, FirstStage, Format, Granule4K, Granule16K, Granule64K, Level,
    Levels, MapRequest, RiscV, SecondStage, Table,
};
use ringfence_types::{
    Iova, MemoryError, PageSize, Permissions, Pfn, PfnRange, PhysAddr, PhysMemory, PhysRange,
    TABLE_WORDS,
};

/// Memory that counts how often the tables are read or written.
struct Counting(Arena, AtomicU64);

impl Counting {
    fn new() -> Self {
        Self(Arena::new(1 << 20).expect("arena"), AtomicU64::new(0))
    }

    fn count(&self) -> &Arena {
        self.1.fetch_add(1, Ordering::Relaxed);
        &self.0
    }

    fn accesses(&self) -> u64 {
        self.1.swap(0, Ordering::Relaxed)
    }
}

impl PhysMemory for Counting {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.count().word(at)
    }
    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        self.count().table(at)
    }
    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        self.count().words(at, count)
    }
    fn write_back(&self, _at: PhysAddr, _bytes: u64) {}
    fn drain(&self) {}
}

fn request(iova: u64, pa: u64, pages: u64) -> MapRequest {
    MapRequest {
        iova: Iova::new(iova),
        pa: PhysAddr::new(pa),
        pages,
        permissions: Permissions::READ_WRITE,
    }
}

/// Creates the table of `format` in `mem` and runs `test` with its frame source.
fn with_table<F: Format>(format: F, test: impl Fn(&Counting, &Frames<&Counting>, &Table<F>)) {
    let mem = Counting::new();
    let region = PhysRange::new(PhysAddr::new(0x1_0000), 0xf_0000).expect("not empty");
    let frames = Frames::new(&mem, region);
    let table = Table::at(format, DOMAIN, Coherency::Coherent, &mem, PhysAddr::ZERO);
    test(&mem, &frames, &table.expect("zeroes"));
}

/// Runs of 2 to 511 pages in a linked leaf table need as few accesses as one of two pages. The
/// first physical address makes every page a leaf of its own; with the second, leaves of several
/// entries fit.
fn one_walk<F: Format>(format: F) {
    for pa in [0x4000_1000, 0x4000_0000] {
        with_table(format, |mem, frames, table| {
            table
                .map(mem, frames, request(511 << 12, 0x1000, 1))
                .expect("frames");
            let mut least = None;
            for pages in [2, 3, 16, 100, 256, 511] {
                mem.accesses();
                table
                    .map(mem, frames, request(0, pa, pages))
                    .expect("frames");
                let map = mem.accesses();
                let range = PfnRange::new(Pfn::new(0), pages).expect("not empty");
                assert!(table.unmap(mem, range).is_ok());
                let both = (map, mem.accesses());
                assert_eq!(
                    *least.get_or_insert(both),
                    both,
                    "{pages} pages: {format:?}"
                );
            }
            // One access per level, and one for the run; without the fast path of four levels, the
            // walk reads the entries of each level once.
            let (map, unmap) = least.expect("measured");
            let most = u64::from(format.root_level().get()) + 1;
            assert!(map <= most && unmap <= most, "{map} {unmap} {format:?}");
        });
    }
}

#[test]
fn a_run_walks_once() {
    let size = |shift| PageSize::from_shift(shift).expect("a size");
    for levels in Levels::ALL {
        one_walk(SecondStage::new(levels));
        if let Some(format) = FirstStage::new(levels) {
            one_walk(format);
        }
        one_walk(RiscV::first_stage(levels).with_napot());
        one_walk(RiscV::second_stage(levels).with_napot());
    }
    for levels in 2..=6 {
        let format = AmdV1::new(Level::new(levels).expect("1 to 6"));
        one_walk(format.with_pages_up_to(size(20)));
    }
    for width in [39, 48] {
        for format in [Arm::<Granule4K>::stage1(width), Arm::stage2(width)] {
            let format = format.expect("exists").with_contiguous_hint();
            one_walk(format.with_pages_up_to(size(16)));
        }
    }
}

/// Counts the leaves below `table` by the level of their entries.
fn leaves<F: Format>(f: &F, mem: &Counting, level: Level, at: PhysAddr, found: &mut [u64; 6]) {
    for word in mem.words(at, f.entries(level)).expect("inside") {
        match f.decode(level, word.load(Ordering::Relaxed)) {
            Entry::Leaf { .. } => found[usize::from(level.get()) - 1] += 1,
            Entry::Table { at, next, .. } => leaves(f, mem, next, at, found),
            Entry::Absent => {}
            Entry::Reserved => panic!("a reserved entry"),
        }
    }
}

/// A range from 0x3fe400000 to 0x4c0600000, mapped to itself: pages of 2 MiB up to the next GiB,
/// three of 1 GiB, and 2 MiB for the rest.
#[test]
fn a_mixed_range_takes_the_largest_pages() {
    fn check<F: Format>(format: F, levels: [u64; 3]) {
        with_table(format, |mem, frames, table| {
            let (first, end) = (0x3_fe40_0000_u64, 0x4_c060_0000_u64);
            let pages = (end - first) >> 12;
            table
                .map(mem, frames, request(first, first, pages))
                .expect("frames");
            let mut found = [0; 6];
            leaves(&format, mem, format.root_level(), table.root(), &mut found);
            assert_eq!(
                found,
                [levels[0], levels[1], levels[2], 0, 0, 0],
                "{format:?}"
            );
            let range = PfnRange::new(Pfn::new(first >> 12), pages).expect("not empty");
            assert!(table.unmap(mem, range).is_ok());
            assert!(table.is_empty(mem));
        });
    }
    let size = PageSize::Size1G;
    check(
        SecondStage::new(Levels::Four).with_pages_up_to(size),
        [0, 17, 3],
    );
    check(FirstStage::FOUR_LEVELS.with_pages_up_to(size), [0, 17, 3]);
    check(
        RiscV::first_stage(Levels::Three).with_pages_up_to(size),
        [0, 17, 3],
    );
    check(
        AmdV1::new(Level::new(4).expect("exists")).with_pages_up_to(size),
        [0, 17, 3],
    );
    let arm = Arm::<Granule4K>::stage1(48).expect("exists");
    check(
        arm.with_pages_up_to(size).with_contiguous_hint(),
        [0, 17, 3],
    );
}

/// Map chooses the leaves of a run in a leaf table: sizes of consecutive leaves, as binary
/// logarithms, for an IOVA and physical address that agree in all bits below 2 MiB.
#[test]
fn a_run_takes_the_largest_leaves() {
    fn sizes<F: Format>(format: F, first: u64, entries: u64) -> Vec<u32> {
        let mem = Arena::new(2 << 20).expect("arena");
        let region = PhysRange::new(PhysAddr::new(0x2_0000), 0x1e_0000).expect("not empty");
        let frames = Frames::of_size(F::GRANULE, &mem, region);
        let at = PhysAddr::ZERO;
        let table = Table::at(format, DOMAIN, Coherency::Coherent, &mem, at).expect("zeroes");
        let bytes = F::GRANULE.bytes();
        let (iova, end) = (first * bytes, (first + entries) * bytes);
        let map = request(iova, 0x4_0000_0000 + iova, entries * F::GRANULE.granules());
        table.map(&mem, &frames, map).expect("frames");
        let mut at = iova;
        let mut found = Vec::new();
        while at < end {
            let leaf = table.walk(&mem, Iova::new(at)).expect("mapped");
            assert_eq!(leaf.translate(Iova::new(at)).get(), 0x4_0000_0000 + at);
            found.push(leaf.page.shift());
            at += leaf.page.bytes();
        }
        found
    }
    let singles = |shift: u32, count: usize| vec![shift; count];
    let around = |shift: u32, head: usize, leaf: u32, tail: usize| {
        [singles(shift, head), vec![leaf], singles(shift, tail)].concat()
    };
    let largest = PageSize::Size2M;
    let vtd = SecondStage::new(Levels::Four).with_pages_up_to(largest);
    let hint = vtd.with_contiguous_hint();
    let first = FirstStage::FOUR_LEVELS.with_pages_up_to(largest);
    let riscv = RiscV::first_stage(Levels::Four).with_pages_up_to(largest);
    let amd = AmdV1::new(Level::new(4).expect("1 to 6")).with_pages_up_to(largest);
    let arm = Arm::<Granule4K>::stage1(48).expect("exists");
    let arm = arm.with_pages_up_to(largest);
    // 2 MiB where the run covers it, in every format with 4 KiB pages.
    for found in [
        sizes(vtd, 512, 512),
        sizes(first, 512, 512),
        sizes(riscv, 512, 512),
        sizes(amd, 512, 512),
        sizes(arm, 512, 512),
    ] {
        assert_eq!(found, [21]);
    }
    // From 5 entries before a 64 KiB boundary to 3 after the next one.
    let odd = (16 - 5, 5 + 16 + 3);
    assert_eq!(sizes(vtd, odd.0, odd.1), singles(12, 24));
    assert_eq!(sizes(first, odd.0, odd.1), singles(12, 24));
    assert_eq!(sizes(hint, odd.0, odd.1), around(12, 5, 16, 3));
    assert_eq!(
        sizes(riscv.with_napot(), odd.0, odd.1),
        around(12, 5, 16, 3)
    );
    assert_eq!(sizes(riscv, odd.0, odd.1), singles(12, 24));
    assert_eq!(
        sizes(arm.with_contiguous_hint(), odd.0, odd.1),
        around(12, 5, 16, 3)
    );
    assert_eq!(sizes(arm, odd.0, odd.1), singles(12, 24));
    assert_eq!(sizes(amd, odd.0, odd.1), [12, 14, 16, 13, 12]);
    // Larger granules: 128 pages of 16 KiB and 32 of 64 KiB are 2 MiB.
    let arm = Arm::<Granule16K>::stage1(47).expect("exists");
    let arm = arm.with_pages_up_to(largest).with_contiguous_hint();
    assert_eq!(sizes(arm, 127, 130), around(14, 1, 21, 1));
    let arm = Arm::<Granule64K>::stage1(48).expect("exists");
    let arm = arm.with_pages_up_to(largest).with_contiguous_hint();
    assert_eq!(sizes(arm, 31, 34), around(16, 1, 21, 1));
}
