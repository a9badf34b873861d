//! Lists of which a piece is refused or its invalidation fails.

use std::ops::Range;

use ringfence_dma::space::UnmapRefusal;
use ringfence_dma::{MapReason, Mapping, Released, SgMapping, UnmapFailure, UnmapReason};
use ringfence_papers::rtc::Rtc;
use ringfence_pviommu::frontend::{UnknownUnmap, UnmapCompletions};
use ringfence_types::{Access, Invalidation, InvalidationError, Invalidator, IovaRange, Ticket};

use super::{CYCLE, FROM, Guest, Looped, buffer, c, guest_that, tree};
use crate::machine::{Line, SPACE, Waits};

/// Waits for answers, except that the invalidations of some numbers fail: the first with
/// `QueueFull`, the others with `Failed`.
struct Failing<I> {
    waits: I,
    submitted: u32,
    fails: Range<u32>,
}

impl<I: Invalidator> Invalidator for Failing<I> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        let number = self.submitted;
        self.submitted += 1;
        if self.fails.start == number && !self.fails.is_empty() {
            return Err(InvalidationError::QueueFull);
        }
        if self.fails.contains(&number) {
            return Err(InvalidationError::Failed);
        }
        self.waits.submit(request)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.waits.poll(ticket)
    }
}

type FailingGuest = Guest<Rtc, Failing<Waits<Looped>>>;

/// Returns a constructor of [`Failing`] for [`guest_that`].
fn failing(fails: Range<u32>) -> impl FnOnce(Line<Looped>) -> Failing<Waits<Looped>> {
    |link| Failing {
        waits: UnmapCompletions::new(link),
        submitted: 0,
        fails,
    }
}

/// A guest with a list of three pieces, all of them in the IOTLB. The cache keeps the first `kept`
/// pieces, and the invalidations numbered `fails` fail.
fn guest_with_list(kept: usize, fails: Range<u32>) -> (FailingGuest, SgMapping<u32>) {
    let mut guest = guest_that(Rtc::new(c(), kept), UnknownUnmap::Refused, failing(fails));
    let list = guest.map_list(&[1, 3, 5].map(|page| buffer(page, 0, 512)), FROM);
    let list = list.unwrap();
    assert_eq!(reached(&guest, list.piece_ranges()), [true; 3]);
    (guest, list)
}

fn reached(guest: &FailingGuest, ranges: &[IovaRange]) -> Vec<bool> {
    let reach = |range: &IovaRange| guest.reach(range.start(), Access::Write).is_some();
    ranges.iter().map(reach).collect()
}

/// Invalidations of a list's pieces fail. A retry that releases the buffer has invalidated every
/// piece, and all addresses are free.
#[test]
fn a_list_is_released_when_no_piece_is_reached() {
    for fails in [0..1, 1..2, 2..3, 0..2, 0..3, 0..4, 0..6] {
        let (mut guest, list) = guest_with_list(0, fails.clone());
        let ranges = list.piece_ranges().to_vec();
        let (cpu, machine) = (&mut guest.cpu, &mut guest.machine);
        let unmapped = guest.dma.unmap_sg(cpu, machine, &guest.at, list);
        let mut not_invalidated = match unmapped.map(drop).unwrap_err().reason {
            UnmapReason::NotFlushed(InvalidationError::QueueFull, not_invalidated) => {
                not_invalidated
            }
            other => panic!("{fails:?}: {other:?}"),
        };
        let buffer = loop {
            match guest.dma.retry_invalidation(cpu, machine, not_invalidated) {
                Ok(Released(buffer)) => break buffer,
                Err((_, left)) => not_invalidated = left,
            }
        };
        let still = reached(&guest, &ranges);
        assert_eq!((buffer, still), (7, vec![false; 3]), "{fails:?}");
        assert_eq!(guest.left().len() as u64, SPACE, "{fails:?}");
    }
}

/// As above, but the cache keeps the first piece. The device reaches that piece, so no retry can
/// release the buffer.
#[test]
fn list_with_a_failed_invalidation_is_not_released() {
    for (fails, lost) in [(0..1, 1), (1..2, 1), (0..2, 2)] {
        let (mut guest, list) = guest_with_list(1, fails.clone());
        let ranges = list.piece_ranges().to_vec();
        let (cpu, machine) = (&mut guest.cpu, &mut guest.machine);
        let unmapped = guest.dma.unmap_sg(cpu, machine, &guest.at, list);
        match unmapped.map(drop).unwrap_err().reason {
            UnmapReason::PartlyUnmapped(UnmapFailure::NotFlushed(_), buffer) => {
                assert_eq!(*buffer.buffer(), 7);
            }
            UnmapReason::NotFlushed(_, not_invalidated) => {
                let retried = guest.dma.retry_invalidation(cpu, machine, not_invalidated);
                let still = reached(&guest, &ranges);
                panic!("{fails:?}: {retried:?}, and the device reaches {still:?}");
            }
            other => panic!("{fails:?}: {other:?}"),
        }
        guest.flush();
        assert_eq!(reached(&guest, &ranges), [false; 3]);
        // The addresses of pieces whose invalidation failed are not free.
        assert_eq!(guest.left().len() as u64, SPACE - lost, "{fails:?}");
    }
}

