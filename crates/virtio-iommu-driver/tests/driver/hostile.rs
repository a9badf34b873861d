//! Devices that break the request queue.

use proptest::prelude::*;
use ringfence_types::{Invalidation, InvalidationError, Invalidator};
use ringfence_virtio_iommu_driver::{Failure, Status, UnitError};

use crate::model::{Chain, DEVICE, DOMAIN, Model, REQUESTS, attached, frames, map, map_of, pages};

type Break = fn(&Model, &Chain);

#[test]
fn used_elements_are_checked() {
    let cases: [(&str, Break, Failure); 8] = [
        (
            "odd",
            |m, c| m.push_used(REQUESTS, u32::from(c.head) + 1, 4),
            Failure::UsedId(3),
        ),
        (
            "not in flight",
            |m, _| m.push_used(REQUESTS, 40, 4),
            Failure::UsedId(40),
        ),
        (
            "beyond the table",
            |m, _| m.push_used(REQUESTS, 128, 4),
            Failure::UsedId(128),
        ),
        (
            "beyond 16 bits",
            |m, c| m.push_used(REQUESTS, 0x1_0000 | u32::from(c.head), 4),
            Failure::UsedId(0x1_0002),
        ),
        (
            "too long",
            |m, c| m.push_used(REQUESTS, c.head.into(), 5),
            Failure::UsedLength(5),
        ),
        (
            "twice",
            |m, c| {
                m.answer(c, 0);
                m.answer(c, 0);
            },
            Failure::UsedId(2),
        ),
        (
            "more than in flight",
            |m, _| m.set_used_index(REQUESTS, 1000),
            Failure::UsedIndex,
        ),
        (
            "needs reset",
            |m, _| m.status.set(15 | 64),
            Failure::NeedsReset,
        ),
    ];
    for (name, break_it, expected) in cases {
        let model = Model::new();
        let frames = frames(&model);
        let mut unit = attached(&model, &frames);
        for first in 0..2 {
            map(&mut unit, &model, first, 1);
        }
        for first in 0..2 {
            let _ = unit.unmap(DOMAIN, pages(first, 1)).unwrap();
        }
        let ticket = unit.submit(Invalidation::Global).unwrap();
        let chains = model.chains(REQUESTS);
        assert_eq!(chains[1].head, 2);
        break_it(&model, &chains[1]);
        let result = loop {
            match unit.poll(ticket) {
                Ok(false) => {}
                result => break result,
            }
        };
        assert_eq!(result, Err(InvalidationError::Failed), "{name}");
        let failed = Err(UnitError::Failed(expected));
        assert_eq!(unit.map(DOMAIN, map_of(9, 1)), failed, "{name}");
        model.answers.set(Some(0));
        unit.recover().unwrap();
        assert_eq!(unit.poll(ticket), Ok(true), "{name}: reset");
    }
}

/// A device that reads ahead of the index answers what it was not given yet.
#[test]
fn an_answer_before_the_request_is_published() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    map(&mut unit, &model, 0, 1);
    let _ = unit.unmap(DOMAIN, pages(0, 1)).unwrap();
    let chain = model.chain(&model.parts(REQUESTS), 0);
    assert_eq!(chain.request[0], 4);
    model.answer(&chain, 0);
    // The sequence number of the request.
    let ticket = ringfence_types::Ticket::new(3);
    assert_eq!(unit.poll(ticket), Err(InvalidationError::Failed));
}

/// A status that the device did not write is an error, even if it claims the whole reply.
#[test]
fn a_status_that_is_not_written() {
    for bytes in [0, 4] {
        let model = Model::new();
        let frames = frames(&model);
        let mut unit = attached(&model, &frames);
        map(&mut unit, &model, 0, 1);
        let _ = unit.unmap(DOMAIN, pages(0, 1)).unwrap();
        let ticket = unit.submit(Invalidation::Global).unwrap();
        let chain = &model.chains(REQUESTS)[0];
        model.push_used(REQUESTS, chain.head.into(), bytes);
        let found = unit.poll(ticket);
        assert_eq!(found, Err(InvalidationError::Failed), "{bytes}");
    }
}

