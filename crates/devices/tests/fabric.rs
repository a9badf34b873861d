//! The fabric with and without access control, and posted writes, over a real unit and memory.

#[allow(dead_code, unreachable_pub)]
#[path = "../../hw/tests/fake/delayed.rs"]
mod delayed;

use std::sync::atomic::Ordering;

use ringfence_devices::fabric::{
    Acs, AttachedBelow, FabricError, FabricRequest, Port, PortError, RootComplex, Routed,
};
use ringfence_devices::posted::{PostingUnit, WriteDraining};
use ringfence_devices::{DmaRequest, Observer};
use ringfence_hw::{
    AddressType, CompatibilityFormat, Geometry, Interrupt, InterruptEntry, InterruptFault,
    InterruptFaultReason, InterruptRemapping, InterruptRequest, RootTable, SourceValidation,
    UnitConfig, VtdUnit,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, MapRequest, PageRequests, SecondStage, Table,
    TranslationType,
};
use ringfence_types::{
    Access, CachedLevels, DomainId, Fault, FaultReason, Invalidation, Iova, Pending, Permissions,
    Pfn, PfnRange, PhysAddr, PhysMemory, PhysRange, RequesterId, Unmapped,
};

use delayed::Delayed;

const ARENA: u64 = 64 << 20;
const TABLES: u64 = 32 << 20;
const INTERRUPT_TABLE: u64 = 0x10_0000;

/// Below port 1: an adapter with two functions. Below port 2: a disk. Below port 4: the bridge
/// 04:00.0 to conventional PCI, with two devices on its secondary bus 5. The secondary buses of the
/// ports are 1, 2 and 4.
const NIC: RequesterId = RequesterId::new(0x0100);
const NIC_FUNCTION_1: RequesterId = RequesterId::new(0x0101);
const DISK: RequesterId = RequesterId::new(0x0208);
const OLD_SOUND: RequesterId = RequesterId::new(0x0508);
const OLD_MODEM: RequesterId = RequesterId::new(0x0510);
const BEHIND_BRIDGE: RequesterId = RequesterId::new(0x0500);
const BRIDGE: RequesterId = RequesterId::new(0x0400);

/// Registers of the disk.
const DISK_BAR: u64 = 0xd000_0000;

struct Rig<'m> {
    mem: &'m Arena,
    frames: Frames<&'m Arena>,
    contexts: ContextTables,
    tables: Vec<Table<SecondStage>>,
}

impl<'m> Rig<'m> {
    fn new(mem: &'m Arena) -> Self {
        let region = PhysRange::new(PhysAddr::new(TABLES), ARENA - TABLES).unwrap();
        let frames = Frames::new(mem, region);
        let contexts = ContextTables::new(Coherency::Coherent, mem, &frames).unwrap();
        Self {
            mem,
            frames,
            contexts,
            tables: Vec::new(),
        }
    }

    /// Attaches `device` to a domain of its own; its number is returned.
    fn attach(&mut self, device: RequesterId, ats: bool) -> usize {
        let number = self.tables.len();
        let domain = DomainId::new(number as u16);
        let format = SecondStage::new(Levels::Four);
        let table =
            Table::new(format, domain, Coherency::Coherent, self.mem, &self.frames).unwrap();
        let (root, levels) = (table.root(), Levels::Four);
        let translation = if ats {
            TranslationType::DeviceTlb {
                root,
                levels,
                page_requests: PageRequests::Blocked,
            }
        } else {
            TranslationType::Table { root, levels }
        };
        let context = Context {
            domain,
            translation,
        };
        self.contexts
            .attach(self.mem, &self.frames, device, &context)
            .unwrap();
        self.tables.push(table);
        number
    }

    fn map(&self, number: usize, iova: u64, pa: u64) {
        let request = MapRequest {
            iova: Iova::new(iova),
            pa: PhysAddr::new(pa),
            pages: 1,
            permissions: Permissions::READ_WRITE,
        };
        self.tables[number]
            .map(self.mem, &self.frames, request)
            .unwrap();
    }

    fn unit(&self) -> VtdUnit {
        let small = Geometry::new(16, 4).unwrap();
        let mut unit = VtdUnit::vtd(&UnitConfig {
            iotlb: small,
            walk_caches: [small; 3],
            contexts: small,
            ..UnitConfig::UNCACHED
        });
        unit.set_root_table(self.contexts.root());
        unit.enable();
        unit
    }

