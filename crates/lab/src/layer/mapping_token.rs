//! The token that a driver holds for a mapping.

use ringfence_dma::{Mapping, PostedBuffer, SgMapping};
use ringfence_types::{Direction, DomainId, IovaRange, PhysAddr};

/// A buffer of a pool that the device owns.
#[derive(Debug)]
pub struct LentBuffer {
    /// The layer's token.
    pub posted: PostedBuffer,
    /// The buffer of the mapping in the trace.
    pub buffer: u64,
    /// The driver's memory for the bytes that it inspects.
    pub driver: PhysAddr,
}

/// The token of a mapping of any kind.
#[derive(Debug, Default)]
pub enum MappingToken {
    /// No mapping: the map was refused, or the unmap took the token.
    #[default]
    None,
    /// A single buffer.
    Single(Mapping<u64>),
    /// A scatterlist, mapped to one or several IOVA ranges.
    List(SgMapping<u64>),
    /// A buffer of a pool, in place of a single buffer or a list.
    Lent(LentBuffer),
}

impl MappingToken {
    /// Returns the IOVA range; `None` without a mapping, and for a list with separate ranges.
    #[inline]
    pub fn range(&self) -> Option<IovaRange> {
        match self {
            Self::None => None,
            Self::Single(mapping) => Some(mapping.range()),
            Self::List(mapping) => mapping.range(),
            Self::Lent(lent) => Some(lent.posted.range()),
        }
    }

    /// Returns the direction; `None` without a mapping.
    pub fn direction(&self) -> Option<Direction> {
        match self {
            Self::None => None,
            Self::Single(mapping) => Some(mapping.direction()),
            Self::List(mapping) => Some(mapping.direction()),
            Self::Lent(lent) => Some(lent.posted.direction()),
        }
    }

    /// Returns the domain that maps the buffer; `None` without a mapping.
    pub fn domain(&self) -> Option<DomainId> {
        match self {
            Self::None => None,
            Self::Single(mapping) => Some(mapping.domain()),
            Self::List(mapping) => Some(mapping.domain()),
            Self::Lent(lent) => Some(lent.posted.domain()),
        }
    }

    /// Returns the buffer; `None` without a mapping.
    pub fn buffer(&self) -> Option<u64> {
        match self {
            Self::None => None,
            Self::Single(mapping) => Some(*mapping.buffer()),
            Self::List(mapping) => Some(*mapping.buffer()),
            Self::Lent(lent) => Some(lent.buffer),
        }
    }
}
