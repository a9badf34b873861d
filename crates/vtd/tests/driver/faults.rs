//! Fault records: a ring of four registers.

use crate::model::{self, CAP, ECAP, Event, FSTS, Model, start};
use ringfence_types::{FaultReason, Iova, RequesterId};
use ringfence_vtd::{Fault, FaultRecord, Mode, Request};

const F: u64 = 1 << 63;

fn record(page: u64, device: u64) -> [u64; 2] {
    [page, F | 5 << 32 | device]
}

#[test]
fn records_come_in_order_of_the_ring_and_an_overflow_once() {
    let model = Model::new(CAP, ECAP);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Legacy).unwrap();
    assert_eq!(unit.next_fault(), None);
    // The oldest is in register 2 (FRI), the next ones in 3 and 0; PFO is set.
    *model.records.borrow_mut() = [
        record(0x3000, 0x30),
        [0, 0],
        record(0x1000, 0x10),
        record(0x2000, 0x20),
    ];
    model.fsts.set(2 << 8 | 1);
    model.take();
    for index in 1..=3_u16 {
        let raw = record(u64::from(index) << 12, u64::from(index) << 4);
        let fault = Fault {
            device: RequesterId::new(index << 4),
            page: Iova::new(u64::from(index) << 12),
            pasid: None,
            request: Request::Write,
            reason: 5,
            raw,
        };
        assert_eq!(fault.known_reason(), Some(FaultReason::WriteDenied));
        assert_eq!(unit.next_fault(), Some(FaultRecord::Fault(fault)));
    }
    assert_eq!(unit.next_fault(), Some(FaultRecord::Lost));
    assert_eq!(unit.next_fault(), None);
    assert_eq!(
        model.take(),
        [
            Event::Write(0x428, F),
            Event::Write(0x438, F),
            Event::Write(0x408, F),
            Event::Write(FSTS, 1),
        ]
    );
    // After the ring was empty, FRI counts again.
    model.records.borrow_mut()[3] = record(0x5000, 0x50);
    model.records.borrow_mut()[0] = record(0x6000, 0x60);
    model.fsts.set(3 << 8);
    let pages: Vec<_> = std::iter::from_fn(|| unit.next_fault())
        .map(|record| match record {
            FaultRecord::Fault(fault) => fault.page.get(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(pages, [0x5000, 0x6000]);
}

/// A loop over all records ends.
#[test]
fn an_overflow_that_the_unit_does_not_clear_is_reported_once() {
    let model = Model::new(CAP, ECAP);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Legacy).unwrap();
    model.fsts.set(1);
    model.keeps_status.set(true);
    let records: Vec<_> = (0..9).map_while(|_| unit.next_fault()).collect();
    assert_eq!(records, [FaultRecord::Lost]);
    // Once the unit has cleared it, the next overflow counts.
    model.fsts.set(0);
    assert_eq!(unit.next_fault(), None);
    model.fsts.set(1);
    assert_eq!(unit.next_fault(), Some(FaultRecord::Lost));
}

#[test]
fn malformed_records_are_reported_and_cleared() {
    let model = Model::new(CAP, ECAP);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Legacy).unwrap();
    let raw = [u64::MAX, F | 0xffff];
    model.records.borrow_mut()[1] = raw;
    assert_eq!(unit.next_fault(), Some(FaultRecord::Malformed(raw)));
    assert_eq!(unit.next_fault(), None);
    model.fsts.set(!2);
    let _ = unit.next_fault();
}
