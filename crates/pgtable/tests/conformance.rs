//! Compares every format, depth, largest page size, front end and memory type with a brute-force
//! model.

mod common;
#[path = "common/interfaces.rs"]
mod interfaces;
#[path = "common/model.rs"]
mod model;

use common::{DOMAIN, Memory, ROOT, Source, flushed, frames, memory, memory_of, page};
use interfaces::{Burst, Cached, Plain, Reclaiming, TableInterface};
use model::{Model, Shape};
use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestRunner};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    CalgaryTce, Coherency, Cursor, DirtyLines, Format, Leaf, Levels, MapError, MapRequest,
    ReclaimingTable, SecondStage, Table, TableError, UnmapError, walk,
};
use ringfence_types::{
    FrameSource, Iova, PageSize, Permissions, Pfn, PfnRange, PhysAddr, PhysMemory,
};

#[derive(Debug, Clone)]
enum Op {
    Map {
        place: usize,
        delta: i64,
        pa: usize,
        pages: usize,
        bits: u64,
    },
    Unmap {
        place: usize,
        delta: i64,
        pages: usize,
    },
    /// Unmaps exactly the leaf that holds the page, if the page is mapped.
    UnmapLeaf { place: usize, delta: i64 },
}

const LENGTHS: [u64; 12] = [1, 1, 2, 3, 8, 16, 511, 512, 513, 1024, 1536, 1 << 18];
const PHYSICAL: [u64; 6] = [0, 1, 512, 1 << 18, (1 << 36) - 512, (1 << 40) - 1];

/// Pages near which all operations happen: the boundaries of tables and leaves at every level, and
/// the ends of the address space.
fn places(shape: &Shape) -> Vec<u64> {
    let mut places = vec![0, 512 * shape.unit(), 1024 * shape.unit(), (1 << 18) + 512];
    for level in &shape.levels {
        places.extend([1 << (level.shift - 12), 2 << (level.shift - 12)]);
        places.extend(level.leaves.iter().map(|leaf| 3_u64 << (leaf - 12)));
    }
    for end in shape.ends() {
        let before =
            [512 * shape.unit(), 1 << 18, shape.unit()].map(|pages| end.saturating_sub(pages));
        places.extend(before);
        places.push(end);
    }
    if shape.sign_extended {
        places.extend([(1 << 52) - (1 << 18), (1 << 52) - 1]);
    }
    places.retain(|place| *place <= 1 << 52 && place.is_multiple_of(shape.unit()));
    places
}

fn op() -> impl Strategy<Value = Op> {
    let delta = prop_oneof![3 => Just(0_i64), 2 => -3_i64..4];
    let delta = || delta.clone();
    prop_oneof![
        4 => (any::<usize>(), delta(), any::<usize>(), any::<usize>(), 1_u64..4)
            .prop_map(|(place, delta, pa, pages, bits)| Op::Map { place, delta, pa, pages, bits }),
        1 => (any::<usize>(), delta(), any::<usize>())
            .prop_map(|(place, delta, pages)| Op::Unmap { place, delta, pages }),
        2 => (any::<usize>(), delta()).prop_map(|(place, delta)| Op::UnmapLeaf { place, delta }),
    ]
}

