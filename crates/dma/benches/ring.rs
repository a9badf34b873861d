//! The cost of a map and an unmap in a ring, in TSC cycles, amortised over bursts of 200. The sides
//! run interleaved in one process; the output has medians, spread and ratios.
//!
//! `cargo bench -p ringfence-dma --bench ring`: `-- --quick` takes a tenth of the time, `-- --long`
//! takes longer samples, `-- NAME` runs only the floor and the sides whose name contains NAME.
//!
//! All sides execute everything except the hardware's part of an invalidation, which a profile
//! charges. A line whose ratio includes that charge says so. Absolute cycles depend on the machine
//! and its load; only ratios are meaningful.

extern crate alloc;

use std::cell::RefCell;
use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use ringfence_dma::flush::{Burst, FlushPolicy, Strict};
use ringfence_dma::ring::{
    OwnedRing, Ring, RingMapping, RingSetup, RingTables, SlotChoice, lay_out,
};
use ringfence_dma::space::{Paged, PlainTable, Rings, Rounding};
use ringfence_dma::{Attachment, Cpu, Dma, Mapping, Outcome, Platform, Space};
use ringfence_iova::{CachedTree, Capacity, Eiovar, Locked};
use ringfence_memory::{Arena, Frames, WriteBack};
use ringfence_pgtable::{Coherency, Levels, RingWords, SecondStage, Table, ring_words};
use ringfence_types::{
    Direction, DomainId, Invalidation, InvalidationError, Invalidator, Iova, Lock, Nanos, Pfn,
    PfnRange, PhysAddr, PhysRange, RequesterId, Ticket,
};

// The paper's ring and burst, compiled here: `ringfence-papers` depends on `hw`, and this crate
// must not.
#[allow(dead_code, unreachable_pub)]
#[path = "../../papers/src/burst.rs"]
mod burst_as_published;
#[allow(dead_code, unreachable_pub)]
#[path = "../../papers/src/ring.rs"]
mod ring_as_published;
#[allow(dead_code, unreachable_pub)]
#[path = "../../papers/src/ring_entry.rs"]
mod ring_entry;

use burst_as_published::BurstAsPublished;
use ring_as_published::RingAsPublished;

/// Maps and unmaps per burst: the average of the papers' throughput workload.
const BURST: usize = 200;
/// Consecutive bursts per sample. Sides alternate, and the first burst of each finds other sides'
/// lines in the caches. `--long` uses eight times as many bursts, which reduces this effect to an
/// eighth.
const BURSTS: usize = 10;
/// N of every ring: holds the live mappings and a burst.
const SLOTS: u32 = 512;
/// Cycles charged for an invalidation (profile r210-2015: rIOMMU Table 1).
const INVALIDATION: f64 = 2150.0;
const FLOOR: &str = "floor: two stores, one clear";
const DEVICE: RequesterId = RequesterId::new(0x18);
const MEMORY: u64 = 64 << 20;

#[cfg(target_arch = "x86_64")]
fn cycles() -> u64 {
    // SAFETY: reads the time stamp counter, which every x86-64 processor lets programs read on
    // Linux.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn cycles() -> u64 {
    std::time::Instant::now().elapsed().as_nanos() as u64
}

/// Accepts every request and completes it at once.
#[derive(Default)]
struct Done(u64);

impl Invalidator for Done {
    #[inline]
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        black_box(request);
        self.0 += 1;
        Ok(Ticket::new(self.0))
    }

    #[inline]
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        Ok(ticket.get() <= self.0)
    }
}

struct Board {
    memory: &'static Arena,
    frames: Frames<&'static Arena>,
    done: Done,
}

impl Platform for Board {
    type Memory = Arena;
    type Frames = Frames<&'static Arena>;
    type Invalidator = Done;

    #[inline]
    fn memory(&self) -> &Arena {
        self.memory
    }

    #[inline]
    fn frames(&self) -> &Self::Frames {
        &self.frames
    }

    #[inline]
    fn invalidator(&mut self) -> &mut Done {
        &mut self.done
    }

    #[inline]
    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

impl Board {
    fn new(kind: WriteBack) -> Self {
        let memory: &'static Arena = Box::leak(Box::new(
            Arena::with_write_back(MEMORY, kind).expect("arena"),
        ));
        let region = PhysRange::new(PhysAddr::ZERO, MEMORY).expect("not empty");
        Self {
            memory,
            frames: Frames::new(memory, region),
            done: Done::default(),
        }
    }

    fn ring(&self, choice: SlotChoice, coherency: Coherency) -> Vec<Ring> {
        let base = self.frames.alloc_contiguous(4).expect("memory");
        let tables = RingTables::new(base, &[SLOTS]).expect("tables");
        let setup = RingSetup { choice, coherency };
        lay_out(self.memory, &tables, setup).expect("ring")
    }
}

