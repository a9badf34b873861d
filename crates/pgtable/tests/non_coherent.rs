//! Write-back for a walker that does not snoop: which lines, when, and how often.

mod common;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};

use common::{DOMAIN, Memory, RUBBISH, frames, memory, page, range};
use ringfence_pgtable::{
    Coherency, Cursor, DirtyLines, Levels, MapRequest, ReclaimingTable, SecondStage, Table,
    UnmapError, WalkErrorKind, walk,
};
use ringfence_types::{
    CachedLevels, Invalidation, MemoryError, Pending, Permissions, PhysAddr, PhysMemory,
    TABLE_WORDS,
};

const FORMAT: SecondStage = SecondStage::new(Levels::Four);

fn request(first: u64, pages: u64) -> MapRequest {
    MapRequest {
        iova: page(first),
        pa: PhysAddr::new((1 << 30) + (first << 12)),
        pages,
        permissions: Permissions::READ,
    }
}

/// Returns true if the device finds page `first`. Asserts that it finds either the correct page or
/// none.
fn device_finds(mem: &Memory, root: PhysAddr, first: u64) -> bool {
    match walk(
        &FORMAT,
        mem.device_view(),
        Cursor::root(&FORMAT, root),
        page(first),
        |_| {},
    ) {
        Ok(leaf) => {
            assert_eq!(
                leaf.base,
                request(first, 1).pa,
                "a table that was not written back"
            );
            true
        }
        Err(error) => {
            assert_eq!(error.kind, WalkErrorKind::NotPresent);
            false
        }
    }
}

/// Memory whose CPU caches evict lines at every step: each access to memory also writes all words
/// of `victims` back.
struct Evicting<'m> {
    inner: &'m Memory,
    victims: RefCell<Vec<PhysAddr>>,
    root: PhysAddr,
    watched: u64,
    steps: Cell<u64>,
}

impl Evicting<'_> {
    fn step(&self) {
        self.steps.set(self.steps.get() + 1);
        for line in self.victims.borrow().iter() {
            self.inner.evict(*line);
        }
        device_finds(self.inner, self.root, self.watched);
    }
}

impl PhysMemory for Evicting<'_> {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.step();
        self.inner.word(at)
    }
    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        self.step();
        self.inner.table(at)
    }
    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        self.step();
        self.inner.words(at, count)
    }
    fn write_back(&self, at: PhysAddr, bytes: u64) {
        self.step();
        self.inner.write_back(at, bytes);
    }
    fn drain(&self) {
        self.step();
        self.inner.drain();
    }
}

#[test]
fn an_eviction_never_shows_a_table_before_its_zeroes() {
    // Evict the line of one table entry at every step, so that it may overtake all other stores.
    for depth in 0..3 {
        let mem = memory();
        let frames = frames(&mem);
        let table =
            Table::new(FORMAT, DOMAIN, Coherency::NonCoherent, &mem, &frames).expect("frames");
        let first = 0x1234;
        // The frame source returns ascending addresses; the reserve is last in, first out.
        let lines: Vec<_> = (0..4)
            .map(|frame| PhysAddr::new(table.root().get() + frame * 4096))
            .collect();
        let shift = [39, 30, 21][depth];
        let offset = (page(first).get() >> shift & 511) * 8;
        let victims = lines
            .iter()
            .map(|frame| frame.wrapping_add(offset))
            .collect();
        let evicting = Evicting {
            inner: &mem,
            victims: RefCell::new(victims),
            root: table.root(),
            watched: first,
            steps: Cell::new(0),
        };
        assert_eq!(table.map(&evicting, &frames, request(first, 1)), Ok(()));
        assert!(evicting.steps.get() > 10, "the enemy had its turns");
        assert!(device_finds(&mem, table.root(), first));
    }
}

