//! Invalid input: each call returns a typed error that names the reason and the range, leaves the
//! state unchanged, and never panics.

mod exhaustion;
mod foreign;

use ringfence_dma::flush::Strict;
use ringfence_dma::space::Rounding;
use ringfence_dma::{
    DmaSegment, FlushPolicy, MapReason, Mapping, Released, SgLimits, SgRequest, UnmapReason,
};
use ringfence_iova::AllocError;
use ringfence_pgtable::UnmapError as TableError;
use ringfence_types::{Direction, Iova, IovaRange, Pfn, PhysAddr, PhysRange};

use crate::rig::*;

const DIRECTION: Direction = Direction::ToDevice;

fn whole() -> PhysRange {
    PhysRange::new(PhysAddr::ZERO, u64::MAX).unwrap()
}

fn segments<const N: usize>() -> [DmaSegment; N] {
    let range = IovaRange::new(Iova::ZERO, 1).unwrap();
    [DmaSegment { range }; N]
}

#[test]
fn sizes_of_nothing_and_of_everything() {
    // An empty range cannot be expressed: a range has at least one byte.
    assert!(PhysRange::new(PhysAddr::ZERO, 0).is_none());
    let mut rig = Rig::<Product, Cached, _, u64>::new(Strict);
    let state = rig.state();
    let words = rig.board.words();
    let (board, dma, cpu, at) = rig.parts();
    let limits = SgLimits::default();
    let (buffer, error) = dma
        .map_sg(
            cpu,
            board,
            at,
            SgRequest {
                buffer: 1,
                pieces: &[],
                direction: DIRECTION,
                limits,
                out: &mut [],
            },
        )
        .unwrap_err();
    assert_eq!(
        (buffer, error.reason, error.buffer),
        (1, MapReason::Empty, None)
    );
    let error = dma.alloc_coherent(cpu, board, at, 0).unwrap_err();
    assert_eq!(error.reason, MapReason::Empty);
    assert!(
        dma.map_multi(cpu, board, at, Vec::new())
            .unwrap()
            .is_empty()
    );
    dma.unmap_multi(cpu, board, at, Vec::new(), |_| {}).unwrap();

    for (start, bytes) in [
        (0, u64::MAX),
        (1, u64::MAX),
        (u64::MAX, 1),
        (u64::MAX - 4095, 4096),
    ] {
        let memory = PhysRange::new(PhysAddr::new(start), bytes).unwrap();
        let (buffer, error) = dma
            .map_single(cpu, board, at, 2, memory, DIRECTION)
            .unwrap_err();
        assert_eq!(
            (buffer, error.buffer, error.device),
            (2, Some(memory), DEVICE)
        );
        let expected = |reason| match reason {
            MapReason::Alloc(AllocError::Exhausted { pages, .. }) => {
                pages == memory.pages(ringfence_types::PageSize::Size4K)
            }
            MapReason::Table(ringfence_pgtable::MapError::PhysicalBeyondWidth { at }) => {
                at == memory.start().align_down(PAGE)
            }
            _ => false,
        };
        assert!(expected(error.reason), "{error}");
    }
    // Lists whose page count overflows.
    let many = vec![whole(); 5000];
    let mut out = segments::<1>();
    let (_, error) = dma
        .map_sg(
            cpu,
            board,
            at,
            SgRequest {
                buffer: 3,
                pieces: &many,
                direction: DIRECTION,
                limits,
                out: &mut out,
            },
        )
        .unwrap_err();
    assert!(
        matches!(
            error.reason,
            MapReason::TooLarge | MapReason::TooManySegments
        ),
        "{error}"
    );
    let mut out = segments::<5000>();
    let (_, error) = dma
        .map_sg(
            cpu,
            board,
            at,
            SgRequest {
                buffer: 3,
                pieces: &many,
                direction: DIRECTION,
                limits,
                out: &mut out,
            },
        )
        .unwrap_err();
    assert_eq!(error.reason, MapReason::TooLarge);
    let error = dma.alloc_coherent(cpu, board, at, usize::MAX).unwrap_err();
    assert_eq!(error.reason, MapReason::OutOfMemory);
    assert_eq!(rig.state(), state);
    assert_eq!(rig.board.words(), words);
}

