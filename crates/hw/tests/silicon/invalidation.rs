//! Lifetime of cached entries, and the exact scope of each invalidation.

use ringfence_hw::{InvalidationGranularity, VtdUnit};
use ringfence_memory::fake::NonCoherent;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, ReclaimingTable, SecondStage, Table, TranslationType,
};
use ringfence_types::FaultReason::NotPresent;
use ringfence_types::{
    CachedLevels, DomainId, FrameSource, Invalidation, InvalidationError, Invalidator, Iova,
    Pending, PhysAddr, PhysMemory, PhysRange, RequesterId, Ticket,
};
use std::sync::atomic::Ordering;

use crate::delayed::Delayed;
use crate::failing::{Failing, Misbehaviour};
use crate::rig::{A, B, DISK, NIC, READ, RW, Rig, Seen, arena, pages_at, request, roomy, seen};

fn pages(domain: DomainId, iova: u64, count: u64, levels: CachedLevels) -> Invalidation {
    Invalidation::Pages {
        domain,
        range: pages_at(iova, count),
        levels,
    }
}

/// The cache is real: without an invalidation, the device still reaches an unmapped page, even
/// after the IOVA was mapped to another page.
#[test]
fn a_stale_entry_is_hit() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain(A, &[NIC]);
    rig.map(&table, 0x1000, 0x7000, 1, RW);
    assert_eq!(rig.dma(NIC, 0x1000, 1, READ), Ok(vec![(0x7000, 1)]));
    rig.unmap(&table, 0x1000, 1);
    assert_eq!(rig.dma(NIC, 0x1000, 1, READ), Ok(vec![(0x7000, 1)]));
    rig.map(&table, 0x1000, 0x8000, 1, RW);
    assert_eq!(
        rig.dma(NIC, 0x1000, 1, READ),
        Ok(vec![(0x7000, 1)]),
        "stale entry"
    );
    rig.unit
        .invalidate(&pages(A, 0x1000, 1, CachedLevels::Leaves));
    assert_eq!(rig.dma(NIC, 0x1000, 1, READ), Ok(vec![(0x8000, 1)]));
    rig.unmap(&table, 0x1000, 1);
    rig.unit
        .invalidate(&pages(A, 0x1000, 1, CachedLevels::Leaves));
    assert_eq!(rig.dma(NIC, 0x1000, 1, READ), Err((0x1000, NotPresent)));
}

/// Absent entries are not cached: the unit sees a new mapping at once, even after a fault on the
/// same page.
#[test]
fn faults_are_not_cached() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain(A, &[NIC]);
    assert!(rig.dma(NIC, 0x1000, 1, READ).is_err());
    rig.map(&table, 0x1000, 0x7000, 1, RW);
    assert!(rig.dma(NIC, 0x1000, 1, READ).is_ok());
}

/// The IOTLB contents of two domains after each kind of invalidation.
#[test]
fn scopes_are_exact() {
    // (domain's device, page)
    let warm = [(NIC, 0x1000), (NIC, 0x2000), (NIC, 1 << 30), (DISK, 0x1000)];
    let all = [true; 4];
    // request, granularity, which of the four still translate, entries in walk caches of level 1
    let leaves = CachedLevels::Leaves;
    let cases: [(Invalidation, InvalidationGranularity, [bool; 4], u32); 13] = [
        (
            pages(A, 0x1000, 1, leaves),
            InvalidationGranularity::Selective,
            [false, true, true, true],
            3,
        ),
        (
            pages(A, 0x1000, 2, leaves),
            InvalidationGranularity::Selective,
            [false, false, true, true],
            3,
        ),
        (
            pages(A, 0x3000, 1 << 18, leaves),
            InvalidationGranularity::Selective,
            [true, true, false, true],
            3,
        ),
        (
            pages(A, 0x3000, 1 << 17, leaves),
            InvalidationGranularity::Selective,
            all,
            3,
        ),
        (
            pages(A, 0x3000, 1, CachedLevels::All),
            InvalidationGranularity::Selective,
            all,
            2,
        ),
        (
            pages(A, 0, (1 << 52) - 1, CachedLevels::All),
            InvalidationGranularity::Selective,
            [false, false, false, true],
            1,
        ),
        (
            Invalidation::Domain(A),
            InvalidationGranularity::Selective,
            [false, false, false, true],
            1,
        ),
        (
            Invalidation::Domain(B),
            InvalidationGranularity::Selective,
            [true, true, true, false],
            2,
        ),
        (
            Invalidation::Global,
            InvalidationGranularity::Selective,
            [false; 4],
            0,
        ),
        (
            Invalidation::Context(NIC),
            InvalidationGranularity::Selective,
            [false, false, false, true],
            1,
        ),
        (
            pages(A, 0x1000, 1, leaves),
            InvalidationGranularity::GlobalOnly,
            [false; 4],
            0,
        ),
        (
            Invalidation::Domain(A),
            InvalidationGranularity::GlobalOnly,
            [false; 4],
            0,
        ),
        (
            Invalidation::Context(NIC),
            InvalidationGranularity::GlobalOnly,
            [false; 4],
            0,
        ),
    ];
    let mem = arena();
    for (request, granularity, survivors, walk_caches) in cases {
        let mut config = roomy();
        config.granularity = granularity;
        let mut rig = Rig::new(&mem, &config);
        let a = rig.domain(A, &[NIC]);
        let b = rig.domain(B, &[DISK]);
        for (device, iova) in warm {
            let table = if device == NIC { &a } else { &b };
            rig.map(table, iova, 0x7000, 1, RW);
            assert!(rig.dma(device, iova, 1, READ).is_ok());
        }
        // Unmap without notice to the unit: only cached entries still translate.
        for (device, iova) in warm {
            rig.unmap(if device == NIC { &a } else { &b }, iova, 1);
        }
        rig.unit.invalidate(&request);
        assert_eq!(rig.unit.walk_caches_live()[0], walk_caches, "{request:?}");
        assert_eq!(
            rig.unit.stats().widened,
            u64::from(granularity == InvalidationGranularity::GlobalOnly),
            "{request:?}"
        );
        assert_eq!(rig.unit.stats().invalidations.total(), 1);
        let left = warm.map(|(device, iova)| rig.dma(device, iova, 1, READ).is_ok());
        assert_eq!(left, survivors, "{request:?} {granularity:?}");
    }
}

