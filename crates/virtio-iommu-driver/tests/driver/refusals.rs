//! Unmaps that the device refuses: their tickets wait until the device accepts a repetition.

use ringfence_types::{CachedLevels, Invalidation, InvalidationError, Invalidator};
use ringfence_virtio_iommu_driver::{Failure, UnitError};

use crate::model::{DOMAIN, Model, REQUESTS, attached, frames, map, pages};

/// Status of a device with an internal error.
const DEVERR: u8 = 3;
/// Requests that the queue of the model holds.
const SLOTS: u64 = 64;

fn invalidation(first: u64, count: u64) -> Invalidation {
    Invalidation::Pages {
        domain: DOMAIN,
        range: pages(first, count),
        levels: CachedLevels::Leaves,
    }
}

/// One CPU waits for its unmap. Another CPU learns that the device refused it, and repeats it with
/// an invalidation of the domain.
#[test]
fn a_repetition_completes_the_ticket_of_the_first_attempt() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    map(&mut unit, &model, 0, 4);
    let _ = unit.unmap(DOMAIN, pages(0, 4)).unwrap();
    let waiting = unit.submit(invalidation(0, 4)).unwrap();
    model.answer(&model.chains(REQUESTS)[0], DEVERR);
    let other = unit.submit(invalidation(8, 1)).unwrap();
    assert_eq!(unit.poll(other), Err(InvalidationError::Failed));
    for attempt in 0..2 {
        let repeated = unit.submit(Invalidation::Domain(DOMAIN)).unwrap();
        let chains = model.chains(REQUESTS);
        for ticket in [waiting, other, repeated] {
            assert_eq!(unit.poll(ticket), Ok(false), "attempt {attempt}");
        }
        model.answer(&chains[0], DEVERR);
        for ticket in [waiting, other, repeated] {
            assert_eq!(unit.poll(ticket), Err(InvalidationError::Failed));
        }
    }
    let repeated = unit.submit(Invalidation::Domain(DOMAIN)).unwrap();
    model.answer(&model.chains(REQUESTS)[0], 0);
    for ticket in [waiting, other, repeated] {
        assert_eq!(unit.poll(ticket), Ok(true));
    }
}

/// A queue that is empty holds all repetitions: otherwise every later invalidation of the domain
/// would find it full.
#[test]
fn the_driver_keeps_no_more_refusals_than_the_queue_holds() {
    let model = Model::new();
    let frames = frames(&model);
    let mut unit = attached(&model, &frames);
    for first in 0..=SLOTS {
        map(&mut unit, &model, first, 1);
    }
    let refuse = |unit: &mut crate::model::ModelUnit<'_>, first| {
        let _ = unit.unmap(DOMAIN, pages(first, 1)).unwrap();
        let ticket = unit.submit(invalidation(first + 1, 1)).unwrap();
        model.answer(&model.chains(REQUESTS)[0], DEVERR);
        assert_eq!(unit.poll(ticket), Err(InvalidationError::Failed));
    };
    for first in 0..SLOTS {
        refuse(&mut unit, first);
    }
    let repeated = unit.submit(Invalidation::Domain(DOMAIN)).unwrap();
    let chains = model.chains(REQUESTS);
    assert_eq!(chains.len() as u64, SLOTS);
    for chain in &chains {
        model.answer(chain, DEVERR);
    }
    assert_eq!(unit.poll(repeated), Err(InvalidationError::Failed));
    // One more: the device is not used any more until a reset.
    refuse(&mut unit, SLOTS);
    let failed = Err(UnitError::Failed(Failure::Refusals));
    assert_eq!(unit.map(DOMAIN, crate::model::map_of(200, 1)), failed);
    let failed = unit.submit(Invalidation::Domain(DOMAIN));
    assert_eq!(failed, Err(InvalidationError::Failed));
    model.answers.set(Some(0));
    unit.recover().unwrap();
    assert_eq!(unit.poll(repeated), Ok(true));
}
