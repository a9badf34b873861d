//! The frontend under `dma`, connected to a backend in the same process. The modelled unit walks
//! its tables.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use proptest::prelude::*;
use ringfence_dma::flush::Strict;
use ringfence_dma::space::{IoPageTable, Paged, Rounding};
use ringfence_dma::{
    Attachment, Cpu, Dma, DmaSegment, MapError, MapMultiRequest, MapReason, Mapping, Released,
    SgLimits, SgMapping, SgRequest, UnmapFailure, UnmapReason,
};
use ringfence_iova::{AllocRequest as Alloc, CachedRbTree, CachedTree, IovaAllocator};
use ringfence_memory::Arena;
use ringfence_pgtable::MapRequest;
use ringfence_pviommu::backend::{Backend, FixedLastTable, HardwareTables, OnDemand};
use ringfence_pviommu::frontend::{
    Channel, ChannelFailure, ChannelOptions, RemoteTable, SharedChannel, UnmapCompletions,
};
use ringfence_pviommu::loopback::Loopback;
use ringfence_types::{
    Access, Direction, Iova, IovaRange, Nanos, Permissions, Pfn, PfnRange, PhysAddr, PhysRange,
};

use crate::hosts::{Host, Trick};
use crate::machine::{ID, Line, Machine, SPACE, Table, Waits};
use crate::rig::{MEMORY, NIC, PAGE, Rig, Source, Unit, WINDOW, cases};

type Back = OnDemand<Arc<Arena>, Source, FixedLastTable>;
type Tables = HardwareTables<Arc<Arena>, Source, Unit>;
type Looped = Host<Loopback<Back, Tables>>;
type Space<Q> = Paged<CachedRbTree<RefCell<CachedTree>>, Table<Q>>;

pub(crate) struct Guest {
    pub(crate) dma: Dma<Space<Looped>, Strict, u32>,
    pub(crate) at: Attachment,
    pub(crate) machine: Machine<Waits<Looped>>,
    pub(crate) link: Line<Looped>,
}

/// Polls after which the guest gives up.
pub(crate) const MAX_EMPTY_POLLS: u64 = 50;

pub(crate) fn guest(trick: Option<(u64, Trick)>) -> Guest {
    let Rig {
        backend,
        arena,
        tables,
        ..
    } = Rig::new();
    let host = Host::new(Loopback::new(backend, 64), trick);
    let options = ChannelOptions {
        pages_max: 16,
        max_empty_polls: MAX_EMPTY_POLLS,
    };
    let link = Rc::new(SharedChannel::new(
        Channel::new(host, options),
        RefCell::new,
    ));
    let machine = Machine {
        memory: arena,
        frames: tables,
        answers: UnmapCompletions::new(Rc::clone(&link)),
        now: Nanos(0),
    };
    let mut dma = Dma::new(Strict);
    let window = PfnRange::new(Pfn::containing(Iova::new(WINDOW)), SPACE).unwrap();
    let at = dma
        .attach(ID, Iova::new(u64::from(u32::MAX)), |domain| {
            let allocator = CachedRbTree::new(CachedTree::new(window), RefCell::new);
            let table = RemoteTable::new(Rc::clone(&link), NIC, domain);
            Ok::<_, ()>(Paged::new(allocator, table, Rounding::Exact))
        })
        .unwrap();
    Guest {
        dma,
        at,
        machine,
        link,
    }
}

