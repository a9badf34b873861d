//! A machine: memory, an IOMMU, the mapping layer in some mode, and a judge that knows what is mapped and nothing of the mode.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use ringfence_devices::api::{
    Attachments, Handback, HasBus, LayerApi, Ring as ApiRing, RingAttachments, Witness,
};
use ringfence_devices::nic::{Profile, World};
use ringfence_devices::{Buffer, Bus, Custody, Mapping, Observer, Request};
use ringfence_dma::flush::{Burst, Deferred, Never, Strict};
use ringfence_dma::ring::{Ring, RingSetup, SlotChoice, Tables, lay_out};
use ringfence_dma::space::{Identity, Paged, PlainTable, Rings, Rounding};
use ringfence_dma::{Attachment, Cpu, Dma, Flush, Platform, Space};
use ringfence_hw::{
    FaultLog, Geometry, Prefetch, Purge, Replacement, RingUnit, RingUnitConfig, Translate,
    UnitConfig, VtdUnit,
};
use ringfence_iova::{CachedTree, Capacity, Eiovar, Locked};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, SecondStage, Table, Translation,
};
use ringfence_types::{
    DeviceId, Direction, DomainId, Fault, Invalidator, Iova, Nanos, Pfn, PfnRange, PhysAddr,
    PhysRange,
};

pub(crate) const NIC: DeviceId = DeviceId::new(0x0300);
/// Buffers lie below, tables and rings above.
pub(crate) const TABLES: u64 = 1 << 30;
const ARENA: u64 = TABLES + (256 << 20);

/// Live grants, and what came of every access.
#[derive(Debug, Default)]
pub(crate) struct Judge {
    grants: BTreeMap<u64, (PhysRange, Direction)>,
    /// Accesses to memory that no live grant covers.
    pub(crate) violations: u64,
    /// Accesses inside a buffer.
    pub(crate) accesses: u64,
    /// Accesses that were stopped.
    pub(crate) faults: u64,
    /// Grants so far.
    pub(crate) maps: u64,
}

impl Judge {
    pub(crate) fn live(&self) -> usize {
        self.grants.len()
    }

    fn grant(&mut self, memory: PhysRange, direction: Direction) {
        self.maps += 1;
        let before = self
            .grants
            .insert(memory.start().get(), (memory, direction));
        assert_eq!(before, None, "{memory} is mapped twice");
    }

    fn revoke(&mut self, start: PhysAddr) {
        let gone = self.grants.remove(&start.get());
        assert!(gone.is_some(), "nothing at {start} is mapped");
    }
}

impl Observer for Judge {
    fn allowed(&mut self, request: &Request, ranges: &[PhysRange]) {
        for range in ranges {
            if range.start().get() >= TABLES {
                continue;
            }
            self.accesses += 1;
            let below = self.grants.range(..=range.start().get()).next_back();
            let granted = below.is_some_and(|(_, (memory, direction))| {
                memory.contains(range) && direction.permissions().allows(request.access)
            });
            self.violations += u64::from(!granted);
        }
    }

    fn faulted(&mut self, _request: &Request, _fault: &Fault) {
        self.faults += 1;
    }
}

/// Keeps the judge's grants as the driver maps and unmaps.
#[derive(Debug, Default)]
pub(crate) struct Grants<W>(pub W);

impl<U, W: Witness<Machine<U>>> Witness<Machine<U>> for Grants<W> {
    fn mapped(&mut self, machine: &mut Machine<U>, mapping: &Mapping, memory: PhysRange) {
        machine.judge.grant(memory, mapping.direction);
        machine.starts.insert(mapping.range.start(), memory.start());
        self.0.mapped(machine, mapping, memory);
    }

    fn unmapping(&mut self, machine: &mut Machine<U>, mapping: &Mapping) {
        self.0.unmapping(machine, mapping);
    }

    fn unmapped(&mut self, machine: &mut Machine<U>, mapping: &Mapping, handback: Handback) {
        let start = machine.starts.remove(&mapping.range.start()).unwrap();
        if handback != Handback::Withheld {
            machine.judge.revoke(start);
        }
        self.0.unmapped(machine, mapping, handback);
    }

    fn released(&mut self, machine: &mut Machine<U>, buffer: &Buffer) {
        machine.judge.revoke(buffer.start());
        self.0.released(machine, buffer);
    }
}

pub(crate) struct Machine<U = VtdUnit> {
    pub(crate) arena: Rc<Arena>,
    frames: Frames<Rc<Arena>>,
    unit: U,
    pub(crate) judge: Judge,
    starts: BTreeMap<Iova, PhysAddr>,
}

impl<U> Machine<U> {
    pub(crate) fn unit(&self) -> &U {
        &self.unit
    }
}

