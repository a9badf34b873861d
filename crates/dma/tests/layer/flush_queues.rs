//! The bound of a flush queue while its CPU unmaps during a timer's flush.

use std::cell::RefCell;
use std::sync::Arc;

use ringfence_dma::flush::{FlushQueue, PerCpuQueue, QueueConfig};
use ringfence_dma::{Platform, UnmapFailure, UnmapReason};
use ringfence_memory::Arena;
use ringfence_memory::fake::FaultyFrames;
use ringfence_types::{Direction, Invalidation, InvalidationError, Invalidator, Nanos, Ticket};

use crate::rig::*;

const ENTRIES: usize = 4;

type Queue = RefCell<FlushQueue>;
type List = RefCell<Vec<Arc<Queue>>>;

fn queues() -> PerCpuQueue<Queue, List> {
    let config = QueueConfig {
        entries: ENTRIES,
        timeout_ns: 0,
    };
    PerCpuQueue::new(config, Queue::new, List::new)
}

/// The platform of the CPU that runs the timer. Every invalidation calls `during` and then fails.
struct TimerBoard<'a> {
    board: Board,
    port: TimerPort<'a>,
}

struct TimerPort<'a> {
    during: &'a mut dyn FnMut(),
}

impl Invalidator for TimerPort<'_> {
    fn submit(&mut self, _request: Invalidation) -> Result<Ticket, InvalidationError> {
        (self.during)();
        Err(InvalidationError::QueueFull)
    }

    fn poll(&mut self, _ticket: Ticket) -> Result<bool, InvalidationError> {
        Ok(false)
    }
}

impl<'a> Platform for TimerBoard<'a> {
    type Memory = Arena;
    type Frames = FaultyFrames<ringfence_memory::Frames<std::rc::Rc<Arena>>>;
    type Invalidator = TimerPort<'a>;

    fn memory(&self) -> &Arena {
        self.board.memory()
    }

    fn frames(&self) -> &Self::Frames {
        self.board.frames()
    }

    fn invalidator(&mut self) -> &mut TimerPort<'a> {
        &mut self.port
    }

    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

/// Fills a queue, then unmaps one range during each of `ticks` failing timer flushes. The CPU's own
/// invalidations fail if `fails`. Returns the number of ranges that the queue holds, and the number
/// of unmaps that the layer rejected.
fn unmap_during_ticks(ticks: u64, fails: bool) -> (usize, usize) {
    let mut rig = Rig::<Tree, Plain, _, u64>::new(queues());
    if fails {
        rig.board
            .port
            .fail(0, usize::MAX / 2, InvalidationFailure::Failed);
    }
    let mut rejected = Vec::new();
    let (board, dma, cpu, at) = rig.parts();
    let mut timer_cpu = dma.cpu();
    let mut unmap_one = |id: u64| {
        let buffer = memory(0x10_0000 + id * PAGE, 64);
        let (mapping, _) = dma
            .map_single(cpu, board, at, id, buffer, Direction::FromDevice)
            .unwrap();
        match dma.unmap_single(cpu, board, at, mapping) {
            Ok(_) => {}
            Err(error) => match error.reason {
                UnmapReason::NotFlushed(_, left) => rejected.push(left),
                other => panic!("{other:?}"),
            },
        }
    };
    let entries = ENTRIES as u64;
    (0..entries).for_each(&mut unmap_one);
    for tick in 0..ticks {
        let mut timer = TimerBoard {
            board: Board::new(),
            port: TimerPort {
                during: &mut || unmap_one(entries + tick),
            },
        };
        let result = dma.tick(&mut timer_cpu, &mut timer);
        let full = UnmapFailure::NotFlushed(InvalidationError::QueueFull);
        assert_eq!(result, Err(full));
    }
    let unfreed = dma.space(at).unwrap().allocator().out.borrow().len();
    let counts = (unfreed - rejected.len(), rejected.len());
    // Every range is freed once the invalidations succeed.
    board.port.trouble = None;
    dma.tick(cpu, board).unwrap();
    for left in rejected {
        let _ = dma.retry_invalidation(cpu, board, left).unwrap();
    }
    assert!(rig.accounts().out.borrow().is_empty());
    counts
}

#[test]
fn a_queue_keeps_its_bound_during_failing_timer_flushes() {
    assert_eq!(unmap_during_ticks(6, true), (ENTRIES, 6));
}

/// The range above the bound is invalidated alone, so the driver sees no error.
#[test]
fn unmap_above_the_bound_is_invalidated_alone() {
    assert_eq!(unmap_during_ticks(6, false), (ENTRIES, 0));
}
