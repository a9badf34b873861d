//! Cost of a ring translation: current slot, next slot with its prefetch, any other slot, a ring
//! without an entry. The same run measures the walking unit and a lower bound.
//!
//! The variants run interleaved, so load from other virtual machines slows all of them. Only the
//! ratios of the medians are comparable. The lower bound reads a flat table of the same size in the
//! same order: the loads that every unit must perform.

use std::hint::black_box;
use std::sync::atomic::Ordering;

use ringfence_hw::{
    FaultLog, FixedLogic, Geometry, InvalidationGranularity, IommuKind, IommuRouter, Prefetch,
    Replacement, RingLogic, RingUnit, RingUnitConfig, Translate, UnitConfig, VtdUnit,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, MapRequest, RingDevice, RingPte, RingTable,
    SecondStage, Table, TranslationType, ring_words,
};
use ringfence_types::{
    Access, CachedLevels, DomainId, Invalidation, Iova, Permissions, Pfn, PfnRange, PhysAddr,
    PhysMemory, PhysRange, RequesterId, RingId, RingIova, RingSlot,
};

#[path = "../../iova/benches/support/clock.rs"]
mod clock;

// Compiled here, because a dependency on `ringfence-papers` would be one on `dma`.
#[allow(dead_code, unreachable_pub)]
#[path = "../../papers/src/ring_logic.rs"]
mod ring_logic;

use clock::{now, quantile};
use ring_logic::LogicAsPublished;

const NIC: RequesterId = RequesterId::new(0x0100);
const DISK: RequesterId = RequesterId::new(0x0208);
const DOMAIN: DomainId = DomainId::new(1);
const RING: RingId = RingId::new(1);
/// Number of slots, and of pages for the walking unit; the IOTLB holds as many.
const SLOTS: u32 = 1 << 10;
/// Accesses per sample.
const ACCESSES: usize = 1 << 13;
const SAMPLES: usize = 61;

fn geometry(sets: u32, ways: u32) -> Geometry {
    Geometry::new(sets, ways).expect("powers of two")
}

/// One measured variant and its cycles per access.
struct Side<'a> {
    name: &'static str,
    work: Box<dyn FnMut() + 'a>,
    cycles: Vec<f64>,
}

impl<'a> Side<'a> {
    fn new(name: &'static str, work: impl FnMut() + 'a) -> Self {
        Self {
            name,
            work: Box::new(work),
            cycles: Vec::new(),
        }
    }
}

fn ring_unit<L: RingLogic>(root: PhysAddr, prefetch: Prefetch) -> RingUnit<L> {
    let mut unit = RingUnit::new(&RingUnitConfig {
        riotlb: geometry(16, 4),
        replacement: Replacement::Lru,
        contexts: geometry(64, 1),
        prefetch,
        fault_log: FaultLog::MAX_CAPACITY,
    });
    unit.set_root_table(root);
    unit.enable();
    unit
}

#[inline(always)]
fn access(unit: &mut impl Translate, mem: &Arena, device: RequesterId, at: Iova) {
    match unit.translate(mem, device, at, 64, Access::Write) {
        Ok(translation) => {
            let range = translation.first();
            black_box((range.start().get(), range.bytes()));
        }
        Err(fault) => panic!("{fault}"),
    }
}

fn slot_iova(slot: u32) -> Iova {
    RingIova::start(RING, RingSlot::new(slot % SLOTS).unwrap_or(RingSlot::FIRST)).iova()
}

