//! How data walks: the exact order of what happens to a two-segment, 9000-byte scatterlist towards the device, in every flush policy and
//! when it fails half-way. `docs/WALK.md` names the functions on the way; the last test checks that they exist.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::{
    Burst, Deferred, Flush, PerCpuQueue, PerWrap, QueueConfig, Ring, Strict,
};
use ringfence_dma::space::{Paged, PlainTable, Rounding, Translations};
use ringfence_dma::{
    Attachment, Cpu, Dma, MapReason, Outcome, Platform, Segment, SgLimits, SgRequest,
};
use ringfence_hw::{Geometry, UnitConfig, VtdUnit};
use ringfence_iova::{
    AllocError, Allocation, Bitmap, BitmapState, CachedTree, IovaAllocator, Locked, Request,
    Returned,
};
use ringfence_memory::fake::FaultyFrames;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, MapError, MapRequest, SecondStage, Table,
    Translation, UnmapError,
};
use ringfence_types::{
    Access, CachedLevels, DeviceId, Direction, DomainId, FaultReason, Flushed, Invalidation,
    InvalidationError, Invalidator, Iova, IovaRange, Nanos, Pfn, PfnRange, PhysAddr, PhysRange,
    Ticket, Unmapped, WholeDomain,
};

use crate::bench::memory;

/// What happens, in the order in which it does.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Event {
    /// The allocator found this many pages from this one on.
    Alloc(u64, u64),
    /// The allocator was asked for the range around a page.
    Find(u64),
    /// The table took this many pages from this one on.
    Install(u64, u64),
    /// It refused.
    Refuse(MapError),
    /// What was stored is visible to the hardware.
    Sync,
    /// The hardware let an access through to here.
    Reach(u64, u64),
    /// The hardware stopped it.
    Stop(FaultReason),
    /// The table lost this many pages from this one on.
    Clear(u64, u64),
    /// An invalidation was submitted.
    Submit(Invalidation),
    /// It was seen to be complete.
    Complete,
    /// The allocator took pages back.
    Free(u64, u64),
    /// The driver has its buffer back.
    Back(u64),
    /// It has not.
    Withheld,
}

use Event::*;

type Log = Rc<RefCell<Vec<Event>>>;

struct Allocator<A> {
    inner: A,
    log: Log,
}

impl<A: IovaAllocator> IovaAllocator for Allocator<A> {
    type PerCpu = A::PerCpu;
    type Returned = A::Returned;

    fn per_cpu(&self) -> A::PerCpu {
        self.inner.per_cpu()
    }

    fn alloc(&self, cpu: &mut A::PerCpu, request: &Request) -> Result<Allocation, AllocError> {
        let found = self.inner.alloc(cpu, request)?;
        let range = found.range;
        self.log
            .borrow_mut()
            .push(Alloc(range.lo().get(), range.pages()));
        Ok(found)
    }

    fn find(&self, cpu: &mut A::PerCpu, page: Pfn) -> Option<PfnRange> {
        self.log.borrow_mut().push(Find(page.get()));
        self.inner.find(cpu, page)
    }

    fn free(&self, cpu: &mut A::PerCpu, range: A::Returned) -> bool {
        let pages = range.range();
        self.log
            .borrow_mut()
            .push(Free(pages.lo().get(), pages.pages()));
        self.inner.free(cpu, range)
    }

    fn flushed(&self, cpu: &mut A::PerCpu, proof: Flushed<WholeDomain>) {
        self.inner.flushed(cpu, proof);
    }

    fn footprint(&self) -> usize {
        self.inner.footprint()
    }
}

struct Traced {
    inner: PlainTable<SecondStage>,
    log: Log,
}

impl Traced {
    fn note(&self, request: MapRequest, made: Result<(), MapError>) -> Result<(), MapError> {
        self.log.borrow_mut().push(match made {
            Ok(()) => Install(Pfn::containing(request.iova).get(), request.pages),
            Err(error) => Refuse(error),
        });
        made
    }
}

