//! Nested translation: both stages against tables in memory, and against two maps from pages to
//! pages.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

use proptest::prelude::*;
use ringfence_hw::{
    NestedFault, NestedInvalidation, NestedUnit, NestedUnitConfig, Pasid, Stage, Translate,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, FirstStage, Levels, NestedEntry, SecondStage, Table};
use ringfence_types::{
    Access, CachedLevels, DomainId, FaultReason, GuestPhysAddr, Invalidation, InvalidationError,
    Invalidator, Iova, MemoryError, PageSize, Permissions, PfnRange, PhysAddr, PhysMemory,
    PhysRange, RequesterId, RingId, TABLE_WORDS,
};

use crate::rig::{A, B, DISK, GPU, NIC, READ, RW, Seen, WRITE, arena, pages_at, request, seen};

/// The guest's memory: 64 MiB at host address `HOST`, with neighbouring pages exchanged.
const GUEST: u64 = 64 << 20;
const HOST: u64 = 64 << 20;
/// The host's tables and the entries of devices.
const TABLES: u64 = 160 << 20;
const ENTRIES: u64 = 152 << 20;
/// Guest-physical frames of the guest's tables.
const GUEST_TABLES: u64 = 32 << 20;

const UNCACHED: NestedUnitConfig = NestedUnitConfig {
    iotlb: 0,
    second_stage: 0,
    largest: PageSize::Size2M,
    fault_log: 16,
};
const CACHED: NestedUnitConfig = NestedUnitConfig {
    iotlb: 64,
    second_stage: 64,
    ..UNCACHED
};

fn host_of(guest: u64) -> u64 {
    HOST + (guest ^ 0x1000)
}

/// The memory as the guest's processor addresses it.
#[derive(Clone, Copy)]
struct GuestMemory<'m>(&'m Arena);

impl PhysMemory for GuestMemory<'_> {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.0.word(PhysAddr::new(host_of(at.get())))
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        self.0.table(PhysAddr::new(host_of(at.get())))
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        self.0.words(PhysAddr::new(host_of(at.get())), count)
    }

    fn write_back(&self, _: PhysAddr, _: u64) {}

    fn drain(&self) {}
}

struct Nested<'m> {
    mem: &'m Arena,
    host_frames: Frames<&'m Arena>,
    guest_frames: Frames<GuestMemory<'m>>,
    second: Table<SecondStage>,
    unit: NestedUnit,
}

fn pasid(raw: u32) -> Pasid {
    Pasid::new(raw).unwrap()
}

impl<'m> Nested<'m> {
    /// Creates a machine whose second stage maps the guest's tables and nothing else.
    fn new(mem: &'m Arena, config: &NestedUnitConfig, levels: Levels) -> Self {
        let region = PhysRange::new(PhysAddr::new(TABLES), (256 << 20) - TABLES).unwrap();
        let host_frames = Frames::new(mem, region);
        let tables = PhysRange::new(PhysAddr::new(GUEST_TABLES), GUEST - GUEST_TABLES).unwrap();
        let guest_frames = Frames::new(GuestMemory(mem), tables);
        let format = SecondStage::new(levels).with_pages_up_to(PageSize::Size2M);
        let second = Table::new(format, A, Coherency::Coherent, mem, &host_frames).unwrap();
        let nested = Self {
            mem,
            host_frames,
            guest_frames,
            second,
            unit: NestedUnit::new(config),
        };
        for page in (GUEST_TABLES..GUEST_TABLES + (1 << 20)).step_by(4096) {
            nested.map_second(page, Permissions::READ);
        }
        nested
    }

    fn map_second(&self, guest: u64, permissions: Permissions) {
        let request = request(guest, host_of(guest), 1, permissions);
        self.second
            .map(self.mem, &self.host_frames, request)
            .unwrap();
    }

    fn unmap_second(&self, guest: u64) {
        let _ = self.second.unmap(self.mem, pages_at(guest, 1)).unwrap();
    }

    /// Creates a first stage of the guest.
    fn first(&self, levels: Levels) -> Table<FirstStage> {
        let format = FirstStage::new(levels)
            .unwrap()
            .with_pages_up_to(PageSize::Size2M);
        let memory = GuestMemory(self.mem);
        Table::new(format, A, Coherency::Coherent, &memory, &self.guest_frames).unwrap()
    }