/// The smallest embedder's lock: one exchange, one store.
struct Spin<T>(AtomicBool, RefCell<T>);

impl<T> Spin<T> {
    fn new(value: T) -> Self {
        Self(AtomicBool::new(false), RefCell::new(value))
    }
}

impl<T> Lock<T> for Spin<T> {
    #[inline]
    fn with<R>(&self, critical: impl FnOnce(&mut T) -> R) -> R {
        while self.0.swap(true, Ordering::Acquire) {
            std::hint::spin_loop();
        }
        let result = critical(&mut self.1.borrow_mut());
        self.0.store(false, Ordering::Release);
        result
    }
}

/// Returns the buffer of a descriptor: 1500 bytes, unaligned.
#[inline(always)]
fn buffer(op: usize) -> PhysRange {
    match PhysRange::new(PhysAddr::new((1 << 30) + op as u64 * 2112), 1500) {
        Some(buffer) => buffer,
        None => unreachable!("not empty"),
    }
}

struct Side {
    name: String,
    run: Box<dyn FnMut()>,
    samples: Vec<f64>,
}

fn side(name: &str, run: impl FnMut() + 'static) -> Side {
    Side {
        name: name.into(),
        run: Box::new(run),
        samples: Vec::new(),
    }
}

/// The minimum work of a pair: map checks that the entry is clear and stores its two words; unmap
/// reads and clears one word.
fn floor(board: &Board) -> impl FnMut() + 'static {
    let memory = board.memory;
    let base = board.frames.alloc_contiguous(4).expect("memory");
    let mut tail = 0_u32;
    #[inline(always)]
    fn entry(memory: &Arena, base: PhysAddr, slot: u32) -> &RingWords {
        ring_words(memory, base.wrapping_add(u64::from(slot) * 16)).expect("inside")
    }
    move || {
        let first = tail;
        for op in 0..BURST {
            let [low, high] = entry(memory, base, tail);
            assert_eq!(high.load(Ordering::Relaxed), 0);
            let buffer = black_box(buffer(op));
            low.store(buffer.start().get(), Ordering::Relaxed);
            high.store(buffer.bytes() | 7 << 30, Ordering::Release);
            tail = (tail + 1) % SLOTS;
        }
        let mut at = first;
        for _ in 0..BURST {
            let [_, high] = entry(memory, base, black_box(at));
            assert_ne!(high.load(Ordering::Relaxed), 0);
            high.store(0, Ordering::Release);
            at = (at + 1) % SLOTS;
        }
    }
}

type Owned = OwnedRing<'static, u32>;

/// The way a driver accesses its ring.
trait Access {
    fn with<R>(&mut self, critical: impl FnOnce(&mut Owned) -> R) -> R;
}

/// The driver owns the ring.
struct Mine(Owned);

impl Access for Mine {
    #[inline(always)]
    fn with<R>(&mut self, critical: impl FnOnce(&mut Owned) -> R) -> R {
        critical(&mut self.0)
    }
}

/// Drivers on several CPUs share the ring.
struct Ours<L>(L);

impl<L: Lock<Owned>> Access for Ours<L> {
    #[inline(always)]
    fn with<R>(&mut self, critical: impl FnOnce(&mut Owned) -> R) -> R {
        self.0.with(critical)
    }
}

/// Runs a driver's bursts on a ring. If `EACH` is true, it makes every entry visible separately.
fn owned<const EACH: bool, A: Access + 'static>(
    board: Board,
    choice: SlotChoice,
    coherency: Coherency,
    access: fn(Owned) -> A,
) -> impl FnMut() + 'static {
    let ring = board.ring(choice, coherency).remove(0);
    let memory = board.memory;
    let mut done = board.done;
    let ring = OwnedRing::new(ring, memory, DomainId::new(1), DEVICE).expect("inside");
    let mut ring = access(ring);
    let mut held: Vec<RingMapping<u32>> = Vec::with_capacity(BURST);
    move || {
        for op in 0..BURST {
            let buffer = black_box(buffer(op));
            let mapped = ring.with(|ring| {
                let mapped = ring.map(memory, op as u32, &buffer, Direction::FromDevice);
                if EACH {
                    ring.sync_map(memory);
                }
                mapped
            });
            match mapped {
                Ok(mapping) => held.push(mapping),
                Err(_) => unreachable!("N >= L + burst"),
            }
        }
        ring.with(|ring| ring.sync_map(memory));
        for mapping in held.drain(..) {
            ring.with(|ring| {
                assert!(ring.unmap(memory, mapping).is_ok());
                if EACH {
                    ring.sync_map(memory);
                }
            });
        }
        let ended = ring.with(|ring| {
            ring.end_burst(memory, &mut done, |buffer| {
                black_box(buffer);
            })
        });
        assert!(ended.is_ok());
    }
}

