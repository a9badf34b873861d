//! The cache of mappings with every retention: shared mappings, optimistic teardown, map caches and
//! "never free".

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::cache::{Cycles, FlatCache, ResidencyPolicy, Retention};
use ringfence_dma::flush::{PerCycle, PerCycleOutcome, RangeBatch};
use ringfence_dma::space::{CacheState, CachedSpace, Paged, Rounding, UnknownUnmap, UnmapRefusal};
use ringfence_dma::{
    Attachment, Cpu, Dma, DmaSegment, Mapping, SgLimits, SgRequest, Teardown, UnmapFailure,
    UnmapReason,
};
use ringfence_iova::AllocError;
use ringfence_types::{Direction, InvalidationError, Iova, Nanos, PhysAddr, PhysMemory, PhysRange};

use crate::rig::*;

type Kept = CachedSpace<Accounts<Tree>, Plain, FlatCache, RefCell<CacheState<FlatCache>>>;
type Policy = PerCycle<RefCell<RangeBatch>>;

/// T of the cycles.
const MS: u64 = 1_000_000;

const TO: Direction = Direction::ToDevice;
const FROM: Direction = Direction::FromDevice;

struct Layer {
    board: Board,
    dma: Dma<Kept, Policy, u64>,
    cpu: Cpu<Kept, Policy, u64>,
    at: Attachment,
}

impl Layer {
    /// Creates a layer with pages `1..=last` and a cache of at most `limit` pages.
    fn new(last: u64, limit: usize, retention: impl Into<Retention>) -> Self {
        let board = Board::new();
        let mut dma = Dma::new(PerCycle::new(RefCell::new));
        let cache = FlatCache::new(Cycles::PAPER, limit, retention);
        let at = dma
            .attach(DEVICE, Iova::new(u64::MAX), |domain| {
                let (accounts, table) =
                    (Accounts::new(Tree::make(last)), Plain::make(&board, domain));
                let paged = Paged::new(accounts, table, Rounding::Exact);
                let unknown = UnknownUnmap::Refused;
                Ok::<_, ()>(CachedSpace::new(paged, cache, MS, unknown, RefCell::new))
            })
            .unwrap();
        Self {
            cpu: dma.cpu(),
            board,
            dma,
            at,
        }
    }

    fn map(&mut self, memory: PhysRange, direction: Direction) -> Mapping<u64> {
        let (cpu, board) = (&mut self.cpu, &mut self.board);
        let mapped = self
            .dma
            .map_single(cpu, board, &self.at, 7, memory, direction);
        mapped.map_err(|(_, error)| error).unwrap().0
    }

    /// Unmaps, and returns true if the device may still reach the buffer.
    fn unmap(&mut self, mapping: Mapping<u64>) -> bool {
        let (cpu, board) = (&mut self.cpu, &mut self.board);
        match self
            .dma
            .unmap_single(cpu, board, &self.at, mapping)
            .unwrap()
        {
            PerCycleOutcome::Cached(7) => true,
            PerCycleOutcome::Released(7) => false,
            other => panic!("{other:?}"),
        }
    }

    fn tick(&mut self, nanos: u64) {
        self.try_tick(nanos).unwrap();
    }

    fn try_tick(&mut self, nanos: u64) -> Result<(), UnmapFailure> {
        self.board.now = Nanos(self.board.now.0 + nanos);
        self.dma.tick(&mut self.cpu, &mut self.board)
    }

    /// Clears the last table entry that points to the page `number`. Returns its address and what
    /// it held.
    fn damage(&self, number: u64) -> (PhysAddr, u64) {
        let tables = self.board.words();
        let entry = tables.iter().rposition(|found| found >> 12 == number);
        let entry = PhysAddr::new(TABLES + entry.unwrap() as u64 * 8);
        (entry, self.poke(entry, 0))
    }

    /// Stores `word` at `entry`, and returns the word that was there.
    fn poke(&self, entry: PhysAddr, word: u64) -> u64 {
        let cell = self.board.arena.word(entry).unwrap();
        cell.swap(word, std::sync::atomic::Ordering::Relaxed)
    }