/// A driver has already unmapped one piece of a list. If that is the first piece, nothing changes;
/// otherwise the other pieces are unmapped and their addresses are free.
#[test]
fn a_list_with_a_stray_piece_is_unmapped_as_far_as_possible() {
    for unknown_piece in 0..3 {
        let (mut guest, list) = guest_with_list(0, 0..0);
        let ranges = list.piece_ranges().to_vec();
        let claimed = Mapping::claim(&guest.at, ranges[unknown_piece], FROM, 7);
        assert!(!guest.unmap(claimed), "not stale");
        let before = reached(&guest, &ranges);
        let (cpu, machine) = (&mut guest.cpu, &mut guest.machine);
        let unmapped = guest.dma.unmap_sg(cpu, machine, &guest.at, list);
        let reason = unmapped.map(drop).unwrap_err().reason;
        if unknown_piece == 0 {
            assert!(matches!(reason, UnmapReason::NotAllocated(_)), "{reason:?}");
            assert_eq!(reached(&guest, &ranges), before);
            for range in &ranges[1..] {
                let claimed = Mapping::claim(&guest.at, *range, FROM, 7);
                assert!(!guest.unmap(claimed), "not stale");
            }
        } else {
            assert!(
                matches!(
                    reason,
                    UnmapReason::PartlyUnmapped(
                        UnmapFailure::Refused(UnmapRefusal::NotAllocated),
                        _
                    )
                ),
                "{unknown_piece}: {reason:?}, and the device reaches {:?}",
                reached(&guest, &ranges)
            );
        }
        assert_eq!(reached(&guest, &ranges), [false; 3]);
        assert_eq!(guest.left().len() as u64, SPACE, "{unknown_piece}");
    }
}

/// A list with less room for its segments than it needs. The cache keeps the first `kept` pieces as
/// after an unmap, until their cycle ends or a list uses them again. The others are unmapped.
#[test]
fn pieces_of_a_list_without_room_for_its_segments_are_cached() {
    let pieces = [1, 3, 5].map(|page| buffer(page, 0, 512));
    for kept in 0..=3 {
        let mut guest = guest_that(Rtc::new(c(), kept), UnknownUnmap::Refused, failing(0..0));
        for entries in 0..3 {
            let error = guest.map_list_into(&pieces, FROM, entries).unwrap_err();
            assert_eq!(error.reason, MapReason::TooManySegments);
            assert_eq!(guest.live(), kept as u64, "{entries} entries");
        }
        let (requests, _) = guest.asked();
        let (list, used) = guest.map_list_into(&pieces, FROM, 3).unwrap();
        let asked = guest.asked().0 - requests;
        assert_eq!(
            (used, asked > 0),
            (3, kept < 3),
            "{kept} pieces need no request"
        );
        let ranges = list.piece_ranges().to_vec();
        assert_eq!(reached(&guest, &ranges), [true; 3]);
        assert_eq!(guest.unmap_list(list), kept > 0);
        let error = guest.map_list_into(&pieces, FROM, 2).unwrap_err();
        assert_eq!(error.reason, MapReason::TooManySegments);
        assert_eq!(reached(&guest, &ranges), [0, 1, 2].map(|at| at < kept));
        for _ in 0..4 {
            guest.wait(CYCLE);
        }
        assert_eq!(
            (guest.live(), reached(&guest, &ranges)),
            (0, vec![false; 3])
        );
        assert_eq!(guest.left().len() as u64, SPACE, "{kept} pieces kept");
    }
}

/// The list has no room for its segments, and its pieces cannot be invalidated. The error names the
/// first failure.
#[test]
fn the_first_failure_of_a_roll_back_is_reported() {
    for fails in [0..3, 1..3] {
        let mut guest = guest_that(
            Rtc::new(c(), 0),
            UnknownUnmap::Refused,
            failing(fails.clone()),
        );
        let pieces = [1, 3, 5].map(|page| buffer(page, 0, 512));
        let error = guest.map_list_into(&pieces, FROM, 2).unwrap_err();
        let failure = UnmapFailure::NotFlushed(InvalidationError::QueueFull);
        assert_eq!(
            error.reason,
            MapReason::RollbackFailed(failure),
            "{fails:?}"
        );
    }
}

/// Two pieces of one page get the same cached page, so one segment describes both. A driver that
/// provides a single entry for them is not rejected.
#[test]
fn pieces_of_one_page_fit_in_one_entry() {
    let mut guest = tree();
    let pieces = [buffer(3, 0, 64), buffer(3, 64, 64)];
    let whole = guest.map(buffer(3, 0, 128), FROM);
    for entries in [2, 1] {
        let list = guest.map_list_into(&pieces, FROM, entries);
        let (list, used) = list.unwrap_or_else(|error| panic!("{entries} entries: {error}"));
        assert_eq!(used, 1, "{:?}", list.piece_ranges());
        assert!(guest.unmap_list(list), "the cache keeps the page");
    }
    guest.unmap(whole);
}
