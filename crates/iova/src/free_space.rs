//! Free ranges in a tree that knows, for each subtree, the largest range and the largest aligned
//! block: what stands behind the [`Magazines`](crate::Magazines).
//!
//! Where Linux searches allocated ranges one by one (EIOVAR section 4), this finds the highest free
//! range that fits in a logarithmic number of nodes, whatever is allocated, and joins a freed range
//! with its neighbours. The summary of subtrees is the idea of FreeBSD's allocator (EIOVAR section
//! 7), applied to free instead of allocated ranges.

use ringfence_types::{Pfn, PfnRange};

use crate::rbtree::{Index, NIL, RbTree, Summary};
use crate::{AllocError, AllocRequest, Allocation, RangeStore, ReusableRange};

/// What a subtree of free ranges can serve.
#[derive(Debug, Clone, Copy, Default)]
struct Largest {
    /// Pages of the longest range.
    pages: u64,
    /// One more than the order of the largest naturally aligned power-of-two block; 0 if there is
    /// none.
    order_plus_1: u8,
}

/// One more than the order of the largest aligned block inside `[lo, hi]`.
#[inline]
fn largest_block(lo: u64, hi: u64) -> u8 {
    let pages = hi - lo + 1;
    // The largest power of two that is no longer than the range...
    let order = 63 - pages.leading_zeros();
    let mask = (1_u64 << order) - 1;
    let start = (lo + mask) & !mask;
    // ...fits if it can start on a multiple of itself; half of it always fits.
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
    /// Ranges handed out: an upper bound on how many free ranges there can be later, less one.
    handed_out: usize,
    free_pages: u64,
}

/// What a search looks for: a request, and which subtrees are worth a visit.
struct FitSearch<'a> {
    request: &'a AllocRequest,
    order_plus_1: u8,
    pages: u64,
}

impl FreeSpace {
    /// All pages of `space` free.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] for the first record.
    pub fn new(space: PfnRange) -> Result<Self, AllocError> {
        let mut free = RbTree::new();
        free.insert(space.lo().get(), space.hi().get())
            .map_err(|_| AllocError::OutOfMemory)?;
        Ok(Self {
            free,
            space,
            handed_out: 0,
            free_pages: space.pages(),
        })
    }

    /// Pages that are free.
    pub fn free_pages(&self) -> u64 {
        self.free_pages
    }

    /// Number of separate free ranges: 1 when everything is free or used from one end, more with
    /// fragmentation.
    pub fn fragments(&self) -> usize {
        self.free.len()
    }

    /// The highest place for `want` below `top` (exclusive) in the subtree of `node`. Visits the
    /// boundary's path and one that leads to the place; recursion is as deep as the tree.
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
        let natural =
            u32::from(request.align_order) == request.order() && request.pages.is_power_of_two();
        // Any range of pages + alignment - 1 contains a place; an aligned power of two needs
        // exactly its block; and one page in line needs only length. In these cases the summary is
        // exact and no subtree is visited in vain.
        let sure = FitSearch {
            request,
            order_plus_1: if natural {
                request.align_order.saturating_add(1)
            } else {
                0
            },
            pages: if natural {
                request.pages
            } else {
                request
                    .pages
                    .saturating_add((1_u64 << (request.align_order & 63)) - 1)
            },
        };
        let root = self.free.root();
        let found = self.search(root, top, &sure, visited);
        if found.is_some() || natural || request.align_order == 0 {
            return found;
        }
        // Odd sizes with large alignment: a shorter range may do if it happens to lie right.
        let perhaps = FitSearch {
            request,
            // An aligned place of so many pages begins with an aligned block of the power of two
            // below.
            order_plus_1: (request.pages.ilog2() as u8)
                .min(request.align_order)
                .saturating_add(1),
            pages: request.pages,
        };
        self.search(root, top, &perhaps, visited)
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
        // Room for the records of every range that can come back: free cannot fail.
        let handed_out = self.handed_out.saturating_add(1);
        self.free
            .reserve(handed_out.saturating_add(1))
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
        self.handed_out = handed_out;
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
        self.handed_out = self.handed_out.saturating_sub(1);
        self.free_pages = self.free_pages.saturating_add(range.pages());
        true
    }

    /// Free ranges say where nothing is allocated, not how the rest is divided.
    fn find(&self, _page: Pfn) -> Option<PfnRange> {
        None
    }

    fn footprint(&self) -> usize {
        self.free.footprint()
    }
}