impl<U: Invalidator> Platform for Machine<U> {
    type Memory = Arena;
    type Frames = Frames<Rc<Arena>>;
    type Invalidator = U;

    fn memory(&self) -> &Arena {
        &self.arena
    }
    fn frames(&self) -> &Frames<Rc<Arena>> {
        &self.frames
    }
    fn invalidator(&mut self) -> &mut U {
        &mut self.unit
    }
    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

impl<U: Invalidator + Translate + 'static> HasBus for Machine<U> {
    type Bus<'a> = Bus<'a, U, Arena, &'a mut Judge>;

    fn bus(&mut self) -> Self::Bus<'_> {
        Bus::new(&mut self.unit, &self.arena, &mut self.judge)
    }
}

/// A machine with one device, in one mode.
pub(crate) struct Rig<S: Space, F: Flush<S, B>, B, W, U = VtdUnit, A = Attachment> {
    pub(crate) machine: Machine<U>,
    dma: Dma<S, F, B>,
    cpu: Cpu<S, F, B>,
    at: A,
    pub(crate) witness: Grants<W>,
}

// Freelists in front, so that no test spends its time in linear searches.
type Lists = Eiovar<CachedTree>;
type Tree = Locked<Lists, RefCell<Lists>>;
pub(crate) type Pages = Paged<Tree, PlainTable<SecondStage>>;

fn radix() -> VtdUnit {
    let geometry = Geometry::new(16, 4).unwrap();
    VtdUnit::vtd(&UnitConfig {
        iotlb: geometry,
        walk_caches: [geometry; 3],
        contexts: geometry,
        replacement: Replacement::Lru,
        fault_log: FaultLog::MAX_CAPACITY,
        purge: Purge::Selective,
    })
}

fn machine<U>(unit: U) -> Machine<U> {
    let arena = Rc::new(Arena::new(ARENA).unwrap());
    let region = PhysRange::new(PhysAddr::new(TABLES), ARENA - TABLES).unwrap();
    let frames = Frames::new(Rc::clone(&arena), region);
    Machine {
        arena,
        frames,
        unit,
        judge: Judge::default(),
        starts: BTreeMap::new(),
    }
}

const MASK: Iova = Iova::new((1 << 48) - 1);

impl<F: Flush<Pages, B>, B, W> Rig<Pages, F, B, W> {
    /// Behind a radix table.
    pub(crate) fn paged(flush: F, witness: W) -> Self {
        let mut machine = machine(radix());
        let mut contexts =
            ContextTables::new(Coherency::Coherent, &*machine.arena, &machine.frames).unwrap();
        machine.unit.set_root_table(contexts.root());
        machine.unit.enable();
        let mut dma = Dma::new(flush);
        let at = dma
            .attach(NIC, MASK, |domain| {
                let format = SecondStage::new(Levels::Four);
                let table = Table::new(
                    format,
                    domain,
                    Coherency::Coherent,
                    &*machine.arena,
                    &machine.frames,
                )
                .unwrap();
                let context = Context {
                    domain,
                    translation: Translation::Table {
                        root: table.root(),
                        levels: Levels::Four,
                    },
                };
                contexts
                    .attach(&*machine.arena, &machine.frames, NIC, &context)
                    .unwrap();
                let all = PfnRange::inclusive(Pfn::new(1), Pfn::new((1 << 36) - 1)).unwrap();
                let lists = Eiovar::new(CachedTree::new(all), Capacity::Unbounded);
                let tree = Locked::new(lists, RefCell::new);
                Ok::<_, DomainId>(Paged::new(tree, PlainTable(table), Rounding::PowerOfTwo))
            })
            .unwrap();
        Self {
            cpu: dma.cpu(),
            machine,
            dma,
            at,
            witness: Grants(witness),
        }
    }
}

impl<W> Rig<Identity, Never, u64, W> {
    /// Without protection. Buffers are numbers, as in a layer that does not know this crate's.
    pub(crate) fn unprotected(witness: W) -> Self {
        let mut dma = Dma::new(Never);
        let at = dma
            .attach(NIC, MASK, |domain| Ok::<_, DomainId>(Identity::new(domain)))
            .unwrap();
        Self {
            cpu: dma.cpu(),
            machine: machine(radix()),
            dma,
            at,
            witness: Grants(witness),
        }
    }
}

type Slots = Rings<Ring, RefCell<Ring>>;
pub(crate) type RingRig<W> = Rig<Slots, Burst, Buffer, W, RingUnit, RingAttachments>;

