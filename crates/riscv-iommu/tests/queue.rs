//! The queues: doorbells, wrap, back-pressure, errors, time-outs and recovery.

mod common;

use std::cell::Cell;
use std::sync::atomic::AtomicU64;

use common::model::{CQ, FQ, PQ};
use common::{
    ATS, BASE, Behaviour, IGS_BOTH, MSI_FLAT, Machine, Model, device, options, start, table,
};
use ringfence_memory::Arena;
use ringfence_pgtable::Levels;
use ringfence_riscv_iommu::{
    Cause, FaultEvent, Interrupts, Loss, Options, PageRequestEvent, PendingInterrupts, Register,
    Translation, Unit, UnitError,
};
use ringfence_types::{
    CachedLevels, DomainId, FrameSource, Invalidation, InvalidationError, Invalidator, MemoryError,
    Pfn, PfnRange, PhysAddr, PhysMemory, RingId, TABLE_WORDS, Ticket,
};

const CAPABILITIES: u64 = BASE | MSI_FLAT;
/// Offset of `cqcsr`.
const CQCSR: u64 = 72;

fn page(domain: u16, number: u64) -> Invalidation {
    Invalidation::Pages {
        domain: DomainId::new(domain),
        range: PfnRange::new(Pfn::new(number), 1).unwrap(),
        levels: CachedLevels::Leaves,
    }
}

fn attach<S: FrameSource>(unit: &mut common::TestUnit<'_>, frames: &S) {
    let first = Translation::FirstStage(table(0x1000, Levels::Three));
    unit.attach(frames, device(9), DomainId::new(1), &first)
        .unwrap();
}

#[test]
fn a_burst_has_one_completion_and_one_doorbell() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    attach(&mut unit, &frames);
    model.take_log();
    model.doorbells();
    let requests: Vec<_> = (0..64).map(|number| page(1, number)).collect();
    let ticket = unit.submit_all(&requests).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    let log = model.take_log();
    assert_eq!(log.len(), 65);
    assert_eq!(
        log.iter().filter(|command| command[0] & 0x7f == 2).count(),
        1
    );
    assert_eq!(model.doorbells(), 1);
    assert_eq!(
        unit.submit_all(&[]).and_then(|ticket| unit.poll(ticket)),
        Ok(true)
    );
}

#[test]
fn the_queue_and_the_sequence_wrap() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let options = Options {
        command_entries: 16,
        ..options()
    };
    let mut unit = start(&machine, &model, &frames, options);
    attach(&mut unit, &frames);
    model.take_log();
    for number in 0..1000 {
        let ticket = unit.submit(page(1, number)).unwrap();
        assert_eq!(unit.poll(ticket), Ok(true));
        let log = model.take_log();
        assert_eq!(log.len(), 2);
        assert_eq!(log[0][1] >> 10, number);
    }
}

#[test]
fn a_full_queue_changes_nothing() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let options = Options {
        command_entries: 16,
        ..options()
    };
    let mut unit = start(&machine, &model, &frames, options);
    attach(&mut unit, &frames);
    model.take_log();
    model.behave(Behaviour::Stuck);
    // 15 entries hold seven pairs of a command and a completion.
    let tickets: Vec<_> = (0..7)
        .map(|number| unit.submit(page(1, number)).unwrap())
        .collect();
    let tail = model.state.borrow().tail[CQ];
    assert_eq!(unit.submit(page(1, 7)), Err(InvalidationError::QueueFull));
    assert_eq!(model.state.borrow().tail[CQ], tail);
    assert_eq!(unit.poll(tickets[0]), Ok(false));
    model.behave(Behaviour::Normal);
    model.run();
    for ticket in &tickets {
        assert_eq!(unit.poll(*ticket), Ok(true));
    }
    let ticket = unit.submit(page(1, 7)).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    let pages: Vec<_> = model
        .take_log()
        .iter()
        .step_by(2)
        .map(|command| command[1] >> 10)
        .collect();
    assert_eq!(pages, (0..8).collect::<Vec<_>>());
}

#[test]
fn a_burst_beyond_the_queue_invalidates_everything() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let options = Options {
        command_entries: 16,
        ..options()
    };
    let mut unit = start(&machine, &model, &frames, options);
    attach(&mut unit, &frames);
    model.take_log();
    let mut requests: Vec<_> = (0..15).map(|number| page(1, number)).collect();
    let ticket = unit.submit_all(&requests).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    let words = |log: Vec<[u64; 2]>| -> Vec<u64> { log.iter().map(|c| c[0] & 0x3ff).collect() };
    assert_eq!(words(model.take_log()), [1, 0x81, 2]);
    requests.push(Invalidation::Context(device(9)));
    unit.submit_all(&requests).unwrap();
    assert_eq!(words(model.take_log()), [3, 1, 0x81, 2]);
}

