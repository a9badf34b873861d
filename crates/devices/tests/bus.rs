//! The access engine and the attackers with a real unit: their targets, and that an access moves
//! all of its bytes or none.

use ringfence_devices::{
    Attacker, Bus, DeviceMapping, DmaError, DmaRequest, DriverEvent, Neighbour, Observer, Passive,
    Racer, Replayer, Reuse,
};
use ringfence_hw::{FaultLog, Geometry, InvalidationGranularity, Replacement, UnitConfig, VtdUnit};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, MapRequest, SecondStage, Table, TranslationType,
};
use ringfence_types::{
    CachedLevels, Direction, DomainId, Fault, FaultReason, Invalidation, Iova, IovaRange,
    Permissions, PfnRange, PhysAddr, PhysRange, RequesterId,
};

const NIC: RequesterId = RequesterId::new(0x0100);
const DOMAIN: DomainId = DomainId::new(7);
const ARENA: u64 = 64 << 20;
const TABLES: u64 = 32 << 20;

/// Records all accesses.
#[derive(Debug, Default)]
struct Watch {
    allowed: Vec<(DmaRequest, Vec<PhysRange>)>,
    faulted: Vec<(DmaRequest, Fault)>,
}

impl Observer for Watch {
    fn allowed(&mut self, request: &DmaRequest, ranges: &[PhysRange]) {
        self.allowed.push((*request, ranges.to_vec()));
    }

    fn faulted(&mut self, request: &DmaRequest, fault: &Fault) {
        self.faulted.push((*request, *fault));
    }
}

struct Rig<'m> {
    mem: &'m Arena,
    frames: Frames<&'m Arena>,
    table: Table<SecondStage>,
    unit: VtdUnit,
    watch: Watch,
}

impl<'m> Rig<'m> {
    fn new(mem: &'m Arena) -> Self {
        let region = PhysRange::new(PhysAddr::new(TABLES), ARENA - TABLES).unwrap();
        let frames = Frames::new(mem, region);
        let mut contexts = ContextTables::new(Coherency::Coherent, mem, &frames).unwrap();
        let format = SecondStage::new(Levels::Four);
        let table = Table::new(format, DOMAIN, Coherency::Coherent, mem, &frames).unwrap();
        let context = Context {
            domain: DOMAIN,
            translation: TranslationType::Table {
                root: table.root(),
                levels: Levels::Four,
            },
        };
        contexts.attach(mem, &frames, NIC, &context).unwrap();
        let small = Geometry::new(16, 4).unwrap();
        let mut unit = VtdUnit::vtd(&UnitConfig {
            iotlb: small,
            walk_caches: [small; 3],
            contexts: small,
            replacement: Replacement::Lru,
            fault_log: FaultLog::MAX_CAPACITY,
            granularity: InvalidationGranularity::Selective,
        });
        unit.set_root_table(contexts.root());
        unit.enable();
        Self {
            mem,
            frames,
            table,
            unit,
            watch: Watch::default(),
        }
    }

    fn map(&self, iova: u64, pa: u64, permissions: Permissions) {
        let request = MapRequest {
            iova: Iova::new(iova),
            pa: PhysAddr::new(pa),
            pages: 1,
            permissions,
        };
        self.table.map(self.mem, &self.frames, request).unwrap();
    }

    fn unmap(&self, range: &IovaRange) {
        let _ = self
            .table
            .unmap(self.mem, PfnRange::covering(range))
            .unwrap();
    }

    fn flush(&mut self, range: &IovaRange) {
        self.unit.invalidate(&Invalidation::Pages {
            domain: DOMAIN,
            range: PfnRange::covering(range),
            levels: CachedLevels::Leaves,
        });
    }

    fn bus(&mut self) -> Bus<'_, VtdUnit, Arena, &mut Watch> {
        Bus::new(&mut self.unit, self.mem, &mut self.watch)
    }

    fn tell<A: Attacker>(&mut self, attacker: &mut A, event: DriverEvent) {
        attacker.on(&event, &mut self.bus());
    }
}

fn arena() -> Arena {
    Arena::new(ARENA).unwrap()
}

