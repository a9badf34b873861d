//! The page walk over hostile memory.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use ringfence_memory::fake::{FaultyFrames, SparseMemory};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    CalgaryTce, Coherency, Cursor, Format, Leaf, Level, Levels, MapError, MapRequest,
    ReclaimingTable, SecondStage, Table, UnmapError, WalkError, WalkErrorKind, walk,
};
use ringfence_types::{
    Access, DomainId, FaultReason, FrameSource, Iova, MemoryError, OutOfFrames, PageSize,
    Permissions, Pfn, PfnRange, PhysAddr, PhysMemory, PhysRange, TABLE_WORDS,
};

use common::{DOMAIN, flushed};

const FOUR: SecondStage = SecondStage::new(Levels::Four).with_pages_up_to(PageSize::Size1G);
const ROOT: u64 = 0x1000;

fn go(mem: &SparseMemory, iova: u64) -> (Result<Leaf, WalkError>, Vec<Cursor>) {
    let mut path = Vec::new();
    let start = Cursor::root(&FOUR, PhysAddr::new(ROOT));
    let end = walk(&FOUR, mem, start, Iova::new(iova), |cursor| {
        path.push(cursor)
    });
    (end, path)
}

fn error(level: u8, kind: WalkErrorKind) -> Result<Leaf, WalkError> {
    Err(WalkError {
        level: Level::new(level).expect("1 to 6"),
        kind,
    })
}

/// Creates tables at 0x1000, 0x2000, ... and sets entry 0 of each.
fn chain(entries: &[u64]) -> SparseMemory {
    let mut mem = SparseMemory::new();
    for (index, entry) in entries.iter().enumerate() {
        mem.set(PhysAddr::new(ROOT + 0x1000 * index as u64), *entry);
    }
    mem
}

#[test]
fn ends_of_a_walk() {
    use WalkErrorKind::{BeyondWidth, NoPermission, NotPresent, ReservedBit, TableAccess};
    let leaf = |page, base, bits| {
        Ok(Leaf {
            page,
            base: PhysAddr::new(base),
            permissions: Permissions::from_bits(bits).expect("some"),
        })
    };
    let cases: &[(&[u64], u64, Result<Leaf, WalkError>)] = &[
        (
            &[0x2003, 0x3003, 0x4003, 0x7001],
            0xfff,
            leaf(PageSize::Size4K, 0x7000, 1),
        ),
        (
            &[0x2003, 0x3003, 0x4000_0083],
            0x1f_ffff,
            leaf(PageSize::Size2M, 0x4000_0000, 3),
        ),
        (
            &[0x2003, 0x4000_0082],
            0x3fff_ffff,
            leaf(PageSize::Size1G, 0x4000_0000, 2),
        ),
        // The result is the intersection of the permissions on the path.
        (
            &[0x2001, 0x3003, 0x4003, 0x7003],
            0,
            leaf(PageSize::Size4K, 0x7000, 1),
        ),
        (
            &[0x2003, 0x3002, 0x4003, 0x7003],
            0,
            leaf(PageSize::Size4K, 0x7000, 2),
        ),
        (&[0x2001, 0x3002, 0x4003, 0x7003], 0, error(3, NoPermission)),
        (&[0x2001, 0x3003, 0x4003, 0x7002], 0, error(1, NoPermission)),
        (&[0x2001, 0x4000_0082], 0, error(3, NoPermission)),
        (&[0], 0, error(4, NotPresent)),
        (&[0x2003, 0x3003, 0x4003, 0x7000], 0, error(1, NotPresent)),
        (
            &[0x2003, 0x3003, 0x4003, 0x7003],
            0x1000,
            error(1, NotPresent),
        ),
        (
            &[0x2003, 0x3003, 0x4003, 0x7003],
            1 << 48,
            error(4, BeyondWidth),
        ),
        (
            &[0x2003, 0x3003, 0x4003, 0x7003],
            u64::MAX,
            error(4, BeyondWidth),
        ),
        (&[0x2083], 0, error(4, ReservedBit)),
        (&[0x2003, 0x3003, 0x803], 0, error(2, ReservedBit)),
        (
            &[0x2003, 0x3003, 0x4003, 1 << 62 | 1],
            0,
            error(1, ReservedBit),
        ),
        (&[0x2003, 0x9003], 0, error(2, TableAccess)),
        (
            &[0x000f_ffff_ffff_f003],
            (1 << 48) - 1,
            error(4, NotPresent),
        ),
        (&[0x000f_ffff_ffff_f003], 0, error(3, TableAccess)),
        (&[], 0, error(4, TableAccess)),
    ];
    for (entries, iova, end) in cases {
        assert_eq!(go(&chain(entries), *iova).0, *end, "{entries:x?} {iova:#x}");
    }
}