/// A table page is freed while a walk cache still points to it.
#[test]
fn a_reclaimed_table_needs_the_walk_caches_flushed() {
    let mem = arena();
    for (levels, safe) in [(CachedLevels::Leaves, false), (CachedLevels::All, true)] {
        let mut rig = Rig::new(&mem, &roomy());
        let format = SecondStage::new(Levels::Four);
        let mut table =
            ReclaimingTable::new(format, A, Coherency::Coherent, &mem, &rig.frames).unwrap();
        rig.attach(NIC, A, table.root(), Levels::Four);
        table
            .map(&mem, &rig.frames, request(0x1000, 0x7000, 1, RW))
            .unwrap();
        assert!(rig.dma(NIC, 0x1000, 1, READ).is_ok());
        let (unmapped, needed) = table.unmap(&mem, pages_at(0x1000, 1)).unwrap();
        assert_eq!(needed, CachedLevels::All);
        let retired = table.take_unlinked();
        assert_eq!(retired.len(), 3);
        // The batch accepts only a covering request. The unit receives the request under test.
        let full = pages(A, 0x1000, 1, CachedLevels::All);
        let mut forgetful = Failing::from(&mut rig.unit, 0, Misbehaviour::Forget);
        let pending = Pending::submit(&mut forgetful, full, retired).unwrap();
        let flushed = pending.wait(&mut forgetful).unwrap();
        rig.unit.invalidate(&pages(A, 0x1000, 1, levels));
        ringfence_pgtable::UnlinkedTables::release(flushed, &rig.frames);
        drop(unmapped);
        // Reuse the frames for data that resembles entries.
        for _ in 0..3 {
            let frame = rig.frames.alloc_zeroed().unwrap();
            for word in mem.table(frame).unwrap() {
                word.store(0x66_6003, Ordering::Relaxed);
            }
        }
        let outcome = rig.dma(NIC, 0x1000, 1, READ);
        let expected: Seen = if safe {
            Err((0x1000, NotPresent))
        } else {
            Ok(vec![(0x66_6000, 1)])
        };
        assert_eq!(outcome, expected);
    }
}

/// A walker that does not snoop reads memory, not the CPU's cache.
#[test]
fn a_table_not_written_back_is_not_seen() {
    for (coherency, mapped_seen) in [(Coherency::NonCoherent, true), (Coherency::Coherent, false)] {
        let size = 16 << 20;
        let mem = NonCoherent::new(Arena::new(size).unwrap(), Arena::new(size).unwrap());
        let region = PhysRange::new(PhysAddr::new(1 << 20), size - (1 << 20)).unwrap();
        let frames = Frames::new(&mem, region);
        let mut contexts = ContextTables::new(Coherency::NonCoherent, &mem, &frames).unwrap();
        let format = SecondStage::new(Levels::Four);
        let table = Table::new(format, A, coherency, &mem, &frames).unwrap();
        let translation = TranslationType::Table {
            root: table.root(),
            levels: Levels::Four,
        };
        let context = Context {
            domain: A,
            translation,
        };
        contexts.attach(&mem, &frames, NIC, &context).unwrap();
        let mut unit = VtdUnit::vtd(&roomy());
        unit.set_root_table(contexts.root());
        unit.enable();
        let dma = |unit: &mut VtdUnit| {
            let result = unit.translate(mem.device_view(), NIC, Iova::new(0x1000), 1, READ);
            seen(result.map(|translation| translation.to_vec()))
        };
        table
            .map(&mem, &frames, request(0x1000, 0x7000, 1, RW))
            .unwrap();
        assert_eq!(dma(&mut unit).is_ok(), mapped_seen, "{coherency:?}");
        let _ = table.unmap(&mem, pages_at(0x1000, 1)).unwrap();
        unit.invalidate(&Invalidation::Domain(A));
        assert_eq!(dma(&mut unit), Err((0x1000, NotPresent)), "{coherency:?}");
    }
}

