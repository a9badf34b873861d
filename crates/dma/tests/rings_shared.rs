//! Two processors on one ring, under shuttle's schedules: what one has unmapped and not yet invalidated is not given to the other, no
//! buffer comes back twice, none while the hardware may still lead to it.

use std::collections::BTreeSet;
use std::sync::Mutex as Plain;

use ringfence_dma::flush::Burst;
use ringfence_dma::ring::{Ring, RingSetup, SlotChoice, Tables, lay_out};
use ringfence_dma::space::Rings;
use ringfence_dma::{Attachment, Dma, MapReason, Platform, Withheld};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, RingDevice, RingPte, RingTable};
use ringfence_types::{
    DeviceId, Direction, Invalidation, InvalidationError, Invalidator, Iova, Lock, Nanos, PhysAddr,
    PhysRange, RingId, RingSlot, Ticket,
};
use shuttle::sync::{Arc, Mutex};
use shuttle::thread;

const DEVICE: DeviceId = DeviceId::new(0x18);
const TABLES: PhysAddr = PhysAddr::new(0x1000);
const SLOTS: u32 = 4;

/// The embedder's lock.
struct Shuttled<T>(Mutex<T>);

impl<T> Lock<T> for Shuttled<T> {
    fn with<R>(&self, critical: impl FnOnce(&mut T) -> R) -> R {
        critical(&mut self.0.lock().unwrap())
    }
}

/// Every entry that the hardware has ever seen and was not told to forget, as (slot, first byte); and the buffers that are lent.
#[derive(Debug, Default)]
struct World {
    cached: BTreeSet<(u32, u64)>,
    lent: BTreeSet<u64>,
    submitted: u64,
}

/// One processor's view of the machine.
struct Processor {
    arena: std::sync::Arc<Arena>,
    frames: Frames<std::sync::Arc<Arena>>,
    port: Port,
}

struct Port(std::sync::Arc<Plain<World>>, std::sync::Arc<Arena>);

impl Port {
    /// The device looks at the whole ring; what it sees stays in its cache.
    fn look(&self) {
        let mut world = self.0.lock().unwrap();
        for slot in 0..SLOTS {
            let entry = entry(&self.1, slot);
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
        let mut world = self.0.lock().unwrap();
        world.cached.clear();
        world.submitted += 1;
        let ticket = Ticket::new(world.submitted);
        drop(world);
        self.look();
        Ok(ticket)
    }

    fn poll(&mut self, _ticket: Ticket) -> Result<bool, InvalidationError> {
        // Others run between the request and its completion.
        thread::yield_now();
        Ok(true)
    }
}

impl Platform for Processor {
    type Memory = Arena;
    type Frames = Frames<std::sync::Arc<Arena>>;
    type Invalidator = Port;

    fn memory(&self) -> &Arena {
        &self.arena
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

fn drive(dma: &Dma<Space, Burst, u64>, at: &Attachment, mut board: Processor, who: u64) {
    let mut cpu = dma.cpu();
    let direction = Direction::ToDevice;
    let world = std::sync::Arc::clone(&board.port.0);
    for round in 0..3_u64 {
        let mut held = Vec::new();
        for n in 0..2 {
            let start = (1 + who) << 32 | (round * 2 + n) << 12;
            let memory = PhysRange::new(PhysAddr::new(start), 64).unwrap();
            world.lock().unwrap().lent.insert(start);
            match dma.map_single(&mut cpu, &mut board, at, start, memory, direction) {
                Ok((mapping, _)) => {
                    let slot = (mapping.iova().get() >> 30) as u32;
                    let found = entry(&board.arena, slot).start().get();
                    assert_eq!(found, start, "slot {slot} was given twice");
                    held.push(mapping);
                }
                Err((back, error)) => {
                    assert!(matches!(error.reason, MapReason::RingFull(_)), "{error}");
                    assert!(world.lock().unwrap().lent.remove(&back));
                }
            }
            board.port.look();
            thread::yield_now();
        }
        for mapping in held {
            let Withheld = dma.unmap_single(&mut cpu, &mut board, at, mapping).unwrap();
            board.port.look();
            thread::yield_now();
        }
        dma.end_burst(&mut cpu, &mut board, at, direction, |start| {
            assert!(world.lock().unwrap().lent.remove(&start), "back twice");
        })
        .unwrap();
        board.port.look();
    }
}

fn two_processors(choice: SlotChoice) {
    let arena = std::sync::Arc::new(Arena::new(1 << 20).unwrap());
    let world = std::sync::Arc::new(Plain::new(World::default()));
    let mut dma = Dma::new(Burst::default());
    let at = dma
        .attach(DEVICE, Iova::new(u64::MAX), |domain| {
            let setup = RingSetup {
                choice,
                coherency: Coherency::Coherent,
            };
            let tables = Tables::new(TABLES, &[SLOTS]).unwrap();
            let rings = lay_out(&*arena, &tables, setup).unwrap();
            Ok::<_, ()>(Rings::new(domain, DEVICE, rings, |ring| {
                Shuttled(Mutex::new(ring))
            }))
        })
        .unwrap();
    let dma = Arc::new(dma);
    let threads: Vec<_> = (0..2)
        .map(|who| {
            let (dma, arena) = (Arc::clone(&dma), std::sync::Arc::clone(&arena));
            let region = PhysRange::new(PhysAddr::new(1 << 19), 4096).unwrap();
            let board = Processor {
                frames: Frames::new(std::sync::Arc::clone(&arena), region),
                port: Port(std::sync::Arc::clone(&world), std::sync::Arc::clone(&arena)),
                arena,
            };
            thread::spawn(move || drive(&dma, &at, board, who))
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert!(world.lock().unwrap().lent.is_empty());
    let ring = dma.space(&at).unwrap().ring(RingId::new(0)).unwrap();
    ring.with(|ring| assert_eq!((ring.live(), ring.withheld()), (0, 0)));
}

#[test]
fn two_processors_share_a_ring() {
    shuttle::check_random(|| two_processors(SlotChoice::Tail), 2000);
    shuttle::check_pct(|| two_processors(SlotChoice::Tail), 1000, 3);
}

#[test]
fn two_processors_share_a_ring_in_any_order() {
    shuttle::check_random(|| two_processors(SlotChoice::NextFree), 2000);
    shuttle::check_pct(|| two_processors(SlotChoice::NextFree), 1000, 3);
}
