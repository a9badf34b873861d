//! The command queue: bursts, completion, a full queue, errors and time-outs.

use ringfence_smmu_v3::{CommandError, UnitError};
use ringfence_types::{DomainId, Invalidation, InvalidationError, Invalidator, RingId, Ticket};

use crate::model::{CMDQ_CONS, CMDQ_PROD, CR0, GERROR, GERRORN, Processor, SMMUEN};
use crate::rig::{DEVICE, DOMAIN, IOVA, OTHER, PA, POLL_LIMIT, Rig, invalidate, one, pages};

const SFM: u64 = 1 << 8;

/// A burst of 64 invalidations writes one index, and two commands at most for each.
#[test]
fn a_burst_has_one_doorbell_and_one_sync() {
    for (rig, per_page) in [(Rig::new(), 1), (Rig::without_ranges(), 1)] {
        let mut unit = rig.unit();
        let table = rig.stage1(DOMAIN);
        unit.attach(DEVICE, DOMAIN, &one(&table)).unwrap();
        rig.map(&table, IOVA, PA, 128);
        for page in 0..128 {
            assert_eq!(
                rig.access(DEVICE, IOVA + 0x1000 * page),
                Some(PA + 0x1000 * page)
            );
        }
        rig.unmap(&table, IOVA, 128);
        rig.commands();
        let (before, accesses) = (rig.model.state().doorbells, rig.model.state().accesses);
        let burst: Vec<_> = (0..64)
            .map(|page| pages(DOMAIN, IOVA + 0x2000 * page, 1))
            .collect();
        let ticket = unit.submit_all(&burst).unwrap();
        assert_eq!(rig.model.state().doorbells, before + 1);
        // The free entries were known: no register was read.
        assert_eq!(rig.model.state().accesses, accesses + 1);
        unit.wait(ticket).unwrap();
        let commands = rig.commands();
        assert_eq!(commands.len(), 64 * per_page + 1);
        let syncs = commands.iter().filter(|command| command[0] == 0x46).count();
        assert_eq!(syncs, 1);
        for page in 0..128 {
            let is_stale = rig.access(DEVICE, IOVA + 0x1000 * page).is_some();
            assert_eq!(is_stale, page % 2 == 1, "page {page}");
        }
    }
}

/// A ticket is complete when the unit has consumed its `CMD_SYNC`, and not when it has consumed
/// the commands before.
#[test]
fn a_ticket_completes_with_its_sync() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    rig.model.change().processor = Processor::Manual;
    let first = unit.submit(Invalidation::Global).unwrap();
    let second = unit.submit(Invalidation::Domain(DOMAIN)).unwrap();
    let states = [
        (false, false),
        (false, false),
        (true, false),
        (true, false),
        (true, false),
    ];
    for (step, (is_first, is_second)) in states.into_iter().enumerate() {
        assert_eq!(unit.poll(second), Ok(is_second), "after {step} commands");
        assert_eq!(unit.poll(first), Ok(is_first), "after {step} commands");
        rig.model.execute(1);
    }
    assert_eq!(unit.poll(second), Ok(true));
    assert_eq!(unit.poll(first), Ok(true));
}

/// Indices wrap with their wrap bit.
#[test]
fn indices_wrap() {
    let mut rig = Rig::new();
    rig.options.command_entries = 16;
    let mut unit = rig.unit();
    let table = rig.stage1(DOMAIN);
    unit.attach(DEVICE, DOMAIN, &one(&table)).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    let mut tickets = Vec::new();
    for round in 0..100 {
        rig.map(&table, IOVA, PA, 1);
        assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
        rig.unmap(&table, IOVA, 1);
        let ticket = unit.submit(pages(DOMAIN, IOVA, 1)).unwrap();
        unit.wait(ticket).unwrap();
        assert_eq!(rig.access(DEVICE, IOVA), None, "round {round}");
        seen.insert(rig.model.register(CMDQ_PROD));
        tickets.push(ticket);
    }
    assert!(seen.iter().all(|index| *index < 32), "{seen:?}");
    assert!(seen.iter().any(|index| *index >= 16), "{seen:?}");
    assert!(seen.contains(&0) || seen.contains(&1));
    for ticket in tickets {
        assert_eq!(unit.poll(ticket), Ok(true));
    }
}

