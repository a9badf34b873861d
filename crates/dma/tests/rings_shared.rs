//! Two CPUs on one ring, under shuttle's schedules. A slot that one CPU unmapped is not reused by
//! the other before its invalidation. Every buffer is returned once, and only after the hardware
//! can no longer reach it. If walkers do not snoop, the device sees every entry whose address it
//! received, and no entry of a returned buffer. This holds whichever CPU wrote the lines back.
// The coroutines of shuttle do not exist for s390x.
#![cfg(not(target_arch = "s390x"))]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex as Plain;
use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_dma::flush::Burst;
use ringfence_dma::ring::{Ring, RingSetup, RingTables, SlotChoice, lay_out};
use ringfence_dma::space::Rings;
use ringfence_dma::{
    Attachment, Cpu, Dma, DmaSegment, MapError, MapReason, Mapping, Platform, SgLimits, SgMapping,
    SgRequest, Withheld,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, RingDevice, RingPte, RingTable};
use ringfence_types::{
    Direction, Invalidation, InvalidationError, Invalidator, Iova, IovaRange, Lock, MemoryError,
    Nanos, PhysAddr, PhysMemory, PhysRange, RequesterId, RingId, RingSlot, TABLE_WORDS, Ticket,
};
use shuttle::sync::{Arc, Mutex};
use shuttle::thread;

const DEVICE: RequesterId = RequesterId::new(0x18);
const TABLES: PhysAddr = PhysAddr::new(0x1000);
/// Returns the number of slots of the ring. It is too small for all maps that two CPUs attempt at
/// once. If walkers do not snoop, it spans two lines of entries.
const fn slots(coherency: Coherency) -> u32 {
    match coherency {
        Coherency::Coherent => 4,
        Coherency::NonCoherent => 6,
    }
}

/// The embedder's lock.
struct Shuttled<T>(Mutex<T>);

impl<T> Lock<T> for Shuttled<T> {
    fn with<R>(&self, critical: impl FnOnce(&mut T) -> R) -> R {
        critical(&mut self.0.lock().unwrap())
    }
}

/// Every entry that the hardware has seen and that was not invalidated, as (slot, first byte), and
/// the buffers that are mapped.
#[derive(Debug, Default)]
struct World {
    cached: BTreeSet<(u32, u64)>,
    lent: BTreeSet<u64>,
    submitted: u64,
}

type Shared<T> = std::sync::Arc<T>;

const LINE: u64 = 64;
type Line = [u64; LINE as usize / 8];

/// The memory that walkers see, with the age of each line. CPU caches are coherent, so an older
/// copy never overwrites a newer one.
#[derive(Debug)]
struct Seen {
    arena: Arena,
    newest: Plain<BTreeMap<u64, u64>>,
    clock: Plain<u64>,
}

/// The memory as one CPU accesses it. Its write-backs wait for its own fence only.
struct Memory {
    processors: Shared<Arena>,
    seen: Shared<Seen>,
    staged: Plain<BTreeMap<u64, (u64, Line)>>,
}

impl PhysMemory for Memory {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.processors.word(at)
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        self.processors.table(at)
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        self.processors.words(at, count)
    }

    fn write_back(&self, at: PhysAddr, bytes: u64) {
        let lines = at.get() / LINE..=(at.get() + bytes - 1) / LINE;
        for line in lines {
            let mut copy = Line::default();
            let words = self.words(PhysAddr::new(line * LINE), copy.len()).unwrap();
            for (to, from) in copy.iter_mut().zip(words) {
                *to = from.load(Ordering::Acquire);
            }
            let mut clock = self.seen.clock.lock().unwrap();
            *clock += 1;
            self.staged.lock().unwrap().insert(line, (*clock, copy));
        }
    }

    fn drain(&self) {
        let staged = std::mem::take(&mut *self.staged.lock().unwrap());
        for (line, (time, copy)) in staged {
            let mut newest = self.seen.newest.lock().unwrap();
            let newest = newest.entry(line).or_default();
            if *newest > time {
                continue;
            }
            *newest = time;
            let words = self
                .seen
                .arena
                .words(PhysAddr::new(line * LINE), copy.len());
            for (to, from) in words.unwrap().iter().zip(copy) {
                to.store(from, Ordering::Release);
            }
        }
    }
}

