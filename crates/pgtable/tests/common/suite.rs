//! Runs random maps and unmaps through every front end of a format, and compares each step with the
//! brute-force model.

use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestRunner};
use ringfence_pgtable::{
    Coherency, Cursor, DirtyLines, Format, Leaf, MapRequest, ReclaimingTable, Table, TableError,
    walk,
};
use ringfence_types::{PageSize, Permissions, Pfn, PfnRange, PhysAddr};

use crate::common::{
    self, DOMAIN, MEMORY, Memory, ROOT, Source, frames_after_root, memory_of, page,
};
use crate::interfaces::{Burst, Cached, Plain, Reclaiming, TableInterface};
use crate::model::{Model, Shape};

#[derive(Debug, Clone)]
enum Op {
    Map {
        boundary: usize,
        delta: i64,
        pa: usize,
        pages: usize,
        bits: u64,
    },
    Unmap {
        boundary: usize,
        delta: i64,
        pages: usize,
    },
    /// Unmaps exactly the leaf that holds the page, if the page is mapped.
    UnmapLeaf { boundary: usize, delta: i64 },
}

const LENGTHS: [u64; 12] = [1, 1, 2, 3, 8, 16, 511, 512, 513, 1024, 1536, 1 << 18];
const PHYSICAL: [u64; 6] = [0, 1, 512, 1 << 18, (1 << 36) - 512, (1 << 40) - 1];

/// Pages near which all operations happen: the boundaries of tables and leaves at every level, and
/// the ends of the address space.
fn boundaries(shape: &Shape) -> Vec<u64> {
    let mut boundaries = vec![0, 512 * shape.unit(), 1024 * shape.unit(), (1 << 18) + 512];
    for level in &shape.levels {
        boundaries.extend([1 << (level.shift - 12), 2 << (level.shift - 12)]);
        boundaries.extend(level.leaves.iter().map(|leaf| 3_u64 << (leaf - 12)));
    }
    for end in shape.ends() {
        let before =
            [512 * shape.unit(), 1 << 18, shape.unit()].map(|pages| end.saturating_sub(pages));
        boundaries.extend(before);
        // An index that is too narrow makes these equal to other boundaries.
        boundaries.extend([end, end >> 1, end >> 2]);
    }
    if shape.sign_extended {
        boundaries.extend([(1 << 52) - (1 << 18), (1 << 52) - 1]);
    }
    boundaries.retain(|boundary| *boundary <= 1 << 52 && boundary.is_multiple_of(shape.unit()));
    boundaries
}

fn op() -> impl Strategy<Value = Op> {
    let delta = prop_oneof![3 => Just(0_i64), 2 => -3_i64..4];
    let delta = || delta.clone();
    prop_oneof![
        4 => (any::<usize>(), delta(), any::<usize>(), any::<usize>(), 1_u64..4)
            .prop_map(|(boundary, delta, pa, pages, bits)| Op::Map {
                boundary,
                delta,
                pa,
                pages,
                bits,
            }),
        1 => (any::<usize>(), delta(), any::<usize>())
            .prop_map(|(boundary, delta, pages)| Op::Unmap { boundary, delta, pages }),
        2 => (any::<usize>(), delta())
            .prop_map(|(boundary, delta)| Op::UnmapLeaf { boundary, delta }),
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
    let granule = PageSize::from_shift(shape.levels[0].shift).expect("a size");
    let bytes = MEMORY * shape.unit().min(4) + (2 << 20);
    let rubbish = match coherency {
        Coherency::Coherent => 0,
        Coherency::NonCoherent => shape.rubbish,
    };
    let mem = memory_of(bytes, rubbish);
    let frames = frames_after_root(&mem, bytes, granule);
    let mut front = front(&mem, &frames);
    let mut model = Model::new(shape, reclaims);
    let boundaries = boundaries(shape);
    let mut probes: Vec<u64> = boundaries
        .iter()
        .flat_map(|p| [p.saturating_sub(1), *p, p + 1, p + 511])
        .collect();
    for op in ops {
        let pfn = |boundary: usize, delta: i64| {
            boundaries[boundary % boundaries.len()]
                .saturating_add_signed(delta * shape.unit() as i64)
        };
        let ranged = |first: u64, pages: u64| PfnRange::new(Pfn::new(first), pages);
        match *op {
            Op::Map {
                boundary,
                delta,
                pa,
                pages,
                bits,
            } => {
                let pages = LENGTHS[pages % LENGTHS.len()] * shape.unit();
                let first = pfn(boundary, delta);
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
                boundary,
                delta,
                pages,
            } => {
                let pages = LENGTHS[pages % LENGTHS.len()] * shape.unit();
                if let Some(range) = ranged(pfn(boundary, delta), pages) {
                    assert_eq!(
                        front.unmap(&mem, &frames, range),
                        model.unmap(&range),
                        "{range}"
                    );
                }
            }
            Op::UnmapLeaf { boundary, delta } => {
                if let Some((first, leaf)) = model.leaf_of(pfn(boundary, delta)) {
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
pub(crate) fn suite<F: Format>(format: F, shape: &Shape, seed: u64) {
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
