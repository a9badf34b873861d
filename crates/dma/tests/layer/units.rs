//! A machine with two IOMMUs: each rejects the other's tokens, although both have a domain of that
//! number.

use ringfence_dma::flush::{Burst, FlushPolicy, Strict};
use ringfence_dma::space::{Paged, Rounding};
use ringfence_dma::{
    AttachError, Attachment, Cpu, DetachError, Dma, MapReason, Outcome, Teardown, UnmapReason,
};
use ringfence_types::{Direction, DomainId, InvalidationError, Iova, RequesterId};

use crate::rig::*;

type Mapped = Space<Bits, Cached>;

const BOTH: Direction = Direction::Bidirectional;

struct Unit<F: FlushPolicy<Mapped, u64>> {
    board: Board,
    dma: Dma<Mapped, F, u64>,
    cpu: Cpu<Mapped, F, u64>,
    at: Attachment,
}

fn attach<F: FlushPolicy<Mapped, u64>>(
    dma: &mut Dma<Mapped, F, u64>,
    board: &Board,
    device: u16,
) -> Result<Attachment, AttachError<()>> {
    dma.attach(RequesterId::new(device), Iova::new(u64::MAX), |domain| {
        let accounts = Accounts::new(Bits::make(40));
        Ok(Paged::new(
            accounts,
            Cached::make(board, domain),
            Rounding::Exact,
        ))
    })
}

impl<F: FlushPolicy<Mapped, u64>> Unit<F> {
    fn new(number: u16, flush: F) -> Self {
        let board = Board::new();
        let mut dma = Dma::for_unit(number, flush);
        let at = attach(&mut dma, &board, 1).expect("the first device");
        Self {
            board,
            cpu: dma.cpu(),
            dma,
            at,
        }
    }

    fn map(&mut self, buffer: u64) -> ringfence_dma::Mapping<u64> {
        let memory = memory(0x10_0000 + buffer * PAGE, 64);
        let (cpu, board) = (&mut self.cpu, &mut self.board);
        let mapped = self
            .dma
            .map_single(cpu, board, &self.at, buffer, memory, BOTH);
        mapped.expect("room").0
    }

    /// Removes the domain; a new one gets its identifier.
    fn renew(&mut self) {
        let (cpu, board) = (&mut self.cpu, &mut self.board);
        let none = |_| panic!("nothing is withheld");
        let gone = self
            .dma
            .detach(cpu, board, &self.at, Teardown::Forced, |_| {}, none);
        assert!(gone.expect("detached").is_some());
        self.at = attach(&mut self.dma, board, 1).expect("again");
    }
}

#[test]
fn attachments_and_mappings_of_another_unit_are_refused() {
    let mut ours = Unit::new(0, Strict);
    let mut theirs = Unit::new(1, Strict);
    assert_eq!(ours.at.domain(), theirs.at.domain());
    for generation in 0..2 {
        let (cpu, board) = (&mut ours.cpu, &mut ours.board);
        let buffer = memory(0x10_0000, 64);
        let refused = ours
            .dma
            .map_single(cpu, board, &theirs.at, 7, buffer, BOTH)
            .expect_err("an attachment of another unit");
        assert_eq!(refused.1.reason, MapReason::NotAttached);
        let detached = ours.dma.detach(
            cpu,
            board,
            &theirs.at,
            Teardown::Forced,
            |_| panic!(),
            |_| {},
        );
        let error = detached.err().expect("not attached here");
        assert_eq!(error, DetachError::NotAttached(RequesterId::new(1)));

        let mine = ours.map(3);
        let mapping = theirs.map(5);
        let before = ours.board.words();
        for at in [ours.at, theirs.at] {
            // A later generation of this unit's domain does not make the token stale either.
            let (cpu, board) = (&mut ours.cpu, &mut ours.board);
            let again = ringfence_dma::Mapping::claim(&theirs.at, mapping.range(), BOTH, 5);
            let error = ours.dma.unmap_single(cpu, board, &at, again);
            let reason = error.expect_err("another unit's").reason;
            assert!(
                matches!(reason, UnmapReason::NotAttached(_)),
                "generation {generation}: {reason:?}"
            );
        }
        assert_eq!(ours.board.words(), before);
        let (cpu, board) = (&mut theirs.cpu, &mut theirs.board);
        let back = theirs.dma.unmap_single(cpu, board, &theirs.at, mapping);
        assert_eq!(back.expect("its own").into_buffer(), Some(5));
        let (cpu, board) = (&mut ours.cpu, &mut ours.board);
        let back = ours.dma.unmap_single(cpu, board, &ours.at, mine);
        assert_eq!(back.expect("its own").into_buffer(), Some(3));
        ours.renew();
    }
}

