//! The buffers that a policy withholds after their unmap.

use ringfence_types::{Direction, PhysRange};

/// The buffers that a descriptor withholds after their unmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Withholds {
    /// All buffers. Until the descriptor ends, the driver maps none of their pages.
    All,
    /// Transmit buffers with at least this number of bytes. The driver has all others back at their
    /// unmap. It maps no byte of a withheld buffer; other bytes on its first and last page were
    /// never part of it.
    TransmitFrom(u64),
}

impl Withholds {
    /// Returns true if the unmap of a buffer of this direction withholds it.
    pub(crate) fn includes(self, direction: Direction, pieces: &[PhysRange]) -> bool {
        match self {
            Self::All => true,
            Self::TransmitFrom(least) => {
                let bytes = pieces.iter().map(PhysRange::bytes);
                direction == Direction::ToDevice && bytes.fold(0, u64::saturating_add) >= least
            }
        }
    }
}
