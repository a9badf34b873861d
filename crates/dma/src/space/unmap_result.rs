//! What unmap leaves in a space that keeps mappings.

use ringfence_types::InvalidationError;

use super::{ClearedRange, IotlbSync, Space, TablePages};
use crate::Platform;
use crate::flush::FlushContext;

/// What is left of a mapping that its driver has released.
#[must_use = "the range may still be cached by the hardware"]
#[derive(Debug, PartialEq, Eq)]
pub enum UnmapResult<T = ()> {
    /// Nothing has changed: the space keeps the translation for the next map of the same memory,
    /// and lets go of it [in time](Space::expire). The device reaches the buffer until then.
    Cached,
    /// It left the table.
    Cleared(ClearedRange<T>),
}

/// Which of the translations that a space keeps are to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expire {
    /// Those whose time is over, by the platform's clock.
    Due,
    /// Those that nobody uses.
    All,
}

impl<T: TablePages> IotlbSync for UnmapResult<T> {
    const HAS_TABLE: bool = true;

    #[inline]
    fn is_cached(&self) -> bool {
        matches!(self, Self::Cached)
    }

    /// What is kept leaves in time. Memory that must not be reached until then is mapped by
    /// [`Space::map_bypass_cache`].
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