    fn attach(&mut self, device: RequesterId, tag: u32, first: &Table<FirstStage>, levels: Levels) {
        let entry = NestedEntry {
            domain: A,
            first_root: GuestPhysAddr::new(first.root().get()),
            first_levels: levels,
            second_root: self.second.root(),
            second_levels: self.second.format().levels(),
        };
        let at = PhysAddr::new(ENTRIES + u64::from(tag) * NestedEntry::BYTES);
        entry.write(self.mem, at).unwrap();
        self.unit.set_context(device, pasid(tag), at);
    }

    fn map_first(&self, first: &Table<FirstStage>, iova: u64, guest: u64, rights: Permissions) {
        let request = request(iova, guest, 1, rights);
        first
            .map(&GuestMemory(self.mem), &self.guest_frames, request)
            .unwrap();
    }

    fn unmap_first(&self, first: &Table<FirstStage>, iova: u64) {
        let pages = pages_at(iova, 1);
        let _ = first.unmap(&GuestMemory(self.mem), pages).unwrap();
    }

    fn dma(&mut self, device: RequesterId, iova: u64, bytes: u64, access: Access) -> Seen {
        let result = self
            .unit
            .translate(self.mem, device, Iova::new(iova), bytes, access);
        seen(result.map(|translation| translation.to_vec()))
    }
}

/// "Up to 24 memory references": m levels over n levels read m * n + m + n words.
#[test]
fn a_walk_reads_24_words_for_four_levels_over_four() {
    let mem = arena();
    for (first_levels, second_levels, references) in [
        (Levels::Four, Levels::Four, 24),
        (Levels::Four, Levels::Three, 19),
        (Levels::Four, Levels::Five, 29),
        (Levels::Five, Levels::Four, 29),
        (Levels::Five, Levels::Five, 35),
    ] {
        let mut nested = Nested::new(&mem, &UNCACHED, second_levels);
        let first = nested.first(first_levels);
        nested.attach(NIC, 1, &first, first_levels);
        nested.map_first(&first, 0x7_0000, 0x3000, RW);
        nested.map_second(0x3000, RW);
        let expected = Ok(vec![(host_of(0x3000) + 8, 16)]);
        for walks in 1..=2 {
            assert_eq!(nested.dma(NIC, 0x7_0008, 16, WRITE), expected);
            assert_eq!(nested.unit.stats().walk_references, walks * references);
        }
    }
}

/// The cache of the second stage leaves the entries of the first to read; the IOTLB leaves nothing.
#[test]
fn caches_of_both_stages_shorten_the_walk() {
    let mem = arena();
    for (config, references) in [(NestedUnitConfig { iotlb: 0, ..CACHED }, 4), (CACHED, 0)] {
        let mut nested = Nested::new(&mem, &config, Levels::Four);
        let first = nested.first(Levels::Four);
        nested.attach(NIC, 1, &first, Levels::Four);
        nested.map_first(&first, 0x7_0000, 0x3000, RW);
        nested.map_second(0x3000, RW);
        assert!(nested.dma(NIC, 0x7_0000, 1, WRITE).is_ok());
        let before = nested.unit.stats().walk_references;
        assert!(nested.dma(NIC, 0x7_0000, 1, WRITE).is_ok());
        let after = nested.unit.stats().walk_references;
        assert_eq!(after - before, references, "{config:?}");
    }
}

/// A cached translation covers the smaller page of both stages.
#[test]
fn large_pages_of_one_stage_are_split_by_the_other() {
    let mem = arena();
    let mut nested = Nested::new(&mem, &CACHED, Levels::Four);
    let first = nested.first(Levels::Four);
    nested.attach(NIC, 1, &first, Levels::Four);
    let memory = GuestMemory(&mem);
    // A large page of the guest over small pages of the host.
    let large = request(0x20_0000, 0x40_0000, 512, RW);
    first.map(&memory, &nested.guest_frames, large).unwrap();
    for guest in [0x40_0000, 0x40_1000] {
        nested.map_second(guest, RW);
    }
    // Small pages of the guest over a large page of the host.
    let host = HOST + (16 << 20);
    let large = request(0x60_0000, host, 512, RW);
    nested.second.map(&mem, &nested.host_frames, large).unwrap();
    nested.map_first(&first, 0x1000, 0x60_5000, RW);
    nested.map_first(&first, 0x2000, 0x60_3000, RW);
    for _ in 0..2 {
        for (iova, at) in [
            (0x20_0000, host_of(0x40_0000)),
            (0x20_1000, host_of(0x40_1000)),
            (0x1000, host + 0x5000),
            (0x2000, host + 0x3000),
        ] {
            assert_eq!(nested.dma(NIC, iova + 8, 8, WRITE), Ok(vec![(at + 8, 8)]));
        }
        assert_eq!(
            nested.dma(NIC, 0x20_2000, 1, READ),
            Err((0x20_2000, FaultReason::NotPresent))
        );
    }
    assert_eq!(nested.unit.iotlb_live(), 4);
}