impl Guest {
    pub(crate) fn map_list(
        &mut self,
        cpu: &mut Cpu<Space<Looped>, Strict, u32>,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Result<SgMapping<u32>, MapError> {
        let nothing = DmaSegment {
            range: IovaRange::new(Iova::ZERO, 1).unwrap(),
        };
        let mut out = vec![nothing; pieces.len()];
        let request = SgRequest {
            pieces,
            buffer: 0,
            direction,
            limits: SgLimits::default(),
            out: &mut out,
        };
        let mapped = self.dma.map_sg(cpu, &mut self.machine, &self.at, request);
        mapped
            .map(|(mapping, _)| mapping)
            .map_err(|(_, error)| error)
    }

    pub(crate) fn backend<R>(&self, use_it: impl FnOnce(&mut Backend<Back, Tables>) -> R) -> R {
        self.link
            .with(|channel| use_it(channel.queue().honest.backend()))
    }

    pub(crate) fn reach(&self, iova: u64, access: Access) -> Option<PhysAddr> {
        let memory = Arc::clone(&self.machine.memory);
        self.backend(|backend| {
            let unit = &mut backend.tables().invalidator().hardware;
            let reached = unit
                .translate(&memory, ID, Iova::new(iova), 1, access)
                .ok()?;
            Some(reached.first().start())
        })
    }

    pub(crate) fn frame(&self, gpa: u64) -> PhysAddr {
        let page = ringfence_pviommu::wire::Gpa::new(gpa & !(PAGE - 1));
        let frame = self.backend(|backend| backend.backing().resolve(page).unwrap());
        frame.wrapping_add(gpa % PAGE)
    }

    pub(crate) fn live(&self) -> u64 {
        self.backend(|backend| backend.mapped_pages(NIC))
    }

    pub(crate) fn broken(&self) -> Option<ChannelFailure> {
        self.link.with(|channel| channel.failure())
    }

    /// Allocates and returns all free pages.
    pub(crate) fn left(&self) -> Vec<u64> {
        let space = self.dma.space(&self.at).unwrap();
        let request = Alloc::new(1, Pfn::new(u64::from(u32::MAX)));
        std::iter::from_fn(|| space.allocator().alloc(&mut (), &request).ok())
            .map(|found| found.range.lo().get() << 12)
            .collect()
    }
}

pub(crate) fn buffer(gpa: u64, bytes: u64) -> PhysRange {
    PhysRange::new(PhysAddr::new(gpa), bytes).unwrap()
}

#[test]
fn a_buffer_is_reached_while_it_is_mapped() {
    let mut guest = guest(None);
    let mut cpu = guest.dma.cpu();
    let memory = buffer(MEMORY + PAGE + 100, 3 * PAGE);
    let (mapping, _) = guest
        .dma
        .map_single(
            &mut cpu,
            &mut guest.machine,
            &guest.at,
            7,
            memory,
            Direction::ToDevice,
        )
        .unwrap();
    let iova = mapping.iova().get();
    for byte in [0, 1, PAGE, 3 * PAGE - 1] {
        let frame = guest.frame(MEMORY + PAGE + 100 + byte);
        assert_eq!(guest.reach(iova + byte, Access::Read), Some(frame));
        assert_eq!(guest.reach(iova + byte, Access::Write), None);
    }
    assert_eq!(guest.live(), 4);
    let Released(seven) = guest
        .dma
        .unmap_single(&mut cpu, &mut guest.machine, &guest.at, mapping)
        .unwrap();
    assert_eq!((seven, guest.live()), (7, 0));
    assert_eq!(guest.reach(iova, Access::Read), None);
    assert_eq!(guest.left().len() as u64, SPACE);
}

/// The host would refuse a second unmap, which would break the channel for every device.
#[test]
fn double_unmap_sends_no_request() {
    let mut guest = guest(None);
    let mut cpu = guest.dma.cpu();
    let direction = Direction::ToDevice;
    let (dma, machine, at) = (&guest.dma, &mut guest.machine, &guest.at);
    let mut other = dma.cpu();
    let mut map = |machine: &mut _, page: u64| {
        let memory = buffer(MEMORY + page * PAGE, 2 * PAGE);
        let mapped = dma.map_single(&mut other, machine, at, 7, memory, direction);
        mapped.unwrap().0
    };
    let (first, second) = (map(machine, 1), map(machine, 8));
    let range = first.range();
    let Released(7) = dma.unmap_single(&mut cpu, machine, at, first).unwrap() else {
        panic!("another buffer");
    };
    let again = Mapping::claim(at, range, direction, 8);
    let error = dma.unmap_single(&mut cpu, machine, at, again).map(drop);
    assert_eq!(guest.link.with(|channel| channel.failure()), None);
    assert!(matches!(
        error.unwrap_err().reason,
        UnmapReason::NotAllocated(_)
    ));
    let Released(7) = dma.unmap_single(&mut cpu, machine, at, second).unwrap() else {
        panic!("another buffer");
    };
    assert_eq!((guest.broken(), guest.live()), (None, 0));
}

/// One kick for all requests of a list, one for its unmap.
#[test]
fn kicks_are_merged() {
    let mut guest = guest(None);
    let mut cpu = guest.dma.cpu();
    let pieces: Vec<PhysRange> = (0..12)
        .map(|n| buffer(MEMORY + n * 3 * PAGE, 600))
        .collect();
    let before = guest.link.with(|channel| *channel.stats());
    let mapping = guest
        .map_list(&mut cpu, &pieces, Direction::FromDevice)
        .unwrap();
    let mapped = guest.link.with(|channel| *channel.stats());
    assert_eq!(mapped.requests - before.requests, 12);
    assert_eq!(mapped.kicks - before.kicks, 1);
    assert_eq!(guest.live(), 12);
    let _ = guest
        .dma
        .unmap_sg(&mut cpu, &mut guest.machine, &guest.at, mapping)
        .unwrap();
    let unmapped = guest.link.with(|channel| *channel.stats());
    assert_eq!(unmapped.requests - mapped.requests, 1);
    assert_eq!(unmapped.kicks - mapped.kicks, 1);
    assert_eq!(guest.live(), 0);
}

/// An unmap whose invalidation is deferred shares the kick of the next map.
#[test]
fn a_map_kicks_once_for_itself_and_a_queued_unmap() {
    let mut guest = guest(None);
    let table: Table<_> = RemoteTable::new(Rc::clone(&guest.link), NIC, guest.at.domain());
    let mut own = table.per_cpu();
    let machine = &mut guest.machine;
    let request = |page: u64| MapRequest {
        iova: Iova::new(WINDOW + page * PAGE),
        pa: PhysAddr::new(MEMORY),
        pages: 1,
        permissions: Permissions::READ,
    };
    table.map(&mut own, machine, request(0)).unwrap();
    let before = guest.link.with(|channel| *channel.stats());
    let first = PfnRange::new(Pfn::containing(request(0).iova), 1).unwrap();
    let _ = table.unmap(&mut own, machine, first).unwrap();
    table.map(&mut own, machine, request(1)).unwrap();
    let after = guest.link.with(|channel| *channel.stats());
    let requests = after.requests - before.requests;
    assert_eq!((requests, after.kicks - before.kicks), (2, 1));
}

#[test]
fn misaligned_addresses_are_not_sent() {
    let mut guest = guest(None);
    let table: Table<_> = RemoteTable::new(Rc::clone(&guest.link), NIC, guest.at.domain());
    let mut own = table.per_cpu();
    let before = guest.link.with(|channel| *channel.stats());
    for (iova, pa) in [(WINDOW + 0x800, MEMORY), (WINDOW, MEMORY + 1)] {
        let request = MapRequest {
            iova: Iova::new(iova),
            pa: PhysAddr::new(pa),
            pages: 1,
            permissions: Permissions::READ,
        };
        let mapped = table.map(&mut own, &mut guest.machine, request);
        assert_eq!(mapped, Err(ringfence_pgtable::MapError::Misaligned));
    }
    let after = guest.link.with(|channel| *channel.stats());
    assert_eq!(after.requests, before.requests);
    assert_eq!(guest.live(), 0);
}

/// The host refuses one piece of a list, because its page is outside memory. No piece stays mapped,
/// and the addresses are free.
#[test]
fn a_list_is_mapped_whole_or_not_at_all() {
    for bad in 0..5 {
        let mut guest = guest(None);
        let mut cpu = guest.dma.cpu();
        let piece = |n: u64| match n {
            n if n == bad => buffer(512 << 20, PAGE),
            n => buffer(MEMORY + n * PAGE * 2, PAGE),
        };
        let pieces: Vec<PhysRange> = (0..5).map(piece).collect();
        let refused = guest.map_list(&mut cpu, &pieces, Direction::ToDevice);
        assert!(refused.is_err(), "{bad}");
        assert_eq!((guest.live(), guest.broken()), (0, None), "{bad}");
        assert_eq!(guest.left().len() as u64, SPACE, "{bad}");
    }
}

/// One buffer takes several requests, and the host refuses a later one.
#[test]
fn a_buffer_of_several_requests_is_mapped_whole_or_not_at_all() {
    let mut guest = guest(None);
    let mut cpu = guest.dma.cpu();
    // 40 pages, 16 per request; the last 8 lie past the end of memory.
    let memory = buffer((8 << 20) - 32 * PAGE, 40 * PAGE);
    let refused = guest.dma.map_single(
        &mut cpu,
        &mut guest.machine,
        &guest.at,
        0,
        memory,
        Direction::ToDevice,
    );
    assert!(refused.is_err());
    assert_eq!((guest.live(), guest.broken()), (0, None));
    let memory = buffer((8 << 20) - 40 * PAGE, 40 * PAGE);
    let (mapping, _) = guest
        .dma
        .map_single(
            &mut cpu,
            &mut guest.machine,
            &guest.at,
            0,
            memory,
            Direction::ToDevice,
        )
        .unwrap();
    assert_eq!(guest.live(), 40);
    let _ = guest
        .dma
        .unmap_single(&mut cpu, &mut guest.machine, &guest.at, mapping)
        .unwrap();
    assert_eq!(guest.left().len() as u64, SPACE);
}

/// The third buffer finds no address, and the host falls silent when the first one is unmapped
/// again, so the unmap of the second is refused. The error reports that, and no address is free.
#[test]
fn a_roll_back_that_is_refused_after_another_reason_is_reported() {
    // Six requests of up to 16 pages map all pages but two. The batch of three maps two buffers
    // and unmaps them again: requests 6 to 9. One by one, requests 10 and 11 map them, and 12
    // unmaps the first.
    let mut guest = guest(Some((12, Trick::Never)));
    let mut cpu = guest.dma.cpu();
    let direction = Direction::ToDevice;
    let (machine, at) = (&mut guest.machine, &guest.at);
    let most = buffer(MEMORY, (SPACE - 2) * PAGE);
    let most = guest
        .dma
        .map_single(&mut cpu, machine, at, 0, most, direction);
    let (most, _) = most.unwrap();
    let requests = [0, 1, 2].map(|number| MapMultiRequest {
        buffer: number,
        memory: buffer(MEMORY + u64::from(number) * PAGE, PAGE),
        direction,
    });
    let mapped = guest.dma.map_multi(&mut cpu, machine, at, requests.into());
    let (back, error) = mapped.unwrap_err();
    let back: Vec<u32> = back.iter().map(|request| request.buffer).collect();
    assert_eq!(back, [0, 1, 2]);
    assert!(
        matches!(
            error.reason,
            MapReason::RollbackFailed(UnmapFailure::Refused(_))
        ),
        "{error}"
    );
    assert_eq!(guest.broken(), Some(ChannelFailure::Silent));
    assert_eq!(guest.left(), []);
    assert_eq!(most.range().bytes(), (SPACE - 2) * PAGE);
}

/// The host maps the last buffer and falls silent, so nothing can be unmapped again. The error says
/// that the device may reach the buffers, and their addresses are not free.
#[test]
fn a_roll_back_that_is_refused_is_reported() {
    for (count, as_list) in [(1, false), (2, false), (2, true)] {
        let pages = (0..count).map(|page| buffer(MEMORY + 2 * page * PAGE, PAGE));
        let memory: Vec<PhysRange> = pages.collect();
        let mut guest = guest(Some((count - 1, Trick::Never)));
        let mut cpu = guest.dma.cpu();
        let direction = Direction::ToDevice;
        let error = if as_list {
            guest.map_list(&mut cpu, &memory, direction).unwrap_err()
        } else {
            let request = |memory| MapMultiRequest {
                buffer: 0,
                memory,
                direction,
            };
            let requests = memory.into_iter().map(request).collect();
            let (machine, at) = (&mut guest.machine, &guest.at);
            let mapped = guest.dma.map_multi(&mut cpu, machine, at, requests);
            mapped.unwrap_err().1
        };
        assert_eq!(guest.broken(), Some(ChannelFailure::Silent));
        let reached: Vec<u64> = (0..SPACE)
            .map(|page| WINDOW + page * PAGE)
            .filter(|iova| guest.reach(*iova, Access::Read).is_some())
            .collect();
        assert_eq!(reached.len() as u64, count);
        let MapReason::RollbackFailed(failure) = error.reason else {
            panic!("{error}, and the device reaches {reached:x?}");
        };
        // A single piece was not installed as far as the guest knows.
        let refused = matches!(failure, UnmapFailure::Refused(_));
        assert_eq!(refused, count > 1, "{failure}");
        let left = guest.left();
        assert!(reached.iter().all(|iova| !left.contains(iova)));
    }
}

proptest! {
    #![proptest_config(cases(48, 20_251_125))]

    /// Random buffers, mapped and unmapped in any order: accessible while mapped, and all addresses
    /// are free in the end.
    #[test]
    fn buffers_come_and_go(
        steps in prop::collection::vec(
            (0..1000_u64, 1..9000_u64, any::<bool>(), 0..8_usize),
            1..60,
        ),
    ) {
        let mut guest = guest(None);
        let mut cpu = guest.dma.cpu();
        let mut held = Vec::new();
        for (at, bytes, maps, which) in steps {
            if maps {
                let memory = buffer(MEMORY + at * 700, bytes);
                let direction = Direction::ALL[which % 3];
                let mapped = guest.dma.map_single(
                    &mut cpu,
                    &mut guest.machine,
                    &guest.at,
                    at as u32,
                    memory,
                    direction,
                );
                if let Ok((mapping, _)) = mapped {
                    held.push((mapping, memory, direction, at as u32));
                }
            } else if !held.is_empty() {
                let (mapping, _, _, given) = held.swap_remove(which % held.len());
                let iova = mapping.iova().get();
                let Released(back) = guest
                    .dma
                    .unmap_single(&mut cpu, &mut guest.machine, &guest.at, mapping)
                    .unwrap();
                prop_assert_eq!(back, given);
                prop_assert_eq!(guest.reach(iova, Access::Read), None);
            }
            for (mapping, memory, direction, _) in &held {
                let frame = guest.frame(memory.start().get());
                let iova = mapping.iova().get();
                for access in [Access::Read, Access::Write] {
                    let allowed = direction.permissions().allows(access);
                    prop_assert_eq!(guest.reach(iova, access), allowed.then_some(frame));
                }
            }
        }
        for (mapping, ..) in held {
            let _ = guest
                .dma
                .unmap_single(&mut cpu, &mut guest.machine, &guest.at, mapping)
                .unwrap();
        }
        prop_assert_eq!((guest.live(), guest.broken()), (0, None));
        prop_assert_eq!(guest.left().len() as u64, SPACE);
    }
}
