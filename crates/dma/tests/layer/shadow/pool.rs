//! The bounds of the pool, and its exhaustion.

use std::cell::RefCell;

use ringfence_dma::flush::Strict;
use ringfence_dma::space::{
    CopyingSpace, Paged, Rounding, ShadowPolicy, ShadowPool, ShadowSpace, WhenExhausted,
};
use ringfence_dma::{Dma, MapReason, Released, ShadowError};
use ringfence_types::{Access, Direction, InvalidationError, Iova};

use super::machine::*;
use crate::rig::*;

/// Maps pages until the layer refuses one.
fn fill(m: &mut Machine, direction: Direction) -> (Vec<ringfence_dma::Mapping<u64>>, MapReason) {
    let mut live = Vec::new();
    loop {
        match m.map(memory(0x1000, PAGE), direction) {
            Ok(mapping) => live.push(mapping),
            Err(error) => return (live, error.reason),
        }
    }
}

#[test]
fn an_exhausted_pool_refuses_until_an_unmap() {
    for pages in [1, 15, 16, 40] {
        let mut m = Machine::new(pages, POLICY);
        let (mut live, reason) = fill(&mut m, Direction::FromDevice);
        assert_eq!(live.len() as u64, pages);
        let exhausted = ShadowError::Exhausted {
            pages: 1,
            pool: pages,
        };
        assert_eq!(reason, MapReason::Shadow(exhausted));
        let pool = m.space().pool();
        assert_eq!(
            (pool.mapped_bytes(), pool.bytes_in_use()),
            (pages * PAGE, pages * PAGE)
        );
        let mapping = live.pop().unwrap();
        m.unmap(mapping);
        let again = m.map(memory(0x1000, PAGE), Direction::FromDevice).unwrap();
        live.push(again);
        for mapping in live.drain(..) {
            m.unmap(mapping);
        }
        let pool = m.space().pool();
        assert_eq!(
            (pool.mapped_bytes(), pool.bytes_in_use()),
            (pages * PAGE, 0)
        );
        // The pages keep their direction: another one finds none.
        let refused = m
            .map(memory(0x1000, PAGE), Direction::ToDevice)
            .unwrap_err();
        assert_eq!(refused.reason, MapReason::Shadow(exhausted));
    }
}

#[test]
fn an_exhausted_pool_maps_pages_if_the_policy_says_so() {
    let policy = ShadowPolicy {
        when_exhausted: WhenExhausted::MapPages,
        ..POLICY
    };
    let mut m = Machine::new(1, policy);
    let shadowed = m.map(memory(0x1000, 8), Direction::FromDevice).unwrap();
    let direct = m.map(memory(0x2000, 8), Direction::FromDevice).unwrap();
    assert_eq!(m.space().direct_pages(), 1);
    m.device_write(direct.iova(), &[7; 8]);
    assert_eq!(
        m.read(0x2000, 8),
        [7; 8],
        "the device writes the buffer itself"
    );
    let iova = direct.iova();
    m.unmap(direct);
    assert_eq!(m.board.port.log.len(), 1, "its unmap invalidates");
    assert_eq!(m.translate(iova, Access::Write), None);
    assert_eq!(m.space().direct_pages(), 0);
    m.unmap(shadowed);
    assert_eq!(m.board.port.log.len(), 1);
}

#[test]
fn slots_of_a_removed_cpu_serve_the_others() {
    let mut m = Machine::new(16, POLICY);
    let (live, _) = fill(&mut m, Direction::ToDevice);
    let mut other = m.dma.cpu();
    for mapping in live {
        let unmapped = m.dma.unmap_single(&mut other, &mut m.board, &m.at, mapping);
        let Released(_) = unmapped.unwrap();
    }
    assert!(m.map(memory(0x1000, 1), Direction::ToDevice).is_err());
    let removed = m.dma.remove_cpu(other, &mut m.board, drop);
    assert!(removed.is_ok());
    let (live, _) = fill(&mut m, Direction::ToDevice);
    assert_eq!(live.len(), 16);
}

#[test]
fn a_cpu_keeps_a_bounded_number_of_free_slots() {
    let mut m = Machine::new(1024, POLICY);
    let (live, _) = fill(&mut m, Direction::ToDevice);
    assert_eq!(live.len(), 1024);
    for mapping in live {
        m.unmap(mapping);
    }
    // Another CPU finds all but the 128 pages that the first one may keep.
    let mut other = m.dma.cpu();
    let mut found = Vec::new();
    while let Ok(mapped) = m.dma.map_single(
        &mut other,
        &mut m.board,
        &m.at,
        0,
        memory(0x1000, 1),
        Direction::ToDevice,
    ) {
        found.push(mapped);
    }
    assert!(found.len() >= 1024 - 128, "{}", found.len());
}