/// A fault names the stage whose owner must handle it.
#[test]
fn faults_name_their_stage() {
    let mem = arena();
    for config in [UNCACHED, CACHED] {
        let mut nested = Nested::new(&mem, &config, Levels::Four);
        let first = nested.first(Levels::Four);
        nested.attach(NIC, 1, &first, Levels::Four);
        nested.map_first(&first, 0x1000, 0x3000, RW);
        nested.map_first(&first, 0x2000, 0x4000, RW);
        nested.map_first(&first, 0x5000, 0x6000, Permissions::READ);
        nested.map_first(&first, 0x8000, 0x9000, RW);
        nested.map_second(0x3000, RW);
        nested.map_second(0x6000, RW);
        nested.map_second(0x9000, Permissions::READ);
        let guest = GuestPhysAddr::new;
        let check = |nested: &mut Nested<'_>, iova, access, reason, stage| {
            let found = nested.dma(NIC, iova, 1, access);
            assert_eq!(found, Err((iova, reason)), "{iova:#x}");
            let NestedFault {
                fault,
                stage: named,
            } = nested.unit.last_fault().unwrap();
            assert_eq!((fault.device, named), (NIC, stage), "{iova:#x}");
        };
        let not_present = FaultReason::NotPresent;
        let denied = FaultReason::WriteDenied;
        // Twice, because the first access may fill a cache.
        for _ in 0..2 {
            let stages = &mut nested;
            check(stages, 0xa000, READ, not_present, Stage::First);
            assert!(stages.dma(NIC, 0x5000, 1, READ).is_ok());
            check(stages, 0x5000, WRITE, denied, Stage::First);
            let page = Stage::SecondForPage {
                guest: guest(0x4000),
            };
            check(stages, 0x2000, READ, not_present, page);
            assert!(stages.dma(NIC, 0x8000, 1, READ).is_ok());
            let page = Stage::SecondForPage {
                guest: guest(0x9000),
            };
            check(stages, 0x8000, WRITE, denied, page);
            let beyond = FaultReason::AddressBeyondWidth;
            check(stages, 1 << 48, READ, beyond, Stage::First);
        }
        // The host takes the page of the guest's root table away.
        let root = first.root().get();
        nested.unmap_second(root);
        nested.unit.invalidate_nested(&NestedInvalidation::Global);
        let table = Stage::SecondForTable { guest: guest(root) };
        check(&mut nested, 0x1000, READ, not_present, table);
        assert_eq!(
            nested.dma(GPU, 0x1000, 1, READ),
            Err((0x1000, FaultReason::Blocked))
        );
        assert_eq!(nested.unit.last_fault().unwrap().stage, Stage::Context);
        assert_eq!(nested.unit.faults().len(), 12);
    }
}

/// A guest cannot reach host memory that its second stage lacks, whatever its first stage holds.
#[test]
fn a_hostile_first_stage_stays_in_the_guest() {
    let mem = arena();
    let mut nested = Nested::new(&mem, &CACHED, Levels::Four);
    let first = nested.first(Levels::Four);
    nested.attach(NIC, 1, &first, Levels::Four);
    // A leaf to the host's own tables, and a root that points to itself.
    nested.map_first(&first, 0x1000, TABLES, RW);
    assert_eq!(
        nested.dma(NIC, 0x1000, 1, READ),
        Err((0x1000, FaultReason::NotPresent))
    );
    let root = first.root();
    let word = GuestMemory(&mem);
    let itself = root.get() | 0x27;
    word.word(root)
        .unwrap()
        .store(itself, std::sync::atomic::Ordering::Relaxed);
    // The root is then also the page: the second stage maps it for reads only.
    assert_eq!(
        nested.dma(NIC, 0, 8, READ),
        Ok(vec![(host_of(root.get()), 8)])
    );
    assert_eq!(
        nested.dma(NIC, 0, 8, WRITE),
        Err((0, FaultReason::WriteDenied))
    );
}

