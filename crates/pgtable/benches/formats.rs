//! Cost of a map and an unmap in every format, in TSC cycles and against the VT-d second stage of
//! four levels. All formats run interleaved.
//!
//! `cargo bench -p ringfence-pgtable --bench formats`; `-- --quick` takes a tenth of the time,
//! `-- --only NAME` runs the formats whose name contains NAME, beside the second stage.
//! `-- --count NAME WORK` repeats one work for an instruction counter.

#[path = "support/timing.rs"]
mod timing;

use std::hint::black_box;

use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    AmdV1, AmdV2, Arm, Coherency, FirstStage, Format, Granule, Granule4K, Granule16K, Granule64K,
    Level, Levels, MapRequest, RiscV, SecondStage, Table,
};
use ringfence_types::{DomainId, PageSize, Permissions, Pfn, PfnRange, PhysAddr, PhysRange};
use timing::{cycles, quantile};

const BASELINE: &str = "VT-d second stage, 4 levels";
/// Measurements whose medians give the printed spread.
const ROUNDS: usize = 9;
/// Single entries and runs in a sample.
const OPS: u64 = 200;
/// Samples of 512 entries take fewer operations.
const LONG_OPS: u64 = 10;
/// Entries from here on have a linked leaf table. Large leaves need one that is not linked.
const LINKED: u64 = 1 << 16;

/// One kind of work.
struct Work {
    name: &'static str,
    ops: u64,
    /// Divisor of an operation's cycles.
    units: u64,
}

const fn work(name: &'static str, ops: u64, units: u64) -> Work {
    Work { name, ops, units }
}

const WORKS: [Work; 6] = [
    work("pair", OPS, 1),
    work("16 entries, per entry", OPS, 16),
    work("16 aligned entries, per entry", OPS, 16),
    work("16 entries from the 8th, per entry", OPS, 16),
    work("512 entries, per entry", LONG_OPS, 512),
    work("512 aligned entries", OPS, 1),
];

/// The works of `table`, in the order of [`WORKS`].
fn works<F: Format>(table: &'static Table<F>, memory: &'static Memory) -> Vec<Box<dyn FnMut()>> {
    let aligned = |op| LINKED + op % 31 * 16;
    vec![
        // In ring order: descending.
        pairs::<F, 1, 1>(table, memory, OPS, |op| LINKED + 1534 - op % 500),
        pairs::<F, 16, 1>(table, memory, OPS, aligned),
        pairs::<F, 16, 0>(table, memory, OPS, aligned),
        pairs::<F, 16, 0>(table, memory, OPS, move |op| aligned(op) + 8),
        pairs::<F, 512, 1>(table, memory, LONG_OPS, |_| LINKED),
        pairs::<F, 512, 0>(table, memory, OPS, |op| op % 8 * 512),
    ]
}

/// Maps and unmaps `ENTRIES` entries of the smallest page from `first(op)` on. The physical
/// address lies `SKEW` entries off the alignment of the IOVA.
fn pairs<F: Format, const ENTRIES: u64, const SKEW: u64>(
    table: &'static Table<F>,
    (mem, frames): &'static Memory,
    ops: u64,
    first: impl Fn(u64) -> u64 + 'static,
) -> Box<dyn FnMut()> {
    Box::new(move || {
        for op in 0..ops {
            let map = request::<F>(black_box(first(op)), ENTRIES, SKEW);
            table.map(mem, frames, map).expect("free");
            let range = range::<F>(black_box(first(op)), ENTRIES);
            assert!(table.unmap(mem, range).is_ok());
        }
    })
}

type Memory = (&'static Arena, Frames<&'static Arena>);

struct Side {
    format: String,
    works: Vec<Box<dyn FnMut()>>,
    /// Medians of the rounds, by work.
    medians: Vec<Vec<f64>>,
}

