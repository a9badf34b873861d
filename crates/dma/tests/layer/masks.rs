//! Devices with a limited DMA mask (HW16, OS15), and spaces that never change (OS14).

use ringfence_dma::flush::{Never, Strict};
use ringfence_dma::space::{Identity, Rounding, StaticTable};
use ringfence_dma::{Dma, MapReason, ReleasedStale};
use ringfence_iova::AllocError;
use ringfence_pgtable::{Levels, SecondStage, Table};
use ringfence_types::{
    Direction, DomainId, Iova, PageSize, Permissions, Pfn, PfnRange, PhysAddr, PhysRange,
    RequesterId,
};

use crate::rig::*;

const DIRECTION: Direction = Direction::Bidirectional;

/// Masks of 14, 24, 30, 31 and 32 bits: no address lies above the mask, and exhaustion yields an
/// exact error.
#[test]
fn nothing_lies_beyond_the_mask() {
    for bits in [14, 24, 30, 31, 32] {
        let mask = (1_u64 << bits) - 1;
        let last = (1 << 21) - 1;
        let mut rig =
            Rig::<Tree, Plain, _, u64>::with(Strict, last, Iova::new(mask), Rounding::Exact);
        let (board, dma, cpu, at) = rig.parts();
        let half = (1 << (bits - 1)) - PAGE;
        let mut made = Vec::new();
        for id in 0..2 {
            // At most 16 MiB at a time, and at most half of the device's reach.
            let buffer = memory(0, half.min(DATA));
            let (mapping, _) = dma
                .map_single(cpu, board, at, id, buffer, DIRECTION)
                .unwrap();
            assert!(
                mapping.range().last().get() <= mask,
                "{bits}: {}",
                mapping.range()
            );
            made.push(mapping);
        }
        let too_much = PhysRange::new(PhysAddr::ZERO, mask + 1).unwrap();
        let (_, error) = dma
            .map_single(cpu, board, at, 9, too_much, DIRECTION)
            .unwrap_err();
        assert_eq!(
            error.reason,
            MapReason::Alloc(AllocError::Exhausted {
                pages: (mask + 1) / PAGE,
                limit: Pfn::new(mask >> 12),
            }),
            "{bits}"
        );
    }
}

/// A page that the device reaches only in part is not allocated.
#[test]
fn half_a_page_is_none() {
    let mut rig = Rig::<Tree, Plain, _, u64>::with(Strict, 100, Iova::new(0x2ffe), Rounding::Exact);
    let (board, dma, cpu, at) = rig.parts();
    let buffer = memory(0, 1);
    let (mapping, _) = dma
        .map_single(cpu, board, at, 1, buffer, DIRECTION)
        .unwrap();
    assert_eq!(Pfn::containing(mapping.iova()), Pfn::new(1));
    let (_, error) = dma
        .map_single(cpu, board, at, 2, buffer, DIRECTION)
        .unwrap_err();
    let limit = Pfn::new(1);
    assert_eq!(
        error.reason,
        MapReason::Alloc(AllocError::Exhausted { pages: 1, limit })
    );
}

/// 32-bit addresses first; higher ones only when those are exhausted.
#[test]
fn low_addresses_come_first() {
    let last = (1 << 20) + 3;
    let mut rig =
        Rig::<Tree, Plain, _, u64>::with(Strict, last, Iova::new(u64::MAX), Rounding::Exact);
    // All but two pages of the low 4 GiB are allocated.
    let low = (1 << 20) - 3;
    {
        use ringfence_iova::{AllocRequest, IovaAllocator};
        let request = AllocRequest::new(low, Pfn::new((1 << 20) - 1));
        rig.accounts().alloc(&mut (), &request).unwrap();
    }
    let (board, dma, cpu, at) = rig.parts();
    let mut pages = Vec::new();
    let mut first = None;
    for id in 0..6 {
        let (mapping, _) = dma
            .map_single(cpu, board, at, id, memory(0, 1), DIRECTION)
            .unwrap();
        pages.push(Pfn::containing(mapping.iova()).get());
        first.get_or_insert(mapping);
    }
    assert_eq!(pages, [2, 1, last, last - 1, last - 2, last - 3]);
    let (_, error) = dma
        .map_single(cpu, board, at, 7, memory(0, 1), DIRECTION)
        .unwrap_err();
    assert!(matches!(
        error.reason,
        MapReason::Alloc(AllocError::Exhausted { .. })
    ));
    // A low address that becomes free is preferred again.
    let _ = dma.unmap_single(cpu, board, at, first.unwrap()).unwrap();
    let (mapping, _) = dma
        .map_single(cpu, board, at, 8, memory(0, 1), DIRECTION)
        .unwrap();
    assert_eq!(Pfn::containing(mapping.iova()), Pfn::new(2));
}

