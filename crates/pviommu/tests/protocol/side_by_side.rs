//! The attacks of `docs/PVIOMMU.md`, on the published design and on this implementation. Prints the
//! table of that document.
//!
//! The as-published side uses the PVIOMMU paper's code where the paper has code (its cache, its
//! pointer). Where the paper does not mention a check, it runs the same step without the check.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ringfence_dma::flush::Never;
use ringfence_dma::space::Identity;
use ringfence_dma::{BouncePool, Dma, Mapping};
use ringfence_papers::LastTableAsPublished;
use ringfence_papers::rtc::{Rtc, RtcAsPublished};
use ringfence_pviommu::backend::{
    BackendLimits, DeviceSlot, FixedLastTable, GuestBacking, IoTables, PagePool, ReclaimError,
};
use ringfence_pviommu::frontend::{Channel, UnknownUnmap, UnmapCompletions};
use ringfence_pviommu::rtc::{Cycles, FlatCache, ResidencyPolicy, ReverseCache};
use ringfence_pviommu::wire::{Gpa, Status};
use ringfence_types::{
    Access, Direction, FrameSource, Invalidation, InvalidationError, Invalidator, Iova,
    OutOfFrames, PhysAddr, PhysMemory, PhysRange, Ticket,
};

use crate::caching::{CYCLE, LIMIT, Looped, buffer, c, guest_that, tree};
use crate::cases::{direction_is_confused, mapping_in_use_expires, range_is_confused};
use crate::machine::{ID, Line};
use crate::overcommit::stale_pointer;
use crate::rig::{MEMORY, NIC, PAGE, Rig, Source, WINDOW, config, map, memory, unmap};
use crate::simulator::{Process, host_of};

/// Number of successful violations: as published and fixed.
type Outcome = (u64, u64);

/// Two key confusions (direction and range) on three caches, one of them as published.
fn a28() -> Outcome {
    fn falls<C: ReverseCache>(make: impl Fn() -> C) -> u64 {
        let direction = direction_is_confused(&mut make());
        u64::from(direction) + u64::from(range_is_confused(&mut make()))
    }
    let c = Cycles::PAPER;
    let flat = || FlatCache::new(c, 100, ResidencyPolicy::Fixed);
    let fixed = falls(|| Rtc::new(c, 100)) + falls(flat);
    (falls(|| RtcAsPublished::new(c, 100)), fixed)
}

fn a29() -> Outcome {
    let c = Cycles::PAPER;
    let as_published = mapping_in_use_expires(&mut RtcAsPublished::new(c, 100));
    let tree = mapping_in_use_expires(&mut Rtc::new(c, 100));
    let flat = mapping_in_use_expires(&mut FlatCache::new(c, 100, ResidencyPolicy::Fixed));
    (as_published.into(), u64::from(tree) + u64::from(flat))
}

/// A map to host memory: executed without checks, and by the backend.
fn a30() -> Outcome {
    let secret = PhysAddr::new(0x1000_0000);
    let to = Direction::ToDevice;
    let last = FixedLastTable::default();
    let limits = BackendLimits::default();
    let mut as_published = Rig::prepared(config(), limits, &memory(), last, |tables| {
        tables
            .map(DeviceSlot::new(0), Iova::new(WINDOW), secret, to)
            .unwrap();
    });
    let mut fixed = Rig::new();
    let request = map(NIC, to, &[(WINDOW, secret.get())]);
    assert_eq!(fixed.backend.handle(&request), Status::BadGpa);
    let reached = |rig: &mut Rig| u64::from(rig.reach(NIC, WINDOW, Access::Read).is_ok());
    (reached(&mut as_published), reached(&mut fixed))
}

/// Guest pages that a device's simulator reads without a grant. One simulator is a thread of the
/// process that has all memory; the other is a process with grants only. Both try the same
/// addresses. `crates/live/tests/isolate/memory_scan.rs` does this with a real thread and a real
/// process.
fn a31() -> Outcome {
    let stolen = |process: Process| {
        let mut host = host_of(process);
        let pages = [(WINDOW, MEMORY), (WINDOW + PAGE, MEMORY + PAGE)];
        let request = map(NIC, Direction::ToDevice, &pages);
        assert_eq!(host.backend.handle(&request), Status::Ok);
        // One page that is granted, and one that was.
        let request = unmap(NIC, &[WINDOW + PAGE]);
        assert_eq!(host.backend.handle(&request), Status::Ok);
        let mut read = host.read_all();
        assert!(read.remove(&MEMORY), "its grant");
        read.len() as u64
    };
    (stolen(Process::whole()), stolen(Process::with_room()))
}

/// The host reclaims a frame that a device can access, without and with pin counts.
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
    let (as_published, secret, _) = stale_pointer(LastTableAsPublished::default());
    let (fixed, ..) = stale_pointer(FixedLastTable::default());
    (
        u64::from(as_published == secret),
        u64::from(fixed == secret),
    )
}

