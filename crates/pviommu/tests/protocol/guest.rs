//! The frontend under `dma`, looped back to a backend whose tables the modelled unit walks; and hosts that break the rules.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use proptest::prelude::*;
use ringfence_dma::flush::Strict;
use ringfence_dma::space::{Paged, Rounding};
use ringfence_dma::{
    Attachment, Cpu, Dma, MapError, Platform, Released, Segment, SgLimits, SgMapping, SgRequest,
};
use ringfence_iova::{CachedRbTree, CachedTree, IovaAllocator, Request as Alloc};
use ringfence_memory::Arena;
use ringfence_pviommu::backend::{Backend, HardwareTables, OnDemand, RepairedLastTable};
use ringfence_pviommu::frontend::{
    Answers, Broken, Channel, ChannelOptions, Link, Queue, QueueFull, RemoteTable, RequestId, Used,
};
use ringfence_pviommu::loopback::Loopback;
use ringfence_pviommu::wire::Status;
use ringfence_types::{
    Access, DeviceId, Direction, Iova, IovaRange, Nanos, Pfn, PfnRange, PhysAddr, PhysRange,
};

use crate::rig::{MEMORY, NIC, PAGE, Rig, Source, Unit, WINDOW, cases};

type Back = OnDemand<Arc<Arena>, Source, RepairedLastTable>;
type Tables = HardwareTables<Arc<Arena>, Source, Unit>;
type Looped = Host<Loopback<Back, Tables>>;
type Shared<Q> = Rc<Link<Q, RefCell<Channel<Q>>>>;
type Table<Q> = RemoteTable<Shared<Q>, Q, RefCell<Channel<Q>>>;
type Space<Q> = Paged<CachedRbTree<RefCell<CachedTree>>, Table<Q>>;

/// What a host does with one of its answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trick {
    /// Gives it after so many polls.
    Late(u32),
    Never,
    Twice,
    /// To a request that was never made.
    Foreign,
    /// After that of the next request.
    Swapped,
    /// Another status, whatever was done.
    Says(u8),
}

/// A queue that plays a trick with the n-th answer.
struct Host<Q> {
    honest: Q,
    trick: Option<(u64, Trick)>,
    answers: u64,
    held: VecDeque<(u32, Used)>,
}

impl<Q: Queue> Queue for Host<Q> {
    fn add(&mut self, request: &[u8]) -> Result<RequestId, QueueFull> {
        self.honest.add(request)
    }

    fn kick(&mut self) {
        self.honest.kick();
    }

    fn poll(&mut self) -> Option<Used> {
        if let Some((polls, used)) = self.held.front_mut() {
            if *polls > 0 {
                *polls -= 1;
                return None;
            }
            let used = *used;
            self.held.pop_front();
            return Some(used);
        }
        let used = self.honest.poll()?;
        let number = self.answers;
        self.answers += 1;
        let Some((_, trick)) = self.trick.filter(|(nth, _)| *nth == number) else {
            return Some(used);
        };
        match trick {
            Trick::Late(polls) => {
                self.held.push_back((polls, used));
                None
            }
            Trick::Never => {
                self.held.push_back((u32::MAX, used));
                None
            }
            Trick::Twice => {
                self.held.push_back((0, used));
                Some(used)
            }
            Trick::Foreign => Some(Used {
                id: RequestId(used.id.0.wrapping_add(1000)),
                ..used
            }),
            Trick::Swapped => {
                let next = self.honest.poll();
                self.held.push_back((0, used));
                next.or_else(|| self.held.pop_front().map(|(_, used)| used))
            }
            Trick::Says(status) => Some(Used { status, ..used }),
        }
    }
}

/// A guest's machine.
struct Machine<Q> {
    memory: Arc<Arena>,
    frames: Source,
    answers: Answers<Shared<Q>, Q, RefCell<Channel<Q>>>,
}

impl<Q: Queue> Platform for Machine<Q> {
    type Memory = Arc<Arena>;
    type Frames = Source;
    type Invalidator = Answers<Shared<Q>, Q, RefCell<Channel<Q>>>;

    fn memory(&self) -> &Arc<Arena> {
        &self.memory
    }

    fn frames(&self) -> &Source {
        &self.frames
    }