/// Runs `ops` and compares the table with the model after each.
fn check<F: Format, T: TableInterface<F>>(
    format: F,
    shape: &Shape,
    reclaims: bool,
    coherency: Coherency,
    ops: &[Op],
    front: impl FnOnce(&Memory, &Source<'_>) -> T,
) {
    let mem = memory_of(shape.rubbish);
    let frames = frames(&mem);
    let mut front = front(&mem, &frames);
    let mut model = Model::new(shape, reclaims);
    let places = places(shape);
    let mut probes: Vec<u64> = places
        .iter()
        .flat_map(|p| [p.saturating_sub(1), *p, p + 1, p + 511])
        .collect();
    for op in ops {
        let pfn = |place: usize, delta: i64| {
            places[place % places.len()].saturating_add_signed(delta * shape.unit() as i64)
        };
        let ranged = |first: u64, pages: u64| PfnRange::new(Pfn::new(first), pages);
        match *op {
            Op::Map {
                place,
                delta,
                pa,
                pages,
                bits,
            } => {
                let pages = LENGTHS[pages % LENGTHS.len()] * shape.unit();
                let first = pfn(place, delta);
                let pa = (PHYSICAL[pa % PHYSICAL.len()] * shape.unit()) << 12;
                // Mapping 1 GiB in small pages takes too long.
                let gigabyte = shape.largest() >= 30 && delta == 0 && pa.is_multiple_of(1 << 30);
                if pages > 4096 * shape.unit() && !(gigabyte && first.is_multiple_of(1 << 18)) {
                    continue;
                }
                let request = MapRequest {
                    iova: page(first),
                    pa: PhysAddr::new(pa),
                    pages,
                    permissions: Permissions::from_bits(bits).expect("1 to 3"),
                };
                assert_eq!(
                    front.map(&mem, &frames, request),
                    model.map(&request),
                    "{request:?}"
                );
                probes.extend([first, first + pages - 1, first + pages]);
            }
            Op::Unmap {
                place,
                delta,
                pages,
            } => {
                let pages = LENGTHS[pages % LENGTHS.len()] * shape.unit();
                if let Some(range) = ranged(pfn(place, delta), pages) {
                    assert_eq!(
                        front.unmap(&mem, &frames, range),
                        model.unmap(&range),
                        "{range}"
                    );
                }
            }
            Op::UnmapLeaf { place, delta } => {
                if let Some((first, leaf)) = model.leaf_of(pfn(place, delta)) {
                    let range = common::range(first, leaf.size.granules());
                    assert_eq!(
                        front.unmap(&mem, &frames, range),
                        model.unmap(&range),
                        "{range}"
                    );
                }
            }
        }
        for pfn in probes.iter().copied().filter(|pfn| pfn >> 52 == 0) {
            let want = model.lookup(pfn);
            let got = front.lookup(&mem, page(pfn));
            assert_eq!(
                seen(got, pfn),
                want,
                "page {pfn:#x} as software sees it after {op:?}"
            );
            if coherency == Coherency::NonCoherent {
                let start = Cursor::root(&format, front.root());
                let got = walk(&format, mem.device_view(), start, page(pfn), |_| {}).ok();
                assert_eq!(
                    seen(got, pfn),
                    want,
                    "page {pfn:#x} as the device sees it after {op:?}"
                );
            }
        }
    }
    front.destroy(&mem, &frames);
    assert_eq!((frames.outstanding(), frames.wrong_frees()), (0, 0));
}

fn seen(leaf: Option<Leaf>, pfn: u64) -> Option<(u64, Permissions, PageSize)> {
    leaf.map(|leaf| (leaf.translate(page(pfn)).get(), leaf.permissions, leaf.page))
}

fn run(cases: u32, seed: u64, test: impl Fn(&[Op])) {
    let config = ProptestConfig {
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(seed),
        ..ProptestConfig::with_cases(cases)
    };
    TestRunner::new(config)
        .run(&prop::collection::vec(op(), 1..24), |ops| {
            test(&ops);
            Ok(())
        })
        .unwrap_or_else(|error| panic!("seed {seed:#x}: {error}"));
}

/// Creates a table. Uses the test's root if that is larger than a frame.
fn table<F: Format>(
    format: F,
    coherency: Coherency,
    mem: &Memory,
    frames: &Source<'_>,
) -> Table<F> {
    match Table::new(format, DOMAIN, coherency, mem, frames) {
        Err(TableError::RootTooLarge) => Table::at(format, DOMAIN, coherency, mem, ROOT),
        table => table,
    }
    .expect("frames")
}

fn reclaiming<F: Format>(
    format: F,
    coherency: Coherency,
    mem: &Memory,
    frames: &Source<'_>,
) -> ReclaimingTable<F> {
    match ReclaimingTable::new(format, DOMAIN, coherency, mem, frames) {
        Err(TableError::RootTooLarge) => ReclaimingTable::at(format, DOMAIN, coherency, mem, ROOT),
        table => table,
    }
    .expect("frames")
}

/// Runs every front end over `format` on both memory types.
fn suite<F: Format>(format: F, shape: &Shape, seed: u64) {
    for coherency in [Coherency::Coherent, Coherency::NonCoherent] {
        run(20, seed, |ops| {
            check(format, shape, false, coherency, ops, |m, f| {
                Plain(table(format, coherency, m, f))
            });
        });
        run(12, seed + 1, |ops| {
            check(format, shape, false, coherency, ops, |m, f| {
                let table = table(format, coherency, m, f);
                let cache = table.leaf_cache();
                Cached(table, cache)
            });
        });
        run(12, seed + 2, |ops| {
            check(format, shape, false, coherency, ops, |m, f| {
                let table = table(format, coherency, m, f);
                let cache = table.leaf_cache();
                Burst(table, cache, DirtyLines::new(), false)
            });
        });
        for wider in [false, true] {
            run(12, seed + 3, |ops| {
                check(format, shape, true, coherency, ops, |m, f| {
                    let table = reclaiming(format, coherency, m, f);
                    Reclaiming(match wider {
                        true => table.with_write_back(common::page_of),
                        false => table,
                    })
                });
            });
        }
    }
}

/// Leaves of one entry, up to `largest`.
fn plain_leaves(largest: PageSize) -> Vec<&'static [u32]> {
    let all: [&[u32]; 3] = [&[12], &[21], &[30]];
    let fit = all.into_iter().filter(|leaf| leaf[0] <= largest.shift());
    fit.collect()
}

