//! Attacks A28 to A35, what the document says beside what is built: one table, which is printed and stands in `docs/PVIOMMU.md`.
//!
//! What the literal side is: where the document has code, that code (its cache, its pointer); where it says nothing of a check, the same step
//! without the check.

use std::sync::atomic::Ordering;

use ringfence_pviommu::backend::{
    Backing, IoTables, LiteralLastTable, PagePool, ReclaimError, RepairedLastTable, Slot,
};
use ringfence_pviommu::rtc::{Cache, Cycles, FlatRtc, LiteralRtc, Residency, Rtc};
use ringfence_pviommu::wire::{Gpa, Status};
use ringfence_types::{Access, Direction, FrameSource, Iova, OutOfFrames, PhysAddr, PhysMemory};

use crate::cases::{direction_is_confused, key, mapping_in_use_expires, range_is_confused};
use crate::overcommit::stale_pointer;
use crate::rig::{MEMORY, NIC, PAGE, Rig, Source, WINDOW, map, memory};
use crate::simulator::host;

/// What came through that should not have: literal and repaired.
type Outcome = (u64, u64);

/// Two confusions of three caches, one of them literal.
fn a28() -> Outcome {
    fn falls<C: Cache>(make: impl Fn() -> C) -> u64 {
        let direction = direction_is_confused(&mut make());
        u64::from(direction) + u64::from(range_is_confused(&mut make()))
    }
    let c = Cycles::DOCUMENT;
    let flat = || FlatRtc::new(c, 100, Residency::Fixed);
    let repaired = falls(|| Rtc::new(c, 100)) + falls(flat);
    (falls(|| LiteralRtc::new(c, 100)), repaired)
}

fn a29() -> Outcome {
    let c = Cycles::DOCUMENT;
    let literal = mapping_in_use_expires(&mut LiteralRtc::new(c, 100));
    let tree = mapping_in_use_expires(&mut Rtc::new(c, 100));
    let flat = mapping_in_use_expires(&mut FlatRtc::new(c, 100, Residency::Fixed));
    (literal.into(), u64::from(tree) + u64::from(flat))
}

/// A map to memory of the host's: done as it is asked for, and by the backend.
fn a30() -> Outcome {
    let secret = PhysAddr::new(0x1000_0000);
    let to = Direction::ToDevice;
    let mut literal = Rig::new();
    let tables = literal.backend.tables();
    tables
        .map(Slot::new(0), Iova::new(WINDOW), secret, to)
        .unwrap();
    let mut repaired = Rig::new();
    let request = map(NIC, to, &[(WINDOW, secret.get())]);
    assert_eq!(repaired.backend.handle(&request), Status::BadGpa);
    let reached = |rig: &mut Rig| u64::from(rig.reach(NIC, WINDOW, Access::Read).is_ok());
    (reached(&mut literal), reached(&mut repaired))
}

/// Pages that a simulated device has without a grant: a thread of the process that has all memory, and one that is granted what is mapped. The
/// process itself is `crates/live/tests/isolate/reached.rs`.
fn a31() -> Outcome {
    let all: u64 = memory().iter().map(|range| range.bytes() / PAGE).sum();
    let mut simulated = host(usize::MAX);
    let request = map(NIC, Direction::ToDevice, &[(WINDOW, MEMORY)]);
    assert_eq!(simulated.backend.handle(&request), Status::Ok);
    (all - 1, simulated.granted() as u64 - 1)
}

/// The host takes a frame that a device reaches, without and with counting those who do.
fn a32() -> Outcome {
    let taken = |counts: bool| {
        let mut rig = Rig::new();
        let page = Gpa::new(MEMORY);
        assert_eq!(
            rig.map(NIC, Direction::ToDevice, &[(WINDOW, MEMORY)]),
            Status::Ok
        );
        if !counts {
            rig.backend.backing().unpin(page);
        }
        let taken = rig.backend.backing().reclaim(page, &mut rig.processors);
        let reached = rig.reach(NIC, WINDOW, Access::Read);
        assert!(taken.is_ok() || taken == Err(ReclaimError::Mapped { mappings: 1 }));
        u64::from(taken.is_ok_and(|frame| reached == Ok(frame)))
    };
    (taken(false), taken(true))
}