impl Translations for Traced {
    type PerCpu = ringfence_pgtable::Dirty;
    type Pages = ();

    fn per_cpu(&self) -> Self::PerCpu {
        self.inner.per_cpu()
    }

    fn domain(&self) -> DomainId {
        self.inner.domain()
    }

    fn map<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.note(request, self.inner.map(cpu, platform, request))
    }

    fn map_deferred<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.note(request, self.inner.map_deferred(cpu, platform, request))
    }

    fn unmap<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        let done = self.inner.unmap(cpu, platform, range)?;
        self.log
            .borrow_mut()
            .push(Clear(range.lo().get(), range.pages()));
        Ok(done)
    }

    fn is_empty<P: Platform>(&self, platform: &P) -> bool {
        self.inner.is_empty(platform)
    }

    fn sync<P: Platform>(&self, cpu: &mut Self::PerCpu, platform: &mut P) {
        self.log.borrow_mut().push(Sync);
        self.inner.sync(cpu, platform);
    }
}

struct Watched {
    unit: VtdUnit,
    log: Log,
}

impl Invalidator for Watched {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.log.borrow_mut().push(Submit(request));
        self.unit.submit(request)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        let done = self.unit.poll(ticket)?;
        self.log.borrow_mut().push(Complete);
        Ok(done)
    }
}

struct Board {
    arena: Rc<Arena>,
    frames: FaultyFrames<Frames<Rc<Arena>>>,
    port: Watched,
    now: Nanos,
}

impl Platform for Board {
    type Memory = Arena;
    type Frames = FaultyFrames<Frames<Rc<Arena>>>;
    type Invalidator = Watched;

    fn memory(&self) -> &Arena {
        &self.arena
    }

    fn frames(&self) -> &Self::Frames {
        &self.frames
    }

    fn invalidator(&mut self) -> &mut Watched {
        &mut self.port
    }

    fn now(&self) -> Nanos {
        self.now
    }
}

type Tree = Locked<CachedTree, RefCell<CachedTree>>;
type Bits = Bitmap<RefCell<BitmapState>>;
type Space<A> = Paged<Allocator<A>, Traced>;

const DEVICE: DeviceId = DeviceId::new(0x18);
/// Four pages that lie astride two leaf tables, so that a failure can come between them.
const FIRST: u64 = 0x1fe;

struct Walk<A: IovaAllocator, F: Flush<Space<A>, u64>> {
    board: Board,
    dma: Dma<Space<A>, F, u64>,
    cpu: Cpu<Space<A>, F, u64>,
    at: Attachment,
    log: Log,
}

/// 9000 bytes: three pages from the middle of one, and one page.
fn pieces() -> [PhysRange; 2] {
    [memory(0x10_0800, 4100), memory(0x20_0010, 4900)]
}

impl<A: IovaAllocator, F: Flush<Space<A>, u64>> Walk<A, F> {
    fn new(alloc: A, flush: F) -> Self {
        let log = Log::default();
        let arena = Rc::new(Arena::new(8 << 20).unwrap());
        let region = PhysRange::new(PhysAddr::new(4 << 20), 4 << 20).unwrap();
        let frames = FaultyFrames::new(Frames::new(Rc::clone(&arena), region));
        let config = UnitConfig {
            iotlb: Geometry::new(16, 4).unwrap(),
            walk_caches: [Geometry::new(1, 4).unwrap(); 3],
            ..UnitConfig::UNCACHED
        };
        let coherency = Coherency::Coherent;
        let mut contexts = ContextTables::new(coherency, &*arena, &frames).unwrap();
        let mut unit = VtdUnit::vtd(&config);
        unit.set_root_table(contexts.root());
        unit.enable();
        let mut dma = Dma::new(flush);
        let mut root = PhysAddr::ZERO;
        let at = dma
            .attach(DEVICE, Iova::new(u64::MAX), |domain| {
                let format = SecondStage::new(Levels::Four);
                let table = Table::new(format, domain, coherency, &*arena, &frames).unwrap();
                root = table.root();
                let table = Traced {
                    inner: PlainTable(table),
                    log: Rc::clone(&log),
                };
                let alloc = Allocator {
                    inner: alloc,
                    log: Rc::clone(&log),
                };
                Ok::<_, ()>(Paged::new(alloc, table, Rounding::Exact))
            })
            .unwrap();
        let context = Context {
            domain: at.domain(),
            translation: Translation::Table {
                root,
                levels: Levels::Four,
            },
        };
        contexts.attach(&*arena, &frames, DEVICE, &context).unwrap();
        let port = Watched {
            unit,
            log: Rc::clone(&log),
        };
        Self {
            board: Board {
                arena,
                frames,
                port,
                now: Nanos(0),
            },
            cpu: dma.cpu(),
            dma,
            at,
            log,
        }
    }

