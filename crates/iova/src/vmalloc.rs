//! The allocator that Linux's IOVA allocator was modelled on: vmalloc, which allocates the
//! kernel's own virtual addresses.
//!
//! Source: EIOVAR section 9. It names what the two have in common: a red-black tree of allocated
//! ranges, and the position of the last freed range as a cache. From there both walk range by range
//! to a large enough hole; vmalloc walks upwards. The EIOVAR paper gives no further details. The
//! cache may skip ranges only under one condition: it changes the steps of an allocation, but never
//! its result, which is first fit.

use ringfence_types::{Pfn, PfnRange};

use crate::rbtree::{Index, NIL, RbTree};
use crate::{AllocError, AllocRequest, Allocation, Locked, RangeStore, ReusableRange};

/// vmalloc's allocator behind one lock.
pub type Vmalloc<L> = Locked<VmallocTree, L>;

/// The tree with its cached position. [`Allocation::steps`] is the number of ranges walked past.
#[derive(Debug)]
pub struct VmallocTree {
    tree: RbTree<()>,
    space: PfnRange,
    skip: Skip,
}

/// The part of the space that a search may skip.
#[derive(Debug, Clone, Copy)]
struct Skip {
    /// Searches begin after this range. NIL represents the bottom of the space.
    cache: Index,
    /// The largest hole below `cache`, in pages (an upper bound).
    hole: u64,
}

impl Skip {
    const NOTHING: Self = Self {
        cache: NIL,
        hole: 0,
    };
}

impl VmallocTree {
    /// Creates an empty tree over the pages of `space`.
    pub fn new(space: PfnRange) -> Self {
        Self {
            tree: RbTree::new(),
            space,
            skip: Skip::NOTHING,
        }
    }

    /// Returns the number of allocated ranges.
    pub fn ranges(&self) -> usize {
        self.tree.len()
    }

    /// Finds the first fit after `skip.cache`. Returns its first page, the largest hole below it,
    /// and the number of ranges walked past.
    fn first_fit(&self, skip: Skip, request: &AllocRequest) -> Option<(u64, u64, u32)> {
        let top = request.limit.min(self.space.hi()).get().saturating_add(1);
        let (mut floor, mut next) = match skip.cache {
            NIL => (self.space.lo().get(), self.tree.first()),
            cache => (self.tree.hi(cache).saturating_add(1), self.tree.next(cache)),
        };
        let (mut hole, mut steps) = (skip.hole, 0_u32);
        loop {
            let end = if next == NIL {
                top
            } else {
                top.min(self.tree.lo(next))
            };
            if let Some(lo) = request.lowest_in(floor, end) {
                return Some((lo, hole.max(lo.saturating_sub(floor)), steps));
            }
            if end == top {
                return None;
            }
            hole = hole.max(end.saturating_sub(floor));
            floor = self.tree.hi(next).saturating_add(1);
            next = self.tree.next(next);
            steps = steps.saturating_add(1);
        }
    }
}

impl RangeStore for VmallocTree {
    fn alloc(&mut self, request: &AllocRequest) -> Result<Allocation, AllocError> {
        request.validate()?;
        // A hole that was too small for earlier requests may fit this one.
        let from = if request.pages <= self.skip.hole {
            Skip::NOTHING
        } else {
            self.skip
        };
        let (lo, hole, steps) = self
            .first_fit(from, request)
            .ok_or_else(|| request.exhausted())?;
        let range =
            PfnRange::new(Pfn::new(lo), request.pages).ok_or_else(|| request.exhausted())?;
        let cache = self
            .tree
            .insert(range.lo().get(), range.hi().get())
            .map_err(|_| AllocError::OutOfMemory)?;
        self.skip = Skip { cache, hole };
        Ok(Allocation { range, steps })
    }

    fn free(&mut self, range: ReusableRange) -> bool {
        let range = range.range();
        let node = self.tree.at_or_below(range.lo().get());
        let (lo, hi) = (self.tree.lo(node), self.tree.hi(node));
        if node == NIL || (lo, hi) != (range.lo().get(), range.hi().get()) {
            return false;
        }
        if self.skip.cache != NIL && lo <= self.tree.lo(self.skip.cache) {
            self.skip = match self.tree.prev(node) {
                NIL => Skip::NOTHING,
                cache => Skip {
                    cache,
                    hole: self.skip.hole,
                },
            };
        }
        self.tree.erase(node);
        true
    }

