//! Start and end.

use ringfence_virtio_iommu_driver::{Failure, Feature, Options, Unit, UnitError};

use crate::model::{EVENTS, Model, Wire, frames, frames_of, start};
use ringfence_virtio_iommu_driver::Transport;

type Change = fn(&Model);

#[test]
fn the_device_is_ready_and_blocks() {
    let model = Model::new();
    let frames = frames(&model);
    let unit = start(&model, &frames).unwrap();
    assert_eq!(model.status.get(), 15);
    // Neither the superseded BYPASS nor MMIO.
    assert_eq!(model.accepted.get(), 1 << 32 | 0x57);
    assert_eq!(model.config.borrow()[36], 0, "bypass");
    assert_eq!(unit.capabilities().domain_range, (0, 100));
    let events = model.chains(EVENTS);
    assert_eq!(events.len(), 64);
    assert!(events.iter().all(|chain| chain.room == 24));
    unit.disable().unwrap();
    assert_eq!((model.status.get(), frames.in_use()), (0, 0));
}

#[test]
fn refusals_free_all_frames() {
    let cases: [(&str, Change, UnitError); 12] = [
        ("absent", |m| m.status.set(0xff), UnitError::Absent),
        (
            "version",
            |m| m.offered.set(0x77),
            UnitError::Unsupported(Feature::Version1),
        ),
        (
            "map",
            |m| m.offered.set(1 << 32 | 0x73),
            UnitError::Unsupported(Feature::MapUnmap),
        ),
        (
            "features",
            |m| m.rejects.set(true),
            UnitError::FeaturesRejected,
        ),
        ("vanishes", |m| m.vanishes_at.set(8), UnitError::Absent),
        (
            "bypass stays",
            |m| m.config.borrow_mut()[36] = 0xee,
            UnitError::Configuration,
        ),
        (
            "page sizes",
            |m| m.config.borrow_mut()[..8].fill(0),
            UnitError::Configuration,
        ),
        (
            "generation",
            |m| m.changes.set(true),
            UnitError::ConfigurationChanges,
        ),
        ("no requests", |m| m.sizes.set([0, 64]), UnitError::Queue(0)),
        (
            "one descriptor",
            |m| m.sizes.set([1, 64]),
            UnitError::Queue(0),
        ),
        ("no events", |m| m.sizes.set([64, 0]), UnitError::Queue(1)),
        (
            "stuck",
            |m| {
                m.status.set(1);
                m.is_stuck.set(true);
            },
            UnitError::ResetTimedOut,
        ),
    ];
    for (name, change, expected) in cases {
        let model = Model::new();
        change(&model);
        let frames = frames(&model);
        assert_eq!(start(&model, &frames).err(), Some(expected), "{name}");
        assert_eq!(frames.in_use(), 0, "{name}");
        let failed = matches!(model.status.get(), 0xff | 1) || model.status.get() & 128 != 0;
        assert!(failed, "{name}: FAILED");
    }
    for count in 0..4 {
        let model = Model::new();
        let frames = frames_of(&model, count.max(1));
        let taken = (count == 0).then(|| {
            use ringfence_types::FrameSource;
            frames.alloc_zeroed().unwrap()
        });
        let found = start(&model, &frames).err();
        assert_eq!(found, Some(UnitError::Frames), "{count}");
        assert_eq!(frames.in_use(), u64::from(taken.is_some()), "{count}");
    }
}

/// The device may still write to frames that it was given.
#[test]
fn frames_of_a_stuck_device_stay() {
    let model = Model::new();
    let frames = frames(&model);
    let unit = start(&model, &frames).unwrap();
    model.is_stuck.set(true);
    assert_eq!(unit.disable(), Err(UnitError::ResetTimedOut));
    assert_eq!(frames.in_use(), 4);
}

#[test]
fn a_device_that_vanishes_while_it_starts_is_named() {
    let absent = Err(UnitError::Failed(Failure::Status(0xff)));
    let model = Model::new();
    let frames = frames(&model);
    model.vanishes_at.set(4);
    assert_eq!(start(&model, &frames).map(|_| ()), absent);
    assert_eq!(frames.in_use(), 4);

    let model = Model::new();
    let frames = self::frames(&model);
    let mut unit = start(&model, &frames).unwrap();
    model.vanishes_at.set(4);
    assert_eq!(unit.recover(), absent);
    // A second failure does not replace the reason.
    assert_eq!(unit.recover(), Err(UnitError::Absent));
    let device = ringfence_types::RequesterId::new(1);
    let attached = unit.attach(device, ringfence_types::DomainId::new(1));
    assert_eq!(attached, absent);
}

#[test]
fn endpoint_numbers_do_not_wrap() {
    let model = Model::new();
    let frames = frames(&model);
    for (first_endpoint, error) in [
        (0xffff_0000, None),
        (0xffff_0001, Some(UnitError::EndpointNumbers)),
        (u32::MAX, Some(UnitError::EndpointNumbers)),
    ] {
        let options = Options {
            first_endpoint,
            poll_limit: 1000,
        };
        let memory = model.memory.clone();
        let unit = Unit::new(Wire(model.clone()), memory, &frames, &options);
        assert_eq!(unit.err(), error, "{first_endpoint:#x}");
    }
}

#[test]
fn small_queues_are_enough() {
    for size in [2, 3, 64, 127] {
        let model = Model::new();
        model.sizes.set([size, size]);
        let frames = frames(&model);
        let _unit = start(&model, &frames).unwrap();
        let parts = model.parts(0);
        assert_eq!(parts.size, 1 << size.ilog2());
        assert_eq!(model.chains(EVENTS).len(), 1 << size.min(64).ilog2());
        // Sections 2.7.5 to 2.7.8: alignment; and the parts do not overlap.
        let n = u64::from(parts.size);
        let [table, available, used] =
            [parts.descriptors, parts.available, parts.used].map(|part| part.get());
        assert!(table % 16 == 0 && available % 2 == 0 && used % 4 == 0);
        assert!(table + 16 * n <= available && available + 6 + 2 * n <= used);
        assert!(used + 6 + 8 * n <= table + 4096);
    }
}

#[test]
fn a_device_that_fails_at_once() {
    let model = Model::new();
    let frames = frames(&model);
    let mut wire = Wire(model.clone());
    wire.write_status(0);
    let unit = start(&model, &frames).unwrap();
    drop(unit);
    model.status.set(64);
    // The reset of the next start ends the error.
    let mut unit = start(&model, &frames).unwrap();
    model.status.set(15 | 128);
    model.answers.set(None);
    let device = ringfence_types::RequesterId::new(1);
    let found = unit.attach(device, ringfence_types::DomainId::new(1));
    assert_eq!(found, Err(UnitError::Failed(Failure::Status(143))));
}
