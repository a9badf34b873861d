//! Attach and detach of devices.

use ringfence_pgtable::TableError;
use ringfence_smmu_v3::{EventType, FaultEvent, Translation, UnitError};
use ringfence_types::{DomainId, InvalidationError, Invalidator, RequesterId};

use crate::model::Processor;
use crate::rig::{
    COHERENT, DEVICE, DOMAIN, FAR, IOVA, OTHER, PA, Rig, TWO_LEVELS, TestUnit, one, two,
};

const SECOND: DomainId = DomainId::new(6);
const V: u64 = 1;

fn next_cause(unit: &mut TestUnit<'_>) -> Option<(EventType, u32)> {
    match unit.next_fault()? {
        FaultEvent::Record(record) => Some((record.event_type, record.stream_id)),
        other => panic!("{other:x?}"),
    }
}

#[test]
fn attached_devices_reach_their_tables() {
    for features in [0, COHERENT, TWO_LEVELS, COHERENT | TWO_LEVELS] {
        let rig = Rig::without(features);
        let mut unit = rig.unit();
        let (first, second) = (rig.stage1(DOMAIN), rig.stage2(SECOND));
        rig.map(&first, IOVA, PA, 2);
        rig.map(&second, IOVA, PA + 0x10_0000, 1);
        for device in [DEVICE, FAR] {
            assert_eq!(rig.access(device, IOVA), None);
            unit.attach(device, DOMAIN, &one(&first)).unwrap();
            assert_eq!(rig.access(device, IOVA + 0x1008), Some(PA + 0x1008));
            assert_eq!(rig.access(device, IOVA + 0x2000), None);
        }
        unit.attach(OTHER, SECOND, &two(&second)).unwrap();
        assert_eq!(rig.access(OTHER, IOVA + 8), Some(PA + 0x10_0008));
        assert_eq!(rig.access(OTHER, IOVA + 0x1000), None);
        for device in [DEVICE, FAR, OTHER] {
            unit.detach(device).unwrap();
            assert_eq!(rig.access(device, IOVA), None);
        }
        unit.disable().unwrap();
        for device in [DEVICE, FAR, OTHER] {
            assert_eq!(rig.access(device, IOVA), None);
        }
    }
}

#[test]
fn devices_without_tables() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    unit.pass_through(DEVICE).unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), Some(IOVA));
    unit.attach(DEVICE, DOMAIN, &Translation::Abort).unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), None);
    assert_eq!(unit.next_fault(), None);
    unit.detach(DEVICE).unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), None);
    assert_eq!(
        next_cause(&mut unit),
        Some((EventType::BadStreamEntry, 0x20))
    );
    assert_eq!(
        unit.detach(DEVICE),
        Err(UnitError::NotAttached { device: DEVICE })
    );
}

/// Section 3.21.3.1: all words but V, an invalidation, V, an invalidation. Each has completed
/// before the next step. The context descriptor is complete before an entry names it.
#[test]
fn an_entry_becomes_valid_last() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let table = rig.stage1(DOMAIN);
    unit.attach(DEVICE, DOMAIN, &one(&table)).unwrap();
    let steps = rig.executed();
    let entries: Vec<_> = steps.iter().filter_map(|step| step.entry).collect();
    let [before, after] = entries[..] else {
        panic!("{steps:x?}");
    };
    assert_eq!(
        before,
        [after[0] & !V, after[1], after[2], after[3], 0, 0, 0, 0]
    );
    assert_eq!(after[0] & V, V);
    for context in steps.iter().filter_map(|step| step.context) {
        assert_eq!(context[0] >> 31 & 1, 1, "{steps:x?}");
        assert_eq!(context[1], table.root().get());
    }
    assert_eq!(steps[1].command, [0x46, 0]);
    unit.detach(DEVICE).unwrap();
    assert_eq!(rig.executed()[0].entry.unwrap()[0] & V, 0);
}