#[test]
fn probe_has_a_buffer_of_its_own() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    model.answers.set(Some(0));
    assert_eq!(unit.probe(DEVICE), Ok(Vec::new()));
    let request = &model.take_log()[0];
    assert_eq!(
        (request.len(), &request[..8]),
        (72, &[5, 0, 0, 0, 0x20, 1, 0, 0][..])
    );
    model.answers.set(Some(2));
    let refused = Err(UnitError::Refused(Status::Unsupp));
    assert_eq!(unit.probe(DEVICE), refused);
}

#[derive(Debug, Clone)]
enum Step {
    /// Stores a byte anywhere in the frames that the device shares.
    Store(u64, u8),
    Used(u32, u32),
    Index(u16),
    Answer(u8),
    Status(u8),
    Map(u64),
    Unmap(u64),
    Flush,
    Detach,
    Attach,
    Probe,
    Fault,
    Recover,
}

/// Descriptor tables and available rings: the driver reads nothing there, and the model insists on
/// what the driver wrote.
fn is_read_by_the_model(at: u64) -> bool {
    match at >> 12 {
        0 => at < 2316,
        2 => at & 0xfff < 1164,
        _ => false,
    }
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0_u64..0x4000, any::<u8>()).prop_map(|(at, value)| Step::Store(at, value)),
        (0_u32..140, 0_u32..30).prop_map(|(id, bytes)| Step::Used(id, bytes)),
        any::<u16>().prop_map(Step::Index),
        any::<u8>().prop_map(Step::Answer),
        any::<u8>().prop_map(Step::Status),
        (0_u64..8).prop_map(Step::Map),
        (0_u64..8).prop_map(Step::Unmap),
        Just(Step::Flush),
        Just(Step::Detach),
        Just(Step::Attach),
        Just(Step::Probe),
        Just(Step::Fault),
        Just(Step::Recover),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// No device makes the driver panic or wait for ever; and it always recovers.
    #[test]
    fn any_device(steps in prop::collection::vec(step(), 0..60)) {
        let model = Model::new();
        let frames = frames(&model);
        let mut unit = attached(&model, &frames);
        for step in steps {
            match step {
                Step::Store(at, value) if !is_read_by_the_model(at) => {
                    model.store_byte(0x10_0000 + at, value);
                }
                Step::Used(id, bytes) if model.status.get() != 0 => {
                    model.push_used(REQUESTS, id, bytes);
                }
                Step::Index(index) if model.status.get() != 0 => {
                    model.set_used_index(REQUESTS, index);
                }
                Step::Answer(status) => model.answers.set((status < 0xf0).then_some(status % 12)),
                Step::Status(status) => model.status.set(model.status.get() | status & 0xc0),
                Step::Map(first) => drop(unit.map(DOMAIN, map_of(first, 1))),
                Step::Unmap(first) => drop(unit.unmap(DOMAIN, pages(first, 1))),
                Step::Flush => {
                    if let Ok(ticket) = unit.submit(Invalidation::Global) {
                        while unit.poll(ticket) == Ok(false) {}
                    }
                }
                Step::Detach => drop(unit.detach(DEVICE)),
                Step::Attach => drop(unit.attach(DEVICE, DOMAIN)),
                Step::Probe => drop(unit.probe(DEVICE)),
                Step::Fault => drop(unit.next_fault()),
                Step::Recover => {
                    model.answers.set(Some(0));
                    let _ = unit.recover();
                }
                Step::Store(..) | Step::Used(..) | Step::Index(_) => {}
            }
        }
        model.answers.set(Some(0));
        prop_assert_eq!(unit.recover(), Ok(()));
        prop_assert!(unit.disable().is_ok());
        prop_assert_eq!(frames.in_use(), 0);
    }
}
