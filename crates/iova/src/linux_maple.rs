//! The store of Linux's maple-tree series (Rik van Riel, June 2026, version 3 on the mailing list):
//! allocated ranges with the gaps between them, searched from the top.
//!
//! Behaviour of `__alloc_and_insert_iova_range` in that series. Differences:
//!
//! - The series uses the kernel's maple tree, a B-tree with up to ten ranges in a node. Here a
//!   binary tree tracks the same gaps. Addresses are those of the series;
//!   [`Allocation::steps`] counts binary nodes.
//! - The series defers a free whose store finds no memory. An erase here needs none.
//! - The series fails a 32-bit request at once if a smaller one has failed since the last free
//!   below 4 GiB ("max32_alloc_size"). Here each request searches.

use ringfence_types::{Pfn, PfnRange};

use crate::freebsd::Gaps;
use crate::rbtree::{Index, NIL, RbTree};
use crate::{AllocError, AllocRequest, Allocation, RangeStore, ReusableRange};

/// The tree of allocated ranges. Linux puts it behind [`LinuxRcache`](crate::LinuxRcache).
#[derive(Debug)]
pub struct LinuxMaple {
    tree: RbTree<Gaps>,
    space: PfnRange,
}

/// A search for the highest gap.
#[derive(Debug, Clone, Copy)]
struct Search {
    /// First page that may be used.
    floor: u64,
    /// First page that may not be used.
    limit: u64,
    /// Pages that the gap must have.
    pages: u64,
}

impl Search {
    /// Returns the end of the gap `[from, end)` if it is wide enough below the limit.
    fn fits(&self, from: u64, end: u64) -> Option<u64> {
        let end = end.min(self.limit);
        let width = end.checked_sub(from.max(self.floor))?;
        (width >= self.pages).then_some(end)
    }
}

impl LinuxMaple {
    /// Creates an empty tree over the pages of `space`.
    pub fn new(space: PfnRange) -> Self {
        Self {
            tree: RbTree::new(),
            space,
        }
    }

    /// Returns the number of allocated ranges.
    pub fn ranges(&self) -> usize {
        self.tree.len()
    }

    /// Finds the highest gap in the subtree of `node` and in the gap after it, which ends at `end`
    /// ("mas_empty_area_rev"). Returns the end of the gap. `Err` holds the end of the gap before
    /// the subtree.
    fn highest_gap(
        &self,
        node: Index,
        end: u64,
        search: Search,
        visited: &mut u32,
    ) -> Result<u64, u64> {
        if node == NIL {
            return Err(end);
        }
        *visited = visited.saturating_add(1);
        let gaps = self.tree.summary(node);
        let after = end.min(search.limit).saturating_sub(gaps.last);
        let too_small = gaps.largest.max(after.saturating_sub(1)) < search.pages;
        if too_small || gaps.first >= search.limit {
            return Err(gaps.first);
        }
        let end = match self.highest_gap(self.tree.right(node), end, search, visited) {
            Ok(end) => return Ok(end),
            Err(end) => end,
        };
        if let Some(end) = search.fits(self.tree.hi(node).saturating_add(1), end) {
            return Ok(end);
        }
        self.highest_gap(self.tree.left(node), self.tree.lo(node), search, visited)
    }
}

impl RangeStore for LinuxMaple {
    fn alloc(&mut self, request: &AllocRequest) -> Result<Allocation, AllocError> {
        request.validate()?;
        let (floor, end) = (self.space.lo().get(), self.space.hi().get() + 1);
        let limit = request.limit.get().saturating_add(1).min(end);
        // An aligned range fits into every gap of this size ("search_size").
        let align = 1_u64 << (request.align_order & 63);
        let search = Search {
            floor,
            limit,
            pages: request.pages.saturating_add(align - 1),
        };
        let mut visited = 0;
        let found = match self.highest_gap(self.tree.root(), end, search, &mut visited) {
            Ok(end) => Some(end),
            Err(end) => search.fits(floor, end),
        };
        let end = found.ok_or(request.exhausted())?;
        let lo = (end - request.pages) & !(align - 1);
        let range = PfnRange::new(Pfn::new(lo), request.pages).ok_or(request.exhausted())?;
        self.tree
            .insert(range.lo().get(), range.hi().get())
            .map_err(|_| AllocError::OutOfMemory)?;
        Ok(Allocation {
            range,
            steps: visited,
        })
    }

    fn free(&mut self, range: ReusableRange) -> bool {
        let range = range.range();
        let node = self.tree.containing(range.lo().get());
        if node == NIL || self.find(range.lo()) != Some(range) {
            return false;
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