impl<W> RingRig<W> {
    /// Behind the rings of a ring unit: for each ring of the API a table for descriptors and one of so many slots.
    pub(crate) fn rings(
        rings: impl IntoIterator<Item = (ApiRing, u32)>,
        setup: RingSetup,
        witness: W,
    ) -> Self {
        let mut machine = machine(RingUnit::new(&RingUnitConfig {
            riotlb: Geometry::new(1, 32).unwrap(),
            replacement: Replacement::Lru,
            contexts: Geometry::new(1, 1).unwrap(),
            prefetch: Prefetch::Immediate,
            fault_log: FaultLog::MAX_CAPACITY,
        }));
        let rings: Vec<_> = rings.into_iter().collect();
        let slots: Vec<_> = rings.iter().flat_map(|(_, live)| [4, *live]).collect();
        let bytes = 16 * slots.iter().map(|slots| u64::from(*slots) + 5).sum::<u64>();
        let base = machine
            .frames
            .alloc_contiguous(bytes.div_ceil(4096) + 1)
            .unwrap();
        let tables = Tables::new(base, &slots).unwrap();
        let laid_out = lay_out(&*machine.arena, &tables, setup).unwrap();
        let mut contexts =
            ContextTables::new(setup.coherency, &*machine.arena, &machine.frames).unwrap();
        machine.unit.set_root_table(contexts.root());
        machine.unit.enable();
        let mut dma = Dma::new(Burst::new(4096));
        let at = dma
            .attach(NIC, Iova::new(u64::MAX), |domain| {
                let context = Context {
                    domain,
                    translation: Translation::Rings { device: base },
                };
                contexts
                    .attach(&*machine.arena, &machine.frames, NIC, &context)
                    .unwrap();
                Ok::<_, DomainId>(Rings::new(domain, NIC, laid_out, RefCell::new))
            })
            .unwrap();
        let at = RingAttachments::new(&dma, &at, rings.iter().map(|(ring, _)| *ring)).unwrap();
        Self {
            cpu: dma.cpu(),
            machine,
            dma,
            at,
            witness: Grants(witness),
        }
    }
}

/// A ring rig for a profile, whose tables hold `times` as many slots as its rings hold buffers.
pub(crate) fn rings(profile: &Profile, times: u32, setup: RingSetup) -> RingRig<()> {
    let rings = profile.api_rings();
    RingRig::rings(rings.map(|(ring, live)| (ring, live * times)), setup, ())
}

pub(crate) const TAIL: RingSetup = RingSetup {
    choice: SlotChoice::Tail,
    coherency: Coherency::Coherent,
};

impl<S, F, B, W, U, A> World for Rig<S, F, B, W, U, A>
where
    S: Space,
    F: Flush<S, B>,
    B: Custody,
    W: Witness<Machine<U>>,
    U: Invalidator + Translate + 'static,
    A: Attachments,
{
    type Handle = ringfence_dma::Mapping<B>;
    type Api<'a>
        = LayerApi<'a, S, F, B, Machine<U>, A, &'a mut Grants<W>>
    where
        Self: 'a;
    type Bus<'a>
        = Bus<'a, U, Arena, &'a mut Judge>
    where
        Self: 'a;

    fn api(&mut self) -> Self::Api<'_> {
        LayerApi {
            dma: &self.dma,
            cpu: &mut self.cpu,
            platform: &mut self.machine,
            at: &self.at,
            witness: &mut self.witness,
        }
    }

    fn bus(&mut self) -> Self::Bus<'_> {
        self.machine.bus()
    }
}

/// What tests need of a rig, whatever its mode.
pub(crate) trait Judged: World {
    fn judge(&mut self) -> &mut Judge;
    /// Frames of tables and rings in use.
    fn frames_in_use(&self) -> u64;
}

impl<S, F, B, W, U, A> Judged for Rig<S, F, B, W, U, A>
where
    S: Space,
    F: Flush<S, B>,
    B: Custody,
    W: Witness<Machine<U>>,
    U: Invalidator + Translate + 'static,
    A: Attachments,
{
    fn judge(&mut self) -> &mut Judge {
        &mut self.machine.judge
    }

    fn frames_in_use(&self) -> u64 {
        self.machine.frames.in_use()
    }
}

pub(crate) fn strict() -> Rig<Pages, Strict, Buffer, ()> {
    Rig::paged(Strict, ())
}

pub(crate) fn burst(longest: usize) -> Rig<Pages, Burst, Buffer, ()> {
    Rig::paged(Burst::new(longest), ())
}

pub(crate) type Queue = Deferred<RefCell<ringfence_dma::flush::DeferredQueue>>;

pub(crate) fn deferred() -> Rig<Pages, Queue, Buffer, ()> {
    Rig::paged(Deferred::new(RefCell::new), ())
}

pub(crate) fn unprotected() -> Rig<Identity, Never, u64, ()> {
    Rig::unprotected(())
}

/// Buffers of `bytes` bytes at the bottom of memory.
pub(crate) fn buffers(bytes: u64) -> PhysRange {
    assert!(bytes <= TABLES - 0x1000);
    PhysRange::new(PhysAddr::new(0x1000), bytes).unwrap()
}