#[test]
fn a_full_queue_changes_nothing() {
    let mut rig = Rig::new();
    rig.options.command_entries = 16;
    let mut unit = rig.unit();
    rig.model.change().processor = Processor::Manual;
    let tickets: Vec<_> = (0..8)
        .map(|_| unit.submit(Invalidation::Global).unwrap())
        .collect();
    let (index, doorbells) = (rig.model.register(CMDQ_PROD), rig.model.state().doorbells);
    for _ in 0..3 {
        let full = unit.submit(Invalidation::Domain(DomainId::new(9)));
        assert_eq!(full, Err(InvalidationError::QueueFull));
    }
    assert_eq!(rig.model.register(CMDQ_PROD), index);
    assert_eq!(rig.model.state().doorbells, doorbells);
    // Three free entries are one too few.
    rig.model.execute(2);
    let full = unit.submit(Invalidation::Domain(DomainId::new(9)));
    assert_eq!(full, Err(InvalidationError::QueueFull));
    rig.model.execute(1);
    let last = unit.submit(Invalidation::Domain(DomainId::new(9))).unwrap();
    rig.model.execute(usize::MAX);
    for ticket in tickets.into_iter().chain([last]) {
        assert_eq!(unit.poll(ticket), Ok(true));
    }
    let commands = rig.commands();
    assert_eq!(
        commands.iter().filter(|command| command[0] == 0x30).count(),
        8
    );
    let tail = [[0x0009_0000_0000_0011, 0], [0x0009_0000_0028, 0], [0x46, 0]];
    assert_eq!(commands[commands.len() - 3..], tail);
}

/// A burst that no queue holds is the invalidation of everything.
#[test]
fn a_burst_beyond_the_queue() {
    let mut rig = Rig::new();
    rig.options.command_entries = 16;
    let mut unit = rig.unit();
    let burst: Vec<_> = (0..16)
        .map(|page| pages(DOMAIN, IOVA + 0x1000 * page, 1))
        .collect();
    let ticket = unit.submit_all(&burst[..7]).unwrap();
    unit.wait(ticket).unwrap();
    assert_eq!(rig.commands().len(), 15);
    let ticket = unit.submit_all(&burst).unwrap();
    unit.wait(ticket).unwrap();
    let (all, sync) = ([0x30, 0], [0x46, 0]);
    assert_eq!(rig.commands(), [all, sync, [0x04, 31], sync, all, sync]);
}

/// Attach and detach wait for entries of a full queue.
#[test]
fn an_attach_waits_for_a_full_queue() {
    let mut rig = Rig::new();
    rig.options.command_entries = 16;
    let mut unit = rig.unit();
    rig.model.change().processor = Processor::Manual;
    for _ in 0..8 {
        unit.submit(Invalidation::Global).unwrap();
    }
    rig.model.change().processor = Processor::Slow;
    unit.pass_through(DEVICE).unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), Some(IOVA));
}

#[test]
fn a_unit_that_does_not_answer_times_out() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    rig.model.change().processor = Processor::Manual;
    let ticket = unit.submit(Invalidation::Global).unwrap();
    for _ in 0..POLL_LIMIT {
        assert_eq!(unit.poll(ticket), Ok(false));
    }
    assert_eq!(unit.poll(ticket), Err(InvalidationError::TimedOut));
    assert_eq!(unit.poll(ticket), Err(InvalidationError::TimedOut));
    // A late answer.
    rig.model.execute(usize::MAX);
    assert_eq!(unit.poll(ticket), Ok(true));
    // Progress begins a new count.
    let ticket = unit.submit_all(&[Invalidation::Global; 4]).unwrap();
    for _ in 0..5 {
        for _ in 1..POLL_LIMIT {
            assert_eq!(unit.poll(ticket), Ok(false));
        }
        rig.model.execute(1);
    }
    assert_eq!(unit.poll(ticket), Ok(true));
}

/// Section 7.1: the unit stops at an illegal command. The error is acknowledged while the queue is
/// off, and everything is invalidated before a ticket completes.
#[test]
fn errors_stop_the_queue_until_recovery() {
    for error in [1, 2, 3, 0x55] {
        let rig = Rig::new();
        let mut unit = rig.unit();
        let table = rig.stage1(DOMAIN);
        unit.attach(DEVICE, DOMAIN, &one(&table)).unwrap();
        rig.map(&table, IOVA, PA, 1);
        assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
        assert_eq!(unit.command_error(), None);
        rig.unmap(&table, IOVA, 1);
        rig.model.change().processor = Processor::Manual;
        let ticket = unit.submit(pages(DOMAIN, IOVA, 1)).unwrap();
        let index = rig.model.register(CMDQ_CONS) & 0xff_ffff;
        rig.model.set(CMDQ_CONS, index | error << 24);
        rig.model.raise(1);
        rig.model.change().processor = Processor::Prompt;
        assert_eq!(unit.poll(ticket), Err(InvalidationError::Failed));
        assert_eq!(unit.poll(ticket), Err(InvalidationError::Failed));
        assert_eq!(
            unit.submit(Invalidation::Global),
            Err(InvalidationError::Failed)
        );
        let expected = match error {
            1 => CommandError::Illegal,
            2 => CommandError::Abort,
            3 => CommandError::AtcInvalidation,
            other => CommandError::Unknown(other as u8),
        };
        assert_eq!(unit.command_error(), Some(expected));
        assert_eq!(rig.access(DEVICE, IOVA), Some(PA));

        rig.model.change().processor = Processor::Manual;
        let recovery = unit.recover().unwrap();
        assert_eq!(unit.command_error(), None);
        assert_eq!(rig.model.register(GERROR), rig.model.register(GERRORN));
        assert_ne!(rig.model.register(CR0) & SMMUEN, 0);
        // The lost commands are not complete before all caches are empty.
        assert_eq!(unit.poll(ticket), Ok(false));
        rig.model.execute(5);
        assert_eq!(unit.poll(ticket), Ok(false));
        rig.model.execute(1);
        assert_eq!(unit.poll(ticket), Ok(true));
        assert_eq!(unit.poll(recovery), Ok(true));
        assert_eq!(rig.access(DEVICE, IOVA), None);
        rig.model.change().processor = Processor::Prompt;
        invalidate(&mut unit, Invalidation::Global);
    }
}

