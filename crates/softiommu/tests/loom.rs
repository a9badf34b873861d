//! The protocol between readers and unmap under loom: every interleaving, and every reordering that
//! loom models, of small cases. The tests compile the shipped source files against loom's atomics
//! (`sync` below replaces the crate's own).
//!
//! A page is a cell that loom tracks. A reader reads it after a translation, and the thread that
//! unmapped it writes it. If the two are not ordered, loom reports it. Tables have two entries, so
//! four pages need two levels.
//!
//! Decision 0015 lists what loom cannot check.
#![allow(dead_code, unreachable_pub)]

#[path = "../src/domain.rs"]
mod domain;
#[path = "../src/domain_mut.rs"]
mod domain_mut;
#[path = "../src/endpoint.rs"]
mod endpoint;
#[path = "../src/error.rs"]
mod error;
#[path = "../src/guard_count.rs"]
mod guard_count;
#[path = "../src/iommu.rs"]
mod iommu;
#[path = "../src/leaf_tables.rs"]
mod leaf_tables;
#[path = "../src/phys_ranges.rs"]
mod phys_ranges;
#[path = "../src/qsbr.rs"]
mod qsbr;
#[path = "../src/reader.rs"]
mod reader;
#[path = "../src/table.rs"]
mod table;
#[path = "../src/table_alloc.rs"]
mod table_alloc;
#[path = "../src/walk.rs"]
mod walk;
#[path = "../src/walk_cache.rs"]
mod walk_cache;

