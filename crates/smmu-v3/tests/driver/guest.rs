//! Stage 1 of a guest under stage 2 of the host.

use std::sync::atomic::Ordering;

use ringfence_pgtable::Table;
use ringfence_smmu_v3::{EventType, FaultEvent, PageTable, Translation};
use ringfence_types::{
    DomainId, GuestPhysAddr, Invalidation, InvalidationError, Invalidator, PhysAddr, PhysMemory,
};

use crate::rig::{
    DEVICE, DOMAIN, IDENTIFICATION, IOVA, OTHER, PA, Rig, TestTable, TestUnit, invalidate, one,
    pages, two,
};

const V: u64 = 1 << 31;
/// ASID of the guest's process.
const ASID: u16 = 9;
/// Address in the guest of a page that holds its descriptor.
const CONTEXT: u64 = 0x70_0000;
const PAGE: u64 = 0x7a_0000;

/// A host table that maps what the guest uses, and a guest table that maps `IOVA` to `PAGE`.
fn guest(rig: &Rig) -> (TestTable, TestTable) {
    let (host, guest) = (rig.stage2(DOMAIN), rig.stage1(DomainId::new(ASID)));
    // The frames of the guest's tables have the same addresses in the guest.
    rig.map(&host, 0x20_0000, 0x20_0000, 1024);
    rig.map(&host, CONTEXT, CONTEXT, 1);
    rig.map(&host, PAGE, PA, 1);
    rig.map(&guest, IOVA, PAGE, 1);
    write_context(rig, CONTEXT, &guest);
    (host, guest)
}

fn write_context(rig: &Rig, at: u64, table: &TestTable) {
    let control = 25 | V | 4 << 32 | 1 << 41 | u64::from(ASID) << 48;
    for (offset, word) in [(0, control), (8, table.root().get())] {
        let word_at = rig.memory.word(PhysAddr::new(at + offset)).unwrap();
        word_at.store(word, Ordering::Release);
    }
}

fn attach(unit: &mut TestUnit<'_>, host: &TestTable) {
    let nested = Translation::Nested {
        table: PageTable::of(host),
        context: GuestPhysAddr::new(CONTEXT),
    };
    unit.attach(DEVICE, DOMAIN, &nested).unwrap();
}

#[test]
fn both_stages_translate() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let (host, _guest) = guest(&rig);
    attach(&mut unit, &host);
    assert_eq!(rig.access(DEVICE, IOVA + 8), Some(PA + 8));
    assert_eq!(rig.access(DEVICE, IOVA + 0x1000), None);
    unit.detach(DEVICE).unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), None);
}

/// The TLB holds results of both stages under the address of stage 1, which an unmap of stage 2
/// does not know.
#[test]
fn an_unmap_of_the_host_ends_accesses_of_both_stages() {
    let requests = [
        pages(DOMAIN, PAGE, 1),
        Invalidation::Domain(DOMAIN),
        Invalidation::Global,
    ];
    for request in requests {
        let rig = Rig::new();
        let mut unit = rig.unit();
        let (host, _guest) = guest(&rig);
        attach(&mut unit, &host);
        rig.model.change().traffic = vec![(0x20, IOVA)];
        assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
        rig.unmap(&host, PAGE, 1);
        assert_eq!(
            rig.access(DEVICE, IOVA),
            Some(PA),
            "the model cached nothing"
        );
        invalidate(&mut unit, request);
        assert_eq!(rig.access(DEVICE, IOVA), None, "{request:?}");
    }
}

/// The unit also caches the guest's context descriptor, which it read through stage 2.
#[test]
fn an_unmap_of_the_host_ends_the_use_of_a_context_descriptor() {
    for recovers in [false, true] {
        for request in [Invalidation::Domain(DOMAIN), Invalidation::Global] {
            let rig = Rig::new();
            let mut unit = rig.unit();
            let (host, _guest) = guest(&rig);
            attach(&mut unit, &host);
            rig.model.change().traffic = vec![(0x20, IOVA)];
            assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
            rig.unmap(&host, CONTEXT, 1);
            if recovers {
                let ticket = unit.recover().unwrap();
                unit.wait(ticket).unwrap();
            } else {
                invalidate(&mut unit, request);
            }
            assert_eq!(rig.access(DEVICE, IOVA), None, "{request:?}");
        }
    }
}

