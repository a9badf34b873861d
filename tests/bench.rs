//! One mode's layer, hardware, attackers and oracle, behind one object, so that a test is written once and built once for all modes.

use ringfence_devices::{
    Attacker, Event, Mapping as Target, Neighbour, Observer, Passive, Port, Racer, Replayer,
    Request, Reuse,
};
use ringfence_dma::flush::{Flush, Never};
use ringfence_dma::space::{Identity, Paged, Rings, Space, StaticTable};
use ringfence_dma::{
    Coherent, Cpu, Dma, MapReason, Mapping, Outcome, Platform, Request as MapRequest, Segment,
    SgLimits, SgMapping, SgRequest,
};
use ringfence_hw::RingLogic;
use ringfence_iova::IovaAllocator;
use ringfence_lab::Profile;
use ringfence_lab::build::{Job, Recipe, ReplayTable, Single, dispatch};
use ringfence_lab::hardware::{Directed, Hardware, Riommu, Vtd};
use ringfence_lab::machine::Machine;
use ringfence_lab::meter::{FlushFor, FlushForRings, ReplayRing};
use ringfence_lab::modes::{Mode, TableKind};
use ringfence_lab::oracle::{GrantId, Oracle, Ownership, Tally, Verdict};
use ringfence_lab::replay::{Attached, Newcomer};
use ringfence_lab::ring::{RingRecipe, RingSizes};
use ringfence_pgtable::{Levels, SecondStage, Table};
use ringfence_trace::DeviceIndex;
use ringfence_types::{
    Access, DeviceId, Direction, Fault, Invalidation, Iova, IovaRange, Nanos, PageSize, PhysAddr,
    PhysMemory, PhysRange,
};

/// Devices of a bench; any number of others is unknown to it.
pub(crate) const DEVICES: usize = 2;
/// Processors of a bench.
pub(crate) const CPUS: usize = 2;

/// Each on a bus of its own: a Calgary bridge has one space for all devices behind it.
pub(crate) fn device(index: usize) -> DeviceId {
    DeviceId::new((0x10 + index as u16) << 8)
}

/// Names a mapping of a bench, dead or alive.
pub(crate) type Handle = usize;

/// What an access came to.
pub(crate) type Reached = Result<Vec<PhysRange>, Fault>;

