//! Failing invalidations: no buffer is returned while a device may reach it, memory stays bounded,
//! and every cleared mapping can be invalidated later.

mod first_error;

use std::cell::RefCell;

use ringfence_dma::flush::{Burst, Deferred, FlushPolicy, PerCpuQueue, QueueConfig, Strict};
use ringfence_dma::{Mapping, Outcome, Released, UnmapReason};
use ringfence_types::{
    Direction, Invalidation, InvalidationError, IovaRange, Nanos, Pfn, PfnRange,
};

use crate::rig::*;

/// Maps one page for buffer `id`, and lets the device use it.
fn map<A: Make, T: MakeTable, F>(rig: &mut Rig<A, T, F, u64>, id: u64) -> (Mapping<u64>, PfnRange)
where
    F: ringfence_dma::FlushPolicy<Space<A, T>, u64>,
{
    let (board, dma, cpu, at) = rig.parts();
    let buffer = memory(0x10_0000 + id % 256 * PAGE, 64);
    let (mapping, _) = dma
        .map_single(cpu, board, at, id, buffer, Direction::FromDevice)
        .map_err(|(_, error)| error)
        .unwrap();
    let pages = PfnRange::covering(&mapping.range());
    board.port.touch(at.domain(), pages);
    (mapping, pages)
}

#[test]
fn strict_reports_failed_invalidations() {
    for (trouble, expected) in [
        (InvalidationFailure::Full, InvalidationError::QueueFull),
        (InvalidationFailure::Failed, InvalidationError::Failed),
    ] {
        let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
        let domain = rig.at.domain();
        let (mapping, pages) = map(&mut rig, 1);
        rig.board.port.fail(0, 2, trouble);
        let (board, dma, cpu, at) = rig.parts();
        let error = dma.unmap_single(cpu, board, at, mapping).unwrap_err();
        let UnmapReason::NotFlushed(why, not_invalidated) = error.reason else {
            panic!("{error}");
        };
        assert_eq!(
            (why, not_invalidated.direction()),
            (expected, Direction::FromDevice)
        );
        assert!(board.port.reaches(domain, pages));
        // The addresses are not free either.
        let out = || dma.space(at).unwrap().allocator().out.borrow().len();
        assert_eq!(out(), 1);
        let (why, not_invalidated) = dma
            .retry_invalidation(cpu, board, not_invalidated)
            .unwrap_err();
        assert_eq!((why, out()), (expected, 1));
        let Released(buffer) = dma.retry_invalidation(cpu, board, not_invalidated).unwrap();
        assert_eq!((buffer, out()), (1, 0));
        assert!(!board.port.reaches(domain, pages));
    }
}

#[test]
fn a_multi_unmap_owes_all_of_them_in_order() {
    for trouble in [InvalidationFailure::Full, InvalidationFailure::Failed] {
        let mut rig = Rig::<Product, Cached, _, u64>::new(Strict);
        let domain = rig.at.domain();
        let (mappings, pages): (Vec<_>, Vec<_>) = (0..5).map(|id| map(&mut rig, id)).unzip();
        rig.board.port.fail(0, 1, trouble);
        let (board, dma, cpu, at) = rig.parts();
        let error = dma
            .unmap_multi(cpu, board, at, mappings, |buffer| {
                panic!("{buffer} came back")
            })
            .unwrap_err();
        assert!(error.refused.is_none() && error.rest.is_empty());
        assert!(error.invalidation.is_some());
        assert_eq!(board.port.log.len(), 1, "one invalidation for all");
        let mut not_invalidated = error.not_invalidated.into_iter();
        for (id, pages) in pages.iter().enumerate() {
            assert!(board.port.reaches(domain, *pages));
            let Released(buffer) = dma
                .retry_invalidation(cpu, board, not_invalidated.next().unwrap())
                .unwrap();
            assert_eq!(buffer, id as u64, "each buffer with its own range");
            assert!(!board.port.reaches(domain, *pages), "{id}");
        }
        assert!(dma.space(at).unwrap().allocator().out.borrow().is_empty());
    }
}

#[test]
fn multi_unmap_stops_at_an_unmapped_buffer() {
    let mut rig = Rig::<Product, Cached, _, u64>::new(Strict);
    let (first, _) = map(&mut rig, 1);
    let (last, _) = map(&mut rig, 2);
    let at = rig.at;
    let nowhere = IovaRange::new(Pfn::new(3).iova(), 64).unwrap();
    let bogus = Mapping::claim(&at, nowhere, Direction::FromDevice, 3);
    let (board, dma, cpu, at) = rig.parts();
    let mut back = Vec::new();
    let error = dma
        .unmap_multi(cpu, board, at, vec![first, bogus, last], |b| back.push(b))
        .unwrap_err();
    assert_eq!(back, [1]);
    assert!(matches!(
        error.refused.unwrap().reason,
        UnmapReason::Table(ringfence_pgtable::UnmapError::NotMapped { .. }, buffer)
            if *buffer.buffer() == 3
    ));
    let rest: Vec<_> = error.rest.iter().map(|m| *m.buffer()).collect();
    assert_eq!(rest, [2]);
    dma.unmap_multi(cpu, board, at, error.rest, |b| back.push(b))
        .unwrap();
    assert_eq!(back, [1, 2]);
}