    fn leaf(&self, iova: Iova) -> Option<PhysAddr> {
        let paged = self.dma.space(&self.at).unwrap().paged();
        paged.table().leaf(&self.board, iova)
    }

    fn invalidations(&self) -> usize {
        self.board.port.log.len()
    }

    /// Returns the number of ranges that the allocator has handed out.
    fn ranges(&self) -> usize {
        let paged = self.dma.space(&self.at).unwrap().paged();
        paged.allocator().out.borrow().len()
    }
}

fn page(number: u64) -> PhysRange {
    memory(number * PAGE, PAGE)
}

#[test]
fn buffers_of_a_page_share_one_mapping_until_the_last_unmap() {
    let mut layer = Layer::new(LAST_PAGE, 64, Retention::NONE);
    let first = layer.map(memory(0x10_0000, 64), TO);
    let words = layer.board.words();
    let others = [0x400, 0x800].map(|offset| layer.map(memory(0x10_0000 + offset, 64), TO));
    let iova = first.iova();
    for (mapping, offset) in others.iter().zip([0x400, 0x800]) {
        assert_eq!(mapping.iova(), iova.wrapping_add(offset));
    }
    assert_eq!(layer.board.words(), words, "one mapping per page");
    assert_eq!((layer.ranges(), layer.invalidations()), (1, 0));
    // A buffer of another direction or length has its own mapping.
    let written = layer.map(memory(0x10_0c00, 64), FROM);
    let long = layer.map(memory(0x10_0000, 2 * PAGE), TO);
    assert_eq!(layer.ranges(), 3);
    assert!(!layer.unmap(written) && !layer.unmap(long));
    assert_eq!((layer.ranges(), layer.invalidations()), (1, 2));
    assert!(layer.unmap(first));
    let [second, third] = others;
    assert!(layer.unmap(second));
    layer.tick(1000 * MS);
    assert_eq!(layer.invalidations(), 2);
    assert_eq!(layer.leaf(iova), Some(PhysAddr::new(0x10_0000)));
    assert!(!layer.unmap(third), "the page leaves with its last user");
    assert_eq!(layer.leaf(iova), None);
    assert_eq!((layer.ranges(), layer.invalidations()), (0, 3));
}

/// An entry counts at most 1023 users. Buffers beyond have mappings of their own, which leave at
/// their unmap.
#[test]
fn users_beyond_the_count_have_mappings_of_their_own() {
    let mut layer = Layer::new(LAST_PAGE, 64, Retention::NONE);
    let mappings: Vec<_> = (0..1030).map(|_| layer.map(page(0x100), TO)).collect();
    let iova = mappings[0].iova();
    let (mut shared, own): (Vec<_>, Vec<_>) = mappings
        .into_iter()
        .partition(|mapping| mapping.iova() == iova);
    assert_eq!((shared.len(), own.len(), layer.ranges()), (1023, 7, 1 + 7));
    let at = Some(PhysAddr::new(0x100 * PAGE));
    for mapping in own {
        let iova = mapping.iova();
        assert_eq!(layer.leaf(iova), at);
        assert!(!layer.unmap(mapping));
        assert_eq!(layer.leaf(iova), None);
    }
    let last = shared.pop().unwrap();
    for mapping in shared {
        assert!(layer.unmap(mapping));
    }
    assert_eq!((layer.ranges(), layer.leaf(iova)), (1, at));
    assert!(!layer.unmap(last));
    assert_eq!((layer.ranges(), layer.leaf(iova)), (0, None));
}

