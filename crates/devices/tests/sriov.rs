//! A self-virtualising adapter: contexts with their own drivers, requester IDs and domains, while
//! one of them attacks.

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed};
use ringfence_devices::api::{DmaHooks, LayerApi, UnmapOutcome};
use ringfence_devices::nic::{
    Delivery, DescriptorSegment, Frame, Nic, NicProfile, QueueDir, Reception, Rings, SendOutcome,
    SriovNic, VirtualFunctions,
};
use ringfence_devices::ring::{RingAddresses, RingBase, RingSize};
use ringfence_devices::{Buffer, Bus, DeviceMapping, DmaRequest, Observer};
use ringfence_dma::flush::Strict;
use ringfence_dma::space::{Paged, PlainTable, Rounding};
use ringfence_dma::{Attachment, Cpu, Dma, Mapping, Platform};
use ringfence_hw::{Geometry, UnitConfig, VtdUnit};
use ringfence_iova::{CachedTree, Locked};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, SecondStage, Table, TranslationType,
};
use ringfence_types::{
    DomainId, Fault, Iova, Nanos, Pfn, PfnRange, PhysAddr, PhysRange, RequesterId,
};

const ARENA: u64 = 64 << 20;
/// Each context owns this much memory: buffers in the lower half, tables and rings in the upper.
const SHARE: u64 = 16 << 20;
const PHYSICAL: RequesterId = RequesterId::new(0x0300);
const CONTEXTS: u16 = 3;
const SIZE: u32 = 8;
const BURST: u32 = 4;

type Space = Paged<Locked<CachedTree, RefCell<CachedTree>>, PlainTable<SecondStage>>;

fn functions() -> VirtualFunctions {
    VirtualFunctions::new(PHYSICAL, 0x80, 2, CONTEXTS).unwrap()
}

fn id(context: u16) -> RequesterId {
    functions().id(context).unwrap()
}

fn profile() -> NicProfile {
    let rings = Rings {
        count: 1,
        size: RingSize::new(SIZE).unwrap(),
    };
    NicProfile {
        name: "context",
        buffers_per_packet: 1,
        receive: rings,
        transmit: rings,
        inline_thold: 0,
        ..NicProfile::BRCM
    }
}

/// Memory that belongs to a context.
fn share(context: u16) -> PhysRange {
    let start = SHARE * (u64::from(context) + 1) - SHARE;
    PhysRange::new(PhysAddr::new(start), SHARE).unwrap()
}

/// Checks that each function reaches only the memory of its context.
#[derive(Debug, Default)]
struct Isolation {
    escapes: Vec<(RequesterId, PhysAddr)>,
    allowed: u64,
    faults: FaultCounts,
}

type FaultCounts = std::collections::BTreeMap<RequesterId, u64>;

impl Observer for Isolation {
    fn allowed(&mut self, request: &DmaRequest, ranges: &[PhysRange]) {
        self.allowed += 1;
        let owner = (0..CONTEXTS).find(|context| id(*context) == request.device);
        for range in ranges {
            if !owner.is_some_and(|owner| share(owner).contains(range)) {
                self.escapes.push((request.device, range.start()));
            }
        }
    }

    fn faulted(&mut self, request: &DmaRequest, _: &Fault) {
        *self.faults.entry(request.device).or_default() += 1;
    }
}

struct NoHooks;

impl<P> DmaHooks<P> for NoHooks {
    fn mapped(&mut self, _: &mut P, _: &DeviceMapping, _: PhysRange) {}
    fn unmapping(&mut self, _: &mut P, _: &DeviceMapping) {}
    fn unmapped(&mut self, _: &mut P, _: &DeviceMapping, _: UnmapOutcome) {}
    fn released(&mut self, _: &mut P, _: &Buffer) {}
    fn synced(&mut self, _: &mut P) {}
}

/// The platform of one guest.
struct Guest<'a, 'm> {
    mem: &'m Arena,
    frames: &'a Frames<&'m Arena>,
    unit: &'a mut VtdUnit,
}

