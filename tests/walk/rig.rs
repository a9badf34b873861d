//! The stacked layers, and the path of one list through them.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::FlushPolicy;
use ringfence_dma::space::{Paged, PlainTable, Rounding};
use ringfence_dma::{
    Attachment, Cpu, Dma, DmaSegment, MapError, Outcome, Platform, SgLimits, SgMapping, SgRequest,
};
use ringfence_hw::{Geometry, UnitConfig, VtdUnit};
use ringfence_iova::{Bitmap, BitmapState, CachedTree, IovaAllocator, Locked};
use ringfence_memory::fake::FaultyFrames;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, SecondStage, Table, TranslationType,
};
use ringfence_types::{
    Access, Direction, Iova, IovaRange, Nanos, Pfn, PfnRange, PhysAddr, PhysRange, RequesterId,
};

use super::traced::Event::{self, *};
use super::traced::{Allocator, Log, Traced, Watched};
use crate::bench::memory;

pub(super) struct Board {
    pub(super) arena: Rc<Arena>,
    pub(super) frames: FaultyFrames<Frames<Rc<Arena>>>,
    pub(super) port: Watched,
    pub(super) now: Nanos,
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

pub(super) type Tree = Locked<CachedTree, RefCell<CachedTree>>;
pub(super) type Bits = Bitmap<RefCell<BitmapState>>;
pub(super) type Space<A> = Paged<Allocator<A>, Traced>;

pub(super) const DEVICE: RequesterId = RequesterId::new(0x18);
/// First of four pages that span two leaf tables, so that a failure can occur between them.
pub(super) const FIRST: u64 = 0x1fe;

pub(super) struct Walk<A: IovaAllocator, F: FlushPolicy<Space<A>, u64>> {
    pub(super) board: Board,
    pub(super) dma: Dma<Space<A>, F, u64>,
    pub(super) cpu: Cpu<Space<A>, F, u64>,
    pub(super) at: Attachment,
    pub(super) log: Log,
}

/// Returns 9000 bytes in two pieces, each on two pages. The first begins in the middle of a page.
pub(super) fn pieces() -> [PhysRange; 2] {
    [memory(0x10_0800, 4100), memory(0x20_0010, 4900)]
}

impl<A: IovaAllocator, F: FlushPolicy<Space<A>, u64>> Walk<A, F> {
    pub(super) fn new(alloc: A, flush: F) -> Self {
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
            translation: TranslationType::Table {
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

    pub(super) fn access(&mut self, iova: Iova, bytes: u64, access: Access) {
        let (unit, arena) = (&mut self.board.port.unit, &*self.board.arena);
        let found = unit.translate(arena, DEVICE, iova, bytes, access);
        let mut log = self.log.borrow_mut();
        match found {
            Ok(ranges) => log.extend(ranges.iter().map(|r| Reach(r.start().get(), r.bytes()))),
            Err(fault) => log.push(Stop(fault.reason)),
        }
    }

    pub(super) fn take(&self) -> Vec<Event> {
        std::mem::take(&mut *self.log.borrow_mut())
    }

    /// Maps the two pieces towards the device.
    pub(super) fn map(
        &mut self,
        limits: SgLimits,
        out: &mut [DmaSegment],
    ) -> Result<(SgMapping<u64>, usize), (u64, MapError)> {
        let Self {
            board,
            dma,
            cpu,
            at,
            ..
        } = self;
        let request = SgRequest {
            buffer: 7,
            pieces: &pieces(),
            direction: Direction::ToDevice,
            limits,
            out,
        };
        dma.map_sg(cpu, board, at, request)
    }

    /// Map, access, a forbidden access, unmap, access: all events up to the return of unmap.
    pub(super) fn there_and_back(&mut self) -> Vec<Event> {
        let nothing = IovaRange::new(Iova::ZERO, 1).unwrap();
        let mut out = [DmaSegment { range: nothing }; 2];
        let (mapping, count) = self.map(SgLimits::default(), &mut out).unwrap();
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

pub(super) fn tree() -> Tree {
    let space = PfnRange::inclusive(Pfn::new(1), Pfn::new(FIRST + 3)).unwrap();
    Locked::new(CachedTree::new(space), RefCell::new)
}

pub(super) fn bits() -> Bits {
    let space = PfnRange::inclusive(Pfn::new(FIRST), Pfn::new(FIRST + 7)).unwrap();
    Bitmap::new(space, RefCell::new).unwrap()
}