/// The last unmap of a shared mapping fails in the table, and in the invalidation.
#[test]
fn the_last_user_keeps_what_was_not_unmapped() {
    let mut layer = Layer::new(LAST_PAGE, 64, Retention::NONE);
    let mapping = layer.map(page(0x100), TO);
    let range = mapping.range();
    let (entry, before) = layer.damage(0x100);
    let (cpu, board) = (&mut layer.cpu, &mut layer.board);
    let refused = layer.dma.unmap_single(cpu, board, &layer.at, mapping);
    let refused = refused.map(drop).unwrap_err();
    let UnmapReason::Table(_, still) = refused.reason else {
        panic!("{refused:?}");
    };
    let buffer = still.into_buffer();
    let (cpu, board, at) = (&mut layer.cpu, &mut layer.board, layer.at);
    let teardown = Teardown::IfUnused;
    let detached = layer.dma.detach(cpu, board, &at, teardown, |_| {}, |_| {});
    assert!(detached.is_err(), "its user has it");
    layer.poke(entry, before);
    let handle = layer.at;
    let again = Mapping::claim(&handle, range, TO, buffer);
    layer.board.port.fail(0, 1, InvalidationFailure::Failed);
    let (cpu, board) = (&mut layer.cpu, &mut layer.board);
    let failed = layer.dma.unmap_single(cpu, board, &layer.at, again);
    let failed = failed.map(drop).unwrap_err();
    let UnmapReason::NotFlushed(_, token) = failed.reason else {
        panic!("{failed:?}");
    };
    assert_eq!(layer.ranges(), 1, "the address is not free yet");
    let released = layer
        .dma
        .retry_invalidation(&mut layer.cpu, &mut layer.board, token);
    assert_eq!(released.map(|r| r.0).ok(), Some(7));
    assert_eq!((layer.ranges(), layer.leaf(range.start())), (0, None));
    let (cpu, board, at) = (&mut layer.cpu, &mut layer.board, layer.at);
    let teardown = Teardown::IfUnused;
    assert!(
        layer
            .dma
            .detach(cpu, board, &at, teardown, |_| {}, |_| {})
            .is_ok()
    );
}

/// Amit et al.: a map within the delay restores the mapping. It stores no entry and invalidates
/// nothing.
#[test]
fn optimistic_teardown_restores_within_its_delay_only() {
    let retention = Retention {
        residency: ResidencyPolicy::Fixed,
        released_max: 4,
    };
    let mut layer = Layer::new(LAST_PAGE, 1 << 10, retention);
    let mapping = layer.map(page(0x100), FROM);
    let (iova, words) = (mapping.iova(), layer.board.words());
    for _ in 0..50 {
        let mapping = layer.map(page(0x100), FROM);
        assert!(layer.unmap(mapping));
    }
    assert!(layer.unmap(mapping));
    layer.tick(3 * MS - 1);
    let restored = layer.map(page(0x100), FROM);
    assert_eq!(restored.iova(), iova);
    assert_eq!((layer.board.words(), layer.invalidations()), (words, 0));
    assert!(layer.unmap(restored));
    // The restored mapping has the full delay again, less than C + 1 cycles.
    layer.tick(3 * MS);
    assert!(layer.leaf(iova).is_some());
    layer.tick(MS);
    assert_eq!((layer.leaf(iova), layer.invalidations()), (None, 1));
    // At most four teardowns wait. A further one is complete when its unmap returns.
    let mappings: Vec<_> = (0..6).map(|number| layer.map(page(number), FROM)).collect();
    let stale: Vec<_> = mappings.into_iter().map(|m| layer.unmap(m)).collect();
    assert_eq!(stale, [true, true, true, true, false, false]);
    assert_eq!((layer.ranges(), layer.invalidations()), (4, 3));
    layer.tick(4 * MS);
    assert_eq!((layer.ranges(), layer.invalidations()), (0, 4), "one batch");
}

/// Creates a layer whose cache holds the released mappings of the pages 0x100 to 0x102 for the
/// same time. Returns their addresses too.
fn three_released() -> (Layer, [Iova; 3]) {
    let retention = Retention {
        residency: ResidencyPolicy::Fixed,
        released_max: 4,
    };
    let mut layer = Layer::new(LAST_PAGE, 64, retention);
    let mappings = [0x100, 0x101, 0x102].map(|number| layer.map(page(number), FROM));
    let iovas = mappings.map(|mapping| {
        let iova = mapping.iova();
        assert!(layer.unmap(mapping));
        iova
    });
    (layer, iovas)
}

