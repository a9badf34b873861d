//! Pre-allocated host frames (PVIOMMU paper, section 4.6, "Pre-allocated page pool"; Fig. 10).

use core::fmt;

use ringfence_types::{FrameSource, OutOfFrames, PhysAddr};

/// Capacity of the ring: 1 MiB of pages.
pub const POOL_PAGES: usize = 256;
/// The pool refills the ring when it holds fewer pages than this.
pub const REFILL_BELOW: usize = 64;

/// Counters of a pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Pages allocated from the ring.
    pub from_ring: u64,
    /// Pages allocated from the host because the ring was empty.
    pub from_host: u64,
    /// Refills from the host.
    pub refills: u64,
}

/// A ring of pages: allocated from the head, refilled at the tail.
pub struct PagePool<S: FrameSource> {
    host: S,
    ring: [PhysAddr; POOL_PAGES],
    /// Index of the oldest page.
    head: usize,
    available: usize,
    /// True if the ring is used; false after [`close`](PagePool::close).
    in_advance: bool,
    stats: PoolStats,
}

impl<S: FrameSource> PagePool<S> {
    /// Creates a pool over the host's allocator and fills its ring as far as the host has pages.
    pub fn new(host: S) -> Self {
        let mut pool = Self {
            host,
            ring: [PhysAddr::ZERO; POOL_PAGES],
            head: 0,
            available: 0,
            in_advance: true,
            stats: PoolStats::default(),
        };
        pool.refill();
        pool
    }

    /// Frees the ring's pages. From now on the pool allocates each page from the host on demand, as
    /// without the optimisation.
    pub fn close(&mut self) {
        self.in_advance = false;
        self.empty();
    }

    fn empty(&mut self) {
        while self.available > 0 {
            if let Some(page) = self.ring.get(self.head) {
                self.host.free(*page);
            }
            self.head = (self.head + 1) % POOL_PAGES;
            self.available -= 1;
        }
    }

    /// Allocates a zeroed page: the oldest of the ring, or one from the host if the ring is empty.
    ///
    /// # Errors
    /// The host has no free page.
    #[inline]
    pub fn alloc(&mut self) -> Result<PhysAddr, OutOfFrames> {
        if self.available == 0 {
            let page = self.host.alloc_zeroed()?;
            self.stats.from_host += 1;
            return Ok(page);
        }
        let page = *self.ring.get(self.head).ok_or(OutOfFrames)?;
        self.head = (self.head + 1) % POOL_PAGES;
        self.available -= 1;
        self.stats.from_ring += 1;
        Ok(page)
    }

    /// Frees a page to the host. It may hold a guest's data, so the pool must not hand it to
    /// another user.
    pub fn free(&mut self, page: PhysAddr) {
        self.host.free(page);
    }

    /// Fills the ring if fewer than [`REFILL_BELOW`] pages are left. Call this outside the request
    /// path.
    #[inline]
    pub fn refill(&mut self) {
        if self.in_advance && self.available < REFILL_BELOW {
            self.fill();
        }
    }

    #[cold]
    fn fill(&mut self) {
        self.stats.refills += 1;
        while self.available < POOL_PAGES {
            let Ok(page) = self.host.alloc_zeroed() else {
                return;
            };
            let tail = (self.head + self.available) % POOL_PAGES;
            if let Some(slot) = self.ring.get_mut(tail) {
                *slot = page;
            }
            self.available += 1;
        }
    }

    /// Returns the number of pages in the ring.
    pub const fn available(&self) -> usize {
        self.available
    }

    /// Returns the counters.
    pub const fn stats(&self) -> &PoolStats {
        &self.stats
    }

    /// The host's allocator.
    pub const fn host(&self) -> &S {
        &self.host
    }
}

impl<S: FrameSource> Drop for PagePool<S> {
    fn drop(&mut self) {
        self.empty();
    }
}

impl<S: FrameSource> fmt::Debug for PagePool<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagePool")
            .field("available", &self.available)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}
