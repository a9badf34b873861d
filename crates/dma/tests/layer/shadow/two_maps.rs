//! Maps on two CPUs while the pool gets its addresses and its runs.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::Strict;
use ringfence_dma::space::{
    Paged, Rounding, ShadowDepot, ShadowPolicy, ShadowPool, ShadowSpace, WhenExhausted,
};
use ringfence_dma::{Attachment, Dma, MapReason, ShadowError};
use ringfence_memory::fake::FaultyFrames;
use ringfence_memory::{Arena, Frames};
use ringfence_types::{Direction, Iova, Lock, Nanos, RequesterId};

use super::machine::*;
use crate::rig::*;

/// A lock before which another CPU works.
struct Gate(RefCell<ShadowDepot>);

thread_local! {
    static MEANWHILE: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
    /// Uses of the lock before that.
    static AFTER: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

impl Lock<ShadowDepot> for Gate {
    fn with<R>(&self, critical: impl FnOnce(&mut ShadowDepot) -> R) -> R {
        match AFTER.get() {
            0 => {
                let work = MEANWHILE.with(|work| work.borrow_mut().take());
                if let Some(work) = work {
                    work();
                }
            }
            more => AFTER.set(more - 1),
        }
        critical(&mut self.0.borrow_mut())
    }
}

type Raced = ShadowSpace<Accounts<Tree>, Plain, Gate>;

/// Creates a layer with a pool of 64 pages behind a [`Gate`].
fn raced(board: &Board) -> (Dma<Raced, Strict, u64>, Attachment) {
    let mut dma = Dma::new(Strict);
    let at = dma.attach(DEVICE, Iova::new(u64::MAX), |domain| {
        let table = Plain::make(board, domain);
        let paged = Paged::new(Accounts::new(Tree::make(LAST_PAGE)), table, Rounding::Exact);
        let pool = ShadowPool::new(memory(POOL, 64 * PAGE), |depot| Gate(RefCell::new(depot)));
        Ok::<_, ()>(ShadowSpace::new(paged, pool.unwrap(), POLICY))
    });
    (dma, at.unwrap())
}

/// The platform of another CPU of the same machine.
fn other_board(arena: Rc<Arena>) -> Board {
    let region = memory(12 << 20, 256 << 10);
    Board {
        frames: FaultyFrames::new(Frames::new(Rc::clone(&arena), region)),
        arena,
        port: Port::default(),
        now: Nanos(0),
    }
}

/// Two devices share a domain. One reaches 8 MiB. While its first map waits for the pool's lock,
/// the other device's first map puts the pool above.
#[test]
fn a_pool_that_another_cpu_places_lies_within_the_mask() {
    let mask = Iova::new(0x7f_ffff);
    let board: &'static mut Board = Box::leak(Box::new(Board::new()));
    let (mut dma, wide) = raced(board);
    let narrow = dma.attach_to(RequesterId::new(0x20), mask, &wide).unwrap();
    let dma: &'static Dma<Raced, Strict, u64> = Box::leak(Box::new(dma));
    let arena = Rc::clone(&board.arena);
    MEANWHILE.set(Some(Box::new(move || {
        let mut other = other_board(arena);
        let mut cpu = dma.cpu();
        let buffer = memory(0x2000, 8);
        let _live = dma
            .map_single(&mut cpu, &mut other, &wide, 2, buffer, Direction::ToDevice)
            .unwrap();
    })));
    let mut cpu = dma.cpu();
    let buffer = memory(0x1000, 8);
    let mapped = dma.map_single(&mut cpu, board, &narrow, 1, buffer, Direction::ToDevice);
    match mapped {
        Ok((mapping, _)) => {
            let last = mapping.range().last();
            assert!(last <= mask, "{last} lies beyond {mask}");
        }
        Err((_, error)) => assert_eq!(error.reason, MapReason::Shadow(ShadowError::BeyondMask)),
    }
}

/// A pool that no address of the device holds has no free slot for it.
#[test]
fn a_device_that_cannot_reach_the_pool_gets_its_pages() {
    let policy = ShadowPolicy {
        when_exhausted: WhenExhausted::MapPages,
        ..POLICY
    };
    for wide_first in [true, false] {
        let mut m = Machine::new(64, policy);
        let mask = Iova::new(0x1_ffff);
        let narrow = m
            .dma
            .attach_to(RequesterId::new(0x20), mask, &m.at)
            .unwrap();
        if wide_first {
            let _live = m.map(memory(0x1000, 8), Direction::ToDevice).unwrap();
        }
        let buffer = memory(0x2000, 8);
        let (board, dma, cpu, _) = m.parts();
        let mapped = dma.map_single(cpu, board, &narrow, 1, buffer, Direction::ToDevice);
        let range = mapped.map(|(mapping, _)| mapping.range());
        let range = range.map_err(|(_, error)| format!("wide first: {wide_first}: {error}"));
        assert!(range.unwrap().last() <= mask);
    }
}

/// Pages of a run that the table refused serve later maps, although another CPU took a run since.
#[test]
fn a_refused_run_is_not_lost() {
    let board: &'static mut Board = Box::leak(Box::new(Board::new()));
    let (dma, at) = raced(board);
    let dma: &'static Dma<Raced, Strict, u64> = Box::leak(Box::new(dma));
    let arena = Rc::clone(&board.arena);
    let work = move || {
        let mut other = other_board(arena);
        let mut cpu = dma.cpu();
        let buffer = memory(0x2000, 8);
        let _live = dma
            .map_single(&mut cpu, &mut other, &at, 2, buffer, Direction::ToDevice)
            .unwrap();
        assert!(dma.remove_cpu(cpu, &mut other, drop).is_ok());
    };
    // The third use of the lock returns the run.
    AFTER.set(2);
    MEANWHILE.set(Some(Box::new(work)));
    board.frames.fail_after(0);
    let mut cpu = dma.cpu();
    let buffer = memory(0x1000, 8);
    let refused = dma.map_single(&mut cpu, board, &at, 1, buffer, Direction::ToDevice);
    assert!(refused.is_err());
    board.frames.recover();
    let mut live = 1;
    while dma
        .map_single(&mut cpu, board, &at, 1, buffer, Direction::ToDevice)
        .is_ok()
    {
        live += 1;
    }
    assert_eq!(live, 64, "pages of the pool");
}
