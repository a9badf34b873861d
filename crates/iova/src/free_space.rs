//! Free ranges in a tree that tracks the longest range and the largest aligned block of each
//! subtree. The [`Magazines`](crate::Magazines) allocate from it.
//!
//! Linux searches allocated ranges one by one (EIOVAR section 4). This tree finds the highest free
//! range that fits in a logarithmic number of nodes, whatever is allocated, and merges a freed
//! range with its neighbours. It applies the subtree summaries of FreeBSD's allocator (EIOVAR
//! section 7) to free instead of allocated ranges.

use ringfence_types::{Pfn, PfnRange};

use crate::rbtree::{Index, NIL, RbTree, Summary};
use crate::{AllocError, AllocRequest, Allocation, RangeStore, ReusableRange};

/// Upper bounds on the requests that a subtree of free ranges can serve.
#[derive(Debug, Clone, Copy, Default)]
struct Largest {
    /// Pages of the longest range.
    pages: u64,
    /// One plus the order of the largest naturally aligned power-of-two block; 0 for an empty
    /// subtree.
    order_plus_1: u8,
}

/// Returns one plus the order of the largest aligned block inside `[lo, hi]`.
#[inline]
fn largest_block(lo: u64, hi: u64) -> u8 {
    let pages = hi - lo + 1;
    // The largest power of two that is not longer than the range...
    let order = 63 - pages.leading_zeros();
    let mask = (1_u64 << order) - 1;
    let start = (lo + mask) & !mask;
    // ...fits if the range contains an aligned start for it. Half of it always fits.
    if start + mask <= hi {
        order as u8 + 1
    } else {
        order as u8
    }
}

impl Summary for Largest {
    const TRACKED: bool = true;

    #[inline]
    fn of(lo: u64, hi: u64, left: &Self, right: &Self) -> Self {
        Self {
            pages: (hi - lo + 1).max(left.pages).max(right.pages),
            order_plus_1: largest_block(lo, hi)
                .max(left.order_plus_1)
                .max(right.order_plus_1),
        }
    }
}

/// The free ranges of one address space.
#[derive(Debug)]
pub struct FreeSpace {
    free: RbTree<Largest>,
    space: PfnRange,
    /// Number of allocated ranges. There can never be more free ranges than this number plus one.
    allocated: usize,
    free_pages: u64,
}

/// A request, with the bounds that select the subtrees to visit.
struct FitSearch<'a> {
    request: &'a AllocRequest,
    order_plus_1: u8,
    pages: u64,
}

impl FreeSpace {
    /// Creates the allocator with all pages of `space` free.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] if the first record cannot be allocated.
    pub fn new(space: PfnRange) -> Result<Self, AllocError> {
        let mut free = RbTree::new();
        free.insert(space.lo().get(), space.hi().get())
            .map_err(|_| AllocError::OutOfMemory)?;
        Ok(Self {
            free,
            space,
            allocated: 0,
            free_pages: space.pages(),
        })
    }

    /// Returns the number of free pages.
    pub fn free_pages(&self) -> u64 {
        self.free_pages
    }

    /// Returns the number of separate free ranges: 1 if everything is free or allocated from one
    /// end, more with fragmentation.
    pub fn fragments(&self) -> usize {
        self.free.len()
    }

    /// Returns the highest start for `want` below `top` (exclusive) in the subtree of `node`.
    /// Visits the path along the boundary and one path to the result. The recursion depth is the
    /// tree's height.
    fn search(
        &self,
        node: Index,
        top: u64,
        want: &FitSearch<'_>,
        visited: &mut u32,
    ) -> Option<(Index, u64)> {
        let largest = self.free.summary(node);
        if node == NIL || largest.order_plus_1 < want.order_plus_1 || largest.pages < want.pages {
            return None;
        }
        *visited = visited.saturating_add(1);
        let (lo, hi) = (self.free.lo(node), self.free.hi(node));
        if lo < top {
            if let Some(found) = self.search(self.free.right(node), top, want, visited) {
                return Some(found);
            }
            if let Some(start) = want.request.highest_in(lo, top.min(hi.saturating_add(1))) {
                return Some((node, start));
            }
        }
        self.search(self.free.left(node), top, want, visited)
    }