/// Runs the same bursts through the layer.
fn layered<S: Space + 'static, F: FlushPolicy<S, u32> + 'static>(
    mut board: Board,
    flush: F,
    space: impl FnOnce(&Board, DomainId) -> S,
) -> impl FnMut() + 'static
where
    F::PerCpu: 'static,
{
    let mut dma: Dma<S, F, u32> = Dma::new(flush);
    let at: Attachment = dma
        .attach(DEVICE, Iova::new(u64::MAX), |domain| {
            Ok::<_, ()>(space(&board, domain))
        })
        .expect("attach");
    let mut cpu: Cpu<S, F, u32> = dma.cpu();
    let mut held: Vec<Mapping<u32>> = Vec::with_capacity(BURST);
    move || {
        for op in 0..BURST {
            let buffer = black_box(buffer(op));
            let direction = Direction::FromDevice;
            match dma.map_single(&mut cpu, &mut board, &at, op as u32, buffer, direction) {
                Ok((mapping, _)) => held.push(mapping),
                Err((_, error)) => unreachable!("{error}"),
            }
        }
        dma.sync_map(&mut cpu, &mut board, &at);
        for mapping in held.drain(..) {
            match dma.unmap_single(&mut cpu, &mut board, &at, mapping) {
                Ok(outcome) => drop(black_box(outcome.into_buffer())),
                Err(error) => unreachable!("{error}"),
            }
        }
        let direction = Direction::FromDevice;
        let ended = dma.end_burst(&mut cpu, &mut board, &at, direction, |buffer| {
            black_box(buffer);
        });
        assert!(ended.is_ok());
    }
}

fn rings<L: Lock<Ring> + 'static>(
    coherency: Coherency,
    kind: WriteBack,
    lock: fn(Ring) -> L,
) -> impl FnMut() + 'static {
    layered(Board::new(kind), Burst::default(), move |board, domain| {
        let rings = board.ring(SlotChoice::Tail, coherency);
        Rings::new(domain, DEVICE, rings, lock)
    })
}

fn as_published(coherency: Coherency, kind: WriteBack) -> impl FnMut() + 'static {
    layered(Board::new(kind), BurstAsPublished, move |board, domain| {
        let rings = board.ring(SlotChoice::Tail, coherency);
        Rings::<RingAsPublished, _>::new(domain, DEVICE, rings, RefCell::new)
    })
}

fn strict_plus(coherency: Coherency, kind: WriteBack) -> impl FnMut() + 'static {
    layered(Board::new(kind), Strict, move |board, domain| {
        let pages = PfnRange::inclusive(Pfn::new(1), Pfn::new((1 << 36) - 1)).expect("not empty");
        let lists = Eiovar::new(CachedTree::new(pages), Capacity::Unbounded);
        let table = Table::new(
            SecondStage::new(Levels::Four),
            domain,
            coherency,
            board.memory,
            &board.frames,
        );
        Paged::new(
            Locked::new(lists, RefCell::new),
            PlainTable(table.expect("frames")),
            Rounding::PowerOfTwo,
        )
    })
}

