//! Requests in flight, bursts, refusals, time-outs and recovery.

use ringfence_types::{
    CachedLevels, DomainId, Invalidation, InvalidationError, Invalidator, Pending, RequesterId,
    RingId, Ticket,
};
use ringfence_virtio_iommu_driver::{Failure, Feature, Status, UnitError};

use crate::model::{
    Chain, DEVICE, DOMAIN, Model, ModelUnit, REQUESTS, attached, frames, map, map_of, pages, start,
};

fn invalidation(first: u64, count: u64) -> Invalidation {
    Invalidation::Pages {
        domain: DOMAIN,
        range: pages(first, count),
        levels: CachedLevels::Leaves,
    }
}

/// Queues the UNMAP of pages that are mapped.
fn unmap(unit: &mut ModelUnit<'_>, first: u64, count: u64) {
    let token = unit.unmap(DOMAIN, pages(first, count)).unwrap();
    assert_eq!(
        (token.domain(), token.range()),
        (DOMAIN, pages(first, count))
    );
}

/// Returns type and first and last address of a request with a range.
fn range_of(chain: &Chain) -> (u8, u64, u64) {
    let at = |offset: usize| {
        let bytes = chain.request[offset..][..8].try_into().unwrap();
        u64::from_le_bytes(bytes)
    };
    (chain.request[0], at(8), at(16))
}

#[test]
fn a_burst_has_one_notification_and_completes_when_all_are_answered() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    for first in [0, 10, 20] {
        map(&mut unit, &model, first, 2);
    }
    for first in [0, 10, 20] {
        unmap(&mut unit, first, 2);
    }
    assert_eq!(model.take_notifications(REQUESTS), 0);
    assert_eq!(model.chains(REQUESTS), []);
    let ticket = unit.submit(invalidation(0, 2)).unwrap();
    assert_eq!(model.take_notifications(REQUESTS), 1);
    let chains = model.chains(REQUESTS);
    let found: Vec<_> = chains.iter().map(range_of).collect();
    assert_eq!(
        found,
        [(4, 0, 0x1fff), (4, 0xa000, 0xbfff), (4, 0x1_4000, 0x1_5fff)]
    );
    assert!(
        chains
            .iter()
            .all(|chain| chain.request.len() == 28 && chain.room == 4)
    );
    // In another order than they were submitted.
    for index in [2, 0, 1] {
        assert_eq!(unit.poll(ticket), Ok(false));
        model.answer(&chains[index], 0);
    }
    assert_eq!(unit.poll(ticket), Ok(true));
    // Nothing is left to wait for, and nothing to tell the device.
    let next = unit.submit(Invalidation::Global).unwrap();
    assert_eq!(unit.poll(next), Ok(true));
    assert_eq!(model.take_notifications(REQUESTS), 0);
}

#[test]
fn tickets_complete_in_order() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    let mut submitted = Vec::new();
    for first in 0..3 {
        map(&mut unit, &model, first, 1);
    }
    for first in 0..3 {
        unmap(&mut unit, first, 1);
        submitted.push(unit.submit(invalidation(first, 1)).unwrap());
    }
    let chains = model.chains(REQUESTS);
    model.answer(&chains[1], 0);
    let states = |unit: &mut ModelUnit<'_>| {
        let states = submitted.iter().map(|ticket| unit.poll(*ticket).unwrap());
        states.collect::<Vec<_>>()
    };
    assert_eq!(states(&mut unit), [false; 3]);
    model.answer(&chains[0], 0);
    assert_eq!(states(&mut unit), [true, true, false]);
    model.answer(&chains[2], 0);
    assert_eq!(states(&mut unit), [true; 3]);
    let unknown = Ticket::new(submitted[2].get() + 1);
    assert_eq!(unit.poll(unknown), Err(InvalidationError::Failed));
}

#[test]
fn a_full_queue_changes_nothing() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    for first in 0..65 {
        map(&mut unit, &model, 2 * first, 1);
    }
    for first in 0..64 {
        unmap(&mut unit, 2 * first, 1);
    }
    let full = unit.unmap(DOMAIN, pages(128, 1));
    assert_eq!(full, Err(UnitError::QueueFull));
    assert!(unit.lookup(DOMAIN, pages(128, 1).lo()).is_some());
    let ticket = unit.submit(Invalidation::Domain(DOMAIN)).unwrap();
    assert_eq!(model.take_notifications(REQUESTS), 1);
    let chains = model.chains(REQUESTS);
    assert_eq!(chains.len(), 64);
    model.answer(&chains[63], 0);
    assert_eq!(unit.poll(ticket), Ok(false));
    unmap(&mut unit, 128, 1);
    chains[..63].iter().for_each(|chain| model.answer(chain, 0));
    assert_eq!(unit.poll(ticket), Ok(true));
}

