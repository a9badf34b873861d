//! Start and end of a unit.

use std::rc::Rc;

use crate::model::{self, CAP, ECAP, ECAP_SCALABLE, Event, GCMD, IQA, IQT, Model, RTADDR, RWBF};
use ringfence_memory::fake::FaultyFrames;
use ringfence_types::InvalidationError;
use ringfence_vtd::{Feature, Interface, Mode, Register, Unit, UnitError};

const QUEUE: Interface = Interface::Queue;

fn error(model: &Rc<Model>, mode: Mode, interface: Interface) -> UnitError {
    let frames = model::frames(model);
    let options = model::options(mode, interface);
    let error = Unit::new(model.clone(), model.memory.clone(), &frames, &options).unwrap_err();
    assert_eq!(frames.in_use(), 0, "{error}");
    error
}

/// "Set Root Table Pointer Operation": queue, root table, invalidation of all caches, translation.
#[test]
fn the_unit_starts_in_the_order_of_the_specification() {
    let model = Model::new(CAP, ECAP);
    let frames = model::frames(&model);
    let unit = model::start(&model, &frames, Mode::Legacy).unwrap();
    let (root, ring, status) = (0x10_0000, 0x10_1000, 0x10_2000);
    assert_eq!(
        model.take(),
        [
            Event::Write(IQT, 0),
            Event::Write(IQA, ring),
            Event::Write(GCMD, 1 << 26),
            Event::Write(RTADDR, root),
            Event::Write(GCMD, 1 << 30 | 1 << 26),
            Event::Write(IQT, 0x40),
            Event::Descriptor([0x11, 0]),
            Event::Descriptor([0x45, 0]),
            Event::Descriptor([0xd2, 0]),
            Event::Descriptor([0x1_0000_0025, status]),
            // RTPS is no command: it is not repeated.
            Event::Write(GCMD, 1 << 31 | 1 << 26),
        ]
    );
    unit.disable().unwrap();
    assert_eq!(
        model.take(),
        [Event::Write(GCMD, 1 << 26), Event::Write(GCMD, 0)]
    );
    assert_eq!(frames.in_use(), 0);
}

#[test]
fn scalable_mode_uses_wide_descriptors_and_its_own_root() {
    let model = Model::new(CAP, ECAP_SCALABLE);
    let frames = model::frames(&model);
    let unit = model::start(&model, &frames, Mode::Scalable).unwrap();
    let events = model.take();
    for event in [
        Event::Write(IQA, 0x10_1800),
        Event::Write(RTADDR, 0x10_0400),
        Event::Write(IQT, 0xc0),
        Event::Descriptor([0x37, 0]),
    ] {
        assert!(events.contains(&event), "{event:x?}: {events:x?}");
    }
    unit.disable().unwrap();
    assert_eq!(frames.in_use(), 0);
}

#[test]
fn a_write_buffer_is_flushed_before_the_unit_reads_the_root() {
    let model = Model::new(CAP | RWBF, ECAP);
    let frames = model::frames(&model);
    let _unit = model::start(&model, &frames, Mode::Legacy).unwrap();
    let events = model.take();
    let index_of = |wanted: Event| events.iter().position(|event| *event == wanted);
    let flush = index_of(Event::Write(GCMD, 1 << 27 | 1 << 26)).unwrap();
    assert!(flush < index_of(Event::Write(GCMD, 1 << 30 | 1 << 26)).unwrap());
}

#[test]
fn options_are_checked_against_the_capabilities() {
    for (ecap, mode, interface, feature) in [
        (ECAP, Mode::Scalable, QUEUE, Feature::ScalableMode),
        (ECAP & !2, Mode::Legacy, QUEUE, Feature::Queue),
        (
            ECAP_SCALABLE,
            Mode::Scalable,
            Interface::Registers,
            Feature::RegisterInvalidation,
        ),
    ] {
        let found = error(&Model::new(CAP, ecap), mode, interface);
        assert_eq!(found, UnitError::Unsupported(feature));
    }
}

#[test]
fn a_unit_that_is_absent_in_use_or_silent_is_refused() {
    let absent = Model::new(CAP, ECAP);
    absent.is_absent.set(true);
    assert_eq!(error(&absent, Mode::Legacy, QUEUE), UnitError::Absent);

    let enabled = Model::new(CAP, ECAP);
    enabled.gsts.set(1 << 31);
    let found = error(&enabled, Mode::Legacy, QUEUE);
    assert_eq!(found, UnitError::AlreadyEnabled);

    for interface in [QUEUE, Interface::Registers] {
        let silent = Model::new(CAP, ECAP);
        silent.is_stalled.set(true);
        let register = Register::GlobalStatus;
        let found = error(&silent, Mode::Legacy, interface);
        assert_eq!(found, UnitError::TimedOut { register });
    }
}

#[test]
fn a_rejected_invalidation_stops_the_start() {
    let model = Model::new(CAP, ECAP);
    model.bad.set(Some(0xd2));
    let frames = model::frames(&model);
    let error = model::start(&model, &frames, Mode::Legacy).unwrap_err();
    let failed = UnitError::Invalidation(InvalidationError::Failed);
    assert_eq!(error, failed);
    // The unit may still use the queue, at whose head it stands.
    assert_eq!(frames.in_use(), 3);
}

#[test]
fn every_shortage_of_frames_is_reported_and_leaves_none_behind() {
    for mode in [Mode::Legacy, Mode::Scalable] {
        for available in 0..3 {
            let model = Model::new(CAP, ECAP_SCALABLE);
            let frames = FaultyFrames::new(model::frames(&model));
            frames.fail_after(available);
            let options = model::options(mode, QUEUE);
            let unit = Unit::new(model.clone(), model.memory.clone(), &frames, &options);
            let error = unit.unwrap_err();
            assert_eq!(error.to_string(), "out of frames for tables");
            assert_eq!(frames.outstanding(), 0, "{mode:?}, {available} frames");
            assert!(model.take().is_empty(), "the unit was not touched");
        }
    }
}

/// A unit that does not confirm TE may enable translation later, with the root table that it has.
#[test]
fn tables_stay_while_the_unit_may_enable_translation() {
    for interface in [QUEUE, Interface::Registers] {
        let model = Model::new(CAP, ECAP);
        model.late.set(1 << 31);
        let frames = model::frames(&model);
        let options = model::options(Mode::Legacy, interface);
        let unit = Unit::new(model.clone(), model.memory.clone(), &frames, &options);
        let register = Register::GlobalStatus;
        assert_eq!(unit.unwrap_err(), UnitError::TimedOut { register });
        let writes = model.take();
        assert_eq!(writes.last().map(is_enabling), Some(false));
        // The root table, and what the queue has.
        let held = if interface == QUEUE { 3 } else { 1 };
        assert_eq!(frames.in_use(), held, "{interface:?}");
    }
}

fn is_enabling(event: &Event) -> bool {
    matches!(event, Event::Write(GCMD, value) if value >> 31 != 0)
}

/// A queue that firmware left enabled is drained and disabled first.
#[test]
fn an_enabled_queue_is_replaced() {
    let model = Model::new(CAP, ECAP);
    model.gsts.set(1 << 26);
    let frames = model::frames(&model);
    let _unit = model::start(&model, &frames, Mode::Legacy).unwrap();
    assert_eq!(model.take().first(), Some(&Event::Write(GCMD, 0)));
}
