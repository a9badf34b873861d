//! The cost of shadow buffers, in TSC cycles. The sides run interleaved in one process; the output
//! has medians and ratios.
//!
//! `cargo bench -p ringfence-dma --bench shadow`
//!
//! Two figures have a bound that was written down before the first run: a slot's allocation plus
//! its release takes at most 25 cycles, and a copy reaches 0.9 of `memcpy` into warm lines. The
//! slot's cost is that of a map and an unmap without received bytes, less that of the same calls
//! in a space that maps nothing. The copy's cost is that of an unmap with received bytes, less that
//! of one without.

use std::cell::RefCell;
use std::hint::black_box;
use std::rc::Rc;

use ringfence_dma::flush::{FlushPolicy, Never, Strict};
use ringfence_dma::space::{
    FromDevice, Identity, Paged, PlainTable, Rounding, ShadowDepot, ShadowPolicy, ShadowPool,
    ShadowSpace, Space, WhenExhausted,
};
use ringfence_dma::{Attachment, Cpu, Dma, Platform};
use ringfence_iova::{Depot, MagazineLimits, Magazines};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, Levels, SecondStage, Table};
use ringfence_types::{
    Direction, DomainId, Invalidation, InvalidationError, Invalidator, Iova, Nanos, Pfn, PfnRange,
    PhysAddr, PhysRange, RequesterId, Ticket,
};

const ROUNDS: usize = 301;
/// Calls of a sample. Large copies take fewer.
const CALLS: u64 = 2_000;
/// Bytes that a sample copies at most, but for its first 50 calls.
const SAMPLE_BYTES: u64 = 16 << 20;
/// First byte of the buffers, which stay in the caches.
const BUFFER: u64 = 0x10_0000;
/// The bound on the cycles of a slot, and on the speed of a copy as a share of `memcpy`.
const SLOT_CYCLES: f64 = 25.0;
const COPY_SHARE: f64 = 0.9;

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

struct Done;

impl Invalidator for Done {
    fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
        Ok(Ticket::new(0))
    }

    fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
        Ok(true)
    }
}

struct Board {
    memory: Rc<Arena>,
    frames: Frames<Rc<Arena>>,
    done: Done,
}

impl Platform for Board {
    type Memory = Arena;
    type Frames = Frames<Rc<Arena>>;
    type Invalidator = Done;

