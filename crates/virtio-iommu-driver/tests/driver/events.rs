//! Events of the device and the return of their buffers.

use ringfence_types::{Iova, Permissions, RequesterId};
use ringfence_virtio_iommu_driver::{Failure, FaultReason, FaultRecord};

use crate::model::{Chain, EVENTS, Model, ModelUnit, attached, frames};

type Break = fn(&Model, &Chain);

fn fault(unit: &mut ModelUnit<'_>) -> Option<FaultRecord> {
    unit.next_fault()
}

/// Every buffer returns to the device, with one notification per burst.
#[test]
fn buffers_return() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    let mut buffers = model.chains(EVENTS);
    model.take_notifications(EVENTS);
    assert_eq!(fault(&mut unit), None);
    for round in 0..20_u64 {
        let taken: Vec<Chain> = buffers.drain(..20).collect();
        for (chain, address) in taken.iter().zip(round << 12..) {
            model.report(chain, [0x102_0000_0002, 0x120, address], 24);
        }
        for address in (round << 12..).take(20) {
            let Some(FaultRecord::Fault(found)) = fault(&mut unit) else {
                panic!("no fault");
            };
            assert_eq!(found.reason, FaultReason::Mapping);
            assert_eq!(found.device, Some(RequesterId::new(0x20)));
            assert_eq!(found.iova, Some(Iova::new(address)));
            assert_eq!(found.access, Some(Permissions::WRITE));
        }
        assert_eq!(model.take_notifications(EVENTS), 0);
        assert_eq!(fault(&mut unit), None);
        assert_eq!(model.take_notifications(EVENTS), 1);
        buffers.extend(model.chains(EVENTS));
        assert_eq!(buffers.len(), 64);
    }
}

/// A caller that never sees the end of a storm gives buffers back too.
#[test]
fn half_of_the_buffers_return_during_a_storm() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    let mut buffers = model.chains(EVENTS);
    for address in 0..1000 {
        while let Some(chain) = buffers.pop() {
            model.report(&chain, [2, 0x120, address], 24);
        }
        assert!(matches!(fault(&mut unit), Some(FaultRecord::Fault(_))));
        buffers.extend(model.chains(EVENTS));
    }
}

#[test]
fn hostile_events() {
    let cases: [(&str, Break, Failure); 5] = [
        (
            "no such buffer",
            |m, _| m.push_used(EVENTS, 64, 24),
            Failure::UsedId(64),
        ),
        (
            "a huge id",
            |m, _| m.push_used(EVENTS, u32::MAX, 24),
            Failure::UsedId(u32::MAX),
        ),
        (
            "too long",
            |m, chain| m.push_used(EVENTS, chain.head.into(), 25),
            Failure::UsedLength(25),
        ),
        (
            "more than all",
            |m, _| m.set_used_index(EVENTS, 65),
            Failure::UsedIndex,
        ),
        (
            "backwards",
            |m, _| m.set_used_index(EVENTS, u16::MAX),
            Failure::UsedIndex,
        ),
    ];
    for (name, break_it, expected) in cases {
        let model = Model::new();
        let frames = frames(&model);
        let mut unit = attached(&model, &frames);
        let buffers = model.chains(EVENTS);
        break_it(&model, &buffers[3]);
        let failed = FaultRecord::QueueFailed(expected);
        assert_eq!(fault(&mut unit), Some(failed), "{name}");
        assert_eq!(fault(&mut unit), None, "{name}: reported once");
        model.answers.set(Some(0));
        unit.recover().unwrap();
        let buffers = model.chains(EVENTS);
        model.report(&buffers[0], [0, 0, 0], 24);
        assert!(
            matches!(fault(&mut unit), Some(FaultRecord::Fault(_))),
            "{name}"
        );
    }
}

/// The length of a fault is fixed.
#[test]
fn a_short_event_is_malformed() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    let buffers = model.chains(EVENTS);
    model.report(&buffers[0], [2, 0, 0], 8);
    let found = fault(&mut unit);
    assert!(matches!(
        found,
        Some(FaultRecord::Malformed {
            bytes: 8,
            raw: [2, 0, 0]
        })
    ));
}