/// One CPU's view of the machine.
struct Processor {
    memory: Memory,
    frames: Frames<Shared<Arena>>,
    port: Port,
}

struct Port {
    world: Shared<Plain<World>>,
    processors: Shared<Arena>,
    seen: Shared<Seen>,
    coherency: Coherency,
}

impl Port {
    /// Returns the memory that walkers read.
    fn view(&self) -> &Arena {
        match self.coherency {
            Coherency::Coherent => &self.processors,
            Coherency::NonCoherent => &self.seen.arena,
        }
    }

    /// The device reads the whole ring and caches what it sees.
    fn look(&self) {
        let mut world = self.world.lock().unwrap();
        for slot in 0..slots(self.coherency) {
            let entry = entry(self.view(), slot);
            if entry.is_valid() {
                world.cached.insert((slot, entry.start().get()));
            }
        }
        for (slot, start) in &world.cached {
            assert!(
                world.lent.contains(start),
                "slot {slot} leads to {start:#x}, which is back"
            );
        }
    }
}

fn entry(arena: &Arena, slot: u32) -> RingPte {
    let device = RingDevice::read(arena, TABLES).unwrap();
    let table = RingTable::read(arena, &device, RingId::new(0)).unwrap();
    RingPte::read(arena, &table, RingSlot::new(slot).unwrap()).unwrap()
}

impl Invalidator for Port {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        assert!(matches!(request, Invalidation::Ring { .. }), "{request:?}");
        thread::yield_now();
        let mut world = self.world.lock().unwrap();
        world.cached.clear();
        world.submitted += 1;
        let ticket = Ticket::new(world.submitted);
        drop(world);
        self.look();
        Ok(ticket)
    }

    fn poll(&mut self, _ticket: Ticket) -> Result<bool, InvalidationError> {
        // Let other tasks run between the request and its completion.
        thread::yield_now();
        Ok(true)
    }
}

impl Platform for Processor {
    type Memory = Memory;
    type Frames = Frames<Shared<Arena>>;
    type Invalidator = Port;

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn frames(&self) -> &Self::Frames {
        &self.frames
    }

