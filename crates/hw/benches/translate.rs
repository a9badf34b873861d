//! Cost of a translation: IOTLB hit, miss with walk, several pages. The same run measures lower
//! bounds.
//!
//! The variants run interleaved, so load from other virtual machines slows all of them. Only the
//! ratios of the medians are comparable.
//!
//! The lower bound of a hit is a lookup in a bare array with the same sets, ways and replacement
//! order. It has no device, domain, permissions or faults.
//!
//! The lower bound of a miss is a failed lookup in an IOTLB and in a walk cache, followed by a walk
//! of four dependent loads from the root. A second lower bound starts at the level 1 table. No
//! walking unit can avoid this work.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ringfence_hw::{FaultLog, Geometry, InvalidationGranularity, Replacement, UnitConfig, VtdUnit};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, MapRequest, SecondStage, Table, TranslationType,
};
use ringfence_types::{
    Access, CachedLevels, DomainId, Invalidation, Iova, Permissions, Pfn, PfnRange, PhysAddr,
    PhysMemory, PhysRange, RequesterId,
};

const DEVICE: RequesterId = RequesterId::new(0x0100);
const DOMAIN: DomainId = DomainId::new(1);
/// Number of mapped pages; more than the IOTLB holds.
const PAGES: u64 = 16 << 10;
/// Number of pages that fit in the IOTLB.
const WARM: u64 = 1 << 10;
const ACCESSES: usize = 1 << 14;
const REPETITIONS: usize = 41;

fn config(iotlb: Geometry) -> UnitConfig {
    let shape = |sets, ways| Geometry::new(sets, ways).unwrap_or(Geometry::ABSENT);
    UnitConfig {
        iotlb,
        walk_caches: [shape(16, 4), shape(4, 4), shape(1, 4)],
        contexts: shape(64, 1),
        replacement: Replacement::Lru,
        fault_log: FaultLog::MAX_CAPACITY,
        granularity: InvalidationGranularity::Selective,
    }
}

/// One measured variant: name, accesses per repetition, nanoseconds per access.
struct Side<'a> {
    name: &'static str,
    per: usize,
    work: Box<dyn FnMut() + 'a>,
    nanos: Vec<f64>,
}

/// Sets of ways of tags and values, most recently used first.
struct BareCache<const WAYS: usize> {
    sets: Vec<[(u64, u64); WAYS]>,
}

impl<const WAYS: usize> BareCache<WAYS> {
    fn new(sets: usize) -> Self {
        Self {
            sets: vec![[(u64::MAX, 0); WAYS]; sets],
        }
    }

    #[inline(always)]
    fn lookup(&mut self, tag: u64) -> Option<u64> {
        let mask = self.sets.len() - 1;
        let set = &mut self.sets[tag as usize & mask];
        if set[0].0 == tag {
            return Some(set[0].1);
        }
        let at = set.iter().position(|way| way.0 == tag)?;
        set[..=at].rotate_right(1);
        Some(set[0].1)
    }

    #[inline(always)]
    fn insert(&mut self, tag: u64, value: u64) {
        let mask = self.sets.len() - 1;
        let set = &mut self.sets[tag as usize & mask];
        set.rotate_right(1);
        set[0] = (tag, value);
    }
}