#[test]
fn the_device_sees_a_map_and_an_unmap_when_they_return() {
    let mem = memory();
    let frames = frames(&mem);
    let table = Table::new(FORMAT, DOMAIN, Coherency::NonCoherent, &mem, &frames).expect("frames");
    let mut cache = table.leaf_cache();
    for (first, pages) in [(0, 1), (510, 4), (0, 3), (4096, 1200)] {
        for cached in [false, true] {
            let map = request(first, pages);
            let range = range(first, pages);
            let ok = if cached {
                cache.map(&table, &mem, &frames, map)
            } else {
                table.map(&mem, &frames, map)
            };
            assert_eq!(ok, Ok(()));
            assert!((first..first + pages).all(|pfn| device_finds(&mem, table.root(), pfn)));
            let unmapped = if cached {
                cache.unmap(&table, &mem, range)
            } else {
                table.unmap(&mem, range)
            };
            assert!(unmapped.is_ok());
            assert!(!(first..first + pages).any(|pfn| device_finds(&mem, table.root(), pfn)));
        }
    }
    // The fake punishes misuse: a table that assumes a snooping walker leaves stale data in the
    // device's view.
    let wrong = Table::new(FORMAT, DOMAIN, Coherency::Coherent, &mem, &frames).expect("frames");
    assert_eq!(wrong.map(&mem, &frames, request(0, 1)), Ok(()));
    let entry = mem.device_view().word(wrong.root()).expect("inside");
    assert_eq!(entry.load(Ordering::Relaxed), RUBBISH);
}

#[test]
fn a_run_writes_each_line_back_once_and_waits_once() {
    let mem = memory();
    let frames = frames(&mem);
    let table = Table::new(FORMAT, DOMAIN, Coherency::NonCoherent, &mem, &frames).expect("frames");
    table.map(&mem, &frames, request(0, 1024)).expect("frames");
    table.unmap(&mem, range(0, 1024)).map(drop).expect("mapped");
    for (first, pages, lines) in [
        (0, 1, 1),
        (0, 8, 1),
        (7, 2, 2),
        (4, 8, 2),
        (0, 16, 2),
        (504, 16, 2),
        (0, 1024, 128),
    ] {
        let cost = |work: &dyn Fn()| {
            let (lines, drains) = (mem.write_backs(), mem.drains());
            work();
            (mem.write_backs() - lines, mem.drains() - drains)
        };
        let map = cost(&|| {
            table
                .map(&mem, &frames, request(first, pages))
                .expect("free")
        });
        let unmap = cost(&|| {
            table
                .unmap(&mem, range(first, pages))
                .map(drop)
                .expect("mapped")
        });
        assert_eq!(
            (map, unmap),
            ((lines, 1), (lines, 1)),
            "{pages} pages from {first}"
        );
    }
}

#[test]
fn a_burst_writes_each_line_back_once_and_waits_once() {
    let mem = memory();
    let frames = frames(&mem);
    let table = Table::new(FORMAT, DOMAIN, Coherency::NonCoherent, &mem, &frames).expect("frames");
    let mut cache = table.leaf_cache();
    table.map(&mem, &frames, request(0, 512)).expect("frames");
    let mut dirty = DirtyLines::new();
    let (lines, drains) = (mem.write_backs(), mem.drains());
    for pfn in 0..200 {
        let unmapped = if pfn % 2 == 0 {
            table.unmap_nosync(&mem, range(pfn, 1), &mut dirty)
        } else {
            cache.unmap_nosync(&table, &mem, range(pfn, 1), &mut dirty)
        };
        assert!(unmapped.is_ok());
    }
    assert_eq!(
        (mem.write_backs(), mem.drains()),
        (lines, drains),
        "nothing until the end of the burst"
    );
    assert!((0..200).all(|pfn| device_finds(&mem, table.root(), pfn)));
    assert_eq!(dirty.lines(), 25);
    dirty.sync(&mem);
    assert_eq!((mem.write_backs() - lines, mem.drains() - drains), (25, 1));
    assert!(!(0..200).any(|pfn| device_finds(&mem, table.root(), pfn)));
    dirty.sync(&mem);
    assert_eq!(mem.drains() - drains, 1, "a clean set does not wait");
}