/// One mode at work.
pub(crate) trait Bench {
    /// Maps one buffer, or a list; `None` if the ring is full.
    fn try_map(
        &mut self,
        device: usize,
        cpu: usize,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Option<Handle>;
    fn map(
        &mut self,
        device: usize,
        cpu: usize,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Handle {
        self.try_map(device, cpu, pieces, direction).expect("room")
    }
    /// Maps several buffers; those of a ring have one direction. None if the ring has not room for all.
    fn map_multi(
        &mut self,
        device: usize,
        cpu: usize,
        buffers: &[(PhysRange, Direction)],
    ) -> Vec<Handle>;
    fn map_coherent(&mut self, device: usize, cpu: usize, pages: usize) -> Option<Handle>;
    fn unmap(&mut self, handle: Handle, cpu: usize);
    fn unmap_multi(&mut self, handles: &[Handle], cpu: usize);
    fn end_burst(&mut self, device: usize, cpu: usize, direction: Direction);
    /// Lets time pass and runs the timers.
    fn tick(&mut self, cpu: usize, nanos: u64);
    /// Flushes all that the layer holds back.
    fn flush(&mut self);
    /// An access by a device, judged by the oracle.
    fn access(&mut self, device: DeviceId, iova: Iova, bytes: u64, access: Access) -> Reached;
    /// The device-visible bytes of a mapping, or of its first piece where pieces lie apart.
    fn range(&self, handle: Handle) -> IovaRange {
        self.ranges(handle)[0]
    }
    /// The device-visible bytes: one range, or one for each piece where pieces lie apart.
    fn ranges(&self, handle: Handle) -> &[IovaRange];
    /// Whether the buffer of the mapping is back.
    fn is_back(&self, handle: Handle) -> bool;
    /// The verdict of the last access.
    fn verdict(&self) -> Verdict;
    fn tally(&self) -> Tally;
    /// Attackers on (the default) or off.
    fn attackers(&mut self, on: bool);
    /// Purges all that the hardware caches, behind the layer's back.
    fn purge(&mut self);
    /// Stores a word.
    fn poke(&mut self, at: PhysAddr, word: u64);
    /// Where the pieces of a live mapping lie.
    fn lies_at(&self, handle: Handle) -> Vec<PhysRange>;
    /// Accesses that the attackers made.
    fn attempts(&self) -> u64;
    /// Unmaps and invalidations so far.
    fn counts(&self) -> (u64, u64);
}

/// The racer last: the cache of a ring holds what was touched last, which is what the replayer tries.
type Attackers = ((Replayer, Neighbour), Racer);

enum Held {
    Single(Mapping<u64>),
    List(SgMapping<u64>),
    Coherent(Coherent),
    Gone,
}

struct Slot {
    held: Held,
    device: usize,
    ranges: Vec<IovaRange>,
    direction: Direction,
    grant: GrantId,
    back: bool,
}

/// Sees every access for the oracle, and keeps the last one.
struct Eye<'a> {
    oracle: &'a mut Oracle,
    last: &'a mut Verdict,
    reached: &'a mut Vec<PhysRange>,
}

/// The oracle's row of a device: strangers get one of their own each.
fn row(device: DeviceId) -> usize {
    usize::from(device.get())
}

impl Observer for Eye<'_> {
    fn allowed(&mut self, request: &Request, ranges: &[PhysRange]) {
        self.reached.clear();
        self.reached.extend_from_slice(ranges);
        let mut iova = request.iova;
        let mut worst = Verdict::Granted;
        for range in ranges {
            let (mut at, mut left) = (range.start(), range.bytes());
            while left > 0 {
                let here = left.min(4096 - iova.offset_in(4096));
                let row = row(request.device);
                let verdict = self.oracle.allowed(row, iova, here, request.access, at);
                if verdict != Verdict::Granted && !worst.is_violation() {
                    worst = verdict;
                }
                iova = iova.wrapping_add(here);
                at = at.wrapping_add(here);
                left -= here;
            }
        }
        *self.last = worst;
    }

    fn faulted(&mut self, request: &Request, fault: &Fault) {
        let bytes = if fault.iova == request.iova {
            request.bytes.min(4096 - request.iova.offset_in(4096))
        } else {
            1
        };
        let row = row(request.device);
        *self.last = self.oracle.faulted(row, fault.iova, bytes, request.access);
    }
}

struct World<H, S: Space, F: Flush<S, u64>> {
    machine: Machine<H>,
    dma: Dma<S, F, u64>,
    cpus: Vec<Cpu<S, F, u64>>,
    at: Vec<Attached>,
    oracle: Oracle,
    last: Verdict,
    reached: Vec<PhysRange>,
    slots: Vec<Slot>,
    attackers: Option<Attackers>,
    attempts: u64,
    unmaps: u64,
    translates: bool,
}

struct Accesses<'a, H> {
    machine: &'a mut Machine<H>,
    eye: Eye<'a>,
    made: u64,
}

impl<H: Hardware> Port for Accesses<'_, H> {
    fn access(&mut self, request: &Request) -> Result<(), Fault> {
        self.made += 1;
        self.machine.probe(request, &mut self.eye)
    }
}