#[test]
fn bytes_arrive_across_pages() {
    let mem = arena();
    let mut rig = Rig::new(&mem);
    rig.map(0x1000, 0x9000, Permissions::READ_WRITE);
    rig.map(0x2000, 0x5000, Permissions::READ_WRITE);
    let sent: Vec<u8> = (0..=255).collect();
    rig.bus().write(NIC, Iova::new(0x1f80), &sent).unwrap();
    let mut first = [0; 128];
    mem.read_bytes(PhysAddr::new(0x9f80), &mut first).unwrap();
    let mut second = [0; 128];
    mem.read_bytes(PhysAddr::new(0x5000), &mut second).unwrap();
    assert_eq!([first, second].concat(), sent);
    let mut back = [0; 256];
    rig.bus().read(NIC, Iova::new(0x1f80), &mut back).unwrap();
    assert_eq!(back[..], sent[..]);
    assert_eq!(rig.watch.allowed.len(), 2);
    assert_eq!(rig.watch.allowed[0].1.len(), 2);
}

/// A unit that checks only the start of an access would allow the first half.
#[test]
fn a_stopped_access_moves_nothing() {
    let mem = arena();
    let mut rig = Rig::new(&mem);
    rig.map(0x1000, 0x9000, Permissions::READ_WRITE);
    rig.map(0x2000, 0x5000, Permissions::READ);
    let fault = Fault {
        device: NIC,
        iova: Iova::new(0x2000),
        access: ringfence_types::Access::Write,
        reason: FaultReason::WriteDenied,
    };
    let result = rig.bus().write(NIC, Iova::new(0x1ffc), &[0xee; 8]);
    assert_eq!(result, Err(DmaError::Fault(fault)));
    let mut bytes = [1; 4];
    mem.read_bytes(PhysAddr::new(0x9ffc), &mut bytes).unwrap();
    assert_eq!(bytes, [0; 4]);
    let mut untouched = [7; 8];
    let result = rig.bus().read(NIC, Iova::new(0x2ffc), &mut untouched);
    assert!(matches!(result, Err(DmaError::Fault(_))));
    assert_eq!(untouched, [7; 8]);
    assert!(rig.watch.allowed.is_empty());
    assert_eq!(rig.watch.faulted[0].1, fault);
    // An access of no bytes is invalid.
    assert!(rig.bus().write(NIC, Iova::new(0x1000), &[]).is_err());
}

#[test]
fn translated_to_nowhere_is_no_fault() {
    let mem = arena();
    let mut rig = Rig::new(&mem);
    rig.map(0x1000, ARENA, Permissions::READ_WRITE);
    let result = rig.bus().write(NIC, Iova::new(0x1000), &[1]);
    assert!(
        matches!(result, Err(DmaError::Unreachable(error)) if error.at == PhysAddr::new(ARENA))
    );
    assert_eq!(rig.watch.allowed.len(), 1);
}

/// All attackers on one mapping, with and without an invalidation at unmap.
#[test]
fn attackers_access_unflushed_pages() {
    let mem = arena();
    for strict in [true, false] {
        let mut rig = Rig::new(&mem);
        let mut attackers = (
            Passive,
            (Racer::new(), (Neighbour, Replayer::new(Reuse::Page))),
        );
        let mapping = DeviceMapping {
            device: NIC,
            range: IovaRange::new(Iova::new(0x1100), 0x40).unwrap(),
            direction: Direction::FromDevice,
        };
        rig.map(0x1000, 0x9000, Permissions::WRITE);
        rig.tell(&mut attackers, DriverEvent::Mapped(mapping));
        // The two bytes next to the buffer.
        assert_eq!(rig.watch.allowed.len(), 2);
        rig.tell(&mut attackers, DriverEvent::Unmapping(mapping));
        assert_eq!(rig.watch.allowed.len(), 4, "passive and racer");
        assert!(rig.watch.faulted.is_empty());
        rig.unmap(&mapping.range);
        if strict {
            rig.flush(&mapping.range);
        }
        rig.watch = Watch::default();
        rig.tell(&mut attackers, DriverEvent::Unmapped(mapping));
        rig.tell(&mut attackers, DriverEvent::Other);
        let (reached, stopped) = if strict { (0, 2) } else { (4, 0) };
        assert_eq!(rig.watch.allowed.len(), reached, "strict: {strict}");
        assert_eq!(rig.watch.faulted.len(), stopped, "strict: {strict}");
        // The late flush ends the attack, after one more attempt at each end.
        rig.flush(&mapping.range);
        rig.watch = Watch::default();
        rig.tell(&mut attackers, DriverEvent::Other);
        rig.tell(&mut attackers, DriverEvent::Other);
        assert!(rig.watch.allowed.is_empty());
        assert_eq!(rig.watch.faulted.len(), if strict { 0 } else { 2 });
    }
}