impl<'m> Platform for Guest<'_, 'm> {
    type Memory = Arena;
    type Frames = Frames<&'m Arena>;
    type Invalidator = VtdUnit;

    fn memory(&self) -> &Arena {
        self.mem
    }
    fn frames(&self) -> &Frames<&'m Arena> {
        self.frames
    }
    fn invalidator(&mut self) -> &mut VtdUnit {
        self.unit
    }
    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

/// The driver of one context.
struct Driver<'m> {
    frames: Frames<&'m Arena>,
    at: Attachment,
    nic: Option<Nic<Mapping<Buffer>>>,
    received: Vec<Frame>,
}

struct Machine<'m> {
    mem: &'m Arena,
    unit: VtdUnit,
    dma: Dma<Space, Strict, Buffer>,
    cpu: Cpu<Space, Strict, Buffer>,
    drivers: Vec<Driver<'m>>,
    nic: SriovNic,
    seen: Isolation,
    wire: Vec<Frame>,
}

impl<'m> Machine<'m> {
    /// Creates contexts that the host assigned to guests. `shared` puts all into the domain of the
    /// first, which is no isolation.
    fn new(mem: &'m Arena, shared: bool) -> Self {
        let region = PhysRange::new(PhysAddr::new(ARENA - SHARE), SHARE).unwrap();
        let host = Frames::new(mem, region);
        let mut contexts = ContextTables::new(Coherency::Coherent, mem, &host).unwrap();
        let small = Geometry::new(16, 4).unwrap();
        let mut unit = VtdUnit::vtd(&UnitConfig {
            iotlb: small,
            walk_caches: [small; 3],
            contexts: small,
            ..UnitConfig::UNCACHED
        });
        unit.set_root_table(contexts.root());
        unit.enable();
        let mut dma = Dma::new(Strict);
        let mut first = None;
        let mut drivers = Vec::new();
        for context in 0..CONTEXTS {
            let upper = share(context).start().wrapping_add(SHARE / 2);
            let frames = Frames::new(mem, PhysRange::new(upper, SHARE / 2).unwrap());
            let mut made = None;
            let mask = Iova::new((1 << 48) - 1);
            let at = dma
                .attach(id(context), mask, |domain| {
                    let format = SecondStage::new(Levels::Four);
                    let table =
                        Table::new(format, domain, Coherency::Coherent, mem, &frames).unwrap();
                    made = Some((domain, table.root()));
                    let all = PfnRange::inclusive(Pfn::new(1), Pfn::new((1 << 20) - 1)).unwrap();
                    let tree = Locked::new(CachedTree::new(all), RefCell::new);
                    Ok::<_, DomainId>(Paged::new(tree, PlainTable(table), Rounding::Exact))
                })
                .unwrap();
            let (domain, root) = *if shared {
                first.get_or_insert(made.unwrap())
            } else {
                made.as_ref().unwrap()
            };
            let translation = TranslationType::Table {
                root,
                levels: Levels::Four,
            };
            let entry = Context {
                domain,
                translation,
            };
            contexts.attach(mem, &host, id(context), &entry).unwrap();
            drivers.push(Driver {
                frames,
                at,
                nic: None,
                received: Vec::new(),
            });
        }
        let mut nic = SriovNic::new(&functions(), &profile(), BURST);
        for context in 0..CONTEXTS {
            nic.steer(flow(context), context);
        }
        Self {
            mem,
            unit,
            cpu: dma.cpu(),
            dma,
            drivers,
            nic,
            seen: Isolation::default(),
            wire: Vec::new(),
        }
    }

    fn with<R>(
        &mut self,
        context: u16,
        act: impl FnOnce(
            &mut Option<Nic<Mapping<Buffer>>>,
            &mut Vec<Frame>,
            &mut LayerApi<'_, Space, Strict, Buffer, Guest<'_, 'm>, Attachment, NoHooks>,
        ) -> R,
    ) -> R {
        let driver = &mut self.drivers[usize::from(context)];
        let mut platform = Guest {
            mem: self.mem,
            frames: &driver.frames,
            unit: &mut self.unit,
        };
        let mut api = LayerApi {
            dma: &self.dma,
            cpu: &mut self.cpu,
            platform: &mut platform,
            at: &driver.at,
            hooks: NoHooks,
        };
        act(&mut driver.nic, &mut driver.received, &mut api)
    }