/// Creates the table of `format` in an arena of its own, with linked leaf tables from
/// [`LINKED`] on.
fn side<F: Format + 'static>(name: &str, format: F) -> Side {
    let granule = F::GRANULE;
    let bytes = 4 << 20;
    let mem: &'static Arena = Box::leak(Box::new(Arena::new(bytes).expect("arena")));
    let root = Table::root_bytes_of(&format).max(granule.bytes());
    let region = PhysRange::new(PhysAddr::new(root), bytes - root).expect("not empty");
    let frames = Frames::of_size(granule, mem, region);
    let at = PhysAddr::ZERO;
    let table = Table::at(format, DomainId::new(1), Coherency::Coherent, mem, at);
    let table: &'static _ = Box::leak(Box::new(table.expect("zeroes")));
    for last in (LINKED..LINKED + 2048).step_by(512) {
        let entry = request::<F>(last + 511, 1, 0);
        table.map(mem, &frames, entry).expect("frames");
        assert!(table.unmap(mem, range::<F>(last + 511, 1)).is_ok());
    }
    Side {
        format: name.into(),
        works: works(table, Box::leak(Box::new((mem, frames)))),
        medians: vec![Vec::new(); WORKS.len()],
    }
}

#[inline(always)]
fn request<F: Format>(first: u64, entries: u64, skew: u64) -> MapRequest {
    MapRequest {
        iova: Pfn::new(first * F::GRANULE.granules()).iova(),
        pa: PhysAddr::new((1 << 40) + (first + skew) * F::GRANULE.bytes()),
        pages: entries * F::GRANULE.granules(),
        permissions: Permissions::READ_WRITE,
    }
}

#[inline(always)]
fn range<F: Format>(first: u64, entries: u64) -> PfnRange {
    let granule = F::GRANULE.granules();
    match PfnRange::new(Pfn::new(first * granule), entries * granule) {
        Some(range) => range,
        None => unreachable!("entries is not zero"),
    }
}

fn arm<G: Granule + 'static>(sides: &mut Vec<Side>, granule: &str, widths: &[u32]) {
    for &width in widths {
        for (stage, format) in [(1, Arm::<G>::stage1(width)), (2, Arm::stage2(width))] {
            let format = format.expect("a width");
            let format = format
                .with_pages_up_to(PageSize::Size1G)
                .with_contiguous_hint();
            let levels = format.root_level().get();
            let name = format!("SMMUv3 stage {stage}, {granule}, {levels} levels");
            sides.push(side(&name, format));
        }
    }
}

fn sides() -> Vec<Side> {
    let largest = PageSize::Size1G;
    let mut sides = Vec::new();
    let four = SecondStage::new(Levels::Four).with_pages_up_to(largest);
    sides.push(side(BASELINE, four));
    for levels in Levels::ALL {
        let depth = levels.root().get();
        if levels != Levels::Four {
            let format = SecondStage::new(levels).with_pages_up_to(largest);
            sides.push(side(&format!("VT-d second stage, {depth} levels"), format));
        }
        if let (Some(vtd), Some(amd)) = (FirstStage::new(levels), AmdV2::new(levels)) {
            let format = vtd.with_pages_up_to(largest);
            sides.push(side(&format!("VT-d first stage, {depth} levels"), format));
            let format = amd.with_pages_up_to(largest);
            sides.push(side(&format!("AMD v2, {depth} levels"), format));
        }
        let riscv = |format: RiscV| format.with_pages_up_to(largest).with_napot();
        let width = levels.width();
        let format = riscv(RiscV::first_stage(levels));
        sides.push(side(&format!("RISC-V Sv{width}"), format));
        let format = riscv(RiscV::second_stage(levels));
        sides.push(side(&format!("RISC-V Sv{width}x4"), format));
    }
    for levels in 3..=6 {
        let format = AmdV1::new(Level::new(levels).expect("1 to 6")).with_pages_up_to(largest);
        sides.push(side(&format!("AMD v1, {levels} levels"), format));
    }
    arm::<Granule4K>(&mut sides, "4 KiB", &[39, 48]);
    arm::<Granule16K>(&mut sides, "16 KiB", &[47]);
    arm::<Granule64K>(&mut sides, "64 KiB", &[48]);
    sides
}

