//! Scatterlists: the device's segments cover the list byte by byte, in order, within the limits.

use proptest::prelude::*;

use ringfence_dma::flush::{FlushPolicy, Never, Strict};
use ringfence_dma::space::{AddressLimits, Identity};
use ringfence_dma::{Dma, DmaSegment, MapReason, SgLimits, SgRequest};
use ringfence_types::{
    Direction, DomainId, Iova, IovaRange, Permissions, Pfn, PhysAddr, PhysRange, RingId,
};

use crate::rig::*;

fn room(count: usize) -> Vec<DmaSegment> {
    let range = IovaRange::new(Iova::ZERO, 1).unwrap();
    vec![DmaSegment { range }; count]
}

/// Returns the physical address behind every byte of the segments.
fn bytes_behind<A: Make, T: MakeTable, F: FlushPolicy<Space<A, T>, u64>>(
    rig: &Rig<A, T, F, u64>,
    segments: &[DmaSegment],
) -> Vec<u64> {
    let mut bytes = Vec::new();
    for segment in segments {
        let mut at = segment.range.start().get();
        while at <= segment.range.last().get() {
            let page = rig.leaf(Pfn::containing(Iova::new(at)).get()).unwrap();
            bytes.push(page.get() + at % PAGE);
            at += 1;
        }
    }
    bytes
}

fn bytes_of(pieces: &[PhysRange]) -> Vec<u64> {
    let all = pieces.iter();
    all.flat_map(|piece| piece.start().get()..=piece.last().get())
        .collect()
}

/// Asserts that neither addresses nor translations of the segments exist.
fn assert_gone<A: Make, T: MakeTable, F: FlushPolicy<Space<A, T>, u64>>(
    rig: &Rig<A, T, F, u64>,
    segments: &[DmaSegment],
) {
    assert!(rig.accounts().out.borrow().is_empty());
    for DmaSegment { range } in segments {
        let pages = ringfence_types::PfnRange::covering(range);
        for page in pages.lo().get()..=pages.hi().get() {
            assert_eq!(rig.leaf(page), None);
        }
    }
}

fn assert_within(segments: &[DmaSegment], pieces: &[PhysRange], limits: SgLimits) {
    let longest = pieces.iter().map(|piece| piece.bytes()).max().unwrap();
    for DmaSegment { range } in segments {
        assert!(range.bytes() <= limits.max_bytes.max(longest), "{range}");
        if let Some(b) = limits.boundary {
            assert_eq!(range.start().get() / b, range.last().get() / b, "{range}");
        }
    }
}

fn piece() -> impl Strategy<Value = PhysRange> {
    // Pieces that begin or end at a page boundary are likely to merge.
    let start = prop_oneof![(0_u64..64).prop_map(|page| page * PAGE), 0_u64..64 * PAGE,];
    let bytes = prop_oneof![(1_u64..4).prop_map(|pages| pages * PAGE), 1_u64..3 * PAGE,];
    (start, bytes).prop_map(|(start, bytes)| memory(start, bytes))
}

