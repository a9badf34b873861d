//! What a translation, a pin, a burst, a protected read and an unmap cost; against vm-memory's `Iotlb`, the same behind a lock, plain
//! `GuestMemoryMmap`, and a bare table without readers.
//!
//! `hits`, `reads`, `changes`, `waking`, `busy` after `--` run that part only.
//!
//! Sides are interleaved, so a neighbour on the machine slows all of them; the medians' ratios are what counts. Addresses are live pages
//! in random order. In a dependent side the next address needs the translation before.

use std::cell::RefCell;
use std::hint::black_box;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use ringfence_softiommu::{Domain, Limits, Reader, SoftIommu};
use ringfence_types::{Access, DeviceId, DomainId, Iova, IovaRange, Permissions, PhysAddr};
use vm_memory::iommu::Iotlb;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, Permissions as Wanted};

#[path = "../../iova/benches/support/clock.rs"]
#[allow(dead_code)]
mod clock;

use clock::quantile;

const DISK: DeviceId = DeviceId::new(0x20);
const DOMAIN: DomainId = DomainId::new(1);
const PAGE: u64 = 1 << 12;
const ACCESSES: usize = 1 << 13;
const SAMPLES: usize = 41;
/// The highest page, as Linux gives out addresses: below 4 GiB, downward.
const TOP: u64 = 0xf_ffff;
const MEMORY: u64 = 64 << 20;

struct Side<'a> {
    name: String,
    work: Box<dyn FnMut() + 'a>,
    nanos: Vec<f64>,
}

fn side<'a>(name: &str, work: impl FnMut() + 'a) -> Side<'a> {
    Side {
        name: name.to_owned(),
        work: Box::new(work),
        nanos: Vec::new(),
    }
}

/// Runs all sides in turn, and prints each beside the first.
fn run(title: &str, samples: usize, sides: &mut [Side<'_>]) {
    for _ in 0..samples {
        for side in sides.iter_mut() {
            (side.work)();
            let start = Instant::now();
            (side.work)();
            side.nanos
                .push(start.elapsed().as_nanos() as f64 / ACCESSES as f64);
        }
    }
    println!("{title}");
    println!(
        "  {:<52} {:>8} {:>8} {:>8} {:>8}",
        "ns", "median", "10%", "90%", "/first"
    );
    let mut first = f64::NAN;
    for side in sides {
        let [median, low, high] = [0.5, 0.1, 0.9].map(|share| quantile(&mut side.nanos, share));
        if first.is_nan() {
            first = median;
        }
        println!(
            "  {:<52} {median:>8.2} {low:>8.2} {high:>8.2} {:>8.3}",
            side.name,
            median / first
        );
    }
}

/// Where page `n` of the live ones is mapped to.
fn frame(n: u64) -> u64 {
    (n * 7919) % (MEMORY / PAGE)
}

fn page(n: u64) -> IovaRange {
    IovaRange::new(Iova::new((TOP - n) * PAGE), PAGE).expect("no wrap")
}

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY as usize)]).expect("memory")
}

fn unit(live: u64) -> SoftIommu<GuestMemoryMmap> {
    let mut unit = SoftIommu::new(Limits::default(), memory());
    unit.add_endpoint(DISK).expect("room");
    let domain = unit.create_domain(DOMAIN).expect("room");
    for n in 0..live {
        let to = PhysAddr::new(frame(n) * PAGE);
        domain
            .map(page(n), to, Permissions::READ_WRITE)
            .expect("room");
    }
    unit.attach(DISK, DOMAIN).expect("there");
    unit
}

fn iotlb(live: u64) -> Iotlb {
    let mut iotlb = Iotlb::new();
    for n in 0..live {
        let (at, to) = (
            GuestAddress(page(n).start().get()),
            GuestAddress(frame(n) * PAGE),
        );
        iotlb
            .set_mapping(at, to, PAGE as usize, Wanted::ReadWrite)
            .expect("set");
    }
    iotlb
}

/// Live addresses in random order, 8 bytes each, within their pages.
fn addresses(live: u64) -> Vec<u64> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    (0..ACCESSES)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            page(state % live).start().get() + (state >> 40) % 511 * 8
        })
        .collect()
}

fn eight(at: u64) -> IovaRange {
    IovaRange::new(Iova::new(at), 8).expect("no wrap")
}

