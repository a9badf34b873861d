//! Cost of table updates in TSC cycles. Runs the variants interleaved; prints medians, spread and
//! ratios.
//!
//! `cargo bench -p ringfence-pgtable`; `-- --quick` takes a tenth of the time. Absolute cycles
//! depend on the machine and its load; only the ratios are comparable.

#[path = "support/floor.rs"]
mod floor;
#[path = "support/timing.rs"]
mod timing;

use std::hint::black_box;

use floor::Bare;
use ringfence_memory::{Arena, Frames, WriteBack};
use ringfence_pgtable::{Coherency, DirtyLines, LeafCache, Levels, MapRequest, SecondStage, Table};
use ringfence_types::{
    DomainId, FrameSource, Permissions, Pfn, PfnRange, PhysAddr, PhysMemory, PhysRange,
};
use timing::{cycles, quantile};

const FORMAT: SecondStage = SecondStage::new(Levels::Four);
/// Operations per sample: one burst as in the papers.
const OPS: u64 = 200;

struct Platform {
    mem: &'static Arena,
    frames: Frames<&'static Arena>,
}

impl Platform {
    fn new(kind: WriteBack) -> Self {
        let mem: &'static Arena = Box::leak(Box::new(
            Arena::with_write_back(64 << 20, kind).expect("arena"),
        ));
        let region = PhysRange::new(PhysAddr::ZERO, 64 << 20).expect("not empty");
        Self {
            mem,
            frames: Frames::new(mem, region),
        }
    }

    fn table(&self, coherency: Coherency) -> Table<SecondStage> {
        let table = Table::new(FORMAT, DomainId::new(1), coherency, self.mem, &self.frames)
            .expect("frames");
        // Warm up: link 48 leaf tables and leave one page mapped in each.
        for leaf in 0..48 {
            let page = request(leaf * 512 + 511, 1);
            table.map(self.mem, &self.frames, page).expect("frames");
        }
        table
    }
}

#[inline(always)]
fn request(first: u64, pages: u64) -> MapRequest {
    MapRequest {
        iova: Pfn::new(first).iova(),
        pa: PhysAddr::new((1 << 32) + (first << 12)),
        pages,
        permissions: Permissions::READ_WRITE,
    }
}

#[inline(always)]
fn range(first: u64, pages: u64) -> PfnRange {
    match PfnRange::new(Pfn::new(first), pages) {
        Some(range) => range,
        None => unreachable!("pages is not zero"),
    }
}

/// Pages in ring order: descending, one after the other.
#[inline(always)]
fn ring(op: u64) -> u64 {
    1534 - op % 500
}

/// Pages of a ring in laps of one burst. Two laps alternate within one leaf table.
#[inline(always)]
fn refill(lap: u64, op: u64) -> u64 {
    4096 + lap % 2 * 256 + op
}

/// Pages that cycle through 48 leaf tables.
#[inline(always)]
fn scattered(op: u64) -> u64 {
    op % 48 * 512 + op / 48
}

#[inline(always)]
fn plain_pair<M: PhysMemory, S: FrameSource>(
    table: &Table<SecondStage>,
    mem: &M,
    frames: &S,
    first: u64,
    pages: u64,
) {
    table
        .map(mem, frames, request(black_box(first), pages))
        .expect("free");
    assert!(table.unmap(mem, range(black_box(first), pages)).is_ok());
}

/// The lower bound of [`plain_pair`].
#[inline(always)]
fn bare_pair(bare: &Bare, first: u64, pages: u64) {
    let leaf = |first: u64| ((1 << 32) + (first << 12)) | 3;
    let map = black_box(first);
    if pages == 1 {
        bare.map(map, leaf(map));
        bare.unmap(black_box(first));
    } else {
        bare.map_run(map, pages, leaf(map));
        bare.unmap_run(black_box(first), pages);
    }
}

#[inline(always)]
fn cached_pair<M: PhysMemory, S: FrameSource>(
    cache: &mut LeafCache,
    table: &Table<SecondStage>,
    mem: &M,
    frames: &S,
    first: u64,
    pages: u64,
) {
    cache
        .map(table, mem, frames, request(black_box(first), pages))
        .expect("free");
    assert!(
        cache
            .unmap(table, mem, range(black_box(first), pages))
            .is_ok()
    );
}

/// Allocates the cache separately from the state that a variant captures. As part of that state,
/// each call that may change the cache would force a reload of the rest.
fn leaf_cache(table: &Table<SecondStage>) -> &'static mut LeafCache {
    Box::leak(Box::new(table.leaf_cache()))
}

struct Side {
    name: String,
    /// Divisor of a sample: operations or pages.
    units: u64,
    run: Box<dyn FnMut()>,
    samples: Vec<f64>,
}