#[test]
fn a_table_that_points_at_itself_ends() {
    let mem = chain(&[ROOT | 3]);
    let (end, path) = go(&mem, 0);
    // At level 1 the same word decodes to a leaf.
    let leaf = Leaf {
        page: PageSize::Size4K,
        base: PhysAddr::new(ROOT),
        permissions: Permissions::READ_WRITE,
    };
    assert_eq!(end, Ok(leaf));
    assert_eq!(path.len(), 3);
    assert!(path.iter().all(|cursor| cursor.table().get() == ROOT));
    assert_eq!(path.last().map(|c| c.level()), Some(Level::LEAF));
}

#[test]
fn walk_resumes_from_every_cursor() {
    let mem = chain(&[0x2003, 0x3001, 0x4003, 0x7003]);
    let (end, path) = go(&mem, 0x123);
    let seen: Vec<_> = path
        .iter()
        .map(|c| (c.level().get(), c.table().get(), c.permissions().bits()))
        .collect();
    assert_eq!(seen, [(3, 0x2000, 3), (2, 0x3000, 1), (1, 0x4000, 1)]);
    for cursor in path {
        assert_eq!(
            walk(&FOUR, &mem, cursor, Iova::new(0x123), |_| {}),
            end,
            "permissions above the cursor count"
        );
    }
    assert_eq!(
        end.map(|leaf| leaf.translate(Iova::new(0x123)).get()),
        Ok(0x7123)
    );
}

#[test]
fn reasons() {
    use WalkErrorKind::{BeyondWidth, NoPermission, NotPresent, ReservedBit, TableAccess};
    let cases = [
        (
            BeyondWidth,
            FaultReason::AddressBeyondWidth,
            FaultReason::AddressBeyondWidth,
        ),
        (NotPresent, FaultReason::NotPresent, FaultReason::NotPresent),
        (
            NoPermission,
            FaultReason::ReadDenied,
            FaultReason::WriteDenied,
        ),
        (
            ReservedBit,
            FaultReason::ReservedBit,
            FaultReason::ReservedBit,
        ),
        (
            TableAccess,
            FaultReason::TableAccess,
            FaultReason::TableAccess,
        ),
    ];
    for (kind, read, write) in cases {
        assert_eq!(
            (
                kind.fault_reason(Access::Read),
                kind.fault_reason(Access::Write)
            ),
            (read, write)
        );
    }
}

struct NoFrames;
impl FrameSource for NoFrames {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        Err(OutOfFrames)
    }
    fn free(&self, _frame: PhysAddr) {}
}

#[test]
fn map_and_unmap_refuse_a_corrupt_path() {
    let mut mem = SparseMemory::new();
    mem.add(PhysAddr::new(ROOT));
    let table = Table::at(
        FOUR,
        DomainId::new(1),
        Coherency::Coherent,
        &mem,
        PhysAddr::new(ROOT),
    )
    .expect("zeroes");
    let iova = Iova::ZERO;
    let request = |pages| MapRequest {
        iova,
        pa: PhysAddr::new(0x5000),
        pages,
        permissions: Permissions::READ,
    };
    let range = |pages| PfnRange::new(Pfn::new(0), pages).expect("not empty");
    // An entry that points to a table outside memory, and one with a reserved bit set.
    for entry in [0x9000_0003, 1 << 62 | 3, 0x83] {
        mem.set(PhysAddr::new(ROOT), entry);
        for pages in [1, 700] {
            assert_eq!(
                table.map(&mem, &NoFrames, request(pages)),
                Err(MapError::Corrupt { iova })
            );
            assert_eq!(
                table.unmap(&mem, range(pages)).err(),
                Some(UnmapError::Corrupt { iova })
            );
        }
    }
    mem.set(PhysAddr::new(ROOT), 0);
    assert_eq!(
        table.map(&mem, &NoFrames, request(1)),
        Err(MapError::OutOfFrames)
    );
}

