//! The command buffer: bursts, wrap, back-pressure, errors and time-outs.

use ringfence_amd_vi::UnitError;
use ringfence_types::{Invalidation, InvalidationError, Invalidator, PhysAddr, PhysMemory, Ticket};
use std::sync::atomic::Ordering;

use crate::model::{COMMAND_BUFFER_BASE, COMMAND_RUN, COMMAND_TAIL, Processor, STATUS};
use crate::rig::{
    DEVICE, DOMAIN, FEATURE, IOVA, PA, POLL_LIMIT, Rig, TestUnit, host, invalidate, pages,
};

/// A unit that executes commands on request.
fn manual(rig: &Rig) -> TestUnit<'_> {
    let unit = rig.unit();
    rig.model
        .change(|state| state.processor = Processor::Manual);
    unit
}

#[test]
fn a_burst_has_one_doorbell_and_one_completion() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    // Ranges that need two commands each.
    let batch: Vec<_> = (0..64).map(|n| pages(DOMAIN, n << 20, 3)).collect();
    rig.executed();
    let (doorbells, accesses) = {
        let state = rig.model.state();
        (state.doorbells, state.accesses)
    };
    let ticket = unit.submit_all(&batch).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    assert_eq!(rig.model.state().doorbells, doorbells + 1);
    // The doorbell is the only access to a register.
    assert_eq!(rig.model.state().accesses, accesses + 1);
    let executed = rig.executed();
    assert_eq!(executed.len(), 2 * 64 + 1);
    assert_eq!(
        executed
            .iter()
            .filter(|[first, _]| first >> 60 == 1)
            .count(),
        1
    );
    // An empty burst submits nothing.
    assert_eq!(unit.submit_all(&[]), Ok(ticket));
    assert_eq!(rig.model.state().doorbells, doorbells + 1);
}

#[test]
fn tickets_complete_in_order() {
    let rig = Rig::new(FEATURE);
    let mut unit = manual(&rig);
    let first = unit.submit(pages(DOMAIN, IOVA, 1)).unwrap();
    let second = unit.submit(pages(DOMAIN, IOVA, 1)).unwrap();
    assert!(first < second);
    // The first command, then its completion.
    for done in [false, true] {
        rig.model.execute(1);
        assert_eq!(unit.poll(first), Ok(done));
        assert_eq!(unit.poll(second), Ok(false));
    }
    rig.model.execute(2);
    assert_eq!(unit.poll(second), Ok(true));
    assert_eq!(unit.poll(first), Ok(true));
}

#[test]
fn a_full_buffer_changes_nothing() {
    let rig = Rig::new(FEATURE);
    let mut unit = manual(&rig);
    let mut last = None;
    let mut submitted = 0;
    let full = loop {
        match unit.submit(pages(DOMAIN, IOVA, 1)) {
            Ok(ticket) => (last, submitted) = (Some(ticket), submitted + 1),
            Err(error) => break error,
        }
    };
    // Two commands each, and one of 256 slots stays free.
    assert_eq!((full, submitted), (InvalidationError::QueueFull, 127));
    let tail = rig.model.register(COMMAND_TAIL);
    let three = pages(DOMAIN, IOVA, 3);
    assert_eq!(unit.submit(three), Err(InvalidationError::QueueFull));
    assert_eq!(rig.model.register(COMMAND_TAIL), tail);
    // One completion makes room for two commands, with the slot that was left.
    rig.model.execute(2);
    let next = unit.submit(three).unwrap();
    let one = pages(DOMAIN, IOVA, 1);
    assert_eq!(unit.submit(one), Err(InvalidationError::QueueFull));
    rig.model.execute(usize::MAX);
    assert_eq!(unit.poll(last.unwrap()), Ok(true));
    assert_eq!(unit.poll(next), Ok(true));
}

#[test]
fn the_buffer_wraps() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    let table = rig.table(DOMAIN, 3);
    unit.attach(DEVICE, DOMAIN, host(&table)).unwrap();
    rig.executed();
    for number in 0..1000 {
        let iova = IOVA + number % 7 * 0x1000;
        rig.map(&table, iova, PA, 3);
        assert!(rig.access(DEVICE, iova).is_some());
        rig.unmap(&table, iova, 3);
        invalidate(&mut unit, pages(DOMAIN, iova, 3));
        assert_eq!(rig.access(DEVICE, iova), None);
    }
    assert!(rig.executed().len() > 10 * 256);
}

#[test]
fn the_largest_burst_fills_the_buffer() {
    let rig = Rig::new(FEATURE);
    let mut unit = manual(&rig);
    let batch = vec![pages(DOMAIN, IOVA, 1); 255];
    // No completion would make room for this one.
    assert_eq!(unit.submit_all(&batch), Err(InvalidationError::Unsupported));
    let ticket = unit.submit_all(&batch[..254]).unwrap();
    let one = unit.submit(batch[0]);
    assert_eq!(one, Err(InvalidationError::QueueFull));
    rig.model.execute(usize::MAX);
    assert_eq!(unit.poll(ticket), Ok(true));
}

#[test]
fn a_unit_that_never_answers_times_out() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    rig.model.change(|state| state.processor = Processor::Hung);
    let ticket = unit.submit(Invalidation::Global).unwrap();
    for _ in 1..POLL_LIMIT {
        assert_eq!(unit.poll(ticket), Ok(false));
    }
    assert_eq!(unit.poll(ticket), Err(InvalidationError::TimedOut));
    // A late answer counts.
    rig.model.execute(usize::MAX);
    assert_eq!(unit.poll(ticket), Ok(true));
    let next = unit.submit(Invalidation::Global).unwrap();
    assert_eq!(unit.poll(next), Ok(false));
}

