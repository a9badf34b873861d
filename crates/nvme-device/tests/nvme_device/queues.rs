//! Creation, deletion and use of queues (base specification, sections 4.1 and 5.3 to 5.6).

use ringfence_nvme_device::{FatalError, NvmeStatus, Step, register};
use ringfence_types::Iova;

use super::rig::{Command, ENTRIES, IO_CQ, IO_SQ, Rig, code, create_cq, create_sq, delete};

/// Changes dword `10 + word` of a command.
fn with(mut command: Command, word: usize, value: u32) -> Command {
    command.words[word] = value;
    command
}

#[test]
fn queues_are_checked() {
    use NvmeStatus as S;
    let misaligned = |mut command: Command| {
        command.prps[0] += 8;
        command
    };
    let size = |entries: u32| entries << 16 | 2;
    let cases = [
        (create_cq(0, 0x8000), S::InvalidQueueIdentifier),
        (create_cq(1, 0x8000), S::InvalidQueueIdentifier),
        (create_cq(17, 0x8000), S::InvalidQueueIdentifier),
        (with(create_cq(2, 0x8000), 0, size(0)), S::InvalidQueueSize),
        (
            with(create_cq(2, 0x8000), 0, size(256)),
            S::InvalidQueueSize,
        ),
        (
            with(create_cq(2, 0x8000), 0, size(0xffff)),
            S::InvalidQueueSize,
        ),
        (
            with(create_cq(2, 0x8000), 1, 2 << 16 | 0b10),
            S::InvalidField,
        ),
        (
            with(create_cq(2, 0x8000), 1, 17 << 16 | 0b11),
            S::InvalidInterruptVector,
        ),
        (misaligned(create_cq(2, 0x8000)), S::PrpOffsetInvalid),
        (create_sq(0, 0x8000), S::InvalidQueueIdentifier),
        (create_sq(1, 0x8000), S::InvalidQueueIdentifier),
        (create_sq(17, 0x8000), S::InvalidQueueIdentifier),
        (with(create_sq(2, 0x8000), 1, 1), S::CompletionQueueInvalid),
        (create_sq(2, 0x8000), S::CompletionQueueInvalid),
        (
            with(create_sq(2, 0x8000), 1, 0xffff << 16 | 1),
            S::CompletionQueueInvalid,
        ),
        (
            misaligned(with(create_sq(2, 0x8000), 1, 1 << 16 | 1)),
            S::PrpOffsetInvalid,
        ),
        (with(create_sq(2, 0x8000), 1, 1 << 16), S::InvalidField),
        (delete(0x04, 1), S::InvalidQueueDeletion),
        (delete(0x04, 0), S::InvalidQueueIdentifier),
        (delete(0x04, 2), S::InvalidQueueIdentifier),
        (delete(0x00, 0), S::InvalidQueueIdentifier),
        (delete(0x00, 0xffff), S::InvalidQueueIdentifier),
        (delete(0x00, 1), S::Success),
        (delete(0x04, 1), S::Success),
        (create_cq(1, 0x8000), S::Success),
    ];
    let mut rig = Rig::ready();
    for (command, status) in cases {
        assert_eq!(rig.admin(command).0, code(status), "{command:x?}");
    }
}

#[test]
fn two_submission_queues_share_a_completion_queue_and_take_turns() {
    let mut rig = Rig::ready();
    assert_eq!(rig.admin(with(create_sq(2, 0x8000), 1, 1 << 16 | 1)).0, 0);
    for number in 1..=2u64 {
        let base = if number == 1 { IO_SQ } else { 0x8000 };
        for id in 0..3u16 {
            let flush = Command {
                id,
                namespace: 1,
                ..Command::new(0)
            };
            rig.host.store(base + u64::from(id) * 64, &flush.encode());
        }
        rig.write(register::DOORBELLS + number * 8, 4, 3);
    }
    assert_eq!(rig.run().len(), 6);
    let done = std::iter::from_fn(|| rig.completion(|rig| &mut rig.io));
    let order: Vec<(u16, u16)> = done.map(|done| (done.queue, done.id)).collect();
    assert_eq!(order, [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)]);
}