#[test]
fn errors_stop_the_queue_until_recovery() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    attach(&mut unit, &frames);
    let done = unit.submit(page(1, 1)).unwrap();
    for cause in ["cqmf", "cmd_ill", "off"] {
        match cause {
            "cqmf" => model.behave(Behaviour::CannotRead),
            _ => model.behave(Behaviour::Stuck),
        }
        let lost = unit.submit(page(1, 2)).unwrap();
        {
            let mut state = model.state.borrow_mut();
            match cause {
                "cmd_ill" => state.csr[CQ] |= 1 << 10,
                "off" => state.csr[CQ] = 0,
                _ => {}
            }
        }
        assert_eq!(unit.poll(lost), Err(InvalidationError::Failed), "{cause}");
        assert_eq!(unit.poll(done), Ok(true));
        assert_eq!(unit.submit(page(1, 3)), Err(InvalidationError::Failed));
        model.behave(Behaviour::Normal);
        model.take_log();
        let ticket = unit.recover().unwrap();
        assert_eq!(unit.poll(ticket), Ok(true));
        assert_eq!(unit.poll(lost), Ok(true));
        // The lost commands are covered by the invalidation of all caches.
        let log: Vec<_> = model
            .take_log()
            .iter()
            .map(|command| command[0] & 0x3ff)
            .collect();
        assert_eq!(log, [3, 1, 0x81, 2]);
        let ticket = unit.submit(page(1, 4)).unwrap();
        assert_eq!(unit.poll(ticket), Ok(true));
    }
    assert!(model.state.borrow().misuse.is_empty());
}

#[test]
fn a_unit_that_does_not_answer_times_out() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    attach(&mut unit, &frames);
    model.behave(Behaviour::Stuck);
    let ticket = unit.submit(page(1, 2)).unwrap();
    for _ in 0..options().poll_limit {
        assert_eq!(unit.poll(ticket), Ok(false));
    }
    assert_eq!(unit.poll(ticket), Err(InvalidationError::TimedOut));
    assert_eq!(unit.poll(ticket), Err(InvalidationError::TimedOut));
    // A late completion still counts.
    model.behave(Behaviour::Normal);
    model.run();
    assert_eq!(unit.poll(ticket), Ok(true));
    // Each completion of another burst is progress.
    model.behave(Behaviour::Stuck);
    let first = unit.submit(page(1, 3)).unwrap();
    for _ in 0..options().poll_limit {
        assert_eq!(unit.poll(first), Ok(false));
    }
    model.behave(Behaviour::Normal);
    model.run();
    model.behave(Behaviour::Stuck);
    let second = unit.submit(page(1, 4)).unwrap();
    assert_eq!(unit.poll(second), Ok(false));
    // The unit disappears.
    model.behave(Behaviour::Absent);
    let polls = (0..40)
        .map(|_| unit.poll(second))
        .find(|poll| *poll != Ok(false));
    assert_eq!(polls, Some(Err(InvalidationError::Failed)));
    assert_eq!(unit.next_fault(), None);
    let timeout = UnitError::TimedOut {
        register: Register::Cqcsr,
    };
    assert_eq!(unit.recover(), Err(timeout));
}

#[test]
fn a_stop_just_before_the_limit_of_polls_is_seen() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    attach(&mut unit, &frames);
    model.behave(Behaviour::Stuck);
    let ticket = unit.submit(page(1, 2)).unwrap();
    for _ in 1..options().poll_limit {
        assert_eq!(unit.poll(ticket), Ok(false));
    }
    model.behave(Behaviour::Absent);
    assert_eq!(unit.poll(ticket), Ok(false));
    assert_eq!(unit.poll(ticket), Err(InvalidationError::Failed));
}

/// Memory that a test can take away.
struct Removable<'a> {
    memory: &'a Arena,
    is_removed: Cell<bool>,
}

impl Removable<'_> {
    fn check(&self, at: PhysAddr) -> Result<(), MemoryError> {
        match self.is_removed.get() {
            true => Err(MemoryError::Outside { at, words: 1 }),
            false => Ok(()),
        }
    }
}

impl PhysMemory for Removable<'_> {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.check(at)?;
        self.memory.word(at)
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        self.check(at)?;
        self.memory.table(at)
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        self.check(at)?;
        self.memory.words(at, count)
    }

    fn write_back(&self, at: PhysAddr, bytes: u64) {
        self.memory.write_back(at, bytes);
    }

    fn drain(&self) {
        self.memory.drain();
    }
}

/// Submits `requests` to a unit that executes no command, and polls until the time-out.
fn submit_and_time_out<M: PhysMemory>(
    unit: &mut Unit<&Model<'_>, M>,
    model: &Model<'_>,
    requests: &[Invalidation],
) -> Ticket {
    model.behave(Behaviour::Stuck);
    let ticket = unit.submit_all(requests).unwrap();
    let mut polls = (0..=options().poll_limit).map(|_| unit.poll(ticket));
    let failed = polls.find(|poll| *poll != Ok(false));
    assert_eq!(failed, Some(Err(InvalidationError::TimedOut)));
    ticket
}