/// A completion of another ticket is progress.
#[test]
fn polls_count_from_the_last_completion() {
    let rig = Rig::new(FEATURE);
    let mut unit = manual(&rig);
    let tickets: Vec<_> = (0..4)
        .map(|_| unit.submit(pages(DOMAIN, IOVA, 1)).unwrap())
        .collect();
    for _ in 0..3 {
        for _ in 1..POLL_LIMIT {
            assert_eq!(unit.poll(tickets[3]), Ok(false));
        }
        rig.model.execute(2);
    }
    assert_eq!(unit.poll(tickets[3]), Ok(false));
}

/// Overwrites the next command of the buffer with a reserved opcode.
fn spoil(rig: &Rig) {
    let base = rig.model.register(COMMAND_BUFFER_BASE) & 0x000f_ffff_ffff_f000;
    let head = rig.model.register(crate::model::COMMAND_HEAD);
    rig.model.store(base + head, 0xf << 60);
}

#[test]
fn an_illegal_command_fails_all_tickets_until_recovery() {
    let rig = Rig::new(FEATURE);
    let mut unit = manual(&rig);
    let table = rig.table(DOMAIN, 3);
    rig.model
        .change(|state| state.processor = Processor::Prompt);
    unit.attach(DEVICE, DOMAIN, host(&table)).unwrap();
    rig.map(&table, IOVA, PA, 1);
    assert!(rig.access(DEVICE, IOVA).is_some());
    rig.unmap(&table, IOVA, 1);
    rig.model
        .change(|state| state.processor = Processor::Manual);
    let ticket = unit.submit(pages(DOMAIN, IOVA, 1)).unwrap();
    spoil(&rig);
    rig.model.execute(usize::MAX);
    let failed = Err(InvalidationError::Failed);
    assert_eq!(unit.wait(ticket), failed);
    assert_eq!(unit.poll(Ticket::new(0)).map(drop), failed);
    assert_eq!(unit.submit(Invalidation::Global).map(drop), failed);
    let error = Err(UnitError::Invalidation(InvalidationError::Failed));
    assert_eq!(unit.detach(DEVICE), error);
    assert_eq!(rig.access(DEVICE, IOVA), Some(PA), "cached");
    // Recovery invalidates what the lost command named.
    rig.model
        .change(|state| state.processor = Processor::Prompt);
    unit.recover().unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), None);
    assert_eq!(unit.poll(ticket), Ok(true));
    invalidate(&mut unit, Invalidation::Global);
}

#[test]
fn a_recovery_that_fails_can_be_repeated() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    let failed = Err(InvalidationError::Failed);
    let ticket = unit.submit(Invalidation::Global).unwrap();
    // The command buffer does not stop, or does not run again.
    rig.model.change(|state| state.stuck = COMMAND_RUN);
    assert!(matches!(unit.recover(), Err(UnitError::TimedOut { .. })));
    assert_eq!(unit.poll(ticket).map(drop), failed);
    rig.model.change(|state| state.stuck = 0);
    // It runs, and never answers: lost tickets must not count as completed.
    rig.model.change(|state| state.processor = Processor::Hung);
    let timed_out = UnitError::Invalidation(InvalidationError::TimedOut);
    assert_eq!(unit.recover(), Err(timed_out));
    assert_eq!(unit.poll(ticket).map(drop), failed);
    rig.model
        .change(|state| state.processor = Processor::Prompt);
    unit.recover().unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
}

/// A stop of the buffer is noticed before the limit of polls.
#[test]
fn polls_notice_a_stopped_buffer() {
    let rig = Rig::new(FEATURE);
    let mut unit = manual(&rig);
    let ticket = unit.submit(Invalidation::Global).unwrap();
    let status = rig.model.register(STATUS);
    rig.model.set(STATUS, status & !COMMAND_RUN);
    let polls = (1..POLL_LIMIT).take_while(|_| unit.poll(ticket) == Ok(false));
    assert!(polls.count() < 256);
}

/// The word of completed commands holds more than was submitted: it is not the unit that wrote it.
#[test]
fn a_forged_completion_is_an_error() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    invalidate(&mut unit, Invalidation::Global);
    let executed = rig.executed();
    let [first, number] = executed.last().copied().unwrap();
    let word = rig
        .memory
        .word(PhysAddr::new(first & 0x000f_ffff_ffff_fff8));
    let word = word.unwrap();
    assert_eq!(word.load(Ordering::Relaxed), number);
    rig.model.change(|state| state.processor = Processor::Hung);
    let ticket = unit.submit(Invalidation::Global).unwrap();
    word.store(ticket.get() + 1, Ordering::Relaxed);
    assert_eq!(unit.poll(ticket), Err(InvalidationError::Failed));
    rig.model
        .change(|state| state.processor = Processor::Prompt);
    // A submission notices it too, and none is possible before the recovery.
    unit.recover().unwrap();
    let (last, forged) = (word.load(Ordering::Relaxed), u64::MAX);
    word.store(forged, Ordering::Relaxed);
    let failed = Err(InvalidationError::Failed);
    assert_eq!(unit.submit(Invalidation::Global), failed);
    word.store(last, Ordering::Relaxed);
    assert_eq!(unit.submit(Invalidation::Global), failed);
    // A number below the last one is no progress.
    rig.model
        .change(|state| state.processor = Processor::Prompt);
    unit.recover().unwrap();
    rig.model.change(|state| state.processor = Processor::Hung);
    let ticket = unit.submit(Invalidation::Global).unwrap();
    word.store(0, Ordering::Relaxed);
    assert_eq!(unit.poll(ticket), Ok(false));
}
