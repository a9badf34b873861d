//! The unmap result of spaces that map copies.

use super::{ClearedRange, EndsAtUnmap, SpaceUnmap, TablePages};

/// The result of unmapping a mapping in a space that maps copies.
#[must_use = "the range may still be cached by the hardware"]
#[derive(Debug, PartialEq, Eq)]
pub enum CopiedOrCleared<T = ()> {
    /// The device used a copy, and never reached the buffer. Nothing was cleared.
    Copied,
    /// The device used the buffer itself. The entries are cleared.
    Cleared(ClearedRange<T>),
}

impl<T: TablePages> SpaceUnmap for CopiedOrCleared<T> {
    const HAS_TABLE: bool = true;
    type Tables = T;

    #[inline]
    fn into_cleared(self) -> Option<ClearedRange<T>> {
        match self {
            Self::Copied => None,
            Self::Cleared(cleared) => Some(cleared),
        }
    }
}

impl<T: TablePages> EndsAtUnmap for CopiedOrCleared<T> {}
