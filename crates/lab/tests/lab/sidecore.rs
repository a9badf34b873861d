//! Maps and unmaps that another core executes: a thread, and the late one of oracle replays.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ringfence_dma::MapReason;
use ringfence_dma::flush::Strict;
use ringfence_dma::space::{Paged, PlainTable, Rounding};
use ringfence_iova::{CachedTree, Locked};
use ringfence_lab::compare::runner;
use ringfence_lab::layer::{
    AttachInfo, ContextTarget, DmaLayer, DmaOps, LayerPlatform, OpKey, TimedInvalidationQueue,
    UnmapOutcome,
};
use ringfence_lab::modes::Safety;
use ringfence_lab::sidecore::{
    Command, LateLink, Link, QUEUED_UNMAPS, Reply, Sidecore, ThreadLink, UnmapWait,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, Levels, SecondStage, Table};
use ringfence_trace::{DeviceIndex, Devices};
use ringfence_types::{Direction, Nanos, Pfn, PfnRange, PhysAddr, PhysRange, RequesterId};

use crate::script::*;

const US: u64 = 1_000;
const ID: RequesterId = RequesterId::new(0x18);

type Tree = Locked<CachedTree, RefCell<CachedTree>>;
type PlainLayer = DmaLayer<Paged<Tree, PlainTable<SecondStage>>, Strict, TimedInvalidationQueue>;

/// A strict layer on its own memory.
fn plain_layer() -> PlainLayer {
    layer_with(PhysAddr::new(0x1000))
}

/// A strict layer on its own memory. Invalidations fail if their status word is not in it.
fn layer_with(status: PhysAddr) -> PlainLayer {
    const ARENA: u64 = 16 << 20;
    let arena = Rc::new(Arena::new(ARENA).unwrap());
    let region = memory(0x2000, ARENA - 0x2000);
    let queue = PhysAddr::new(0);
    let platform = LayerPlatform {
        frames: Rc::new(Frames::new(Rc::clone(&arena), region)),
        invalidator: TimedInvalidationQueue::new(Rc::clone(&arena), queue, status),
        arena,
        now: Nanos(0),
    };
    DmaLayer::new(Strict, platform, |of: &AttachInfo, platform| {
        let (memory, frames) = (&*platform.arena, &*platform.frames);
        let format = SecondStage::new(Levels::Four);
        let table = Table::new(format, of.domain, Coherency::Coherent, memory, frames)?;
        let target = ContextTarget::Table(table.root());
        let pages = PfnRange::inclusive(Pfn::new(1), Pfn::new(0xf_ffff)).unwrap();
        let alloc = Locked::new(CachedTree::new(pages), RefCell::new);
        Ok((
            Paged::new(alloc, PlainTable(table), Rounding::Exact),
            target,
        ))
    })
}

const KEY: OpKey = OpKey::new(DeviceIndex(0), 0, Direction::ToDevice);

fn page(number: u64) -> PhysRange {
    PhysRange::new(PhysAddr::new(number << 12), 4096).unwrap()
}

/// Maps, unmaps and maps lists through `layer`; returns every address and outcome.
fn drive(layer: &mut dyn DmaOps) -> Vec<(u64, bool)> {
    layer.reserve(1, 4).unwrap();
    layer.attach(DeviceIndex(0), ID).unwrap();
    let mut seen = Vec::new();
    let mut live = std::collections::VecDeque::new();
    for number in 1..600 {
        let list = [page(number), page(number + 1000)];
        let pieces = &list[..1 + usize::from(number % 5 == 0)];
        let token = layer.map(KEY, number, pieces).unwrap().token;
        let iova = layer.segments()[..pieces.len().min(layer.segments().len())]
            .first()
            .filter(|_| pieces.len() > 1)
            .map_or_else(|| token.range().unwrap(), |segment| segment.range);
        seen.push((iova.start().get(), false));
        live.push_back(token);
        if live.len() > 100 {
            let token = live.pop_front().unwrap();
            let buffer = token.buffer().unwrap();
            let UnmapOutcome::Returned {
                buffer: back,
                stale,
            } = layer.unmap(KEY, token)
            else {
                panic!("buffer {buffer} is not back");
            };
            assert_eq!(back, buffer);
            seen.push((back, stale));
        }
    }
    // More unmaps than the queue holds.
    assert!(live.len() > QUEUED_UNMAPS);
    for token in live {
        assert!(matches!(
            layer.unmap(KEY, token),
            UnmapOutcome::Returned { .. }
        ));
    }
    layer.tick();
    seen
}

