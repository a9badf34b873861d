//! The protocol between readers and unmap under loom: every interleaving, and every reordering that
//! loom models, of small cases. What runs here are the shipped sources, compiled against loom's
//! atomics (`sync` below stands in for the crate's own).
//!
//! A page is a cell that loom watches: a reader looks at it through a translation, and whoever has
//! unmapped it writes. If the two are not ordered, loom says so. Tables have two entries, so that
//! four pages need two levels.
//!
//! What loom cannot show is said in decision 0015.
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

/// Loom's part of `src/sync.rs`.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
    pub(crate) use loom::sync::{Mutex, MutexGuard};

    pub(crate) const INDEX_BITS: u32 = 1;
    pub(crate) const IDLE_AFTER: usize = 3;

    loom::lazy_static! {
        /// All light and heavy fences, in an order. That they are ordered among each other, and
        /// with no other fence, is all that is promised of them; and loom is told no more.
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
pub use error::{IommuError, MapError, MapReason, ReadSectionOpen, UnmapError};
pub use iommu::{SoftIommu, SoftIommuLimits};
pub use phys_ranges::PhysRanges;
pub use reader::{ReadGuard, ReadSection, Reader};
pub use table::Width;

const DISK: RequesterId = RequesterId::new(0x20);
const DOMAIN: DomainId = DomainId::new(1);
const OTHER: DomainId = DomainId::new(2);

/// Two pages of memory. A device looks, and only whoever has taken the page away writes.
struct Pages([UnsafeCell<u32>; 2]);

impl Pages {
    fn new() -> Self {
        Self([UnsafeCell::new(0), UnsafeCell::new(0)])
    }

    /// The page belongs to the caller alone, who says so by writing.
    fn poison(&self, page: usize) {
        self.0[page].with_mut(|_| ());
    }

    fn look(&self, page: usize) {
        self.0[page].with(|_| ());
    }
}

// SAFETY: nothing looks into the cells; loom watches who would, and that is the test.
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

/// A unit with page 0 mapped to memory page 0. The attachment has waited at the gate twice, as one
/// that is there and as one that has changed: the next wait that finds nobody online parks it.
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

/// As [`unit`], and page 1 is mapped to memory page 1.
fn unit_of_two_pages() -> (Unit, Arc<Pages>) {
    let (mut unit, pages) = unit(2);
    let mut domain = unit.domain(DOMAIN).unwrap();
    domain.map(page(1), memory(1), Permissions::READ).unwrap();
    (unit, pages)
}

/// As [`unit`], and the gate is parked.
fn parked() -> (Unit, Arc<Pages>) {
    let (mut unit, pages) = unit_of_two_pages();
    unit.domain(DOMAIN).unwrap().unmap(page(1)).unwrap();
    (unit, pages)
}

/// The device reads `at`, and looks at what it got.
fn access(pin: &ReadGuard<'_, Arc<Pages>>, at: IovaRange) -> Result<u64, Fault> {
    let place = pin.translate(at, Access::Read)?.first().start().get() >> 12;
    pin.memory().look(place as usize);
    Ok(place)
}

/// A thread of the device: a burst of one request, for page 0.
fn one_burst(mut reader: Reader<Arc<Pages>>) -> JoinHandle<()> {
    thread::spawn(move || {
        let _ = access(&reader.online().guard(), page(0));
    })
}

/// A thread of the device: two of them.
fn two_bursts(mut reader: Reader<Arc<Pages>>) -> JoinHandle<()> {
    thread::spawn(move || {
        let _ = access(&reader.online().guard(), page(0));
        let _ = access(&reader.online().guard(), page(0));
    })
}

/// Takes page 0 from `devices`, which may be looking at it. Then it is the caller's, who writes.
fn take_away(mut unit: Unit, pages: &Pages, devices: impl IntoIterator<Item = JoinHandle<()>>) {
    unit.domain(DOMAIN).unwrap().unmap(page(0)).unwrap();
    pages.poison(0);
    for device in devices {
        device.join().unwrap();
    }
}

/// As [`take_away`], from two devices that come once each.
fn take_away_from_two((unit, pages): (Unit, Arc<Pages>)) {
    let readers = [(); 2].map(|()| unit.reader(DISK).unwrap());
    take_away(unit, &pages, readers.map(one_burst));
}

/// All executions, or those in which threads are interrupted at most `preemptions` times other than
/// where they wait.
fn explore(preemptions: Option<usize>, test: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.max_branches = 10_000;
    model.preemption_bound = preemptions;
    model.check(test);
}

/// For what takes minutes otherwise. Each mutation that needs one of these tests is caught within
/// the bound.
const FEW: Option<usize> = Some(2);

/// A burst of one request, and unmap: R1, R2, R6 against W1 to W5.
#[test]
fn nobody_looks_at_a_page_after_unmap() {
    explore(None, || {
        let (unit, pages) = unit(2);
        let device = one_burst(unit.reader(DISK).unwrap());
        take_away(unit, &pages, [device]);
    });
}

/// The same for many ranges at once.
#[test]
fn nobody_looks_at_a_page_after_unmap_of_several() {
    explore(FEW, || {
        let (mut unit, pages) = unit(2);
        let device = one_burst(unit.reader(DISK).unwrap());
        let mut domain = unit.domain(DOMAIN).unwrap();
        domain.unmap_all([page(0), page(1)]).unwrap();
        pages.poison(0);
        device.join().unwrap();
    });
}

/// A burst of two requests: its checkpoint lets unmap go on, R4 and R5.
#[test]
fn a_checkpoint_ends_what_was_before_it() {
    explore(None, || {
        let (unit, pages) = unit(2);
        let mut reader = unit.reader(DISK).unwrap();
        let device = thread::spawn(move || {
            let mut burst = reader.online();
            let _ = access(&burst.guard(), page(0));
            let _ = access(&burst.guard(), page(0));
        });
        take_away(unit, &pages, [device]);
    });
}

/// Two bursts: the second one's slot may be what unmap meets, and the first one's accesses are over
/// nevertheless (R1).
#[test]
fn a_new_burst_ends_what_was_before_it() {
    explore(FEW, || {
        let (unit, pages) = unit(2);
        let device = two_bursts(unit.reader(DISK).unwrap());
        take_away(unit, &pages, [device]);
    });
}

/// A table goes from one range to another: who follows the new link sees nothing of the old
/// entries, and who followed the old link has left before the table is filled again.
#[test]
fn a_table_forgets_its_range_before_it_has_another() {
    explore(FEW, || {
        // The root, the table of pages 0 and 1, and no other: pages 2 and 3 need that one again.
        let (mut unit, pages) = unit(2);
        let mut reader = unit.reader(DISK).unwrap();
        let device = thread::spawn(move || {
            let mut burst = reader.online();
            let pin = burst.guard();
            // Page 2 is at no time mapped to memory page 0, nor page 0 to memory page 1.
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

/// What goes from one range to another is not reached by links that a reader followed before:
/// `next` takes the pin after, which sees nothing of the range that the table has now.
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
fn a_checkpoint_forgets_links() {
    links_are_forgotten(|reader| {
        let mut burst = reader.online();
        let _ = access(&burst.guard(), page(0));
        // The first wait is unmap's own, the second one is for the table.
        let _ = burst.guard();
        assert_ne!(access(&burst.guard(), page(1)), Ok(1));
    });
}

#[test]
fn a_new_burst_forgets_links() {
    links_are_forgotten(|reader| {
        let _ = access(&reader.online().guard(), page(0));
        assert_ne!(access(&reader.online().guard(), page(1)), Ok(1));
    });
}

/// Who sees a mapping sees what was done to the page before it was mapped.
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

/// Once detach has returned nothing is translated and nothing is looked at, in this burst or in the
/// next one.
#[test]
fn nobody_looks_at_a_page_after_detach() {
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

/// The unit goes while the thread that drops it is in a burst, and does not wait: who takes a pin
/// afterwards, in the burst that is open or in a new one, translates nothing.
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
fn who_comes_after_drop_is_denied() {
    explore(FEW, || denied_after_drop(unit(2)));
}

#[test]
fn who_comes_to_a_parked_gate_after_drop_is_denied() {
    explore(FEW, || denied_after_drop(parked()));
}

/// Two readers: unmap waits for both.
#[test]
fn unmap_waits_for_every_reader() {
    explore(FEW, || take_away_from_two(unit(2)));
}

/// A reader that registers while unmap is under way is waited for, or sees the page gone.
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

/// A reader that goes online at a parked gate: P1 and P2 against V1 to V4.
#[test]
fn who_comes_to_a_parked_gate_is_seen() {
    explore(None, || {
        let (unit, pages) = parked();
        let device = one_burst(unit.reader(DISK).unwrap());
        take_away(unit, &pages, [device]);
    });
}

/// Two of them: the second one may find the gate woken, or half woken, by the first.
#[test]
fn who_comes_to_a_woken_gate_is_seen() {
    explore(FEW, || take_away_from_two(parked()));
}

/// A reader that comes while the gate is being parked: P3 to P5 against R1, R2 and V1.
#[test]
fn who_comes_while_a_gate_is_parked_is_seen() {
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
