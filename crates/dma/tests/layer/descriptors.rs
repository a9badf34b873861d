//! Descriptors: withheld buffers, and invalidations by address that keep other translations.

use std::cell::RefCell;
use std::collections::BTreeSet;

use ringfence_dma::flush::{Burst, Descriptors};
use ringfence_dma::{Mapping, Outcome};
use ringfence_iova::{Contiguous, FreeBlocks};
use ringfence_types::{CachedLevels, Direction, Invalidation, InvalidationError, PfnRange};

use crate::rig::*;

const BLOCK: u64 = 64;
const RX: Direction = Direction::FromDevice;

/// A layer whose device has used `count` mapped pages.
struct Mapped<F: ringfence_dma::FlushPolicy<Space<Product, Cached>, u64>> {
    rig: Rig<Product, Cached, F, u64>,
    mappings: Vec<Option<Mapping<u64>>>,
    pages: Vec<PfnRange>,
}

impl<F: ringfence_dma::FlushPolicy<Space<Product, Cached>, u64>> Mapped<F> {
    fn new(flush: F, count: u64) -> Self {
        let mut rig = Rig::<Product, Cached, F, u64>::new(flush);
        let (mut mappings, mut pages) = (Vec::new(), Vec::new());
        let (board, dma, cpu, at) = rig.parts();
        for id in 0..count {
            let buffer = memory(0x10_0000 + id % 256 * PAGE, 64);
            let mapped = dma.map_single(cpu, board, at, id, buffer, RX);
            let (mapping, _) = mapped.map_err(|(_, error)| error).unwrap();
            let range = PfnRange::covering(&mapping.range());
            board.port.touch(at.domain(), range);
            pages.push(range);
            mappings.push(Some(mapping));
        }
        Self {
            rig,
            mappings,
            pages,
        }
    }

    fn unmap(&mut self, index: usize) {
        let (board, dma, cpu, at) = self.rig.parts();
        let mapping = self.mappings[index].take().unwrap();
        let outcome = dma.unmap_single(cpu, board, at, mapping).unwrap();
        assert_eq!(
            Outcome::<u64>::into_buffer(outcome),
            None,
            "{index} is back"
        );
    }

    fn end(&mut self) -> (Result<(), InvalidationError>, Vec<u64>) {
        let (board, dma, cpu, at) = self.rig.parts();
        let mut back = Vec::new();
        let result = dma.end_burst(cpu, board, at, RX, |buffer| back.push(buffer));
        (result, back)
    }

    fn reaches(&self, index: usize) -> bool {
        let domain = self.rig.at.domain();
        self.rig.board.port.reaches(domain, self.pages[index])
    }

    fn block(&self, index: usize) -> u64 {
        self.pages[index].lo().get() / BLOCK
    }

    /// Returns the index of a page in each block, in order of address.
    fn one_of_each_block(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.pages.len()).collect();
        order.sort_by_key(|index| self.pages[*index].lo());
        order.dedup_by_key(|index| self.block(*index));
        order
    }
}

/// Blocks that are near each other take one request for their hull. Up to eight that are far apart
/// take one each, and more take one for the domain. `Burst` always takes one.
#[test]
fn descriptors_far_apart_are_invalidated_by_address() {
    for (step, count, by_address) in [(1, 2, 1), (1, 8, 1), (10, 2, 2), (2, 8, 8), (1, 9, 0)] {
        let mut mapped = Mapped::new(Descriptors::default(), 20 * BLOCK);
        let blocks = mapped.one_of_each_block();
        let chosen: Vec<usize> = blocks.iter().step_by(step).take(count).copied().collect();
        assert_eq!(chosen.len(), count);
        chosen.iter().for_each(|index| mapped.unmap(*index));
        let before = mapped.rig.board.port.log.len();
        let (result, back) = mapped.end();
        assert_eq!((result, back.len()), (Ok(()), count));
        let log = &mapped.rig.board.port.log[before..];
        if by_address == 0 {
            assert_eq!(log, [Invalidation::Domain(mapped.rig.at.domain())]);
            continue;
        }
        assert_eq!(log.len(), by_address, "{step} {count}: {log:?}");
        for request in log {
            let Invalidation::Pages { range, levels, .. } = request else {
                panic!("{request:?}");
            };
            assert_eq!(*levels, CachedLevels::Leaves);
            assert!(range.pages() <= BLOCK || by_address == 1, "{range}");
        }
        // Translations in other blocks stay valid.
        let touched: BTreeSet<u64> = chosen.iter().map(|index| mapped.block(*index)).collect();
        for index in 0..mapped.pages.len() {
            if chosen.contains(&index) {
                assert!(!mapped.reaches(index), "{index}");
            } else if by_address > 1 && !touched.contains(&mapped.block(index)) {
                assert!(mapped.reaches(index), "{index} was invalidated");
            }
        }
    }
    let mut mapped = Mapped::new(Burst::default(), 20 * BLOCK);
    let blocks = mapped.one_of_each_block();
    let (first, last) = (blocks[0], blocks[blocks.len() - 1]);
    mapped.unmap(first);
    mapped.unmap(last);
    mapped.end().0.unwrap();
    let domain = Invalidation::Domain(mapped.rig.at.domain());
    assert_eq!(mapped.rig.board.port.log.last(), Some(&domain));
}