impl<H: Hardware, S: Space, F: Flush<S, u64>> World<H, S, F> {
    fn port(&mut self) -> Accesses<'_, H> {
        Accesses {
            machine: &mut self.machine,
            eye: Eye {
                oracle: &mut self.oracle,
                last: &mut self.last,
                reached: &mut self.reached,
            },
            made: 0,
        }
    }

    fn attack(&mut self, event: &Event) {
        let Some(mut attackers) = self.attackers.take() else {
            return;
        };
        let mut port = self.port();
        attackers.on(event, &mut port);
        let made = port.made;
        self.attempts += made;
        self.attackers = Some(attackers);
    }

    fn keep(
        &mut self,
        device: usize,
        held: Held,
        ranges: Vec<IovaRange>,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Handle {
        let at = self.at[device].towards(direction);
        let row = row(at.device());
        let grant = if self.translates && !S::JOINS && ranges.len() == pieces.len() {
            self.oracle.grant_apart(row, &ranges, pieces, direction)
        } else {
            self.oracle.grant(row, ranges[0], pieces, direction)
        };
        self.slots.push(Slot {
            held,
            device,
            ranges,
            direction,
            grant,
            back: false,
        });
        let handle = self.slots.len() - 1;
        self.tell(Event::Mapped, handle);
        handle
    }

    /// The attackers notice what the driver does with each range of a mapping.
    fn tell(&mut self, event: fn(Target) -> Event, handle: Handle) {
        let slot = &self.slots[handle];
        let (direction, at) = (slot.direction, &self.at[slot.device]);
        let device = at.towards(direction).device();
        for range in slot.ranges.clone() {
            self.attack(&event(Target {
                device,
                range,
                direction,
            }));
        }
    }

    /// The device does its work, then whoever else wants to.
    fn before_unmap(&mut self, handle: Handle) {
        let slot = &self.slots[handle];
        let grant = self.oracle.get(slot.grant).expect("a live grant");
        let pieces: Vec<_> = grant.pieces().collect();
        let (direction, at) = (slot.direction, &self.at[slot.device]);
        let device = at.towards(direction).device();
        let mut port = self.port();
        for range in pieces {
            let target = Target {
                device,
                range,
                direction,
            };
            Passive.on(&Event::Unmapping(target), &mut port);
        }
        self.tell(Event::Unmapping, handle);
    }

    fn back(&mut self, handle: u64) {
        let slot = &mut self.slots[handle as usize];
        assert!(!slot.back, "buffer {handle} came back twice");
        slot.back = true;
        self.oracle.release(slot.grant);
    }

    fn after_unmap(&mut self, handle: Handle) {
        self.unmaps += 1;
        self.tell(Event::Unmapped, handle);
    }
}

