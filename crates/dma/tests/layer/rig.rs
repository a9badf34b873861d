//! A machine with memory, a limited supply of frames, and an allocator that records its ranges. Its
//! invalidation port can fail, and records the pages that devices may still reach.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use ringfence_dma::flush::FlushPolicy;
use ringfence_dma::space::{IoPageTable, LeafCachedTable, Paged, PlainTable, Reclaiming, Rounding};
use ringfence_dma::{Attachment, Cpu, Dma, Platform};
use ringfence_iova::{
    AllocError, AllocRequest, Allocation, Bitmap, BitmapState, CachedTree, Depot, FreeProof,
    IovaAllocator, Locked, MagazineLimits, Magazines,
};
use ringfence_memory::fake::FaultyFrames;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, Levels, ReclaimingTable, SecondStage, Table};
use ringfence_types::{
    CachedLevels, DomainId, Flushed, Invalidation, InvalidationError, Invalidator, Iova, Nanos,
    Pfn, PfnRange, PhysAddr, PhysMemory, PhysRange, RequesterId, Ticket, WholeDomain,
};

pub(crate) const PAGE: u64 = 4096;
/// End of the buffers.
pub(crate) const DATA: u64 = 16 << 20;
/// Start of the tables, above the buffers.
pub(crate) const TABLES: u64 = DATA;
const TABLE_BYTES: u64 = 256 << 10;
/// The last I/O virtual page: eight leaf tables cover the space.
pub(crate) const LAST_PAGE: u64 = 0xfff;

/// The failure of an invalidation.
#[derive(Debug, Clone, Copy)]
pub(crate) enum InvalidationFailure {
    /// The port rejects the request.
    Full,
    /// The port accepts the request, which then fails.
    Failed,
    /// The port rejects the first of the requests. It accepts the others, which then fail.
    FullThenFailed,
}

/// The invalidation port, with the pages that devices may reach through their caches.
#[derive(Debug, Default)]
pub(crate) struct Port {
    pub(crate) log: Vec<Invalidation>,
    /// The range of requests that fail, and their failure.
    pub(crate) trouble: Option<(std::ops::Range<usize>, InvalidationFailure)>,
    pub(crate) warm: BTreeSet<(DomainId, u64)>,
    failed: BTreeSet<u64>,
}

impl Port {
    /// Records that a device has used these pages, which caches them.
    pub(crate) fn touch(&mut self, domain: DomainId, pages: PfnRange) {
        for page in pages.lo().get()..=pages.hi().get() {
            self.warm.insert((domain, page));
        }
    }

    pub(crate) fn reaches(&self, domain: DomainId, pages: PfnRange) -> bool {
        (pages.lo().get()..=pages.hi().get()).any(|page| self.warm.contains(&(domain, page)))
    }

    /// Makes `count` requests fail, after `skip` successful ones.
    pub(crate) fn fail(&mut self, skip: usize, count: usize, trouble: InvalidationFailure) {
        let first = self.log.len() + skip;
        self.trouble = Some((first..first.saturating_add(count), trouble));
    }
}

impl Invalidator for Port {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        let number = self.log.len();
        self.log.push(request);
        let trouble = match &self.trouble {
            Some((range, InvalidationFailure::FullThenFailed)) if range.start == number => {
                Some(InvalidationFailure::Full)
            }
            Some((range, trouble)) if range.contains(&number) => Some(*trouble),
            _ => None,
        };
        match trouble {
            Some(InvalidationFailure::Full) => return Err(InvalidationError::QueueFull),
            Some(InvalidationFailure::Failed | InvalidationFailure::FullThenFailed) => {
                self.failed.insert(number as u64);
            }
            None => self.warm.retain(|(domain, page)| {
                let page = PfnRange::new(Pfn::new(*page), 1).unwrap();
                !request.covers(*domain, &page, CachedLevels::Leaves)
            }),
        }
        Ok(Ticket::new(number as u64))
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        if self.failed.contains(&ticket.get()) {
            return Err(InvalidationError::Failed);
        }
        Ok(true)
    }
}

/// The memory, the frames, the invalidation port and the clock.
pub(crate) struct Board {
    pub(crate) arena: Rc<Arena>,
    pub(crate) frames: FaultyFrames<Frames<Rc<Arena>>>,
    pub(crate) port: Port,
    pub(crate) now: Nanos,
}

impl Board {
    pub(crate) fn new() -> Self {
        let arena = Rc::new(Arena::new(DATA + TABLE_BYTES).unwrap());
        let region = PhysRange::new(PhysAddr::new(TABLES), TABLE_BYTES).unwrap();
        Self {
            frames: FaultyFrames::new(Frames::new(Rc::clone(&arena), region)),
            arena,
            port: Port::default(),
            now: Nanos(0),
        }
    }

