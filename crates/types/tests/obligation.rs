//! Only a completed invalidation that covers a range turns it into `Flushed`.

use ringfence_types::{
    CachedLevels, DomainId, Flushed, Invalidation, InvalidationError, Invalidator, Pending, Pfn,
    PfnRange, Ticket, Unmapped, WholeDomain,
};

const DOMAIN: DomainId = DomainId::new(1);
const OTHER: DomainId = DomainId::new(2);

/// Returns the next scripted answer to each poll.
struct Scripted {
    submitted: Vec<Invalidation>,
    answers: Vec<Result<bool, InvalidationError>>,
}

impl Scripted {
    fn new(answers: &[Result<bool, InvalidationError>]) -> Self {
        Self {
            submitted: Vec::new(),
            answers: answers.iter().rev().copied().collect(),
        }
    }
}

impl Invalidator for Scripted {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.submitted.push(request);
        Ok(Ticket::new(self.submitted.len() as u64))
    }

    fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
        self.answers.pop().expect("polled more often than scripted")
    }
}

fn range(lo: u64, pages: u64) -> PfnRange {
    PfnRange::new(Pfn::new(lo), pages).unwrap()
}

fn unmapped() -> Unmapped {
    Unmapped::attest_cleared(DOMAIN, range(8, 4))
}

fn pages(domain: DomainId, range: PfnRange) -> Invalidation {
    Invalidation::Pages {
        domain,
        range,
        levels: CachedLevels::Leaves,
    }
}

#[test]
fn only_a_request_that_covers_the_range_is_submitted() {
    for (request, covers) in [
        (pages(DOMAIN, range(8, 4)), true),
        (pages(DOMAIN, range(0, 64)), true),
        (pages(DOMAIN, range(8, 3)), false),
        (pages(DOMAIN, range(9, 3)), false),
        (pages(OTHER, range(8, 4)), false),
        (Invalidation::Domain(DOMAIN), true),
        (Invalidation::Domain(OTHER), false),
        (Invalidation::Global, true),
    ] {
        let mut invalidator = Scripted::new(&[]);
        match Pending::submit(&mut invalidator, request, unmapped()) {
            Ok(_) => assert!(covers, "{request:?}"),
            Err((batch, error)) => {
                assert!(!covers, "{request:?}");
                assert_eq!(error, InvalidationError::ScopeTooNarrow);
                assert_eq!(batch, unmapped(), "the batch comes back");
            }
        }
        assert_eq!(invalidator.submitted.len(), usize::from(covers));
    }
}

#[test]
fn one_page_range_does_not_stand_for_a_whole_domain() {
    for (request, covers) in [
        (pages(DOMAIN, range(0, 1 << 40)), false),
        (Invalidation::Domain(DOMAIN), true),
        (Invalidation::Domain(OTHER), false),
        (Invalidation::Global, true),
    ] {
        let mut invalidator = Scripted::new(&[]);
        let pending = Pending::submit(&mut invalidator, request, WholeDomain(DOMAIN));
        assert_eq!(pending.is_ok(), covers, "{request:?}");
    }
}

#[test]
fn waiting_ends_with_the_completion() {
    let mut invalidator = Scripted::new(&[Ok(false), Ok(false), Ok(true)]);
    let pending = Pending::submit(&mut invalidator, Invalidation::Global, unmapped()).unwrap();
    let flushed: Flushed = pending.wait(&mut invalidator).unwrap();
    assert_eq!((flushed.domain(), flushed.range()), (DOMAIN, range(8, 4)));
    assert!(
        invalidator.answers.is_empty(),
        "every answer was waited for"
    );
}

#[test]
fn a_failed_invalidation_releases_nothing() {
    let mut invalidator = Scripted::new(&[Err(InvalidationError::Failed), Ok(true)]);
    let pending = Pending::submit(&mut invalidator, Invalidation::Global, unmapped()).unwrap();
    let (pending, error) = pending.wait(&mut invalidator).unwrap_err();
    assert_eq!(error, InvalidationError::Failed);
    assert_eq!(pending.wait(&mut invalidator).unwrap().range(), range(8, 4));
}

#[test]
fn poll_releases_only_completed_ranges() {
    let answers = [Ok(false), Err(InvalidationError::Failed), Ok(true)];
    let mut invalidator = Scripted::new(&answers);
    let pending = Pending::submit(&mut invalidator, Invalidation::Global, unmapped()).unwrap();
    let pending = pending.poll(&mut invalidator).unwrap_err();
    let pending = pending.poll(&mut invalidator).unwrap_err();
    assert!(pending.poll(&mut invalidator).is_ok());
}

#[test]
fn ranges_are_appended_to_their_domain_only() {
    for (domain, next, allowed) in [
        (DOMAIN, range(12, 1), true),
        (DOMAIN, range(12, 100), true),
        (OTHER, range(12, 1), false),
        (DOMAIN, range(13, 1), false),
        (DOMAIN, range(11, 2), false),
        (DOMAIN, range(4, 4), false),
    ] {
        let mut run = unmapped();
        match run.append(Unmapped::attest_cleared(domain, next)) {
            Ok(()) => assert!(allowed && run.range() == range(8, 4 + next.pages())),
            Err(same) => assert!(!allowed && same.range() == next && run == unmapped()),
        }
    }
}

#[test]
fn ranges_widen_only_to_enclosing_ranges() {
    for (enclosing, allowed) in [
        (range(8, 4), true),
        (range(8, 8), true),
        (range(0, 12), true),
        (range(9, 8), false),
        (range(8, 3), false),
    ] {
        match unmapped().widen(enclosing) {
            Ok(wider) => assert!(allowed && wider.range() == enclosing, "{enclosing:?}"),
            Err(same) => assert!(!allowed && same == unmapped(), "{enclosing:?}"),
        }
    }
}
