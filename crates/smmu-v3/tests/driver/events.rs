//! The event queue.

use ringfence_smmu_v3::{Class, EventRecord, EventType, FaultEvent, Loss};
use ringfence_types::{Access, DomainId, GuestPhysAddr, Iova, PhysAddr};

use crate::model::{EVENTQ_CONS, EVENTQ_PROD, GERROR, GERRORN};
use crate::rig::{COHERENT, DEVICE, DOMAIN, IOVA, OTHER, PA, Rig, TestUnit, one, two};

fn record(unit: &mut TestUnit<'_>) -> EventRecord {
    match unit.next_fault() {
        Some(FaultEvent::Record(record)) => record,
        other => panic!("{other:x?}"),
    }
}

#[test]
fn stopped_accesses_are_reported_in_order() {
    for features in [0, COHERENT] {
        let rig = Rig::without(features);
        let mut unit = rig.unit();
        let (first, second) = (rig.stage1(DOMAIN), rig.stage2(DomainId::new(6)));
        rig.map(&first, IOVA, PA, 1);
        unit.attach(DEVICE, DOMAIN, &one(&first)).unwrap();
        unit.attach(OTHER, DomainId::new(6), &two(&second)).unwrap();
        rig.access(DEVICE, IOVA + 0x1234);
        rig.model.access(0x28, IOVA, false);
        rig.model.access(0x99, IOVA, false);
        let fault = record(&mut unit);
        assert_eq!(
            (fault.event_type, fault.stream_id),
            (EventType::Translation, 0x20)
        );
        let transaction = fault.transaction.unwrap();
        assert_eq!(transaction.address, Iova::new(IOVA + 0x1234));
        assert_eq!(transaction.access, Access::Write);
        assert!(!fault.stage.unwrap().is_stage2);
        let fault = record(&mut unit);
        let stage = fault.stage.unwrap();
        assert_eq!(fault.transaction.unwrap().access, Access::Read);
        assert!(stage.is_stage2);
        assert_eq!(
            (stage.class, stage.ipa),
            (Class::Input, Some(GuestPhysAddr::new(IOVA)))
        );
        let fault = record(&mut unit);
        assert_eq!(
            (fault.event_type, fault.stream_id),
            (EventType::BadStreamId, 0x99)
        );
        assert_eq!((fault.transaction, fault.stage), (None, None));
        assert_eq!(unit.next_fault(), None);
        assert_eq!(
            rig.model.register(EVENTQ_CONS),
            rig.model.register(EVENTQ_PROD)
        );
    }
}

/// Section 7.3, by hand.
#[test]
fn records_are_decoded() {
    // F_PERMISSION: SSV, substream 0x12345, privileged instruction fetch, stage 2, CLASS table,
    // stalled.
    let raw = [
        0xabcd_0000 << 32 | 0x1234_5000 | 1 << 11 | 0x13,
        1 << 31 | 1 << 33 | 1 << 34 | 1 << 35 | 1 << 39 | 1 << 40,
        0xfedc_ba98_7654_3210,
        0x00ab_cdef_0123_4000,
    ];
    let fault = EventRecord::decode(raw).unwrap();
    assert_eq!(fault.event_type, EventType::Permission);
    assert_eq!(fault.stream_id, 0xabcd_0000);
    assert_eq!(fault.substream, Some(0x1_2345));
    let transaction = fault.transaction.unwrap();
    assert_eq!(transaction.address, Iova::new(0xfedc_ba98_7654_3210));
    assert_eq!(transaction.access, Access::Read);
    assert!(transaction.is_instruction && transaction.is_privileged);
    let stage = fault.stage.unwrap();
    assert!(stage.is_stage2 && stage.is_stalled);
    assert_eq!(stage.class, Class::Table);
    assert_eq!(stage.ipa, Some(GuestPhysAddr::new(0x00ab_cdef_0123_4000)));
    assert_eq!((fault.fetch_address, fault.raw), (None, raw));
    // F_WALK_EABT: the address of the entry instead of that of stage 2.
    let walk = EventRecord::decode([0x7_0000_000b, 1 << 39, 0x1000, 0x8765_4320]).unwrap();
    assert_eq!(walk.fetch_address, Some(PhysAddr::new(0x8765_4320)));
    assert_eq!(walk.stage.unwrap().ipa, None);
    assert_eq!(walk.substream, None);
    let numbers = [
        (0x01, EventType::UnsupportedTransaction),
        (0x02, EventType::BadStreamId),
        (0x03, EventType::StreamEntryFetch),
        (0x04, EventType::BadStreamEntry),
        (0x05, EventType::BadTranslationRequest),
        (0x06, EventType::StreamDisabled),
        (0x07, EventType::TranslatedForbidden),
        (0x08, EventType::BadSubstreamId),
        (0x09, EventType::ContextFetch),
        (0x0a, EventType::BadContext),
        (0x0b, EventType::WalkAbort),
        (0x10, EventType::Translation),
        (0x11, EventType::AddressSize),
        (0x12, EventType::AccessFlag),
        (0x13, EventType::Permission),
        (0x20, EventType::TlbConflict),
        (0x21, EventType::ConfigurationConflict),
        (0x24, EventType::PageRequest),
        (0x25, EventType::VirtualMachineFetch),
    ];
    for number in 0..=0xff {
        let event_type = EventRecord::decode([number, 0, 0, 0]).map(|record| record.event_type);
        let expected = numbers.iter().find(|one| one.0 == number).map(|one| one.1);
        assert_eq!(event_type, expected, "{number:#x}");
    }
}