#[test]
fn a_full_completion_queue_stops_its_submission_queues() {
    let mut rig = Rig::ready();
    assert_eq!(rig.admin(create_cq(2, 0x9000)).0, 0);
    assert_eq!(rig.admin(create_sq(2, 0x8000)).0, 0);
    let flush = Command {
        namespace: 1,
        ..Command::new(0)
    };
    for _ in 0..ENTRIES - 1 {
        rig.submit(|rig| &mut rig.io, flush);
    }
    // Seven entries fill a queue of eight.
    assert_eq!(rig.run().len(), 7);
    rig.submit(|rig| &mut rig.io, flush);
    assert_eq!(rig.step(), Step::Idle);
    // The other queue pair continues.
    rig.host.store(0x8000, &flush.encode());
    rig.write(register::DOORBELLS + 16, 4, 1);
    assert!(matches!(rig.step(), Step::Executed(_)));
    // A consumed entry makes room. The phase changes at the end of the queue.
    assert!(rig.completion(|rig| &mut rig.io).is_some());
    assert!(matches!(rig.step(), Step::Executed(_)));
    let rest = std::iter::from_fn(|| rig.completion(|rig| &mut rig.io));
    assert_eq!(rest.count(), 7);
    for _ in 0..20 {
        assert_eq!(rig.io(flush), 0);
    }
}

#[test]
fn completions_signal_their_vector() {
    let mut rig = Rig::started();
    rig.controller.take_interrupts();
    rig.create_pair();
    assert_eq!(
        rig.controller.take_interrupts(),
        1,
        "the admin queue has vector 0"
    );
    let flush = Command {
        namespace: 1,
        ..Command::new(0)
    };
    rig.io(flush);
    assert_eq!(rig.controller.take_interrupts(), 1 << 1);
    assert_eq!(rig.controller.take_interrupts(), 0);
    // Queue 2 has no interrupts.
    assert_eq!(rig.admin(with(create_cq(2, 0x9000), 1, 2 << 16 | 1)).0, 0);
    assert_eq!(rig.admin(create_sq(2, 0x8000)).0, 0);
    rig.controller.take_interrupts();
    rig.host.store(0x8000, &flush.encode());
    rig.write(register::DOORBELLS + 16, 4, 1);
    assert_eq!(rig.run().len(), 1);
    assert_eq!(rig.controller.take_interrupts(), 0);
}

#[test]
fn a_deleted_queue_drops_its_commands() {
    let mut rig = Rig::ready();
    rig.io(Command::transfer(2, 0, 1, [0x10000, 0]));
    // After a command of queue 1 it is the admin queue's turn.
    rig.submit(|rig| &mut rig.io, Command::transfer(2, 0, 1, [0x10000, 0]));
    rig.submit(|rig| &mut rig.admin, delete(0x00, 1));
    assert_eq!(rig.run().len(), 1);
    assert!(rig.completion(|rig| &mut rig.io).is_none());
    assert_eq!(
        rig.completion(|rig| &mut rig.admin).map(|done| done.status),
        Some(0)
    );
    // A new queue begins at its first entry.
    assert_eq!(rig.admin(create_sq(1, IO_SQ)).0, 0);
    assert_eq!(rig.step(), Step::Idle);
}

#[test]
fn inaccessible_queues_are_fatal() {
    let fetch = FatalError::Fetch {
        queue: 1,
        at: Some(Iova::new(IO_SQ)),
    };
    let complete = FatalError::Complete {
        queue: 1,
        at: Some(Iova::new(IO_CQ)),
    };
    for (page, error) in [(IO_SQ, fetch), (IO_CQ, complete)] {
        let mut rig = Rig::ready();
        rig.submit(|rig| &mut rig.io, Command::new(0));
        rig.host.blocked = Some(page);
        assert_eq!(rig.step(), Step::Failed(error));
        assert_eq!(rig.controller.read(register::CSTS, 4), 0b11);
        // Nothing is executed until the host resets the controller.
        rig.host.blocked = None;
        rig.submit(|rig| &mut rig.io, Command::new(0));
        assert_eq!(rig.step(), Step::Idle);
        rig.write(register::CC, 4, 0);
        rig.enable();
        rig.create_pair();
    }
}

#[test]
fn a_queue_beyond_the_address_space_is_fatal() {
    let mut rig = Rig::ready();
    let end = !0xfff_u64;
    assert_eq!(rig.admin(create_cq(2, end)).0, 0);
    let mut wide = with(create_sq(2, end), 0, 255 << 16 | 2);
    wide.words[1] = 2 << 16 | 1;
    assert_eq!(rig.admin(wide).0, 0);
    rig.write(register::DOORBELLS + 16, 4, 1);
    assert!(matches!(
        rig.step(),
        Step::Failed(FatalError::Fetch { queue: 2, .. })
    ));
}

/// The host polls the phase tag in the last bytes of an entry.
#[test]
fn the_phase_is_written_after_the_result() {
    let mut rig = Rig::ready();
    rig.host.writes.clear();
    let flush = Command {
        namespace: 1,
        ..Command::new(0)
    };
    assert_eq!(rig.io(flush), 0);
    assert_eq!(rig.host.writes, [(IO_CQ, 8), (IO_CQ + 8, 8)]);
}