    fn find_fit(&self, request: &AllocRequest, visited: &mut u32) -> Option<(Index, u64)> {
        let top = request
            .limit
            .get()
            .min(self.space.hi().get())
            .saturating_add(1);
        let is_aligned =
            u32::from(request.align_order) == request.order() && request.pages.is_power_of_two();
        // In three cases the summary is exact, so every subtree that the search enters contains a
        // fit. Any range of pages + alignment - 1 contains one. An aligned power of two needs a
        // block of its size. An alignment of one page needs only length.
        let exact = FitSearch {
            request,
            order_plus_1: if is_aligned {
                request.align_order.saturating_add(1)
            } else {
                0
            },
            pages: if is_aligned {
                request.pages
            } else {
                request
                    .pages
                    .saturating_add((1_u64 << (request.align_order & 63)) - 1)
            },
        };
        let root = self.free.root();
        let found = self.search(root, top, &exact, visited);
        if found.is_some() || is_aligned || request.align_order == 0 {
            return found;
        }
        // Other sizes with large alignment: a shorter range may fit, depending on its start.
        let approximate = FitSearch {
            request,
            // An aligned range of this many pages begins with an aligned block of the next lower
            // power of two.
            order_plus_1: (request.pages.ilog2() as u8)
                .min(request.align_order)
                .saturating_add(1),
            pages: request.pages,
        };
        self.search(root, top, &approximate, visited)
    }
}

impl RangeStore for FreeSpace {
    const HAS_LOOKUP: bool = false;

    fn alloc(&mut self, request: &AllocRequest) -> Result<Allocation, AllocError> {
        request.validate()?;
        let mut visited = 0;
        let (node, start) = self
            .find_fit(request, &mut visited)
            .ok_or_else(|| request.exhausted())?;
        let range =
            PfnRange::new(Pfn::new(start), request.pages).ok_or_else(|| request.exhausted())?;
        // Reserve records for every range that can be freed later, so that free cannot fail.
        let allocated = self.allocated.saturating_add(1);
        self.free
            .reserve(allocated.saturating_add(1))
            .map_err(|_| AllocError::OutOfMemory)?;
        let (lo, hi) = (self.free.lo(node), self.free.hi(node));
        let last = range.hi().get();
        if start == lo && last == hi {
            self.free.erase(node);
        } else if last == hi {
            self.free.resize(node, lo, start - 1);
        } else if start == lo {
            self.free.resize(node, last + 1, hi);
        } else {
            self.free.resize(node, lo, start - 1);
            if self.free.insert(last + 1, hi).is_err() {
                self.free.resize(node, lo, hi);
                return Err(AllocError::OutOfMemory);
            }
        }
        self.allocated = allocated;
        self.free_pages = self.free_pages.saturating_sub(request.pages);
        Ok(Allocation {
            range,
            steps: visited.saturating_sub(1),
        })
    }

    fn free(&mut self, range: ReusableRange) -> bool {
        let range = range.range();
        let (lo, hi) = (range.lo().get(), range.hi().get());
        let below = self.free.at_or_below(hi);
        if !self.space.contains(&range) || (below != NIL && self.free.hi(below) >= lo) {
            return false;
        }
        let above = if below == NIL {
            self.free.first()
        } else {
            self.free.next(below)
        };
        let joins_below = below != NIL && self.free.hi(below) + 1 == lo;
        let joins_above = above != NIL && hi + 1 == self.free.lo(above);
        match (joins_below, joins_above) {
            (true, true) => {
                let top = self.free.hi(above);
                self.free.erase(above);
                self.free.resize(below, self.free.lo(below), top);
            }
            (true, false) => self.free.resize(below, self.free.lo(below), hi),
            (false, true) => self.free.resize(above, lo, self.free.hi(above)),
            (false, false) => {
                if self.free.insert(lo, hi).is_err() {
                    return false;
                }
            }
        }
        self.allocated = self.allocated.saturating_sub(1);
        self.free_pages = self.free_pages.saturating_add(range.pages());
        true
    }

    /// Returns `None`: free ranges do not show where allocated ranges begin and end.
    fn find(&self, _page: Pfn) -> Option<PfnRange> {
        None
    }

    fn footprint(&self) -> usize {
        self.free.footprint()
    }
}