/// Follows `levels` entries from the table at word `table`. Checks only the end of the arena.
#[inline(always)]
fn bare_walk(words: &[AtomicU64], table: u64, levels: u32, iova: Iova) -> u64 {
    (0..levels).rev().fold(table, |table, level| {
        let index = iova.get() >> (12 + 9 * level) & 511;
        let raw = words[(table + index) as usize].load(Ordering::Acquire);
        (raw & 0x000f_ffff_ffff_f000) / 8
    })
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() {
    // `cargo test --benches` runs this too; one repetition suffices then.
    let repetitions = if std::env::args().any(|arg| arg == "--bench") {
        REPETITIONS
    } else {
        1
    };
    let mem = Arena::new(1 << 30).expect("1 GiB of address space");
    let region = PhysRange::new(PhysAddr::new(512 << 20), 512 << 20).expect("not empty");
    let frames = Frames::new(&mem, region);
    let mut contexts = ContextTables::new(Coherency::Coherent, &mem, &frames).expect("frames");
    let table = Table::new(
        SecondStage::new(Levels::Four),
        DOMAIN,
        Coherency::Coherent,
        &mem,
        &frames,
    )
    .expect("frames");
    let context = Context {
        domain: DOMAIN,
        translation: TranslationType::Table {
            root: table.root(),
            levels: Levels::Four,
        },
    };
    contexts
        .attach(&mem, &frames, DEVICE, &context)
        .expect("frames");
    // Descending IOVAs, as Linux allocates them; scattered physical pages.
    let top = 1 << 20;
    let iova = |page: u64| Iova::new((top - 1 - page) << 12);
    for page in 0..PAGES {
        let request = MapRequest {
            iova: iova(page),
            pa: PhysAddr::new((page * 7 % PAGES) << 12),
            pages: 1,
            permissions: Permissions::READ_WRITE,
        };
        table.map(&mem, &frames, request).expect("free pages");
    }
    let unit = |iotlb| {
        let mut unit = VtdUnit::vtd(&config(iotlb));
        unit.set_root_table(contexts.root());
        unit.enable();
        unit
    };
    let large = Geometry::new(1024, 8).expect("powers of two");

    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % below
    };
    let warm: Vec<Iova> = (0..ACCESSES)
        .map(|_| iova(random(WARM)).wrapping_add(random(4088)))
        .collect();
    let cold: Vec<Iova> = (0..ACCESSES)
        .map(|_| iova(random(PAGES)).wrapping_add(random(4088)))
        .collect();
    let words = mem
        .words(PhysAddr::ZERO, (mem.bytes() / 8) as usize)
        .expect("all of it");
    let (mut bare, mut bare_tables) = (BareCache::<8>::new(1024), BareCache::<4>::new(16));

    let translate = |unit: &mut VtdUnit, at: Iova, bytes: u64| match unit.translate(
        &mem,
        DEVICE,
        at,
        bytes,
        Access::Write,
    ) {
        Ok(translation) => {
            black_box(translation.first());
        }
        Err(fault) => panic!("{fault}"),
    };
    let (mut hit, mut sequential, mut off, mut sixteen) =
        (unit(large), unit(large), unit(large), unit(large));
    let (mut cycled, mut mapped) = (unit(large), unit(large));
    // Without an IOTLB, every access walks.
    let mut miss = unit(Geometry::ABSENT);
    off.disable();
    let mut sides = [
        Side::new("floor of a hit: bare lookup", ACCESSES, || {
            for at in &warm {
                let page = at.get() >> 12;
                let found = bare.lookup(page).unwrap_or_else(|| {
                    bare.insert(page, page << 12);
                    page << 12
                });
                black_box((found | at.get() & 0xfff, 8));
            }
        }),
        Side::new("IOTLB hit, random", ACCESSES, || {
            for at in &warm {
                translate(&mut hit, *at, 8);
            }
        }),
        Side::new("IOTLB hit, sequential", ACCESSES, || {
            for page in 0..ACCESSES as u64 {
                translate(&mut sequential, iova(page % WARM), 8);
            }
        }),
        Side::new("switched off", ACCESSES, || {
            for at in &warm {
                translate(&mut off, *at, 8);
            }
        }),
        Side::new("walk of 4 levels by the table, random", ACCESSES, || {
            for at in &cold {
                black_box(table.walk(&mem, *at).is_ok());
            }
        }),
        Side::new("bare walk of 4 levels, random", ACCESSES, || {
            for at in &cold {
                black_box(bare_walk(words, table.root().get() / 8, 4, *at));
            }
        }),
        Side::new("floor of a miss: bare lookup, 1 level", ACCESSES, || {
            for at in &cold {
                let region = at.get() >> 21;
                let leaves = bare_tables.lookup(region).unwrap_or_else(|| {
                    let leaves = bare_walk(words, table.root().get() / 8, 3, *at);
                    bare_tables.insert(region, leaves);
                    leaves
                });
                let page = bare_walk(words, leaves, 1, *at) * 8;
                black_box((page | at.get() & 0xfff, 8));
            }
        }),
        Side::new("miss and walk, random", ACCESSES, || {
            for at in &cold {
                translate(&mut miss, *at, 8);
            }
        }),
        Side::new(
            "miss and walk, fill, eviction, sequential",
            ACCESSES,
            || {
                for page in 0..ACCESSES as u64 {
                    translate(&mut cycled, iova(page), 8);
                }
            },
        ),
        // Invalidate each page after its use, as strict mode does.
        Side::new(
            "miss and walk, fill, invalidation of the page",
            ACCESSES,
            || {
                for page in 0..ACCESSES as u64 {
                    let at = iova(page);
                    translate(&mut mapped, at, 8);
                    if let Some(range) = PfnRange::new(Pfn::containing(at), 1) {
                        mapped.invalidate(&Invalidation::Pages {
                            domain: DOMAIN,
                            range,
                            levels: CachedLevels::Leaves,
                        });
                    }
                }
            },
        ),
        Side::new("16 pages at once, hits, per page", WARM as usize, || {
            for run in 1..=WARM / 16 {
                translate(&mut sixteen, iova(run * 16), 16 << 12);
            }
        }),
    ];
    for _ in 0..repetitions {
        for side in &mut sides {
            // One run to warm the caches, one to measure.
            (side.work)();
            let start = Instant::now();
            (side.work)();
            let nanos = start.elapsed().as_nanos() as f64;
            side.nanos.push(nanos / side.per as f64);
        }
    }
    let mut rows = Vec::new();
    for side in &mut sides {
        rows.push((side.name, median(&mut side.nanos)));
    }
    let find = |name: &str| {
        rows.iter()
            .find(|row| row.0.starts_with(name))
            .map_or(f64::NAN, |row| row.1)
    };
    let (hit_floor, miss_floor) = (find("floor of a hit"), find("floor of a miss"));
    println!("{:<48} {:>8} {:>8} {:>8}", "", "ns", "/hit's", "/miss's");
    for (name, nanos) in &rows {
        println!(
            "{name:<48} {nanos:>8.2} {:>8.2} {:>8.2}",
            nanos / hit_floor,
            nanos / miss_floor
        );
    }
    drop(sides);
    println!("hit unit: {:?}", hit.stats());
    println!("miss unit: {:?}", miss.stats());
}

impl<'a> Side<'a> {
    fn new(name: &'static str, per: usize, work: impl FnMut() + 'a) -> Self {
        Self {
            name,
            per,
            work: Box::new(work),
            nanos: Vec::new(),
        }
    }
}
