//! The allocator of Linux 3.4: a red-black tree of allocated ranges, searched downwards from
//! a cached node.
//!
//! Source: EIOVAR section 4 and Fig. 2; where the figure is silent, `drivers/iommu/iova.c` of
//! Linux 3.4. Its names: `cached32_node` is the cached node, and `dma_32bit_pfn` the last page of
//! the 32-bit space, or of a smaller space. Without a cached node, the search starts at the highest
//! range; ranges above the limit count as steps. Only requests whose limit is `dma_32bit_pfn` use
//! and move the cached node. The figure has no such bound; Linux caches a successor only if it
//! begins below that page (`pfn_lo < dma_32bit_pfn`).
//!
//! The code departs from Linux 3.4 in two points. Ranges of different sizes leave gaps above the
//! cached node, so a search from it can fail although space exists. Linux then reports exhaustion;
//! this code searches again from the top, and adds both step counts. And Linux never allocates
//! pages 0 and 1, while the space says here which page is the lowest.

use ringfence_types::{Pfn, PfnRange};

use crate::allocator::LAST_32BIT_PAGE;
use crate::rbtree::{Index, NIL, RbTree};
use crate::{AllocError, AllocRequest, Allocation, Locked, RangeStore, ReusableRange};

/// The allocator of Linux 3.4 behind one lock.
pub type CachedRbTree<L> = Locked<CachedTree, L>;

/// The tree of allocated ranges with its cached node.
#[derive(Debug)]
pub struct CachedTree {
    tree: RbTree<()>,
    space: PfnRange,
    /// `dma_32bit_pfn`. Requests with this limit start at the cached node and move it.
    cached_limit: u64,
    /// C of Fig. 2 ("cached32_node"). With NIL, no node is cached.
    cached_node: Index,
}

/// The reason why a tree could not be created from the given ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InitialRangesError {
    /// The range lies outside the space.
    Outside(PfnRange),
    /// The range overlaps an earlier one.
    Overlaps(PfnRange),
    /// No range begins at the page given for the cached node.
    NoSuchRange(Pfn),
    /// The range at the page given for the cached node begins above the 32-bit space.
    CachedNodeTooHigh(Pfn),
    /// Out of memory for the tree.
    OutOfMemory,
}

impl core::fmt::Display for InitialRangesError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Outside(range) => write!(f, "{range} lies outside the space"),
            Self::Overlaps(range) => write!(f, "{range} overlaps an earlier range"),
            Self::NoSuchRange(page) => write!(f, "no range begins at page {page}"),
            Self::CachedNodeTooHigh(page) => {
                write!(
                    f,
                    "page {page} of the cached node lies above the 32-bit space"
                )
            }
            Self::OutOfMemory => f.write_str("out of memory for the tree"),
        }
    }
}

impl core::error::Error for InitialRangesError {}

impl CachedTree {
    /// Creates an empty tree over the pages of `space`.
    pub fn new(space: PfnRange) -> Self {
        Self {
            tree: RbTree::new(),
            space,
            cached_limit: space.hi().get().min(LAST_32BIT_PAGE),
            cached_node: NIL,
        }
    }

    /// Creates a tree in which `ranges` are allocated. The cached node is the range that begins at
    /// `cached_page`; `None` for no cached node.
    ///
    /// # Errors
    /// See [`InitialRangesError`].
    pub fn with_allocated(
        space: PfnRange,
        ranges: impl IntoIterator<Item = PfnRange>,
        cached_page: Option<Pfn>,
    ) -> Result<Self, InitialRangesError> {
        let mut created = Self::new(space);
        for range in ranges {
            if !space.contains(&range) {
                return Err(InitialRangesError::Outside(range));
            }
            let (lo, hi) = (range.lo().get(), range.hi().get());
            let below = created.tree.at_or_below(hi);
            if below != NIL && created.tree.hi(below) >= lo {
                return Err(InitialRangesError::Overlaps(range));
            }
            created
                .tree
                .insert(lo, hi)
                .map_err(|_| InitialRangesError::OutOfMemory)?;
        }
        if let Some(page) = cached_page {
            let node = created.tree.at_or_below(page.get());
            if node == NIL || created.tree.lo(node) != page.get() {
                return Err(InitialRangesError::NoSuchRange(page));
            }
            if page.get() > created.cached_limit {
                return Err(InitialRangesError::CachedNodeTooHigh(page));
            }
            created.cached_node = node;
        }
        Ok(created)
    }

    /// Returns the first page of the cached node's range, C in EIOVAR Table 1. `None` if no node is
    /// cached.
    pub fn cached_page(&self) -> Option<Pfn> {
        (self.cached_node != NIL).then(|| Pfn::new(self.tree.lo(self.cached_node)))
    }

    /// Returns the number of allocated ranges.
    pub fn ranges(&self) -> usize {
        self.tree.len()
    }

    /// The loop of Fig. 2: walks down from `top` (exclusive) and the range `left` until the gap
    /// between them is large enough. Adds its iterations to `steps`.
    #[inline]
    fn search(
        &self,
        mut left: Index,
        mut top: u64,
        request: &AllocRequest,
        steps: &mut u32,
    ) -> Option<u64> {
        loop {
            let floor = if left == NIL {
                self.space.lo().get()
            } else {
                self.tree.hi(left).saturating_add(1)
            };
            // A range above the limit, or across it, leaves no gap: its floor lies above `top`.
            if let Some(lo) = request.highest_in(floor, top) {
                return Some(lo);
            }
            if left == NIL {
                return None;
            }
            top = top.min(self.tree.lo(left));
            left = self.tree.prev(left);
            *steps = steps.saturating_add(1);
        }
    }
}

impl RangeStore for CachedTree {
    fn alloc(&mut self, request: &AllocRequest) -> Result<Allocation, AllocError> {
        request.validate()?;
        let limit = request.limit.get().min(self.space.hi().get());
        let uses_cached_node = limit == self.cached_limit;
        let mut steps = 0;
        let mut found = None;
        if uses_cached_node && self.cached_node != NIL {
            let (left, top) = (
                self.tree.prev(self.cached_node),
                self.tree.lo(self.cached_node),
            );
            found = self.search(left, top, request, &mut steps);
        }
        if found.is_none() {
            found = self.search(
                self.tree.last(),
                limit.saturating_add(1),
                request,
                &mut steps,
            );
        }
        let range = found
            .and_then(|lo| PfnRange::new(Pfn::new(lo), request.pages))
            .ok_or_else(|| request.exhausted())?;
        let node = self
            .tree
            .insert(range.lo().get(), range.hi().get())
            .map_err(|_| AllocError::OutOfMemory)?;
        if uses_cached_node {
            self.cached_node = node;
        }
        Ok(Allocation { range, steps })
    }

    fn free(&mut self, range: ReusableRange) -> bool {
        let range = range.range();
        let (lo, hi) = (range.lo().get(), range.hi().get());
        let node = self.tree.at_or_below(lo);
        if node == NIL || (self.tree.lo(node), self.tree.hi(node)) != (lo, hi) {
            return false;
        }
        if self.cached_node != NIL && lo >= self.tree.lo(self.cached_node) {
            let next = self.tree.next(node);
            // `__cached_rbnode_delete_update`: a successor at the last page of the 32-bit space
            // does not become the cached node.
            self.cached_node = if next != NIL && self.tree.lo(next) < self.cached_limit {
                next
            } else {
                NIL
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
