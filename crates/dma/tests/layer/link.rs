//! Requests whose pieces are linked one by one, against a list of the linked pages.

use ringfence_dma::flush::{Burst, Deferred, FlushPolicy, Strict};
use ringfence_dma::{
    DmaSegment, LinkedRequest, MapReason, Outcome, SgLimits, SgRequest, UnmapReason,
};
use ringfence_types::{
    Direction, Invalidation, Iova, IovaRange, Pfn, PfnRange, PhysAddr, PhysRange,
};

use crate::rig::*;

const TX: Direction = Direction::ToDevice;

/// The I/O page and the frame of a linked page.
type Leaf = (u64, u64);

fn reserve<A: Make, T: MakeTable, F: FlushPolicy<Space<A, T>, u64>>(
    rig: &mut Rig<A, T, F, u64>,
    buffer: u64,
    pages: u64,
) -> LinkedRequest<u64> {
    let (board, dma, cpu, at) = rig.parts();
    dma.reserve_request(cpu, board, at, buffer, pages, TX)
        .map_err(|(_, error)| error)
        .unwrap()
}

fn link<A: Make, T: MakeTable, F: FlushPolicy<Space<A, T>, u64>>(
    rig: &mut Rig<A, T, F, u64>,
    request: &mut LinkedRequest<u64>,
    piece: PhysRange,
) -> Result<IovaRange, MapReason> {
    let (board, dma, cpu, at) = rig.parts();
    let linked = dma.link_piece(cpu, board, at, request, piece);
    linked.map_err(|error| {
        assert_eq!(error.buffer, Some(piece));
        error.reason
    })
}

/// Three pieces at their own offsets take consecutive pages, one write-back and one invalidation.
fn one_range_and_one_invalidation<A: Make, T: MakeTable>(pages: u64) {
    let mut rig = Rig::<A, T, _, u64>::new(Strict);
    let pieces = [
        memory(0x10_0000, 4096),
        memory(0x20_0123, 5000),
        memory(0x30_0ff0, 32),
    ];
    let mut request = reserve(&mut rig, 7, pages);
    let first = request.reserved().lo().get();
    assert!(request.is_synced() && request.room() >= 5);
    let mut page = first;
    for piece in pieces {
        let range = link(&mut rig, &mut request, piece).unwrap();
        assert_eq!(range.bytes(), piece.bytes());
        assert_eq!(
            range.start().get(),
            (page << 12) + (piece.start().get() & 0xfff)
        );
        for offset in [0, piece.bytes() - 1] {
            let at = (range.start().get() + offset) >> 12;
            let frame = (piece.start().get() + offset) & !0xfff;
            assert_eq!(rig.leaf(at), Some(PhysAddr::new(frame)));
        }
        page = (range.last().get() >> 12) + 1;
        assert!(!request.is_synced());
    }
    assert_eq!(page - first, 5);
    let (board, dma, cpu, at) = rig.parts();
    dma.sync_request(cpu, board, at, &mut request).unwrap();
    assert!(request.is_synced());
    board
        .port
        .touch(at.domain(), PfnRange::new(Pfn::new(first), 5).unwrap());
    let reserved = request.reserved();
    let before = board.port.log.len();
    let outcome = dma.destroy_request(cpu, board, at, request).unwrap();
    assert_eq!(Outcome::into_buffer(outcome), Some(7));
    let log = &board.port.log[before..];
    assert!(
        matches!(log, [Invalidation::Pages { range, .. }] if *range == reserved),
        "{log:?}"
    );
    assert!(board.port.warm.is_empty());
    let state = rig.state();
    assert!(
        state.leaves.is_empty() && state.ranges.is_empty(),
        "{state:?}"
    );
}

#[test]
fn a_request_takes_one_range_and_one_invalidation() {
    for pages in [5, 6, 40] {
        one_range_and_one_invalidation::<Tree, Plain>(pages);
        one_range_and_one_invalidation::<Product, Cached>(pages);
    }
}

/// Counts of a request: ranges of addresses, pages of each, and invalidations of its unmap; with
/// the entries that mapped it.
type RequestCounts = (Vec<u64>, usize, Vec<(u64, PhysAddr)>);

/// Counts a request of `rig` between its map and its unmap.
fn counted<A: Make, T: MakeTable, M>(
    map: impl FnOnce(&mut Rig<A, T, Strict, u64>) -> M,
    unmap: impl FnOnce(&mut Rig<A, T, Strict, u64>, M),
) -> RequestCounts {
    let mut rig = Rig::<A, T, _, u64>::new(Strict);
    let mapped = map(&mut rig);
    let state = rig.state();
    let first = state.leaves.iter().map(|(page, _)| *page).min().unwrap();
    let leaves = state.leaves.iter();
    let leaves = leaves.map(|(page, frame)| (page - first, *frame)).collect();
    let ranges = state.ranges.values().map(PfnRange::pages).collect();
    let before = rig.board.port.log.len();
    unmap(&mut rig, mapped);
    assert!(rig.state().ranges.is_empty() && rig.state().leaves.is_empty());
    (ranges, rig.board.port.log.len() - before, leaves)
}

