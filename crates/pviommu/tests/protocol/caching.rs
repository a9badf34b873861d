//! The cache in front of the frontend: its requests to the host, and which pages a device can
//! access for how long.

mod detach;
mod lists;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use ringfence_dma::flush::{PerCycle, RangeBatch};
use ringfence_dma::space::{AddressLimits, AddressSpace as _, CachedOrCleared, Paged, Rounding};
use ringfence_dma::{
    Attachment, Cpu, Dma, DmaSegment, MapError, Mapping, Outcome, SgLimits, SgMapping, SgRequest,
    UnmapFailure, UnmapReason,
};
use ringfence_iova::{AllocRequest as Alloc, CachedRbTree, CachedTree, IovaAllocator as _};
use ringfence_memory::fake::FaultyFrames;
use ringfence_memory::{Arena, Frames};
use ringfence_papers::rtc::{Rtc, RtcAsPublished};
use ringfence_pviommu::backend::{FixedLastTable, HardwareTables, OnDemand};
use ringfence_pviommu::frontend::{
    CacheState, CachedSpace, Channel, ChannelOptions, RemoteTable, SharedChannel, UnknownUnmap,
    UnmapCompletions,
};
use ringfence_pviommu::loopback::Loopback;
use ringfence_pviommu::rtc::{Cycles, FlatCache, MappingKey, ResidencyPolicy, ReverseCache};
use ringfence_types::{
    Access, Direction, Invalidator, Iova, IovaRange, Nanos, Pfn, PfnRange, PhysAddr, PhysRange,
    RingId,
};

use crate::machine::{ID, Line, Machine, SPACE, Table, Waits};
use crate::rig::{MEMORY, NIC, PAGE, Rig, Source, Unit, WINDOW};

pub(crate) type Looped = Loopback<
    OnDemand<Arc<Arena>, Source, FixedLastTable>,
    HardwareTables<Arc<Arena>, Source, Unit>,
>;
type Space<C> =
    CachedSpace<CachedRbTree<RefCell<CachedTree>>, Table<Looped>, C, RefCell<CacheState<C>>>;
type Policy = PerCycle<RefCell<RangeBatch>>;

/// T, the length of a cycle.
pub(crate) const CYCLE: u64 = 1000;
/// Maximum number of cached mappings.
pub(crate) const LIMIT: usize = 64;

pub(crate) struct Guest<C: ReverseCache, I: Invalidator = Waits<Looped>> {
    dma: Dma<Space<C>, Policy, u32>,
    cpu: Cpu<Space<C>, Policy, u32>,
    at: Attachment,
    pub(crate) machine: Machine<I>,
    link: Line<Looped>,
    fails: Rc<Cell<bool>>,
}

pub(crate) fn c() -> Cycles {
    Cycles::new(2).unwrap()
}

pub(crate) fn guest<C: ReverseCache>(cache: C, unknown_unmap: UnknownUnmap) -> Guest<C> {
    guest_that(cache, unknown_unmap, UnmapCompletions::new)
}

/// Creates a guest whose invalidator is `waits`.
pub(crate) fn guest_that<C: ReverseCache, I: Invalidator>(
    cache: C,
    unknown_unmap: UnknownUnmap,
    waits: impl FnOnce(Line<Looped>) -> I,
) -> Guest<C, I> {
    let Rig {
        backend,
        arena,
        fails,
        ..
    } = Rig::new();
    let options = ChannelOptions {
        pages_max: 16,
        max_empty_polls: 50,
    };
    let channel = Channel::new(Loopback::new(backend, 64), options);
    let link = Rc::new(SharedChannel::new(channel, RefCell::new));
    // Memory of the guest that no test maps.
    let region = PhysRange::new(PhysAddr::new(MEMORY + (4 << 20)), 4 << 20).unwrap();
    let frames = Frames::new(Arc::clone(&arena), region);
    let machine = Machine {
        memory: arena,
        frames: Source(Arc::new(FaultyFrames::new(frames))),
        answers: waits(Rc::clone(&link)),
        now: Nanos(0),
    };
    let mut dma = Dma::new(PerCycle::new(RefCell::new));
    let window = PfnRange::new(Pfn::containing(Iova::new(WINDOW)), SPACE).unwrap();
    let at = dma
        .attach(ID, Iova::new(u64::from(u32::MAX)), |domain| {
            let allocator = CachedRbTree::new(CachedTree::new(window), RefCell::new);
            let table = RemoteTable::new(Rc::clone(&link), NIC, domain);
            let paged = Paged::new(allocator, table, Rounding::Exact);
            Ok::<_, ()>(CachedSpace::new(
                paged,
                cache,
                CYCLE,
                unknown_unmap,
                RefCell::new,
            ))
        })
        .unwrap();
    Guest {
        cpu: dma.cpu(),
        dma,
        at,
        machine,
        link,
        fails,
    }
}