    #[inline]
    fn memory(&self) -> &Arena {
        &self.memory
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

fn range(start: u64, bytes: u64) -> PhysRange {
    PhysRange::new(PhysAddr::new(start), bytes).expect("a range")
}

fn board() -> Board {
    let memory = Rc::new(Arena::new(64 << 20).expect("memory"));
    Board {
        frames: Frames::new(Rc::clone(&memory), range(16 << 20, 4 << 20)),
        memory,
        done: Done,
    }
}

/// A layer with one device.
struct Side<S: Space, F: FlushPolicy<S, ()>> {
    board: Board,
    dma: Dma<S, F, ()>,
    cpu: Cpu<S, F, ()>,
    at: Attachment,
}

impl<S: Space, F: FlushPolicy<S, ()>> Side<S, F> {
    fn new(flush: F, make: impl FnOnce(&Board, DomainId) -> S) -> Self {
        let board = board();
        let mut dma = Dma::new(flush);
        let device = RequesterId::new(0x18);
        let at = dma.attach(device, Iova::new(u64::MAX), |id| {
            Ok::<_, ()>(make(&board, id))
        });
        let at = at.expect("an attached device");
        Self {
            cpu: dma.cpu(),
            board,
            dma,
            at,
        }
    }

    /// Returns the cycles of a map and an unmap of a buffer of `bytes` bytes.
    fn sample(&mut self, bytes: u64, direction: Direction, received: u64) -> f64 {
        let Self {
            board,
            dma,
            cpu,
            at,
        } = self;
        let memory = range(BUFFER, bytes);
        let calls = calls(bytes);
        let start = cycles();
        for _ in 0..calls {
            let mapped = dma.map_single(cpu, board, at, (), black_box(memory), direction);
            let Ok((mapping, _)) = mapped else {
                panic!("a map that fails")
            };
            let unmapped = dma.unmap_received(cpu, board, at, mapping, received);
            let _ = black_box(unmapped.is_ok());
        }
        (cycles() - start) as f64 / calls as f64
    }
}

/// Returns the number of calls of a sample with buffers of `bytes` bytes.
fn calls(bytes: u64) -> u64 {
    (SAMPLE_BYTES / bytes).clamp(50, CALLS)
}

type Shadows =
    ShadowSpace<Magazines<RefCell<Depot>>, PlainTable<SecondStage>, RefCell<ShadowDepot>>;

fn shadows(board: &Board, domain: DomainId) -> Shadows {
    let (memory, frames) = (&*board.memory, &board.frames);
    let format = SecondStage::new(Levels::Four);
    let table = Table::new(format, domain, Coherency::Coherent, memory, frames).expect("a table");
    let pages = PfnRange::inclusive(Pfn::new(1), Pfn::new(0xf_ffff)).expect("pages");
    let alloc = Magazines::new(pages, MagazineLimits::DEFAULT, RefCell::new).expect("addresses");
    let paged = Paged::new(alloc, PlainTable(table), Rounding::Exact);
    let pool = ShadowPool::new(range(32 << 20, 16 << 20), RefCell::new).expect("a pool");
    let policy = ShadowPolicy {
        from_device: FromDevice::Unspecified,
        when_exhausted: WhenExhausted::Refuse,
    };
    ShadowSpace::new(paged, pool, policy)
}

/// Returns the cycles of `memcpy` between warm buffers.
fn memcpy(from: &[u8], to: &mut [u8]) -> f64 {
    let calls = calls(from.len() as u64);
    let start = cycles();
    for _ in 0..calls {
        black_box(&mut *to).copy_from_slice(black_box(from));
    }
    (cycles() - start) as f64 / calls as f64
}

fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

fn main() {
    let mut shadow = Side::new(Strict, shadows);
    let mut nothing = Side::new(Never, |_, id| Identity::new(id));
    let (rx, tx) = (Direction::FromDevice, Direction::ToDevice);
    let (mut slot, mut floor) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        slot.push(shadow.sample(2048, rx, 0));
        floor.push(nothing.sample(2048, rx, 0));
    }
    let (slot, floor) = (median(&mut slot), median(&mut floor));
    let own = slot - floor;
    let met = if own <= SLOT_CYCLES { "met" } else { "missed" };
    println!(
        "map + unmap without copy {slot:.1}, layer alone {floor:.1}, ratio {:.2}",
        slot / floor
    );
    println!("slot alloc + free {own:.1} cycles, bound {SLOT_CYCLES}: {met}");
    println!("bytes  copy in  memcpy  share  copy out  memcpy/copy out");
    let small = [64_u64, 256, 1500, 2048, 4096, 9000];
    let large = [16, 32, 64, 128, 256, 512, 1024].map(|kib| kib << 10);
    for bytes in small.into_iter().chain(large) {
        let (from, mut to) = (vec![7; bytes as usize], vec![0; bytes as usize]);
        let mut sides = [const { Vec::new() }; 4];
        for _ in 0..ROUNDS / 3 {
            sides[0].push(shadow.sample(bytes, rx, bytes));
            sides[1].push(shadow.sample(bytes, rx, 0));
            sides[2].push(shadow.sample(bytes, tx, 0));
            sides[3].push(memcpy(&from, &mut to));
        }
        let [whole, without, out, plain] = sides.map(|mut side| median(&mut side));
        let (copy_in, copy_out) = (whole - without, out - without);
        let share = plain / copy_in;
        let met = if share >= COPY_SHARE { "met" } else { "missed" };
        println!(
            "{bytes:5}  {copy_in:7.0}  {plain:6.0}  {share:5.2}  {copy_out:8.0}  {:5.2}  {met}",
            plain / copy_out
        );
    }
}