#[test]
fn a_failed_recovery_completes_no_lost_commands() {
    let timeout = UnitError::TimedOut {
        register: Register::Cqcsr,
    };
    let refused = UnitError::Invalidation(InvalidationError::Failed);
    for (behaviour, without_memory, error) in [
        (Behaviour::Off(CQCSR), false, timeout),
        (Behaviour::StaysOn(CQCSR), false, timeout),
        (Behaviour::Normal, true, refused),
    ] {
        let machine = Machine::new();
        let model = Model::new(&machine.memory, CAPABILITIES);
        let frames = machine.frames();
        let memory = Removable {
            memory: &machine.memory,
            is_removed: Cell::new(false),
        };
        let mut unit = Unit::new(&model, &memory, &frames, options()).unwrap();
        let lost = submit_and_time_out(&mut unit, &model, &[page(1, 1)]);
        model.take_log();
        model.behave(behaviour);
        memory.is_removed.set(without_memory);
        assert_eq!(unit.recover(), Err(error));
        // The unit is late: it now is on, and has nothing to execute.
        model.behave(Behaviour::Normal);
        memory.is_removed.set(false);
        model.state.borrow_mut().csr[CQ] |= 1 << 16;
        let later = unit.submit(page(1, 2));
        assert_eq!(later, Err(InvalidationError::Failed), "{behaviour:?}");
        assert_eq!(unit.poll(lost), Err(InvalidationError::Failed));
        assert_eq!(model.take_log(), [] as [[u64; 2]; 0]);
        let ticket = unit.recover().unwrap();
        assert_eq!(unit.poll(ticket), Ok(true));
        assert_eq!(unit.poll(lost), Ok(true));
        let log = model.take_log();
        let opcodes: Vec<_> = log.iter().map(|command| command[0] & 0x3ff).collect();
        assert_eq!(opcodes, [3, 1, 0x81, 2]);
    }
}

/// A queue that turns on executes its entries again, from the first one.
#[test]
fn an_acknowledgement_does_not_enable_the_queue() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES | IGS_BOTH);
    model.state.borrow_mut().fctl_writable = 0b111;
    let frames = machine.frames();
    let options = Options {
        interrupts: Interrupts::Wired,
        ..options()
    };
    let mut unit = start(&machine, &model, &frames, options);
    let lost = submit_and_time_out(&mut unit, &model, &[page(1, 1)]);
    model.behave(Behaviour::StaysOn(CQCSR));
    let timeout = UnitError::TimedOut {
        register: Register::Cqcsr,
    };
    assert_eq!(unit.recover(), Err(timeout));
    // The queue turns off later.
    model.behave(Behaviour::Normal);
    model.state.borrow_mut().csr[CQ] &= !(1 << 16);
    model.take_log();
    assert!(unit.acknowledge_interrupts().commands);
    assert_eq!(model.take_log(), [] as [[u64; 2]; 0]);
    assert_eq!(unit.poll(lost), Err(InvalidationError::Failed));
    let ticket = unit.recover().unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    assert_eq!(unit.poll(lost), Ok(true));
}

#[test]
fn ids_beyond_20_bits_are_refused() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    for (id, error) in [
        (0xf_ffff, None),
        (0x10_0000, Some(InvalidationError::Unsupported)),
        (0x10_0001, Some(InvalidationError::Unsupported)),
        (u32::MAX, Some(InvalidationError::Unsupported)),
    ] {
        let guest = DomainId::new(1);
        let space = unit.submit_guest_first_stage(guest, Some(id), None, CachedLevels::All);
        assert_eq!(space.err(), error, "{id:#x}");
        assert_eq!(
            unit.submit_guest_process(device(1), id).err(),
            error,
            "{id:#x}"
        );
    }
}

#[test]
fn tickets_and_completions_that_were_not_given_are_not_believed() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    attach(&mut unit, &frames);
    let next = Ticket::new(unit.submit(page(1, 1)).unwrap().get() + 1);
    assert_eq!(unit.poll(next), Err(InvalidationError::Failed));
    let log = model.take_log();
    let status = log.last().unwrap()[1] << 2;
    model.behave(Behaviour::Stuck);
    let ticket = unit.submit(page(1, 2)).unwrap();
    for word in [ticket.get() + 1, ticket.get() - 2, u64::from(u32::MAX)] {
        machine.set(status, word);
        assert_eq!(unit.poll(ticket), Ok(false), "{word}");
    }
    // The unit writes the lower half only.
    machine.set(status, 0xdead_beef << 32 | ticket.get());
    assert_eq!(unit.poll(ticket), Ok(true));
    let ring = Invalidation::Ring {
        domain: DomainId::new(1),
        device: device(9),
        ring: RingId::new(1),
    };
    let refused = unit.submit_all(&[page(1, 1), ring]);
    assert_eq!(refused, Err(InvalidationError::Unsupported));
}