    fn invalidator(&mut self) -> &mut Port {
        &mut self.port
    }

    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

type Space = Rings<Ring, Shuttled<Ring>>;

enum Held {
    One(Mapping<u64>),
    List(SgMapping<u64>),
}

/// Maps a buffer of one piece, or of two.
fn map(
    dma: &Dma<Space, Burst, u64>,
    cpu: &mut Cpu<Space, Burst, u64>,
    board: &mut Processor,
    at: &Attachment,
    pieces: &[PhysRange],
) -> Result<(Held, Vec<u32>), (u64, MapError)> {
    let (direction, name) = (Direction::ToDevice, pieces[0].start().get());
    let slot = |iova: Iova| (iova.get() >> 30) as u32;
    if let [piece] = pieces {
        let (mapping, _) = dma.map_single(cpu, board, at, name, *piece, direction)?;
        let slots = vec![slot(mapping.iova())];
        return Ok((Held::One(mapping), slots));
    }
    let nothing = IovaRange::inclusive(Iova::ZERO, Iova::ZERO).unwrap();
    let mut out = vec![DmaSegment { range: nothing }; pieces.len()];
    let request = SgRequest {
        buffer: name,
        pieces,
        direction,
        limits: SgLimits::default(),
        out: &mut out,
    };
    let (mapping, _) = dma.map_sg(cpu, board, at, request)?;
    let slots = out.iter().map(|out| slot(out.range.start())).collect();
    Ok((Held::List(mapping), slots))
}

fn drive(dma: &Dma<Space, Burst, u64>, at: &Attachment, mut board: Processor, who: u64, most: u64) {
    let mut cpu = dma.cpu();
    let direction = Direction::ToDevice;
    let world = Shared::clone(&board.port.world);
    let pieces = |start: u64| {
        let count = 1 + start / 4096 % most;
        (0..count)
            .map(|n| PhysRange::new(PhysAddr::new(start + n * 1024), 64).unwrap())
            .collect::<Vec<_>>()
    };
    for round in 0..3_u64 {
        let mut held = Vec::new();
        for n in 0..2 {
            let start = (1 + who) << 32 | (round * 2 + n) << 12;
            let pieces = pieces(start);
            let starts = || pieces.iter().map(|piece| piece.start().get());
            world.lock().unwrap().lent.extend(starts());
            match map(dma, &mut cpu, &mut board, at, &pieces) {
                Ok((mapping, slots)) => {
                    let lies = |view: &Arena| {
                        for (slot, start) in slots.iter().zip(starts()) {
                            let found = entry(view, *slot).start().get();
                            assert_eq!(found, start, "slot {slot} was given twice");
                        }
                    };
                    lies(&board.port.processors);
                    thread::yield_now();
                    dma.sync_map(&mut cpu, &mut board, at);
                    lies(board.port.view());
                    held.push(mapping);
                }
                Err((_, error)) => {
                    assert!(matches!(error.reason, MapReason::RingFull(_)), "{error}");
                    let mut world = world.lock().unwrap();
                    starts().for_each(|start| assert!(world.lent.remove(&start)));
                }
            }
            board.port.look();
            thread::yield_now();
        }
        for mapping in held {
            let Withheld = match mapping {
                Held::One(mapping) => dma.unmap_single(&mut cpu, &mut board, at, mapping).unwrap(),
                Held::List(mapping) => dma.unmap_sg(&mut cpu, &mut board, at, mapping).unwrap(),
            };
            board.port.look();
            thread::yield_now();
        }
        dma.end_burst(&mut cpu, &mut board, at, direction, |start| {
            let mut world = world.lock().unwrap();
            for piece in pieces(start) {
                assert!(world.lent.remove(&piece.start().get()), "back twice");
            }
        })
        .unwrap();
        board.port.look();
    }
}

fn two_processors(setup: RingSetup, most: u64) {
    let arena = || Arena::new(1 << 20).unwrap();
    let processors = Shared::new(arena());
    let seen = Shared::new(Seen {
        arena: arena(),
        newest: Plain::default(),
        clock: Plain::default(),
    });
    let world = Shared::new(Plain::new(World::default()));
    let board = || {
        let region = PhysRange::new(PhysAddr::new(1 << 19), 4096).unwrap();
        Processor {
            frames: Frames::new(Shared::clone(&processors), region),
            port: Port {
                world: Shared::clone(&world),
                processors: Shared::clone(&processors),
                seen: Shared::clone(&seen),
                coherency: setup.coherency,
            },
            memory: Memory {
                processors: Shared::clone(&processors),
                seen: Shared::clone(&seen),
                staged: Plain::default(),
            },
        }
    };
    let mut dma = Dma::new(Burst::default());
    let at = dma
        .attach(DEVICE, Iova::new(u64::MAX), |domain| {
            let tables = RingTables::new(TABLES, &[slots(setup.coherency)]).unwrap();
            let rings = lay_out(&board().memory, &tables, setup).unwrap();
            Ok::<_, ()>(Rings::new(domain, DEVICE, rings, |ring| {
                Shuttled(Mutex::new(ring))
            }))
        })
        .unwrap();
    let dma = Arc::new(dma);
    let threads: Vec<_> = (0..2)
        .map(|who| {
            let (dma, board) = (Arc::clone(&dma), board());
            thread::spawn(move || drive(&dma, &at, board, who, most))
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert!(world.lock().unwrap().lent.is_empty());
    let ring = dma.space(&at).unwrap().ring(RingId::new(0)).unwrap();
    ring.with(|ring| assert_eq!((ring.live(), ring.withheld()), (0, 0)));
}

/// Maps single buffers, and lists of two pieces among them.
fn under_all_schedules(choice: SlotChoice, coherency: Coherency) {
    let setup = RingSetup { choice, coherency };
    for most in 1..=2 {
        shuttle::check_random(move || two_processors(setup, most), 400);
        shuttle::check_pct(move || two_processors(setup, most), 200, 3);
    }
}

#[test]
fn two_processors_share_a_ring() {
    under_all_schedules(SlotChoice::Tail, Coherency::Coherent);
}

#[test]
fn two_processors_share_a_ring_in_any_order() {
    under_all_schedules(SlotChoice::NextFree, Coherency::Coherent);
}

#[test]
fn two_processors_share_a_ring_that_walkers_do_not_snoop() {
    under_all_schedules(SlotChoice::Tail, Coherency::NonCoherent);
}

#[test]
fn two_cpus_share_a_ring_without_snooping() {
    under_all_schedules(SlotChoice::NextFree, Coherency::NonCoherent);
}