#[test]
fn a_thread_executes_what_the_layer_itself_would() {
    let mut own = plain_layer();
    let expected = drive(&mut own);
    for wait in [UnmapWait::Waits, UnmapWait::Returns] {
        let start = || ThreadLink::start(|| Ok(plain_layer())).unwrap();
        let mut thread = Sidecore::new(start(), wait).unwrap();
        let mut late = Sidecore::late(plain_layer(), wait);
        for front in [&mut thread as &mut dyn DmaOps, &mut late] {
            let stale = wait == UnmapWait::Returns;
            let found = drive(front);
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.into_iter().zip(&expected) {
                assert_eq!(found.0, expected.0);
                assert!(!found.1 || stale, "{wait:?}");
            }
        }
    }
}

/// Sleeps between commands, and wakes up for each.
#[test]
fn a_sleeping_sidecore_wakes_up() {
    let mut link = ThreadLink::start(|| Ok(plain_layer())).unwrap();
    for _ in 0..3 {
        while !link.is_asleep() {
            std::thread::yield_now();
        }
        assert!(matches!(link.call(Command::Traits), Ok(Reply::Traits(_))));
    }
}

/// The start fails with the error of the layer; a sidecore that has ended refuses everything.
#[test]
fn a_sidecore_that_is_gone_refuses() {
    let failed = ThreadLink::start::<PlainLayer>(|| Err(ringfence_lab::LabError::TooManyDevices));
    assert!(matches!(
        failed,
        Err(ringfence_lab::LabError::TooManyDevices)
    ));
    let mut link = ThreadLink::start(|| Ok(plain_layer())).unwrap();
    assert!(matches!(link.call(Command::Stop), Ok(Reply::Ended)));
    assert!(matches!(link.call(Command::Traits), Err(Command::Traits)));
    assert!(Sidecore::new(link, UnmapWait::Waits).is_err());
    let mut link = ThreadLink::start(|| Ok(plain_layer())).unwrap();
    let Ok(Reply::Traits(_)) = link.call(Command::Traits) else {
        panic!("no traits");
    };
    let mut front = Sidecore::new(link, UnmapWait::Waits).unwrap();
    let error = front.map(KEY, 1, &[page(1)]).map(drop).unwrap_err();
    assert!(matches!(error.reason, MapReason::NotAttached), "{error:?}");
}

/// A link whose sidecore a test can end.
#[derive(Debug)]
struct SharedLink(Rc<RefCell<ThreadLink>>);

impl Link for SharedLink {
    fn send(&mut self, command: Command) -> Result<(), Command> {
        self.0.borrow_mut().send(command)
    }

    fn call(&mut self, command: Command) -> Result<Reply, Command> {
        self.0.borrow_mut().call(command)
    }
}

/// A sidecore that has ended gives the token of a failed invalidation back, so that the buffer
/// stays withheld.
#[test]
fn a_retry_of_an_ended_sidecore_returns_the_token() {
    let layer = || Ok(layer_with(PhysAddr::new(1 << 40)));
    let link = Rc::new(RefCell::new(ThreadLink::start(layer).unwrap()));
    let mut front = Sidecore::new(SharedLink(Rc::clone(&link)), UnmapWait::Waits).unwrap();
    front.reserve(1, 4).unwrap();
    front.attach(DeviceIndex(0), ID).unwrap();
    let token = front.map(KEY, 7, &[page(1)]).unwrap().token;
    let UnmapOutcome::NotInvalidated(token) = front.unmap(KEY, token) else {
        panic!("the invalidation succeeded");
    };
    let token = front.retry_invalidation(token).unwrap_err();
    assert!(matches!(
        link.borrow_mut().call(Command::Stop),
        Ok(Reply::Ended)
    ));
    // Once with room in the queue, and once without.
    let token = front.retry_invalidation(token).unwrap_err();
    let unmap = || Command::UnmapLater(Nanos(0), KEY, Default::default());
    for _ in 0..QUEUED_UNMAPS {
        link.borrow_mut().send(unmap()).unwrap();
    }
    link.borrow_mut().send(unmap()).unwrap_err();
    let token = front.retry_invalidation(token).unwrap_err();
    assert_eq!(token.direction(), Direction::ToDevice);
}