    fn access(&mut self, iova: Iova, bytes: u64, access: Access) {
        let (unit, arena) = (&mut self.board.port.unit, &*self.board.arena);
        let found = unit.translate(arena, DEVICE, iova, bytes, access);
        let mut log = self.log.borrow_mut();
        match found {
            Ok(ranges) => log.extend(ranges.iter().map(|r| Reach(r.start().get(), r.bytes()))),
            Err(fault) => log.push(Stop(fault.reason)),
        }
    }

    fn take(&self) -> Vec<Event> {
        std::mem::take(&mut *self.log.borrow_mut())
    }

    /// Map, access, a wrong access, unmap, access: everything up to the moment when unmap has returned.
    fn there_and_back(&mut self) -> Vec<Event> {
        let nothing = IovaRange::new(Iova::ZERO, 1).unwrap();
        let mut out = [Segment { range: nothing }; 2];
        let Self {
            board,
            dma,
            cpu,
            at,
            ..
        } = self;
        let (direction, limits) = (Direction::ToDevice, SgLimits::default());
        let (mapping, count) = dma
            .map_sg(
                cpu,
                board,
                at,
                SgRequest {
                    buffer: 7,
                    pieces: &pieces(),
                    direction,
                    limits,
                    out: &mut out,
                },
            )
            .unwrap();
        assert_eq!(count, 2);
        let [first, second] = out.map(|segment| segment.range);
        self.access(first.start(), first.bytes(), Access::Read);
        self.access(second.start(), second.bytes(), Access::Read);
        self.access(first.start(), 1, Access::Write);
        let Self {
            board,
            dma,
            cpu,
            at,
            ..
        } = self;
        let outcome = dma.unmap_sg(cpu, board, at, mapping).unwrap();
        let back = outcome.into_buffer().map_or(Withheld, Back);
        self.log.borrow_mut().push(back);
        self.access(first.start(), 1, Access::Read);
        self.take()
    }
}

fn tree() -> Tree {
    let space = PfnRange::inclusive(Pfn::new(1), Pfn::new(FIRST + 3)).unwrap();
    Locked::new(CachedTree::new(space), RefCell::new)
}

fn bits() -> Bits {
    let space = PfnRange::inclusive(Pfn::new(FIRST), Pfn::new(FIRST + 7)).unwrap();
    Bitmap::new(space, RefCell::new).unwrap()
}

const DOMAIN: DomainId = DomainId::new(1);

/// The invalidation of exactly the four pages.
fn by_address() -> Invalidation {
    Invalidation::Pages {
        domain: DOMAIN,
        range: PfnRange::new(Pfn::new(FIRST), 4).unwrap(),
        levels: CachedLevels::Leaves,
    }
}

/// Up to unmap's return all policies are alike: what differs is what follows `Clear`.
fn expected(find_at_unmap: bool, rest: &[Event]) -> Vec<Event> {
    let mut events = vec![
        Alloc(FIRST, 4),
        Install(FIRST, 2),
        Install(FIRST + 2, 2),
        Sync,
        Reach(0x10_0800, 4100),
        Reach(0x20_0010, 4900),
        Stop(FaultReason::WriteDenied),
    ];
    if find_at_unmap {
        events.push(Find(FIRST));
    }
    events.push(Clear(FIRST, 4));
    events.extend_from_slice(rest);
    events
}

