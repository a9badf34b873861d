//! The unmap result of spaces that keep unmapped translations.

use ringfence_types::InvalidationError;

use super::{ClearedRange, IotlbSync, Space, TablePages};
use crate::Platform;
use crate::flush::FlushContext;

/// The result of unmapping a mapping in such a space.
#[must_use = "the range may still be cached by the hardware"]
#[derive(Debug, PartialEq, Eq)]
pub enum UnmapResult<T = ()> {
    /// The space keeps the translation for the next map of the same memory, and
    /// [expires](Space::expire) it later. The device reaches the buffer until then.
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

impl<T: TablePages> IotlbSync for UnmapResult<T> {
    const HAS_TABLE: bool = true;

    #[inline]
    fn is_cached(&self) -> bool {
        matches!(self, Self::Cached)
    }

    /// Kept translations need no invalidation: they expire later. Use [`Space::map_bypass_cache`]
    /// for memory that the device must not reach after its unmap.
    fn iotlb_sync<S: Space<UnmapResult = Self>, P: Platform>(
        self,
        home: &mut FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), (InvalidationError, ClearedRange)> {
        match self {
            Self::Cached => Ok(()),
            Self::Cleared(gone) => home.invalidate_and_release(gone, platform),
        }
    }
}