fn hits(live: u64, samples: usize) {
    let unit = unit(live);
    let mut reader = unit.reader(DISK).expect("room");
    let mut other = unit.reader(DISK).expect("room");
    let mut third = unit.reader(DISK).expect("room");
    let (tlb, locked) = (iotlb(live), RwLock::new(iotlb(live)));
    let addresses = addresses(live);
    let mut burst = reader.online();
    let pin = burst.pin();
    let lookup = |tlb: &Iotlb, at| {
        let found = Iotlb::lookup(tlb, GuestAddress(at), 8, Wanted::Read).map(|mut it| it.next());
        black_box(found.ok().flatten().map(|range| range.base.0));
    };
    run(
        &format!("translations of 8 bytes, {live} pages live"),
        samples,
        &mut [
            side("vm-memory Iotlb", || {
                for at in &addresses {
                    lookup(&tlb, *at);
                }
            }),
            side("vm-memory RwLock<Iotlb>", || {
                for at in &addresses {
                    lookup(&locked.read().expect("whole"), *at);
                }
            }),
            side("under one pin", || {
                for at in &addresses {
                    let found = pin.translate(eight(*at), Access::Read);
                    black_box(found.map(|pieces| pieces.first().start().get()).ok());
                }
            }),
            side("under one pin, each needs the one before", || {
                let mut n = 0;
                for _ in 0..ACCESSES {
                    let at = addresses[n];
                    let to = pin
                        .translate(eight(at), Access::Read)
                        .map_or(0, |pieces| pieces.first().start().get());
                    n = (to >> 3) as usize % ACCESSES;
                }
                black_box(n);
            }),
            side("the same chain of addresses without translation", || {
                let mut n = 0;
                for _ in 0..ACCESSES {
                    n = (addresses[n] >> 3) as usize % ACCESSES;
                }
                black_box(n);
            }),
            side("a pin for each", || {
                let mut burst = other.online();
                for at in &addresses {
                    let found = burst.pin().translate(eight(*at), Access::Read);
                    black_box(found.map(|pieces| pieces.first().start().get()).ok());
                }
            }),
            side("a burst for each, nothing translated", || {
                for _ in 0..ACCESSES {
                    black_box(third.online().pin().device());
                }
            }),
        ],
    );
}

fn reads(live: u64, samples: usize) {
    let unit = unit(live);
    let mut reader = unit.reader(DISK).expect("room");
    let plain = memory();
    let addresses = addresses(live);
    let physical: Vec<u64> = addresses.iter().map(|at| at % MEMORY).collect();
    let mut burst = reader.online();
    let pin = burst.pin();
    run(
        &format!("reads of 8 bytes, {live} pages live"),
        samples,
        &mut [
            side("GuestMemoryMmap::read_obj, unprotected", || {
                for at in &physical {
                    black_box(plain.read_obj::<u64>(GuestAddress(*at)).ok());
                }
            }),
            side("Pin::read", || {
                for at in &addresses {
                    black_box(pin.read::<u64>(Iova::new(*at)).ok());
                }
            }),
            side("read_obj of GuestMemory for Pin", || {
                for at in &addresses {
                    black_box(pin.read_obj::<u64>(GuestAddress(*at)).ok());
                }
            }),
        ],
    );
}

/// A radix table and nothing around it: no readers, no checks but of what is there.
struct Bare {
    words: Vec<AtomicU64>,
    used: usize,
}

impl Bare {
    fn new(live: u64) -> Self {
        let mut bare = Self {
            words: (0..512 * 64).map(|_| AtomicU64::new(0)).collect(),
            used: 512,
        };
        for n in 0..live {
            bare.map(page(n).start().get(), frame(n) * PAGE);
        }
        bare
    }

    #[inline]
    fn leaf(&mut self, iova: u64) -> &AtomicU64 {
        let mut at = 0;
        for shift in [39, 30, 21] {
            let link = at | (iova >> shift) as usize & 511;
            at = self.words[link].load(Ordering::Relaxed) as usize;
            if at == 0 {
                at = self.used;
                self.words[link].store(at as u64, Ordering::Relaxed);
                self.used += 512;
            }
        }
        &self.words[at | (iova >> 12) as usize & 511]
    }

    #[inline]
    fn map(&mut self, iova: u64, to: u64) -> bool {
        let leaf = self.leaf(iova);
        let free = leaf.load(Ordering::Relaxed) == 0;
        leaf.store(to | 3, Ordering::Relaxed);
        free
    }

    #[inline]
    fn unmap(&mut self, iova: u64) -> bool {
        let leaf = self.leaf(iova);
        let was = leaf.load(Ordering::Relaxed) != 0;
        leaf.store(0, Ordering::Relaxed);
        was
    }
}

fn again(domain: &mut Domain<GuestMemoryMmap>, range: IovaRange) {
    let unmapped = domain.unmap(range);
    let mapped = domain.map(range, PhysAddr::new(PAGE), Permissions::READ_WRITE);
    black_box((unmapped.is_ok(), mapped.is_ok()));
}

fn pages_of(addresses: &[u64]) -> Vec<IovaRange> {
    addresses
        .iter()
        .filter_map(|at| IovaRange::new(Iova::new(at & !(PAGE - 1)), PAGE))
        .collect()
}

