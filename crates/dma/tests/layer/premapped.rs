//! Buffers mapped once and used many times (OS19).

use ringfence_dma::flush::{Burst, Deferred, FlushPolicy, Never, Strict};
use ringfence_dma::space::Identity;
use ringfence_dma::{BouncePool, Dma, MapMultiRequest, PremappedError, Teardown};
use ringfence_types::{Direction, Iova, PhysAddr, RequesterId};

use crate::rig::*;

fn requests(count: u64) -> Vec<MapMultiRequest<u64>> {
    (0..count)
        .map(|buffer| MapMultiRequest {
            buffer,
            memory: memory(0x80_0000 + buffer * PAGE + 16, 1500),
            direction: Direction::Bidirectional,
        })
        .collect()
}

/// Under any policy, any number of uses touches neither table, allocator nor port. The end of the
/// pool does, once.
fn lives<F: FlushPolicy<Space<Tree, Plain>, u64>>(flush: F, back_at_once: bool) {
    let mut rig = Rig::<Tree, Plain, F, u64>::new(flush);
    let (board, dma, cpu, at) = rig.parts();
    let mut pool = dma.premap(cpu, board, at, requests(4)).unwrap();
    let (state, words) = (rig.state(), rig.board.words());
    assert_eq!(state.leaves.len(), 4);
    let Rig {
        board, dma, cpu, ..
    } = &mut rig;
    let mut known = std::collections::BTreeMap::new();
    for round in 0..100 {
        let mut out: Vec<_> = (0..4).map(|_| pool.acquire().unwrap()).collect();
        assert!(pool.acquire().is_none());
        assert_eq!((pool.idle(), pool.in_use()), (0, 4));
        if round % 2 == 0 {
            out.rotate_left(1);
        }
        for loan in out {
            let name = *loan.buffer();
            let posted = dma.post(board, loan);
            let iova = posted.iova();
            assert_eq!(
                *known.entry(name).or_insert(iova),
                iova,
                "the address stays"
            );
            assert_eq!(posted.range().bytes(), 1500);
            let loan = dma.reap(board, posted);
            pool.release(loan).unwrap();
        }
    }
    let loan = pool.acquire().unwrap();
    let (1, mut pool) = (match dma.unmap_premapped(cpu, board, pool, |_| {}) {
        Err(PremappedError::InUse(count, pool)) => (count, pool),
        other => panic!("{other:?}"),
    }) else {
        panic!("not one");
    };
    pool.release(loan).unwrap();
    assert!(rig.board.port.log.is_empty());
    assert_eq!((rig.state(), rig.board.words()), (state, words));
    let (board, dma, cpu, at) = rig.parts();
    let mut back = Vec::new();
    dma.unmap_premapped(cpu, board, pool, |b| back.push(b))
        .unwrap();
    assert_eq!(back.len(), if back_at_once { 4 } else { 0 });
    dma.end_burst(cpu, board, at, Direction::Bidirectional, |b| back.push(b))
        .unwrap();
    back.sort_unstable();
    assert_eq!(back, [0, 1, 2, 3]);
    assert!(rig.state().leaves.is_empty());
}

#[test]
fn use_costs_nothing_under_any_policy() {
    lives(Strict, true);
    lives(Burst::default(), false);
    lives(Deferred::new(std::cell::RefCell::new), true);
}

/// A pool shrinks by unmaps alone: the buffers that were idle longest leave it with one
/// invalidation, and the device no longer reaches them.
#[test]
fn a_pool_gives_up_its_oldest_idle_buffers() {
    let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
    let (board, dma, cpu, at) = rig.parts();
    let mut pool = dma.premap(cpu, board, at, requests(5)).unwrap();
    let used: Vec<_> = (0..5).map(|_| pool.acquire().unwrap()).collect();
    let mut used = used.into_iter();
    let lent = used.next().unwrap();
    // Released in this order: 3, 2, 1, 0.
    used.for_each(|loan| pool.release(loan).unwrap());
    let mut back = Vec::new();
    for keep in [7, 4, 2] {
        dma.trim_premapped(cpu, board, &mut pool, keep, |buffer| back.push(buffer))
            .unwrap();
    }
    assert_eq!(back, [3, 2]);
    assert_eq!((pool.idle(), pool.in_use()), (2, 1));
    assert_eq!(board.port.log.len(), 1, "{:?}", board.port.log);
    assert_eq!(rig.state().leaves.len(), 3);
    let Rig {
        board, dma, cpu, ..
    } = &mut rig;
    pool.release(lent).unwrap();
    dma.unmap_premapped(cpu, board, pool, |buffer| back.push(buffer))
        .unwrap();
    assert_eq!(back, [3, 2, 1, 0, 4]);
    assert!(rig.state().leaves.is_empty());
}