impl<H: Hardware, S: Space, F: Flush<S, u64>> Bench for World<H, S, F> {
    fn try_map(
        &mut self,
        device: usize,
        cpu: usize,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Option<Handle> {
        let name = self.slots.len() as u64;
        let (own, at) = (&mut self.cpus[cpu], self.at[device].towards(direction));
        let machine = &mut self.machine;
        let made = if let [piece] = pieces {
            self.dma
                .map_single(own, machine, at, name, *piece, direction)
                .map(|(mapping, _)| {
                    let ranges = vec![mapping.range()];
                    (Held::Single(mapping), ranges)
                })
        } else {
            let nothing = IovaRange::new(Iova::ZERO, 1).unwrap();
            let mut out = vec![Segment { range: nothing }; pieces.len()];
            let limits = SgLimits {
                max_bytes: u64::MAX,
                boundary: None,
            };
            let request = SgRequest {
                buffer: name,
                pieces,
                direction,
                limits,
                out: &mut out,
            };
            let made = self.dma.map_sg(own, machine, at, request);
            made.map(|(mapping, count)| {
                let ranges = match mapping.range() {
                    Some(range) => vec![range],
                    None => out[..count].iter().map(|out| out.range).collect(),
                };
                (Held::List(mapping), ranges)
            })
        };
        let (held, ranges) = match made {
            Ok(made) => made,
            Err((back, error)) => {
                assert_eq!(back, name);
                assert!(matches!(error.reason, MapReason::RingFull(_)), "{error}");
                return None;
            }
        };
        self.dma.doorbell(own, machine, at);
        Some(self.keep(device, held, ranges, pieces, direction))
    }

    fn map_multi(
        &mut self,
        device: usize,
        cpu: usize,
        buffers: &[(PhysRange, Direction)],
    ) -> Vec<Handle> {
        let first = self.slots.len() as u64;
        let requests = (first..)
            .zip(buffers)
            .map(|(buffer, &(memory, direction))| MapRequest {
                buffer,
                memory,
                direction,
            })
            .collect();
        let ring = buffers
            .first()
            .map_or(Direction::ToDevice, |(_, ring)| *ring);
        let (own, at) = (&mut self.cpus[cpu], self.at[device].towards(ring));
        let made = match self.dma.map_multi(own, &mut self.machine, at, requests) {
            Ok(made) => made,
            Err((back, error)) => {
                assert_eq!(back.len(), buffers.len());
                assert!(matches!(error.reason, MapReason::RingFull(_)), "{error}");
                return Vec::new();
            }
        };
        self.dma.doorbell(own, &mut self.machine, at);
        made.into_iter()
            .zip(buffers)
            .map(|(mapping, (memory, direction))| {
                let ranges = vec![mapping.range()];
                self.keep(
                    device,
                    Held::Single(mapping),
                    ranges,
                    &[*memory],
                    *direction,
                )
            })
            .collect()
    }

    fn map_coherent(&mut self, device: usize, cpu: usize, pages: usize) -> Option<Handle> {
        let both = Direction::Bidirectional;
        let (own, at) = (&mut self.cpus[cpu], self.at[device].towards(both));
        let memory = self
            .dma
            .alloc_coherent(own, &mut self.machine, at, pages)
            .ok()?;
        let frames = memory.frames().iter();
        let pieces: Vec<_> = frames.map(|f| PhysRange::new(*f, 4096).unwrap()).collect();
        let ranges = vec![memory.range()];
        self.dma.doorbell(own, &mut self.machine, at);
        Some(self.keep(device, Held::Coherent(memory), ranges, &pieces, both))
    }

    fn unmap(&mut self, handle: Handle, cpu: usize) {
        self.before_unmap(handle);
        let slot = &mut self.slots[handle];
        let held = std::mem::replace(&mut slot.held, Held::Gone);
        let (own, at) = (
            &mut self.cpus[cpu],
            self.at[slot.device].towards(slot.direction),
        );
        let machine = &mut self.machine;
        let outcome = match held {
            Held::Single(mapping) => self.dma.unmap_single(own, machine, at, mapping),
            Held::List(mapping) => self.dma.unmap_sg(own, machine, at, mapping),
            Held::Coherent(memory) => {
                self.dma.free_coherent(own, machine, at, memory).unwrap();
                self.back(handle as u64);
                return self.after_unmap(handle);
            }
            Held::Gone => panic!("{handle} is gone"),
        };
        match outcome.expect("mapped").into_buffer() {
            Some(name) => {
                assert_eq!(name, handle as u64, "another's buffer");
                self.back(name);
            }
            None => self.oracle.withhold(self.slots[handle].grant),
        }
        self.after_unmap(handle);
    }

    fn unmap_multi(&mut self, handles: &[Handle], cpu: usize) {
        let of = handles.first().map(|h| &self.slots[*h]);
        let Some((device, ring)) = of.map(|slot| (slot.device, slot.direction)) else {
            return;
        };
        let mut mappings = Vec::new();
        for handle in handles {
            self.before_unmap(*handle);
            let held = std::mem::replace(&mut self.slots[*handle].held, Held::Gone);
            let Held::Single(mapping) = held else {
                panic!("{handle} is no single mapping");
            };
            mappings.push(mapping);
        }
        let (own, at) = (&mut self.cpus[cpu], self.at[device].towards(ring));
        let mut back = Vec::new();
        self.dma
            .unmap_multi(own, &mut self.machine, at, mappings, |name| back.push(name))
            .expect("mapped");
        for handle in handles {
            if !back.contains(&(*handle as u64)) {
                self.oracle.withhold(self.slots[*handle].grant);
            }
        }
        for name in back {
            assert!(handles.contains(&(name as usize)), "another's buffer");
            self.back(name);
        }
        for handle in handles {
            self.after_unmap(*handle);
        }
    }

    fn end_burst(&mut self, device: usize, cpu: usize, direction: Direction) {
        let (own, at) = (&mut self.cpus[cpu], self.at[device].towards(direction));
        let mut back = Vec::new();
        self.dma
            .end_burst(own, &mut self.machine, at, direction, |name| {
                back.push(name)
            })
            .expect("an invalidation that works");
        for name in back {
            let slot = &self.slots[name as usize];
            assert_eq!((slot.device, slot.direction), (device, direction));
            self.back(name);
        }
        self.attack(&Event::Other);
    }

    fn tick(&mut self, cpu: usize, nanos: u64) {
        self.machine.now = Nanos(self.machine.now.0 + nanos);
        let own = &mut self.cpus[cpu];
        self.dma
            .tick(own, &mut self.machine)
            .expect("an invalidation that works");
        self.attack(&Event::Other);
    }

    fn flush(&mut self) {
        for device in 0..DEVICES {
            for cpu in 0..CPUS {
                for direction in Direction::ALL {
                    self.end_burst(device, cpu, direction);
                }
            }
            let at = self.at[device].towards(Direction::ToDevice);
            let own = &mut self.cpus[0];
            self.dma.flush(own, &mut self.machine, at).unwrap();
        }
    }

    fn access(&mut self, device: DeviceId, iova: Iova, bytes: u64, access: Access) -> Reached {
        let request = Request {
            device,
            iova,
            bytes,
            access,
        };
        self.port().access(&request)?;
        Ok(self.reached.clone())
    }

    fn ranges(&self, handle: Handle) -> &[IovaRange] {
        &self.slots[handle].ranges
    }

    fn is_back(&self, handle: Handle) -> bool {
        self.slots[handle].back
    }

    fn verdict(&self) -> Verdict {
        self.last
    }

    fn tally(&self) -> Tally {
        self.oracle.tally
    }

    fn attackers(&mut self, on: bool) {
        self.attackers = on.then(|| attackers(self.translates));
    }

    fn purge(&mut self) {
        let purged = self.machine.iommu.hardware.submit(Invalidation::Global);
        purged.expect("purged");
    }

    fn poke(&mut self, at: PhysAddr, word: u64) {
        let memory = self.machine.arena().word(at).unwrap();
        memory.store(word, std::sync::atomic::Ordering::Relaxed);
    }

    fn lies_at(&self, handle: Handle) -> Vec<PhysRange> {
        match &self.slots[handle].held {
            Held::Coherent(memory) => {
                let frames = memory.frames().iter();
                frames.map(|f| PhysRange::new(*f, 4096).unwrap()).collect()
            }
            _ => Vec::new(),
        }
    }

    fn attempts(&self) -> u64 {
        self.attempts
    }

    fn counts(&self) -> (u64, u64) {
        (self.unmaps, self.machine.iommu.count)
    }
}

fn attackers(translates: bool) -> Attackers {
    let reuse = if translates { Reuse::Page } else { Reuse::Byte };
    ((Replayer::new(reuse), Neighbour), Racer::new())
}

struct Build;

impl Build {
    fn world<H: Hardware, S: Space + 'static, F: Flush<S, u64> + 'static>(
        flush: F,
        enabled: bool,
        ownership: Ownership,
        mut make: impl FnMut(&Newcomer, &Machine<H>) -> (S, Directed),
    ) -> Box<dyn Bench> {
        let mut machine = Machine::new(&Profile::r210_2015(), enabled).unwrap();
        let mut dma = Dma::new(flush);
        let mut at = Vec::new();
        for index in 0..DEVICES {
            let mut to = Directed::PassThrough;
            let attachment = dma
                .attach(device(index), Iova::new(u64::MAX), |domain| {
                    let newcomer = Newcomer {
                        domain,
                        device: device(index),
                        row: DeviceIndex(index as u16),
                    };
                    let (space, directed) = make(&newcomer, &machine);
                    to = directed;
                    Ok::<_, ()>(space)
                })
                .unwrap();
            machine
                .attach(device(index), attachment.domain(), to)
                .unwrap();
            at.push(Attached::new(&dma, attachment));
        }
        let translates = ownership == Ownership::Page;
        Box::new(World {
            machine,
            cpus: (0..CPUS).map(|_| dma.cpu()).collect(),
            dma,
            at,
            oracle: Oracle::new(ownership),
            last: Verdict::Stopped,
            reached: Vec::new(),
            slots: Vec::new(),
            attackers: Some(attackers(translates)),
            attempts: 0,
            unmaps: 0,
            translates,
        })
    }
}

impl Job for Build {
    type Output = Box<dyn Bench>;

