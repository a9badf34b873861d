//! Domains and CPUs that are added and removed. An identifier is reused only when no entry of its
//! last domain is cached. Tokens of a removed domain never affect another domain, and every buffer
//! is returned once.

use std::cell::RefCell;
use std::collections::BTreeSet;

use proptest::prelude::*;

use ringfence_dma::flush::{
    Burst, Deferred, FlushPolicy, Never, PerCpuQueue, PerWrap, QueueConfig, Strict,
};
use ringfence_dma::space::{Identity, Paged, Rounding};
use ringfence_dma::{
    Attachment, BouncePool, Cpu, DetachError, Detached, Dma, DmaSegment, MapMultiRequest,
    MapReason, Mapping, NotInvalidated, Outcome, SgLimits, SgRequest, Teardown, UnmapReason,
};
use ringfence_types::{
    Direction, Invalidation, InvalidationError, Iova, Nanos, PfnRange, RequesterId,
};

use crate::rig::*;

const CPUS: usize = 2;
/// Few pages, so that addresses recur.
const LAST: u64 = 40;

#[derive(Debug, Clone, Copy)]
enum Op {
    Attach,
    Share(usize),
    Detach(usize, usize, bool),
    Map(usize, usize),
    Unmap(usize, usize),
    /// Unmaps a token of a removed domain, through a stale attachment or through that of the domain
    /// that now has the identifier.
    UnmapDead(usize, usize, bool),
    EndBurst(usize, usize),
    Retire(usize),
    Tick,
    Fail,
}

fn op() -> impl Strategy<Value = Op> {
    let number = || 0..8_usize;
    prop_oneof![
        2 => Just(Op::Attach),
        1 => number().prop_map(Op::Share),
        3 => (number(), number(), prop::bool::ANY).prop_map(|(d, c, f)| Op::Detach(d, c, f)),
        9 => (number(), number()).prop_map(|(d, c)| Op::Map(d, c)),
        6 => (number(), number()).prop_map(|(m, c)| Op::Unmap(m, c)),
        2 => (number(), number(), prop::bool::ANY).prop_map(|(m, c, o)| Op::UnmapDead(m, c, o)),
        2 => (number(), number()).prop_map(|(d, c)| Op::EndBurst(d, c)),
        1 => number().prop_map(Op::Retire),
        1 => Just(Op::Tick),
        1 => Just(Op::Fail),
    ]
}

struct World<A: Make, F: FlushPolicy<Space<A, Cached>, u64>> {
    board: Board,
    dma: Dma<Space<A, Cached>, F, u64>,
    cpus: Vec<Cpu<Space<A, Cached>, F, u64>>,
    /// One entry per device.
    attached: Vec<Attachment>,
    gone: Vec<Attachment>,
    live: Vec<(Attachment, Mapping<u64>)>,
    dead: Vec<(Attachment, Mapping<u64>)>,
    not_invalidated: Vec<NotInvalidated<u64>>,
    back: BTreeSet<u64>,
    mapped: u64,
    devices: u16,
}

impl<A: Make, F: FlushPolicy<Space<A, Cached>, u64>> World<A, F> {
    fn new(flush: F) -> Self {
        let dma = Dma::new(flush);
        Self {
            board: Board::new(),
            cpus: (0..CPUS).map(|_| dma.cpu()).collect(),
            dma,
            attached: Vec::new(),
            gone: Vec::new(),
            live: Vec::new(),
            dead: Vec::new(),
            not_invalidated: Vec::new(),
            back: BTreeSet::new(),
            mapped: 0,
            devices: 0,
        }
    }

    fn attach(&mut self) {
        self.devices += 1;
        let board = &self.board;
        let at = self
            .dma
            .attach(
                RequesterId::new(self.devices),
                Iova::new(u64::MAX),
                |domain| {
                    let accounts = Accounts::new(A::make(LAST));
                    let table = Cached::make(board, domain);
                    Ok::<_, ()>(Paged::new(accounts, table, Rounding::Exact))
                },
            )
            .unwrap();
        let cached = self.board.port.warm.iter().find(|(d, _)| *d == at.domain());
        assert_eq!(cached, None, "a new domain begins with translations");
        self.attached.push(at);
    }