/// With a port that always fails: the policy accepts `longest` unmaps, then returns every further
/// mapping to the caller.
fn stays_bounded<F>(
    mut rig: Rig<Tree, Plain, F, u64>,
    longest: usize,
    end: impl Fn(&mut Rig<Tree, Plain, F, u64>),
) where
    F: ringfence_dma::FlushPolicy<Space<Tree, Plain>, u64>,
{
    rig.board
        .port
        .fail(0, usize::MAX / 2, InvalidationFailure::Failed);
    let mut not_invalidated = Vec::new();
    let mut all = Vec::new();
    for id in 0..longest as u64 * 3 {
        let (mapping, pages) = map(&mut rig, id);
        all.push(pages);
        let (board, dma, cpu, at) = rig.parts();
        board.now = Nanos(id * 6_000_000);
        let _ = dma.tick(cpu, board);
        match dma.unmap_single(cpu, board, at, mapping) {
            Ok(_) => {}
            Err(error) => match error.reason {
                UnmapReason::NotFlushed(InvalidationError::Failed, left) => {
                    not_invalidated.push(left)
                }
                other => panic!("{other:?}"),
            },
        }
    }
    let kept = all.len() - not_invalidated.len();
    assert!(
        kept <= longest + 1,
        "{kept} ranges are kept, {longest} is the bound"
    );
    // No address is free while a device may use it, and all are free once none can.
    assert_eq!(rig.accounts().out.borrow().len(), all.len());
    rig.board.port.trouble = None;
    for left in not_invalidated {
        let Rig {
            board,
            dma,
            cpu,
            at: _,
        } = &mut rig;
        let _ = dma.retry_invalidation(cpu, board, left).unwrap();
    }
    end(&mut rig);
    assert!(rig.accounts().out.borrow().is_empty());
    let domain = rig.at.domain();
    assert!(
        all.iter()
            .all(|pages| !rig.board.port.reaches(domain, *pages))
    );
}

#[test]
fn memory_stays_bounded_when_invalidations_fail() {
    fn flush<F: ringfence_dma::FlushPolicy<Space<Tree, Plain>, u64>>(
        rig: &mut Rig<Tree, Plain, F, u64>,
    ) {
        let (board, dma, cpu, at) = rig.parts();
        dma.flush(cpu, board, at).unwrap();
    }
    let deferred = Deferred::with(10, 10_000_000, std::cell::RefCell::new);
    stays_bounded(Rig::new(deferred), 10, flush);
    let config = QueueConfig {
        entries: 10,
        timeout_ns: 10_000_000,
    };
    type Ring = std::cell::RefCell<ringfence_dma::flush::FlushQueue>;
    type List = std::cell::RefCell<Vec<std::sync::Arc<Ring>>>;
    let queues = PerCpuQueue::<Ring, List>::new(config, Ring::new, List::new);
    stays_bounded(Rig::new(queues), 10, flush);
    stays_bounded(Rig::new(Burst::new(10)), 10, |rig| {
        let (board, dma, cpu, at) = rig.parts();
        dma.end_burst(cpu, board, at, Direction::FromDevice, |_| {})
            .unwrap();
    });
}

/// The queues of two CPUs with a timer that fails repeatedly: each queue keeps its own ranges and
/// stays within its bound.
#[test]
fn a_failing_timer_gives_every_ring_its_own_back() {
    let config = QueueConfig {
        entries: 4,
        timeout_ns: 0,
    };
    type Ring = std::cell::RefCell<ringfence_dma::flush::FlushQueue>;
    type List = std::cell::RefCell<Vec<std::sync::Arc<Ring>>>;
    let queues = PerCpuQueue::<Ring, List>::new(config, Ring::new, List::new);
    let mut rig = Rig::<Tree, Plain, _, u64>::new(queues);
    let mut other = rig.dma.cpu();
    rig.board
        .port
        .fail(0, usize::MAX / 2, InvalidationFailure::Full);
    let mut kept = 0;
    let mut not_invalidated = Vec::new();
    for id in 0..60 {
        let (mapping, _) = map(&mut rig, id);
        let (board, dma, cpu, at) = rig.parts();
        let processor = if id % 3 == 0 { cpu } else { &mut other };
        match dma.unmap_single(processor, board, at, mapping) {
            Ok(_) => kept += 1,
            Err(error) => match error.reason {
                UnmapReason::NotFlushed(_, left) => not_invalidated.push(left),
                other => panic!("{other:?}"),
            },
        }
        assert!(dma.tick(processor, board).is_err());
    }
    assert_eq!(kept, 8, "four for each of two rings");
    rig.board.port.trouble = None;
    let Rig {
        board,
        dma,
        cpu,
        at: _,
    } = &mut rig;
    dma.tick(cpu, board).unwrap();
    for left in not_invalidated {
        let _ = dma.retry_invalidation(cpu, board, left).unwrap();
    }
    assert!(rig.accounts().out.borrow().is_empty());
    assert!(rig.board.port.warm.is_empty());
}