#[test]
fn a_refused_unmap_is_repeated_until_the_device_accepts() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    map(&mut unit, &model, 0, 4);
    let token = unit.unmap(DOMAIN, pages(0, 4)).unwrap();
    let pending = Pending::submit(&mut unit, invalidation(0, 4), token).unwrap();
    model.answer(&model.chains(REQUESTS)[0], 3);
    let (pending, error) = pending.wait(&mut unit).unwrap_err();
    assert_eq!(error, InvalidationError::Failed);
    // Another range does not repeat it, and does not hide it.
    let other = unit.submit(invalidation(4, 1)).unwrap();
    assert_eq!(model.chains(REQUESTS), []);
    assert_eq!(unit.poll(other), Err(InvalidationError::Failed));
    let token = pending.abandon();
    let pending = Pending::submit(&mut unit, invalidation(0, 4), token).unwrap();
    let chains = model.chains(REQUESTS);
    assert_eq!(range_of(&chains[0]), (4, 0, 0x3fff));
    model.answer(&chains[0], 0);
    assert_eq!(pending.wait(&mut unit).unwrap().range(), pages(0, 4));
    assert_eq!(unit.poll(other), Ok(true));
}

#[test]
fn the_last_detach_ends_refused_unmaps() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    map(&mut unit, &model, 0, 4);
    unmap(&mut unit, 0, 4);
    let ticket = unit.submit(invalidation(0, 4)).unwrap();
    model.answer(&model.chains(REQUESTS)[0], 6);
    assert_eq!(unit.poll(ticket), Err(InvalidationError::Failed));
    model.answers.set(Some(0));
    unit.detach(DEVICE).unwrap();
    let expected = [
        2, 0, 0, 0, 1, 0, 0, 0, 0x20, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];
    assert_eq!(model.take_log(), [expected.to_vec()]);
    assert_eq!(unit.poll(ticket), Ok(true));
}

#[test]
fn a_late_answer_ends_a_time_out() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    map(&mut unit, &model, 0, 1);
    unmap(&mut unit, 0, 1);
    let ticket = unit.submit(invalidation(0, 1)).unwrap();
    for _ in 0..300 {
        assert_eq!(unit.poll(ticket), Ok(false));
    }
    assert_eq!(unit.poll(ticket), Err(InvalidationError::TimedOut));
    model.answer(&model.chains(REQUESTS)[0], 0);
    assert_eq!(unit.poll(ticket), Ok(true));
}

#[test]
fn a_request_that_times_out_stops_the_unit_until_recovery() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    map(&mut unit, &model, 0, 1);
    map(&mut unit, &model, 8, 1);
    unmap(&mut unit, 8, 1);
    let failed = UnitError::Failed(Failure::TimedOut);
    assert_eq!(unit.map(DOMAIN, map_of(1, 1)), Err(failed));
    let ticket = unit.submit(Invalidation::Global);
    assert_eq!(ticket, Err(InvalidationError::Failed));
    assert_eq!(unit.unmap(DOMAIN, pages(0, 1)), Err(failed));
    assert_eq!(unit.detach(DEVICE), Err(failed));
    assert_eq!(unit.probe(DEVICE), Err(failed));
    model.answers.set(Some(0));
    unit.recover().unwrap();
    // The device, and the mapping that exists; not the one that failed, nor the unmapped one.
    let log = model.take_log();
    let kinds: Vec<_> = log.iter().map(|request| (request[0], request[9])).collect();
    assert_eq!(kinds, [(1, 1), (3, 0)]);
    let ticket = unit.submit(Invalidation::Global).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    unit.map(DOMAIN, map_of(1, 1)).unwrap();
}

