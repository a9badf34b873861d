//! A long run of mixed sizes. Neither memory nor search length may grow.
//!
//! `cargo run --release -p ringfence-iova --example soak -- [OPERATIONS]` (default 10^8). An
//! operation is an alloc or a free. Below 10^7 the samples are too few for a verdict. A warm-up of
//! 2 x 10^7 operations comes first: after it, the mix of sizes no longer increases the
//! fragmentation of free space. Two handles on one thread: either may unmap the other's maps. Exit
//! code 1 if anything grew.

use std::cell::RefCell;
use std::process::ExitCode;

use ringfence_iova::{AllocRequest, IovaAllocator, MagazineLimits, Magazines};
use ringfence_types::{
    DomainId, Flushed, Invalidation, InvalidationError, Invalidator, Pending, Pfn, PfnRange,
    Ticket, Unmapped,
};

/// An invalidation interface that completes at once.
struct Prompt;

impl Invalidator for Prompt {
    fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
        Ok(Ticket::new(0))
    }

    fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
        Ok(true)
    }
}

fn flushed(range: PfnRange) -> Option<Flushed> {
    let unmapped = Unmapped::attest_cleared(DomainId::new(0), range);
    let pending = Pending::submit(&mut Prompt, Invalidation::Global, unmapped).ok()?;
    pending.wait(&mut Prompt).ok()
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 32) * bound) >> 32
    }

    /// Returns a size: mostly one page, often a few, sometimes up to 8 MiB, with every order in
    /// between.
    fn size(&mut self) -> u64 {
        match self.below(16) {
            0..9 => 1,
            9..13 => 1 + self.below(32),
            13..15 => 33 + self.below(480),
            _ => 1 + self.below(2048),
        }
    }
}

/// The measures that must not grow, over one tenth of the run.
#[derive(Debug, Clone, Copy, Default)]
struct Peak {
    footprint: usize,
    leased: u64,
    total_fragments: usize,
    samples: usize,
    steps: u32,
    total_steps: u64,
    allocations: u64,
    refused: u64,
}

impl Peak {
    fn fragments(&self) -> f64 {
        self.total_fragments as f64 / self.samples.max(1) as f64
    }
}

const SLOTS: u64 = 6000;
const TENTHS: usize = 10;
const WARM_UP: u64 = 20_000_000;

fn main() -> ExitCode {
    let operations: u64 = match std::env::args().nth(1).map(|word| word.parse()) {
        None => 100_000_000,
        Some(Ok(operations)) => operations,
        Some(Err(_)) => {
            eprintln!("usage: soak [OPERATIONS]");
            return ExitCode::from(2);
        }
    };
    let (lo, hi) = (Pfn::new(1), Pfn::MAX);
    let Some(space) = PfnRange::inclusive(lo, hi) else {
        return ExitCode::from(2);
    };
    let allocator = match Magazines::new(space, MagazineLimits::DEFAULT, RefCell::new) {
        Ok(allocator) => allocator,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let limits = [
        Pfn::new(0xf_ffff),
        Pfn::new(0xf_ffff),
        Pfn::new(0xf_ffff),
        Pfn::new(0x7_ffff),
        Pfn::MAX,
    ];
    let mut cpus = [allocator.per_cpu(), allocator.per_cpu()];
    let mut live: Vec<Option<PfnRange>> = vec![None; SLOTS as usize];
    let mut random = Random(0x0005_eed1);
    let mut peaks = [Peak::default(); TENTHS];
    let mut done = 0;
    let mut warm_up = Peak::default();
    let phases = core::iter::once(&mut warm_up).chain(&mut peaks);
    for (phase, peak) in phases.enumerate() {
        let until = WARM_UP + operations / TENTHS as u64 * phase as u64;
        // The load rises and falls within each tenth, so that caches and free space exchange
        // ranges.
        while done < until {
            let slots = 1 + SLOTS * (1 + (done >> 16) % 4) / 4;
            let slot = random.below(slots.min(SLOTS)) as usize;
            let cpu = &mut cpus[random.below(2) as usize];
            match live[slot].take() {
                Some(range) => {
                    let kept = flushed(range).is_some_and(|range| allocator.free(cpu, range));
                    assert!(kept, "{range} was refused");
                }
                None => {
                    let limit = limits[random.below(limits.len() as u64) as usize];
                    match allocator.alloc(cpu, &AllocRequest::new(random.size(), limit)) {
                        Ok(found) => {
                            live[slot] = Some(found.range);
                            peak.steps = peak.steps.max(found.steps);
                            peak.total_steps += u64::from(found.steps);
                            peak.allocations += 1;
                        }
                        Err(_) => peak.refused += 1,
                    }
                }
            }
            done += 1;
            if done.is_multiple_of(4096) {
                peak.footprint = peak.footprint.max(allocator.footprint());
                peak.leased = peak.leased.max(allocator.leased_pages());
                peak.total_fragments += allocator.fragments();
                peak.samples += 1;
            }
        }
        println!(
            "{done:>12} operations: {:>8} bytes, {:>7} pages leased, {:>6.1} fragments, search \
            {:.4} mean, {} longest, {} refused",
            peak.footprint,
            peak.leased,
            peak.fragments(),
            peak.total_steps as f64 / peak.allocations.max(1) as f64,
            peak.steps,
            peak.refused
        );
    }
    for (slot, range) in live.into_iter().enumerate() {
        if let Some(range) = range.and_then(flushed) {
            assert!(allocator.free(&mut cpus[slot % 2], range));
        }
    }
    for cpu in &mut cpus {
        allocator.drain(cpu);
    }
    // Allocating the whole space reclaims the depot's ranges.
    let whole = allocator.alloc(&mut cpus[0], &AllocRequest::new(space.pages(), hi));
    verdict(&peaks, whole.is_ok())
}

type Measure = fn(&Peak) -> f64;

/// Fails if the second half of the run exceeds the first by more than noise.
fn verdict(peaks: &[Peak; TENTHS], whole: bool) -> ExitCode {
    let (first, second) = peaks.split_at(TENTHS / 2);
    let most = |peaks: &[Peak], of: Measure| peaks.iter().map(of).fold(0.0, f64::max);
    let measures: [(&str, Measure); 5] = [
        ("bytes", |peak| peak.footprint as f64),
        ("pages leased", |peak| peak.leased as f64),
        ("fragments", Peak::fragments),
        ("longest search", |peak| f64::from(peak.steps)),
        ("mean search", |peak| {
            peak.total_steps as f64 / peak.allocations.max(1) as f64
        }),
    ];
    let mut grown = !whole;
    for (name, of) in measures {
        let (before, after) = (most(first, of), most(second, of));
        if after > before * 1.1 + 2.0 {
            println!("GROWN: {name} from {before:.2} to {after:.2}");
            grown = true;
        }
    }
    if !whole {
        println!("LOST: the space is not whole after everything was freed");
    }
    if grown {
        return ExitCode::FAILURE;
    }
    println!("no growth; the space is whole");
    ExitCode::SUCCESS
}