fn limits() -> impl Strategy<Value = SgLimits> {
    let boundary = prop_oneof![Just(None), (12_u32..16).prop_map(|bits| Some(1 << bits))];
    (1_u64..6 * PAGE, boundary).prop_map(|(max_bytes, boundary)| SgLimits {
        max_bytes,
        boundary,
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 96,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn segments_cover_the_list(
        pieces in prop::collection::vec(piece(), 1..8),
        limits in limits(),
        short in 0_usize..12,
    ) {
        let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
        let Rig { board, dma, cpu, at } = &mut rig;
        let mut out = room(64);
        let (mapping, count) = dma
            .map_sg(
                cpu,
                board,
                at,
                SgRequest {
                    buffer: 1,
                    pieces: &pieces,
                    direction: Direction::ToDevice,
                    limits,
                    out: &mut out,
                },
            )
            .unwrap();
        prop_assert_eq!(bytes_behind(&rig, &out[..count]), bytes_of(&pieces));
        assert_within(&out[..count], &pieces, limits);
        let first = out[0].range.start();
        prop_assert_eq!(mapping.range().unwrap().start(), first);
        let Rig { board, dma, cpu, at } = &mut rig;
        prop_assert_eq!(dma.unmap_sg(cpu, board, at, mapping).unwrap().0, 1);
        assert_gone(&rig, &out[..count]);
        // The same with a shorter array: either rejected and undone, or it fits too.
        let full = out[..count].to_vec();
        let log = rig.board.port.log.len();
        let Rig { board, dma, cpu, at } = &mut rig;
        let mut out = room(short);
        match dma.map_sg(
            cpu,
            board,
            at,
            SgRequest {
                buffer: 2,
                pieces: &pieces,
                direction: Direction::ToDevice,
                limits,
                out: &mut out,
            },
        ) {
            Ok((mapping, fewer)) => {
                prop_assert_eq!(fewer, count);
                drop(mapping);
            }
            Err((2, error)) => {
                prop_assert!(short < count);
                prop_assert_eq!(error.reason, MapReason::TooManySegments);
                assert_gone(&rig, &full);
                // Installed entries were invalidated before their addresses became free.
                prop_assert!(rig.board.port.log.len() <= log + 1);
            }
            Err(other) => prop_assert!(false, "{:?}", other),
        }
    }

    /// If device addresses are physical ones, adjacent pieces need not meet at a page boundary.
    #[test]
    fn identity_lists_lead_to_themselves(
        pieces in prop::collection::vec(piece(), 1..6),
        cuts in prop::collection::vec(1_u64..3 * PAGE, 0..4),
        limits in limits(),
    ) {
        // A run of adjacent pieces, cut at any byte, after arbitrary ones.
        let mut pieces = pieces;
        let mut at = 200 * PAGE + 5;
        for bytes in cuts {
            pieces.push(memory(at, bytes));
            at += bytes;
        }
        let mut board = Board::new();
        let mut dma = Dma::<Identity, Never, u64>::new(Never);
        let attached = dma
            .attach(DEVICE, Iova::new(u64::MAX), |domain| Ok::<_, ()>(Identity::new(domain)))
            .unwrap();
        let mut cpu = dma.cpu();
        for pieces in [&pieces[..], &pieces[pieces.len() / 2..]] {
            let mut out = room(64);
            let (mapping, count) = dma
                .map_sg(
                    &mut cpu,
                    &mut board,
                    &attached,
                    SgRequest {
                        buffer: 1,
                        pieces,
                        direction: Direction::ToDevice,
                        limits,
                        out: &mut out,
                    },
                )
                .unwrap();
            let told: Vec<_> = out[..count]
                .iter()
                .map(|s| {
                    PhysRange::new(PhysAddr::new(s.range.start().get()), s.range.bytes()).unwrap()
                })
                .collect();
            prop_assert_eq!(bytes_of(&told), bytes_of(pieces));
            assert_within(&out[..count], pieces, limits);
            // No single range represents the whole list.
            prop_assert_eq!(mapping.range(), None);
            let _ = dma.unmap_sg(&mut cpu, &mut board, &attached, mapping).unwrap();
        }
    }
}

/// A run is mapped at consecutive pages or rejected: pieces that meet inside a page would share it.
#[test]
fn identity_runs_meet_where_pages_do() {
    use ringfence_dma::space::AddressSpace as Role;
    let mut board = Board::new();
    let space = Identity::new(DomainId::new(1));
    let all = Pfn::new((1 << 36) - 1);
    let limits = AddressLimits {
        preferred: all,
        mask: all,
        ring: RingId::new(0),
    };
    for (meeting, is_run) in [(2 * PAGE, true), (2 * PAGE - 7, false), (PAGE + 1, false)] {
        let pieces = [memory(PAGE, meeting - PAGE), memory(meeting, 10)];
        let permissions = Permissions::READ_WRITE;
        let placed = Role::map(&space, &mut (), &mut board, &pieces, permissions, limits);
        let expected = if is_run {
            Ok(IovaRange::new(Iova::new(PAGE), meeting - PAGE + 10).unwrap())
        } else {
            Err(MapReason::NotContiguous)
        };
        assert_eq!(placed.map(|placed| placed.range), expected, "{meeting:#x}");
    }
}

#[test]
fn neighbours_merge_as_far_as_the_limits_go() {
    let pages = |from: u64, count: u64| -> Vec<PhysRange> {
        (0..count)
            .map(|i| memory((from + 2 * i) * PAGE, PAGE))
            .collect()
    };
    // (pieces, longest segment, boundary, segments)
    for (pieces, max_bytes, boundary, expected) in [
        (pages(1, 4), 65536, None, 1),
        (pages(1, 4), 2 * PAGE, None, 2),
        (pages(1, 4), 3 * PAGE, None, 2),
        (pages(1, 4), 1, None, 4),
        (pages(1, 4), 65536, Some(PAGE), 4),
        (vec![memory(100, 8), memory(5000, 8)], 65536, None, 2),
        (
            vec![memory(100, PAGE - 100), memory(8 * PAGE, 8)],
            65536,
            None,
            1,
        ),
        // The range begins at page 0xffd of 0xfff: the last of its three pages lies after a 2-page
        // boundary.
        (vec![memory(0, 3 * PAGE)], 65536, Some(2 * PAGE), 2),
        // Pages 0xff4 to 0xfff. The boundary splits the two middle pieces, and their parts fill the
        // segments of their neighbours. By lengths alone, no two pieces fit into one segment.
        (
            (0..4).map(|i| memory(8 * i * PAGE, 3 * PAGE)).collect(),
            4 * PAGE,
            Some(4 * PAGE),
            3,
        ),
    ] {
        let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
        let (board, dma, cpu, at) = rig.parts();
        let limits = SgLimits {
            max_bytes,
            boundary,
        };
        // The array has room for exactly the expected segments.
        let mut out = room(expected);
        let direction = Direction::ToDevice;
        let (_mapping, count) = dma
            .map_sg(
                cpu,
                board,
                at,
                SgRequest {
                    buffer: 1,
                    pieces: &pieces,
                    direction,
                    limits,
                    out: &mut out,
                },
            )
            .unwrap();
        assert_eq!(count, expected, "{pieces:?} {limits:?}");
    }
}

#[test]
fn impossible_boundaries_are_refused() {
    for boundary in [0, 1, 2048, 3 * PAGE, u64::MAX] {
        let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
        let (board, dma, cpu, at) = rig.parts();
        let limits = SgLimits {
            max_bytes: 65536,
            boundary: Some(boundary),
        };
        let pieces = [memory(0, 3 * PAGE)];
        let direction = Direction::ToDevice;
        let (_, error) = dma
            .map_sg(
                cpu,
                board,
                at,
                SgRequest {
                    buffer: 1,
                    pieces: &pieces,
                    direction,
                    limits,
                    out: &mut room(4),
                },
            )
            .unwrap_err();
        assert_eq!(error.reason, MapReason::BadLimits);
        assert!(rig.state().ranges.is_empty());
    }
}