#[test]
fn a_loan_of_another_device_is_not_taken() {
    let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
    let board = &rig.board;
    let other = rig
        .dma
        .attach(
            ringfence_types::RequesterId::new(9),
            Iova::new(u64::MAX),
            |domain| {
                let accounts = Accounts::new(Tree::make(LAST_PAGE));
                let rounding = ringfence_dma::space::Rounding::Exact;
                Ok::<_, ()>(ringfence_dma::space::Paged::new(
                    accounts,
                    Plain::make(board, domain),
                    rounding,
                ))
            },
        )
        .unwrap();
    let (board, dma, cpu, at) = rig.parts();
    let mut mine = dma.premap(cpu, board, at, requests(1)).unwrap();
    let mut theirs = dma.premap(cpu, board, &other, requests(2)).unwrap();
    let (loan, _out) = (mine.acquire().unwrap(), theirs.acquire().unwrap());
    let loan = theirs.release(loan).unwrap_err();
    mine.release(loan).unwrap();
    // Nor more buffers than were acquired.
    let extra = theirs.acquire().unwrap();
    let mut fresh = dma.premap(cpu, board, &other, requests(1)).unwrap();
    assert!(fresh.release(extra).is_err());
}

/// A buffer of a removed domain is not accepted for the domain that now has its identifier.
#[test]
fn loans_of_a_detached_domain_stay_out() {
    let mut board = Board::new();
    let mut dma = Dma::<Identity, Never, u64>::new(Never);
    let mut cpu = dma.cpu();
    let mask = Iova::new(u64::MAX);
    let attach = |dma: &mut Dma<Identity, Never, u64>, device| {
        let make = |domain| Ok::<_, ()>(Identity::new(domain));
        dma.attach(RequesterId::new(device), mask, make).unwrap()
    };
    let old = attach(&mut dma, 1);
    let mut pool = dma.premap(&mut cpu, &mut board, &old, requests(1)).unwrap();
    let stale = pool.acquire().unwrap();
    let gone = dma.detach(&mut cpu, &mut board, &old, Teardown::Forced, |_| {}, |_| {});
    assert!(gone.unwrap().is_some());
    let new = attach(&mut dma, 2);
    assert_eq!(new.domain(), old.domain());
    let mut pool = dma.premap(&mut cpu, &mut board, &new, requests(1)).unwrap();
    let _out = pool.acquire().unwrap();
    assert!(pool.release(stale).is_err());
    let ended = dma.unmap_premapped(&mut cpu, &mut board, pool, |_| {});
    assert!(matches!(ended, Err(PremappedError::InUse(1, _))));
}

/// If the buffers are bounced, `post` and `reap` copy the bytes.
#[test]
fn turns_move_bounced_bytes() {
    let pool = BouncePool::new(memory(0x10_0000, 128 << 10)).unwrap();
    let mut dma = Dma::<Identity, Never, u64>::new(Never).with_bounce(pool);
    let mut board = Board::new();
    let at = dma
        .attach(DEVICE, Iova::new(0x3f_ffff), |domain| {
            Ok::<_, ()>(Identity::new(domain))
        })
        .unwrap();
    let mut cpu = dma.cpu();
    let mut pool = dma.premap(&mut cpu, &mut board, &at, requests(2)).unwrap();
    for round in 0..50_u8 {
        let loan = pool.acquire().unwrap();
        let buffer = requests(2)[*loan.buffer() as usize].memory;
        let sent = vec![round; 1500];
        board.arena.write_bytes(buffer.start(), &sent).unwrap();
        let posted = dma.post(&board, loan);
        // The device reads, and answers.
        let copy = PhysAddr::new(posted.iova().get());
        let mut seen = vec![0; 1500];
        board.arena.read_bytes(copy, &mut seen).unwrap();
        assert_eq!(seen, sent);
        board.arena.write_bytes(copy, &[!round; 20]).unwrap();
        let loan = dma.reap(&board, posted);
        board.arena.read_bytes(buffer.start(), &mut seen).unwrap();
        assert_eq!(&seen[..20], &[!round; 20]);
        assert_eq!(&seen[20..], &sent[20..]);
        pool.release(loan).unwrap();
    }
    let mut back = 0;
    dma.unmap_premapped(&mut cpu, &mut board, pool, |_| back += 1)
        .unwrap();
    assert_eq!(back, 2);
}

/// Two pools of one domain, each with a buffer in use. Each takes only its own buffers.
#[test]
fn a_loan_of_another_pool_is_not_taken() {
    let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
    let (board, dma, cpu, at) = rig.parts();
    let [mut first, mut second] =
        [1, 2].map(|count| dma.premap(cpu, board, at, requests(count)).unwrap());
    let (loan, other) = (first.acquire().unwrap(), second.acquire().unwrap());
    let loan = second
        .release(loan)
        .expect_err("a buffer of the first pool");
    let posted = dma.post(board, loan);
    let loan = dma.reap(board, posted);
    let loan = second
        .release(loan)
        .expect_err("a buffer of the first pool");
    first.release(loan).unwrap();
    second.release(other).unwrap();
    for pool in [first, second] {
        assert_eq!(pool.in_use(), 0);
        dma.unmap_premapped(cpu, board, pool, |_| {}).unwrap();
    }
}