fn a33() -> Outcome {
    let (literal, secret, _) = stale_pointer(LiteralLastTable::default());
    let (repaired, ..) = stale_pointer(RepairedLastTable::default());
    (u64::from(literal == secret), u64::from(repaired == secret))
}

/// A source that hands frames on as they are.
struct Unclean(Source, std::cell::Cell<Option<PhysAddr>>);

impl FrameSource for Unclean {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        self.1.take().map_or_else(|| self.0.alloc_zeroed(), Ok)
    }

    fn free(&self, frame: PhysAddr) {
        self.1.set(Some(frame));
    }
}

/// Words of an earlier owner's in a frame of the pool. (The slots of bounce buffers: `crates/dma/tests/layer/bounce.rs`.)
fn a34() -> Outcome {
    fn residue<S: FrameSource>(rig: &Rig, source: S) -> u64 {
        let mut pool = PagePool::new(source);
        let all: Vec<_> = (0..pool.available())
            .map(|_| pool.take().unwrap())
            .collect();
        let words = |frame: &PhysAddr| rig.arena.table(*frame).unwrap();
        for word in words(&all[0]) {
            word.store(0x5ec2e7, Ordering::Relaxed);
        }
        pool.give_back(all[0]);
        pool.refill();
        let mut again = std::iter::from_fn(|| (pool.available() > 0).then(|| pool.take().unwrap()));
        let dirty = again.find(|frame| {
            let left = |word: &std::sync::atomic::AtomicU64| word.load(Ordering::Relaxed) != 0;
            words(frame).iter().any(left)
        });
        dirty.map_or(0, |frame| words(&frame).len() as u64)
    }
    let rig = Rig::new();
    let unclean = Unclean(rig.frames.clone(), None.into());
    (residue(&rig, unclean), residue(&rig, rig.frames.clone()))
}

/// Pages of an expired batch that the device still reaches when they are free: freed one by one before the batch's one request, and after its answer.
fn a35() -> Outcome {
    let pages = 64;
    let reached = |literal: bool| {
        let mut rig = Rig::new();
        let mut cache = Rtc::new(Cycles::DOCUMENT, 100);
        for page in 0..pages {
            let (giova, gpa) = (WINDOW + page * PAGE, MEMORY + page * PAGE);
            let to = Direction::FromDevice;
            assert_eq!(rig.map(NIC, to, &[(giova, gpa)]), Status::Ok);
            // The IOTLB has it.
            rig.reach(NIC, giova, Access::Write).unwrap();
            cache.insert(key(page, 1, to), Iova::new(giova)).unwrap();
            cache.release(key(page, 1, to)).unwrap();
        }
        let mut batch = Vec::new();
        for _ in 0..=Cycles::DOCUMENT.get() {
            cache.tick(|_, giova| batch.push(giova.get()));
        }
        assert_eq!(batch.len() as u64, pages, "all of a cycle at once");
        let mut reached = 0;
        if !literal {
            assert_eq!(rig.unmap(NIC, &batch), Status::Ok);
        }
        for giova in &batch {
            // Its address is free.
            reached += u64::from(rig.reach(NIC, *giova, Access::Write).is_ok());
        }
        if literal {
            assert_eq!(rig.unmap(NIC, &batch), Status::Ok);
        }
        reached
    };
    (reached(true), reached(false))
}

#[test]
fn literal_and_repaired() {
    type Row = (&'static str, &'static str, fn() -> Outcome);
    let rows: [Row; 8] = [
        ("A28", "mappings of another direction or length", a28),
        ("A29", "mappings in use that expire", a29),
        ("A30", "pages outside the guest", a30),
        ("A31", "pages without a grant", a31),
        ("A32", "mapped frames that the host takes", a32),
        ("A33", "pages behind a freed table", a33),
        ("A34", "words of an earlier owner", a34),
        ("A35", "pages freed before their unmap", a35),
    ];
    println!("{:<6}{:<42}{:>8}{:>10}", "", "", "literal", "repaired");
    for (name, what, attack) in rows {
        let (literal, repaired) = attack();
        println!("{name:<6}{what:<42}{literal:>8}{repaired:>10}");
        assert!(literal > 0, "{name} shows nothing");
        assert_eq!(repaired, 0, "{name}");
    }
}