    fn invalidator(&mut self) -> &mut Self::Invalidator {
        &mut self.answers
    }

    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

struct Guest {
    dma: Dma<Space<Looped>, Strict, u32>,
    at: Attachment,
    machine: Machine<Looped>,
    link: Shared<Looped>,
}

const ID: DeviceId = DeviceId::new(NIC.get() as u16);
const PATIENCE: u64 = 50;
/// Pages of the window that the guest uses.
const SPACE: u64 = 96;

fn guest(trick: Option<(u64, Trick)>) -> Guest {
    let Rig {
        backend,
        arena,
        tables,
        ..
    } = Rig::new();
    let host = Host {
        honest: Loopback::new(backend, 64),
        trick,
        answers: 0,
        held: VecDeque::new(),
    };
    let options = ChannelOptions {
        pages_max: 16,
        patience: PATIENCE,
    };
    let link = Rc::new(Link::new(Channel::new(host, options), RefCell::new));
    let machine = Machine {
        memory: arena,
        frames: tables,
        answers: Answers::new(Rc::clone(&link)),
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
    fn map_list(
        &mut self,
        cpu: &mut Cpu<Space<Looped>, Strict, u32>,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Result<SgMapping<u32>, MapError> {
        let nothing = Segment {
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

    fn backend<R>(&self, use_it: impl FnOnce(&mut Backend<Back, Tables>) -> R) -> R {
        self.link
            .with(|channel| use_it(channel.queue().honest.backend()))
    }

    fn reach(&self, iova: u64, access: Access) -> Option<PhysAddr> {
        let memory = Arc::clone(&self.machine.memory);
        self.backend(|backend| {
            let unit = &mut backend.tables().invalidator().hardware;
            let reached = unit
                .translate(&memory, ID, Iova::new(iova), 1, access)
                .ok()?;
            Some(reached.first().start())
        })
    }

    fn frame(&self, gpa: u64) -> PhysAddr {
        let page = ringfence_pviommu::wire::Gpa::new(gpa & !(PAGE - 1));
        let frame = self.backend(|backend| backend.backing().resolve(page).unwrap());
        frame.wrapping_add(gpa % PAGE)
    }

    fn live(&self) -> u64 {
        self.backend(|backend| backend.mapped_pages(NIC))
    }

    fn broken(&self) -> Option<Broken> {
        self.link.with(|channel| channel.broken())
    }

    /// The pages that the allocator would still give out, from now on.
    fn left(&self) -> Vec<u64> {
        let space = self.dma.space(&self.at).unwrap();
        let request = Alloc::new(1, Pfn::new(u64::from(u32::MAX)));
        std::iter::from_fn(|| space.allocator().alloc(&mut (), &request).ok())
            .map(|found| found.range.lo().get() << 12)
            .collect()
    }
}

fn buffer(gpa: u64, bytes: u64) -> PhysRange {
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

/// PV04: one kick for all requests of a list, one for its unmap.
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

/// A list of which the host refuses one piece, for the page is no memory: none of it stays, and its addresses are free.
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

/// One buffer in several requests, of which a later one is refused.
#[test]
fn a_buffer_of_several_requests_is_mapped_whole_or_not_at_all() {
    let mut guest = guest(None);
    let mut cpu = guest.dma.cpu();
    // 40 pages, 16 a request; the last 8 lie past the end of memory.
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

/// Maps a buffer and unmaps it, with a host that plays a trick with the first answer (the map's) or the second.
#[test]
fn a_host_that_breaks_the_rules_is_found_out() {
    let first = RequestId(0);
    for (nth, trick, broken) in [
        (0, Trick::Late(20), None),
        (1, Trick::Late(20), None),
        (0, Trick::Never, Some(Broken::Silent)),
        (1, Trick::Never, Some(Broken::Silent)),
        (0, Trick::Late(PATIENCE as u32 + 20), Some(Broken::Silent)),
        (0, Trick::Twice, Some(Broken::Unasked(first))),
        (1, Trick::Twice, Some(Broken::Unasked(RequestId(1)))),
        (0, Trick::Foreign, Some(Broken::Unasked(RequestId(1000)))),
        (1, Trick::Foreign, Some(Broken::Unasked(RequestId(1001)))),
        (0, Trick::Says(7), None),
        (0, Trick::Says(0xff), None),
        (
            1,
            Trick::Says(8),
            Some(Broken::UnmapRefused(Status::Failed)),
        ),
        (
            1,
            Trick::Says(6),
            Some(Broken::UnmapRefused(Status::NotMapped)),
        ),
        (
            1,
            Trick::Says(0x80),
            Some(Broken::UnmapRefused(Status::Failed)),
        ),
    ] {
        let what = format!("answer {nth}: {trick:?}");
        let mut guest = guest(Some((nth, trick)));
        let mut cpu = guest.dma.cpu();
        let memory = buffer(MEMORY, 2 * PAGE);
        let direction = Direction::ToDevice;
        let mapped = guest.dma.map_single(
            &mut cpu,
            &mut guest.machine,
            &guest.at,
            0,
            memory,
            direction,
        );
        let refused = nth == 0 && !matches!(trick, Trick::Late(20) | Trick::Twice);
        if refused {
            assert!(mapped.is_err(), "{what}");
        }
        let mut taken = Vec::new();
        if let Ok((mapping, _)) = mapped {
            let iova = mapping.iova().get();
            let unmapped = guest
                .dma
                .unmap_single(&mut cpu, &mut guest.machine, &guest.at, mapping);
            let confirmed = broken.is_none() || matches!((nth, trick), (1, Trick::Twice));
            assert_eq!(unmapped.is_ok(), confirmed, "{what}");
            if !confirmed {
                taken = vec![iova, iova + PAGE];
            }
        }
        guest.link.with(Channel::poll);
        assert_eq!(guest.broken(), broken, "{what}");
        // What the device may still reach is never given out again.
        let left = guest.left();
        for iova in &taken {
            assert!(!left.contains(iova), "{what}: {iova:#x}");
        }
        let may_be_mapped: Vec<u64> = (0..SPACE)
            .map(|page| WINDOW + page * PAGE)
            .filter(|iova| guest.reach(*iova, Access::Read).is_some())
            .collect();
        for iova in may_be_mapped {
            assert!(
                !left.contains(&iova) || matches!(trick, Trick::Says(_)) && nth == 0,
                "{what}: {iova:#x} is mapped and free"
            );
        }
        if broken.is_some() {
            let again = guest.dma.map_single(
                &mut cpu,
                &mut guest.machine,
                &guest.at,
                0,
                memory,
                direction,
            );
            assert!(again.is_err(), "{what}");
        }
    }
}

/// Answers of a list in another order than its requests.
#[test]
fn answers_out_of_order_break_the_channel() {
    let mut guest = guest(Some((1, Trick::Swapped)));
    let mut cpu = guest.dma.cpu();
    let pieces: Vec<PhysRange> = (0..4)
        .map(|n| buffer(MEMORY + n * 2 * PAGE, PAGE))
        .collect();
    let refused = guest.map_list(&mut cpu, &pieces, Direction::ToDevice);
    assert!(refused.is_err());
    assert_eq!(guest.broken(), Some(Broken::Unasked(RequestId(2))));
}

/// A queue that is full is emptied by waiting, and one that stays full ends.
#[test]
fn a_full_queue_is_waited_for() {
    let mut guest = guest(None);
    let mut cpu = guest.dma.cpu();
    // 80 requests through 64 chains.
    let pieces: Vec<PhysRange> = (0..80)
        .map(|n| buffer(MEMORY + n * 2 * PAGE, PAGE))
        .collect();
    let mapped = guest.map_list(&mut cpu, &pieces, Direction::ToDevice);
    assert_eq!((mapped.is_ok(), guest.live()), (true, 80));

    struct Full;
    impl Queue for Full {
        fn add(&mut self, _: &[u8]) -> Result<RequestId, QueueFull> {
            Err(QueueFull)
        }
        fn kick(&mut self) {}
        fn poll(&mut self) -> Option<Used> {
            None
        }
    }
    let options = ChannelOptions {
        pages_max: 16,
        patience: PATIENCE,
    };
    let link = Rc::new(Link::new(Channel::new(Full, options), RefCell::new));
    let table: Table<Full> = RemoteTable::new(Rc::clone(&link), NIC, guest.at.domain());
    let mut machine = Machine {
        memory: Arc::clone(&guest.machine.memory),
        frames: guest.machine.frames.clone(),
        answers: Answers::new(Rc::clone(&link)),
    };
    use ringfence_dma::space::Translations;
    let request = ringfence_pgtable::MapRequest {
        iova: Iova::new(WINDOW),
        pa: PhysAddr::new(0),
        pages: 1,
        permissions: ringfence_types::Permissions::READ,
    };
    let refused = table.map(&mut table.per_cpu(), &mut machine, request);
    assert!(refused.is_err());
    assert_eq!(link.with(|channel| channel.broken()), Some(Broken::Full));
    assert!(table.is_empty(&machine));
}

proptest! {
    #![proptest_config(cases(48, 20_251_125))]

    /// Any buffers, mapped and unmapped in any order: reached while mapped, and everything is free in the end.
    #[test]
    fn buffers_come_and_go(steps in prop::collection::vec((0..1000_u64, 1..9000_u64, any::<bool>(), 0..8_usize), 1..60)) {
        let mut guest = guest(None);
        let mut cpu = guest.dma.cpu();
        let mut held = Vec::new();
        for (at, bytes, maps, which) in steps {
            if maps {
                let memory = buffer(MEMORY + at * 700, bytes);
                let direction = Direction::ALL[which % 3];
                let mapped = guest.dma.map_single(&mut cpu, &mut guest.machine, &guest.at, at as u32, memory, direction);
                if let Ok((mapping, _)) = mapped {
                    held.push((mapping, memory, direction, at as u32));
                }
            } else if !held.is_empty() {
                let (mapping, _, _, given) = held.swap_remove(which % held.len());
                let iova = mapping.iova().get();
                let Released(back) = guest.dma.unmap_single(&mut cpu, &mut guest.machine, &guest.at, mapping).unwrap();
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
            let _ = guest.dma.unmap_single(&mut cpu, &mut guest.machine, &guest.at, mapping).unwrap();
        }
        prop_assert_eq!((guest.live(), guest.broken()), (0, None));
        prop_assert_eq!(guest.left().len() as u64, SPACE);
    }
}
