//! The end of a space.

use ringfence_iova::IovaAllocator;

use super::super::IoPageTable;
use super::Paged;

impl<A: IovaAllocator, T: IoPageTable> Paged<A, T> {
    /// Returns the table of a space that [`Dma::detach`](crate::Dma::detach) has removed, so that
    /// the caller destroys it. The allocator's records are freed.
    pub fn into_table(self) -> T {
        self.table
    }
}