fn main() {
    let arguments: Vec<_> = std::env::args().collect();
    let after = |flag: &str, skip: usize| {
        let at = arguments.iter().position(|argument| argument == flag)?;
        arguments.get(at + skip).cloned()
    };
    if let Some(name) = after("--count", 1) {
        let work = after("--count", 2).expect("--count NAME WORK");
        return count(&mut sides(), &name, &work);
    }
    let only = after("--only", 1).unwrap_or_default();
    let quick = arguments
        .iter()
        .any(|argument| argument == "--quick" || argument == "--test");
    let samples = if quick { 20 } else { 200 };
    let mut results: Vec<Side> = Vec::new();
    for _ in 0..ROUNDS {
        // New tables for each round: their address in memory changes what the caches do.
        let mut sides = sides();
        sides.retain(|side| side.format == BASELINE || side.format.contains(&only));
        round(&mut sides, samples);
        match results.is_empty() {
            true => results = sides,
            false => merge(&mut results, sides),
        }
    }
    report(&results);
}

/// Measures every work of every side `samples` times, in turn.
fn round(sides: &mut [Side], samples: usize) {
    let mut spent = vec![vec![Vec::new(); WORKS.len()]; sides.len()];
    for _ in 0..samples {
        for (at, work) in WORKS.iter().enumerate() {
            for (side, spent) in sides.iter_mut().zip(&mut spent) {
                // The first run brings the table and the code into the cache.
                (side.works[at])();
                let start = cycles();
                (side.works[at])();
                let cycles = cycles().wrapping_sub(start);
                spent[at].push(cycles as f64 / (work.ops * work.units) as f64);
            }
        }
    }
    for (side, spent) in sides.iter_mut().zip(&mut spent) {
        for (medians, samples) in side.medians.iter_mut().zip(spent) {
            samples.sort_by(f64::total_cmp);
            medians.push(quantile(samples, 0.5));
        }
    }
}

/// Adds the medians of another round.
fn merge(results: &mut [Side], sides: Vec<Side>) {
    for (result, side) in results.iter_mut().zip(sides) {
        for (all, new) in result.medians.iter_mut().zip(side.medians) {
            all.extend(new);
        }
    }
}

/// Prints the median over all rounds, and of the ratios to the baseline within each round.
fn report(sides: &[Side]) {
    let baseline = &sides[0];
    for (at, work) in WORKS.iter().enumerate() {
        println!(
            "{:<36} {:>8} {:>17} {:>7} {:>15}",
            work.name, "cycles", "least to most", "ratio", "least to most"
        );
        for side in sides {
            let sorted = |mut values: Vec<f64>| {
                values.sort_by(f64::total_cmp);
                values
            };
            let own = &side.medians[at];
            let ratios = own.iter().zip(&baseline.medians[at]).map(|(a, b)| a / b);
            let (cycles, ratios) = (sorted(own.clone()), sorted(ratios.collect()));
            println!(
                "{:<36} {:>8.2} {:>8.2} {:>8.2} {:>7.3} {:>7.3} {:>7.3}",
                side.format,
                quantile(&cycles, 0.5),
                cycles[0],
                cycles[cycles.len() - 1],
                quantile(&ratios, 0.5),
                ratios[0],
                ratios[ratios.len() - 1],
            );
        }
        println!();
    }
}

/// Function that callgrind counts.
#[inline(never)]
fn counted_by_callgrind(run: &mut dyn FnMut()) {
    for _ in 0..100 {
        run();
    }
    black_box(());
}

/// Repeats `work` of the format `name` for an instruction counter.
fn count(sides: &mut [Side], name: &str, work: &str) {
    let side = sides.iter_mut().find(|side| side.format == name);
    let at = WORKS.iter().position(|known| known.name == work);
    counted_by_callgrind(&mut side.expect("a format").works[at.expect("a work")]);
}