#[test]
fn a_burst_of_any_length_and_order_ends_in_memory() {
    let mem = memory();
    let frames = frames(&mem);
    let table = Table::new(FORMAT, DOMAIN, Coherency::NonCoherent, &mem, &frames).expect("frames");
    let mut dirty = DirtyLines::new();
    // 500 dirty lines in many tables exceed the set. Each line is visited twice, far apart.
    let pfn = |turn: u64| (turn * 37 % 500) * 8 + turn / 500;
    for turn in 0..1000 {
        table
            .map_nosync(&mem, &frames, request(pfn(turn), 1), &mut dirty)
            .expect("frames");
    }
    let drains = mem.drains();
    dirty.sync(&mem);
    assert_eq!(mem.drains(), drains + 1);
    assert!((0..1000).all(|turn| device_finds(&mem, table.root(), pfn(turn))));
    for turn in 0..1000 {
        assert!(
            table
                .unmap_nosync(&mem, range(pfn(turn), 1), &mut dirty)
                .is_ok()
        );
    }
    dirty.sync(&mem);
    assert!(!(0..1000).any(|turn| device_finds(&mem, table.root(), pfn(turn))));
}

/// Memory in which another CPU clears an entry before a lookup of many words, against the contract
/// of the table.
struct Contended<'m> {
    inner: &'m Memory,
    /// Number of lookups before that.
    countdown: Cell<u64>,
    entry: PhysAddr,
}

impl PhysMemory for Contended<'_> {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.inner.word(at)
    }
    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        self.inner.table(at)
    }
    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        if self.countdown.get() == 0 {
            self.inner.word(self.entry)?.store(0, Ordering::Relaxed);
        }
        self.countdown.set(self.countdown.get().wrapping_sub(1));
        self.inner.words(at, count)
    }
    fn write_back(&self, at: PhysAddr, bytes: u64) {
        self.inner.write_back(at, bytes);
    }
    fn drain(&self) {
        self.inner.drain();
    }
}

/// Another CPU breaks the contract after the check of the range. The pages already cleared must be
/// in memory when the unmap fails, because the caller may invalidate them.
#[test]
fn an_interrupted_unmap_writes_back() {
    let mem = memory();
    let frames = frames(&mem);
    let table = Table::new(FORMAT, DOMAIN, Coherency::NonCoherent, &mem, &frames).expect("frames");
    table.map(&mem, &frames, request(0, 1024)).expect("frames");
    // The check looks up both leaf tables; the first one is then looked up and cleared.
    let contended = Contended {
        inner: &mem,
        countdown: Cell::new(4),
        entry: entry_of(&mem, table.root(), 600),
    };
    let drains = mem.drains();
    let failed = table.unmap(&contended, range(0, 1024)).err();
    assert_eq!(failed, Some(UnmapError::NotMapped { iova: page(600) }));
    let is_mapped = |pfn| table.lookup(&mem, page(pfn)).is_some();
    let left = (0..1024).filter(|pfn| is_mapped(*pfn)).count();
    assert_eq!(left, 511, "the first table is cleared");
    let seen = (0..512).filter(|pfn| device_finds(&mem, table.root(), *pfn));
    assert_eq!((seen.count(), mem.drains() - drains), (0, 1));
    // An unmap that fails its check stores nothing and does not wait.
    let drains = mem.drains();
    assert!(table.unmap(&mem, range(0, 1024)).is_err());
    assert_eq!(mem.drains(), drains);
}