fn side(name: &str, units: u64, run: impl FnMut() + 'static) -> Side {
    Side {
        name: name.into(),
        units,
        run: Box::new(run),
        samples: Vec::new(),
    }
}

fn main() {
    let quick = std::env::args().any(|arg| arg == "--quick" || arg == "--test");
    let rounds = if quick { 200 } else { 4000 };
    let mut sides = Vec::new();
    sides.push(side("empty loop", OPS, || {
        for op in 0..OPS {
            black_box(range(black_box(ring(op)), 1));
        }
    }));
    coherent(&mut sides);
    for kind in WriteBack::available() {
        if kind != WriteBack::FenceOnly {
            non_coherent(&mut sides, kind);
        }
    }
    for round in 0..rounds + rounds / 10 {
        for side in &mut sides {
            let start = cycles();
            (side.run)();
            let spent = cycles().wrapping_sub(start);
            if round >= rounds / 10 {
                side.samples.push(spent as f64 / side.units as f64);
            }
        }
    }
    report(&mut sides);
}

fn coherent(sides: &mut Vec<Side>) {
    let platform: &'static Platform = Box::leak(Box::new(Platform::new(WriteBack::best())));
    let table: &'static Table<SecondStage> =
        Box::leak(Box::new(platform.table(Coherency::Coherent)));
    let (mem, frames) = (platform.mem, &platform.frames);
    let bare = Bare::new(mem, table.root());
    single_pages(sides, platform, table, "ring", ring);
    single_pages(sides, platform, table, "48 tables in turn", scattered);
    sides.push(side("plain 16 pages, per page", OPS * 16, move || {
        for op in 0..OPS {
            plain_pair(table, mem, frames, op % 31 * 16, 16);
        }
    }));
    sides.push(side("floor of 16 pages, per page", OPS * 16, move || {
        for op in 0..OPS {
            bare_pair(&bare, op % 31 * 16, 16);
        }
    }));
    let cache = leaf_cache(table);
    sides.push(side("leaf cache 16 pages, per page", OPS * 16, move || {
        for op in 0..OPS {
            cached_pair(cache, table, mem, frames, op % 31 * 16, 16);
        }
    }));
}

fn single_pages(
    sides: &mut Vec<Side>,
    platform: &'static Platform,
    table: &'static Table<SecondStage>,
    name: &str,
    page_of: impl Fn(u64) -> u64 + Copy + 'static,
) {
    let (mem, frames) = (platform.mem, &platform.frames);
    sides.push(side(&format!("plain walk pair, {name}"), OPS, move || {
        for op in 0..OPS {
            plain_pair(table, mem, frames, page_of(op), 1);
        }
    }));
    let bare = Bare::new(mem, table.root());
    sides.push(side(&format!("floor of a pair, {name}"), OPS, move || {
        for op in 0..OPS {
            bare_pair(&bare, page_of(op), 1);
        }
    }));
    let cache = leaf_cache(table);
    sides.push(side(&format!("leaf cache pair, {name}"), OPS, move || {
        for op in 0..OPS {
            cached_pair(cache, table, mem, frames, page_of(op), 1);
        }
    }));
}

