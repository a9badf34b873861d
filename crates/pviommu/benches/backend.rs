//! Cost of a request in the backend of assigned devices: from its bytes to a VT-d table, with a
//! walk of the second stage.
//!
//! Maps and unmaps of one page alternate on random pages, so the number of live mappings stays
//! constant. The mappings lead to random pages of all guest memory, which is fully allocated. The
//! rows differ only in the number of mappings.
//!
//! The baseline ("floor") is the shortest loop that serves a trusted guest: it reads the addresses,
//! finds the frame in an array and stores the entry. Runs of both sides are interleaved; the ratios
//! of the medians are the result. Invalidations go to the modelled unit, without an IOTLB. Hardware
//! latency is not charged.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ringfence_hw::{UnitConfig, VtdUnit};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, Levels, SecondStage};
use ringfence_pviommu::backend::{
    Backend, BackendLimits, FixedLastTable, HardwareTables, LastTable, NoLastTable, OnDemand,
};
use ringfence_pviommu::wire::{
    Config, Devid, Gpa, GuestPhysical, Request, Status, encode_map, encode_unmap,
};
use ringfence_types::{
    AddressRange, Direction, DomainId, FrameSource, Iova, IovaRange, OutOfFrames, PhysAddr,
    PhysRange,
};

const PAGE: u64 = 4096;
const WINDOW: u64 = 1 << 32;
const DEVICE: Devid = Devid::new(8);
/// Requests per sample; half of them are maps.
const REQUESTS: usize = 512;
const REPETITIONS: usize = 201;
const GUEST_BYTES: u64 = 1 << 30;

#[derive(Clone)]
struct Source(Arc<Frames<Arc<Arena>>>);

impl FrameSource for Source {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        self.0.alloc_zeroed()
    }

    fn free(&self, frame: PhysAddr) {
        self.0.free(frame);
    }
}

type Host<K> =
    Backend<OnDemand<Arc<Arena>, Source, K>, HardwareTables<Arc<Arena>, Source, VtdUnit>>;

fn backend<K: LastTable>(live: u64, last: K) -> Host<K> {
    let arena = Arc::new(Arena::new(4 << 30).expect("memory"));
    let source = |start, bytes| {
        let region = PhysRange::new(PhysAddr::new(start), bytes).expect("a region");
        Source(Arc::new(Frames::new(Arc::clone(&arena), region)))
    };
    let (tables, frames) = (source(64 << 20, 1 << 30), source(2 << 30, 2 << 30));
    let format = SecondStage::new(Levels::Four);
    let memory: AddressRange<GuestPhysical> =
        AddressRange::new(Gpa::new(0), GUEST_BYTES).expect("a range");
    let backing = OnDemand::new(
        Arc::clone(&arena),
        tables.clone(),
        frames,
        format,
        DomainId::new(9),
        &[memory],
        last,
        (),
    )
    .expect("guest memory");
    let unit = VtdUnit::vtd(&UnitConfig::UNCACHED);
    let coherency = Coherency::Coherent;
    let domains = [DomainId::new(1)];
    let tables =
        HardwareTables::new(arena, tables, unit, format, coherency, &domains).expect("a table");
    let window = IovaRange::new(Iova::new(WINDOW), 16 << 30).expect("a window");
    let config = Config::new(window, 1024, [8]).expect("a configuration");
    let limits = BackendLimits {
        mappings: 2 << 20,
        ..BackendLimits::default()
    };
    let mut backend = Backend::new(config, limits, backing, tables);
    for page in 0..GUEST_BYTES / PAGE {
        let frame = backend.backing().resolve(gpa(page));
        assert!(frame.is_ok());
        backend.maintain();
    }
    for page in 0..live {
        assert_eq!(backend.handle(&map(page, page)), Status::Ok);
    }
    backend
}

/// Returns a pseudo-random page of the guest's memory.
fn gpa(number: u64) -> Gpa {
    Gpa::new(number.wrapping_mul(0x9e37_79b1) % (GUEST_BYTES / PAGE) * PAGE)
}

fn giova(page: u64) -> Iova {
    Iova::new(WINDOW + page * PAGE)
}

fn map(page: u64, to: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let pair = [(giova(page), gpa(to))].into_iter();
    encode_map(&mut bytes, DEVICE, Direction::Bidirectional, pair).expect("a page");
    bytes
}

fn unmap(page: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_unmap(&mut bytes, DEVICE, [giova(page)].into_iter()).expect("a page");
    bytes
}