/// Bytes of an earlier user that a device finds in a bounce slot next to its buffer: in an
/// uncleared slot, and in a slot from the DMA layer.
fn a34() -> Outcome {
    const SLOT: u64 = 2048;
    const LOW: u64 = MEMORY + (64 << 10);
    let left = |as_published: bool| {
        let mut machine = tree().machine;
        let arena = Arc::clone(&machine.memory);
        let memory = |start, bytes| PhysRange::new(PhysAddr::new(start), bytes).unwrap();
        let pool = BouncePool::new(memory(LOW, 128 << 10)).unwrap();
        let mut dma = Dma::new(Never).with_bounce(pool);
        // A device that can address the slots but not the buffers.
        let (reach, high) = (Iova::new((1 << 20) - 1), MEMORY + (2 << 20));
        let at = dma.attach(ID, reach, |domain| Ok::<_, ()>(Identity::new(domain)));
        let (at, mut cpu) = (at.unwrap(), dma.cpu());
        let to = Direction::ToDevice;
        arena
            .write_bytes(PhysAddr::new(high), &[0x5e; SLOT as usize])
            .unwrap();
        let earlier = memory(high, SLOT);
        let mapped = dma.map_single(&mut cpu, &mut machine, &at, (), earlier, to);
        let (mapping, _) = mapped.unwrap();
        let slot = mapping.bounce().unwrap().copy();
        let _ = dma
            .unmap_single(&mut cpu, &mut machine, &at, mapping)
            .unwrap();
        // Now map 64 bytes of another user.
        let later = memory(high + SLOT, 64);
        let own = [0x11; 64];
        arena.write_bytes(later.start(), &own).unwrap();
        if as_published {
            // Copy the buffer into a free slot without clearing the rest.
            arena.write_bytes(slot.start(), &own).unwrap();
        } else {
            let mapped = dma.map_single(&mut cpu, &mut machine, &at, (), later, to);
            let again = mapped.unwrap().0.bounce().unwrap().copy();
            assert_eq!(again.start(), slot.start(), "the same slot");
        }
        let mut seen = [0; SLOT as usize];
        arena.read_bytes(slot.start(), &mut seen).unwrap();
        assert_eq!(seen[..64], own);
        seen.iter().filter(|byte| **byte == 0x5e).count() as u64
    };
    (left(true), left(false))
}

/// A source that does not zero its frames.
struct Unclean(Source, std::cell::Cell<Option<PhysAddr>>);

impl FrameSource for Unclean {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        self.1.take().map_or_else(|| self.0.alloc_zeroed(), Ok)
    }

    fn free(&self, frame: PhysAddr) {
        self.1.set(Some(frame));
    }
}

/// Words of an earlier owner in a frame of the pool.
fn a34_frames() -> Outcome {
    fn residue<S: FrameSource>(rig: &Rig, source: S) -> u64 {
        let mut pool = PagePool::new(source);
        let all: Vec<_> = (0..pool.available())
            .map(|_| pool.alloc().unwrap())
            .collect();
        let words = |frame: &PhysAddr| rig.arena.table(*frame).unwrap();
        for word in words(&all[0]) {
            word.store(0x5ec2e7, Ordering::Relaxed);
        }
        pool.free(all[0]);
        pool.refill();
        let mut again =
            std::iter::from_fn(|| (pool.available() > 0).then(|| pool.alloc().unwrap()));
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

/// Takes an unmap for complete when the request was sent.
struct UnconfirmedUnmap(Line<Looped>);

impl Invalidator for UnconfirmedUnmap {
    fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
        self.0.with(Channel::kick);
        Ok(Ticket::new(0))
    }

    fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
        Ok(true)
    }
}

/// Pages of an expired batch that the device can still access when their addresses are free again.
/// One guest frees them after the request, the other after the answer.
fn a35() -> Outcome {
    fn reached<I: Invalidator>(waits: impl FnOnce(Line<Looped>) -> I) -> u64 {
        let pages = LIMIT as u64;
        let cache = Rtc::new(c(), LIMIT);
        let mut guest = guest_that(cache, UnknownUnmap::Refused, waits);
        let from = Direction::FromDevice;
        let mappings: Vec<_> = (0..pages)
            .map(|page| guest.map(buffer(page, 0, 64), from))
            .collect();
        let expired: BTreeSet<Iova> = mappings.iter().map(Mapping::iova).collect();
        for mapping in mappings {
            // Load the translation into the IOTLB.
            guest.reach(mapping.iova(), Access::Write).unwrap();
            assert!(guest.unmap(mapping), "kept");
        }
        let before = guest.asked().0;
        for _ in 0..=c().get() {
            guest.wait(CYCLE);
        }
        assert!(guest.asked().0 > before, "the batch has expired");
        let free: Vec<Iova> = guest.left();
        let of_batch: Vec<_> = free.iter().filter(|iova| expired.contains(iova)).collect();
        assert_eq!(of_batch.len() as u64, pages, "all are free");
        let reached = of_batch
            .iter()
            .filter(|iova| guest.reach(***iova, Access::Write).is_some());
        reached.count() as u64
    }
    (reached(UnconfirmedUnmap), reached(UnmapCompletions::new))
}

#[test]
fn as_published_and_fixed() {
    type Row = (&'static str, &'static str, fn() -> Outcome);
    let rows: [Row; 9] = [
        ("A28", "mappings of another direction or length", a28),
        ("A29", "mappings in use that expire", a29),
        ("A30", "pages outside the guest", a30),
        ("A31", "pages without a grant", a31),
        ("A32", "mapped frames that the host takes", a32),
        ("A33", "pages behind a freed table", a33),
        ("A34", "bytes of an earlier user of a bounce slot", a34),
        ("A34", "words of an earlier owner of a frame", a34_frames),
        ("A35", "pages freed before their unmap is answered", a35),
    ];
    println!("{:<6}{:<44}{:>13}{:>10}", "", "", "as published", "fixed");
    for (name, what, attack) in rows {
        let (as_published, fixed) = attack();
        println!("{name:<6}{what:<44}{as_published:>13}{fixed:>10}");
        assert!(as_published > 0, "{name} shows nothing");
        assert_eq!(fixed, 0, "{name}");
    }
}
