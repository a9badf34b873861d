//! Unmaps that land while a timer's flush is in progress.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use ringfence_dma::flush::{
    Deferred, DeferredQueue, FlushPolicy, FlushQueue, PerCpuQueue, QueueConfig,
};
use ringfence_dma::space::{Paged, PlainTable, Rounding};
use ringfence_dma::{Attachment, Dma, Platform};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, Levels, SecondStage, Table};
use ringfence_types::{
    Direction, Invalidation, InvalidationError, Invalidator, Iova, Nanos, PhysAddr, PhysRange,
    Ticket,
};

use crate::rig::{DEVICE, LAST_PAGE, Make, PAGE, Plain, Tree, memory};

const FRAMES: u64 = 64 * PAGE;
const TIMEOUT: u64 = 100;

type Queue = RefCell<FlushQueue>;
type Policy = PerCpuQueue<Queue, RefCell<Vec<Arc<Queue>>>>;

/// Runs `during` within the next invalidation, which then fails.
#[derive(Default)]
struct Port {
    during: Option<Box<dyn FnOnce()>>,
    accepted: u32,
    last: Option<Invalidation>,
}

impl Invalidator for Port {
    fn submit(&mut self, scope: Invalidation) -> Result<Ticket, InvalidationError> {
        if let Some(during) = self.during.take() {
            during();
            return Err(InvalidationError::QueueFull);
        }
        self.accepted += 1;
        self.last = Some(scope);
        Ok(Ticket::new(0))
    }

    fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
        Ok(true)
    }
}

/// One CPU's view of the machine.
struct Processor {
    arena: Rc<Arena>,
    frames: Rc<Frames<Rc<Arena>>>,
    port: Port,
    now: Nanos,
}

impl Platform for Processor {
    type Memory = Arena;
    type Frames = Frames<Rc<Arena>>;
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
        self.now
    }
}

/// Attaches the device to an empty space.
fn attach<F: FlushPolicy<Paged<Tree, Plain>, u64>>(
    dma: &mut Dma<Paged<Tree, Plain>, F, u64>,
    arena: &Arena,
    frames: &Frames<Rc<Arena>>,
) -> Attachment {
    dma.attach(DEVICE, Iova::new(u64::MAX), |domain| {
        let format = SecondStage::new(Levels::Three);
        let table = Table::new(format, domain, Coherency::Coherent, arena, frames);
        let table = PlainTable(table.unwrap());
        Ok::<_, ()>(Paged::new(Tree::make(LAST_PAGE), table, Rounding::Exact))
    })
    .unwrap()
}

/// A CPU queues a new range while the timer's flush of its older range fails. The older range is
/// still due at the next tick.
#[test]
fn ranges_of_a_failed_flush_keep_their_age() {
    let arena = Rc::new(Arena::new(FRAMES).unwrap());
    let region = PhysRange::new(PhysAddr::ZERO, FRAMES).unwrap();
    let frames = Rc::new(Frames::new(Rc::clone(&arena), region));
    let processor = |now| Processor {
        arena: Rc::clone(&arena),
        frames: Rc::clone(&frames),
        port: Port::default(),
        now: Nanos(now),
    };
    let config = QueueConfig {
        entries: 8,
        timeout_ns: TIMEOUT,
    };
    let policy = Policy::new(config, RefCell::new, RefCell::new);
    let mut dma = Dma::<Paged<Tree, Plain>, Policy, u64>::new(policy);
    let at = attach(&mut dma, &arena, &frames);
    let dma = Rc::new(dma);
    let (mut cpu, mut worker) = (dma.cpu(), processor(0));
    let [older, newer] = [1, 2].map(|id| {
        let buffer = memory(id * PAGE, 64);
        let direction = Direction::FromDevice;
        let mapped = dma.map_single(&mut cpu, &mut worker, &at, id, buffer, direction);
        mapped.unwrap().0
    });
    let _ = dma.unmap_single(&mut cpu, &mut worker, &at, older).unwrap();
    let (mut timer, mut platform) = (dma.cpu(), processor(TIMEOUT));
    let shared = Rc::clone(&dma);
    platform.port.during = Some(Box::new(move || {
        worker.now = Nanos(TIMEOUT);
        let _ = shared
            .unmap_single(&mut cpu, &mut worker, &at, newer)
            .unwrap();
    }));
    assert_eq!(
        dma.tick(&mut timer, &mut platform),
        Err(InvalidationError::QueueFull.into())
    );
    dma.tick(&mut timer, &mut platform).unwrap();
    assert_eq!(platform.port.accepted, 1, "the older range is due");
}

/// The timer of a deferred flush runs from the oldest entry: further unmaps do not restart it, and
/// the first unmap after a flush does.
#[test]
fn the_oldest_entry_of_a_deferred_flush_sets_its_time() {
    const LATE: u64 = 1000;
    let arena = Rc::new(Arena::new(FRAMES).unwrap());
    let region = PhysRange::new(PhysAddr::ZERO, FRAMES).unwrap();
    let frames = Rc::new(Frames::new(Rc::clone(&arena), region));
    let policy = Deferred::<RefCell<DeferredQueue>>::with(10, LATE, RefCell::new);
    let mut dma = Dma::<Paged<Tree, Plain>, _, u64>::new(policy);
    let at = attach(&mut dma, &arena, &frames);
    let mut cpu = dma.cpu();
    let mut platform = Processor {
        arena,
        frames,
        port: Port::default(),
        now: Nanos(0),
    };
    let steps = [
        (0, true, 0),
        (400, true, 0),
        (800, true, 0),
        (999, false, 0),
        (1000, false, 1),
        (1500, true, 1),
        (2499, false, 1),
        (2500, false, 2),
        (9000, false, 2),
    ];
    for (time, unmaps, flushes) in steps {
        platform.now = Nanos(time);
        if unmaps {
            let buffer = memory((1 + time) * PAGE, 64);
            let direction = Direction::FromDevice;
            let (mapped, _) = dma
                .map_single(&mut cpu, &mut platform, &at, time, buffer, direction)
                .unwrap();
            let _ = dma
                .unmap_single(&mut cpu, &mut platform, &at, mapped)
                .unwrap();
        }
        dma.tick(&mut cpu, &mut platform).unwrap();
        assert_eq!(platform.port.accepted, flushes, "at {time}");
    }
    assert_eq!(platform.port.last, Some(Invalidation::Global));
}