fn main() {
    // `cargo test --benches` runs this too; one sample suffices then.
    let samples = if std::env::args().any(|arg| arg == "--bench") {
        SAMPLES
    } else {
        1
    };
    let mem = Arena::new(64 << 20).expect("address space");
    let frames = Frames::new(
        &mem,
        PhysRange::new(PhysAddr::new(32 << 20), 32 << 20).expect("not empty"),
    );
    let new_contexts = || ContextTables::new(Coherency::Coherent, &mem, &frames).expect("frames");

    // Ring 1 of the NIC, with every slot valid.
    let (device, rings, table) = (
        PhysAddr::new(0x10_0000),
        PhysAddr::new(0x10_1000),
        PhysAddr::new(0x20_0000),
    );
    let table = RingTable::new(table, SLOTS).expect("fits");
    let words = |at| ring_words(&mem, at).expect("in memory");
    RingDevice::new(rings, 2)
        .expect("fits")
        .store(words(device));
    table.store(words(rings.wrapping_add(16)));
    for slot in 0..SLOTS {
        let buffer = PhysRange::new(PhysAddr::new(u64::from(slot) * 1500 + 2), 1500);
        let pte = RingPte::new(&buffer.expect("not empty"), Permissions::READ_WRITE);
        let at = table.entry(RingSlot::new(slot).expect("fits"));
        pte.expect("short").store(words(at.expect("in the ring")));
    }
    let mut ring_contexts = new_contexts();
    let context = Context {
        domain: DOMAIN,
        translation: TranslationType::Rings { device },
    };
    ring_contexts
        .attach(&mem, &frames, NIC, &context)
        .expect("frames");

    // The same number of pages for the walking unit.
    let mut contexts = new_contexts();
    let pages = Table::new(
        SecondStage::new(Levels::Four),
        DOMAIN,
        Coherency::Coherent,
        &mem,
        &frames,
    )
    .expect("frames");
    let context = Context {
        domain: DOMAIN,
        translation: TranslationType::Table {
            root: pages.root(),
            levels: Levels::Four,
        },
    };
    contexts
        .attach(&mem, &frames, DISK, &context)
        .expect("frames");
    let page_iova = |page: u32| Iova::new(0xffff_f000 - (u64::from(page % SLOTS) << 12));
    for page in 0..SLOTS {
        let request = MapRequest {
            iova: page_iova(page),
            pa: PhysAddr::new(u64::from(page) << 12),
            pages: 1,
            permissions: Permissions::READ_WRITE,
        };
        pages.map(&mem, &frames, request).expect("free pages");
    }
    let walking = |iotlb| {
        let mut unit = VtdUnit::vtd(&UnitConfig {
            iotlb,
            walk_caches: [geometry(16, 4), geometry(4, 4), geometry(1, 4)],
            contexts: geometry(64, 1),
            replacement: Replacement::Lru,
            fault_log: FaultLog::MAX_CAPACITY,
            granularity: InvalidationGranularity::Selective,
        });
        unit.set_root_table(contexts.root());
        unit.enable();
        unit
    };

    let root = ring_contexts.root();
    let immediate = || ring_unit::<FixedLogic>(root, Prefetch::Immediate);
    let (mut hit, mut sequential, mut anywhere, mut burst, mut missing) = (
        immediate(),
        immediate(),
        immediate(),
        immediate(),
        immediate(),
    );
    let mut unprefetched = ring_unit::<FixedLogic>(root, Prefetch::Absent);
    let mut random = ring_unit::<FixedLogic>(root, Prefetch::Absent);
    let mut as_published = ring_unit::<LogicAsPublished>(root, Prefetch::Immediate);
    let mut machine = IommuRouter::new(walking(geometry(1024, 8)), immediate(), 1);
    machine.attach(NIC, IommuKind::Ring);
    machine.attach(DISK, IommuKind::Baseline);
    let (mut page_hit, mut page_miss) = (walking(geometry(1024, 8)), walking(Geometry::ABSENT));
    let mut page_burst = walking(geometry(1024, 8));
    // Each slot once, in an order in which no slot follows its predecessor.
    let order: Vec<u32> = (0..ACCESSES as u32).map(|n| n * 389 % SLOTS).collect();
    let invalidate_ring = Invalidation::Ring {
        domain: DOMAIN,
        device: NIC,
        ring: RING,
    };

    let each = 0..ACCESSES as u32;
    let mut sides = [
        Side::new("yardstick: flat table, in order", || {
            for slot in each.clone() {
                flat(&mem, &table, slot % SLOTS);
            }
        }),
        Side::new("yardstick: flat table, out of order", || {
            for slot in &order {
                flat(&mem, &table, *slot);
            }
        }),
        Side::new("ring: current slot", || {
            for offset in each.clone() {
                let at = slot_iova(7).wrapping_add(u64::from(offset % 1024));
                access(&mut hit, &mem, NIC, at);
            }
        }),
        Side::new("ring: in order, prefetched", || {
            for slot in each.clone() {
                access(&mut sequential, &mem, NIC, slot_iova(slot));
            }
        }),
        Side::new("ring: in order, prefetched, as published", || {
            for slot in each.clone() {
                access(&mut as_published, &mem, NIC, slot_iova(slot));
            }
        }),
        Side::new("ring: in order, never prefetched", || {
            for slot in each.clone() {
                access(&mut unprefetched, &mem, NIC, slot_iova(slot));
            }
        }),
        Side::new("ring: any slot, never prefetched", || {
            for slot in &order {
                access(&mut random, &mem, NIC, slot_iova(*slot));
            }
        }),
        Side::new("ring: any slot, next one read too", || {
            for slot in &order {
                access(&mut anywhere, &mem, NIC, slot_iova(*slot));
            }
        }),
        Side::new("ring: in order, invalidated every 200", || {
            for slot in each.clone() {
                access(&mut burst, &mem, NIC, slot_iova(slot));
                if slot % 200 == 199 {
                    burst.invalidate(&invalidate_ring);
                }
            }
        }),
        Side::new("ring: invalidated every time", || {
            for slot in each.clone() {
                access(&mut missing, &mem, NIC, slot_iova(slot));
                missing.invalidate(&invalidate_ring);
            }
        }),
        Side::new("machine of both: ring, in order", || {
            for slot in each.clone() {
                access(&mut machine, &mem, NIC, slot_iova(slot));
            }
        }),
        Side::new("walking unit: IOTLB hit, in order", || {
            for page in each.clone() {
                access(&mut page_hit, &mem, DISK, page_iova(page));
            }
        }),
        Side::new("walking unit: miss and walk, in order", || {
            for page in each.clone() {
                access(&mut page_miss, &mem, DISK, page_iova(page));
            }
        }),
        Side::new("walking unit: page invalidated every time", || {
            for page in each.clone() {
                let at = page_iova(page);
                access(&mut page_burst, &mem, DISK, at);
                if let Some(range) = PfnRange::new(Pfn::containing(at), 1) {
                    page_burst.invalidate(&Invalidation::Pages {
                        domain: DOMAIN,
                        range,
                        levels: CachedLevels::Leaves,
                    });
                }
            }
        }),
    ];
    for _ in 0..samples {
        for side in &mut sides {
            // One run to warm the caches, one to measure.
            (side.work)();
            let start = now();
            (side.work)();
            let taken = now().wrapping_sub(start);
            side.cycles.push(taken as f64 / ACCESSES as f64);
        }
    }
    let yardstick = sides
        .first_mut()
        .map_or(f64::NAN, |side| quantile(&mut side.cycles, 0.5));
    println!(
        "{:<44} {:>8} {:>8} {:>8} {:>8}",
        "TSC cycles an access", "median", "10%", "90%", "/flat"
    );
    for side in &mut sides {
        let mut at = |share| quantile(&mut side.cycles, share);
        let (median, low, high) = (at(0.5), at(0.1), at(0.9));
        let ratio = median / yardstick;
        println!(
            "{:<44} {median:>8.1} {low:>8.1} {high:>8.1} {ratio:>8.2}",
            side.name
        );
    }
    drop(sides);
    println!("in order: {:?}", sequential.stats());
    println!("any slot: {:?}", anywhere.stats());
}

/// Loads the two words of a slot.
#[inline(always)]
fn flat(mem: &Arena, table: &RingTable, slot: u32) {
    let at = table.base().wrapping_add(u64::from(slot) * 16);
    if let Ok([first, second]) = mem.words(at, 2) {
        black_box(first.load(Ordering::Relaxed) + second.load(Ordering::Relaxed));
    }
}