#[test]
fn a_guest_invalidates_its_own_stage() {
    for asid in [None, Some(ASID)] {
        let rig = Rig::new();
        let mut unit = rig.unit();
        let (host, guest) = guest(&rig);
        attach(&mut unit, &host);
        assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
        rig.unmap(&guest, IOVA, 1);
        rig.commands();
        let ticket = unit.submit_guest_stage1(DOMAIN, asid).unwrap();
        unit.wait(ticket).unwrap();
        assert_eq!(rig.access(DEVICE, IOVA), None);
        let expected = match asid {
            None => [0x0005_0000_0010, 0],
            Some(_) => [0x0009_0005_0000_0011, 0],
        };
        assert_eq!(rig.commands(), [expected, [0x46, 0]]);
    }
}

#[test]
fn a_guest_changes_its_context_descriptor() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let (host, _guest) = guest(&rig);
    attach(&mut unit, &host);
    assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
    let other: TestTable = rig.stage1(DomainId::new(ASID));
    rig.map(&other, IOVA + 0x1000, PAGE, 1);
    write_context(&rig, CONTEXT, &other);
    rig.commands();
    let ticket = unit.submit_guest_context(DEVICE).unwrap();
    unit.wait(ticket).unwrap();
    assert_eq!(rig.commands(), [[0x20_0000_0005, 1], [0x46, 0]]);
    let ticket = unit.submit_guest_stage1(DOMAIN, None).unwrap();
    unit.wait(ticket).unwrap();
    assert_eq!(rig.access(DEVICE, IOVA + 0x1000), Some(PA));
    assert_eq!(rig.access(DEVICE, IOVA), None);
}

/// Nobody would resume the transactions of a guest that lets them stall: its descriptor with S is
/// not valid (section 5.2, S1STALLD).
#[test]
fn a_guest_cannot_stall_transactions() {
    const S: u64 = 1 << 44;
    for stall_model in [0, 1 << 24] {
        let [idr0, rest @ ..] = IDENTIFICATION;
        let rig = Rig::with([idr0 | stall_model, rest[0], rest[1], rest[2]]);
        let mut unit = rig.unit();
        let (host, _guest) = guest(&rig);
        let control = rig.memory.word(PhysAddr::new(CONTEXT)).unwrap();
        control.store(control.load(Ordering::Acquire) | S, Ordering::Release);
        attach(&mut unit, &host);
        assert_eq!(rig.access(DEVICE, IOVA + 0x1000), None);
        let Some(FaultEvent::Record(record)) = unit.next_fault() else {
            panic!("no record");
        };
        assert_eq!(record.event_type, EventType::BadContext);
        let entry = rig.model.entry_in_memory(0x20).unwrap();
        // S1STALLD is reserved in a unit that never stalls.
        assert_eq!(entry[1] >> 27 & 1 == 1, stall_model == 0);
    }
}

/// ASID16 and VMID16 are bits 12 and 18.
#[test]
fn a_guest_cannot_name_an_asid_that_the_unit_does_not_have() {
    let unsupported = Err(InvalidationError::Unsupported);
    for (feature, guest, asid) in [(1 << 12, DOMAIN, 0x100), (1 << 18, DomainId::new(0x100), 9)] {
        let rig = Rig::new();
        assert!(rig.unit().submit_guest_stage1(guest, Some(asid)).is_ok());
        let rig = Rig::without(feature);
        let mut unit = rig.unit();
        assert_eq!(unit.submit_guest_stage1(guest, Some(asid)), unsupported);
        let ticket = unit.submit_guest_stage1(DOMAIN, Some(0xff)).unwrap();
        unit.wait(ticket).unwrap();
    }
}

#[test]
fn guests_need_both_stages() {
    let rig = Rig::without(1);
    let mut unit = rig.unit();
    let table = rig.stage1(DOMAIN);
    unit.attach(DEVICE, DOMAIN, &one(&table)).unwrap();
    let unsupported = Err(InvalidationError::Unsupported);
    assert_eq!(unit.submit_guest_stage1(DOMAIN, None), unsupported);
    let rig = Rig::without(2);
    let mut unit = rig.unit();
    let table = rig.stage2(DOMAIN);
    unit.attach(DEVICE, DOMAIN, &two(&table)).unwrap();
    assert_eq!(unit.submit_guest_stage1(DOMAIN, None), unsupported);
    assert_eq!(unit.submit_guest_context(DEVICE), unsupported);
    assert_eq!(unit.submit_guest_context(OTHER), unsupported);
    let _: &Table<_> = &table;
}