/// Loom's version of `src/sync.rs`.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
    pub(crate) use loom::sync::{Mutex, MutexGuard};

    pub(crate) const INDEX_BITS: u32 = 1;
    pub(crate) const IDLE_AFTER: usize = 3;

    loom::lazy_static! {
        /// Total order of all light and heavy fences. The only guarantee of these fences is their
        /// order among each other, not relative to other fences, and this counter gives loom no
        /// more.
        static ref FENCES: AtomicUsize = AtomicUsize::new(0);
    }

    pub(crate) fn has_heavy_fence() -> bool {
        true
    }

    pub(crate) fn light_fence() {
        FENCES.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn heavy_fence() {
        FENCES.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn prefetch_write(_: &AtomicU64) {}

    pub(crate) fn zeroed(words: usize) -> Option<Box<[AtomicU64]>> {
        Some((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    loom::thread_local! {
        pub(crate) static READ_SECTIONS: std::cell::Cell<usize> = std::cell::Cell::new(0);
    }

    pub(crate) fn pause(_looks: u32) {
        loom::thread::yield_now();
    }
}

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread::{self, JoinHandle};
use ringfence_types::{
    Access, DomainId, Fault, Iova, IovaRange, Permissions, PhysAddr, RequesterId,
};

pub use domain_mut::DomainMut;
pub use error::{DomainMapError, DomainMapReason, DomainUnmapError, IommuError, ReadSectionOpen};
pub use iommu::{SoftIommu, SoftIommuLimits};
pub use phys_ranges::PhysRanges;
pub use reader::{ReadGuard, ReadSection, Reader};
pub use table::Width;

const DISK: RequesterId = RequesterId::new(0x20);
const DOMAIN: DomainId = DomainId::new(1);
const OTHER: DomainId = DomainId::new(2);

/// Two pages of memory. The device reads them; only the thread that has unmapped a page writes it.
struct Pages([UnsafeCell<u32>; 2]);

impl Pages {
    fn new() -> Self {
        Self([UnsafeCell::new(0), UnsafeCell::new(0)])
    }

    /// Writes the page. The caller must be its only owner.
    fn poison(&self, page: usize) {
        self.0[page].with_mut(|_| ());
    }

    fn look(&self, page: usize) {
        self.0[page].with(|_| ());
    }
}

// SAFETY: no code accesses the contents of the cells; loom reports conflicting accesses, which is
// the purpose of the tests.
unsafe impl Sync for Pages {}
// SAFETY: as above.
unsafe impl Send for Pages {}

type Unit = SoftIommu<Arc<Pages>>;

fn page(number: u64) -> IovaRange {
    IovaRange::new(Iova::new(number << 12), 1 << 12).unwrap()
}

fn memory(number: u64) -> PhysAddr {
    PhysAddr::new(number << 12)
}

/// Creates a unit with page 0 mapped to memory page 0. The attach has waited twice at the same QSBR
/// state, for the present and for the changed endpoint. The next wait without an online reader
/// makes it idle.
fn unit(tables: usize) -> (Unit, Arc<Pages>) {
    let pages = Arc::new(Pages::new());
    let limits = SoftIommuLimits {
        width: Width::new(14).unwrap(),
        tables,
        domains: 2,
        endpoints: 1,
        readers: 2,
    };
    let mut unit = SoftIommu::new(limits, Arc::clone(&pages));
    unit.add_endpoint(DISK).unwrap();
    let mut domain = unit.create_domain(DOMAIN).unwrap();
    domain.map(page(0), memory(0), Permissions::READ).unwrap();
    unit.attach(DISK, DOMAIN).unwrap();
    (unit, pages)
}

/// Like [`unit`], with page 1 also mapped to memory page 1.
fn unit_of_two_pages() -> (Unit, Arc<Pages>) {
    let (mut unit, pages) = unit(2);
    let mut domain = unit.domain(DOMAIN).unwrap();
    domain.map(page(1), memory(1), Permissions::READ).unwrap();
    (unit, pages)
}

/// Like [`unit_of_two_pages`], with page 1 unmapped and the QSBR state idle.
fn parked() -> (Unit, Arc<Pages>) {
    let (mut unit, pages) = unit_of_two_pages();
    unit.domain(DOMAIN).unwrap().unmap(page(1)).unwrap();
    (unit, pages)
}

/// Translates `at` for a read and reads the page.
fn access(pin: &ReadGuard<'_, Arc<Pages>>, at: IovaRange) -> Result<u64, Fault> {
    let page = pin.translate(at, Access::Read)?.first().start().get() >> 12;
    pin.memory().look(page as usize);
    Ok(page)
}

/// A device thread with one read section of one request, for page 0.
fn one_burst(mut reader: Reader<Arc<Pages>>) -> JoinHandle<()> {
    thread::spawn(move || {
        let _ = access(&reader.online().guard(), page(0));
    })
}

/// A device thread with two such read sections.
fn two_bursts(mut reader: Reader<Arc<Pages>>) -> JoinHandle<()> {
    thread::spawn(move || {
        let _ = access(&reader.online().guard(), page(0));
        let _ = access(&reader.online().guard(), page(0));
    })
}

/// Unmaps page 0 while `devices` may be reading it, then writes it.
fn unmap_during_accesses(
    mut unit: Unit,
    pages: &Pages,
    devices: impl IntoIterator<Item = JoinHandle<()>>,
) {
    unit.domain(DOMAIN).unwrap().unmap(page(0)).unwrap();
    pages.poison(0);
    for device in devices {
        device.join().unwrap();
    }
}

/// [`unmap_during_accesses`] from two devices with one read section each.
fn unmap_during_accesses_of_two((unit, pages): (Unit, Arc<Pages>)) {
    let readers = [(); 2].map(|()| unit.reader(DISK).unwrap());
    unmap_during_accesses(unit, &pages, readers.map(one_burst));
}

/// Checks all executions, or those with at most `preemptions` preemptions.
fn explore(preemptions: Option<usize>, test: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.max_branches = 10_000;
    model.preemption_bound = preemptions;
    model.check(test);
}

/// Preemption bound for tests that would otherwise take minutes. Each mutation that needs one of
/// these tests is caught within the bound.
const FEW: Option<usize> = Some(2);

/// One read section with one request, and unmap: R1, R2, R6 against W1 to W5.
#[test]
fn no_reader_uses_a_page_after_unmap() {
    explore(None, || {
        let (unit, pages) = unit(2);
        let device = one_burst(unit.reader(DISK).unwrap());
        unmap_during_accesses(unit, &pages, [device]);
    });
}

/// The same with an unmap of several ranges.
#[test]
fn no_reader_uses_a_page_after_multi_unmap() {
    explore(FEW, || {
        let (mut unit, pages) = unit(2);
        let device = one_burst(unit.reader(DISK).unwrap());
        let mut domain = unit.domain(DOMAIN).unwrap();
        domain.unmap_all([page(0), page(1)]).unwrap();
        pages.poison(0);
        device.join().unwrap();
    });
}

/// One read section with two requests. Its checkpoint lets unmap return: R4 and R5.
#[test]
fn checkpoint_ends_earlier_sections() {
    explore(None, || {
        let (unit, pages) = unit(2);
        let mut reader = unit.reader(DISK).unwrap();
        let device = thread::spawn(move || {
            let mut burst = reader.online();
            let _ = access(&burst.guard(), page(0));
            let _ = access(&burst.guard(), page(0));
        });
        unmap_during_accesses(unit, &pages, [device]);
    });
}

/// Two read sections. Unmap may see the slot of the second one; the accesses of the first must be
/// complete nevertheless (R1).
#[test]
fn new_burst_ends_earlier_sections() {
    explore(FEW, || {
        let (unit, pages) = unit(2);
        let device = two_bursts(unit.reader(DISK).unwrap());
        unmap_during_accesses(unit, &pages, [device]);
    });
}

/// A table is reused for another range. A reader that follows the new link sees no old entries. A
/// reader that followed the old link is done before the table is filled again.
#[test]
fn table_clears_its_range_before_reuse() {
    explore(FEW, || {
        // The root and the table of pages 0 and 1 are at the limit: pages 2 and 3 must reuse the
        // latter.
        let (mut unit, pages) = unit(2);
        let mut reader = unit.reader(DISK).unwrap();
        let device = thread::spawn(move || {
            let mut burst = reader.online();
            let pin = burst.guard();
            // Page 2 is never mapped to memory page 0, nor page 0 to memory page 1.
            assert_ne!(access(&pin, page(2)), Ok(0));
            assert_ne!(access(&pin, page(1)), Ok(1));
        });
        let mut domain = unit.domain(DOMAIN).unwrap();
        domain.unmap(page(0)).unwrap();
        pages.poison(0);
        domain.map(page(3), memory(1), Permissions::READ).unwrap();
        device.join().unwrap();
    });
}

/// A reader must not reach a reused table through links that it followed earlier. `next` takes a
/// later guard, which must see no entry of the table's new range.
fn links_are_forgotten(next: impl Fn(&mut Reader<Arc<Pages>>) + Copy + Send + Sync + 'static) {
    explore(Some(3), move || {
        let (mut unit, pages) = unit(2);
        let mut reader = unit.reader(DISK).unwrap();
        let device = thread::spawn(move || next(&mut reader));
        let mut domain = unit.domain(DOMAIN).unwrap();
        domain.unmap(page(0)).unwrap();
        pages.poison(0);
        domain.map(page(3), memory(1), Permissions::READ).unwrap();
        device.join().unwrap();
    });
}

#[test]
fn checkpoint_drops_links() {
    links_are_forgotten(|reader| {
        let mut burst = reader.online();
        let _ = access(&burst.guard(), page(0));
        // The first wait is for the unmap, the second one for the table.
        let _ = burst.guard();
        assert_ne!(access(&burst.guard(), page(1)), Ok(1));
    });
}

#[test]
fn new_burst_drops_links() {
    links_are_forgotten(|reader| {
        let _ = access(&reader.online().guard(), page(0));
        assert_ne!(access(&reader.online().guard(), page(1)), Ok(1));
    });
}

/// A reader that sees a mapping also sees all writes to the page before the map.
#[test]
fn a_page_is_ready_before_it_is_seen() {
    explore(None, || {
        let (mut unit, pages) = unit(2);
        let mut reader = unit.reader(DISK).unwrap();
        let device = thread::spawn(move || {
            let mut burst = reader.online();
            let _ = access(&burst.guard(), page(1));
        });
        pages.poison(1);
        let mut domain = unit.domain(DOMAIN).unwrap();
        domain.map(page(1), memory(1), Permissions::READ).unwrap();
        device.join().unwrap();
    });
}

/// After detach has returned, the device gets no translation and reads no page, in this read
/// section or the next.
#[test]
fn no_reader_uses_a_page_after_detach() {
    explore(Some(3), || {
        let (mut unit, pages) = unit(2);
        let mut reader = unit.reader(DISK).unwrap();
        let detached = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&detached);
        let device = thread::spawn(move || {
            let mut burst = reader.online();
            let _ = access(&burst.guard(), page(0));
            let over = seen.load(Ordering::Acquire) == 1;
            let result = access(&burst.guard(), page(0));
            assert!(!over || result.is_err());
        });
        unit.detach(DISK).unwrap();
        detached.store(1, Ordering::Release);
        pages.poison(0);
        device.join().unwrap();
    });
}

/// A thread drops the unit during its own read section and does not wait. Guards taken afterwards,
/// in open or new read sections, translate nothing.
fn denied_after_drop((unit, _): (Unit, Arc<Pages>)) {
    let (mut reader, mut own) = (unit.reader(DISK).unwrap(), unit.reader(DISK).unwrap());
    let dropped = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&dropped);
    let device = thread::spawn(move || {
        let mut burst = reader.online();
        let over = seen.load(Ordering::Acquire) == 1;
        let result = access(&burst.guard(), page(0));
        assert!(!over || result.is_err());
        drop(burst);
    });
    let mut burst = own.online();
    drop(unit);
    assert!(access(&burst.guard(), page(0)).is_err());
    dropped.store(1, Ordering::Release);
    drop(burst);
    device.join().unwrap();
}

#[test]
fn qsbr_reader_after_drop_is_denied() {
    explore(FEW, || denied_after_drop(unit(2)));
}

#[test]
fn qsbr_idle_reader_after_drop_is_denied() {
    explore(FEW, || denied_after_drop(parked()));
}

/// Two readers: unmap waits for both.
#[test]
fn unmap_waits_for_every_reader() {
    explore(FEW, || unmap_during_accesses_of_two(unit(2)));
}

/// A reader that registers during unmap: unmap waits for it, or it sees the page unmapped.
#[test]
fn a_new_reader_is_not_missed() {
    explore(None, || {
        let (unit, pages) = unit(2);
        let unit = Arc::new(loom::sync::Mutex::new(unit));
        let theirs = Arc::clone(&unit);
        let device = thread::spawn(move || {
            let reader = theirs.lock().unwrap().reader(DISK);
            let mut reader = reader.unwrap();
            let mut burst = reader.online();
            let _ = access(&burst.guard(), page(0));
        });
        let mut unit = unit.lock().unwrap();
        unit.domain(DOMAIN).unwrap().unmap(page(0)).unwrap();
        drop(unit);
        pages.poison(0);
        device.join().unwrap();
    });
}

/// A reader goes online while the state is idle: P1 and P2 against V1 to V4.
#[test]
fn qsbr_idle_reader_that_wakes_is_seen() {
    explore(None, || {
        let (unit, pages) = parked();
        let device = one_burst(unit.reader(DISK).unwrap());
        unmap_during_accesses(unit, &pages, [device]);
    });
}

/// Two readers: the second one may find the state active again, or being woken by the first.
#[test]
fn qsbr_woken_reader_is_seen() {
    explore(FEW, || unmap_during_accesses_of_two(parked()));
}

/// A reader goes online while the state becomes idle: P3 to P5 against R1, R2 and V1.
#[test]
fn qsbr_reader_during_idle_is_seen() {
    explore(FEW, || {
        let (mut unit, pages) = unit_of_two_pages();
        let device = two_bursts(unit.reader(DISK).unwrap());
        let mut domain = unit.domain(DOMAIN).unwrap();
        domain.unmap(page(1)).unwrap();
        domain.unmap(page(0)).unwrap();
        pages.poison(0);
        device.join().unwrap();
    });
}