#[test]
fn faults_are_decoded_and_losses_reported_once() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let options = Options {
        fault_entries: 8,
        ..options()
    };
    let mut unit = start(&machine, &model, &frames, options);
    assert_eq!(unit.next_fault(), None);
    let record = |address| [9 << 40 | 3 << 34 | 15, 0, address, 0];
    for round in 0..5 {
        // Seven records fit; the eighth is lost.
        for number in 0..9 {
            model.record(FQ, &record(round * 0x1000 + number));
        }
        for number in 0..7 {
            let Some(FaultEvent::Record(found)) = unit.next_fault() else {
                panic!("no record {number}");
            };
            assert_eq!(found.iotval, round * 0x1000 + number);
            assert_eq!(
                (found.cause, found.requester()),
                (Cause::WritePage, device(9))
            );
        }
        assert_eq!(unit.next_fault(), Some(FaultEvent::Lost(Loss::Overflow)));
        assert_eq!(unit.next_fault(), None);
    }
    let malformed = [0xfff, 1, 2, 3];
    model.record(FQ, &malformed);
    assert_eq!(unit.next_fault(), Some(FaultEvent::Malformed(malformed)));
    model.state.borrow_mut().csr[FQ] |= 1 << 8;
    assert_eq!(unit.next_fault(), Some(FaultEvent::Lost(Loss::MemoryFault)));
    model.record(FQ, &record(7));
    assert!(matches!(unit.next_fault(), Some(FaultEvent::Record(_))));
    // An index beyond the queue is not followed.
    model.state.borrow_mut().tail[FQ] = 8;
    assert_eq!(unit.next_fault(), None);
}

/// A loop over all records ends.
#[test]
fn a_loss_that_the_unit_does_not_clear_is_reported_once() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    let lost = FaultEvent::Lost(Loss::Overflow);
    model.behave(Behaviour::KeepsLosses);
    model.state.borrow_mut().csr[FQ] |= 1 << 9;
    let events: Vec<_> = (0..9).map_while(|_| unit.next_fault()).collect();
    assert_eq!(events, [lost]);
    // Once the unit has cleared it, the next loss counts.
    model.state.borrow_mut().csr[FQ] &= !(1 << 9);
    assert_eq!(unit.next_fault(), None);
    model.state.borrow_mut().csr[FQ] |= 1 << 9;
    assert_eq!(unit.next_fault(), Some(lost));
}

#[test]
fn page_requests_are_decoded_and_losses_reported_once() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES | ATS);
    let frames = machine.frames();
    let options = Options {
        page_request_entries: Some(4),
        ..options()
    };
    let mut unit = start(&machine, &model, &frames, options);
    assert_eq!(unit.next_page_request(), None);
    for number in 0..4_u64 {
        model.record(PQ, &[9 << 40, number << 12 | 7]);
    }
    for number in 0..3 {
        let Some(PageRequestEvent::Request(request)) = unit.next_page_request() else {
            panic!("no request {number}");
        };
        assert_eq!((request.page.get(), request.device_id), (number << 12, 9));
    }
    let lost = Some(PageRequestEvent::Lost(Loss::Overflow));
    assert_eq!(
        (unit.next_page_request(), unit.next_page_request()),
        (lost, None)
    );
    model.record(PQ, &[1, 2]);
    let malformed = Some(PageRequestEvent::Malformed([1, 2]));
    assert_eq!(unit.next_page_request(), malformed);
    unit.disable(&frames).map_err(|(_, error)| error).unwrap();
    assert_eq!(frames.in_use(), 0);
}

#[test]
fn wired_interrupts_are_acknowledged() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES | IGS_BOTH);
    model.state.borrow_mut().fctl_writable = 0b111;
    let frames = machine.frames();
    let options = Options {
        interrupts: Interrupts::Wired,
        ..options()
    };
    let mut unit = start(&machine, &model, &frames, options);
    assert_eq!(
        model.state.borrow().csr[CQ] & 0b1000_0000_0011,
        0b1000_0000_0011
    );
    let pending = |commands| PendingInterrupts {
        commands,
        faults: false,
        page_requests: false,
    };
    assert_eq!(unit.acknowledge_interrupts(), pending(true));
    assert_eq!(unit.acknowledge_interrupts(), pending(false));
    assert_eq!(model.state.borrow().csr[CQ] >> 11 & 1, 0);
    let ticket = unit.submit(Invalidation::Global).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    assert_eq!(unit.acknowledge_interrupts(), pending(true));
}