    fn machine(&self, acs: Acs) -> RootComplex<VtdUnit> {
        let mut machine = RootComplex::new(self.unit());
        for (first_bus, last_bus, below, windows) in [
            (1, 1, AttachedBelow::Express, vec![]),
            (
                2,
                3,
                AttachedBelow::Express,
                vec![PhysRange::new(PhysAddr::new(DISK_BAR), 0x1000).unwrap()],
            ),
            (
                4,
                5,
                AttachedBelow::ConventionalBridge { secondary_bus: 5 },
                vec![],
            ),
        ] {
            let port = Port {
                first_bus,
                last_bus,
                acs,
                below,
                windows,
            };
            machine.topology.add(port).unwrap();
        }
        machine
    }
}

fn arena() -> Arena {
    Arena::new(ARENA).unwrap()
}

/// Records the devices of accesses that reached memory.
#[derive(Debug, Default)]
struct Watch(Vec<(RequesterId, u64)>);

impl Observer for Watch {
    fn allowed(&mut self, request: &DmaRequest, ranges: &[PhysRange]) {
        self.0.push((request.device, ranges[0].start().get()));
    }

    fn faulted(&mut self, _: &DmaRequest, _: &Fault) {}
}

/// Attack A12: with source validation, a requester ID of another port is blocked. One of the same
/// port is not: the specification compares bus numbers only.
#[test]
fn source_validation_blocks_requester_ids_of_other_ports() {
    let mem = arena();
    let mut rig = Rig::new(&mem);
    for (device, frame) in [(NIC, 0x5000), (NIC_FUNCTION_1, 0x6000), (DISK, 0x7000)] {
        let number = rig.attach(device, false);
        rig.map(number, 0x1000, frame);
    }
    let memory = |at| {
        Ok(Routed::Memory(vec![
            PhysRange::new(PhysAddr::new(at), 8).unwrap(),
        ]))
    };
    let violation = |requester| {
        Err(FabricError::ForeignRequester {
            sender: NIC,
            requester,
        })
    };
    let fault = |device, reason| {
        Err(FabricError::Blocked(Fault {
            device,
            iova: Iova::new(0x1000),
            access: Access::Write,
            reason,
        }))
    };
    let phantom = RequesterId::new(0x0105);
    for (acs, claimed, expected) in [
        (Acs::NONE, NIC, memory(0x5000)),
        (Acs::NONE, DISK, memory(0x7000)),
        (Acs::NONE, NIC_FUNCTION_1, memory(0x6000)),
        (
            Acs::NONE,
            phantom,
            fault(phantom, FaultReason::ContextNotPresent),
        ),
        (Acs::SOURCE_VALIDATION, NIC, memory(0x5000)),
        (Acs::SOURCE_VALIDATION, DISK, violation(DISK)),
        (Acs::SOURCE_VALIDATION, BRIDGE, violation(BRIDGE)),
        (Acs::SOURCE_VALIDATION, NIC_FUNCTION_1, memory(0x6000)),
    ] {
        let mut machine = rig.machine(acs);
        let mut watch = Watch::default();
        let request = FabricRequest {
            requester: claimed,
            ..FabricRequest::own(NIC, Iova::new(0x1000), 8, Access::Write)
        };
        let found = machine.route(&mem, &request, &mut watch);
        assert_eq!(found, expected, "{acs:?} {claimed}");
        // The observer sees the true sender.
        let reached = match expected {
            Ok(Routed::Memory(ranges)) => vec![(NIC, ranges[0].start().get())],
            _ => vec![],
        };
        assert_eq!(watch.0, reached);
    }
    let unknown = RequesterId::new(0x0900);
    let request = FabricRequest::own(unknown, Iova::new(0x1000), 8, Access::Read);
    let found = rig.machine(Acs::NONE).route(&mem, &request, ());
    assert_eq!(found, Err(FabricError::NoPort(unknown)));
}