/// A linked request equals a list in everything that costs: one range of the same pages, the same
/// entries, one invalidation. Pieces that are mapped one by one take as many as there are pieces.
fn lists_and_links_have_equal_counts<A: Make, T: MakeTable>() {
    for count in [1_u64, 2, 3, 8, 16, 33] {
        let piece = |n: u64| memory(0x10_0000 + (n << 16) + if n == 0 { 0x80 } else { 0 }, 3000);
        let pieces: Vec<PhysRange> = (0..count).map(piece).collect();
        let list = counted::<A, T, _>(
            |rig| {
                let range = IovaRange::new(Iova::ZERO, 1).unwrap();
                let mut out = vec![DmaSegment { range }; pieces.len()];
                let Rig {
                    board,
                    dma,
                    cpu,
                    at,
                } = rig;
                let request = SgRequest {
                    buffer: 1,
                    pieces: &pieces,
                    direction: TX,
                    limits: SgLimits::default(),
                    out: &mut out,
                };
                dma.map_sg(cpu, board, at, request).unwrap().0
            },
            |rig, mapping| {
                let Rig {
                    board,
                    dma,
                    cpu,
                    at,
                } = rig;
                assert_eq!(dma.unmap_sg(cpu, board, at, mapping).unwrap().0, 1);
            },
        );
        let linked = counted::<A, T, _>(
            |rig| {
                let mut request = reserve(rig, 1, count);
                for piece in &pieces {
                    link(rig, &mut request, *piece).unwrap();
                }
                let Rig {
                    board,
                    dma,
                    cpu,
                    at,
                } = rig;
                dma.sync_request(cpu, board, at, &mut request).unwrap();
                request
            },
            |rig, request| {
                let Rig {
                    board,
                    dma,
                    cpu,
                    at,
                } = rig;
                let released = dma.destroy_request(cpu, board, at, request);
                assert_eq!(released.unwrap().0, 1);
            },
        );
        let singles = counted::<A, T, _>(
            |rig| {
                let Rig {
                    board,
                    dma,
                    cpu,
                    at,
                } = rig;
                let map = |(n, piece): (usize, &PhysRange)| {
                    dma.map_single(cpu, board, at, n as u64, *piece, TX)
                        .unwrap()
                        .0
                };
                pieces.iter().enumerate().map(map).collect::<Vec<_>>()
            },
            |rig, mappings| {
                let Rig {
                    board,
                    dma,
                    cpu,
                    at,
                } = rig;
                for (n, mapping) in mappings.into_iter().enumerate() {
                    let released = dma.unmap_single(cpu, board, at, mapping);
                    assert_eq!(released.unwrap().0, n as u64);
                }
            },
        );
        assert_eq!(list, linked, "{count} pieces");
        assert_eq!((list.0.len(), list.1), (1, 1), "{count} pieces");
        let apart = (singles.0.len(), singles.1);
        assert_eq!(apart, (pieces.len(), pieces.len()), "{count} pieces");
    }
}

#[test]
fn a_linked_request_has_the_counts_of_a_list() {
    lists_and_links_have_equal_counts::<Tree, Plain>();
    lists_and_links_have_equal_counts::<Product, Cached>();
}

#[test]
fn wrong_requests_change_nothing() {
    let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
    {
        let (board, dma, cpu, at) = rig.parts();
        for (pages, empty) in [(0, true), (u64::MAX, false), (LAST_PAGE + 1, false)] {
            let (buffer, error) = dma
                .reserve_request(cpu, board, at, 9, pages, TX)
                .unwrap_err();
            assert_eq!(buffer, 9);
            assert_eq!(error.reason == MapReason::Empty, empty, "{error}");
        }
    }
    assert!(rig.state().ranges.is_empty());
    let mut request = reserve(&mut rig, 1, 3);
    let room = request.room();
    link(&mut rig, &mut request, memory(0x10_0000, 4096)).unwrap();
    let state = rig.state();
    // One page too many, and a piece whose offset takes one more.
    let left = (room - 1) << 12;
    for piece in [memory(0x20_0000, left + 1), memory(0x20_0001, left)] {
        let refused = link(&mut rig, &mut request, piece);
        assert_eq!(refused, Err(MapReason::TooLarge));
    }
    assert_eq!(rig.state(), state);
    assert_eq!(request.room(), room - 1);
    link(&mut rig, &mut request, memory(0x20_0000, left)).unwrap();
    assert_eq!(request.room(), 0);
    let (board, dma, cpu, at) = rig.parts();
    let outcome = dma.destroy_request(cpu, board, at, request).unwrap();
    assert_eq!(Outcome::into_buffer(outcome), Some(1));
    assert!(rig.state().leaves.is_empty());
}

#[test]
fn a_request_without_pieces_frees_its_addresses() {
    let mut rig = Rig::<Product, Cached, _, u64>::new(Strict);
    let request = reserve(&mut rig, 3, 8);
    let (board, dma, cpu, at) = rig.parts();
    let outcome = dma.destroy_request(cpu, board, at, request).unwrap();
    assert_eq!(Outcome::into_buffer(outcome), Some(3));
    assert!(rig.state().ranges.is_empty());
}