fn main() {
    let quick = std::env::args().any(|arg| arg == "--quick" || arg == "--test");
    let long = std::env::args().any(|arg| arg == "--long");
    let bursts = if long { 8 * BURSTS } else { BURSTS };
    let rounds = match (quick, long) {
        (true, _) => 40,
        (false, true) => 100,
        (false, false) => 800,
    };
    let best = WriteBack::best();
    let (coherent, tail) = (Coherency::Coherent, SlotChoice::Tail);
    let mut sides = vec![
        side(FLOOR, floor(&Board::new(best))),
        side(
            "owned, tail",
            owned::<false, _>(Board::new(best), tail, coherent, Mine),
        ),
        side(
            "owned, next free",
            owned::<false, _>(Board::new(best), SlotChoice::NextFree, coherent, Mine),
        ),
        side(
            "shared, spin lock",
            owned::<false, _>(Board::new(best), tail, coherent, |ring| {
                Ours(Spin::new(ring))
            }),
        ),
        side(
            "shared, mutex",
            owned::<false, _>(Board::new(best), tail, coherent, |ring| {
                Ours(Mutex::new(ring))
            }),
        ),
        side("layer, one thread", rings(coherent, best, RefCell::new)),
        side("layer, spin lock", rings(coherent, best, Spin::new)),
        side("layer, mutex", rings(coherent, best, Mutex::new)),
        side("as published, one thread", as_published(coherent, best)),
        side("strict+", strict_plus(coherent, best)),
    ];
    let kinds: Vec<_> = WriteBack::available()
        .into_iter()
        .filter(|kind| *kind != WriteBack::FenceOnly)
        .collect();
    for kind in &kinds {
        let non_coherent = Coherency::NonCoherent;
        sides.push(side(
            &format!("{kind:?}: owned, tail"),
            owned::<false, _>(Board::new(*kind), tail, non_coherent, Mine),
        ));
        sides.push(side(
            &format!("{kind:?}: owned, an entry at a time"),
            owned::<true, _>(Board::new(*kind), tail, non_coherent, Mine),
        ));
        sides.push(side(
            &format!("{kind:?}: layer, one thread"),
            rings(non_coherent, *kind, RefCell::new),
        ));
        sides.push(side(
            &format!("{kind:?}: as published"),
            as_published(non_coherent, *kind),
        ));
        sides.push(side(
            &format!("{kind:?}: strict+"),
            strict_plus(non_coherent, *kind),
        ));
    }
    if let Some(name) = std::env::args().skip(1).find(|arg| !arg.starts_with('-')) {
        sides.retain(|side| side.name.contains(&name) || side.name == FLOOR);
    }
    for round in 0..rounds + rounds / 10 {
        for side in &mut sides {
            let start = cycles();
            for _ in 0..bursts {
                (side.run)();
            }
            let spent = cycles().wrapping_sub(start);
            if round >= rounds / 10 {
                side.samples.push(spent as f64 / (BURST * bursts) as f64);
            }
        }
    }
    report(&mut sides, &kinds);
}

fn quantile(sorted: &[f64], part: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * part) as usize]
}

fn report(sides: &mut [Side], kinds: &[WriteBack]) {
    println!(
        "{:<44} {:>8} {:>8} {:>8}",
        "cycles a map and unmap", "median", "10%", "90%"
    );
    let mut medians = Vec::new();
    for side in sides.iter_mut() {
        side.samples.sort_by(f64::total_cmp);
        let median = quantile(&side.samples, 0.5);
        let (low, high) = (quantile(&side.samples, 0.1), quantile(&side.samples, 0.9));
        println!("{:<44} {median:>8.1} {low:>8.1} {high:>8.1}", side.name);
        medians.push((side.name.clone(), median));
    }
    println!();
    let of = |name: &str| medians.iter().find(|(n, _)| n == name).map(|(_, m)| *m);
    let ratio = |what: &str, a: Option<f64>, b: Option<f64>, bound: &str| {
        if let (Some(a), Some(b)) = (a, b) {
            println!("{what:<68} {:>8.4}  (wanted: {bound})", a / b);
        }
    };
    let (owned, strict) = (of("owned, tail"), of("strict+"));
    ratio("owned / floor", owned, of(FLOOR), "12 cycles");
    ratio(
        "shared behind a mutex / floor",
        of("shared, mutex"),
        of(FLOOR),
        "80 cycles",
    );
    let burst = INVALIDATION / BURST as f64;
    ratio(
        "owned / strict+, invalidations charged to both",
        owned.map(|c| c + burst),
        strict.map(|c| c + INVALIDATION),
        "<= 0.2",
    );
    ratio(
        "layer / strict+, invalidations charged to both",
        of("layer, one thread").map(|c| c + burst),
        strict.map(|c| c + INVALIDATION),
        "<= 0.2",
    );
    for kind in kinds {
        for what in ["owned, tail", "layer, one thread"] {
            ratio(
                &format!("{kind:?}: {what}, a burst / an entry at a time"),
                of(&format!("{kind:?}: {what}")),
                of(&format!("{kind:?}: owned, an entry at a time")),
                "<= 0.04",
            );
        }
    }
}