    fn map(&mut self, at: Attachment, cpu: usize) {
        let (board, cpu) = (&mut self.board, &mut self.cpus[cpu]);
        let buffer = memory(0x10_0000 + self.mapped % 64 * PAGE, 64);
        let both = Direction::Bidirectional;
        match self
            .dma
            .map_single(cpu, board, &at, self.mapped, buffer, both)
        {
            Ok((mapping, _)) => {
                self.mapped += 1;
                let pages = PfnRange::covering(&mapping.range());
                board.port.touch(at.domain(), pages);
                self.live.push((at, mapping));
            }
            Err((_, error)) => assert!(
                matches!(error.reason, MapReason::Alloc(_) | MapReason::Flush(_)),
                "{error}"
            ),
        }
    }

    fn came_back(back: &mut BTreeSet<u64>, buffer: u64) {
        assert!(back.insert(buffer), "{buffer} comes back twice");
    }

    fn unmap(&mut self, index: usize, cpu: usize) {
        let (at, mapping) = self.live.swap_remove(index);
        let (board, cpu) = (&mut self.board, &mut self.cpus[cpu]);
        match self.dma.unmap_single(cpu, board, &at, mapping) {
            Ok(outcome) => {
                if let Some(buffer) = outcome.into_buffer() {
                    Self::came_back(&mut self.back, buffer);
                }
            }
            Err(error) => match error.reason {
                UnmapReason::NotFlushed(_, not_invalidated) => {
                    self.not_invalidated.push(not_invalidated)
                }
                other => panic!("{other:?}"),
            },
        }
    }

    fn unmap_dead(&mut self, index: usize, cpu: usize, by_heir: bool) {
        let (at, mapping) = self.dead.swap_remove(index);
        let buffer = *mapping.buffer();
        let heir = self.attached.iter().find(|a| a.domain() == at.domain());
        let by = *heir.filter(|_| by_heir).unwrap_or(&at);
        let before = self.board.words();
        let (board, cpu) = (&mut self.board, &mut self.cpus[cpu]);
        let error = match self.dma.unmap_single(cpu, board, &by, mapping) {
            Err(error) => error,
            Ok(_) => panic!("{buffer} was unmapped in another domain"),
        };
        match error.reason {
            UnmapReason::Detached(back) => Self::came_back(&mut self.back, back),
            other => panic!("{other:?}"),
        }
        assert_eq!(self.board.words(), before);
    }