#[test]
fn invalidations_of_another_unit_are_not_retried() {
    let mut ours = Unit::new(0, Strict);
    let mut theirs = Unit::new(1, Strict);
    for _ in 0..2 {
        let mapping = theirs.map(5);
        theirs.board.port.fail(0, 1, InvalidationFailure::Failed);
        let (cpu, board) = (&mut theirs.cpu, &mut theirs.board);
        let error = theirs.dma.unmap_single(cpu, board, &theirs.at, mapping);
        let UnmapReason::NotFlushed(_, not_invalidated) = error.expect_err("it failed").reason
        else {
            panic!("no failed invalidation");
        };
        let logged = ours.board.port.log.len();
        let (error, not_invalidated) = ours
            .dma
            .retry_invalidation(&mut ours.cpu, &mut ours.board, not_invalidated)
            .expect_err("another unit's");
        assert_eq!(error, InvalidationError::Unsupported);
        assert_eq!(ours.board.port.log.len(), logged);
        let (cpu, board) = (&mut theirs.cpu, &mut theirs.board);
        let settled = theirs
            .dma
            .retry_invalidation(cpu, board, not_invalidated)
            .expect("settled");
        assert_eq!(settled.0, 5);
        ours.renew();
    }
}

/// A handle does not transfer buffers between units: a device of the other unit still reaches those
/// that it withholds there.
#[test]
fn a_handle_of_another_unit_gives_nothing_back_here() {
    let mut ours = Unit::new(0, Burst::default());
    let mut theirs = Unit::new(1, Burst::default());
    let mapping = theirs.map(5);
    let (cpu, board) = (&mut theirs.cpu, &mut theirs.board);
    let outcome = theirs.dma.unmap_single(cpu, board, &theirs.at, mapping);
    assert_eq!(outcome.expect("withheld").into_buffer(), None::<u64>);

    std::mem::swap(&mut ours.cpu, &mut theirs.cpu);
    let mapping = ours.map(3);
    let (cpu, board) = (&mut ours.cpu, &mut ours.board);
    let outcome = ours.dma.unmap_single(cpu, board, &ours.at, mapping);
    assert_eq!(outcome.expect("withheld").into_buffer(), None::<u64>);
    let mut back = Vec::new();
    let ended = ours
        .dma
        .end_burst(cpu, board, &ours.at, BOTH, |b| back.push(b));
    assert!(ended.is_ok());
    assert_eq!(back, [3]);
    ours.renew();
    let fresh = ours.dma.cpu();
    let (board, cpu) = (&mut ours.board, std::mem::replace(&mut ours.cpu, fresh));
    assert!(ours.dma.remove_cpu(cpu, board, |b| back.push(b)).is_ok());
    assert_eq!(back, [3], "5 is still mapped in the other unit");
}

#[test]
fn a_device_has_one_domain() {
    let mut unit = Unit::new(0, Strict);
    let first = DomainId::new(1);
    let again = attach(&mut unit.dma, &unit.board, 1);
    assert_eq!(again.err(), Some(AttachError::Attached(first)));
    let other = attach(&mut unit.dma, &unit.board, 2).expect("another device");
    let device = RequesterId::new(1);
    let shared = unit.dma.attach_to(device, Iova::new(u64::MAX), &other);
    assert_eq!(shared.err(), Some(AttachError::Attached(first)));
    // Attaching the device to its own domain again returns the same attachment.
    let same = unit.dma.attach_to(device, Iova::new(u64::MAX), &unit.at);
    assert_eq!(same.ok(), Some(unit.at));
    unit.renew();
}