    fn open(&mut self, context: u16) {
        let bytes = Nic::<Mapping<Buffer>>::buffer_bytes(&profile(), BURST);
        let memory = PhysRange::new(share(context).start(), bytes).unwrap();
        let (rings, tail) = self.with(context, |nic, _, api| {
            let opened = nic.insert(Nic::open(profile(), memory, api).unwrap());
            let rings: Vec<_> = opened.rings().collect();
            (rings, opened.sync_map(api, QueueDir::Rx, 0).unwrap())
        });
        let registers = self.nic.context(context).unwrap();
        for (dir, index, at) in rings {
            registers.program(dir, index, &at);
        }
        registers.doorbell(QueueDir::Rx, 0, tail);
    }

    /// Sends a frame to the adapter from the wire.
    fn arrive(&mut self, frame: Frame) -> Result<Delivery, ringfence_devices::DmaError> {
        let mut bytes = Vec::new();
        frame.build(&mut bytes);
        let mut bus = Bus::new(&mut self.unit, self.mem, &mut self.seen);
        self.nic.receive(&mut bus, 0, &bytes)
    }

    /// Runs the receive loop of a context's driver.
    fn poll(&mut self, context: u16) {
        let tail = self.with(context, |nic, received, api| {
            let nic = nic.as_mut().unwrap();
            nic.receive(api, 0, u32::MAX, None, |frame| {
                received.push(Frame::verify(frame).unwrap());
            })
            .unwrap();
            nic.sync_map(api, QueueDir::Rx, 0).unwrap()
        });
        let registers = self.nic.context(context).unwrap();
        registers.take_interrupt(QueueDir::Rx, 0);
        registers.doorbell(QueueDir::Rx, 0, tail);
    }

    /// Sends a frame of `flow` through a context.
    fn send(&mut self, context: u16, frame: Frame) {
        let mut bytes = Vec::new();
        frame.build(&mut bytes);
        let tail = self.with(context, |nic, _, api| {
            let nic = nic.as_mut().unwrap();
            assert_eq!(nic.send(api, 0, &bytes).unwrap(), SendOutcome::Queued);
            nic.sync_map(api, QueueDir::Tx, 0).unwrap()
        });
        let registers = self.nic.context(context).unwrap();
        registers.doorbell(QueueDir::Tx, 0, tail);
        let wire = &mut self.wire;
        let mut bus = Bus::new(&mut self.unit, self.mem, &mut self.seen);
        self.nic
            .transmit(&mut bus, context, 0, |frame| {
                wire.push(Frame::verify(frame).unwrap());
            })
            .unwrap();
        self.with(context, |nic, _, api| {
            nic.as_mut().unwrap().reclaim(api, 0, u32::MAX).unwrap();
        });
    }

    /// Exchanges `rounds` frames in both directions with a context and verifies them.
    fn exchange(&mut self, context: u16, first: u64, rounds: u64) {
        for number in first..first + rounds {
            let frame = Frame {
                flow: flow(context),
                number,
                body: 100 + number as u32,
            };
            let to = Delivery::Context(context, Reception::Taken);
            assert_eq!(self.arrive(frame).unwrap(), to);
            self.poll(context);
            assert_eq!(
                self.drivers[usize::from(context)].received.pop(),
                Some(frame)
            );
            self.send(context, frame);
            assert_eq!(self.wire.pop(), Some(frame));
        }
    }
}

fn flow(context: u16) -> u32 {
    70 + u32::from(context)
}

fn arena() -> Arena {
    Arena::new(ARENA).unwrap()
}

