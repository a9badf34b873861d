//! Two units in one machine.

use ringfence_hw::{
    DmaUsage, FaultLog, FixedLogic, Geometry, InvalidationGranularity, IommuKind, IommuRouter,
    Prefetch, Replacement, Translate, UnitConfig, UnmapOrder, VtdUnit,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, MapRequest, SecondStage, Table, TranslationType,
};
use ringfence_types::FaultReason::{self, Blocked, ContextInvalid, ContextNotPresent};
use ringfence_types::{
    DomainId, InvalidationError, Invalidator, Iova, Permissions, PhysRange, RequesterId,
};

use crate::rig::{NIC, NOBODY, READ, RW, Rig, arena, iova, pa, pte, ring_request, roomy};

const DISK: RequesterId = RequesterId::new(0x0300);

type Both<'m> = IommuRouter<VtdUnit, ringfence_hw::RingUnit<FixedLogic>>;

fn baseline(mem: &Arena) -> VtdUnit {
    let frames = Frames::new(mem, PhysRange::new(pa(16 << 20), 8 << 20).unwrap());
    let mut contexts = ContextTables::new(Coherency::Coherent, mem, &frames).unwrap();
    let domain = DomainId::new(1);
    let table = Table::new(
        SecondStage::new(Levels::Four),
        domain,
        Coherency::Coherent,
        mem,
        &frames,
    )
    .unwrap();
    let request = MapRequest {
        iova: Iova::ZERO,
        pa: pa(0xd_0000),
        pages: 1,
        permissions: Permissions::READ_WRITE,
    };
    table.map(mem, &frames, request).unwrap();
    let walked = TranslationType::Table {
        root: table.root(),
        levels: Levels::Four,
    };
    // The ring device also has a ring context here; this unit must block it.
    let rings = TranslationType::Rings {
        device: pa(1 << 20),
    };
    for (device, translation) in [(DISK, walked), (NIC, rings)] {
        let context = Context {
            domain,
            translation,
        };
        contexts.attach(mem, &frames, device, &context).unwrap();
    }
    let mut unit = VtdUnit::vtd(&UnitConfig {
        iotlb: Geometry::new(16, 4).unwrap(),
        walk_caches: [Geometry::ABSENT; 3],
        contexts: Geometry::new(16, 1).unwrap(),
        replacement: Replacement::Lru,
        fault_log: FaultLog::MAX_CAPACITY,
        granularity: InvalidationGranularity::Selective,
    });
    unit.set_root_table(contexts.root());
    unit.enable();
    unit
}

fn access(
    machine: &mut Both<'_>,
    mem: &Arena,
    device: RequesterId,
    at: Iova,
) -> Result<u64, FaultReason> {
    machine
        .translate(mem, device, at, 1, READ)
        .map(|translation| translation.first().start().get())
        .map_err(|fault| fault.reason)
}