    fn find(&self, page: Pfn) -> Option<PfnRange> {
        match self.tree.containing(page.get()) {
            NIL => None,
            node => PfnRange::inclusive(Pfn::new(self.tree.lo(node)), Pfn::new(self.tree.hi(node))),
        }
    }

    fn footprint(&self) -> usize {
        self.tree.footprint()
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    fn space() -> PfnRange {
        PfnRange::inclusive(Pfn::new(16), Pfn::new(0x3ff)).unwrap()
    }

    fn take(tree: &mut VmallocTree, pages: u64) -> Allocation {
        tree.alloc(&AllocRequest::new(pages, Pfn::MAX)).unwrap()
    }

    fn give(tree: &mut VmallocTree, range: PfnRange) {
        assert!(tree.free(ReusableRange::cached(range)));
    }

    /// Returns the lowest fit, found by checking every page.
    fn lowest(live: &[PfnRange], request: &AllocRequest) -> Option<u64> {
        (space().lo().get()..=space().hi().min(request.limit).get()).find(|lo| {
            let Some(range) = PfnRange::new(Pfn::new(*lo), request.pages) else {
                return false;
            };
            lo & ((1 << request.align_order) - 1) == 0
                && range.hi() <= request.limit
                && space().contains(&range)
                && !live.iter().any(|other| other.overlaps(&range))
        })
    }

    /// With random sizes, alignments and limits, every allocation is the lowest fit, wherever the
    /// search began.
    #[test]
    fn the_cache_never_changes_the_answer() {
        for seed in 1..=20_u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut below = |bound: u64| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state % bound
            };
            let mut tree = VmallocTree::new(space());
            let mut live: Vec<PfnRange> = Vec::new();
            for step in 0..500 {
                if below(5) < 3 {
                    let limit = if below(4) == 0 {
                        Pfn::new(below(0x400))
                    } else {
                        Pfn::MAX
                    };
                    let most = 1 << below(6);
                    let request = AllocRequest {
                        align_order: if below(3) == 0 { below(5) as u8 } else { 0 },
                        ..AllocRequest::new(1 + below(most), limit)
                    };
                    let expected = lowest(&live, &request);
                    let got = tree.alloc(&request).ok().map(|found| found.range);
                    assert_eq!(
                        got.map(|range| range.lo().get()),
                        expected,
                        "seed {seed}, step {step}: {request:?}"
                    );
                    live.extend(got);
                } else if !live.is_empty() {
                    let index = below(live.len() as u64) as usize;
                    give(&mut tree, live.swap_remove(index));
                }
            }
        }
    }

    /// "Both cache the location of the last freed range": the next allocation of that size takes
    /// that range without a step. Ranges freed above it need a walk.
    #[test]
    fn a_freed_range_is_the_next_place_to_look() {
        let mut tree = VmallocTree::new(space());
        let all: Vec<PfnRange> = (0..100).map(|_| take(&mut tree, 1).range).collect();
        for (at, steps) in [(80, 0), (60, 0), (40, 0), (0, 0), (99, 98)] {
            give(&mut tree, all[at]);
            let found = take(&mut tree, 1);
            assert_eq!((found.range, found.steps), (all[at], steps));
        }
    }

    /// Like its descendant, the search walks past a hole that is too small and past all ranges
    /// after it.
    #[test]
    fn holes_that_are_too_small_make_long_searches() {
        let mut tree = VmallocTree::new(space());
        let all: Vec<PfnRange> = (0..100).map(|_| take(&mut tree, 1).range).collect();
        give(&mut tree, all[10]);
        let two = take(&mut tree, 2);
        assert_eq!((two.range.lo().get(), two.steps), (16 + 100, 89));
        // The hole is remembered; a search for a range that fits begins at the bottom.
        let one = take(&mut tree, 1);
        assert_eq!((one.range, one.steps), (all[10], 10));
    }
}