/// A link that counts the replies that its user waited for.
struct CountedLink(LateLink<PlainLayer>, Rc<Cell<u64>>);

impl Link for CountedLink {
    fn send(&mut self, command: Command) -> Result<(), Command> {
        self.0.send(command)
    }

    fn call(&mut self, command: Command) -> Result<Reply, Command> {
        self.1.set(self.1.get() + 1);
        self.0.call(command)
    }
}

/// The I/O core waits once for a map, also if it then writes a doorbell. It waits once for an unmap
/// of `sidecore-strict`, and for none of `sidecore`.
#[test]
fn a_map_waits_once_and_a_doorbell_never() {
    for (wait, waits) in [(UnmapWait::Waits, 2), (UnmapWait::Returns, 1)] {
        let calls = Rc::new(Cell::new(0));
        let link = CountedLink(LateLink::new(plain_layer()), Rc::clone(&calls));
        let mut front = Sidecore::new(link, wait).unwrap();
        front.reserve(1, 4).unwrap();
        front.attach(DeviceIndex(0), ID).unwrap();
        calls.set(0);
        for number in 1..10 {
            let token = front.map(KEY, number, &[page(number)]).unwrap().token;
            front.sync_map(KEY);
            let outcome = front.unmap(KEY, token);
            assert!(matches!(outcome, UnmapOutcome::Returned { .. }));
            assert_eq!(calls.get(), waits * number, "{wait:?}");
        }
    }
}

/// A late sidecore executes an unmap when its queue is full, at the next map, and at a tick.
#[test]
fn late_unmaps_wait_for_room_for_a_map_or_for_a_tick() {
    let mut link = LateLink::new(plain_layer());
    for _ in 0..QUEUED_UNMAPS + 5 {
        let unmap = Command::UnmapLater(Default::default(), KEY, Default::default());
        link.send(unmap).unwrap();
    }
    assert_eq!(link.waiting(), QUEUED_UNMAPS);
    link.call(Command::Tick(Default::default())).unwrap();
    assert_eq!(link.waiting(), 0);
}

/// The oracle sees the windows of asynchronous unmaps, and none if unmaps wait.
#[test]
fn only_asynchronous_unmaps_are_stale() {
    let mut script = Script::default();
    let buffer = |number: u64| [memory((number + 16) << 12 | 0x80, 100)];
    for pair in 0..300 {
        script.map(2 * pair * US, (0, 0, RX), 0, &buffer(pair));
        script.unmap((2 * pair + 1) * US, (0, 0), 0);
    }
    // A last run of unmaps, which no map follows.
    let base = 10_000 * US;
    for id in 0..20 {
        script.map(base + id * US, (0, 0, RX), 5000 + id as u32, &buffer(id));
    }
    for id in 0..20 {
        script.unmap(base + (100 + id) * US, (0, 0), 5000 + id as u32);
    }
    let options = judged_only(true);
    for (name, safety) in [
        ("sidecore-strict", Safety::Strict),
        ("sidecore", Safety::Bounded),
    ] {
        let mode = mode(name);
        assert_eq!(mode.safety(), safety);
        let mut runner = runner(&mode, &options).unwrap();
        let (plan, planner) = planned_with(&script.chunk, &[]);
        let mut attack = runner.attack.take().unwrap();
        attack.run(&plan, &Devices::new()).unwrap();
        let outcomes = attack.finish(&planner.live_mappings());
        let tally = outcomes.tally;
        assert_eq!(
            tally.stale > 0,
            safety == Safety::Bounded,
            "{name}: {tally:?}"
        );
        assert_eq!(tally.violations(), tally.stale, "{name}: {tally:?}");
        assert_eq!(tally.false_faults, 0, "{name}");
        assert_eq!(
            outcomes.stale_max_ns > 0,
            safety == Safety::Bounded,
            "{name}"
        );
    }
}
