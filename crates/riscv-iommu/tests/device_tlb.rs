//! Address translation services: device TLBs are invalidated after the unit's caches, time-outs
//! are reported, and page requests are answered.

mod common;

use common::model::PQ;
use common::{
    ATS, BASE, Behaviour, MSI_FLAT, Machine, Model, T2GPA, device, options, start, table,
};
use ringfence_pgtable::Levels;
use ringfence_riscv_iommu::{
    Ats, GuestFirstStage, Options, PageRequestEvent, PageResponse, Privilege, ProcessBits,
    Translation, UnitError,
};
use ringfence_types::{
    CachedLevels, DomainId, GuestPhysAddr, Invalidation, InvalidationError, Invalidator, Pfn,
    PfnRange,
};

const CAPABILITIES: u64 = BASE | MSI_FLAT | ATS | T2GPA;
const FENCE: [u64; 2] = [2, 0];
const ALL: u64 = 0x7fff_ffff_ffff_f800;

const fn domain(id: u16) -> DomainId {
    DomainId::new(id)
}

fn pages(id: u16, lo: u64, count: u64) -> Invalidation {
    Invalidation::Pages {
        domain: domain(id),
        range: PfnRange::new(Pfn::new(lo), count).unwrap(),
        levels: CachedLevels::Leaves,
    }
}

/// Returns the commands behind the last fence, without the completion.
fn behind_fence(log: &[[u64; 2]]) -> Vec<[u64; 2]> {
    let fence = log.iter().rposition(|command| *command == FENCE);
    let fence = fence.expect("no fence");
    assert!(log[..fence].iter().all(|command| command[0] & 0x7f != 4));
    log[fence + 1..log.len() - 1].to_vec()
}

#[test]
fn device_tlbs_follow_the_caches_of_the_unit() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    let first = Translation::FirstStage(table(0x4000, Levels::Three));
    let ats = Some(Ats::default());
    unit.attach(&frames, device(8), domain(1), &first).unwrap();
    unit.attach_with_ats(&frames, device(9), domain(1), &first, ats)
        .unwrap();
    let second = Translation::SecondStage {
        table: table(0x8000, Levels::Three),
        guest: GuestFirstStage::Table {
            root: GuestPhysAddr::new(0x1000),
            levels: Levels::Three,
            space: 3,
        },
        msi: None,
    };
    unit.attach_with_ats(&frames, device(10), domain(2), &second, ats)
        .unwrap();
    let to = |device: u64, payload| [device << 40 | 4, payload];
    for (request, expected) in [
        (pages(1, 0x12345, 1), vec![to(9, 0x1234_5000)]),
        // Pages 5 to 8 lie in an aligned block of 16: S, and the first zero bit at position 3.
        (pages(1, 5, 4), vec![to(9, 0x7800)]),
        (pages(1, 0, 1 << 51), vec![to(9, ALL)]),
        (Invalidation::Domain(domain(1)), vec![to(9, ALL)]),
        // The device caches addresses of the guest's first stage.
        (pages(2, 5, 1), vec![to(10, ALL)]),
        (Invalidation::Global, vec![to(9, ALL), to(10, ALL)]),
        (Invalidation::Context(device(9)), vec![to(9, ALL)]),
        (Invalidation::Context(device(8)), vec![]),
        (pages(3, 5, 1), vec![]),
    ] {
        model.take_log();
        let ticket = unit.submit(request).unwrap();
        assert_eq!(unit.poll(ticket), Ok(true));
        assert_eq!(behind_fence(&model.take_log()), expected, "{request:?}");
    }
    let ticket = unit.submit_guest_first_stage(domain(2), Some(3), None, CachedLevels::All);
    assert_eq!(unit.poll(ticket.unwrap()), Ok(true));
    assert_eq!(behind_fence(&model.take_log()), [to(10, ALL)]);
    unit.detach(&frames, device(9)).unwrap();
    unit.detach(&frames, device(10)).unwrap();
    model.take_log();
    unit.submit(Invalidation::Global).unwrap();
    assert!(model.take_log().iter().all(|command| *command != FENCE));
}