fn changes(live: u64, samples: usize) {
    let mut alone = unit(live);
    let mut idle = unit(live);
    let _readers: Vec<Reader<_>> = (0..2).filter_map(|_| idle.reader(DISK).ok()).collect();
    let mut bare = Bare::new(live);
    let mut tlb = iotlb(live);
    let ranges = pages_of(&addresses(live));
    let (alone, idle) = (
        alone.domain(DOMAIN).expect("there"),
        idle.domain(DOMAIN).expect("there"),
    );
    run(
        &format!("unmap and map of one page, {live} pages live"),
        samples,
        &mut [
            side("bare table, unsynchronised", || {
                for range in &ranges {
                    let at = range.start().get();
                    black_box((bare.unmap(at), bare.map(at, PAGE)));
                }
            }),
            side("vm-memory Iotlb", || {
                for range in &ranges {
                    let at = GuestAddress(range.start().get());
                    tlb.invalidate_mapping(at, PAGE as usize);
                    let set = tlb.set_mapping(at, GuestAddress(PAGE), PAGE as usize, Wanted::Read);
                    black_box(set.is_ok());
                }
            }),
            side("no reader", || {
                for range in &ranges {
                    again(alone, *range);
                }
            }),
            side("two idle readers", || {
                for range in &ranges {
                    again(idle, *range);
                }
            }),
        ],
    );
}

/// Going online at a gate that was parked: a `membarrier`, whose price depends on who else runs.
fn waking(samples: usize) {
    let mut unit = unit(1);
    let mut reader = unit.reader(DISK).expect("room");
    let domain = unit.domain(DOMAIN).expect("there");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for title in ["no other thread runs", "another thread runs"] {
            let mut nanos: Vec<f64> = (0..samples)
                .map(|_| {
                    // More than it takes to park.
                    for _ in 0..2 * ACCESSES {
                        again(domain, page(0));
                    }
                    let start = Instant::now();
                    black_box(reader.online().pin().device());
                    start.elapsed().as_nanos() as f64
                })
                .collect();
            let [median, low, high] = [0.5, 0.1, 0.9].map(|share| quantile(&mut nanos, share));
            println!("online at a parked gate, {title}: {median:.0} ns ({low:.0} to {high:.0})");
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    black_box(());
                }
            });
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// A second thread translates as fast as it can, a pin for each four accesses.
fn busy(live: u64, samples: usize) {
    let mut watched = unit(live);
    let mut reader = watched.reader(DISK).expect("room");
    let mut here = watched.reader(DISK).expect("room");
    let addresses = addresses(live);
    let ranges = pages_of(&addresses);
    let stop = AtomicBool::new(false);
    let translate = |reader: &mut Reader<GuestMemoryMmap>| {
        let mut burst = reader.online();
        for four in addresses.chunks(4) {
            let pin = burst.pin();
            for at in four {
                let found = pin.translate(eight(*at), Access::Read);
                black_box(found.map(|pieces| pieces.first().start().get()).ok());
            }
        }
    };
    run(
        &format!("one reader alone, {live} pages live, a pin for each four"),
        samples,
        &mut [side("translation", || translate(&mut here))],
    );
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                translate(&mut reader);
            }
        });
        run(
            &format!("one reader beside another, {live} pages live"),
            samples,
            &mut [side("translation", || translate(&mut here))],
        );
        let domain = RefCell::new(watched.domain(DOMAIN).expect("there"));
        run(
            &format!("unmap and map of one page beside a busy reader, {live} pages live"),
            samples,
            &mut [
                side("one at a time", || {
                    for range in &ranges {
                        again(&mut domain.borrow_mut(), *range);
                    }
                }),
                side("unmapped in batches of 16", || {
                    let mut domain = domain.borrow_mut();
                    for batch in ranges.chunks(16) {
                        black_box(domain.unmap_all(batch.iter().copied()).is_ok());
                        for range in batch {
                            let to = PhysAddr::new(PAGE);
                            let mapped = domain.map(*range, to, Permissions::READ_WRITE);
                            black_box(mapped.is_ok());
                        }
                    }
                }),
            ],
        );
        stop.store(true, Ordering::Relaxed);
    });
}

fn main() {
    // `cargo test --benches` runs this too: then once is enough.
    let samples = if std::env::args().any(|arg| arg == "--bench") {
        SAMPLES
    } else {
        1
    };
    let parts: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    let chosen = |part: &str| parts.is_empty() || parts.iter().any(|name| name == part);
    for live in [64, 1 << 10, 16 << 10] {
        if chosen("hits") {
            hits(live, samples);
        }
        if chosen("reads") {
            reads(live, samples);
        }
        if chosen("changes") {
            changes(live, samples);
        }
    }
    if chosen("waking") {
        waking(samples);
    }
    if chosen("busy") {
        busy(1 << 10, samples);
    }
}
