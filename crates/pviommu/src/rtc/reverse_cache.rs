//! The role of a reverse translation cache.

use core::fmt;

use ringfence_types::Iova;

use super::MappingKey;

/// A cache of one device's mappings, in use and released (section 4.5, steps 1 to 5 of its last
/// paragraph).
///
/// A mapping has users: buffers of a driver that lie in the same pages in the same direction.
/// Whoever calls keeps the [`MappingKey`] of each of its buffers until it releases it. What expires
/// leaves the cache first; the caller then has the host unmap it, all in one request, and must not
/// give its addresses out before the host has confirmed.
pub trait ReverseCache {
    /// Step 1 and 5: a buffer takes the mapping of `key`, which counts one user more. `None`: there
    /// is none, or none that can take another user; then the caller maps, and
    /// [`insert`](Self::insert)s.
    fn acquire(&mut self, key: MappingKey) -> Option<Iova>;

    /// The host has mapped `key` at `giova`; the mapping has one user, and its release is one of
    /// the cache's.
    ///
    /// # Errors
    /// [`NotCached`]: the mapping stays the caller's, who unmaps it at its release. After [`NotCached::Full`], a [`evict`](Self::evict) makes room
    /// if anything is released.
    fn insert(&mut self, key: MappingKey, giova: Iova) -> Result<(), NotCached>;

    /// Step 3: a user of `key` is done. The last one leaves the mapping to the cache, for C cycles
    /// and the rest of this one.
    ///
    /// # Errors
    /// [`NotInUse`]: no mapping of that key has a user.
    fn release(&mut self, key: MappingKey) -> Result<(), NotInUse>;

    /// Step 4: a cycle ends. Forgets the mappings that nobody has used for C cycles, and gives each
    /// to `expired`: the batch to be unmapped with one request.
    fn tick(&mut self, expired: impl FnMut(MappingKey, Iova));

    /// The limit is reached: forgets those released mappings that would expire next, and gives each
    /// to `expired`. They have at most a sixteenth of the limit's pages, unless the first alone has
    /// more.
    fn evict(&mut self, expired: impl FnMut(MappingKey, Iova));

    /// Forgets every released mapping: the device goes, or memory is short. Mappings in use stay.
    fn drain(&mut self, expired: impl FnMut(MappingKey, Iova));

    /// What the cache holds and has done.
    fn stats(&self) -> RtcStats;
}

/// Why a mapping is not in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NotCached {
    /// The key has a mapping already.
    Present,
    /// With it there were more pages than the limit allows.
    Full,
    /// No memory.
    OutOfMemory,
    /// The address is no multiple of 4096 or above what an entry has room for.
    Address(Iova),
}

impl fmt::Display for NotCached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Present => f.write_str("the key has a mapping already"),
            Self::Full => f.write_str("more pages than the limit allows"),
            Self::OutOfMemory => f.write_str("no memory"),
            Self::Address(giova) => write!(f, "{giova} is no address that can be cached"),
        }
    }
}

impl core::error::Error for NotCached {}

/// A release of what nobody holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NotInUse(
    /// What was to be released.
    pub MappingKey,
);

impl fmt::Display for NotInUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nobody holds {}", self.0)
    }
}

impl core::error::Error for NotInUse {}

/// What a [`evict`](ReverseCache::evict) may still take, in order of release: the module's
/// `pvi_take_unused`.
#[derive(Debug)]
pub(super) struct EvictionBudget {
    pages: u64,
    first: bool,
}

impl EvictionBudget {
    /// All there are.
    pub(super) const fn all() -> Self {
        Self::new(u64::MAX, true)
    }

    /// A sixteenth of a limit.
    pub(super) fn of(limit: usize) -> Self {
        Self::new(limit.div_ceil(16) as u64, true)
    }

    /// So many pages; `first`: the first one goes, however many it has.
    pub(super) const fn new(pages: u64, first: bool) -> Self {
        Self { pages, first }
    }

    /// Whether a mapping of so many pages goes. After one that does not, none does.
    pub(super) fn takes(&mut self, pages: u64) -> bool {
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

/// What a cache holds and has done since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RtcStats {
    /// Takes that found a mapping.
    pub hits: u64,
    /// Takes that found none.
    pub misses: u64,
    /// Mappings that came in.
    pub inserted: u64,
    /// Mappings that left at a cycle's end.
    pub expired: u64,
    /// Mappings that left earlier: shed or drained.
    pub forced: u64,
    /// Mappings in the cache now.
    pub mappings: usize,
    /// Of those, the ones that nobody uses: what the cache exposes.
    pub released: usize,
    /// Pages of the mappings in the cache now. The literal cache does not count them.
    pub pages: u64,
    /// Bytes of memory that the cache occupies.
    pub bytes: usize,
}

impl RtcStats {
    /// Share of takes that found a mapping; 0 without any.
    pub fn hit_rate(&self) -> f64 {
        match self.hits.saturating_add(self.misses) {
            0 => 0.0,
            takes => self.hits as f64 / takes as f64,
        }
    }
}
