//! Measures one allocation and one free, in cycles and as ratios to an unlocked stack per thread.
//! All sides are measured alternately.
//!
//! `cargo bench -p ringfence-iova -- [--quick] [--check]`: `--quick` takes a tenth of the samples;
//! `--check` fails if a bound is missed.

#[path = "support/clock.rs"]
mod clock;
#[path = "support/workloads.rs"]
mod workloads;

use std::cell::RefCell;
use std::process::ExitCode;
use std::sync::Mutex;

use clock::quantile;
use ringfence_iova::*;
use ringfence_types::{Flushed, Pfn, PfnRange};
use workloads::*;

/// The baseline: a stack of page numbers that one thread owns, without locks, limits or sizes.
struct Stack {
    next: RefCell<u64>,
}

impl IovaAllocator for Stack {
    type PerCpu = Vec<u64>;
    type FreeProof = Flushed;

    fn per_cpu(&self) -> Vec<u64> {
        Vec::with_capacity(1 << 15)
    }

    #[inline]
    fn alloc(&self, cpu: &mut Vec<u64>, request: &AllocRequest) -> Result<Allocation, AllocError> {
        let lo = match cpu.pop() {
            Some(lo) => lo,
            None => {
                let mut next = self.next.borrow_mut();
                *next += request.pages;
                *next
            }
        };
        match PfnRange::new(Pfn::new(lo), request.pages) {
            Some(range) => Ok(Allocation { range, steps: 0 }),
            None => Err(AllocError::OutOfMemory),
        }
    }

    fn find(&self, _: &mut Vec<u64>, _: Pfn) -> Option<PfnRange> {
        None
    }

    #[inline]
    fn free(&self, cpu: &mut Vec<u64>, range: Flushed) -> bool {
        cpu.push(range.range().lo().get());
        true
    }

    fn footprint(&self) -> usize {
        0
    }
}

fn space() -> PfnRange {
    match PfnRange::inclusive(Pfn::new(1), workloads::LIMIT) {
        Some(space) => space,
        None => unreachable!(),
    }
}

fn magazines() -> Magazines<Mutex<Depot>> {
    match Magazines::new(space(), MagazineLimits::DEFAULT, Mutex::new) {
        Ok(allocator) => allocator,
        Err(error) => panic!("{error}"),
    }
}

type Tree = CachedTree;

fn rcache() -> LinuxRcache<Tree, Mutex<RcacheShared<Tree>>> {
    LinuxRcache::new(Tree::new(space()), Mutex::new)
}

fn eiovar() -> LockedEiovar<Tree, Mutex<Eiovar<Tree>>> {
    Locked::new(
        Eiovar::new(Tree::new(space()), Capacity::Unbounded),
        Mutex::new,
    )
}

fn freebsd() -> FreeBsd<Mutex<FreeBsdTree>> {
    Locked::new(FreeBsdTree::new(space()), Mutex::new)
}

fn vmalloc() -> Vmalloc<Mutex<VmallocTree>> {
    Locked::new(VmallocTree::new(space()), Mutex::new)
}

fn tree() -> CachedRbTree<Mutex<Tree>> {
    Locked::new(Tree::new(space()), Mutex::new)
}

/// One measured allocator: its name, the pairs per sample, and a function that takes a sample.
struct Side<'a> {
    name: &'static str,
    pairs: usize,
    sample: Box<dyn FnMut(usize) -> f64 + 'a>,
    cycles: Vec<f64>,
    ratios: Vec<f64>,
}

/// Prints medians with the spread from the first to the last decile. Returns the median ratio of
/// each side to the first one.
fn report(title: &str, mut sides: Vec<Side<'_>>, rounds: usize) -> Vec<(&'static str, f64)> {
    for round in 0..rounds + 1 {
        let mut first = 0.0;
        for (number, side) in sides.iter_mut().enumerate() {
            let cycles = (side.sample)(side.pairs);
            if number == 0 {
                first = cycles;
            }
            // The first round warms up.
            if round > 0 {
                side.cycles.push(cycles);
                side.ratios.push(cycles / first);
            }
        }
    }
    println!("\n{title}");
    println!(
        "  {:<28} {:>9} {:>9} {:>9}   {:>8} {:>8} {:>8}",
        "", "cycles", "10%", "90%", "ratio", "10%", "90%"
    );
    let mut ratios = Vec::new();
    for side in &mut sides {
        let mut at = |share| quantile(&mut side.cycles, share);
        let cycles = (at(0.5), at(0.1), at(0.9));
        let mut at = |share| quantile(&mut side.ratios, share);
        let ratio = (at(0.5), at(0.1), at(0.9));
        println!(
            "  {:<28} {:>9.1} {:>9.1} {:>9.1}   {:>8.2} {:>8.2} {:>8.2}",
            side.name, cycles.0, cycles.1, cycles.2, ratio.0, ratio.1, ratio.2
        );
        ratios.push((side.name, ratio.0));
    }
    ratios
}