    fn detach(&mut self, index: usize, cpu: usize, teardown: Teardown) {
        let at = self.attached[index];
        let same = |other: &Attachment| other.domain() == at.domain();
        let is_last = self.attached.iter().filter(|a| same(a)).count() == 1;
        let used = self.live.iter().any(|(other, _)| same(other));
        let mut disconnected = false;
        let (dma, board, cpu) = (&mut self.dma, &mut self.board, &mut self.cpus[cpu]);
        let back = &mut self.back;
        let logged = board.port.log.len();
        let result = dma.detach(
            cpu,
            board,
            &at,
            teardown,
            |_| disconnected = true,
            |buffer| Self::came_back(back, buffer),
        );
        match result {
            Ok(left) => {
                assert!(disconnected);
                assert_eq!(left.is_some(), is_last);
                assert!(!is_last || !used || teardown == Teardown::Forced);
                // The context first: otherwise the unit could look the domain up again.
                let log = &board.port.log[logged..];
                let context = Invalidation::Context(at.device());
                let context = log.iter().position(|r| *r == context).unwrap();
                let Some(Detached { space, proof }) = left else {
                    self.attached.remove(index);
                    return;
                };
                let domain = Invalidation::Domain(at.domain());
                assert!(log.iter().rposition(|r| *r == domain).unwrap() > context);
                assert_eq!(proof.whole_domain(), at.domain());
                assert_eq!(space.table().0.domain(), at.domain());
                self.attached.remove(index);
                self.gone.push(at);
                let (dead, live) = std::mem::take(&mut self.live)
                    .into_iter()
                    .partition(|(other, _)| same(other));
                self.live = live;
                self.dead.extend::<Vec<_>>(dead);
                // The domain accepts neither a map nor another detach.
                let buffer = memory(0x10_0000, 64);
                let refused = dma.map_single(cpu, board, &at, 0, buffer, Direction::ToDevice);
                assert_eq!(refused.unwrap_err().1.reason, MapReason::NotAttached);
                let again = dma.detach(cpu, board, &at, Teardown::Forced, |_| panic!(), |_| {});
                assert_eq!(again.err().unwrap(), DetachError::NotAttached(at.device()));
            }
            Err(DetachError::MappingsLive(device)) => {
                assert_eq!(device, at.device());
                assert!(is_last && used && teardown == Teardown::IfUnused && !disconnected);
                assert_eq!(board.port.log.len(), logged);
            }
            Err(DetachError::NotFlushed(device, error)) => {
                assert_eq!((device, error), (at.device(), InvalidationError::Failed));
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn end_burst(&mut self, at: Attachment, cpu: usize) {
        let (dma, board, cpu) = (&self.dma, &mut self.board, &mut self.cpus[cpu]);
        let back = &mut self.back;
        // After a failure the buffers stay withheld for the next attempt.
        let _ = dma.end_burst(cpu, board, &at, Direction::Bidirectional, |buffer| {
            Self::came_back(back, buffer);
        });
    }

    fn retire(&mut self, index: usize) {
        let mut cpu = std::mem::replace(&mut self.cpus[index], self.dma.cpu());
        let (dma, board, back) = (&self.dma, &mut self.board, &mut self.back);
        while let Err((_, left)) = dma.remove_cpu(cpu, board, |b| Self::came_back(back, b)) {
            cpu = left;
        }
    }

    fn step(&mut self, op: Op) {
        let pick = |index: usize, of: usize| (of > 0).then(|| index % of);
        match op {
            Op::Attach if self.attached.len() < 4 => self.attach(),
            Op::Attach => {}
            Op::Share(index) => {
                if let Some(index) = pick(index, self.attached.len()) {
                    self.devices += 1;
                    let (device, mask) = (RequesterId::new(self.devices), Iova::new(u64::MAX));
                    let at = self.dma.attach_to(device, mask, &self.attached[index]);
                    self.attached.push(at.unwrap());
                }
            }
            Op::Detach(index, cpu, forced) => {
                if let Some(index) = pick(index, self.attached.len()) {
                    let teardown = if forced {
                        Teardown::Forced
                    } else {
                        Teardown::IfUnused
                    };
                    self.detach(index, cpu % CPUS, teardown);
                }
            }
            Op::Map(index, cpu) => {
                if let Some(index) = pick(index, self.attached.len()) {
                    self.map(self.attached[index], cpu % CPUS);
                }
            }
            Op::Unmap(index, cpu) => {
                if let Some(index) = pick(index, self.live.len()) {
                    self.unmap(index, cpu % CPUS);
                }
            }
            Op::UnmapDead(index, cpu, by_heir) => {
                if let Some(index) = pick(index, self.dead.len()) {
                    self.unmap_dead(index, cpu % CPUS, by_heir);
                }
            }
            Op::EndBurst(index, cpu) => {
                let all: Vec<_> = self.attached.iter().chain(&self.gone).copied().collect();
                if let Some(index) = pick(index, all.len()) {
                    self.end_burst(all[index], cpu % CPUS);
                }
            }
            Op::Retire(index) => self.retire(index % CPUS),
            Op::Tick => {
                self.board.now = Nanos(self.board.now.0 + 3);
                let _ = self.dma.tick(&mut self.cpus[0], &mut self.board);
            }
            Op::Fail => self.board.port.fail(0, 1, InvalidationFailure::Failed),
        }
    }

    /// Unmaps and removes everything. No buffer and no address may be missing.
    fn finish(&mut self) {
        self.board.port.trouble = None;
        while !self.live.is_empty() {
            self.unmap(0, 0);
        }
        while !self.dead.is_empty() {
            self.unmap_dead(0, 1, true);
        }
        for not_invalidated in std::mem::take(&mut self.not_invalidated) {
            let (cpu, board) = (&mut self.cpus[0], &mut self.board);
            let settled = self
                .dma
                .retry_invalidation(cpu, board, not_invalidated)
                .unwrap();
            Self::came_back(&mut self.back, settled.0);
        }
        for index in 0..CPUS {
            self.retire(index);
        }
        assert_eq!(self.back, (0..self.mapped).collect());
        let mut cpu = self.dma.cpu();
        for at in &self.attached {
            self.dma.flush(&mut cpu, &mut self.board, at).unwrap();
            let out = self.dma.space(at).unwrap().allocator().out.borrow();
            assert!(out.is_empty(), "{out:?} of {} is lost", at.domain());
        }
        assert!(
            self.dma
                .remove_cpu(cpu, &mut self.board, |_| panic!())
                .is_ok()
        );
        while !self.attached.is_empty() {
            let before = self.attached.len();
            self.detach(0, 0, Teardown::IfUnused);
            assert_eq!(self.attached.len(), before - 1);
        }
    }
}

fn check<A: Make, F: FlushPolicy<Space<A, Cached>, u64>>(flush: F, ops: &[Op]) {
    let mut world = World::<A, F>::new(flush);
    for op in ops {
        world.step(*op);
    }
    world.finish();
}

type One = RefCell<ringfence_dma::flush::FlushQueue>;

fn queues() -> PerCpuQueue<One, RefCell<Vec<std::sync::Arc<One>>>> {
    let config = QueueConfig {
        entries: 3,
        timeout_ns: 5,
    };
    PerCpuQueue::new(config, RefCell::new, RefCell::new)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn domains_come_and_go_under_every_policy(ops in prop::collection::vec(op(), 1..80)) {
        check::<Tree, _>(Strict, &ops);
        check::<Product, _>(Strict, &ops);
        check::<Tree, _>(Burst::new(3), &ops);
        check::<Product, _>(Burst::new(3), &ops);
        check::<Product, _>(Deferred::with(3, 5, RefCell::new), &ops);
        check::<Tree, _>(queues(), &ops);
        check::<Bits, _>(PerWrap, &ops);
    }
}

/// Scatterlists, coherent memory and withheld buffers that outlive their domain.
#[test]
fn other_tokens_outlive_their_domain() {
    let mut rig = Rig::<Tree, Plain, Strict, u64>::new(Strict);
    let (board, dma, cpu, at) = rig.parts();
    let both = Direction::Bidirectional;
    let rings = dma.alloc_coherent(cpu, board, at, 2).unwrap();
    let request = |buffer| MapMultiRequest {
        buffer,
        memory: memory(buffer * PAGE, 64),
        direction: both,
    };
    let many = dma
        .map_multi(cpu, board, at, vec![request(1), request(2)])
        .unwrap();
    let pool = dma.premap(cpu, board, at, vec![request(3)]).unwrap();
    let (not_invalidated, _) = dma
        .map_single(cpu, board, at, 4, memory(0, 1), both)
        .unwrap();
    board.port.fail(0, 1, InvalidationFailure::Failed);
    let UnmapReason::NotFlushed(_, not_invalidated) = dma
        .unmap_single(cpu, board, at, not_invalidated)
        .unwrap_err()
        .reason
    else {
        panic!("no failed invalidation");
    };
    let left = dma
        .detach(cpu, board, at, Teardown::Forced, |_| {}, |_| panic!())
        .unwrap()
        .unwrap();
    // All frames belong to the table, except the two pages of the rings.
    let table = left.space.table().bytes() / PAGE;
    assert_eq!(board.frames.outstanding() as u64, table + 2);
    let heir = dma
        .attach(DEVICE, Iova::new(u64::MAX), |domain| {
            let accounts = Accounts::new(Tree::make(LAST));
            let table = Plain::make(board, domain);
            Ok::<_, ()>(Paged::new(accounts, table, Rounding::Exact))
        })
        .unwrap();
    assert_eq!(heir.domain(), at.domain());
    let asked = board.port.log.len();
    let before = board.frames.outstanding();
    let mut back = Vec::new();
    dma.unmap_multi(cpu, board, &heir, many, |b| back.push(b))
        .unwrap();
    dma.unmap_premapped(cpu, board, pool, |b| back.push(b))
        .unwrap();
    back.push(
        dma.retry_invalidation(cpu, board, not_invalidated)
            .unwrap()
            .0,
    );
    assert_eq!(back, [1, 2, 3, 4]);
    dma.free_coherent(cpu, board, &heir, rings).unwrap();
    assert_eq!(board.frames.outstanding(), before - 2);
    assert_eq!(
        board.port.log.len(),
        asked,
        "there is nothing to invalidate"
    );
}

#[test]
fn bounce_buffers_of_a_detached_domain_are_dropped() {
    let mut board = Board::new();
    let pool = BouncePool::new(memory(0, 128 << 10)).unwrap();
    let mut dma = Dma::<Identity, Never, u64>::new(Never).with_bounce(pool);
    let at = dma
        .attach(DEVICE, Iova::new((1 << 20) - 1), |domain| {
            Ok::<_, ()>(Identity::new(domain))
        })
        .unwrap();
    let mut cpu = dma.cpu();
    let (far, both) = (memory(2 << 20, 64), Direction::Bidirectional);
    let (one, _) = dma
        .map_single(&mut cpu, &mut board, &at, 1, far, both)
        .unwrap();
    let (two, _) = dma
        .map_single(&mut cpu, &mut board, &at, 2, far, both)
        .unwrap();
    let mut out = [DmaSegment { range: one.range() }; 2];
    let request = SgRequest {
        buffer: 3,
        pieces: &[far, far],
        direction: both,
        limits: SgLimits::default(),
        out: &mut out,
    };
    let (list, _) = dma.map_sg(&mut cpu, &mut board, &at, request).unwrap();
    assert_eq!(dma.bounce().unwrap().in_use(), 4);
    let _ = dma
        .detach(
            &mut cpu,
            &mut board,
            &at,
            Teardown::IfUnused,
            |_| {},
            |_| {},
        )
        .unwrap()
        .unwrap();
    for error in [
        dma.unmap_single(&mut cpu, &mut board, &at, one)
            .unwrap_err(),
        dma.unmap_sg(&mut cpu, &mut board, &at, list).unwrap_err(),
    ] {
        assert!(matches!(error.reason, UnmapReason::Detached(1 | 3)));
    }
    dma.unmap_multi(&mut cpu, &mut board, &at, vec![two], |buffer| {
        assert_eq!(buffer, 2);
    })
    .unwrap();
    assert_eq!(dma.bounce().unwrap().in_use(), 0);
}

/// Addresses in a removed CPU's magazines and in its queue are freed.
#[test]
fn retired_cpu_frees_everything() {
    fn check<F: FlushPolicy<Space<Product, Cached>, u64>>(flush: F) {
        let mut rig = Rig::<Product, Cached, F, u64>::new(flush);
        let Rig { board, dma, at, .. } = &mut rig;
        let free = |dma: &Dma<_, F, _>| {
            let space: &Space<_, Cached> = dma.space(at).unwrap();
            space.allocator().inner().free_pages()
        };
        let all = free(dma);
        let mut cpu = dma.cpu();
        for buffer in 0..20 {
            let memory = memory(0x10_0000, (1 + buffer % 3) * PAGE);
            let direction = [Direction::ToDevice, Direction::FromDevice][buffer as usize % 2];
            let (mapping, _) = dma
                .map_single(&mut cpu, board, at, buffer, memory, direction)
                .unwrap();
            let _ = dma.unmap_single(&mut cpu, board, at, mapping).unwrap();
        }
        assert!(free(dma) < all, "magazines hold something");
        // A failure keeps the state for the next attempt.
        board.port.fail(0, 1, InvalidationFailure::Failed);
        let mut back = Vec::new();
        while let Err((_, left)) = dma.remove_cpu(cpu, board, |buffer| back.push(buffer)) {
            cpu = left;
        }
        board.port.trouble = None;
        assert!(matches!(back.len(), 0 | 20));
        let mut other = dma.cpu();
        dma.flush(&mut other, board, at).unwrap();
        assert!(dma.remove_cpu(other, board, |_| panic!()).is_ok());
        assert_eq!(free(dma), all);
    }
    check(Strict);
    check(Burst::new(4));
    check(queues());
}