#[test]
fn strict() {
    let mut walk = Walk::new(tree(), Strict);
    let rest = [
        Sync,
        Submit(by_address()),
        Complete,
        Free(FIRST, 4),
        Back(7),
        Stop(FaultReason::NotPresent),
    ];
    assert_eq!(walk.there_and_back(), expected(true, &rest));
}

#[test]
fn deferred() {
    let flush = Deferred::with(10, 1000, RefCell::new);
    let mut walk = Walk::new(tree(), flush);
    // The buffer is back and the device still reaches it.
    let rest = [Sync, Back(7), Reach(0x10_0800, 1)];
    assert_eq!(walk.there_and_back(), expected(true, &rest));
    let Walk {
        board, dma, cpu, ..
    } = &mut walk;
    board.now = Nanos(999);
    dma.tick(cpu, board).unwrap();
    assert_eq!(walk.take(), []);
    let Walk {
        board, dma, cpu, ..
    } = &mut walk;
    board.now = Nanos(1000);
    dma.tick(cpu, board).unwrap();
    let done = [Sync, Submit(Invalidation::Global), Complete, Free(FIRST, 4)];
    assert_eq!(walk.take(), done);
}

#[test]
fn per_cpu_queue() {
    type One = RefCell<Ring>;
    let config = QueueConfig {
        entries: 10,
        timeout_ns: 1000,
    };
    let flush = PerCpuQueue::<One, RefCell<Vec<std::sync::Arc<One>>>>::new(
        config,
        RefCell::new,
        RefCell::new,
    );
    let mut walk = Walk::new(tree(), flush);
    let rest = [Sync, Back(7), Reach(0x10_0800, 1)];
    assert_eq!(walk.there_and_back(), expected(true, &rest));
    let Walk {
        board, dma, cpu, ..
    } = &mut walk;
    board.now = Nanos(1000);
    dma.tick(cpu, board).unwrap();
    let done = [
        Sync,
        Submit(Invalidation::Domain(DOMAIN)),
        Complete,
        Free(FIRST, 4),
    ];
    assert_eq!(walk.take(), done);
}

#[test]
fn burst() {
    let mut walk = Walk::new(tree(), Burst::default());
    let rest = [Withheld, Reach(0x10_0800, 1)];
    assert_eq!(walk.there_and_back(), expected(true, &rest));
    let log = Rc::clone(&walk.log);
    let Walk {
        board,
        dma,
        cpu,
        at,
        ..
    } = &mut walk;
    dma.end_burst(cpu, board, at, Direction::ToDevice, |b| {
        log.borrow_mut().push(Back(b))
    })
    .unwrap();
    walk.access(Pfn::new(FIRST).iova(), 1, Access::Read);
    let done = [
        Sync,
        Submit(by_address()),
        Complete,
        Free(FIRST, 4),
        Back(7),
        Stop(FaultReason::NotPresent),
    ];
    assert_eq!(walk.take(), done);
}

#[test]
fn per_wrap() {
    let mut walk = Walk::new(bits(), PerWrap);
    // Free at once, and not handed out before the flush that the second wrap asks for.
    let rest = [Sync, Free(FIRST, 4), Back(7), Reach(0x10_0800, 1)];
    assert_eq!(walk.there_and_back(), expected(true, &rest));
    let Walk {
        board,
        dma,
        cpu,
        at,
        ..
    } = &mut walk;
    let mut map = |board: &mut Board| {
        let buffer = memory(0, 4 * 4096);
        let made = dma.map_single(cpu, board, at, 8, buffer, Direction::ToDevice);
        assert!(made.is_ok());
    };
    map(board);
    map(board);
    let done = [
        Alloc(FIRST + 4, 4),
        Install(FIRST + 4, 4),
        Sync,
        Submit(Invalidation::Domain(DOMAIN)),
        Complete,
        Alloc(FIRST, 4),
        Install(FIRST, 4),
    ];
    assert_eq!(walk.take(), done);
}