fn side<'a, A: IovaAllocator>(
    name: &'static str,
    pairs: usize,
    allocator: &'a A,
    work: Single,
) -> Side<'a> {
    let mut runner = Runner::new(allocator, work);
    Side {
        name,
        pairs,
        sample: Box::new(move |pairs| runner.run(pairs)),
        cycles: Vec::new(),
        ratios: Vec::new(),
    }
}

fn parallel<'a>(
    name: &'static str,
    pairs: usize,
    sample: impl FnMut(usize) -> f64 + 'a,
) -> Side<'a> {
    Side {
        name,
        pairs,
        sample: Box::new(sample),
        cycles: Vec::new(),
        ratios: Vec::new(),
    }
}

const MAGAZINES: &str = "magazines";

/// Returns the bound on the cost of the magazines, as a multiple of the stack's.
fn bound(workload: &str) -> Option<f64> {
    match workload.split(' ').next()? {
        "a1" | "b0" | "c1" => Some(2.5),
        "f1" => Some(3.0),
        "d2" => Some(4.0),
        _ => None,
    }
}

fn main() -> ExitCode {
    let asked = |flag: &str| std::env::args().any(|argument| argument == flag);
    let (quick, check) = (asked("--quick"), asked("--check"));
    let rounds = if quick { 11 } else { 101 };
    let mut missed = Vec::new();
    for work in SINGLE {
        let stack = Stack {
            next: RefCell::new(0),
        };
        let (magazines, rcache, eiovar, freebsd, vmalloc, tree) = (
            magazines(),
            rcache(),
            eiovar(),
            freebsd(),
            vmalloc(),
            tree(),
        );
        // A linear search takes tens of thousands of cycles where the others take tens.
        let slow = if work.live > 10_000 { 50 } else { 500 };
        let sides = vec![
            side("stack, no lock", 20_000, &stack, work),
            side(MAGAZINES, 20_000, &magazines, work),
            side(
                "linux rcache",
                if work.pages > 1 { slow } else { 20_000 },
                &rcache,
                work,
            ),
            side("eiovar, k = inf", 2_000, &eiovar, work),
            side("freebsd", 1_000, &freebsd, work),
            side("vmalloc", slow, &vmalloc, work),
            side("linux 3.4 tree", slow, &tree, work),
        ];
        for (name, ratio) in report(work.name, sides, rounds) {
            if name == MAGAZINES && bound(work.name).is_some_and(|bound| ratio > bound) {
                missed.push(format!("{}: {ratio:.2} times the stack", work.name));
            }
        }
    }
    let rounds = rounds.min(31);
    let (mags, cache, one_lock) = (magazines(), rcache(), tree());
    report(
        "two threads, own rings of 512 (the single lock)",
        vec![
            parallel(MAGAZINES, 100_000, |pairs| {
                two_rings_two_threads(&mags, pairs)
            }),
            parallel("linux rcache", 100_000, |pairs| {
                two_rings_two_threads(&cache, pairs)
            }),
            parallel("linux 3.4 tree, one lock", 2_000, |pairs| {
                two_rings_two_threads(&one_lock, pairs)
            }),
        ],
        rounds,
    );
    let (mags, cache, one_lock) = (magazines(), rcache(), tree());
    report(
        "map on one thread, unmap on the other",
        vec![
            parallel("queue alone", 200_000, queue_alone),
            parallel(MAGAZINES, 200_000, |pairs| {
                map_here_unmap_there(&mags, pairs)
            }),
            parallel("linux rcache", 200_000, |pairs| {
                map_here_unmap_there(&cache, pairs)
            }),
            parallel("linux 3.4 tree, one lock", 20_000, |pairs| {
                map_here_unmap_there(&one_lock, pairs)
            }),
        ],
        rounds,
    );
    for line in &missed {
        println!("\nmissed: {line}");
    }
    if check && !missed.is_empty() {
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
