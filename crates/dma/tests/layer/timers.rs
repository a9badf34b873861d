//! Unmaps that land while a timer's flush is in progress.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use ringfence_dma::flush::{FlushQueue, PerCpuQueue, QueueConfig};
use ringfence_dma::space::{Paged, PlainTable, Rounding};
use ringfence_dma::{Dma, Platform};
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
}

impl Invalidator for Port {
    fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
        if let Some(during) = self.during.take() {
            during();
            return Err(InvalidationError::QueueFull);
        }
        self.accepted += 1;
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
    let at = dma
        .attach(DEVICE, Iova::new(u64::MAX), |domain| {
            let format = SecondStage::new(Levels::Three);
            let table = Table::new(format, domain, Coherency::Coherent, &*arena, &*frames);
            let table = PlainTable(table.unwrap());
            Ok::<_, ()>(Paged::new(Tree::make(LAST_PAGE), table, Rounding::Exact))
        })
        .unwrap();
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
        Err(InvalidationError::QueueFull)
    );
    dma.tick(&mut timer, &mut platform).unwrap();
    assert_eq!(platform.port.accepted, 1, "the older range is due");
}