/// The second piece finds no frame for its leaf table: the first is cleared and purged before its addresses are free again.
#[test]
fn rolled_back_half_way() {
    let mut walk = Walk::new(tree(), Strict);
    // The root exists: two tables above the leaves, and the first leaf table.
    walk.board.frames.fail_after(3);
    let nothing = IovaRange::new(Iova::ZERO, 1).unwrap();
    let mut out = [Segment { range: nothing }; 2];
    let Walk {
        board,
        dma,
        cpu,
        at,
        ..
    } = &mut walk;
    let (direction, limits) = (Direction::ToDevice, SgLimits::default());
    let (buffer, error) = dma
        .map_sg(
            cpu,
            board,
            at,
            SgRequest {
                buffer: 7,
                pieces: &pieces(),
                direction,
                limits,
                out: &mut out,
            },
        )
        .unwrap_err();
    assert_eq!(buffer, 7);
    assert_eq!(error.reason, MapReason::Table(MapError::OutOfFrames));
    walk.access(Pfn::new(FIRST).iova(), 1, Access::Read);
    let done = [
        Alloc(FIRST, 4),
        Install(FIRST, 2),
        Refuse(MapError::OutOfFrames),
        Clear(FIRST, 2),
        Sync,
        Submit(by_address()),
        Complete,
        Free(FIRST, 4),
        Stop(FaultReason::NotPresent),
    ];
    assert_eq!(walk.take(), done);
    // And with frames again, as if nothing had happened.
    walk.board.frames.recover();
    assert_eq!(walk.there_and_back().len(), expected(true, &[]).len() + 6);
}

/// No room for the device's segments: refused before anything happens where that is sure, undone where it is not.
#[test]
fn rolled_back_for_want_of_room() {
    let nothing = IovaRange::new(Iova::ZERO, 1).unwrap();
    let mut walk = Walk::new(tree(), Strict);
    let mut map = |limits, room: usize| {
        let mut out = vec![Segment { range: nothing }; room];
        let Walk {
            board,
            dma,
            cpu,
            at,
            ..
        } = &mut walk;
        let direction = Direction::ToDevice;
        let (_, error) = dma
            .map_sg(
                cpu,
                board,
                at,
                SgRequest {
                    buffer: 7,
                    pieces: &pieces(),
                    direction,
                    limits,
                    out: &mut out,
                },
            )
            .unwrap_err();
        assert_eq!(error.reason, MapReason::TooManySegments);
        walk.take()
    };
    assert_eq!(map(SgLimits::default(), 1), []);
    let boundary = SgLimits {
        max_bytes: 65536,
        boundary: Some(4096),
    };
    let undone = [
        Alloc(FIRST, 4),
        Install(FIRST, 2),
        Install(FIRST + 2, 2),
        Sync,
        Find(FIRST),
        Clear(FIRST, 4),
        Sync,
        Submit(by_address()),
        Complete,
        Free(FIRST, 4),
    ];
    assert_eq!(map(boundary, 3), undone);
}

/// Every `file` and function that the document names exists.
#[test]
fn the_document_names_what_exists() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let text = std::fs::read_to_string(format!("{root}/docs/WALK.md")).unwrap();
    let mut steps = 0;
    for line in text.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        let [_, step, file, functions, ..] = cells[..] else {
            continue;
        };
        if step.parse::<u32>().is_err() {
            continue;
        }
        let Some(file) = file.strip_prefix('`').and_then(|f| f.strip_suffix('`')) else {
            continue;
        };
        let source = std::fs::read_to_string(format!("{root}/crates/{file}"))
            .unwrap_or_else(|_| panic!("{file} does not exist: {line}"));
        for function in functions
            .split(',')
            .map(|name| name.trim().trim_matches('`'))
        {
            let defined = format!("fn {function}");
            let found = source
                .match_indices(&defined)
                .any(|(at, _)| source[at + defined.len()..].starts_with(['(', '<']));
            assert!(found, "{file} has no {function}: {line}");
            steps += 1;
        }
    }
    assert!(steps >= 15, "{steps} steps");
}