/// With several segments, each command names the segment of its device, also segment 0.
#[test]
fn commands_name_the_segment_if_there_are_several() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    const DSV: u64 = 1 << 33;
    for (device_id_bits, segment, qualified) in [
        (16, 0, 0),
        (17, 0, DSV),
        (24, 0, DSV),
        (16, 3, DSV | 3 << 56),
        (24, 0xff, DSV | 0xff << 56),
    ] {
        let options = Options {
            device_id_bits,
            segment,
            page_request_entries: Some(16),
            ..options()
        };
        let mut unit = start(&machine, &model, &frames, options);
        let ats = Ats {
            page_requests: true,
            ..Ats::default()
        };
        let first = Translation::FirstStage(table(0x4000, Levels::Three));
        unit.attach_with_ats(&frames, device(9), domain(1), &first, Some(ats))
            .unwrap();
        model.take_log();
        unit.submit(pages(1, 5, 1)).unwrap();
        let expected = [qualified | 9 << 40 | 4, 0x5000];
        assert_eq!(behind_fence(&model.take_log()), [expected]);
        let id = u64::from(segment) << 16 | 9;
        model.record(PQ, &[id << 40, 0x5000 | 5 << 3 | 0b111]);
        let Some(PageRequestEvent::Request(request)) = unit.next_page_request() else {
            panic!("no request");
        };
        unit.respond(&request, PageResponse::Success).unwrap();
        let expected = [qualified | 9 << 40 | 0x84, 9 << 48 | 5 << 32];
        assert_eq!(model.take_log().first(), Some(&expected));
        assert!(model.state.borrow().misuse.is_empty());
        unit.disable(&frames).map_err(|(_, error)| error).unwrap();
    }
}

/// A removed or hostile device stops the queue at each invalidation of its TLB. It must not keep
/// the unit from serving the others.
#[test]
fn a_device_that_never_answers_can_be_detached() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    let one = Translation::FirstStage(table(0x4000, Levels::Three));
    let two = Translation::FirstStage(table(0x8000, Levels::Three));
    unit.attach_with_ats(&frames, device(9), domain(1), &one, Some(Ats::default()))
        .unwrap();
    unit.attach(&frames, device(10), domain(2), &two).unwrap();
    model.behave(Behaviour::DeviceTimesOut);
    let lost = unit.submit(pages(1, 5, 1)).unwrap();
    let failed = Err(InvalidationError::Failed);
    assert_eq!(unit.poll(lost), failed);
    let ticket = unit.recover().unwrap();
    assert_eq!(unit.poll(ticket), failed);
    // The context is clear now, and nothing completes before the unit has read it again.
    assert_eq!(
        unit.detach(&frames, device(9)),
        Err(UnitError::Invalidation(InvalidationError::Failed))
    );
    assert_eq!(unit.poll(lost), failed);
    assert_eq!(unit.submit(pages(1, 5, 1)), Err(InvalidationError::Failed));
    model.take_log();
    let ticket = unit.recover().unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    assert_eq!(unit.poll(lost), Ok(true));
    let log = model.take_log();
    let contexts = log.iter().position(|command| command[0] == 3);
    assert!(contexts.is_some(), "{log:x?}");
    unit.detach(&frames, device(9)).unwrap();
    let ticket = unit.submit(pages(2, 5, 1)).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    unit.detach(&frames, device(10)).unwrap();
}

/// After a time-out the unit may still execute everything, also with the context that it cached.
#[test]
fn a_detach_that_times_out_omits_no_device_tlb() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    let one = Translation::FirstStage(table(0x4000, Levels::Three));
    unit.attach_with_ats(&frames, device(9), domain(1), &one, Some(Ats::default()))
        .unwrap();
    model.behave(Behaviour::Stuck);
    assert_eq!(
        unit.detach(&frames, device(9)),
        Err(UnitError::Invalidation(InvalidationError::TimedOut))
    );
    model.behave(Behaviour::Normal);
    model.take_log();
    let ticket = unit.submit(pages(1, 5, 1)).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    let log = model.take_log();
    assert!(log.contains(&[9 << 40 | 4, 0x5000]), "{log:x?}");
    unit.detach(&frames, device(9)).unwrap();
}

