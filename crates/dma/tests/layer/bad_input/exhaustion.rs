//! Exhausted addresses: the failing map changes nothing, and a later map finds addresses that a
//! flush released.

use ringfence_dma::MapReason;
use ringfence_dma::flush::{Burst, Deferred};
use ringfence_iova::AllocError;
use ringfence_types::{Iova, Pfn};

use super::DIRECTION;
use crate::rig::*;

/// If addresses are exhausted, the layer flushes the deferred unmaps and retries the request once.
#[test]
fn addresses_run_out() {
    const SPACE: u64 = 8;
    let all = ringfence_dma::space::Rounding::Exact;
    let mask = Iova::new(u64::MAX);
    let flush = Deferred::with(100, u64::MAX, std::cell::RefCell::new);
    let mut rig = Rig::<Tree, Plain, _, u64>::with(flush, SPACE, mask, all);
    let (board, dma, cpu, at) = rig.parts();
    let buffer = memory(0x10_0000, PAGE);
    let mut kept = Vec::new();
    for id in 0..SPACE {
        kept.push(
            dma.map_single(cpu, board, at, id, buffer, DIRECTION)
                .unwrap()
                .0,
        );
    }
    // Nothing to flush: the map fails without endless retries.
    let (_, error) = dma
        .map_single(cpu, board, at, 9, buffer, DIRECTION)
        .unwrap_err();
    let exhausted = |limit| MapReason::Alloc(AllocError::Exhausted { pages: 1, limit });
    assert_eq!(error.reason, exhausted(Pfn::MAX));
    assert!(board.port.log.is_empty());
    // All unmapped and none flushed: the layer flushes, and the map succeeds.
    for mapping in kept.drain(..) {
        let _ = dma.unmap_single(cpu, board, at, mapping).unwrap();
    }
    let (mapping, _) = dma
        .map_single(cpu, board, at, 10, buffer, DIRECTION)
        .unwrap();
    assert_eq!(board.port.log.len(), 1);
    let _ = dma.unmap_single(cpu, board, at, mapping).unwrap();
    // If the flush fails, the map reports that error, and no address becomes free.
    for id in 0..SPACE - 1 {
        kept.push(
            dma.map_single(cpu, board, at, id, buffer, DIRECTION)
                .unwrap()
                .0,
        );
    }
    board.port.fail(0, 1, InvalidationFailure::Failed);
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

    // A bitmap requests its own flush.
    let mut rig = Rig::<Bits, Plain, _, u64>::with(ringfence_dma::flush::PerWrap, SPACE, mask, all);
    let (board, dma, cpu, at) = rig.parts();
    for id in 0..SPACE * 3 {
        let (mapping, _) = dma
            .map_single(cpu, board, at, id, buffer, DIRECTION)
            .unwrap();
        let _ = dma.unmap_single(cpu, board, at, mapping).unwrap();
    }
    assert_eq!(board.port.log.len(), 2, "one flush a wrap");
    // Other CPUs take every released address: the layer gives up with an error that reports it.
    let accounts = dma.space(at).unwrap().allocator();
    accounts.fail_after(0, AllocError::NeedsFlush);
    let (_, error) = dma
        .map_single(cpu, board, at, 0, buffer, DIRECTION)
        .unwrap_err();
    let flushes = board.port.log.len() as u32 - 2;
    assert_eq!(error.reason, MapReason::FlushRetriesExhausted { flushes });
    assert!((2..100).contains(&flushes), "{flushes}");
    assert!(error.to_string().contains("flushes: other CPUs"));

    // The end of the burst, which the driver decides, releases withheld addresses.
    let mut rig = Rig::<Tree, Plain, _, u64>::with(Burst::default(), SPACE, mask, all);
    let (board, dma, cpu, at) = rig.parts();
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