/// Power-of-two rounding reserves additional addresses but maps no memory there.
#[test]
fn rounding_reserves_and_does_not_map() {
    for pages in 1..=17_u64 {
        let mut rig = Rig::<Tree, Plain, _, u64>::with(
            Strict,
            LAST_PAGE,
            Iova::new(u64::MAX),
            Rounding::PowerOfTwo,
        );
        let (board, dma, cpu, at) = rig.parts();
        let buffer = memory(0x10_0000, pages * PAGE);
        let (mapping, _) = dma
            .map_single(cpu, board, at, 1, buffer, DIRECTION)
            .unwrap();
        let first = Pfn::containing(mapping.iova());
        let reserved = pages.next_power_of_two();
        assert_eq!(first.get() % reserved, 0, "aligned to its size");
        let expected = PfnRange::new(first, reserved).unwrap();
        assert_eq!(
            rig.accounts().out.borrow().get(&first.get()),
            Some(&expected)
        );
        assert_eq!(rig.state().leaves.len() as u64, pages);
        let (board, dma, cpu, at) = rig.parts();
        let _ = dma.unmap_single(cpu, board, at, mapping).unwrap();
        // The invalidation covers the whole reserved range, which an address mask expresses
        // exactly.
        assert!(matches!(
            board.port.log[..],
            [ringfence_types::Invalidation::Pages { range, .. }] if range == expected
        ));
        assert!(rig.state().ranges.is_empty() && rig.state().leaves.is_empty());
    }
}

/// A static map of a whole guest: filled once with the largest pages that fit, and never changed by
/// map and unmap (OS14, HW11).
#[test]
fn a_static_map_is_made_once() {
    let mut board = Board::new();
    let domain = DomainId::new(1);
    let format = SecondStage::new(Levels::Four).with_pages_up_to(PageSize::Size2M);
    let coherency = ringfence_pgtable::Coherency::Coherent;
    let table = Table::new(format, domain, coherency, &*board.arena, &board.frames).unwrap();
    // 2 MiB and two pages, of which the first and the last are covered only in part.
    let guest = [memory(0x1f_f800, 0x20_1000), memory(0x80_0000, PAGE)];
    StaticTable::fill(&table, &board, &guest).unwrap();
    for page in 0..DATA / PAGE {
        let inside = (0x1ff..=0x400).contains(&page) || page == 0x800;
        let leaf = table.lookup(&*board.arena, Pfn::new(page).iova());
        assert_eq!(leaf.is_some(), inside, "{page:#x}");
        if let Some(leaf) = leaf {
            let at = leaf.translate(Pfn::new(page).iova());
            assert_eq!(at.get(), page * PAGE);
            let large = (0x200..0x400).contains(&page);
            assert_eq!(leaf.page == PageSize::Size2M, large, "{page:#x}");
            assert_eq!(leaf.permissions, Permissions::READ_WRITE, "{page:#x}");
        }
    }
    let words = board.words();
    let mut dma = Dma::<Identity, Never, u64>::new(Never);
    let mask = Iova::new(u64::MAX);
    let at = dma
        .attach(RequesterId::new(1), mask, |domain| {
            Ok::<_, ()>(Identity::new(domain))
        })
        .unwrap();
    let mut cpu = dma.cpu();
    let buffer = memory(0x20_0010, 100);
    let (mapping, placed) = dma
        .map_single(&mut cpu, &mut board, &at, 1, buffer, DIRECTION)
        .unwrap();
    assert_eq!((mapping.iova().get(), placed.steps), (0x20_0010, 0));
    let ReleasedStale(1) = dma
        .unmap_single(&mut cpu, &mut board, &at, mapping)
        .unwrap()
    else {
        panic!("another buffer");
    };
    // The unmapped buffer is still translated.
    let leaf = table.lookup(&*board.arena, Iova::new(0x20_0010)).unwrap();
    assert_eq!(leaf.translate(Iova::new(0x20_0010)).get(), 0x20_0010);
    assert_eq!(board.words(), words);
    assert!(board.port.log.is_empty());
}