/// The unit may have cached any entry, also the invalid first-level descriptor of a table of the
/// second level that did not exist.
#[test]
fn tables_of_the_second_level_grow() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let before = rig.frames.in_use();
    for (device, frames) in [
        (DEVICE, 1),
        (OTHER, 1),
        (FAR, 2),
        (RequesterId::new(0x1235), 2),
    ] {
        assert_eq!(rig.access(device, IOVA), None);
        unit.pass_through(device).unwrap();
        assert_eq!(rig.access(device, IOVA), Some(IOVA), "{device}");
        assert_eq!(rig.frames.in_use(), before + frames);
    }
    unit.disable().unwrap();
    assert_eq!(rig.frames.in_use(), 0);
}

/// Entries of the TLB bear the domain-id only: the next user of the id must not hit old ones. The
/// device accesses memory while the unit works.
#[test]
fn a_domain_id_is_free_after_its_last_device() {
    for stage in [one, two] {
        let rig = Rig::new();
        let mut unit = rig.unit();
        let make = |rig: &Rig| match stage(&rig.stage1(DOMAIN)) {
            Translation::Stage1(_) => rig.stage1(DOMAIN),
            _ => rig.stage2(DOMAIN),
        };
        let (old, new) = (make(&rig), make(&rig));
        rig.map(&old, IOVA, PA, 1);
        rig.map(&new, IOVA, PA + 0x1000, 1);
        rig.model.change().traffic = vec![(0x20, IOVA), (0x28, IOVA)];
        for device in [DEVICE, OTHER] {
            unit.attach(device, DOMAIN, &stage(&old)).unwrap();
            assert_eq!(rig.access(device, IOVA), Some(PA));
        }
        unit.detach(DEVICE).unwrap();
        assert_eq!(rig.access(DEVICE, IOVA), None);
        assert_eq!(rig.access(OTHER, IOVA), Some(PA));
        let mismatch = UnitError::DomainMismatch { domain: DOMAIN };
        assert_eq!(unit.attach(DEVICE, DOMAIN, &stage(&new)), Err(mismatch));
        unit.detach(OTHER).unwrap();
        unit.attach(DEVICE, DOMAIN, &stage(&new)).unwrap();
        assert_eq!(rig.access(DEVICE, IOVA), Some(PA + 0x1000));
        // The only user of a domain may replace its table.
        unit.attach(DEVICE, DOMAIN, &stage(&old)).unwrap();
        assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
    }
}

/// The descriptor of a domain is free when no entry names it, and not before.
#[test]
fn context_descriptors_are_reused() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let tables: Vec<_> = (1..4).map(|id| rig.stage1(DomainId::new(id))).collect();
    for (index, table) in tables.iter().enumerate() {
        rig.map(table, IOVA, PA + 0x1000 * index as u64, 1);
    }
    unit.attach(DEVICE, DomainId::new(1), &one(&tables[0]))
        .unwrap();
    unit.attach(OTHER, DomainId::new(1), &one(&tables[0]))
        .unwrap();
    unit.attach(FAR, DomainId::new(2), &one(&tables[1]))
        .unwrap();
    let frames = rig.frames.in_use();
    for round in 0..200_usize {
        let index = 1 + round % 2;
        unit.attach(FAR, DomainId::new(index as u16 + 1), &one(&tables[index]))
            .unwrap();
        assert_eq!(rig.access(FAR, IOVA), Some(PA + 0x1000 * index as u64));
        assert_eq!(rig.access(OTHER, IOVA), Some(PA));
        if round == 100 {
            unit.detach(DEVICE).unwrap();
        }
    }
    assert_eq!(rig.frames.in_use(), frames);
    // Domain 1 still has a device, which reads its descriptor again.
    let new = rig.stage1(DomainId::new(4));
    for id in [0x30, 0x31] {
        let device = RequesterId::new(id);
        unit.attach(device, DomainId::new(4), &one(&new)).unwrap();
    }
    let ticket = unit.recover().unwrap();
    unit.wait(ticket).unwrap();
    assert_eq!(rig.access(OTHER, IOVA), Some(PA));
    assert_eq!(rig.access(RequesterId::new(0x30), IOVA), None);
}