/// A hostile hand links table pages twice, in a cycle, and at the root: each frame returns once.
#[test]
fn a_table_page_that_is_linked_twice_is_freed_once() {
    let mem = Arena::new(1 << 20).expect("arena");
    let region = PhysRange::new(PhysAddr::new(0x1000), (1 << 20) - 0x1000).expect("not empty");
    // An entry of the page at `level` on the path to address zero, by the entry's index.
    let cases: [&[(u8, usize, u8)]; 6] = [
        &[(4, 5, 3)],
        &[(3, 5, 2), (3, 6, 2)],
        &[(2, 511, 1), (3, 1, 1)],
        &[(2, 0, 2), (2, 3, 2)],
        &[(3, 0, 4), (2, 7, 4)],
        &[(4, 1, 4), (2, 1, 3), (2, 2, 1), (3, 3, 2)],
    ];
    for links in cases {
        for reclaims in [false, true] {
            let frames = FaultyFrames::new(Frames::new(&mem, region));
            let mut plain = None;
            let mut reclaiming = None;
            let request = MapRequest {
                iova: Iova::ZERO,
                pa: PhysAddr::new(0x5000),
                pages: 3,
                permissions: Permissions::READ,
            };
            let root = if reclaims {
                let coherency = Coherency::Coherent;
                let table = ReclaimingTable::new(FOUR, DOMAIN, coherency, &mem, &frames);
                let table = reclaiming.insert(table.expect("frames"));
                table.map(&mem, &frames, request).expect("frames");
                table.root()
            } else {
                let table = Table::new(FOUR, DOMAIN, Coherency::Coherent, &mem, &frames);
                let table = plain.insert(table.expect("frames"));
                table.map(&mem, &frames, request).expect("frames");
                table.root()
            };
            let mut pages = vec![root];
            for _ in 0..3 {
                let last = pages.last().expect("the root");
                let entry = mem.word(*last).expect("inside").load(Ordering::Relaxed);
                pages.push(FOUR.descend(Level::MAX, entry).expect("linked"));
            }
            let page = |level: u8| pages[usize::from(4 - level)];
            for (level, index, to) in links {
                let at = page(*level).wrapping_add(*index as u64 * 8);
                let word = mem.word(at).expect("inside");
                word.store(FOUR.table(Level::MAX, page(*to)), Ordering::Relaxed);
            }
            if let Some(table) = plain {
                assert!(table.destroy(&mem, &frames, &flushed()).is_ok());
            }
            if let Some(table) = reclaiming {
                assert!(table.destroy(&mem, &frames, &flushed()).is_ok());
            }
            assert_eq!(frames.wrong_frees(), 0, "{links:?}");
        }
    }
}

/// A root that the caller owns is not freed, whatever its tables point to.
#[test]
fn a_root_of_the_caller_is_not_freed() {
    let mut mem = SparseMemory::new();
    mem.add(PhysAddr::new(ROOT));
    let root = PhysAddr::new(ROOT);
    let table = Table::at(FOUR, DOMAIN, Coherency::Coherent, &mem, root).expect("zeroes");
    mem.set(PhysAddr::new(ROOT + 8), ROOT | 3);
    mem.set(PhysAddr::new(ROOT + 16), 0x9000_0003);
    let frames = FaultyFrames::new(NoFrames);
    assert!(table.destroy(&mem, &frames, &flushed()).is_ok());
    assert_eq!(
        frames.wrong_frees(),
        0,
        "neither the root nor a page outside memory"
    );
}

