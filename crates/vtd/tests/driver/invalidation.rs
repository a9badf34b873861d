//! Invalidations through the queue and the registers.

use crate::model::{
    self, CAP, CCMD, ECAP, ECAP_SCALABLE, Event, IOTLB, IQT, IVA, Model, PSI, start,
};
use proptest::prelude::*;
use ringfence_pgtable::Levels;
use ringfence_types::{
    CachedLevels, DomainId, Invalidation, InvalidationError, Invalidator, Pasid, Pfn, PfnRange,
    PhysAddr, RequesterId, RingId, Ticket,
};
use ringfence_vtd::{Interface, Mode, Translation, Unit};

const DOMAIN: DomainId = DomainId::new(7);
const FIRST: Translation = Translation::FirstStage {
    root: PhysAddr::new(0x5000),
    levels: Levels::Four,
};

fn pages(lo: u64, count: u64, levels: CachedLevels) -> Invalidation {
    Invalidation::Pages {
        domain: DOMAIN,
        range: PfnRange::new(Pfn::new(lo), count).unwrap(),
        levels,
    }
}

#[test]
fn golden_commands_of_legacy_mode() {
    let model = Model::new(CAP, ECAP);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Legacy).unwrap();
    let device = RequesterId::new(0x20);
    let root = PhysAddr::new(0x5000);
    let levels = Levels::Three;
    unit.attach(device, DOMAIN, Translation::SecondStage { root, levels })
        .unwrap();
    model.take();
    let (all, leaves) = (CachedLevels::All, CachedLevels::Leaves);
    let other = RequesterId::new(0x28);
    for (request, commands) in [
        (pages(0x10, 1, leaves), vec![[0x0007_00f2, 0x1_0040]]),
        (pages(0x10, 1, all), vec![[0x0007_00f2, 0x1_0000]]),
        (
            pages(0xf, 3, all),
            vec![[0x0007_00f2, 0xf000], [0x0007_00f2, 0x1_0001]],
        ),
        (pages(0x200, 512, all), vec![[0x0007_00f2, 0x20_0009]]),
        // MAMV = 9: a larger block is the whole domain.
        (
            pages(0, 513, all),
            vec![[0x0007_00f2, 9], [0x0007_00f2, 0x20_0000]],
        ),
        (pages(0, 1024, all), vec![[0x0007_00e2, 0]]),
        (Invalidation::Domain(DOMAIN), vec![[0x0007_00e2, 0]]),
        (Invalidation::Global, vec![[0xd2, 0]]),
        (
            Invalidation::Context(device),
            vec![[0x0020_0007_0031, 0], [0x45, 0], [0x0007_00e2, 0]],
        ),
        (
            Invalidation::Context(other),
            vec![[0x11, 0], [0x45, 0], [0xd2, 0]],
        ),
    ] {
        let ticket = unit.submit(request).unwrap();
        assert_eq!(unit.poll(ticket), Ok(true));
        assert_eq!(model.take_commands(), commands, "{request:?}");
    }
    let ring = Invalidation::Ring {
        domain: DOMAIN,
        device,
        ring: RingId::new(1),
    };
    assert_eq!(unit.submit(ring), Err(InvalidationError::Unsupported));
    assert_eq!(model.take(), []);
}

#[test]
fn a_unit_without_page_selective_commands_invalidates_the_domain() {
    let model = Model::new(CAP & !PSI, ECAP);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Legacy).unwrap();
    model.take();
    unit.submit(pages(3, 1, CachedLevels::All)).unwrap();
    assert_eq!(model.take_commands(), [[0x0007_00e2, 0]]);
}

/// First-stage translations are tagged with the PASID too.
#[test]
fn first_stage_commands_name_every_pasid_of_the_domain() {
    let model = Model::new(CAP, ECAP_SCALABLE);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Scalable).unwrap();
    let attach = |unit: &mut model::ModelUnit<'_>, device, pasid| {
        let pasid = Pasid::new(pasid).unwrap();
        unit.attach_pasid(RequesterId::new(device), pasid, DOMAIN, FIRST)
            .unwrap();
        model.take();
        unit.submit(pages(0xf, 3, CachedLevels::All)).unwrap();
        let of_pages = model.take_commands();
        unit.submit(Invalidation::Domain(DOMAIN)).unwrap();
        (of_pages, model.take_commands())
    };
    let narrow = vec![[0x0007_0036, 0xf000], [0x0007_0036, 0x1_0001]];
    for device in [0x20, 0x28] {
        let expected = (narrow.clone(), vec![[0x0007_0026, 0]]);
        assert_eq!(attach(&mut unit, device, 0), expected);
    }
    let both = vec![[0x0007_0026, 0], [0x5_0007_0026, 0]];
    assert_eq!(attach(&mut unit, 0x20, 5), (both.clone(), both));
    let all = vec![[0xd2, 0]];
    assert_eq!(attach(&mut unit, 0x20, 6), (all.clone(), all));
}

/// 64 ranges: at most two descriptors each, one wait, one doorbell.
#[test]
fn a_burst_has_one_doorbell() {
    let model = Model::new(CAP, ECAP);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Legacy).unwrap();
    model.take();
    let burst: Vec<_> = (0..64)
        .map(|index| pages(index * 0x1000 + 0xf, 3, CachedLevels::Leaves))
        .collect();
    let ticket = unit.submit_all(&burst).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    let events = model.take();
    let doorbells = events.iter().filter(|e| matches!(e, Event::Write(IQT, _)));
    assert_eq!(doorbells.count(), 1);
    assert_eq!(events.len(), 1 + 2 * 64 + 1);

    // A ring of wide descriptors holds 127: the burst becomes an invalidation of everything.
    let model = Model::new(CAP, ECAP_SCALABLE);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Scalable).unwrap();
    model.take();
    unit.submit_all(&burst).unwrap();
    assert_eq!(
        model.take_commands(),
        [[0x11, 0], [0x45, 0], [0x37, 0], [0x45, 0], [0xd2, 0]]
    );
}

