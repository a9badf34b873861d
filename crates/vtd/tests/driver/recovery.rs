//! Recovery from errors of the queue and from refused register commands. A ticket whose commands
//! may be lost completes only after all caches were invalidated.

use ringfence_types::{DomainId, Invalidation, InvalidationError, Invalidator};
use ringfence_vtd::{Interface, Mode, Unit, UnitError};

use crate::model::{self, CAP, ECAP, ECAP_SCALABLE, Event, GCMD, IOTLB, Model, start};

const DOMAIN: DomainId = DomainId::new(7);
const OTHER: DomainId = DomainId::new(8);
/// The descriptor of an invalidation of [`DOMAIN`].
const BAD: u64 = 0x0007_00e2;
const ALL_TRANSLATIONS: u64 = 0xd2;
const FAILED: InvalidationError = InvalidationError::Failed;

/// VT-d specification, section 6.5.2.10: the unit stops at a descriptor that it rejects.
#[test]
fn the_queue_continues_after_an_error() {
    for (mode, ecap) in [(Mode::Legacy, ECAP), (Mode::Scalable, ECAP_SCALABLE)] {
        let model = Model::new(CAP, ecap);
        let frames = model::frames(&model);
        let mut unit = start(&model, &frames, mode).unwrap();
        model.take();
        model.bad.set(Some(BAD));
        let rejected = unit.submit(Invalidation::Domain(DOMAIN)).unwrap();
        let behind = unit.submit(Invalidation::Domain(OTHER)).unwrap();
        assert_eq!(unit.poll(behind), Err(FAILED));
        assert_eq!(model.take_commands(), [] as [[u64; 2]; 0]);
        unit.recover().unwrap();
        assert_eq!(unit.poll(rejected), Ok(true));
        assert_eq!(unit.poll(behind), Ok(true));
        let commands = model.take_commands();
        assert_eq!(commands.first(), Some(&[0x45, 0]), "instead of the bad one");
        assert_eq!(commands.last(), Some(&[ALL_TRANSLATIONS, 0]), "all caches");
        assert_eq!(model.fsts.get(), 0);
        unit.disable().unwrap();
    }
}

/// The rejected descriptor was replaced, so that the unit passes the wait behind it. Then it
/// rejects the invalidation of all caches too.
#[test]
fn a_ticket_does_not_complete_by_a_recovery_that_fails() {
    let model = Model::new(CAP, ECAP);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Legacy).unwrap();
    model.bad.set(Some(BAD));
    let lost = unit.submit(Invalidation::Domain(DOMAIN)).unwrap();
    assert_eq!(unit.poll(lost), Err(FAILED));
    model.bad.set(Some(ALL_TRANSLATIONS));
    assert_eq!(unit.recover(), Err(UnitError::Invalidation(FAILED)));
    for _ in 0..3 {
        assert_eq!(unit.poll(lost), Err(FAILED));
    }
    assert_eq!(unit.submit(Invalidation::Domain(DOMAIN)), Err(FAILED));
    model.bad.set(None);
    unit.recover().unwrap();
    assert_eq!(unit.poll(lost), Ok(true));
}

fn with_registers<'f>(
    model: &std::rc::Rc<Model>,
    frames: &'f model::ModelFrames,
) -> model::ModelUnit<'f> {
    let options = model::options(Mode::Legacy, Interface::Registers);
    Unit::new(model.clone(), model.memory.clone(), frames, &options).unwrap()
}

/// The actual granularity is 0: the unit invalidated nothing.
#[test]
fn a_refused_register_command_stays_incomplete() {
    let model = Model::new(CAP, ECAP);
    let frames = model::frames(&model);
    let mut unit = with_registers(&model, &frames);
    let earlier = unit.submit(Invalidation::Global).unwrap();
    let refused = unit.submit(Invalidation::Domain(DOMAIN)).unwrap();
    model.iotlb_command.set(0);
    for _ in 0..3 {
        assert_eq!(unit.poll(refused), Err(FAILED));
        assert_eq!(unit.submit(Invalidation::Domain(DOMAIN)), Err(FAILED));
    }
    unit.recover().unwrap();
    assert_eq!(unit.poll(earlier), Ok(true));
    assert_eq!(unit.poll(refused), Ok(true));
    model.take();
    let next = unit.submit(Invalidation::Domain(DOMAIN)).unwrap();
    let command = Event::Write(IOTLB, 0xa003_0007_0000_0000);
    assert_eq!((unit.poll(next), model.take()), (Ok(true), vec![command]));
}

/// A recovery waits as long as any other operation, also after a time-out.
#[test]
fn a_recovery_of_registers_waits_for_the_command_under_way() {
    let model = Model::new(CAP, ECAP);
    let frames = model::frames(&model);
    let mut unit = with_registers(&model, &frames);
    let ticket = unit.submit(Invalidation::Global).unwrap();
    model.iotlb_command.set(1 << 63);
    let limit = (0..200).position(|_| unit.poll(ticket) == Err(InvalidationError::TimedOut));
    assert_eq!(limit, Some(99));
    model.iotlb_busy_reads.set(50);
    unit.recover().unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
}

/// VT-d specification, section "Register-based Invalidation Interface": software must not use it
/// while the queue is enabled, for example by firmware.
#[test]
fn registers_are_used_after_the_queue_is_disabled() {
    let model = Model::new(CAP, ECAP);
    model.gsts.set(1 << 26);
    let frames = model::frames(&model);
    let unit = with_registers(&model, &frames);
    assert_eq!(model.take().first(), Some(&Event::Write(GCMD, 0)));
    unit.disable().unwrap();
}