/// 64 descriptors are a frame.
#[test]
fn many_domains_have_descriptors_of_their_own() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let mut seen = std::collections::BTreeSet::new();
    for id in 0..130_u16 {
        let table = rig.stage1(DomainId::new(id));
        unit.attach(RequesterId::new(id), DomainId::new(id), &one(&table))
            .unwrap();
        let entry = rig.model.entry_in_memory(id.into()).unwrap();
        let context = entry[0] & !0x3f;
        assert!(seen.insert(context));
        assert_eq!(rig.model.load(context) >> 48, u64::from(id));
        assert_eq!(rig.model.load(context + 8), table.root().get());
    }
}

/// Attach and detach that the unit does not answer leave the device blocked, and can be repeated.
#[test]
fn an_attach_without_an_answer_blocks_the_device() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let table = rig.stage1(DOMAIN);
    rig.map(&table, IOVA, PA, 1);
    let timed_out = Err(UnitError::Invalidation(InvalidationError::TimedOut));
    // Before and after the first invalidation.
    for budget in [0, 2] {
        rig.model.change().budget = budget;
        assert_eq!(unit.attach(DEVICE, DOMAIN, &one(&table)), timed_out);
        assert_eq!(rig.model.entry_in_memory(0x20).unwrap()[0] & V, 0);
        rig.model.change().budget = usize::MAX;
        let ticket = unit.recover().unwrap();
        unit.wait(ticket).unwrap();
        unit.detach(DEVICE).unwrap();
    }

    unit.attach(DEVICE, DOMAIN, &one(&table)).unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
    rig.model.change().processor = Processor::Manual;
    assert_eq!(unit.detach(DEVICE), timed_out);
    // The entry may still be cached, and the domain-id is not free.
    let other = rig.stage1(DOMAIN);
    let mismatch = UnitError::DomainMismatch { domain: DOMAIN };
    assert_eq!(unit.attach(OTHER, DOMAIN, &one(&other)), Err(mismatch));
    rig.model.change().processor = Processor::Prompt;
    let ticket = unit.recover().unwrap();
    unit.wait(ticket).unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), None);
    unit.detach(DEVICE).unwrap();
    assert_eq!(
        unit.detach(DEVICE),
        Err(UnitError::NotAttached { device: DEVICE })
    );
}

/// A failed attach keeps the earlier attachment if it fails before the first change.
#[test]
fn an_attach_without_frames() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    unit.pass_through(DEVICE).unwrap();
    let mut taken = Vec::new();
    while let Ok(frame) = ringfence_types::FrameSource::alloc_zeroed(&rig.frames) {
        taken.push(frame);
    }
    assert_eq!(
        unit.pass_through(FAR),
        Err(UnitError::Table(TableError::OutOfFrames))
    );
    assert_eq!(rig.access(FAR, IOVA), None);
    assert_eq!(rig.access(DEVICE, IOVA), Some(IOVA));
}

/// Requesters have the stream ids that firmware tables give them.
#[test]
fn stream_ids_begin_at_an_offset() {
    let mut rig = Rig::new();
    rig.options.first_stream_id = 0x8000;
    let mut unit = rig.unit();
    unit.pass_through(DEVICE).unwrap();
    assert_eq!(unit.stream_id(DEVICE), Ok(0x8020));
    assert_eq!(rig.model.access(0x8020, IOVA, true), Some(IOVA));
    assert_eq!(rig.model.access(0x20, IOVA, true), None);
    let cause = next_cause(&mut unit).unwrap();
    assert_eq!(cause, (EventType::BadStreamId, 0x20));
    assert_eq!(unit.requester(0x8020), Some(DEVICE));
    assert_eq!(unit.requester(0x20), None);
    assert_eq!(unit.requester(0x1_8000), None);
    let device = RequesterId::new(0x8000);
    assert_eq!(
        unit.pass_through(device),
        Err(UnitError::DeviceBeyondTable { device })
    );
}
