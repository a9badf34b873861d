//! A36: accesses of a device before the tables are loaded, before its attach, after its detach, and
//! in an identity domain.

use ringfence_hw::{Geometry, UnitConfig, VtdUnit};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, MapRequest, SecondStage, Table, TranslationType,
};
use ringfence_types::{
    Access, DomainId, FaultReason, Invalidation, Iova, Permissions, PhysAddr, PhysRange,
    RequesterId,
};

const DEVICE: RequesterId = RequesterId::new(0x18);
const TARGET: Iova = Iova::new(0x5000);

fn reach(unit: &mut VtdUnit, arena: &Arena, device: RequesterId) -> Result<u64, FaultReason> {
    unit.translate(arena, device, TARGET, 8, Access::Write)
        .map(|found| found.first().start().get())
        .map_err(|fault| fault.reason)
}

#[test]
fn device_accesses_are_limited_by_its_context() {
    let arena = Arena::new(1 << 20).unwrap();
    let frames = Frames::new(
        &arena,
        PhysRange::new(PhysAddr::new(1 << 19), 1 << 19).unwrap(),
    );
    let geometry = Geometry::new(4, 2).unwrap();
    let config = UnitConfig {
        iotlb: geometry,
        walk_caches: [geometry; 3],
        contexts: Geometry::new(8, 1).unwrap(),
        ..UnitConfig::UNCACHED
    };
    let mut unit = VtdUnit::vtd(&config);
    // The unit is off: every access passes, so a kernel enables it before the first driver.
    assert_eq!(reach(&mut unit, &arena, DEVICE), Ok(0x5000));
    // Enabled before the root table is set: every access is blocked.
    unit.enable();
    assert_eq!(reach(&mut unit, &arena, DEVICE), Err(FaultReason::Blocked));
    let coherency = Coherency::Coherent;
    let mut contexts = ContextTables::new(coherency, &arena, &frames).unwrap();
    unit.set_root_table(contexts.root());
    assert_eq!(
        reach(&mut unit, &arena, DEVICE),
        Err(FaultReason::RootNotPresent)
    );
    // Attached to a domain, first without mappings, then with one.
    let domain = DomainId::new(1);
    let format = SecondStage::new(Levels::Four);
    let table = Table::new(format, domain, coherency, &arena, &frames).unwrap();
    let levels = Levels::Four;
    let root = table.root();
    let context = Context {
        domain,
        translation: TranslationType::Table { root, levels },
    };
    contexts.attach(&arena, &frames, DEVICE, &context).unwrap();
    assert_eq!(
        reach(&mut unit, &arena, DEVICE),
        Err(FaultReason::NotPresent)
    );
    let request = MapRequest {
        iova: TARGET,
        pa: PhysAddr::new(0x9000),
        pages: 1,
        permissions: Permissions::READ_WRITE,
    };
    table.map(&arena, &frames, request).unwrap();
    assert_eq!(reach(&mut unit, &arena, DEVICE), Ok(0x9000));
    // Its neighbour on the same bus has no context entry.
    let neighbour = RequesterId::new(0x19);
    assert_eq!(
        reach(&mut unit, &arena, neighbour),
        Err(FaultReason::ContextNotPresent)
    );
    // Detached: the context entry is cleared, and its cached copy is purged with all translations
    // cached under it.
    assert!(matches!(contexts.detach(&arena, DEVICE), Ok(Some(_))));
    unit.invalidate(&Invalidation::Context(DEVICE));
    assert_eq!(
        reach(&mut unit, &arena, DEVICE),
        Err(FaultReason::ContextNotPresent)
    );
    // In an identity domain, the device reaches all memory by design.
    let context = Context {
        domain: DomainId::new(2),
        translation: TranslationType::PassThrough { levels },
    };
    contexts.attach(&arena, &frames, DEVICE, &context).unwrap();
    assert_eq!(reach(&mut unit, &arena, DEVICE), Ok(0x5000));
    // The fault log records the source and the address.
    let records: Vec<_> = std::iter::from_fn(|| unit.faults().take()).collect();
    assert_eq!(records.len(), 5);
    assert!(
        records.iter().filter(|r| r.source == DEVICE).count() == 4,
        "{records:?}"
    );
}