pub(crate) fn tree() -> Guest<Rtc> {
    guest(Rtc::new(c(), LIMIT), UnknownUnmap::Refused)
}

impl<C: ReverseCache, I: Invalidator> Guest<C, I> {
    pub(crate) fn map(&mut self, memory: PhysRange, direction: Direction) -> Mapping<u32> {
        let (cpu, machine) = (&mut self.cpu, &mut self.machine);
        let mapped = self
            .dma
            .map_single(cpu, machine, &self.at, 7, memory, direction);
        mapped.unwrap().0
    }

    pub(crate) fn map_list(
        &mut self,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Option<SgMapping<u32>> {
        let mapped = self.map_list_into(pieces, direction, pieces.len());
        mapped.ok().map(|(mapping, _)| mapping)
    }

    /// Maps a list with `entries` entries for its segments. Returns the number of segments too.
    pub(crate) fn map_list_into(
        &mut self,
        pieces: &[PhysRange],
        direction: Direction,
        entries: usize,
    ) -> Result<(SgMapping<u32>, usize), MapError> {
        let nothing = DmaSegment {
            range: IovaRange::new(Iova::ZERO, 1).unwrap(),
        };
        let request = SgRequest {
            pieces,
            buffer: 7,
            direction,
            limits: SgLimits::default(),
            out: &mut vec![nothing; entries],
        };
        let (cpu, machine) = (&mut self.cpu, &mut self.machine);
        let mapped = self.dma.map_sg(cpu, machine, &self.at, request);
        mapped.map_err(|(_, error)| error)
    }

    /// Unmaps the buffer; true if the device can still access it.
    pub(crate) fn unmap(&mut self, mapping: Mapping<u32>) -> bool {
        let (cpu, machine) = (&mut self.cpu, &mut self.machine);
        let outcome = self.dma.unmap_single(cpu, machine, &self.at, mapping);
        let outcome = outcome.unwrap();
        let stale = outcome.is_stale();
        assert_eq!(outcome.into_buffer(), Some(7));
        stale
    }

    pub(crate) fn unmap_list(&mut self, mapping: SgMapping<u32>) -> bool {
        let (cpu, machine) = (&mut self.cpu, &mut self.machine);
        let outcome = self.dma.unmap_sg(cpu, machine, &self.at, mapping).unwrap();
        outcome.is_stale()
    }

    pub(crate) fn wait(&mut self, ns: u64) {
        self.machine.now = Nanos(self.machine.now.0 + ns);
        let _ = self.dma.tick(&mut self.cpu, &mut self.machine);
    }

    pub(crate) fn flush(&mut self) {
        let (cpu, machine) = (&mut self.cpu, &mut self.machine);
        self.dma.flush(cpu, machine, &self.at).unwrap();
    }

    pub(crate) fn reach(&self, iova: Iova, access: Access) -> Option<PhysAddr> {
        let memory = Arc::clone(&self.machine.memory);
        self.link.with(|channel| {
            let unit = &mut channel.queue().backend().tables().invalidator().hardware;
            let reached = unit.translate(&memory, ID, iova, 1, access).ok()?;
            Some(reached.first().start())
        })
    }

    pub(crate) fn frame(&self, at: PhysAddr) -> PhysAddr {
        let page = ringfence_pviommu::wire::Gpa::new(at.get() & !(PAGE - 1));
        let resolve = |channel: &mut Channel<Looped>| {
            channel.queue().backend().backing().resolve(page).unwrap()
        };
        self.link.with(resolve).wrapping_add(at.get() % PAGE)
    }

    /// Returns the number of pages that the host has mapped.
    pub(crate) fn live(&self) -> u64 {
        self.link
            .with(|channel| channel.queue().backend().mapped_pages(NIC))
    }

    /// Allocates and returns all free pages.
    pub(crate) fn left(&self) -> Vec<Iova> {
        let space = self.dma.space(&self.at).unwrap();
        let allocator = space.paged().allocator();
        let request = Alloc::new(1, Pfn::new(u64::from(u32::MAX)));
        std::iter::from_fn(|| allocator.alloc(&mut (), &request).ok())
            .map(|found| found.range.lo().iova())
            .collect()
    }

    /// Returns the number of requests and kicks so far.
    pub(crate) fn asked(&self) -> (u64, u64) {
        self.link.with(|channel| {
            let stats = channel.stats();
            (stats.requests, stats.kicks)
        })
    }
}

pub(crate) fn buffer(page: u64, offset: u64, bytes: u64) -> PhysRange {
    PhysRange::new(PhysAddr::new(MEMORY + page * PAGE + offset), bytes).unwrap()
}

const TO: Direction = Direction::ToDevice;
const FROM: Direction = Direction::FromDevice;

#[test]
fn cached_mappings_need_no_request() {
    let mut guest = tree();
    let mapping = guest.map(buffer(3, 100, 2 * PAGE), TO);
    assert_eq!(guest.asked(), (1, 1));
    let first = mapping.iova();
    assert!(guest.unmap(mapping));
    // Another buffer in the same pages.
    for offset in [0, 7, 100] {
        let mapping = guest.map(buffer(3, offset, 2 * PAGE + 1), TO);
        let page = |iova: Iova| iova.align_down(PAGE);
        assert_eq!(page(mapping.iova()), page(first));
        assert_eq!(mapping.iova().offset_in(PAGE), offset);
        assert!(guest.unmap(mapping));
    }
    assert_eq!((guest.asked(), guest.live()), ((1, 1), 3));
}

/// The frontend reuses no mapping of another direction or length.
#[test]
fn direction_and_length_make_another_mapping() {
    let mut guest = tree();
    let written = guest.map(buffer(3, 0, PAGE), FROM);
    let old = written.iova();
    guest.unmap(written);
    let read = guest.map(buffer(3, 0, PAGE), TO);
    assert_ne!(read.iova(), old);
    assert!(guest.reach(read.iova(), Access::Write).is_none());
    let long = guest.map(buffer(3, 0, 4 * PAGE), TO);
    for page in 0..4 {
        let at = PhysAddr::new(MEMORY + (3 + page) * PAGE);
        let reached = guest.reach(long.iova().wrapping_add(page * PAGE), Access::Read);
        assert_eq!(reached, Some(guest.frame(at)));
    }
    guest.unmap(read);
    guest.unmap(long);
}

/// No mapping in use expires at the frontend, even with the as-published cache.
#[test]
fn a_mapping_stays_as_long_as_it_has_a_user() {
    fn reached<C: ReverseCache>(mut guest: Guest<C>) -> bool {
        let first = guest.map(buffer(3, 0, 64), FROM);
        let second = guest.map(buffer(3, 1024, 64), FROM);
        assert_eq!(guest.asked().0, 1);
        guest.unmap(first);
        for _ in 0..4 {
            guest.wait(CYCLE);
        }
        let reached = guest.reach(second.iova(), Access::Write).is_some();
        guest.unmap(second);
        reached
    }
    assert!(reached(tree()));
    assert!(!reached(guest(
        RtcAsPublished::new(c(), LIMIT),
        UnknownUnmap::Ignored
    )));
}

/// All mappings that expire together take one request and one kick, and then their addresses are
/// free.
#[test]
fn a_cycle_ends_with_one_request() {
    let mut guest = tree();
    let mappings: Vec<_> = (0..12)
        .map(|page| guest.map(buffer(2 * page, 0, 64), TO))
        .collect();
    let iovas: Vec<Iova> = mappings.iter().map(Mapping::iova).collect();
    let held = guest.map(buffer(40, 0, 64), TO);
    mappings.into_iter().for_each(|mapping| {
        guest.unmap(mapping);
    });
    let before = guest.asked();
    // Released in the first cycle, so cached for two more.
    for _ in 0..2 {
        guest.wait(CYCLE);
        assert_eq!(guest.live(), 13);
    }
    assert!(
        iovas
            .iter()
            .all(|iova| guest.reach(*iova, Access::Read).is_some())
    );
    guest.wait(CYCLE - 1);
    assert_eq!(guest.asked(), before);
    guest.wait(1);
    let after = guest.asked();
    assert_eq!((after.0 - before.0, after.1 - before.1), (1, 1));
    assert_eq!(guest.live(), 1);
    assert!(
        iovas
            .iter()
            .all(|iova| guest.reach(*iova, Access::Read).is_none())
    );
    guest.unmap(held);
    guest.flush();
    assert_eq!(guest.live(), 0);
    // All pages of the window can be allocated again.
    let all: Vec<_> = (0..SPACE)
        .map(|page| guest.map(buffer(page, 0, 64), TO))
        .collect();
    all.into_iter().for_each(|mapping| {
        guest.unmap(mapping);
    });
}

/// Other lists reuse the pieces of a list. One kick requests all pieces that miss.
#[test]
fn the_pieces_of_a_list_are_cached_one_by_one() {
    let mut guest = tree();
    let pieces = |pages: &[u64]| -> Vec<PhysRange> {
        pages.iter().map(|page| buffer(2 * page, 0, 512)).collect()
    };
    let first = guest.map_list(&pieces(&[1, 2, 3]), FROM).unwrap();
    assert_eq!(guest.asked(), (3, 1));
    let second = guest.map_list(&pieces(&[1, 4, 3, 5]), FROM).unwrap();
    assert_eq!(guest.asked(), (5, 2));
    assert_eq!(first.piece_ranges()[0], second.piece_ranges()[0]);
    assert!(guest.unmap_list(first));
    for (range, page) in second.piece_ranges().iter().zip([1, 4, 3, 5]) {
        let frame = guest.frame(PhysAddr::new(MEMORY + 2 * page * PAGE));
        assert_eq!(guest.reach(range.start(), Access::Write), Some(frame));
    }
    for _ in 0..4 {
        guest.wait(CYCLE);
    }
    // The piece that only the first list had has expired.
    assert_eq!(guest.live(), 4);
    assert!(guest.unmap_list(second));
    // A piece outside memory: the list is refused, and the pieces found for it are released.
    let mut bad = pieces(&[1, 2]);
    bad.push(PhysRange::new(PhysAddr::new(512 << 20), PAGE).unwrap());
    assert!(guest.map_list(&bad, FROM).is_none());
    guest.flush();
    assert_eq!(guest.live(), 0);
}

/// A mapping that is not cached is unmapped at once. A full cache evicts at the next check of the
/// clock.
#[test]
fn a_full_cache_sheds() {
    let mut guest = guest(Rtc::new(c(), 8), UnknownUnmap::Refused);
    let kept: Vec<_> = (0..8)
        .map(|page| guest.map(buffer(page, 0, 64), TO))
        .collect();
    let neighbour = guest.map(buffer(20, 0, 64), TO);
    let iova = neighbour.iova();
    assert!(!guest.unmap(neighbour), "not stale");
    assert!(guest.reach(iova, Access::Read).is_none());
    kept.into_iter()
        .for_each(|mapping| assert!(guest.unmap(mapping)));
    guest.wait(1);
    assert_eq!(guest.live(), 7, "one in sixteen, and one at least");
    let neighbour = guest.map(buffer(20, 0, 64), TO);
    assert!(guest.unmap(neighbour));
}

/// Yassour et al.: a map cache over mapping on demand. A list of misses is one batch, a hit sends
/// nothing, and a full cache unmaps its oldest mappings with one request.
#[test]
fn a_map_cache_batches_its_requests() {
    const QUOTA: usize = 32;
    let cache = FlatCache::new(c(), QUOTA, ResidencyPolicy::UntilFull);
    let mut guest = guest(cache, UnknownUnmap::Refused);
    let lists: Vec<Vec<_>> = (0..8)
        .map(|list| {
            (0..4)
                .map(|piece| buffer(list * 4 + piece, 0, 64))
                .collect()
        })
        .collect();
    for round in 0..10 {
        for list in &lists {
            let mapping = guest.map_list(list, FROM).unwrap();
            assert!(guest.unmap_list(mapping));
        }
        guest.wait(100 * CYCLE);
        // Four maps and one kick for each list, once.
        assert_eq!(guest.asked(), (32, 8), "round {round}");
    }
    let mapping = guest.map(buffer(40, 0, 64), FROM);
    assert!(!guest.unmap(mapping), "the quota is full");
    assert_eq!(guest.asked(), (34, 10));
    guest.wait(0);
    assert_eq!(guest.live(), QUOTA as u64 - 2);
    assert_eq!(guest.asked(), (35, 11), "one request for two mappings");
}

/// Unmaps of an unmapped address and of a part of a mapping are refused.
#[test]
fn strays_are_refused() {
    let mut guest = tree();
    let mapping = guest.map(buffer(3, 0, 2 * PAGE), TO);
    let part = IovaRange::new(mapping.iova(), 64).unwrap();
    let claimed = Mapping::claim(&guest.at, part, TO, 7);
    let (cpu, machine) = (&mut guest.cpu, &mut guest.machine);
    let refused = guest.dma.unmap_single(cpu, machine, &guest.at, claimed);
    assert!(matches!(
        refused.map(|_| ()).unwrap_err().reason,
        UnmapReason::NotAllocated(_)
    ));
    assert!(guest.unmap(mapping));
}

/// An unmap with a length that no key has releases no mapping.
#[test]
fn an_unmap_of_another_length_is_refused() {
    let mut guest = tree();
    let mapping = guest.map(buffer(3, 0, 64), FROM);
    let first = Pfn::containing(mapping.iova());
    for pages in [2, MappingKey::PAGES_MAX, MappingKey::PAGES_MAX + 1, 1 << 40] {
        let wrong = PfnRange::new(first, pages).unwrap();
        let claim = Mapping::claim(&guest.at, wrong.iovas(), FROM, 8);
        let (cpu, machine) = (&mut guest.cpu, &mut guest.machine);
        let Err(error) = guest.dma.unmap_single(cpu, machine, &guest.at, claim) else {
            panic!("an unmap of {pages} pages releases the mapping of one");
        };
        assert!(matches!(error.reason, UnmapReason::NotAllocated(_)));
    }
    for _ in 0..4 {
        guest.wait(CYCLE);
    }
    assert!(guest.reach(mapping.iova(), Access::Write).is_some());
    assert!(guest.unmap(mapping));
}

/// A mapping serves a device only if its mask covers the whole mapping: masks differ between the
/// devices of a domain.
#[test]
fn a_mapping_beyond_the_mask_is_no_hit() {
    let mut guest = tree();
    let memory = buffer(3, 0, 2 * PAGE);
    let high = guest.map(memory, TO);
    let last = Pfn::containing(high.range().last()).get();
    let space = guest.dma.space(&guest.at).unwrap();
    let (mut cpu, machine) = (space.per_cpu(), &mut guest.machine);
    for (mask, hits) in [(last, true), (last - 1, false)] {
        let limits = AddressLimits {
            preferred: Pfn::new(mask),
            mask: Pfn::new(mask),
            ring: RingId::new(0),
        };
        let permissions = TO.permissions();
        let placed = space.map(&mut cpu, machine, &[memory], permissions, limits);
        let range = placed.unwrap().range;
        assert_eq!(range == high.range(), hits);
        assert!(Pfn::containing(range.last()).get() <= mask);
        // The other mapping is not cached, because its key has a mapping already.
        let unmapped = space.unmap(&mut cpu, machine, range).unwrap();
        assert_eq!(matches!(unmapped, CachedOrCleared::Cached), hits);
    }
    guest.unmap(high);
    let space = guest.dma.space(&guest.at).unwrap();
    let stats = space.with_cache(ReverseCache::stats);
    assert_eq!((stats.mappings, stats.released), (1, 1), "nobody uses it");
}

/// Coherent memory is not cached: its frames are free after it is freed.
#[test]
fn coherent_memory_is_not_cached() {
    let mut guest = tree();
    let (cpu, machine) = (&mut guest.cpu, &mut guest.machine);
    let memory = guest
        .dma
        .alloc_coherent(cpu, machine, &guest.at, 3)
        .unwrap();
    let iova = memory.range().start();
    guest
        .dma
        .free_coherent(cpu, machine, &guest.at, memory)
        .unwrap();
    assert!(guest.reach(iova, Access::Read).is_none());
    assert_eq!(guest.live(), 0);
}

/// If the host cannot invalidate, no address of the batch is reused.
#[test]
fn a_batch_that_fails_is_given_up() {
    let mut guest = tree();
    let mapping = guest.map(buffer(3, 0, 64), TO);
    let iova = mapping.iova();
    guest.unmap(mapping);
    guest.fails.set(true);
    guest.machine.now = Nanos(4 * CYCLE);
    let (cpu, machine) = (&mut guest.cpu, &mut guest.machine);
    let failed = guest.dma.tick(cpu, machine);
    assert!(
        matches!(failed, Err(UnmapFailure::NotFlushed(_))),
        "{failed:?}"
    );
    guest.fails.set(false);
    // The channel is broken, so ask the allocator, which gives the highest free address first.
    let allocator = guest.dma.space(&guest.at).unwrap().paged().allocator();
    let limit = Pfn::containing(Iova::new(u64::from(u32::MAX)));
    let free = allocator.alloc(&mut allocator.per_cpu(), &Alloc::new(1, limit));
    assert!(free.unwrap().range.lo() < Pfn::containing(iova));
}