/// The unit itself rejects a command: here all, after its features changed.
#[test]
fn an_illegal_command_is_reported() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let table = rig.stage1(DOMAIN);
    unit.attach(DEVICE, DOMAIN, &one(&table)).unwrap();
    let idr0 = rig.model.register(crate::model::IDR0);
    rig.model.set(crate::model::IDR0, idr0 & !2);
    let ticket = unit.submit(pages(DOMAIN, IOVA, 1)).unwrap();
    assert_eq!(unit.wait(ticket), Err(InvalidationError::Failed));
    assert_eq!(unit.command_error(), Some(CommandError::Illegal));
    let failed = Err(UnitError::Invalidation(InvalidationError::Failed));
    assert_eq!(unit.detach(DEVICE), failed);
    assert_eq!(unit.pass_through(OTHER), failed);
    assert_eq!(rig.access(OTHER, IOVA), None);
    rig.model.set(crate::model::IDR0, idr0);
    let ticket = unit.recover().unwrap();
    unit.wait(ticket).unwrap();
    unit.detach(DEVICE).unwrap();
    unit.detach(OTHER).unwrap();
}

/// Section 12.3: a unit in service failure mode consumes nothing.
#[test]
fn service_failure_mode_fails_tickets() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    rig.model.change().processor = Processor::Manual;
    let ticket = unit.submit(Invalidation::Global).unwrap();
    rig.model.raise(SFM);
    assert_eq!(unit.wait(ticket), Err(InvalidationError::Failed));
}

/// An error that the status shows only later is found while the unit does not progress.
#[test]
fn an_error_is_found_before_the_time_out() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    rig.model.change().processor = Processor::Manual;
    let ticket = unit.submit(Invalidation::Global).unwrap();
    assert_eq!(unit.poll(ticket), Ok(false));
    rig.model.raise(1);
    let mut polls = (0..POLL_LIMIT / 2).map(|_| unit.poll(ticket));
    let error = polls.find(|poll| *poll != Ok(false));
    assert_eq!(error, Some(Err(InvalidationError::Failed)));
}

#[test]
fn requests_and_tickets_that_no_unit_knows() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    assert_eq!(
        unit.poll(Ticket::new(u64::MAX)),
        Err(InvalidationError::Failed)
    );
    let before = rig.model.register(CMDQ_PROD);
    let ring = Invalidation::Ring {
        domain: DOMAIN,
        device: DEVICE,
        ring: RingId::new(1),
    };
    let burst = [Invalidation::Global, ring];
    assert_eq!(unit.submit_all(&burst), Err(InvalidationError::Unsupported));
    assert_eq!(rig.model.register(CMDQ_PROD), before);
    // No requests: the ticket of what was submitted before.
    let ticket = unit.submit_all(&[]).unwrap();
    unit.wait(ticket).unwrap();
    assert_eq!(rig.commands(), [[0x46, 0]]);
}

/// An index outside the commands that the unit may consume is an error.
#[test]
fn an_index_beyond_the_commands_fails() {
    for index in [3, 0x1ff, 0x100] {
        let rig = Rig::new();
        let mut unit = rig.unit();
        rig.model.change().processor = Processor::Manual;
        let ticket = unit.submit(Invalidation::Global).unwrap();
        let consumed = rig.model.register(CMDQ_CONS);
        rig.model.set(CMDQ_CONS, (consumed + index) & 0x1ff);
        assert_eq!(
            unit.poll(ticket),
            Err(InvalidationError::Failed),
            "{index:#x}"
        );
        assert_eq!(
            unit.poll(ticket),
            Err(InvalidationError::Failed),
            "{index:#x}"
        );
    }
}
