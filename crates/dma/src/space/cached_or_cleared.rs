//! The unmap result of spaces that keep unmapped translations.

use super::{ClearedRange, SpaceUnmap, TablePages};

/// The result of unmapping a mapping in such a space.
#[must_use = "the range may still be cached by the hardware"]
#[derive(Debug, PartialEq, Eq)]
pub enum CachedOrCleared<T = ()> {
    /// The space keeps the translation for the next map of the same memory, and
    /// [expires](super::CachingSpace::expire) it later. The device reaches the buffer until then.
    Cached,
    /// The entries are cleared.
    Cleared(ClearedRange<T>),
}

/// Selects the kept translations to clear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expire {
    /// Translations that have expired by the platform's clock.
    Due,
    /// All translations that no live mapping uses.
    All,
}

impl<T: TablePages> SpaceUnmap for CachedOrCleared<T> {
    const HAS_TABLE: bool = true;
    type Tables = T;

    #[inline]
    fn is_cached(&self) -> bool {
        matches!(self, Self::Cached)
    }

    /// Returns `None` for a kept translation: it expires later. Use
    /// [`CachingSpace::map_bypass_cache`](super::CachingSpace::map_bypass_cache) for
    /// memory that the device must not reach after its unmap.
    fn into_cleared(self) -> Option<ClearedRange<T>> {
        match self {
            Self::Cached => None,
            Self::Cleared(cleared) => Some(cleared),
        }
    }
}