#[test]
fn the_queue_wraps() {
    let mut rig = Rig::new();
    rig.options.event_entries = 4;
    let mut unit = rig.unit();
    let table = rig.stage1(DOMAIN);
    unit.attach(DEVICE, DOMAIN, &one(&table)).unwrap();
    for round in 0..50_u64 {
        let burst = 1 + round % 4;
        for page in 0..burst {
            rig.access(DEVICE, IOVA + 0x1_0000 * round + 0x1000 * page);
        }
        for page in 0..burst {
            let address = record(&mut unit).transaction.unwrap().address;
            assert_eq!(address.get(), IOVA + 0x1_0000 * round + 0x1000 * page);
        }
        assert_eq!(unit.next_fault(), None);
    }
}

/// Section 7.4: the flag toggles, and the driver copies it.
#[test]
fn an_overflow_is_reported_once() {
    let mut rig = Rig::new();
    rig.options.event_entries = 4;
    let mut unit = rig.unit();
    for _ in 0..3 {
        for _ in 0..7 {
            rig.access(DEVICE, IOVA);
        }
        for _ in 0..4 {
            assert_eq!(record(&mut unit).event_type, EventType::BadStreamId);
        }
        assert_eq!(unit.next_fault(), Some(FaultEvent::Lost(Loss::Overflow)));
        assert_eq!(unit.next_fault(), None);
        let (producer, consumer) = (EVENTQ_PROD, EVENTQ_CONS);
        assert_eq!(rig.model.register(producer), rig.model.register(consumer));
    }
}

#[test]
fn an_aborted_write_is_reported_once() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    rig.access(DEVICE, IOVA);
    rig.model.raise(1 << 2);
    assert_eq!(record(&mut unit).event_type, EventType::BadStreamId);
    assert_eq!(unit.next_fault(), Some(FaultEvent::Lost(Loss::Abort)));
    assert_eq!(unit.next_fault(), None);
    assert_eq!(rig.model.register(GERROR), rig.model.register(GERRORN));
    // Other errors stay active.
    rig.model.raise(1);
    assert_eq!(unit.next_fault(), None);
    assert_ne!(rig.model.register(GERROR), rig.model.register(GERRORN));
}

#[test]
fn undefined_numbers_are_malformed() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let raw = [0x7_0000_00e5, 1, 2, 3];
    rig.model.record(raw);
    assert_eq!(unit.next_fault(), Some(FaultEvent::Malformed(raw)));
    assert_eq!(unit.next_fault(), None);
}

/// More records than the queue holds cannot be there.
#[test]
fn an_index_outside_the_queue_is_a_loss() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    rig.model.set(EVENTQ_PROD, 0x81);
    assert_eq!(unit.next_fault(), Some(FaultEvent::Lost(Loss::Index)));
    assert_eq!(unit.next_fault(), None);
    assert_eq!(rig.model.register(EVENTQ_CONS), 0x81);
    rig.access(DEVICE, IOVA);
    assert_eq!(record(&mut unit).event_type, EventType::BadStreamId);
    assert_eq!(unit.next_fault(), None);
}