/// Devices behind a conventional bridge have the requester ID of its secondary bus, so they share
/// a domain. The bridge has another ID.
#[test]
fn a_conventional_bridge_hides_its_devices() {
    let mem = arena();
    let mut rig = Rig::new(&mem);
    let number = rig.attach(BEHIND_BRIDGE, false);
    rig.map(number, 0x1000, 0x5000);
    rig.attach(BRIDGE, false);
    for sender in [OLD_SOUND, OLD_MODEM] {
        let mut machine = rig.machine(Acs::ISOLATED);
        // Any claimed id becomes the bridge's.
        let request = FabricRequest {
            requester: DISK,
            ..FabricRequest::own(sender, Iova::new(0x1000), 8, Access::Read)
        };
        let found = machine.route(&mem, &request, ()).unwrap();
        assert!(matches!(found, Routed::Memory(_)), "{found:?}");
    }
}

/// Attack A16: without redirect, a request to a sibling's registers never reaches the IOMMU.
#[test]
fn request_redirect_sends_peer_requests_through_the_iommu() {
    let mem = arena();
    let mut rig = Rig::new(&mem);
    let number = rig.attach(NIC, false);
    let request = FabricRequest::own(NIC, Iova::new(DISK_BAR + 0x40), 4, Access::Write);
    let mut plain = rig.machine(Acs::NONE);
    assert_eq!(
        plain.route(&mem, &request, ()),
        Ok(Routed::PeerDirect { port_bus: 2 })
    );
    assert_eq!(plain.unit.stats().faults, 0);
    let mut redirected = rig.machine(Acs::REQUEST_REDIRECT);
    assert!(matches!(
        redirected.route(&mem, &request, ()),
        Err(FabricError::Blocked(fault)) if fault.reason == FaultReason::NotPresent
    ));
    assert_eq!(redirected.unit.stats().faults, 1);
    // Plain PCI misroutes an IOVA that equals the address of registers.
    rig.map(number, DISK_BAR, 0x5000);
    assert_eq!(
        plain.route(&mem, &request, ()),
        Ok(Routed::PeerDirect { port_bus: 2 })
    );
    let found = redirected.route(&mem, &request, ()).unwrap();
    assert!(matches!(found, Routed::Memory(ranges) if ranges[0].start().get() == 0x5040));
    // The IOMMU may permit peer-to-peer access.
    rig.map(number, 0x9000, DISK_BAR);
    let permitted = FabricRequest::own(NIC, Iova::new(0x9000), 4, Access::Write);
    assert_eq!(
        redirected.route(&mem, &permitted, ()),
        Ok(Routed::PeerTranslated { port_bus: 2 })
    );
}

/// Attack A13 at the port: translation blocking stops a translated request before the IOMMU.
#[test]
fn translation_blocking_stops_translated_requests() {
    let mem = arena();
    let mut rig = Rig::new(&mem);
    rig.attach(NIC, true);
    let request = FabricRequest {
        address_type: AddressType::Translated,
        ..FabricRequest::own(NIC, Iova::new(0x9_9000), 8, Access::Read)
    };
    let reached = rig.machine(Acs::NONE).route(&mem, &request, ()).unwrap();
    assert!(matches!(reached, Routed::Memory(_)));
    let blocked = rig
        .machine(Acs::TRANSLATION_BLOCKING)
        .route(&mem, &request, ());
    assert_eq!(blocked, Err(FabricError::TranslatedAddress(NIC)));
}

