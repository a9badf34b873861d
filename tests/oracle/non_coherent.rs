//! A21: a walker that does not snoop the CPU's caches. A table that skips a write-back, or
//! invalidates before it, leaves the old entries visible to the device.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::{Burst, Deferred, FlushPolicy, Strict};
use ringfence_dma::space::{IoPageTable, LeafCachedTable, Paged, PlainTable, Reclaiming, Rounding};
use ringfence_dma::{Dma, DmaSegment, Platform, SgLimits, SgRequest};
use ringfence_hw::{Geometry, UnitConfig, VtdUnit};
use ringfence_iova::{CachedTree, Locked};
use ringfence_memory::fake::NonCoherent;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, ReclaimingTable, SecondStage, Table, TranslationType,
};
use ringfence_types::{
    Access, Direction, DomainId, Iova, IovaRange, Nanos, Pfn, PfnRange, PhysAddr, PhysRange,
    RequesterId,
};

use crate::bench::memory;

const BYTES: u64 = 4 << 20;
const DEVICE: RequesterId = RequesterId::new(0x18);
type Memory = Rc<NonCoherent<Arena>>;
type Tree = Locked<CachedTree, RefCell<CachedTree>>;

struct Board {
    memory: Memory,
    frames: Frames<Memory>,
    unit: VtdUnit,
}

impl Platform for Board {
    type Memory = NonCoherent<Arena>;
    type Frames = Frames<Memory>;
    type Invalidator = VtdUnit;

    fn memory(&self) -> &NonCoherent<Arena> {
        &self.memory
    }

    fn frames(&self) -> &Frames<Memory> {
        &self.frames
    }

    fn invalidator(&mut self) -> &mut VtdUnit {
        &mut self.unit
    }

    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

impl Board {
    fn reads(&mut self, iova: Iova) -> Option<u64> {
        let view = self.memory.device_view();
        let found = self.unit.translate(view, DEVICE, iova, 1, Access::Read);
        found.ok().map(|range| range.first().start().get())
    }
}

/// Builds a table; returns it with its root address.
type Make<T> = fn(&Board, DomainId) -> (T, PhysAddr);

fn table(board: &Board, domain: DomainId) -> Table<SecondStage> {
    let format = SecondStage::new(Levels::Four);
    let coherency = Coherency::NonCoherent;
    Table::new(format, domain, coherency, &*board.memory, &board.frames).unwrap()
}

fn device_sees_what_it_should<T, F>(flush: F, make: Make<T>)
where
    T: IoPageTable,
    F: FlushPolicy<Paged<Tree, T>, u64>,
{
    // Memory that was never written back contains wrong entries in the device's view.
    let arenas = [Arena::new(BYTES).unwrap(), Arena::new(BYTES).unwrap()];
    for at in (0..BYTES).step_by(8) {
        let rubbish = (at & !0xfff) | 3;
        let word = ringfence_types::PhysMemory::word(&arenas[1], PhysAddr::new(at)).unwrap();
        word.store(rubbish, std::sync::atomic::Ordering::Relaxed);
    }
    let [processors, devices] = arenas;
    let memory_ = Rc::new(NonCoherent::new(processors, devices));
    let region = PhysRange::new(PhysAddr::new(BYTES / 2), BYTES / 2).unwrap();
    let geometry = Geometry::new(4, 4).unwrap();
    let config = UnitConfig {
        iotlb: geometry,
        walk_caches: [geometry; 3],
        ..UnitConfig::UNCACHED
    };
    let mut board = Board {
        frames: Frames::new(Rc::clone(&memory_), region),
        memory: memory_,
        unit: VtdUnit::vtd(&config),
    };
    let coherency = Coherency::NonCoherent;
    let mut contexts = ContextTables::new(coherency, &*board.memory, &board.frames).unwrap();
    board.unit.set_root_table(contexts.root());
    board.unit.enable();
    let mut dma = Dma::new(flush);
    let mut root = PhysAddr::ZERO;
    let at = dma
        .attach(DEVICE, Iova::new(u64::MAX), |domain| {
            let space = PfnRange::inclusive(Pfn::new(1), Pfn::new(0x3ff)).unwrap();
            let alloc = Locked::new(CachedTree::new(space), RefCell::new);
            let (table, at) = make(&board, domain);
            root = at;
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
    contexts
        .attach(&*board.memory, &board.frames, DEVICE, &context)
        .unwrap();
    let mut cpu = dma.cpu();
    for round in 0..40 {
        let pieces = [memory(0x1_0000, 64), memory(0x2_0000, 0x280 * 8)];
        let one = memory(0x3_0000, 5000);
        let direction = Direction::ToDevice;
        let (single, _) = dma
            .map_single(&mut cpu, &mut board, &at, round, one, direction)
            .unwrap();
        let nothing = IovaRange::new(Iova::ZERO, 1).unwrap();
        let mut out = [DmaSegment { range: nothing }; 2];
        let limits = SgLimits::default();
        let (list, _) = dma
            .map_sg(
                &mut cpu,
                &mut board,
                &at,
                SgRequest {
                    buffer: round,
                    pieces: &pieces,
                    direction,
                    limits,
                    out: &mut out,
                },
            )
            .unwrap();
        // Visible to the device when map returns.
        assert_eq!(board.reads(single.iova()), Some(0x3_0000));
        assert_eq!(board.reads(out[0].range.start()), Some(0x1_0000));
        assert_eq!(board.reads(out[1].range.start()), Some(0x2_0000));
        let (first, second) = (single.iova(), out[1].range.start());
        let _ = dma.unmap_single(&mut cpu, &mut board, &at, single).unwrap();
        let _ = dma.unmap_sg(&mut cpu, &mut board, &at, list).unwrap();
        // Unreachable after the invalidation has completed, and not fetched again.
        dma.end_burst(&mut cpu, &mut board, &at, direction, |_| {})
            .unwrap();
        dma.flush(&mut cpu, &mut board, &at).unwrap();
        assert_eq!(
            (board.reads(first), board.reads(second)),
            (None, None),
            "round {round}"
        );
    }
}

#[test]
fn non_coherent_walkers_see_cleared_entries() {
    fn plain(board: &Board, domain: DomainId) -> (PlainTable<SecondStage>, PhysAddr) {
        let table = table(board, domain);
        let root = table.root();
        (PlainTable(table), root)
    }
    fn cached(board: &Board, domain: DomainId) -> (LeafCachedTable<SecondStage>, PhysAddr) {
        let table = table(board, domain);
        let root = table.root();
        (LeafCachedTable(table), root)
    }
    type Gas = Reclaiming<SecondStage, RefCell<ReclaimingTable<SecondStage>>>;
    fn gas(board: &Board, domain: DomainId) -> (Gas, PhysAddr) {
        let (format, coherency) = (SecondStage::new(Levels::Four), Coherency::NonCoherent);
        let (memory, frames) = (&*board.memory, &board.frames);
        let table = ReclaimingTable::new(format, domain, coherency, memory, frames);
        let table = table.unwrap();
        let root = table.root();
        (Reclaiming::new(table, RefCell::new), root)
    }
    device_sees_what_it_should(Strict, plain);
    device_sees_what_it_should(Strict, cached);
    device_sees_what_it_should(Strict, gas);
    device_sees_what_it_should(Burst::default(), plain);
    device_sees_what_it_should(Burst::default(), cached);
    device_sees_what_it_should(Deferred::new(RefCell::new), plain);
    device_sees_what_it_should(Deferred::new(RefCell::new), cached);
}
