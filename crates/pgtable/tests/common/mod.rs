//! Platform for table tests: memory with caches that do not snoop, and frames with leak accounting.
#![allow(dead_code)] // each test binary uses its part

use std::sync::atomic::Ordering;

use ringfence_memory::fake::{FaultyFrames, NonCoherent};
use ringfence_memory::{Arena, Frames};
use ringfence_types::{
    DomainId, Flushed, Invalidation, InvalidationError, Invalidator, Iova, PageSize, Pending, Pfn,
    PfnRange, PhysAddr, PhysMemory, PhysRange, Ticket, WholeDomain,
};

pub(crate) const DOMAIN: DomainId = DomainId::new(7);
/// Bytes of the memory that holds the tables.
pub(crate) const MEMORY: u64 = 4 << 20;

pub(crate) type Memory = NonCoherent<Arena>;
pub(crate) type Source<'m> = FaultyFrames<Frames<&'m Memory>>;

/// The CPU's view is zeroed. The device's view starts as [`RUBBISH`], present leaves everywhere,
/// until the CPU writes a line back.
pub(crate) fn memory() -> Memory {
    memory_of(MEMORY, RUBBISH)
}

/// [`memory`] of `bytes` bytes with another word in the device's view.
pub(crate) fn memory_of(bytes: u64, rubbish: u64) -> Memory {
    let devices = Arena::new(bytes).expect("arena");
    let words = if rubbish == 0 {
        0
    } else {
        (bytes / 8) as usize
    };
    for word in devices.words(PhysAddr::ZERO, words).expect("inside") {
        word.store(rubbish, Ordering::Relaxed);
    }
    NonCoherent::new(Arena::new(bytes).expect("arena"), devices)
}

/// A present entry at every level. A test fails if the device follows it.
pub(crate) const RUBBISH: u64 = 0x0000_6666_6666_6003;

/// Address of a root that the test provides, of at most 1 MiB. Frames lie below and above.
pub(crate) const ROOT: PhysAddr = PhysAddr::new(1 << 20);

pub(crate) fn frames(mem: &Memory) -> Source<'_> {
    let region = PhysRange::new(PhysAddr::new(4096), MEMORY - 4096).expect("not empty");
    FaultyFrames::new(Frames::new(mem, region))
}

/// Frames of `size` in the last part of a memory of `bytes` bytes, after the root at [`ROOT`].
pub(crate) fn frames_after_root(mem: &Memory, bytes: u64, size: PageSize) -> Source<'_> {
    let start = ROOT.wrapping_add(1 << 20);
    let region = PhysRange::new(start, bytes - start.get()).expect("not empty");
    FaultyFrames::new(Frames::of_size(size, mem, region))
}

/// Returns every word of the CPU's view.
pub(crate) fn snapshot(mem: &Memory) -> Vec<u64> {
    mem.words(PhysAddr::ZERO, (MEMORY / 8) as usize)
        .expect("inside")
        .iter()
        .map(|word| word.load(Ordering::Relaxed))
        .collect()
}

pub(crate) fn page(number: u64) -> Iova {
    Pfn::new(number).iova()
}

pub(crate) fn range(first: u64, pages: u64) -> PfnRange {
    PfnRange::new(Pfn::new(first), pages).expect("not empty")
}

/// Invalidator that completes every request at once.
pub(crate) struct Instant;

impl Invalidator for Instant {
    fn submit(&mut self, _request: Invalidation) -> Result<Ticket, InvalidationError> {
        Ok(Ticket::new(0))
    }

    fn poll(&mut self, _ticket: Ticket) -> Result<bool, InvalidationError> {
        Ok(true)
    }
}

pub(crate) fn flushed() -> Flushed<WholeDomain> {
    Pending::submit(
        &mut Instant,
        Invalidation::Domain(DOMAIN),
        WholeDomain(DOMAIN),
    )
    .expect("covers")
    .wait(&mut Instant)
    .expect("completes")
}

/// Returns the pages that contain a store: a span for `ReclaimingTable::with_write_back`.
pub(crate) fn page_of(at: PhysAddr, bytes: u64) -> (PhysAddr, u64) {
    let offset = at.get() % 4096;
    (at.align_down(4096), (offset + bytes).next_multiple_of(4096))
}
