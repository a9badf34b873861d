//! Every error returns coherent memory, and its pages are freed once no device reaches them.

use ringfence_dma::FreeCoherentError;
use ringfence_dma::flush::{Burst, FlushPolicy, Strict};
use ringfence_types::{InvalidationError, PfnRange};

use crate::rig::*;

const PAGES: usize = 3;

fn freed_after_its_invalidation<A: Make, T: MakeTable, F>(flush: F)
where
    F: FlushPolicy<Space<A, T>, u64> + Copy,
{
    for (trouble, expected) in [
        (InvalidationFailure::Full, InvalidationError::QueueFull),
        (InvalidationFailure::Failed, InvalidationError::Failed),
    ] {
        let mut rig = Rig::<A, T, F, u64>::new(flush);
        let (board, dma, cpu, at) = rig.parts();
        let rings = dma.alloc_coherent(cpu, board, at, PAGES).unwrap();
        let (range, frames) = (rings.range(), rings.frames().to_vec());
        let pages = PfnRange::covering(&range);
        for (page, frame) in frames.iter().enumerate() {
            let iova = pages.lo().iova().wrapping_add(page as u64 * PAGE);
            let leaf = dma.space(at).unwrap().table().leaf(board, iova);
            assert_eq!(leaf, Some(*frame), "page {page}");
        }
        board.port.touch(at.domain(), pages);
        let free = board.frames.outstanding();
        let out = || dma.space(at).unwrap().allocator().out.borrow().len();

        board.port.fail(0, 2, trouble);
        let mut kept = Some(rings);
        for _ in 0..2 {
            let rings = kept.take().unwrap();
            let (error, rings) = dma.free_coherent(cpu, board, at, rings).unwrap_err();
            assert_eq!(error, FreeCoherentError::NotFlushed(expected));
            assert_eq!((rings.range(), rings.frames()), (range, &frames[..]));
            // The device still reaches the memory, so neither pages nor addresses are reused.
            assert!(board.port.reaches(at.domain(), pages));
            assert_eq!((board.frames.outstanding(), out()), (free, 1));
            kept = Some(rings);
        }
        dma.free_coherent(cpu, board, at, kept.unwrap()).unwrap();
        assert!(!board.port.reaches(at.domain(), pages));
        assert_eq!(out(), 0);
        assert!(free - board.frames.outstanding() >= PAGES);
        assert_eq!(board.frames.wrong_frees(), 0);
    }
}

#[test]
fn coherent_memory_is_reused_after_the_flush() {
    freed_after_its_invalidation::<Tree, Plain, _>(Strict);
    freed_after_its_invalidation::<Product, Cached, _>(Burst::default());
    freed_after_its_invalidation::<Bits, Plain, _>(Strict);
    freed_after_its_invalidation::<Tree, Gas, _>(Strict);
}