/// Each stage's invalidation removes what it must and no other first stage's entries.
#[test]
fn each_stage_invalidates_its_own() {
    let mem = arena();
    // Entries: two devices with first stages of their own, one page each.
    for (name, invalidation, remaining, second_stage_stale) in [
        (
            "one page of one first stage",
            NestedInvalidation::FirstStagePages {
                domain: A,
                pasid: pasid(1),
                range: pages_at(0x1000, 1),
            },
            1,
            true,
        ),
        (
            "another page",
            NestedInvalidation::FirstStagePages {
                domain: A,
                pasid: pasid(1),
                range: pages_at(0x2000, 1),
            },
            2,
            true,
        ),
        (
            "one first stage",
            NestedInvalidation::FirstStage {
                domain: A,
                pasid: pasid(2),
            },
            1,
            true,
        ),
        (
            "a page of the second stage",
            NestedInvalidation::SecondStagePages {
                domain: A,
                range: pages_at(0x3000, 1),
            },
            0,
            false,
        ),
        (
            "another page of the second stage",
            NestedInvalidation::SecondStagePages {
                domain: A,
                range: pages_at(0x4000, 1),
            },
            0,
            true,
        ),
        ("the domain", NestedInvalidation::Domain(A), 0, false),
        ("another domain", NestedInvalidation::Domain(B), 2, true),
        ("everything", NestedInvalidation::Global, 0, false),
        ("the context", NestedInvalidation::Context(NIC), 0, false),
    ] {
        let mut nested = Nested::new(&mem, &CACHED, Levels::Four);
        let stages = [nested.first(Levels::Four), nested.first(Levels::Four)];
        nested.map_second(0x3000, RW);
        for (tag, device, first) in [(1, NIC, &stages[0]), (2, DISK, &stages[1])] {
            nested.attach(device, tag, first, Levels::Four);
            nested.map_first(first, 0x1000, 0x3000, RW);
            assert!(nested.dma(device, 0x1000, 1, WRITE).is_ok());
        }
        assert_eq!(nested.unit.iotlb_live(), 2);
        nested.unmap_second(0x3000);
        nested.unit.invalidate_nested(&invalidation);
        assert_eq!(nested.unit.iotlb_live(), remaining, "{name}");
        // A new walk for another IOVA of the same page uses the cache of the second stage.
        nested.map_first(&stages[0], 0x9000, 0x3000, RW);
        let reached = nested.dma(NIC, 0x9000, 1, READ).is_ok();
        assert_eq!(reached, second_stage_stale, "{name}");
    }
}

#[test]
fn a_guests_invalidator_covers_all_first_stages_of_its_domain() {
    let mem = arena();
    let mut nested = Nested::new(&mem, &CACHED, Levels::Four);
    let first = nested.first(Levels::Four);
    nested.map_second(0x3000, RW);
    for (tag, device) in [(1, NIC), (2, DISK)] {
        nested.attach(device, tag, &first, Levels::Four);
    }
    nested.map_first(&first, 0x1000, 0x3000, RW);
    for device in [NIC, DISK] {
        assert!(nested.dma(device, 0x1000, 1, READ).is_ok());
    }
    let ticket = nested
        .unit
        .submit(Invalidation::Pages {
            domain: A,
            range: pages_at(0x1000, 1),
            levels: CachedLevels::Leaves,
        })
        .unwrap();
    assert_eq!(nested.unit.poll(ticket), Ok(true));
    assert_eq!(nested.unit.iotlb_live(), 0);
    let ring = Invalidation::Ring {
        domain: A,
        device: NIC,
        ring: RingId::new(0),
    };
    assert_eq!(
        nested.unit.submit(ring),
        Err(InvalidationError::Unsupported)
    );
}

#[derive(Debug, Clone)]
enum Step {
    MapFirst(u64, u64, Permissions),
    UnmapFirst(u64),
    MapSecond(u64, Permissions),
    UnmapSecond(u64),
    Access(u64, u64, u64, Access),
}

fn step() -> impl Strategy<Value = Step> {
    let both = prop::sample::select(&[Permissions::READ, RW][..]);
    let any = prop::sample::select(&[Permissions::READ, Permissions::WRITE, RW][..]);
    let access = prop::sample::select(&[READ, WRITE][..]);
    prop_oneof![
        3 => (0..8_u64, 0..8_u64, both).prop_map(|(iova, guest, rights)| {
            Step::MapFirst(iova, guest, rights)
        }),
        2 => (0..8_u64).prop_map(Step::UnmapFirst),
        3 => (0..8_u64, any).prop_map(|(guest, rights)| Step::MapSecond(guest, rights)),
        2 => (0..8_u64).prop_map(Step::UnmapSecond),
        8 => (0..8_u64, 0..4096_u64, 1..9000_u64, access)
            .prop_map(|(page, offset, bytes, access)| Step::Access(page, offset, bytes, access)),
    ]
}

/// The two stages, modelled without tables.
#[derive(Default)]
struct Pages {
    first: BTreeMap<u64, (u64, Permissions)>,
    second: BTreeMap<u64, Permissions>,
}

