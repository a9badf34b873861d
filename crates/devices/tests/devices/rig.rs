//! A machine: memory, an IOMMU, the mapping layer in some mode, and a judge.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_devices::api::{
    Attachments, DeviceRing as ApiRing, DmaHooks, HasBus, LayerApi, RingAttachments, UnmapOutcome,
};
use ringfence_devices::nic::{Environment, NicProfile};
use ringfence_devices::recovery::DeviceIsolation;
use ringfence_devices::{Buffer, BufferOwner, Bus, DeviceMapping};
use ringfence_dma::flush::{Burst, Deferred, Never, Strict};
use ringfence_dma::ring::{Ring, RingSetup, RingTables, SlotChoice, lay_out};
use ringfence_dma::space::{Identity, Paged, PlainTable, RingDriver, Rings, Rounding};
use ringfence_dma::{Attachment, Cpu, Dma, FlushPolicy, Platform, Space, Teardown};
use ringfence_hw::{
    FaultLog, FaultRecord, FixedLogic, Geometry, InvalidationGranularity, Prefetch, Replacement,
    RingLogic, RingUnit, RingUnitConfig, Translate, UnitConfig, VtdUnit,
};
use ringfence_iova::{CachedTree, Capacity, Eiovar, Locked};
use ringfence_papers::{BurstAsPublished, LogicAsPublished, RingAsPublished};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, SecondStage, Table, TranslationType,
};
use ringfence_types::{
    DomainId, FrameSource, Invalidation, InvalidationError, Invalidator, Iova, Nanos, Pfn,
    PfnRange, PhysAddr, PhysRange, RequesterId,
};

use super::hardware::{FailureInjector, Memory, Pool, Walker};
use super::judge::Judge;

pub(crate) const NIC: RequesterId = RequesterId::new(0x0300);
/// Buffers are below this address, tables and rings above.
pub(crate) const TABLES: u64 = 1 << 30;

/// Updates the judge's grants when the driver maps and unmaps.
#[derive(Debug, Default)]
pub(crate) struct Grants<W>(pub W);

impl<U, W: DmaHooks<Machine<U>>> DmaHooks<Machine<U>> for Grants<W> {
    fn mapped(&mut self, machine: &mut Machine<U>, mapping: &DeviceMapping, memory: PhysRange) {
        machine.judge.grant(mapping, memory);
        self.0.mapped(machine, mapping, memory);
    }

    fn unmapping(&mut self, machine: &mut Machine<U>, mapping: &DeviceMapping) {
        self.0.unmapping(machine, mapping);
    }

    fn unmapped(
        &mut self,
        machine: &mut Machine<U>,
        mapping: &DeviceMapping,
        handback: UnmapOutcome,
    ) {
        let is_back = handback != UnmapOutcome::Withheld;
        machine.judge.unmap(mapping.range.start(), is_back);
        self.0.unmapped(machine, mapping, handback);
    }

    fn released(&mut self, machine: &mut Machine<U>, buffer: &Buffer) {
        machine.judge.release(buffer.start());
        self.0.released(machine, buffer);
    }

    fn synced(&mut self, machine: &mut Machine<U>) {
        machine.judge.tell();
        self.0.synced(machine);
    }
}

pub(crate) struct Machine<U = VtdUnit> {
    pub(crate) memory: Rc<Memory>,
    pub(crate) pool: Pool,
    pub(crate) walker: Walker<U>,
    pub(crate) judge: Judge,
}

impl<U> Machine<U> {
    fn new(unit: U, coherency: Coherency) -> Self {
        let memory = Rc::new(Memory::new(coherency));
        Self {
            pool: Pool::new(&memory),
            walker: Walker::new(unit, &memory, coherency),
            judge: Judge::new(coherency == Coherency::NonCoherent),
            memory,
        }
    }

    pub(crate) fn unit(&self) -> &U {
        &self.walker.unit
    }
}

impl<U: Invalidator> Platform for Machine<U> {
    type Memory = Memory;
    type Frames = Pool;
    type Invalidator = Walker<U>;

