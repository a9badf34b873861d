//! What a driver holds for a mapping.

use ringfence_dma::{Mapping, SgMapping};
use ringfence_types::IovaRange;

/// The token of a mapping, of either kind.
#[derive(Debug, Default)]
pub enum MappingToken {
    /// Nothing.
    #[default]
    None,
    /// A buffer.
    Single(Mapping<u64>),
    /// A scatterlist.
    List(SgMapping<u64>),
}

impl MappingToken {
    /// The device-visible bytes; `None` for nothing, and for a list whose pieces lie apart.
    #[inline]
    pub fn range(&self) -> Option<IovaRange> {
        match self {
            Self::None => None,
            Self::Single(mapping) => Some(mapping.range()),
            Self::List(mapping) => mapping.range(),
        }
    }
}