#[test]
fn unmaps_of_unmapped_ranges() {
    fn refused<A: Make, T: MakeTable>(finds: bool)
    where
        Strict:
            ringfence_dma::FlushPolicy<Space<A, T>, u64, Outcome = ringfence_dma::Released<u64>>,
    {
        let mut rig = Rig::<A, T, Strict, u64>::new(Strict);
        let (board, dma, cpu, at) = rig.parts();
        let buffer = memory(0x10_0010, 2 * PAGE);
        let (mapping, _) = dma
            .map_single(cpu, board, at, 1, buffer, DIRECTION)
            .unwrap();
        let range = mapping.range();
        assert_eq!(range.pages(ringfence_types::PageSize::Size4K), 3);
        let state = rig.state();
        let first = Pfn::containing(range.start()).get();
        // (first page, pages): after, before, across the end, elsewhere, the highest page
        for (page, pages) in [
            (first + 3, 1),
            (first - 1, 3),
            (first, 5),
            (7, 1),
            (LAST_PAGE + 1, 1),
            (Pfn::MAX.get(), 1),
            (0, 1 << 52),
        ] {
            let (board, dma, cpu, at) = rig.parts();
            let wrong = ringfence_types::PfnRange::new(Pfn::new(page), pages).unwrap();
            let claim = Mapping::claim(at, wrong.iovas(), DIRECTION, 2);
            let error = dma.unmap_single(cpu, board, at, claim).unwrap_err();
            assert_eq!((error.device, error.range), (DEVICE, wrong.iovas()));
            match error.reason {
                UnmapReason::Table(
                    TableError::NotMapped { .. } | TableError::BeyondWidth { .. },
                    buffer,
                ) if *buffer.buffer() == 2 => {}
                UnmapReason::NotAllocated(buffer) if finds && *buffer.buffer() == 2 => {}
                other => panic!("{other:?} for {wrong}"),
            }
            assert!(board.port.log.is_empty(), "nothing to invalidate");
            assert_eq!(rig.state(), state, "{wrong}");
        }
        // Unmapped twice.
        let (board, dma, cpu, at) = rig.parts();
        let _ = dma.unmap_single(cpu, board, at, mapping).unwrap();
        let claim = Mapping::claim(at, range, DIRECTION, 3);
        let error = dma.unmap_single(cpu, board, at, claim).unwrap_err();
        assert!(matches!(
            error.reason,
            UnmapReason::Table(TableError::NotMapped { .. }, buffer) if *buffer.buffer() == 3
        ));
        assert!(rig.accounts().out.borrow().is_empty());
    }
    refused::<Tree, Plain>(true);
    refused::<Product, Cached>(false);
    refused::<Bits, Plain>(false);
    refused::<Tree, Gas>(true);
}

/// A tree knows the size of a range: it rejects a part of a mapping that the table alone would
/// clear.
#[test]
fn a_part_of_a_mapping() {
    let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
    let (board, dma, cpu, at) = rig.parts();
    let buffer = memory(0x10_0000, 3 * PAGE);
    let (mapping, _) = dma
        .map_single(cpu, board, at, 1, buffer, DIRECTION)
        .unwrap();
    let first = Pfn::containing(mapping.iova());
    let state = rig.state();
    for (skip, pages) in [(0, 1), (0, 2), (1, 2), (2, 1)] {
        let (board, dma, cpu, at) = rig.parts();
        let part = ringfence_types::PfnRange::new(Pfn::new(first.get() + skip), pages).unwrap();
        let claim = Mapping::claim(at, part.iovas(), DIRECTION, 2);
        let error = dma.unmap_single(cpu, board, at, claim).unwrap_err();
        assert!(
            matches!(&error.reason, UnmapReason::NotAllocated(b) if *b.buffer() == 2),
            "{error}"
        );
        assert_eq!(rig.state(), state);
    }
}