    fn memory(&self) -> &Memory {
        &self.memory
    }
    fn frames(&self) -> &Pool {
        &self.pool
    }
    fn invalidator(&mut self) -> &mut Walker<U> {
        &mut self.walker
    }
    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

impl<U: Invalidator + Translate + 'static> HasBus for Machine<U> {
    type Bus<'a> = Bus<'a, Walker<U>, Memory, &'a mut Judge>;

    fn bus(&mut self) -> Self::Bus<'_> {
        Bus::new(&mut self.walker, &self.memory, &mut self.judge)
    }
}

/// The device's access to memory was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GateEvent {
    /// Access was denied. `reached` of `live` mapped buffers were accessible after that.
    Blocked { live: usize, reached: usize },
    /// Access was allowed, with this number of mapped buffers.
    Unblocked { live: usize },
}

/// The context entry of a device.
pub(crate) struct ContextGate {
    contexts: ContextTables,
    context: Context,
    events: Vec<GateEvent>,
}

/// A machine with one device, in one mode.
pub(crate) struct Rig<S: Space, F: FlushPolicy<S, B>, B, W, U = VtdUnit, A = Attachment> {
    pub(crate) machine: Machine<U>,
    dma: Dma<S, F, B>,
    cpu: Cpu<S, F, B>,
    at: A,
    pub(crate) hooks: Grants<W>,
    /// `None` without a table of pages.
    gate: Option<ContextGate>,
}

// Use free lists, because linear searches would dominate the tests.
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
        granularity: InvalidationGranularity::Selective,
    })
}

const MASK: Iova = Iova::new((1 << 48) - 1);

impl<F: FlushPolicy<Pages, B>, B, W> Rig<Pages, F, B, W> {
    /// Creates a rig with a radix table.
    pub(crate) fn paged(flush: F, hooks: W) -> Self {
        let mut machine = Machine::new(radix(), Coherency::Coherent);
        let mut contexts =
            ContextTables::new(Coherency::Coherent, &*machine.memory, &machine.pool).unwrap();
        machine.walker.unit.set_root_table(contexts.root());
        machine.walker.unit.enable();
        let mut dma = Dma::new(flush);
        let mut entry = None;
        let at = dma
            .attach(NIC, MASK, |domain| {
                let format = SecondStage::new(Levels::Four);
                let table = Table::new(
                    format,
                    domain,
                    Coherency::Coherent,
                    &*machine.memory,
                    &machine.pool,
                )
                .unwrap();
                let context = Context {
                    domain,
                    translation: TranslationType::Table {
                        root: table.root(),
                        levels: Levels::Four,
                    },
                };
                entry = Some(context);
                contexts
                    .attach(&*machine.memory, &machine.pool, NIC, &context)
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
            hooks: Grants(hooks),
            gate: entry.map(|context| ContextGate {
                contexts,
                context,
                events: Vec::new(),
            }),
        }
    }
}

impl<F: FlushPolicy<Pages, Buffer>, W> Rig<Pages, F, Buffer, W> {
    /// Detaches the device with all its mappings. Its domain no longer exists.
    pub(crate) fn detach(&mut self) {
        let disconnect = |machine: &mut Machine| {
            let nothing = machine.pool.alloc_zeroed().unwrap();
            machine.walker.unit.set_root_table(nothing);
        };
        let withheld = |_| panic!("nothing is withheld");
        let gone = self.dma.detach(
            &mut self.cpu,
            &mut self.machine,
            &self.at,
            Teardown::Forced,
            disconnect,
            withheld,
        );
        assert!(gone.unwrap().is_some());
    }
}

impl<F: FlushPolicy<Pages, Buffer>, W> Rig<Pages, F, Buffer, W> {
    /// Returns the changes of the device's access so far.
    pub(crate) fn gate_events(&self) -> Vec<GateEvent> {
        self.gate
            .iter()
            .flat_map(|gate| gate.events.clone())
            .collect()
    }

    fn invalidate_context(&mut self) -> Result<(), InvalidationError> {
        let walker = &mut self.machine.walker;
        let ticket = walker.submit(Invalidation::Context(NIC))?;
        while !walker.poll(ticket)? {}
        Ok(())
    }
}

impl<F: FlushPolicy<Pages, Buffer>, W> DeviceIsolation for Rig<Pages, F, Buffer, W> {
    type Error = InvalidationError;