/// The table refuses one of three expired mappings. The other two end, and the refused one stays in
/// the space, which tries again at each tick.
#[test]
fn a_mapping_that_the_table_refuses_does_not_keep_the_others() {
    for number in [0x100, 0x101, 0x102] {
        let (mut layer, iovas) = three_released();
        let (entry, before) = layer.damage(number);
        for (nanos, invalidations) in [(4 * MS, 1), (0, 1)] {
            let refused = layer.try_tick(nanos);
            let Err(UnmapFailure::Refused(UnmapRefusal::Table(_))) = refused else {
                panic!("{number:x}: {refused:?}");
            };
            let mapped = iovas.map(|iova| layer.leaf(iova).is_some());
            assert_eq!(mapped, [false; 3], "{number:x}");
            assert_eq!((layer.ranges(), layer.invalidations()), (1, invalidations));
        }
        layer.poke(entry, before);
        let reached = iovas.iter().find_map(|iova| layer.leaf(*iova));
        assert_eq!(reached, Some(PhysAddr::new(number * PAGE)));
        layer.tick(0);
        let reached = iovas.iter().find_map(|iova| layer.leaf(*iova));
        assert_eq!((reached, layer.ranges()), (None, 0));
        assert_eq!(layer.invalidations(), 2);
    }
}

/// Also if the table refuses several of them.
#[test]
fn each_mapping_that_the_table_refuses_is_kept() {
    for numbers in [[0x100, 0x101], [0x100, 0x102], [0x101, 0x102]] {
        let (mut layer, iovas) = three_released();
        let damaged = numbers.map(|number| layer.damage(number));
        assert!(layer.try_tick(4 * MS).is_err(), "{numbers:x?}");
        assert_eq!((layer.ranges(), layer.invalidations()), (2, 1));
        for (entry, before) in damaged {
            layer.poke(entry, before);
        }
        let mapped = |layer: &Layer| iovas.map(|iova| layer.leaf(iova).is_some());
        let count = mapped(&layer).into_iter().filter(|is| *is).count();
        assert_eq!(count, 2, "the third is unmapped");
        layer.tick(0);
        assert_eq!((mapped(&layer), layer.ranges()), ([false; 3], 0));
    }
}

/// An entry that the table refuses ends with its domain. It does not keep the device attached.
#[test]
fn a_device_is_detached_although_the_table_refuses_an_entry() {
    let (mut layer, _) = three_released();
    layer.damage(0x101);
    let (cpu, board, at) = (&mut layer.cpu, &mut layer.board, layer.at);
    let flushed = layer.dma.flush(cpu, board, &at);
    assert!(matches!(flushed, Err(UnmapFailure::Refused(_))));
    let teardown = Teardown::IfUnused;
    let detached = layer.dma.detach(cpu, board, &at, teardown, |_| {}, |_| {});
    assert!(detached.unwrap().is_some());
}

/// The invalidation of a cycle fails. Its addresses stay allocated until a later one succeeds.
#[test]
fn a_cycle_whose_invalidation_fails_releases_nothing() {
    let (mut layer, iovas) = three_released();
    layer.board.port.fail(0, 1, InvalidationFailure::Failed);
    let failed = Err(UnmapFailure::NotFlushed(InvalidationError::Failed));
    assert_eq!(layer.try_tick(4 * MS), failed);
    assert_eq!(iovas.map(|iova| layer.leaf(iova)), [None; 3]);
    assert_eq!(layer.ranges(), 3, "the device may still reach their pages");
    layer.tick(0);
    assert_eq!(layer.ranges(), 0);
}