    fn identity(self, kind: TableKind) -> Box<dyn Bench> {
        let enabled = kind != TableKind::None;
        Self::world(
            Never,
            enabled,
            Ownership::Byte,
            |&Newcomer { domain, .. }, machine: &Machine<Vtd>| {
                let directed = if kind == TableKind::StaticRadix {
                    let format = SecondStage::new(Levels::Four).with_pages_up_to(PageSize::Size2M);
                    let (memory, frames) = (&**machine.arena(), machine.frames());
                    let coherency = machine.coherency();
                    let table = Table::new(format, domain, coherency, memory, frames).unwrap();
                    let all = PhysRange::new(PhysAddr::ZERO, ringfence_lab::machine::DATA_BYTES);
                    StaticTable::fill(&table, machine, &[all.unwrap()]).unwrap();
                    Directed::Table(table.root())
                } else {
                    Directed::PassThrough
                };
                (Identity::new(domain), directed)
            },
        )
    }

    fn paged<A, T, F>(self, recipe: Recipe<A, T, F>) -> Box<dyn Bench>
    where
        A: IovaAllocator + 'static,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let flush = (recipe.flush)();
        Self::world::<T::Hardware, Paged<A, T>, F>(
            flush,
            true,
            Ownership::Page,
            |&Newcomer { domain, .. }, machine| {
                let (memory, frames) = (machine.arena(), machine.frames());
                let table = (recipe.table)(domain, machine.coherency(), memory, frames).unwrap();
                let directed = Directed::Table(table.root());
                let alloc = recipe.allocator(memory, frames, Some(&table)).unwrap();
                (Paged::new(alloc, table, recipe.rounding), directed)
            },
        )
    }

    fn rings<D, L, F>(self, recipe: RingRecipe<D, L, F>) -> Box<dyn Bench>
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        let sizes = RingSizes::Every(SLOTS);
        Self::world::<Riommu<L>, Rings<D, Single<D>>, F>(
            (recipe.flush)(),
            true,
            Ownership::Page,
            |newcomer, machine| {
                let (memory, frames) = (machine.arena(), machine.frames());
                let (space, rings) = recipe.space(newcomer, &sizes, memory, frames).unwrap();
                (space, Directed::Table(rings))
            },
        )
    }
}

/// Slots of every ring: fewer than a test may have live, so that maps wait.
const SLOTS: u32 = 16;

/// A bench of `mode`.
pub(crate) fn bench(mode: &Mode) -> Box<dyn Bench> {
    dispatch(mode, Build).unwrap()
}

/// A bench of the mode of that name.
pub(crate) fn named(name: &str) -> Box<dyn Bench> {
    bench(&Mode::find(name).unwrap())
}

/// `bytes` bytes of memory from `start`.
pub(crate) fn memory(start: u64, bytes: u64) -> PhysRange {
    PhysRange::new(PhysAddr::new(start), bytes).unwrap()
}