#[test]
fn burst_releases_only_invalidated_buffers() {
    let mut rig = Rig::<Product, Cached, _, u64>::new(Burst::new(4));
    let domain = rig.at.domain();
    let mut pages = Vec::new();
    for id in 0..10 {
        let (mapping, range) = map(&mut rig, id);
        pages.push(range);
        let (board, dma, cpu, at) = rig.parts();
        let outcome = dma.unmap_single(cpu, board, at, mapping).unwrap();
        assert_eq!(Outcome::<u64>::into_buffer(outcome), None);
        // Addresses of an open part are not reused. The unmap that finds a part full ends it.
        let open = (id as usize).saturating_sub(1) / 4 * 4;
        let distinct: std::collections::BTreeSet<_> = pages[open..].iter().collect();
        assert_eq!(distinct.len(), pages.len() - open);
    }
    // Two parts of four are invalidated. The last two mappings are not, and stay withheld if the
    // port fails.
    rig.board.port.fail(0, 1, InvalidationFailure::Failed);
    let (board, dma, cpu, at) = rig.parts();
    let mut back = Vec::new();
    let direction = Direction::FromDevice;
    let result = dma.end_burst(cpu, board, at, direction, |b| back.push(b));
    assert_eq!(result, Err(InvalidationError::Failed));
    assert_eq!(back, (0..8).collect::<Vec<_>>());
    assert!(board.port.reaches(domain, pages[8]) && board.port.reaches(domain, pages[9]));
    // Other directions belong to other bursts.
    dma.end_burst(cpu, board, at, Direction::ToDevice, |b| back.push(b))
        .unwrap();
    assert_eq!(back.len(), 8);
    dma.end_burst(cpu, board, at, direction, |b| back.push(b))
        .unwrap();
    assert_eq!(back, (0..10).collect::<Vec<_>>());
    assert!(board.port.warm.is_empty());
}

/// Any CPU that fills the queue shared by all domains flushes it, even if its handle is older than
/// a domain.
#[test]
fn the_shared_queue_frees_ranges_of_every_domain() {
    let deferred = Deferred::with(4, u64::MAX, std::cell::RefCell::new);
    let mut rig = Rig::<Tree, Plain, _, u64>::new(deferred);
    // Mapped before another domain exists, so that the old CPU's next call is its unmap.
    let (early, _) = map(&mut rig, 3);
    let board = &rig.board;
    let later = rig
        .dma
        .attach(
            ringfence_types::RequesterId::new(0x20),
            ringfence_types::Iova::new(u64::MAX),
            |domain| {
                let accounts = Accounts::new(Tree::make(LAST_PAGE));
                let table = Plain::make(board, domain);
                let rounding = ringfence_dma::space::Rounding::Exact;
                Ok::<_, ()>(ringfence_dma::space::Paged::new(accounts, table, rounding))
            },
        )
        .unwrap();
    let mut other = rig.dma.cpu();
    let (board, dma, cpu, at) = rig.parts();
    // Three in the new domain by the new CPU, the last in the old domain by the old CPU.
    for id in 0..3 {
        let buffer = memory(0x10_0000, 64);
        let (mapping, _) = dma
            .map_single(&mut other, board, &later, id, buffer, Direction::ToDevice)
            .unwrap();
        let _ = dma
            .unmap_single(&mut other, board, &later, mapping)
            .unwrap();
    }
    let _ = dma.unmap_single(cpu, board, at, early).unwrap();
    assert_eq!(board.port.log, [Invalidation::Global]);
    for at in [at, &later] {
        let out = dma.space(at).unwrap().allocator().out.borrow().clone();
        assert!(out.is_empty(), "{out:?} of {} is lost", at.domain());
    }
}