/// A part whose invalidation fails keeps its addresses, and all buffers stay withheld until the
/// retry. Addresses of invalidated parts are free at once.
#[test]
fn a_failed_part_withholds_the_buffers() {
    for trouble in [
        InvalidationFailure::Full,
        InvalidationFailure::Failed,
        InvalidationFailure::FullThenFailed,
    ] {
        for (skip, failing) in [(0, 1), (1, 1), (2, 1), (0, 3), (1, 2)] {
            let mut mapped = Mapped::new(Descriptors::default(), 20 * BLOCK);
            let chosen: Vec<usize> = mapped
                .one_of_each_block()
                .into_iter()
                .step_by(9)
                .take(3)
                .collect();
            chosen.iter().for_each(|index| mapped.unmap(*index));
            mapped.rig.board.port.fail(skip, failing, trouble);
            let why = format!("{trouble:?} {skip} {failing}");
            let (result, back) = mapped.end();
            assert!(result.is_err(), "{why}");
            assert_eq!(back, [], "{why}");
            let unsafe_parts = chosen
                .iter()
                .filter(|index| mapped.reaches(**index))
                .count();
            assert_eq!(unsafe_parts, failing, "{why}");
            let out = mapped.rig.accounts().out.borrow().len();
            assert_eq!(out, mapped.pages.len() - (3 - failing), "{why}");
            mapped.rig.board.port.trouble = None;
            let (result, mut back) = mapped.end();
            back.sort_unstable();
            let mut expected: Vec<u64> = chosen.iter().map(|index| *index as u64).collect();
            expected.sort_unstable();
            assert_eq!((result, back), (Ok(()), expected), "{why}");
            assert!(chosen.iter().all(|index| !mapped.reaches(*index)), "{why}");
            let out = mapped.rig.accounts().out.borrow().len();
            assert_eq!(out, mapped.pages.len() - 3, "{why}");
        }
    }
}

/// Random unmaps and ends, against the set of unmapped pages: no buffer is back while its page is
/// reachable, and every buffer comes back once.
#[test]
fn no_buffer_is_back_before_its_invalidation() {
    for seed in 0..20_u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut below = |bound: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % bound
        };
        let mut mapped = Mapped::new(Descriptors::default(), 20 * BLOCK);
        let mut open: BTreeSet<u64> = BTreeSet::new();
        let mut live: Vec<usize> = (0..mapped.pages.len()).collect();
        while !live.is_empty() {
            for _ in 0..1 + below(400) {
                if live.is_empty() {
                    break;
                }
                let index = live.swap_remove(below(live.len() as u64) as usize);
                mapped.unmap(index);
                open.insert(index as u64);
            }
            let fails = below(3) == 0;
            if fails {
                let trouble = InvalidationFailure::Failed;
                mapped.rig.board.port.fail(below(3) as usize, 9, trouble);
            }
            let (_, back) = mapped.end();
            mapped.rig.board.port.trouble = None;
            for buffer in back {
                assert!(open.remove(&buffer), "seed {seed}: {buffer} is back twice");
                assert!(!mapped.reaches(buffer as usize), "seed {seed}: {buffer}");
            }
        }
        let (result, back) = mapped.end();
        assert_eq!(result, Ok(()));
        assert_eq!(
            back.into_iter().collect::<BTreeSet<_>>(),
            open,
            "seed {seed}"
        );
        assert!(mapped.rig.accounts().out.borrow().is_empty(), "seed {seed}");
    }
}

type Blocks = Contiguous<Product, RefCell<FreeBlocks>>;

impl Make for Blocks {
    fn make(last: u64) -> Self {
        Contiguous::new(Product::make(last), 32, RefCell::new).unwrap()
    }
}

/// Buffers of both directions in turn, as a device with a transmit and a receive ring maps them:
/// each direction gets runs of 64 pages. A descriptor of one run takes one invalidation.
#[test]
fn each_direction_has_its_own_runs() {
    let mut rig = Rig::<Blocks, Cached, _, u64>::new(Descriptors::default());
    let directions = [Direction::ToDevice, RX];
    let mut mapped = [Vec::new(), Vec::new()];
    let (board, dma, cpu, at) = rig.parts();
    for id in 0..4 * BLOCK {
        let which = id as usize % 2;
        let buffer = memory(0x10_0000 + id * PAGE, 64);
        let made = dma.map_single(cpu, board, at, id, buffer, directions[which]);
        mapped[which].push(made.map_err(|(_, error)| error).unwrap().0);
    }
    for (direction, mappings) in directions.into_iter().zip(mapped) {
        let pages = |mapping: &Mapping<u64>| PfnRange::covering(&mapping.range()).lo().get();
        let mut rest = mappings.into_iter().peekable();
        while let Some(first) = rest.peek().map(pages) {
            assert_eq!(first % BLOCK, 0);
            for page in first..first + BLOCK {
                let mapping = rest.next().unwrap();
                assert_eq!(pages(&mapping), page, "{direction}");
                let outcome = dma.unmap_single(cpu, board, at, mapping).unwrap();
                assert_eq!(Outcome::<u64>::into_buffer(outcome), None);
            }
            let before = board.port.log.len();
            let mut back = 0;
            dma.end_burst(cpu, board, at, direction, |_| back += 1)
                .unwrap();
            assert_eq!((back, board.port.log.len() - before), (BLOCK, 1));
        }
    }
    assert!(rig.accounts().out.borrow().is_empty());
}