#[test]
fn recovery_of_a_device_that_refuses() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    map(&mut unit, &model, 0, 1);
    model.is_stuck.set(true);
    assert_eq!(unit.recover(), Err(UnitError::ResetTimedOut));
    let failed_with = |failure| Err(UnitError::Failed(failure));
    let mapped = unit.map(DOMAIN, map_of(1, 1));
    assert_eq!(mapped, failed_with(Failure::TimedOut));
    model.is_stuck.set(false);
    model.answers.set(Some(8));
    assert_eq!(unit.recover(), Err(UnitError::Refused(Status::NoMem)));
    let mapped = unit.map(DOMAIN, map_of(1, 1));
    assert_eq!(mapped, failed_with(Failure::Refusals));
    model.config.borrow_mut()[28] = 99;
    assert_eq!(unit.recover(), Err(UnitError::CapabilitiesChanged));
    model.config.borrow_mut()[28] = 100;
    model.answers.set(Some(0));
    unit.recover().unwrap();
    unit.map(DOMAIN, map_of(1, 1)).unwrap();
}

#[test]
fn statuses_are_typed_and_nothing_is_mapped() {
    for (code, status) in [
        (1, Status::IoErr),
        (2, Status::Unsupp),
        (3, Status::DevErr),
        (4, Status::Inval),
        (5, Status::Range),
        (6, Status::NoEnt),
        (7, Status::Fault),
        (8, Status::NoMem),
        (9, Status::Unknown(9)),
        (0xff, Status::Unknown(0xff)),
    ] {
        let model = Model::new();
        let frames = frames(&model);
        let mut unit = attached(&model, &frames);
        let refused = Err(UnitError::Refused(status));
        model.answers.set(Some(code));
        assert_eq!(unit.map(DOMAIN, map_of(0, 1)), refused);
        assert!(unit.is_empty(DOMAIN));
        assert_eq!(unit.detach(DEVICE), refused);
        assert_eq!(unit.attach(RequesterId::new(9), DomainId::new(9)), refused);
        assert_eq!(unit.probe(DEVICE), Err(UnitError::Refused(status)));
        model.answers.set(Some(0));
        // Still attached, and the other one is not.
        unit.detach(DEVICE).unwrap();
        let other = RequesterId::new(9);
        assert_eq!(unit.detach(other), Err(UnitError::NotAttached(other)));
    }
}

#[test]
fn a_burst_of_maps_is_undone() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    model.answers.set(Some(0));
    unit.map_all(DOMAIN, &[map_of(0, 1), map_of(2, 3), map_of(9, 1)])
        .unwrap();
    assert_eq!(model.take_notifications(REQUESTS), 1);
    assert_eq!(model.take_log().len(), 3);
    // The second one overlaps: no request is sent.
    let overlap = unit.map_all(DOMAIN, &[map_of(20, 1), map_of(4, 2)]);
    assert_eq!(overlap, Err(UnitError::Overlap(pages(4, 2))));
    assert_eq!(model.take_log().len(), 0);
    unit.map(DOMAIN, map_of(20, 1)).unwrap();
}

#[test]
fn an_empty_burst_creates_no_domain() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = start(&model, &frames).unwrap();
    unit.map_all(DOMAIN, &[]).unwrap();
    unit.pass_through(DEVICE, DOMAIN).unwrap();
}

/// A device may execute requests in any order.
#[test]
fn a_map_waits_for_unmaps_of_its_range() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    map(&mut unit, &model, 0, 4);
    unmap(&mut unit, 0, 4);
    let found = unit.map(DOMAIN, map_of(3, 1));
    assert_eq!(found, Err(UnitError::Failed(Failure::TimedOut)));
    let kinds: Vec<_> = model.chains(REQUESTS).iter().map(range_of).collect();
    assert_eq!(kinds, [(4, 0, 0x3fff)], "the MAP is not sent");
}

#[test]
fn domains_without_devices_are_known_to_the_driver_only() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = start(&model, &frames).unwrap();
    unit.map(DOMAIN, map_of(0, 2)).unwrap();
    unit.map(DOMAIN, map_of(4, 1)).unwrap();
    let _ = unit.unmap(DOMAIN, pages(4, 1)).unwrap();
    assert_eq!(model.take_log().len(), 0);
    unit.attach(DEVICE, DOMAIN).unwrap();
    unit.attach(RequesterId::new(0x21), DOMAIN).unwrap();
    let log = model.take_log();
    let kinds: Vec<_> = log.iter().map(|request| request[0]).collect();
    assert_eq!(kinds, [1, 3, 1], "mappings only with the first device");
    unit.detach(DEVICE).unwrap();
    unit.detach(RequesterId::new(0x21)).unwrap();
    model.take_log();
    unit.attach(DEVICE, DOMAIN).unwrap();
    assert_eq!(model.take_log().len(), 2, "the domain is new to the device");
}