#[test]
fn processes_have_entries_of_their_own() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    let ats = Some(Ats::default());
    let processes = Translation::Processes(ProcessBits::Eight);
    unit.attach_with_ats(&frames, device(9), domain(0), &processes, ats)
        .unwrap();
    let root = table(0x4000, Levels::Three);
    for (process, id) in [(0, 1), (7, 2)] {
        unit.attach_process(
            &frames,
            device(9),
            process,
            domain(id),
            root,
            Privilege::User,
        )
        .unwrap();
    }
    let tagged = |process: u64, payload| [9 << 40 | 1 << 32 | process << 12 | 4, payload];
    model.take_log();
    unit.submit(pages(2, 5, 1)).unwrap();
    assert_eq!(behind_fence(&model.take_log()), [tagged(7, 0x5000)]);
    // Accesses without a process id belong to process 0.
    unit.submit(pages(1, 5, 1)).unwrap();
    let untagged = [9 << 40 | 4, 0x5000];
    assert_eq!(
        behind_fence(&model.take_log()),
        [tagged(0, 0x5000), untagged]
    );
    unit.detach_process(&frames, device(9), 7).unwrap();
    assert_eq!(behind_fence(&model.take_log()), [tagged(7, ALL)]);
    // A guest's processes: untagged, and global over all processes.
    let second = Translation::SecondStage {
        table: table(0x8000, Levels::Three),
        guest: GuestFirstStage::Processes {
            root: GuestPhysAddr::new(0x1000),
            bits: ProcessBits::Eight,
            default_process: true,
        },
        msi: None,
    };
    unit.attach_with_ats(&frames, device(9), domain(3), &second, ats)
        .unwrap();
    model.take_log();
    unit.submit(pages(3, 5, 1)).unwrap();
    assert_eq!(
        behind_fence(&model.take_log()),
        [[9 << 40 | 4, ALL], tagged(0, ALL | 1)]
    );
}

#[test]
fn a_device_that_does_not_answer_fails_the_invalidation() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    let first = Translation::FirstStage(table(0x4000, Levels::Three));
    unit.attach_with_ats(&frames, device(9), domain(1), &first, Some(Ats::default()))
        .unwrap();
    model.behave(Behaviour::DeviceTimesOut);
    let ticket = unit.submit(pages(1, 5, 1)).unwrap();
    assert_eq!(unit.poll(ticket), Err(InvalidationError::Failed));
    // The device still does not answer: its TLB may hold the page.
    let again = unit.recover().unwrap();
    assert_eq!(unit.poll(again), Err(InvalidationError::Failed));
    assert_eq!(unit.poll(ticket), Err(InvalidationError::Failed));
    model.behave(Behaviour::Normal);
    let last = unit.recover().unwrap();
    assert_eq!((unit.poll(last), unit.poll(ticket)), (Ok(true), Ok(true)));
}

#[test]
fn page_requests_are_answered() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let options = Options {
        page_request_entries: Some(16),
        ..options()
    };
    let mut unit = start(&machine, &model, &frames, options);
    let first = Translation::FirstStage(table(0x4000, Levels::Three));
    for (tagged, response, expected) in [
        (
            false,
            PageResponse::Success,
            [9 << 40 | 0x84, 9 << 48 | 5 << 32],
        ),
        (
            true,
            PageResponse::InvalidRequest,
            [9 << 40 | 1 << 32 | 7 << 12 | 0x84, 0x9_1005 << 32],
        ),
        (
            true,
            PageResponse::Failure,
            [9 << 40 | 1 << 32 | 7 << 12 | 0x84, 0x9_f005 << 32],
        ),
    ] {
        let ats = Ats {
            page_requests: true,
            response_process: tagged,
            guest_addresses: false,
        };
        unit.attach_with_ats(&frames, device(9), domain(1), &first, Some(ats))
            .unwrap();
        model.record(PQ, &[9 << 40 | 1 << 32 | 7 << 12, 0x5000 | 5 << 3 | 0b111]);
        let Some(PageRequestEvent::Request(request)) = unit.next_page_request() else {
            panic!("no request");
        };
        model.take_log();
        let ticket = unit.respond(&request, response).unwrap();
        assert_eq!(unit.poll(ticket), Ok(true));
        assert_eq!(model.take_log().first(), Some(&expected));
    }
}