    fn take_fault(&mut self, device: RequesterId) -> Option<FaultRecord> {
        self.machine.walker.unit.faults().take_of(device)
    }

    fn block(&mut self, device: RequesterId) -> Result<(), InvalidationError> {
        let gate = self.gate.as_mut().expect("a context entry");
        let old = gate.contexts.detach(&*self.machine.memory, device);
        assert_eq!(old.unwrap(), Some(gate.context));
        self.invalidate_context()?;
        // Every mapped buffer, past the judge, which would count these accesses.
        let granted = self.machine.judge.granted();
        let Machine { walker, memory, .. } = &mut self.machine;
        let reached = granted.iter().filter(|(iova, access)| {
            let found = walker.translate(&**memory, device, *iova, 1, *access);
            found.is_ok()
        });
        let event = GateEvent::Blocked {
            live: granted.len(),
            reached: reached.count(),
        };
        // Only the test causes these faults.
        while self.machine.walker.unit.faults().take().is_some() {}
        self.machine.walker.unit.faults().clear_overflow();
        self.gate.as_mut().unwrap().events.push(event);
        Ok(())
    }

    fn unblock(&mut self, device: RequesterId) -> Result<(), InvalidationError> {
        let live = self.machine.judge.live();
        let gate = self.gate.as_mut().expect("a context entry");
        gate.events.push(GateEvent::Unblocked { live });
        let (memory, frames) = (&*self.machine.memory, &self.machine.pool);
        let attached = gate.contexts.attach(memory, frames, device, &gate.context);
        attached.unwrap();
        self.invalidate_context()
    }
}

impl<W> Rig<Identity, Never, u64, W> {
    /// Creates a rig without protection. Buffers are numbers, as in a layer that does not know this
    /// crate.
    pub(crate) fn unprotected(hooks: W) -> Self {
        let mut dma = Dma::new(Never);
        let at = dma
            .attach(NIC, MASK, |domain| Ok::<_, DomainId>(Identity::new(domain)))
            .unwrap();
        Self {
            cpu: dma.cpu(),
            machine: Machine::new(radix(), Coherency::Coherent),
            dma,
            at,
            hooks: Grants(hooks),
            gate: None,
        }
    }
}

type Slots<R> = Rings<R, RefCell<R>>;
/// A rig with rings that `R` drives under the policy `F`, and a unit with the logic `L`.
pub(crate) type AnyRingRig<R, F, L, W> = Rig<Slots<R>, F, Buffer, W, RingUnit<L>, RingAttachments>;
pub(crate) type RingRig<W> = AnyRingRig<Ring, Burst, FixedLogic, W>;
/// The ring as published.
pub(crate) type AsPublishedRig<W> =
    AnyRingRig<RingAsPublished, BurstAsPublished, LogicAsPublished, W>;

impl<W> RingRig<W> {
    /// Creates a rig with a ring unit. Each API ring has a table for descriptors and one with the
    /// given number of slots.
    pub(crate) fn rings(
        rings: impl IntoIterator<Item = (ApiRing, u32)>,
        setup: RingSetup,
        hooks: W,
    ) -> Self {
        Self::of_rings(rings, setup, Prefetch::Immediate, Burst::new(4096), hooks)
    }
}

impl<R, F, L, W> AnyRingRig<R, F, L, W>
where
    R: RingDriver + From<Ring>,
    F: FlushPolicy<Slots<R>, Buffer>,
    L: RingLogic,
{
    /// Like `rings`, with any driver, unit and policy.
    pub(crate) fn of_rings(
        rings: impl IntoIterator<Item = (ApiRing, u32)>,
        setup: RingSetup,
        prefetch: Prefetch,
        flush: F,
        hooks: W,
    ) -> Self {
        let unit = RingUnit::new(&RingUnitConfig {
            riotlb: Geometry::new(1, 32).unwrap(),
            replacement: Replacement::Lru,
            contexts: Geometry::new(1, 1).unwrap(),
            prefetch,
            fault_log: FaultLog::MAX_CAPACITY,
        });
        let mut machine = Machine::new(unit, setup.coherency);
        let rings: Vec<_> = rings.into_iter().collect();
        let slots: Vec<_> = rings.iter().flat_map(|(_, live)| [4, *live]).collect();
        let bytes = 16 * slots.iter().map(|slots| u64::from(*slots) + 5).sum::<u64>();
        let base = machine
            .pool
            .frames
            .alloc_contiguous(bytes.div_ceil(4096) + 1)
            .unwrap();
        let tables = RingTables::new(base, &slots).unwrap();
        let laid_out = lay_out(&*machine.memory, &tables, setup).unwrap();
        let mut contexts =
            ContextTables::new(setup.coherency, &*machine.memory, &machine.pool).unwrap();
        machine.walker.unit.set_root_table(contexts.root());
        machine.walker.unit.enable();
        let mut dma = Dma::new(flush);
        let at = dma
            .attach(NIC, Iova::new(u64::MAX), |domain| {
                let context = Context {
                    domain,
                    translation: TranslationType::Rings { device: base },
                };
                contexts
                    .attach(&*machine.memory, &machine.pool, NIC, &context)
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
            hooks: Grants(hooks),
            gate: None,
        }
    }
}

/// Creates a ring rig for a profile. Its tables hold `times` as many slots as its rings have
/// buffers.
pub(crate) fn rings(profile: &NicProfile, times: u32, setup: RingSetup) -> RingRig<()> {
    let rings = profile.api_rings();
    RingRig::rings(rings.map(|(ring, live)| (ring, live * times)), setup, ())
}

pub(crate) const TAIL: RingSetup = RingSetup {
    choice: SlotChoice::Tail,
    coherency: Coherency::Coherent,
};

impl<S, F, B, W, U, A> Environment for Rig<S, F, B, W, U, A>
where
    S: Space,
    F: FlushPolicy<S, B>,
    B: BufferOwner,
    W: DmaHooks<Machine<U>>,
    U: Invalidator + Translate + 'static,
    A: Attachments,
{
    type Handle = ringfence_dma::Mapping<B>;
    type Api<'a>
        = LayerApi<'a, S, F, B, Machine<U>, A, &'a mut Grants<W>>
    where
        Self: 'a;
    type Bus<'a>
        = Bus<'a, Walker<U>, Memory, &'a mut Judge>
    where
        Self: 'a;

    fn api(&mut self) -> Self::Api<'_> {
        LayerApi {
            dma: &self.dma,
            cpu: &mut self.cpu,
            platform: &mut self.machine,
            at: &self.at,
            hooks: &mut self.hooks,
        }
    }

    fn bus(&mut self) -> Self::Bus<'_> {
        self.machine.bus()
    }
}

