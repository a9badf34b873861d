//! The event log.

use ringfence_amd_vi::{Event, Request};
use ringfence_types::{Access, Iova};

use crate::model::{EVENT_HEAD, EVENT_LOG_BASE, EVENT_RUN, EVENT_TAIL, OVERFLOW, STATUS};
use crate::rig::{DEVICE, DOMAIN, FEATURE, IOVA, PA, Rig, host};

#[test]
fn stopped_accesses_are_reported_in_order() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    assert_eq!(unit.next_fault(), None);
    let table = rig.table(DOMAIN, 3);
    unit.attach(DEVICE, DOMAIN, host(&table)).unwrap();
    // More than the log holds at a time, so that it wraps.
    for number in 0..600 {
        let (iova, access) = match number % 2 {
            0 => (IOVA + number * 0x1000, Access::Write),
            _ => (IOVA + number * 0x1000 + 0x123, Access::Read),
        };
        assert_eq!(rig.model.access(DEVICE, iova, access), None);
        let record = unit.next_fault().unwrap();
        let request = Request {
            device: DEVICE,
            address: Iova::new(iova),
            access: Some(access),
            translation_request: false,
        };
        let event = Event::IoPageFault {
            request,
            domain: Some(DOMAIN),
            present: false,
            reserved: false,
        };
        assert_eq!(record.event, event);
        assert_eq!(unit.next_fault(), None);
    }
    assert_eq!(rig.model.register(EVENT_HEAD), 600 % 256 * 16);
}

/// Many records cost as many accesses to registers as one.
#[test]
fn registers_are_accessed_once_for_many_records() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    for number in 0..100 {
        assert_eq!(rig.access(DEVICE, number << 12), None);
    }
    let before = rig.model.state().accesses;
    for number in 1..=100 {
        assert!(unit.next_fault().is_some());
        assert_eq!(unit.has_known_fault(), number != 100);
    }
    // The tail and the head.
    assert_eq!(rig.model.state().accesses - before, 2);
    assert_eq!(rig.model.register(EVENT_HEAD), 100 * 16);
}

#[test]
fn an_overflow_is_reported_once_and_cleared() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    for _ in 0..2 {
        for number in 0..300 {
            assert_eq!(rig.access(DEVICE, number << 12), None);
        }
        assert_eq!(
            rig.model.register(STATUS) & (OVERFLOW | EVENT_RUN),
            OVERFLOW
        );
        for number in 0..255 {
            let Event::IoPageFault { request, .. } = unit.next_fault().unwrap().event else {
                panic!("record {number} is no page fault");
            };
            assert_eq!(request.address, Iova::new(number << 12));
        }
        let lost = unit.next_fault().unwrap();
        assert_eq!((lost.event, lost.raw), (Event::Lost, [0; 2]));
        assert_eq!(unit.next_fault(), None);
        assert_eq!(
            rig.model.register(STATUS) & (OVERFLOW | EVENT_RUN),
            EVENT_RUN
        );
    }
}

/// An overflow that the unit does not clear is not reported for ever.
#[test]
fn a_stuck_overflow_is_reported_once() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    rig.model.set(STATUS, rig.model.register(STATUS) | OVERFLOW);
    assert_eq!(
        unit.next_fault().map(|record| record.event),
        Some(Event::Lost)
    );
    for _ in 0..3 {
        rig.model.set(STATUS, rig.model.register(STATUS) | OVERFLOW);
    }
    assert_eq!(
        unit.next_fault().map(|record| record.event),
        Some(Event::Lost)
    );
}

#[test]
fn malformed_records_are_returned() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    rig.model.log([0xf << 60 | 7, 8]);
    let record = unit.next_fault().unwrap();
    assert_eq!(
        (record.event, record.raw),
        (Event::Malformed, [0xf << 60 | 7, 8])
    );
    // The tail moved, and the record never arrives.
    rig.model.log([0, 0]);
    let record = unit.next_fault().unwrap();
    assert_eq!((record.event, record.raw), (Event::Malformed, [0; 2]));
}

/// Records are cleared, so that a late one is not mistaken for the old record of its slot.
#[test]
fn a_read_record_is_cleared() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    rig.model.log([2 << 60 | 1, 0x1000]);
    assert!(unit.next_fault().is_some());
    for _ in 1..256 {
        rig.model.log([2 << 60 | 2, 0x2000]);
        assert!(unit.next_fault().is_some());
    }
    assert_eq!(rig.model.register(EVENT_TAIL), 0);
    // The tail moves before the record of slot 0 is in memory.
    rig.model.set(EVENT_TAIL, 16);
    assert_eq!(
        unit.next_fault().map(|record| record.event),
        Some(Event::Malformed)
    );
    assert_ne!(rig.model.register(EVENT_LOG_BASE), 0);
}

#[test]
fn an_illegal_command_is_reported_with_its_address() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    rig.model.log([5 << 60, PA]);
    let record = unit.next_fault().unwrap();
    assert_eq!(record.to_string(), "illegal command at 0x800000");
}