#[test]
fn each_device_is_translated_by_its_own_unit() {
    let mem = arena();
    let rig = Rig::<FixedLogic>::new(&mem, &roomy(Prefetch::Immediate), 8);
    rig.map(NIC, 0, 0, pte(0x7001, 64, RW));
    let mut machine = IommuRouter::new(baseline(&mem), rig.unit, 4);
    // Ring 0, slot 0, offset 0 has the same IOVA as page 0.
    assert_eq!(iova(0, 0, 0), Iova::ZERO);
    assert_eq!(access(&mut machine, &mem, NIC, Iova::ZERO), Err(Blocked));
    assert_eq!(
        machine.faults().take().map(|record| record.source),
        Some(NIC)
    );
    assert_eq!(machine.attach(NIC, IommuKind::Ring), None);
    assert_eq!(machine.attach(DISK, IommuKind::Baseline), None);
    for _ in 0..2 {
        assert_eq!(access(&mut machine, &mem, NIC, Iova::ZERO), Ok(0x7001));
        assert_eq!(access(&mut machine, &mem, DISK, Iova::ZERO), Ok(0xd_0000));
    }
    // Attached to the wrong unit, a device is blocked. Neither unit accepts the other's contexts,
    // and entries cached in the other unit have no effect.
    assert_eq!(
        machine.attach(NIC, IommuKind::Baseline),
        Some(IommuKind::Ring)
    );
    assert_eq!(
        access(&mut machine, &mem, NIC, Iova::ZERO),
        Err(ContextInvalid)
    );
    assert_eq!(
        machine.attach(DISK, IommuKind::Ring),
        Some(IommuKind::Baseline)
    );
    assert_eq!(
        access(&mut machine, &mem, DISK, Iova::ZERO),
        Err(FaultReason::RootNotPresent)
    );
    machine.attach(NOBODY, IommuKind::Ring);
    assert_eq!(
        access(&mut machine, &mem, NOBODY, Iova::ZERO),
        Err(ContextNotPresent)
    );
    // Each fault is in the log of the unit that blocked the access.
    assert_eq!(machine.baseline.faults().len(), 1);
    assert_eq!(machine.ring.faults().len(), 2);
    assert_eq!(machine.detach(NIC), Some(IommuKind::Baseline));
    assert_eq!(access(&mut machine, &mem, NIC, Iova::ZERO), Err(Blocked));
    assert_eq!(machine.iommu_kind(NIC), None);
}

/// The rule attaches each device, and the accesses go through the unit that it selected.
#[test]
fn usage_selects_the_unit_that_translates() {
    let mem = arena();
    let rig = Rig::<FixedLogic>::new(&mem, &roomy(Prefetch::Immediate), 8);
    rig.map(NIC, 0, 0, pte(0x7001, 64, RW));
    let mut machine = IommuRouter::new(baseline(&mem), rig.unit, 4);
    let ahci = DmaUsage {
        order: UnmapOrder::Arbitrary,
        ..DmaUsage::rings(2, 32)
    };
    let nvme = DmaUsage::rings(2 * 1024, 1 << 16);
    for (usage, device, kind, address) in [
        (nvme, NIC, IommuKind::Ring, 0x7001),
        (ahci, DISK, IommuKind::Baseline, 0xd_0000),
        (DmaUsage::RDMA, DISK, IommuKind::Baseline, 0xd_0000),
    ] {
        assert_eq!(machine.attach_by_usage(device, &usage), kind);
        assert_eq!(machine.iommu_kind(device), Some(kind));
        assert_eq!(access(&mut machine, &mem, device, Iova::ZERO), Ok(address));
    }
}

/// The ring unit rejects a context that points to a page table.
#[test]
fn the_ring_unit_stops_devices_with_tables() {
    let mem = arena();
    let mut rig = Rig::<FixedLogic>::new(&mem, &roomy(Prefetch::Immediate), 8);
    let frames = Frames::new(&mem, PhysRange::new(pa(16 << 20), 8 << 20).unwrap());
    let mut contexts = ContextTables::new(Coherency::Coherent, &mem, &frames).unwrap();
    rig.unit.set_root_table(contexts.root());
    for translation in [
        TranslationType::Table {
            root: pa(0x1000),
            levels: Levels::Four,
        },
        TranslationType::PassThrough {
            levels: Levels::Five,
        },
    ] {
        let context = Context {
            domain: DomainId::new(1),
            translation,
        };
        contexts.attach(&mem, &frames, NIC, &context).unwrap();
        assert_eq!(rig.touch(NIC, 0, 0), Err((Iova::ZERO, ContextInvalid)));
    }
}

/// A unit without ring entries must not certify that a ring entry was purged.
#[test]
fn the_walking_unit_refuses_invalidations_of_rings() {
    let mem = arena();
    let mut unit = baseline(&mem);
    let request = ring_request(NIC, 0);
    assert_eq!(unit.submit(request), Err(InvalidationError::Unsupported));
    let mut delayed = crate::delayed::Delayed::new(unit, 1, 4);
    assert_eq!(delayed.submit(request), Err(InvalidationError::Unsupported));
}