#[test]
fn functions_have_ids_of_their_own() {
    let ids: Vec<_> = (0..4).map(|n| functions().id(n)).collect();
    let id = |raw| Some(RequesterId::new(raw));
    assert_eq!(ids, [id(0x380), id(0x382), id(0x384), None]);
    for (offset, stride, count, possible) in [
        (1, 1, 4, true),
        (1, 0, 1, true),
        (1, 0, 2, false),
        (0, 1, 1, false),
        (0, 0, 0, true),
        (0xfcff, 1, 1, true),
        (0xfd00, 1, 1, false),
        (1, 0x8000, 3, false),
    ] {
        let found = VirtualFunctions::new(PHYSICAL, offset, stride, count);
        assert_eq!(found.is_ok(), possible, "{offset:#x} {stride} {count}");
    }
}

#[test]
fn each_context_receives_and_sends_its_own_flows() {
    let mem = arena();
    let mut machine = Machine::new(&mem, false);
    for context in 0..CONTEXTS {
        machine.open(context);
    }
    for round in 0..20 {
        for context in 0..CONTEXTS {
            machine.exchange(context, round, 1);
        }
    }
    let unknown = Frame {
        flow: 1,
        number: 0,
        body: 1,
    };
    assert_eq!(machine.arrive(unknown).unwrap(), Delivery::NoContext);
    assert_eq!(machine.nic.switch_stats().unknown, 1);
    assert_eq!(machine.seen.escapes, []);
    assert!(machine.seen.faults.is_empty());
    // A descriptor, the bytes and a completion, in each direction.
    assert_eq!(machine.seen.allowed, 20 * 3 * 6);
}

#[test]
fn a_frame_of_a_foreign_flow_never_reaches_the_wire() {
    let mem = arena();
    let mut machine = Machine::new(&mem, false);
    machine.open(0);
    let forged = Frame {
        flow: flow(1),
        number: 0,
        body: 40,
    };
    machine.send(0, forged);
    assert_eq!(machine.wire, []);
    assert_eq!(machine.nic.switch_stats().spoofed, 1);
}

/// A context without descriptors loses only its own frames.
#[test]
fn a_context_without_descriptors_stops_no_other() {
    let mem = arena();
    let mut machine = Machine::new(&mem, false);
    machine.open(0);
    let to_1 = Frame {
        flow: flow(1),
        number: 0,
        body: 40,
    };
    let held_back = Delivery::Context(1, Reception::NoDescriptor);
    assert_eq!(machine.arrive(to_1).unwrap(), held_back);
    machine.exchange(0, 0, 5);
}

/// Returns ring registers that point to `at`.
fn ring_at(at: u64) -> RingAddresses {
    let base = |at| RingBase {
        at: Iova::new(at),
        size: RingSize::new(SIZE).unwrap(),
        entry_bytes: 16,
    };
    RingAddresses {
        descriptors: base(at),
        completions: base(at + 0x800),
    }
}

/// The attacker aims its rings at the rings and buffers of context 0. Returns the number of
/// escapes.
fn attack(machine: &mut Machine<'_>) -> usize {
    machine.open(0);
    machine.exchange(0, 0, 3);
    let targets: Vec<u64> = machine.with(0, |nic, _, _| {
        let nic = nic.as_ref().unwrap();
        let rings = nic.rings();
        rings
            .flat_map(|(_, _, at)| [at.descriptors.at.get(), at.completions.at.get()])
            .collect()
    });
    for target in targets {
        for dir in [QueueDir::Rx, QueueDir::Tx] {
            let registers = machine.nic.context(1).unwrap();
            registers.program(dir, 0, &ring_at(target));
            registers.doorbell(dir, 0, SIZE);
            let frame = Frame {
                flow: flow(1),
                number: 0,
                body: 64,
            };
            // Blocked, or within the attacker's own memory.
            let _ = machine.arrive(frame);
            let mut bus = Bus::new(&mut machine.unit, machine.mem, &mut machine.seen);
            let _ = machine.nic.transmit(&mut bus, 1, 0, |_| {});
        }
    }
    machine.seen.escapes.len()
}

#[test]
fn an_attacking_context_reaches_no_other() {
    let mem = arena();
    let mut machine = Machine::new(&mem, false);
    assert_eq!(attack(&mut machine), 0);
    assert!(machine.seen.faults[&id(1)] > 0);
    assert_eq!(machine.seen.faults.get(&id(0)), None);
    // The victim is not disturbed.
    machine.exchange(0, 3, 5);
}

