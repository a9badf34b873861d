//! Frames taken from the host in advance (section 4.6, "Pre-allocated page pool"; Fig. 10).

use core::fmt;

use ringfence_types::{FrameSource, OutOfFrames, PhysAddr};

/// Pointers in the ring: 1 MiB of pages.
pub const POOL_PAGES: usize = 256;
/// With fewer pages than these, the pool asks for more.
pub const REFILL_BELOW: usize = 64;

/// What a pool has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Pages taken from the ring.
    pub from_ring: u64,
    /// Pages taken from the host's allocator while the ring was empty.
    pub from_host: u64,
    /// Refills that asked the host for pages.
    pub refills: u64,
}

/// A ring of pages: taken at its head, appended at its tail.
pub struct PagePool<S: FrameSource> {
    host: S,
    ring: [PhysAddr; POOL_PAGES],
    /// Place of the oldest page.
    head: usize,
    available: usize,
    /// Whether the ring is filled at all.
    in_advance: bool,
    stats: PoolStats,
}

impl<S: FrameSource> PagePool<S> {
    /// A pool over the host's allocator, filled as far as that gives pages.
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

    /// Gives the ring's pages back: from here on each page is asked of the host when it is needed,
    /// as without the optimisation.
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

    /// A page that reads zero: the oldest of the ring, or one from the host if there is none.
    ///
    /// # Errors
    /// The host has none either.
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

    /// Gives a page back to the host: it may hold a guest's data, which no pool hands to the next
    /// one.
    pub fn free(&mut self, page: PhysAddr) {
        self.host.free(page);
    }

    /// Fills the ring if fewer than [`REFILL_BELOW`] pages are left. Off the way of requests.
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
            if let Some(place) = self.ring.get_mut(tail) {
                *place = page;
            }
            self.available += 1;
        }
    }

    /// Pages in the ring.
    pub const fn available(&self) -> usize {
        self.available
    }

    /// What was done so far.
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