#[test]
fn larger_slots_serve_smaller_buffers_but_not_the_reverse() {
    let mut m = Machine::new(4, POLICY);
    let large = m
        .map(memory(0x1000, 4 * PAGE), Direction::ToDevice)
        .unwrap();
    assert!(m.map(memory(0x1000, 1), Direction::ToDevice).is_err());
    m.unmap(large);
    let small = m.map(memory(0x1000, 1), Direction::ToDevice).unwrap();
    assert_eq!(m.space().pool().bytes_in_use(), 4 * PAGE);
    m.unmap(small);
    let large = m
        .map(memory(0x1000, 4 * PAGE), Direction::ToDevice)
        .unwrap();
    m.unmap(large);
}

#[test]
fn a_pool_has_whole_aligned_pages() {
    let new = |start, bytes| {
        let pool = ShadowPool::new(memory(start, bytes), std::cell::RefCell::new);
        pool.map(|pool| pool.memory().bytes())
    };
    assert_eq!(new(0x1000, 0x3000), Some(0x3000));
    for (start, bytes) in [(0x1008, 0x1000), (0x1000, 0x1001), (0x1000, 0x800)] {
        assert_eq!(new(start, bytes), None, "{bytes:#x} at {start:#x}");
    }
    assert_eq!(new(0, 1 << 44), None);
}

#[test]
fn the_pool_takes_its_addresses_once_and_below_the_mask() {
    let mut m = Machine::new(32, POLICY);
    let one = m.map(memory(0x1000, 1), Direction::ToDevice).unwrap();
    let two = m.map(memory(0x1000, 1), Direction::FromDevice).unwrap();
    let reserved = m.space().paged().allocator().out.borrow().clone();
    assert_eq!(reserved.len(), 1);
    assert_eq!(reserved.values().next().unwrap().pages(), 32);
    // Another device of the domain reaches only the first pages.
    let narrow = m.dma.attach_to(
        ringfence_types::RequesterId::new(0x20),
        Iova::new(0xffff),
        &m.at,
    );
    let at = narrow.unwrap();
    let (board, dma, mut cpu) = (&mut m.board, &m.dma, m.dma.cpu());
    let refused = dma.map_single(
        &mut cpu,
        board,
        &at,
        0,
        memory(0x1000, 1),
        Direction::ToDevice,
    );
    let (_, error) = refused.unwrap_err();
    assert_eq!(error.reason, MapReason::Shadow(ShadowError::BeyondMask));
    m.unmap(one);
    m.unmap(two);
}

/// A table page that waits for its invalidation may hide new entries, so a run of slots below it
/// needs an invalidation too. If that fails, its entries exist, and the device may use them.
#[test]
fn slots_whose_entries_may_be_hidden_are_not_used() {
    let mut board = Board::new();
    let mut dma = Dma::<_, _, u64>::new(Strict);
    let at = dma
        .attach(DEVICE, Iova::new(u64::MAX), |domain| {
            let table = Gas::make(&board, domain);
            let paged = Paged::new(Accounts::new(Tree::make(LAST_PAGE)), table, Rounding::Exact);
            let pool = ShadowPool::new(memory(POOL, 32 * PAGE), RefCell::new).unwrap();
            Ok::<_, ()>(ShadowSpace::new(paged, pool, POLICY))
        })
        .unwrap();
    let mut cpu = dma.cpu();
    let ring = dma.alloc_coherent(&mut cpu, &mut board, &at, 1).unwrap();
    board.port.fail(0, 2, InvalidationFailure::Failed);
    let freed = dma.free_coherent(&mut cpu, &mut board, &at, ring);
    let _ring = freed.expect_err("the invalidation failed").1;
    let buffer = memory(0x1000, 1);
    let mapped = dma.map_single(&mut cpu, &mut board, &at, 7, buffer, Direction::ToDevice);
    let (_, error) = mapped.unwrap_err();
    assert_eq!(error.reason, MapReason::Flush(InvalidationError::Failed));
    // The invalidation works again. The other half of the pool serves one direction.
    let mapped = dma.map_single(&mut cpu, &mut board, &at, 7, buffer, Direction::FromDevice);
    let (mapping, _) = mapped.unwrap();
    let space = dma.space(&at).unwrap();
    assert_eq!(space.pool().mapped_bytes(), 16 * PAGE);
    let slot = space.shadow(mapping.range()).unwrap();
    assert!(slot.start().get() >= POOL + 16 * PAGE);
    let mapped = dma.map_single(&mut cpu, &mut board, &at, 7, buffer, Direction::ToDevice);
    let exhausted = ShadowError::Exhausted { pages: 1, pool: 32 };
    assert_eq!(mapped.unwrap_err().1.reason, MapReason::Shadow(exhausted));
}