fn second_stage(levels: Levels) {
    for largest in PageSize::ALL {
        let format = SecondStage::new(levels).with_pages_up_to(largest);
        let depth = usize::from(format.root_level().get());
        let shape = Shape::of(depth, &plain_leaves(largest));
        let seed = 0x5eed_0000 + u64::from(shape.width) * 256 + u64::from(largest.shift());
        suite(format, &shape, seed);
    }
}

#[test]
fn three_levels() {
    second_stage(Levels::Three);
}

#[test]
fn four_levels() {
    second_stage(Levels::Four);
}

#[test]
fn five_levels() {
    second_stage(Levels::Five);
}

#[test]
fn flat() {
    // The smallest flat table (64 KiB) and one of 1 MiB.
    for bits in [25, 29] {
        let format = CalgaryTce::new(bits).expect("exists");
        let mut shape = Shape::of(1, &[&[12]]);
        (shape.width, shape.physical_bits) = (bits, 48);
        suite(format, &shape, 0xca19_0000 + u64::from(bits));
    }
}

#[test]
fn a_flat_root_must_be_given_and_be_empty() {
    let mem = memory();
    let frames = frames(&mem);
    let new = Table::new(CalgaryTce::FULL, DOMAIN, Coherency::Coherent, &mem, &frames);
    assert_eq!(new.err(), Some(TableError::RootTooLarge));
    let arena = Arena::new(32 << 20).expect("arena");
    let whole = ringfence_types::PhysRange::new(PhysAddr::ZERO, 32 << 20).expect("not empty");
    let source = Frames::new(&arena, whole);
    let bytes = Table::root_bytes_of(&CalgaryTce::FULL);
    assert_eq!(bytes, 8 << 20);
    let root = source.alloc_contiguous(bytes / 4096).expect("room");
    let table = Table::at(
        CalgaryTce::FULL,
        DOMAIN,
        Coherency::NonCoherent,
        &arena,
        root,
    )
    .expect("zeroes");
    assert_eq!(table.table_bytes(), 8 << 20);
    let last = MapRequest {
        iova: page((1 << 20) - 1),
        pa: PhysAddr::new(0x5000),
        pages: 1,
        permissions: Permissions::READ,
    };
    assert_eq!(table.map(&arena, &source, last), Ok(()));
    let again = Table::at(CalgaryTce::FULL, DOMAIN, Coherency::Coherent, &arena, root);
    assert_eq!(again.err(), Some(TableError::RootNotEmpty));
    assert!(table.destroy(&arena, &source, &flushed()).is_ok());
    assert!(source.alloc_zeroed().is_ok());
    assert!(arena.word(PhysAddr::ZERO).is_ok());
}