#[test]
fn a_full_queue_is_unchanged_and_continues() {
    let model = Model::new(CAP, ECAP);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Legacy).unwrap();
    model.take();
    model.is_stalled.set(true);
    let request = pages(1, 1, CachedLevels::All);
    let mut tickets = Vec::new();
    let error = loop {
        match unit.submit(request) {
            Ok(ticket) if tickets.len() < 1000 => tickets.push(ticket),
            Ok(_) => panic!("the queue is never full"),
            Err(error) => break error,
        }
    };
    assert_eq!(error, InvalidationError::QueueFull);
    // 255 usable descriptors, two per request.
    assert_eq!(tickets.len(), 127);
    let doorbells = model.take().len();
    assert_eq!(unit.submit(request), Err(InvalidationError::QueueFull));
    assert_eq!((doorbells, model.take().len()), (127, 0));
    assert_eq!(unit.poll(tickets[0]), Ok(false));

    model.is_stalled.set(false);
    model.run();
    for ticket in &tickets {
        assert_eq!(unit.poll(*ticket), Ok(true));
    }
    assert_eq!(model.take_commands().len(), 2 * 127 - 1);
    // The ring wraps many times.
    for _ in 0..1000 {
        let ticket = unit.submit(request).unwrap();
        assert_eq!(unit.poll(ticket), Ok(true));
    }
    let unknown = Ticket::new(u64::MAX);
    assert_eq!(unit.poll(unknown), Err(InvalidationError::Failed));
}

#[test]
fn a_unit_that_stops_answering_is_a_time_out() {
    let model = Model::new(CAP, ECAP);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Legacy).unwrap();
    model.is_stalled.set(true);
    let ticket = unit.submit(Invalidation::Global).unwrap();
    let polls = (0..200).map(|_| unit.poll(ticket));
    let first = polls.into_iter().position(|poll| poll.is_err());
    assert_eq!(first, Some(99));
    assert_eq!(unit.poll(ticket), Err(InvalidationError::TimedOut));
    model.is_absent.set(true);
    assert_eq!(unit.poll(ticket), Err(InvalidationError::Failed));
    assert_eq!(unit.next_fault(), None);
    assert!(unit.recover().is_err());
    for _ in 0..300 {
        let _ = unit.submit(Invalidation::Global);
    }
    assert!(unit.disable().is_err());
}

#[test]
fn registers_execute_one_command_at_a_time() {
    let model = Model::new(CAP, ECAP);
    let frames = model::frames(&model);
    let options = model::options(Mode::Legacy, Interface::Registers);
    let (memory, registers) = (model.memory.clone(), model.clone());
    let mut unit = Unit::new(registers, memory, &frames, &options).unwrap();
    model.take();
    let ticket = unit.submit(pages(0xf, 3, CachedLevels::Leaves)).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    let command = 0xb003_0007_0000_0000;
    assert_eq!(
        model.take(),
        [
            Event::Write(IVA, 0xf040),
            Event::Write(IOTLB, command),
            Event::Write(IVA, 0x1_0041),
            Event::Write(IOTLB, command),
        ]
    );
    let device = RequesterId::new(0x20);
    let root = PhysAddr::new(0x5000);
    let levels = Levels::Three;
    unit.attach(device, DOMAIN, Translation::SecondStage { root, levels })
        .unwrap();
    unit.detach(device).unwrap();
    assert_eq!(
        model.take(),
        [
            Event::Write(CCMD, 0xe000_0000_0020_0007),
            Event::Write(IOTLB, 0xa003_0007_0000_0000),
        ]
    );

    // Under way: IVT is set.
    let running = unit.submit(Invalidation::Global).unwrap();
    model.iotlb_command.set(1 << 63);
    assert_eq!(unit.poll(running), Ok(false));
    let full = unit.submit(Invalidation::Global);
    assert_eq!(full, Err(InvalidationError::QueueFull));
    let polls = (0..200).map(|_| unit.poll(running));
    assert!(
        polls
            .into_iter()
            .any(|poll| poll == Err(InvalidationError::TimedOut))
    );
}

proptest! {
    /// The pages that the unit removes: it ignores the low AM bits of each address.
    #[test]
    fn commands_cover_the_range(lo in 0_u64..1 << 40, count in 1_u64..2000) {
        let model = Model::new(CAP, ECAP);
        let frames = model::frames(&model);
        let mut unit = start(&model, &frames, Mode::Legacy).unwrap();
        model.take();
        unit.submit(pages(lo, count, CachedLevels::All)).unwrap();
        let commands = model.take_commands();
        prop_assert!(commands.len() <= 2);
        let removed = |page: u64| commands.iter().any(|[low, high]| {
            let mask = high & 0x3f;
            assert!(*low == 0x0007_00e2 || mask <= 9);
            *low == 0x0007_00e2 || (page ^ high >> 12) >> mask == 0
        });
        for page in lo..lo + count {
            prop_assert!(removed(page), "{page:x}: {commands:x?}");
        }
    }
}