/// Returns the address of the leaf entry of page `pfn`.
fn entry_of(mem: &Memory, root: PhysAddr, pfn: u64) -> PhysAddr {
    let mut table = root;
    for shift in [27, 18, 9] {
        let at = table.wrapping_add((pfn >> shift & 511) * 8);
        let entry = mem.word(at).expect("inside").load(Ordering::Relaxed);
        table = PhysAddr::new(entry & 0x000f_ffff_ffff_f000);
    }
    table.wrapping_add((pfn & 511) * 8)
}

#[test]
fn coherent_tables_never_write_back() {
    let mem = memory();
    let frames = frames(&mem);
    let table = Table::new(FORMAT, DOMAIN, Coherency::Coherent, &mem, &frames).expect("frames");
    let mut dirty = DirtyLines::new();
    table
        .map_nosync(&mem, &frames, request(0, 700), &mut dirty)
        .expect("frames");
    assert!(dirty.is_clean());
    dirty.sync(&mem);
    assert!(table.unmap(&mem, range(0, 700)).is_ok());
    assert_eq!((mem.write_backs(), mem.drains()), (0, 0));
}

#[test]
fn an_unmap_writes_back_its_lines_or_the_given_span() {
    // A neighbouring page keeps the leaf table from becoming empty.
    for (wider, neighbour, lines) in [
        (true, true, 64),
        (false, true, 1),
        // Unmapping the last page unlinks three table pages: one dirty line in each table above,
        // or the span around it.
        (true, false, 64 + 3 * 64),
        (false, false, 1 + 3),
    ] {
        let mem = memory();
        let frames = frames(&mem);
        let mut table = ReclaimingTable::new(FORMAT, DOMAIN, Coherency::NonCoherent, &mem, &frames)
            .expect("frames");
        if wider {
            table = table.with_write_back(common::page_of);
        }
        table.map(&mem, &frames, request(9, 1)).expect("frames");
        if neighbour {
            table.map(&mem, &frames, request(300, 1)).expect("frames");
        }
        let before = mem.write_backs();
        let (_, levels) = table.unmap(&mem, range(9, 1)).expect("mapped");
        assert_eq!(mem.write_backs() - before, lines, "{wider}");
        assert_eq!(
            levels,
            if neighbour {
                CachedLevels::Leaves
            } else {
                CachedLevels::All
            }
        );
        assert!(!device_finds(&mem, table.root(), 9));
        let retired = table.take_unlinked();
        assert_eq!(retired.len(), if neighbour { 0 } else { 3 });
    }
}

#[test]
fn retired_pages_wait_for_an_invalidation_of_the_walk_caches() {
    let mem = memory();
    let frames = frames(&mem);
    let mut table =
        ReclaimingTable::new(FORMAT, DOMAIN, Coherency::Coherent, &mem, &frames).expect("frames");
    table.map(&mem, &frames, request(9, 1)).expect("frames");
    assert!(table.unmap(&mem, range(9, 1)).is_ok());
    let mut retired = table.take_unlinked();
    assert!(table.take_unlinked().is_empty());
    let pages = |range, levels| Invalidation::Pages {
        domain: DOMAIN,
        range,
        levels,
    };
    let other = ringfence_types::DomainId::new(8);
    for narrow in [
        pages(range(9, 1), CachedLevels::Leaves),
        pages(range(10, 1), CachedLevels::All),
        Invalidation::Domain(other),
        Invalidation::Context(ringfence_types::RequesterId::new(0)),
    ] {
        match Pending::submit(&mut common::Instant, narrow, retired) {
            Ok(_) => panic!("{narrow:?} does not cover"),
            Err((back, _)) => retired = back,
        }
    }
    let request = pages(range(9, 1), CachedLevels::All);
    let pending = Pending::submit(&mut common::Instant, request, retired).expect("covered");
    let flushed = pending.wait(&mut common::Instant).expect("completes");
    assert_eq!(frames.outstanding(), 4);
    ringfence_pgtable::UnlinkedTables::release(flushed, &frames);
    assert_eq!((frames.outstanding(), frames.wrong_frees()), (1, 0));
}