fn warm_rig(mem: &Arena) -> Rig<'_> {
    let mut rig = Rig::new(mem, &roomy());
    let table = rig.domain(A, &[NIC]);
    rig.map(&table, 0x1000, 0x7000, 1, RW);
    assert!(rig.dma(NIC, 0x1000, 1, READ).is_ok());
    rig.unmap(&table, 0x1000, 1);
    rig
}

fn reaches(unit: &mut VtdUnit, mem: &Arena, device: RequesterId) -> bool {
    unit.translate(mem, device, Iova::new(0x1000), 1, READ)
        .is_ok()
}

#[test]
fn unit_completes_at_once_and_checks_tickets() {
    let mem = arena();
    let mut rig = warm_rig(&mem);
    assert_eq!(
        rig.unit.poll(Ticket::new(1)),
        Err(InvalidationError::Failed)
    );
    let ticket = rig.unit.submit(Invalidation::Domain(A)).unwrap();
    assert_eq!(rig.unit.poll(ticket), Ok(true));
    assert!(!reaches(&mut rig.unit, &mem, NIC));
}

#[test]
fn a_delayed_invalidation_takes_effect_when_it_completes() {
    let mem = arena();
    for polls in [0, 1, 3] {
        let unit = warm_rig(&mem).unit;
        let mut queue = Delayed::new(unit, polls, 2);
        let first = queue.submit(Invalidation::Domain(B)).unwrap();
        let second = queue.submit(Invalidation::Domain(A)).unwrap();
        assert_eq!(
            queue.submit(Invalidation::Global),
            Err(InvalidationError::QueueFull)
        );
        assert!(reaches(queue.unit(), &mem, NIC), "submitted is not done");
        for _ in 0..polls {
            assert_eq!(queue.poll(first), Ok(false));
        }
        assert_eq!(queue.poll(first), Ok(true));
        assert!(
            reaches(queue.unit(), &mem, NIC),
            "the first is not the second"
        );
        for _ in 0..polls {
            assert_eq!(queue.poll(second), Ok(false));
            assert!(reaches(queue.unit(), &mem, NIC));
        }
        assert_eq!(queue.poll(second), Ok(true));
        assert!(!reaches(queue.unit(), &mem, NIC));
        assert_eq!(queue.outstanding(), 0);
        assert_eq!(queue.poll(second), Ok(true));
        assert_eq!(queue.poll(Ticket::new(3)), Err(InvalidationError::Failed));
    }
}

#[test]
fn injected_failures_occur_as_configured() {
    let mem = arena();
    let request = Invalidation::Domain(A);
    for misbehaviour in [
        Misbehaviour::Refuse(InvalidationError::QueueFull),
        Misbehaviour::Fail(InvalidationError::Failed),
        Misbehaviour::Forget,
    ] {
        // Only request number 1 misbehaves: the requests before and after it are forwarded.
        let mut failing = Failing::at(warm_rig(&mem).unit, 1, misbehaviour);
        let before = failing.submit(Invalidation::Domain(B)).unwrap();
        assert_eq!(failing.poll(before), Ok(true));
        match (misbehaviour, failing.submit(request)) {
            (Misbehaviour::Refuse(error), result) => assert_eq!(result, Err(error)),
            (Misbehaviour::Fail(error), Ok(ticket)) => {
                assert_eq!(failing.poll(ticket), Err(error));
            }
            (Misbehaviour::Forget, Ok(ticket)) => assert_eq!(failing.poll(ticket), Ok(true)),
            (_, Err(error)) => panic!("refused: {error}"),
        }
        assert!(reaches(failing.inner(), &mem, NIC), "{misbehaviour:?}");
        let after = failing.submit(request).unwrap();
        assert_eq!(failing.poll(after), Ok(true));
        assert!(!reaches(failing.inner(), &mem, NIC));
        assert_eq!(failing.seen(), 3);
    }
}