/// Baseline: flat arrays without validation.
struct Floor {
    frames: Vec<u64>,
    entries: Vec<AtomicU64>,
}

impl Floor {
    fn new(live: u64) -> Self {
        Self {
            frames: (0..GUEST_BYTES / PAGE)
                .map(|page| (page + 7) * PAGE)
                .collect(),
            entries: (0..live.max(1)).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    fn handle(&self, request: &[u8]) -> u8 {
        match Request::decode(request, 1024) {
            Ok(Request::Map(map)) => {
                for (giova, gpa) in map.pairs() {
                    let frame = self.frames[(gpa.get() / PAGE) as usize];
                    self.entry(giova).store(frame | 3, Ordering::Release);
                }
                0
            }
            Ok(Request::Unmap(unmap)) => {
                for giova in unmap.giovas {
                    self.entry(giova).store(0, Ordering::Release);
                }
                0
            }
            Err(_) => 1,
        }
    }

    fn entry(&self, giova: Iova) -> &AtomicU64 {
        &self.entries[((giova.get() - WINDOW) / PAGE) as usize]
    }
}

/// Requests of a sample, with one page each.
struct Sample {
    unmaps: Vec<Vec<u8>>,
    maps: Vec<Vec<u8>>,
}

/// Returns the nanoseconds per request, for maps and for unmaps.
fn timed(sample: &Sample, mut handle: impl FnMut(&[u8]) -> u8) -> [f64; 2] {
    let mut run = |requests: &[Vec<u8>]| {
        let start = Instant::now();
        for request in requests {
            let status = black_box(handle(black_box(request)));
            assert_eq!(status, 0);
        }
        start.elapsed().as_nanos() as f64 / requests.len() as f64
    };
    // All pages are mapped: unmap them first, then map them again.
    let unmaps = run(&sample.unmaps);
    [run(&sample.maps), unmaps]
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() {
    // `cargo test --benches` also runs this; one repetition is enough there.
    let bench = std::env::args().any(|arg| arg == "--bench");
    let repetitions = if bench { REPETITIONS } else { 1 };
    println!("nanoseconds a request of one page, medians of {repetitions}; ratio to the floor");
    println!("million map requests a second on one core, with the pointer to the last table");
    println!(
        "{:>8} {:>7} {:>16} {:>16} {:>9} {:>7} {:>16}",
        "live", "floor", "map", "walking always", "million/s", "floor", "unmap"
    );
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let sizes: &[u64] = if bench {
        &[1 << 10, 16 << 10, 128 << 10, 1 << 20]
    } else {
        &[1 << 10]
    };
    for &live in sizes {
        let mut ours = backend(live, FixedLastTable::default());
        let mut walking = backend(live, NoLastTable);
        let floor = Floor::new(live);
        let mut samples: [[Vec<f64>; 2]; 3] = Default::default();
        for _ in 0..repetitions {
            let mut pages: Vec<(u64, u64)> = Vec::new();
            while pages.len() < REQUESTS / 2 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let page = random % live;
                if !pages.iter().any(|(other, _)| *other == page) {
                    pages.push((page, random >> 24));
                }
            }
            let requests = Sample {
                unmaps: pages.iter().map(|(page, _)| unmap(*page)).collect(),
                maps: pages.iter().map(|(page, to)| map(*page, *to)).collect(),
            };
            let measured = [
                timed(&requests, |request| floor.handle(request)),
                timed(&requests, |request| {
                    let status = ours.handle(request).raw();
                    ours.maintain();
                    status
                }),
                timed(&requests, |request| {
                    let status = walking.handle(request).raw();
                    walking.maintain();
                    status
                }),
            ];
            for (side, values) in samples.iter_mut().zip(measured) {
                for (all, value) in side.iter_mut().zip(values) {
                    all.push(value);
                }
            }
        }
        let [floor, ours, walking] = samples.map(|side| side.map(median));
        println!(
            "{live:>8} {:>7.1} {:>16} {:>16} {:>9.2} {:>7.1} {:>16}",
            floor[0],
            format!("{:.0} ({:.2}x)", ours[0], ours[0] / floor[0]),
            format!("{:.0} ({:.2}x)", walking[0], walking[0] / floor[0]),
            1e3 / ours[0],
            floor[1],
            format!("{:.0} ({:.2}x)", ours[1], ours[1] / floor[1]),
        );
    }
}