/// In one domain, the same attack succeeds: contexts are isolated by domains, not by the adapter.
#[test]
fn contexts_of_one_domain_are_not_isolated() {
    let mem = arena();
    let mut machine = Machine::new(&mem, true);
    assert!(attack(&mut machine) > 0);
}

#[derive(Debug, Clone)]
enum Abuse {
    Program(bool, u64),
    Doorbell(bool, u32),
    Descriptor(u64, u64, u32),
    Receive,
    Transmit,
    Reset,
    Victim(u16),
}

fn abuse() -> impl Strategy<Value = Abuse> {
    let at = prop_oneof![
        // Addresses that the allocators of all domains use, and any.
        4 => ((1_u64 << 20) - 40..1 << 20).prop_map(|page| page << 12),
        1 => any::<u64>().prop_map(|at| at & !0xf),
    ];
    prop_oneof![
        2 => (any::<bool>(), at.clone()).prop_map(|(rx, at)| Abuse::Program(rx, at)),
        3 => (any::<bool>(), 0..20_u32).prop_map(|(rx, tail)| Abuse::Doorbell(rx, tail)),
        3 => (0..8_u64, at, 0..5000_u32)
            .prop_map(|(slot, at, bytes)| Abuse::Descriptor(slot, at, bytes)),
        3 => Just(Abuse::Receive),
        3 => Just(Abuse::Transmit),
        1 => Just(Abuse::Reset),
        2 => prop::sample::select(&[0_u16, 2][..]).prop_map(Abuse::Victim),
    ]
}

proptest! {
    #![proptest_config(Config {
        cases: 48,
        rng_seed: RngSeed::Fixed(0x73_7269_6f76),
        failure_persistence: None,
        ..Config::default()
    })]

    /// Random use of a context's registers and descriptors disturbs no other context.
    #[test]
    fn no_abuse_of_a_context_disturbs_another(steps in prop::collection::vec(abuse(), 1..80)) {
        let mem = arena();
        let mut machine = Machine::new(&mem, false);
        for context in 0..CONTEXTS {
            machine.open(context);
        }
        // The attacker's own receive ring, in its own memory.
        let own = machine.with(1, |nic, _, _| nic.as_ref().unwrap().rings().next().unwrap().2);
        let dir = |rx| if rx { QueueDir::Rx } else { QueueDir::Tx };
        let mut numbers = [0; CONTEXTS as usize];
        for step in steps {
            let registers = machine.nic.context(1).unwrap();
            match step {
                Abuse::Program(rx, at) => {
                    registers.program(dir(rx), 0, &ring_at(at.min(u64::MAX >> 1)));
                }
                Abuse::Doorbell(rx, tail) => registers.doorbell(dir(rx), 0, tail),
                Abuse::Descriptor(slot, at, bytes) => {
                    let raw = DescriptorSegment {
                        iova: Iova::new(at),
                        bytes,
                    }
                    .encode();
                    let entry = own.descriptors.at.wrapping_add(slot * 16);
                    let mut bus = Bus::new(&mut machine.unit, &mem, &mut machine.seen);
                    let _ = bus.write(id(1), entry, &raw);
                }
                Abuse::Receive => {
                    let frame = Frame { flow: flow(1), number: 0, body: 1000 };
                    let _ = machine.arrive(frame);
                }
                Abuse::Transmit => {
                    let mut bus = Bus::new(&mut machine.unit, &mem, &mut machine.seen);
                    let _ = machine.nic.transmit(&mut bus, 1, 0, |_| {});
                }
                Abuse::Reset => registers.reset(),
                Abuse::Victim(context) => {
                    let number = &mut numbers[usize::from(context)];
                    *number += 1;
                    let first = *number;
                    machine.exchange(context, first, 1);
                }
            }
            prop_assert_eq!(&machine.seen.escapes, &vec![]);
        }
        for context in [0, 2] {
            machine.exchange(context, 1000, 2);
            prop_assert_eq!(machine.seen.faults.get(&id(context)), None);
        }
    }
}