    /// Returns every word of every table.
    pub(crate) fn words(&self) -> Vec<u64> {
        let words = (TABLE_BYTES / 8) as usize;
        self.arena
            .words(PhysAddr::new(TABLES), words)
            .unwrap()
            .iter()
            .map(|word| word.load(std::sync::atomic::Ordering::Relaxed))
            .collect()
    }
}

impl Platform for Board {
    type Memory = Arena;
    type Frames = FaultyFrames<Frames<Rc<Arena>>>;
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

/// An allocator that fails on demand, and checks that every range is freed once, exactly as it was
/// allocated.
pub(crate) struct Accounts<A> {
    inner: A,
    pub(crate) out: RefCell<BTreeMap<u64, PfnRange>>,
    pub(crate) asked: Cell<u64>,
    /// The number of the first request that fails, and its error.
    pub(crate) fail: Cell<Option<(u64, AllocError)>>,
    /// The work of another CPU during the next request that fails.
    pub(crate) meanwhile: Cell<Option<Box<dyn FnOnce()>>>,
}

impl<A> Accounts<A> {
    pub(crate) fn new(inner: A) -> Self {
        Self {
            inner,
            out: RefCell::default(),
            asked: Cell::new(0),
            fail: Cell::new(None),
            meanwhile: Cell::new(None),
        }
    }

    pub(crate) fn inner(&self) -> &A {
        &self.inner
    }

    pub(crate) fn fail_after(&self, count: u64, error: AllocError) {
        self.fail.set(Some((self.asked.get() + count, error)));
    }
}

impl<A: IovaAllocator> IovaAllocator for Accounts<A> {
    type PerCpu = A::PerCpu;
    type FreeProof = A::FreeProof;

    fn per_cpu(&self) -> A::PerCpu {
        self.inner.per_cpu()
    }

    fn alloc(&self, cpu: &mut A::PerCpu, request: &AllocRequest) -> Result<Allocation, AllocError> {
        let turn = self.asked.get();
        self.asked.set(turn + 1);
        if let Some((from, error)) = self.fail.get()
            && turn >= from
        {
            if let Some(work) = self.meanwhile.take() {
                work();
            }
            return Err(error);
        }
        let found = self.inner.alloc(cpu, request)?;
        let old = self
            .out
            .borrow_mut()
            .insert(found.range.lo().get(), found.range);
        assert_eq!(old, None, "{} is handed out twice", found.range);
        Ok(found)
    }

    fn find(&self, cpu: &mut A::PerCpu, page: Pfn) -> Option<PfnRange> {
        self.inner.find(cpu, page)
    }

    fn free(&self, cpu: &mut A::PerCpu, range: A::FreeProof) -> bool {
        let pages = range.range();
        let was = self.out.borrow_mut().remove(&pages.lo().get());
        assert_eq!(was, Some(pages), "{pages} is freed, {was:?} was handed out");
        assert!(self.inner.free(cpu, range));
        true
    }

    fn flushed(&self, cpu: &mut A::PerCpu, proof: Flushed<WholeDomain>) {
        self.inner.flushed(cpu, proof);
    }

    fn drain(&self, cpu: &mut A::PerCpu) {
        self.inner.drain(cpu);
    }

    fn footprint(&self) -> usize {
        self.inner.footprint()
    }
}

pub(crate) type Tree = Locked<CachedTree, RefCell<CachedTree>>;
pub(crate) type Bits = Bitmap<RefCell<BitmapState>>;
pub(crate) type Product = Magazines<RefCell<Depot>>;
pub(crate) type Plain = PlainTable<SecondStage>;
pub(crate) type Cached = LeafCachedTable<SecondStage>;
pub(crate) type Gas = Reclaiming<SecondStage, RefCell<ReclaimingTable<SecondStage>>>;

/// Allocators that a test can create over pages `1..=last`.
pub(crate) trait Make: IovaAllocator + Sized {
    fn make(last: u64) -> Self;
}

fn pages(last: u64) -> PfnRange {
    PfnRange::inclusive(Pfn::new(1), Pfn::new(last)).unwrap()
}

impl Make for Tree {
    fn make(last: u64) -> Self {
        Locked::new(CachedTree::new(pages(last)), RefCell::new)
    }
}

impl Make for Bits {
    fn make(last: u64) -> Self {
        Bitmap::new(pages(last), RefCell::new).unwrap()
    }
}

impl Make for Product {
    fn make(last: u64) -> Self {
        let limits = MagazineLimits {
            slots: 2,
            magazine_pages: 8,
            cpu_pages: 64,
            total_pages: 128,
        };
        Magazines::new(pages(last), limits, RefCell::new).unwrap()
    }
}

/// Tables that a test can create and read.
pub(crate) trait MakeTable: IoPageTable + Sized {
    fn make(board: &Board, domain: DomainId) -> Self;
    fn leaf(&self, board: &Board, iova: Iova) -> Option<PhysAddr>;
    /// Returns the memory of the tables in bytes, as the table counts it.
    fn bytes(&self) -> u64;
}

fn format() -> SecondStage {
    SecondStage::new(Levels::Four)
}

fn table(board: &Board, domain: DomainId) -> Table<SecondStage> {
    Table::new(
        format(),
        domain,
        Coherency::Coherent,
        &*board.arena,
        &board.frames,
    )
    .unwrap()
}

impl MakeTable for Plain {
    fn make(board: &Board, domain: DomainId) -> Self {
        PlainTable(table(board, domain))
    }