/// A part of a mapping can have the same rounded reservation as the whole mapping. The table
/// distinguishes them.
#[test]
fn a_part_of_a_rounded_mapping() {
    fn refused<T: MakeTable>()
    where
        Strict: FlushPolicy<Space<Tree, T>, u64, Outcome = Released<u64>>,
    {
        for whole in 2..=16_u64 {
            let power_of_two = Rounding::PowerOfTwo;
            let mask = Iova::new(u64::MAX);
            let mut rig = Rig::<Tree, T, _, u64>::with(Strict, LAST_PAGE, mask, power_of_two);
            let (board, dma, cpu, at) = rig.parts();
            let buffer = memory(0x10_0000, whole * PAGE);
            let (mapping, _) = dma
                .map_single(cpu, board, at, 1, buffer, DIRECTION)
                .unwrap();
            let first = Pfn::containing(mapping.iova());
            let state = rig.state();
            for pages in 1..whole {
                let (board, dma, cpu, at) = rig.parts();
                let part = ringfence_types::PfnRange::new(first, pages).unwrap();
                let claim = Mapping::claim(at, part.iovas(), DIRECTION, 2);
                let Err(error) = dma.unmap_single(cpu, board, at, claim) else {
                    panic!("{pages} of {whole} pages are unmapped");
                };
                assert!(
                    matches!(&error.reason, UnmapReason::NotAllocated(b) if *b.buffer() == 2),
                    "{error}"
                );
                assert!(board.port.log.is_empty());
                assert_eq!(rig.state(), state, "{pages} of {whole} pages");
            }
            let (board, dma, cpu, at) = rig.parts();
            let _ = dma.unmap_single(cpu, board, at, mapping).unwrap();
            assert!(rig.accounts().out.borrow().is_empty());
        }
    }
    refused::<Plain>();
    refused::<Cached>();
    refused::<Gas>();
}

/// A bitmap frees page by page: the given part is freed, and the remaining part stays mapped until
/// it is claimed.
#[test]
fn a_part_of_a_mapping_in_a_bitmap() {
    type Space = ringfence_dma::space::Paged<Bits, Plain>;
    let mut board = Board::new();
    let mut dma = ringfence_dma::Dma::<Space, Strict, u64>::new(Strict);
    let mask = Iova::new(u64::MAX);
    let at = dma
        .attach(DEVICE, mask, |domain| {
            let exact = ringfence_dma::space::Rounding::Exact;
            Ok::<_, ()>(Space::new(
                Bits::make(4),
                Plain::make(&board, domain),
                exact,
            ))
        })
        .unwrap();
    let mut cpu = dma.cpu();
    let map = |board: &mut Board, cpu: &mut _, buffer, pages| {
        let memory = memory(0x10_0000, pages * PAGE);
        dma.map_single(cpu, board, &at, buffer, memory, DIRECTION)
            .map(|(mapping, _)| mapping)
    };
    let whole = map(&mut board, &mut cpu, 1, 3).unwrap();
    let (first, rest) = (whole.iova(), whole.iova().checked_add(PAGE).unwrap());
    let part = Mapping::claim(&at, IovaRange::new(first, PAGE).unwrap(), DIRECTION, 2);
    let _ = dma.unmap_single(&mut cpu, &mut board, &at, part).unwrap();
    // Other maps get two of the four pages; the two in the middle stay with the mapping.
    for buffer in [3, 4] {
        let other = map(&mut board, &mut cpu, buffer, 1).unwrap();
        let pages = ringfence_types::PfnRange::covering(&other.range());
        let held = IovaRange::new(rest, 2 * PAGE).unwrap();
        assert!(!pages.overlaps(&ringfence_types::PfnRange::covering(&held)));
    }
    assert!(map(&mut board, &mut cpu, 5, 1).is_err());
    let held = Mapping::claim(&at, IovaRange::new(rest, 2 * PAGE).unwrap(), DIRECTION, 6);
    let _ = dma.unmap_single(&mut cpu, &mut board, &at, held).unwrap();
    assert!(map(&mut board, &mut cpu, 7, 2).is_ok());
}

/// The text of an error names the device and the range.
#[test]
fn errors_name_range_and_device() {
    let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
    let (board, dma, cpu, at) = rig.parts();
    let (_, error) = dma
        .map_single(cpu, board, at, 1, memory(0x1000, 1 << 40), DIRECTION)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot map 0x1000..=0x10000000fff for 00:03.0: no free range of 268435456 pages at or \
        below page 0xfffffffffffff"
    );
    let range = IovaRange::new(Iova::new(0x5000), 0x10).unwrap();
    let claim = Mapping::claim(at, range, DIRECTION, 1);
    let error = dma.unmap_single(cpu, board, at, claim).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot unmap 0x5000..=0x500f of 00:03.0: 0x5000 is not mapped"
    );
}