/// Interface of a rig for tests, in every mode.
pub(crate) trait OracleChecked: Environment {
    fn judge(&mut self) -> &mut Judge;
    /// Returns the number of frames used by tables and rings.
    fn frames_in_use(&self) -> u64;
    /// Returns the injectors for frame allocations and for invalidations.
    fn troubles(&self) -> [&FailureInjector; 2];
}

impl<S, F, B, W, U, A> OracleChecked for Rig<S, F, B, W, U, A>
where
    S: Space,
    F: FlushPolicy<S, B>,
    B: BufferOwner,
    W: DmaHooks<Machine<U>>,
    U: Invalidator + Translate + 'static,
    A: Attachments,
{
    fn judge(&mut self) -> &mut Judge {
        &mut self.machine.judge
    }

    fn frames_in_use(&self) -> u64 {
        self.machine.pool.in_use()
    }

    fn troubles(&self) -> [&FailureInjector; 2] {
        [&self.machine.pool.trouble, &self.machine.walker.trouble]
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

/// Returns buffer memory of `bytes` bytes at the bottom of memory.
pub(crate) fn buffers(bytes: u64) -> PhysRange {
    assert!(bytes <= TABLES - 0x1000);
    PhysRange::new(PhysAddr::new(0x1000), bytes).unwrap()
}