impl Pages {
    fn access(&self, iova: u64, bytes: u64, access: Access) -> Seen {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let mut at = iova;
        let last = iova + bytes - 1;
        let denied = match access {
            Access::Read => FaultReason::ReadDenied,
            Access::Write => FaultReason::WriteDenied,
        };
        while at <= last {
            let end = (at | 0xfff).min(last);
            let (guest, first) = self
                .first
                .get(&(at >> 12))
                .ok_or((at, FaultReason::NotPresent))?;
            if !first.allows(access) {
                return Err((at, denied));
            }
            let second = self
                .second
                .get(guest)
                .ok_or((at, FaultReason::NotPresent))?;
            if !second.allows(access) {
                return Err((at, denied));
            }
            let start = host_of(guest << 12) + (at & 0xfff);
            match ranges.last_mut() {
                Some((first, bytes)) if *first + *bytes == start => *bytes += end - at + 1,
                _ => ranges.push((start, end - at + 1)),
            }
            at = end + 1;
        }
        Ok(ranges)
    }
}

/// Runs `steps`; returns the number of accesses that differ from the model.
fn run(steps: &[Step], config: &NestedUnitConfig, invalidate: [bool; 2]) -> usize {
    let mem = arena();
    let mut nested = Nested::new(&mem, config, Levels::Four);
    let first = nested.first(Levels::Four);
    nested.attach(NIC, 1, &first, Levels::Four);
    let mut pages = Pages::default();
    let mut differences = 0;
    for step in steps {
        match *step {
            Step::MapFirst(iova, guest, rights) => {
                if pages.first.insert(iova, (guest, rights)).is_some() {
                    nested.unmap_first(&first, iova << 12);
                    flush_first(&mut nested, iova, invalidate[0]);
                }
                nested.map_first(&first, iova << 12, guest << 12, rights);
            }
            Step::UnmapFirst(iova) => {
                if pages.first.remove(&iova).is_some() {
                    nested.unmap_first(&first, iova << 12);
                    flush_first(&mut nested, iova, invalidate[0]);
                }
            }
            Step::MapSecond(guest, rights) => {
                if pages.second.insert(guest, rights).is_some() {
                    nested.unmap_second(guest << 12);
                    flush_second(&mut nested, guest, invalidate[1]);
                }
                nested.map_second(guest << 12, rights);
            }
            Step::UnmapSecond(guest) => {
                if pages.second.remove(&guest).is_some() {
                    nested.unmap_second(guest << 12);
                    flush_second(&mut nested, guest, invalidate[1]);
                }
            }
            Step::Access(page, offset, bytes, access) => {
                let iova = page << 12 | offset;
                let expected = pages.access(iova, bytes, access);
                let found = nested.dma(NIC, iova, bytes, access);
                differences += usize::from(found != expected);
            }
        }
    }
    differences
}

fn flush_first(nested: &mut Nested<'_>, iova: u64, invalidate: bool) {
    if invalidate {
        let range: PfnRange = pages_at(iova << 12, 1);
        let domain: DomainId = A;
        nested
            .unit
            .invalidate_nested(&NestedInvalidation::FirstStagePages {
                domain,
                pasid: pasid(1),
                range,
            });
    }
}

fn flush_second(nested: &mut Nested<'_>, guest: u64, invalidate: bool) {
    if invalidate {
        let range = pages_at(guest << 12, 1);
        nested
            .unit
            .invalidate_nested(&NestedInvalidation::SecondStagePages { domain: A, range });
    }
}

proptest! {
    #![proptest_config(crate::rig::cases(96, 0x6e65_7374))]

    #[test]
    fn both_stages_agree_with_the_model(steps in prop::collection::vec(step(), 1..150)) {
        for (iotlb, second_stage) in [(0, 0), (2, 0), (0, 3), (64, 64)] {
            let config = NestedUnitConfig { iotlb, second_stage, ..UNCACHED };
            prop_assert_eq!(run(&steps, &config, [true, true]), 0, "{:?}", config);
        }
    }
}

/// Without the invalidations of one stage, the property fails: it is not vacuous.
#[test]
fn a_missing_invalidation_of_either_stage_shows() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let strategy = prop::collection::vec(step(), 300..301);
    let mut differences = [0; 2];
    for _ in 0..8 {
        let steps = strategy.new_tree(&mut runner).unwrap().current();
        differences[0] += run(&steps, &CACHED, [false, true]);
        differences[1] += run(&steps, &CACHED, [true, false]);
    }
    assert!(
        differences.iter().all(|count| *count > 5),
        "{differences:?}"
    );
}