fn non_coherent(sides: &mut Vec<Side>, kind: WriteBack) {
    let platform: &'static Platform = Box::leak(Box::new(Platform::new(kind)));
    let table: &'static Table<SecondStage> =
        Box::leak(Box::new(platform.table(Coherency::NonCoherent)));
    let (mem, frames) = (platform.mem, &platform.frames);
    sides.push(side(
        &format!("{kind:?}: pair, flushed per operation"),
        OPS,
        move || {
            for op in 0..OPS {
                plain_pair(table, mem, frames, ring(op), 1);
            }
        },
    ));
    let mut dirty = DirtyLines::new();
    sides.push(side(
        &format!("{kind:?}: pair, burst of {OPS}"),
        OPS,
        move || {
            // A burst of maps and one sync, then a burst of unmaps and one sync.
            for op in 0..OPS {
                let map = request(black_box(ring(op)), 1);
                table
                    .map_nosync(mem, frames, map, &mut dirty)
                    .expect("free");
            }
            dirty.sync(mem);
            for op in 0..OPS {
                let range = range(black_box(ring(op)), 1);
                assert!(table.unmap_nosync(mem, range, &mut dirty).is_ok());
            }
            dirty.sync(mem);
        },
    ));
    let mut dirty = DirtyLines::new();
    let cache = leaf_cache(table);
    sides.push(side(
        &format!("{kind:?}: leaf cache pair, burst of {OPS}"),
        OPS,
        move || {
            for op in 0..OPS {
                let map = request(black_box(ring(op)), 1);
                cache
                    .map_nosync(table, mem, frames, map, &mut dirty)
                    .expect("free");
            }
            dirty.sync(mem);
            for op in 0..OPS {
                let range = range(black_box(ring(op)), 1);
                assert!(cache.unmap_nosync(table, mem, range, &mut dirty).is_ok());
            }
            dirty.sync(mem);
        },
    ));
    // A ring in steady state. Each step unmaps a buffer of an earlier lap and maps a new one. One
    // sync ends the burst, before the invalidation and the doorbell.
    let mut dirty = DirtyLines::new();
    let cache = leaf_cache(table);
    let mut lap = 0;
    for op in 0..OPS {
        table
            .map(mem, frames, request(refill(0, op), 1))
            .expect("free");
    }
    sides.push(side(
        &format!("{kind:?}: leaf cache refill, burst of {OPS}"),
        OPS,
        move || {
            for op in 0..OPS {
                let range = range(black_box(refill(lap, op)), 1);
                assert!(cache.unmap_nosync(table, mem, range, &mut dirty).is_ok());
                let map = request(black_box(refill(lap + 1, op)), 1);
                cache
                    .map_nosync(table, mem, frames, map, &mut dirty)
                    .expect("free");
            }
            dirty.sync(mem);
            lap += 1;
        },
    ));
    // Lower bounds of such bursts: only their loads, stores, write-backs and waits. After a wait
    // the lines are out of the cache, and later accesses must fetch them again.
    let start = PhysAddr::new(32 << 20);
    let words = mem.words(start, OPS as usize).expect("inside");
    for waits in [1, 2] {
        sides.push(side(
            &format!("{kind:?}: floor of a burst, waits: {waits}"),
            OPS,
            move || {
                for value in [1, 0] {
                    floor::store_all(words, black_box(value));
                    mem.write_back(start, OPS * 8);
                    if waits == 2 || value == 0 {
                        mem.drain();
                    }
                }
            },
        ));
    }
}

fn report(sides: &mut [Side]) {
    println!("{:<52} {:>8} {:>8} {:>8}", "cycles", "median", "10%", "90%");
    let mut medians = Vec::new();
    for side in sides.iter_mut() {
        side.samples.sort_by(f64::total_cmp);
        let median = quantile(&side.samples, 0.5);
        let (low, high) = (quantile(&side.samples, 0.1), quantile(&side.samples, 0.9));
        println!("{:<52} {median:>8.1} {low:>8.1} {high:>8.1}", side.name);
        medians.push((side.name.clone(), median));
    }
    let of = |name: &str| medians.iter().find(|(n, _)| n == name).map(|(_, m)| *m);
    println!();
    let ratio = |what: &str, a: &str, b: &str, bound: &str| {
        if let (Some(a), Some(b)) = (of(a), of(b)) {
            println!("{what:<64} {:>7.4}  (wanted: {bound})", a / b);
        }
    };
    for pages in ["ring", "48 tables in turn"] {
        ratio(
            &format!("plain walk pair / its floor, {pages}"),
            &format!("plain walk pair, {pages}"),
            &format!("floor of a pair, {pages}"),
            "20 cycles",
        );
        ratio(
            &format!("leaf cache pair / plain walk pair, {pages}"),
            &format!("leaf cache pair, {pages}"),
            &format!("plain walk pair, {pages}"),
            "<= 0.5",
        );
    }
    ratio(
        "plain 16 pages / their floor",
        "plain 16 pages, per page",
        "floor of 16 pages, per page",
        "3.5 cycles",
    );
    for kind in WriteBack::available() {
        ratio(
            &format!("{kind:?}: burst of {OPS} / flushed per operation"),
            &format!("{kind:?}: pair, burst of {OPS}"),
            &format!("{kind:?}: pair, flushed per operation"),
            "<= 0.0333",
        );
        for (waits, burst) in [(2, "pair"), (1, "refill")] {
            ratio(
                &format!("{kind:?}: leaf cache {burst}, burst / its floor"),
                &format!("{kind:?}: leaf cache {burst}, burst of {OPS}"),
                &format!("{kind:?}: floor of a burst, waits: {waits}"),
                "none",
            );
        }
        ratio(
            &format!("{kind:?}: leaf cache refill burst / flushed per operation"),
            &format!("{kind:?}: leaf cache refill, burst of {OPS}"),
            &format!("{kind:?}: pair, flushed per operation"),
            "<= 0.0333",
        );
        ratio(
            &format!("{kind:?}: leaf cache burst / flushed per operation"),
            &format!("{kind:?}: leaf cache pair, burst of {OPS}"),
            &format!("{kind:?}: pair, flushed per operation"),
            "<= 0.0333",
        );
    }
}
