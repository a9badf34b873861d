//! What unmap leaves in a space that keeps mappings.

use ringfence_types::InvalidationError;

use super::{Gone, Remains, Space, TablePages};
use crate::Platform;
use crate::flush::Home;

/// What is left of a mapping that its driver has released.
#[must_use = "the range may still be cached by the hardware"]
#[derive(Debug, PartialEq, Eq)]
pub enum Leaving<T = ()> {
    /// Nothing has changed: the space keeps the translation for the next map of the same memory, and lets go of it
    /// [in time](Space::expire). The device reaches the buffer until then.
    Kept,
    /// It left the table.
    Gone(Gone<T>),
}

/// Which of the translations that a space keeps are to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expire {
    /// Those whose time is over, by the platform's clock.
    Due,
    /// Those that nobody uses.
    All,
}

impl<T: TablePages> Remains for Leaving<T> {
    const INSTALLS: bool = true;

    #[inline]
    fn is_kept(&self) -> bool {
        matches!(self, Self::Kept)
    }

    /// What is kept leaves in time. Memory that must not be reached until then is mapped by [`Space::map_unkept`].
    fn purge<S: Space<Gone = Self>, P: Platform>(
        self,
        home: &mut Home<'_, S>,
        platform: &mut P,
    ) -> Result<(), (InvalidationError, Gone)> {
        match self {
            Self::Kept => Ok(()),
            Self::Gone(gone) => home.purge(gone, platform),
        }
    }
}