/// Attack A15: with remapping, a device sends only the interrupts of its own entries.
#[test]
fn interrupt_remapping_validates_the_source() {
    let mem = arena();
    let mut rig = Rig::new(&mem);
    // The interrupt range is not memory, even if a table maps it.
    let number = rig.attach(NIC, false);
    rig.map(number, 0xfee0_0000, 0x5000);
    let entry = |index: u64, words: [u64; 2]| {
        let at = PhysAddr::new(INTERRUPT_TABLE + index * 16);
        let stored = mem.words(at, 2).unwrap();
        stored[0].store(words[0], Ordering::Relaxed);
        stored[1].store(words[1], Ordering::Relaxed);
    };
    let of = |source| SourceValidation::Requester {
        source,
        ignored_function_bits: 0,
    };
    let interrupt = |vector| Interrupt {
        destination: 3,
        vector,
    };
    let valid = |vector, validation| {
        InterruptEntry {
            interrupt: interrupt(vector),
            validation,
        }
        .encode()
    };
    entry(1, valid(0x41, of(NIC)));
    entry(2, valid(0x42, of(DISK)));
    entry(3, valid(0x43, SourceValidation::None));
    entry(4, [valid(0x44, of(NIC))[0] | 1 << 12, 0]);
    let write = |address, data| FabricRequest {
        data,
        ..FabricRequest::own(NIC, Iova::new(address), 4, Access::Write)
    };
    let message = |index| {
        let (address, data) = InterruptRequest::message(index);
        write(address.get(), data)
    };
    let forged = write(0xfee0_3000, 0x80);
    let fault = |index, reason| {
        Err(FabricError::Interrupt(InterruptFault {
            source: NIC,
            index,
            reason,
        }))
    };
    use InterruptFaultReason as Reason;
    let enabled = |compatibility| InterruptRemapping::Enabled {
        table: PhysAddr::new(INTERRUPT_TABLE),
        log2_entries: 4,
        compatibility,
    };
    let off = InterruptRemapping::Disabled;
    let on = enabled(CompatibilityFormat::Blocked);
    let lenient = enabled(CompatibilityFormat::PassedThrough);
    let outside = InterruptRemapping::Enabled {
        table: PhysAddr::new(1 << 50),
        log2_entries: 4,
        compatibility: CompatibilityFormat::Blocked,
    };
    let sent = |vector| Ok(Routed::Interrupt(interrupt(vector)));
    let read = FabricRequest::own(NIC, Iova::new(0xfee0_0000), 4, Access::Read);
    let long = FabricRequest::own(NIC, Iova::new(0xfee0_0000), 8, Access::Write);
    let unsupported = Err(FabricError::UnsupportedInterruptAccess(NIC));
    for (name, remapping, request, expected) in [
        ("forged vector", off, forged, sent(0x80)),
        ("remappable while off", off, message(1), Ok(Routed::Dropped)),
        (
            "forged vector",
            on,
            forged,
            fault(0, Reason::CompatibilityBlocked),
        ),
        ("forged vector", lenient, forged, sent(0x80)),
        ("own entry", on, message(1), sent(0x41)),
        (
            "foreign entry",
            on,
            message(2),
            fault(2, Reason::SourceDenied),
        ),
        ("unvalidated entry", on, message(3), sent(0x43)),
        ("malformed", on, message(4), fault(4, Reason::ReservedBit)),
        ("absent", on, message(5), fault(5, Reason::NotPresent)),
        ("last", on, message(15), fault(15, Reason::NotPresent)),
        (
            "beyond",
            on,
            message(16),
            fault(16, Reason::IndexBeyondTable),
        ),
        (
            "table outside memory",
            outside,
            message(1),
            fault(1, Reason::TableAccess),
        ),
        ("read", off, read, unsupported.clone()),
        ("write of 8 bytes", on, long, unsupported),
    ] {
        let mut machine = rig.machine(Acs::NONE);
        machine.interrupts = remapping;
        let mut watch = Watch::default();
        let found = machine.route(&mem, &request, &mut watch);
        assert_eq!(found, expected, "{name}");
        assert_eq!(watch.0, [], "{name}: an interrupt reached memory");
    }
    let codes = [
        Reason::IndexBeyondTable,
        Reason::NotPresent,
        Reason::TableAccess,
        Reason::ReservedBit,
        Reason::CompatibilityBlocked,
        Reason::SourceDenied,
    ]
    .map(Reason::code);
    assert_eq!(codes, [0x21, 0x22, 0x23, 0x24, 0x25, 0x26]);
}

#[test]
fn ports_must_not_overlap() {
    let mem = arena();
    let rig = Rig::new(&mem);
    let mut topology = rig.machine(Acs::NONE).topology;
    let window = PhysRange::new(PhysAddr::new(DISK_BAR + 0xfff), 1).unwrap();
    for (first_bus, last_bus, windows, error) in [
        (9, 8, vec![], PortError::NoBus { first: 9, last: 8 }),
        (0, 1, vec![], PortError::BusTaken(1)),
        (3, 9, vec![], PortError::BusTaken(3)),
        (8, 9, vec![window], PortError::WindowTaken(window)),
    ] {
        let port = Port {
            first_bus,
            last_bus,
            acs: Acs::NONE,
            below: AttachedBelow::Express,
            windows,
        };
        assert_eq!(topology.add(port), Err(error));
    }
    for secondary_bus in [7, 10] {
        let port = Port {
            first_bus: 8,
            last_bus: 9,
            acs: Acs::NONE,
            below: AttachedBelow::ConventionalBridge { secondary_bus },
            windows: vec![],
        };
        let error = PortError::BridgeBus(secondary_bus);
        assert_eq!(topology.add(port), Err(error));
    }
    assert_eq!(Acs::decode(0b111), Some(Acs::ISOLATED));
    assert_eq!(Acs::decode(0b1000), None);
    assert_eq!(
        (Acs::SOURCE_VALIDATION | Acs::REQUEST_REDIRECT).encode(),
        0b101
    );
}