    fn leaf(&self, board: &Board, iova: Iova) -> Option<PhysAddr> {
        Some(self.0.lookup(&*board.arena, iova)?.base)
    }

    fn bytes(&self) -> u64 {
        self.0.table_bytes()
    }
}

impl MakeTable for Cached {
    fn make(board: &Board, domain: DomainId) -> Self {
        LeafCachedTable(table(board, domain))
    }

    fn leaf(&self, board: &Board, iova: Iova) -> Option<PhysAddr> {
        Some(self.0.lookup(&*board.arena, iova)?.base)
    }

    fn bytes(&self) -> u64 {
        self.0.table_bytes()
    }
}

impl MakeTable for Gas {
    fn make(board: &Board, domain: DomainId) -> Self {
        let table = ReclaimingTable::new(
            format(),
            domain,
            Coherency::Coherent,
            &*board.arena,
            &board.frames,
        )
        .unwrap();
        Reclaiming::new(table, RefCell::new)
    }

    fn leaf(&self, board: &Board, iova: Iova) -> Option<PhysAddr> {
        let format = format();
        let cursor = ringfence_pgtable::Cursor::root(&format, self.root());
        ringfence_pgtable::walk(&format, &*board.arena, cursor, iova, |_| {})
            .ok()
            .map(|leaf| leaf.base)
    }

    fn bytes(&self) -> u64 {
        self.table_bytes()
    }
}

pub(crate) type Space<A, T> = Paged<Accounts<A>, T>;

/// A layer with one device and one CPU.
pub(crate) struct Rig<A: IovaAllocator, T: IoPageTable, F: FlushPolicy<Space<A, T>, B>, B> {
    pub(crate) board: Board,
    pub(crate) dma: Dma<Space<A, T>, F, B>,
    pub(crate) cpu: Cpu<Space<A, T>, F, B>,
    pub(crate) at: Attachment,
}

/// The arguments of calls of a layer.
pub(crate) type Parts<'a, S, F, B> = (
    &'a mut Board,
    &'a mut Dma<S, F, B>,
    &'a mut Cpu<S, F, B>,
    &'a Attachment,
);

pub(crate) const DEVICE: RequesterId = RequesterId::new(0x18);

/// The state that a failed call must not change.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) leaves: Vec<(u64, PhysAddr)>,
    pub(crate) ranges: BTreeMap<u64, PfnRange>,
}

impl<A: Make, T: MakeTable, F: FlushPolicy<Space<A, T>, B>, B> Rig<A, T, F, B> {
    pub(crate) fn new(flush: F) -> Self {
        Self::with(flush, LAST_PAGE, Iova::new(u64::MAX), Rounding::Exact)
    }

    pub(crate) fn with(flush: F, last: u64, mask: Iova, rounding: Rounding) -> Self {
        let board = Board::new();
        let mut dma = Dma::new(flush);
        let at = dma
            .attach(DEVICE, mask, |domain| {
                let accounts = Accounts::new(A::make(last));
                Ok::<_, ()>(Paged::new(accounts, T::make(&board, domain), rounding))
            })
            .unwrap();
        let cpu = dma.cpu();
        Self {
            board,
            dma,
            cpu,
            at,
        }
    }

    /// Borrows the arguments of calls of the layer.
    pub(crate) fn parts(&mut self) -> Parts<'_, Space<A, T>, F, B> {
        (&mut self.board, &mut self.dma, &mut self.cpu, &self.at)
    }

    pub(crate) fn space(&self) -> &Space<A, T> {
        self.dma.space(&self.at).unwrap()
    }

    pub(crate) fn accounts(&self) -> &Accounts<A> {
        self.space().allocator()
    }

    /// Asserts that every allocated frame is part of the table.
    pub(crate) fn assert_no_frame_lost(&self) {
        let frames = self.board.frames.outstanding() as u64;
        assert_eq!(frames * PAGE, self.space().table().bytes());
        assert_eq!(self.board.frames.wrong_frees(), 0);
    }

    pub(crate) fn leaf(&self, page: u64) -> Option<PhysAddr> {
        self.space()
            .table()
            .leaf(&self.board, Pfn::new(page).iova())
    }

    pub(crate) fn state(&self) -> State {
        State {
            leaves: (0..=LAST_PAGE)
                .filter_map(|page| Some((page, self.leaf(page)?)))
                .collect(),
            ranges: self.accounts().out.borrow().clone(),
        }
    }
}

pub(crate) fn memory(start: u64, bytes: u64) -> PhysRange {
    PhysRange::new(PhysAddr::new(start), bytes).unwrap()
}
