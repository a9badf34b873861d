//! The interface of a reverse translation cache.

use core::fmt;

use ringfence_types::Iova;

use super::MappingKey;

/// A cache of one device's mappings, in use and released (section 4.5, steps 1 to 5 of its last
/// paragraph).
///
/// The users of a mapping are the driver's buffers in the same pages with the same direction. The
/// caller keeps the [`MappingKey`] of each buffer until its release. Mappings leave the cache when
/// they expire. The caller then unmaps all of them with one request. It must not reuse their
/// addresses before the invalidation has completed.
pub trait ReverseCache {
    /// Steps 1 and 5: looks up the mapping of `key` and adds a user. `None` if the cache has no
    /// such mapping, or if it cannot take another user. The caller then maps the buffer and calls
    /// [`insert`](Self::insert).
    fn acquire(&mut self, key: MappingKey) -> Option<Iova>;

    /// Adds a mapping that was made for `key` at `iova`. The mapping has one user, who must
    /// call [`release`](Self::release).
    ///
    /// # Errors
    /// [`NotCached`]: the caller keeps the mapping and unmaps it at its release. After
    /// [`NotCached::Full`], [`evict`](Self::evict) makes room if any mapping is released.
    fn insert(&mut self, key: MappingKey, iova: Iova) -> Result<(), NotCached>;

    /// Step 3: removes a user of `key`. After the last one, the mapping stays cached for the rest
    /// of this cycle and C more, unless the cache keeps no more released mappings
    /// ([`Retained::Removed`]).
    ///
    /// # Errors
    /// [`NotInUse`]: no mapping of that key has a user.
    fn release(&mut self, key: MappingKey) -> Result<Retained, NotInUse>;

    /// Step 4: ends a cycle. Removes the mappings unused for C cycles and passes each to `expired`.
    /// The caller unmaps this batch with one request.
    fn tick(&mut self, expired: impl FnMut(MappingKey, Iova));

    /// Removes the released mappings that would expire next and passes each to `expired`, because
    /// the cache has reached its limit. They have at most a sixteenth of the limit's pages, or are
    /// a single larger mapping.
    fn evict(&mut self, expired: impl FnMut(MappingKey, Iova));

    /// Removes every released mapping, on detach or low memory. Mappings in use stay.
    fn drain(&mut self, expired: impl FnMut(MappingKey, Iova));

    /// Returns the counters.
    fn stats(&self) -> CacheStats;
}

/// The location of a mapping after a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Retained {
    /// The cache keeps the mapping, for other users or for reuse.
    Cached,
    /// The cache removed the mapping with its last user. The caller unmaps it.
    Removed,
}

/// Reason why a mapping was not cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NotCached {
    /// The key has a mapping already.
    Present,
    /// The mapping would exceed the limit of pages.
    Full,
    /// Out of memory.
    OutOfMemory,
    /// The address is no multiple of 4096, or too large for an entry.
    Address(Iova),
}

impl fmt::Display for NotCached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Present => f.write_str("the cache already has a mapping of this key"),
            Self::Full => f.write_str("the cache has its maximum number of pages"),
            Self::OutOfMemory => f.write_str("out of memory for the cache"),
            Self::Address(iova) => write!(f, "{iova} is too high for a cache entry"),
        }
    }
}

impl core::error::Error for NotCached {}

/// Error: release of a mapping that has no user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NotInUse(
    /// The key to release.
    pub MappingKey,
);

impl fmt::Display for NotInUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mapping {} is not in use", self.0)
    }
}

impl core::error::Error for NotInUse {}

/// Pages that [`evict`](ReverseCache::evict) may still remove, in order of release. Corresponds to
/// the kernel module's `pvi_take_unused`.
#[derive(Debug)]
pub struct EvictionBudget {
    pages: u64,
    first: bool,
}

impl EvictionBudget {
    /// Allows every mapping.
    pub const fn all() -> Self {
        Self::new(u64::MAX, true)
    }

    /// Allows a sixteenth of a limit.
    pub fn of(limit: usize) -> Self {
        Self::new(limit.div_ceil(16) as u64, true)
    }

    /// Allows `pages` pages. If `first`, allows the first mapping whatever its size.
    pub const fn new(pages: u64, first: bool) -> Self {
        Self { pages, first }
    }

    /// Returns true if a mapping of `pages` pages may leave. After one rejection, rejects all.
    pub fn takes(&mut self, pages: u64) -> bool {
        let fits = self.pages > 0 && (self.first || pages <= self.pages);
        self.pages = if fits {
            self.pages.saturating_sub(pages)
        } else {
            0
        };
        self.first = false;
        fits
    }
}

/// Counters of a cache since its creation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Lookups that found a mapping.
    pub hits: u64,
    /// Lookups that found none.
    pub misses: u64,
    /// Mappings that the embedder inserted.
    pub inserted: u64,
    /// Mappings that left at the end of a cycle.
    pub expired: u64,
    /// Mappings that left earlier, by eviction or drain.
    pub forced: u64,
    /// Mappings in the cache now.
    pub mappings: usize,
    /// Mappings in the cache without users; the device can still access their pages.
    pub released: usize,
    /// Pages of the mappings in the cache now. The as-published cache does not count them.
    pub pages: u64,
    /// Memory that the cache occupies, in bytes.
    pub bytes: usize,
}

impl CacheStats {
    /// Returns the share of lookups that found a mapping; 0 without any lookup.
    pub fn hit_rate(&self) -> f64 {
        match self.hits.saturating_add(self.misses) {
            0 => 0.0,
            takes => self.hits as f64 / takes as f64,
        }
    }
}