/// The request of a failed invalidation stays withheld until the retry.
#[test]
fn a_failed_invalidation_withholds_the_request() {
    for trouble in [InvalidationFailure::Full, InvalidationFailure::Failed] {
        let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
        let mut request = reserve(&mut rig, 4, 2);
        link(&mut rig, &mut request, memory(0x10_0000, 8192)).unwrap();
        let (board, dma, cpu, at) = rig.parts();
        dma.sync_request(cpu, board, at, &mut request).unwrap();
        board.port.touch(at.domain(), request.reserved());
        board.port.fail(0, 1, trouble);
        let error = dma.destroy_request(cpu, board, at, request).unwrap_err();
        let UnmapReason::NotFlushed(_, token) = error.reason else {
            panic!("{error}");
        };
        assert!(!board.port.warm.is_empty());
        let released = dma.retry_invalidation(cpu, board, token).unwrap();
        assert_eq!((released.0, board.port.warm.len()), (4, 0));
        assert!(rig.state().ranges.is_empty());
    }
}

/// A token of another domain, and of a detached one.
#[test]
fn requests_belong_to_their_domain() {
    let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
    let mut request = reserve(&mut rig, 5, 2);
    link(&mut rig, &mut request, memory(0x10_0000, 4096)).unwrap();
    let other = {
        let Rig { board, dma, .. } = &mut rig;
        let device = ringfence_types::RequesterId::new(0x20);
        let mask = ringfence_types::Iova::new(u64::MAX);
        dma.attach(device, mask, |domain| {
            let accounts = Accounts::new(Tree::make(LAST_PAGE));
            let rounding = ringfence_dma::space::Rounding::Exact;
            let table = Plain::make(board, domain);
            Ok::<_, ()>(ringfence_dma::space::Paged::new(accounts, table, rounding))
        })
        .unwrap()
    };
    let Rig {
        board, dma, cpu, ..
    } = &mut rig;
    let piece = memory(0x20_0000, 4096);
    let refused = dma.link_piece(cpu, board, &other, &mut request, piece);
    assert_eq!(refused.unwrap_err().reason, MapReason::NotAttached);
    let refused = dma.sync_request(cpu, board, &other, &mut request);
    assert_eq!(refused.unwrap_err().reason, MapReason::NotAttached);
    let error = dma
        .destroy_request(cpu, board, &other, request)
        .unwrap_err();
    assert!(
        matches!(&error.reason, UnmapReason::OtherDomain(_, held) if *held.buffer() == 5),
        "{error}"
    );
}

/// Under a burst the request is withheld, under a deferred policy it comes back stale. Random
/// requests: the table maps exactly the linked pages of live requests.
#[test]
fn the_table_maps_the_linked_pages_and_no_others() {
    fn run<F: FlushPolicy<Space<Product, Cached>, u64>>(flush: F) {
        let mut rig = Rig::<Product, Cached, F, u64>::new(flush);
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut below = |bound: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % bound
        };
        let mut live: Vec<(LinkedRequest<u64>, Vec<Leaf>)> = Vec::new();
        for step in 0..400 {
            match below(8) {
                0..2 if live.len() < 12 => {
                    live.push((reserve(&mut rig, step, 1 + below(20)), Vec::new()));
                }
                2..6 if !live.is_empty() => {
                    let which = below(live.len() as u64) as usize;
                    let (request, pages) = &mut live[which];
                    let start = 0x10_0000 + below(400) * PAGE + below(4096);
                    let piece = memory(start, 1 + below(3 * PAGE));
                    let count = ((start & 0xfff) + piece.bytes()).div_ceil(PAGE);
                    let room = request.room();
                    match link(&mut rig, request, piece) {
                        Ok(range) => {
                            let first = range.start().get() >> 12;
                            pages.extend((0..count).map(|n| (first + n, (start >> 12) + n)));
                            assert_eq!(request.room(), room - count);
                        }
                        Err(reason) => {
                            assert_eq!(reason, MapReason::TooLarge);
                            assert!(count > room);
                        }
                    }
                }
                6 if !live.is_empty() => {
                    let (request, _) = live.swap_remove(below(live.len() as u64) as usize);
                    let (board, dma, cpu, at) = rig.parts();
                    let _ = dma.destroy_request(cpu, board, at, request).unwrap();
                    dma.end_burst(cpu, board, at, TX, drop).unwrap();
                }
                _ => {}
            }
            let mut expected: Vec<(u64, PhysAddr)> = live
                .iter()
                .flat_map(|(_, pages)| pages)
                .map(|(iova, frame)| (*iova, PhysAddr::new(frame << 12)))
                .collect();
            expected.sort_unstable();
            assert_eq!(rig.state().leaves, expected, "step {step}");
        }
    }
    run(Strict);
    run(Burst::default());
    run(Deferred::with(4, 1_000_000, std::cell::RefCell::new));
}