#[test]
fn a_cache_used_with_another_table_walks() {
    let mem = memory();
    let frames = frames(&mem);
    let format = SecondStage::new(Levels::Four);
    let table = || Table::new(format, DOMAIN, Coherency::Coherent, &mem, &frames).expect("frames");
    let (a, b) = (table(), table());
    let mut cache = a.leaf_cache();
    let request = MapRequest {
        iova: page(5),
        pa: PhysAddr::new(0x9000),
        pages: 1,
        permissions: Permissions::READ,
    };
    for t in [&a, &b, &b, &a] {
        assert_eq!(cache.map(t, &mem, &frames, request), Ok(()));
        let other = if t.root() == a.root() { &b } else { &a };
        assert!(t.lookup(&mem, page(5)).is_some());
        assert!(other.lookup(&mem, page(5)).is_none());
        assert!(cache.unmap(t, &mem, common::range(5, 1)).is_ok());
    }
}

#[test]
fn ranges_that_cannot_be() {
    let mem = memory();
    let frames = frames(&mem);
    for levels in Levels::ALL {
        let format = SecondStage::new(levels);
        let table = Table::new(format, DOMAIN, Coherency::Coherent, &mem, &frames).expect("frames");
        let end = 1_u64 << levels.width();
        let good = MapRequest {
            iova: Iova::new(end - 4096),
            pa: PhysAddr::new((1 << 52) - 4096),
            pages: 1,
            permissions: Permissions::READ,
        };
        let cases = [
            (MapRequest { pages: 0, ..good }, MapError::Empty),
            (
                MapRequest {
                    iova: Iova::new(1),
                    ..good
                },
                MapError::Misaligned,
            ),
            (
                MapRequest {
                    pa: PhysAddr::new(2048),
                    ..good
                },
                MapError::Misaligned,
            ),
            (
                MapRequest {
                    pages: 2,
                    pa: PhysAddr::ZERO,
                    ..good
                },
                MapError::BeyondWidth { iova: good.iova },
            ),
            (
                MapRequest {
                    iova: Iova::new(end),
                    ..good
                },
                MapError::BeyondWidth {
                    iova: Iova::new(end),
                },
            ),
            (
                MapRequest {
                    iova: Iova::new(u64::MAX - 4095),
                    ..good
                },
                MapError::BeyondWidth {
                    iova: Iova::new(u64::MAX - 4095),
                },
            ),
            (
                MapRequest {
                    pages: u64::MAX,
                    ..good
                },
                MapError::PhysicalBeyondWidth { at: good.pa },
            ),
            (
                MapRequest {
                    iova: Iova::ZERO,
                    pages: 2,
                    ..good
                },
                MapError::PhysicalBeyondWidth { at: good.pa },
            ),
            (
                MapRequest {
                    pa: PhysAddr::new(1 << 52),
                    ..good
                },
                MapError::PhysicalBeyondWidth {
                    at: PhysAddr::new(1 << 52),
                },
            ),
        ];
        let mut cache = table.leaf_cache();
        for (request, error) in cases {
            assert_eq!(table.map(&mem, &frames, request), Err(error));
            assert_eq!(cache.map(&table, &mem, &frames, request), Err(error));
        }
        assert_eq!(frames.outstanding(), 1, "no table for a refused range");
        assert_eq!(table.map(&mem, &frames, good), Ok(()), "the very last page");
        let last = (end >> 12) - 1;
        let beyond = UnmapError::BeyondWidth { iova: page(last) };
        assert_eq!(
            table.unmap(&mem, common::range(last, 2)).err(),
            Some(beyond)
        );
        assert_eq!(
            cache.unmap(&table, &mem, common::range(last, 2)).err(),
            Some(beyond)
        );
        assert!(table.unmap(&mem, common::range(last, 1)).is_ok());
        drop(cache);
        assert!(table.destroy(&mem, &frames, &flushed()).is_ok());
        assert_eq!(frames.outstanding(), 0);
    }
}
