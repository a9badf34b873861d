//! Input that makes no sense: a typed error that says what and where, the state as before, never a panic.

use ringfence_dma::flush::{Burst, Deferred, Strict};
use ringfence_dma::{
    AttachError, FreeCoherentError, MapReason, Mapping, Segment, SgLimits, SgRequest, UnmapReason,
};
use ringfence_iova::AllocError;
use ringfence_pgtable::UnmapError as TableError;
use ringfence_types::{DeviceId, Direction, Iova, IovaRange, Pfn, PhysAddr, PhysRange};

use crate::rig::*;

const DIRECTION: Direction = Direction::ToDevice;

fn whole() -> PhysRange {
    PhysRange::new(PhysAddr::ZERO, u64::MAX).unwrap()
}

fn segments<const N: usize>() -> [Segment; N] {
    let range = IovaRange::new(Iova::ZERO, 1).unwrap();
    [Segment { range }; N]
}

#[test]
fn sizes_of_nothing_and_of_everything() {
    // Nothing cannot be said: a range has at least one byte.
    assert!(PhysRange::new(PhysAddr::ZERO, 0).is_none());
    let mut rig = Rig::<Product, Cached, _, u64>::new(Strict);
    let state = rig.state();
    let words = rig.board.words();
    let Rig {
        board,
        dma,
        cpu,
        at,
    } = &mut rig;
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
    // Lists whose pages cannot even be counted.
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
fn unmaps_of_what_is_not_mapped() {
    fn refused<A: Make, T: MakeTable>(finds: bool)
    where
        Strict: ringfence_dma::Flush<Space<A, T>, u64, Outcome = ringfence_dma::Released<u64>>,
    {
        let mut rig = Rig::<A, T, Strict, u64>::new(Strict);
        let Rig {
            board,
            dma,
            cpu,
            at,
        } = &mut rig;
        let buffer = memory(0x10_0010, 2 * PAGE);
        let (mapping, _) = dma
            .map_single(cpu, board, at, 1, buffer, DIRECTION)
            .unwrap();
        let range = mapping.range();
        assert_eq!(range.pages(ringfence_types::PageSize::Size4K), 3);
        let state = rig.state();
        let first = Pfn::containing(range.start()).get();
        // (first page, pages): beyond, below, over the end, elsewhere, the end of the world
        for (page, pages) in [
            (first + 3, 1),
            (first - 1, 3),
            (first, 5),
            (7, 1),
            (LAST_PAGE + 1, 1),
            (Pfn::MAX.get(), 1),
            (0, 1 << 52),
        ] {
            let Rig {
                board,
                dma,
                cpu,
                at,
            } = &mut rig;
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
        // Twice.
        let Rig {
            board,
            dma,
            cpu,
            at,
        } = &mut rig;
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

/// A tree knows the size of a range: a part of a mapping is refused where the table alone would clear it.
#[test]
fn a_part_of_a_mapping() {
    let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
    let Rig {
        board,
        dma,
        cpu,
        at,
    } = &mut rig;
    let buffer = memory(0x10_0000, 3 * PAGE);
    let (mapping, _) = dma
        .map_single(cpu, board, at, 1, buffer, DIRECTION)
        .unwrap();
    let first = Pfn::containing(mapping.iova());
    let state = rig.state();
    for (skip, pages) in [(0, 1), (0, 2), (1, 2), (2, 1)] {
        let Rig {
            board,
            dma,
            cpu,
            at,
        } = &mut rig;
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

/// A bitmap frees page by page: a part goes, the rest stays mapped until it is claimed.
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
    // Two of four pages are left to others, and the two in the middle to the mapping.
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

#[test]
fn attachments_of_another_layer_and_mappings_of_another_device() {
    let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
    let mut second = Rig::<Tree, Plain, _, u64>::new(Strict);
    let board = &second.board;
    let other = second
        .dma
        .attach(DeviceId::new(0x20), Iova::new(u64::MAX), |domain| {
            let accounts = Accounts::new(Tree::make(LAST_PAGE));
            let rounding = ringfence_dma::space::Rounding::Exact;
            Ok::<_, ()>(ringfence_dma::space::Paged::new(
                accounts,
                Plain::make(board, domain),
                rounding,
            ))
        })
        .unwrap();
    // The first layer knows no second domain.
    let buffer = memory(0x10_0000, 1);
    let Rig {
        board,
        dma,
        cpu,
        at,
    } = &mut rig;
    let (back, error) = dma
        .map_single(cpu, board, &other, 1, buffer, DIRECTION)
        .unwrap_err();
    assert_eq!((back, error.reason), (1, MapReason::NotAttached));
    assert_eq!(error.device, other.device());
    let mapping = Mapping::claim(
        &other,
        IovaRange::new(Iova::new(0x1000), 1).unwrap(),
        DIRECTION,
        2,
    );
    let error = dma.unmap_single(cpu, board, &other, mapping).unwrap_err();
    assert!(matches!(error.reason, UnmapReason::NotAttached(b) if *b.buffer() == 2));
    assert_eq!(
        dma.alloc_coherent(cpu, board, &other, 1)
            .unwrap_err()
            .reason,
        MapReason::NotAttached
    );
    assert!(dma.space(&other).is_none());
    dma.flush(cpu, board, &other).unwrap();
    dma.end_burst(cpu, board, &other, DIRECTION, |_| {})
        .unwrap();
    assert_eq!(
        dma.attach_to(DeviceId::new(1), Iova::new(u64::MAX), &other),
        Err(AttachError::NoSuchDomain)
    );
    assert!(dma.space(at).is_some());

    // Two devices of one layer, each with a mapping at the same address.
    let Rig {
        board,
        dma,
        cpu,
        at,
    } = &mut second;
    let (mine, _) = dma
        .map_single(cpu, board, at, 1, buffer, DIRECTION)
        .unwrap();
    let (theirs, _) = dma
        .map_single(cpu, board, &other, 2, buffer, DIRECTION)
        .unwrap();
    assert_eq!(mine.iova(), theirs.iova());
    let range = mine.range();
    let error = dma.unmap_single(cpu, board, &other, mine).unwrap_err();
    match error.reason {
        UnmapReason::OtherDomain(domain, buffer) => {
            assert_eq!((domain, buffer.into_buffer()), (at.domain(), 1));
        }
        other => panic!("{other:?}"),
    }
    let rings = dma.alloc_coherent(cpu, board, at, 1).unwrap();
    let (error, rings) = dma.free_coherent(cpu, board, &other, rings).unwrap_err();
    assert_eq!(error, FreeCoherentError::NotMapped);
    dma.free_coherent(cpu, board, at, rings).unwrap();
    // Both are still there.
    let error = dma
        .unmap_multi(cpu, board, at, vec![theirs], |_| {})
        .unwrap_err();
    assert!(matches!(
        error.refused.unwrap().reason,
        UnmapReason::OtherDomain(_, buffer) if *buffer.buffer() == 2
    ));
    for (at, buffer) in [(*at, 1), (other, 2)] {
        let claim = Mapping::claim(&at, range, DIRECTION, buffer);
        assert_eq!(dma.unmap_single(cpu, board, &at, claim).unwrap().0, buffer);
    }
}

#[test]
fn attaching() {
    let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
    let attach = |rig: &mut Rig<Tree, Plain, Strict, u64>, mask, result| {
        let made = rig
            .dma
            .attach(DeviceId::new(1), Iova::new(mask), |_| result);
        made.err()
    };
    for mask in [0, 1, 0xffe] {
        let error = attach(&mut rig, mask, Err(()));
        assert_eq!(error, Some(AttachError::BadMask), "{mask:#x}");
    }
    assert_eq!(
        attach(&mut rig, 0xfff, Err(())),
        Some(AttachError::Space(()))
    );
    // A space that answers for a domain that is not the next one.
    let stray = {
        let accounts = Accounts::new(Tree::make(1));
        let table = Plain::make(&rig.board, ringfence_types::DomainId::new(9));
        ringfence_dma::space::Paged::new(accounts, table, ringfence_dma::space::Rounding::Exact)
    };
    assert_eq!(
        attach(&mut rig, 0xfff, Ok(stray)),
        Some(AttachError::WrongDomain)
    );
}

/// Addresses run out: what waits for a flush is flushed and the request tried again, once.
#[test]
fn addresses_run_out() {
    const SPACE: u64 = 8;
    let all = ringfence_dma::space::Rounding::Exact;
    let mask = Iova::new(u64::MAX);
    let flush = Deferred::with(100, u64::MAX, std::cell::RefCell::new);
    let mut rig = Rig::<Tree, Plain, _, u64>::with(flush, SPACE, mask, all);
    let Rig {
        board,
        dma,
        cpu,
        at,
    } = &mut rig;
    let buffer = memory(0x10_0000, PAGE);
    let mut kept = Vec::new();
    for id in 0..SPACE {
        kept.push(
            dma.map_single(cpu, board, at, id, buffer, DIRECTION)
                .unwrap()
                .0,
        );
    }
    // Nothing to flush: the error, and no retry without end.
    let (_, error) = dma
        .map_single(cpu, board, at, 9, buffer, DIRECTION)
        .unwrap_err();
    let exhausted = |limit| MapReason::Alloc(AllocError::Exhausted { pages: 1, limit });
    assert_eq!(error.reason, exhausted(Pfn::MAX));
    assert!(board.port.log.is_empty());
    // All unmapped and none flushed: the flush happens, and the address comes.
    for mapping in kept.drain(..) {
        let _ = dma.unmap_single(cpu, board, at, mapping).unwrap();
    }
    let (mapping, _) = dma
        .map_single(cpu, board, at, 10, buffer, DIRECTION)
        .unwrap();
    assert_eq!(board.port.log.len(), 1);
    let _ = dma.unmap_single(cpu, board, at, mapping).unwrap();
    // The flush fails: then that is the reason, and nothing becomes free.
    for id in 0..SPACE - 1 {
        kept.push(
            dma.map_single(cpu, board, at, id, buffer, DIRECTION)
                .unwrap()
                .0,
        );
    }
    board.port.fail(0, 1, Trouble::Failed);
    let (_, error) = dma
        .map_single(cpu, board, at, 11, buffer, DIRECTION)
        .unwrap_err();
    assert_eq!(
        error.reason,
        MapReason::Flush(ringfence_types::InvalidationError::Failed)
    );
    dma.map_single(cpu, board, at, 12, buffer, DIRECTION)
        .map(|made| kept.push(made.0))
        .unwrap();
    assert_eq!(kept.len(), SPACE as usize);

    // A bitmap asks for its flush by itself.
    let mut rig = Rig::<Bits, Plain, _, u64>::with(ringfence_dma::flush::PerWrap, SPACE, mask, all);
    let Rig {
        board,
        dma,
        cpu,
        at,
    } = &mut rig;
    for id in 0..SPACE * 3 {
        let (mapping, _) = dma
            .map_single(cpu, board, at, id, buffer, DIRECTION)
            .unwrap();
        let _ = dma.unmap_single(cpu, board, at, mapping).unwrap();
    }
    assert_eq!(board.port.log.len(), 2, "one flush a wrap");
    // Others take whatever a flush releases: an end, and an error that says so.
    let accounts = dma.space(at).unwrap().allocator();
    accounts.fail_after(0, AllocError::NeedsFlush);
    let (_, error) = dma
        .map_single(cpu, board, at, 0, buffer, DIRECTION)
        .unwrap_err();
    let flushes = board.port.log.len() as u32 - 2;
    assert_eq!(error.reason, MapReason::FlushedInVain { flushes });
    assert!((2..100).contains(&flushes), "{flushes}");
    assert!(error.to_string().contains("flushes of the domain"));

    // Withheld addresses come back at the end of the burst, which is the driver's to say.
    let mut rig = Rig::<Tree, Plain, _, u64>::with(Burst::default(), SPACE, mask, all);
    let Rig {
        board,
        dma,
        cpu,
        at,
    } = &mut rig;
    for id in 0..SPACE {
        let (mapping, _) = dma
            .map_single(cpu, board, at, id, buffer, DIRECTION)
            .unwrap();
        let ringfence_dma::Withheld = dma.unmap_single(cpu, board, at, mapping).unwrap();
    }
    let (_, error) = dma
        .map_single(cpu, board, at, 9, buffer, DIRECTION)
        .unwrap_err();
    assert_eq!(error.reason, exhausted(Pfn::MAX));
    dma.end_burst(cpu, board, at, DIRECTION, |_| {}).unwrap();
    assert!(dma.map_single(cpu, board, at, 9, buffer, DIRECTION).is_ok());
}

/// What an embedder prints names the device and the range.
#[test]
fn errors_say_what_and_where() {
    let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
    let Rig {
        board,
        dma,
        cpu,
        at,
    } = &mut rig;
    let (_, error) = dma
        .map_single(cpu, board, at, 1, memory(0x1000, 1 << 40), DIRECTION)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot map 0x1000..=0x10000000fff for 00:03.0: no free range of 268435456 pages at or below page 0xfffffffffffff"
    );
    let range = IovaRange::new(Iova::new(0x5000), 0x10).unwrap();
    let claim = Mapping::claim(at, range, DIRECTION, 1);
    let error = dma.unmap_single(cpu, board, at, claim).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot unmap 0x5000..=0x500f of 00:03.0: 0x5000 is not mapped"
    );
}