fn unmap(rig: &Rig<'_>, number: usize) -> (Unmapped, Invalidation) {
    let page = PfnRange::new(Pfn::new(1), 1).unwrap();
    let (unmapped, _) = rig.tables[number].unmap(rig.mem, page).unwrap();
    let request = Invalidation::Pages {
        domain: DomainId::new(number as u16),
        range: page,
        levels: CachedLevels::Leaves,
    };
    (unmapped, request)
}

fn word(mem: &Arena, at: u64) -> u64 {
    mem.word(PhysAddr::new(at)).unwrap().load(Ordering::Relaxed)
}

/// Attack A23: a write that was posted before the unmap reaches memory before the unmap returns, or
/// long after it if the invalidation does not drain.
#[test]
fn an_invalidation_drains_posted_writes() {
    for (draining, late) in [
        (WriteDraining::Drained, false),
        (WriteDraining::NotDrained, true),
    ] {
        for polls in [0, 3] {
            let mem = arena();
            let mut rig = Rig::new(&mem);
            let number = rig.attach(NIC, false);
            rig.map(number, 0x1000, 0x5000);
            let unit: Delayed<RootTable> = Delayed::new(rig.unit(), polls, 4);
            let mut path = PostingUnit::new(unit, &mem, Watch::default(), draining, 8);
            post(&mut path, 0x1008, 7).unwrap();
            assert_eq!((path.posted(), word(&mem, 0x5008)), (1, 0));
            let (unmapped, request) = unmap(&rig, number);
            let pending = Pending::submit(&mut path, request, unmapped).unwrap();
            let _ = pending.wait(&mut path).unwrap();
            // The driver now owns the buffer.
            mem.word(PhysAddr::new(0x5008))
                .unwrap()
                .store(1, Ordering::Relaxed);
            assert!(post(&mut path, 0x1008, 8).is_err());
            path.deliver(usize::MAX);
            let found = word(&mem, 0x5008);
            assert_eq!(found, if late { 7 } else { 1 }, "{draining:?} {polls}");
            assert_eq!(path.observer().0, [(NIC, 0x5008)]);
        }
    }
}

/// `Delayed` translates through the unit that it wraps.
fn post(
    path: &mut PostingUnit<'_, Delayed<RootTable>, Arena, Watch>,
    iova: u64,
    value: u64,
) -> Result<(), Fault> {
    path.post(NIC, Iova::new(iova), &value.to_le_bytes())
}

/// A read returns the bytes of earlier writes, and full buffers push the oldest write.
#[test]
fn reads_push_posted_writes() {
    let mem = arena();
    let mut rig = Rig::new(&mem);
    let number = rig.attach(NIC, false);
    rig.map(number, 0x1000, 0x5000);
    let mut path = PostingUnit::new(rig.unit(), &mem, (), WriteDraining::Drained, 2);
    for value in 1..=3_u8 {
        path.post(NIC, Iova::new(0x1000 + u64::from(value) * 8), &[value])
            .unwrap();
    }
    assert_eq!((path.posted(), word(&mem, 0x5008)), (2, 1));
    let mut into = [0; 1];
    path.read(NIC, Iova::new(0x1018), &mut into).unwrap();
    assert_eq!((into, path.posted()), ([3], 0));
    // A write to an address without memory is lost, and the next one is not.
    rig.map(number, 0x2000, 1 << 40);
    path.post(NIC, Iova::new(0x2000), &[1]).unwrap();
    path.post(NIC, Iova::new(0x1020), &[4]).unwrap();
    path.deliver(2);
    assert_eq!((path.unreachable(), word(&mem, 0x5020)), (1, 4));
}