/// A list fails after another CPU has filled the queue of released mappings. The mapping that the
/// list found and gave back leaves the cache, and the next check of the clock unmaps it.
#[test]
fn a_failed_list_gives_back_a_mapping_that_the_queue_has_no_room_for() {
    for others in [false, true] {
        let retention = Retention {
            residency: ResidencyPolicy::Fixed,
            released_max: 1,
        };
        let mut layer = Layer::new(LAST_PAGE, 64, retention);
        let held = layer.map(page(0x200), FROM);
        let (kept, range) = (held.iova(), held.range());
        let found = layer.map(page(0x100), FROM);
        let iova = found.iova();
        assert!(layer.unmap(found));
        let Layer {
            mut board,
            dma,
            mut cpu,
            at,
        } = layer;
        let dma = Rc::new(dma);
        let allocator = || dma.space(&at).unwrap().paged().allocator();
        let other = Rc::clone(&dma);
        let unmap = move || {
            let (mut cpu, mut board) = (other.cpu(), Board::new());
            let unmapped = other.unmap_single(&mut cpu, &mut board, &at, held);
            assert_eq!(unmapped.unwrap(), PerCycleOutcome::Cached(7));
        };
        if others {
            allocator().meanwhile.set(Some(Box::new(unmap)));
        }
        allocator().fail_after(0, AllocError::OutOfMemory);
        let pieces = [page(0x100), page(0x300)];
        let request = SgRequest {
            buffer: 7,
            pieces: &pieces,
            direction: FROM,
            limits: SgLimits::default(),
            out: &mut [DmaSegment { range }; 2],
        };
        let (buffer, _) = dma.map_sg(&mut cpu, &mut board, &at, request).unwrap_err();
        assert_eq!(buffer, 7);
        let leaf = |board: &Board, iova| dma.space(&at).unwrap().paged().table().leaf(board, iova);
        let at_found = Some(PhysAddr::new(0x100 * PAGE));
        assert_eq!(leaf(&board, iova), at_found, "as after an unmap");
        assert_eq!(board.port.log.len(), 0);
        dma.tick(&mut cpu, &mut board).unwrap();
        // Without the other CPU, the queue has room, and the mapping stays for its cycles.
        assert_eq!(leaf(&board, iova), at_found.filter(|_| !others));
        assert_eq!(board.port.log.len(), usize::from(others));
        let at_held = Some(PhysAddr::new(0x200 * PAGE));
        assert_eq!(leaf(&board, kept), at_held);
        assert_eq!(allocator().out.borrow().len(), 2 - usize::from(others));
    }
}

/// A map cache evicts the oldest sixteenth of its quota with one invalidation, and nothing by time.
#[test]
fn a_full_map_cache_evicts_the_oldest_in_one_batch() {
    let mut layer = Layer::new(LAST_PAGE, 64, ResidencyPolicy::UntilFull);
    let mut oldest = Vec::new();
    for number in 0..64 {
        let mapping = layer.map(page(number), TO);
        oldest.push(mapping.iova());
        assert!(layer.unmap(mapping));
        layer.tick(MS);
    }
    layer.tick(1_000_000 * MS);
    assert_eq!((layer.ranges(), layer.invalidations()), (64, 0));
    // The mapping that does not fit is unmapped strictly. The next check of the clock makes room.
    let mapping = layer.map(page(64), TO);
    assert!(!layer.unmap(mapping));
    assert_eq!((layer.ranges(), layer.invalidations()), (64, 1));
    layer.tick(0);
    assert_eq!((layer.ranges(), layer.invalidations()), (60, 2));
    let gone = oldest.iter().map(|iova| layer.leaf(*iova).is_none());
    assert_eq!(gone.filter(|gone| *gone).count(), 4);
    let mapping = layer.map(page(64), TO);
    assert!(layer.unmap(mapping), "it fits now");
}

/// Calgary slides: a mapping exists until its address is needed.
#[test]
fn never_freed_mappings_end_when_their_addresses_are_reused() {
    let mut layer = Layer::new(8, 1 << 20, ResidencyPolicy::UntilFull);
    let mut iovas = Vec::new();
    for number in 0..8 {
        let mapping = layer.map(page(number), TO);
        iovas.push(mapping.iova());
        assert!(layer.unmap(mapping));
    }
    layer.tick(1_000_000 * MS);
    assert_eq!(layer.invalidations(), 0);
    assert!(iovas.iter().all(|iova| layer.leaf(*iova).is_some()));
    let held = layer.map(page(3), TO);
    assert_eq!((held.iova(), layer.invalidations()), (iovas[3], 0), "a hit");
    let new = layer.map(page(8), TO);
    assert_eq!(
        layer.invalidations(),
        1,
        "one invalidation before the reuse"
    );
    for iova in iovas {
        let expected = match iova {
            iova if iova == held.iova() => Some(3 * PAGE),
            iova if iova == new.iova() => Some(8 * PAGE),
            _ => None,
        };
        assert_eq!(layer.leaf(iova), expected.map(PhysAddr::new), "{iova}");
    }
    assert!(layer.unmap(held) && layer.unmap(new));
}