/// The layer stops a driver that never ends its bursts before it clears an entry, for single unmaps
/// and for batches.
#[test]
fn a_burst_that_never_ends_is_bounded() {
    const MOST: u64 = 5;
    let mut rig = Rig::<Tree, Plain, _, u64>::new(Burst::new(2).with_most(MOST as usize));
    let mut live: Vec<_> = (0..MOST + 2).map(|id| map(&mut rig, id).0).collect();
    let (board, dma, cpu, at) = rig.parts();
    let (multi, single) = (live.pop().unwrap(), live.pop().unwrap());
    let range = single.range();
    for mapping in live {
        let _ = dma.unmap_single(cpu, board, at, mapping).unwrap();
    }
    let words = board.words();
    let error = dma.unmap_single(cpu, board, at, single).unwrap_err();
    assert!(matches!(error.reason, UnmapReason::BurstFull(buffer) if *buffer.buffer() == MOST));
    let error = dma
        .unmap_multi(cpu, board, at, vec![multi], |_| panic!())
        .unwrap_err();
    let refused = error.refused.unwrap();
    assert!(matches!(refused.reason, UnmapReason::BurstFull(_)));
    assert_eq!(board.words(), words);
    let mut back = Vec::new();
    let direction = Direction::FromDevice;
    dma.end_burst(cpu, board, at, direction, |b| back.push(b))
        .unwrap();
    assert_eq!(back, (0..MOST).collect::<Vec<_>>());
    for (range, buffer) in [(range, MOST), (refused.range, MOST + 1)] {
        let again = Mapping::claim(at, range, direction, buffer);
        let _ = dma.unmap_single(cpu, board, at, again).unwrap();
    }
}

/// The bound holds for the mappings of one call as for those of many calls, separately per
/// direction. The excess mappings stay mapped, and fit after the end of the burst.
#[test]
fn a_burst_of_one_call_is_bounded() {
    const MOST: usize = 5;
    let directions = [Direction::FromDevice, Direction::ToDevice];
    for (longest, count, fit) in [(2, 20, 2 * MOST), (100, 20, 2 * MOST), (2, 6, 6)] {
        let burst = Burst::new(longest).with_most(MOST);
        let mut rig = Rig::<Tree, Plain, _, u64>::new(burst);
        let (board, dma, cpu, at) = rig.parts();
        let live: Vec<_> = (0..count)
            .map(|id| {
                let (buffer, direction) = (
                    memory(0x10_0000 + id * PAGE, 64),
                    directions[id as usize % 2],
                );
                dma.map_single(cpu, board, at, id, buffer, direction)
                    .unwrap()
                    .0
            })
            .collect();
        let mut rest = live;
        let mut back = Vec::new();
        let mut sizes = Vec::new();
        while !rest.is_empty() {
            let left = dma.unmap_multi(cpu, board, at, rest, |_| panic!("before the end"));
            rest = left.map_or_else(
                |error| {
                    let refused = error.refused.expect("a full burst");
                    let (range, UnmapReason::BurstFull(buffer)) = (refused.range, refused.reason)
                    else {
                        panic!("not for room");
                    };
                    let id = *buffer.buffer();
                    let direction = directions[id as usize % 2];
                    let again = Mapping::claim(at, range, direction, id);
                    [again].into_iter().chain(error.rest).collect()
                },
                |()| Vec::new(),
            );
            let before = back.len();
            for direction in directions {
                let of = back.len();
                dma.end_burst(cpu, board, at, direction, |b| back.push(b))
                    .unwrap();
                assert!(back.len() - of <= MOST, "{} in one burst", back.len() - of);
            }
            sizes.push(back.len() - before);
        }
        assert_eq!(sizes.first(), Some(&fit), "bursts of {longest}");
        back.sort_unstable();
        assert_eq!(back, (0..count).collect::<Vec<_>>());
    }
}

/// Batches without a limit allocate no memory in advance.
#[test]
fn batches_may_be_as_long_as_can_be_counted() {
    fn drive<F: FlushPolicy<Space<Tree, Plain>, u64>>(flush: F) {
        let mut rig = Rig::<Tree, Plain, F, u64>::new(flush);
        let (mapping, _) = map(&mut rig, 7);
        let (board, dma, cpu, at) = rig.parts();
        let mut back = Vec::new();
        let outcome = dma.unmap_single(cpu, board, at, mapping).unwrap();
        back.extend(outcome.into_buffer());
        dma.end_burst(cpu, board, at, Direction::FromDevice, |b| back.push(b))
            .unwrap();
        assert_eq!(back, [7]);
    }
    drive(Burst::new(usize::MAX));
    drive(Deferred::with(usize::MAX, 1, RefCell::new));
    let config = QueueConfig {
        entries: usize::MAX,
        timeout_ns: 1,
    };
    drive(PerCpuQueue::new(config, RefCell::new, RefCell::new));
}
