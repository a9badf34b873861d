//! Asynchronous events (base specification, section 5.2): doorbells that the host must not write.

use ringfence_nvme_device::{NvmeStatus, Step, register};

use super::rig::{Command, ENTRIES, Rig, code, delete};

const BUFFER: u64 = 0x10000;

fn request(id: u16) -> Command {
    Command {
        id,
        ..Command::new(0x0c)
    }
}

/// Reads the error log. Returns the number of errors and the queue of the last one.
fn errors(rig: &mut Rig, retain: bool) -> (u64, u16) {
    let command = Command {
        prps: [BUFFER, 0],
        words: [15 << 16 | u32::from(retain) << 15 | 1, 0, 0, 0, 0, 0],
        ..Command::new(0x02)
    };
    assert_eq!(rig.admin(command).0, 0);
    let raw = rig.host.load(BUFFER, 10);
    let count = u64::from_le_bytes(raw[..8].try_into().unwrap());
    (count, u16::from_le_bytes([raw[8], raw[9]]))
}

#[test]
fn wrong_doorbells_are_events() {
    let doorbell = |index: u64| register::DOORBELLS + index * 4;
    for (at, value, information, queue) in [
        (doorbell(4), 0, 0, 2),
        (doorbell(2 * 16), 0, 0, 16),
        (doorbell(1000), 0, 0, 500),
        (doorbell(2), ENTRIES, 1, 1),
        (doorbell(3), ENTRIES, 1, 1),
        (doorbell(0), 0xffff, 1, 0),
    ] {
        let mut rig = Rig::ready();
        rig.submit(|rig| &mut rig.admin, request(7));
        rig.run();
        assert!(rig.completion(|rig| &mut rig.admin).is_none());
        rig.write(at, 4, value.into());
        assert_eq!(rig.run(), [Step::Event], "{at:#x}");
        let done = rig.completion(|rig| &mut rig.admin).unwrap();
        assert_eq!((done.id, done.status), (7, 0));
        assert_eq!(done.result, 1 << 16 | information << 8, "{at:#x}");
        assert_eq!(errors(&mut rig, false), (1, queue));
    }
}

#[test]
fn events_are_masked_until_the_log_is_read() {
    let mut rig = Rig::ready();
    for id in 0..3 {
        rig.submit(|rig| &mut rig.admin, request(id));
    }
    rig.run();
    let wrong = |rig: &mut Rig| {
        rig.write(register::DOORBELLS + 8, 4, 0xff);
        let steps = rig.run();
        assert_eq!(steps.len(), usize::from(steps.contains(&Step::Event)));
        rig.completion(|rig| &mut rig.admin).map(|done| done.id)
    };
    assert_eq!(wrong(&mut rig), Some(0));
    assert_eq!(wrong(&mut rig), None);
    assert_eq!(errors(&mut rig, true), (2, 1));
    assert_eq!(wrong(&mut rig), None);
    assert_eq!(errors(&mut rig, false), (3, 1));
    assert_eq!(wrong(&mut rig), Some(1));
}

#[test]
fn an_event_waits_for_a_request() {
    let mut rig = Rig::ready();
    rig.write(register::DOORBELLS + 8, 4, 0xff);
    assert_eq!(rig.step(), Step::Idle);
    rig.submit(|rig| &mut rig.admin, request(7));
    assert_eq!(rig.run().last(), Some(&Step::Event));
}

#[test]
fn requests_have_a_limit_and_can_be_aborted() {
    let mut rig = Rig::ready();
    for id in 0..4 {
        rig.submit(|rig| &mut rig.admin, request(id));
    }
    rig.run();
    let fifth = rig.admin(request(4)).0;
    assert_eq!(fifth, code(NvmeStatus::EventLimitExceeded));
    // The request is completed after the command that aborts it.
    assert_eq!(rig.admin(delete(0x08, 2 << 16)), (0, 0));
    let done = rig.completion(|rig| &mut rig.admin).unwrap();
    assert_eq!(
        (done.id, done.status),
        (2, code(NvmeStatus::AbortRequested))
    );
    assert_eq!(rig.admin(delete(0x08, 2 << 16)), (0, 1));
    // A request of another queue is not this one.
    assert_eq!(rig.admin(delete(0x08, 3 << 16 | 1)), (0, 1));
}