#[test]
fn bad_requests_reach_no_device() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    map(&mut unit, &model, 0x10, 4);
    let beyond = pages(1 << 36, 1);
    let mut bad = map_of(1, 1);
    for (expected, change) in [
        (
            UnitError::Range,
            (|m| m.pages = 0) as fn(&mut ringfence_pgtable::MapRequest),
        ),
        (UnitError::Range, |m| m.pages = u64::MAX),
        (UnitError::Range, |m| {
            m.pa = ringfence_types::PhysAddr::new(u64::MAX - 4095);
            m.pages = 2;
        }),
        (UnitError::Misaligned, |m| {
            m.pa = ringfence_types::PhysAddr::new(8)
        }),
        (UnitError::Misaligned, |m| {
            m.iova = ringfence_types::Iova::new(0x1001)
        }),
        (UnitError::OutsideInput(beyond), |m| {
            m.iova = ringfence_types::Iova::new(1 << 48);
        }),
        (UnitError::Overlap(pages(0xf, 2)), |m| {
            m.iova = ringfence_types::Iova::new(0xf000);
            m.pages = 2;
        }),
    ] {
        bad = map_of(1, 1);
        change(&mut bad);
        assert_eq!(unit.map(DOMAIN, bad), Err(expected));
    }
    let far = DomainId::new(101);
    assert_eq!(unit.map(far, bad), Err(UnitError::Domain(far)));
    assert_eq!(
        unit.attach(RequesterId::new(1), far),
        Err(UnitError::Domain(far))
    );
    assert_eq!(
        unit.attach(DEVICE, DomainId::new(2)),
        Err(UnitError::Attached(DEVICE))
    );
    let passing = unit.pass_through(RequesterId::new(1), DOMAIN);
    assert_eq!(passing, Err(UnitError::OtherKind(DOMAIN)));
    for (range, expected) in [
        (pages(0x10, 3), UnitError::Splits(pages(0x10, 3))),
        (pages(0x11, 3), UnitError::Splits(pages(0x11, 3))),
        (pages(0x10, 5), UnitError::NotMapped(pages(0x10, 5))),
        (pages(0xf, 5), UnitError::NotMapped(pages(0xf, 5))),
    ] {
        assert_eq!(unit.unmap(DOMAIN, range), Err(expected));
    }
    let ring = Invalidation::Ring {
        domain: DOMAIN,
        device: DEVICE,
        ring: RingId::new(1),
    };
    assert_eq!(unit.submit(ring), Err(InvalidationError::Unsupported));
    assert_eq!(model.chains(REQUESTS), []);
    assert_eq!(model.take_notifications(REQUESTS), 0);
}

#[test]
fn bypass_domains_need_the_feature() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = start(&model, &frames).unwrap();
    unit.pass_through(DEVICE, DOMAIN).unwrap();
    assert_eq!(model.take_log()[0][12..16], [1, 0, 0, 0]);
    assert_eq!(
        unit.map(DOMAIN, map_of(0, 1)),
        Err(UnitError::OtherKind(DOMAIN))
    );
    drop(unit);
    model.offered.set(1 << 32 | 0x07);
    let mut unit = start(&model, &frames).unwrap();
    let lacking = |feature| Err(UnitError::Unsupported(feature));
    assert_eq!(
        unit.pass_through(DEVICE, DOMAIN),
        lacking(Feature::BypassConfig)
    );
    assert_eq!(unit.probe(DEVICE).map(drop), lacking(Feature::Probe));
}

/// An UNMAP that the device executes after the last DETACH would be refused.
#[test]
fn a_detach_waits_for_unmaps() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    map(&mut unit, &model, 0, 4);
    unmap(&mut unit, 0, 4);
    let failed = UnitError::Failed(Failure::TimedOut);
    assert_eq!(unit.detach(DEVICE), Err(failed));
    let kinds: Vec<_> = model
        .chains(REQUESTS)
        .iter()
        .map(|c| c.request[0])
        .collect();
    assert_eq!(kinds, [4], "the DETACH is not sent");
}