/// Memory that counts how often the tables are read.
struct Counting(Arena, AtomicU64);

impl Counting {
    fn count(&self) -> &Arena {
        self.1.fetch_add(1, Ordering::Relaxed);
        &self.0
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

/// A map that needs more tables than there are frames ends at the first frame that is missing, not
/// after it has counted all of them.
#[test]
fn a_map_of_more_tables_than_frames_is_bounded_by_the_frames() {
    const FRAMES: u64 = 64;
    let format = SecondStage::new(Levels::Four);
    let mem = Counting(
        Arena::new((FRAMES + 1) << 12).expect("arena"),
        AtomicU64::new(0),
    );
    let region = PhysRange::new(PhysAddr::new(0x1000), FRAMES << 12).expect("not empty");
    let frames = FaultyFrames::new(Frames::new(&mem, region));
    let table = Table::new(format, DOMAIN, Coherency::Coherent, &mem, &frames).expect("frames");
    for pages in [1 << 20, 1 << 25, 1 << 36] {
        let before = mem.1.load(Ordering::Relaxed);
        let request = MapRequest {
            iova: Iova::ZERO,
            pa: PhysAddr::ZERO,
            pages,
            permissions: Permissions::READ,
        };
        assert_eq!(
            table.map(&mem, &frames, request),
            Err(MapError::OutOfFrames)
        );
        let reads = mem.1.load(Ordering::Relaxed) - before;
        assert!(reads <= 16 * FRAMES, "{reads} reads for {pages} pages");
        assert_eq!(frames.outstanding(), 1, "the root");
    }
    assert!(table.destroy(&mem, &frames, &flushed()).is_ok());
}

/// Words that resemble entries: most point to one of a few pages, with some bits flipped.
fn entry() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => (1_u64..9, any::<u64>()).prop_map(|(page, flags)| page << 12 | flags & 0x83),
        2 => (1_u64..9).prop_map(|page| page << 12 | 3),
        1 => any::<u64>(),
        1 => (1_u64..9, 0_u32..64).prop_map(|(page, bit)| (page << 12 | 3) ^ 1 << bit),
    ]
}

fn walk_all<F: Format>(format: &F, mem: &SparseMemory, root: u64, iova: u64) {
    let mut steps = 0;
    let end = walk(
        format,
        mem,
        Cursor::root(format, PhysAddr::new(root)),
        Iova::new(iova),
        |cursor| {
            steps += 1;
            assert!(cursor.level() < format.root_level());
        },
    );
    assert!(steps < format.root_level().get(), "one step a level");
    if let Ok(leaf) = end {
        assert!(leaf.base.is_aligned(leaf.page.bytes()));
        assert_eq!(iova >> format.width(), 0);
        assert!(leaf.base.get() >> format.physical_bits() == 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(0xbad),
        ..ProptestConfig::with_cases(4000)
    })]

    #[test]
    fn any_memory_any_address(
        words in prop::collection::vec((1_u64..9, 0_u64..4, entry()), 0..24),
        root in prop_oneof![4 => (1_u64..9).prop_map(|p| p << 12), 1 => any::<u64>()],
        iova in prop_oneof![4 => (0_u64..4, 0_u64..4, 0_u64..4, 0_u64..4)
            .prop_map(|(a, b, c, d)| a << 39 | b << 30 | c << 21 | d << 12), 1 => any::<u64>()],
    ) {
        let mut mem = SparseMemory::new();
        for (page, index, word) in words {
            mem.set(PhysAddr::new(page << 12 | index << 3), word);
        }
        for levels in Levels::ALL {
            for largest in PageSize::ALL {
                walk_all(&SecondStage::new(levels).with_pages_up_to(largest), &mem, root, iova);
            }
        }
        walk_all(&CalgaryTce::FULL, &mem, root, iova & 0xffff_ffff);
    }
}
